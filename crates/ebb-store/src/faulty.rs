//! A store for tests that fails as disks and kernels do (feature `test-store`).
//!
//! What reads return and what a power failure leaves are kept apart. A flush makes earlier writes
//! stable. **A flush that fails loses any subset of what was not flushed, and is reported once**:
//! the next flush succeeds despite the loss, as `fdatasync` on Linux does. A write with FUA makes
//! its own range stable, and reports an earlier loss instead of the next flush, as `RWF_DSYNC`
//! does.
//!
//! All faults follow from a seed and from settings. A request is carried out in pieces with waits
//! between them, so that requests that overlap in time really interleave. A failed write may have
//! written any sectors from its start on.

mod contents;
mod faults;
mod file;
mod hold;
mod store;

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ebb_block::{BlockError, Buf, BufResult, Io, Operation, Tracking};
use ebb_io::random::{STEP, mix};

use self::contents::{DiskContents, SECTOR, SectorAfterLoss};
use self::hold::RequestHold;

pub use self::faults::{Faults, Record};

/// Bytes carried out between two waits.
const PIECE: usize = 4096;

/// A random number generator shared by threads.
#[derive(Debug)]
pub(crate) struct FaultRandom(AtomicU64);

impl FaultRandom {
    /// The next number of one sequence for all threads.
    pub(crate) fn next(&self) -> u64 {
        mix(self.0.fetch_add(STEP, Ordering::Relaxed))
    }
}

/// An opened test disk, see the module: what all openers share is its [`Disk`].
#[derive(Debug)]
pub struct TestStore {
    disk: Arc<Disk>,
    tracking: Arc<Tracking>,
    #[cfg(feature = "sim")]
    name: crate::file_name::FileName,
}

impl Deref for TestStore {
    type Target = Disk;

    fn deref(&self) -> &Disk {
        &self.disk
    }
}

impl TestStore {
    /// A store of `size` zeroes that never fails and completes at once.
    #[must_use]
    pub fn new(size: u64, seed: u64) -> TestStore {
        TestStore::open(Arc::new(Disk::new(size, seed, None)))
    }

    /// As [`TestStore::new`], for the content of this file, which is a hole: the file gives it its names and its identity, and
    /// has its first bytes, which are read from it without a store.
    #[must_use]
    pub fn of_file(file: std::fs::File, size: u64, seed: u64) -> TestStore {
        TestStore::open(Arc::new(Disk::new(size, seed, Some(file))))
    }

    /// As [`Disk::release`]; the `release` of a store is something else.
    pub fn release(&self) {
        self.disk.release();
    }

    /// Gives the disk another identity, as an exchange of layers does.
    pub fn renumber(&self) {
        self.disk.number.fetch_add(1 << 32, Ordering::Relaxed);
    }

    /// The same open disk, which knows of the same failures.
    #[must_use]
    pub fn share(&self) -> TestStore {
        TestStore { tracking: self.tracking.clone(), ..self.open_anew() }
    }

    /// The same disk, reopened: it does not know of flushes that failed before, as a reopened file.
    #[must_use]
    pub fn open_anew(&self) -> TestStore {
        TestStore::open(self.disk.clone())
    }
}

