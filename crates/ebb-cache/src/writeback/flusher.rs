//! The way of dirty data to the store: in the background, and when a flush asks for it.
//!
//! Invariants: the background has one buffer from before anything is dirty; more are taken if they
//! are there, and nothing waits for them. What is sent is told to the [`WritebackControl`] before, and after.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use ebb_mem::SpareHeld;
use ebb_store::{BlockError, Buf, BufResult, ErrorKind, Io, Store};

use super::frames::{Frames, MARKED_AT_ONCE, Turns, WRITTEN_AT_ONCE};
use super::{CLUSTER_MAX, FRAMES, RESERVE, WritebackOrder};
use crate::inflight::Wakers;
use crate::pages::{FRAME, PAGE, PAGE_BYTES, index, mask, runs, within};
use crate::read::Wait;
use crate::volume::{SHARDS, VolumeCache};

/// Writes of one volume's flusher, and of one flush, that are under way at once.
const DEPTH: usize = 64;
const DEPTH_OF_FLUSH: usize = 16;
/// Bytes that one of a flush's writes may have.
const CLUSTER_OF_FLUSH: usize = 256 << 10;
/// After a failure nothing is sent for so long, if the control does not want more.
const AFTER_FAILURE: Duration = Duration::from_millis(100);
/// A flusher without work looks up so often, to see whether it is needed still.
const LOOK_UP: Duration = Duration::from_secs(1);
/// With work that cannot be begun: nothing to take, or no buffer.
const AGAIN: Duration = Duration::from_millis(20);

/// Dirty data on its way.
struct Cluster {
    offset: u64,
    length: usize,
    /// Bytes of its pages.
    bytes: u64,
    taken: [(u64, u64, u16); FRAMES],
    count: usize,
}

/// What a flush works on: each of several writes takes the next frame.
struct Work {
    frames: RefCell<Frames>,
    /// What somebody else has on its way, or what failed.
    left: RefCell<Vec<u64>>,
    failed: RefCell<Option<BlockError>>,
}

