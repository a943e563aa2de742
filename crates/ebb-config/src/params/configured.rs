//! The values that the configuration gives to parameters.

use std::collections::BTreeMap;

use ebb_param::ParameterValue;

use super::definition::Key;
use super::names::name_number;
use super::table::{
    BUFFER_SQUEEZE_DURATION_MS, CACHE_MAX, CACHE_MIN, CONNECTION_MEMORY, LIMIT_BANDWIDTH,
    LIMIT_BURST_MS, LIMIT_GROUP, LIMIT_IOPS, LIMIT_READ_BANDWIDTH, LIMIT_READ_IOPS,
    LIMIT_WRITE_BANDWIDTH, LIMIT_WRITE_IOPS, LOG, MAX_BUFFER_PAGES, MAX_BYTES, MAX_CLIENTS,
    MAX_RATIO, MAX_REQUEST, MIN_RATIO, STRICT_LIMIT,
};
use crate::{BdiConfig, Config, LimitsConfig, Percent, Size, VolumeConfig};

/// The values of the configuration: those of the daemon (absent: the default), and those of volumes
/// and backing devices. All values are within their ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configured {
    /// The daemon's values.
    pub daemon: BTreeMap<Key, u64>,
    /// The volumes, each with its own values.
    pub volumes: BTreeMap<String, BTreeMap<Key, u64>>,
    /// The configured backing devices, each with its values.
    pub bdis: BTreeMap<String, BTreeMap<Key, u64>>,
    /// The configured groups of limits, each with its values.
    pub limit_groups: BTreeMap<String, BTreeMap<Key, u64>>,
}

impl From<&Config> for Configured {
    fn from(config: &Config) -> Self {
        let daemon = BTreeMap::from([
            (MAX_BUFFER_PAGES.key(), config.max_buffer_pages),
            (BUFFER_SQUEEZE_DURATION_MS.key(), config.buffer_squeeze_duration_ms),
            (CACHE_MAX.key(), config.cache_max.bytes()),
            (CACHE_MIN.key(), config.cache_min.bytes()),
            (MAX_CLIENTS.key(), config.nbd.max_clients.to_bits()),
            (MAX_REQUEST.key(), config.nbd.max_request.bytes()),
            (CONNECTION_MEMORY.key(), config.nbd.connection_memory.bytes()),
            (LOG.key(), config.log.to_bits()),
        ]);
        let volumes = config.volumes.iter();
        let bdis = config.bdis.iter();
        let groups = config.limit_groups.iter();
        Self {
            daemon,
            volumes: volumes.map(|(name, volume)| (name.clone(), of_volume(volume))).collect(),
            bdis: bdis.map(|(name, bdi)| (name.clone(), of_bdi(bdi))).collect(),
            limit_groups: groups.map(|(name, own)| (name.clone(), given(of_limits(own)))).collect(),
        }
    }
}

pub(super) fn of_volume(volume: &VolumeConfig) -> BTreeMap<Key, u64> {
    let group = volume.limit_group.as_deref().and_then(name_number);
    let own = [
        (MAX_BUFFER_PAGES.key(), volume.max_buffer_pages),
        (BUFFER_SQUEEZE_DURATION_MS.key(), volume.buffer_squeeze_duration_ms),
        (LIMIT_GROUP.key(), group),
    ];
    given(own.into_iter().chain(of_limits(&volume.limits)))
}

pub(super) fn of_limits(limits: &LimitsConfig) -> [(Key, Option<u64>); 7] {
    [
        (LIMIT_IOPS.key(), limits.iops),
        (LIMIT_READ_IOPS.key(), limits.read_iops),
        (LIMIT_WRITE_IOPS.key(), limits.write_iops),
        (LIMIT_BANDWIDTH.key(), limits.bandwidth.map(Size::bytes)),
        (LIMIT_READ_BANDWIDTH.key(), limits.read_bandwidth.map(Size::bytes)),
        (LIMIT_WRITE_BANDWIDTH.key(), limits.write_bandwidth.map(Size::bytes)),
        (LIMIT_BURST_MS.key(), limits.burst_ms),
    ]
}

fn of_bdi(bdi: &BdiConfig) -> BTreeMap<Key, u64> {
    let part = |part: Option<Percent>| part.map(|part| u64::from(part.parts_per_million()));
    given([
        (MIN_RATIO.key(), part(bdi.min_ratio)),
        (MAX_RATIO.key(), part(bdi.max_ratio)),
        (MAX_BYTES.key(), bdi.max_bytes.map(Size::bytes)),
        (STRICT_LIMIT.key(), bdi.strict_limit.map(u64::from)),
    ])
}

pub(super) fn given(values: impl IntoIterator<Item = (Key, Option<u64>)>) -> BTreeMap<Key, u64> {
    values.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
}
