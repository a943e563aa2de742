//! Reads: cached pages from memory, the remaining ones from the store, each once however many requests want
//! it.
//!
//! A request is processed in windows of up to 1 MiB. A pass over a window copies what is valid, opens fills
//! for what is missing, loads that with one store read, inserts it if permitted, and then waits for fills of
//! other requests. If the whole request is missing, the store reads into the request's own buffer, otherwise
//! into a temporary one; either way the data is copied once more, between that buffer and the cache.
//! Read-ahead is loaded in the same way, by tasks of its own (`read_ahead.rs`).

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use ebb_block::{BlockError, BlockStore, Buf, BufResult, Io};
use ebb_mem::WorkerMemory;

use crate::copy_target::Pieces;
use crate::inflight::Wakers;
use crate::pages::{FRAME, FRAME_PAGES, FramePart, PAGE, PAGE_BYTES, index, parts, runs, touched};
use crate::shard::{AHEAD, COLD, MARK, Shard, shard_of};
use crate::stats::Mode;
use crate::volume::{LockedShard, PreparedBuffers, StoreCache, VolumeCache};
use crate::write::yields_before;

/// Bytes of a window.
const WINDOW: usize = 1 << 20;
/// Frames that a window may touch.
pub(crate) const FRAMES: usize = WINDOW / 65536 + 1;
/// Up to this many valid pages between two missing ones are read again, instead of splitting the store read.
const GAP: u64 = 16;
/// Attempts of a read that bypasses the cache before it keeps flushes of the store waiting.
const TRIES: usize = 4;

/// Pages of a window that are still to be served, per frame.
#[derive(Clone, Copy)]
pub(crate) struct PendingPages {
    pub(crate) first: u64,
    pub(crate) pages: [u16; FRAMES],
}

impl PendingPages {
    fn at(&mut self, frame: u64) -> &mut u16 {
        &mut self.pages[index(frame - self.first).min(FRAMES - 1)]
    }
}

/// An open fill.
#[derive(Clone, Copy, Default)]
struct OpenFill {
    id: u64,
    frame: u64,
    pages: u16,
    /// Pages that no buffer covers.
    fresh: u16,
}

/// Open fills. Fills that are still open when it is dropped are abandoned, and their waiters are woken.
pub(crate) struct OpenFills<'a> {
    volume: &'a VolumeCache,
    list: [OpenFill; FRAMES],
    count: usize,
}

impl Drop for OpenFills<'_> {
    fn drop(&mut self) {
        for at in 0..self.count {
            let claim = self.list[at];
            let mut wakers = Wakers::default();
            let mut shard = self.volume.lock(shard_of(claim.frame));
            shard.inflight.end_fill(claim.id, &mut wakers);
        }
    }
}

/// The result of one pass over a window.
pub(crate) struct ReadRound<'a> {
    claims: OpenFills<'a>,
    /// Pages of the volume to load: first and end. Empty if there are none.
    pub(crate) load: Range<u64>,
    /// A fill of another request to wait for: shard and number.
    pub(crate) wait: Option<(usize, u64)>,
}

impl VolumeCache {
    /// Reads `buf.len()` bytes at `offset` if all of them are in memory; otherwise returns false, and the
    /// content of `buf` is undefined. Neither waits nor allocates.
    pub fn try_read_cached(&self, buf: &mut [u8], offset: u64) -> bool {
        self.copy_cached(offset, buf.len(), |shard, part, tick| {
            shard.copy_out(&self.memory, part, part.touched(), &mut buf[part.range()], tick)
        })
    }

    /// As [`VolumeCache::try_read_cached`] of `length` bytes, passed to `put` in pieces of at most a few pages, each with
    /// its place in the request, in any order. If the result is false, `put` may have had some of them.
    pub fn try_read_cached_pieces(
        &self,
        offset: u64,
        length: usize,
        put: &mut impl FnMut(usize, &[u8]),
    ) -> bool {
        self.copy_cached(offset, length, |shard, part, tick| {
            let mut pieces = Pieces { offset: part.range().start, put: &mut *put };
            shard.copy_out(&self.memory, part, part.touched(), &mut pieces, tick)
        })
    }

