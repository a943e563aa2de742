//! A Xen guest of the world: a disk over a ring in shared memory, with several requests in flight,
//! whose responses are checked against the oracle. It never waits: the world's loop steps it. The
//! guest and its ring survive the end of a daemon.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ebb_export_xen::abi::{
    Abi, Body, MAX_DIRECT_SEGMENTS, PAGE_BYTES, Request as Asked, Segment, op,
};
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig, offset};
use ebb_export_xen::shm::{Guest as Domain, World as Machine};
use ebb_export_xen::{DiskSpec, attach, device_number};
use ebb_volume::Volume;

use crate::manner::Manner;
use crate::oracle::{Change, Oracle, SECTOR, Writing};
use crate::random::Random;

/// The name of the disk in the guest.
const DISK: &str = "xvdb";
/// Consecutive failed requests after which a guest reconnects.
const FAILURES: u32 = 12;
/// The longest barrier write, sectors.
const BARRIER: usize = MAX_DIRECT_SEGMENTS * PAGE_BYTES / SECTOR;
/// Enough pages for a full ring of the longest requests, and for the ring.
const PAGES: u32 = 640;

enum Kind {
    Read {
        begun: u64,
    },
    Change(Writing),
    Flush {
        begun: u64,
    },
    /// A flush of acknowledged writes, followed by a write.
    Barrier {
        begun: u64,
        writing: Writing,
    },
}

/// A request in flight.
struct Request {
    kind: Kind,
    first: usize,
    count: usize,
    /// The pages of its data, and those of its descriptors.
    pages: Vec<u32>,
    descriptors: Vec<u32>,
    /// The number of resizes when it was sent, if it lies beyond the end.
    beyond: Option<u64>,
    sent: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    Serving,
    /// Disconnects the disk, at once or (`patient`) after all requests have completed; reconnects if
    /// `again`.
    Closing {
        patient: bool,
        again: bool,
    },
}

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepResult {
    Idle,
    Busy,
    /// The disk is disconnected for good.
    Ended,
}

/// See the module.
pub(crate) struct Guest {
    number: u16,
    machine: Machine,
    domain: Arc<Domain>,
    disk: Frontend,
    manner: Manner,
    random: Random,
    phase: Phase,
    open: BTreeMap<u64, Request>,
    next_at: Instant,
    /// Submits no more requests.
    pub(crate) quiet: bool,
    pub(crate) answered: u64,
    pub(crate) succeeded: u64,
    /// The number of consecutive requests that failed last.
    failures: u32,
    /// Some acknowledged writes are not covered by a flush.
    unflushed: bool,
    /// Such writes were in the memory of a daemon that was killed: no write and no flush may succeed.
    lost: bool,
    /// The volume to which it was connected.
    serving: Weak<Volume>,
    /// Since when a request has waited too long although the guest is served.
    pub(crate) waits: Option<Instant>,
    told: bool,
}

/// What remains of a destroyed guest: memory that the backend may have mapped, and changes that may be in flight.
pub(crate) struct Remains {
    pub(crate) number: u16,
    pub(crate) domain: Arc<Domain>,
    pub(crate) orphans: Vec<Writing>,
}

impl Guest {
    pub(crate) fn new(
        machine: &Machine,
        number: u16,
        volume: &str,
        manner: Manner,
        mut random: Random,
        now: Instant,
    ) -> Guest {
        let domain = machine.guest(number, PAGES).unwrap();
        let order = DiskSpec { volume, name: DISK, read_only: false };
        attach(&mut machine.tree.connect().unwrap(), number, &order).unwrap();
        let wishes = FrontendConfig {
            abi: random.pick(&[Abi::X86_64, Abi::X86_32]),
            persistent: random.chance(60),
            ..FrontendConfig::default()
        };
        let disk = Frontend::new(machine, &domain, device_number(DISK).unwrap(), wishes);
        Guest {
            number,
            machine: machine.clone(),
            domain,
            disk,
            manner,
            random,
            phase: Phase::Connecting,
            open: BTreeMap::new(),
            next_at: now,
            quiet: false,
            answered: 0,
            succeeded: 0,
            failures: 0,
            unflushed: false,
            lost: false,
            serving: Weak::new(),
            waits: None,
            told: crate::trace::is_told(),
        }
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Pages that a backend has mapped.
    pub(crate) fn mapped(&self) -> u64 {
        self.domain.mapped()
    }

    /// Requests in flight.
    pub(crate) fn open(&self) -> usize {
        self.open.len()
    }

    /// When the oldest request was sent.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.open.values().map(|request| request.sent).min()
    }

