//! A worker thread: its run queue, its event loop, and the interface for other threads.
//!
//! One iteration of the loop: run ready tasks (at most [`POLLS_PER_ITERATION`] polls, so that completions are processed
//! in between), submit and wait in one system call, wake the tasks of completions and timers.
//!
//! Wakers may be used from any thread: on the worker itself they push to the run queue; on other threads
//! they use a locked inbox and an eventfd, which are not on any data path.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use async_task::Runnable;
use ebb_mem::{Memory, OwnerId};

use crate::buf::BufPool;
use crate::iteration_clock::IterationClock;
use crate::offload;
use crate::ring::IoRing;
use crate::signal::Budget;
use crate::tasks::{Tasks, TrackedFuture, note_worker_ends};
use crate::timer::Timers;

/// A spawned task; dropping it cancels the task, `detach` lets it run to completion.
pub type Task<T> = async_task::Task<T>;

/// The most polls of tasks in one iteration.
const POLLS_PER_ITERATION: usize = 512;
/// Memory ceiling of a worker with its own memory.
#[cfg(any(test, feature = "testing"))]
const ALONE_BYTES: usize = 256 << 20;
/// Completions per iteration below which a request may bypass the ring: a single request causes two, its
/// arrival and its read.
const DIRECT_BELOW: u32 = 3;
/// Completions per iteration from which on the worker waits for several.
const LINGER_FROM: u32 = 4;
/// How long the worker waits for further completions after the first one.
const LINGER: Duration = Duration::from_micros(50);
/// The longest wait while no alarm can be armed.
const UNARMED: Duration = Duration::from_millis(1);
/// How often the worker queries when its memory needs maintenance next.
const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(100);
/// How long a stopping worker waits until the kernel has released its buffers.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

type Starter = Box<dyn FnOnce(&Io) + Send>;

thread_local! {
    /// Which worker runs on this thread (0: none), and its run queue.
    static WORKER: Cell<u64> = const { Cell::new(0) };
    static READY: RefCell<VecDeque<Runnable>> = const { RefCell::new(VecDeque::new()) };
}

/// The part of a worker that other threads use.
struct WorkerRemote {
    id: u64,
    wake: OwnedFd,
    inbox: Mutex<Inbox>,
    stop: AtomicBool,
}

#[derive(Default)]
struct Inbox {
    runnables: Vec<Runnable>,
    starters: Vec<Starter>,
    /// The worker has stopped: new work is dropped.
    closed: bool,
}

impl WorkerRemote {
    fn new() -> io::Result<Arc<WorkerRemote>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // SAFETY: no preconditions; the result is checked.
        let wake = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if wake < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor, owned here only.
        let wake = unsafe { OwnedFd::from_raw_fd(wake) };
        Ok(Arc::new(WorkerRemote {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            wake,
            inbox: Mutex::default(),
            stop: AtomicBool::new(false),
        }))
    }

    fn schedule(&self, runnable: Runnable) {
        if WORKER.try_with(Cell::get) == Ok(self.id) {
            // While the thread ends, the queue may not be accessible; then the task is dropped.
            let mut pending = Some(runnable);
            let _ = READY.try_with(|ready| {
                if let Ok(mut ready) = ready.try_borrow_mut() {
                    ready.extend(pending.take());
                }
            });
            return;
        }
        self.inbox().runnables.push(runnable);
        self.signal_wake();
    }

    fn start(&self, starter: Starter) {
        {
            let mut inbox = self.inbox();
            if inbox.closed {
                drop(inbox);
                return drop(starter);
            }
            inbox.starters.push(starter);
        }
        self.signal_wake();
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal_wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes. EAGAIN (a full counter) means that a wake-up is pending already.
        unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

/// Statistics of one worker since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats {
    /// System calls made to submit and wait.
    pub enters: u64,
    /// Operations started.
    pub operations: u64,
}

/// The recent number of completions per iteration, which decides whether to wait for several.
#[derive(Default)]
struct CompletionLoad {
    /// Moving average of completions per iteration, in sixteenths.
    average: Cell<u32>,
    /// Operations executed without the ring in this iteration; they count as completions.
    direct: Cell<u32>,
}

impl CompletionLoad {
    fn note(&self, completions: u32) {
        let completions = completions.saturating_add(self.direct.take());
        let average = self.average.get();
        self.average.set(average - average / 8 + completions.min(512) * 2);
    }

    /// Few completions per iteration: batching would not help.
    fn is_light(&self) -> bool {
        self.average.get() / 16 < LINGER_FROM
    }

    /// Requests arrive one by one, and this is the first of the iteration: batching would not help.
    fn take_direct(&self) -> bool {
        let first = self.average.get() / 16 < DIRECT_BELOW && self.direct.get() == 0;
        if first {
            self.direct.set(1);
        }
        first
    }

    /// Under load, wait for the average number of completions, but no longer than [`LINGER`];
    /// a single request is never delayed.
    fn batch(&self) -> (usize, Option<Duration>) {
        match self.average.get() / 16 {
            0..LINGER_FROM => (1, None),
            usual => (usual as usize, Some(LINGER)),
        }
    }
}

/// Tasks that wait for the next iteration.
#[derive(Default)]
struct IterationWaiters {
    /// Tasks that poll memory, or have little to do.
    polling: Vec<Waker>,
    /// Tasks that have much to do: they run after all other tasks.
    bulk: Vec<Waker>,
    /// Bulk tasks that were woken and have not run yet. They are ready, but other bulk tasks do not
    /// yield to them.
    bulk_woken: usize,
}

