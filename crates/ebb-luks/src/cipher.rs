//! [`SectorCipher`]: sectors under AES-XTS with keys of 256 or 128 bits, each with its number as the tweak (`aes-xts-plain64`).

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use openssl::cipher::Cipher;
use openssl::cipher_ctx::CipherCtx;

use crate::error::LuksError;
use crate::openssl_memory::in_locked_memory;
use crate::secret::{Secret, scrub_stack};

/// Bytes of a new key: two keys of AES-256.
pub const KEY_BYTES: usize = 64;
/// Bytes of a key for AES-128-XTS, which other programs may have made.
pub(crate) const SHORT_KEY_BYTES: usize = 32;
/// The unit of sector numbers, whatever the size of a sector, and the least that a disk writes as a whole.
const UNIT: u64 = 512;
const UNIT_BYTES: usize = 512;
/// How often a thread looks for a pair of contexts that another one returns: more than a second.
const TRIES: u32 = 1 << 20;

/// A pair of contexts, which one thread uses at a time.
struct Contexts {
    encrypt: CipherCtx,
    decrypt: CipherCtx,
}

/// Encrypts and decrypts sectors. Any number of threads may use it at the same time.
pub struct SectorCipher {
    key: Secret,
    sector: usize,
    /// The number of the first sector, in units of 512 bytes.
    first: u64,
    /// As many as were in use at once.
    idle: Mutex<Vec<Contexts>>,
}

impl fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SectorCipher({} bytes, from {})", self.sector, self.first)
    }
}

/// The cipher for a key of this many bytes.
fn algorithm(key_bytes: usize) -> Result<&'static Cipher, LuksError> {
    static LONG: OnceLock<Option<Cipher>> = OnceLock::new();
    static SHORT: OnceLock<Option<Cipher>> = OnceLock::new();
    let (fetched, name) = match key_bytes {
        KEY_BYTES => (&LONG, "AES-256-XTS"),
        SHORT_KEY_BYTES => (&SHORT, "AES-128-XTS"),
        _ => return Err(LuksError::Metadata("its key has a wrong size")),
    };
    let fetched = fetched.get_or_init(|| {
        let cipher = Cipher::fetch(None, name, None).ok()?;
        // What OpenSSL allocates at the first use of a cipher stays, and is not to take locked memory.
        let key: [u8; KEY_BYTES] = std::array::from_fn(|at| u8::try_from(at).unwrap_or(0));
        CipherCtx::new()
            .ok()?
            .encrypt_init(Some(&cipher), key.get(..key_bytes), Some(&[0; 16]))
            .ok()?;
        Some(cipher)
    });
    fetched.as_ref().ok_or(LuksError::Library("OpenSSL (AES-XTS)"))
}

impl SectorCipher {
    /// A cipher for sectors of this many bytes, of which the first has the number `first` in units of 512 bytes.
    ///
    /// # Errors
    /// [`LuksError`]: there is no memory for the key, or the key has neither 64 nor 32 bytes.
    pub fn new(key: Secret, sector: usize, first: u64) -> Result<SectorCipher, LuksError> {
        crate::openssl_memory::prepare()?;
        let cipher = SectorCipher { key, sector, first, idle: Mutex::new(Vec::new()) };
        let contexts = cipher.make()?;
        cipher.put_back(contexts);
        Ok(cipher)
    }

    /// The key.
    pub fn key(&self) -> &Secret {
        &self.key
    }

    /// Whether this is the key.
    pub fn has_key(&self, key: &[u8]) -> bool {
        key.len() == self.key.len() && openssl::memcmp::eq(key, &self.key)
    }

    /// Bytes of a sector.
    pub fn sector(&self) -> usize {
        self.sector
    }

    fn make(&self) -> Result<Contexts, LuksError> {
        let algorithm = algorithm(self.key.len())?;
        let (key, iv) = (Some(&*self.key), Some(&[0; 16][..]));
        let made = in_locked_memory(|| {
            let (mut encrypt, mut decrypt) = (CipherCtx::new()?, CipherCtx::new()?);
            encrypt.encrypt_init(Some(algorithm), key, iv)?;
            decrypt.decrypt_init(Some(algorithm), key, iv)?;
            Ok::<_, openssl::error::ErrorStack>(Contexts { encrypt, decrypt })
        })?;
        scrub_stack();
        made.map_err(|_| LuksError::Library("OpenSSL (memory for a key)"))
    }

