//! [`RbdStore`]: an image as a store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use ebb_advice::Advised;
use ebb_block::{
    BlockError, BlockStore, BufResult, Capabilities, DeviceIdentity, ErrorKind, Extent, Identity,
    NONE_REMAINING, Operation, Remaining, Resize, ResizeError, SECTOR, Tracking, ZeroFlags,
    check_size_change, push_extent,
};
use ebb_io::{Buf, Io};
use ebb_sandbox::threads;

use crate::handles::{ImageHandle, RbdRequest};
use crate::lock_check::LockCheck;
use crate::open::{self, OpenRbdImage};
use crate::options::{RbdError, RbdOptions};
use crate::requests::{CallEnd, ImageRequests, RANGE_OBJECTS};
use crate::state::{RbdShared, RbdState, WaitEnd};

/// The longest range of one discard or of one request for zeroes.
const RANGE_MAX: u64 = 1 << 30;
/// How often it is checked whether an image that is to be closed is still used by a call.
const IN_USE: Duration = Duration::from_millis(20);
/// The most objects whose allocation is asked for in one call: where the image has a map of them, and where each has to be
/// asked for.
const MAPPED_OBJECTS: u64 = 1 << 16;
const ASKED_OBJECTS: u64 = 256;
/// An image of a Ceph cluster.
pub struct RbdStore {
    requests: ImageRequests,
    size: AtomicU64,
    released: AtomicBool,
    tracking: Tracking,
}

impl std::fmt::Debug for RbdStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RbdStore").field("options", &self.requests.options).finish_non_exhaustive()
    }
}

impl Drop for RbdStore {
    /// The image is closed on a thread of its own, which blocks for as long as the cluster does not answer; of a fenced
    /// client perhaps for ever. If no thread can be started, the image stays open.
    fn drop(&mut self) {
        let Some(open) = self.requests.open.take() else { return };
        self.requests.shared.figures().close();
        // An image that is offline has no lock any more.
        let offline = self.requests.shared.is_offline();
        if let (true, Some(record)) = (offline, &open.record) {
            record.unlock();
        }
        let closing = (!offline).then(|| open::ClosingImage::begin(&open.key));
        // Passed through a channel, so that no reference is left here: the last one closes the image.
        let (sender, receiver) = mpsc::sync_channel(1);
        let builder = std::thread::Builder::new().name("rbd-close".to_owned());
        let started = threads::spawn(builder, move || {
            if let Ok(open) = receiver.recv() {
                close(open);
            }
            drop(closing);
        });
        match started {
            Ok(_) => {
                if let Err(mpsc::SendError(open)) = sender.send(open) {
                    std::mem::forget(open);
                }
            }
            Err(_) => std::mem::forget(open),
        }
    }
}

/// Closes an image if this is the last reference to it, and then gives its record back. Waits for calls on the image.
fn close(open: Arc<OpenRbdImage>) {
    let Some(open) = Arc::into_inner(open) else { return };
    let OpenRbdImage { mut image, record, cluster, .. } = open;
    let image = loop {
        match Arc::try_unwrap(image) {
            Ok(alone) => break alone,
            Err(used) => image = used,
        }
        std::thread::sleep(IN_USE);
    };
    drop(image);
    drop(cluster);
    drop(record);
}

impl RbdStore {
    /// Opens an image, and takes its lock unless it is read-only; blocks for at most half a minute. Returns notes for the
    /// operator.
    ///
    /// # Errors
    /// [`RbdError`], each with a remedy.
    pub fn open(options: RbdOptions) -> Result<(RbdStore, Vec<String>), RbdError> {
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let calls = rustix::event::eventfd(0, flags).map_err(|e| RbdError::Thread(e.into()))?;
        let mut open = open::open(&options)?;
        let notes = std::mem::take(&mut open.notes);
        let (spec, written) = (options.image_spec(), options.is_written());
        let shared = Arc::new(RbdShared::new(open.figures.clone(), spec, written, options.timeout));
        if written {
            shared.guard(LockCheck::new(&open.image, &open.cluster.client));
            let watched = Arc::downgrade(&shared);
            open.cluster.client.watched.add(watched).map_err(RbdError::Thread)?;
        }
        let store = RbdStore {
            size: AtomicU64::new(open.size),
            requests: ImageRequests {
                shared,
                options,
                open: Some(Arc::new(open)),
                calls: ebb_io::fd_from(calls),
                snapshot_checks: AtomicUsize::new(0),
            },
            released: AtomicBool::new(false),
            tracking: Tracking::default(),
        };
        Ok((store, notes))
    }

    /// The state of the image.
    pub fn state(&self) -> RbdState {
        self.requests.shared.state()
    }

