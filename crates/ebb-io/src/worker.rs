//! A worker thread: its run queue, its event loop, and the interface for other threads.
//!
//! One iteration of the loop: run ready tasks (at most [`TASKS_PER_ITERATION`], so that completions are processed
//! in between), submit and wait in one system call, wake the tasks of completions and timers. While requests come
//! quickly, the worker polls for a moment before it waits ([`crate::busy_poll`]).
//!
//! Wakers may be used from any thread: on the worker itself they push to the run queue; on other threads
//! they use a locked inbox and an eventfd, which are not on any data path.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::hint::spin_loop;
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use async_task::Runnable;
use ebb_mem::{Memory, OwnerId};
use ebb_param::Parameter;
use ebb_sandbox::{Mechanism, Unlisted};

use crate::buf::BufPool;
use crate::busy_poll::{PollList, PollParameters, PollSource};
use crate::iteration::{CompletionLoad, IterationWaiters};
use crate::iteration_clock::IterationClock;
use crate::offload;
use crate::per_worker::{OwnSlot, WorkerSlot};
use crate::remote::{READY, Starter, WORKER, WorkerRemote};
use crate::ring::IoRing;
use crate::signal::Budget;
use crate::tasks::{Tasks, TrackedFuture, note_worker_ends};
use crate::timer::Timers;

#[cfg(feature = "sim")]
mod stepped;

#[cfg(feature = "sim")]
pub(crate) use stepped::SteppedWorker;

/// A spawned task; dropping it cancels the task, `detach` lets it run to completion.
pub type Task<T> = async_task::Task<T>;

/// How many ready tasks one iteration runs at most; one that is ready again counts again.
const TASKS_PER_ITERATION: usize = 512;
/// Memory ceiling of a worker with its own memory.
#[cfg(any(test, feature = "testing"))]
const ALONE_BYTES: usize = 256 << 20;
/// Checks for work between two looks at the clock while the worker polls.
const CHECKS: u32 = 16;
/// The longest wait while no alarm can be armed.
const UNARMED: Duration = Duration::from_millis(1);
/// How often the worker queries when its memory needs maintenance next.
const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(100);
/// How long a stopping worker waits until the kernel has released its buffers.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Statistics of one worker since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats {
    /// System calls made to submit and wait.
    pub enters: u64,
    /// Operations started.
    pub operations: u64,
    /// Polls before sleep that found work, and that did not; see [`PollParameters`].
    pub polls: u64,
    /// See `polls`.
    pub unsuccessful_polls: u64,
}

struct WorkerCore {
    ring: IoRing,
    load: CompletionLoad,
    clock: IterationClock,
    polls: Rc<PollList>,
    memory: ebb_mem::WorkerMemory,
    /// When the memory needs maintenance next, and when that was last queried.
    maintain_at: Cell<Option<Instant>>,
    maintenance_queried: Cell<Option<Instant>>,
    /// The kernel can wait for several completions with a deadline.
    linger: bool,
    timers: Timers,
    /// Tasks that run after completions have been processed next.
    waiters: RefCell<IterationWaiters>,
    pool: BufPool,
    offload: Rc<Budget>,
    offload_files: offload::FileBudgets,
    tasks: Rc<Tasks>,
    slot: OwnSlot,
    shared: Arc<WorkerRemote>,
}

/// The interface of a worker for its tasks: spawn, wait, read, write. Cheap to clone; stays on its thread.
#[derive(Clone)]
pub struct Io(Rc<WorkerCore>);

impl Io {
    pub(crate) fn ring(&self) -> &IoRing {
        &self.0.ring
    }

    #[cfg(test)]
    pub(crate) fn polls(&self) -> &PollList {
        &self.0.polls
    }

    pub(crate) fn clock(&self) -> &IterationClock {
        &self.0.clock
    }

    pub(crate) fn timers(&self) -> &Timers {
        &self.0.timers
    }

    pub(crate) fn offload_budget(&self) -> &Rc<Budget> {
        &self.0.offload
    }

    pub(crate) fn file_budgets(&self) -> &offload::FileBudgets {
        &self.0.offload_files
    }

    /// True while there are few completions per iteration, so that batching would not help.
    pub(crate) fn is_light(&self) -> bool {
        self.0.load.is_light()
    }

