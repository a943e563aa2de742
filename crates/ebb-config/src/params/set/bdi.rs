//! The values of backing devices. The daemon has no values that a device could use: without a value of
//! its own a device has the default.
//!
//! # Invariants
//! - The known devices are those in the configuration, and those with volumes.
//! - The `min_ratio` of a device is at most its `max_ratio`, and those of all known devices together
//!   are at most the whole, so that the controller accepts the values in force in some order.

use std::collections::BTreeMap;

use super::super::definition::{Key, ParameterScope};
use super::super::error::{ParameterError, ParameterErrorKind as ErrorKind};
use super::super::table::{MAX_RATIO, MIN_RATIO};
use super::{Configured, ParameterChange, ParameterOwner, Parameters, State, Values, value_of};
use crate::{Percent, shorten, suggest};

/// The values of one backing device.
#[derive(Debug)]
pub(super) struct BdiValues {
    pub(super) values: Values,
    /// Whether the configuration has values for it.
    is_configured: bool,
    /// Whether it has volumes.
    has_volumes: bool,
}

impl Parameters {
    /// To be called when a backing device has its first volume: from now on its values can be read and set.
    pub fn add_bdi(&self, name: &str) {
        let mut state = self.lock();
        let new = state.new_bdi(&BTreeMap::new());
        state.bdis.entry(name.to_owned()).or_insert(new).has_volumes = true;
    }

    /// To be called when backing devices have no volumes any more: the values set for them are discarded. All devices
    /// are visited once, whatever the number of names.
    pub fn remove_bdis<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        let mut state = self.lock();
        let before = state.bdis_in_force();
        let keys: Vec<Key> = state.table.keys_of(ParameterScope::Bdi).collect();
        for name in names {
            let Some(bdi) = state.bdis.get_mut(name) else { continue };
            bdi.has_volumes = false;
            bdi.values.reset(&keys);
            if !bdi.is_configured {
                state.bdis.remove(name);
            }
        }
        state.settle_bdis();
        let changes = state.bdi_changes(&before);
        state.follow_and_notify(&changes);
    }

    /// The names of backing devices with volumes.
    pub fn bdis_with_volumes(&self) -> Vec<String> {
        let state = self.lock();
        let used = state.bdis.iter().filter(|(_, bdi)| bdi.has_volumes);
        used.map(|(name, _)| name.clone()).collect()
    }

    /// The names of configured backing devices without volumes.
    pub fn bdis_without_volumes(&self) -> Vec<String> {
        let state = self.lock();
        let unused = state.bdis.iter().filter(|(_, bdi)| !bdi.has_volumes);
        unused.map(|(name, _)| name.clone()).collect()
    }
}

impl State {
    fn new_bdi(&self, configured: &BTreeMap<Key, u64>) -> BdiValues {
        let keys = self.table.keys_of(ParameterScope::Bdi);
        let values = Values::new(keys, |key| Some(value_of(configured, key)), |_| 0);
        BdiValues { values, is_configured: !configured.is_empty(), has_volumes: false }
    }

    pub(super) fn unknown_bdi(&self, name: &str) -> ParameterError {
        let names = self.bdis.keys().map(String::as_str);
        let remedy = match self.bdis.is_empty() {
            true => {
                "there is none yet: the first volume with `cache = \"writeback\"` makes one".into()
            }
            false => suggest(name, names, "the backing devices are"),
        };
        let message = format!("there is no backing device `{}`", shorten(name));
        ParameterError::new(ErrorKind::UnknownBdi, message, remedy)
    }

    /// Checks a device's `value` for `key` against those of other devices.
    pub(super) fn bdis_fit(&self, key: Key, bdi: &str, value: u64) -> Result<(), ParameterError> {
        let left = whole().saturating_sub(self.reserved(Some(bdi)));
        if key != MIN_RATIO.key() || value <= left {
            return Ok(());
        }
        let text = |value| key.definition().text(value);
        Err(ParameterError::new(
            ErrorKind::Conflict,
            format!("{} is more than the other devices leave of 100", text(value)),
            format!("choose {} or less, or lower the min_ratio of another device", text(left)),
        ))
    }

    /// The sum of `min_ratio` of all devices, except one.
    fn reserved(&self, except: Option<&str>) -> u64 {
        let others = self.bdis.iter().filter(|(name, _)| Some(name.as_str()) != except);
        others.fold(0, |sum, (_, bdi)| sum.saturating_add(bdi.values.get(MIN_RATIO.key())))
    }

