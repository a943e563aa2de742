//! The values of backing devices. The daemon has no values that a device could use: without a value of
//! its own a device has the default.
//!
//! # Invariants
//! - The known devices are those in the configuration, and those with volumes.
//! - The `min_ratio` of a device is at most its `max_ratio`, and those of all known devices together
//!   are at most the whole, so that the controller accepts the values in force in some order.

use std::collections::BTreeMap;

use serde_json::Value;

use super::super::error::{ParameterError, ParameterErrorKind as ErrorKind};
use super::super::table::Key;
use super::{Live, Origin, ParameterChange, Parameters, Reading, State};
use crate::Percent;
use crate::{Config, shorten, suggest};

/// Handles to the values in force of one backing device.
#[derive(Clone, Debug)]
pub struct BdiLive(BTreeMap<Key, Live>);

impl BdiLive {
    fn new(configured: &BTreeMap<Key, u64>) -> BdiLive {
        let value = |key: Key| value_of(configured, key);
        BdiLive(Key::per_bdi().map(|key| (key, Live::new(value(key)))).collect())
    }

    /// The value in force of one of [`Key::per_bdi`].
    pub fn get(&self, key: Key) -> u64 {
        self.0.get(&key).map_or(key.definition().default, Live::get)
    }

    fn set(&self, key: Key, value: u64) {
        if let Some(live) = self.0.get(&key) {
            live.set(value);
        }
    }
}

/// The values of one backing device.
#[derive(Debug)]
pub(super) struct BdiCells {
    configured: BTreeMap<Key, u64>,
    live: BdiLive,
    /// Whether it has volumes.
    has_volumes: bool,
}

/// The configured values of backing devices.
pub(super) fn configured(config: &Config) -> BTreeMap<String, BTreeMap<Key, u64>> {
    let values = |bdi: &crate::BdiConfig| {
        let part = |part: Option<Percent>| part.map(|part| u64::from(part.parts_per_million()));
        [
            (Key::MinRatio, part(bdi.min_ratio)),
            (Key::MaxRatio, part(bdi.max_ratio)),
            (Key::MaxBytes, bdi.max_bytes.map(crate::Size::bytes)),
            (Key::StrictLimit, bdi.strict_limit.map(u64::from)),
        ]
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)))
        .collect()
    };
    config.bdis.iter().map(|(name, bdi)| (name.clone(), values(bdi))).collect()
}

fn value_of(configured: &BTreeMap<Key, u64>, key: Key) -> u64 {
    configured.get(&key).copied().unwrap_or(key.definition().default)
}

/// The error if a parameter of backing devices is used without a device.
pub(super) fn needs_bdi(key: Key) -> ParameterError {
    ParameterError::new(
        ErrorKind::NotPerBdi,
        format!("{key} belongs to a backing device"),
        "name one with --bdi NAME; `ebbd stat bdi` lists them",
    )
}

impl Parameters {
    /// To be called when a backing device has its first volume: from now on its values can be read and set.
    pub fn add_bdi(&self, name: &str) -> BdiLive {
        let mut state = self.lock();
        let cells = state.bdis.entry(name.to_owned()).or_insert_with(|| BdiCells {
            configured: BTreeMap::new(),
            live: BdiLive::new(&BTreeMap::new()),
            has_volumes: true,
        });
        cells.has_volumes = true;
        cells.live.clone()
    }

