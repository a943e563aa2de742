//! A regular file or block device, accessed through the worker's io_uring.
//!
//! Direct I/O needs offsets and lengths that are multiples of the device's sector. Where a sector
//! is 4096 bytes, smaller writes are read-modify-write under a lock that excludes other writes to
//! the store; where it is 512 bytes (nearly everywhere) or 1 (page cache) there is no lock.

mod extents;
mod foreign;
mod image;
mod lock;
mod number;

pub use number::FileNumber;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use async_lock::{RwLockReadGuard, RwLockWriteGuard};
use ebb_block::unaligned::{self, Blocks};
use ebb_block::{
    BlockError, BlockLock, BlockStore, BufResult, Capabilities, DeviceIdentity, ErrorKind, Extent,
    ForeignResult, ForeignVectors, Identity, MEMORY_PIECE, NONE_REMAINING, Operation, Remaining,
    Resize, ResizeError, SECTOR, Tracking, ZeroFlags, check_size_change, nonce,
};
use ebb_io::{Buf, Fd, Gather, Io, WriteFlags, fd_from};
use ebb_sandbox::threads;
use rustix::fs::SeekFrom;

use crate::file_identity::identity_of_file;
use crate::file_name::FileName;
use crate::open::{self, Content, OpenedFile};
use crate::open_options::{OpenError, OpenOptions};

/// The kernel transfers at most this much in one read or write (`MAX_RW_COUNT` is slightly more).
const TRANSFER_MAX: usize = 1 << 30;

/// A file or block device.
#[derive(Debug)]
pub struct FileStore {
    fd: Fd,
    /// The present path.
    path: Mutex<Box<Path>>,
    tracking: Tracking,
    size: AtomicU64,
    /// The file ends here, and reads beyond that return zeroes.
    padded_from: Option<u64>,
    pub(crate) block_device: bool,
    alignment: u64,
    direct: bool,
    /// On tmpfs: requests never wait for a device.
    in_memory: bool,
    read_only: bool,
    made: bool,
    /// Held shared by aligned writes and exclusively by unaligned ones; `None` where all are
    /// aligned.
    unaligned: Option<BlockLock>,
    /// A second open file description of the same file. The kernel reports each writeback error
    /// once per description, so this one shows whether there was an error that another request has
    /// consumed.
    witness: Option<Fd>,
    /// A flush covers the writes of earlier processes, although this store is read-only.
    covers_earlier: AtomicBool,
    name: FileName,
}

