//! What an operator should change about a volume that is served.

use ebb_api::stat::ProblemStat;
use ebb_config::{NO_BASE, VolumeConfig, VolumeOrigin};

use super::commit::{half_committed, half_committed_base, repeat_commit};
use super::flatten::is_flattened;
use super::{Engine, lock};

impl Engine {
    /// Warnings about a volume, each with a remedy.
    pub(crate) fn warnings_of(&self, name: &str) -> Vec<String> {
        let Some((config, origin)) = self.definition(name) else { return Vec::new() };
        let slot = lock(&self.slots).get(name).cloned();
        let format = slot.as_ref().and_then(|slot| slot.foreign_format());
        let base = self.warning_of_base(&config, &origin, || {
            let served = slot.as_ref().and_then(|slot| slot.served());
            served.is_some_and(|(volume, _)| is_flattened(&volume))
        });
        let unchanged = slot.as_ref().and_then(|slot| slot.unchanged());
        let unchanged = unchanged.map(|why| {
            format!(
                "the last reload did not change it, and it is served as before: {why}; `ebbd config diff` shows what the \
                 configuration has instead"
            )
        });
        let served = slot.as_ref().and_then(|slot| slot.served());
        let mixed = served.and_then(|(volume, _)| half_committed_base(&volume));
        let mixed = mixed.map(|base| format!("{}: {}", half_committed(&base), repeat_commit(name)));
        let idle = lock(&self.definitions).config.as_ref().map(|all| all.idle_entries(&config));
        mixed
            .into_iter()
            .chain(self.warning_of_mix(name))
            .chain(base)
            .chain(format.map(|format| format.warning()))
            .chain(unchanged)
            .chain(idle.into_iter().flatten())
            .collect()
    }

    /// The settings in force, or to be applied next: not the settings of the last reload if it
    /// could not be changed.
    pub(crate) fn in_force(&self, name: &str) -> Option<VolumeConfig> {
        let slot = lock(&self.slots).get(name).cloned();
        slot.and_then(|slot| slot.wanted())
    }

    /// The warning about a base into which a commit has begun and not ended.
    fn warning_of_mix(&self, name: &str) -> Option<String> {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let above = slots.iter().find(|slot| {
            slot.served().is_some_and(|(volume, config)| {
                config.base.as_deref() == Some(name) && half_committed_base(&volume).is_some()
            })
        })?;
        let above = above.name();
        Some(format!(
            "a commit of {above} into it has not ended, and alone it is a mix of old and new data: {}",
            repeat_commit(above)
        ))
    }

    /// The commits that have begun and not ended.
    pub(super) fn unfinished_commits(&self) -> Vec<ProblemStat> {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let unfinished = slots.iter().filter_map(|slot| {
            let (volume, config) = slot.served()?;
            let base = config.base.as_ref().and_then(|_| half_committed_base(&volume))?;
            let (name, kind) = (slot.name(), ProblemStat::COMMIT.to_owned());
            let (volume, message) = (Some(name.to_owned()), half_committed(&base));
            Some(ProblemStat { volume, message, kind, remedy: repeat_commit(name) })
        });
        unfinished.collect()
    }

    fn warning_of_base(
        &self,
        config: &VolumeConfig,
        origin: &VolumeOrigin,
        is_flattened: impl Fn() -> bool,
    ) -> Option<String> {
        let base = config.base.as_deref().filter(|base| *base != NO_BASE)?;
        if let VolumeOrigin::Configuration(place) = origin
            && is_flattened()
        {
            return Some(format!(
                "it no longer needs a base: set `base = \"{NO_BASE}\"` for it at {place}, remove `create` and `size`, and reload"
            ));
        }
        let (_, base_origin) = self.definition(base)?;
        if *origin == VolumeOrigin::RunTime || base_origin != VolumeOrigin::RunTime {
            return None;
        }
        Some(format!(
            "its base `{base}` is not kept, so that the next start cannot open it: keep it with `ebbd volume persist {base}`"
        ))
    }
}
