//! Writes dirty data to the store: in the background, and for a flush.
//!
//! Invariants: the flusher owns one buffer from before anything is dirty; it takes more if they are available
//! and never waits for them. It notifies the [`WritebackControl`] before and after each write.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use ebb_block::{BlockError, BlockStore, Buf, BufResult, ErrorKind, Io};
use ebb_mem::SpareHeld;

use super::frames::{Frames, MARKED_AT_ONCE, WRITTEN_AT_ONCE, YieldCounter};
use super::{FRAMES, RESERVE};
use crate::inflight::Wakers;
use crate::pages::{FRAME, PAGE, PAGE_BYTES, index, mask, runs, within};
use crate::read::InflightWait;
use crate::shard::{SHARDS, shard_of};
use crate::volume::{StoreCache, VolumeCache};
use crate::writeback_state::{CLUSTER_MAX, WritebackOrder};

/// Concurrent writes of one volume's flusher, and of one flush.
const DEPTH: usize = 64;
const DEPTH_OF_FLUSH: usize = 16;
/// Maximum bytes of one write of a flush.
const CLUSTER_OF_FLUSH: usize = 256 << 10;
/// After a failure nothing is sent for this long, unless the control asks for a longer wait.
const AFTER_FAILURE: Duration = Duration::from_millis(100);
/// A flusher without work wakes up this often to check whether the volume is still in use.
const IDLE_CHECK: Duration = Duration::from_secs(1);
/// Delay when there is work that cannot begin: nothing to take, or no buffer.
const RETRY: Duration = Duration::from_millis(20);

/// Dirty data on its way to the store.
struct Cluster {
    offset: u64,
    length: usize,
    /// Bytes of its pages.
    bytes: u64,
    taken: [(u64, u64, u16); FRAMES],
    count: usize,
}

/// The work of one flush, shared by its concurrent writes: each takes the next frame.
struct FlushWork {
    frames: RefCell<Frames>,
    /// Frames under writeback by another task, or that failed.
    left: RefCell<Vec<u64>>,
    failed: RefCell<Option<BlockError>>,
}

impl StoreCache {
    /// Writes back everything of `pages` that is dirty now, and waits until none of it is under writeback.
    pub(crate) async fn clean(&self, io: &Io, pages: &Range<u64>) -> Result<(), BlockError> {
        let pages = &self.existing(pages);
        // Long lists take memory: later flushes wait for this one and then have less to list.
        let _guard = match self.lists_many_frames(pages) {
            true => Some(self.writeback.listing.enter().await),
            false => None,
        };
        // Frames that an earlier flush has written are not visited again.
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
            return self.clean_frame(io, (frame, pages), buf).await.0;
        }
        let more = frames.left().min(DEPTH_OF_FLUSH) - 1;
        let work = FlushWork {
            frames: RefCell::new(frames),
            left: RefCell::default(),
            failed: RefCell::default(),
        };
        // Several writes at once; none of them waits for what is already under writeback.
        let more = (0..more).map_while(|_| self.spare_buffer(io, CLUSTER_OF_FLUSH, RESERVE));
        let mut writes: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
        writes.push(Box::pin(self.clean_some(io, &work, buf, pages)));
        for (buf, spare) in more {
            let write = self.clean_some(io, &work, buf, pages);
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
        let mut yields = YieldCounter::default();
        for frame in left {
            yields.done(io, MARKED_AT_ONCE / WRITTEN_AT_ONCE).await;
            let (done, back) = self.clean_frame(io, (frame, pages), buf).await;
            buf = back;
            done?;
        }
        Ok(())
    }

    /// Writes one frame after the other while there are any.
    async fn clean_some(&self, io: &Io, work: &FlushWork, mut buf: Buf, pages: &Range<u64>) {
        let mut yields = YieldCounter::default();
        loop {
            let next = work.frames.borrow_mut().next();
            let Some(frame) = next else { return };
            // Much may have been written since, and some stores never wait.
            yields.done(io, MARKED_AT_ONCE / WRITTEN_AT_ONCE).await;
            let (result, back) = self.write_frame(io, frame, buf).await;
            buf = back;
            if let Err(error) = result {
                *work.failed.borrow_mut() = Some(error);
            }
            let unsaved = self.lock(shard_of(frame)).unsaved(frame);
            if unsaved & within(frame, pages) != 0 {
                work.left.borrow_mut().push(frame);
            }
        }
    }

