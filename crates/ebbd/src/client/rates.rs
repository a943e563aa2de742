//! Rates of volumes between two samples of the statistics, for `ebbd stat --watch` and `ebbd top`.

use std::collections::HashMap;

use ebb_api::stat::{
    LatencyStat, OperationStat, RemoteCondition, RemoteStat, Stat, VolumeCacheStat,
    VolumeCondition, VolumeStat,
};

/// What a volume did between two samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct VolumeRates {
    pub(super) name: String,
    pub(super) state: VolumeCondition,
    /// Requests per second.
    pub(super) reads: f64,
    pub(super) writes: f64,
    /// Bytes per second.
    pub(super) read_bytes: f64,
    pub(super) written_bytes: f64,
    /// Of reads and writes, seconds; absent without any.
    pub(super) p50: Option<f64>,
    pub(super) p99: Option<f64>,
    /// Failed requests per second.
    pub(super) errors: f64,
    pub(super) dirty: u64,
    /// Bytes of cache hits and misses; absent without a cache.
    pub(super) hits: Option<(u64, u64)>,
    /// Cache memory, and how it has changed, bytes.
    pub(super) cached: Option<(u64, i64)>,
    pub(super) clients: u64,
    /// The state of the connection to its server, if its store is one.
    pub(super) remote: Option<String>,
}

/// The rates of all volumes of `now`, and the seconds between the samples. The counters of a new volume, and of a
/// daemon that was restarted, begin at 0.
pub(super) fn rates(before: &Stat, now: &Stat) -> Vec<VolumeRates> {
    let seconds = now.uptime_seconds - before.uptime_seconds;
    let none = Stat::default();
    // After a restart of the daemon its uptime is shorter.
    let (before, seconds) =
        if seconds > 0.0 { (before, seconds) } else { (&none, now.uptime_seconds) };
    let old: HashMap<&str, &VolumeStat> =
        before.volumes.iter().map(|volume| (&*volume.name, volume)).collect();
    let new_volume = VolumeStat::default();
    let of = |volume: &VolumeStat| {
        let old = old.get(&*volume.name).copied().unwrap_or(&new_volume);
        volume_rates(old, volume, seconds)
    };
    now.volumes.iter().map(of).collect()
}

fn volume_rates(old: &VolumeStat, new: &VolumeStat, seconds: f64) -> VolumeRates {
    let of = |volume: &VolumeStat, name| -> OperationStat {
        volume.operations.get(name).cloned().unwrap_or_default()
    };
    let per_second = |from: u64, to: u64| as_float(to.saturating_sub(from)) / seconds;
    let [read, write] = ["read", "write"].map(|name| (of(old, name), of(new, name)));
    let times = difference(
        &[&read.0, &write.0].map(|stat| stat.service.clone().unwrap_or_default()),
        &[&read.1, &write.1].map(|stat| stat.service.clone().unwrap_or_default()),
    );
    let errors = |volume: &VolumeStat| {
        volume.operations.values().fold(0_u64, |sum, stat| sum.saturating_add(stat.errors))
    };
    let empty = VolumeCacheStat::default();
    let was = old.cache.as_ref().unwrap_or(&empty);
    VolumeRates {
        name: new.name.clone(),
        state: new.state,
        reads: per_second(read.0.requests, read.1.requests),
        writes: per_second(write.0.requests, write.1.requests),
        read_bytes: per_second(read.0.bytes, read.1.bytes),
        written_bytes: per_second(write.0.bytes, write.1.bytes),
        p50: quantile(&times, 0.5),
        p99: quantile(&times, 0.99),
        errors: per_second(errors(old), errors(new)),
        dirty: new.cache.as_ref().map_or(0, |cache| cache.dirty_bytes),
        hits: new.cache.as_ref().map(|is| {
            (
                is.hit_bytes.saturating_sub(was.hit_bytes),
                is.miss_bytes.saturating_sub(was.miss_bytes),
            )
        }),
        cached: new.cache.as_ref().map(|is| {
            let change = is.bufspace_bytes.cast_signed() - was.bufspace_bytes.cast_signed();
            (is.bufspace_bytes, change)
        }),
        clients: new.clients,
        remote: new.remote.as_ref().map(remote_state),
    }
}

/// The state of the connection to a server in a few words.
pub(super) fn remote_state(remote: &RemoteStat) -> String {
    let word = remote.condition().as_str();
    match remote.condition() {
        RemoteCondition::Down => format!("{word} {} s", remote.since_seconds),
        RemoteCondition::Silent => format!("{word} {} s", remote.silent_seconds),
        _ => word.to_owned(),
    }
}