    /// Has `copy` copy each part of a range, if all of it is in memory.
    #[inline(always)]
    fn copy_cached(
        &self,
        offset: u64,
        length: usize,
        mut copy: impl FnMut(&mut Shard, &FramePart, u8) -> u16,
    ) -> bool {
        let tick = self.cache.tick.load(Ordering::Relaxed);
        let several = offset % FRAME + length as u64 > FRAME;
        // A request that will miss is neither copied nor counted here.
        let is_valid =
            |part: FramePart| self.lock(shard_of(part.frame)).has(part.frame, part.touched());
        if several && !parts(offset, length).all(is_valid) {
            return false;
        }
        for part in parts(offset, length) {
            let mut shard = self.lock(shard_of(part.frame));
            if !several && !shard.has(part.frame, part.touched()) {
                return false;
            }
            if copy(&mut shard, &part, tick) != 0 {
                return false;
            }
            self.take_mark(&mut shard);
        }
        true
    }

    /// How many of `length` bytes at `offset` are in memory, by pages.
    pub(crate) fn cached_bytes(&self, offset: u64, length: usize) -> u64 {
        let valid = |part: FramePart| {
            let valid = self.lock(shard_of(part.frame)).valid(part.frame) & part.touched();
            u64::from(valid.count_ones()) * PAGE
        };
        parts(offset, length).map(valid).sum::<u64>().min(length as u64)
    }

    fn take_mark(&self, shard: &mut LockedShard<'_>) {
        if shard.marked {
            shard.marked = false;
            self.marked.store(true, Ordering::Relaxed);
        }
    }
}

/// How the read of a window ended, if no error is to be reported.
enum Window {
    Complete,
    /// Read the request from the store.
    Bypass,
}

impl StoreCache {
    /// As [`VolumeCache::try_read_cached`]; also starts read-ahead for a sequential reader.
    pub fn read_cached(&self, io: &Io, buf: &mut [u8], offset: u64) -> bool {
        let hit = self.try_read_cached(buf, offset);
        self.follow_hit(io, hit, offset, buf.len());
        hit
    }

    /// As [`StoreCache::read_cached`], see [`VolumeCache::try_read_cached_pieces`].
    pub fn read_cached_pieces(
        &self,
        io: &Io,
        (offset, length): (u64, usize),
        put: &mut impl FnMut(usize, &[u8]),
    ) -> bool {
        let hit = self.try_read_cached_pieces(offset, length, put);
        self.follow_hit(io, hit, offset, length);
        hit
    }

    #[inline]
    fn follow_hit(&self, io: &Io, hit: bool, offset: u64, length: usize) {
        if hit && self.marked.load(Ordering::Relaxed) && self.marked.swap(false, Ordering::Relaxed)
        {
            self.start_read_ahead(io, &touched(offset, length as u64));
        }
    }

    /// Bytes that are copied without yielding to other tasks: longer reads must use [`StoreCache::read`].
    pub const AT_ONCE: usize = WINDOW;

    /// Reads `buf.len()` bytes at `offset`.
    pub async fn read(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let length = buf.len();
        let mut kind = None;
        let mut at = 0;
        while at < length {
            let end = length.min(at + WINDOW);
            if at > 0 {
                // Yield after each window to the other tasks of the worker.
                io.yield_now().await;
            }
            let position = offset + at as u64;
            if length > WINDOW && self.read_cached(io, &mut buf[at..end], position) {
                at = end;
                continue;
            }
            let kind = *kind.get_or_insert_with(|| {
                let sequential =
                    self.start_read_ahead(io, &touched(position, (length - at) as u64));
                if sequential { COLD } else { 0 }
            });
            let (result, returned) = self.read_window(io, (buf, offset), at..end, kind).await;
            buf = returned;
            match result {
                Ok(Window::Complete) => {}
                // The whole request, so that nothing of it is left. Called here, where the future of the window is
                // over: the size of a task is that of its largest future.
                Ok(Window::Bypass) => return self.read_uncached(io, buf, offset).await,
                Err(error) => return (Err(error), buf),
            }
            at = end;
        }
        (Ok(()), buf)
    }