    /// To be called when backing devices have no volumes any more: the values set for them are discarded. All devices
    /// are visited once, whatever the number of names.
    pub fn remove_bdis<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        let mut state = self.lock();
        let before = state.bdi_values();
        for name in names {
            let Some(cells) = state.bdis.get_mut(name) else { continue };
            cells.has_volumes = false;
            for key in Key::per_bdi() {
                cells.live.set(key, value_of(&cells.configured, key));
            }
            if cells.configured.is_empty() {
                state.bdis.remove(name);
            }
        }
        state.settle_bdis();
        state.bdi_changes(before).iter().for_each(|change| state.notify(change));
    }

    /// The names of backing devices with volumes.
    pub fn bdis_with_volumes(&self) -> Vec<String> {
        let state = self.lock();
        let used = state.bdis.iter().filter(|(_, cells)| cells.has_volumes);
        used.map(|(name, _)| name.clone()).collect()
    }

    /// The names of configured backing devices without volumes.
    pub fn bdis_without_volumes(&self) -> Vec<String> {
        let state = self.lock();
        let unused = state.bdis.iter().filter(|(_, cells)| !cells.has_volumes);
        unused.map(|(name, _)| name.clone()).collect()
    }

    /// The parameters of a backing device, in order.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownBdi`].
    pub fn list_bdi(&self, bdi: &str) -> Result<Vec<Reading>, ParameterError> {
        let state = self.lock();
        Key::per_bdi().map(|key| state.reading_bdi(key, bdi)).collect()
    }

    /// A backing device's value of the parameter called `name`.
    ///
    /// # Errors
    /// An unknown name, an unknown device, or a parameter that devices do not have.
    pub fn get_bdi(&self, name: &str, bdi: &str) -> Result<Reading, ParameterError> {
        let key = Key::parse(name)?;
        self.lock().reading_bdi(key, bdi)
    }

    /// Sets a backing device's parameter at run time; the change is in force when this returns.
    ///
    /// # Errors
    /// As for [`Self::get_bdi`], or a value that is refused.
    pub fn set_bdi(
        &self,
        name: &str,
        bdi: &str,
        value: &Value,
    ) -> Result<ParameterChange, ParameterError> {
        let key = Key::parse(name)?;
        let mut state = self.lock();
        let from = state.reading_bdi(key, bdi)?.value;
        let to = key.definition().parse(value)?;
        state.put_bdi(key, bdi, from, to)
    }

    /// Goes back to a backing device's value of the configuration, or else to the default.
    ///
    /// # Errors
    /// As for [`Self::get_bdi`], or [`ErrorKind::Conflict`] with a value set meanwhile.
    pub fn unset_bdi(&self, name: &str, bdi: &str) -> Result<ParameterChange, ParameterError> {
        let key = Key::parse(name)?;
        let mut state = self.lock();
        let from = state.reading_bdi(key, bdi)?.value;
        let to = state.bdis.get(bdi).map_or(from, |cells| value_of(&cells.configured, key));
        state.put_bdi(key, bdi, from, to)
    }
}

impl State {
    fn reading_bdi(&self, key: Key, bdi: &str) -> Result<Reading, ParameterError> {
        let Some(cells) = self.bdis.get(bdi) else {
            let names = self.bdis.keys().map(String::as_str);
            let remedy = suggest(bdi, names, "the backing devices are");
            let message = format!("there is no backing device `{}`", shorten(bdi));
            return Err(ParameterError::new(ErrorKind::UnknownBdi, message, remedy));
        };
        if !Key::per_bdi().any(|own| own == key) {
            let names: Vec<String> = Key::per_bdi().map(Key::name).collect();
            return Err(ParameterError::new(
                ErrorKind::NotPerBdi,
                format!("{key} is not a parameter of backing devices"),
                format!("omit the device; the parameters of devices are {}", names.join(", ")),
            ));
        }
        let value = cells.live.get(key);
        let configured = value_of(&cells.configured, key) == value;
        let origin = if configured { Origin::Configuration } else { Origin::RunTime };
        Ok(Reading { key, value, origin })
    }

    fn put_bdi(
        &mut self,
        key: Key,
        bdi: &str,
        from: u64,
        to: u64,
    ) -> Result<ParameterChange, ParameterError> {
        self.bdi_fits(key, bdi, to)?;
        if let Some(cells) = self.bdis.get(bdi) {
            cells.live.set(key, to);
        }
        let change = ParameterChange { key, volume: None, bdi: Some(bdi.to_owned()), from, to };
        if from != to {
            self.notify(&change);
        }
        Ok(change)
    }

    /// Checks a device's `value` for `key` against other values.
    fn bdi_fits(&self, key: Key, bdi: &str, value: u64) -> Result<(), ParameterError> {
        let text = |value| key.definition().text(value);
        let of = |key| self.bdis.get(bdi).map_or(0, |cells| cells.live.get(key));
        let conflict = |message: String, remedy: String| {
            Err(ParameterError::new(ErrorKind::Conflict, message, remedy))
        };
        match key {
            Key::MaxRatio if value < of(Key::MinRatio) => {
                let least = text(of(Key::MinRatio));
                conflict(
                    format!("{} is less than min_ratio, {least}", text(value)),
                    format!("choose {least} or more, or a smaller min_ratio first"),
                )
            }
            Key::MinRatio if value > of(Key::MaxRatio) => {
                let most = text(of(Key::MaxRatio));
                conflict(
                    format!("{} is more than max_ratio, {most}", text(value)),
                    format!("choose {most} or less, or a larger max_ratio first"),
                )
            }
            Key::MinRatio => {
                let left = whole().saturating_sub(self.kept(Some(bdi)));
                if value <= left {
                    return Ok(());
                }
                conflict(
                    format!("{} is more than the other devices leave of 100", text(value)),
                    format!(
                        "choose {} or less, or lower the min_ratio of another device",
                        text(left)
                    ),
                )
            }
            _ => Ok(()),
        }
    }

