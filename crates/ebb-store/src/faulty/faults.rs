//! The faults of a test store, and the record of its completed requests.

/// One completed operation, for replaying.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// Data written at an offset; with `fua` it is stable.
    Write {
        /// First byte.
        offset: u64,
        /// The data.
        data: Vec<u8>,
        /// Stable on return.
        fua: bool,
    },
    /// What completed before it was submitted is stable.
    Flush {
        /// The number of records that it covers.
        covers: usize,
    },
    /// Data was lost: the stable content of a range that was not flushed. Nothing newer becomes
    /// stable.
    Left {
        /// First byte.
        offset: u64,
        /// The data.
        data: Vec<u8>,
    },
}

/// The faults of a test store; numbers are per 1,000 requests of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Reads that fail.
    pub reads: u32,
    /// Writes and zeroes that fail, part of them done.
    pub writes: u32,
    /// Flushes, and syncs of writes with FUA, that fail and lose any subset of what was not
    /// flushed.
    pub flushes: u32,
    /// Writes after which the kernel's own writeback fails: any subset of what was not flushed is
    /// lost, and the next flush or FUA reports it.
    pub writing_back: u32,
    /// Requests that hang until [`Disk::release`](super::Disk::release).
    pub hangs: u32,
    /// Requests that are carried out and completed late, by `late_us`.
    pub late: u32,
    /// Microseconds.
    pub late_us: u64,
    /// Every flush fails until all that was lost is written again; otherwise only one fails.
    pub told_always: bool,
    /// A loss is reported as "no space": writeback found none.
    pub told_as_full: bool,
}
