//! A world: a host with disks, a daemon on it that lives and dies, clients, and what befalls them.
//!
//! The loop gives everybody a turn, and when nobody has anything to do moves the clock to when somebody
//! has. What befalls them is drawn from the seed, and so is the order of everything.

use std::time::{Duration, Instant};

use ebb_mem::clock;
use ebb_mem::pressure::Level;
use ebb_store::{Faults, TestStore};
use ebb_volume::{Mode, Volume};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::client::{Client, Manner, Turn};
use crate::daemon::{Daemon, Later, Place, Settings, VolumeConfig};
use crate::oracle::{Oracle, SECTOR, Writing};
use crate::random::Random;
use crate::trace::Trace;

/// A volume whose store is healthy answers within this, whatever befalls its neighbours.
const BOUND: Duration = Duration::from_secs(2);
/// What a daemon may take to end what is under way once everything is healthy.
const PATIENCE: Duration = Duration::from_secs(120);
/// Whether disks fail writes and flushes, and lose what was not flushed.
const LOSSES: bool = false;
/// Turns without the clock being moved, at most: more is a loop.
const TURNS: u64 = 200_000;

/// A volume, its disk, and what is known of it.
struct Site {
    config: VolumeConfig,
    oracle: Oracle,
    /// Losses of its disk that the oracle knows of.
    losses: u64,
    /// Changes of clients that are gone, which the server may be at still.
    orphans: Vec<Writing>,
    /// Its disk hangs; it has no room.
    hangs: bool,
    full: bool,
    /// Since when the disk has been healthy; `None` while it is not.
    healthy: Option<Instant>,
}

impl Site {
    fn disk(&self) -> Option<&Arc<TestStore>> {
        match &self.config.place {
            Place::Disk(disk) => Some(disk),
            Place::Memory(_) => None,
        }
    }

    /// Whether it is healthy now.
    fn judge(&mut self, now: Instant) {
        let sound = !self.hangs && !self.full;
        self.healthy = sound.then(|| self.healthy.unwrap_or(now));
    }

    /// Nothing is under way any more.
    fn end_orphans(&mut self) {
        for writing in self.orphans.drain(..) {
            self.oracle.end(writing, false);
        }
    }

    /// Tells the oracle of what the disk has lost.
    fn notice(&mut self) {
        let losses = self.disk().map_or(0, |disk| disk.losses.load(Ordering::SeqCst));
        if losses != self.losses {
            self.losses = losses;
            self.oracle.lost();
        }
    }
}

struct Seat {
    site: usize,
    client: Option<Client>,
    /// When somebody sits down again.
    again: Instant,
}

/// What may befall a world, and how often: a share of 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Faults,
    Hang,
    Lose,
    Pressure,
    Leave,
    Deaf,
    Parameters,
    Reoffer,
    Kill,
    PowerCut,
    Stop,
}

const EVENTS: [(Event, u64); 11] = [
    (Event::Faults, 20),
    (Event::Hang, 10),
    (Event::Lose, 5),
    (Event::Pressure, 20),
    (Event::Leave, 15),
    (Event::Deaf, 8),
    (Event::Parameters, 8),
    (Event::Reoffer, 4),
    (Event::Kill, 5),
    (Event::PowerCut, 3),
    (Event::Stop, 3),
];

/// What a seed came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) requests: u64,
    pub(crate) succeeded: u64,
    pub(crate) checked: u64,
    pub(crate) lives: u64,
    pub(crate) hash: u64,
    pub(crate) slowest: Duration,
    pub(crate) simulated: Duration,
}

/// See the module.
pub(crate) struct World {
    random: Random,
    begin: Instant,
    now: Instant,
    sites: Vec<Site>,
    seats: Vec<Seat>,
    daemon: Option<Daemon>,
    events: Vec<(Event, u64)>,
    event_at: Instant,
    event_every: u64,
    /// Nothing befalls it any more.
    calm: bool,
    pub(crate) trace: Trace,
    outcome: Outcome,
    turns: u64,
}

