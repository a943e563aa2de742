//! The KVM guests of a world: their steps and events. Like Xen guests, they keep running when the
//! daemon is killed, and end at a power cut of the host.

use std::collections::BTreeMap;
use std::sync::Weak;
use std::time::{Duration, Instant};

use ebb_export_vhost::DeathAtStore;
use ebb_volume::Volume;
use ebbd::engine::StopReport;

use super::site::Site;
use super::{BOUND, PATIENCE, World};
use crate::daemon::{Later, Place};
use crate::frontends::Sockets;
use crate::kvm::{KvmGuest, Remains};
use crate::manner::Manner;
use crate::random::Random;

/// The time within which the backend unmaps a guest's memory after it has stopped serving the
/// guest. A request that waited for a full disk is tried again after up to a second.
const UNMAPPED: Duration = Duration::from_secs(2);
/// The number of turns of the world that the backend has at least for that.
const TURNS: u32 = 20;
/// A guest that was refused this often, for a valid reason, ends.
const REFUSALS: u32 = 3;

/// A place for one guest of a volume: when it is destroyed, another one starts.
pub(super) struct KvmSlot {
    pub(super) site: usize,
    pub(super) guest: Option<KvmGuest>,
    /// The time at which the next guest starts.
    pub(super) again: Instant,
}

/// A guest that has ended, and that the daemon may still serve.
struct EndedGuest {
    number: u16,
    site: usize,
    /// The volume that the guest was attached to: its site may have another name by now.
    volume: String,
    remains: Remains,
    /// The highest number that a connection of the guest may have.
    connection: u64,
    /// The time since which the guest is no longer served.
    over: Option<Instant>,
    /// The number of turns of the world since `over`.
    turns: u32,
}

/// See the module.
#[derive(Default)]
pub(super) struct KvmGuests {
    pub(super) slots: Vec<KvmSlot>,
    ended: Vec<EndedGuest>,
    /// The sockets at which volumes are served to the guests.
    pub(super) sockets: Option<Sockets>,
    /// The daemon stops: it accepts no VMM.
    pub(super) stopping: bool,
    /// The reloads that were begun, until they have ended.
    pub(super) reloads: Vec<Later<()>>,
}

/// The coming death of the daemon between two stores to memory that it shares with guests.
pub(super) enum PlannedDeath {
    Kvm(DeathAtStore),
    Xen(ebb_export_xen::DeathAtRingStore),
}

/// Draws which volumes are served to guests.
pub(super) fn draw(random: &mut Random, sites: &mut [Site], now: Instant) -> KvmGuests {
    let certain = random.index(sites.len());
    let mut slots = Vec::new();
    for (number, site) in sites.iter_mut().enumerate() {
        if number == certain || random.chance(40) {
            site.config.shared = true;
            slots.push(KvmSlot { site: number, guest: None, again: now });
        }
    }
    let names = slots.iter().map(|slot| &*sites[slot.site].config.name);
    KvmGuests { sockets: Some(Sockets::new(names)), slots, ..KvmGuests::default() }
}

/// Draws which overlays are served to guests: in most worlds none.
pub(super) fn draw_above(random: &mut Random, sites: &mut [Site], now: Instant) -> KvmGuests {
    if random.chance(70) {
        return KvmGuests::default();
    }
    let mut slots = Vec::new();
    for (number, site) in sites.iter_mut().enumerate().filter(|(_, s)| s.overlay().is_some()) {
        site.config.shared = true;
        slots.push(KvmSlot { site: number, guest: None, again: now });
    }
    let names = slots.iter().map(|slot| &*sites[slot.site].config.name);
    KvmGuests { sockets: Some(Sockets::new(names)), slots, ..KvmGuests::default() }
}

/// The number of mappings of each file in this process, by inode.
fn mappings() -> BTreeMap<u64, usize> {
    let mut mappings = BTreeMap::new();
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        if line.contains("/memfd:")
            && let Some(inode) = line.split_whitespace().nth(4)
        {
            *mappings.entry(inode.parse().unwrap()).or_default() += 1;
        }
    }
    mappings
}

