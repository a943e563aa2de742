//! [`Secret`]: bytes that are neither swapped, nor in a core, nor left behind.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use zeroize::Zeroize;

use crate::error::LuksError;

/// Bytes in pages of their own, which are locked in memory, left out of cores, zero in a child process, and wiped when
/// they are dropped. `Debug` shows only their number.
pub struct Secret {
    pages: SecretPages,
    length: usize,
}

impl Secret {
    /// This many bytes, all zero.
    ///
    /// # Errors
    /// [`LuksError::Locked`] if the kernel locks no more memory.
    pub fn zeroed(length: usize) -> Result<Secret, LuksError> {
        let pages = SecretPages::map(length).map_err(LuksError::Locked)?;
        pages.lock().map_err(LuksError::Locked)?;
        Ok(Secret { pages, length })
    }

    /// A copy of these bytes, which the caller has to wipe.
    ///
    /// # Errors
    /// As [`Secret::zeroed`].
    pub fn copy_of(bytes: &[u8]) -> Result<Secret, LuksError> {
        let mut secret = Secret::zeroed(bytes.len())?;
        secret.copy_from_slice(bytes);
        Ok(secret)
    }

    /// Random bytes.
    ///
    /// # Errors
    /// As [`Secret::zeroed`], and [`LuksError::Library`].
    pub fn random(length: usize) -> Result<Secret, LuksError> {
        let mut secret = Secret::zeroed(length)?;
        random(&mut secret)?;
        Ok(secret)
    }

    /// Drops the bytes from `length` on.
    pub fn truncate(&mut self, length: usize) {
        if length < self.length {
            self[length..].zeroize();
            self.length = length;
        }
    }
}

impl Deref for Secret {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.pages.bytes()[..self.length]
    }
}

impl DerefMut for Secret {
    fn deref_mut(&mut self) -> &mut [u8] {
        let length = self.length;
        &mut self.pages.bytes_mut()[..length]
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({} bytes)", self.length)
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.pages.bytes_mut().zeroize();
    }
}

/// Random bytes of the kernel.
///
/// # Errors
/// [`LuksError::Library`]: it has none.
pub(crate) fn random(mut bytes: &mut [u8]) -> Result<(), LuksError> {
    while !bytes.is_empty() {
        // SAFETY: the kernel writes at most `len` bytes to the slice.
        let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(count) {
            Ok(count) => bytes = &mut bytes[count..],
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err(LuksError::Library("getrandom")),
        }
    }
    Ok(())
}

/// Anonymous pages of their own, which are in no core and zero in a child process. They are not locked.
#[derive(Debug)]
pub(crate) struct SecretPages {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the pages belong to this value alone, as those of a `Box<[u8]>` do.
unsafe impl Send for SecretPages {}
// SAFETY: shared access only reads.
unsafe impl Sync for SecretPages {}

impl SecretPages {
    /// At least this many bytes, all zero.
    pub(crate) fn map(length: usize) -> io::Result<SecretPages> {
        SecretPages::with_access(length, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Addresses only, which are not charged for: a range of them becomes memory by [`lock_range`]. What the others have may
    /// not be used.
    pub(crate) fn reserve(length: usize) -> io::Result<SecretPages> {
        SecretPages::with_access(length, libc::PROT_NONE)
    }

    fn with_access(length: usize, access: i32) -> io::Result<SecretPages> {
        const PAGE: usize = 4096;
        let length = length.max(1).next_multiple_of(PAGE);
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = SecretPages { start, length };
        for advice in [libc::MADV_DONTDUMP, libc::MADV_WIPEONFORK] {
            // SAFETY: the range is this mapping, and neither advice changes what it holds in this process.
            if unsafe { libc::madvise(start.as_ptr().cast(), length, advice) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(pages)
    }

    /// Locks them, so that they are never swapped.
    fn lock(&self) -> io::Result<()> {
        lock_range(self.start.as_ptr(), self.length)
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable, initialised by the kernel, and lives as long as `self`; writes need `&mut`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for SecretPages {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping, and nothing refers to it any longer.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Makes a range of a mapping of this module readable and writable, and locks it.
pub(crate) fn lock_range(start: *mut u8, length: usize) -> io::Result<()> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: more access invalidates no reference; the range is mapped, else the call fails.
    if unsafe { libc::mprotect(start.cast(), length, access) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: locking changes no content; the range is mapped, else the call fails.
    match unsafe { libc::mlock(start.cast(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Overwrites the part of the stack that calls of a library have used.
#[inline(never)]
pub(crate) fn scrub_stack() {
    let mut bytes = [0u8; 32 << 10];
    bytes.zeroize();
    std::hint::black_box(&mut bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_locked_and_shows_nothing() {
        let mut secret = Secret::copy_of(b"correct horse").unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(13 bytes)");
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", secret.pages.start.as_ptr() as usize);
        let flags = maps.split(&start).nth(1).unwrap();
        let flags = flags.lines().find(|line| line.starts_with("VmFlags")).unwrap();
        for flag in [" lo ", " dd ", " wf "] {
            assert!(flags.contains(flag), "{flags} has no {flag}");
        }
        secret.truncate(7);
        assert_eq!(&*secret, b"correct");
        assert_eq!(&secret.pages.bytes()[7..13], [0; 6]);
    }
}
