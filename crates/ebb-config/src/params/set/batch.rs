//! Several changes of one owner at once: all are made, or none.

use std::collections::BTreeMap;

use serde_json::Value;

use super::super::definition::Key;
use super::super::error::ParameterError;
use super::{ParameterChange, ParameterOwner, Parameters, State, fits_pair};

impl Parameters {
    /// Changes parameters of one owner at run time; `null` goes back to the value of the configuration, or of the daemon.
    /// All changes are in force when this returns. Returns them in the order of their keys.
    ///
    /// # Errors
    /// As for [`Parameters::set`] and [`Parameters::unset`]; then nothing is changed.
    pub fn change(
        &self,
        owner: ParameterOwner,
        wanted: &BTreeMap<String, Value>,
    ) -> Result<Vec<ParameterChange>, ParameterError> {
        let mut state = self.lock();
        let mut values = BTreeMap::new();
        for (name, value) in wanted {
            let key = state.table.parse(name)?;
            let value = match value {
                Value::Null => None,
                value => Some(key.definition().parse(value)?),
            };
            values.insert(key, value);
        }
        if let ParameterOwner::LimitGroup(group) = owner
            && values.values().any(Option::is_some)
        {
            state.add_limit_group(group)?;
        }
        let mut new = BTreeMap::new();
        for (key, value) in values {
            new.insert(key, value.or(state.cell(key, owner)?.configured));
        }
        state.put_all(owner, &new)
    }
}

impl State {
    /// Puts values in force, all or none. With `None` a volume uses the daemon's value.
    pub(super) fn put_all(
        &mut self,
        owner: ParameterOwner,
        new: &BTreeMap<Key, Option<u64>>,
    ) -> Result<Vec<ParameterChange>, ParameterError> {
        let values = self.values(owner)?;
        let to = |key: Key| match new.get(&key) {
            Some(value) => value.unwrap_or_else(|| self.daemon.get(key)),
            None => values.get(key),
        };
        let mut changes = Vec::new();
        for key in new.keys() {
            let from = self.cell(*key, owner)?.live.get();
            fits_pair(*key, to(*key), to)?;
            if let ParameterOwner::Bdi(bdi) = owner {
                self.bdis_fit(*key, bdi, to(*key))?;
            }
            changes.push(ParameterChange::new(*key, owner, from, to(*key)));
        }
        for change in &changes {
            if let Some(cell) = self.cell_mut(change.key, owner) {
                cell.own = new.get(&change.key).copied().flatten();
                cell.live.store(change.to);
            }
        }
        self.follow_and_notify(&changes);
        Ok(changes)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::configured::Configured;
    use super::*;

    #[test]
    fn several_changes_are_made_together_or_not_at_all() {
        let volumes = BTreeMap::from([("disk".to_owned(), BTreeMap::new())]);
        let parameters = Parameters::new(&Configured { volumes, ..Configured::default() });
        let disk = ParameterOwner::Volume("disk");
        let change = |owner, values: Value| {
            parameters.change(owner, &serde_json::from_value(values).unwrap())
        };
        let get = |name: &str, owner| parameters.get(name, owner).unwrap().value;
        let made = change(disk, json!({ "limit_iops": 500, "limit_group": "gold" })).unwrap();
        assert_eq!(made.len(), 2);
        for bad in
            [json!({ "limit_bandwidth": 5 }), json!({ "limit_x": 5 }), json!({ "log": "info" })]
        {
            let mut wanted = json!({ "limit_iops": 7, "limit_group": null, "limit_read_iops": 3 });
            wanted.as_object_mut().unwrap().extend(bad.as_object().unwrap().clone());
            change(disk, wanted).unwrap_err();
            let now = ["limit_iops", "limit_read_iops"].map(|name| get(name, disk));
            assert_eq!((now, get("limit_group", disk) > 0), ([500, 0], true));
        }
        change(ParameterOwner::LimitGroup("new"), json!({ "limit_iops": 7, "limit_burst_ms": -1 }))
            .unwrap_err();
        assert!(parameters.limit_groups().is_empty());
        change(disk, json!({ "limit_iops": null, "limit_group": null })).unwrap();
        assert_eq!((get("limit_iops", disk), get("limit_group", disk)), (0, 0));
    }

    /// Values that fit each other only after the change, and values that do not.
    #[test]
    fn a_pair_is_checked_as_it_will_be() {
        let parameters = Parameters::new(&Configured::default());
        let change = |request: &str, memory: &str| {
            let wanted = json!({ "max_request": request, "connection_memory": memory });
            parameters.change(ParameterOwner::Daemon, &serde_json::from_value(wanted).unwrap())
        };
        assert_eq!(change("32M", "32M").unwrap().len(), 2);
        change("16M", "8M").unwrap_err();
        let now = parameters.get("max_request", ParameterOwner::Daemon).unwrap();
        assert_eq!(now.value, 32 << 20);
        change("64M", "64M").unwrap();
        change("1M", "1M").unwrap();
    }
}
