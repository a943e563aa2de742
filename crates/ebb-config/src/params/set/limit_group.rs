//! The values of groups of limits. The daemon has no values that a group could use: without a value of its own a group has
//! the default, no limit.
//!
//! A group is known from when the configuration or a volume names it, or a value of it is set; the number of names is
//! bounded (`params/names.rs`).

use std::collections::BTreeMap;

use super::super::configured::{given, of_limits};
use super::super::definition::{Key, ParameterScope};
use super::super::error::{ParameterError, ParameterErrorKind as ErrorKind};
use super::super::names::{name_number, too_many_names};
use super::{Configured, ParameterChange, ParameterOwner, Parameters, State, Values, value_of};
use crate::{LimitsConfig, shorten, suggest};

impl Parameters {
    /// To be called when a volume names a group: from now on its values can be read and set.
    ///
    /// # Errors
    /// An invalid name, or too many groups.
    pub fn add_limit_group(&self, name: &str) -> Result<(), ParameterError> {
        self.lock().add_limit_group(name)
    }

    /// Changes the configured limits of a group. Values that were set at run time stay in force.
    pub fn configure_limit_group(&self, name: &str, limits: &LimitsConfig) {
        let mut state = self.lock();
        let own = given(of_limits(limits));
        let Some(values) = state.limit_groups.get_mut(name) else { return };
        let before = values.in_force();
        values.configure(|key| Some(value_of(&own, key)), |_| 0);
        let changes = values.changes(ParameterOwner::LimitGroup(name), &before);
        state.follow_and_notify(&changes);
    }

    /// The names of the known groups.
    pub fn limit_groups(&self) -> Vec<String> {
        self.lock().limit_groups.keys().cloned().collect()
    }
}

impl State {
    pub(super) fn add_limit_group(&mut self, name: &str) -> Result<(), ParameterError> {
        if self.limit_groups.contains_key(name) {
            return Ok(());
        }
        if name_number(name).is_none_or(|number| number == 0) {
            if let Some((message, remedy)) = too_many_names() {
                return Err(ParameterError::new(ErrorKind::InvalidValue, message, remedy));
            }
            let message = format!("`{}` cannot be the name of a group of limits", shorten(name));
            let remedy =
                "choose a name of 1 to 255 bytes without control characters, other than none";
            return Err(ParameterError::new(ErrorKind::InvalidValue, message, remedy.to_owned()));
        }
        let values = self.new_limit_group(&BTreeMap::new());
        self.limit_groups.insert(name.to_owned(), values);
        Ok(())
    }

    fn new_limit_group(&self, configured: &BTreeMap<Key, u64>) -> Values {
        let keys = self.table.keys_of(ParameterScope::LimitGroup);
        Values::new(keys, |key| Some(value_of(configured, key)), |_| 0)
    }

    pub(super) fn unknown_limit_group(&self, name: &str) -> ParameterError {
        let names = self.limit_groups.keys().map(String::as_str);
        let remedy = match self.limit_groups.is_empty() {
            true => "set a limit of it to make it".to_owned(),
            false => suggest(name, names, "the groups are"),
        };
        let message = format!("there is no group of limits `{}`", shorten(name));
        ParameterError::new(ErrorKind::UnknownLimitGroup, message, remedy)
    }

