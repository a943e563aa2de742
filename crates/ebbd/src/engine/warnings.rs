//! What an operator should change about a volume that is served.

use ebb_config::{NO_BASE, VolumeConfig, VolumeOrigin};

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
            format!("the last reload did not change it, and it is served as before: {why}")
        });
        base.into_iter().chain(format.map(|format| format.warning())).chain(unchanged).collect()
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
                "it needs no base any more: set `base = \"{NO_BASE}\"` for it at {place}, remove `create` and `size`, and reload"
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
