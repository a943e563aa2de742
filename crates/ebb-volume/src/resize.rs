//! Resizing a volume in use.
//!
//! Growing: first the store, then the cache, and last the size that requests are checked against: a request
//! that sees the new size finds the store and the cache ready for it.
//!
//! Shrinking: first the size that requests are checked against. Requests that were checked against the old
//! size complete, and so do the cache's reads and writes; then the store is truncated, since a later write
//! would extend a file again. All waiting has a limit: if the store hangs, the volume keeps its size.
//!
//! An overlay is resized in the same order, and its store by its delta (`ebb-cache/delta/resize.rs`).

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use ebb_block::{BlockStore, Io, Resize, ResizeError};
use ebb_io::clock;

use crate::volume::Volume;

/// How long [`Volume::resize`] waits for requests in flight.
pub const RESIZE_LIMIT: Duration = Duration::from_secs(30);

/// Bytes of a block of an overlay.
const BLOCK: u64 = 4096;

const CLOSING: ResizeError =
    ResizeError::Unsupported { why: "it is being closed", remedy: "try again when it is served" };

/// The time until which a resize may wait.
struct Deadline<'a> {
    io: &'a Io,
    time: Duration,
    end: Instant,
}

impl Deadline<'_> {
    /// Awaits `wait`, but not beyond the deadline.
    async fn bound<T>(&self, wait: impl Future<Output = T>) -> Result<T, ResizeError> {
        let mut wait = pin!(wait);
        let mut late = pin!(self.io.sleep(self.end.saturating_duration_since(clock::now())));
        poll_fn(|cx| {
            if let Poll::Ready(result) = wait.as_mut().poll(cx) {
                return Poll::Ready(Ok(result));
            }
            let busy = ResizeError::Busy { seconds: self.time.as_secs() };
            late.as_mut().poll(cx).map(|()| Err(busy))
        })
        .await
    }
}

/// Flushes wait until it is dropped.
struct FlushBlocker<'a>(&'a Volume);

impl Drop for FlushBlocker<'_> {
    fn drop(&mut self) {
        self.0.shrinking.store(false, Ordering::SeqCst);
    }
}

/// What a resize has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// The size when the resize began, bytes.
    pub from: u64,
    /// The new size, bytes.
    pub to: u64,
}

impl Volume {
    /// Notes the size that the volume is about to be shrunk to; `None`: it keeps the size that it
    /// has.
    pub fn plan_size(&self, to: Option<u64>) {
        self.planned_size.store(to.unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// The size that the volume has at least after a kill at this moment, bytes.
    pub fn least_size(&self) -> u64 {
        self.size().min(self.planned_size.load(Ordering::SeqCst))
    }

    /// Resizes the volume and returns the new size, bytes, which exports use from then on. A client that learnt
    /// an earlier size keeps it: what lies beyond the new end is refused, and what was added is unknown to it.
    /// Shrinking waits up to [`RESIZE_LIMIT`] for requests in flight.
    ///
    /// # Errors
    /// [`ResizeError`]; then the volume keeps its size.
    pub async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        self.resize_within(io, order, RESIZE_LIMIT).await.map(|done| done.to)
    }

    /// As [`Volume::resize`], with a limit of the time to wait; also returns the former size.
    ///
    /// # Errors
    /// As [`Volume::resize`].
    pub async fn resize_within(
        &self,
        io: &Io,
        order: Resize,
        time: Duration,
    ) -> Result<Resized, ResizeError> {
        let resized = self.resize_once(io, order, time).await;
        resized.inspect_err(|error| self.owe_cause(error))
    }

    async fn resize_once(
        &self,
        io: &Io,
        order: Resize,
        time: Duration,
    ) -> Result<Resized, ResizeError> {
        let deadline = Deadline { io, time, end: clock::now() + time };
        let _alone = deadline.bound(self.resizing.lock()).await?;
        if self.is_closing() {
            return Err(CLOSING);
        }
        let to = deadline.bound(self.store.check_resize(io, order)).await??;
        let order = Resize { to: Some(to), ..order };
        let from = self.size();
        if to >= from {
            let to = self.grow(&deadline, order, to).await?;
            return Ok(Resized { from, to });
        }
        self.shrinking.store(true, Ordering::SeqCst);
        let flushes = FlushBlocker(self);
        let to = self.shrink(&deadline, order, to).await?;
        drop(flushes);
        // Flushes do not wait for a large discard.
        self.store.discard_beyond_end(io, from).await;
        Ok(Resized { from, to })
    }

    async fn grow(
        &self,
        deadline: &Deadline<'_>,
        order: Resize,
        to: u64,
    ) -> Result<u64, ResizeError> {
        let size = match self.store.only() {
            Some(top) => {
                let prepared = deadline.bound(top.prepare_resize(deadline.io, to)).await?;
                let prepared = prepared.map_err(ResizeError::Unsaved)?;
                prepared.resize(deadline.io, order).await?
            }
            None => {
                let old = self.size();
                let size = self.store.resize(deadline.io, order).await?;
                if !old.is_multiple_of(BLOCK) {
                    // Zeroes up to the old end are written to all of its last block, in pieces: these must not follow a
                    // write to what was added there.
                    match deadline.bound(self.gate.synchronize()).await {
                        Ok(true) => {}
                        Ok(false) => return Err(CLOSING),
                        Err(late) => return Err(late),
                    }
                }
                size
            }
        };
        self.size.store(size, Ordering::SeqCst);
        Ok(size)
    }

    async fn shrink(
        &self,
        deadline: &Deadline<'_>,
        order: Resize,
        to: u64,
    ) -> Result<u64, ResizeError> {
        let (io, from) = (deadline.io, self.size());
        if let Some(top) = self.store.only() {
            // Dirty data below the new end is written before anything is discarded.
            let written = deadline.bound(top.write_below(io, to)).await?;
            written.map_err(ResizeError::Unsaved)?;
        }
        self.size.store(to, Ordering::SeqCst);
        let cut = match deadline.bound(self.gate.synchronize()).await {
            Ok(true) => self.cut(deadline, order, to).await,
            Ok(false) => Err(CLOSING),
            Err(late) => Err(late),
        };
        if cut.is_err() {
            self.size.store(from, Ordering::SeqCst);
        }
        cut
    }

    async fn cut(
        &self,
        deadline: &Deadline<'_>,
        order: Resize,
        to: u64,
    ) -> Result<u64, ResizeError> {
        let io = deadline.io;
        let Some(top) = self.store.only() else { return self.store.resize(io, order).await };
        let prepared = deadline.bound(top.prepare_resize(io, to)).await?;
        let prepared = prepared.map_err(ResizeError::Unsaved)?;
        if let Err(late) = deadline.bound(prepared.seal()).await {
            prepared.cancel(io);
            return Err(late);
        }
        prepared.resize(io, order).await
    }
}