    /// True once after the image has changed: its size may be another one, see [`BlockStore::resize`].
    pub fn take_changed(&self) -> bool {
        // The size of a snapshot stays, and its reads look at this.
        if self.requests.options.snapshot.is_some() {
            return false;
        }
        self.requests.open.as_ref().is_some_and(|open| open.changed.swap(false, Ordering::AcqRel))
    }

    fn is_written(&self) -> bool {
        self.requests.options.is_written()
    }

    /// The longest range of one discard or of one request for zeroes.
    fn range_most(&self) -> u64 {
        self.requests.object_size().saturating_mul(RANGE_OBJECTS).min(RANGE_MAX)
    }

    /// The size of the image in the cluster.
    async fn size_in_cluster(&self, io: &Io) -> Result<u64, ResizeError> {
        self.requests.call(io, ImageHandle::size).await.map_err(|end| self.resize_error(end))
    }

    fn resize_error(&self, end: CallEnd) -> ResizeError {
        match end {
            CallEnd::Failed(call) => ResizeError::Remote(Box::new(call)),
            CallEnd::Left(WaitEnd::Aborted) => ResizeError::Unsupported {
                why: "it is being closed",
                remedy: "try again when it is served",
            },
            CallEnd::Left(WaitEnd::Offline) => ResizeError::Unsupported {
                why: "the image is offline",
                remedy: "remove the volume, and add it again",
            },
            CallEnd::Left(WaitEnd::Late) => {
                let seconds = self.requests.shared.timeout().as_secs();
                let image = self.requests.shared.image().to_owned();
                ResizeError::Remote(Box::new(Advised(RbdError::Silent { image, seconds })))
            }
        }
    }
}

impl BlockStore for RbdStore {
    fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: !self.is_written(),
            discard: true,
            fast_zero: true,
            alignment: 1,
            direct: false,
            read_piece: None,
        }
    }

    /// The numbers of its cluster, pool and image: another name of the image is the same.
    fn identity(&self) -> Identity {
        let key = self.requests.open.as_ref().map(|open| open.key.clone()).unwrap_or_default();
        Identity { key, place: self.place() }
    }

    fn place(&self) -> String {
        format!("rbd:{}", self.requests.shared.image())
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        let fsid = &self.requests.open.as_ref()?.cluster.fsid;
        Some(DeviceIdentity::Server(format!("ceph {fsid} pool {}", self.requests.options.pool)))
    }

    #[inline]
    fn tracking(&self) -> Option<&Tracking> {
        Some(&self.tracking)
    }

    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        self.requests.transfer(io, RbdRequest::Read(offset), buf, (Operation::Read, offset)).await
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let what = (Operation::Write, offset);
        let (mut result, buf) =
            self.requests.transfer(io, RbdRequest::Write(offset), buf, what).await;
        if fua && result.is_ok() {
            // Without librbd's cache it has nothing to wait for. The image itself may turn one on.
            let what = (Operation::Flush, offset, buf.len() as u64);
            result = self.requests.order(io, RbdRequest::Flush, what).await;
        }
        (result, buf)
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        if !self.is_written() {
            return Ok(());
        }
        self.requests.order(io, RbdRequest::Flush, (Operation::Flush, 0, self.size())).await
    }

    fn has_fua_by_flush(&self) -> bool {
        true
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let piece = (end - at).min(self.range_most());
            let what = (Operation::Discard, at, piece);
            self.requests.order(io, RbdRequest::Discard(at, piece), what).await?;
            at += piece;
        }
        Ok(())
    }

    /// All of it by the OSDs. Where the space has to stay allocated, they write zeroes, which is not fast.
    async fn zero_range(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        if flags.fast_only && !flags.may_unmap {
            let kind = ErrorKind::Unsupported;
            return Err(BlockError::new(kind, Operation::WriteZeroes, offset, length));
        }
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let piece = (end - at).min(self.range_most());
            let what = (Operation::WriteZeroes, at, piece);
            self.requests.order(io, RbdRequest::Zeroes(at, piece, !flags.may_unmap), what).await?;
            at += piece;
        }
        Ok(NONE_REMAINING)
    }

    /// By whole objects, as `rbd diff --whole-object` lists them.
    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let refusal = self.requests.refusal(Operation::Extents, offset, length);
        let (Some(open), None) = (&self.requests.open, &refusal) else {
            return match refusal {
                Some(refusal) => Err(refusal),
                None => Ok(vec![Extent { offset, length, hole: false }]),
            };
        };
        // See the crate's limits.
        if length == 0 || self.requests.options.encryption.is_some() {
            return Ok(vec![Extent { offset, length, hole: false }]);
        }
        let object = open.object_size;
        // librbd before 16 is wrong for ranges that do not begin with an object.
        let start = offset - offset % object;
        let fast_diff = open.fast_diff;
        let asked = move |image: &ImageHandle| {
            // A map that is marked as invalid is not used by librbd.
            let objects = match fast_diff && image.flags()? == 0 {
                true => MAPPED_OBJECTS,
                false => ASKED_OBJECTS,
            };
            let end = (offset + length).min(start.saturating_add(object.saturating_mul(objects)));
            Ok((end, image.data(start, end - start)?))
        };
        let (end, data) = match self.requests.call(io, asked).await {
            Ok(found) => found,
            Err(CallEnd::Left(end)) => {
                return Err(self.requests.left_error(end, Operation::Extents, offset, length));
            }
            Err(CallEnd::Failed(call)) => {
                let code = call.code().saturating_neg();
                self.requests.shared.note_result(isize::try_from(code).unwrap_or(-1));
                return Err(self.requests.error(code, Operation::Extents, offset, length));
            }
        };
        let Some(data) = data else {
            return Ok(vec![Extent { offset, length: end - offset, hole: false }]);
        };
        Ok(list_extents(&data, offset, end, limit))
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let size = self.size_in_cluster(io).await?;
        let to = order.to.unwrap_or(size);
        check_size_change(self.size(), to, SECTOR, order.shrink)?;
        match to == size || self.is_written() {
            true => Ok(to),
            false => Err(ResizeError::Server { size }),
        }
    }

    /// Resizes the image, or uses the size that it has got.
    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let to = self.check_resize(io, order).await?;
        if to != self.size_in_cluster(io).await? {
            let header = self.requests.open.as_ref().map_or(0, |open| open.header);
            let resized = self.requests.call(io, move |image| {
                image.resize(to, header)?;
                image.size()
            });
            let resized = resized.await.map_err(|end| self.resize_error(end))?;
            if resized != to {
                return Err(ResizeError::Server { size: resized });
            }
        }
        self.size.store(to, Ordering::SeqCst);
        Ok(to)
    }

    /// Requests in flight stay with librbd, which carries them out when the cluster answers. Until then it has the lock
    /// of the image.
    fn abort(&self) {
        self.requests.shared.abort();
    }

    /// By another thread, which an opening of the same image waits for, and the end of the process.
    fn release(&self) {
        let first = !self.released.swap(true, Ordering::AcqRel);
        let Some(open) = self.requests.open.clone().filter(|_| first && self.is_written()) else {
            return;
        };
        // It may have the last reference. One that is offline may never end, and is not waited for.
        let closing =
            (!self.requests.shared.is_offline()).then(|| open::ClosingImage::begin(&open.key));
        let builder = std::thread::Builder::new().name("rbd-release".to_owned());
        // Without a thread the lock is released when the store is dropped.
        let _ = threads::spawn(builder, move || {
            let released = open.image.release_lock();
            if let (Ok(()), Some(record)) = (released, &open.record) {
                record.unlock();
            }
            close(open);
            drop(closing);
        });
    }
}

