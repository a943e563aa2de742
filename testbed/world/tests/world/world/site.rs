//! A volume of a world, its disk, and the world's knowledge of both.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use ebb_mem::clock;
use ebb_store::{Faults, TestStore};
use ebb_volume::{Mode, Volume};
use ebbd::engine::{StableFailure, StopReport};

use super::changes::RunTime;
use super::mounts::Mounting;
use super::overlays::IDLE;
use super::remotes;
use crate::daemon::{Later, Overlay, Place, Wanted};
use crate::oracle::{Oracle, SECTOR, Writing};
use crate::random::Random;
use crate::remote::Remote;

/// A volume, its disk, and the world's knowledge of both.
pub(super) struct Site {
    pub(super) config: Wanted,
    pub(super) oracle: Oracle,
    /// Number of losses of the disk that were reported to the oracle.
    pub(super) losses: u64,
    /// The volume that is served now.
    pub(super) serving: Weak<Volume>,
    /// The cache mode of that volume.
    pub(super) mode: Mode,
    /// A kill would have lost acknowledged writes in the last step.
    pub(super) loses: bool,
    /// Flushes of the volume fail, since data may be lost.
    pub(super) lost: bool,
    /// At the last look, the disk had a loss that no flush had reported.
    pub(super) owed: bool,
    /// The time at which the last reload was submitted, by the oracle's clock.
    pub(super) reloaded: u64,
    /// The size of the volume before the last shrink.
    pub(super) before: usize,
    /// The size of the volume before the last resize.
    pub(super) ended: usize,
    /// A resize in flight.
    pub(super) resizing: Option<Later<Result<u64, String>>>,
    /// The time at which the first reload of this life was submitted.
    pub(super) changed: Option<Instant>,
    /// The volume is in the configuration.
    pub(super) listed: bool,
    /// Changes of disconnected clients, which the server may still carry out.
    pub(super) orphans: Vec<Writing>,
    /// The store does not respond.
    pub(super) hangs: bool,
    /// The store did not respond at some time in this life.
    pub(super) hung: bool,
    /// The store is full.
    pub(super) full: bool,
    /// The disk fails writes or flushes.
    pub(super) fails: bool,
    /// Flushes of the folder may fail.
    pub(super) bad_syncs: bool,
    /// The time since which the disk can do everything that a shutdown needs.
    pub(super) well_since: Option<Instant>,
    /// The disk lost data in this life.
    pub(super) shaken: bool,
    /// The time since which the disk has been healthy; `None` while it is not.
    pub(super) healthy: Option<Instant>,
    /// The time since which no request has been in flight.
    pub(super) before_idle: Option<Instant>,
    /// A resize of this overlay has failed, or not ended: its header may have either size.
    pub(super) is_unsure: bool,
    /// The time at which the last operation ended that copies into this overlay, by the oracle's
    /// clock; `u64::MAX` while there is such an operation.
    pub(super) filled: u64,
    /// The volume was not served since the world began, or since its file was moved away.
    pub(super) is_anew: bool,
    /// The names of a volume that is added and removed at run time.
    pub(super) run_time: Option<RunTime>,
    /// The key of an encrypted volume.
    pub(super) key: Option<u64>,
    pub(super) mounting: Mounting,
    /// The overlay is not in the configuration: it is added after each start.
    pub(super) at_run_time: bool,
}

impl Site {
    pub(super) fn disk(&self) -> Option<&Arc<TestStore>> {
        match &self.config.place {
            Place::Disk(disk) => Some(disk),
            Place::Memory(_) | Place::Remote(..) | Place::Overlay(_) => None,
        }
    }

    pub(super) fn overlay(&self) -> Option<&Overlay> {
        match &self.config.place {
            Place::Overlay(overlay) => Some(overlay),
            Place::Disk(_) | Place::Memory(_) | Place::Remote(..) => None,
        }
    }

    /// The disks that the volume is on. The disks of an overlay are files.
    pub(super) fn stores(&self) -> Vec<Arc<TestStore>> {
        match &self.config.place {
            Place::Disk(disk) => vec![disk.clone()],
            Place::Overlay(overlay) => overlay.folder.disks(),
            Place::Memory(_) | Place::Remote(..) => Vec::new(),
        }
    }

    /// Returns true if the volume may have this cache mode.
    pub(super) fn may_have(&self, mode: Mode) -> bool {
        match self.config.place {
            Place::Disk(_) | Place::Remote(..) => true,
            Place::Overlay(_) => mode != Mode::None,
            Place::Memory(_) => false,
        }
    }