    fn take(&self) -> Result<Contexts, LuksError> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.map_or_else(|| self.make_or_wait(), Ok)
    }

    /// Another pair of contexts. If no more memory may be locked, one of the pairs that other threads use, which takes
    /// microseconds: a request must not fail for that.
    #[cold]
    fn make_or_wait(&self) -> Result<Contexts, LuksError> {
        let made = self.make();
        let mut tries = 0;
        while made.is_err() && tries < TRIES {
            std::thread::yield_now();
            if let Some(contexts) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop() {
                return Ok(contexts);
            }
            tries += 1;
        }
        made
    }

    fn put_back(&self, contexts: Contexts) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(contexts);
    }

    /// The tweak of the sector `at` bytes behind the first one.
    fn tweak(&self, at: u64) -> [u8; 16] {
        let mut tweak = [0; 16];
        tweak[..8].copy_from_slice(&self.first.wrapping_add(at / UNIT).to_le_bytes());
        tweak
    }

    /// Encrypts whole sectors, of which the first is `at` bytes behind the first of all, into another buffer of the same
    /// length.
    ///
    /// # Errors
    /// [`LuksError::Library`]: there is no memory for another pair of contexts, or the lengths are wrong.
    pub fn encrypt(&self, at: u64, plain: &[u8], into: &mut [u8]) -> Result<(), LuksError> {
        let mut contexts = self.take()?;
        let sectors = plain.chunks(self.sector).zip(into.chunks_mut(self.sector));
        let done = || {
            for ((plain, into), at) in sectors.zip((at..).step_by(self.sector)) {
                contexts.encrypt.encrypt_init(None, None, Some(&self.tweak(at)))?;
                contexts.encrypt.cipher_update(plain, Some(into))?;
            }
            Ok(())
        };
        let done = done();
        self.put_back(contexts);
        failed(done)
    }

    /// Encrypts whole sectors in place.
    ///
    /// # Errors
    /// As [`SectorCipher::encrypt`].
    pub fn encrypt_in_place(&self, at: u64, bytes: &mut [u8]) -> Result<(), LuksError> {
        let mut contexts = self.take()?;
        let mut done = || {
            for (sector, at) in bytes.chunks_mut(self.sector).zip((at..).step_by(self.sector)) {
                contexts.encrypt.encrypt_init(None, None, Some(&self.tweak(at)))?;
                contexts.encrypt.cipher_update_inplace(sector, sector.len())?;
            }
            Ok(())
        };
        let done = done();
        self.put_back(contexts);
        failed(done)
    }

    /// Decrypts whole sectors in place.
    ///
    /// # Errors
    /// As [`SectorCipher::encrypt`].
    pub fn decrypt_in_place(&self, at: u64, bytes: &mut [u8]) -> Result<(), LuksError> {
        self.decrypt_unless(at, bytes, |_| 0)
    }

    /// As [`SectorCipher::decrypt_in_place`], but leaves units of 512 bytes that are zero as they are: those that were never
    /// written. A power failure may leave a sector that is written for the first time with some of its units only; of XTS
    /// each block of 16 bytes can be decrypted without the others. The chance that a unit of data is zero when it is
    /// encrypted is one in 2 to the power of its bits.
    ///
    /// # Errors
    /// As [`SectorCipher::encrypt`].
    pub fn decrypt_written(&self, at: u64, bytes: &mut [u8]) -> Result<(), LuksError> {
        self.decrypt_unless(at, bytes, zero_units)
    }

    /// Decrypts all but the units of each sector of which `zero` has a bit.
    fn decrypt_unless(
        &self,
        at: u64,
        bytes: &mut [u8],
        zero: impl Fn(&[u8]) -> u32,
    ) -> Result<(), LuksError> {
        let mut contexts = self.take()?;
        let mut done = || {
            for (sector, at) in bytes.chunks_mut(self.sector).zip((at..).step_by(self.sector)) {
                let zero = zero(sector);
                let mut units = 0..sector.len().div_ceil(UNIT_BYTES);
                if units.all(|number| zero & 1 << number != 0) {
                    continue;
                }
                contexts.decrypt.decrypt_init(None, None, Some(&self.tweak(at)))?;
                contexts.decrypt.cipher_update_inplace(sector, sector.len())?;
                if zero != 0 {
                    let units = sector.chunks_mut(UNIT_BYTES).enumerate();
                    units
                        .filter(|(number, _)| zero & 1 << number != 0)
                        .for_each(|(_, unit)| unit.fill(0));
                }
            }
            Ok(())
        };
        let done = done();
        self.put_back(contexts);
        failed(done)
    }
}