#[allow(clippy::cast_precision_loss, reason = "a rate for people")]
fn as_float(count: u64) -> f64 {
    count as f64
}

/// The buckets of several histograms together, less those of earlier ones: the end of each, seconds, and its count, in
/// order.
fn difference(old: &[LatencyStat], new: &[LatencyStat]) -> Vec<(f64, u64)> {
    let mut counts = HashMap::<u64, (u64, u64)>::new();
    for (end, count) in old.iter().flat_map(|times| &times.buckets) {
        counts.entry(end.to_bits()).or_default().0 += count;
    }
    for (end, count) in new.iter().flat_map(|times| &times.buckets) {
        counts.entry(end.to_bits()).or_default().1 += count;
    }
    let mut buckets: Vec<(f64, u64)> = counts
        .into_iter()
        .map(|(end, (old, new))| (f64::from_bits(end), new.saturating_sub(old)))
        .filter(|(_, count)| *count > 0)
        .collect();
    buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
    buckets
}

/// The end of the bucket that `fraction` of all requests do not exceed.
fn quantile(buckets: &[(f64, u64)], fraction: f64) -> Option<f64> {
    let all: u64 = buckets.iter().map(|(_, count)| count).sum();
    let wanted = (as_float(all) * fraction).ceil().max(1.0);
    let mut sum = 0.0;
    let mut ends = buckets.iter().filter_map(|(end, count)| {
        sum += as_float(*count);
        (sum >= wanted).then_some(*end)
    });
    ends.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn stat(
        uptime_seconds: f64,
        reads: u64,
        bufspace: u64,
        hits: u64,
        misses: u64,
    ) -> Stat {
        let service = LatencyStat {
            buckets: vec![(0.001, reads / 2), (0.5, reads - reads / 2)],
            ..LatencyStat::default()
        };
        let operation = OperationStat {
            requests: reads,
            bytes: reads * 4096,
            service: Some(service),
            ..OperationStat::default()
        };
        let cache = VolumeCacheStat {
            bufspace_bytes: bufspace,
            hit_bytes: hits,
            miss_bytes: misses,
            dirty_bytes: 4096,
            ..VolumeCacheStat::default()
        };
        let volume = VolumeStat {
            name: "disk".to_owned(),
            state: VolumeCondition::Serving,
            operations: [("read".to_owned(), operation)].into(),
            cache: Some(cache),
            ..VolumeStat::default()
        };
        Stat { uptime_seconds, volumes: vec![volume], ..Stat::default() }
    }

    #[test]
    fn rates_are_those_of_the_time_between() {
        let (before, now) = (stat(10.0, 100, 1 << 20, 0, 100), stat(12.0, 300, 1 << 19, 300, 200));
        let [disk] = &rates(&before, &now)[..] else { panic!() };
        assert_eq!((disk.reads, disk.read_bytes, disk.writes), (100.0, 409_600.0, 0.0));
        assert_eq!((disk.p50, disk.p99), (Some(0.001), Some(0.5)));
        assert_eq!((disk.hits, disk.cached), (Some((300, 100)), Some((1 << 19, -(1 << 19)))));
        assert_eq!(disk.dirty, 4096);
        // Without requests there are no times.
        let [idle] = &rates(&now, &Stat { uptime_seconds: 13.0, ..now.clone() })[..] else {
            panic!()
        };
        assert_eq!((idle.reads, idle.p50), (0.0, None));
    }

    #[test]
    fn after_a_restart_rates_begin_at_zero() {
        let [disk] = &rates(&stat(10.0, 100, 1 << 20, 0, 100), &stat(2.0, 20, 4096, 0, 0))[..]
        else {
            panic!()
        };
        assert_eq!((disk.reads, disk.cached), (10.0, Some((4096, 4096))));
    }

    #[test]
    fn the_state_of_a_server_is_told_in_a_few_words() {
        let remote = |connections, silent_seconds, in_flight| {
            remote_state(&RemoteStat {
                connections,
                silent_seconds,
                in_flight,
                since_seconds: 7,
                ..RemoteStat::default()
            })
        };
        let told = [remote(0, 0, 0), remote(0, 0, 1), remote(1, 0, 0), remote(2, 19, 1)];
        assert_eq!(told, ["idle", "down 7 s", "up", "silent 19 s"]);
    }
}
