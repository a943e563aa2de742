//! Derived keys that are remembered for a while: a daemon that takes over from another one derives
//! the keys of its volumes while that still serves them, so that clients do not wait for it.
//!
//! Invariant: nothing is remembered, and nothing that was is found, once the last
//! [`RememberedKeys`] was dropped. What is remembered is in locked memory ([`Secret`]), and is
//! found by the passphrase and all parameters: it is what the derivation would return.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::LuksError;
use crate::kdf::Kdf;
use crate::secret::Secret;

/// The most keys that are remembered: their memory is locked.
const KEYS_MOST: usize = 1024;

struct Derived {
    kdf: Kdf,
    passphrase: Secret,
    key: Secret,
}

#[derive(Default)]
struct Memory {
    holders: usize,
    keys: Vec<Derived>,
}

static MEMORY: Mutex<Memory> = Mutex::new(Memory { holders: 0, keys: Vec::new() });

fn memory() -> MutexGuard<'static, Memory> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it exists, derived keys are remembered.
#[derive(Debug)]
pub struct RememberedKeys(());

impl RememberedKeys {
    /// Begins to remember.
    #[must_use]
    pub fn begin() -> RememberedKeys {
        memory().holders += 1;
        RememberedKeys(())
    }
}

impl Drop for RememberedKeys {
    fn drop(&mut self) {
        let mut memory = memory();
        memory.holders = memory.holders.saturating_sub(1);
        if memory.holders == 0 {
            memory.keys = Vec::new();
        }
    }
}

/// Derives a key, as [`Kdf::derive`], unless it is remembered.
///
/// # Errors
/// Those of [`Kdf::derive`].
pub(crate) fn derive(kdf: &Kdf, passphrase: &[u8], length: usize) -> Result<Secret, LuksError> {
    if let Some(key) = find(kdf, passphrase, length) {
        return Ok(key);
    }
    let key = kdf.derive(passphrase, length)?;
    remember(kdf, passphrase, &key);
    Ok(key)
}

/// A key that was derived before.
fn find(kdf: &Kdf, passphrase: &[u8], length: usize) -> Option<Secret> {
    let memory = memory();
    let is_it = |one: &&Derived| {
        one.kdf == *kdf && *one.passphrase == *passphrase && one.key.len() == length
    };
    Secret::copy_of(&memory.keys.iter().find(is_it)?.key).ok()
}

/// Remembers a key, if that is wanted and there is locked memory for it.
fn remember(kdf: &Kdf, passphrase: &[u8], key: &Secret) {
    let mut memory = memory();
    if memory.holders > 0
        && memory.keys.len() < KEYS_MOST
        && let (Ok(passphrase), Ok(key)) = (Secret::copy_of(passphrase), Secret::copy_of(key))
    {
        memory.keys.push(Derived { kdf: kdf.clone(), passphrase, key });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kdf::Hash;

    #[test]
    fn keys_are_found_by_all_they_depend_on_and_only_while_wanted() {
        let kdf = |iterations| Kdf::Pbkdf2 { hash: Hash::Sha256, iterations, salt: vec![9; 32] };
        let key = derive(&kdf(1000), b"remembered", 32).unwrap();
        assert!(find(&kdf(1000), b"remembered", 32).is_none(), "remembered without being asked");
        let (one, other) = (RememberedKeys::begin(), RememberedKeys::begin());
        derive(&kdf(1000), b"remembered", 32).unwrap();
        drop(other);
        assert!(*find(&kdf(1000), b"remembered", 32).unwrap() == *key);
        assert!(*derive(&kdf(1000), b"remembered", 32).unwrap() == *key);
        assert!(find(&kdf(1001), b"remembered", 32).is_none());
        assert!(find(&kdf(1000), b"Remembered", 32).is_none());
        assert!(find(&kdf(1000), b"remembered", 64).is_none());
        drop(one);
        assert!(find(&kdf(1000), b"remembered", 32).is_none(), "remembered for too long");
    }
}
