//! One virtqueue, served on one worker: consumes requests, carries them out or passes them to request tasks, publishes
//! completions.
//!
//! # Invariants
//! - A chain is copied once and the copy is checked; each request is completed exactly once.
//! - Requests that were consumed run to completion, also if the frontend has gone; only then does the queue end, so that
//!   closing a volume waits for every write, and a stopped queue changes no guest memory.
//! - What a guest can make the backend hold is bounded by its queue's size and the queue's memory budget.
//! - A request that waits for the volume's limits is the last one that was consumed; those behind it stay in the ring.
//! - A ring that is invalid, or whose memory was truncated, is not served any more.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebb_export::{ErrorLine, ErrorLines, RequestRunner, RequestTasks};
use ebb_guest_ring::{Completions, Consumed, GuestRing, THROTTLE, TimeSlice, serve_ring};
use ebb_io::{Budget, BufPool, Fd, Io, QueueShare, Signal};

use crate::chain::{Chain, RingFault, Token};
use crate::commands::{
    ConnectionId, ControlMailbox, ControlMessage, QueueCommand, QueueCommands, QueueEnd,
};
use crate::disk_served::ServedFrontends;
use crate::disk_shared::{DiskShared, add};
use crate::events::{notify, take_event};
use crate::inflight::InflightRecord;
use crate::inline_io::InlineData;
use crate::memory::GuestMemory;
use crate::request::{self, BlkRequest};
use crate::request_task::{Job, TaskChain};
use crate::ring_setup::SetupFault;
use crate::throttle::{Throttled, throttle};
use crate::virtqueue::Virtqueue;

