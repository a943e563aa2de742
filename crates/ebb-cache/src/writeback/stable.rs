//! Making stable what the store has: flushes of the store, and what becomes of data when one fails.
//!
//! After a failed flush any change since the last good one may be lost, and the next flush would say OK
//! over that (`ebb-store/syncs.rs`). What was written since then is still in memory, so it is
//! written again, and then a flush that goes well is true.
//!
//! # Invariants
//! - Of a volume's flushes of the store one is under way at a time. Who comes meanwhile is covered by the
//!   next, which all of them share.
//! - Of a page that is on its way to the store, or under a change, no older copy is written again.
//! - What was on its way to the store while a flush failed counts as lost with it: the number of losses
//!   is looked at under the shard's lock, before pages are taken for saved.
//! - Zeroes that went past memory are made again from a list of ranges (`zeroes.rs`), as far as it goes.
//! - What else is on the store, not stable, and not in memory cannot be written again: after a loss flushes
//!   fail until the volume is opened anew.
//!
//! Memory: the background flushes the store when [`KEEP_MAX`] or an eighth of the cache's limit is kept, after
//! [`KEEP_TIME`], and under pressure. Where more than half of the limit is kept, over all volumes,
//! nothing more is.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_store::{BlockError, Buf, ErrorKind, Io, Operation, Store};

use super::RESERVE;
use super::frames::{Frames, MARKED_AT_ONCE, Turns, WRITTEN_AT_ONCE};
use crate::inflight::Wakers;
use crate::pages::{FRAME, FRAME_PAGES, PAGE, PAGE_BYTES, index, mask, runs};
use crate::read::Wait;
use crate::stats::Mode;
use crate::volume::{SHARDS, VolumeCache};

/// Bytes of one volume that are kept before the background flushes the store.
const KEEP_MAX: u64 = 64 << 20;
/// As long may anything be unstable, and as soon is a failed flush tried again.
const KEEP_TIME: Duration = Duration::from_secs(5);
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// Under pressure the background flushes the store no more often.
const UNDER_PRESSURE: Duration = Duration::from_millis(100);

impl VolumeCache {
    /// Bytes that are on the store and not known to be stable there; they are kept in memory.
    pub fn unstable(&self) -> u64 {
        self.unstable.load(Ordering::Relaxed) * PAGE
    }

    /// True if changes may be lost and cannot be written again: no flush goes well any more.
    pub fn is_lost(&self, store: &Store) -> bool {
        match self.mode() {
            Mode::Writeback => {
                store.losses() != self.writeback.losses.load(Ordering::SeqCst) && self.is_loose()
            }
            _ => store.is_lost(),
        }
    }

    /// Whether what is saved now is to be kept until the store is flushed.
    pub(super) fn keeps(&self) -> bool {
        self.cache.unstable.load(Ordering::Relaxed) * PAGE <= self.cache.limit_bytes() / 2
    }

    /// A change has gone past memory to the store, while there were `losses` before it began. False if it may
    /// be lost already.
    pub(crate) fn note_bypass(&self, store: &Store, losses: u64, offset: u64) -> bool {
        let mut shard = self.lock(VolumeCache::shard_of(offset / FRAME));
        if store.losses() != losses {
            return false;
        }
        shard.loose = true;
        true
    }

    /// What was written to the store before is stable there.
    pub(super) async fn stabilize(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
    ) -> Result<(), BlockError> {
        let back = &self.writeback;
        let need = back.begun.load(Ordering::SeqCst) + 1;
        let _turn = back.syncing.enter().await;
        if back.done.load(Ordering::SeqCst) >= need {
            return Ok(());
        }
        let first = self.flush_store(io, store).await;
        let result = match first {
            // Once more: what may be lost is written again first.
            Err(_) if !self.is_loose() => self.flush_store(io, store).await,
            result => result,
        };
        let wait = if result.is_ok() { Duration::ZERO } else { AFTER_FAILURE };
        let now = self.cache.millis(ebb_mem::clock::now() + wait);
        back.synced.store(now, Ordering::SeqCst);
        result
    }

    async fn flush_store(self: &Arc<Self>, io: &Io, store: &Store) -> Result<(), BlockError> {
        let back = &self.writeback;
        let number = back.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let losses = store.losses();
        if losses != back.losses.load(Ordering::SeqCst) {
            self.write_again(io, store).await?;
        }
        self.begin_flush(io).await;
        let result = store.flush_rewritten(io, losses).await;
        let good = result.is_ok();
        (0..SHARDS).for_each(|shard| self.lock(shard).end_flush(good));
        if good {
            back.losses.store(losses, Ordering::SeqCst);
            back.done.store(number, Ordering::SeqCst);
        }
        // Given up in the middle, what is left of this is the next flush's.
        self.settle_flush(io, good).await;
        result
    }

    /// What is on the store by now will be stable once it was flushed.
    async fn begin_flush(&self, io: &Io) {
        let mut turns = Turns::default();
        for shard in 0..SHARDS {
            let frames = self.lock(shard).kept_frames();
            // What comes meanwhile is not followed without end.
            for _ in 0..frames / MARKED_AT_ONCE {
                self.lock(shard).begin_flush(MARKED_AT_ONCE);
                turns.done(io, MARKED_AT_ONCE).await;
            }
            self.lock(shard).begin_flush(usize::MAX);
            turns.done(io, frames % MARKED_AT_ONCE).await;
        }
    }

