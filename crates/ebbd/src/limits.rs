//! Limits of volumes and groups: from the parameters to the volumes that keep them, now and after changes.
//!
//! A limit set at run time ends with the daemon, unless it is kept in the state directory (`Engine::keep_limits`).
//!
//! # Invariants
//! - A watcher of a parameter must not call [`Parameters`]: a change of a volume's group, for which the group's handles are
//!   needed, is done by a task on a worker.
//! - Groups stay until the daemon ends; the number of their names is bounded by the parameters.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ebb_api::LimitStat;
use ebb_config::params::{
    LIMIT_BANDWIDTH, LIMIT_BURST_MS, LIMIT_GROUP, LIMIT_IOPS, LIMIT_READ_BANDWIDTH,
    LIMIT_READ_IOPS, LIMIT_WRITE_BANDWIDTH, LIMIT_WRITE_IOPS, Origin, ParameterError,
    ParameterOwner, Parameters, name_of,
};
use ebb_config::{LimitsConfig, Size};
use ebb_control::figures::limit_stat;
use ebb_io::WorkerHandle;
use ebb_param::Parameter;
use ebb_volume::{LimitFigures, LimitGroup, RateLimits, Volume};

/// The limits of one owner, as parameters.
struct LimitParameters([Parameter<u64>; 7]);

impl LimitParameters {
    fn of(parameters: &Parameters, owner: ParameterOwner) -> Arc<Self> {
        let keys = [
            LIMIT_IOPS,
            LIMIT_READ_IOPS,
            LIMIT_WRITE_IOPS,
            LIMIT_BANDWIDTH,
            LIMIT_READ_BANDWIDTH,
            LIMIT_WRITE_BANDWIDTH,
            LIMIT_BURST_MS,
        ];
        Arc::new(Self(keys.map(|key| parameters.handle(key, owner))))
    }

    fn now(&self) -> RateLimits {
        let [iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms] =
            self.0.each_ref().map(Parameter::get);
        RateLimits {
            iops,
            read_iops,
            write_iops,
            bandwidth,
            read_bandwidth,
            write_bandwidth,
            burst_ms,
        }
    }

    /// Passes the limits to `subject`, now and after each change.
    fn follow<S: Send + Sync + 'static>(
        self: Arc<Self>,
        subject: &Arc<S>,
        set: impl Fn(&S, RateLimits) + Copy + Send + Sync + 'static,
    ) {
        for parameter in &self.0 {
            let all = self.clone();
            parameter.watch_for(subject, move |subject, _| set(subject, all.now()));
        }
        set(subject, self.now());
    }
}

/// See the module.
pub(crate) struct LimitSettings {
    parameters: Parameters,
    worker: WorkerHandle,
    groups: Mutex<BTreeMap<String, Arc<LimitGroup>>>,
}

impl LimitSettings {
    pub(crate) fn new(parameters: Parameters, worker: WorkerHandle) -> Arc<Self> {
        Arc::new(Self { parameters, worker, groups: Mutex::default() })
    }

    /// Lets a volume that is about to be served follow its limits.
    pub(crate) fn follow(self: &Arc<Self>, volume: &Arc<Volume>) {
        let owner = ParameterOwner::Volume(volume.name());
        LimitParameters::of(&self.parameters, owner).follow(volume, Volume::set_rate_limits);
        let group = self.parameters.handle(LIMIT_GROUP, owner);
        // Weak: the parameters keep the watcher, and the settings have a handle of the parameters.
        let (settings, weak) = (Arc::downgrade(self), Arc::downgrade(volume));
        let follower = group.clone();
        group.watch_for(volume, move |_, _| {
            let Some(settings) = settings.upgrade() else { return };
            let (weak, follower) = (weak.clone(), follower.clone());
            settings.worker.clone().spawn(move |_| async move {
                if let Some(volume) = weak.upgrade() {
                    settings.join(&volume, follower.get());
                }
            });
        });
        self.join(volume, group.get());
    }

    /// Puts a volume into the group whose name has this number.
    fn join(&self, volume: &Volume, number: u64) {
        let group = name_of(number).and_then(|name| self.group(&name));
        if let Some(group) = &group
            && !group.figures().limits.is_limited()
        {
            let (volume, limit_group) = (&**volume.name(), &**group.name());
            tracing::warn!(
                volume,
                limit_group,
                "this group has no limits: set them with `ebbd limit --group`"
            );
        }
        volume.set_limit_group(group.as_ref());
    }