    pub(super) fn reload_limit_groups(&mut self, configured: &Configured) -> Vec<ParameterChange> {
        let (mut changes, none) = (Vec::new(), BTreeMap::new());
        for (name, values) in &mut self.limit_groups {
            let before = values.in_force();
            let new = configured.limit_groups.get(name).unwrap_or(&none);
            values.reload(|key| Some(value_of(new, key)), |_| 0);
            changes.extend(values.changes(ParameterOwner::LimitGroup(name), &before));
        }
        for (name, own) in &configured.limit_groups {
            if !self.limit_groups.contains_key(name) {
                let values = self.new_limit_group(own);
                self.limit_groups.insert(name.clone(), values);
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::table::{LIMIT_BANDWIDTH, LIMIT_GROUP, LIMIT_IOPS};
    use super::super::{Origin, ParameterOwner::LimitGroup, ParameterOwner::Volume};
    use super::*;

    fn configured(iops: Option<u64>) -> Configured {
        let own = iops.map(|iops| (LIMIT_IOPS.key(), iops));
        let limit_groups = own.map(|own| ("gold".to_owned(), BTreeMap::from([own])));
        let volumes = BTreeMap::from([("disk".to_owned(), BTreeMap::new())]);
        Configured {
            limit_groups: limit_groups.into_iter().collect(),
            volumes,
            ..Configured::default()
        }
    }

    #[test]
    fn a_group_is_made_by_setting_a_limit_and_a_mistake_makes_none() {
        let parameters = Parameters::new(&configured(None));
        let kind = |result: Result<_, ParameterError>| {
            result.map(|_: ParameterChange| ()).unwrap_err().kind
        };
        let set = |name: &str, group: &str, value| parameters.set(name, LimitGroup(group), &value);
        assert_eq!(kind(set("limit_bandwidth", "gold", json!(7))), ErrorKind::OutOfRange);
        assert_eq!(kind(set("limit_iops", "none", json!(7))), ErrorKind::InvalidValue);
        let unknown = parameters.get("limit_iops", LimitGroup("gold")).unwrap_err();
        assert_eq!(unknown.kind, ErrorKind::UnknownLimitGroup);
        let change = set("limit_bandwidth", "gold", json!("1M")).unwrap();
        assert_eq!((change.limit_group.as_deref(), change.to), (Some("gold"), 1 << 20));
        assert_eq!(parameters.handle(LIMIT_BANDWIDTH, LimitGroup("gold")).get(), 1 << 20);
        assert_eq!(kind(set("log", "gold", json!("info"))), ErrorKind::NotPerLimitGroup);
        assert_eq!(parameters.limit_groups(), ["gold"]);
        assert_eq!(parameters.list(LimitGroup("gold")).unwrap().len(), 7);
    }

    #[test]
    fn a_reload_changes_a_group_as_the_file_says_and_keeps_what_was_set() {
        let parameters = Parameters::new(&configured(Some(100)));
        let iops = parameters.handle(LIMIT_IOPS, LimitGroup("gold"));
        parameters.set("limit_iops", LimitGroup("gold"), &json!(200)).unwrap();
        assert_eq!(parameters.reload(&configured(Some(100))), []);
        assert_eq!(iops.get(), 200);
        assert_eq!(parameters.reload(&configured(Some(300))).len(), 1);
        assert_eq!(iops.get(), 300);
        parameters.reload(&configured(None));
        assert_eq!(iops.get(), 0);
    }

    #[test]
    fn kept_limits_of_a_group_become_its_configured_ones() {
        let parameters = Parameters::new(&configured(None));
        let set = |value| parameters.set("limit_iops", LimitGroup("gold"), &value).unwrap();
        let reading = || {
            let reading = parameters.get("limit_iops", LimitGroup("gold")).unwrap();
            (reading.value, reading.origin)
        };
        set(json!(7));
        let keep = |iops| {
            let limits = LimitsConfig { iops, ..LimitsConfig::default() };
            parameters.configure_limit_group("gold", &limits);
        };
        keep(Some(7));
        assert_eq!(reading(), (7, Origin::Configuration));
        set(json!(9));
        keep(None);
        assert_eq!(reading(), (9, Origin::RunTime), "what was set stays in force");
        parameters.unset("limit_iops", LimitGroup("gold")).unwrap();
        assert_eq!(reading(), (0, Origin::Default));
    }

    #[test]
    fn a_volume_names_its_group() {
        let parameters = Parameters::new(&configured(None));
        let group = parameters.handle(LIMIT_GROUP, Volume("disk"));
        parameters.set("limit_group", Volume("disk"), &json!("gold")).unwrap();
        assert_eq!(super::super::super::name_of(group.get()).as_deref(), Some("gold"));
        let reading = parameters.get("limit_group", Volume("disk")).unwrap();
        assert_eq!(
            (reading.origin, LIMIT_GROUP.definition().text(reading.value)),
            (Origin::RunTime, "gold".to_owned())
        );
        parameters.set("limit_group", Volume("disk"), &json!("none")).unwrap();
        assert_eq!(group.get(), 0);
    }
}