    /// The sum of `min_ratio` of all devices, except one.
    fn kept(&self, except: Option<&str>) -> u64 {
        let others = self.bdis.iter().filter(|(name, _)| Some(name.as_str()) != except);
        others.fold(0, |sum, (_, cells)| sum.saturating_add(cells.live.get(Key::MinRatio)))
    }

    pub(super) fn reload_bdis(&mut self, configured: &super::Configured) -> Vec<ParameterChange> {
        let before = self.bdi_values();
        let none = BTreeMap::new();
        for (name, cells) in &mut self.bdis {
            let new = configured.bdis.get(name).unwrap_or(&none);
            for key in Key::per_bdi() {
                if value_of(&cells.configured, key) != value_of(new, key) {
                    cells.live.set(key, value_of(new, key));
                }
            }
            cells.configured.clone_from(new);
        }
        self.bdis.retain(|_, cells| cells.has_volumes || !cells.configured.is_empty());
        for (name, configured) in &configured.bdis {
            self.bdis.entry(name.clone()).or_insert_with(|| BdiCells {
                configured: configured.clone(),
                live: BdiLive::new(configured),
                has_volumes: false,
            });
        }
        self.settle_bdis();
        self.bdi_changes(before)
    }

    fn bdi_values(&self) -> Vec<(String, Key, u64)> {
        let of = |(name, cells): (&String, &BdiCells)| {
            let value = |key| (name.clone(), key, cells.live.get(key));
            Key::per_bdi().map(value).collect::<Vec<_>>()
        };
        self.bdis.iter().flat_map(of).collect()
    }

    /// Where parts do not fit together, the configuration's count: those do.
    fn settle_bdis(&self) {
        let crossed =
            |cells: &BdiCells| cells.live.get(Key::MinRatio) > cells.live.get(Key::MaxRatio);
        if self.kept(None) > whole() || self.bdis.values().any(crossed) {
            for cells in self.bdis.values() {
                for key in [Key::MinRatio, Key::MaxRatio] {
                    cells.live.set(key, value_of(&cells.configured, key));
                }
            }
        }
    }

    fn bdi_changes(&self, before: Vec<(String, Key, u64)>) -> Vec<ParameterChange> {
        let change = |(name, key, from): (String, Key, u64)| {
            let to = self.bdis.get(&name)?.live.get(key);
            (from != to).then_some(ParameterChange { key, volume: None, bdi: Some(name), from, to })
        };
        before.into_iter().filter_map(change).collect()
    }
}

