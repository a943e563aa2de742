//! Keys out of passphrases: PBKDF2 and Argon2, with limits for what a header may ask for.

use std::num::NonZero;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use argon2::{Algorithm, Argon2, Block, Params, Version};
use openssl::hash::MessageDigest;

use crate::error::LuksError;
use crate::secret::{Secret, SecretPages, scrub_stack};

/// The most memory of a key slot, KiB: the default maximum of `cryptsetup`.
const MEMORY_KIB_MAX: u32 = 1 << 20;
/// The most memory times passes, KiB: 16 passes over the most memory, which take about half a minute.
const MEMORY_PASSES_MAX: u64 = 16 << 20;
/// The most iterations of PBKDF2: about a minute.
const ITERATIONS_MAX: u32 = 1 << 26;
const CPUS_MAX: u32 = 64;

/// The cost of new key slots, as RFC 9106 recommends it where memory is short: 64 MiB, three passes, parallelism four.
const NEW_MEMORY_KIB: u32 = 64 << 10;
const NEW_PASSES: u32 = 3;
const NEW_CPUS: u32 = 4;

/// A hash function of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hash {
    /// SHA-256.
    Sha256,
    /// SHA-512.
    Sha512,
}

impl Hash {
    /// By the name that headers have.
    pub(crate) fn of_name(name: &str) -> Option<Hash> {
        match name {
            "sha256" => Some(Hash::Sha256),
            "sha512" => Some(Hash::Sha512),
            _ => None,
        }
    }

    pub(crate) fn digest(self) -> MessageDigest {
        match self {
            Hash::Sha256 => MessageDigest::sha256(),
            Hash::Sha512 => MessageDigest::sha512(),
        }
    }
}

/// How a key is derived from a passphrase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kdf {
    /// PBKDF2.
    Pbkdf2 {
        /// Its hash function.
        hash: Hash,
        /// Rounds.
        iterations: u32,
        /// Salt.
        salt: Vec<u8>,
    },
    /// Argon2.
    Argon2 {
        /// Whether it is Argon2id, else Argon2i.
        id: bool,
        /// Passes.
        time: u32,
        /// Memory in KiB.
        memory: u32,
        /// Parallelism.
        cpus: u32,
        /// Salt.
        salt: Vec<u8>,
    },
}

impl Kdf {
    /// That of a new key slot.
    ///
    /// # Errors
    /// [`LuksError::Library`]: there are no random bytes.
    pub(crate) fn new() -> Result<Kdf, LuksError> {
        let mut salt = vec![0; 32];
        crate::secret::random(&mut salt)?;
        let (time, memory, cpus) = (NEW_PASSES, NEW_MEMORY_KIB, NEW_CPUS);
        Ok(Kdf::Argon2 { id: true, time, memory, cpus, salt })
    }

    /// Whether its cost is within the limits, and its parameters are those of the algorithm.
    pub(crate) fn is_bearable(&self) -> bool {
        match self {
            Kdf::Pbkdf2 { iterations, .. } => (1..=ITERATIONS_MAX).contains(iterations),
            Kdf::Argon2 { time, memory, cpus, salt, .. } => {
                let passes = u64::from(*time) * u64::from(*memory);
                (1..=CPUS_MAX).contains(cpus)
                    && (8 * cpus..=MEMORY_KIB_MAX).contains(memory)
                    && (1..=MEMORY_PASSES_MAX).contains(&passes)
                    && salt.len() >= 8
            }
        }
    }

    /// Its cost: KiB of memory times passes, and rounds of PBKDF2 in the same unit of time.
    pub(crate) fn cost(&self) -> u64 {
        match self {
            Kdf::Pbkdf2 { iterations, .. } => u64::from(*iterations) / 2,
            Kdf::Argon2 { time, memory, .. } => u64::from(*time) * u64::from(*memory),
        }
    }

    /// Its memory in KiB.
    fn kib(&self) -> u32 {
        if let Kdf::Argon2 { memory, .. } = self { *memory } else { 0 }
    }

    /// Derives a key of this many bytes. Takes a second, or several, and waits while other derivations use the processors or
    /// the memory for all.
    ///
    /// # Errors
    /// [`LuksError`]: there is no memory, or the process may not use so much.
    pub(crate) fn derive(&self, passphrase: &[u8], length: usize) -> Result<Secret, LuksError> {
        let _permit = Permit::take(Cost::of(self), self.kib(), room_now)?;
        let mut key = Secret::zeroed(length)?;
        match self {
            Kdf::Pbkdf2 { hash, iterations, salt } => {
                let rounds = usize::try_from(*iterations).unwrap_or(usize::MAX);
                openssl::pkcs5::pbkdf2_hmac(passphrase, salt, rounds, hash.digest(), &mut key)
                    .map_err(|_| LuksError::Library("OpenSSL (PBKDF2)"))?;
            }
            Kdf::Argon2 { id, time, memory, cpus, salt } => {
                let algorithm = if *id { Algorithm::Argon2id } else { Algorithm::Argon2i };
                let failed =
                    |_| LuksError::Metadata("a key slot has parameters that Argon2 refuses");
                let params = Params::new(*memory, *time, *cpus, Some(length)).map_err(failed)?;
                let mut blocks = ArgonMemory::new(params.block_count())?;
                let argon2 = Argon2::new(algorithm, Version::V0x13, params);
                argon2
                    .hash_password_into_with_memory(passphrase, salt, &mut key, &mut blocks)
                    .map_err(failed)?;
            }
        }
        scrub_stack();
        Ok(key)
    }
}

