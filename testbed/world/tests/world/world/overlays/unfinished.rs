//! Overlays that are added at run time. A commit of one fails halfway, and its file cannot be
//! opened afterwards: only that file says that the base is a mix, so that the daemon must not
//! remove the volume.

use std::time::Instant;

use ebb_api::AddVolumeBody;
use ebb_control::VolumeChange;
use ebb_store::Faults;

use super::{End, Task};
use crate::random::Random;
use crate::world::World;
use crate::world::site::Site;

/// See the module.
#[derive(Default)]
pub(super) struct Unfinished {
    /// When a volume that is missing is added again.
    again: Option<Instant>,
    /// The overlay whose commit fails.
    overlay: Option<usize>,
    /// The base fails, and the file of the overlay cannot be opened.
    has_failed: bool,
}

impl World {
    /// Adds the overlays that are not in the configuration.
    pub(super) fn add_overlays(&mut self) {
        let (now, unfinished) = (self.now, &self.overlays.unfinished);
        let Some(daemon) = self.daemon.as_ref().filter(|daemon| !daemon.engine.is_stopping())
        else {
            return;
        };
        if unfinished.again.is_some_and(|again| now < again) {
            return;
        }
        let is_missing = |at: &usize| {
            let site = &self.sites[*at];
            let adds = self.overlays.operations.iter().any(|one| one.site == *at);
            site.at_run_time && !adds && daemon.engine.definition(&site.config.name).is_none()
        };
        let Some(at) = (0..self.sites.len()).find(is_missing) else { return };
        let site = &self.sites[at];
        let overlay = site.overlay().expect("it is an overlay");
        let body = AddVolumeBody {
            name: site.config.name.clone(),
            store: format!("file:{}", overlay.folder.path(&overlay.file).display()),
            base: Some(overlay.base.clone()),
            create: Some(true),
            cache: Some(site.config.mode.to_string()),
            ..AddVolumeBody::default()
        };
        self.overlays.unfinished.again = Some(now + crate::world::AGAIN);
        self.begin_operation(at, Task::AddOwn, VolumeChange::Add(body));
    }

    /// Plans that a commit fails that has begun.
    pub(super) fn plan_unfinished(&mut self, site: usize) {
        if self.sites[site].at_run_time && !self.calm && self.apart.chance(70) {
            self.overlays.unfinished.overlay = Some(site);
        }
    }

    /// The commit of an overlay copies: from now on its base takes no writes.
    pub(super) fn fail_commit(&mut self, site: usize) {
        let unfinished = &mut self.overlays.unfinished;
        if unfinished.overlay == Some(site) && !unfinished.has_failed {
            unfinished.has_failed = true;
            self.trouble(site, true);
        }
    }

    fn trouble(&mut self, site: usize, fails: bool) {
        let faults = Faults { writes: if fails { 1000 } else { 0 }, ..Faults::default() };
        let overlay = self.sites[site].overlay().expect("it is an overlay");
        let base = self.sites.iter().find(|base| base.config.name == overlay.base);
        base.expect("it has a base").set_faults(&faults, 20, 0);
        let name = self.sites[site].config.name.clone();
        self.disks.fail(&name, fails);
        self.note(format_args!("{name} cannot be opened, and its base not be written: {fails}"));
    }

    /// A commit has ended. If it has failed halfway, the volume is to be removed.
    pub(super) fn remove_unfinished(&mut self, site: usize) {
        let is_commit = |task: &Task| matches!(task, Task::Commit { .. });
        let mut others = self.overlays.operations.iter().filter(|one| one.site == site);
        let goes_on = others.any(|one| is_commit(&one.task));
        if self.overlays.unfinished.overlay != Some(site) || goes_on {
            return;
        }
        let (folder, file) = self.file_of(site);
        let name = self.sites[site].config.name.clone();
        let served = self.daemon.as_ref().is_some_and(|daemon| daemon.volume(&name).is_some());
        let removes = self.overlays.unfinished.has_failed
            && !served
            && folder.is_half_committed(&file)
            && self.begin_operation(site, Task::Remove, VolumeChange::Remove(name));
        if !removes {
            self.end_unfinished();
        }
    }

    /// An attempt to remove the volume has ended.
    pub(super) fn check_unfinished(&mut self, site: usize, end: &End) -> Result<(), String> {
        self.end_unfinished();
        match end {
            End::Done => {
                let name = &self.sites[site].config.name;
                Err(format!("{name} was removed, although its commit has not ended"))
            }
            End::Failed(_) | End::Killed => Ok(()),
        }
    }

    /// Everything can be opened and written again.
    pub(super) fn end_unfinished(&mut self) {
        if let Some(site) = self.overlays.unfinished.overlay.take()
            && std::mem::take(&mut self.overlays.unfinished.has_failed)
        {
            self.trouble(site, false);
        }
    }
}

/// A base, and an overlay that is not in the configuration.
pub(in crate::world) fn commit_sites(random: &mut Random) -> Vec<Site> {
    let mut sites = super::sites(random);
    sites.truncate(2);
    sites[1].at_run_time = true;
    sites
}
