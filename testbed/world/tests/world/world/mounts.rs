//! File systems that are absent for a while, and mistakes in the configuration that are corrected
//! later.
//!
//! All volumes are configured with `create`, and the daemon has a state directory. The file of a
//! volume that was served exists, so that nothing may be made in its place, whatever is mounted
//! when a daemon starts or reloads.

use std::sync::{Arc, Weak};
use std::time::Duration;

use ebb_volume::Volume;
use ebbd::engine::VolumePhase;

use super::World;
use super::site::{Site, disk_site};
use crate::daemon;
use crate::random::Random;

/// After so long each volume that can be opened is served: the longest pause between two attempts.
const RETRIED: Duration = Duration::from_secs(40);

/// Texts that are no valid configuration.
const MISTAKES: [&str; 5] = [
    "listen = 3\n",
    "[volume.v0\nstore = \"file:/world/v0\"\n",
    "[volume.v0]\nstore = \"file:/world/v0\"\ncache = \"sometimes\"\n",
    "[volume.v0]\ncache = \"off\"\n",
    "[volume.v0]\nstore = \"file:/world/v0\"\nsiez = 4096\n",
];

/// The file system of a volume, as far as it may be absent.
#[derive(Debug, Default)]
pub(super) struct Mounting {
    absent: bool,
    /// What was served when it was unmounted, or its path became wrong, and goes on.
    open: Weak<Volume>,
    /// Its path was wrong when the daemon started, and is.
    pub(super) wrong_at_start: bool,
}

/// Volumes whose files do not exist yet.
pub(super) fn sites(random: &mut Random) -> Vec<Site> {
    let count = random.between(1, 3);
    let site = |number| {
        let mut site = disk_site(&format!("v{number}"), random);
        site.config.create = true;
        site
    };
    (0..count).map(site).collect()
}

impl World {
    /// The file system of a volume or of the state directory is unmounted, or mounted again.
    pub(super) fn mount(&mut self) -> Result<(), String> {
        if self.random.chance(20) {
            let absent = self.random.chance(50);
            let state = self.state.as_ref().expect("it has one");
            state.set_mounted(!absent)?;
            self.state_absent = absent;
            self.note(format_args!("the state directory is absent: {absent}"));
            return Ok(());
        }
        let at = self.random.index(self.sites.len());
        let absent = self.random.chance(60);
        let volume = self.daemon.as_ref().and_then(|d| d.volume(&self.sites[at].config.name));
        let site = &mut self.sites[at];
        if absent == site.mounting.absent {
            return Ok(());
        }
        if absent {
            // One that was never served may have no record.
            let Some(volume) = volume.filter(|_| !site.config.wrong) else { return Ok(()) };
            site.mounting.open = Arc::downgrade(&volume);
        }
        site.mounting.absent = absent;
        self.disks.set_mounted(&site.config.disk, !absent);
        self.note(format_args!("disk {at} is absent: {absent}"));
        Ok(())
    }

    /// A successor wants to take over while the file system of the state directory is not mounted:
    /// it would not have the volumes that are kept there.
    pub(super) fn try_other_state(&mut self) -> Result<(), String> {
        let state = self.state.clone().expect("it has one");
        let busy = |at: usize| self.changes.changing.iter().any(|change| change.site == at);
        let keeps = |(at, site): (usize, &Site)| {
            !busy(at) && site.run_time.as_ref().is_some_and(|own| own.kept_name().is_some())
        };
        let keeps = self.sites.iter().enumerate().any(keeps);
        let engine = &self.daemon().engine;
        if let Err(refused) = engine.must_share_state(&state.as_found(true)) {
            return Err(format!("a successor cannot be added: {}", refused.body.message));
        }
        if keeps && engine.must_share_state(&state.as_found(false)).is_ok() {
            return Err("a successor without the state directory is accepted".to_owned());
        }
        Ok(())
    }

