//! One ring being served, on one worker: take requests, hand them to lanes, publish responses.
//!
//! # Invariants
//! - A request is copied once into the journal, checked there, and answered exactly once.
//! - Requests that began run to their end, also when the guest is gone: only then does the queue
//!   end, so that closing a volume knows of every write.
//! - What a guest can make us hold is bounded: its ring's slots, the queue's memory budget, and the
//!   cap of persistent grants.
//! - A guest that floods us with events is heard once for each turn; one that lies about its ring
//!   is heard no more.

use std::cell::{Cell, RefCell};
use std::hint::spin_loop;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_io::{Budget, Buf, BufPool, Io, QueueShare, Signal};

use crate::abi::{Response, Slot, Status, op};
use crate::busy_poll::BusyPoll;
use crate::copier::Copier;
use crate::device_shared::{DeviceShared, add};
use crate::inline_io::Express;
use crate::journal::Journal;
use crate::persistent::{Limits, Table};
use crate::platform::{Channel, Domain, Grants};
use crate::request_task::Lane;
use crate::ring::{Overrun, Ring};

/// Requests taken between two looks at what else there is to do.
const BATCH: u32 = 64;
/// Work after which requests make way if somebody is waiting who has little to do; in copies of a
/// mapped page, as all work is reckoned ([`crate::inline_io::cost`]). A ring of small requests.
const QUANTUM: usize = 32;
/// Work between two looks whether anybody is.
const STEP: usize = 8;
/// Work after which they make way at all: long, since rings that take turns find their pages gone from
/// the processor's cache (ADR 6).
const SLICE: usize = 2048;
/// Turns without a request after which a guest's events are let through more slowly.
const SPURIOUS: u32 = 16;
/// How much more slowly; and how long a guest must wait that only sends what is refused.
const THROTTLE: Duration = Duration::from_millis(1);
/// How often too full a table of grants is tidied (seed `003`).
const TIDY: Duration = Duration::from_millis(100);
/// Looks at an empty ring between two turns of the worker, a pause of the processor before each.
const LOOKS: u32 = 16;
/// When memory is wanted, what has not been used for so long is unmapped, and what comes to that in the
/// same time after the sign. Mappings in use are worth their memory (0.9 KiB each): made again at
/// once, each costs several calls of the system and of the hypervisor.
const IDLE: Duration = Duration::from_secs(5);
/// Grants unmapped between two looks whether somebody is waiting, and in one turn of the worker at most:
/// each costs as much as many requests.
const UNMAP_STEP: usize = 1;
const UNMAP_TURN: usize = 16;
/// Grants mapped in one batch while there are nearly as many as may be; others are copied.
pub(crate) const MAP_TURN: usize = 1;
/// Failed requests logged for each queue: a broken disk or guest must not fill the log.
const ERRORS_LOGGED: u32 = 10;

/// What a queue is made of, put together where waiting does no harm.
pub(crate) struct Parts {
    pub(crate) disk: Arc<DeviceShared>,
    pub(crate) name: String,
    pub(crate) guest: Domain,
    pub(crate) grants: Arc<dyn Grants>,
    pub(crate) channel: Box<dyn Channel>,
    pub(crate) ring: Ring,
    pub(crate) journal: Arc<Journal>,
    /// Entries of the journal to be done again.
    pub(crate) left_over: Vec<u32>,
    pub(crate) persistent: bool,
}