    pub(super) fn reload_bdis(&mut self, configured: &Configured) -> Vec<ParameterChange> {
        let before = self.bdis_in_force();
        let none = BTreeMap::new();
        for (name, bdi) in &mut self.bdis {
            let new = configured.bdis.get(name).unwrap_or(&none);
            bdi.values.reload(|key| Some(value_of(new, key)), |_| 0);
            bdi.is_configured = !new.is_empty();
        }
        self.bdis.retain(|_, bdi| bdi.has_volumes || bdi.is_configured);
        for (name, configured) in &configured.bdis {
            let new = self.new_bdi(configured);
            self.bdis.entry(name.clone()).or_insert(new);
        }
        self.settle_bdis();
        self.bdi_changes(&before)
    }

    /// If parts do not fit together, all devices get those of the configuration, which fit.
    fn settle_bdis(&mut self) {
        let crossed =
            |bdi: &BdiValues| bdi.values.get(MIN_RATIO.key()) > bdi.values.get(MAX_RATIO.key());
        if self.reserved(None) > whole() || self.bdis.values().any(crossed) {
            for bdi in self.bdis.values_mut() {
                bdi.values.reset(&[MIN_RATIO.key(), MAX_RATIO.key()]);
            }
        }
    }

    fn bdis_in_force(&self) -> Vec<(String, Vec<(Key, u64)>)> {
        self.bdis.iter().map(|(name, bdi)| (name.clone(), bdi.values.in_force())).collect()
    }

    fn bdi_changes(&self, before: &[(String, Vec<(Key, u64)>)]) -> Vec<ParameterChange> {
        let changes = |(name, before): &(String, Vec<(Key, u64)>)| {
            let bdi = self.bdis.get(name)?;
            Some(bdi.values.changes(ParameterOwner::Bdi(name), before))
        };
        before.iter().filter_map(changes).flatten().collect()
    }
}

fn whole() -> u64 {
    u64::from(Percent::WHOLE.parts_per_million())
}

#[cfg(test)]
mod tests {
    use ebb_param::ParameterValue;
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::super::definition::TypedKey;
    use super::super::super::table::{MAX_BYTES, STRICT_LIMIT};
    use super::super::{Origin, ParameterOwner::Bdi};
    use super::*;

    /// A backing device with volumes.
    struct Device<'a>(&'a Parameters, &'a str);