    /// The configuration gets a mistake: one that the daemon refuses, or a path at which there is
    /// nothing, which a later call corrects.
    pub(super) fn mistake(&mut self) -> Result<(), String> {
        if self.is_reloading() {
            return Ok(());
        }
        if self.random.chance(60) {
            let at = self.random.index(self.sites.len());
            let wrong = !self.sites[at].config.wrong;
            self.sites[at].config.wrong = wrong;
            self.sites[at].mounting.wrong_at_start = false;
            self.note(format_args!("reload: the path of disk {at} is wrong: {wrong}"));
            self.read_configuration();
            return Ok(());
        }
        let state = self.state.clone().expect("it has a configuration file");
        let before = self.phases();
        self.note_kept_volumes();
        let text = self.random.pick(&MISTAKES);
        self.note(format_args!("reload of {text:?}"));
        state.write_configuration(text);
        self.daemon().engine.begin_reading();
        let read = state.load_again(true);
        self.daemon().engine.end_reading();
        let settings = self.daemon().settings.clone();
        state.write_configuration(&daemon::configuration(&settings, &self.listed()));
        if read.is_ok() {
            return Err(format!("a configuration with a mistake was accepted: {text:?}"));
        }
        if self.phases() != before {
            return Err("a reload that was refused has changed volumes".to_owned());
        }
        Ok(())
    }

    /// The volumes of the daemon, and what each of them is.
    fn phases(&self) -> Vec<(String, VolumePhase, usize)> {
        let states = self.daemon.as_ref().map(|daemon| daemon.engine.states()).unwrap_or_default();
        let one = |state: ebbd::engine::VolumeState| {
            let volume = state.volume.as_ref().map_or(0, |volume| Arc::as_ptr(volume) as usize);
            (state.name, state.phase, volume)
        };
        states.into_iter().map(one).collect()
    }

    /// Waits until each volume was tried again: it is served exactly if its file can be opened.
    pub(super) fn check_health(&mut self) -> Result<(), String> {
        let calm = std::mem::replace(&mut self.calm, true);
        if let Some(reloading) = self.reloading.take() {
            self.wait_for(&reloading, super::PATIENCE, "a reload")?;
        }
        if self.unread && !self.state_absent {
            let reloading = self.read_configuration();
            self.wait_for(&reloading, super::PATIENCE, "a reload")?;
            self.reloading = None;
        }
        if self.unread {
            self.calm = calm;
            return Ok(());
        }
        self.quieten(true);
        self.wait_until(self.now + RETRIED)?;
        self.quieten(false);
        self.calm = calm;
        let phases = self.phases();
        for (at, site) in self.sites.iter().enumerate() {
            let found = phases.iter().find(|(name, ..)| *name == site.config.name);
            let is_open = self.daemon.as_ref().and_then(|d| d.volume(&site.config.name));
            let phase = found.map(|(_, phase, _)| *phase);
            // Whether a new file may be made, the state directory says.
            let is_new = self.state_absent && !self.disks.is_made(&site.config.disk);
            let can_open = !site.mounting.absent && !site.config.wrong && !is_new;
            let stays = is_open.as_ref().is_some_and(|volume| {
                std::ptr::eq(site.mounting.open.as_ptr(), Arc::as_ptr(volume))
            });
            // A reload whose new path cannot be opened leaves the volume as it is; it may have been
            // opened meanwhile.
            let stays =
                stays || site.config.wrong && is_open.is_some() && !site.mounting.wrong_at_start;
            let expected = match (site.listed, can_open || stays) {
                (false, _) => None,
                (true, true) => Some(VolumePhase::Serving),
                (true, false) => Some(VolumePhase::Failed),
            };
            if phase != expected || is_open.is_some() != (expected == Some(VolumePhase::Serving)) {
                return Err(format!(
                    "volume {at} is {phase:?}, not {expected:?}: absent {}, wrong path {}, state directory absent {}",
                    site.mounting.absent, site.config.wrong, self.state_absent
                ));
            }
        }
        self.note(format_args!("each volume is what its disk lets it be"));
        Ok(())
    }

    /// Everything is mounted, and correct.
    pub(super) fn mount_all(&mut self) -> Result<(), String> {
        self.state_absent = false;
        self.state.iter().try_for_each(|state| state.set_mounted(true))?;
        for site in &mut self.sites {
            (site.mounting.absent, site.config.wrong) = (false, false);
            self.disks.set_mounted(&site.config.disk, true);
        }
        Ok(())
    }
}
