//! [`RbdStore`]: an image as a store.

use std::ffi::CString;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ebb_block::{
    BlockError, BlockStore, BufResult, Capabilities, DeviceIdentity, ErrorKind, Extent, Identity,
    NONE_REMAINING, Operation, Remaining, Resize, ResizeError, SECTOR, Tracking, ZeroFlags,
    check_size_change, push_extent,
};
use ebb_io::{Budget, BudgetGuard, Buf, Fd, Io, clock};

use crate::completions::{CompletionQueue, RequestEnd, RequestInFlight};
use crate::handles::{ImageHandle, RbdRequest};
use crate::left::REQUEST_COST;
use crate::lock_check::LockCheck;
use crate::open::{self, OpenRbdImage};
use crate::options::{RbdCall, RbdError, RbdOptions};
use crate::state::{REMOVED, RbdShared, RbdState, WaitEnd};

/// The longest range of one discard or of one request for zeroes.
const RANGE_MAX: u64 = 1 << 30;
/// The most objects whose allocation is asked for in one call: where the image has a map of them, and where each has to be
/// asked for.
const MAPPED_OBJECTS: u64 = 1 << 16;
const ASKED_OBJECTS: u64 = 256;
/// How often a call on another thread is checked for the end of the store.
const CHECK: Duration = Duration::from_millis(100);
/// The most objects that one discard or request for zeroes changes: each is a request of its own to an OSD.
const RANGE_OBJECTS: u64 = 256;
/// How often a call that waits for its place is tried again, and an image that is in use elsewhere is closed.
const RETRY: Duration = Duration::from_millis(20);

/// An image of a Ceph cluster.
pub struct RbdStore {
    options: RbdOptions,
    /// `None` only while it is dropped.
    open: Option<Arc<OpenRbdImage>>,
    size: AtomicU64,
    shared: Arc<RbdShared>,
    /// Calls that block are counted by it.
    calls: Fd,
    released: AtomicBool,
    tracking: Tracking,
}

