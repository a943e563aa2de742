//! A store for tests: memory that can fail, dawdle, tear and remember (feature `test-store`).
//!
//! Everything it does is decided by a seed and by the counters set by the test. A request is carried out
//! in pieces with waits between them, so that requests that overlap in time really mix. A
//! failed write may have written any part of its data, as a device's may.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{BlockError, Buf, BufResult, Extent, Io, Operation};

/// Bytes carried out between two waits.
const PIECE: usize = 4096;

/// One thing that was done, for those who replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// So many bytes of data at an offset; with `fua` stable by itself.
    Write {
        /// First byte.
        offset: u64,
        /// The data.
        data: Vec<u8>,
        /// Stable on return.
        fua: bool,
    },
    /// What was done before it was asked for is stable.
    Flush {
        /// So many of what was remembered.
        covers: usize,
    },
}

/// See the module.
#[derive(Debug)]
pub struct TestStore {
    bytes: Mutex<Vec<u8>>,
    random: AtomicU64,
    /// How many of 1,000 reads fail.
    pub read_faults: AtomicU32,
    /// How many of 1,000 writes, flushes and others fail.
    pub write_faults: AtomicU32,
    /// Most turns of the worker's loop that a request waits for, between two pieces.
    pub waits: AtomicU32,
    /// Microseconds that each request takes at least.
    pub latency_us: AtomicU64,
    /// Requests so far.
    pub reads: AtomicU64,
    /// Bytes read so far.
    pub read_bytes: AtomicU64,
    /// Writes so far.
    pub writes: AtomicU64,
    /// Bytes written so far.
    pub written_bytes: AtomicU64,
    /// Flushes so far.
    pub flushes: AtomicU64,
    record: Mutex<Option<Vec<Record>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn place(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl TestStore {
    /// A store of `size` zeroes that never fails and answers at once.
    #[must_use]
    pub fn new(size: u64, seed: u64) -> TestStore {
        TestStore {
            bytes: Mutex::new(vec![0; place(size)]),
            random: AtomicU64::new(seed),
            read_faults: AtomicU32::new(0),
            write_faults: AtomicU32::new(0),
            waits: AtomicU32::new(0),
            latency_us: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            record: Mutex::default(),
        }
    }

    /// Remembers writes and flushes from now on.
    pub fn start_record(&self) {
        *lock(&self.record) = Some(Vec::new());
    }

    /// How much was remembered so far.
    #[must_use]
    pub fn recorded(&self) -> usize {
        lock(&self.record).as_ref().map_or(0, Vec::len)
    }

    fn remember(&self, record: impl FnOnce() -> Record) {
        if let Some(all) = &mut *lock(&self.record) {
            all.push(record());
        }
    }

    /// What was remembered.
    #[must_use]
    pub fn take_record(&self) -> Vec<Record> {
        lock(&self.record).take().unwrap_or_default()
    }

    /// A copy of what it holds.
    #[must_use]
    pub fn content(&self) -> Vec<u8> {
        lock(&self.bytes).clone()
    }

    /// Copies what it holds from `offset` on.
    pub fn look(&self, offset: u64, out: &mut [u8]) {
        out.copy_from_slice(&lock(&self.bytes)[place(offset)..place(offset) + out.len()]);
    }

    /// Changes what it holds, as somebody else might.
    pub fn change(&self, offset: u64, data: &[u8]) {
        lock(&self.bytes)[place(offset)..place(offset) + data.len()].copy_from_slice(data);
    }

    pub(crate) fn size(&self) -> u64 {
        lock(&self.bytes).len() as u64
    }

    /// The next number: any thread's calls take from one sequence.
    fn next(&self) -> u64 {
        let seed = self.random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn fails(&self, per_thousand: &AtomicU32) -> bool {
        self.next() % 1000 < u64::from(per_thousand.load(Ordering::Relaxed))
    }

    async fn pause(&self, io: &Io) {
        let most = u64::from(self.waits.load(Ordering::Relaxed));
        if most > 0 {
            for _ in 0..self.next() % (most + 1) {
                io.yield_now().await;
            }
        }
    }

    async fn begin(&self, io: &Io) {
        let latency = self.latency_us.load(Ordering::Relaxed);
        if latency > 0 {
            io.sleep(Duration::from_micros(latency)).await;
        }
        self.pause(io).await;
    }

    fn error(operation: Operation, offset: u64, length: u64) -> BlockError {
        BlockError::from_io(std::io::Error::from_raw_os_error(libc::EIO), operation, offset, length)
    }

    pub(crate) async fn read(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let length = buf.len();
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(length as u64, Ordering::Relaxed);
        self.begin(io).await;
        let fails = self.fails(&self.read_faults);
        let mut at = 0;
        while at < length {
            let end = length.min(at + PIECE);
            {
                let bytes = lock(&self.bytes);
                match bytes.get(place(offset) + at..place(offset) + end) {
                    Some(from) => buf[at..end].copy_from_slice(from),
                    None => return (Err(Self::error(Operation::Read, offset, length as u64)), buf),
                }
            }
            at = end;
            self.pause(io).await;
        }
        if fails {
            buf.fill(0xdb);
            return (Err(Self::error(Operation::Read, offset, length as u64)), buf);
        }
        (Ok(()), buf)
    }

    pub(crate) async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let length = buf.len();
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(length as u64, Ordering::Relaxed);
        self.begin(io).await;
        let fails = self.fails(&self.write_faults);
        let until =
            if fails { place(self.next() % (length as u64 + 1)) / 512 * 512 } else { length };
        let mut at = 0;
        while at < until {
            let end = until.min(at + PIECE);
            self.change(offset + at as u64, &buf[at..end]);
            at = end;
            self.pause(io).await;
        }
        // A failed one has done a part.
        let stable = fua && !fails;
        self.remember(|| Record::Write { offset, data: buf[..until].to_vec(), fua: stable });
        if fails {
            return (Err(Self::error(Operation::Write, offset, length as u64)), buf);
        }
        (Ok(()), buf)
    }

    pub(crate) async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        let covers = self.recorded();
        self.begin(io).await;
        if self.fails(&self.write_faults) {
            return Err(Self::error(Operation::Flush, 0, 0));
        }
        self.remember(|| Record::Flush { covers });
        Ok(())
    }

    /// Zeroes: also what a discard does here, and like a write it may fail in the middle.
    pub(crate) async fn zero(
        &self,
        io: &Io,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Result<(), BlockError> {
        self.begin(io).await;
        let fails = self.fails(&self.write_faults);
        let until = if fails { self.next() % (length + 1) / 512 * 512 } else { length };
        let mut at = 0;
        while at < until {
            let end = until.min(at + 8 * PIECE as u64);
            lock(&self.bytes)[place(offset + at)..place(offset + end)].fill(0);
            at = end;
            self.pause(io).await;
        }
        self.remember(|| Record::Write { offset, data: vec![0; place(until)], fua: false });
        if fails {
            return Err(Self::error(operation, offset, length));
        }
        Ok(())
    }

    pub(crate) fn extents(offset: u64, length: u64) -> Vec<Extent> {
        vec![Extent { offset, length, hole: false }]
    }
}