impl World {
    pub(crate) fn new(seed: u64, words: bool) -> World {
        let mut random = Random::new(seed);
        let begin = Instant::now();
        clock::set(Some(begin));
        ebb_io::sim::set_order(Some(random.next()));
        let sites: Vec<Site> = (0..random.between(1, 4)).map(|n| site(n, &mut random)).collect();
        let mut seats = Vec::new();
        for site in 0..sites.len() {
            for _ in 0..random.between(1, 3) {
                seats.push(Seat { site, client: None, again: begin });
            }
        }
        // Each world knows some of the events only: what is rare meets what is rare in some of them.
        let events: Vec<_> = EVENTS.into_iter().filter(|_| random.chance(60)).collect();
        let event_every = random.pick(&[200, 2_000, 20_000, 200_000]);
        let trace = Trace::new(words);
        let mut world = World {
            begin,
            now: begin,
            sites,
            seats,
            daemon: None,
            events,
            event_at: begin,
            event_every,
            calm: false,
            trace,
            outcome: Outcome::default(),
            turns: 0,
            random,
        };
        world.start();
        world
    }

    fn nanos(&self) -> u64 {
        u64::try_from((self.now - self.begin).as_nanos()).unwrap()
    }

    fn note(&mut self, what: std::fmt::Arguments<'_>) {
        let at = self.nanos();
        self.trace.note(at, what);
    }

    /// Runs it until so many requests are answered, then lets everything end well and looks at what is left.
    ///
    /// # Errors
    /// A promise that was not kept.
    pub(crate) fn run(&mut self, requests: u64) -> Result<Outcome, String> {
        // A world in which hardly anything is answered ends by its clock.
        let end = self.begin + Duration::from_secs(300);
        while self.outcome.requests < requests && self.now < end {
            self.turn()?;
        }
        self.note(format_args!("calm"));
        self.settle()?;
        self.look_at_all()?;
        match self.random.below(3) {
            0 => self.stop(None)?,
            1 => self.kill(false)?,
            _ => self.kill(true)?,
        }
        self.start();
        self.look_at_all()?;
        self.stop(None)?;
        for site in &self.sites {
            self.outcome.checked += site.oracle.checked;
        }
        self.outcome.simulated = self.now - self.begin;
        let at = self.nanos();
        self.trace.mix(at);
        self.outcome.hash = self.trace.hash();
        Ok(self.outcome)
    }

    fn start(&mut self) {
        let settings = Settings::draw(&mut self.random);
        for at in 0..self.sites.len() {
            let (config, sectors) = (&self.sites[at].config, self.sites[at].oracle.sectors());
            let kind = if self.sites[at].disk().is_some() { "disk" } else { "memory" };
            let what = format!("{}: {kind} of {sectors} sectors, {}", config.name, config.mode);
            self.note(format_args!("{what}"));
        }
        self.note(format_args!("start {settings:?}"));
        let volumes: Vec<_> = self.sites.iter().map(|site| site.config.clone()).collect();
        self.daemon = Some(Daemon::start(settings, &volumes, self.now));
        self.outcome.lives += 1;
        for seat in &mut self.seats {
            seat.again = self.now;
        }
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("it lives")
    }

    /// Everybody has a turn; time goes on.
    fn turn(&mut self) -> Result<(), String> {
        if !self.calm && self.now >= self.event_at {
            self.befall()?;
            let pause = self.random.between(1, 2 * self.event_every);
            self.event_at = self.now + Duration::from_micros(pause);
        }
        let now = self.now;
        let mut busy = self.daemon.as_mut().is_some_and(|daemon| daemon.turn(now));
        for site in &mut self.sites {
            site.notice();
        }
        self.bury();
        let first = self.random.index(self.seats.len());
        for at in 0..self.seats.len() {
            busy |= self.serve((first + at) % self.seats.len())?;
        }
        self.pass_time(busy)
    }

    /// Changes of clients that are gone are over when the server serves nobody but those who are here.
    fn bury(&mut self) {
        if self.sites.iter().all(|site| site.orphans.is_empty()) {
            return;
        }
        let Some(daemon) = &self.daemon else { return };
        let served = daemon.server.volumes();
        for (number, site) in
            self.sites.iter_mut().enumerate().filter(|(_, s)| !s.orphans.is_empty())
        {
            let here = self.seats.iter().filter(|seat| seat.site == number);
            let here: Vec<_> = here.filter_map(|seat| seat.client.as_ref()).collect();
            let of_this = |(volume, _): &&(Arc<Volume>, u64)| **volume.name() == site.config.name;
            if let Some((_, inside)) = served.iter().find(of_this)
                && *inside == here.len() as u64
                && here.iter().all(|client| client.answered > 0)
            {
                site.end_orphans();
            }
        }
    }