/// A bit for each unit of a sector that is zero. A sector has at most eight.
fn zero_units(sector: &[u8]) -> u32 {
    let units = sector.chunks(UNIT_BYTES).enumerate();
    units.filter(|(_, unit)| is_zero(unit)).fold(0, |bits, (number, _)| bits | 1 << number)
}

fn is_zero(bytes: &[u8]) -> bool {
    // Nearly all that is not zero shows in the first bytes.
    let (first, rest) = bytes.split_at(bytes.len().min(16));
    first.iter().all(|byte| *byte == 0) && rest.iter().fold(0, |sum, byte| sum | byte) == 0
}

fn failed(done: Result<(), openssl::error::ErrorStack>) -> Result<(), LuksError> {
    done.map_err(|_| LuksError::Library("OpenSSL (AES-XTS)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cipher(sector: usize, first: u64) -> SectorCipher {
        let key: Vec<u8> = (0..64).collect();
        SectorCipher::new(Secret::copy_of(&key).unwrap(), sector, first).unwrap()
    }

    /// Vector 10 of IEEE 1619-2007: AES-256, sector 255.
    #[test]
    fn a_vector_of_the_standard() {
        let key: Vec<u8> = [
            "2718281828459045235360287471352662497757247093699959574966967627",
            "3141592653589793238462643383279502884197169399375105820974944592",
        ]
        .concat()
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
        let cipher = SectorCipher::new(Secret::copy_of(&key).unwrap(), 512, 255).unwrap();
        let plain: Vec<u8> = (0..=255).chain(0..=255).collect();
        let mut out = vec![0; 512];
        cipher.encrypt(0, &plain, &mut out).unwrap();
        let start = [0x1c, 0x3b, 0x3a, 0x10, 0x2f, 0x77, 0x03, 0x86, 0xe4, 0x83, 0x6c, 0x99];
        assert_eq!(out[..12], start);
        cipher.decrypt_in_place(0, &mut out).unwrap();
        assert_eq!(out, plain);
    }

    #[test]
    fn each_sector_has_its_number_in_units_of_512_bytes() {
        let (large, small) = (cipher(4096, 0), cipher(4096, 16));
        let plain = vec![7; 12288];
        let mut one = plain.clone();
        large.encrypt_in_place(0, &mut one).unwrap();
        let mut other = vec![0; 4096];
        small.encrypt(0, &plain[..4096], &mut other).unwrap();
        assert_eq!(one[8192..], other);
        assert_ne!(one[..4096], one[4096..8192]);
        large.decrypt_in_place(4096, &mut one[4096..]).unwrap();
        assert_eq!(one[4096..], plain[4096..]);
    }

    #[test]
    fn what_was_never_written_reads_as_zeroes() {
        let cipher = cipher(512, 0);
        let mut bytes = vec![0; 1536];
        bytes[512..1024].fill(9);
        cipher.encrypt_in_place(512, &mut bytes[512..1024]).unwrap();
        cipher.decrypt_written(0, &mut bytes).unwrap();
        assert!(bytes[..512].iter().chain(&bytes[1024..]).all(|byte| *byte == 0));
        assert!(bytes[512..1024].iter().all(|byte| *byte == 9));
    }

    #[test]
    fn a_sector_that_was_written_for_the_first_time_in_part_has_the_rest_as_zeroes() {
        let cipher = cipher(4096, 0);
        let plain: Vec<u8> = (0..8192u32).map(|at| at.to_le_bytes()[0] | 1).collect();
        let mut bytes = plain.clone();
        cipher.encrypt_in_place(0, &mut bytes).unwrap();
        bytes[..1024].fill(0);
        bytes[4096 + 3584..].fill(0);
        cipher.decrypt_written(0, &mut bytes).unwrap();
        let lost = |at: &usize| *at < 1024 || *at >= 4096 + 3584;
        let expected = |at: usize| if lost(&at) { 0 } else { plain[at] };
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    }

    #[test]
    fn contexts_are_in_locked_memory_and_given_back() {
        let one = cipher(512, 0);
        // Two contexts, of two allocations each.
        assert!(crate::openssl_memory::used() >= 4);
        drop(one);
    }
}