    impl Device<'_> {
        fn get<T: ParameterValue>(&self, key: TypedKey<T>) -> T {
            self.0.handle(key, Bdi(self.1)).get()
        }
    }

    fn add<'a>(parameters: &'a Parameters, name: &'a str) -> Device<'a> {
        parameters.add_bdi(name);
        Device(parameters, name)
    }

    fn configured(bdis: &[(&str, &[(Key, u64)])]) -> Configured {
        let bdi = |(name, own): &(&str, &[(Key, u64)])| {
            ((*name).to_owned(), own.iter().copied().collect())
        };
        Configured { bdis: bdis.iter().map(bdi).collect(), ..Configured::default() }
    }

    fn kind<T: std::fmt::Debug>(outcome: Result<T, ParameterError>) -> ErrorKind {
        outcome.unwrap_err().kind
    }

    #[test]
    fn a_device_has_configured_values_until_they_are_set_and_loses_set_values_with_its_volumes() {
        let parameters = Parameters::new(&configured(&[("array", &[(MAX_BYTES.key(), 8 << 20)])]));
        assert_eq!(parameters.bdis_without_volumes(), ["array"]);
        let (array, disk) = (add(&parameters, "array"), add(&parameters, "8:0"));
        assert_eq!((array.get(MAX_BYTES), disk.get(MAX_BYTES)), (8 << 20, 0));
        assert_eq!(disk.get(MAX_RATIO), 1_000_000);
        assert!(parameters.bdis_without_volumes().is_empty());

        let change = parameters.set("max_bytes", Bdi("array"), &json!("16M")).unwrap();
        assert_eq!((change.from, change.to, array.get(MAX_BYTES)), (8 << 20, 16 << 20, 16 << 20));
        assert_eq!(parameters.get("max_bytes", Bdi("array")).unwrap().origin, Origin::RunTime);
        parameters.set("strict_limit", Bdi("8:0"), &json!("on")).unwrap();
        parameters.set("max_ratio", Bdi("8:0"), &json!(12.5)).unwrap();
        assert_eq!((disk.get(STRICT_LIMIT), disk.get(MAX_RATIO)), (true, 125_000));
        parameters.unset("max_bytes", Bdi("array")).unwrap();
        assert_eq!(array.get(MAX_BYTES), 8 << 20);

        parameters.set("max_bytes", Bdi("array"), &json!(1 << 20)).unwrap();
        parameters.remove_bdis(["array", "8:0", "never"]);
        assert_eq!(parameters.get("max_bytes", Bdi("array")).unwrap().value, 8 << 20);
        assert_eq!(kind(parameters.list(Bdi("8:0"))), ErrorKind::UnknownBdi);
    }

    #[test]
    fn a_reload_keeps_what_was_set_unless_the_file_changed_it() {
        let file = |bytes, part| {
            configured(&[("array", &[(MAX_BYTES.key(), bytes), (MIN_RATIO.key(), part)])])
        };
        let parameters = Parameters::new(&file(1 << 20, 100_000));
        let array = add(&parameters, "array");
        parameters.set("max_bytes", Bdi("array"), &json!("2M")).unwrap();
        assert_eq!(parameters.reload(&file(1 << 20, 200_000)).len(), 1);
        assert_eq!((array.get(MAX_BYTES), array.get(MIN_RATIO)), (2 << 20, 200_000));
        let changes = parameters.reload(&file(3 << 20, 200_000));
        assert_eq!(changes[0].bdi.as_deref(), Some("array"));
        assert_eq!(array.get(MAX_BYTES), 3 << 20);
        // The section leaves the file, the volumes stay.
        parameters.reload(&configured(&[]));
        assert_eq!((array.get(MAX_BYTES), array.get(MIN_RATIO)), (0, 0));
        assert_eq!(parameters.list(Bdi("array")).unwrap().len(), 4);
    }

    #[test]
    fn ratios_of_all_devices_fit_together() {
        let parameters = Parameters::new(&Configured::default());
        let (a, b) = (add(&parameters, "a"), add(&parameters, "b"));
        parameters.set("min_ratio", Bdi("a"), &json!(60)).unwrap();
        let error = parameters.set("min_ratio", Bdi("b"), &json!(41)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        assert!(error.remedy.contains("choose 40 or less"), "{error}");
        parameters.set("min_ratio", Bdi("b"), &json!("40%")).unwrap();
        assert_eq!(kind(parameters.set("max_ratio", Bdi("a"), &json!(59))), ErrorKind::Conflict);
        parameters.set("max_ratio", Bdi("b"), &json!(50)).unwrap();
        assert_eq!(kind(parameters.set("min_ratio", Bdi("b"), &json!(51))), ErrorKind::Conflict);
        // What the file says now does not fit what was set: the file's counts for all.
        parameters.reload(&configured(&[("b", &[(MIN_RATIO.key(), 450_000)])]));
        assert_eq!((a.get(MIN_RATIO), b.get(MIN_RATIO)), (0, 450_000));
    }

    #[test]
    fn unknown_names_are_refused_with_a_suggestion() {
        let parameters = Parameters::new(&configured(&[("array", &[])]));
        let error = parameters.get("max_bytes", Bdi("aray")).unwrap_err();
        assert_eq!(error.remedy, "did you mean `array`?");
        assert_eq!(kind(parameters.get("log", Bdi("array"))), ErrorKind::NotPerBdi);
        let error = parameters.set("max_bytes", ParameterOwner::Daemon, &json!(0)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotPerBdi);
        assert!(error.remedy.contains("--bdi"), "{error}");
        assert_eq!(
            kind(parameters.set("max_bytes", Bdi("array"), &json!(1))),
            ErrorKind::OutOfRange
        );
        assert_eq!(
            kind(parameters.set("max_ratio", Bdi("array"), &json!(0))),
            ErrorKind::OutOfRange
        );
    }

    proptest! {
        /// Whatever is set, loaded, or comes and goes: the controller accepts it.
        #[test]
        fn what_is_in_force_fits(steps in prop::collection::vec((0u8..6, 0u8..3, 0u64..=1_000_000), 1..60)) {
            let parameters = Parameters::new(&Configured::default());
            for (what, bdi, value) in steps {
                let name = bdi.to_string();
                let text = json!(Percent::new(u32::try_from(value).unwrap()).to_string());
                match what {
                    0 => parameters.add_bdi(&name),
                    1 => parameters.remove_bdis([name.as_str()]),
                    2 => drop(parameters.set("min_ratio", Bdi(&name), &text)),
                    3 => drop(parameters.set("max_ratio", Bdi(&name), &text)),
                    4 => drop(parameters.unset("max_ratio", Bdi(&name))),
                    _ => drop(parameters.reload(&configured(&[(&name, &[(MIN_RATIO.key(), value)])]))),
                }
                let state = parameters.lock();
                prop_assert!(state.reserved(None) <= whole());
                for cells in state.bdis.values() {
                    prop_assert!(cells.values.get(MIN_RATIO.key()) <= cells.values.get(MAX_RATIO.key()));
                }
            }
        }
    }
}