    /// Reads from the store, bypassing the cache.
    async fn read_uncached(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        if self.mode() == Mode::Writeback {
            // Boxed here and elsewhere: rare, and the size of a task is that of its largest future.
            return Box::pin(self.read_around_cache(io, buf, offset)).await;
        }
        self.store.read(io, buf, offset).await
    }

    /// Reads from the store, and from memory the pages that are not stable: the store may have lost
    /// them. Those are wired, so that none is lost while it is copied over the store's data.
    async fn read_around_cache(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let pages = touched(offset, buf.len() as u64);
        for attempt in 0..=TRIES {
            if let Err(error) = self.clean(io, &pages).await {
                return (Err(error), buf);
            }
            // The last attempt keeps flushes of the store waiting.
            let _no_flush = match attempt {
                TRIES => Some(self.writeback.syncing.enter().await),
                _ => None,
            };
            let flushed = self.writeback.done.load(Ordering::SeqCst);
            let result;
            (result, buf) = self.store.read(io, buf, offset).await;
            if result.is_err() {
                return (result, buf);
            }
            for (number, part) in parts(offset, buf.len()).enumerate() {
                if yields_before(number) {
                    io.yield_now().await;
                }
                let tick = self.cache.tick.load(Ordering::Relaxed);
                let (all, out) = (part.touched(), &mut buf[part.range()]);
                let mut shard = self.lock(shard_of(part.frame));
                let newer = all & (shard.unsaved(part.frame) | shard.unstable(part.frame));
                shard.copy_out(&self.memory, &part, newer, out, tick);
                // Also those that are being zeroed again, which count as under writeback.
                shard.fill_blank(&part, all, out);
            }
            // Data that was not stable when the store read it may be so now, and have left memory.
            if self.writeback.done.load(Ordering::SeqCst) == flushed {
                break;
            }
        }
        (Ok(()), buf)
    }

    /// Reads one window through the cache.
    async fn read_window(
        &self,
        io: &Io,
        (mut buf, offset): (Buf, u64),
        window: Range<usize>,
        kind: u8,
    ) -> (Result<Window, BlockError>, Buf) {
        let start = offset + window.start as u64;
        let mut todo = PendingPages { first: start / FRAME, pages: [0; FRAMES] };
        for part in parts(start, window.len()) {
            *todo.at(part.frame) = part.touched();
        }
        let mut claims = true;
        loop {
            let round = self.round(&mut buf[window.clone()], start, &mut todo, claims);
            if round.load.is_empty() {
                let Some((shard, fill)) = round.wait else { return (Ok(Window::Complete), buf) };
                drop(round);
                InflightWait { volume: self, shard, fill, waiter: None }.await;
                // If that fill has left no data, all that waited for it read for themselves now, at the same time: with a
                // fill of one of them, they would fail one after the other.
                claims = false;
                continue;
            }
            let wanted = (round.load.end * PAGE).min(start + window.len() as u64);
            let end = (round.load.end * PAGE).min(self.size());
            if end < wanted {
                // The volume was shrunk after this request was submitted: nothing of it is kept.
                return (Ok(Window::Bypass), buf);
            }
            let span = (round.load.start * PAGE)..end;
            let request = offset..offset + buf.len() as u64;
            let all = window.len() == buf.len() && span == request && round.wants(&todo);
            let result;
            if all {
                (result, buf) = self.store.read(io, buf, offset).await;
                if let Err(error) = result {
                    return (Err(error), buf);
                }
                round.keep(io.pool().worker(), span.start, &buf, kind);
                return (Ok(Window::Complete), buf);
            }
            let length = index(span.end.saturating_sub(span.start));
            let Some((own, _spare)) = self.spare_buffer(io, length, length) else {
                // No memory except the request's own buffer.
                return (Ok(Window::Bypass), buf);
            };
            let (read, own) = self.store.read(io, own, span.start).await;
            if read.is_err() {
                // The error may lie outside the request, in a page it only touches: read exactly the
                // requested bytes.
                return (Ok(Window::Bypass), buf);
            }
            copy_loaded(&mut buf[window.clone()], start, &mut todo, &own, &span);
            round.keep(io.pool().worker(), span.start, &own, kind);
        }
    }