impl KvmGuests {
    /// Notes that the volume of a site was opened again, as `volume`.
    pub(super) fn note_opened(&mut self, site: usize, volume: &Weak<Volume>) {
        let slots = self.slots.iter_mut().filter(|slot| slot.site == site);
        slots.filter_map(|slot| slot.guest.as_mut()).for_each(|guest| guest.note_opened(volume));
    }
}

impl World {
    /// Reads the responses that have arrived; with `all` also those without a notification.
    pub(super) fn receive_kvm_guests(&mut self, all: bool) -> Result<(), String> {
        for KvmSlot { site, guest, .. } in &mut self.kvm.slots {
            let Some(guest) = guest else { continue };
            let site = &mut self.sites[*site];
            let (answered, succeeded) = (guest.answered, guest.succeeded);
            guest.risky = site.loses;
            guest.receive(&mut site.oracle, &site.serving, all)?;
            if guest.answered > answered {
                self.outcome.requests += guest.answered - answered;
                self.outcome.kvm_guests += guest.answered - answered;
                self.outcome.succeeded += guest.succeeded - succeeded;
                self.trace.mix(guest.answered << 16 | u64::from(guest.number()));
            }
        }
        Ok(())
    }

    /// Makes a step of each guest.
    pub(super) fn serve_kvm_guests(&mut self) -> Result<bool, String> {
        let mut busy = self.end_ended_guests()?;
        for at in 0..self.kvm.slots.len() {
            busy |= self.serve_kvm_guest(at)?;
        }
        Ok(busy)
    }

    fn serve_kvm_guest(&mut self, at: usize) -> Result<bool, String> {
        let now = self.now;
        let KvmSlot { site, guest, again } = &mut self.kvm.slots[at];
        let Some(guest) = guest else {
            if self.calm || *again > now {
                return Ok(false);
            }
            self.seat_kvm_guest(at);
            return Ok(true);
        };
        let site = &mut self.sites[*site];
        let busy = guest.step(&mut site.oracle, now)?;
        if guest.refusals >= REFUSALS && (site.may_be_another_disk() || guest.is_displaced()) {
            self.destroy_kvm_guest(at);
            return Ok(true);
        }
        self.check_for_kvm_hang(at)?;
        Ok(busy)
    }

    fn seat_kvm_guest(&mut self, at: usize) {
        let Some(sockets) = &self.kvm.sockets else { return };
        let site = &self.sites[self.kvm.slots[at].site];
        let mut manner = Manner::draw(&mut self.random, site.oracle.sectors());
        if self.random.chance(20) {
            manner.depth = 32;
        }
        // Makes many events happen to each guest.
        manner.pause_us = self.random.pick(&[50, 1_000, 5_000]);
        let (random, number) = (self.random.fork(), self.next_guest);
        self.next_guest += 1;
        let name = site.config.name.clone();
        let address = sockets.of(&name);
        let guest = KvmGuest::new(number, &name, address, &manner, random, self.now);
        self.kvm.slots[at].guest = Some(guest);
        self.trace.mix(u64::from(number));
        self.note(format_args!("guest {number} starts, with a disk on {name}"));
    }

    /// Checks that requests of a guest to a healthy store take no longer than requests of NBD
    /// clients, while its volume is served and its VMM can connect.
    fn check_for_kvm_hang(&mut self, at: usize) -> Result<(), String> {
        let number = self.kvm.slots[at].site;
        let (healthy, now) = (self.healthy_since(number), self.now);
        let site = &self.sites[number];
        let (Some(daemon), Some(guest)) = (&self.daemon, &mut self.kvm.slots[at].guest) else {
            return Ok(());
        };
        let waits = guest.waits_since().is_some_and(|since| now - since > BOUND)
            && healthy.is_some_and(|since| now >= since)
            && site.listed
            && !self.kvm.stopping
            && daemon.volume(&site.config.name).is_some();
        guest.waits = waits.then(|| guest.waits.unwrap_or(now));
        match guest.waits {
            Some(since) if now - since > BOUND => {
                let what = self.describe();
                Err(format!("a KVM guest of a healthy store has waited too long: {what}"))
            }
            _ => Ok(()),
        }
    }

    /// Has guests send no more requests (`quiet`), or send requests again.
    pub(super) fn quieten_kvm_guests(&mut self, quiet: bool) {
        for guest in self.kvm.slots.iter_mut().filter_map(|slot| slot.guest.as_mut()) {
            guest.quiet = quiet;
        }
    }

