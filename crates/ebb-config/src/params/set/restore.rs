//! What was set at run time, for the same daemon after it has started anew in its process.

use std::collections::BTreeMap;

use super::super::definition::Key;
use super::{ParameterChange, ParameterOwner, Parameters, Values};

impl Parameters {
    /// The values that were set at run time, each as a change from the value of the configuration.
    pub fn set_at_run_time(&self) -> Vec<ParameterChange> {
        let state = self.lock();
        let set = |owner: ParameterOwner, values: &Values| -> Vec<_> {
            let changed = |cell: &&super::ValueCell| cell.own != cell.configured;
            let change = |cell: &super::ValueCell| {
                let own = cell.own?;
                Some(ParameterChange::new(cell.key, owner, cell.configured.unwrap_or(own), own))
            };
            values.0.iter().filter(changed).filter_map(change).collect()
        };
        let mut found = set(ParameterOwner::Daemon, &state.daemon);
        for (name, values) in &state.volumes {
            found.extend(set(ParameterOwner::Volume(name), values));
        }
        for (name, bdi) in &state.bdis {
            found.extend(set(ParameterOwner::Bdi(name), &bdi.values));
        }
        for (name, values) in &state.limit_groups {
            found.extend(set(ParameterOwner::LimitGroup(name), values));
        }
        found
    }

    /// Sets such values again, those of an owner together. Returns the ones that cannot be set: their owner does not exist, or the
    /// configuration has other values by now that they do not fit.
    pub fn restore(&self, set: &[ParameterChange]) -> Vec<ParameterChange> {
        let mut state = self.lock();
        let mut refused = Vec::new();
        for of_owner in set.chunk_by(|one, next| one.owner() == next.owner()) {
            let owner = of_owner[0].owner();
            if let ParameterOwner::LimitGroup(group) = owner {
                // If there are too many, putting the values fails below.
                let _ = state.add_limit_group(group);
            }
            let values: BTreeMap<Key, Option<u64>> =
                of_owner.iter().map(|change| (change.key, Some(change.to))).collect();
            if state.put_all(owner, &values).is_err() {
                refused.extend_from_slice(of_owner);
            }
        }
        refused
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::configured::Configured;
    use super::*;

    #[test]
    fn what_was_set_is_set_again_and_what_cannot_be_is_returned() {
        let volumes = |names: &[&str]| {
            let volumes = names.iter().map(|name| ((*name).to_owned(), BTreeMap::new())).collect();
            Parameters::new(&Configured { volumes, ..Configured::default() })
        };
        let before = volumes(&["disk", "gone"]);
        let (disk, gone) = (ParameterOwner::Volume("disk"), ParameterOwner::Volume("gone"));
        let group = ParameterOwner::LimitGroup("gold");
        for (name, owner, value) in [
            ("max_buffer_pages", ParameterOwner::Daemon, json!(77)),
            ("max_buffer_pages", disk, json!(7)),
            ("max_buffer_pages", gone, json!(8)),
            ("limit_iops", group, json!(500)),
        ] {
            before.set(name, owner, &value).unwrap();
        }
        let after = volumes(&["disk"]);
        let refused = after.restore(&before.set_at_run_time());
        let refused: Vec<_> = refused.iter().map(|change| (change.owner(), change.to)).collect();
        assert_eq!(refused, [(gone, 8)]);
        for (name, owner) in [
            ("max_buffer_pages", ParameterOwner::Daemon),
            ("max_buffer_pages", disk),
            ("limit_iops", group),
        ] {
            assert_eq!(after.get(name, owner).unwrap(), before.get(name, owner).unwrap());
        }
        assert_eq!(after.set_at_run_time().len(), 3);
    }
}