    /// Work takes a little time; and when there is none, time goes to when there is some.
    fn pass_time(&mut self, busy: bool) -> Result<(), String> {
        let step = Duration::from_nanos(self.random.below(4000));
        if busy {
            self.turns += 1;
            if self.turns > TURNS {
                return Err(format!("{TURNS} turns and time has not gone on: {}", self.describe()));
            }
            self.now += step;
        } else {
            self.turns = 0;
            let daemon = self.daemon.as_ref().map(Daemon::wants);
            let clients = self.seats.iter().filter_map(|seat| match &seat.client {
                Some(client) => client.wants(),
                None => (self.daemon.is_some() && !self.calm).then_some(seat.again),
            });
            let event = (!self.calm).then_some(self.event_at);
            let next = clients.chain(daemon).chain(event).min();
            self.now = next.map_or(self.now + step, |next| next.max(self.now + step));
        }
        clock::set(Some(self.now));
        Ok(())
    }

    fn serve(&mut self, number: usize) -> Result<bool, String> {
        let now = self.now;
        let seat = &mut self.seats[number];
        let site = &mut self.sites[seat.site];
        let Some(client) = &mut seat.client else {
            if self.calm || seat.again > now {
                return Ok(false);
            }
            let Some(daemon) = &self.daemon else { return Ok(false) };
            let manner = Manner::draw(&mut self.random, site.oracle.sectors());
            let stream = daemon.connect();
            let random = self.random.fork();
            self.trace.mix(number as u64);
            seat.client = Some(Client::new(stream, &site.config.name, manner, random, now));
            return Ok(true);
        };
        let (answered, succeeded) = (client.answered, client.succeeded);
        let turn = client.turn(&mut site.oracle, now)?;
        if client.answered > answered {
            self.outcome.requests += client.answered - answered;
            self.outcome.succeeded += client.succeeded - succeeded;
            self.trace.mix(client.answered << 8 | number as u64);
        }
        if let (Some(oldest), Some(healthy), false) = (client.oldest(), site.healthy, client.deaf) {
            let waits = now.saturating_duration_since(oldest.max(healthy));
            self.outcome.slowest = self.outcome.slowest.max(waits);
            if waits > BOUND {
                return Err(format!(
                    "a request to a healthy store has waited for {waits:?}: {}",
                    self.describe()
                ));
            }
        }
        if turn == Turn::Gone {
            self.leave(number);
            return Ok(true);
        }
        Ok(turn == Turn::Busy)
    }

    /// A client's connection is over; another one comes soon.
    fn leave(&mut self, number: usize) {
        let pause = Duration::from_micros(self.random.below(5_000));
        let seat = &mut self.seats[number];
        seat.again = self.now + pause;
        if let Some(client) = seat.client.take() {
            let what = client.describe();
            let site = &mut self.sites[seat.site];
            site.orphans.extend(client.leave(&mut site.oracle));
            self.note(format_args!("client {number} is gone: {what}"));
        }
    }

    fn describe(&self) -> String {
        let clients = self.seats.iter().filter_map(|seat| seat.client.as_ref());
        let clients: Vec<String> = clients.map(Client::describe).collect();
        clients.join("; ")
    }