    pub(super) fn apply_kvm_event(&mut self) {
        const LIMITS: [&str; 3] = ["limit_iops", "limit_read_iops", "limit_write_iops"];
        let at = self.random.index(self.kvm.slots.len());
        let now = self.now;
        let (which, patient) = (self.random.below(12), self.random.chance(50));
        if which < 2 {
            return self.destroy_kvm_guest(at);
        }
        if which == 2 {
            let name = self.random.pick(&LIMITS);
            let value = self.random.pick(&[None, Some(500), Some(5_000)]);
            let set = self.daemon().set(name, value);
            return self.note(format_args!("{name} = {value:?}: {set}"));
        }
        let Some(guest) = &mut self.kvm.slots[at].guest else { return };
        let what = match which {
            3..=7 => {
                guest.disconnect(patient, now);
                if patient { "disconnects when it is idle" } else { "disconnects" }
            }
            8..=9 => {
                guest.pause();
                "pauses"
            }
            _ => {
                guest.reset();
                "resets its disk"
            }
        };
        let number = guest.number();
        self.note(format_args!("guest {number} {what}"));
    }

    /// Plans to kill the daemon between two stores to rings, regions and journals, if there will be
    /// as many. Returns true if that is planned.
    pub(super) fn plan_death(&mut self) -> bool {
        let has_guests = !self.kvm.slots.is_empty() || self.xen.is_some();
        let planned = has_guests && self.random.chance(60);
        if planned {
            let stores = self.random.below(300);
            self.death = None;
            self.death = Some(match self.xen {
                None => PlannedDeath::Kvm(DeathAtStore::after(stores)),
                Some(_) => PlannedDeath::Xen(ebb_export_xen::DeathAtRingStore::after(stores)),
            });
            self.note(format_args!("a kill after {stores} stores"));
        }
        planned
    }

    /// Kills the daemon if the time of its death has come.
    pub(super) fn die_at_store(&mut self) -> Result<(), String> {
        let has_come = match &self.death {
            Some(PlannedDeath::Kvm(death)) => death.has_come(),
            Some(PlannedDeath::Xen(death)) => death.has_come(),
            None => false,
        };
        if has_come {
            self.kill(false)?;
            self.start()?;
        }
        Ok(())
    }

    /// Destroys a guest, with its requests in flight; another one starts soon.
    pub(super) fn destroy_kvm_guest(&mut self, at: usize) {
        let pause = Duration::from_micros(self.random.below(5_000));
        let slot = &mut self.kvm.slots[at];
        slot.again = self.now + pause;
        let Some(guest) = slot.guest.take() else { return };
        let (site, what, number) = (slot.site, guest.describe(), guest.number());
        let volume = guest.volume().to_owned();
        let remains = guest.die(&mut self.sites[site].oracle);
        let disks = self.daemon.as_ref().map(|daemon| daemon.frontends()).unwrap_or_default();
        let own = disks.iter().filter(|disk| *disk.volume == *volume);
        let connection = own.map(|disk| disk.number).max().unwrap_or(0);
        let (over, turns) = (None, 0);
        self.kvm.ended.push(EndedGuest { number, site, volume, remains, connection, over, turns });
        self.note(format_args!("destroyed: {what}"));
    }