    /// Writes back everything of a frame's part of `pages` that the store lacks now. Other tasks may have
    /// parts of it under writeback, before or in between: this waits for them, and writes their pages here if
    /// they failed. Every iteration that does not wait writes at least one page.
    async fn clean_frame(
        &self,
        io: &Io,
        (frame, pages): (u64, &Range<u64>),
        mut buf: Buf,
    ) -> BufResult {
        let number = shard_of(frame);
        let mut want = self.lock(number).unsaved(frame) & within(frame, pages);
        loop {
            let busy = {
                let shard = self.lock(number);
                // What is neither dirty nor under writeback is on the store, or beyond its end by now.
                want &= shard.unsaved(frame) & within(frame, &self.existing(pages));
                shard.inflight.cleaning(frame, want).1
            };
            if want == 0 {
                return (Ok(()), buf);
            }
            if let Some(fill) = busy {
                InflightWait { volume: self, shard: number, fill, waiter: None }.await;
                continue;
            }
            let most = buf.capacity().min(CLUSTER_MAX);
            buf.set_len(most);
            let from = usize::try_from(want.trailing_zeros()).unwrap_or(0);
            // Nothing if another worker was faster: then the page is under writeback.
            let Some(cluster) = self.take(frame, from, &mut buf) else { continue };
            let taken = cluster.taken[0].2;
            let (result, back) = self.save(io, cluster, buf).await;
            buf = back;
            if result.is_err() {
                return (result, buf);
            }
            want &= !taken;
        }
    }

    /// Writes the pages of a frame that are dirty and not under writeback, and the dirty pages that follow.
    async fn write_frame(&self, io: &Io, frame: u64, mut buf: Buf) -> BufResult {
        let mut from = 0;
        while from < 16 {
            let most = buf.capacity().min(CLUSTER_MAX);
            buf.set_len(most);
            let Some(cluster) = self.take(frame, from, &mut buf) else { break };
            from = index((cluster.offset + cluster.length as u64 - frame * FRAME).div_ceil(PAGE));
            let (result, back) = self.save(io, cluster, buf).await;
            buf = back;
            if result.is_err() {
                return (result, buf);
            }
        }
        (Ok(()), buf)
    }

