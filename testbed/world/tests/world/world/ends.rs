//! The end of a daemon (kill, power cut or shutdown) and of a world.

use std::sync::Weak;
use std::time::Duration;

use ebb_volume::Mode;
use ebbd::engine::StopReport;

use super::sharing::latest;
use super::site::Site;
use super::{AGAIN, BOUND, PATIENCE, World};
use crate::client::Client;
use crate::daemon::Place;
use crate::guest::Guest;
use crate::kvm::KvmGuest;
use crate::manner::Manner;
use crate::oracle::SECTOR;
use crate::remote::Remote;
use crate::state::KeptState;

impl World {
    /// Notes that a volume was closed; if `well`, all its data is stable.
    fn after_close(&mut self, at: usize, well: bool, abandoned: bool) {
        let site = &mut self.sites[at];
        site.notice();
        site.end_orphans();
        match (&site.config.place, well) {
            (Place::Memory(_), _) if self.handover.keeps_memory(at) => {}
            (Place::Memory(_), _) => site.oracle.wiped(),
            // This daemon did not flush data that an earlier daemon left in the page cache.
            (Place::Disk(_) | Place::Remote(..) | Place::Overlay(_), true) if abandoned => {}
            (Place::Disk(_) | Place::Remote(..) | Place::Overlay(_), true) => {
                let now = site.oracle.now();
                site.oracle.closed(now);
            }
            (Place::Disk(_) | Place::Remote(..) | Place::Overlay(_), false) => {
                site.oracle.crashed();
            }
        }
        if site.lost {
            // A disk reports a loss once: writes of earlier daemons may be missing, and no
            // successor knows that. The guests know it (`note_inherited_loss`).
            site.oracle.reopened();
        }
        (site.serving, site.lost) = (Weak::new(), false);
    }

    /// Kills the daemon; with `power` the host crashes, too.
    pub(super) fn kill(&mut self, power: bool) -> Result<(), String> {
        self.note(format_args!("{}", if power { "power cut" } else { "kill" }));
        self.check_ciphertext()?;
        self.make_last_calls();
        for site in &mut self.sites {
            site.loses &= site.serving.upgrade().is_some_and(|volume| volume.loses_by_kill());
        }
        let daemon = self.daemon.take().expect("the daemon is running");
        let remains = daemon.remains();
        drop(daemon);
        self.death = None;
        self.end_changes(power);
        self.disks.end_life();
        self.end_guests_daemon()?;
        self.end_kvm_daemon()?;
        if power {
            self.destroy_guests_host()?;
            self.destroy_kvm_guests()?;
        }
        (0..self.client_slots.len()).for_each(|number| self.leave(number));
        self.end_resizes(true);
        self.let_remotes_hear();
        self.end_overlays_daemon(power)?;
        for site in &mut self.sites {
            site.notice();
            site.end_orphans();
            // In this order: data that was written while flushes failed is lost, however old it is.
            let idle = site.was_idle(self.now);
            (site.serving, site.lost) = (Weak::new(), false);
            match &site.config.place {
                // The server is on another host and keeps the data that it received.
                Place::Remote(..) => {
                    if [site.mode, site.config.mode].contains(&Mode::Writeback) {
                        site.oracle.crashed();
                    }
                    site.oracle.reopened();
                }
                Place::Memory(_) => site.oracle.wiped(),
                Place::Disk(disk) => {
                    if power {
                        disk.power_cut();
                        site.forgive_losses();
                    }
                    // Data in the page cache survives the process.
                    let modes = [site.mode, site.config.mode];
                    if power || modes.contains(&Mode::Writeback) && !idle {
                        site.oracle.crashed();
                    }
                    site.oracle.reopened();
                }
                Place::Overlay(_) => {
                    // The map of the delta is in memory for a while, whatever the cache mode.
                    if power || !idle {
                        site.oracle.crashed();
                    }
                    site.oracle.reopened();
                }
            }
        }
        remains.check()
    }