    fn befall(&mut self) -> Result<(), String> {
        let all: u64 = self.events.iter().map(|(_, share)| share).sum();
        if all == 0 {
            return Ok(());
        }
        let mut at = self.random.below(all);
        let mut event = self.events[0].0;
        for (which, share) in &self.events {
            event = *which;
            if at < *share {
                break;
            }
            at -= share;
        }
        self.trace.mix(event as u64);
        match event {
            Event::Faults => self.set_faults(),
            Event::Hang => self.hang(),
            Event::Lose => self.lose(),
            Event::Pressure => {
                let level = self.random.pick(&[Level::L0, Level::L1, Level::L2, Level::L3]);
                self.note(format_args!("pressure {level:?}"));
                let now = self.now;
                self.daemon().pressure(level, now);
            }
            Event::Leave => {
                let number = self.random.index(self.seats.len());
                if self.random.chance(50) {
                    self.leave(number);
                } else if let Some(client) = &mut self.seats[number].client {
                    client.goodbye();
                    self.note(format_args!("client {number} says goodbye"));
                }
            }
            Event::Deaf => {
                let number = self.random.index(self.seats.len());
                if let Some(client) = &mut self.seats[number].client {
                    client.deaf = !client.deaf;
                    let deaf = client.deaf;
                    self.note(format_args!("client {number} deaf: {deaf}"));
                }
            }
            Event::Parameters => self.set_parameters(),
            Event::Reoffer => return self.reoffer(),
            Event::Kill => {
                self.kill(false)?;
                self.start();
            }
            Event::PowerCut => {
                self.kill(true)?;
                self.start();
            }
            Event::Stop => {
                let limit = self.random.pick(&[None, Some(Duration::from_millis(20)), Some(BOUND)]);
                self.stop(limit)?;
                self.start();
            }
        }
        Ok(())
    }

    fn set_faults(&mut self) {
        let at = self.random.index(self.sites.len());
        let random = &mut self.random;
        let faults = if random.chance(50) {
            Faults::default()
        } else {
            Faults {
                reads: random.pick(&[0, 0, 20, 200]),
                writes: if LOSSES { random.pick(&[0, 0, 20, 200]) } else { 0 },
                flushes: if LOSSES { random.pick(&[0, 50, 300]) } else { 0 },
                late: random.pick(&[0, 0, 50]),
                late_us: 3_000,
                ..Faults::default()
            }
        };
        let (latency, waits) = (random.pick(&[0, 0, 20, 100, 1000]), random.pick(&[0, 0, 2, 8]));
        let site = &mut self.sites[at];
        let told_always = site.config.mode != Mode::Writeback;
        let Some(disk) = site.disk() else { return };
        disk.faults(&Faults { told_always, ..faults });
        disk.latency_us.store(latency, Ordering::Relaxed);
        disk.waits.store(waits, Ordering::Relaxed);
        self.note(format_args!("disk {at}: {faults:?}, {latency} us, {waits} waits"));
    }

    fn hang(&mut self) {
        let at = self.random.index(self.sites.len());
        let hang = self.random.chance(50);
        let now = self.now;
        let site = &mut self.sites[at];
        let Some(disk) = site.disk() else { return };
        if hang {
            disk.hang();
        } else {
            disk.release();
        }
        site.hangs = hang;
        site.judge(now);
        self.note(format_args!("disk {at} hangs: {hang}"));
    }

    fn lose(&mut self) {
        let at = self.random.index(self.sites.len());
        let full = self.random.chance(30) || !LOSSES;
        let Some(disk) = self.sites[at].disk() else { return };
        if full {
            let room = self.random.pick(&[None, None, Some(0), Some(100 << 10)]);
            disk.set_room(room);
            self.sites[at].full = room.is_some();
            self.sites[at].judge(self.now);
            self.note(format_args!("disk {at} has room for {room:?}"));
        } else {
            disk.lose();
            self.note(format_args!("disk {at} loses what was not flushed"));
        }
    }

    fn set_parameters(&mut self) {
        let random = &mut self.random;
        let max = random.pick(&[0, 64 << 10, 1 << 20, 8 << 20]);
        let min = random.pick(&[0, 0, 64 << 10, 1 << 20]);
        let (pages, squeeze) = (random.pick(&[0, 16, 1024]), random.pick(&[0, 10, 1000]));
        let daemon = self.daemon();
        daemon.cache.set_max(Some(max));
        daemon.cache.set_min(min);
        daemon.pool.set_max_buffer_pages(pages);
        daemon.pool.set_buffer_squeeze_duration_ms(squeeze);
        self.note(format_args!("cache {min} to {max}, pools {pages} pages, squeeze {squeeze} ms"));
    }