    /// True if the caller may execute an operation without the ring: while requests arrive one by one,
    /// so that batching would not help, and once per iteration.
    pub(crate) fn take_direct(&self) -> bool {
        self.0.load.take_direct()
    }

    /// Where this worker counts.
    #[inline]
    pub fn slot(&self) -> WorkerSlot {
        self.0.slot.slot()
    }

    /// The worker's buffer pool.
    pub fn pool(&self) -> &BufPool {
        &self.0.pool
    }

    /// Runs `future` on this worker, concurrently with the caller.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Task<T> {
        let shared = self.0.shared.clone();
        let (index, future) = TrackedFuture::new(future, &self.0.tasks);
        let (runnable, task) = async_task::spawn_local(future, move |r| shared.schedule(r));
        self.0.tasks.set_waker(index, runnable.waker());
        runnable.schedule();
        task
    }

    /// Lets other ready tasks run first.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|cx| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// Waits for the next iteration of the worker's loop: until all ready tasks have run and completions were
    /// processed. The worker does not sleep before. For tasks that poll shared memory.
    pub async fn next_iteration(&self) {
        let mut waited = false;
        std::future::poll_fn(|cx| {
            if std::mem::replace(&mut waited, true) {
                return Poll::Ready(());
            }
            self.0.waiters.borrow_mut().polling.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// As [`Io::next_iteration`], for tasks that have much to do: runs after all other tasks, and does not count
    /// for [`Io::has_other_work`] of other such tasks.
    pub async fn yield_iteration(&self) {
        let mut waited = false;
        std::future::poll_fn(|cx| {
            let waiting = &mut *self.0.waiters.borrow_mut();
            if std::mem::replace(&mut waited, true) {
                waiting.bulk_woken = waiting.bulk_woken.saturating_sub(1);
                return Poll::Ready(());
            }
            waiting.bulk.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// True if another task of this worker should run soon: a task is ready or polls, operations wait to be
    /// submitted, completions to be processed, or a lightly loaded source in shared memory has requests. A task that has much to do checks this to decide how long it
    /// continues; tasks in [`Io::yield_iteration`] do not count.
    pub fn has_other_work(&self) -> bool {
        let waiting = self.0.waiters.borrow();
        !waiting.polling.is_empty()
            || self.0.polls.has_light()
            || READY.with_borrow(|ready| ready.len() > waiting.bulk_woken)
            || self.0.ring.has_work()
    }

    /// A source of requests that arrive through the ring: a socket.
    pub fn poll_source(&self) -> PollSource {
        PollSource::new(self.0.polls.clone(), None)
    }

    /// A source of requests in shared memory; `check` says whether there are any.
    pub fn poll_source_in_memory(&self, check: impl Fn() -> bool + 'static) -> PollSource {
        PollSource::new(self.0.polls.clone(), Some(Box::new(check)))
    }

    /// Statistics of this worker.
    pub fn stats(&self) -> WorkerStats {
        let ring = &self.0.ring;
        WorkerStats {
            enters: ring.enters.get(),
            operations: ring.operations.get(),
            polls: self.0.polls.found.get(),
            unsuccessful_polls: self.0.polls.missed.get(),
        }
    }

    /// Sets up the worker of this thread.
    fn new(
        ring: IoRing,
        shared: Arc<WorkerRemote>,
        (memory, owner): (&Arc<Memory>, OwnerId),
        polling: Arc<PollParameters>,
    ) -> Io {
        WORKER.set(shared.id);
        note_worker_ends(false);
        let waker = shared.clone();
        let memory = memory.worker(move || waker.signal_wake());
        Io(Rc::new(WorkerCore {
            load: CompletionLoad::default(),
            clock: IterationClock::new(ebb_mem::clock::now()),
            polls: Rc::new(PollList::new(polling, ebb_mem::clock::now())),
            maintain_at: Cell::default(),
            maintenance_queried: Cell::default(),
            linger: ring.can_linger(),
            timers: Timers::default(),
            waiters: RefCell::default(),
            pool: BufPool::new(memory.clone(), owner),
            offload: Budget::new(offload::AT_ONCE),
            offload_files: offload::FileBudgets::default(),
            tasks: Rc::default(),
            slot: OwnSlot::take(),
            ring,
            memory,
            shared,
        }))
    }

    fn run(&self) {
        let core = &*self.0;
        // Also when a task panics: the kernel must have released all memory before it is freed.
        let _end = WindDown(self);
        let mut rearm = true;
        while !core.shared.stop.load(Ordering::Acquire) {
            self.iterate(&mut rearm, true);
        }
    }

    /// One iteration of the loop, which may `sleep` if there is nothing to do. Returns whether anything was
    /// done.
    fn iterate(&self, rearm: &mut bool, sleep: bool) -> bool {
        let core = &*self.0;
        if *rearm {
            *rearm = !core.ring.arm_wake(core.shared.wake.as_raw_fd());
        }
        let ran = run_ready();
        let polling = !core.waiters.borrow().is_empty();
        let ready = READY.with_borrow(|ready| !ready.is_empty());
        let busy = polling || ready || core.ring.has_unreported();
        let mut polled = polling;
        if busy || !sleep {
            if core.ring.wants_enter() {
                core.ring.enter(0, None, None);
            }
            if !core.polls.is_empty() {
                core.polls.check();
            }
        } else {
            polled = self.poll_before_sleep();
            if !polled {
                self.sleep_in_ring();
            } else if core.ring.wants_enter() {
                core.ring.enter(0, None, None);
            }
        }
        let reaped = core.ring.reap();
        *rearm |= reaped.rearm;
        // An iteration that only polled says nothing about the number of completions per wait.
        if reaped.count > 0 || !polled {
            core.load.note(reaped.count);
        }
        if polling {
            core.waiters.borrow_mut().wake();
        }
        if reaped.woken {
            self.read_inbox();
        }
        let now = ebb_mem::clock::now();
        core.clock.begin(now);
        core.polls.set_now(now);
        if !core.polls.is_empty() {
            core.polls.expire(now);
        }
        core.timers.fire(now);
        self.maintain_memory(now);
        ran || busy || reaped.count > 0
    }

    /// Polls instead of sleeping, if that is worthwhile; see [`crate::busy_poll`]. True if there is something to do:
    /// work was found, a timer is due, or a task has to wait for an event instead of being polled for.
    fn poll_before_sleep(&self) -> bool {
        let core = &*self.0;
        if core.polls.is_empty() {
            return false;
        }
        if core.polls.check() {
            return true;
        }
        let started = ebb_mem::clock::now();
        if core.polls.expire(started) {
            return true;
        }
        // Under load, waiting for several completions is better than finding each one early.
        let permission = if core.load.is_light() { core.polls.begin(started) } else { None };
        let Some((_polling, until)) = permission else { return core.polls.give_up() };
        if core.ring.wants_enter() {
            core.ring.enter(0, None, None);
        }
        if core.ring.has_work() {
            return true;
        }
        let next = self.next_deadline(started);
        let until = next.map_or(until, |next| next.min(until));
        loop {
            for _ in 0..CHECKS {
                spin_loop();
                if core.ring.has_work() || core.polls.check() {
                    core.polls.note_poll(true, Duration::ZERO);
                    return true;
                }
            }
            let now = ebb_mem::clock::now();
            if now >= until {
                core.polls.note_poll(false, now.saturating_duration_since(started));
                return core.polls.expire(now) || next.is_some_and(|next| next <= now);
            }
        }
    }

    /// When there is something to do, if nothing else happens before.
    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        [self.0.timers.next_deadline(), self.next_maintenance(now)].into_iter().flatten().min()
    }

    /// Waits for a completion or an alarm: a timer, or the time to release idle buffers.
    fn sleep_in_ring(&self) {
        let core = &*self.0;
        let now = ebb_mem::clock::now();
        // A simulation's time does not pass during sleep.
        let next = self.next_deadline(now).filter(|_| !ebb_mem::clock::is_virtual());
        let (want, linger) = if core.linger { core.load.batch() } else { (1, None) };
        if next.is_some_and(|at| !core.ring.wake_at(at, now)) {
            return core.ring.enter(1, Some(UNARMED), None);
        }
        core.ring.enter(want, None, linger);
    }

    /// Lets the memory return, lend or squeeze free buffers that are due, or as another thread requested.
    fn maintain_memory(&self, now: Instant) {
        let core = &*self.0;
        if core.memory.needs_poll() || core.maintain_at.get().is_some_and(|at| at <= now) {
            core.maintain_at.set(None);
            core.memory.poll(now);
        }
    }

    /// When the memory needs maintenance next. Queried at most every [`MAINTENANCE_INTERVAL`], since the
    /// query visits every queue.
    fn next_maintenance(&self, now: Instant) -> Option<Instant> {
        let core = &*self.0;
        if core.maintain_at.get().is_none() {
            let soon = core
                .maintenance_queried
                .get()
                .map(|at| at + MAINTENANCE_INTERVAL)
                .filter(|at| *at > now);
            let next = soon.or_else(|| {
                core.maintenance_queried.set(Some(now));
                core.memory.next_deadline()
            });
            core.maintain_at.set(next);
        }
        core.maintain_at.get()
    }

    fn read_inbox(&self) {
        let mut counter = [0u8; 8];
        let fd = self.0.shared.wake.as_raw_fd();
        // SAFETY: eight writable bytes; the eventfd is non-blocking.
        unsafe { libc::read(fd, counter.as_mut_ptr().cast(), counter.len()) };
        let inbox = {
            let mut inbox = self.0.shared.inbox();
            std::mem::take(&mut *inbox)
        };
        READY.with_borrow_mut(|ready| ready.extend(inbox.runnables));
        for start in inbox.starters {
            start(self);
        }
    }

    /// Drops all tasks, and waits until the kernel has released all memory.
    fn wind_down(&self) {
        let core = &*self.0;
        note_worker_ends(true);
        let starters = {
            let mut inbox = core.shared.inbox();
            inbox.closed = true;
            std::mem::take(&mut inbox.starters)
        };
        drop(starters);
        let deadline = Instant::now() + STOP_TIMEOUT;
        // Repeated until none is left: dropping a task may spawn tasks, and another thread that is
        // waking one may not have put it into the inbox yet.
        while !core.tasks.is_empty() && Instant::now() < deadline {
            core.tasks.wake_all();
            let sent = std::mem::take(&mut core.shared.inbox().runnables);
            drop(sent);
            while let Some(runnable) = READY.with_borrow_mut(VecDeque::pop_front) {
                drop(runnable);
            }
            std::thread::yield_now();
        }
        core.timers.clear();
        core.ring.shut_down(STOP_TIMEOUT);
    }
}

struct WindDown<'a>(&'a Io);

impl Drop for WindDown<'_> {
    fn drop(&mut self) {
        self.0.wind_down();
    }
}

/// Runs ready tasks; false if there were none.
fn run_ready() -> bool {
    for count in 0..TASKS_PER_ITERATION {
        let Some(runnable) = READY.with_borrow_mut(next_ready) else { return count > 0 };
        runnable.run();
    }
    true
}

/// The next task to run: the first in the queue, or in a simulation one chosen by the seed.
fn next_ready(ready: &mut VecDeque<Runnable>) -> Option<Runnable> {
    #[cfg(feature = "sim")]
    if let Some(at) = crate::sim::choose(ready.len()) {
        return ready.swap_remove_front(at);
    }
    ready.pop_front()
}

/// A handle by which other threads spawn tasks on a worker.
#[derive(Clone)]
pub struct WorkerHandle(Arc<WorkerRemote>);

impl WorkerHandle {
    /// Runs the future that `start` creates on the worker. Dropped if the worker has
    /// stopped.
    pub fn spawn<F, Fut>(&self, start: F)
    where
        F: FnOnce(Io) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        let starter: Starter = Box::new(move |io: &Io| io.spawn(start(io.clone())).detach());
        self.0.start(starter);
    }

    /// As [`WorkerHandle::spawn`], and blocks the calling thread until the future has completed. `None`
    /// if the worker stopped before.
    pub fn block_on<F, Fut, T>(&self, start: F) -> Option<T>
    where
        F: FnOnce(Io) -> Fut + Send + 'static,
        Fut: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        self.spawn(move |io| {
            let future = start(io);
            async move {
                let _ = sender.send(future.await);
            }
        });
        receiver.recv().ok()
    }
}