    /// Shuts the daemon down. Volumes that the daemon lists count as lost; it must not list a
    /// volume whose disk is healthy.
    pub(super) fn stop(&mut self) -> Result<(), String> {
        self.end_daemon(false)
    }

    /// Has clients send no more requests (`quiet`), or send requests again.
    pub(super) fn quieten(&mut self, quiet: bool) {
        for client in self.client_slots.iter_mut().filter_map(|slot| slot.client.as_mut()) {
            client.quiet = quiet;
        }
    }

    /// Shuts the daemon down; with `keep` its connections stay.
    pub(super) fn end_daemon(&mut self, keep: bool) -> Result<(), String> {
        self.death = None;
        let drain = self.daemon().settings.drain;
        self.note(format_args!("stop within {drain:?}"));
        let engine = self.daemon().engine.clone();
        // Requests in flight may take as long as the bound, so a shorter stop may list their
        // volumes. Writes to parts of one block run in sequence, each a read and a write: on a slow
        // server they may take longer.
        let slow = |at: usize, site: &Site| {
            let slow = site.remote().is_some_and(Remote::is_slow);
            // The first flush of an overlay is one of each of its layers.
            let several = site.overlay().is_some();
            drain < BOUND && (slow || several || self.has_requests(at))
        };
        let well_since = |(at, site): (usize, &Site)| {
            latest(self.sharing(at).map(Site::well_since)).filter(|_| !slow(at, site))
        };
        let begun: Vec<_> = self.sites.iter().enumerate().map(well_since).collect();
        // True if a disk lost no data that this daemon has acknowledged and that was not stable
        // before. A volume that a reload has closed is not asked.
        let lacks_nothing = |site: &Site| site.serving.upgrade().is_none_or(|v| v.is_stable());
        let stable: Vec<_> = self.sites.iter().map(lacks_nothing).collect();
        let stopped = self.daemon().submit(|io| async move { engine.stop(&io).await });
        self.kvm.stopping = true;
        let report = self.wait_for(&stopped, drain + BOUND, "a shutdown")?;
        self.kvm.stopping = false;
        let daemon = self.daemon.take().expect("the daemon is running");
        // A flush in the background that ends with the daemon, after the volume was closed, loses
        // nothing.
        let lost = |site: &Site| self.disks.is_lost(&site.config.disk);
        let withdrawn: Vec<_> = self.sites.iter().map(|site| !site.listed && lost(site)).collect();
        daemon.engine.end_guests();
        if keep {
            self.inherited = daemon.leave_connections(&report);
            self.handover.note_report(&report);
        }
        let remains = daemon.remains();
        drop(daemon);
        self.receive_guests()?;
        self.receive_kvm_guests(true)?;
        self.note_guests_stable(&report);
        self.note_kvm_guests_stable(&report);
        self.end_guests_daemon()?;
        self.end_kvm_daemon()?;
        // Closed with a loss by a reload that ended during the shutdown: the reload reports that,
        // and the shutdown does not.
        let replaced = |site: &Site| self.disks.take_lost(&site.config.disk);
        let replaced: Vec<_> = self.sites.iter().map(replaced).collect();
        self.disks.end_life();
        self.leave_stopped(keep, &report, &replaced);
        self.end_resizes(true);
        self.let_remotes_hear();
        self.end_overlays_daemon(false)?;
        self.note(format_args!("stopped: {report:?}"));
        for at in 0..self.sites.len() {
            let (well_since, withdrawn, replaced) = (begun[at], withdrawn[at], replaced[at]);
            let site = &mut self.sites[at];
            site.lost |= withdrawn;
            let listed = report.unflushed.iter().find(|left| left.volume == site.config.name);
            // A volume that a reload replaced or withdrew was closed then: the state of its disk
            // now does not matter.
            let closed_well = site.changed.is_none_or(|at| !site.shaken && well_since <= Some(at));
            let well = well_since.is_some() && closed_well && !site.lost && !site.hung && !replaced;
            if let Some(listed) = listed.filter(|_| well) {
                return Err(format!("a shutdown lists a volume whose disk is healthy: {listed:?}"));
            }
            let served = site.serving.as_ptr() != Weak::new().as_ptr();
            // A flush that a stop cancels counts as failed; a volume that was given up lacks no
            // data all the same.
            let left = report.abandoned.contains(&site.config.name);
            // A flush that was in flight may have made all data stable before the stop's own flush
            // failed.
            let failing = report.failing.iter().any(|left| left.volume == site.config.name);
            let left = left || stable[at] || failing;
            if served && site.lost && !replaced && listed.is_none() && !left {
                return Err(format!(
                    "a shutdown does not list {}, which has lost data",
                    site.config.name
                ));
            }
            let told = listed.map(|left| left.why.clone());
            let (well, name) = (listed.is_none() && !replaced, site.config.name.clone());
            // A volume that was not served by this daemon was not flushed either.
            let abandoned = report.abandoned.contains(&name) || !served;
            let (lost, hung, clock) = (site.lost, site.hung, site.oracle.now());
            self.after_close(at, well, abandoned);
            self.note(format_args!(
                "volume {name} closed well: {well} {told:?}, given up or not served: {abandoned}, \
                 lost {lost}, hung {hung}, now {clock}"
            ));
        }
        self.end_changes(false);
        drop(stopped);
        remains.check()
    }