impl FileStore {
    /// Opens a file; the notes are for the log.
    ///
    /// # Errors
    /// [`OpenError`], each with a remedy.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<(FileStore, Vec<String>), OpenError> {
        Ok(FileStore::of(open::open(path, options, Content::Disk)?, path, options))
    }

    fn of(opened: OpenedFile, path: &Path, options: &OpenOptions) -> (FileStore, Vec<String>) {
        let witness = if options.read_only { None } else { open::reopen(&opened.file) };
        let in_memory = open::is_in_memory(&opened.file);
        let store = FileStore {
            in_memory,
            witness: witness.map(fd_from),
            fd: fd_from(opened.file),
            path: Mutex::new(path.into()),
            tracking: Tracking::default(),
            size: AtomicU64::new(opened.size),
            padded_from: opened.padded_from,
            block_device: opened.block_device,
            alignment: u64::from(opened.alignment),
            direct: opened.direct,
            read_only: options.read_only,
            made: opened.made,
            unaligned: (u64::from(opened.alignment) > SECTOR).then(BlockLock::default),
            covers_earlier: AtomicBool::new(false),
            name: FileName::new(path, options.read_only || opened.block_device || in_memory),
        };
        (store, opened.notes)
    }

    /// Assumes sectors of `alignment` bytes (512 or 4096): for tests on machines with other
    /// devices.
    #[cfg(any(test, feature = "test-store"))]
    #[must_use]
    pub fn assume_alignment(mut self, alignment: u32) -> FileStore {
        self.alignment = u64::from(alignment);
        self.unaligned = (self.alignment > SECTOR).then(BlockLock::default);
        self
    }

    /// Whether opening created the file.
    pub fn was_made(&self) -> bool {
        self.made
    }

    /// From now on a flush covers the writes of earlier processes, also of a read-only file.
    pub(crate) fn cover_earlier_writes(&self) {
        self.covers_earlier.store(true, Ordering::Relaxed);
    }

    /// Makes its name stable; see [`FileName`].
    #[inline]
    pub(crate) async fn make_name_stable(&self, io: &Io) -> Result<(), BlockError> {
        if self.name.is_stable() {
            return Ok(());
        }
        // Boxed, because it would enlarge the future of every request.
        Box::pin(self.name.make_stable(io, &self.fd)).await
    }

    pub(crate) fn has_stable_name(&self) -> bool {
        self.name.is_stable()
    }

    pub(crate) fn note_renamed(&self, path: &Path) {
        *self.path.lock().unwrap_or_else(PoisonError::into_inner) = path.into();
    }

    pub(crate) fn doubt_name(&self) {
        self.name.doubt();
    }

    pub(crate) fn needs_fsync(&self) -> bool {
        self.name.needs_fsync()
    }

    /// As `fsync(2)`, on a helper thread.
    #[cold]
    async fn fsync(&self, io: &Io) -> std::io::Result<()> {
        io.offload_on(&self.fd, |fd| rustix::fs::fsync(&**fd).map_err(std::io::Error::from))
            .await?;
        self.name.note_fsync();
        Ok(())
    }

    /// The size after `order`, and the current size of the file or device.
    async fn new_and_current_size(
        &self,
        io: &Io,
        order: Resize,
    ) -> Result<(u64, u64), ResizeError> {
        let current = io.offload_on(&self.fd, |fd| rustix::fs::seek(fd, SeekFrom::End(0))).await;
        let current = current.map_err(std::io::Error::from)?;
        let to = order.to.unwrap_or(current);
        check_size_change(self.size(), to, self.alignment, order.shrink)?;
        if self.block_device && to != current {
            return Err(ResizeError::Device { size: current });
        }
        if to != current && self.read_only {
            return Err(ResizeError::Unsupported {
                why: "it is read-only",
                remedy: "resize the file elsewhere, such as with `truncate -s`, then resize the volume \
                         without a size",
            });
        }
        Ok((to, current))
    }

    pub(crate) async fn read_whole(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let length = buf.len();
        let fail = |source| self.failure(source, Operation::Read, offset, length as u64);
        let mut done = 0;
        // Zeroes and discards of a block device hold its inode's lock until the device has
        // completed them, and a buffered read waits for that lock: never on the worker's thread.
        let apart = self.block_device && !self.direct;
        if !self.direct && !apart {
            done = io.read_page_cache(&self.fd, &mut buf, 0..length, offset).unwrap_or(0);
        }
        while done < length {
            let range = done..length.min(done + TRANSFER_MAX);
            let at = offset + done as u64;
            let (result, returned) = match apart {
                true => io.read_at_apart(&self.fd, buf, range, at).await,
                false => io.read_at(&self.fd, buf, range, at).await,
            };
            buf = returned;
            match result {
                Ok(count) => match self.progress(count) {
                    0 if self.padded_from.is_some_and(|end| at + count as u64 >= end) => {
                        buf.iter_mut().skip(done + count).for_each(|byte| *byte = 0);
                        done = length;
                    }
                    0 => {
                        let short = ErrorKind::Short;
                        let error = BlockError::new(short, Operation::Read, offset, length as u64);
                        return (Err(error), buf);
                    }
                    count => done += count,
                },
                Err(error) if is_retry(&error) => {}
                Err(error) => return (Err(fail(error)), buf),
            }
        }
        (Ok(()), buf)
    }

    /// The error of a transfer. EINVAL of direct I/O: the device needs a larger alignment.
    fn failure(
        &self,
        source: std::io::Error,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> BlockError {
        let is_misaligned = self.direct && source.raw_os_error() == Some(libc::EINVAL);
        let mut error = BlockError::from_io(source, operation, offset, length);
        if is_misaligned {
            error.kind = ErrorKind::Misaligned;
        }
        error
    }

    /// How much of a short transfer counts: direct I/O must continue at an aligned offset.
    fn progress(&self, count: usize) -> usize {
        match usize::try_from(self.alignment) {
            Ok(alignment) if alignment > 1 => count - count % alignment,
            _ => count,
        }
    }

    async fn write_whole(&self, io: &Io, mut buf: Buf, offset: u64, fua: bool) -> BufResult {
        let length = buf.len();
        let fail = |source| self.failure(source, Operation::Write, offset, length as u64);
        let flags = WriteFlags { dsync: fua };
        let mut done = 0;
        while done < length {
            let range = done..length.min(done + TRANSFER_MAX);
            let at = offset + done as u64;
            let (result, returned) = io.write_at(&self.fd, buf, range, at, flags).await;
            buf = returned;
            match result {
                Ok(count) => match self.progress(count) {
                    0 => {
                        let short = ErrorKind::Short;
                        let error = BlockError::new(short, Operation::Write, offset, length as u64);
                        return (Err(error), buf);
                    }
                    count => done += count,
                },
                Err(error) if is_retry(&error) => {}
                Err(error) => return (Err(fail(error)), buf),
            }
        }
        (Ok(()), buf)
    }

    /// Keeps zeroes for part of a block from running during the read-modify-write of its other
    /// sectors, which would write back the old data.
    async fn lock_for_zeroes(&self, offset: u64, length: u64) -> Option<BlockGuard<'_>> {
        let lock = self.unaligned.as_ref()?;
        let whole = offset.is_multiple_of(self.alignment) && length.is_multiple_of(self.alignment);
        Some(match whole {
            true => BlockGuard::Shared { _guard: lock.read().await },
            false => BlockGuard::Alone { _guard: lock.write().await },
        })
    }
}

