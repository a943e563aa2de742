//! Flushing the store, and repairing what a failed flush may have lost.
//!
//! After a failed flush any write since the last successful one may be lost, and the next flush would report
//! success nevertheless (`ebb-block/flush_state.rs`). Those writes are still in memory: they are written again, and
//! only then does a successful flush tell the truth (docs/adr/0008-failed-flush.md).
//!
//! # Invariants
//! - One flush of the store per volume is in flight at a time. Requests that arrive meanwhile share the next
//!   one.
//! - While a page is under writeback or part of an in-flight write, no older copy of it is written.
//! - Writes in flight during a failed flush count as lost with it: the loss counter is read under the shard's
//!   lock before pages are marked as written.
//! - Zeroes that bypassed memory are repeated from a bounded list of ranges (`zeroes.rs`).
//! - Anything else that is on the store, not stable and not in memory cannot be written again: after a loss
//!   flushes fail until the volume is reopened. Until a flush has succeeded, that includes what an earlier
//!   process left on the store: it may have been killed before it flushed that. The volume is lost then: what was
//!   kept for a repair is let go, and no more is kept. Dirty pages stay, and are written as before.
//!
//! Memory: the background flushes the store when [`KEEP_MAX`] or an eighth of the cache's limit is kept,
//! after [`KEEP_TIME`], and under pressure. When more than half of the limit is kept, over all volumes, no
//! more is kept. The background also flushes a store that was just opened: a loss after that can be repaired.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_block::{BlockError, BlockStore, Buf, ErrorKind, Io, Operation};

use super::RESERVE;
use super::frames::{Frames, MARKED_AT_ONCE, WRITTEN_AT_ONCE, YieldCounter};
use crate::inflight::Wakers;
use crate::pages::{FRAME, FRAME_PAGES, PAGE, PAGE_BYTES, each, index, mask, runs, touched};
use crate::read::InflightWait;
use crate::shard::{SHARDS, shard_of};
use crate::stats::Mode;
use crate::volume::{StoreCache, VolumeCache};

/// Bytes of one volume that are kept before the background flushes the store.
const KEEP_MAX: u64 = 64 << 20;
/// Data may stay unstable for this long; a failed flush is repeated this soon.
const KEEP_TIME: Duration = Duration::from_secs(5);
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// Minimum interval of background flushes under pressure.
const UNDER_PRESSURE: Duration = Duration::from_millis(100);

impl VolumeCache {
    /// Bytes that are on the store and not known to be stable there; they are kept in memory.
    pub fn unstable(&self) -> u64 {
        self.unstable.load(Ordering::Relaxed) * PAGE
    }
}

impl StoreCache {
    /// True if acknowledged data may be lost and cannot be written again: no flush succeeds any more.
    pub fn is_lost(&self) -> bool {
        match self.mode() {
            Mode::Writeback => {
                self.store.losses() != self.writeback.losses.load(Ordering::SeqCst)
                    && self.is_loose()
            }
            _ => self.store.is_lost(),
        }
    }

    /// Whether data written now is kept until the store is flushed. Called under the lock of the data's shard:
    /// [`StoreCache::give_up_repair`] visits it later, or has been noted before.
    pub(super) fn keeps(&self) -> bool {
        !self.writeback.beyond_repair.load(Ordering::SeqCst)
            && self.cache.unstable.load(Ordering::Relaxed) * PAGE <= self.cache.limit_bytes() / 2
    }

    /// A write bypassed memory; `losses` is the loss counter from before it began. False if it may be lost
    /// already.
    pub(crate) fn note_bypass(&self, losses: u64, (offset, length): (u64, u64)) -> bool {
        {
            let mut shard = self.lock(shard_of(offset / FRAME));
            if self.store.losses() != losses {
                return false;
            }
            shard.loose = true;
        }
        // Zeroes that it replaced are not repeated.
        let pages = touched(offset, length);
        for number in each(VolumeCache::shards_of(&pages)) {
            self.lock(number).note_written_over(number, &pages, &pages);
        }
        true
    }

    /// Makes stable everything that was written to the store before.
    pub(crate) async fn stabilize(&self, io: &Io) -> Result<(), BlockError> {
        let back = &self.writeback;
        let need = back.begun.load(Ordering::SeqCst) + 1;
        let _guard = back.syncing.enter().await;
        if back.done.load(Ordering::SeqCst) >= need {
            return Ok(());
        }
        let first = self.flush_store(io).await;
        let result = match first {
            // Again: first rewrite what may be lost.
            Err(_) if !self.is_loose() => self.flush_store(io).await,
            result => result,
        };
        // No flush is in flight now: what is lost stays lost.
        if result.is_err() && self.is_lost() {
            self.give_up_repair(io).await;
        }
        let wait = if result.is_ok() { Duration::ZERO } else { AFTER_FAILURE };
        let now = self.cache.millis(ebb_mem::clock::now() + wait);
        back.synced.store(now, Ordering::SeqCst);
        result
    }