    /// Loads what is missing of `pages`, as far as there is room and no other request is loading it. Ignores
    /// errors: a request that reads the data gets them.
    pub(crate) async fn load(&self, io: &Io, pages: Range<u64>) {
        let mut at = pages.start;
        let mut kind = COLD | AHEAD | MARK;
        while at < pages.end && self.cache.has_room_ahead() {
            let end = pages.end.min(at + WINDOW as u64 / PAGE);
            let round = self.claim_missing(at..end);
            at = end;
            if round.load.is_empty() {
                continue;
            }
            let start = round.load.start * PAGE;
            let length = index((round.load.end * PAGE).min(self.size()).saturating_sub(start));
            let Some((buf, _spare)) = self.spare_buffer(io, length, length) else { return };
            let (result, buf) = self.store.read(io, buf, start).await;
            if result.is_err() {
                return;
            }
            round.keep(io.pool().worker(), start, &buf, kind);
            kind &= !MARK;
        }
    }
}

impl VolumeCache {
    /// Opens fills for what is missing of `pages`, at most one window.
    fn claim_missing(&self, pages: Range<u64>) -> ReadRound<'_> {
        let claims = OpenFills { volume: self, list: [OpenFill::default(); FRAMES], count: 0 };
        let mut round = ReadRound { claims, load: 0..0, wait: None };
        let length = usize::try_from((pages.end - pages.start) * PAGE).unwrap_or(0);
        for part in parts(pages.start * PAGE, length) {
            let mut shard = self.lock(shard_of(part.frame));
            let missing = part.touched() & !shard.valid(part.frame);
            let missing = missing & !shard.inflight.filling(part.frame, missing).0;
            let missing = missing & !shard.inflight.writing(part.frame, missing);
            let missing = missing & !shard.zeroed(part.frame);
            if missing != 0 && round.takes(part.frame, missing) {
                round.claim(&mut shard, part.frame, missing);
            }
        }
        round
    }

    /// Copies what is in memory, and with `claims` opens fills for what is missing.
    pub(crate) fn round(
        &self,
        buf: &mut [u8],
        start: u64,
        todo: &mut PendingPages,
        claims: bool,
    ) -> ReadRound<'_> {
        let tick = self.cache.tick.load(Ordering::Relaxed);
        let admits = claims && self.cache.admits();
        let claims = OpenFills { volume: self, list: [OpenFill::default(); FRAMES], count: 0 };
        let mut round = ReadRound { claims, load: 0..0, wait: None };
        for part in parts(start, buf.len()) {
            let want = *todo.at(part.frame);
            if want == 0 {
                continue;
            }
            let number = shard_of(part.frame);
            let mut shard = self.lock(number);
            let missing = shard.copy_out(&self.memory, &part, want, &mut buf[part.range()], tick);
            let missing = missing & !shard.fill_blank(&part, missing, &mut buf[part.range()]);
            *todo.at(part.frame) = missing;
            if missing == 0 {
                continue;
            }
            let (filling, fill) = shard.inflight.filling(part.frame, missing);
            if let Some(fill) = fill {
                round.wait = round.wait.or(Some((number, fill)));
            }
            let load = missing & !filling;
            if load == 0 || !round.takes(part.frame, load) {
                continue;
            }
            shard.tally.misses += u64::from(load.count_ones());
            let pages = load & !shard.inflight.writing(part.frame, load);
            if admits && pages != 0 {
                round.claim(&mut shard, part.frame, pages);
            }
        }
        if !round.load.is_empty() {
            self.uses.fetch_add(1, Ordering::Relaxed);
        }
        round
    }
}