/// The most cost of a derivation that counts as cheap, and of the memory of all of them, KiB: four new slots at once.
const CHEAP_COST: u64 = NEW_PASSES as u64 * NEW_MEMORY_KIB as u64;
const CHEAP_KIB_MAX: u32 = 4 * NEW_MEMORY_KIB;

/// The derivations of this process, by [`Cost`]: a daemon that starts opens many volumes at once.
/// In each class at most as many run as there are processors, within the memory of the class. Cheap
/// ones, such as those of slots that ebbd has made, do not wait for processors that costly ones
/// use: an image whose slots cost a minute must not delay other volumes. Both classes together use
/// no more memory than the process may still use.
static IN_USE: Mutex<[InUse; 2]> = Mutex::new([InUse { derivations: 0, kib: 0 }; 2]);
static RELEASED: Condvar = Condvar::new();

/// Returns the memory that the process may still use; `None` without a limit.
static ROOM: OnceLock<fn() -> Option<KeyRoom>> = OnceLock::new();

/// Memory that the derivation of a key may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRoom {
    /// Bytes.
    pub bytes: u64,
    /// The setting of the service that raises it.
    pub setting: &'static str,
    /// One part in this many of a raise of the setting adds nothing; more than 1.
    pub margin: u64,
}

/// Makes derivations wait or fail that need more memory than `room` returns: the kernel would kill
/// the process at the limit of its control group. `room` is called before each derivation. Only the
/// first call of this function has an effect.
pub fn limit_memory(room: fn() -> Option<KeyRoom>) {
    let _ = ROOM.set(room);
}

fn room_now() -> Option<KeyRoom> {
    ROOM.get().and_then(|room| room())
}

#[derive(Clone, Copy)]
struct InUse {
    derivations: usize,
    kib: u32,
}

/// The class in which a derivation is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cost {
    Cheap,
    Costly,
}

impl Cost {
    fn of(kdf: &Kdf) -> Cost {
        let is_cheap = kdf.cost() <= CHEAP_COST && kdf.kib() <= NEW_MEMORY_KIB;
        if is_cheap { Cost::Cheap } else { Cost::Costly }
    }

    fn kib_max(self) -> u32 {
        match self {
            Cost::Cheap => CHEAP_KIB_MAX,
            Cost::Costly => MEMORY_KIB_MAX,
        }
    }

    fn among(self, all: &mut [InUse; 2]) -> &mut InUse {
        let [cheap, costly] = all;
        match self {
            Cost::Cheap => cheap,
            Cost::Costly => costly,
        }
    }
}

/// A derivation that is counted until it is dropped.
struct Permit {
    cost: Cost,
    kib: u32,
}

impl Permit {
    /// Waits for processors and memory.
    ///
    /// # Errors
    /// [`LuksError::NoRoom`]: there is too little memory, although no other derivation uses any.
    fn take(cost: Cost, kib: u32, room: impl Fn() -> Option<KeyRoom>) -> Result<Permit, LuksError> {
        let most = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut all = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            // Others have not touched all of their memory yet.
            let promised: u64 = all.iter().map(|class| u64::from(class.kib)).sum();
            let now = cost.among(&mut all);
            let too_much = now.kib.saturating_add(kib) > cost.kib_max();
            let must_wait = now.derivations > 0 && (now.derivations >= most || too_much);
            if !must_wait {
                let room = if kib > 0 { room() } else { None };
                let lacks = room.filter(|room| (promised + u64::from(kib)) << 10 > room.bytes);
                match lacks {
                    None => {
                        now.derivations += 1;
                        now.kib = now.kib.saturating_add(kib);
                        return Ok(Permit { cost, kib });
                    }
                    Some(KeyRoom { bytes, setting, margin }) if promised == 0 => {
                        let (mib, left) = (u64::from(kib).div_ceil(1 << 10), bytes >> 20);
                        let missing = mib.saturating_sub(left).max(1);
                        let more = missing + missing.div_ceil(margin.max(2) - 1);
                        return Err(LuksError::NoRoom { mib, left, more, setting });
                    }
                    Some(_) => {}
                }
            }
            all = RELEASED.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut all = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let in_use = self.cost.among(&mut all);
        in_use.derivations = in_use.derivations.saturating_sub(1);
        in_use.kib = in_use.kib.saturating_sub(self.kib);
        drop(all);
        RELEASED.notify_all();
    }
}

/// Memory of Argon2, from which the key could be computed: in no core, and given back to the kernel, which wipes it. It
/// is too large to be locked.
struct ArgonMemory {
    pages: SecretPages,
    blocks: usize,
}