    /// Disconnects the clients of a stopped daemon; with `keep` only those that the next daemon
    /// does not continue.
    fn leave_stopped(&mut self, keep: bool, report: &StopReport, replaced: &[bool]) {
        for number in 0..self.client_slots.len() {
            let site = &self.sites[self.client_slots[number].site];
            let left = report.unflushed.iter().any(|left| left.volume == site.config.name)
                || report.abandoned.contains(&site.config.name);
            // Unread replies are those to changes that are lost, or may be lost.
            let is_memory = matches!(site.config.place, Place::Memory(_))
                && !self.handover.keeps_memory(self.client_slots[number].site);
            let replaced = replaced[self.client_slots[number].site];
            if !keep
                || left
                || is_memory
                || replaced
                || site.serving.as_ptr() == Weak::new().as_ptr()
            {
                self.leave(number);
            }
        }
    }

    /// Makes everything healthy, and waits until every request has completed.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        self.calm = true;
        self.death = None;
        if !self.disks.broker().works() {
            self.stop()?;
            self.start()?;
        }
        for site in &mut self.sites {
            site.heal();
            // Servers become healthy below, and their clients reconnect a while later.
            if site.remote().is_none() {
                (site.hangs, site.full) = (false, false);
                (site.fails, site.bad_syncs) = (false, false);
                site.judge(self.now);
            }
        }
        self.revive_remotes();
        self.guest_slots
            .iter_mut()
            .filter_map(|slot| slot.guest.as_mut())
            .for_each(|g| g.quiet = true);
        self.quieten_kvm_guests(true);
        for slot in &mut self.client_slots {
            if let Some(client) = &mut slot.client {
                client.deaf = false;
                client.quiet = true;
            }
        }
        for at in 0..self.sites.len() {
            self.sites[at].listed = true;
            self.disks.fail(&self.sites[at].config.disk, false);
        }
        // In this order: the memory of a connection must be at least the largest request.
        for name in ["max_clients", "connection_memory", "max_request"] {
            if !self.daemon().set(name, None) {
                return Err(format!("{name} cannot be reset"));
            }
        }
        self.state.iter().for_each(KeptState::heal);
        self.mount_all()?;
        if let Some(earlier) = self.reloading.take() {
            self.wait_for(&earlier, PATIENCE, "a reload")?;
        }
        // A reload during the start has no effect.
        let end = self.now + PATIENCE;
        while !self.daemon().has_tried_all() {
            if self.now > end {
                return Err(format!("the start does not end: {}", self.describe()));
            }
            self.step()?;
        }
        let reloaded = self.read_configuration();
        self.wait_for(&reloaded, PATIENCE, "a reload")?;
        self.reloading = None;
        self.define_all()?;
        self.end_operations()?;
        self.drain("requests")
    }

    /// Makes steps until no client and no guest has requests in flight.
    fn drain(&mut self, what: &str) -> Result<(), String> {
        let end = self.now + PATIENCE;
        let waits = |world: &World| {
            let guests = world.guest_slots.iter().filter_map(|slot| slot.guest.as_ref());
            let kvm = world.kvm.slots.iter().filter_map(|slot| slot.guest.as_ref());
            guests.map(Guest::open).chain(kvm.map(KvmGuest::open)).any(|open| open > 0)
                || world
                    .client_slots
                    .iter()
                    .any(|slot| slot.client.as_ref().is_some_and(|c| c.open() > 0))
        };
        while waits(self) {
            if self.now > end {
                return Err(format!("{what} do not complete: {}", self.describe()));
            }
            self.step()?;
        }
        Ok(())
    }

    /// Reads all volumes completely, each with one client.
    pub(super) fn check_all(&mut self) -> Result<(), String> {
        self.calm = true;
        (0..self.client_slots.len()).for_each(|number| self.leave(number));
        for at in 0..self.sites.len() {
            let name = self.sites[at].config.name.clone();
            // A volume that could not be opened for long is tried every 30 s.
            let end = self.now + PATIENCE + Duration::from_secs(30);
            while self.daemon().volume(&name).is_none() {
                if self.now > end {
                    return Err(format!("volume {name} is not served"));
                }
                self.step()?;
            }
            let end = self.now + PATIENCE;
            loop {
                let sectors = self.read_all(at)?;
                let Some(sectors) = sectors else { break };
                // The connection to a restarted server takes a while, and a shrink that was
                // submitted before may take effect now.
                let bytes = self.daemon().volume(&name).map_or(0, |volume| volume.size());
                let excused =
                    self.sites[at].remote().is_some() || bytes != (sectors * SECTOR) as u64;
                if !excused || self.now > end {
                    return Err(format!("volume {name} is healthy, but reads of it fail"));
                }
                let again = self.now + AGAIN;
                while self.now < again {
                    self.step()?;
                }
            }
        }
        self.check_snapshots()
    }

    /// Returns a client that sends only the requests it is given.
    fn reader(&mut self, at: usize) -> Client {
        let manner = Manner::told();
        let (stream, random) = (self.daemon().connect(), self.random.fork());
        Client::new(stream, &self.sites[at].config.name, manner, random, self.now)
    }

    /// Reads a volume completely. If some reads failed, returns the size that the client knows,
    /// sectors.
    fn read_all(&mut self, at: usize) -> Result<Option<usize>, String> {
        let number = self
            .client_slots
            .iter()
            .position(|slot| slot.site == at)
            .expect("every volume has a client");
        let (end, mut again) = (self.now + PATIENCE, self.now);
        loop {
            // Clients that disconnected while their requests waited for a server count as connected
            // until it has replied.
            if self.client_slots[number].client.is_none() && self.now >= again {
                again = self.now + AGAIN;
                self.client_slots[number].client = Some(self.reader(at));
            }
            if self.client_slots[number].client.as_ref().is_some_and(Client::is_serving) {
                break;
            }
            if self.now > end {
                return Err(format!("a client of volume {at} cannot connect"));
            }
            self.step()?;
        }
        let now = self.now;
        let sectors = self.client_slots[number].client.as_ref().map_or(0, Client::size);
        for first in (0..sectors).step_by(256) {
            let client = self.client_slots[number].client.as_mut().expect("it is connected");
            client.read(first, 256.min(sectors - first), &mut self.sites[at].oracle, now);
        }
        self.drain("reads of a whole volume")?;
        let failed = match &self.client_slots[number].client {
            None => return Err(format!("the client of volume {at} was disconnected")),
            Some(client) => client.succeeded < client.answered,
        };
        self.leave(number);
        Ok(failed.then_some(sectors))
    }
}