    /// Returns true if the volume is on a disk of the world.
    pub(super) fn is_on_a_disk(&self) -> bool {
        matches!(self.config.place, Place::Disk(_) | Place::Overlay(_))
    }

    /// Sets how the disk carries out requests from now on.
    pub(super) fn set_faults(&self, faults: &Faults, latency: u64, waits: u32) {
        match &self.config.place {
            Place::Overlay(overlay) => overlay.folder.set_faults(faults, latency, waits),
            _ => self.disk().into_iter().for_each(|disk| {
                disk.faults(faults);
                disk.latency_us.store(latency, Ordering::Relaxed);
                disk.waits.store(waits, Ordering::Relaxed);
            }),
        }
    }

    /// Has the disk complete no request, or complete requests again.
    pub(super) fn set_hangs(&self, hangs: bool) {
        match &self.config.place {
            Place::Overlay(overlay) => overlay.folder.set_hangs(hangs),
            _ if hangs => self.disk().into_iter().for_each(|disk| disk.hang()),
            _ => self.disk().into_iter().for_each(|disk| disk.release()),
        }
    }

    /// Limits the room of the disk, or removes the limit.
    pub(super) fn set_room(&self, room: Option<u64>) {
        match &self.config.place {
            Place::Overlay(overlay) => overlay.folder.set_room(room),
            _ => self.disk().into_iter().for_each(|disk| disk.set_room(room)),
        }
    }

    /// Has the disk carry out all requests.
    pub(super) fn heal(&self) {
        match &self.config.place {
            Place::Disk(disk) => {
                disk.faults(&Faults::default());
                disk.latency_us.store(20, Ordering::Relaxed);
            }
            Place::Overlay(overlay) => {
                overlay.folder.set_faults(&Faults::default(), 20, 0);
                overlay.folder.set_bad_syncs(0);
            }
            Place::Memory(_) | Place::Remote(..) => return,
        }
        self.set_room(None);
        self.set_hangs(false);
    }

    /// Returns true if the kernel has all acknowledged data, since no request was in flight for
    /// long enough and the disk was well.
    pub(super) fn was_idle(&self, now: Instant) -> bool {
        let idle = |since: Instant| {
            now - since >= IDLE && self.well_since().is_some_and(|well| well <= since)
        };
        !self.lost && self.before_idle.is_some_and(idle)
    }

    /// Number of losses of the disk.
    fn count_losses(&self) -> u64 {
        self.stores().iter().map(|disk| disk.losses.load(Ordering::SeqCst)).sum()
    }

    /// Counts all losses until now as reported.
    pub(super) fn forgive_losses(&mut self) {
        self.losses = self.count_losses();
    }

    pub(super) fn remote(&self) -> Option<&Remote> {
        match &self.config.place {
            Place::Remote(remote, _) => Some(remote),
            Place::Disk(_) | Place::Memory(_) | Place::Overlay(_) => None,
        }
    }

    /// Determines the time since which the disk is healthy.
    pub(super) fn judge(&mut self, now: Instant) {
        let sound = !self.hangs && !self.full;
        self.healthy = sound.then(|| self.healthy.unwrap_or(now));
        let well = sound && !self.fails && !self.bad_syncs;
        self.well_since = well.then(|| self.well_since.unwrap_or(now));
    }

    /// Returns the time since which flushes are certain to succeed; `None` if they may fail.
    pub(super) fn well_since(&self) -> Option<Instant> {
        self.well_since.filter(|_| !self.owes_a_failure())
    }

    /// Returns true if the disk has a loss that no flush has reported yet.
    pub(super) fn owes_a_failure(&self) -> bool {
        self.stores().iter().any(|disk| disk.owes_a_failure())
    }

    /// Returns true if the last flush of a stop has failed over a loss, so that only writes of
    /// earlier daemons may be lost.
    pub(super) fn has_inherited_loss(&self, report: &StopReport) -> bool {
        let is_this = |left: &&StableFailure| left.volume == self.config.name;
        let failing = report.failing.iter().find(is_this);
        self.lost && failing.is_some_and(|left| !left.knows_earlier)
    }

    /// Reports to the oracle that a resize has ended: with its result, or with the end of the
    /// daemon.
    pub(super) fn end_resize(&mut self, life_ends: bool) -> Option<String> {
        let answer = self.resizing.as_ref()?.borrow_mut().take();
        if answer.is_none() && !life_ends {
            return None;
        }
        self.resizing = None;
        let now = usize::try_from(self.disk()?.size()).unwrap() / SECTOR;
        self.oracle.resized(now);
        Some(format!("{} has {now} sectors: {answer:?}", self.config.name))
    }

