//! The Xen guests of a world: their steps and events. They keep running when the daemon is killed,
//! and end at a power cut of the host.

use std::path::PathBuf;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ebb_export_xen::shm::World as Machine;
use ebb_volume::Mode;
use ebbd::engine::StopReport;

use super::site::Site;
use super::{BOUND, PATIENCE, World};
use crate::daemon::{Place, Xen};
use crate::guest::{Guest, Remains, StepResult};
use crate::manner::Manner;
use crate::random::Random;

/// The time within which the backend unmaps a guest's pages after it has stopped serving the guest.
const UNMAPPED: Duration = Duration::from_secs(1);

/// A place for one guest of a volume: when it is destroyed, another one starts.
pub(super) struct GuestSlot {
    site: usize,
    pub(super) guest: Option<Guest>,
    /// When the next guest starts.
    pub(super) again: Instant,
}

/// A guest that has ended, and that the daemon may still serve.
pub(super) struct DestroyedGuest {
    site: usize,
    remains: Remains,
    /// Since when it is no longer served.
    over: Option<Instant>,
}

/// In every third world some volumes are served to guests, too: draws which.
pub(super) fn draw(seed: u64, sites: &mut [Site], now: Instant) -> Vec<GuestSlot> {
    // Not from the world's own random numbers, so that worlds without guests do not change.
    let mut random = Random::new(seed.wrapping_add(0x0067_7565_7374));
    if random.below(3) > 0 {
        return Vec::new();
    }
    let certain = random.index(sites.len());
    let mut guest_slots = Vec::new();
    for (number, site) in sites.iter_mut().enumerate() {
        if number == certain || random.chance(40) {
            site.config.shared = true;
            guest_slots.push(GuestSlot { site: number, guest: None, again: now });
        }
    }
    guest_slots
}

/// A new host, with nothing in its memory.
pub(super) fn host() -> Xen {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("/dev/shm/ebb-world-{}-{number}", std::process::id());
    Xen { machine: Machine::default(), journals: PathBuf::from(name) }
}

impl World {
    /// Whether clients or guests of a site have requests in flight.
    pub(super) fn has_requests(&self, site: usize) -> bool {
        let clients = self.client_slots.iter().filter(|slot| slot.site == site);
        let guests = self.guest_slots.iter().filter(|slot| slot.site == site);
        let kvm = self.kvm.slots.iter().filter(|slot| slot.site == site);
        clients.filter_map(|slot| slot.client.as_ref()).any(|client| client.open() > 0)
            || guests.filter_map(|slot| slot.guest.as_ref()).any(|guest| guest.open() > 0)
            || kvm.filter_map(|slot| slot.guest.as_ref()).any(|guest| guest.open() > 0)
    }

    /// Reads the responses that have arrived.
    pub(super) fn receive_guests(&mut self) -> Result<(), String> {
        for at in 0..self.guest_slots.len() {
            let GuestSlot { site, guest, .. } = &mut self.guest_slots[at];
            let Some(guest) = guest else { continue };
            let oracle = &mut self.sites[*site].oracle;
            let (answered, succeeded) = (guest.answered, guest.succeeded);
            guest.receive(oracle)?;
            if guest.answered > answered {
                self.outcome.requests += guest.answered - answered;
                self.outcome.guests += guest.answered - answered;
                self.outcome.succeeded += guest.succeeded - succeeded;
                self.trace.mix(guest.answered << 16 | u64::from(guest.number()));
            }
        }
        Ok(())
    }

    /// A step of each guest.
    pub(super) fn serve_guests(&mut self) -> Result<bool, String> {
        let mut busy = self.end_destroyed_guests()?;
        for at in 0..self.guest_slots.len() {
            busy |= self.serve_guest(at)?;
        }
        Ok(busy)
    }