/// A running worker. Dropping it stops the thread: tasks are dropped, and the thread ends when the kernel has
/// released all buffers. Stopping does not drain: let requests complete before.
///
/// A panic in a task ends the worker in the same way (where panics unwind; a release build of the
/// daemon aborts): all its tasks are dropped, and [`WorkerHandle::block_on`] returns `None` then and later.
pub struct Worker {
    handle: WorkerHandle,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a worker thread called `name`, which sleeps whenever it has nothing to do.
    ///
    /// # Errors
    /// When the thread or its io_uring cannot be created; the message names the remedy.
    pub fn start(name: &str, memory: &Arc<Memory>) -> io::Result<Worker> {
        Worker::start_polling(name, memory, &Arc::new(PollParameters::new(Parameter::new(0))))
    }

    /// As [`Worker::start`], for a worker that polls before it sleeps while requests come quickly.
    ///
    /// # Errors
    /// As [`Worker::start`].
    pub fn start_polling(
        name: &str,
        memory: &Arc<Memory>,
        polling: &Arc<PollParameters>,
    ) -> io::Result<Worker> {
        Worker::start_with(name, memory, polling, false)
    }

    /// As [`Worker::start_polling`], with a ring that takes only the operations of this crate, as far as the kernel can do
    /// that. [`Worker::restrict`] is to follow.
    ///
    /// # Errors
    /// As [`Worker::start`].
    pub fn start_restricted(
        name: &str,
        memory: &Arc<Memory>,
        polling: &Arc<PollParameters>,
    ) -> io::Result<Worker> {
        Worker::start_with(name, memory, polling, true)
    }

