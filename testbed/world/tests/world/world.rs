//! A world: a host with disks, a daemon on it that starts and ends, clients, and events.
//!
//! The loop steps the daemon, its clients, guests and servers; when none of them has work, it
//! advances the clock to the next time that one has. The seed determines the events and the order
//! of all steps.

mod brokers;
mod changes;
mod encrypted;
mod ends;
mod events;
mod exchange;
mod guests;
mod handover;
mod kvm_guests;
mod mounts;
mod overlays;
mod recovery;
mod reloads;
mod remotes;
mod sharing;
mod site;
mod theme;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ebb_mem::clock;
use ebb_volume::Volume;

use self::brokers::BrokerFate;
use self::changes::Changes;
use self::events::Event;
use self::guests::{DestroyedGuest, GuestSlot};
use self::handover::Handover;
use self::kvm_guests::{KvmGuests, PlannedDeath};
use self::overlays::Overlays;
use self::reloads::KeptVolumes;
use self::site::Site;
use self::theme::Theme;
use crate::client::{Client, StepResult};
use crate::daemon::{self, Daemon, Host, Hosts, Inherited, Later, Place, Xen};
use crate::disks::Disks;
use crate::guest::Guest;
use crate::kvm::KvmGuest;
use crate::random::Random;
use crate::state::KeptState;
use crate::trace::Trace;

/// The longest time to a reply for a volume whose store is healthy, whatever happens to others.
const BOUND: Duration = Duration::from_secs(5);
/// The longest time for a daemon to complete requests in flight once everything is healthy.
const PATIENCE: Duration = Duration::from_secs(120);
/// The pause between two attempts to read a volume that cannot be read yet.
const AGAIN: Duration = Duration::from_millis(100);
/// Most iterations without an advance of the clock: more are an endless loop.
const STEPS: u64 = 200_000;
/// Iterations after which a world proceeds to its end, however few requests have completed.
const STEPS_MOST: u64 = 200_000;

/// A place for one client of a volume: when it disconnects, another one connects.
struct ClientSlot {
    site: usize,
    client: Option<Client>,
    /// The volume that was served when the client connected.
    used: Weak<Volume>,
    /// The time at which the next client connects.
    again: Instant,
}

/// The result of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) requests: u64,
    pub(crate) succeeded: u64,
    /// Number of requests of Xen guests.
    pub(crate) guests: u64,
    /// Number of ends of a daemon at which a Xen guest had requests in flight.
    pub(crate) handed_over: u64,
    /// Number of ends of a daemon that lost acknowledged writes of a Xen guest.
    pub(crate) deprived: u64,
    /// The same three numbers for KVM guests.
    pub(crate) kvm_guests: u64,
    pub(crate) kvm_handed_over: u64,
    pub(crate) kvm_deprived: u64,
    /// Connections that a successor has continued.
    pub(crate) continued: u64,
    pub(crate) checked: u64,
    pub(crate) lives: u64,
    pub(crate) hash: u64,
    pub(crate) slowest: Duration,
    pub(crate) simulated: Duration,
}

impl Outcome {
    pub(crate) fn add(&mut self, other: &Outcome) {
        self.requests += other.requests;
        self.succeeded += other.succeeded;
        self.guests += other.guests;
        self.handed_over += other.handed_over;
        self.deprived += other.deprived;
        self.kvm_guests += other.kvm_guests;
        self.kvm_handed_over += other.kvm_handed_over;
        self.kvm_deprived += other.kvm_deprived;
        self.continued += other.continued;
        self.checked += other.checked;
        self.lives += other.lives;
        self.simulated += other.simulated;
        self.slowest = self.slowest.max(other.slowest);
    }
}

/// See the module.
pub(crate) struct World {
    random: Random,
    /// A second source, for draws that were added later: the draws of the first one stay the same.
    apart: Random,
    theme: Theme,
    begin: Instant,
    now: Instant,
    sites: Vec<Site>,
    client_slots: Vec<ClientSlot>,
    /// Xen, if the world has guests, and the places for guests.
    xen: Option<Xen>,
    guest_slots: Vec<GuestSlot>,
    destroyed_guests: Vec<DestroyedGuest>,
    kvm: KvmGuests,
    death: Option<PlannedDeath>,
    /// The number of the next guest.
    next_guest: u16,
    /// The snapshots of overlays, and the operations on them.
    overlays: Overlays,
    /// The state directory, if there is one, and the changes of its files.
    state: Option<KeptState>,
    changes: Changes,
    /// The state directory is not mounted.
    state_absent: bool,
    /// The configuration file is not in force.
    unread: bool,
    /// The listener and connections that a daemon has left to its successor.
    inherited: Inherited,
    handing_over: bool,
    handover: Handover,
    broker: BrokerFate,
    steady: Instant,
    /// The last reload that was begun.
    reloading: Option<Later<()>>,
    kept_volumes: KeptVolumes,
    daemon: Option<Daemon>,
    disks: Arc<Disks>,
    events: Vec<(Event, u64)>,
    event_at: Instant,
    event_every: u64,
    /// No event happens from now on.
    calm: bool,
    pub(crate) trace: Trace,
    outcome: Outcome,
    steps: u64,
    /// The number of all iterations of the loop.
    all_steps: u64,
}