    /// Takes the first run of dirty pages from page `from` of `frame` on, and the dirty pages that follow.
    fn take(&self, frame: u64, from: usize, buf: &mut Buf) -> Option<Cluster> {
        let taken = [(0, 0, 0); FRAMES];
        let mut cluster = Cluster { offset: 0, length: 0, bytes: 0, taken, count: 0 };
        let (mut at, mut from) = (frame, from);
        while cluster.count < FRAMES && cluster.length < buf.len() {
            let mut shard = self.lock(shard_of(at));
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

    /// Writes a cluster and records the result for its pages.
    async fn save(&self, io: &Io, cluster: Cluster, mut buf: Buf) -> BufResult {
        let Cluster { offset, length, .. } = cluster;
        let sent = ebb_mem::clock::now();
        self.control().sent(sent, cluster.bytes);
        let losses = self.store.losses();
        let mut pending = InflightCluster { volume: self, cluster, sent, losses, saved: false };
        buf.set_len(length);
        let (result, buf) = self.store.write(io, buf, offset, false).await;
        pending.saved = result.is_ok();
        let full = result.as_ref().is_err_and(|error| error.kind == ErrorKind::NoSpace);
        self.writeback.full.store(full, Ordering::SeqCst);
        self.control().note_full(full);
        drop(pending);
        (result, buf)
    }

    /// Writes back in the background until [`VolumeCache::end_flusher`], or while the volume's cache has
    /// other users. Runs as a task of one worker.
    pub async fn run_flusher(self, io: Io) {
        let tasks = Rc::new(WritebackTasks::new(io.pool().take(RESERVE).await));
        let mut resting: Option<Instant> = None;
        while self.users() > 1 + tasks.in_flight.get() + usize::from(tasks.syncing.get())
            && !self.writeback.ended.load(Ordering::SeqCst)
        {
            self.drop_clean(&io).await;
            let now = ebb_mem::clock::now();
            if !tasks.syncing.get() && self.wants_sync(now) {
                tasks.syncing.set(true);
                io.spawn(sync(tasks.clone(), self.clone(), io.clone())).detach();
            }
            let bytes = match self.order(now, tasks.not_before.get(), tasks.in_flight.get()) {
                WritebackOrder::Write(bytes) => bytes.clamp(PAGE_BYTES, CLUSTER_MAX),
                WritebackOrder::Wait(time) => {
                    resting = (time == IDLE_CHECK).then(|| *resting.get_or_insert(now));
                    if resting.is_some_and(|since| now - since >= IDLE_CHECK) {
                        tasks.end_idle_tasks();
                    }
                    self.writeback.flusher_sleep.wait(&io, time).await;
                    continue;
                }
            };
            resting = None;
            // The reserved buffer, or another one.
            let own = tasks.reserve.borrow_mut().take();
            let spare = self.spare_buffer(&io, bytes, bytes.min(RESERVE));
            let (mut buf, spare) = match (own, spare) {
                (own, Some((buf, spare))) => {
                    *tasks.reserve.borrow_mut() = own;
                    (buf, Some(spare))
                }
                (Some(own), None) => (own, None),
                (None, None) => {
                    self.writeback.flusher_sleep.wait(&io, RETRY).await;
                    continue;
                }
            };
            let most = buf.capacity().min(bytes.max(PAGE_BYTES));
            buf.set_len(most);
            let Some(cluster) = self.take_oldest(&mut buf) else {
                if spare.is_none() {
                    *tasks.reserve.borrow_mut() = Some(buf);
                }
                self.writeback.flusher_sleep.wait(&io, RETRY).await;
                continue;
            };
            tasks.in_flight.set(tasks.in_flight.get() + 1);
            let job = WritebackJob { volume: self.clone(), cluster, buf, spare };
            if let Some(job) = tasks.assign(job) {
                let task = Rc::new(WritebackTask::default());
                io.spawn(work(tasks.clone(), task, job, io.clone())).detach();
            }
        }
        tasks.ended.set(true);
        tasks.end_idle_tasks();
    }

    /// Drops frames that are clean by now from the list of dirty ones, in steps: after a flush there may be
    /// many.
    async fn drop_clean(&self, io: &Io) {
        let mut yields = YieldCounter::default();
        for shard in 0..SHARDS {
            loop {
                let dropped = self.lock(shard).drop_clean(MARKED_AT_ONCE);
                yields.done(io, dropped).await;
                if dropped < MARKED_AT_ONCE {
                    break;
                }
            }
        }
    }

    /// What the flusher does next.
    fn order(&self, now: Instant, not_before: Instant, in_flight: usize) -> WritebackOrder {
        let oldest = || {
            let all = (0..SHARDS).filter_map(|shard| self.lock(shard).oldest());
            all.map(|aged| aged.since).min()
        };
        let mut since = oldest();
        if since.is_none() {
            // Check again once writers can see that the flusher sleeps: then they wake it.
            self.writeback.idle.store(true, Ordering::SeqCst);
            since = oldest();
        }
        let Some(since) = since else {
            self.forget_full();
            return WritebackOrder::Wait(IDLE_CHECK);
        };
        self.writeback.idle.store(false, Ordering::SeqCst);
        if now < not_before {
            return WritebackOrder::Wait(not_before - now);
        }
        if in_flight >= DEPTH {
            return WritebackOrder::Wait(RETRY);
        }
        let age = Duration::from_millis(self.cache.millis(now).saturating_sub(since));
        self.control().next(now, self.dirty(), age)
    }

    /// The store counts as full only while there is data for it.
    fn forget_full(&self) {
        // Data under writeback is still dirty for this, and its write notes what it finds before
        // that ends.
        if self.dirty() == 0 && self.writeback.full.swap(false, Ordering::SeqCst) {
            self.control().note_full(false);
        }
    }

    /// Takes the data that has been dirty for longest and has no older copy under writeback.
    fn take_oldest(&self, buf: &mut Buf) -> Option<Cluster> {
        let mut all = [None; SHARDS];
        for (shard, place) in all.iter_mut().enumerate() {
            *place = self.lock(shard).oldest().map(|aged| (aged.since, aged.frame));
        }
        all.sort_unstable();
        all.iter().flatten().find_map(|(_, frame)| self.take(*frame, 0, buf))
    }
}

impl VolumeCache {
    /// Ends the flusher: the volume was closed. Dirty data stays dirty.
    pub fn end_flusher(&self) {
        self.writeback.ended.store(true, Ordering::SeqCst);
        self.writeback.flusher_sleep.interrupt();
    }

    /// Wakes the first waiting writer, and the flusher, to consult the
    /// [`WritebackControl`](crate::WritebackControl) again.
    pub fn retry_reservation(&self) {
        self.writeback.writer_queue.first.interrupt();
        self.writeback.flusher_sleep.interrupt();
    }
}

/// What a writeback task does next. Between two jobs a task holds nothing of the volume.
struct WritebackJob {
    volume: StoreCache,
    cluster: Cluster,
    buf: Buf,
    /// The memory charged for `buf`, unless it is the reserved buffer.
    spare: Option<SpareHeld>,
}

/// A writeback task while it waits for its next job.
#[derive(Default)]
struct WritebackTask {
    job: RefCell<Option<WritebackJob>>,
    ended_by_flusher: Cell<bool>,
    waker: Cell<Option<Waker>>,
}

impl WritebackTask {
    fn wake(&self) {
        self.waker.take().into_iter().for_each(Waker::wake);
    }

    /// The next job; `None` when the task is to end.
    async fn next(&self) -> Option<WritebackJob> {
        poll_fn(|cx| {
            let job = self.job.borrow_mut().take();
            if job.is_some() || self.ended_by_flusher.get() {
                return Poll::Ready(job);
            }
            self.waker.set(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await
    }
}

/// Tasks that each carry one write to the store at a time. There are as many as were ever needed at once, so
/// that a write allocates nothing; they end when nothing has been dirty for a while.
struct WritebackTasks {
    idle: RefCell<Vec<Rc<WritebackTask>>>,
    in_flight: Cell<usize>,
    /// The reserved buffer.
    reserve: RefCell<Option<Buf>>,
    not_before: Cell<Instant>,
    ended: Cell<bool>,
    /// The store is being flushed in the background.
    syncing: Cell<bool>,
}

impl WritebackTasks {
    fn new(reserve: Buf) -> WritebackTasks {
        WritebackTasks {
            idle: RefCell::new(Vec::with_capacity(DEPTH)),
            in_flight: Cell::new(0),
            reserve: RefCell::new(Some(reserve)),
            not_before: Cell::new(ebb_mem::clock::now()),
            ended: Cell::new(false),
            syncing: Cell::new(false),
        }
    }

    /// Assigns the job to an idle task; returns it if there is none.
    fn assign(&self, job: WritebackJob) -> Option<WritebackJob> {
        let Some(task) = self.idle.borrow_mut().pop() else { return Some(job) };
        *task.job.borrow_mut() = Some(job);
        task.wake();
        None
    }

    /// Ends the idle tasks.
    fn end_idle_tasks(&self) {
        for task in self.idle.borrow_mut().drain(..) {
            task.ended_by_flusher.set(true);
            task.wake();
        }
    }
}

/// Flushes the store in the background. The next flush, or a later attempt, reports a failure.
async fn sync(tasks: Rc<WritebackTasks>, volume: StoreCache, io: Io) {
    let _ = volume.stabilize(&io).await;
    tasks.syncing.set(false);
    volume.writeback.flusher_sleep.interrupt();
}

/// A writeback task: carries out its job and waits for more.
async fn work(tasks: Rc<WritebackTasks>, task: Rc<WritebackTask>, first: WritebackJob, io: Io) {
    let mut next = Some(first);
    while let Some(WritebackJob { volume, cluster, buf, spare }) = next {
        let (result, buf) = volume.save(&io, cluster, buf).await;
        if spare.is_none() {
            *tasks.reserve.borrow_mut() = Some(buf);
        } else {
            drop((buf, spare));
        }
        if result.is_err() {
            tasks.not_before.set(ebb_mem::clock::now() + AFTER_FAILURE);
        }
        tasks.in_flight.set(tasks.in_flight.get() - 1);
        volume.writeback.flusher_sleep.interrupt();
        drop(volume);
        if tasks.ended.get() {
            return;
        }
        tasks.idle.borrow_mut().push(task.clone());
        next = task.next().await;
    }
}

/// A cluster that is being written. If it is dropped before completion, its pages are dirty again.
struct InflightCluster<'a> {
    volume: &'a StoreCache,
    cluster: Cluster,
    sent: Instant,
    /// The store's loss counter when it began.
    losses: u64,
    saved: bool,
}

impl Drop for InflightCluster<'_> {
    fn drop(&mut self) {
        let now = ebb_mem::clock::now();
        let millis = self.volume.cache.millis(now);
        let (mut twice, mut saved_pages, mut failed_pages) = (0, 0, 0);
        for &(frame, id, pages) in &self.cluster.taken[..self.cluster.count] {
            let mut wakers = Wakers::default();
            let mut shard = self.volume.lock(shard_of(frame));
            // Under the lock: the repair of a loss visits this shard after the loss was counted.
            let saved = self.saved && self.volume.store.losses() == self.losses;
            let keep = self.volume.keeps();
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