    /// Puts the worker under the rules of the sandbox, for good, and returns what is in force. To be called before it gets
    /// other work, and after all rings of the process were made and all its threads put under theirs. Blocks for a moment.
    pub fn restrict(&self, unlisted: Unlisted) -> Vec<Mechanism> {
        let restricted = self.handle.block_on(move |io| async move {
            let ring = match &io.ring().unrestricted {
                None => Mechanism::in_force(Mechanism::RING, "rings take 12 operations only"),
                Some(why) => Mechanism::missing(Mechanism::RING, why),
            };
            io.0.polls.open_load();
            let [calls, paths] = ebb_sandbox::restrict_worker(unlisted);
            vec![ring, calls, paths]
        });
        // None, if the worker has ended.
        restricted.unwrap_or_default()
    }

    fn start_with(
        name: &str,
        memory: &Arc<Memory>,
        polling: &Arc<PollParameters>,
        restrict: bool,
    ) -> io::Result<Worker> {
        let shared = WorkerRemote::new()?;
        let (result, started) = std::sync::mpsc::sync_channel(1);
        let for_thread = shared.clone();
        let (memory, polling) = (memory.clone(), polling.clone());
        let owner = memory.owner(name).map_err(io::Error::other)?;
        let builder = std::thread::Builder::new().name(name.to_owned()).stack_size(512 << 10);
        let thread = builder.spawn(move || match IoRing::new(restrict) {
            Ok(ring) => {
                let _ = result.send(Ok(()));
                Io::new(ring, for_thread, (&memory, owner), polling).run();
            }
            Err(error) => drop(result.send(Err(error))),
        })?;
        started.recv().map_err(io::Error::other)??;
        Ok(Worker { handle: WorkerHandle(shared), thread: Some(thread) })
    }

    /// As [`Worker::start`], with its own memory of at most 256 MiB: for tests and tools.
    ///
    /// # Errors
    /// As [`Worker::start`], or when the address space cannot be reserved.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_alone(name: &str) -> io::Result<Worker> {
        let options = ebb_mem::MemoryOptions::new(ALONE_BYTES, ebb_mem::clock::now());
        let memory = Memory::new(options).map_err(io::Error::other)?;
        Worker::start(name, &memory)
    }

    /// As [`Worker::start_alone`], with a restricted ring.
    ///
    /// # Errors
    /// As [`Worker::start_alone`].
    #[cfg(any(test, feature = "testing"))]
    pub fn start_alone_restricted(name: &str) -> io::Result<Worker> {
        let options = ebb_mem::MemoryOptions::new(ALONE_BYTES, ebb_mem::clock::now());
        let memory = Memory::new(options).map_err(io::Error::other)?;
        let polling = Arc::new(PollParameters::new(Parameter::new(0)));
        Worker::start_restricted(name, &memory, &polling)
    }

    /// A handle for other threads.
    pub fn handle(&self) -> WorkerHandle {
        self.handle.clone()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.handle.0.stop.store(true, Ordering::Release);
        self.handle.0.signal_wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
