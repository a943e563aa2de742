//! The anti-forensic split: a key as many stripes, all of which are needed to get it back, so that wiping any of them
//! wipes the key. Stripes are produced and consumed one by one: only ciphertext is ever held as a whole.

use openssl::sha::{Sha256, Sha512};
use zeroize::Zeroize;

use crate::error::LuksError;
use crate::kdf::Hash;
use crate::secret::{Secret, random, scrub_stack};

/// The sum of stripes so far.
#[derive(Debug)]
pub(crate) struct Merge {
    hash: Hash,
    sum: Secret,
}

impl Merge {
    /// For stripes of a key of `key_bytes`.
    pub(crate) fn new(hash: Hash, key_bytes: usize) -> Result<Merge, LuksError> {
        Ok(Merge { hash, sum: Secret::zeroed(key_bytes)? })
    }

    /// Adds a stripe that is not the last.
    pub(crate) fn add(&mut self, stripe: &[u8]) {
        xor(&mut self.sum, stripe);
        diffuse(self.hash, &mut self.sum);
    }

    /// The key, by the last stripe.
    pub(crate) fn end(mut self, stripe: &[u8]) -> Secret {
        xor(&mut self.sum, stripe);
        scrub_stack();
        self.sum
    }
}

/// Fills `stripes` of a key, of which this is a part from stripe `from` of `total` on.
pub(crate) struct Split<'a> {
    key: &'a [u8],
    merge: Option<Merge>,
    left: usize,
}

impl Split<'_> {
    pub(crate) fn new(hash: Hash, key: &[u8], stripes: usize) -> Result<Split<'_>, LuksError> {
        Ok(Split { key, merge: Some(Merge::new(hash, key.len())?), left: stripes })
    }

    /// The next stripe.
    pub(crate) fn next(&mut self, stripe: &mut [u8]) -> Result<(), LuksError> {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            stripe.copy_from_slice(self.key);
            if let Some(merge) = self.merge.take() {
                xor(stripe, &merge.sum);
            }
            scrub_stack();
            return Ok(());
        }
        random(stripe)?;
        if let Some(merge) = &mut self.merge {
            merge.add(stripe);
        }
        Ok(())
    }
}

fn xor(sum: &mut [u8], with: &[u8]) {
    sum.iter_mut().zip(with).for_each(|(sum, with)| *sum ^= with);
}

/// Replaces each piece of the size of a digest by the digest of its number and itself.
fn diffuse(hash: Hash, bytes: &mut [u8]) {
    let size = hash.digest().size();
    for (number, piece) in (0u32..).zip(bytes.chunks_mut(size)) {
        let number = number.to_be_bytes();
        match hash {
            Hash::Sha256 => {
                let mut hasher = Sha256::new();
                hasher.update(&number);
                hasher.update(piece);
                let mut digest = hasher.finish();
                let length = piece.len();
                piece.copy_from_slice(&digest[..length]);
                digest.zeroize();
            }
            Hash::Sha512 => {
                let mut hasher = Sha512::new();
                hasher.update(&number);
                hasher.update(piece);
                let mut digest = hasher.finish();
                let length = piece.len();
                piece.copy_from_slice(&digest[..length]);
                digest.zeroize();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cipher::KEY_BYTES;

    #[test]
    fn a_split_key_is_merged_from_all_of_its_stripes_only() {
        for hash in [Hash::Sha256, Hash::Sha512] {
            let key = Secret::random(KEY_BYTES).unwrap();
            let mut split = Split::new(hash, &key, 4000).unwrap();
            let mut stripes = vec![[0; KEY_BYTES]; 4000];
            stripes.iter_mut().for_each(|stripe| split.next(stripe).unwrap());
            let merged = |stripes: &[[u8; KEY_BYTES]]| {
                let mut merge = Merge::new(hash, KEY_BYTES).unwrap();
                let (last, others) = stripes.split_last().unwrap();
                others.iter().for_each(|stripe| merge.add(stripe));
                merge.end(last)
            };
            assert_eq!(*merged(&stripes), *key);
            stripes[1234][5] ^= 1;
            assert_ne!(*merged(&stripes), *key);
        }
    }
}
