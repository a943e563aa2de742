//! A KVM guest of the world, and its VMM: a disk over vhost-user, with several requests in flight,
//! whose responses are checked against the oracle. The guest never waits: the world's loop steps
//! it. The guest, its rings and its inflight region survive the end of a daemon.

mod drivers;
mod link;
mod messages;
mod requests;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ebb_vhost_proto::{InflightArea, VirtioFeatures};
use ebb_volume::Volume;
use rustix::event::{EventfdFlags, eventfd};

use self::drivers::driver::{Driver, status};
use self::drivers::guest::Guest as Memory;
use self::link::Link;
use crate::manner::Manner;
use crate::oracle::{Oracle, SECTOR, Writing};
use crate::random::Random;

/// Consecutive failed requests after which a guest resets its disk.
const FAILURES: u32 = 12;
/// The longest request, sectors.
const LONGEST: usize = 128;
/// Bytes of the name of a disk.
const ID_BYTES: usize = 20;

#[derive(Debug)]
enum Kind {
    Read { begun: u64 },
    Change(Writing),
    Flush { begun: u64 },
    Id,
}

/// A request in flight.
struct Request {
    kind: Kind,
    first: usize,
    count: usize,
    /// The guest address of the data.
    data: u64,
    /// The number of resizes when the request was sent, if the request lies beyond the end.
    beyond: Option<u64>,
    sent: Instant,
}

/// The features that VMM and driver use, drawn once for each guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wishes {
    packed: bool,
    event_idx: bool,
    indirect: bool,
    queues: usize,
    size: u16,
    /// The driver sends flushes; otherwise each write must be stable before its completion.
    flushes: bool,
    /// After a reconnect the VMM sends the available index as the base of a queue, not the used
    /// one.
    base_available: bool,
}

impl Wishes {
    fn draw(random: &mut Random) -> Wishes {
        Wishes {
            packed: random.chance(40),
            event_idx: random.chance(60),
            indirect: random.chance(50),
            queues: random.pick(&[1, 1, 2]),
            size: random.pick(&[8, 16, 32]),
            flushes: random.chance(80),
            base_available: random.chance(50),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The VMM is not connected until then.
    Away(Instant),
    /// The VMM sets up the disk.
    Setting,
    Serving,
    /// The VMM ends the queues for this purpose.
    Ending(Purpose),
    /// The queues have ended, and begin again then.
    Paused(Instant),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Pause,
    Reset,
}

/// See the module.
pub(crate) struct KvmGuest {
    number: u16,
    volume: String,
    address: SocketAddr,
    memory: Memory,
    drivers: Vec<Driver>,
    kicks: Vec<Arc<OwnedFd>>,
    calls: Vec<Arc<OwnedFd>>,
    /// The inflight region, which the VMM keeps for the next daemon.
    inflight: Option<(Arc<OwnedFd>, InflightArea)>,
    /// The features that guest and device have agreed on.
    features: Option<VirtioFeatures>,
    wishes: Wishes,
    manner: Manner,
    random: Random,
    phase: Phase,
    link: Option<Link>,
    /// The VMM disconnects when no request is in flight.
    leaves: bool,
    /// The value of `answered` when the disk was set up last.
    answered_before: u64,
    /// The base of each queue after a pause, as the backend has replied.
    bases: Vec<Option<u32>>,
    /// The size in sectors, as the device reports it.
    size: usize,
    open: BTreeMap<(usize, u16), Request>,
    next_at: Instant,
    /// The guest submits no more requests.
    pub(crate) quiet: bool,
    pub(crate) answered: u64,
    pub(crate) succeeded: u64,
    /// The number of consecutive requests that failed last.
    failures: u32,
    /// Number of attempts to set up the disk that ended with the connection, since the guest was
    /// served last.
    pub(crate) refusals: u32,
    /// The volume that has acknowledged writes of this guest which no flush covers.
    unflushed: Option<Weak<Volume>>,
    /// `Volume::loses_by_kill` was true before and after one of these writes was acknowledged.
    at_risk: bool,
    /// `Volume::loses_by_kill` was true when the last response was read.
    pub(crate) risky: bool,
    /// A kill has lost such writes: no write and no flush may succeed until the guest is reset.
    lost: bool,
    /// The inflight region belongs to another store than the volume's: the daemon must refuse the
    /// guest until it is reset.
    foreign: bool,
    /// The time since which the guest has waited too long although its volume is served.
    pub(crate) waits: Option<Instant>,
    /// The time since which the guest has not been served.
    unserved: Option<Instant>,
    told: bool,
}

/// The remains of a destroyed guest: files of memory that the backend may have mapped, and changes
/// that may be in flight.
pub(crate) struct Remains {
    pub(crate) files: Vec<u64>,
    /// The file of the inflight region.
    pub(crate) region: Option<u64>,
    pub(crate) orphans: Vec<Writing>,
}

fn event() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
}

impl KvmGuest {
    pub(crate) fn new(
        number: u16,
        volume: &str,
        address: SocketAddr,
        manner: &Manner,
        mut random: Random,
        now: Instant,
    ) -> KvmGuest {
        let wishes = Wishes::draw(&mut random);
        let manner = Manner { longest: manner.longest.min(LONGEST), ..manner.clone() };
        KvmGuest {
            number,
            volume: volume.to_owned(),
            address,
            memory: Memory::new(wishes.queues),
            drivers: (0..wishes.queues).map(|queue| Driver::new(queue, wishes.size)).collect(),
            kicks: (0..wishes.queues).map(|_| event()).collect(),
            calls: (0..wishes.queues).map(|_| event()).collect(),
            inflight: None,
            features: None,
            wishes,
            manner,
            random,
            phase: Phase::Away(now),
            link: None,
            leaves: false,
            answered_before: 0,
            bases: vec![None; wishes.queues],
            size: 0,
            open: BTreeMap::new(),
            next_at: now,
            quiet: false,
            answered: 0,
            succeeded: 0,
            failures: 0,
            refusals: 0,
            unflushed: None,
            at_risk: false,
            risky: false,
            lost: false,
            foreign: false,
            waits: None,
            unserved: Some(now),
            told: crate::trace::is_told(),
        }
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Number of requests in flight.
    pub(crate) fn open(&self) -> usize {
        self.open.len()
    }

    /// Returns the time since which the guest has waited for a response, or to be served. `None` if
    /// it does not wait.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        let asleep = matches!(self.phase, Phase::Paused(_));
        let oldest = self.open.values().map(|request| request.sent).min();
        oldest.into_iter().chain(self.unserved).min().filter(|_| !asleep)
    }

