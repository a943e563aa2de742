//! Requests in flight at librbd, and how a worker learns that they have completed.
//!
//! librbd calls back on threads of its own, for each request. The callback stores the result in the request's node, which is
//! linked into a stack of the worker that submitted it, and writes to the worker's eventfd if the stack was empty. It neither
//! allocates nor locks. A task of the worker takes the whole stack at once and wakes the requests: one wake for each burst.
//!
//! # Invariants
//! - A node, with the buffer in it, belongs to librbd from the submission until its callback has linked it, also when the
//!   request's future was dropped or its time has passed. Then the worker returns the buffer to its pool.
//! - Between its callback and the worker's task a node is used by nothing else. All of it but the link and the result is used
//!   by the worker's thread only.
//! - What librbd holds of requests that are not waited for any longer is bounded: `left.rs`.
//! - When a worker ends, the nodes in flight are leaked, with their buffers: librbd may still use them.
//! - Once warm, a request allocates nothing here.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::ffi::c_void;
use std::future::Future;
use std::pin::Pin;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, AtomicPtr, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use ebb_block::Operation;
use ebb_io::{Budget, BudgetGuard, Buf, Io, Shares, clock};

use crate::ffi::{Librbd, Opaque};
use crate::handles::{ImageHandle, RbdRequest};
use crate::left::{LeftMemory, Windows};
use crate::state::{RbdShared, WaitEnd};
use crate::wakeups::WorkerWakeup;

/// Nodes that a worker keeps for later requests.
const SPARE_NODES: usize = 1024;
/// How often requests are checked for those that wait for long.
const TICK: Duration = Duration::from_millis(250);
/// The pause after the eventfd could not be waited for.
const PAUSE: Duration = Duration::from_millis(10);

/// The part of a worker's queue that librbd's threads use.
struct QueueShared {
    /// The node that completed last.
    head: AtomicPtr<Node>,
    wakeup: Arc<WorkerWakeup>,
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The node has none.
    Free,
    /// librbd has it.
    InFlight,
    /// librbd has it, and its future was dropped.
    Abandoned,
    /// It has completed, and its future takes the result.
    Completed,
}

/// The part of a node that only the worker's thread uses.
struct LocalNode {
    phase: Phase,
    waker: Option<Waker>,
    buf: Option<Buf>,
    store: Option<Arc<RbdShared>>,
    operation: Operation,
    since: Instant,
    /// Its part of the image's window.
    window: Option<BudgetGuard>,
    /// Its memory, if it is not waited for any longer.
    left: Option<LeftMemory>,
    /// Its place in the list of all nodes.
    place: usize,
    /// It was counted as slow.
    slow: bool,
}

/// A request in flight. See the module.
struct Node {
    next: AtomicPtr<Node>,
    result: AtomicIsize,
    library: &'static Librbd,
    queue: Arc<QueueShared>,
    local: UnsafeCell<LocalNode>,
}

/// The part of a node that the worker uses.
///
/// # Safety
/// The node exists, this is the worker's thread, and no other reference to this part is in use.
unsafe fn local_of<'a>(node: NonNull<Node>) -> &'a mut LocalNode {
    // SAFETY: the caller says that it exists.
    let node: &'a Node = unsafe { node.as_ref() };
    // SAFETY: the caller says that nothing else uses it.
    unsafe { &mut *node.local.get() }
}

/// What librbd calls when a request has completed.
unsafe extern "C" fn completed(completion: Opaque, node: *mut c_void) {
    let node: *mut Node = node.cast();
    // SAFETY: the node of this request; the worker leaves it alone until it is linked below.
    let this = unsafe { &*node };
    // SAFETY: the completion of this request, which has a result now.
    let result = unsafe { (this.library.rbd_aio_get_return_value)(completion) };
    // SAFETY: as above; it is not used after this.
    unsafe { (this.library.rbd_aio_release)(completion) };
    this.result.store(result, Ordering::Relaxed);
    // The worker may reuse or free the node as soon as it is linked.
    let queue = this.queue.clone();
    let mut head = queue.head.load(Ordering::Relaxed);
    loop {
        this.next.store(head, Ordering::Relaxed);
        match queue.head.compare_exchange_weak(head, node, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => break,
            Err(now) => head = now,
        }
    }
    if head.is_null() {
        queue.wakeup.wake();
    }
}

