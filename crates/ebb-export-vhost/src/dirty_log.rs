//! The log of what a device writes to guest memory while the guest is migrated: one bit per page of guest physical
//! addresses, in memory that the VMM shares, reads and clears at any time.
//!
//! Invariants: a bit is set after the write that it stands for, and atomically, because the VMM clears bits of the same
//! byte. What is beyond the log is ignored.
//!
//! Source: vhost-user, "Migration" and `VHOST_USER_SET_LOG_BASE`.

use ebb_guest_ring::SharedMemory;

/// Bytes of guest memory per bit (`VHOST_LOG_PAGE`).
const LOG_PAGE: u64 = 4096;

/// The log.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    bits: SharedMemory,
}

impl DirtyLog {
    /// A log in this memory.
    pub(crate) fn new(bits: SharedMemory) -> DirtyLog {
        DirtyLog { bits }
    }

    #[cfg(test)]
    pub(crate) fn bits(&self) -> &SharedMemory {
        &self.bits
    }

    /// Notes that `len` bytes at a guest physical address were written.
    pub(crate) fn mark(&self, address: u64, len: u32) {
        if len == 0 {
            return;
        }
        let pages = (self.bits.bytes() as u64).saturating_mul(8);
        let last = address.saturating_add(u64::from(len) - 1) / LOG_PAGE;
        let end = pages.min(last + 1);
        let mut page = address / LOG_PAGE;
        while page < end {
            let byte = page / 8;
            let next = (byte * 8 + 8).min(end);
            // 1 to 8 bits.
            let bits = 0xff >> (8 - (next - page)) << (page % 8);
            if let Ok(byte) = usize::try_from(byte) {
                self.bits.fetch_or_u8(byte, bits);
            }
            page = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::memory::testing::memfd;

    fn log(bytes: usize) -> DirtyLog {
        let fd = memfd(bytes);
        DirtyLog::new(SharedMemory::map(fd.as_fd(), 0, bytes, Arc::default()).unwrap())
    }

    /// The pages whose bits are set.
    fn marked(log: &DirtyLog) -> Vec<u64> {
        let mut bytes = vec![0; log.bits.bytes()];
        assert!(log.bits.read(0, &mut bytes));
        let is_set = |page: &u64| bytes[usize::try_from(page / 8).unwrap()] & 1 << (page % 8) != 0;
        (0..bytes.len() as u64 * 8).filter(is_set).collect()
    }

    #[test]
    fn pages_are_marked_in_whole() {
        for (address, len, expected) in [
            (0, 1, vec![0]),
            (4095, 1, vec![0]),
            (4095, 2, vec![0, 1]),
            (4096, 4096, vec![1]),
            (7 * 4096 + 5, 4096, vec![7, 8]),
            (6 * 4096, 12 * 4096, (6..18).collect()),
            (8192, 0, vec![]),
        ] {
            let log = log(3);
            log.mark(address, len);
            assert_eq!(marked(&log), expected, "{len} bytes at {address}");
        }
    }

    #[test]
    fn what_is_beyond_the_log_is_ignored() {
        let log = log(2);
        for (address, len) in [(16 * 4096, 1), (u64::MAX, u32::MAX), (u64::MAX - 4095, 1)] {
            log.mark(address, len);
            assert_eq!(marked(&log), [0; 0]);
        }
        log.mark(15 * 4096, u32::MAX);
        assert_eq!(marked(&log), [15]);
    }

    proptest! {
        #[test]
        fn marks_are_those_of_a_page_by_page_log(
            marks in prop::collection::vec((0..40 * LOG_PAGE, 0..20 * 4096u32), 1..6),
        ) {
            let log = log(4);
            let mut expected = vec![];
            for (address, len) in marks {
                log.mark(address, len);
                let end = address + u64::from(len);
                let touched = |page: &u64| page * LOG_PAGE < end && address < (page + 1) * LOG_PAGE;
                expected.extend((0..32).filter(touched).filter(|_| len > 0));
            }
            expected.sort_unstable();
            expected.dedup();
            prop_assert_eq!(marked(&log), expected);
        }
    }
}