    fn serve_guest(&mut self, at: usize) -> Result<bool, String> {
        let now = self.now;
        let site = self.guest_slots[at].site;
        if self.guest_slots[at].guest.is_none() {
            if self.calm || self.guest_slots[at].again > now {
                return Ok(false);
            }
            self.seat_guest(at);
            return Ok(true);
        }
        let Some(guest) = &mut self.guest_slots[at].guest else { return Ok(false) };
        let served = guest.is_serving();
        let own = &mut self.sites[site];
        let step = guest.step(&mut own.oracle, &own.serving, now)?;
        let complaint = guest.complaint();
        if let Some(text) = complaint.filter(|_| served && !guest.is_serving()) {
            let number = guest.number();
            self.judge_complaint(site, &text)?;
            self.note(format_args!("guest {number} is refused: {text}"));
        }
        if step == StepResult::Ended {
            self.destroy_guest(at);
            return Ok(true);
        }
        self.check_for_hang(at)?;
        Ok(step == StepResult::Busy)
    }

    fn seat_guest(&mut self, at: usize) {
        let Some(xen) = &self.xen else { return };
        let site = &self.sites[self.guest_slots[at].site];
        let mut manner = Manner::draw(&mut self.random, site.oracle.sectors());
        if self.random.chance(20) {
            manner.depth = 32;
        }
        let (random, number) = (self.random.fork(), self.next_guest);
        self.next_guest += 1;
        let name = site.config.name.clone();
        let guest = Guest::new(&xen.machine, number, &name, manner, random, self.now);
        self.guest_slots[at].guest = Some(guest);
        self.trace.mix(u64::from(number));
        self.note(format_args!("guest {number} starts, with a disk on {name}"));
    }

    /// Whether the backend may stop serving a guest for this reason.
    fn judge_complaint(&self, site: usize, text: &str) -> Result<(), String> {
        let site = &self.sites[site];
        let changed = site.changed.is_some() || !site.listed;
        let (_, resizes) = site.oracle.end_and_resizes();
        let may = text.contains("is not served any more")
            || changed && text.contains("there is no volume")
            || resizes > 0 && text.contains("but it was attached with")
            // A volume in memory of the same name is another one after a restart.
            || matches!(site.config.place, Place::Memory(_)) && text.contains("it was attached to volume");
        match may {
            true => Ok(()),
            false => Err(format!("the guest of {} is refused: {text}", site.config.name)),
        }
    }