impl World {
    pub(crate) fn new(seed: u64, words: bool) -> World {
        let (mut random, mut apart) = (Random::new(seed), Random::new(!seed));
        let begin = Instant::now();
        clock::set(Some(begin));
        ebb_io::sim::set_order(Some(random.next()));
        let theme = Theme::draw(seed, &mut random);
        let mut sites = theme.sites(&mut random);
        theme.begin(&mut sites);
        let disks = Arc::<Disks>::default();
        sites.iter().for_each(|site| disks.put(&site.config.disk, &site.config.place));
        let added = sites.iter().filter(|site| site.run_time.is_some());
        let new: Vec<_> = added.filter(|_| random.chance(50)).collect();
        let made = sites.iter().filter(|site| site.config.create);
        new.into_iter().chain(made).for_each(|site| disks.unmake(&site.config.disk));
        for (site, key) in sites.iter().filter_map(|site| Some((site, site.key?))) {
            disks.encrypt(&site.config.disk, key);
        }
        let mut client_slots = Vec::new();
        for site in 0..sites.len() {
            for _ in 0..random.between(1, 3) {
                let used = Weak::new();
                client_slots.push(ClientSlot { site, client: None, used, again: begin });
            }
        }
        remotes::step_in_handshakes(&sites);
        overlays::know_synced_folders(&sites);
        ebb_sandbox::threads::sim::keep_calls(true);
        let (mut events, event_every, event_at) = theme.events(&mut random, begin);
        let guest_slots = match theme {
            Theme::Any => guests::draw(seed, &mut sites, begin),
            _ => Vec::new(),
        };
        let kvm = match theme {
            Theme::Kvm => kvm_guests::draw(&mut random, &mut sites, begin),
            Theme::Overlays => kvm_guests::draw_above(&mut apart, &mut sites, begin),
            _ => KvmGuests::default(),
        };
        let xen = (!guest_slots.is_empty()).then(guests::host);
        events.extend(xen.iter().flat_map(|_| [(Event::Guest, 15), (Event::Kill, 15)]));
        let above = theme == Theme::Overlays && !kvm.slots.is_empty();
        events.extend(above.then_some((Event::Kvm, 15)));
        let trace = Trace::new(words);
        World {
            begin,
            now: begin,
            sites,
            client_slots,
            xen,
            guest_slots,
            destroyed_guests: Vec::new(),
            kvm,
            death: None,
            next_guest: 1,
            overlays: Overlays::default(),
            state: theme.has_state().then(KeptState::new),
            changes: Changes::default(),
            state_absent: false,
            unread: false,
            inherited: Inherited::default(),
            handing_over: false,
            handover: Handover::default(),
            broker: BrokerFate::default(),
            steady: begin,
            reloading: None,
            kept_volumes: KeptVolumes::default(),
            daemon: None,
            disks,
            events,
            event_at,
            event_every,
            calm: false,
            trace,
            outcome: Outcome::default(),
            steps: 0,
            all_steps: 0,
            random,
            apart,
            theme,
        }
    }

    fn nanos(&self) -> u64 {
        u64::try_from((self.now - self.begin).as_nanos()).unwrap()
    }

    fn note(&mut self, what: std::fmt::Arguments<'_>) {
        let at = self.nanos();
        self.trace.note(at, what);
    }

    /// Runs until this many requests have completed; then ends the daemon and checks the content of
    /// the volumes.
    ///
    /// # Errors
    /// A promise that was not kept.
    pub(crate) fn run(&mut self, requests: u64) -> Result<Outcome, String> {
        self.start()?;
        // A world whose requests hardly complete ends after this simulated time.
        let end = self.begin + Duration::from_secs(300);
        while self.outcome.requests < requests && self.now < end && self.all_steps < STEPS_MOST {
            self.step()?;
        }
        self.note(format_args!("calm"));
        self.settle()?;
        self.check_all()?;
        self.check_recovery()?;
        match self.random.below(3) {
            0 => self.stop()?,
            1 => self.kill(false)?,
            _ => self.kill(true)?,
        }
        self.start()?;
        self.check_all()?;
        self.end_guests()?;
        self.end_kvm_guests()?;
        self.stop()?;
        self.check_ciphertext()?;
        for site in &self.sites {
            self.outcome.checked += site.oracle.checked;
        }
        self.outcome.simulated = self.now - self.begin;
        let at = self.nanos();
        self.trace.mix(at);
        self.outcome.hash = self.trace.hash();
        Ok(self.outcome)
    }