    /// Returns the time of the next step, if the guest receives nothing before.
    pub(crate) fn wants(&self) -> Option<Instant> {
        match self.phase {
            Phase::Away(until) | Phase::Paused(until) => Some(until),
            Phase::Serving => {
                let may = !self.quiet && !self.leaves && self.open.len() < self.manner.depth;
                let room = self.drivers.iter().any(|driver| self.room(driver));
                (may && room && self.size > 0).then_some(self.next_at)
            }
            Phase::Setting | Phase::Ending(_) => None,
        }
    }

    /// Disconnects the VMM, at once or (`patient`) when no request is in flight. The VMM connects
    /// again later.
    pub(crate) fn disconnect(&mut self, patient: bool, now: Instant) {
        match patient && self.phase == Phase::Serving {
            true => self.leaves = true,
            false => self.go_away(now),
        }
    }

    fn go_away(&mut self, now: Instant) {
        (self.link, self.leaves) = (None, false);
        self.bases.fill(None);
        let pause = self.random.pick(&[2_000, 10_000, 50_000]);
        self.phase = Phase::Away(now + Duration::from_micros(self.random.below(pause)));
        self.unserved.get_or_insert(now);
    }

    /// Pauses the guest: its queues end, and begin again soon.
    pub(crate) fn pause(&mut self) {
        self.end_queues(Purpose::Pause);
    }

    /// Restarts the guest, which resets its disk.
    pub(crate) fn reset(&mut self) {
        self.end_queues(Purpose::Reset);
    }

    fn end_queues(&mut self, purpose: Purpose) {
        if self.phase != Phase::Serving {
            return;
        }
        self.phase = Phase::Ending(purpose);
        let device = purpose == Purpose::Reset && self.random.chance(40);
        let queues = self.wishes.queues;
        if let Some(link) = &mut self.link {
            messages::end(link, queues, device);
        }
    }

    /// Returns true if a kill may lose acknowledged writes to this volume, as far as the guest
    /// knows.
    pub(crate) fn would_lose(&self, volume: &Weak<Volume>) -> bool {
        // A flush may have succeeded without a response.
        let flushing = self.open.values().any(|one| matches!(one.kind, Kind::Flush { .. }));
        self.at_risk && self.unflushed.as_ref().is_some_and(|on| on.ptr_eq(volume)) && !flushing
    }

    /// Notes that a kill has lost acknowledged writes.
    pub(crate) fn lose(&mut self) {
        self.lost = true;
    }

    pub(crate) fn volume(&self) -> &str {
        &self.volume
    }

    /// Notes that the volume of the guest is on another store (`displaced`), or on the former one
    /// again. Returns false if the volume is on another store and the guest is not attached.
    pub(crate) fn set_displaced(&mut self, displaced: bool) -> bool {
        self.foreign = displaced && self.inflight.is_some();
        self.foreign == displaced
    }

    pub(crate) fn is_displaced(&self) -> bool {
        self.foreign
    }