impl VolumeCache {
    /// Has all that is dirty of `pages` now on the store, and nothing of it on its way.
    pub(crate) async fn clean(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        pages: &Range<u64>,
    ) -> Result<(), BlockError> {
        let pages = &self.existing(pages);
        // Long lists take memory: those who come meanwhile find less to do in their turn.
        let _turn = match self.lists_much(pages) {
            true => Some(self.writeback.listing.enter().await),
            false => None,
        };
        // What an earlier flush has saved is not looked at again.
        self.drop_clean(io).await;
        let mut frames = self.unsaved_frames(io, pages).await;
        if frames.left() == 0 {
            return Ok(());
        }
        let (buf, _spare) = match self.spare_buffer(io, CLUSTER_MAX, RESERVE) {
            Some((buf, spare)) => (buf, Some(spare)),
            None => (io.pool().take(RESERVE).await, None),
        };
        if frames.left() == 1
            && let Some(frame) = frames.next()
        {
            return self.clean_frame(io, store, (frame, pages), buf).await.0;
        }
        let more = frames.left().min(DEPTH_OF_FLUSH) - 1;
        let work = Work {
            frames: RefCell::new(frames),
            left: RefCell::default(),
            failed: RefCell::default(),
        };
        // Several at once; none of them waits for what is on its way already.
        let more = (0..more).map_while(|_| self.spare_buffer(io, CLUSTER_OF_FLUSH, RESERVE));
        let mut writes: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
        writes.push(Box::pin(self.clean_some(io, store, &work, buf, pages)));
        for (buf, spare) in more {
            let write = self.clean_some(io, store, &work, buf, pages);
            writes.push(Box::pin(async move {
                write.await;
                drop(spare);
            }));
        }
        poll_fn(|cx| {
            writes.retain_mut(|write| write.as_mut().poll(cx).is_pending());
            if writes.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        drop(writes);
        if let Some(error) = work.failed.take() {
            return Err(error);
        }
        let left = work.left.take();
        if left.is_empty() {
            return Ok(());
        }
        let mut buf = io.pool().take(RESERVE).await;
        let mut turns = Turns::default();
        for frame in left {
            turns.done(io, MARKED_AT_ONCE / WRITTEN_AT_ONCE).await;
            let (done, back) = self.clean_frame(io, store, (frame, pages), buf).await;
            buf = back;
            done?;
        }
        Ok(())
    }

    /// Writes one frame after the other, as long as there are any.
    async fn clean_some(
        &self,
        io: &Io,
        store: &Store,
        work: &Work,
        mut buf: Buf,
        pages: &Range<u64>,
    ) {
        let mut turns = Turns::default();
        loop {
            let next = work.frames.borrow_mut().next();
            let Some(frame) = next else { return };
            // Much may have been saved since, and some stores never wait.
            turns.done(io, MARKED_AT_ONCE / WRITTEN_AT_ONCE).await;
            let (result, back) = self.write_frame(io, store, frame, buf).await;
            buf = back;
            if let Err(error) = result {
                *work.failed.borrow_mut() = Some(error);
            }
            let unsaved = self.lock(VolumeCache::shard_of(frame)).unsaved(frame);
            if unsaved & within(frame, pages) != 0 {
                work.left.borrow_mut().push(frame);
            }
        }
    }

    /// Has all of a frame's part of `pages` that the store lacks now on it. Others may have some of it
    /// on its way, at the beginning or in between: that is waited for, and if it failed it is
    /// written here. Each turn but those that wait saves a page at least.
    async fn clean_frame(
        &self,
        io: &Io,
        store: &Store,
        (frame, pages): (u64, &Range<u64>),
        mut buf: Buf,
    ) -> BufResult {
        let number = VolumeCache::shard_of(frame);
        let mut want = self.lock(number).unsaved(frame) & within(frame, pages);
        loop {
            let busy = {
                let shard = self.lock(number);
                // What is neither dirty nor on its way is on the store, or beyond its end by now.
                want &= shard.unsaved(frame) & within(frame, &self.existing(pages));
                shard.flights.cleaning(frame, want).1
            };
            if want == 0 {
                return (Ok(()), buf);
            }
            if let Some(fill) = busy {
                Wait { volume: self, shard: number, fill, waiter: None }.await;
                continue;
            }
            let most = buf.capacity().min(CLUSTER_MAX);
            buf.set_len(most);
            let from = usize::try_from(want.trailing_zeros()).unwrap_or(0);
            // Nothing if another worker was faster: then it is on its way.
            let Some(cluster) = self.take(frame, from, &mut buf) else { continue };
            let taken = cluster.taken[0].2;
            let (result, back) = self.save(io, store, cluster, buf).await;
            buf = back;
            if result.is_err() {
                return (result, buf);
            }
            want &= !taken;
        }
    }

    /// Writes what of a frame is dirty and not on its way, and what follows it.
    async fn write_frame(&self, io: &Io, store: &Store, frame: u64, mut buf: Buf) -> BufResult {
        let mut from = 0;
        while from < 16 {
            let most = buf.capacity().min(CLUSTER_MAX);
            buf.set_len(most);
            let Some(cluster) = self.take(frame, from, &mut buf) else { break };
            from = index((cluster.offset + cluster.length as u64 - frame * FRAME).div_ceil(PAGE));
            let (result, back) = self.save(io, store, cluster, buf).await;
            buf = back;
            if result.is_err() {
                return (result, buf);
            }
        }
        (Ok(()), buf)
    }

    /// Takes the first run of dirty pages from page `from` of `frame` on, and what follows it.
    fn take(&self, frame: u64, from: usize, buf: &mut Buf) -> Option<Cluster> {
        let taken = [(0, 0, 0); FRAMES];
        let mut cluster = Cluster { offset: 0, length: 0, bytes: 0, taken, count: 0 };
        let (mut at, mut from) = (frame, from);
        while cluster.count < FRAMES && cluster.length < buf.len() {
            let mut shard = self.lock(VolumeCache::shard_of(at));
            let ready =
                shard.ready(at) & !mask(0, from) & within(at, &self.existing(&(0..u64::MAX)));
            let room = (buf.len() - cluster.length) / PAGE_BYTES;
            let run = runs(ready).next().map(|(start, count)| (start, count.min(room)));
            let Some((start, count)) = run.filter(|run| run.1 > 0) else { break };
            if cluster.count > 0 && start != 0 {
                break;
            }
            let offset = at * FRAME + (start * PAGE_BYTES) as u64;
            let length =
                index(((count * PAGE_BYTES) as u64).min(self.size().saturating_sub(offset)));
            let pages = mask(start, count);
            let out = &mut buf[cluster.length..cluster.length + length];
            let id = shard.take_dirty(at, pages, out);
            if cluster.count == 0 {
                cluster.offset = offset;
            }
            cluster.taken[cluster.count] = (at, id, pages);
            cluster.count += 1;
            cluster.length += length;
            cluster.bytes += count as u64 * PAGE;
            if start + count < 16 {
                break;
            }
            (at, from) = (at + 1, 0);
        }
        (cluster.count > 0).then_some(cluster)
    }

    /// Writes a cluster, and says what became of its pages.
    async fn save(&self, io: &Io, store: &Store, cluster: Cluster, mut buf: Buf) -> BufResult {
        let Cluster { offset, length, .. } = cluster;
        let sent = ebb_mem::clock::now();
        self.control().sent(sent, cluster.bytes);
        let losses = store.losses();
        let mut pending = Pending { volume: self, store, cluster, sent, losses, saved: false };
        buf.set_len(length);
        let (result, buf) = store.write(io, buf, offset, false).await;
        pending.saved = result.is_ok();
        let full = result.as_ref().is_err_and(|error| error.kind == ErrorKind::NoSpace);
        self.writeback.full.store(full, Ordering::SeqCst);
        drop(pending);
        (result, buf)
    }

    /// Writes back in the background until [`VolumeCache::end_flusher`], or as long as the volume's
    /// cache has other users: a task of one worker.
    pub async fn run_flusher(self: Arc<Self>, io: Io, store: Arc<Store>) {
        let crew = Rc::new(Crew::new(io.pool().take(RESERVE).await));
        let mut resting: Option<Instant> = None;
        while Arc::strong_count(&self) > 1 + crew.in_flight.get() + usize::from(crew.syncing.get())
            && !self.writeback.ended.load(Ordering::SeqCst)
        {
            self.drop_clean(&io).await;
            let now = ebb_mem::clock::now();
            if !crew.syncing.get() && self.wants_sync(now) {
                crew.syncing.set(true);
                io.spawn(sync(crew.clone(), self.clone(), io.clone(), store.clone())).detach();
            }
            let bytes = match self.order(now, crew.not_before.get(), crew.in_flight.get()) {
                WritebackOrder::Write(bytes) => bytes.clamp(PAGE_BYTES, CLUSTER_MAX),
                WritebackOrder::Wait(time) => {
                    resting = (time == LOOK_UP).then(|| *resting.get_or_insert(now));
                    if resting.is_some_and(|since| now - since >= LOOK_UP) {
                        crew.dismiss();
                    }
                    self.writeback.work.wait(&io, time).await;
                    continue;
                }
            };
            resting = None;
            // The one that is always there, or another one.
            let own = crew.reserve.borrow_mut().take();
            let spare = self.spare_buffer(&io, bytes, bytes.min(RESERVE));
            let (mut buf, spare) = match (own, spare) {
                (own, Some((buf, spare))) => {
                    *crew.reserve.borrow_mut() = own;
                    (buf, Some(spare))
                }
                (Some(own), None) => (own, None),
                (None, None) => {
                    self.writeback.work.wait(&io, AGAIN).await;
                    continue;
                }
            };
            let most = buf.capacity().min(bytes.max(PAGE_BYTES));
            buf.set_len(most);
            let Some(cluster) = self.take_oldest(&mut buf) else {
                if spare.is_none() {
                    *crew.reserve.borrow_mut() = Some(buf);
                }
                self.writeback.work.wait(&io, AGAIN).await;
                continue;
            };
            crew.in_flight.set(crew.in_flight.get() + 1);
            let job = Job { volume: self.clone(), cluster, buf, spare };
            if let Some(job) = crew.hand_over(job) {
                let hand = Rc::new(Hand::default());
                io.spawn(work(crew.clone(), hand, job, io.clone(), store.clone())).detach();
            }
        }
        crew.ended.set(true);
        crew.dismiss();
    }

    /// Forgets what was dirty and is saved by now, some at a time: after a flush that may be much.
    async fn drop_clean(&self, io: &Io) {
        let mut turns = Turns::default();
        for shard in 0..SHARDS {
            loop {
                let dropped = self.lock(shard).drop_clean(MARKED_AT_ONCE);
                turns.done(io, dropped).await;
                if dropped < MARKED_AT_ONCE {
                    break;
                }
            }
        }
    }

    /// What the flusher is to do.
    fn order(&self, now: Instant, not_before: Instant, in_flight: usize) -> WritebackOrder {
        let oldest = || {
            let all = (0..SHARDS).filter_map(|shard| self.lock(shard).oldest());
            all.map(|aged| aged.since).min()
        };
        let mut since = oldest();
        if since.is_none() {
            // Looked at again once it is known that the flusher sleeps: then writers wake it.
            self.writeback.idle.store(true, Ordering::SeqCst);
            since = oldest();
        }
        let Some(since) = since else { return WritebackOrder::Wait(LOOK_UP) };
        self.writeback.idle.store(false, Ordering::SeqCst);
        if now < not_before {
            return WritebackOrder::Wait(not_before - now);
        }
        if in_flight >= DEPTH {
            return WritebackOrder::Wait(AGAIN);
        }
        let age = Duration::from_millis(self.cache.millis(now).saturating_sub(since));
        self.control().next(now, self.dirty(), age)
    }

    /// Takes the data that has been dirty for longest, of what is not on its way in an older copy.
    fn take_oldest(&self, buf: &mut Buf) -> Option<Cluster> {
        let mut all = [None; SHARDS];
        for (shard, place) in all.iter_mut().enumerate() {
            *place = self.lock(shard).oldest().map(|aged| (aged.since, aged.frame));
        }
        all.sort_unstable();
        all.iter().flatten().find_map(|(_, frame)| self.take(*frame, 0, buf))
    }

    /// Ends the flusher: the volume was closed. What is dirty stays so.
    pub fn end_flusher(&self) {
        self.writeback.ended.store(true, Ordering::SeqCst);
        self.writeback.work.poke();
    }

    /// Has the first writer that waits ask its [`WritebackControl`](super::WritebackControl) again, and the flusher, too.
    pub fn ask_again(&self) {
        self.writeback.line.first.poke();
        self.writeback.work.poke();
    }
}

/// What one of the crew does next. Between two jobs it holds nothing of the volume.
struct Job {
    volume: Arc<VolumeCache>,
    cluster: Cluster,
    buf: Buf,
    /// What `buf` takes, unless it is the one that is always there.
    spare: Option<SpareHeld>,
}

/// One of the crew, while it waits for its next job.
#[derive(Default)]
struct Hand {
    job: RefCell<Option<Job>>,
    dismissed: Cell<bool>,
    waker: Cell<Option<Waker>>,
}

impl Hand {
    fn wake(&self) {
        self.waker.take().into_iter().for_each(Waker::wake);
    }

    /// The next job, or none when it is dismissed.
    async fn next(&self) -> Option<Job> {
        poll_fn(|cx| {
            let job = self.job.borrow_mut().take();
            if job.is_some() || self.dismissed.get() {
                return Poll::Ready(job);
            }
            self.waker.set(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await
    }
}

/// Tasks that each carry one write to the store at a time: as many as were ever needed at once, so that
/// a write takes nothing from the heap, until nothing is dirty for a while.
struct Crew {
    idle: RefCell<Vec<Rc<Hand>>>,
    in_flight: Cell<usize>,
    /// The buffer that is always there.
    reserve: RefCell<Option<Buf>>,
    not_before: Cell<Instant>,
    ended: Cell<bool>,
    /// The store is being flushed in the background.
    syncing: Cell<bool>,
}

impl Crew {
    fn new(reserve: Buf) -> Crew {
        Crew {
            idle: RefCell::new(Vec::with_capacity(DEPTH)),
            in_flight: Cell::new(0),
            reserve: RefCell::new(Some(reserve)),
            not_before: Cell::new(ebb_mem::clock::now()),
            ended: Cell::new(false),
            syncing: Cell::new(false),
        }
    }

    /// Gives the job to somebody idle; gives it back if there is nobody.
    fn hand_over(&self, job: Job) -> Option<Job> {
        let Some(hand) = self.idle.borrow_mut().pop() else { return Some(job) };
        *hand.job.borrow_mut() = Some(job);
        hand.wake();
        None
    }

    /// Ends those who are idle.
    fn dismiss(&self) {
        for hand in self.idle.borrow_mut().drain(..) {
            hand.dismissed.set(true);
            hand.wake();
        }
    }
}

/// Flushes the store in the background. A failure is left to who flushes next, or to another try.
async fn sync(crew: Rc<Crew>, volume: Arc<VolumeCache>, io: Io, store: Arc<Store>) {
    let _ = volume.stabilize(&io, &store).await;
    crew.syncing.set(false);
    volume.writeback.work.poke();
}

/// One of the crew: writes what it is given, and waits for more.
async fn work(crew: Rc<Crew>, hand: Rc<Hand>, first: Job, io: Io, store: Arc<Store>) {
    let mut next = Some(first);
    while let Some(Job { volume, cluster, buf, spare }) = next {
        let (result, buf) = volume.save(&io, &store, cluster, buf).await;
        if spare.is_none() {
            *crew.reserve.borrow_mut() = Some(buf);
        } else {
            drop((buf, spare));
        }
        if let Err(error) = result {
            *volume.writeback.failed.lock() = Some(error);
            crew.not_before.set(ebb_mem::clock::now() + AFTER_FAILURE);
        }
        crew.in_flight.set(crew.in_flight.get() - 1);
        volume.writeback.work.poke();
        drop(volume);
        if crew.ended.get() {
            return;
        }
        crew.idle.borrow_mut().push(hand.clone());
        next = hand.next().await;
    }
}

/// A cluster that is being written. Dropped before its end its pages are dirty again.
struct Pending<'a> {
    volume: &'a VolumeCache,
    store: &'a Store,
    cluster: Cluster,
    sent: Instant,
    /// The store's losses when it began.
    losses: u64,
    saved: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let now = ebb_mem::clock::now();
        let millis = self.volume.cache.millis(now);
        let keep = self.volume.keeps();
        let (mut twice, mut saved_pages, mut failed_pages) = (0, 0, 0);
        for &(frame, id, pages) in &self.cluster.taken[..self.cluster.count] {
            let mut wakers = Wakers::default();
            let mut shard = self.volume.lock(VolumeCache::shard_of(frame));
            // Under the lock: who sees to a loss looks at this shard after it was counted.
            let saved = self.saved && self.store.losses() == self.losses;
            let again = shard.end_clean(frame, (id, pages), (saved, keep), millis, &mut wakers);
            let count = u64::from(pages.count_ones());
            if saved {
                saved_pages += count;
            } else {
                twice += again;
                failed_pages += count;
            }
        }
        let control = self.volume.control();
        for (pages, saved) in [(saved_pages, true), (failed_pages, false)] {
            if pages > 0 {
                control.written(now, pages * PAGE, self.sent, saved);
            }
        }
        if twice > 0 {
            control.unused(twice * PAGE);
        }
    }
}