    /// Ends the changes of disconnected clients.
    pub(super) fn end_orphans(&mut self) {
        for writing in self.orphans.drain(..) {
            self.oracle.end(writing, false);
        }
    }

    /// Notes that flushes of the volume fail, or no longer fail. If they fail, blocks that an
    /// overlay has begun may be lost, and read as before. An overlay with a writeback cache notices
    /// the loss of its file before the loss of its blocks, and one with several layers notices the
    /// loss of each layer by itself.
    pub(super) fn notice_loss(&mut self, is_lost: bool) {
        let begins = is_lost && !self.lost;
        self.lost = is_lost;
        let owes = self.owes_a_failure();
        let owed = std::mem::replace(&mut self.owed, owes);
        match (self.overlay(), self.mode) {
            (Some(_), Mode::Writeback) if is_lost => self.oracle.lost(),
            (Some(_), _) if begins => self.oracle.lost_knowingly(),
            (Some(_), _) if is_lost && owed => self.oracle.lost(),
            _ => {}
        }
    }

    /// Reports losses of the disk to the oracle.
    pub(super) fn notice(&mut self) {
        let losses = self.count_losses();
        if losses != self.losses {
            self.losses = losses;
            self.shaken = true;
            match self.config.place {
                Place::Overlay(_) => {
                    let filled = self.filled > self.oracle.last_flush();
                    self.oracle.lost_blocks(filled);
                }
                _ => self.oracle.lost(),
            }
        }
    }
}

pub(super) fn site(number: u64, random: &mut Random) -> Site {
    let name = format!("v{number}");
    let sectors = random.pick(&[512, 2048, 2055, 8192]);
    let bytes = (sectors * SECTOR) as u64;
    let mode = random.pick(&[Mode::None, Mode::Writethrough, Mode::Writeback, Mode::Writeback]);
    let (place, mode) = if random.chance(12) {
        (Place::Memory(bytes), Mode::None)
    } else if random.chance(35) {
        (remotes::place(bytes, random), mode)
    } else {
        let disk = TestStore::new(bytes, random.next());
        disk.latency_us.store(random.pick(&[0, 20, 100, 1000]), Ordering::Relaxed);
        (Place::Disk(Arc::new(disk)), mode)
    };
    let oracle = Oracle::new(&name, sectors);
    let bdi = random.chance(30).then(|| "shared".to_owned());
    Site::of(Wanted { bdi, ..Wanted::new(&name, place, mode) }, oracle)
}

/// A volume on a disk.
pub(super) fn disk_site(name: &str, random: &mut Random) -> Site {
    disk_site_of(name, &[512, 2048, 2055], random)
}

/// As [`disk_site`], of one of these sizes in sectors.
pub(super) fn disk_site_of(name: &str, sizes: &[usize], random: &mut Random) -> Site {
    let (name, sectors) = (name.to_owned(), random.pick(sizes));
    let disk = TestStore::new((sectors * SECTOR) as u64, random.next());
    disk.latency_us.store(random.pick(&[0, 20, 100, 1000]), Ordering::Relaxed);
    let mode = random.pick(&[Mode::None, Mode::Writethrough, Mode::Writeback, Mode::Writeback]);
    let (oracle, place) = (Oracle::new(&name, sectors), Place::Disk(Arc::new(disk)));
    Site::of(Wanted::new(&name, place, mode), oracle)
}

impl Site {
    pub(super) fn of(config: Wanted, oracle: Oracle) -> Site {
        let sectors = oracle.sectors();
        Site {
            config,
            oracle,
            losses: 0,
            serving: Weak::new(),
            mode: Mode::None,
            loses: false,
            lost: false,
            owed: false,
            reloaded: 0,
            before: sectors,
            ended: sectors,
            resizing: None,
            changed: None,
            listed: true,
            orphans: Vec::new(),
            hangs: false,
            hung: false,
            full: false,
            fails: false,
            bad_syncs: false,
            well_since: Some(clock::now()),
            shaken: false,
            healthy: Some(clock::now()),
            before_idle: None,
            is_unsure: false,
            filled: 0,
            is_anew: true,
            run_time: None,
            key: None,
            mounting: Mounting::default(),
            at_run_time: false,
        }
    }
}
