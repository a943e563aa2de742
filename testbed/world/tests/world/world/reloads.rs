//! A reload leaves volumes as they are whose definitions it does not change, or cannot put in
//! force, and their clients.

use std::sync::{Arc, Weak};

use ebb_volume::Volume;

use super::World;
use super::site::Site;
use crate::client::Client;

/// Volumes that the reload in progress must leave as they are, by site.
#[derive(Default)]
pub(super) struct KeptVolumes(Vec<(usize, Weak<Volume>)>);

impl KeptVolumes {
    /// A volume may change from now on.
    pub(super) fn forget(&mut self, site: usize) {
        self.0.retain(|(at, _)| *at != site);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl World {
    /// A reload begins: notes the volumes that it must leave as they are.
    pub(super) fn note_kept_volumes(&mut self) {
        let Some(daemon) = &self.daemon else { return };
        let stays = |(at, site): (usize, &Site)| {
            let volume = daemon.volume(&site.config.name)?;
            // One with a path at which there is nothing is served as before.
            let same = volume.cache_mode() == site.config.mode || site.config.wrong;
            let stays =
                same && (site.listed || site.run_time.is_some()) && site.overlay().is_none();
            stays.then(|| (at, Arc::downgrade(&volume)))
        };
        self.kept_volumes.0 = self.sites.iter().enumerate().filter_map(stays).collect();
        for change in &self.changes.changing {
            self.kept_volumes.forget(change.site);
        }
    }

    /// Checks that the reload in progress, or one that has just ended, has left them.
    pub(super) fn check_kept_volumes(&mut self) -> Result<(), String> {
        if self.kept_volumes.0.is_empty() {
            return Ok(());
        }
        let Some(daemon) = self.daemon.as_ref().filter(|daemon| !daemon.engine.is_stopping())
        else {
            self.kept_volumes.clear();
            return Ok(());
        };
        for (at, before) in &self.kept_volumes.0 {
            let name = &self.sites[*at].config.name;
            let now = daemon.volume(name);
            if now.as_ref().is_none_or(|now| !std::ptr::eq(Arc::as_ptr(now), before.as_ptr())) {
                let what = if now.is_some() { "replaced" } else { "withdrawn" };
                return Err(format!(
                    "volume {name} was {what} by a reload that did not change it, or could not"
                ));
            }
        }
        if !self.is_reloading() {
            self.kept_volumes.clear();
        }
        Ok(())
    }

    /// Checks that a connection that has ended was not ended by the daemon, while it serves the
    /// volume that it served when the client connected.
    pub(super) fn check_disconnection(&mut self, number: usize) -> Result<(), String> {
        let slot = &mut self.client_slots[number];
        let used = std::mem::take(&mut slot.used).upgrade();
        // The limit of clients may end one that has just agreed on its export.
        let is_used = |c: &&Client| c.is_serving() && c.answered > 0 && !c.may_be_ended;
        let client = slot.client.as_ref().filter(is_used);
        let Some(client) = client else {
            return Ok(());
        };
        let Some(daemon) = self.daemon.as_ref().filter(|daemon| !daemon.engine.is_stopping())
        else {
            return Ok(());
        };
        let now = daemon.volume(&self.sites[slot.site].config.name);
        match (used, now) {
            (Some(used), Some(now)) if Arc::ptr_eq(&used, &now) => Err(format!(
                "the daemon has disconnected client {number}, and serves its volume as before: {}",
                client.describe()
            )),
            _ => Ok(()),
        }
    }

    /// The file of a volume in the state directory is damaged when a reload reads it.
    pub(super) fn damage_file(&mut self) {
        let Some(state) = self.state.clone().filter(|_| !self.is_reloading()) else { return };
        let kept = self.sites.iter().filter_map(|site| site.run_time.as_ref()?.kept_name());
        let kept: Vec<&str> = kept.collect();
        if kept.is_empty() {
            return;
        }
        let name = self.random.pick(&kept).to_owned();
        let what = self.random.below(3);
        let Some(text) = state.text_of(&name) else { return };
        let damaged = match what {
            0 => "store = 3\n".to_owned(),
            1 => format!("{text}["),
            _ => text.replace("store", "stroe"),
        };
        self.note(format_args!("reload: the file of {name} is {damaged:?}"));
        state.set_text_of(&name, &damaged);
        self.read_configuration();
        state.set_text_of(&name, &text);
    }
}