    pub(crate) fn is_serving(&self) -> bool {
        self.phase == Phase::Serving
    }

    /// When it needs its next step if it receives nothing before.
    pub(crate) fn wants(&self) -> Option<Instant> {
        let may = self.phase == Phase::Serving && self.open.len() < self.manner.depth;
        (may && !self.quiet).then_some(self.next_at)
    }

    /// Disconnects the disk and reconnects.
    pub(crate) fn close(&mut self, patient: bool) {
        if self.phase == Phase::Serving {
            self.phase = Phase::Closing { patient, again: true };
        }
    }

    /// The reason why the backend does not serve it, from the `error` node.
    pub(crate) fn complaint(&self) -> Option<String> {
        let device = device_number(DISK)?;
        let path = format!("/local/domain/0/error/backend/ebbd/{}/{device}/error", self.number);
        self.machine.tree.get(&path)
    }

    /// Whether some acknowledged writes are only in the memory of this volume, as far as the guest knows.
    pub(crate) fn would_lose(&self, volume: &Weak<Volume>) -> bool {
        let flush =
            |request: &Request| matches!(request.kind, Kind::Flush { .. } | Kind::Barrier { .. });
        // A flush may have succeeded without a response.
        let flushing = self.open.values().any(flush);
        let served = self.phase == Phase::Serving && self.serving.ptr_eq(volume);
        self.unflushed && served && !flushing
    }

    /// Acknowledged writes were lost with a daemon.
    pub(crate) fn lose(&mut self) {
        self.lost = true;
    }

    /// All acknowledged writes are stable: the volume was closed cleanly.
    pub(crate) fn note_stable(&mut self) {
        self.unflushed = false;
    }

    /// One step: receive, submit. If the backend reports an error it disconnects the disk.
    ///
    /// # Errors
    /// A promise that was not kept.
    pub(crate) fn step(
        &mut self,
        oracle: &mut Oracle,
        volume: &Weak<Volume>,
        now: Instant,
    ) -> Result<StepResult, String> {
        let mut busy = self.receive(oracle)?;
        let refused = self.complaint().is_some();
        match self.phase {
            // A guest that has begun to disconnect continues in the usual way.
            Phase::Connecting if refused => return Ok(StepResult::Ended),
            Phase::Connecting => {
                let before = self.own_state();
                if self.disk.step_connect().map_err(|error| error.to_string())? {
                    self.phase = Phase::Serving;
                    self.serving = volume.clone();
                    (self.unflushed, self.lost, self.failures) = (false, false, 0);
                    busy = true;
                }
                busy |= before != self.own_state();
            }
            Phase::Serving if refused => {
                self.phase = Phase::Closing { patient: false, again: false };
                busy = true;
            }
            Phase::Serving => busy |= self.submit_all(oracle, now),
            Phase::Closing { patient: true, again: true } if !self.open.is_empty() && !refused => {}
            Phase::Closing { again, .. } => {
                let before = self.own_state();
                if self.disk.step_close() {
                    // The rings have ended: there will be no further responses.
                    self.abandon(oracle).into_iter().for_each(|w| oracle.end(w, false));
                    if !again || refused {
                        return Ok(StepResult::Ended);
                    }
                    self.phase = Phase::Connecting;
                    busy = true;
                }
                busy |= before != self.own_state();
            }
        }
        Ok(if busy { StepResult::Busy } else { StepResult::Idle })
    }

    fn own_state(&self) -> Option<String> {
        let device = device_number(DISK)?;
        self.machine.tree.get(&format!("/local/domain/{}/device/vbd/{device}/state", self.number))
    }

    /// The size in sectors, as the backend reports it.
    fn size(&self) -> usize {
        usize::try_from(self.disk.size()).unwrap() / SECTOR
    }

    fn submit_all(&mut self, oracle: &mut Oracle, now: Instant) -> bool {
        let mut asked = false;
        while self.size() > 0 && self.wants().is_some_and(|at| at <= now) {
            self.submit(oracle, now);
            asked = true;
            let pause = self.random.below(self.manner.pause_us + 1);
            if pause > 0 {
                self.next_at = now + Duration::from_micros(pause);
            }
        }
        if asked {
            self.disk.queues[0].push();
        }
        if self.failures >= FAILURES {
            self.failures = 0;
            self.close(true);
        }
        asked
    }