/// The requests of one worker.
pub(crate) struct CompletionQueue {
    shared: Arc<QueueShared>,
    /// All nodes, and those without a request.
    nodes: RefCell<Vec<NonNull<Node>>>,
    free: RefCell<Vec<NonNull<Node>>>,
    in_flight: Cell<usize>,
    windows: Windows,
    shares: Shares,
    ticking: Cell<bool>,
    /// The worker's task has ended: nothing completes here any more.
    ended: Cell<bool>,
}

thread_local! {
    static QUEUE: RefCell<Option<Rc<CompletionQueue>>> = const { RefCell::new(None) };
}

/// Notes that the worker's task has ended.
struct TaskEnd(Rc<CompletionQueue>);

impl Drop for TaskEnd {
    fn drop(&mut self) {
        self.0.ended.set(true);
    }
}

impl CompletionQueue {
    /// That of this worker. The first call starts its task.
    pub(crate) fn of_worker(io: &Io) -> std::io::Result<Rc<CompletionQueue>> {
        let known = QUEUE.try_with(|queue| queue.borrow().clone()).ok().flatten();
        if let Some(queue) = known.filter(|queue| !queue.ended.get()) {
            return Ok(queue);
        }
        let (head, wakeup) = (AtomicPtr::new(ptr::null_mut()), WorkerWakeup::new()?);
        let shared = Arc::new(QueueShared { head, wakeup });
        let queue = Rc::new(CompletionQueue {
            shared,
            nodes: RefCell::default(),
            free: RefCell::default(),
            in_flight: Cell::new(0),
            windows: Windows::default(),
            shares: io.pool().memory().shares().clone(),
            ticking: Cell::new(false),
            ended: Cell::new(false),
        });
        let end = TaskEnd(queue.clone());
        let worker = io.clone();
        io.spawn(async move {
            let end = end;
            loop {
                if worker.readable(end.0.shared.wakeup.event()).await.is_err() {
                    worker.sleep(PAUSE).await;
                }
                end.0.take_completed();
            }
        })
        .detach();
        let _ = QUEUE.try_with(|place| place.replace(Some(queue.clone())));
        Ok(queue)
    }

    /// What the requests of an image may take of librbd at a time, on this worker.
    pub(crate) fn window(&self, store: &Arc<RbdShared>) -> Rc<Budget> {
        self.windows.of(store)
    }

    /// Submits a request, which has this part of the image's window and began to wait for it at `since`. The result is that
    /// of librbd; the memory of the buffer is read or written by it.
    ///
    /// # Errors
    /// The error number with which librbd refused it, and the buffer.
    pub(crate) fn submit(
        self: &Rc<CompletionQueue>,
        io: &Io,
        (image, store): (&ImageHandle, &Arc<RbdShared>),
        (request, window, since): (RbdRequest, BudgetGuard, Instant),
        buf: Option<Buf>,
    ) -> Result<RequestInFlight, (i32, Option<Buf>)> {
        let node = self.take_node(image.library);
        let mut completion: Opaque = ptr::null_mut();
        let (argument, callback) = (node.as_ptr().cast(), completed);
        let create = image.library.rbd_aio_create_completion;
        // SAFETY: a place for the completion; the node lives until the callback.
        let created = unsafe { create(argument, callback, &raw mut completion) };
        if created < 0 {
            self.give_back(node);
            return Err((created, buf));
        }
        // SAFETY: the node has no request: it is used here only.
        let local = unsafe { local_of(node) };
        local.phase = Phase::InFlight;
        local.buf = buf;
        local.operation = request.operation();
        local.since = since;
        local.slow = false;
        local.store = Some(store.clone());
        local.window = Some(window);
        store.figures().begin();
        // SAFETY: the node owns the buffer, whose memory does not move, until the callback.
        let submitted = unsafe { image.submit(request, local.buf.as_mut(), completion) };
        if submitted < 0 {
            // SAFETY: it was refused, so that its callback is not called.
            unsafe { (image.library.rbd_aio_release)(completion) };
            let buf = local.buf.take();
            store.figures().refused();
            self.give_back(node);
            return Err((submitted, buf));
        }
        self.in_flight.set(self.in_flight.get() + 1);
        if !self.ticking.replace(true) {
            self.start_ticking(io);
        }
        Ok(RequestInFlight { queue: self.clone(), node, taken: false })
    }