    /// A volume is withdrawn, and offered again when it is closed.
    fn reoffer(&mut self) -> Result<(), String> {
        let at = self.random.index(self.sites.len());
        if self.sites[at].healthy.is_none() {
            return Ok(());
        }
        let name = self.sites[at].config.name.clone();
        self.note(format_args!("volume {name} is withdrawn"));
        let server = self.daemon().server.clone();
        let Some(volume) = self.daemon().volume(&name) else { return Ok(()) };
        let gone = self.daemon().ask(|io| async move {
            server.withdraw(&io, &name).await;
            volume.close(&io).await
        });
        let outcome = self.wait_for(&gone, PATIENCE, "a withdrawal")?;
        self.after_close(at, outcome.is_ok());
        let config = self.sites[at].config.clone();
        self.daemon().offer(&config);
        self.note(format_args!("volume {at} is offered again; closed well: {}", outcome.is_ok()));
        Ok(())
    }

    /// A volume was closed, and with `well` all of it is stable.
    fn after_close(&mut self, at: usize, well: bool) {
        let site = &mut self.sites[at];
        site.notice();
        site.end_orphans();
        match (&site.config.place, well) {
            (Place::Memory(_), _) => site.oracle.wiped(),
            (Place::Disk(_), true) => site.oracle.closed(),
            (Place::Disk(_), false) => site.oracle.crashed(),
        }
    }

    /// Turns until there is an answer.
    fn wait_for<T>(&mut self, later: &Later<T>, limit: Duration, what: &str) -> Result<T, String> {
        let end = self.now + limit;
        let calm = std::mem::replace(&mut self.calm, true);
        loop {
            if let Some(answer) = later.borrow_mut().take() {
                self.calm = calm;
                return Ok(answer);
            }
            if self.now > end {
                return Err(format!("{what} has not ended after {limit:?}: {}", self.describe()));
            }
            self.turn()?;
        }
    }

    /// The process is gone; with `power` the host, too.
    fn kill(&mut self, power: bool) -> Result<(), String> {
        self.note(format_args!("{}", if power { "power cut" } else { "kill" }));
        let daemon = self.daemon.take().expect("it lives");
        let remains = daemon.remains();
        drop(daemon);
        (0..self.seats.len()).for_each(|number| self.leave(number));
        for site in &mut self.sites {
            site.notice();
            site.end_orphans();
            match &site.config.place {
                Place::Memory(_) => site.oracle.wiped(),
                Place::Disk(disk) => {
                    if power {
                        disk.power_cut();
                        site.losses = disk.losses.load(Ordering::SeqCst);
                    }
                    // What was handed to the system outlives the process.
                    if power || site.config.mode == Mode::Writeback {
                        site.oracle.crashed();
                    }
                }
            }
        }
        remains.check()
    }

    /// The daemon is told to stop; volumes that are not closed within the limit count as lost.
    fn stop(&mut self, limit: Option<Duration>) -> Result<(), String> {
        self.note(format_args!("stop within {limit:?}"));
        let unhealthy = self.sites.iter().any(|site| site.healthy.is_none());
        let limit = limit.or(unhealthy.then_some(BOUND));
        let server = self.daemon().server.clone();
        let volumes: Vec<_> = server.volumes().into_iter().map(|(volume, _)| volume).collect();
        let seen_off = self.daemon().ask(|_| async move { server.stop().await });
        let closing: Vec<_> = volumes
            .iter()
            .map(|volume| {
                let (name, volume) = (volume.name().to_string(), volume.clone());
                let later = self.daemon().ask(|io| async move {
                    loop {
                        let result = volume.close(&io).await;
                        if result.is_ok() || volume.cache_mode() != Mode::Writeback {
                            return result.is_ok();
                        }
                        io.sleep(Duration::from_millis(10)).await;
                    }
                });
                (name, later)
            })
            .collect();
        drop(volumes);
        let end = self.now + limit.unwrap_or(PATIENCE);
        let calm = std::mem::replace(&mut self.calm, true);
        let open = |later: &Later<bool>| later.borrow().is_none();
        while self.now < end
            && (seen_off.borrow().is_none() || closing.iter().any(|(_, l)| open(l)))
        {
            self.turn()?;
        }
        self.calm = calm;
        let sound = |name: &str| {
            let site = self.sites.iter().find(|site| site.config.name == name);
            site.and_then(Site::disk).is_none_or(|disk| disk.lost_sectors().is_empty())
        };
        let late = closing.iter().filter(|(name, later)| open(later) && sound(name));
        let who: Vec<_> = late.map(|(name, _)| name).collect();
        if limit.is_none() && !who.is_empty() {
            return Err(format!(
                "a stop of healthy stores does not end: {who:?} {}",
                self.describe()
            ));
        }
        let daemon = self.daemon.take().expect("it lives");
        let remains = daemon.remains();
        drop(daemon);
        (0..self.seats.len()).for_each(|number| self.leave(number));
        for (name, later) in &closing {
            let at = self.sites.iter().position(|site| site.config.name == *name).unwrap();
            let well = *later.borrow() == Some(true);
            self.after_close(at, well);
            self.note(format_args!("volume {name} closed well: {well}"));
        }
        drop(closing);
        remains.check()
    }