    async fn settle_flush(&self, io: &Io, good: bool) {
        let mut turns = Turns::default();
        for shard in 0..SHARDS {
            loop {
                let settled = self.lock(shard).settle_flush(good, MARKED_AT_ONCE);
                turns.done(io, settled).await;
                if settled < MARKED_AT_ONCE {
                    break;
                }
            }
        }
    }

    /// Whether anything is on the store, not stable, and not in memory.
    fn is_loose(&self) -> bool {
        (0..SHARDS).any(|shard| {
            let shard = self.lock(shard);
            shard.loose || shard.loose_flushing
        })
    }

    /// Whether zeroes are on the store and not stable.
    fn has_zeroed(&self) -> bool {
        (0..SHARDS).any(|shard| self.lock(shard).has_zeroed())
    }

    pub(super) fn refuse_if_loose(&self) -> Result<(), BlockError> {
        match self.is_loose() {
            true => Err(BlockError::new(ErrorKind::Lost, Operation::Flush, 0, self.size())),
            false => Ok(()),
        }
    }

    /// Writes all again that may be lost.
    async fn write_again(self: &Arc<Self>, io: &Io, store: &Store) -> Result<(), BlockError> {
        let mut frames = Frames::default();
        // One that was given up is over, too.
        (0..SHARDS).for_each(|shard| self.lock(shard).end_flush(false));
        self.settle_flush(io, false).await;
        for shard in 0..SHARDS {
            let mut some = Vec::new();
            self.lock(shard).unstable_frames(&mut some);
            frames.add(io, some).await;
        }
        self.refuse_if_loose()?;
        // What is on its way may be lost with the rest: then it is dirty again when that has ended.
        Box::pin(self.clean(io, store, &(0..u64::MAX))).await?;
        Box::pin(self.zero_again(io, store)).await?;
        let mut buf = io.pool().take(RESERVE).await;
        let mut turns = Turns::default();
        while let Some(frame) = frames.next() {
            turns.done(io, MARKED_AT_ONCE / WRITTEN_AT_ONCE).await;
            buf = self.write_frame_again(io, store, frame, buf).await?;
        }
        Box::pin(self.clean(io, store, &(0..u64::MAX))).await?;
        self.refuse_if_loose()
    }

    async fn write_frame_again(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        frame: u64,
        mut buf: Buf,
    ) -> Result<Buf, BlockError> {
        let number = VolumeCache::shard_of(frame);
        let mut want = self.lock(number).unstable(frame);
        while want != 0 {
            let (busy, dirty) = {
                let mut shard = self.lock(number);
                want &= shard.unstable(frame) | shard.unsaved(frame);
                let (change, stuck) = shard.flights.changed_by(frame, want);
                // A change whose request was dropped may still reach the store, before or after this.
                shard.loose |= stuck;
                let busy = change.or(shard.flights.cleaning(frame, want).1);
                (busy, want & shard.unsaved(frame))
            };
            self.refuse_if_loose()?;
            if let Some(fill) = busy {
                Wait { volume: self, shard: number, fill, waiter: None }.await;
                continue;
            }
            if dirty != 0 {
                let first = frame * FRAME_PAGES;
                Box::pin(self.clean(io, store, &(first..first + FRAME_PAGES))).await?;
                want &= !dirty;
                continue;
            }
            let (pages, result, back) = self.rewrite(io, store, frame, want, buf).await;
            buf = back;
            result?;
            want &= !pages;
        }
        Ok(buf)
    }

    /// Writes the first run of unstable pages among `want` again.
    async fn rewrite(
        &self,
        io: &Io,
        store: &Store,
        frame: u64,
        want: u16,
        mut buf: Buf,
    ) -> (u16, Result<(), BlockError>, Buf) {
        buf.set_len(RESERVE);
        let (rewrite, offset, length) = {
            let mut shard = self.lock(VolumeCache::shard_of(frame));
            let unsaved = shard.unsaved(frame);
            let here =
                want & shard.unstable(frame) & !unsaved & !shard.flights.changing(frame, want);
            // Another one was faster: it is dirty now, on its way, or being changed.
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
        let (result, buf) = store.write(io, buf, offset, false).await;
        drop(rewrite);
        (pages, result, buf)
    }

    /// Whether the background is to flush the store.
    pub(super) fn wants_sync(&self, now: Instant) -> bool {
        let kept = self.unstable();
        let since =
            self.cache.millis(now).checked_sub(self.writeback.synced.load(Ordering::SeqCst));
        let Some(since) = since.map(Duration::from_millis) else { return false };
        let limit = self.cache.limit_bytes();
        let pressed = !self.cache.admits() || self.cache.excess() > 0;
        kept > KEEP_MAX.min(limit / 8)
            || kept > 0 && pressed && since >= UNDER_PRESSURE
            || since >= KEEP_TIME && (kept > 0 || self.is_loose() || self.has_zeroed())
    }
}

/// Pages that are being written again.
struct Rewrite<'a> {
    volume: &'a VolumeCache,
    frame: u64,
    id: u64,
    pages: u16,
}

impl Drop for Rewrite<'_> {
    fn drop(&mut self) {
        let mut wakers = Wakers::default();
        let mut shard = self.volume.lock(VolumeCache::shard_of(self.frame));
        shard.end_rewrite(self.frame, (self.id, self.pages), &mut wakers);
    }
}
