//! Mapped guest memory, accessible by copies only.
//!
//! Invariants: there are no references into a mapping, since the guest can change it at any time
//! (XSA-155): bytes are moved by machine instructions about which the compiler makes no assumptions, and
//! only the copy is checked and used. Every copy is within its mapping, or refused. Bits are set by atomic
//! instructions, through references that last for the instruction. Dropping a mapping ends it.

#[cfg(feature = "count-copies")]
pub(crate) mod copied;
mod copy;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

use self::copy::copy;

/// Unmaps mappings.
pub trait Unmap: Send + Sync {
    /// Ends the mapping of `bytes` bytes at `base` that was made under `cookie`.
    fn unmap(&self, base: NonNull<u8>, bytes: usize, cookie: u64);
}

/// A range of memory shared with a guest or another process.
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    cookie: u64,
    owner: Arc<dyn Unmap>,
}

// SAFETY: the memory belongs to the whole process and is accessed by copies only.
unsafe impl Send for Mapping {}
// SAFETY: the guest may write the memory at any time anyway; no access assumes that it is constant.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A mapping of `bytes` bytes at `base`, which `owner` unmaps under `cookie`.
    ///
    /// # Safety
    /// The memory must be readable and, if the mapping is written to, writable, until `owner`
    /// unmaps it; aligned to 8 bytes; and no Rust reference may point into it.
    pub unsafe fn new(
        base: NonNull<u8>,
        bytes: usize,
        cookie: u64,
        owner: Arc<dyn Unmap>,
    ) -> Mapping {
        Mapping { base, bytes, cookie, owner }
    }

    /// Its size, bytes.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of `len` bytes at `offset`, if they are within.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (end <= self.bytes).then(|| self.base.as_ptr().wrapping_add(offset))
    }

    /// The address of `len` bytes at `offset`, if they are within: for system calls that access them in place, while the
    /// mapping exists. Nothing else may.
    #[inline]
    pub fn address_of(&self, offset: usize, len: usize) -> Option<*mut u8> {
        self.at(offset, len)
    }

    /// Copies out of the mapping. False, without effect, if the range is not within the mapping.
    #[must_use]
    #[inline]
    pub fn read(&self, offset: usize, to: &mut [u8]) -> bool {
        let Some(from) = self.at(offset, to.len()) else { return false };
        #[cfg(feature = "count-copies")]
        copied::note(to.len());
        // SAFETY: `from` is valid for as many bytes, and our slice cannot overlap a mapping.
        unsafe { copy(from, to.as_mut_ptr(), to.len()) };
        true
    }

    /// Copies into the mapping. False, without effect, if the range is not within the mapping.
    #[must_use]
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> bool {
        let Some(to) = self.at(offset, from.len()) else { return false };
        #[cfg(feature = "count-copies")]
        copied::note(from.len());
        // SAFETY: `to` is valid for as many bytes, and our slice cannot overlap a mapping.
        unsafe { copy(from.as_ptr(), to, from.len()) };
        true
    }

    /// Copies words out, each read once. False, without effect, if the range is not within the mapping or
    /// `offset` is not a multiple of 8.
    #[must_use]
    #[inline]
    pub fn read_words(&self, offset: usize, to: &mut [u64]) -> bool {
        let Some(from) = self.words_at(offset, to.len()) else { return false };
        for (number, word) in to.iter_mut().enumerate() {
            // SAFETY: within the mapping and aligned.
            *word = unsafe { from.wrapping_add(number).read_volatile() };
        }
        true
    }

    /// Copies words in. False, without effect, if the range is not within the mapping or `offset` is not
    /// a multiple of 8.
    #[must_use]
    #[inline]
    pub fn write_words(&self, offset: usize, from: &[u64]) -> bool {
        let Some(to) = self.words_at(offset, from.len()) else { return false };
        for (number, word) in from.iter().enumerate() {
            // SAFETY: within the mapping and aligned.
            unsafe { to.wrapping_add(number).write_volatile(*word) };
        }
        true
    }

    #[inline]
    fn words_at(&self, offset: usize, words: usize) -> Option<*mut u64> {
        let at = self.at(offset, words.checked_mul(8)?)?;
        offset.is_multiple_of(8).then(|| at.cast::<u64>())
    }

    /// The address of a number at `offset`, if it is within and aligned.
    #[inline]
    fn number_at<T>(&self, offset: usize) -> Option<*mut T> {
        let at = self.at(offset, size_of::<T>())?;
        offset.is_multiple_of(size_of::<T>()).then(|| at.cast::<T>())
    }

    /// Reads one number, once; 0 outside the mapping or if `offset` is not aligned.
    #[inline]
    pub fn load(&self, offset: usize) -> u32 {
        // SAFETY: within the mapping and aligned.
        self.number_at::<u32>(offset).map_or(0, |at| unsafe { at.read_volatile() })
    }

    /// Writes one number with one store; without effect outside the mapping or if `offset` is not aligned.
    #[inline]
    pub fn store(&self, offset: usize, value: u32) {
        if let Some(at) = self.number_at::<u32>(offset) {
            // SAFETY: within the mapping and aligned.
            unsafe { at.write_volatile(value) };
        }
    }

    /// As [`Mapping::load`], 16 bits.
    #[inline]
    pub fn load_u16(&self, offset: usize) -> u16 {
        // SAFETY: within the mapping and aligned.
        self.number_at::<u16>(offset).map_or(0, |at| unsafe { at.read_volatile() })
    }

    /// As [`Mapping::store`], 16 bits.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16) {
        if let Some(at) = self.number_at::<u16>(offset) {
            // SAFETY: within the mapping and aligned.
            unsafe { at.write_volatile(value) };
        }
    }

    /// As [`Mapping::load`], 64 bits.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> u64 {
        // SAFETY: within the mapping and aligned.
        self.number_at::<u64>(offset).map_or(0, |at| unsafe { at.read_volatile() })
    }

    /// As [`Mapping::store`], 64 bits.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) {
        if let Some(at) = self.number_at::<u64>(offset) {
            // SAFETY: within the mapping and aligned.
            unsafe { at.write_volatile(value) };
        }
    }

    /// Sets bits of one byte atomically, after all earlier writes of this thread, and returns what the byte was; 0,
    /// without effect, outside the mapping.
    #[inline]
    pub fn fetch_or_u8(&self, offset: usize, bits: u8) -> u8 {
        let Some(at) = self.number_at::<u8>(offset) else { return 0 };
        // SAFETY: within the mapping, which outlives the reference; a byte is always aligned. The reference allows others
        // to change the byte. This process accesses it by single instructions only; what the other process does to it
        // is as if by atomic accesses of the processor, and any value is valid.
        let byte = unsafe { AtomicU8::from_ptr(at) };
        byte.fetch_or(bits, Ordering::Release)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.owner.unmap(self.base, self.bytes, self.cookie);
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("bytes", &self.bytes).finish()
    }
}