    /// Notes that all acknowledged writes are stable: the volume was closed cleanly.
    pub(crate) fn note_stable(&mut self) {
        (self.unflushed, self.at_risk) = (None, false);
    }

    /// Notes that the volume of the guest was opened again, as `volume`.
    pub(crate) fn note_opened(&mut self, volume: &Weak<Volume>) {
        if self.unflushed.as_ref().is_some_and(|on| !on.ptr_eq(volume)) {
            self.note_stable();
        }
    }

    /// Notes that the last flush of a stop has failed, and that no flush of that daemon has
    /// succeeded: writes of the guest to earlier daemons may be lost. The daemon records that if it
    /// has served the guest.
    pub(crate) fn note_inherited_loss(&mut self) {
        let served = self.phase == Phase::Serving && self.answered > self.answered_before;
        let flushing = self.open.values().any(|one| matches!(one.kind, Kind::Flush { .. }));
        self.lost |= served && self.unflushed.is_some() && !flushing;
    }

    /// Makes one step: connects, sets up, receives, submits.
    ///
    /// # Errors
    /// A promise that was not kept.
    pub(crate) fn step(&mut self, oracle: &mut Oracle, now: Instant) -> Result<bool, String> {
        match self.phase {
            Phase::Away(until) if until > now => return Ok(false),
            Phase::Away(_) => {
                self.connect(now);
                return Ok(true);
            }
            Phase::Paused(until) if until <= now => {
                self.phase = Phase::Setting;
                self.start_queues();
            }
            Phase::Setting | Phase::Serving | Phase::Ending(_) | Phase::Paused(_) => {}
        }
        let mut busy = false;
        loop {
            let Some(link) = &mut self.link else { return Ok(true) };
            match link.step() {
                Err(_) => {
                    if matches!(self.phase, Phase::Setting) {
                        self.refusals += 1;
                    }
                    self.tell(format_args!("is disconnected in {:?}", self.phase));
                    self.go_away(now);
                    return Ok(true);
                }
                Ok(None) => break,
                Ok(Some(reply)) => {
                    busy = true;
                    self.take_reply(reply)?;
                }
            }
        }
        let Some(link) = &mut self.link else { return Ok(true) };
        if link.has_news() {
            messages::ask_for_size(link);
            busy = true;
        }
        if link.is_idle() {
            match self.phase {
                Phase::Setting if self.foreign => {
                    let number = self.number;
                    return Err(format!("guest {number} goes on, over another disk"));
                }
                Phase::Setting => {
                    self.phase = Phase::Serving;
                    self.answered_before = self.answered;
                    (self.failures, self.refusals, self.unserved) = (0, 0, None);
                    busy = true;
                }
                Phase::Ending(purpose) => {
                    self.end_ending(purpose, oracle, now)?;
                    busy = true;
                }
                Phase::Away(_) | Phase::Serving | Phase::Paused(_) => {}
            }
        }
        if self.phase == Phase::Serving {
            busy |= self.submit_all(oracle, now);
            if self.leaves && self.open.is_empty() {
                self.go_away(now);
            }
        }
        Ok(busy)
    }

    fn end_ending(
        &mut self,
        purpose: Purpose,
        oracle: &mut Oracle,
        now: Instant,
    ) -> Result<(), String> {
        if purpose == Purpose::Pause {
            let pause = Duration::from_micros(self.random.below(20_000));
            self.phase = Phase::Paused(now + pause);
            return Ok(());
        }
        // The device has completed the requests that it took, and takes no more.
        self.receive(oracle, &Weak::new(), true)?;
        self.abandon(oracle).into_iter().for_each(|writing| oracle.end(writing, false));
        for driver in &mut self.drivers {
            driver.reset(&self.memory);
        }
        (self.unflushed, self.at_risk) = (None, false);
        (self.lost, self.foreign, self.failures) = (false, false, 0);
        (self.inflight, self.features) = (None, None);
        self.bases.fill(None);
        self.phase = Phase::Setting;
        if let Some(link) = &mut self.link {
            messages::ask_for_features(link);
        }
        Ok(())
    }

    /// Reads responses: from the queues that have notified the guest, or (`all`) from all queues.
    ///
    /// # Errors
    /// A promise that was not kept.
    pub(crate) fn receive(
        &mut self,
        oracle: &mut Oracle,
        volume: &Weak<Volume>,
        all: bool,
    ) -> Result<bool, String> {
        let mut heard = false;
        for queue in 0..self.drivers.len() {
            let notified = rustix::io::read(&self.calls[queue], &mut [0; 8]).is_ok();
            if !notified && !all {
                continue;
            }
            loop {
                while let Some(done) = self.drivers[queue].take(&self.memory) {
                    heard = true;
                    let Some(request) = self.open.remove(&(queue, done.head)) else {
                        let number = self.number;
                        return Err(format!("guest {number}: {done:?} belongs to no request"));
                    };
                    self.tell(format_args!("received {queue}: {done:?}"));
                    if done.status == status::NONE {
                        let number = self.number;
                        return Err(format!("guest {number}: {done:?} has no status"));
                    }
                    self.finish(&request, done.status == status::OK, oracle, volume)?;
                }
                // Completions that arrive from now on are notified.
                self.drivers[queue].arm(&self.memory);
                if !self.drivers[queue].has_used(&self.memory) {
                    break;
                }
            }
        }
        Ok(heard)
    }

