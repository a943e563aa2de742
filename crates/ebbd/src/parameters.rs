//! The parameters and their users: each function gives a part of the daemon the handles it reads, or watches them for
//! a part that has to be told of a change. The parameters of backing devices are in `bdi.rs`.

use std::sync::Arc;
use std::time::Instant;

use ebb_cache::{Cache, CacheOptions};
use ebb_config::LogLevel;
use ebb_config::params::{
    BUFFER_SQUEEZE_DURATION_MS, CACHE_MAX, CACHE_MIN, CONNECTION_MEMORY, FEATURE_PERSISTENT, LOG,
    MAX_BUFFER_PAGES, MAX_CLIENTS, MAX_PERSISTENT_GRANTS, MAX_REQUEST,
    PERSISTENT_GRANT_UNUSED_SECONDS, POLL_US, ParameterOwner, Parameters, ZONE_LIMIT_BYTES,
};
use ebb_export_nbd::ServerParameters;
use ebb_export_xen::XenParameters;
use ebb_io::PollParameters;
use ebb_mem::{Memory, PoolParameters};

/// A limit that 0 turns off.
fn limit(bytes: u64) -> Option<u64> {
    (bytes != 0).then_some(bytes)
}

/// The parameters of the page pools of a volume.
pub fn pool(parameters: &Parameters, volume: &str) -> PoolParameters {
    let owner = ParameterOwner::Volume(volume);
    PoolParameters {
        max_buffer_pages: parameters.handle(MAX_BUFFER_PAGES, owner),
        buffer_squeeze_duration_ms: parameters.handle(BUFFER_SQUEEZE_DURATION_MS, owner),
    }
}

/// The parameters of the rings of Xen guests.
pub fn rings(parameters: &Parameters) -> Arc<XenParameters> {
    let mut rings = XenParameters::default();
    rings.max_persistent_grants = parameters.daemon(MAX_PERSISTENT_GRANTS);
    rings.persistent_grant_unused_seconds = parameters.daemon(PERSISTENT_GRANT_UNUSED_SECONDS);
    rings.feature_persistent = parameters.daemon(FEATURE_PERSISTENT);
    Arc::new(rings)
}

/// The parameters of busy polling, for all workers.
pub fn polling(parameters: &Parameters) -> Arc<PollParameters> {
    Arc::new(PollParameters::new(parameters.daemon(POLL_US)))
}

/// Limits the zones of `memory`, now and after changes.
pub fn limit_zones(parameters: &Parameters, memory: &Arc<Memory>) {
    for (class, key) in ZONE_LIMIT_BYTES.members().enumerate() {
        let limit_zone = move |memory: &Memory, bytes: u64| {
            let bytes = limit(bytes).map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
            memory.set_zone_limit(4096 << class, bytes);
        };
        let bytes = parameters.daemon(key);
        bytes.watch_for(memory, limit_zone);
        limit_zone(memory, bytes.get());
    }
}

/// The limits of a cache that is to be started.
pub fn cache_options(parameters: &Parameters, started: Instant) -> CacheOptions {
    CacheOptions {
        max_bytes: limit(parameters.daemon(CACHE_MAX).get()),
        min_bytes: parameters.daemon(CACHE_MIN).get(),
        started,
    }
}

/// Changes the limits of `cache` with the parameters.
pub fn limit_cache(parameters: &Parameters, cache: &Arc<Cache>) {
    let (max, min) = (parameters.daemon(CACHE_MAX), parameters.daemon(CACHE_MIN));
    max.watch_for(cache, |cache, bytes| cache.set_max(limit(bytes)));
    min.watch_for(cache, |cache, bytes| cache.set_min(bytes));
}

/// The limits of the NBD server.
pub fn clients(parameters: &Parameters) -> ServerParameters {
    ServerParameters {
        max_clients: parameters.daemon(MAX_CLIENTS),
        max_request: parameters.daemon(MAX_REQUEST),
        connection_memory: parameters.daemon(CONNECTION_MEMORY),
    }
}

