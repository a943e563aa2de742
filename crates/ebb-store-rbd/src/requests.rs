//! How a request gets to librbd, and how it ends: its turn, its time, its result; and calls that block.
//!
//! # Invariants
//! - A request waits for three things, each with the time limit of the image, an abort and a lost lock: its turn in the
//!   image's window (`left.rs`), librbd (`completions.rs`), and, if the snapshot may be gone, a call (`handles.rs`).
//! - Nothing is sent for an image that is offline or aborted.

use std::ffi::CString;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ebb_block::{BlockError, BufResult, ErrorKind, Operation, SECTOR};
use ebb_io::{Budget, BudgetGuard, Buf, Fd, Io, clock};

use crate::completions::{CompletionQueue, RequestEnd, RequestInFlight};
use crate::handles::{ImageHandle, RbdRequest};
use crate::left::REQUEST_COST;
use crate::open::OpenRbdImage;
use crate::options::{RbdCall, RbdOptions};
use crate::state::{REMOVED, RbdShared, WaitEnd};

/// The most objects that one discard or request for zeroes changes: each is a request of its own to an OSD.
pub(crate) const RANGE_OBJECTS: u64 = 256;
/// How often a call that waits for its place is tried again.
const RETRY: Duration = Duration::from_millis(20);
/// How often a call on another thread is checked for the end of the store.
const CHECK: Duration = Duration::from_millis(100);

/// Why a request was not given to librbd: an error number, negative, or it was not waited for any longer.
enum NotSubmitted {
    Failed(i32),
    Left(WaitEnd),
}

/// How a call on a helper thread ended without a value.
pub(crate) enum CallEnd {
    Failed(RbdCall),
    Left(WaitEnd),
}

/// The error number of a result, negative, if it is one.
fn failure(result: isize) -> Option<i32> {
    (result < 0).then(|| i32::try_from(result).unwrap_or(-libc::EIO))
}

/// An open image, and what its requests have in common.
pub(crate) struct ImageRequests {
    pub(crate) options: RbdOptions,
    /// `None` only while the store is dropped.
    pub(crate) open: Option<Arc<OpenRbdImage>>,
    pub(crate) shared: Arc<RbdShared>,
    /// Calls that block are counted by it.
    pub(crate) calls: Fd,
    /// Checks of the snapshot that have not ended: until then other reads check it, too.
    pub(crate) snapshot_checks: AtomicUsize,
}

/// A check of the snapshot. Dropped before it has succeeded, also with its request, it leaves the snapshot to be checked.
struct SnapshotCheck<'a> {
    requests: &'a ImageRequests,
    open: &'a OpenRbdImage,
    succeeded: bool,
}

impl Drop for SnapshotCheck<'_> {
    fn drop(&mut self) {
        if !self.succeeded {
            self.open.changed.store(true, Ordering::Release);
        }
        self.requests.snapshot_checks.fetch_sub(1, Ordering::AcqRel);
    }
}

impl ImageRequests {
    pub(crate) fn object_size(&self) -> u64 {
        self.open.as_ref().map_or(SECTOR, |open| open.object_size.max(SECTOR))
    }

    /// Whether the image has changed since it was last found to have the snapshot.
    fn snapshot_may_be_gone(&self) -> bool {
        if self.options.snapshot.is_none() {
            return false;
        }
        let changed = self.open.as_ref().is_some_and(|open| open.changed.load(Ordering::Acquire));
        changed || self.snapshot_checks.load(Ordering::Acquire) > 0
    }

    /// Takes the store offline if its snapshot was removed: librbd would read what the image has now.
    #[cold]
    async fn check_snapshot(&self, io: &Io) -> Result<(), CallEnd> {
        let Some(open) = &self.open else { return Ok(()) };
        let Ok(name) = CString::new(self.options.snapshot.clone().unwrap_or_default()) else {
            return Ok(());
        };
        // Counted before the flag is cleared: a read that finds the flag cleared finds this.
        self.snapshot_checks.fetch_add(1, Ordering::AcqRel);
        let mut check = SnapshotCheck { requests: self, open, succeeded: false };
        open.changed.store(false, Ordering::Release);
        let found = self.call(io, move |image| image.snapshot_id(&name)).await.map(drop);
        check.succeeded = found.is_ok();
        if let Err(CallEnd::Failed(call)) = &found
            && call.code() == libc::ENOENT
        {
            self.shared.go_offline(REMOVED);
        }
        found
    }

    /// Why no request may be sent.
    pub(crate) fn refusal(
        &self,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Option<BlockError> {
        if self.shared.is_aborted() {
            return Some(self.left_error(WaitEnd::Aborted, operation, offset, length));
        }
        let offline = self.shared.is_offline();
        offline.then(|| self.left_error(WaitEnd::Offline, operation, offset, length))
    }

    /// The error of a request that librbd still has, or that it did not get.
    #[cold]
    pub(crate) fn left_error(
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
    pub(crate) fn error(
        &self,
        result: i32,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> BlockError {
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
        let (window, begun) = (queue.window(&self.shared), clock::now());
        let part = match window.try_take(cost) {
            Some(part) => part,
            None => match Box::pin(self.turn(io, &window, cost, begun)).await {
                Ok(part) => part,
                Err(end) => return Err((NotSubmitted::Left(end), buf)),
            },
        };
        let Some(open) = &self.open else {
            return Err((NotSubmitted::Failed(-libc::ESHUTDOWN), buf));
        };
        let submitted = queue.submit(io, (&open.image, &self.shared), (request, part, begun), buf);
        submitted.map_err(|(code, buf)| (NotSubmitted::Failed(code), buf))
    }

    #[cold]
    async fn turn(
        &self,
        io: &Io,
        window: &Rc<Budget>,
        cost: usize,
        begun: Instant,
    ) -> Result<BudgetGuard, WaitEnd> {
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
    pub(crate) async fn transfer(
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
    pub(crate) async fn order(
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
    pub(crate) async fn call<T: Send + 'static>(
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
}