impl std::fmt::Debug for RbdStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RbdStore").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Drop for RbdStore {
    /// The image is closed on a thread of its own, which blocks for as long as the cluster does not answer; of a fenced
    /// client perhaps for ever. If no thread can be started, the image stays open.
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.shared.figures().close();
        // An image that is offline has no lock any more.
        let offline = self.shared.is_offline();
        if let (true, Some(record)) = (offline, &open.record) {
            record.unlock();
        }
        let closing = (!offline).then(|| open::ClosingImage::begin(&open.key));
        // Passed through a channel, so that no reference is left here: the last one closes the image.
        let (sender, receiver) = mpsc::sync_channel(1);
        let builder = std::thread::Builder::new().name("rbd-close".to_owned());
        let started = builder.spawn(move || {
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
        std::thread::sleep(RETRY);
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
            open.cluster.client.watched.add(&shared).map_err(RbdError::Thread)?;
        }
        let store = RbdStore {
            size: AtomicU64::new(open.size),
            shared,
            options,
            open: Some(Arc::new(open)),
            calls: ebb_io::fd_from(calls),
            released: AtomicBool::new(false),
            tracking: Tracking::default(),
        };
        Ok((store, notes))
    }

    /// The state of the image.
    pub fn state(&self) -> RbdState {
        self.shared.state()
    }

    /// True once after the image has changed: its size may be another one, see [`BlockStore::resize`].
    pub fn take_changed(&self) -> bool {
        // The size of a snapshot stays, and its reads look at this.
        if self.options.snapshot.is_some() {
            return false;
        }
        self.open.as_ref().is_some_and(|open| open.changed.swap(false, Ordering::AcqRel))
    }

    fn is_written(&self) -> bool {
        self.options.is_written()
    }

    fn object_size(&self) -> u64 {
        self.open.as_ref().map_or(SECTOR, |open| open.object_size.max(SECTOR))
    }

    /// The longest range of one discard or of one request for zeroes.
    fn range_most(&self) -> u64 {
        self.object_size().saturating_mul(RANGE_OBJECTS).min(RANGE_MAX)
    }

    /// Whether the image has changed since it was last found to have the snapshot.
    fn snapshot_may_be_gone(&self) -> bool {
        let changed = self.open.as_ref().is_some_and(|open| open.changed.load(Ordering::Acquire));
        changed && self.options.snapshot.is_some()
    }

    /// Takes the store offline if its snapshot was removed: librbd would read what the image has now.
    #[cold]
    async fn check_snapshot(&self, io: &Io) -> Result<(), CallEnd> {
        let Some(open) = &self.open else { return Ok(()) };
        let Ok(name) = CString::new(self.options.snapshot.clone().unwrap_or_default()) else {
            return Ok(());
        };
        open.changed.store(false, Ordering::Release);
        let found = self.call(io, move |image| image.snapshot_id(&name)).await.map(drop);
        match &found {
            Ok(()) => {}
            Err(CallEnd::Failed(call)) if call.code() == libc::ENOENT => {
                self.shared.go_offline(REMOVED);
            }
            // It is asked again.
            Err(_) => open.changed.store(true, Ordering::Release),
        }
        found
    }

    /// Why no request may be sent.
    fn refusal(&self, operation: Operation, offset: u64, length: u64) -> Option<BlockError> {
        if self.shared.is_aborted() {
            return Some(self.left_error(WaitEnd::Aborted, operation, offset, length));
        }
        let offline = self.shared.is_offline();
        offline.then(|| self.left_error(WaitEnd::Offline, operation, offset, length))
    }

    /// The error of a request that librbd still has, or that it did not get.
    #[cold]
    fn left_error(
        &self,
        end: WaitEnd,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> BlockError {
        let image = self.shared.image();
        let (kind, source) = match end {
            WaitEnd::Aborted => {
                let what = format!("aborted before the cluster of {image} answered");
                (ErrorKind::Closing, io::Error::new(io::ErrorKind::Interrupted, what))
            }
            WaitEnd::Offline => {
                let why = self.shared.offline_reason();
                (ErrorKind::Offline, io::Error::other(format!("{image} is offline: {why}")))
            }
            WaitEnd::Late => {
                let seconds = self.shared.timeout().as_secs();
                let what = format!("no answer from the cluster of {image} within {seconds} s");
                self.shared.figures().failed(what.clone());
                (ErrorKind::Io, io::Error::new(io::ErrorKind::TimedOut, what))
            }
        };
        BlockError::new(kind, operation, offset, length).caused_by(Some(source))
    }

    /// The error of a request that librbd has completed or refused with `result`.
    #[cold]
    fn error(&self, result: i32, operation: Operation, offset: u64, length: u64) -> BlockError {
        if let Some(open) = self.open.as_ref().filter(|_| self.shared.is_offline()) {
            // Images that are opened later get another handle.
            open.cluster.client.retire();
        }
        if let Some(refusal) = self.refusal(operation, offset, length) {
            return refusal;
        }
        let code = result.saturating_neg();
        let source = io::Error::from_raw_os_error(code);
        if code == libc::EINVAL {
            // librbd refuses a range beyond its end: the image was made smaller.
            let short = BlockError::new(ErrorKind::Short, operation, offset, length);
            return short.caused_by(Some(source));
        }
        BlockError::from_io(source, operation, offset, length)
    }

    /// Waits for the turn of a request that costs `cost` of the image's window, and submits it.
    async fn submit(
        &self,
        io: &Io,
        (request, cost): (RbdRequest, usize),
        buf: Option<Buf>,
    ) -> Result<RequestInFlight, (NotSubmitted, Option<Buf>)> {
        let queue = match CompletionQueue::of_worker(io) {
            Ok(queue) => queue,
            Err(error) => {
                let code = -error.raw_os_error().unwrap_or(libc::EIO);
                return Err((NotSubmitted::Failed(code), buf));
            }
        };
        let window = queue.window(&self.shared);
        let part = match window.try_take(cost) {
            Some(part) => part,
            None => match Box::pin(self.turn(io, &window, cost)).await {
                Ok(part) => part,
                Err(end) => return Err((NotSubmitted::Left(end), buf)),
            },
        };
        let Some(open) = &self.open else {
            return Err((NotSubmitted::Failed(-libc::ESHUTDOWN), buf));
        };
        let submitted = queue.submit(io, (&open.image, &self.shared), (request, part), buf);
        submitted.map_err(|(code, buf)| (NotSubmitted::Failed(code), buf))
    }

    #[cold]
    async fn turn(
        &self,
        io: &Io,
        window: &Rc<Budget>,
        cost: usize,
    ) -> Result<BudgetGuard, WaitEnd> {
        let begun: Instant = clock::now();
        let mut taking = std::pin::pin!(window.take(cost));
        loop {
            if let Some(part) = io.timeout(CHECK, taking.as_mut()).await {
                return Ok(part);
            }
            if let Some(end) = self.shared.end_of(begun) {
                return Err(end);
            }
        }
    }

    /// A request with a buffer.
    async fn transfer(
        &self,
        io: &Io,
        request: RbdRequest,
        buf: Buf,
        (operation, offset): (Operation, u64),
    ) -> BufResult {
        let (bytes, length) = (buf.len(), buf.len() as u64);
        if let Some(refusal) = self.refusal(operation, offset, length) {
            return (Err(refusal), buf);
        }
        if self.snapshot_may_be_gone()
            && let Err(end) = Box::pin(self.check_snapshot(io)).await
        {
            let error = match end {
                CallEnd::Left(end) => self.left_error(end, operation, offset, length),
                CallEnd::Failed(call) => self.error(-call.code(), operation, offset, length),
            };
            return (Err(error), buf);
        }
        let cost = bytes.max(REQUEST_COST);
        let (result, buf) = match self.submit(io, (request, cost), Some(buf)).await {
            Err((NotSubmitted::Failed(code), buf)) => (isize::try_from(code).unwrap_or(-1), buf),
            Err((NotSubmitted::Left(end), Some(buf))) => {
                return (Err(self.left_error(end, operation, offset, length)), buf);
            }
            Err((NotSubmitted::Left(_), None)) => (isize::try_from(-libc::EIO).unwrap_or(-1), None),
            Ok(mut request) => match (&mut request).await {
                RequestEnd::Completed(result, buf) => (result, buf),
                RequestEnd::Left(end) => {
                    // librbd has the buffer until it answers.
                    let error = self.left_error(end, operation, offset, length);
                    let mut buf = io.pool().take(bytes).await;
                    request.copy_to(&mut buf);
                    return (Err(error), buf);
                }
            },
        };
        let buf = match buf {
            Some(buf) => buf,
            None => io.pool().take(bytes).await,
        };
        if let Some(code) = failure(result) {
            return (Err(self.error(code, operation, offset, length)), buf);
        }
        let whole = operation != Operation::Read || usize::try_from(result) == Ok(bytes);
        if whole {
            return (Ok(()), buf);
        }
        (Err(BlockError::new(ErrorKind::Short, operation, offset, length)), buf)
    }

    /// A request without a buffer.
    async fn order(
        &self,
        io: &Io,
        request: RbdRequest,
        (operation, offset, length): (Operation, u64, u64),
    ) -> Result<(), BlockError> {
        if let Some(refusal) = self.refusal(operation, offset, length) {
            return Err(refusal);
        }
        let objects = match operation {
            Operation::Flush | Operation::Write => 1,
            _ => length.div_ceil(self.object_size()).clamp(1, RANGE_OBJECTS),
        };
        let cost = usize::try_from(objects).unwrap_or(1) * REQUEST_COST;
        let result = match self.submit(io, (request, cost), None).await {
            Err((NotSubmitted::Failed(code), _)) => isize::try_from(code).unwrap_or(-1),
            Err((NotSubmitted::Left(end), _)) => {
                return Err(self.left_error(end, operation, offset, length));
            }
            Ok(request) => match request.await {
                RequestEnd::Completed(result, _) => result,
                RequestEnd::Left(end) => {
                    return Err(self.left_error(end, operation, offset, length));
                }
            },
        };
        match failure(result) {
            Some(code) => Err(self.error(code, operation, offset, length)),
            None => Ok(()),
        }
    }

    /// Runs a call that blocks on a helper thread, until the store is aborted or the time has passed.
    async fn call<T: Send + 'static>(
        &self,
        io: &Io,
        call: impl FnOnce(&ImageHandle) -> Result<T, RbdCall> + Send + 'static,
    ) -> Result<T, CallEnd> {
        // Not a reference that would close the image on the worker's thread if it is the last one.
        let image = self.open.as_ref().map(|open| Arc::downgrade(&open.image)).unwrap_or_default();
        let call = move || match image.upgrade() {
            Some(image) => call(&image),
            None => Err(RbdCall::failed("rbd_close", libc::ESHUTDOWN)),
        };
        let begun: Instant = clock::now();
        let place = loop {
            match self.shared.take_call_place() {
                Some(place) => break place,
                None => io.sleep(RETRY).await,
            }
            if let Some(end) = self.shared.end_of(begun) {
                return Err(CallEnd::Left(end));
            }
        };
        let call = move || {
            let result = call();
            drop(place);
            result
        };
        let mut running = Box::pin(io.offload_on(&self.calls, move |_| call()));
        loop {
            if let Some(result) = io.timeout(CHECK, running.as_mut()).await {
                return result.map_err(CallEnd::Failed);
            }
            if let Some(end) = self.shared.end_of(begun) {
                return Err(CallEnd::Left(end));
            }
        }
    }

    /// The size of the image in the cluster.
    async fn size_in_cluster(&self, io: &Io) -> Result<u64, ResizeError> {
        self.call(io, ImageHandle::size).await.map_err(|end| self.resize_error(end))
    }

    fn resize_error(&self, end: CallEnd) -> ResizeError {
        match end {
            CallEnd::Failed(call) => ResizeError::Remote(Box::new(call)),
            CallEnd::Left(WaitEnd::Aborted) => ResizeError::Unsupported("it is being closed"),
            CallEnd::Left(WaitEnd::Offline) => ResizeError::Unsupported("the image is offline"),
            CallEnd::Left(WaitEnd::Late) => {
                let seconds = self.shared.timeout().as_secs();
                ResizeError::Remote(Box::new(RbdError::Silent {
                    image: self.shared.image().to_owned(),
                    seconds,
                }))
            }
        }
    }
}