impl ArgonMemory {
    fn new(blocks: usize) -> Result<ArgonMemory, LuksError> {
        let bytes = blocks.saturating_mul(size_of::<Block>());
        let mib = (bytes >> 20) as u64;
        let pages = SecretPages::map(bytes).map_err(|source| LuksError::Memory { mib, source })?;
        Ok(ArgonMemory { pages, blocks })
    }
}

impl AsMut<[Block]> for ArgonMemory {
    fn as_mut(&mut self) -> &mut [Block] {
        let start = self.pages.start().as_ptr().cast::<Block>();
        // SAFETY: the pages have room for so many blocks and are aligned to more than them; a block is numbers only, for
        // which zeroes are valid; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(start, self.blocks) }
    }
}

#[cfg(test)]
mod tests {
    use ebb_advice::full_text;

    use super::*;

    /// Tests that take permits run one at a time: the process has one set of them.
    fn alone() -> std::sync::MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn derivation_that_exceeds_the_group_fails_with_its_size() {
        let _alone = alone();
        let small = || Some(KeyRoom { bytes: 100 << 20, setting: "MemoryHigh", margin: 8 });
        let permit = |kib| Permit::take(Cost::Costly, kib, small);
        let error = permit(1 << 20).err().unwrap();
        let text = full_text(&error);
        // 924 MiB are missing, and an eighth of the larger limit is margin.
        let needs = LuksError::NoRoom { mib: 1024, left: 100, more: 1056, setting: "MemoryHigh" };
        assert_eq!(text, full_text(&needs));
        assert!(text.contains("raise MemoryHigh by 1056M"), "{text}");
        // PBKDF2 needs none, and a slot of the size of ebbd's fits.
        drop((permit(0).unwrap(), permit(NEW_MEMORY_KIB).unwrap()));
        // Two of them do not fit: the second one waits.
        let first = permit(NEW_MEMORY_KIB).unwrap();
        let (sender, taken) = std::sync::mpsc::channel();
        let second = std::thread::spawn(move || {
            sender.send(Permit::take(Cost::Cheap, NEW_MEMORY_KIB, small).is_ok()).unwrap();
        });
        let early = taken.recv_timeout(std::time::Duration::from_millis(200));
        assert!(early.is_err(), "both have the memory of one");
        drop(first);
        assert_eq!(taken.recv_timeout(std::time::Duration::from_mins(2)), Ok(true));
        second.join().unwrap();
    }

    #[test]
    fn costly_derivations_that_use_all_memory_leave_room_for_cheap_ones() {
        let argon2 = |memory| Kdf::Argon2 { id: true, time: 1, memory, cpus: 1, salt: vec![1; 32] };
        let _alone = alone();
        let kdf = argon2(MEMORY_KIB_MAX);
        let costly = Permit::take(Cost::of(&kdf), MEMORY_KIB_MAX, || None).unwrap();
        let (sender, derived) = std::sync::mpsc::channel();
        let cheap = std::thread::spawn(move || {
            // Also those of a new volume, and of the digest of its key.
            let slot = Kdf::new().unwrap();
            let digest = Kdf::Pbkdf2 { hash: Hash::Sha256, iterations: 1000, salt: vec![1; 32] };
            for kdf in [slot, digest, argon2(64)] {
                sender.send(kdf.derive(b"one", 32).unwrap().len()).unwrap();
            }
        });
        for _ in 0..3 {
            let waited = derived.recv_timeout(std::time::Duration::from_mins(2));
            assert_eq!(waited, Ok(32), "it waits for the costly one");
        }
        cheap.join().unwrap();
        drop(costly);
        let costly = Kdf::Argon2 { id: true, time: 4, memory: 1 << 20, cpus: 4, salt: vec![1; 32] };
        assert_eq!(Cost::of(&costly), Cost::Costly);
    }

    #[test]
    fn what_a_header_may_ask_for_is_limited() {
        let argon2 =
            |time, memory, cpus| Kdf::Argon2 { id: true, time, memory, cpus, salt: vec![1; 32] };
        let pbkdf2 = |iterations| Kdf::Pbkdf2 { hash: Hash::Sha256, iterations, salt: vec![1; 32] };
        for (kdf, bearable) in [
            (argon2(4, 1 << 20, 4), true),
            (argon2(17, 1 << 20, 4), false),
            (argon2(1, (1 << 20) + 1, 4), false),
            (argon2(u32::MAX, u32::MAX, 4), false),
            (argon2(0, 65536, 4), false),
            (argon2(4, 31, 4), false),
            (argon2(4, 65536, 0), false),
            (argon2(4, 65536, u32::MAX), false),
            (pbkdf2(1000), true),
            (pbkdf2(0), false),
            (pbkdf2(u32::MAX), false),
        ] {
            assert_eq!(kdf.is_bearable(), bearable, "{kdf:?}");
        }
        assert!(Kdf::new().unwrap().is_bearable());
    }
}