    /// The group of this name, which is made if there is none.
    fn group(&self, name: &str) -> Option<Arc<LimitGroup>> {
        let known = self.known(name);
        if known.is_some() {
            return known;
        }
        // The name is one already, as the value of a parameter: this does not fail.
        self.parameters.add_limit_group(name).ok()?;
        let parameters = LimitParameters::of(&self.parameters, ParameterOwner::LimitGroup(name));
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let group = groups.entry(name.to_owned()).or_insert_with(|| {
            let group = LimitGroup::new(name);
            parameters.follow(&group, LimitGroup::set);
            group
        });
        Some(group.clone())
    }

    /// The group of this name, if a volume has been in it.
    pub(crate) fn known(&self, name: &str) -> Option<Arc<LimitGroup>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// The names of all groups.
    pub(crate) fn names(&self) -> Vec<String> {
        self.parameters.limit_groups()
    }

    /// The limits of a volume that were set at run time, and its group if that was; the group is `none` for no group.
    pub(crate) fn set_at_run_time(&self, name: &str) -> (LimitsConfig, Option<String>) {
        let owner = ParameterOwner::Volume(name);
        let group = self.set_value("limit_group", owner);
        let group = group.map(|group| name_of(group).unwrap_or_else(|| "none".to_owned()));
        (self.limits_set(owner), group)
    }

    /// The limits of a group that were set at run time.
    ///
    /// # Errors
    /// If there is no such group.
    pub(crate) fn of_group_set_at_run_time(
        &self,
        group: &str,
    ) -> Result<LimitsConfig, ParameterError> {
        let owner = ParameterOwner::LimitGroup(group);
        self.parameters.list(owner)?;
        Ok(self.limits_set(owner))
    }

    /// The value of a parameter, if it was set at run time.
    fn set_value(&self, parameter: &str, owner: ParameterOwner) -> Option<u64> {
        let reading = self.parameters.get(parameter, owner).ok()?;
        (reading.origin == Origin::RunTime).then_some(reading.value)
    }

    fn limits_set(&self, owner: ParameterOwner) -> LimitsConfig {
        let number = |parameter| self.set_value(parameter, owner);
        let size = |parameter| number(parameter).map(Size::new);
        LimitsConfig {
            iops: number("limit_iops"),
            read_iops: number("limit_read_iops"),
            write_iops: number("limit_write_iops"),
            bandwidth: size("limit_bandwidth"),
            read_bandwidth: size("limit_read_bandwidth"),
            write_bandwidth: size("limit_write_bandwidth"),
            burst_ms: number("limit_burst_ms"),
        }
    }

    /// The limits that a group would have if a volume joined it.
    pub(crate) fn configured(&self, name: &str) -> LimitStat {
        let owner = ParameterOwner::LimitGroup(name);
        let limits = LimitParameters::of(&self.parameters, owner).now();
        limit_stat(&LimitFigures { limits, ..LimitFigures::default() })
    }
}

#[cfg(test)]
mod tests {
    use ebb_config::params::Configured;
    use ebb_io::Worker;
    use ebb_store::{NullStore, Store};
    use ebb_volume::VolumeOptions;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_volume_and_its_group_follow_their_parameters() {
        let volumes = BTreeMap::from([("a".to_owned(), BTreeMap::from([(LIMIT_IOPS.key(), 7)]))]);
        let parameters = Parameters::new(&Configured { volumes, ..Configured::default() });
        let worker = Worker::start_alone("limits").unwrap();
        let settings = LimitSettings::new(parameters.clone(), worker.handle());
        let store = Store::Null(NullStore::new(1 << 20));
        let volume = Volume::new("a", store, VolumeOptions::default());
        settings.follow(&volume);
        let figures = || volume.limit_figures().unwrap();
        assert_eq!((figures().limits.iops, figures().limits.burst_ms), (7, 100));
        let set = |name, owner, value| parameters.set(name, owner, &value).unwrap();
        let own = ParameterOwner::Volume("a");
        set("limit_iops", own, json!(0));
        assert!(volume.limits().is_none());
        set("limit_write_bandwidth", ParameterOwner::Daemon, json!("1M"));
        assert_eq!(figures().limits.write_bandwidth, 1 << 20, "the daemon's value");
        set("limit_bandwidth", ParameterOwner::LimitGroup("gold"), json!("2M"));
        set("limit_group", own, json!("gold"));
        // The worker does it after the tasks before it.
        worker.handle().block_on(|_| async {}).unwrap();
        assert_eq!(figures().group.as_deref(), Some("gold"));
        let gold = settings.known("gold").unwrap();
        assert_eq!(gold.figures().limits.bandwidth, 2 << 20);
        set("limit_iops", ParameterOwner::LimitGroup("gold"), json!(9));
        assert_eq!((gold.figures().limits.iops, settings.names().len()), (9, 1));
        parameters.unset("limit_group", own).unwrap();
        worker.handle().block_on(|_| async {}).unwrap();
        assert_eq!(figures().group, None);
    }
}