    fn take_node(&self, library: &'static Librbd) -> NonNull<Node> {
        if let Some(node) = self.free.borrow_mut().pop() {
            return node;
        }
        let local = LocalNode {
            phase: Phase::Free,
            waker: None,
            buf: None,
            store: None,
            operation: Operation::Flush,
            since: clock::now(),
            window: None,
            left: None,
            place: self.nodes.borrow().len(),
            slow: false,
        };
        let node = Box::new(Node {
            next: AtomicPtr::new(ptr::null_mut()),
            result: AtomicIsize::new(0),
            library,
            queue: self.shared.clone(),
            local: UnsafeCell::new(local),
        });
        let node = NonNull::from(Box::leak(node));
        self.nodes.borrow_mut().push(node);
        node
    }

    /// A node without a request is kept, or freed if there are many.
    fn give_back(&self, node: NonNull<Node>) {
        // SAFETY: neither librbd nor a future uses the node.
        let local = unsafe { local_of(node) };
        local.phase = Phase::Free;
        local.waker = None;
        local.store = None;
        local.window = None;
        local.left = None;
        // A buffer is returned to its pool, which wakes other requests.
        drop(local.buf.take());
        let mut free = self.free.borrow_mut();
        if free.len() < SPARE_NODES {
            free.push(node);
            return;
        }
        drop(free);
        let mut nodes = self.nodes.borrow_mut();
        let place = local.place;
        nodes.swap_remove(place);
        if let Some(moved) = nodes.get(place) {
            // SAFETY: only this thread uses this part, and it is that of another node.
            unsafe { local_of(*moved) }.place = place;
        }
        drop(nodes);
        // SAFETY: made by `take_node`, and in no list any more.
        drop(unsafe { Box::from_raw(node.as_ptr()) });
    }

    /// Takes all requests that have completed, and wakes their futures; wakes also those of aborted stores.
    fn take_completed(&self) {
        // Before the stack: what is linked after that wakes the task again.
        let ends = self.shared.wakeup.take();
        let mut next = self.shared.head.swap(ptr::null_mut(), Ordering::AcqRel);
        while let Some(node) = NonNull::new(next) {
            // SAFETY: its callback linked the node and is done with it.
            let this = unsafe { node.as_ref() };
            next = this.next.load(Ordering::Relaxed);
            self.in_flight.set(self.in_flight.get().saturating_sub(1));
            // SAFETY: only this thread uses this part.
            let local = unsafe { local_of(node) };
            if let Some(store) = &local.store {
                let request = (local.operation, local.since, local.slow);
                store.note_answer(request, this.result.load(Ordering::Relaxed));
            }
            // Other requests wait for it.
            local.window = None;
            match local.phase {
                Phase::InFlight => {
                    local.phase = Phase::Completed;
                    local.waker.take().inspect(Waker::wake_by_ref);
                }
                Phase::Free | Phase::Abandoned | Phase::Completed => self.give_back(node),
            }
        }
        if ends {
            self.wake_ended(false);
        }
    }