    /// Requests of a guest to a healthy store take no longer than those of NBD clients while it is served.
    fn check_for_hang(&mut self, at: usize) -> Result<(), String> {
        let healthy = self.healthy_since(self.guest_slots[at].site);
        let now = self.now;
        let (Some(daemon), Some(guest)) = (&self.daemon, &mut self.guest_slots[at].guest) else {
            return Ok(());
        };
        let old = guest.oldest().filter(|oldest| now.saturating_duration_since(*oldest) > BOUND);
        let waits = old.is_some()
            && healthy.is_some_and(|since| now >= since)
            && daemon.serves_guest(guest.number()).0;
        guest.waits = waits.then(|| guest.waits.unwrap_or(now));
        match guest.waits {
            Some(since) if now - since > BOUND => {
                let what = self.describe();
                Err(format!("a guest's request to a healthy store has waited too long: {what}"))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn apply_guest_event(&mut self) {
        const VALUES: [(&str, &[u64]); 4] = [
            ("max_persistent_grants", &[1, 16, 1056]),
            ("persistent_grant_unused_seconds", &[0, 1, 60]),
            ("feature_persistent", &[0, 1]),
            ("poll_us", &[0, 100, 1000]),
        ];
        let at = self.random.index(self.guest_slots.len());
        match self.random.below(4) {
            0 => self.destroy_guest(at),
            1 => {
                let (name, values) = self.random.pick(&VALUES);
                let value = self.random.pick(values);
                let set = self.daemon().set(name, Some(value));
                self.note(format_args!("{name} = {value}: {set}"));
            }
            _ => {
                let patient = self.random.chance(50);
                if let Some(guest) = &mut self.guest_slots[at].guest {
                    guest.close(patient);
                    let number = guest.number();
                    self.note(format_args!("guest {number} disconnects; patient: {patient}"));
                }
            }
        }
    }

    /// Destroys a guest, with its requests in flight; another one starts soon.
    fn destroy_guest(&mut self, at: usize) {
        let mut pause = Duration::from_micros(self.random.below(5_000));
        let slot = &mut self.guest_slots[at];
        if slot.guest.as_ref().is_some_and(|guest| guest.complaint().is_some()) {
            pause *= 50;
        }
        slot.again = self.now + pause;
        if let Some(guest) = slot.guest.take() {
            let (site, what) = (slot.site, guest.describe());
            let remains = guest.die(&mut self.sites[site].oracle);
            self.destroyed_guests.push(DestroyedGuest { site, remains, over: None });
            self.note(format_args!("destroyed: {what}"));
        }
    }

    /// Changes of guests that have ended are complete once the daemon no longer serves the guest;
    /// then it must have none of the guest's memory mapped.
    fn end_destroyed_guests(&mut self) -> Result<bool, String> {
        if self.destroyed_guests.is_empty() {
            return Ok(false);
        }
        let (now, mut wrong) = (self.now, None);
        let (sites, daemon) = (&mut self.sites, &self.daemon);
        let before = self.destroyed_guests.len();
        self.destroyed_guests.retain_mut(|DestroyedGuest { site, remains, over }| {
            if daemon.as_ref().is_some_and(|daemon| daemon.serves_guest(remains.number).1) {
                return true;
            }
            let since = *over.get_or_insert(now);
            let oracle = &mut sites[*site].oracle;
            remains.orphans.drain(..).for_each(|writing| oracle.end(writing, false));
            let mapped = remains.domain.mapped();
            if mapped > 0 && now - since > UNMAPPED {
                wrong = Some(format!(
                    "{mapped} pages of guest {} are mapped after it has ended",
                    remains.number
                ));
            }
            mapped > 0
        });
        wrong.map_or(Ok(self.destroyed_guests.len() < before), Err)
    }

    /// The daemon has ended: nothing may be mapped. The guests wait for its successor.
    pub(super) fn end_guests_daemon(&mut self) -> Result<(), String> {
        self.receive_guests()?;
        for GuestSlot { site, guest, .. } in &mut self.guest_slots {
            let Some(guest) = guest else { continue };
            let site = &self.sites[*site];
            if guest.mapped() > 0 {
                let (pages, number) = (guest.mapped(), guest.number());
                return Err(format!(
                    "the daemon has ended, but {pages} pages of guest {number} are mapped"
                ));
            }
            if guest.open() > 0 {
                self.outcome.handed_over += 1;
            }
            let none = site.serving.ptr_eq(&Weak::new());
            if !none && site.mode == Mode::Writeback && guest.would_lose(&site.serving) {
                guest.lose();
                self.outcome.deprived += 1;
            }
        }
        self.end_destroyed_guests()?;
        match self.destroyed_guests.first() {
            Some(DestroyedGuest { remains, .. }) => Err(format!(
                "the daemon has ended, but {} pages of guest {}, which has ended, too, are mapped",
                remains.domain.mapped(),
                remains.number
            )),
            None => Ok(()),
        }
    }

    /// The host has crashed: its guests, xenstore and all that was in memory are lost.
    pub(super) fn destroy_guests_host(&mut self) -> Result<(), String> {
        let Some(xen) = self.xen.take() else { return Ok(()) };
        (0..self.guest_slots.len()).for_each(|at| self.destroy_guest(at));
        let _ = std::fs::remove_dir_all(&xen.journals);
        self.xen = Some(host());
        self.end_destroyed_guests()?;
        Ok(())
    }

    /// The daemon was shut down: data of volumes that were closed cleanly is stable.
    pub(super) fn note_guests_stable(&mut self, report: &StopReport) {
        for GuestSlot { site, guest, .. } in &mut self.guest_slots {
            let site = &self.sites[*site];
            let left = report.unflushed.iter().any(|left| left.volume == site.config.name);
            let inherited = site.has_inherited_loss(report);
            match guest {
                Some(guest) if inherited && guest.would_lose(&site.serving) => guest.lose(),
                Some(guest) if !left && !inherited => guest.note_stable(),
                _ => {}
            }
        }
    }

    /// Destroys all guests, and waits until the daemon has none of their memory mapped.
    pub(super) fn end_guests(&mut self) -> Result<(), String> {
        (0..self.guest_slots.len()).for_each(|at| self.destroy_guest(at));
        let end = self.now + PATIENCE;
        while !self.destroyed_guests.is_empty() {
            if self.now > end {
                return Err(
                    "guests that have ended are still served, or their pages mapped".to_owned()
                );
            }
            self.step()?;
        }
        Ok(())
    }
}