    fn start(&mut self) -> Result<(), String> {
        self.renew_broker();
        self.exchange_under_guests();
        self.move_files_away();
        let settings = self.theme.settings(&mut self.random);
        for at in 0..self.sites.len() {
            let (config, sectors) = (&self.sites[at].config, self.sites[at].oracle.sectors());
            let kind = match &config.place {
                Place::Disk(_) => "disk",
                Place::Memory(_) => "memory",
                Place::Remote(..) => "server",
                Place::Overlay(_) => "overlay",
            };
            let what = format!("{}: {kind} of {sectors} sectors, {}", config.name, config.mode);
            self.note(format_args!("{what}"));
        }
        self.note(format_args!("start {settings:?}"));
        let text = daemon::configuration(&settings, &self.listed());
        let (config, lock) = self.find_configuration(&text)?;
        let guests = Hosts { xen: self.xen.clone(), sockets: self.kvm.sockets.clone() };
        let (disks, state) = (self.disks.clone(), self.state.clone());
        let inherited = std::mem::take(&mut self.inherited);
        let host = Host { disks, guests, state, lock, inherited };
        self.daemon = Some(Daemon::start(settings, config, host, self.now));
        self.outcome.lives += 1;
        for site in &mut self.sites {
            (site.hung, site.changed) = (site.hangs, None);
            site.shaken = site.owes_a_failure();
            site.mounting.wrong_at_start = site.config.wrong;
            site.oracle.begin_life();
        }
        for slot in &mut self.client_slots {
            slot.again = self.now;
        }
        Ok(())
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("the daemon is running")
    }

    /// Makes one iteration: an event if one is due, a step of each participant, and the clock.
    fn step(&mut self) -> Result<(), String> {
        self.all_steps += 1;
        if !self.calm && self.now >= self.event_at {
            self.apply_event()?;
            let pause = self.random.between(1, 2 * self.event_every);
            self.event_at = self.now + Duration::from_micros(pause);
        }
        let now = self.now;
        self.serve_broker();
        let mut busy = self.daemon.as_mut().is_some_and(|daemon| daemon.step(now));
        self.die_at_store()?;
        busy |= self.serve_remotes()?;
        self.sites.iter_mut().for_each(Site::notice);
        self.end_resizes(false);
        if let Some(disk) = self.state.as_ref().and_then(|_| self.disks.misplaced()) {
            return Err(format!("a file was made for {disk}, which exists elsewhere"));
        }
        busy |= self.serve_changes()?;
        self.check_kept_volumes()?;
        // First: a volume that was replaced has completed these requests before.
        self.receive_guests()?;
        self.receive_kvm_guests(false)?;
        self.notice_replaced_volumes();
        self.bury();
        let first = self.random.index(self.client_slots.len());
        for at in 0..self.client_slots.len() {
            busy |= self.serve((first + at) % self.client_slots.len())?;
        }
        busy |= self.serve_guests()?;
        busy |= self.serve_kvm_guests()?;
        busy |= self.serve_overlays()?;
        self.pass_time(busy)
    }

    fn end_resizes(&mut self, life_ends: bool) {
        for at in 0..self.sites.len() {
            if let Some(what) = self.sites[at].end_resize(life_ends) {
                self.note(format_args!("{what}"));
                if self.theme == Theme::Sizes && !life_ends {
                    self.read_ends(at);
                }
            }
        }
    }

    /// Has clients read a volume at its end before a resize, and at its present end. Half of those
    /// that do not know the new size disconnect, so that the next connection learns it.
    fn read_ends(&mut self, at: usize) {
        let now = self.now;
        let site = &mut self.sites[at];
        let sectors = site.oracle.sectors();
        let ends = [std::mem::replace(&mut site.ended, sectors), sectors];
        for slot in self.client_slots.iter_mut().filter(|slot| slot.site == at) {
            let Some(client) = slot.client.as_mut().filter(|client| client.is_serving()) else {
                continue;
            };
            for first in ends.map(|end| (end - 1) / 8 * 8).into_iter().filter(|at| *at < sectors) {
                let count = 16.min(sectors - first);
                if first + count <= client.size() {
                    client.read(first, count, &mut site.oracle, now);
                } else if self.random.chance(50) {
                    client.goodbye();
                    break;
                }
            }
        }
    }