/// Calls `set` with the level of the log when it has changed.
pub(crate) fn log_level(parameters: &Parameters, set: impl Fn(LogLevel) + Send + Sync + 'static) {
    parameters.daemon(LOG).watch(set);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ebb_config::params::Configured;
    use ebb_export_nbd::ServerLimits;
    use serde_json::json;

    use super::*;

    #[test]
    fn xen_rings_follow_the_parameters_of_grants() {
        let daemon = BTreeMap::from([(MAX_PERSISTENT_GRANTS.key(), 99)]);
        let parameters = Parameters::new(&Configured { daemon, ..Configured::default() });
        let values = |rings: &XenParameters| {
            (
                rings.max_persistent_grants.get(),
                rings.persistent_grant_unused_seconds.get(),
                rings.feature_persistent.get(),
            )
        };
        let defaults = rings(&Parameters::new(&Configured::default()));
        let ours = values(&XenParameters::default());
        assert_eq!(values(&defaults), ours, "both crates have one default");
        let rings = rings(&parameters);
        assert_eq!(values(&rings), (99, 60, true));
        let set = |name, value| parameters.set(name, ParameterOwner::Daemon, &value);
        set("max_persistent_grants", json!(0)).unwrap();
        set("persistent_grant_unused_seconds", json!("5")).unwrap();
        set("feature_persistent", json!("off")).unwrap();
        assert_eq!(values(&rings), (0, 5, false));
        parameters.unset("max_persistent_grants", ParameterOwner::Daemon).unwrap();
        parameters.unset("feature_persistent", ParameterOwner::Daemon).unwrap();
        assert_eq!(values(&rings), (99, 5, true));
        assert!(set("feature_persistent", json!("maybe")).is_err());
    }

    #[test]
    fn workers_follow_the_parameter_of_busy_polling() {
        let parameters = Parameters::new(&Configured::default());
        let polling = polling(&parameters);
        let default = ebb_io::PollParameters::default().poll_us.get();
        assert_eq!(polling.poll_us.get(), default, "both crates have one default");
        parameters.set("poll_us", ParameterOwner::Daemon, &json!(7)).unwrap();
        assert_eq!(polling.poll_us.get(), 7);
    }

    #[test]
    fn pools_and_the_server_have_the_defaults_of_the_table_and_follow_it() {
        let configured = BTreeMap::from([("a".to_owned(), BTreeMap::new())]);
        let parameters =
            Parameters::new(&Configured { volumes: configured, ..Configured::default() });
        let values = |pool: &PoolParameters| {
            (pool.max_buffer_pages.get(), pool.buffer_squeeze_duration_ms.get())
        };
        let (of_volume, server) = (pool(&parameters, "a"), clients(&parameters));
        assert_eq!(values(&of_volume), values(&PoolParameters::default()));
        assert_eq!(server.now(), ServerLimits::default());
        let set = |name, owner, value| parameters.set(name, owner, &value).unwrap();
        set("max_buffer_pages", ParameterOwner::Daemon, json!(5));
        set("buffer_squeeze_duration_ms", ParameterOwner::Volume("a"), json!(60_000));
        set("max_clients", ParameterOwner::Daemon, json!(3));
        assert_eq!((values(&of_volume), server.now().max_clients), ((5, 60_000), 3));
    }

    #[test]
    fn zones_and_the_cache_follow_their_limits() {
        let started = Instant::now();
        let memory = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, started)).unwrap();
        let parameters = Parameters::new(&Configured::default());
        let set = |name, value| parameters.set(name, ParameterOwner::Daemon, &value).unwrap();
        set("zone_limit_bytes.8K", json!("2M"));
        limit_zones(&parameters, &memory);
        set("zone_limit_bytes.64K", json!("4M"));
        let limit = |bytes| {
            memory.stats().zones.iter().find(|zone| zone.item_bytes == bytes).unwrap().limit
        };
        assert_eq!([limit(4096), limit(8192), limit(65_536)], [None, Some(256), Some(64)]);
        parameters.unset("zone_limit_bytes.8K", ParameterOwner::Daemon).unwrap();
        assert_eq!(limit(8192), None);

        set("cache_max", json!("2M"));
        let cache = Cache::without_reclaimer(&memory, cache_options(&parameters, started));
        limit_cache(&parameters, &cache);
        assert_eq!(cache.limit_bytes(), 2 << 20);
        set("cache_max", json!("1M"));
        assert_eq!(cache.limit_bytes(), 1 << 20);
    }
}
