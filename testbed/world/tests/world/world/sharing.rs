//! Volumes that share a backing device by configuration, and therefore its outages.

use std::time::Instant;

use ebb_volume::Mode;

use super::World;
use super::site::Site;

/// The latest of all; `None` if one is missing.
pub(super) fn latest(mut all: impl Iterator<Item = Option<Instant>>) -> Option<Instant> {
    all.try_fold(None, |latest, one| Some(latest.max(Some(one?))))?
}

impl World {
    /// A volume, and those that are configured to share its backing device: they share the device's limit of dirty
    /// data, which one of them uses up if its store takes no writes. Also the base below an overlay.
    pub(super) fn sharing(&self, at: usize) -> impl Iterator<Item = &Site> {
        let own = &self.sites[at];
        let writes_back = |site: &Site| [site.mode, site.config.mode].contains(&Mode::Writeback);
        let shares = move |site: &&Site| {
            let device = own.config.bdi.is_some() && site.config.bdi == own.config.bdi;
            device && writes_back(own) && writes_back(site)
        };
        let below = own.overlay().map(|overlay| overlay.base.as_str());
        let is_below = move |site: &&Site| below == Some(site.config.name.as_str());
        self.sites.iter().filter(move |site| shares(site) || is_below(site)).chain([own])
    }

    /// Since when requests to a volume complete within the bound, whatever happens to volumes that share nothing with it.
    pub(super) fn healthy_since(&self, at: usize) -> Option<Instant> {
        latest(self.sharing(at).map(|site| site.healthy))
    }
}