impl ReadRound<'_> {
    /// Adds pages of a frame to the store read, unless they are too far from the others.
    fn takes(&mut self, frame: u64, pages: u16) -> bool {
        let first = frame * FRAME_PAGES + u64::from(pages.trailing_zeros());
        let end = (frame + 1) * FRAME_PAGES - u64::from(pages.leading_zeros());
        if self.load.is_empty() {
            self.load = first..end;
        } else if first <= self.load.end + GAP && self.claims.count < FRAMES {
            self.load.end = end;
        } else {
            return false;
        }
        true
    }

    /// Opens a fill.
    fn claim(&mut self, shard: &mut LockedShard<'_>, frame: u64, pages: u16) {
        let fresh = pages & !shard.covered(frame);
        let id = shard.inflight.begin_fill(frame, pages);
        self.claims.list[self.claims.count] = OpenFill { id, frame, pages, fresh };
        self.claims.count += 1;
    }

    /// Whether everything still to be served is being loaded.
    fn wants(&self, todo: &PendingPages) -> bool {
        let left: u32 = todo.pages.iter().map(|pages| pages.count_ones()).sum();
        self.wait.is_none() && u64::from(left) == self.load.end - self.load.start
    }

    /// Inserts loaded data into the cache where permitted, and ends the fills.
    pub(crate) fn keep(mut self, worker: &WorkerMemory, offset: u64, data: &[u8], mut kind: u8) {
        probe::probe!(ebbd, cache_fill, offset, data.len());
        let claims = &mut self.claims;
        let volume = claims.volume;
        for part in parts(offset, data.len()) {
            let Some(at) = claims.list[..claims.count].iter().position(|c| c.frame == part.frame)
            else {
                continue;
            };
            let claim = claims.list[at];
            claims.count -= 1;
            claims.list[at] = claims.list[claims.count];
            // The volume may have been shrunk since the fills were opened.
            let there = part.touched();
            let (claim_pages, fresh) = (claim.pages & there, claim.fresh & there);
            volume.end_fill(worker, claim.id, &part, [claim_pages, fresh], data, kind);
            kind &= !MARK;
        }
    }
}

impl VolumeCache {
    /// Ends a fill of `pages`, of which no buffer covered `fresh`; `data` is that of the whole range the part
    /// belongs to.
    fn end_fill(
        &self,
        worker: &WorkerMemory,
        id: u64,
        part: &FramePart,
        [pages, fresh]: [u16; 2],
        data: &[u8],
        kind: u8,
    ) {
        let tick = self.cache.tick.load(Ordering::Relaxed);
        let data = &data[part.range()];
        let mut prepared = if self.cache.admits() {
            self.prepare(worker, part, fresh, data)
        } else {
            PreparedBuffers::none()
        };
        {
            let mut wakers = Wakers::default();
            let mut shard = self.lock(shard_of(part.frame));
            if shard.inflight.end_fill(id, &mut wakers) {
                shard.update(worker, part, pages & !fresh, pages, data);
                prepared.attach(&mut shard, part.frame, kind, tick);
            }
        }
        prepared.finish(&self.cache, worker);
    }
}

/// Copies the pages of the window that are still to be served and lie in `span` from the loaded data.
pub(crate) fn copy_loaded(
    buf: &mut [u8],
    start: u64,
    todo: &mut PendingPages,
    loaded: &[u8],
    span: &Range<u64>,
) {
    for part in parts(start, buf.len()) {
        let left = todo.at(part.frame);
        for (first, count) in runs(*left) {
            for page in first..first + count {
                let position = part.frame * FRAME + (page * PAGE_BYTES) as u64;
                if !span.contains(&position) {
                    continue;
                }
                let range = part.clip(page, 1);
                let from = index(part.frame * FRAME + range.start as u64 - span.start);
                buf[part.at + range.start - part.from..part.at + range.end - part.from]
                    .copy_from_slice(&loaded[from..from + range.len()]);
                *left &= !crate::pages::mask(page, 1);
            }
        }
    }
}

/// Waits for the end of a fill, a writeback or an in-flight write.
pub(crate) struct InflightWait<'a> {
    pub(crate) volume: &'a VolumeCache,
    pub(crate) shard: usize,
    pub(crate) fill: u64,
    pub(crate) waiter: Option<u64>,
}

impl Future for InflightWait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let volume = self.volume;
        let mut shard = volume.lock(self.shard);
        let waiter = self.waiter.unwrap_or_else(|| shard.inflight.new_waiter());
        if shard.inflight.wait(waiter, self.fill, cx.waker()) {
            self.waiter = Some(waiter);
            Poll::Pending
        } else {
            self.waiter = None;
            Poll::Ready(())
        }
    }
}

impl Drop for InflightWait<'_> {
    fn drop(&mut self) {
        if let Some(waiter) = self.waiter {
            self.volume.lock(self.shard).inflight.forget(waiter);
        }
    }
}
