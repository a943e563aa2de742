//! Another size for a volume in use.
//!
//! Growing: the store first, then the cache, and last what requests are judged by: who sees the new size
//! finds all of it ready.
//!
//! Shrinking: requests are judged by the new size first. Those judged by the old one are waited for, and so is
//! what the cache has on its way; then the store is cut. A write that ran after that would make a file
//! longer again. All waiting has a limit: if the store hangs, the volume keeps the size it had.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use ebb_cache::{Edge, VolumeCache};
use ebb_io::clock;
use ebb_store::{Io, Resize, ResizeError};

use crate::volume::Volume;

/// How long [`Volume::resize`] waits for what is under way.
pub const RESIZE_LIMIT: Duration = Duration::from_secs(30);

const CLOSING: ResizeError = ResizeError::Unsupported("it is being closed");

/// What may be waited for, and until when.
struct Limit<'a> {
    io: &'a Io,
    time: Duration,
    end: Instant,
}

impl Limit<'_> {
    /// Waits for it, but not longer.
    async fn on<T>(&self, wait: impl Future<Output = T>) -> Result<T, ResizeError> {
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

/// Flushes wait as long as it is there.
struct Held<'a>(&'a Volume);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.shrinking.store(false, Ordering::SeqCst);
    }
}

/// What a resize has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// The size it had when its turn came, bytes.
    pub from: u64,
    /// The size it has, bytes.
    pub to: u64,
}

impl Volume {
    /// Gives it another size, on which exports go from then on; the size, bytes. Those who are told a
    /// size once keep it: what lies beyond is refused to them or unknown to them. Shrinking waits up to
    /// half a minute for requests under way.
    ///
    /// # Errors
    /// [`ResizeError`]; then it has the size it had.
    pub async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        self.resize_within(io, order, RESIZE_LIMIT).await.map(|done| done.to)
    }

    /// As [`Volume::resize`], with a limit to how long it waits for what is under way; also the size before.
    ///
    /// # Errors
    /// As [`Volume::resize`].
    pub async fn resize_within(
        &self,
        io: &Io,
        order: Resize,
        time: Duration,
    ) -> Result<Resized, ResizeError> {
        let limit = Limit { io, time, end: clock::now() + time };
        let _alone = limit.on(self.resizing.lock()).await?;
        if self.is_closing() {
            return Err(CLOSING);
        }
        let to = limit.on(self.store.check_resize(io, order)).await??;
        let order = Resize { to: Some(to), ..order };
        let from = self.size();
        if to >= from {
            let to = self.grow(&limit, order).await?;
            return Ok(Resized { from, to });
        }
        self.shrinking.store(true, Ordering::SeqCst);
        let _flushes = Held(self);
        let to = self.shrink(&limit, order, to).await?;
        Ok(Resized { from, to })
    }

    async fn grow(&self, limit: &Limit<'_>, order: Resize) -> Result<u64, ResizeError> {
        let (io, from) = (limit.io, self.size());
        let Some(cache) = &self.cache else {
            let size = self.store.resize(io, order).await?;
            self.size.store(size, Ordering::SeqCst);
            return Ok(size);
        };
        let edge = limit.on(cache.hold_edge(io, &self.store, from)).await?;
        let edge = edge.map_err(ResizeError::Unsaved)?;
        match self.store.resize(io, order).await {
            Ok(size) => {
                cache.grow(io, size, edge);
                self.size.store(size, Ordering::SeqCst);
                Ok(size)
            }
            Err(error) => {
                cache.keep_size(io, from, edge);
                Err(error)
            }
        }
    }

    async fn shrink(&self, limit: &Limit<'_>, order: Resize, to: u64) -> Result<u64, ResizeError> {
        let (io, from) = (limit.io, self.size());
        if let Some(cache) = &self.cache {
            // What is kept is on the store before anything is lost.
            let written = limit.on(cache.write_below(io, &self.store, to)).await?;
            written.map_err(ResizeError::Unsaved)?;
        }
        self.size.store(to, Ordering::SeqCst);
        let cut = match limit.on(self.gate.turn()).await {
            Ok(true) => match &self.cache {
                Some(cache) => self.cut_cached(limit, cache, order, to).await,
                None => self.store.resize(io, order).await,
            },
            Ok(false) => Err(CLOSING),
            Err(late) => Err(late),
        };
        if cut.is_err() {
            self.size.store(from, Ordering::SeqCst);
        }
        cut
    }

    async fn cut_cached(
        &self,
        limit: &Limit<'_>,
        cache: &Arc<VolumeCache>,
        order: Resize,
        to: u64,
    ) -> Result<u64, ResizeError> {
        let (io, from) = (limit.io, cache.size());
        let edge = limit.on(cache.hold_edge(io, &self.store, to)).await?;
        let edge: Edge<'_> = edge.map_err(ResizeError::Unsaved)?;
        let cut = match limit.on(cache.seal(to)).await {
            Ok(()) => self.store.resize(io, order).await,
            Err(late) => Err(late),
        };
        match cut {
            Ok(_) => cache.cut(io, to, edge).await,
            Err(_) => cache.keep_size(io, from, edge),
        }
        cut
    }
}
