//! Takeovers: a daemon stops with its connections kept, and its successor continues them. If the
//! successor ends before it uses them, the daemon serves again, with its stores in memory.

use std::sync::Weak;

use ebbd::engine::StopReport;

use super::{BOUND, ClientSlot, World};
use crate::daemon::Place;

/// The fate of a takeover.
#[derive(Default)]
pub(super) struct Handover {
    /// The successor will end before it serves.
    fails: bool,
    /// The volumes in memory whose content must last, by site.
    in_memory: Vec<usize>,
}

impl Handover {
    /// Whether the content of a volume in memory lasts when the daemon stops.
    pub(super) fn keeps_memory(&self, site: usize) -> bool {
        self.fails && self.in_memory.contains(&site)
    }

    /// A daemon that could not close a volume does not serve again.
    pub(super) fn note_report(&mut self, report: &StopReport) {
        self.fails &= report.is_clean();
    }
}

impl World {
    /// Determines whether a takeover fails, and which volumes are in memory then.
    fn plan_failure(&mut self) {
        self.handover = Handover::default();
        if self.is_reloading() || !self.random.chance(50) {
            return;
        }
        let daemon = self.daemon.as_ref().expect("the daemon is running");
        let in_memory = |at: &usize| {
            let site = &self.sites[*at];
            let served = daemon.volume(&site.config.name);
            matches!(site.config.place, Place::Memory(_)) && site.listed && served.is_some()
        };
        let in_memory = (0..self.sites.len()).filter(in_memory).collect();
        self.handover = Handover { fails: true, in_memory };
    }

    /// The successor opens the volumes, and ends before it uses the connections.
    fn fail_successor(&mut self) -> Result<(), String> {
        let kept = std::mem::take(&mut self.inherited);
        self.inherited = kept.copy_sockets();
        self.inherited.is_held = true;
        self.start()?;
        let calm = std::mem::replace(&mut self.calm, true);
        for _ in 0..self.random.below(200) {
            self.step()?;
        }
        self.calm = calm;
        self.note(format_args!("the successor ends, and its predecessor serves again"));
        let daemon = self.daemon.take().expect("it has begun");
        let remains = daemon.remains();
        drop(daemon);
        self.disks.end_life();
        self.let_remotes_hear();
        for site in &mut self.sites {
            site.notice();
            (site.serving, site.lost) = (Weak::new(), false);
        }
        self.inherited = kept;
        remains.check()
    }

    /// Hands the clients over to a successor, which starts at once.
    pub(super) fn hand_over(&mut self) -> Result<(), String> {
        let (engine, drain) = (self.daemon().engine.clone(), self.daemon().settings.drain);
        let flushed = self
            .daemon()
            .submit(move |io| async move { engine.flush_everything(&io, drain).await });
        let calm = std::mem::replace(&mut self.calm, true);
        for _ in 0..300 {
            if flushed.borrow().is_none() {
                self.step()?;
            }
        }
        // A store that hangs takes long, and a fast client would send requests all the time.
        self.quieten(true);
        let flushed = self.wait_for(&flushed, drain + BOUND, "writing all data")?;
        self.quieten(false);
        for _ in 0..self.random.below(30) {
            self.step()?;
        }
        self.calm = calm;
        self.note(format_args!("takeover: {flushed:?}"));
        if flushed.is_err() {
            return Ok(());
        }
        self.handing_over = true;
        self.daemon().server.keep_connections();
        self.plan_failure();
        self.end_daemon(true)?;
        self.outcome.continued += self.inherited.connections.len() as u64;
        self.client_slots
            .iter_mut()
            .filter_map(|slot| slot.client.as_mut())
            .for_each(|client| client.may_be_ended = true);
        // Those that were not kept notice that they were disconnected.
        for _ in 0..3 {
            for number in 0..self.client_slots.len() {
                self.serve(number)?;
            }
        }
        let exchanged = if self.handover.fails {
            self.fail_successor()?;
            Vec::new()
        } else {
            self.inherited.memory.clear();
            self.exchange_disks()
        };
        self.start()?;
        let calm = std::mem::replace(&mut self.calm, true);
        while !self.daemon().is_listening() {
            self.step()?;
        }
        (self.handing_over, self.steady) = (false, self.now);
        self.check_continued(&exchanged)?;
        self.handover = Handover::default();
        self.calm = calm;
        Ok(())
    }

    /// The successor may have another configuration: two volumes on each other's disks.
    fn exchange_disks(&mut self) -> Vec<usize> {
        let is_disk = |at: &usize| self.sites[*at].disk().is_some();
        let disks: Vec<usize> = (0..self.sites.len()).filter(is_disk).collect();
        if disks.len() < 2 || self.random.chance(80) {
            return Vec::new();
        }
        self.exchange_names(disks[0], disks[1]);
        for number in 0..self.client_slots.len() {
            let slot = &self.client_slots[number];
            let begins = slot.client.as_ref().is_some_and(|client| !client.is_serving());
            // It would ask the successor for a volume by the name that another has now.
            if begins && disks[..2].contains(&slot.site) {
                self.leave(number);
            }
        }
        disks[..2].to_vec()
    }

    /// Clients of healthy volumes that are on their disk stay connected, and get their replies;
    /// others are disconnected.
    fn check_continued(&mut self, exchanged: &[usize]) -> Result<(), String> {
        let stays = |slot: &ClientSlot| {
            let client = slot.client.as_ref()?;
            let served = self.daemon.as_ref()?.volume(&self.sites[slot.site].config.name);
            served.filter(|_| client.is_serving() && !client.deaf)?;
            if !self.handover.keeps_memory(slot.site) {
                self.sites[slot.site].disk()?;
            }
            self.healthy_since(slot.site)?;
            (!exchanged.contains(&slot.site)).then_some(())
        };
        let stay: Vec<bool> = self.client_slots.iter().map(|slot| stays(slot).is_some()).collect();
        self.quieten(true);
        let end = self.now + BOUND;
        let waits = |slot: &ClientSlot| slot.client.as_ref().is_none_or(|client| client.open() > 0);
        let waits = |world: &World| {
            world.client_slots.iter().zip(&stay).any(|(slot, stays)| *stays && waits(slot))
        };
        for _ in 0..20 {
            self.step()?;
        }
        while waits(self) && self.now < end {
            self.step()?;
        }
        for (number, slot) in self.client_slots.iter().enumerate() {
            match &slot.client {
                None if stay[number] => {
                    return Err(format!("client {number} was disconnected by the successor"));
                }
                Some(client) if stay[number] && client.open() > 0 => {
                    return Err(format!("the successor does not reply: {}", client.describe()));
                }
                Some(client) if exchanged.contains(&slot.site) && !client.deaf => {
                    return Err(format!("a client is on another disk: {}", client.describe()));
                }
                _ => {}
            }
        }
        self.quieten(false);
        Ok(())
    }
}