impl BlockStore for FileStore {
    fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: self.read_only,
            discard: !self.read_only,
            fast_zero: !self.read_only,
            alignment: u32::try_from(self.alignment).unwrap_or(u32::MAX),
            direct: self.direct,
            read_piece: (!self.direct).then_some(MEMORY_PIECE),
        }
    }

    fn identity(&self) -> Identity {
        let fd = self.fd.clone();
        // Not by a worker itself, which may not.
        threads::call(move || identity_of_file(&*fd))
            .unwrap_or_else(|error| Identity::of_key(format!("unknown: {error}, {:x}", nonce())))
    }

    fn place(&self) -> String {
        self.path.lock().unwrap_or_else(PoisonError::into_inner).display().to_string()
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        let device = match self.number().ok()? {
            FileNumber::File { device, .. } | FileNumber::Device(device) => device,
        };
        Some(DeviceIdentity::Disk(device))
    }

    #[inline]
    fn tracking(&self) -> Option<&Tracking> {
        Some(&self.tracking)
    }

    #[inline]
    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        unaligned::bounce_bytes(self.alignment, offset, length)
    }

    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        if unaligned::is_aligned(self.alignment, offset, buf.len()) {
            return self.read_whole(io, buf, offset).await;
        }
        // Boxed, because it would enlarge the future of every request.
        Box::pin(unaligned::read(self, io, buf, offset)).await
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let Some(lock) = &self.unaligned else {
            return self.write_whole(io, buf, offset, fua).await;
        };
        if unaligned::is_aligned(self.alignment, offset, buf.len()) {
            let _shared = lock.read().await;
            return self.write_whole(io, buf, offset, fua).await;
        }
        let _alone = lock.write().await;
        // Boxed, as in `read`.
        Box::pin(unaligned::write(self, io, buf, offset, fua)).await
    }

    fn takes_foreign(&self, offset: u64, vectors: &ForeignVectors) -> bool {
        self.transfers(offset, vectors)
    }

    async fn read_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        self.read_vectors(io, vectors, offset).await
    }

    async fn write_foreign(
        &self,
        io: &Io,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        self.write_vectors(io, vectors, offset).await
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        if self.read_only && !self.covers_earlier.load(Ordering::Relaxed) {
            return Ok(());
        }
        let flushed = match self.name.needs_fsync() {
            true => Box::pin(self.fsync(io)).await,
            false => io.fdatasync(&self.fd).await,
        };
        let result = match flushed {
            // A file system that cannot be written to, such as squashfs, has nothing to flush. One
            // that has become read-only after an error says EROFS.
            Err(error) if self.read_only && error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            result => result,
        };
        result.map_err(|e| BlockError::from_io(e, Operation::Flush, 0, self.size()))
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let result = if self.block_device {
            io.offload_on(&self.fd, move |fd| block_discard(fd, offset, length)).await
        } else {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            io.fallocate(&self.fd, mode, offset, length).await
        };
        match result.map_err(|e| BlockError::from_io(e, Operation::Discard, offset, length)) {
            // Discard is a hint: a store that cannot discard has completed it.
            Err(error) if error.kind == ErrorKind::Unsupported => Ok(()),
            other => other,
        }
    }

    /// By the kernel or the device: what remains is nothing or all.
    async fn zero_range(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        let punch = libc::FALLOC_FL_PUNCH_HOLE | keep;
        let zero = libc::FALLOC_FL_ZERO_RANGE | keep;
        // On a device the kernel may carry out ZERO_RANGE by writing, however long that takes.
        let modes: &[i32] = match (flags.may_unmap, self.block_device && flags.fast_only) {
            (true, true) => &[punch],
            (true, false) => &[punch, zero],
            (false, true) => &[],
            (false, false) => &[zero],
        };
        let order = self.lock_for_zeroes(offset, length).await;
        for mode in modes {
            match io.fallocate(&self.fd, *mode, offset, length).await {
                Ok(()) => return Ok(NONE_REMAINING),
                // EINVAL: a block device whose sectors are larger than the range's alignment.
                Err(error) if is_unsupported(&error) => {}
                Err(error) => {
                    return Err(BlockError::from_io(error, Operation::WriteZeroes, offset, length));
                }
            }
        }
        // Writing zeroes as data takes this lock itself.
        drop(order);
        if flags.fast_only {
            let kind = ErrorKind::Unsupported;
            return Err(BlockError::new(kind, Operation::WriteZeroes, offset, length));
        }
        Ok([offset..offset + length, 0..0])
    }

    /// Writes zeroes over whole blocks, without allocating memory.
    async fn zero_blocks(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let _shared = match &self.unaligned {
            Some(lock) => Some(lock.read().await),
            None => None,
        };
        let mut message = Box::<Gather>::default();
        message.push_zeroes(usize::try_from(length).unwrap_or(usize::MAX));
        while !message.is_empty() {
            let at = offset + length - message.remaining() as u64;
            let (result, returned) = io.write_message_at(&self.fd, message, at).await;
            message = returned;
            match result.map(|count| self.progress(count)) {
                Ok(0) => {
                    let (kind, operation) = (ErrorKind::Short, Operation::WriteZeroes);
                    return Err(BlockError::new(kind, operation, offset, length));
                }
                Ok(count) => message.advance(count),
                Err(error) if is_retry(&error) => {}
                Err(error) => {
                    return Err(BlockError::from_io(error, Operation::WriteZeroes, offset, length));
                }
            }
        }
        Ok(())
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        if self.block_device {
            // A device does not report its holes.
            return Ok(vec![Extent { offset, length, hole: false }]);
        }
        let walk = move |fd: &Fd| extents::walk(fd, offset, offset + length, limit);
        let result = io.offload_on(&self.fd, walk).await;
        result.map_err(|e| BlockError::from_io(e.into(), Operation::Extents, offset, length))
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        if self.direct {
            return Ok(());
        }
        let advise = move |fd: &Fd| {
            let length = std::num::NonZeroU64::new(length);
            rustix::fs::fadvise(fd, offset, length, rustix::fs::Advice::WillNeed)
        };
        let result = io.offload_on(&self.fd, advise).await;
        result.map_err(|e| BlockError::from_io(e.into(), Operation::Prefetch, offset, length))
    }

    /// True if no writeback of this file has failed since it was opened, or since the last call.
    async fn has_no_unreported_error(&self, io: &Io) -> bool {
        match &self.witness {
            Some(witness) => io.fdatasync(witness).await.is_ok(),
            None => false,
        }
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        self.new_and_current_size(io, order).await.map(|(to, _)| to)
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let (to, current) = self.new_and_current_size(io, order).await?;
        if to != current {
            let cut = io.offload_on(&self.fd, move |fd| rustix::fs::ftruncate(fd, to)).await;
            cut.map_err(std::io::Error::from)?;
        }
        self.size.store(to, Ordering::Relaxed);
        Ok(to)
    }

    fn release(&self) {
        self.unlock();
    }
}