fn whole() -> u64 {
    u64::from(Percent::WHOLE.parts_per_million())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::Configured;
    use super::*;

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
        let parameters = Parameters::new(&configured(&[("array", &[(Key::MaxBytes, 8 << 20)])]));
        assert_eq!(parameters.bdis_without_volumes(), ["array"]);
        let (array, disk) = (parameters.add_bdi("array"), parameters.add_bdi("8:0"));
        assert_eq!((array.get(Key::MaxBytes), disk.get(Key::MaxBytes)), (8 << 20, 0));
        assert_eq!(disk.get(Key::MaxRatio), 1_000_000);
        assert!(parameters.bdis_without_volumes().is_empty());

        let change = parameters.set_bdi("max_bytes", "array", &json!("16M")).unwrap();
        assert_eq!(
            (change.from, change.to, array.get(Key::MaxBytes)),
            (8 << 20, 16 << 20, 16 << 20)
        );
        assert_eq!(parameters.get_bdi("max_bytes", "array").unwrap().origin, Origin::RunTime);
        parameters.set_bdi("strict_limit", "8:0", &json!("on")).unwrap();
        parameters.set_bdi("max_ratio", "8:0", &json!(12.5)).unwrap();
        assert_eq!((disk.get(Key::StrictLimit), disk.get(Key::MaxRatio)), (1, 125_000));
        parameters.unset_bdi("max_bytes", "array").unwrap();
        assert_eq!(array.get(Key::MaxBytes), 8 << 20);

        parameters.set_bdi("max_bytes", "array", &json!(1 << 20)).unwrap();
        parameters.remove_bdis(["array", "8:0", "never"]);
        assert_eq!(parameters.get_bdi("max_bytes", "array").unwrap().value, 8 << 20);
        assert_eq!(kind(parameters.list_bdi("8:0")), ErrorKind::UnknownBdi);
    }

    #[test]
    fn a_reload_keeps_what_was_set_unless_the_file_changed_it() {
        let file = |bytes, part| {
            configured(&[("array", &[(Key::MaxBytes, bytes), (Key::MinRatio, part)])])
        };
        let parameters = Parameters::new(&file(1 << 20, 100_000));
        let array = parameters.add_bdi("array");
        parameters.set_bdi("max_bytes", "array", &json!("2M")).unwrap();
        assert_eq!(parameters.reload(&file(1 << 20, 200_000)).len(), 1);
        assert_eq!((array.get(Key::MaxBytes), array.get(Key::MinRatio)), (2 << 20, 200_000));
        let changes = parameters.reload(&file(3 << 20, 200_000));
        assert_eq!(changes[0].bdi.as_deref(), Some("array"));
        assert_eq!(array.get(Key::MaxBytes), 3 << 20);
        // The section leaves the file, the volumes stay.
        parameters.reload(&configured(&[]));
        assert_eq!((array.get(Key::MaxBytes), array.get(Key::MinRatio)), (0, 0));
        assert_eq!(parameters.list_bdi("array").unwrap().len(), 4);
    }

    #[test]
    fn ratios_of_all_devices_fit_together() {
        let parameters = Parameters::new(&Configured::default());
        let (a, b) = (parameters.add_bdi("a"), parameters.add_bdi("b"));
        parameters.set_bdi("min_ratio", "a", &json!(60)).unwrap();
        let error = parameters.set_bdi("min_ratio", "b", &json!(41)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        assert!(error.remedy.contains("choose 40 or less"), "{error}");
        parameters.set_bdi("min_ratio", "b", &json!("40%")).unwrap();
        assert_eq!(kind(parameters.set_bdi("max_ratio", "a", &json!(59))), ErrorKind::Conflict);
        parameters.set_bdi("max_ratio", "b", &json!(50)).unwrap();
        assert_eq!(kind(parameters.set_bdi("min_ratio", "b", &json!(51))), ErrorKind::Conflict);
        // What the file says now does not fit what was set: the file's counts for all.
        parameters.reload(&configured(&[("b", &[(Key::MinRatio, 450_000)])]));
        assert_eq!((a.get(Key::MinRatio), b.get(Key::MinRatio)), (0, 450_000));
    }

    #[test]
    fn unknown_names_are_refused_with_a_suggestion() {
        let parameters = Parameters::new(&configured(&[("array", &[])]));
        let error = parameters.get_bdi("max_bytes", "aray").unwrap_err();
        assert_eq!(error.remedy, "did you mean `array`?");
        assert_eq!(kind(parameters.get_bdi("log", "array")), ErrorKind::NotPerBdi);
        let error = parameters.set("max_bytes", None, &json!(0)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotPerBdi);
        assert!(error.remedy.contains("--bdi"), "{error}");
        assert_eq!(
            kind(parameters.set_bdi("max_bytes", "array", &json!(1))),
            ErrorKind::OutOfRange
        );
        assert_eq!(
            kind(parameters.set_bdi("max_ratio", "array", &json!(0))),
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
                    0 => drop(parameters.add_bdi(&name)),
                    1 => parameters.remove_bdis([name.as_str()]),
                    2 => drop(parameters.set_bdi("min_ratio", &name, &text)),
                    3 => drop(parameters.set_bdi("max_ratio", &name, &text)),
                    4 => drop(parameters.unset_bdi("max_ratio", &name)),
                    _ => drop(parameters.reload(&configured(&[(&name, &[(Key::MinRatio, value)])]))),
                }
                let state = parameters.lock();
                prop_assert!(state.kept(None) <= whole());
                for cells in state.bdis.values() {
                    prop_assert!(cells.live.get(Key::MinRatio) <= cells.live.get(Key::MaxRatio));
                }
            }
        }
    }
}