impl IterationWaiters {
    fn is_empty(&self) -> bool {
        self.polling.is_empty() && self.bulk.is_empty()
    }

    fn wake(&mut self) {
        self.bulk_woken = self.bulk.len();
        self.polling.drain(..).chain(self.bulk.drain(..)).for_each(Waker::wake);
    }
}

struct WorkerCore {
    ring: IoRing,
    load: CompletionLoad,
    clock: IterationClock,
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
    shared: Arc<WorkerRemote>,
}

/// The interface of a worker for its tasks: spawn, wait, read, write. Cheap to clone; stays on its thread.
#[derive(Clone)]
pub struct Io(Rc<WorkerCore>);

impl Io {
    pub(crate) fn ring(&self) -> &IoRing {
        &self.0.ring
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
    /// submitted, or completions to be processed. A task that has much to do checks this to decide how long it
    /// continues; tasks in [`Io::yield_iteration`] do not count.
    pub fn has_other_work(&self) -> bool {
        let waiting = self.0.waiters.borrow();
        !waiting.polling.is_empty()
            || READY.with_borrow(|ready| ready.len() > waiting.bulk_woken)
            || self.0.ring.has_work()
    }

    /// Statistics of this worker.
    pub fn stats(&self) -> WorkerStats {
        let ring = &self.0.ring;
        WorkerStats { enters: ring.enters.get(), operations: ring.operations.get() }
    }

    /// Sets up the worker of this thread.
    fn new(ring: IoRing, shared: Arc<WorkerRemote>, memory: &Arc<Memory>, owner: OwnerId) -> Io {
        WORKER.set(shared.id);
        note_worker_ends(false);
        let waker = shared.clone();
        let memory = memory.worker(move || waker.signal_wake());
        Io(Rc::new(WorkerCore {
            load: CompletionLoad::default(),
            clock: IterationClock::new(ebb_mem::clock::now()),
            maintain_at: Cell::default(),
            maintenance_queried: Cell::default(),
            linger: ring.can_linger(),
            timers: Timers::default(),
            waiters: RefCell::default(),
            pool: BufPool::new(memory.clone(), owner),
            offload: Budget::new(offload::AT_ONCE),
            offload_files: offload::FileBudgets::default(),
            tasks: Rc::default(),
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
        if busy || !sleep {
            if core.ring.wants_enter() {
                core.ring.enter(0, None, None);
            }
        } else {
            self.sleep_in_ring();
        }
        let reaped = core.ring.reap();
        *rearm |= reaped.rearm;
        // An iteration that only polled says nothing about the number of completions per wait.
        if reaped.count > 0 || !polling {
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
        core.timers.fire(now);
        self.maintain_memory(now);
        ran || busy || reaped.count > 0
    }

    /// Waits for a completion or an alarm: a timer, or the time to release idle buffers.
    fn sleep_in_ring(&self) {
        let core = &*self.0;
        let now = ebb_mem::clock::now();
        let next =
            [core.timers.next_deadline(), self.next_maintenance(now)].into_iter().flatten().min();
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
    for polls in 0..POLLS_PER_ITERATION {
        let Some(runnable) = READY.with_borrow_mut(next_ready) else { return polls > 0 };
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
    /// Starts a worker thread called `name`.
    ///
    /// # Errors
    /// When the thread or its io_uring cannot be created; the message names the remedy.
    pub fn start(name: &str, memory: &Arc<Memory>) -> io::Result<Worker> {
        let shared = WorkerRemote::new()?;
        let (result, started) = std::sync::mpsc::sync_channel(1);
        let for_thread = shared.clone();
        let memory = memory.clone();
        let owner = memory.owner(name).map_err(io::Error::other)?;
        let builder = std::thread::Builder::new().name(name.to_owned()).stack_size(512 << 10);
        let thread = builder.spawn(move || match IoRing::new() {
            Ok(ring) => {
                let _ = result.send(Ok(()));
                Io::new(ring, for_thread, &memory, owner).run();
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

    /// A handle for other threads.
    pub fn handle(&self) -> WorkerHandle {
        self.handle.clone()
    }
}

/// A worker whose owner runs each iteration, on the owner's thread: see [`crate::sim`].
#[cfg(feature = "sim")]
pub(crate) struct SteppedWorker {
    pub(crate) io: Io,
    rearm: bool,
}

#[cfg(feature = "sim")]
impl SteppedWorker {
    pub(crate) fn new(name: &str, memory: &Arc<Memory>) -> io::Result<SteppedWorker> {
        assert_eq!(WORKER.get(), 0, "one worker on a thread at a time");
        let owner = memory.owner(name).map_err(io::Error::other)?;
        let io = Io::new(IoRing::new()?, WorkerRemote::new()?, memory, owner);
        Ok(SteppedWorker { io, rearm: true })
    }

    pub(crate) fn handle(&self) -> WorkerHandle {
        WorkerHandle(self.io.0.shared.clone())
    }

    pub(crate) fn iterate(&mut self) -> bool {
        self.io.iterate(&mut self.rearm, false)
    }

    /// When there is something to do, if nothing else happens before.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let maintenance = self.io.next_maintenance(ebb_mem::clock::now());
        [self.io.0.timers.next_deadline(), maintenance].into_iter().flatten().min()
    }
}

#[cfg(feature = "sim")]
impl Drop for SteppedWorker {
    fn drop(&mut self) {
        self.io.wind_down();
        READY.with_borrow_mut(VecDeque::clear);
        WORKER.set(0);
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