impl Blocks for FileStore {
    fn block(&self) -> u64 {
        self.alignment
    }

    fn read_blocks(&self, io: &Io, buf: Buf, offset: u64) -> impl Future<Output = BufResult> {
        self.read_whole(io, buf, offset)
    }

    fn write_blocks(
        &self,
        io: &Io,
        buf: Buf,
        offset: u64,
        fua: bool,
    ) -> impl Future<Output = BufResult> {
        self.write_whole(io, buf, offset, fua)
    }
}

/// The lock that an operation holds where blocks are larger than sectors.
enum BlockGuard<'a> {
    Shared { _guard: RwLockReadGuard<'a, ()> },
    Alone { _guard: RwLockWriteGuard<'a, ()> },
}

fn is_retry(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
}

fn is_unsupported(error: &std::io::Error) -> bool {
    let number = error.raw_os_error();
    matches!(number, Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::EINVAL))
}

fn block_discard(fd: &Fd, offset: u64, length: u64) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    /// `BLKDISCARD` of `linux/fs.h`: `_IO(0x12, 119)`.
    const BLKDISCARD: libc::c_ulong = 0x1277;
    // The device discards whole sectors; partial ones at the ends stay.
    let sector = u64::from(rustix::fs::ioctl_blksszget(fd)?);
    let (start, end) = (offset.next_multiple_of(sector), (offset + length) / sector * sector);
    if start >= end {
        return Ok(());
    }
    let range = [start, end - start];
    // SAFETY: the request reads two 64-bit numbers from the pointer, which outlives the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests;