/// Refused requests, beyond successful ones, after which a guest is delayed.
const REFUSED_AT_ONCE: u32 = 64;
/// How often a ring is checked whose driver sends no notifications.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How long a queue is idle before its request tasks end.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// Why a ring is not served any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueFailure {
    #[error(transparent)]
    Ring(#[from] RingFault),
    #[error("after a change of memory: {0}")]
    Setup(#[from] SetupFault),
    #[error("no more notifications can be received: {0}")]
    Kick(#[from] std::io::Error),
}

/// The parts of a queue, made on the control thread.
pub(crate) struct VirtqueueParts {
    pub(crate) disk: Arc<DiskShared>,
    pub(crate) end: EndOfQueue,
    pub(crate) connection: ConnectionId,
    pub(crate) index: u16,
    pub(crate) ring: Virtqueue,
    pub(crate) memory: Arc<GuestMemory>,
    /// Notified by the guest; `None`: the ring is polled.
    pub(crate) kick: Option<Fd>,
    pub(crate) call: Option<Fd>,
    /// Notified when the ring is broken.
    pub(crate) err: Option<Fd>,
    /// Where unstable writes are recorded.
    pub(crate) record: Option<Arc<InflightRecord>>,
    pub(crate) commands: Arc<QueueCommands>,
    pub(crate) mailbox: ControlMailbox,
}

/// A table of regions in use: the control thread is notified when the last request that uses it has completed.
pub(crate) struct MemoryInUse {
    memory: Arc<GuestMemory>,
    connection: ConnectionId,
    mailbox: ControlMailbox,
}

impl MemoryInUse {
    #[inline]
    pub(crate) fn table(&self) -> &Arc<GuestMemory> {
        &self.memory
    }
}

impl Drop for MemoryInUse {
    fn drop(&mut self) {
        // The control thread looks whether it has the last reference, and unmaps the regions: not this thread.
        self.memory = Arc::default();
        self.mailbox.send(ControlMessage::MemoryReleased(self.connection));
    }
}

/// Reports the end of a queue when dropped, also if the worker dropped the queue's task.
pub(crate) struct EndOfQueue {
    disk: Arc<DiskShared>,
    served: Arc<ServedFrontends>,
    mailbox: ControlMailbox,
    end: QueueEnd,
}

impl EndOfQueue {
    /// Counts the queue as one of its disk's, until this is dropped.
    pub(crate) fn new(
        disk: &Arc<DiskShared>,
        served: &Arc<ServedFrontends>,
        mailbox: &ControlMailbox,
        end: QueueEnd,
    ) -> EndOfQueue {
        disk.queues.fetch_add(1, Ordering::SeqCst);
        let (disk, served, mailbox) = (disk.clone(), served.clone(), mailbox.clone());
        EndOfQueue { disk, served, mailbox, end }
    }
}

impl Drop for EndOfQueue {
    fn drop(&mut self) {
        self.disk.queues.fetch_sub(1, Ordering::SeqCst);
        self.served.note_ring_end();
        self.mailbox.send(ControlMessage::Ended(self.end));
    }
}

/// See the module.
pub(crate) struct DiskQueue {
    pub(crate) io: Io,
    pub(crate) disk: Arc<DiskShared>,
    connection: ConnectionId,
    index: u16,
    ring: RefCell<Virtqueue>,
    /// The table for requests that are consumed now.
    memory: RefCell<Rc<MemoryInUse>>,
    /// The chain of the request that is consumed now.
    chain: RefCell<Chain>,
    kick: Option<Fd>,
    call: RefCell<Option<Fd>>,
    err: Option<Fd>,
    /// Where it is recorded for a successor that acknowledged writes are not stable.
    pub(crate) record: Option<Arc<InflightRecord>>,
    mailbox: ControlMailbox,
    pub(crate) buffers: BufPool,
    pub(crate) budget: Rc<Budget>,
    /// The volume's share of the memory for requests.
    pub(crate) queue_share: Rc<QueueShare>,
    tasks: RequestTasks<Job, TaskChain>,
    /// Completed requests that are to be published: their tokens, and the bytes written to guest memory.
    completions: Completions<(Token, u32)>,
    /// Refused requests minus successful ones, since the guest was last delayed.
    refused: Cell<u32>,
    /// Why the ring is not served any more.
    fault: RefCell<Option<RingFault>>,
    stopping: Cell<bool>,
    commands: Arc<QueueCommands>,
    pub(crate) halt: Signal,
    /// Requests consumed, modulo 2^32; and set when there are new ones.
    consumed: Cell<u32>,
    activity: Signal,
    error_lines: ErrorLines,
}

/// A consumed request that waits for the volume's limits; its chain is in the queue's scratch.
pub(crate) struct WaitingRequest {
    token: Token,
    request: BlkRequest,
    memory: Rc<MemoryInUse>,
}

/// What has to be done before more requests are consumed.
pub(crate) enum AfterChains {
    /// Nothing.
    Nothing,
    /// The last request has to wait for the volume's limits.
    Throttled(Throttled, WaitingRequest),
}

impl DiskQueue {
    /// Serves a ring until it is stopped; then all consumed requests have completed and are published.
    pub(crate) async fn run(io: Io, parts: VirtqueueParts) {
        let VirtqueueParts { disk, connection, index, ring, memory, commands, mailbox, .. } = parts;
        let mut end = parts.end;
        let slots = usize::from(ring.size());
        let share = disk.volume.share(io.pool().memory().shares()).clone();
        let memory = MemoryInUse { memory, connection, mailbox: mailbox.clone() };
        let queue = Rc::new(DiskQueue {
            connection,
            index,
            ring: RefCell::new(ring),
            memory: RefCell::new(Rc::new(memory)),
            chain: RefCell::default(),
            kick: parts.kick,
            call: RefCell::new(parts.call),
            err: parts.err,
            record: parts.record,
            mailbox,
            buffers: io.pool().queue(io.pool().owner(), &disk.pool),
            budget: Budget::new(disk.queue_memory),
            queue_share: QueueShare::new(share),
            tasks: RequestTasks::new(slots),
            completions: Completions::new(slots),
            refused: Cell::new(0),
            fault: RefCell::new(None),
            stopping: Cell::new(false),
            commands: commands.clone(),
            halt: Signal::default(),
            consumed: Cell::new(0),
            activity: Signal::default(),
            error_lines: ErrorLines::default(),
            disk,
            io: io.clone(),
        });
        let helpers = [
            io.spawn(queue.clone().publish_completions()),
            io.spawn(queue.clone().follow(commands)),
            io.spawn(queue.clone().watch_stop()),
            io.spawn(queue.clone().housekeeping()),
        ];
        queue.serve().await;
        queue.tasks.drain().await;
        queue.publish();
        drop(helpers);
        queue.tasks.retire_idle();
        queue.queue_share.empty();
        let ring = queue.ring.borrow();
        (end.end.base, end.end.complete) = (ring.base(), ring.is_complete());
    }

    /// Frees the request tasks and the memory for chains when no request was consumed for a while, and idle tasks as long as
    /// memory is short. The pool of buffers shrinks by itself.
    async fn housekeeping(self: Rc<Self>) {
        loop {
            self.activity.wait().await;
            loop {
                let consumed = self.consumed.get();
                self.io.sleep(IDLE_AFTER).await;
                let idle = self.consumed.get() == consumed && self.tasks.busy() == 0;
                if idle || self.buffers.memory().draining() {
                    self.tasks.retire_idle();
                }
                if idle {
                    self.chain.take();
                    self.queue_share.empty();
                    break;
                }
            }
        }
    }

    async fn watch_stop(self: Rc<Self>) {
        self.disk.stop.wait().await;
        self.stop();
    }

    fn stop(&self) {
        self.stopping.set(true);
        self.halt.set();
    }

    /// Carries out the commands of the control thread.
    async fn follow(self: Rc<Self>, commands: Arc<QueueCommands>) {
        loop {
            for command in commands.next().await {
                match command {
                    QueueCommand::SetCall(call) => {
                        self.call.replace(call);
                        // A completion may have been published before without one.
                        self.notify();
                    }
                    QueueCommand::SetMemory(memory) => self.set_memory(memory),
                    QueueCommand::Stop => self.stop(),
                }
            }
        }
    }

    fn set_memory(&self, memory: Arc<GuestMemory>) {
        let mut ring = self.ring.borrow_mut();
        if let Err(fault) = ring.relocate(&memory) {
            drop(ring);
            self.note_broken(&fault.into());
            self.stop();
        }
        let (connection, mailbox) = (self.connection, self.mailbox.clone());
        let memory = MemoryInUse { memory, connection, mailbox };
        self.memory.replace(Rc::new(memory));
    }

    async fn serve(self: &Rc<Self>) {
        // A predecessor may have ended between a publication and its notification, also if nothing was in flight then. A guest
        // that does not wait ignores it.
        self.notify();
        let Err(failure) = serve_ring(self).await else { return };
        self.note_broken(&failure);
        while !self.stopping.get() {
            self.halt.wait().await;
        }
    }

    /// Ends the queue if the guest's memory is lost: data from it is not to be trusted.
    fn check_memory(&self) {
        if !self.memory.borrow().table().is_lost() || self.stopping.get() {
            return;
        }
        if let Some(suppressed) = self.disk.may_log() {
            let (volume, queue) = (&**self.disk.volume.name(), self.index);
            tracing::warn!(
                volume,
                connection = %self.connection,
                queue,
                suppressed,
                "the guest's memory was truncated"
            );
        }
        self.mailbox.send(ControlMessage::MemoryLost(self.connection));
        self.stop();
    }

    fn note_broken(&self, failure: &QueueFailure) {
        if let Some(err) = &self.err
            && !notify(err)
        {
            self.end_connection();
        }
        if let Some(suppressed) = self.disk.may_log() {
            let (volume, queue) = (&**self.disk.volume.name(), self.index);
            tracing::warn!(volume, connection = %self.connection, queue, error = %failure, suppressed,
                "the ring is invalid and is not served any more");
        }
        self.mailbox.send(match self.memory.borrow().table().is_lost() {
            true => ControlMessage::MemoryLost(self.connection),
            false => ControlMessage::Broken(self.connection, self.index),
        });
    }

    /// Carries out a consumed request, at once or in a task. Returns the cost for the time slice.
    #[inline]
    fn begin(
        self: &Rc<Self>,
        data: &InlineData<'_>,
        memory: &Rc<MemoryInUse>,
        chain: &mut Chain,
        token: Token,
        request: BlkRequest,
    ) -> usize {
        let table = memory.table();
        if let Some(outcome) = self.try_inline(data, table, chain, &request) {
            add(&self.disk.counters.inline, 1);
            self.finish(table, chain, token, &request, outcome.result, outcome.written);
            return outcome.cost;
        }
        let task = self.tasks.try_idle(self);
        debug_assert!(task.is_some(), "no more requests than tasks");
        if let Some(task) = task {
            task.scratch().set_chain(chain, self.io.iteration_start());
            task.start(Job { token, request, memory: memory.clone() });
        }
        1
    }

    /// Carries out a request that has waited.
    pub(crate) fn begin_held(self: &Rc<Self>, held: WaitingRequest) {
        let WaitingRequest { token, request, memory } = held;
        let data = InlineData::of(&self.disk.volume, &self.io);
        self.begin(&data, &memory, &mut self.chain.borrow_mut(), token, request);
        self.publish();
    }

    /// Queues the completion of a request, to be published with others: `written` bytes of guest memory were written.
    pub(crate) fn complete(&self, token: Token, written: u32) {
        self.completions.push((token, written));
    }

    /// Counts a request that succeeded or failed.
    pub(crate) fn note_result(&self, failed: bool) {
        let refused = self.refused.get();
        if failed {
            self.refused.set(refused.saturating_add(1));
            add(&self.disk.counters.errors, 1);
        } else if refused > 0 {
            self.refused.set(refused - 1);
        }
    }

    /// Has the completions of request tasks published soon.
    pub(crate) fn publish_soon(&self) {
        self.completions.publish_soon();
    }

    /// Publishes the completions of request tasks, after all that were ready have run.
    async fn publish_completions(self: Rc<Self>) {
        loop {
            self.completions.ready().await;
            self.publish();
        }
    }

    fn notify(&self) {
        let notified = self.call.borrow().as_ref().map(notify);
        if notified == Some(false) {
            self.end_connection();
        }
        add(&self.disk.counters.calls, notified.is_some().into());
    }

    /// Ends the connection of a frontend that has held the worker's thread: it filled a counter and made it blocking.
    #[cold]
    fn end_connection(&self) {
        self.call.take();
        if let Some(suppressed) = self.disk.may_log() {
            let (volume, queue) = (&**self.disk.volume.name(), self.index);
            tracing::warn!(
                volume,
                connection = %self.disk.connection(),
                queue,
                suppressed,
                "notifying the guest did not return: its connection is closed"
            );
        }
        self.mailbox.send(ControlMessage::NotifyFailed(self.connection));
    }

    /// Whether a failed request of this queue is to be logged.
    pub(crate) fn may_log(&self) -> bool {
        match self.error_lines.admit() {
            ErrorLine::Request => self.disk.may_log().is_some(),
            ErrorLine::Notice => {
                let volume = &**self.disk.volume.name();
                let (connection, queue) = (self.connection, self.index);
                tracing::warn!(
                    volume,
                    %connection,
                    queue,
                    "further failed requests of this ring are not logged"
                );
                false
            }
            ErrorLine::Nothing => false,
        }
    }

    async fn wait_for_kick(&self) -> std::io::Result<()> {
        let kicked = async {
            let Some(kick) = &self.kick else {
                self.io.sleep(POLL_INTERVAL).await;
                return Ok(());
            };
            self.io.readable(kick).await?;
            take_event(kick);
            add(&self.disk.counters.kicks, 1);
            Ok(())
        };
        let halted = async {
            self.halt.wait().await;
            Ok(())
        };
        futures_lite::future::or(kicked, halted).await
    }
}

impl GuestRing for DiskQueue {
    type Broken = QueueFailure;
    type After = AfterChains;

    /// Half of a common queue depth. With 64 a cached read of 32 in flight took 1.2 to 1.4 times as long; a notification is cheap.
    const BATCH: u32 = 16;

    fn io(&self) -> &Io {
        &self.io
    }

    fn is_stopping(&self) -> bool {
        self.stopping.get() || self.commands.is_stopped()
    }

    fn waiting(&self) -> Result<u32, QueueFailure> {
        if let Some(fault) = self.fault.take() {
            return Err(fault.into());
        }
        Ok(self.ring.borrow_mut().waiting()?)
    }

    fn arm(&self) -> Result<bool, QueueFailure> {
        Ok(self.ring.borrow_mut().arm()?)
    }

    async fn event(&self) -> Result<(), QueueFailure> {
        Ok(self.wait_for_kick().await?)
    }

    fn has_requests(&self) -> bool {
        // It is borrowed while its requests are consumed, and then not polled.
        self.ring.try_borrow_mut().is_ok_and(|mut ring| !matches!(ring.waiting(), Ok(0)))
    }

    fn note_polled(&self) {
        add(&self.disk.counters.polls, 1);
    }

    fn take_batch(self: &Rc<Self>, most: u32, slice: &mut TimeSlice) -> Consumed<AfterChains> {
        let memory = self.memory.borrow().clone();
        let chain = &mut *self.chain.borrow_mut();
        let limits = self.disk.volume.limits();
        let data = InlineData::of(&self.disk.volume, &self.io);
        self.ring.borrow_mut().disarm();
        let (mut count, mut after, mut make_way) = (0, AfterChains::Nothing, false);
        while count < most && !make_way {
            let taken = self.ring.borrow_mut().take(memory.table(), chain);
            let token = match taken {
                Ok(Some(token)) => token,
                Ok(None) => break,
                Err(fault) => {
                    // Requests before it are completed first.
                    self.fault.replace(Some(fault));
                    break;
                }
            };
            count += 1;
            if let Some(address) = chain.outside() {
                self.fail_outside(memory.table(), chain, token, address);
                make_way = slice.spend(1 + chain.cost(), &self.io);
                continue;
            }
            let Some(request) = request::parse(memory.table(), chain) else {
                self.note_result(true);
                self.complete(token, 0);
                make_way = slice.spend(1 + chain.cost(), &self.io);
                continue;
            };
            if let Some(limits) = limits
                && let Some(throttled) = throttle(limits, &request)
            {
                let memory = memory.clone();
                after =
                    AfterChains::Throttled(throttled, WaitingRequest { token, request, memory });
                break;
            }
            let cost = chain.cost() + self.begin(&data, &memory, chain, token, request);
            make_way = slice.spend(cost, &self.io);
        }
        add(&self.disk.counters.consumed, count.into());
        self.consumed.set(self.consumed.get().wrapping_add(count));
        self.activity.set();
        Consumed { count, make_way, after }
    }

    fn publish(&self) {
        let due = self.completions.publish(|completions| {
            let mut ring = self.ring.borrow_mut();
            add(&self.disk.counters.completed, completions.len() as u64);
            add(&self.disk.counters.publications, 1);
            for (token, written) in completions.drain(..) {
                ring.complete(token, written);
            }
            ring.publish()
        });
        if due == Some(true) {
            self.notify();
        }
        self.check_memory();
    }

    async fn after_batch(self: &Rc<Self>, after: AfterChains) {
        match after {
            AfterChains::Nothing => {}
            AfterChains::Throttled(throttled, held) => self.wait_for_limits(throttled, held).await,
        }
        if self.refused.get() > REFUSED_AT_ONCE {
            self.refused.set(0);
            add(&self.disk.counters.throttled, 1);
            self.io.sleep(THROTTLE).await;
        }
    }
}

impl RequestRunner for DiskQueue {
    type Job = Job;
    type Scratch = TaskChain;

    fn tasks(&self) -> &RequestTasks<Job, TaskChain> {
        &self.tasks
    }

    fn io(&self) -> &Io {
        &self.io
    }

    async fn execute(&self, task: &Rc<ebb_export::RequestTask<Job, TaskChain>>) {
        self.execute_task(task).await;
    }

    fn all_done(&self) {
        self.buffers.done(ebb_mem::clock::now());
    }
}