    fn submit(&mut self, oracle: &mut Oracle, now: Instant) {
        // By the size that it knows: requests may lie beyond the end after a shrink.
        let size = self.size();
        let random = &mut self.random;
        let count = 1 + random.index(self.manner.longest.min(size));
        let first = random.index(self.manner.reach.min(size)).min(size - count);
        let (first, count) = if random.chance(70) && size >= 8 {
            let first = first / 8 * 8;
            (first, count.next_multiple_of(8).min((size - first) / 8 * 8).max(8).min(size - first))
        } else {
            (first, count)
        };
        let kind = if random.chance(self.manner.flushes) {
            Kind::Flush { begun: oracle.now() }
        } else if random.chance(self.manner.reads) {
            Kind::Read { begun: oracle.begin_read() }
        } else {
            match random.below(12) {
                0 if self.disk.backend("feature-discard").as_deref() == Some("1") => {
                    Kind::Change(oracle.begin(Change::Discard, first, count, false))
                }
                1 => {
                    // A barrier's segments are in its slot of the ring.
                    let (begun, count) = (oracle.now(), count.min(BARRIER));
                    let writing = oracle.begin(Change::Data, first, count, false);
                    let kind = Kind::Barrier { begun, writing };
                    return self.send(kind, first, count, oracle, now);
                }
                _ => Kind::Change(oracle.begin(Change::Data, first, count, false)),
            }
        };
        self.send(kind, first, count, oracle, now);
    }

    fn send(&mut self, kind: Kind, first: usize, count: usize, oracle: &Oracle, now: Instant) {
        let writing = match &kind {
            Kind::Change(writing) | Kind::Barrier { writing, .. } => Some(*writing),
            Kind::Read { .. } | Kind::Flush { .. } => None,
        };
        let operation = match (&kind, writing.map(|writing| writing.is_discard())) {
            (Kind::Flush { .. }, _) => op::FLUSH_DISKCACHE,
            (Kind::Read { .. }, _) => op::READ,
            (Kind::Barrier { .. }, _) => op::WRITE_BARRIER,
            (Kind::Change(_), Some(true)) => op::DISCARD,
            (Kind::Change(_), _) => op::WRITE,
        };
        let sector = first as u64;
        let (size, resizes) = oracle.end_and_resizes();
        let beyond = (operation != op::FLUSH_DISKCACHE && first + count > size).then_some(resizes);
        let (pages, descriptors, asked) = match operation {
            op::FLUSH_DISKCACHE => {
                let (descriptors, asked) = self.disk.request(operation, 0, &[]);
                (Vec::new(), descriptors, asked)
            }
            op::DISCARD => {
                let body = Body::Discard { sector, sectors: count as u64, secure: false };
                (Vec::new(), Vec::new(), Asked { id: 0, operation, body })
            }
            _ => {
                let (pages, segments) = self.lay_out(count, first, writing.as_ref());
                let (descriptors, asked) = self.disk.request(operation, sector, &segments);
                (pages, descriptors, asked)
            }
        };
        let id = self.disk.queues[0].put(asked);
        if self.told {
            println!("    guest {} submits {id}: {operation} {first}+{count}", self.number);
        }
        let request = Request { kind, first, count, pages, descriptors, beyond, sent: now };
        self.open.insert(id, request);
    }

    /// Pages for `count` sectors, filled with the data of a write if it is one.
    fn lay_out(
        &mut self,
        count: usize,
        first: usize,
        writing: Option<&Writing>,
    ) -> (Vec<u32>, Vec<Segment>) {
        let mut data = vec![0xee; count * SECTOR];
        if let Some(writing) = writing {
            Oracle::fill(writing.number, first, &mut data);
        }
        let pages = self.disk.pages(data.len().div_ceil(PAGE_BYTES));
        let mut segments = Vec::new();
        for (page, chunk) in pages.iter().zip(data.chunks(PAGE_BYTES)) {
            assert!(self.domain.memory().write(offset(*page), chunk));
            let last = u8::try_from(chunk.len() / SECTOR - 1).unwrap();
            segments.push(Segment { gref: *page, first: 0, last });
        }
        (pages, segments)
    }