    fn finish(
        &mut self,
        request: &Request,
        done: bool,
        oracle: &mut Oracle,
        volume: &Weak<Volume>,
    ) -> Result<(), String> {
        self.answered += 1;
        self.succeeded += u64::from(done);
        self.failures = if done { 0 } else { self.failures + 1 };
        let Request { kind, first, count, beyond, .. } = request;
        let number = self.number;
        if done && beyond.is_some_and(|resizes| oracle.end_and_resizes().1 == resizes) {
            return Err(format!(
                "guest {number}: a request at {first}+{count} is beyond the end, but succeeds"
            ));
        }
        if done && self.foreign {
            return Err(format!("guest {number}: {first}+{count} is done on another disk"));
        }
        let stable = match kind {
            Kind::Read { .. } | Kind::Id => false,
            Kind::Change(writing) => !writing.is_discard(),
            Kind::Flush { .. } => true,
        };
        if done && stable && self.lost {
            return Err(format!(
                "guest {number}: a write or flush at {first}+{count} succeeds although a kill has lost acknowledged writes"
            ));
        }
        match kind {
            Kind::Read { begun } => {
                oracle.end_read(*begun);
                if done {
                    let data = self.memory.read(request.data, count * SECTOR);
                    oracle.check(*begun, *first, &data)?;
                }
            }
            Kind::Change(writing) => {
                oracle.end(*writing, done);
                if done && self.wishes.flushes && !writing.is_discard() {
                    self.unflushed = Some(volume.clone());
                    let loses = |volume: Arc<Volume>| volume.loses_by_kill();
                    self.at_risk |= self.risky && volume.upgrade().is_none_or(loses);
                }
            }
            Kind::Flush { begun } => {
                if done {
                    oracle.flushed(*begun);
                    (self.unflushed, self.at_risk) = (None, false);
                }
            }
            Kind::Id => {
                let mut expected = self.volume.as_bytes().to_vec();
                expected.resize(ID_BYTES, 0);
                if done && self.memory.read(request.data, ID_BYTES) != expected {
                    return Err(format!("guest {number}: the disk has another name"));
                }
            }
        }
        Ok(())
    }

    /// Gives up all requests in flight. Returns the changes that may have been carried out.
    fn abandon(&mut self, oracle: &mut Oracle) -> Vec<Writing> {
        let mut orphans = Vec::new();
        for (_, request) in std::mem::take(&mut self.open) {
            match request.kind {
                Kind::Read { begun } => oracle.end_read(begun),
                Kind::Change(writing) => orphans.push(writing),
                Kind::Flush { .. } | Kind::Id => {}
            }
        }
        orphans
    }

    /// The files of the guest's memory.
    fn files(&self) -> impl Iterator<Item = u64> + '_ {
        self.memory.regions.iter().map(|region| rustix::fs::fstat(&region.file).unwrap().st_ino)
    }

    /// The file of the guest's inflight region.
    fn region(&self) -> Option<u64> {
        let file = self.inflight.as_ref().map(|(file, _)| file)?;
        Some(rustix::fs::fstat(file).unwrap().st_ino)
    }

    /// The files of the guest's memory and of its inflight region.
    pub(crate) fn all_files(&self) -> impl Iterator<Item = u64> + '_ {
        self.files().chain(self.region())
    }

    /// Destroys the guest, with its requests in flight.
    pub(crate) fn die(mut self, oracle: &mut Oracle) -> Remains {
        let orphans = self.abandon(oracle);
        Remains { files: self.files().collect(), region: self.region(), orphans }
    }

    /// The requests in flight, for messages.
    pub(crate) fn describe(&self) -> String {
        let all = self.open.iter();
        let open: Vec<String> = all
            .map(|((queue, head), request)| {
                format!("{queue}/{head}: {:?} {}+{}", request.kind, request.first, request.count)
            })
            .collect();
        format!(
            "KVM guest {} of {} {:?}, {:?}, lost {}: {}",
            self.number,
            self.volume,
            self.phase,
            self.wishes,
            self.lost,
            open.join(", ")
        )
    }

    fn tell(&self, what: std::fmt::Arguments<'_>) {
        if self.told {
            println!("    guest {} {what}", self.number);
        }
    }
}