    async fn flush_store(&self, io: &Io) -> Result<(), BlockError> {
        let back = &self.writeback;
        let number = back.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let losses = self.store.losses();
        let doubts = back.doubts.load(Ordering::SeqCst);
        let in_doubt = doubts != back.settled.load(Ordering::SeqCst);
        if in_doubt || losses != back.losses.load(Ordering::SeqCst) {
            self.rewrite_unstable(io).await?;
        }
        self.begin_flush(io).await;
        let result = self.store.flush_rewritten(io, losses).await;
        // What a request that has failed meanwhile left in doubt is kept.
        let good = result.is_ok() && back.doubts.load(Ordering::SeqCst) == doubts;
        (0..SHARDS).for_each(|shard| self.lock(shard).end_flush(good));
        if result.is_ok() {
            back.losses.store(losses, Ordering::SeqCst);
            back.settled.store(doubts, Ordering::SeqCst);
            back.done.store(number, Ordering::SeqCst);
        }
        // If this future is dropped midway, the next flush does the remainder.
        self.settle_flush(io, good).await;
        result
    }

    /// Marks what is on the store now: it will be stable after the flush.
    async fn begin_flush(&self, io: &Io) {
        let mut yields = YieldCounter::default();
        for shard in 0..SHARDS {
            let frames = self.lock(shard).kept_frames();
            // Frames that arrive meanwhile are not followed without end.
            for _ in 0..frames / MARKED_AT_ONCE {
                self.lock(shard).begin_flush(MARKED_AT_ONCE);
                yields.done(io, MARKED_AT_ONCE).await;
            }
            self.lock(shard).begin_flush(usize::MAX);
            yields.done(io, frames % MARKED_AT_ONCE).await;
        }
    }

    async fn settle_flush(&self, io: &Io, good: bool) {
        let mut yields = YieldCounter::default();
        for shard in 0..SHARDS {
            loop {
                let settled = self.lock(shard).settle_flush(good, MARKED_AT_ONCE);
                yields.done(io, settled).await;
                if settled < MARKED_AT_ONCE {
                    break;
                }
            }
        }
    }

    /// Lets go of everything that was kept for a repair. If this future is dropped midway, the next flush, which fails,
    /// too, does the remainder.
    async fn give_up_repair(&self, io: &Io) {
        self.writeback.beyond_repair.store(true, Ordering::SeqCst);
        let mut yields = YieldCounter::default();
        for shard in 0..SHARDS {
            loop {
                let frames = self.lock(shard).give_up_repair(MARKED_AT_ONCE);
                yields.done(io, frames).await;
                if frames < MARKED_AT_ONCE {
                    break;
                }
            }
        }
    }

    /// Whether no flush of the store has succeeded since it was opened.
    fn is_never_flushed(&self) -> bool {
        self.writeback.done.load(Ordering::SeqCst) == 0
    }

    /// Whether there is data on the store that is neither stable nor in memory: that of any shard or, if a flush has
    /// failed before the first one succeeded, that of an earlier process.
    fn is_loose(&self) -> bool {
        let inherited = self.is_never_flushed() && self.store.is_lost();
        inherited
            || (0..SHARDS).any(|shard| {
                let shard = self.lock(shard);
                shard.loose || shard.loose_flushing
            })
    }

    /// Whether there are zeroes on the store that are not stable.
    fn has_zeroed(&self) -> bool {
        (0..SHARDS).any(|shard| self.lock(shard).has_zeroed())
    }

    /// Fails if there was a loss that cannot be repaired.
    pub(super) fn refuse_if_lost(&self) -> Result<(), BlockError> {
        match self.is_lost() {
            true => Err(BlockError::new(ErrorKind::Lost, Operation::Flush, 0, self.size())),
            false => Ok(()),
        }
    }