/// Why a request was not given to librbd: an error number, negative, or it was not waited for any longer.
enum NotSubmitted {
    Failed(i32),
    Left(WaitEnd),
}

/// How a call on a helper thread ended without a value.
enum CallEnd {
    Failed(RbdCall),
    Left(WaitEnd),
}

/// The error number of a result, negative, if it is one.
fn failure(result: isize) -> Option<i32> {
    (result < 0).then(|| i32::try_from(result).unwrap_or(-libc::EIO))
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
        let key = self.open.as_ref().map(|open| open.key.clone()).unwrap_or_default();
        Identity { key, place: self.place() }
    }

    fn place(&self) -> String {
        format!("rbd:{}", self.shared.image())
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        let fsid = &self.open.as_ref()?.cluster.fsid;
        Some(DeviceIdentity::Server(format!("ceph {fsid} pool {}", self.options.pool)))
    }

    #[inline]
    fn tracking(&self) -> Option<&Tracking> {
        Some(&self.tracking)
    }

    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        self.transfer(io, RbdRequest::Read(offset), buf, (Operation::Read, offset)).await
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let what = (Operation::Write, offset);
        let (mut result, buf) = self.transfer(io, RbdRequest::Write(offset), buf, what).await;
        if fua && result.is_ok() {
            // Without librbd's cache it has nothing to wait for. The image itself may turn one on.
            let what = (Operation::Write, offset, buf.len() as u64);
            result = self.order(io, RbdRequest::Flush, what).await;
        }
        (result, buf)
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        if !self.is_written() {
            return Ok(());
        }
        self.order(io, RbdRequest::Flush, (Operation::Flush, 0, self.size())).await
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let piece = (end - at).min(self.range_most());
            let what = (Operation::Discard, at, piece);
            self.order(io, RbdRequest::Discard(at, piece), what).await?;
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
            self.order(io, RbdRequest::Zeroes(at, piece, !flags.may_unmap), what).await?;
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
        let refusal = self.refusal(Operation::Extents, offset, length);
        let (Some(open), None) = (&self.open, &refusal) else {
            return match refusal {
                Some(refusal) => Err(refusal),
                None => Ok(vec![Extent { offset, length, hole: false }]),
            };
        };
        // See the crate's limits.
        if length == 0 || self.options.encryption.is_some() {
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
        let (end, data) = match self.call(io, asked).await {
            Ok(found) => found,
            Err(CallEnd::Left(end)) => {
                return Err(self.left_error(end, Operation::Extents, offset, length));
            }
            Err(CallEnd::Failed(call)) => {
                let code = call.code().saturating_neg();
                self.shared.note_result(isize::try_from(code).unwrap_or(-1));
                return Err(self.error(code, Operation::Extents, offset, length));
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
            let header = self.open.as_ref().map_or(0, |open| open.header);
            let resized = self.call(io, move |image| {
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
        self.shared.abort();
    }

    /// By another thread, which an opening of the same image waits for, and the end of the process.
    fn release(&self) {
        let first = !self.released.swap(true, Ordering::AcqRel);
        let Some(open) = self.open.clone().filter(|_| first && self.is_written()) else { return };
        // It may have the last reference. One that is offline may never end, and is not waited for.
        let closing = (!self.shared.is_offline()).then(|| open::ClosingImage::begin(&open.key));
        let builder = std::thread::Builder::new().name("rbd-release".to_owned());
        // Without a thread the lock is released when the store is dropped.
        let _ = builder.spawn(move || {
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