    /// Ends the changes of disconnected clients, once the server serves only connected ones.
    fn bury(&mut self) {
        if self.sites.iter().all(|site| site.orphans.is_empty()) {
            return;
        }
        let Some(daemon) = &self.daemon else { return };
        for (number, site) in
            self.sites.iter_mut().enumerate().filter(|(_, s)| !s.orphans.is_empty())
        {
            let here = self.client_slots.iter().filter(|slot| slot.site == number);
            let here: Vec<_> = here.filter_map(|slot| slot.client.as_ref()).collect();
            let name = &site.config.name;
            if daemon.volume(name).is_some()
                && daemon.server.connections(name) == here.len() as u64
                && here.iter().all(|client| client.answered > 0)
            {
                site.end_orphans();
            }
        }
    }

    /// Advances the clock: a little after work, or else to the next time that there is work.
    fn pass_time(&mut self, busy: bool) -> Result<(), String> {
        let step = Duration::from_nanos(self.random.below(4000));
        if busy {
            self.steps += 1;
            if self.steps > STEPS {
                return Err(format!(
                    "{STEPS} iterations without an advance of the clock: {}",
                    self.describe()
                ));
            }
            self.now += step;
        } else {
            self.steps = 0;
            let daemon = self.daemon.as_ref().map(Daemon::wants);
            let clients = self.client_slots.iter().filter_map(|slot| match &slot.client {
                Some(client) => client.wants(),
                None => (self.daemon.is_some() && !self.calm).then_some(slot.again),
            });
            let event = (!self.calm).then_some(self.event_at);
            let remotes = self.sites.iter().filter_map(|site| site.remote()?.wants());
            let guests = self.guest_slots.iter().filter_map(|slot| match &slot.guest {
                Some(guest) => guest.wants(),
                None => (!self.calm).then_some(slot.again),
            });
            let kvm = self.kvm.slots.iter().filter_map(|slot| match &slot.guest {
                Some(guest) => guest.wants(),
                None => (!self.calm).then_some(slot.again),
            });
            let guests = guests.chain(kvm);
            let others = event.into_iter().chain(self.broker_wants());
            let next = clients.chain(guests).chain(daemon).chain(remotes).chain(others).min();
            self.now = next.map_or(self.now + step, |next| next.max(self.now + step));
        }
        clock::set(Some(self.now));
        Ok(())
    }

    fn serve(&mut self, number: usize) -> Result<bool, String> {
        let now = self.now;
        let healthy = self.healthy_since(self.client_slots[number].site);
        let slot = &mut self.client_slots[number];
        let site = &mut self.sites[slot.site];
        let Some(client) = &mut slot.client else {
            if self.calm || slot.again > now {
                return Ok(false);
            }
            let Some(daemon) = &self.daemon else { return Ok(false) };
            let sectors = site.oracle.sectors();
            let manner = self.theme.manner(slot.site, &mut self.random, sectors);
            let stream = daemon.connect();
            let used = daemon.volume(&site.config.name);
            slot.used = used.as_ref().map(Arc::downgrade).unwrap_or_default();
            let random = self.random.fork();
            self.trace.mix(number as u64);
            slot.client = Some(Client::new(stream, &site.config.name, manner, random, now));
            return Ok(true);
        };
        let (answered, succeeded) = (client.answered, client.succeeded);
        let step = client.step(&mut site.oracle, now)?;
        if client.answered > answered {
            self.outcome.requests += client.answered - answered;
            self.outcome.succeeded += client.succeeded - succeeded;
            self.trace.mix(client.answered << 8 | number as u64);
        }
        let pauses = client.deaf || self.handing_over;
        if let (Some(oldest), Some(healthy), false) = (client.oldest(), healthy, pauses) {
            let waits = now.saturating_duration_since(oldest.max(healthy).max(self.steady));
            self.outcome.slowest = self.outcome.slowest.max(waits);
            if waits > BOUND * self.theme.patience(slot.site) {
                return Err(format!(
                    "a request to a healthy store has waited for {waits:?}: {}",
                    self.describe()
                ));
            }
        }
        if step == StepResult::Ended {
            self.check_disconnection(number)?;
            self.leave(number);
            return Ok(true);
        }
        Ok(step == StepResult::Busy)
    }

