//! One ring, served on one worker: consumes requests, passes them to request tasks, publishes responses.
//!
//! # Invariants
//! - A request is copied once into the journal, checked there, and gets exactly one response.
//! - Requests that were started run to completion, also if the guest was destroyed; only then does the
//!   queue end, so that closing a volume waits for every write.
//! - What a guest can make the backend hold is bounded: by its ring's slots, the queue's memory budget,
//!   and the cap of persistent grants.
//! - While a request waits for the volume's limits it stays in the ring, and so do those behind it (`throttle.rs`).
//! - A guest that floods the backend with events causes one wakeup per iteration; a ring whose indices
//!   are invalid is not served any more.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_export::{ErrorLine, ErrorLines, RequestRunner, RequestTasks};
use ebb_guest_ring::{Completions, Consumed, GuestRing, THROTTLE, TimeSlice, serve_ring};
use ebb_io::{Budget, Buf, BufPool, Io, QueueShare, Signal};
use ebb_volume::RequestCost;

use crate::abi::{Response, Slot, Status, op};
use crate::copier::Copier;
use crate::device_shared::{DeviceShared, add};
use crate::inline_io::InlineIo;
use crate::journal::Journal;
use crate::persistent::{GrantLimits, GrantTable};
use crate::platform::{Channel, Domain, Grants};
use crate::request_task::{SegmentTask, TaskSegments};
use crate::ring::{BlkifRing, Overrun};
use crate::throttle::ThrottledSlot;

/// Refused requests, beyond successful ones, after which a guest is delayed.
const REFUSED_AT_ONCE: u32 = 64;
/// The interval of purges of a full table of grants (100 ms, as in Linux's xen-blkback).
const PURGE_INTERVAL: Duration = Duration::from_millis(100);
/// Under memory pressure, mappings that have been idle for this long are unmapped, and those that become so
/// in the same time after it. Mappings in use are worth their memory (0.9 KiB each): mapping one again at
/// once takes several system calls and hypercalls.
const IDLE: Duration = Duration::from_secs(5);
/// Grants unmapped between two checks whether other tasks are waiting, and at most in one iteration of the
/// worker: each costs as much as many requests.
const UNMAP_STEP: usize = 1;
const UNMAP_BATCH: usize = 16;
/// Grants mapped per batch while nearly as many are mapped as may be; other pages are copied.
pub(crate) const MAP_BATCH: usize = 1;