/// See the module.
#[derive(Debug)]
pub struct Disk {
    /// No other disk of this process has it.
    number: AtomicU64,
    /// The file whose content it is.
    file: Option<std::fs::File>,
    /// Other processes may open the file, to read it.
    pub shared: AtomicBool,
    bytes: Mutex<DiskContents>,
    random: FaultRandom,
    hold: RequestHold,
    /// How many of 1,000 reads fail.
    pub read_faults: AtomicU32,
    /// How many of 1,000 writes and zeroes fail.
    pub write_faults: AtomicU32,
    /// How many of 1,000 flushes, and syncs of writes with FUA, fail and lose data.
    pub flush_faults: AtomicU32,
    more: Mutex<Faults>,
    /// The most iterations of the worker's loop that a request waits for between two pieces.
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
    /// How often data was lost.
    pub losses: AtomicU64,
    /// The alignment that it says its direct I/O needs; any is served.
    pub alignment: AtomicU32,
    /// It says that it does not use direct I/O.
    pub indirect: AtomicBool,
    /// It says that it is a device, and no regular file.
    pub device: AtomicBool,
    /// Its folder cannot be flushed.
    pub name_fails: AtomicBool,
    /// Flushes fail as if a server did not reply: nothing is lost.
    pub silent: AtomicBool,
    /// Reads return another buffer, of 512 bytes: the fault of a store that breaks its contract.
    pub other_buffers: AtomicBool,
    /// How often a store of it was aborted, which has no other effect.
    pub aborts: AtomicU64,
    /// Bytes that may be written until the disk is full.
    room: AtomicU64,
    /// A loss that no flush has reported yet.
    owed: AtomicBool,
    /// Whether a failed sync is reported by that sync only.
    reports_once: AtomicBool,
    /// The same, for [`Disk::has_no_unreported_error`].
    unseen: AtomicBool,
    /// How often the power failed: requests from before it fail.
    cuts: AtomicU64,
    record: Mutex<Option<Vec<Record>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn place(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl Disk {
    fn new(size: u64, seed: u64, file: Option<std::fs::File>) -> Disk {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Disk {
            number: NEXT.fetch_add(1, Ordering::Relaxed).into(),
            file,
            shared: AtomicBool::new(false),
            bytes: Mutex::new(DiskContents::new(place(size))),
            random: FaultRandom(AtomicU64::new(seed)),
            hold: RequestHold::default(),
            read_faults: AtomicU32::new(0),
            write_faults: AtomicU32::new(0),
            flush_faults: AtomicU32::new(0),
            more: Mutex::default(),
            waits: AtomicU32::new(0),
            latency_us: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            alignment: AtomicU32::new(1),
            indirect: AtomicBool::new(false),
            device: AtomicBool::new(false),
            name_fails: AtomicBool::new(false),
            silent: AtomicBool::new(false),
            other_buffers: AtomicBool::new(false),
            aborts: AtomicU64::new(0),
            room: AtomicU64::new(u64::MAX),
            owed: AtomicBool::new(false),
            reports_once: AtomicBool::new(false),
            unseen: AtomicBool::new(false),
            cuts: AtomicU64::new(0),
            record: Mutex::default(),
        }
    }

    /// Sets the faults from now on. Requests that hang continue to hang.
    pub fn faults(&self, faults: &Faults) {
        self.read_faults.store(faults.reads, Ordering::Relaxed);
        self.write_faults.store(faults.writes, Ordering::Relaxed);
        self.flush_faults.store(faults.flushes, Ordering::Relaxed);
        *lock(&self.more) = *faults;
    }

    /// From now on no request completes until [`Disk::release`]: connected, and silent.
    pub fn hang(&self) {
        self.hold.shut(hold::ALL);
    }

    /// From now on operations of these kinds do not complete until [`Disk::release`].
    pub fn hang_only(&self, kinds: &[Operation]) {
        self.hold.shut(kinds.iter().fold(0, |all, kind| all | hold::bit(*kind)));
    }

    /// Completes the requests that hang, and ends [`Disk::hang`] and [`Disk::hang_only`].
    pub fn release(&self) {
        self.hold.release();
    }

    /// Requests that hang now.
    #[must_use]
    pub fn hanging(&self) -> usize {
        self.hold.count(hold::ALL)
    }

    /// Sets the remaining space: when it is used up, writes and zeroes fail with `ENOSPC` and write
    /// nothing. `None`: unlimited.
    pub fn set_room(&self, bytes: Option<u64>) {
        self.room.store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The power fails and returns: any subset of what was not flushed is stable, and requests in
    /// flight fail.
    pub fn power_cut(&self) {
        self.cuts.fetch_add(1, Ordering::SeqCst);
        self.owed.store(false, Ordering::SeqCst);
        lock(&self.bytes).power_cut(&self.random);
        self.write_head();
    }

    /// The machine loses its power: returns the disk as it is after the boot. Users of this one
    /// have no access to that one.
    #[must_use]
    pub fn reboot(&self) -> TestStore {
        self.power_cut();
        let stable = self.stable_bytes();
        let next = TestStore::new(stable.len() as u64, self.random.next());
        next.change(0, &stable);
        next.faults(&lock(&self.more));
        next.waits.store(self.waits.load(Ordering::Relaxed), Ordering::Relaxed);
        next.latency_us.store(self.latency_us.load(Ordering::Relaxed), Ordering::Relaxed);
        next
    }

    /// A flush fails without being requested: any subset of what was not flushed is lost, and the
    /// next flush or FUA reports it.
    pub fn lose(&self) {
        self.lose_some();
        self.owed.store(true, Ordering::SeqCst);
    }

    /// A failed sync is reported once, as by a server whose lost writes are reported: later ones succeed.
    pub fn report_once(&self) {
        self.reports_once.store(true, Ordering::SeqCst);
    }

    /// Whether there is a loss that no flush has reported yet.
    #[must_use]
    pub fn owes_a_failure(&self) -> bool {
        self.owed.load(Ordering::SeqCst)
    }

    /// Evicts what was lost: reads return what is stable from now on.
    pub fn evict(&self) {
        lock(&self.bytes).evict_lost();
        self.write_head();
    }

    /// Resizes it; requests beyond the end fail.
    pub fn set_size(&self, size: u64) {
        lock(&self.bytes).resize(place(size));
    }

    /// Records writes and flushes from now on.
    pub fn start_record(&self) {
        *lock(&self.record) = Some(Vec::new());
    }

    /// The number of records so far.
    #[must_use]
    pub fn recorded(&self) -> usize {
        lock(&self.record).as_ref().map_or(0, Vec::len)
    }

    fn remember(&self, record: impl FnOnce() -> Record) {
        if let Some(all) = &mut *lock(&self.record) {
            all.push(record());
        }
    }

    /// Returns the records.
    #[must_use]
    pub fn take_record(&self) -> Vec<Record> {
        lock(&self.record).take().unwrap_or_default()
    }

    /// A copy of what reads return.
    #[must_use]
    pub fn content(&self) -> Vec<u8> {
        lock(&self.bytes).seen.clone()
    }

    /// A copy of what a power failure leaves in any case.
    #[must_use]
    pub fn stable_bytes(&self) -> Vec<u8> {
        lock(&self.bytes).stable.clone()
    }

    /// Sectors that were lost and not written since.
    #[must_use]
    pub fn lost_sectors(&self) -> Vec<u64> {
        lock(&self.bytes).lost.list().into_iter().map(|sector| sector as u64).collect()
    }

    /// Copies what reads return from `offset` on.
    pub fn look(&self, offset: u64, out: &mut [u8]) {
        out.copy_from_slice(&lock(&self.bytes).seen[place(offset)..place(offset) + out.len()]);
    }

    /// Changes its content, as another program might; stable at once.
    pub fn change(&self, offset: u64, data: &[u8]) {
        lock(&self.bytes).change(place(offset), data);
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        lock(&self.bytes).seen.len() as u64
    }

    fn chance(&self, per_thousand: u32) -> bool {
        per_thousand > 0 && self.random.next() % 1000 < u64::from(per_thousand)
    }

    fn fails(&self, per_thousand: &AtomicU32) -> bool {
        self.random.next() % 1000 < u64::from(per_thousand.load(Ordering::Relaxed))
    }

    async fn pause(&self, io: &Io) {
        let most = u64::from(self.waits.load(Ordering::Relaxed));
        if most > 0 {
            for _ in 0..self.random.next() % (most + 1) {
                io.yield_now().await;
            }
        }
    }

    /// The start of each request; returns the number of power failures so far.
    async fn begin(&self, io: &Io, operation: Operation) -> u64 {
        let cuts = self.cuts.load(Ordering::SeqCst);
        let hangs = self.chance(lock(&self.more).hangs);
        self.hold.pass(operation, hangs).await;
        let latency = self.latency_us.load(Ordering::Relaxed);
        if latency > 0 {
            io.sleep(Duration::from_micros(latency)).await;
        }
        self.pause(io).await;
        cuts
    }

    /// The end of each request that was carried out.
    async fn end(&self, io: &Io) {
        let Faults { late, late_us, .. } = *lock(&self.more);
        if self.chance(late) {
            io.sleep(Duration::from_micros(late_us)).await;
        }
    }

    /// Whether the power has failed since a request began.
    fn is_cut(&self, cuts: u64) -> bool {
        self.cuts.load(Ordering::SeqCst) != cuts
    }

    fn error(operation: Operation, offset: u64, length: u64) -> BlockError {
        BlockError::from_io(std::io::Error::from_raw_os_error(libc::EIO), operation, offset, length)
    }

    /// Takes space for a write, or fails with `ENOSPC`.
    fn take_room(&self, length: u64) -> Result<(), std::io::Error> {
        let left = |room: u64| if room == u64::MAX { Some(room) } else { room.checked_sub(length) };
        match self.room.try_update(Ordering::Relaxed, Ordering::Relaxed, left) {
            Ok(_) => Ok(()),
            Err(_) => Err(std::io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    /// As that of a file: true if nothing was lost since the last call.
    fn has_no_unreported_error(&self) -> bool {
        !self.unseen.swap(false, Ordering::SeqCst)
    }

    /// The error of a failed sync.
    fn sync_error(&self, operation: Operation, offset: u64, length: u64) -> BlockError {
        let number = if lock(&self.more).told_as_full { libc::ENOSPC } else { libc::EIO };
        let source = std::io::Error::from_raw_os_error(number);
        BlockError::from_io(source, operation, offset, length)
    }

    /// Loses any subset of what is not flushed.
    fn lose_some(&self) {
        self.unseen.store(true, Ordering::SeqCst);
        self.losses.fetch_add(1, Ordering::SeqCst);
        let mut bytes = lock(&self.bytes);
        let left = bytes.lose(&self.random);
        for SectorAfterLoss { sector, data } in left {
            self.remember(|| Record::Left { offset: (sector * SECTOR) as u64, data });
        }
        drop(bytes);
        self.write_head();
    }

    /// A loss happened during a write: records what was not recorded then.
    fn remember_left(&self, offset: u64, length: usize) {
        let bytes = lock(&self.bytes);
        for sector in place(offset) / SECTOR..(place(offset) + length).div_ceil(SECTOR) {
            let at = sector * SECTOR;
            if !bytes.unflushed.has(sector)
                && let Some(data) = bytes.stable.get(at..at + SECTOR)
            {
                self.remember(|| Record::Left { offset: at as u64, data: data.to_vec() });
            }
        }
    }

    /// Whether a sync that runs now fails; if so, data is lost.
    fn sync_fails(&self) -> bool {
        if self.owed.swap(false, Ordering::SeqCst) {
            return true;
        }
        let told_always = lock(&self.more).told_always;
        if told_always && !lock(&self.bytes).lost.list().is_empty() {
            return true;
        }
        if !self.fails(&self.flush_faults) {
            return false;
        }
        self.lose_some();
        true
    }

    async fn read(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let length = buf.len();
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(length as u64, Ordering::Relaxed);
        let cuts = self.begin(io, Operation::Read).await;
        let fails = self.fails(&self.read_faults);
        let mut at = 0;
        while at < length {
            let end = length.min(at + PIECE);
            {
                let bytes = lock(&self.bytes);
                match bytes.seen.get(place(offset) + at..place(offset) + end) {
                    Some(from) => buf[at..end].copy_from_slice(from),
                    None => return (Err(Self::error(Operation::Read, offset, length as u64)), buf),
                }
            }
            at = end;
            self.pause(io).await;
        }
        self.end(io).await;
        if fails || self.is_cut(cuts) {
            buf.fill(0xdb);
            return (Err(Self::error(Operation::Read, offset, length as u64)), buf);
        }
        if self.other_buffers.load(Ordering::Relaxed) {
            buf = io.pool().take(512).await;
        }
        (Ok(()), buf)
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let length = buf.len();
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(length as u64, Ordering::Relaxed);
        let cuts = self.begin(io, Operation::Write).await;
        let losses = self.losses.load(Ordering::SeqCst);
        if let Err(full) = self.take_room(length as u64) {
            let error = BlockError::from_io(full, Operation::Write, offset, length as u64);
            return (Err(error), buf);
        }
        let fails = self.fails(&self.write_faults);
        let until = if fails {
            place(self.random.next() % (length as u64 + 1)) / 512 * 512
        } else {
            length
        };
        let mut at = 0;
        while at < until {
            let end = until.min(at + PIECE);
            if !self.put(cuts, offset + at as u64, &buf[at..end]) {
                return (Err(Self::error(Operation::Write, offset, length as u64)), buf);
            }
            at = end;
            self.pause(io).await;
        }
        self.remember(|| Record::Write { offset, data: buf[..until].to_vec(), fua: false });
        if losses != self.losses.load(Ordering::SeqCst) {
            self.remember_left(offset, until);
        }
        if self.chance(lock(&self.more).writing_back) {
            self.lose();
        }
        let mut unsynced = false;
        if fua && !fails {
            unsynced = self.sync_fails();
            if !unsynced && !self.is_cut(cuts) {
                lock(&self.bytes).save_range(place(offset), length);
                self.remember(|| Record::Write { offset, data: buf.to_vec(), fua: true });
            }
        }
        self.end(io).await;
        if unsynced {
            return (Err(self.sync_error(Operation::Write, offset, length as u64)), buf);
        }
        if fails || self.is_cut(cuts) {
            return (Err(Self::error(Operation::Write, offset, length as u64)), buf);
        }
        (Ok(()), buf)
    }

    /// Writes a piece, unless the power has failed or it is beyond the end.
    fn put(&self, cuts: u64, offset: u64, data: &[u8]) -> bool {
        let mut bytes = lock(&self.bytes);
        let is_written = !self.is_cut(cuts) && bytes.write(place(offset), data, &self.random);
        drop(bytes);
        if offset < file::HEAD {
            self.write_head();
        }
        is_written
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        let covers = self.recorded();
        let covered = lock(&self.bytes).unflushed.list();
        let cuts = self.begin(io, Operation::Flush).await;
        let fails = self.sync_fails();
        if !fails && !self.is_cut(cuts) {
            {
                let mut bytes = lock(&self.bytes);
                for sector in covered {
                    if bytes.unflushed.has(sector) {
                        bytes.save(sector);
                    }
                }
            }
            self.remember(|| Record::Flush { covers });
        }
        self.end(io).await;
        if fails || self.is_cut(cuts) {
            return Err(self.sync_error(Operation::Flush, 0, 0));
        }
        Ok(())
    }

    /// Writes zeroes, also for a discard. Like a write it may fail in the middle.
    async fn zero(
        &self,
        io: &Io,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Result<(), BlockError> {
        let cuts = self.begin(io, operation).await;
        let needed = if operation == Operation::Discard { 0 } else { length };
        self.take_room(needed).map_err(|e| BlockError::from_io(e, operation, offset, length))?;
        let fails = self.fails(&self.write_faults);
        let until = if fails { self.random.next() % (length + 1) / 512 * 512 } else { length };
        let mut at = 0;
        while at < until {
            let end = until.min(at + 8 * PIECE as u64);
            if !self.put(cuts, offset + at, &vec![0; place(end - at)]) {
                return Err(Self::error(operation, offset, length));
            }
            at = end;
            self.pause(io).await;
        }
        self.remember(|| Record::Write { offset, data: vec![0; place(until)], fua: false });
        self.end(io).await;
        if fails || self.is_cut(cuts) {
            return Err(Self::error(operation, offset, length));
        }
        Ok(())
    }
}