    /// Ends the connection of a client; another client connects soon.
    fn leave(&mut self, number: usize) {
        let mut pause = Duration::from_micros(self.random.below(5_000));
        let slot = &mut self.client_slots[number];
        if slot.client.as_ref().is_some_and(Client::was_refused) {
            pause *= 50;
        }
        slot.again = self.now + pause;
        slot.used = Weak::new();
        if let Some(client) = slot.client.take() {
            let what = client.describe();
            let site = &mut self.sites[slot.site];
            site.orphans.extend(client.leave(&mut site.oracle));
            self.note(format_args!("client {number} has disconnected: {what}"));
        }
    }

    fn describe(&self) -> String {
        let clients = self.client_slots.iter().filter_map(|slot| slot.client.as_ref());
        let guests = self.guest_slots.iter().filter_map(|slot| slot.guest.as_ref());
        let kvm = self.kvm.slots.iter().filter_map(|slot| slot.guest.as_ref());
        let guests = guests.map(Guest::describe).chain(kvm.map(KvmGuest::describe));
        let all: Vec<String> = clients.map(Client::describe).chain(guests).collect();
        all.join("; ")
    }

    /// Detects volumes that were replaced by a reload: writes that were acknowledged before the
    /// reload was submitted are stable.
    fn notice_replaced_volumes(&mut self) {
        let Some(daemon) = &self.daemon else { return };
        let mut renewed = Vec::new();
        for (at, site) in self.sites.iter_mut().enumerate() {
            // `is_lost` may become false again: after a failed flush, the next successful flush
            // makes a change stable that bypasses the cache.
            if let Some(volume) = site.serving.upgrade() {
                site.notice_loss(volume.is_lost());
                site.loses = volume.loses_by_kill();
            }
            let Some(volume) = daemon.volume(&site.config.name) else { continue };
            if std::ptr::eq(site.serving.as_ptr(), Arc::as_ptr(&volume)) {
                continue;
            }
            let before = std::mem::replace(&mut site.serving, Arc::downgrade(&volume));
            site.mode = volume.cache_mode();
            (site.is_anew, site.is_unsure) = (false, false);
            if before.ptr_eq(&Weak::new()) {
                continue;
            }
            self.kvm.note_opened(at, &site.serving);
            site.notice();
            // The volume may have lost data and been closed within one step.
            site.lost |= self.disks.take_lost(&site.config.disk);
            let (name, lost, hung) = (&site.config.name, site.lost, site.hung);
            let (nanos, clock) =
                (u64::try_from((self.now - self.begin).as_nanos()).unwrap(), site.oracle.now());
            let reloaded = site.reloaded;
            self.trace.note(
                nanos,
                format_args!("{name} was replaced: lost {lost}, hung {hung}, reload submitted at {reloaded}, now {clock}"),
            );
            match (&site.config.place, std::mem::take(&mut site.lost)) {
                (Place::Memory(_), _) => {
                    site.oracle.cleared();
                    renewed.push(at);
                }
                (Place::Disk(_) | Place::Remote(..) | Place::Overlay(_), true) => {
                    site.oracle.crashed();
                    self.overlays.doubt_snapshots(at);
                }
                // The last flush may have failed because the server was down.
                (Place::Remote(..), false) if site.hung => site.oracle.crashed(),
                // A disk that did not respond may have been given up; then no data of this life was
                // unflushed.
                (Place::Disk(_) | Place::Overlay(_), false) if site.hung => {}
                (Place::Disk(_) | Place::Remote(..) | Place::Overlay(_), false) => {
                    site.oracle.closed(site.reloaded);
                }
            }
        }
        self.displace_kvm_guests(|site| renewed.contains(&site));
    }

    /// Makes steps until the result is there. No events happen meanwhile.
    fn wait_for<T>(&mut self, later: &Later<T>, limit: Duration, what: &str) -> Result<T, String> {
        let end = self.now + limit;
        let calm = std::mem::replace(&mut self.calm, true);
        loop {
            if let Some(answer) = later.borrow_mut().take() {
                self.calm = calm;
                return Ok(answer);
            }
            if self.now > end {
                return Err(format!(
                    "{what} has not completed after {limit:?}: {}",
                    self.describe()
                ));
            }
            self.step()?;
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.daemon = None;
        if let Some(xen) = &self.xen {
            let _ = std::fs::remove_dir_all(&xen.journals);
        }
        ebb_io::sim::set_order(None);
        ebb_store::set_peer(None);
        ebb_store::set_folder_sync(None);
        ebb_sandbox::threads::sim::keep_calls(false);
        ebbd::sandbox::sim::set_fault(None);
        clock::set(None);
    }
}