    /// Wakes the requests that are not to wait any longer. At a `tick` it has the locks of stores checked whose requests
    /// wait for long, and counts those that are slow.
    fn wake_ended(&self, tick: bool) {
        for node in self.nodes.borrow().iter().copied() {
            // SAFETY: only this thread uses this part.
            let local = unsafe { local_of(node) };
            if local.phase != Phase::InFlight {
                continue;
            }
            let Some(store) = &local.store else { continue };
            if tick {
                store.check_lock(local.since);
                local.slow = local.slow || store.figures().count_slow(local.since);
            }
            let ended = store.end_of(local.since).is_some();
            if ended {
                local.waker.take().inspect(Waker::wake_by_ref);
            }
        }
    }

    fn start_ticking(self: &Rc<CompletionQueue>, io: &Io) {
        let (queue, worker) = (self.clone(), io.clone());
        io.spawn(async move {
            while queue.in_flight.get() > 0 {
                worker.sleep(TICK).await;
                queue.wake_ended(true);
            }
            queue.ticking.set(false);
        })
        .detach();
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        for node in self.free.borrow_mut().drain(..) {
            // SAFETY: made by `take_node`; a free node is used by nothing else. Those in flight are leaked.
            drop(unsafe { Box::from_raw(node.as_ptr()) });
        }
    }
}

/// How a request ended.
pub(crate) enum RequestEnd {
    /// librbd's result, and the buffer.
    Completed(isize, Option<Buf>),
    /// It is not waited for any longer: librbd still has it, and the buffer.
    Left(WaitEnd),
}

/// A request, until it has completed or is left. See the module.
pub(crate) struct RequestInFlight {
    queue: Rc<CompletionQueue>,
    node: NonNull<Node>,
    taken: bool,
}

impl RequestInFlight {
    fn local(&mut self) -> &mut LocalNode {
        // SAFETY: only this thread uses this part, and no other reference to it is kept over a call.
        unsafe { local_of(self.node) }
    }

    /// Counts the memory of a request that is not waited for any longer. False if it has to wait after all: it is tried again
    /// at the next tick.
    #[cold]
    fn leave(&mut self, end: WaitEnd) -> bool {
        let local = self.local();
        if local.left.is_some() {
            return true;
        }
        let bytes = local.buf.as_ref().map_or(0, |buf| buf.len());
        let left = match end {
            WaitEnd::Late => LeftMemory::within(&self.queue.shares, bytes),
            WaitEnd::Aborted | WaitEnd::Offline => Some(LeftMemory::of(bytes)),
        };
        self.local().left = left;
        self.local().left.is_some()
    }

    /// Copies what the request writes, for a caller that needs its data back although librbd still has the buffer.
    pub(crate) fn copy_to(&mut self, buf: &mut Buf) {
        if let Some(held) = self.local().buf.as_ref().filter(|held| held.len() == buf.len()) {
            buf.copy_from_slice(held);
        }
    }
}

impl Future for RequestInFlight {
    type Output = RequestEnd;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RequestEnd> {
        let node = self.node;
        let local = self.local();
        if local.phase == Phase::Completed {
            let buf = local.buf.take();
            // SAFETY: the node is not freed before `taken` is set.
            let result = unsafe { node.as_ref() }.result.load(Ordering::Relaxed);
            self.taken = true;
            self.queue.give_back(node);
            return Poll::Ready(RequestEnd::Completed(result, buf));
        }
        let end = match &local.store {
            Some(store) => store.end_of(local.since),
            None => Some(WaitEnd::Aborted),
        };
        if let Some(end) = end
            && self.leave(end)
        {
            return Poll::Ready(RequestEnd::Left(end));
        }
        let local = self.local();
        if !local.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            local.waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

impl Drop for RequestInFlight {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        let node = self.node;
        let local = self.local();
        local.waker = None;
        match local.phase {
            Phase::InFlight => {
                local.phase = Phase::Abandoned;
                let bytes = local.buf.as_ref().map_or(0, |buf| buf.len());
                local.left.get_or_insert_with(|| LeftMemory::of(bytes));
            }
            _ => self.queue.give_back(node),
        }
    }
}