    /// Reads responses.
    ///
    /// # Errors
    /// A promise that was not kept.
    pub(crate) fn receive(&mut self, oracle: &mut Oracle) -> Result<bool, String> {
        let mut heard = false;
        loop {
            let Some(queue) = self.disk.queues.first_mut() else { return Ok(heard) };
            let taken = queue.take().map_err(|error| format!("guest {}: {error}", self.number))?;
            let Some(response) = taken else { return Ok(heard) };
            heard = true;
            let Some(request) = self.open.remove(&response.id) else {
                return Err(format!("guest {}: {response:?} belongs to no request", self.number));
            };
            if self.told {
                println!("    guest {} received {response:?}", self.number);
            }
            self.disk.free_pages(&request.descriptors);
            self.finish(&request, response.status == 0, oracle)?;
            self.disk.free_pages(&request.pages);
        }
    }

    fn finish(&mut self, request: &Request, done: bool, oracle: &mut Oracle) -> Result<(), String> {
        self.answered += 1;
        self.succeeded += u64::from(done);
        self.failures = if done { 0 } else { self.failures + 1 };
        let Request { kind, first, count, beyond, .. } = request;
        if done && beyond.is_some_and(|resizes| oracle.end_and_resizes().1 == resizes) {
            return Err(format!(
                "a guest's request at {first}+{count} is beyond the end, but succeeds"
            ));
        }
        let stable = match kind {
            Kind::Read { .. } => false,
            Kind::Change(writing) => !writing.is_discard(),
            Kind::Flush { .. } | Kind::Barrier { .. } => true,
        };
        if done && stable && self.lost {
            return Err(format!(
                "guest {}: a write or flush at {first}+{count} succeeds although a kill has lost acknowledged writes",
                self.number
            ));
        }
        match kind {
            Kind::Read { begun } => {
                oracle.end_read(*begun);
                if done {
                    let mut data = vec![0; count * SECTOR];
                    for (page, chunk) in request.pages.iter().zip(data.chunks_mut(PAGE_BYTES)) {
                        assert!(self.domain.memory().read(offset(*page), chunk));
                    }
                    oracle.check(*begun, *first, &data)?;
                }
            }
            Kind::Change(writing) => {
                oracle.end(*writing, done);
                self.unflushed |= done && !writing.is_discard();
            }
            Kind::Flush { begun } if done => {
                oracle.flushed(*begun);
                self.unflushed = false;
            }
            Kind::Flush { .. } => {}
            Kind::Barrier { begun, writing } => {
                if done {
                    oracle.flushed(*begun);
                }
                oracle.end(*writing, done);
                // The flush does not cover the barrier's own write, which follows it; if the barrier
                // failed, the flush may have succeeded before.
                self.unflushed = done;
            }
        }
        Ok(())
    }

    /// There will be no further responses: returns the changes that may have been carried out.
    fn abandon(&mut self, oracle: &mut Oracle) -> Vec<Writing> {
        let mut orphans = Vec::new();
        for (_, request) in std::mem::take(&mut self.open) {
            match request.kind {
                Kind::Read { begun } => oracle.end_read(begun),
                Kind::Change(writing) | Kind::Barrier { writing, .. } => orphans.push(writing),
                Kind::Flush { .. } => {}
            }
            self.disk.free_pages(&request.descriptors);
            self.disk.free_pages(&request.pages);
        }
        orphans
    }

    /// Destroys the guest, with its requests in flight.
    pub(crate) fn die(mut self, oracle: &mut Oracle) -> Remains {
        self.machine.destroy(self.number);
        let orphans = self.abandon(oracle);
        Remains { number: self.number, domain: self.domain, orphans }
    }

    /// The requests in flight, for messages.
    pub(crate) fn describe(&self) -> String {
        let open: Vec<String> = self
            .open
            .iter()
            .map(|(id, request)| {
                let kind = match &request.kind {
                    Kind::Read { .. } => "read",
                    Kind::Change(_) => "change",
                    Kind::Flush { .. } => "flush",
                    Kind::Barrier { .. } => "barrier",
                };
                format!("{id}: {kind} {}+{}", request.first, request.count)
            })
            .collect();
        let backend = self.disk.backend("state");
        format!(
            "guest {} {:?}, states {:?} and {backend:?}: {}",
            self.number,
            self.phase,
            self.own_state(),
            open.join(", ")
        )
    }
}