/// See the module.
pub(crate) struct Queue {
    pub(crate) io: Io,
    pub(crate) disk: Arc<DeviceShared>,
    pub(crate) guest: Domain,
    pub(crate) grants: Arc<dyn Grants>,
    name: String,
    channel: Box<dyn Channel>,
    /// What events are read into.
    event: Cell<Option<Buf>>,
    ring: RefCell<Ring>,
    pub(crate) journal: Arc<Journal>,
    /// Grants that stay mapped, if guest and backend agreed on it.
    pub(crate) table: Option<RefCell<Table>>,
    /// Grants mapped in this batch.
    pub(crate) mapped: Cell<usize>,
    /// No mapping could be had lately: pages are copied until the table was tidied.
    pub(crate) starved: Cell<bool>,
    /// Work done since others had their turn.
    spent: Cell<usize>,
    pub(crate) buffers: BufPool,
    pub(crate) memory: Rc<Budget>,
    /// The volume's share of the memory for requests.
    pub(crate) queue_share: Rc<QueueShare>,
    pub(crate) copier: Copier,
    pub(crate) express: Express,
    /// The table of grants wants a look.
    pub(crate) untidy: Signal,
    lanes: Lanes,
    free_entries: RefCell<Vec<u32>>,
    answers: RefCell<Vec<(u32, Response)>>,
    answered: Signal,
    /// Requests that were refused beyond those that were carried out, since the guest was made to wait.
    refused: Cell<u32>,
    pace: BusyPoll,
    /// The time as of the last requests taken: exact enough for the order of use.
    pub(crate) now: Cell<Instant>,
    stopping: Cell<bool>,
    halt: Signal,
    logged: Cell<u32>,
}

#[derive(Default)]
struct Lanes {
    idle: RefCell<Vec<Rc<Lane>>>,
    busy: Cell<u32>,
    /// Set when none is busy any more.
    quiet: Signal,
}

impl Queue {
    /// Serves a ring until told to stop; then nothing of it is under way, and all that was taken
    /// has been answered.
    pub(crate) async fn run(io: Io, parts: Parts) {
        let Parts { disk, name, guest, grants, channel, ring, journal, .. } = parts;
        let slots = usize::try_from(ring.slots()).unwrap_or_default();
        let entries = (0..ring.slots()).rev();
        let free: Vec<u32> = entries.filter(|n| !parts.left_over.contains(n)).collect();
        let buffers = io.pool().queue(io.pool().owner(), disk.pool.clone());
        let memory = Budget::new(disk.queue_memory);
        let queue_share = QueueShare::new(disk.volume.share(io.pool().memory().shares()).clone());
        // As of now: a sign that comes before the housekeeper's first turn is for this ring, too.
        let shrinks = disk.parameters.shrinks();
        let queue = Rc::new(Queue {
            io: io.clone(),
            guest,
            grants,
            name,
            channel,
            event: Cell::default(),
            ring: RefCell::new(ring),
            journal,
            table: parts.persistent.then(RefCell::default),
            mapped: Cell::new(0),
            starved: Cell::new(false),
            spent: Cell::new(0),
            buffers,
            memory,
            queue_share,
            copier: Copier::default(),
            express: Express::default(),
            untidy: Signal::default(),
            lanes: Lanes::default(),
            free_entries: RefCell::new(free),
            answers: RefCell::new(Vec::with_capacity(slots)),
            answered: Signal::default(),
            refused: Cell::new(0),
            pace: BusyPoll::default(),
            now: Cell::new(ebb_mem::clock::now()),
            stopping: Cell::new(false),
            halt: Signal::default(),
            logged: Cell::new(0),
            disk,
        });
        let helpers = [
            io.spawn(queue.clone().publish_answers()),
            io.spawn(queue.clone().copy_for_lanes()),
            io.spawn(queue.clone().housekeeping(shrinks)),
            io.spawn(queue.clone().obey()),
        ];
        let share = parts.persistent.then(|| queue.disk.parameters.enter());
        queue.serve(parts.left_over).await;
        queue.drain().await;
        queue.publish();
        drop(helpers);
        queue.retire_idle();
        queue.unmap(|table| table.clear(UNMAP_STEP)).await;
        drop(share);
    }

    async fn obey(self: Rc<Self>) {
        self.disk.stop.wait().await;
        self.stopping.set(true);
        self.halt.set();
    }