/// Why a ring is not served any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RingFailure {
    /// Its indices are invalid.
    #[error(transparent)]
    Overrun(#[from] Overrun),
    /// No more events can be received.
    #[error(transparent)]
    Channel(#[from] std::io::Error),
}

/// The parts of a queue, opened on the thread that may block.
pub(crate) struct QueueParts {
    pub(crate) disk: Arc<DeviceShared>,
    pub(crate) name: String,
    pub(crate) guest: Domain,
    pub(crate) grants: Arc<dyn Grants>,
    pub(crate) channel: Box<dyn Channel>,
    pub(crate) ring: BlkifRing,
    pub(crate) journal: Arc<Journal>,
    /// Entries of the journal that are to be repeated.
    pub(crate) resumed_entries: Vec<u32>,
    pub(crate) persistent: bool,
}

/// What has to be done before more requests are consumed.
#[derive(Debug)]
pub(crate) enum AfterBatch {
    /// Nothing.
    Nothing,
    /// The barrier of this entry.
    Barrier(u32),
    /// The next request has to wait for the volume's limits.
    Throttled(ThrottledSlot),
}

/// See the module.
pub(crate) struct Queue {
    pub(crate) io: Io,
    pub(crate) disk: Arc<DeviceShared>,
    pub(crate) guest: Domain,
    pub(crate) grants: Arc<dyn Grants>,
    name: String,
    channel: Box<dyn Channel>,
    event_fd: ebb_io::Fd,
    /// The buffer that events are read into.
    event: Cell<Option<Buf>>,
    ring: RefCell<BlkifRing>,
    pub(crate) journal: Arc<Journal>,
    /// Grants that stay mapped, if guest and backend agreed on it.
    pub(crate) table: Option<RefCell<GrantTable>>,
    /// Grants mapped in this batch.
    pub(crate) mapped: Cell<usize>,
    /// Mapping failed: pages are copied until the next purge.
    pub(crate) starved: Cell<bool>,
    pub(crate) buffers: BufPool,
    pub(crate) memory: Rc<Budget>,
    /// The volume's share of the memory for requests.
    pub(crate) queue_share: Rc<QueueShare>,
    pub(crate) copier: Copier,
    pub(crate) inline_io: InlineIo,
    /// Set when the table of grants has to be purged.
    pub(crate) purge_needed: Signal,
    tasks: RequestTasks<u32, TaskSegments>,
    free_entries: RefCell<Vec<u32>>,
    /// Responses to be published, with their entries in the journal.
    responses: Completions<(u32, Response)>,
    /// Refused requests minus successful ones, since the guest was last delayed.
    refused: Cell<u32>,
    /// The time when requests were last consumed: exact enough for the order of use.
    pub(crate) now: Cell<Instant>,
    stopping: Cell<bool>,
    pub(crate) halt: Signal,
    /// What the next request has passed the volume's limits with, after it had to wait.
    pub(crate) passed: Cell<Option<RequestCost>>,
    error_lines: ErrorLines,
}

impl Queue {
    /// Serves a ring until it is stopped; then all consumed requests have completed and have responses.
    pub(crate) async fn run(io: Io, parts: QueueParts) {
        let QueueParts { disk, name, guest, grants, channel, ring, journal, .. } = parts;
        let slots = usize::try_from(ring.slots()).unwrap_or_default();
        let entries = (0..ring.slots()).rev();
        let free: Vec<u32> = entries.filter(|n| !parts.resumed_entries.contains(n)).collect();
        let buffers = io.pool().queue(io.pool().owner(), &disk.pool);
        let memory = Budget::new(disk.queue_memory);
        let queue_share = QueueShare::new(disk.volume.share(io.pool().memory().shares()).clone());
        // Read now: a shrink before the first housekeeping also counts for this ring.
        let shrinks = disk.parameters.shrinks();
        let queue = Rc::new(Queue {
            io: io.clone(),
            guest,
            grants,
            name,
            event_fd: channel.fd(),
            channel,
            event: Cell::default(),
            ring: RefCell::new(ring),
            journal,
            table: parts.persistent.then(RefCell::default),
            mapped: Cell::new(0),
            starved: Cell::new(false),
            buffers,
            memory,
            queue_share,
            copier: Copier::default(),
            inline_io: InlineIo::default(),
            purge_needed: Signal::default(),
            tasks: RequestTasks::new(slots),
            free_entries: RefCell::new(free),
            responses: Completions::new(slots),
            refused: Cell::new(0),
            now: Cell::new(ebb_mem::clock::now()),
            stopping: Cell::new(false),
            halt: Signal::default(),
            passed: Cell::new(None),
            error_lines: ErrorLines::default(),
            disk,
        });
        let helpers = [
            io.spawn(queue.clone().publish_responses()),
            io.spawn(queue.clone().copy_for_tasks()),
            io.spawn(queue.clone().housekeeping(shrinks)),
            io.spawn(queue.clone().watch_stop()),
        ];
        let share = parts.persistent.then(|| queue.disk.parameters.add_ring());
        queue.serve(parts.resumed_entries).await;
        queue.tasks.drain().await;
        queue.publish();
        drop(helpers);
        queue.tasks.retire_idle();
        queue.unmap(|table| table.clear(UNMAP_STEP)).await;
        drop(share);
    }

    async fn watch_stop(self: Rc<Self>) {
        self.disk.stop.wait().await;
        self.stopping.set(true);
        self.halt.set();
    }

    async fn serve(self: &Rc<Self>, resumed_entries: Vec<u32>) {
        add(&self.disk.counters.resumed, resumed_entries.len() as u64);
        add(&self.disk.counters.consumed, resumed_entries.len() as u64);
        for entry in resumed_entries {
            self.begin(entry, is_barrier(&self.journal.slot(entry))).await;
        }
        // The guest may be waiting since the predecessor ended.
        self.notify();
        let Err(failure) = serve_ring(self).await else { return };
        match failure {
            RingFailure::Overrun(overrun) => {
                if let Some(suppressed) = self.disk.log_limit.admit(ebb_mem::clock::now()) {
                    tracing::warn!(queue = self.name, error = %overrun, suppressed, "the ring is not served any more");
                }
            }
            RingFailure::Channel(error) => {
                tracing::warn!(queue = self.name, %error, "the event channel failed: the ring is not served any more");
            }
        }
        self.halt.wait().await;
    }

    /// Unmasks the next event and waits for it, in one system call.
    async fn wait_for_event(&self) -> std::io::Result<()> {
        let token = self.channel.token();
        let mut masked = true;
        loop {
            let mut buf = match self.event.take() {
                Some(buf) => buf,
                None => self.io.pool().take(token.len()).await,
            };
            buf.copy_from_slice(token);
            let received =
                async { Some(self.io.exchange(&self.event_fd, buf, token.len(), masked).await) };
            let halted = async {
                self.halt.wait().await;
                None
            };
            let Some((outcome, buf)) = futures_lite::future::or(received, halted).await else {
                return Ok(());
            };
            self.event.set(Some(buf));
            match outcome {
                Ok(count) if count == token.len() => {
                    add(&self.disk.counters.events, 1);
                    return Ok(());
                }
                Ok(_) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Err(error) if is_again(&error) => masked = false,
                Err(error) => return Err(error),
            }
        }
    }

    /// Notes the next request, of which `slot` is the private copy, in the journal and consumes it.
    #[inline]
    fn note_next(&self, ring: &mut BlkifRing, entry: u32, slot: &Slot) {
        let used = ring.abi().used_words(slot[0]);
        self.journal.take(entry, ring.req_cons(), &slot[..used]);
        ring.advance();
    }

    /// Starts a request in a task. No request passes a barrier in either direction.
    async fn begin(self: &Rc<Self>, entry: u32, barrier: bool) {
        if barrier {
            self.tasks.drain().await;
        }
        self.start(entry);
        if barrier {
            self.tasks.drain().await;
        }
    }

    /// Starts a request in a task. There is one for each entry of the journal.
    fn start(self: &Rc<Self>, entry: u32) {
        let task = self.tasks.try_idle(self);
        debug_assert!(task.is_some(), "no more entries than tasks");
        if let Some(task) = task {
            task.scratch().note_arrival(self.io.iteration_start());
            task.start(entry);
        }
    }

    /// Queues the response of a completed request, to be published with others.
    pub(crate) fn complete(&self, entry: u32, response: Response) {
        let refused = self.refused.get();
        if response.status == Status::Okay.code() {
            if refused > 0 {
                self.refused.set(refused - 1);
            }
        } else {
            self.refused.set(refused.saturating_add(1));
            if response.status == Status::Error.code() {
                add(&self.disk.counters.errors, 1);
            }
        }
        self.responses.push((entry, response));
    }

    /// Publishes the responses of request tasks, after all that were ready have run.
    async fn publish_responses(self: Rc<Self>) {
        loop {
            self.responses.ready().await;
            self.publish();
        }
    }

    fn notify(&self) {
        add(&self.disk.counters.notifications, 1);
        if let Err(error) = self.channel.notify() {
            tracing::debug!(queue = self.name, %error, "cannot notify the guest");
        }
    }

    async fn copy_for_tasks(self: Rc<Self>) {
        loop {
            self.copier.requested().await;
            let done = self.copier.run(self.guest, &*self.grants);
            add(&self.disk.counters.copies, done);
            add(&self.disk.counters.copy_calls, u64::from(done > 0));
        }
    }

    /// Keeps the table of grants within its limits, and unmaps idle grants under memory pressure: since there
    /// were `shrinks` signs of it.
    async fn housekeeping(self: Rc<Self>, mut shrinks: u64) {
        let parameters = self.disk.parameters.clone();
        let mut sign = None;
        loop {
            let changed = parameters.listen();
            if parameters.shrinks() != shrinks {
                shrinks = parameters.shrinks();
                sign = Some(ebb_mem::clock::now());
                self.tasks.retire_idle();
            }
            let now = ebb_mem::clock::now();
            self.starved.set(false);
            let limits = GrantLimits {
                cap: parameters.ring_cap(),
                unused: idle_limit(parameters.unused(), sign, now),
            };
            let mut first = true;
            self.unmap(|table| table.purge(&limits, now, UNMAP_STEP, std::mem::take(&mut first)))
                .await;
            let expiry =
                self.table.as_ref().and_then(|table| table.borrow().next_expiry(limits.unused));
            let expired = async {
                match expiry {
                    Some(at) => self.io.sleep(at.saturating_duration_since(now)).await,
                    None => std::future::pending().await,
                }
            };
            let purge_needed = async {
                self.purge_needed.wait().await;
                self.io
                    .sleep((now + PURGE_INTERVAL).saturating_duration_since(ebb_mem::clock::now()))
                    .await;
            };
            futures_lite::future::or(changed, futures_lite::future::or(expired, purge_needed))
                .await;
        }
    }

    /// Unmaps what `step` chooses, [`UNMAP_STEP`] at a time, until it returns false.
    async fn unmap(&self, mut step: impl FnMut(&mut GrantTable) -> bool) {
        let mut done = 0;
        while self.with_table(&mut step) {
            done += UNMAP_STEP;
            if done >= UNMAP_BATCH || self.io.has_other_work() {
                done = 0;
                self.io.next_iteration().await;
            }
        }
    }

    fn with_table(&self, act: impl FnOnce(&mut GrantTable) -> bool) -> bool {
        let Some(table) = &self.table else { return false };
        let mut table = table.borrow_mut();
        let (before, (evictions, expiries)) = (table.len(), table.unmapped());
        let more = act(&mut table);
        let (after, unmapped) = (table.len(), table.unmapped());
        drop(table);
        let removed = i64::try_from(before - after).unwrap_or(i64::MAX);
        let counters = &self.disk.counters;
        counters.note_mapped(-removed);
        self.disk.parameters.release_mappings(u32::try_from(removed).unwrap_or_default());
        add(&counters.evictions, unmapped.0 - evictions);
        add(&counters.expiries, unmapped.1 - expiries);
        more
    }

    /// Whether a failed request of this queue is to be logged.
    pub(crate) fn may_log(&self) -> bool {
        match self.error_lines.admit() {
            ErrorLine::Request => self.disk.log_limit.admit(ebb_mem::clock::now()).is_some(),
            ErrorLine::Notice => {
                tracing::warn!(
                    queue = self.name,
                    "further failed requests of this ring are not logged"
                );
                false
            }
            ErrorLine::Nothing => false,
        }
    }

    /// Its name in the log.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl GuestRing for Queue {
    type Broken = RingFailure;
    type After = AfterBatch;

    /// Two rings of 32 slots: each notification is a hypercall.
    const BATCH: u32 = 64;

    fn io(&self) -> &Io {
        &self.io
    }

    fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    fn waiting(&self) -> Result<u32, RingFailure> {
        Ok(self.ring.borrow().waiting()?)
    }

    fn arm(&self) -> Result<bool, RingFailure> {
        Ok(self.ring.borrow().arm()?)
    }

    async fn event(&self) -> Result<(), RingFailure> {
        Ok(self.wait_for_event().await?)
    }

    fn has_requests(&self) -> bool {
        // It is borrowed while its requests are consumed, and then not polled.
        self.ring.try_borrow().is_ok_and(|ring| !matches!(ring.waiting(), Ok(0)))
    }

    fn note_polled(&self) {
        add(&self.disk.counters.polls, 1);
    }

    /// Carries out the requests that need no wait, until a barrier or the end of the time slice.
    fn take_batch(self: &Rc<Self>, most: u32, slice: &mut TimeSlice) -> Consumed<AfterBatch> {
        self.now.set(ebb_mem::clock::now());
        self.mapped.set(0);
        let data = self.disk.volume.direct_access(&self.io);
        let abi = self.ring.borrow().abi();
        let limits = self.disk.volume.limits();
        let (mut count, mut after, mut make_way) = (0, AfterBatch::Nothing, false);
        let (mut ring, mut free) = (self.ring.borrow_mut(), self.free_entries.borrow_mut());
        while count < most && !make_way {
            let Some(entry) = free.pop() else { break };
            let slot = ring.copy_next();
            if let Some(limits) = limits
                && let Some(waiting) = self.throttle_next(limits, &slot, abi)
            {
                free.push(entry);
                after = AfterBatch::Throttled(waiting);
                break;
            }
            self.note_next(&mut ring, entry, &slot);
            count += 1;
            if is_barrier(&slot) {
                after = AfterBatch::Barrier(entry);
                break;
            }
            let done = data.as_ref().and_then(|data| self.try_inline(data, abi, entry, &slot));
            let cost = done.unwrap_or_else(|| {
                self.start(entry);
                1
            });
            make_way = slice.spend(cost, &self.io);
        }
        drop((ring, free));
        add(&self.disk.counters.consumed, count.into());
        if let Some(data) = data {
            self.finish_copies(&data);
        }
        Consumed { count, make_way, after }
    }

    fn publish(&self) {
        let event = self.responses.publish(|responses| {
            let mut ring = self.ring.borrow_mut();
            for (entry, response) in responses.iter() {
                self.journal.begin_response(*entry, ring.rsp_prod());
                ring.respond(*response);
            }
            let event = ring.publish();
            let mut free = self.free_entries.borrow_mut();
            add(&self.disk.counters.responses, responses.len() as u64);
            add(&self.disk.counters.publications, 1);
            for (entry, _) in responses.drain(..) {
                self.journal.free(entry);
                free.push(entry);
            }
            event
        });
        if event == Some(true) {
            self.notify();
        }
    }

    async fn after_batch(self: &Rc<Self>, after: AfterBatch) {
        match after {
            AfterBatch::Nothing => {}
            AfterBatch::Barrier(entry) => self.begin(entry, true).await,
            AfterBatch::Throttled(waiting) => self.throttle(waiting).await,
        }
        if self.refused.get() > REFUSED_AT_ONCE {
            self.refused.set(0);
            add(&self.disk.counters.throttled, 1);
            self.io.sleep(THROTTLE).await;
        }
    }
}

impl RequestRunner for Queue {
    type Job = u32;
    type Scratch = TaskSegments;

    fn tasks(&self) -> &RequestTasks<u32, TaskSegments> {
        &self.tasks
    }

    fn io(&self) -> &Io {
        &self.io
    }

    async fn execute(&self, task: &Rc<SegmentTask>) {
        let Some((entry, due)) = task.take() else { return };
        let slot = self.journal.slot(entry);
        let abi = self.ring.borrow().abi();
        let response = self.respond_to(task, abi, &slot).await;
        if response.status == Status::Error.code() && self.disk.leaves_failures() {
            due.waive();
            if let Some(suppressed) = self.disk.log_limit.admit(ebb_mem::clock::now()) {
                tracing::warn!(
                    queue = self.name,
                    suppressed,
                    "a request was given up: it gets no response until the next daemon completes it"
                );
            }
        } else {
            self.complete(entry, response);
            due.settle();
            self.responses.publish_soon();
        }
    }

    fn all_done(&self) {
        self.buffers.done(ebb_mem::clock::now());
    }
}

/// How long a mapping may be idle, if there was memory pressure at `sign`.
fn idle_limit(unused: Option<Duration>, sign: Option<Instant>, now: Instant) -> Option<Duration> {
    let wanted = sign.is_some_and(|sign| now.saturating_duration_since(sign) < IDLE * 2);
    if wanted { Some(unused.map_or(IDLE, |unused| unused.min(IDLE))) } else { unused }
}

fn is_barrier(slot: &Slot) -> bool {
    slot[0].to_le_bytes()[0] == op::WRITE_BARRIER
}

fn is_again(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn under_memory_pressure_idle_mappings_expire_sooner() {
        let (start, unused) = (Instant::now(), Some(Duration::from_secs(60)));
        assert_eq!(idle_limit(unused, None, start), unused);
        for after in [Duration::ZERO, IDLE, IDLE * 2 - Duration::from_millis(1)] {
            let rest = |unused| idle_limit(unused, Some(start), start + after);
            assert_eq!((rest(unused), rest(None)), (Some(IDLE), Some(IDLE)), "{after:?}");
            assert_eq!(rest(Some(Duration::from_millis(5))), Some(Duration::from_millis(5)));
        }
        assert_eq!(
            idle_limit(unused, Some(start), start + IDLE * 2),
            unused,
            "the pressure has ended"
        );
    }
}