    /// Ends the changes of destroyed guests that the daemon no longer serves, and checks that it
    /// has none of their memory mapped.
    fn end_ended_guests(&mut self) -> Result<bool, String> {
        if self.kvm.ended.is_empty() {
            return Ok(false);
        }
        let (now, mut wrong) = (self.now, None);
        self.kvm.reloads.retain(|reload| reload.borrow().is_none());
        let closing = self.kvm.stopping || !self.kvm.reloads.is_empty();
        let disks = self.daemon.as_ref().map(|daemon| daemon.frontends()).unwrap_or_default();
        let sites = &mut self.sites;
        let before = self.kvm.ended.len();
        let mut mapped = None;
        self.kvm.ended.retain_mut(|ended| {
            let site = &mut sites[ended.site];
            let name = &*ended.volume;
            let is_own = |number| number <= ended.connection;
            if disks.iter().any(|disk| *disk.volume == *name && is_own(disk.number)) {
                return true;
            }
            ended.over.get_or_insert(now);
            let oracle = &mut site.oracle;
            ended.remains.orphans.drain(..).for_each(|writing| oracle.end(writing, false));
            let mapped = mapped.get_or_insert_with(mappings);
            let memory = ended.remains.files.iter().any(|file| mapped.contains_key(file));
            let region = ended.remains.region.is_some_and(|file| mapped.contains_key(&file));
            ended.turns += 1;
            if closing && !memory || site.healthy.is_none() || site.full {
                // The result of closing the volume is recorded in the region: the VMM may connect
                // to a successor. A store that does not reply, or that is full, keeps its volume,
                // and so the region, or the memory of requests.
                (ended.over, ended.turns) = (Some(now), 0);
            }
            let left = memory || region;
            let late = ended.over.is_some_and(|since| now - since > UNMAPPED);
            // A handshake takes ten seconds in one turn, without one of the thread that unmaps.
            if left && late && ended.turns > TURNS {
                wrong =
                    Some(format!("memory of guest {} is mapped after it has ended", ended.number));
            }
            left
        });
        wrong.map_or(Ok(self.kvm.ended.len() < before), Err)
    }

    /// Checks that no memory of guests is mapped after the end of the daemon. The guests wait for
    /// the next daemon.
    pub(super) fn end_kvm_daemon(&mut self) -> Result<(), String> {
        if self.kvm.slots.is_empty() {
            return Ok(());
        }
        self.kvm.reloads.clear();
        self.receive_kvm_guests(true)?;
        let mapped = mappings();
        for KvmSlot { site, guest, .. } in &mut self.kvm.slots {
            let Some(guest) = guest else { continue };
            let site = &self.sites[*site];
            let number = guest.number();
            if guest.all_files().any(|file| mapped.get(&file).is_some_and(|count| *count > 1)) {
                return Err(format!(
                    "the daemon has ended, but memory of guest {number} is mapped"
                ));
            }
            if guest.open() > 0 {
                self.outcome.kvm_handed_over += 1;
            }
            let none = site.serving.ptr_eq(&Weak::new());
            if !none && site.loses && !site.was_idle(self.now) && guest.would_lose(&site.serving) {
                guest.lose();
                self.outcome.kvm_deprived += 1;
            }
        }
        self.displace_guests_of_memory();
        self.end_ended_guests()?;
        match self.kvm.ended.first() {
            Some(ended) => Err(format!(
                "the daemon has ended, but memory of guest {}, which has ended, too, is mapped",
                ended.number
            )),
            None => Ok(()),
        }
    }

    /// Destroys the guests: the host has crashed.
    pub(super) fn destroy_kvm_guests(&mut self) -> Result<(), String> {
        (0..self.kvm.slots.len()).for_each(|at| self.destroy_kvm_guest(at));
        self.end_ended_guests()?;
        Ok(())
    }

    /// Notes after a shutdown that data of volumes that were closed cleanly is stable.
    pub(super) fn note_kvm_guests_stable(&mut self, report: &StopReport) {
        for KvmSlot { site, guest, .. } in &mut self.kvm.slots {
            let site = &self.sites[*site];
            let left = report.unflushed.iter().any(|left| left.volume == site.config.name);
            match guest {
                Some(guest) if site.has_inherited_loss(report) => guest.note_inherited_loss(),
                Some(guest) if !left => guest.note_stable(),
                _ => {}
            }
        }
    }

    /// Destroys all guests, and waits until the daemon has none of their memory mapped.
    pub(super) fn end_kvm_guests(&mut self) -> Result<(), String> {
        (0..self.kvm.slots.len()).for_each(|at| self.destroy_kvm_guest(at));
        let end = self.now + PATIENCE;
        while !self.kvm.ended.is_empty() {
            if self.now > end {
                return Err("KVM guests that have ended are still served, or mapped".to_owned());
            }
            self.step()?;
        }
        Ok(())
    }
}

impl Site {
    /// Returns true if a guest may be refused for good: the disk has lost its end, or is another
    /// one after a restart.
    fn may_be_another_disk(&self) -> bool {
        self.oracle.end_and_resizes().1 > 0
            || matches!(self.config.place, Place::Memory(_) | Place::Overlay(_))
    }
}