    async fn serve(self: &Rc<Self>, left_over: Vec<u32>) {
        add(&self.disk.counters.resumed, left_over.len() as u64);
        for entry in left_over {
            self.begin(entry, is_barrier(&self.journal.slot(entry))).await;
        }
        // The guest may have waited for us.
        self.notify();
        let fd = self.channel.fd();
        let mut spurious = 0;
        while !self.stopping.get() {
            match self.take_requests().await {
                Ok(0) => spurious += 1,
                Ok(_) => spurious = 0,
                Err(overrun) => {
                    if let Some(suppressed) = self.disk.lines.admit(ebb_mem::clock::now()) {
                        tracing::warn!(queue = self.name, error = %overrun, suppressed, "not served any more");
                    }
                    self.halt.wait().await;
                    return;
                }
            }
            if spurious > SPURIOUS {
                self.io.sleep(THROTTLE).await;
            }
            if let Err(error) = self.wait_for_event(&fd).await {
                tracing::warn!(queue = self.name, %error, "the event channel broke");
                self.halt.wait().await;
                return;
            }
        }
    }

    /// Lets the next event through and waits for it, in one call of the system.
    async fn wait_for_event(&self, fd: &ebb_io::Fd) -> std::io::Result<()> {
        let token = self.channel.token();
        let mut masked = true;
        loop {
            let mut buf = match self.event.take() {
                Some(buf) => buf,
                None => self.io.pool().take(token.len()).await,
            };
            buf.copy_from_slice(token);
            let heard = async { Some(self.io.exchange(fd, buf, token.len(), masked).await) };
            let halted = async {
                self.halt.wait().await;
                None
            };
            let Some((outcome, buf)) = futures_lite::future::or(heard, halted).await else {
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

    /// Takes what waits in the ring, until nothing does and the guest has been asked for an event.
    async fn take_requests(self: &Rc<Self>) -> Result<u32, Overrun> {
        let mut taken = 0u32;
        self.spent.set(0);
        while !self.stopping.get() {
            let waiting = self.ring.borrow().waiting()?;
            if waiting == 0 {
                if self.look().await? || self.ring.borrow().arm()? {
                    continue;
                }
                break;
            }
            self.now.set(ebb_mem::clock::now());
            let (count, barrier, make_way) = self.take_batch(waiting.min(BATCH));
            self.pace.took(count, self.now.get());
            taken = taken.saturating_add(count);
            self.publish();
            if let Some(entry) = barrier {
                self.begin(entry, true).await;
            }
            if self.refused.get() > BATCH {
                self.refused.set(0);
                add(&self.disk.counters.throttled, 1);
                self.io.sleep(THROTTLE).await;
            }
            if make_way || count == 0 {
                self.spent.set(0);
                self.io.yield_iteration().await;
            }
        }
        Ok(taken)
    }

    /// Looks at the empty ring while that is likely to pay, without asking the guest for an event; true
    /// if requests came. A guest that waits for something else to be over is not looked at.
    async fn look(&self) -> Result<bool, Overrun> {
        let each = Duration::from_micros(self.disk.parameters.poll_us().into());
        let Some(until) = self.pace.look_until(each, ebb_mem::clock::now()) else {
            return Ok(false);
        };
        while !self.stopping.get() && self.lanes.busy.get() == 0 {
            for _ in 0..LOOKS {
                spin_loop();
                if self.ring.borrow().waiting()? > 0 {
                    add(&self.disk.counters.polls, 1);
                    return Ok(true);
                }
            }
            if ebb_mem::clock::now() >= until {
                break;
            }
            self.spent.set(0);
            match self.pace.is_light() {
                true => self.io.next_iteration().await,
                false => self.io.yield_iteration().await,
            }
        }
        Ok(false)
    }

    /// Takes at most `most` requests and carries out those that need not wait, until one is a
    /// barrier, or others shall go on: how many, the entry of that, and whether they shall.
    fn take_batch(self: &Rc<Self>, most: u32) -> (u32, Option<u32>, bool) {
        self.mapped.set(0);
        let data = self.disk.volume.direct_access();
        let abi = self.ring.borrow().abi();
        let (mut taken, mut barrier) = (0, None);
        let (mut ring, mut free) = (self.ring.borrow_mut(), self.free_entries.borrow_mut());
        let (mut spent, mut make_way) = (self.spent.get(), false);
        while taken < most && !make_way {
            let Some(entry) = free.pop() else { break };
            let slot = self.note_next(&mut ring, entry);
            taken += 1;
            if is_barrier(&slot) {
                barrier = Some(entry);
                break;
            }
            let before = spent / STEP;
            match data.as_ref().and_then(|data| self.at_once(data, abi, entry, &slot)) {
                Some(cost) => spent += cost,
                None => {
                    spent += 1;
                    self.start(entry);
                }
            }
            let look = spent >= QUANTUM && spent / STEP > before;
            make_way = spent >= SLICE || (look && self.io.has_other_work());
        }
        self.spent.set(spent);
        drop((ring, free));
        if let Some(data) = data {
            self.finish_copies(&data);
        }
        (taken, barrier, make_way)
    }

    /// Copies the next request into the journal and takes it; the private copy.
    #[inline]
    fn note_next(&self, ring: &mut Ring, entry: u32) -> Slot {
        let slot = ring.copy_next();
        let used = ring.abi().used_words(slot[0]);
        self.journal.take(entry, ring.req_cons(), &slot[..used]);
        ring.advance();
        slot
    }

    /// Gives a request to a lane. Nothing passes a barrier in either direction.
    async fn begin(self: &Rc<Self>, entry: u32, barrier: bool) {
        if barrier {
            self.drain().await;
        }
        self.start(entry);
        if barrier {
            self.drain().await;
        }
    }

    fn start(self: &Rc<Self>, entry: u32) {
        self.lanes.busy.set(self.lanes.busy.get() + 1);
        let idle = self.lanes.idle.borrow_mut().pop();
        let lane = idle.unwrap_or_else(|| {
            let lane = Rc::new(Lane::default());
            self.io.spawn(self.clone().run_lane(lane.clone())).detach();
            lane
        });
        lane.give(entry);
    }

    /// Notes how a request ended, to be published with others.
    pub(crate) fn settle(&self, entry: u32, response: Response) {
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
        self.answers.borrow_mut().push((entry, response));
    }

    /// Waits until no request is under way.
    async fn drain(&self) {
        while self.lanes.busy.get() > 0 {
            self.lanes.quiet.wait().await;
        }
    }

    async fn run_lane(self: Rc<Self>, lane: Rc<Lane>) {
        while let Some(entry) = lane.next().await {
            let slot = self.journal.slot(entry);
            let abi = self.ring.borrow().abi();
            let response = self.execute(&lane, abi, &slot).await;
            self.settle(entry, response);
            self.answered.set();
            let busy = self.lanes.busy.get() - 1;
            self.lanes.busy.set(busy);
            if busy == 0 {
                self.lanes.quiet.set();
                self.buffers.done(ebb_mem::clock::now());
            }
            self.lanes.idle.borrow_mut().push(lane.clone());
        }
    }

    fn retire_idle(&self) {
        self.lanes.idle.take().iter().for_each(|lane| lane.retire());
    }

    /// Publishes what has gathered, whenever something has: behind all lanes that were ready.
    async fn publish_answers(self: Rc<Self>) {
        loop {
            self.answered.wait().await;
            self.publish();
        }
    }

    fn publish(&self) {
        let mut answers = self.answers.borrow_mut();
        if answers.is_empty() {
            return;
        }
        let mut ring = self.ring.borrow_mut();
        for (entry, response) in answers.iter() {
            self.journal.answer(*entry, ring.rsp_prod());
            ring.respond(*response);
        }
        let event = ring.publish();
        let mut free = self.free_entries.borrow_mut();
        add(&self.disk.counters.answers, answers.len() as u64);
        add(&self.disk.counters.publications, 1);
        for (entry, _) in answers.drain(..) {
            self.journal.free(entry);
            free.push(entry);
        }
        drop((free, ring, answers));
        if event {
            self.notify();
        }
    }

    fn notify(&self) {
        add(&self.disk.counters.notifications, 1);
        if let Err(error) = self.channel.notify() {
            tracing::debug!(queue = self.name, %error, "the guest is gone");
        }
    }

    async fn copy_for_lanes(self: Rc<Self>) {
        loop {
            self.copier.asked().await;
            let done = self.copier.run(self.guest, &*self.grants);
            add(&self.disk.counters.copies, done);
            add(&self.disk.counters.copy_calls, u64::from(done > 0));
        }
    }

    /// Keeps the table of grants within its limits, and gives it back when memory is wanted: has been
    /// since there were `shrinks` signs of that.
    async fn housekeeping(self: Rc<Self>, mut shrinks: u64) {
        let parameters = self.disk.parameters.clone();
        let mut sign = None;
        loop {
            let changed = parameters.listen();
            if parameters.shrinks() != shrinks {
                shrinks = parameters.shrinks();
                sign = Some(ebb_mem::clock::now());
                self.retire_idle();
            }
            let now = ebb_mem::clock::now();
            self.starved.set(false);
            let limits = Limits {
                cap: parameters.ring_cap(),
                unused: may_rest(parameters.unused(), sign, now),
            };
            let mut first = true;
            self.unmap(|table| table.tidy(&limits, now, UNMAP_STEP, std::mem::take(&mut first)))
                .await;
            let expiry =
                self.table.as_ref().and_then(|table| table.borrow().next_expiry(limits.unused));
            let expired = async {
                match expiry {
                    Some(at) => self.io.sleep(at.saturating_duration_since(now)).await,
                    None => std::future::pending().await,
                }
            };
            let untidy = async {
                self.untidy.wait().await;
                self.io.sleep((now + TIDY).saturating_duration_since(ebb_mem::clock::now())).await;
            };
            futures_lite::future::or(changed, futures_lite::future::or(expired, untidy)).await;
        }
    }

    /// Unmaps what `step` finds, [`UNMAP_STEP`] at a time, until that says that there is no more.
    async fn unmap(&self, mut step: impl FnMut(&mut Table) -> bool) {
        let mut done = 0;
        while self.with_table(&mut step) {
            done += UNMAP_STEP;
            if done >= UNMAP_TURN || self.io.has_other_work() {
                done = 0;
                self.io.next_iteration().await;
            }
        }
    }

    fn with_table(&self, act: impl FnOnce(&mut Table) -> bool) -> bool {
        let Some(table) = &self.table else { return false };
        let mut table = table.borrow_mut();
        let (before, (evictions, expiries)) = (table.len(), table.unmapped());
        let more = act(&mut table);
        let (after, unmapped) = (table.len(), table.unmapped());
        drop(table);
        let gone = i64::try_from(before - after).unwrap_or(i64::MAX);
        let counters = &self.disk.counters;
        counters.note_mapped(-gone);
        self.disk.parameters.give_mappings_back(u32::try_from(gone).unwrap_or_default());
        add(&counters.evictions, unmapped.0 - evictions);
        add(&counters.expiries, unmapped.1 - expiries);
        more
    }

    /// True while failed requests of this queue still go to the log.
    pub(crate) fn may_log(&self) -> bool {
        let count = self.logged.get();
        self.logged.set(count.saturating_add(1));
        if count == ERRORS_LOGGED {
            tracing::warn!(queue = self.name, "more failed requests; not logged any more");
        }
        count < ERRORS_LOGGED && self.disk.lines.admit(ebb_mem::clock::now()).is_some()
    }

    /// The name it has in the log.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// How long a mapping may lie idle, when memory was last wanted at `sign`.
fn may_rest(unused: Option<Duration>, sign: Option<Instant>, now: Instant) -> Option<Duration> {
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
    fn when_memory_is_wanted_idle_mappings_go_soon_and_those_in_use_stay() {
        let (start, unused) = (Instant::now(), Some(Duration::from_secs(60)));
        assert_eq!(may_rest(unused, None, start), unused);
        for after in [Duration::ZERO, IDLE, IDLE * 2 - Duration::from_millis(1)] {
            let rest = |unused| may_rest(unused, Some(start), start + after);
            assert_eq!((rest(unused), rest(None)), (Some(IDLE), Some(IDLE)), "{after:?}");
            assert_eq!(rest(Some(Duration::from_millis(5))), Some(Duration::from_millis(5)));
        }
        assert_eq!(may_rest(unused, Some(start), start + IDLE * 2), unused, "it is over");
    }
}