    /// Everything is healthy from now on, and whatever was asked is answered.
    fn settle(&mut self) -> Result<(), String> {
        self.calm = true;
        for site in &mut self.sites {
            if let Some(disk) = site.disk() {
                let told_always = site.config.mode != Mode::Writeback;
                disk.faults(&Faults { told_always, ..Faults::default() });
                disk.latency_us.store(20, Ordering::Relaxed);
                disk.set_room(None);
                disk.release();
            }
            (site.hangs, site.full) = (false, false);
            site.judge(self.now);
        }
        for seat in &mut self.seats {
            if let Some(client) = &mut seat.client {
                client.deaf = false;
                client.quiet = true;
            }
        }
        self.drain("requests")
    }

    /// Turns until no client waits for anything.
    fn drain(&mut self, what: &str) -> Result<(), String> {
        let end = self.now + PATIENCE;
        while self.seats.iter().any(|seat| seat.client.as_ref().is_some_and(|c| c.open() > 0)) {
            if self.now > end {
                return Err(format!("{what} are not answered: {}", self.describe()));
            }
            self.turn()?;
        }
        Ok(())
    }

    /// Reads all of all volumes, as one client each.
    fn look_at_all(&mut self) -> Result<(), String> {
        self.calm = true;
        (0..self.seats.len()).for_each(|number| self.leave(number));
        for at in 0..self.sites.len() {
            let sectors = self.sites[at].oracle.sectors();
            let manner =
                Manner { depth: 0, reads: 100, longest: 8, flushes: 0, pause_us: 0, reach: 8 };
            let stream = self.daemon().connect();
            let random = self.random.fork();
            let client = Client::new(stream, &self.sites[at].config.name, manner, random, self.now);
            let number = self.seats.iter().position(|seat| seat.site == at).expect("each has one");
            self.seats[number].client = Some(client);
            let end = self.now + PATIENCE;
            loop {
                let seat = &self.seats[number];
                if seat.client.as_ref().is_some_and(Client::is_serving) {
                    break;
                }
                if self.now > end || seat.client.is_none() {
                    return Err(format!("a client of volume {at} finds no way in"));
                }
                self.turn()?;
            }
            let now = self.now;
            for first in (0..sectors).step_by(256) {
                let client = self.seats[number].client.as_mut().expect("just seen");
                client.read(first, 256.min(sectors - first), &mut self.sites[at].oracle, now);
            }
            self.drain("reads of all")?;
            if self.seats[number].client.is_none() {
                return Err(format!("the client of volume {at} was put out"));
            }
            self.leave(number);
        }
        Ok(())
    }
}

fn site(number: u64, random: &mut Random) -> Site {
    let name = format!("v{number}");
    let sectors = random.pick(&[512, 2048, 2055, 8192]);
    let bytes = (sectors * SECTOR) as u64;
    let mode = random.pick(&[Mode::None, Mode::Writethrough, Mode::Writeback, Mode::Writeback]);
    let (place, mode) = if random.chance(12) {
        (Place::Memory(bytes), Mode::None)
    } else {
        let disk = TestStore::new(bytes, random.next());
        disk.faults(&Faults { told_always: mode != Mode::Writeback, ..Faults::default() });
        disk.latency_us.store(random.pick(&[0, 20, 100, 1000]), Ordering::Relaxed);
        (Place::Disk(Arc::new(disk)), mode)
    };
    let oracle = Oracle::new(&name, sectors);
    let config = VolumeConfig { name, place, mode };
    Site {
        config,
        oracle,
        losses: 0,
        orphans: Vec::new(),
        hangs: false,
        full: false,
        healthy: Some(clock::now()),
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.daemon = None;
        ebb_io::sim::set_order(None);
        clock::set(None);
    }
}