/// A read barrier: later reads are not done before earlier ones (`xen_rmb`).
#[inline]
pub fn read_barrier() {
    fence(Ordering::Acquire);
}

/// A write barrier: earlier writes are visible before later ones (`xen_wmb`).
#[inline]
pub fn write_barrier() {
    fence(Ordering::Release);
}

/// A full barrier: no read or write passes it (`xen_mb`).
#[inline]
pub fn full_barrier() {
    fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Own;

    impl Unmap for Own {
        fn unmap(&self, base: NonNull<u8>, bytes: usize, cookie: u64) {
            assert_eq!(cookie, 7);
            // SAFETY: made from a boxed slice of 8-byte words of this length, below.
            drop(unsafe { Vec::from_raw_parts(base.as_ptr().cast::<u64>(), bytes / 8, bytes / 8) });
        }
    }

    fn mapping(words: usize) -> Mapping {
        let mut memory = vec![0u64; words].into_boxed_slice();
        let base = NonNull::new(memory.as_mut_ptr().cast::<u8>()).unwrap();
        std::mem::forget(memory);
        // SAFETY: ours alone from here on, and freed by `Own`.
        unsafe { Mapping::new(base, words * 8, 7, Arc::new(Own)) }
    }

    #[test]
    fn copies_of_every_length_and_alignment_arrive_and_change_nothing_else() {
        let mapping = mapping(16);
        for offset in 0..20 {
            for len in 0..100 {
                let data: Vec<u8> = (0..len).map(|n| n + offset + 1).collect();
                assert!(mapping.write(0, &[0; 128]) && mapping.write(offset.into(), &data));
                let mut back = [0; 128];
                assert!(mapping.read(offset.into(), &mut back[..len.into()]));
                assert_eq!(back[..len.into()], data);
                assert!(back[len.into()..].iter().all(|byte| *byte == 0));
                assert!(mapping.read(0, &mut back));
                let (from, to) = (offset.into(), (offset + len).into());
                assert_eq!(back[from..to], data);
                assert!(back[..from].iter().chain(&back[to..]).all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn large_copies_arrive_and_change_nothing_else() {
        let mapping = mapping(1100);
        let data: Vec<u8> = (0..8192u32).map(|n| n.to_le_bytes()[0] ^ 0x5a).collect();
        for (offset, len) in [(0, 4096), (8, 511), (8, 512), (1, 513), (3, 4095), (600, 8191)] {
            assert!(mapping.write(0, &[0; 8800]));
            assert!(mapping.write(offset, &data[..len]));
            let mut back = vec![0; 8800];
            assert!(mapping.read(0, &mut back));
            assert_eq!(back[offset..offset + len], data[..len]);
            assert!(back[..offset].iter().chain(&back[offset + len..]).all(|byte| *byte == 0));
        }
    }

    #[test]
    fn words_are_copied_only_if_aligned() {
        let mapping = mapping(4);
        assert!(mapping.write_words(8, &[1, u64::MAX]));
        let mut back = [0; 2];
        assert!(mapping.read_words(8, &mut back));
        assert_eq!(back, [1, u64::MAX]);
        assert!(!mapping.read_words(4, &mut back) && !mapping.read_words(24, &mut back));
        assert!(!mapping.write_words(24, &back));
    }

    #[test]
    fn accesses_outside_a_mapping_are_refused() {
        let mapping = mapping(2);
        assert!(!mapping.write(9, &[0; 8]));
        assert!(!mapping.read(usize::MAX, &mut [0; 2]));
        mapping.store(16, 1);
        mapping.store(13, 1);
        assert_eq!(mapping.load(16), 0);
        assert!(mapping.read(16, &mut []));
        mapping.store(12, 5);
        assert_eq!(mapping.load(12), 5);
        mapping.store_u16(14, 7);
        mapping.store_u16(16, 1);
        mapping.store_u16(13, 1);
        assert_eq!((mapping.load_u16(14), mapping.load_u16(13), mapping.load_u16(16)), (7, 0, 0));
        assert_eq!(mapping.load_u64(8), 5 << 32 | 7 << 48);
        assert_eq!((mapping.load_u64(12), mapping.load_u64(16)), (0, 0));
    }

    #[test]
    fn numbers_of_each_width_are_within_and_aligned() {
        let mapping = mapping(2);
        mapping.store_u64(8, 0x0102_0304_0506_0708);
        assert_eq!(mapping.load_u64(8), 0x0102_0304_0506_0708);
        assert_eq!((mapping.load_u16(8), mapping.load_u16(14)), (0x0708, 0x0102));
        mapping.store_u16(10, 0xffff);
        assert_eq!(mapping.load_u64(8), 0x0102_0304_ffff_0708);
        for offset in [4, 12, 16, usize::MAX - 7] {
            mapping.store_u64(offset, 7);
            assert_eq!(mapping.load_u64(offset), 0);
        }
        for offset in [9, 15, 16, usize::MAX - 1] {
            mapping.store_u16(offset, 7);
            assert_eq!(mapping.load_u16(offset), 0);
        }
        assert_eq!((mapping.load_u64(0), mapping.load_u64(8)), (0, 0x0102_0304_ffff_0708));
    }

    #[test]
    fn bits_are_set_within_the_mapping() {
        let mapping = mapping(1);
        assert_eq!((mapping.fetch_or_u8(8, 1), mapping.fetch_or_u8(usize::MAX, 1)), (0, 0));
        assert_eq!((mapping.fetch_or_u8(3, 5), mapping.fetch_or_u8(3, 2)), (0, 5));
        assert_eq!(mapping.load(0), 0x0700_0000);
    }

    /// As a VMM reads a dirty log: it takes all bits of a byte at once. Each bit that was set is taken once.
    #[test]
    fn bits_are_set_atomically() {
        let mapping = mapping(1);
        let set = |bit: u8| (0..200_000).filter(|_| mapping.fetch_or_u8(0, bit) & bit == 0).count();
        // SAFETY: mapped, aligned, and accessed atomically only.
        let byte = unsafe { AtomicU8::from_ptr(mapping.address()) };
        std::thread::scope(|scope| {
            let (first, second) = (scope.spawn(|| set(1)), scope.spawn(|| set(2)));
            let mut taken = [0, 0];
            let mut ended = false;
            while !ended {
                ended = first.is_finished() && second.is_finished();
                let bits = usize::from(byte.swap(0, Ordering::Relaxed));
                taken = [taken[0] + (bits & 1), taken[1] + (bits >> 1)];
            }
            assert_eq!(taken, [first.join().unwrap(), second.join().unwrap()]);
        });
    }

    impl Mapping {
        /// For system calls of tests.
        pub(crate) fn address(&self) -> *mut u8 {
            self.base.as_ptr()
        }
    }
}
