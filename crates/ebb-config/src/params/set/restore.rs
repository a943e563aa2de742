//! What was set at run time, for the same daemon after it has started anew in its process.

use std::collections::BTreeMap;

use super::super::definition::Key;
use super::super::error::ParameterError;
use super::{ParameterChange, ParameterOwner, Parameters, State, ValueCell, Values};

impl Parameters {
    /// The values that were set at run time, each as a change from the value of the configuration.
    pub fn set_at_run_time(&self) -> Vec<ParameterChange> {
        let state = self.lock();
        let set = |owner: ParameterOwner, values: &Values| -> Vec<_> {
            let changed = |cell: &&ValueCell| cell.own != cell.configured;
            let change = |cell: &ValueCell| {
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

    /// Sets such values again, those of an owner together where they fit. Returns the ones that cannot be set, and why: their
    /// owner does not exist, or the configuration has other values by now that they do not fit.
    pub fn restore(&self, set: &[ParameterChange]) -> Vec<(ParameterChange, ParameterError)> {
        let mut state = self.lock();
        let mut left: Vec<_> = set.chunk_by(|one, next| one.owner() == next.owner()).collect();
        // A value of one device may fit only after that of another one has been set.
        loop {
            let before = left.len();
            left.retain(|of_owner| state.put_again(of_owner).is_err());
            if left.len() == before {
                break;
            }
        }
        let mut refused = Vec::new();
        for change in left.into_iter().flatten() {
            if let Err(error) = state.put_again(std::slice::from_ref(change)) {
                refused.push((change.clone(), error));
            }
        }
        refused
    }
}

impl State {
    /// Sets values of one owner.
    fn put_again(&mut self, changes: &[ParameterChange]) -> Result<(), ParameterError> {
        let Some(owner) = changes.first().map(ParameterChange::owner) else { return Ok(()) };
        if let ParameterOwner::LimitGroup(group) = owner {
            self.add_limit_group(group)?;
        }
        let values: BTreeMap<Key, Option<u64>> =
            changes.iter().map(|change| (change.key, Some(change.to))).collect();
        self.put_all(owner, &values).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::configured::Configured;
    use super::super::super::table::MIN_RATIO;
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
        let refused: Vec<_> =
            refused.iter().map(|(change, _)| (change.owner(), change.to)).collect();
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

    #[test]
    fn what_fits_only_after_another_device_has_its_value_is_set_in_a_further_pass() {
        let devices = || {
            let bdis =
                ["a", "b"].map(|name| (name.to_owned(), BTreeMap::from([(MIN_RATIO.key(), 50)])));
            let configured = Configured { bdis: bdis.into(), ..Configured::default() };
            let parameters = Parameters::new(&configured);
            ["a", "b"].iter().for_each(|name| parameters.add_bdi(name));
            parameters
        };
        let before = devices();
        let (a, b) = (ParameterOwner::Bdi("a"), ParameterOwner::Bdi("b"));
        before.set("min_ratio", b, &json!(10)).unwrap();
        before.set("min_ratio", a, &json!(90)).unwrap();
        before.set("max_ratio", a, &json!(95)).unwrap();
        let after = devices();
        assert!(after.restore(&before.set_at_run_time()).is_empty());
        for (name, owner) in [("min_ratio", a), ("max_ratio", a), ("min_ratio", b)] {
            assert_eq!(after.get(name, owner).unwrap(), before.get(name, owner).unwrap(), "{name}");
        }
    }
}