    /// Rewrites everything that may be lost.
    async fn rewrite_unstable(&self, io: &Io) -> Result<(), BlockError> {
        let mut frames = Frames::default();
        // A flush whose future was dropped has ended, too.
        (0..SHARDS).for_each(|shard| self.lock(shard).end_flush(false));
        self.settle_flush(io, false).await;
        for shard in 0..SHARDS {
            let mut some = Vec::new();
            self.lock(shard).unstable_frames(&mut some);
            frames.add(io, some).await;
        }
        self.refuse_if_lost()?;
        // Pages under writeback may be lost as well: they are dirty again when that writeback has ended.
        Box::pin(self.clean(io, &(0..u64::MAX))).await?;
        Box::pin(self.repeat_zeroes(io)).await?;
        let mut buf = io.pool().take(RESERVE).await;
        let mut yields = YieldCounter::default();
        while let Some(frame) = frames.next() {
            yields.done(io, MARKED_AT_ONCE / WRITTEN_AT_ONCE).await;
            buf = self.rewrite_frame(io, frame, buf).await?;
        }
        Box::pin(self.clean(io, &(0..u64::MAX))).await?;
        self.refuse_if_lost()
    }

    async fn rewrite_frame(&self, io: &Io, frame: u64, mut buf: Buf) -> Result<Buf, BlockError> {
        let number = shard_of(frame);
        let mut want = self.lock(number).unstable(frame);
        while want != 0 {
            let (busy, dirty) = {
                let mut shard = self.lock(number);
                want &= shard.unstable(frame) | shard.unsaved(frame);
                let (write, stuck) = shard.inflight.write_in_flight(frame, want);
                // A write whose future was dropped may still reach the store, before or after this.
                shard.loose |= stuck;
                let busy = write.or(shard.inflight.cleaning(frame, want).1);
                (busy, want & shard.unsaved(frame))
            };
            self.refuse_if_lost()?;
            if let Some(fill) = busy {
                InflightWait { volume: self, shard: number, fill, waiter: None }.await;
                continue;
            }
            if dirty != 0 {
                let first = frame * FRAME_PAGES;
                Box::pin(self.clean(io, &(first..first + FRAME_PAGES))).await?;
                want &= !dirty;
                continue;
            }
            let (pages, result, back) = self.rewrite(io, frame, want, buf).await;
            buf = back;
            result?;
            want &= !pages;
        }
        Ok(buf)
    }

    /// Rewrites the first run of unstable pages among `want`.
    async fn rewrite(
        &self,
        io: &Io,
        frame: u64,
        want: u16,
        mut buf: Buf,
    ) -> (u16, Result<(), BlockError>, Buf) {
        buf.set_len(RESERVE);
        let (rewrite, offset, length) = {
            let mut shard = self.lock(shard_of(frame));
            let unsaved = shard.unsaved(frame);
            let here =
                want & shard.unstable(frame) & !unsaved & !shard.inflight.writing(frame, want);
            // Another task was faster: the page is dirty now, under writeback, or part of an in-flight write.
            let Some((start, count)) = runs(here).next() else {
                return (0, Ok(()), buf);
            };
            let offset = frame * FRAME + (start * PAGE_BYTES) as u64;
            let end = (offset + (count * PAGE_BYTES) as u64).min(self.size());
            let length = index(end.saturating_sub(offset));
            let pages = mask(start, count);
            let id = shard.take_unstable(frame, pages, &mut buf[..length]);
            (Rewrite { volume: self, frame, id, pages }, offset, length)
        };
        buf.set_len(length);
        let pages = rewrite.pages;
        if length == 0 {
            return (pages, Ok(()), buf);
        }
        let (result, buf) = self.store.write(io, buf, offset, false).await;
        drop(rewrite);
        (pages, result, buf)
    }

    /// Whether the background should flush the store.
    pub(super) fn wants_sync(&self, now: Instant) -> bool {
        let kept = self.unstable();
        let since =
            self.cache.millis(now).checked_sub(self.writeback.synced.load(Ordering::SeqCst));
        let Some(since) = since.map(Duration::from_millis) else { return false };
        let limit = self.cache.limit_bytes();
        let pressed = !self.cache.admits() || self.cache.excess() > 0;
        kept > KEEP_MAX.min(limit / 8)
            || self.is_never_flushed() && !self.store.is_lost()
            || kept > 0 && pressed && since >= UNDER_PRESSURE
            || since >= KEEP_TIME && (kept > 0 || self.is_loose() || self.has_zeroed())
    }
}

/// Pages that are being rewritten.
struct Rewrite<'a> {
    volume: &'a VolumeCache,
    frame: u64,
    id: u64,
    pages: u16,
}

impl Drop for Rewrite<'_> {
    fn drop(&mut self) {
        let mut wakers = Wakers::default();
        let mut shard = self.volume.lock(shard_of(self.frame));
        shard.end_rewrite(self.frame, (self.id, self.pages), &mut wakers);
    }
}