/// The runs of data and holes from `offset` to `end`, from a sorted list of ranges with data.
fn list_extents(data: &[(u64, u64)], offset: u64, end: u64, limit: usize) -> Vec<Extent> {
    let mut list = Vec::new();
    let mut at = offset;
    for (from, bytes) in data {
        let (from, to) = ((*from).clamp(at, end), from.saturating_add(*bytes).min(end));
        if to <= from {
            continue;
        }
        if at < from {
            push_extent(&mut list, Extent { offset: at, length: from - at, hole: true });
        }
        push_extent(&mut list, Extent { offset: from, length: to - from, hole: false });
        at = to;
        if list.len() > limit {
            break;
        }
    }
    if at < end && list.len() <= limit {
        push_extent(&mut list, Extent { offset: at, length: end - at, hole: true });
    }
    list.truncate(limit);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(data: &[(u64, u64)], offset: u64, end: u64, limit: usize) -> Vec<(u64, u64, bool)> {
        let list = list_extents(data, offset, end, limit);
        list.into_iter().map(|extent| (extent.offset, extent.length, extent.hole)).collect()
    }

    #[test]
    fn extents_cover_the_range_without_gaps() {
        assert_eq!(listed(&[], 10, 20, 9), [(10, 10, true)]);
        assert_eq!(listed(&[(0, 40)], 10, 20, 9), [(10, 10, false)]);
        let data = [(0, 12), (14, 2), (16, 1), (15, 4), (30, 9)];
        let expected = [(10, 2, false), (12, 2, true), (14, 5, false), (19, 1, true)];
        assert_eq!(listed(&data, 10, 20, 9), expected);
        assert_eq!(listed(&data, 10, 20, 2), expected[..2]);
        // What a broken library says is clipped.
        assert_eq!(listed(&[(u64::MAX, u64::MAX), (5, u64::MAX)], 10, 20, 9), [(10, 10, false)]);
    }
}
