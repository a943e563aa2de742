//! The tables of `ebbd stat`.

use ebb_api::stat::{
    BdiStat, CacheStat, MemoryStat, OperationStat, PoolStat, PressureStat, RemoteCondition, Stat,
    VolumeCondition, VolumeStat, WorkerStat, ZoneStat,
};

use ebb_api::{LimitGroupStat, LimitStat};

use super::table::TextTable;
use super::{show_clusters, show_guests};
use crate::cli::StatTopic;
use ebb_config::plural;

/// A number of bytes in short form.
pub(super) fn bytes(bytes: u64) -> String {
    for (unit, shift) in [("T", 40), ("G", 30), ("M", 20), ("K", 10)] {
        let whole = bytes >> shift;
        if whole > 0 {
            let tenths = (bytes - (whole << shift)).saturating_mul(10) >> shift;
            return format!("{whole}.{tenths}{unit}");
        }
    }
    bytes.to_string()
}

/// The resident memory of the daemon; 0 is a figure that it could not read.
pub(super) fn resident(size: u64) -> String {
    match size {
        0 => "resident memory unknown".to_owned(),
        size => format!("{} resident", bytes(size)),
    }
}

/// The tables of a topic; if there are none, a line that says so.
pub(super) fn or_none(tables: &str, topic: Option<StatTopic>) -> String {
    let none = match topic {
        Some(StatTopic::Xen) => "no disk of a Xen guest is connected\n",
        Some(StatTopic::Vhost) => "no frontend of vhost-user is connected\n",
        Some(StatTopic::Remote) => "no volume is on an NBD server\n",
        Some(StatTopic::Cluster) => "no volume is in a Ceph cluster\n",
        Some(StatTopic::Limit) => "no volume and no group has limits\n",
        _ => "",
    };
    if tables.is_empty() { none.to_owned() } else { tables.to_owned() }
}

/// All tables.
pub(super) fn all(stat: &Stat) -> String {
    let mut out = format!(
        "ebbd {}, up {:.0} s, {}, {}\n",
        stat.version,
        stat.uptime_seconds,
        resident(stat.resident_bytes),
        plural(stat.clients, "client")
    );
    let silent = stat.workers.iter().filter(|worker| !worker.answers);
    for worker in silent {
        out.push_str(&format!("worker {} does not respond\n", worker.worker));
    }
    if let Some(stat) = &stat.pressure {
        out.push_str(&pressure(stat));
    }
    out.push_str(&volumes(&stat.volumes));
    out.push_str(&show_clusters::clusters(&stat.clusters));
    out.push_str(&limits(&stat.volumes, &stat.limit_groups));
    out.push_str(&show_guests::xen(&stat.xen));
    out.push_str(&show_guests::vhost(&stat.vhost));
    if let Some(of_all) = &stat.cache {
        out.push_str(&cache(of_all, &stat.volumes));
    }
    if !stat.bdis.is_empty() {
        out.push('\n');
        out.push_str(&bdis(&stat.bdis));
    }
    if let Some(stat) = &stat.memory {
        out.push_str(&memory(stat));
    }
    out
}

pub(super) fn pressure(pressure: &PressureStat) -> String {
    let [decays, squeezes, drains, last] = pressure.events;
    format!(
        "\npressure L{} ({}) for {:.0} s: {}\nevents   {squeezes} squeeze, {drains} drain, \
         {last} last resort, {decays} decay; the last {:.0} s ago\nsources  {}\n",
        pressure.level,
        pressure.name,
        pressure.since_seconds,
        pressure.cause,
        pressure.event_seconds,
        if pressure.listening.is_empty() {
            "none".to_owned()
        } else {
            pressure.listening.join("\n         ")
        },
    )
}

/// Volumes that are not served or have lost writes, each with the cause and a remedy.
fn show_failures(volumes: &[VolumeStat]) -> String {
    let mut out = String::new();
    for volume in volumes
        .iter()
        .filter(|volume| !matches!(volume.state, VolumeCondition::Unset | VolumeCondition::Serving))
    {
        let name = &volume.name;
        if let Some(loss) = &volume.loss {
            out.push_str(&format!(
                "{name} may have lost writes {:.0} s ago, and all its flushes fail: {}\n    {}\n",
                loss.since_seconds, loss.error, loss.remedy
            ));
        }
        let line = match &volume.failure {
            // The loss is told above, the outage with the remote store or by `ebbd status`.
            None if volume.state.is_served() => continue,
            Some(failure) => {
                let since = failure.since_seconds;
                let tries = match failure.next_seconds {
                    Some(next) => {
                        let attempts = plural(failure.attempts, "attempt");
                        format!("{attempts} in {since:.0} s, the next in {next:.0} s")
                    }
                    None if failure.removed => {
                        let name = &volume.name;
                        format!("removed {since:.0} s ago; `ebbd volume remove {name}` tries again")
                    }
                    None => {
                        format!("its file was read {since:.0} s ago; `ebbd reload` reads it again")
                    }
                };
                format!("{name} is not served: {}\n    {tries}\n", failure.reason)
            }
            None => format!("{name} is {}\n", volume.state),
        };
        out.push_str(&line);
    }
    if out.is_empty() { out } else { format!("\n{out}") }
}

pub(super) fn volumes(volumes: &[VolumeStat]) -> String {
    let titles =
        ["VOLUME", "SIZE", "CLIENTS", "READS", "READ", "WRITES", "WRITTEN", "FLUSHES", "ERRORS"];
    let mut table = TextTable::new(&titles, 1);
    for volume in volumes {
        let of = |name: &str| volume.operations.get(name).cloned().unwrap_or_default();
        let (read, write, flush) = (of("read"), of("write"), of("flush"));
        let errors = |sum: u64, stat: &OperationStat| sum.saturating_add(stat.errors);
        table.row([
            volume.name.clone(),
            volume.opened().map_or_else(|| "-".to_owned(), |open| bytes(open.size_bytes)),
            volume.clients.to_string(),
            read.requests.to_string(),
            bytes(read.bytes),
            write.requests.to_string(),
            bytes(write.bytes),
            flush.requests.to_string(),
            volume.operations.values().fold(0, errors).to_string(),
        ]);
    }
    let (times, failures) = (show_times(volumes), show_failures(volumes));
    let overlays = overlays(volumes);
    format!("\n{}{times}{overlays}{failures}{}", table.text(), remotes(volumes))
}

/// A row for each overlay: what its delta holds, the memory of its own layer and of those below, and what its reads found in these.
fn overlays(volumes: &[VolumeStat]) -> String {
    let titles =
        ["OVERLAY", "OWN", "LAYERS", "OWN CACHE", "SHARED CACHE", "SHARED HIT", "FOUND", "MISSED"];
    let mut table = TextTable::new(&titles, 1);
    let mut any = false;
    for volume in volumes.iter().filter(|volume| volume.layers > 1) {
        any = true;
        table.row([
            volume.name.clone(),
            volume.own_bytes.map_or_else(|| "-".to_owned(), bytes),
            volume.layers.to_string(),
            bytes(volume.cache.as_ref().map_or(0, |own| own.bufspace_bytes)),
            bytes(volume.shared_cache_bytes),
            share(volume.shared_hit_bytes, volume.shared_miss_bytes),
            bytes(volume.shared_hit_bytes),
            bytes(volume.shared_miss_bytes),
        ]);
    }
    if any { format!("\n{}", table.text()) } else { String::new() }
}

/// A row for each volume with limits and each group: the limits together, and what they have done.
pub(super) fn limits(volumes: &[VolumeStat], groups: &[LimitGroupStat]) -> String {
    let titles =
        ["LIMITS OF", "GROUP", "REQUESTS/S", "BYTES/S", "BURST", "THROTTLED", "THROTTLED FOR"];
    let mut table = TextTable::new(&titles, 0b11);
    let volumes = volumes
        .iter()
        .filter_map(|volume| volume.limits.as_ref().map(|limits| (volume.name.clone(), limits)));
    let groups = groups.iter().map(|group| (format!("group {}", group.name), &group.limits));
    let rows: Vec<_> = volumes.chain(groups).collect();
    if rows.is_empty() {
        return String::new();
    }
    for (name, limits) in rows {
        let [requests, bandwidth] = limit_values(limits);
        table.row([
            name,
            limits.group.clone().unwrap_or_else(|| "-".to_owned()),
            requests,
            bandwidth,
            format!("{}ms", limits.burst_ms),
            limits.throttled_requests.to_string(),
            format!("{:.1}s", limits.throttled_seconds),
        ]);
    }
    format!("\n{}", table.text())
}

/// The limits of requests and of bytes per second, each for all or for reads and writes apart: "5000", "r 100 w 50".
pub(crate) fn limit_values(limits: &LimitStat) -> [String; 2] {
    let parts = |[all, read, write]: [u64; 3], text: fn(u64) -> String| {
        let parts = [("", all), ("r ", read), ("w ", write)].into_iter();
        let parts: Vec<_> = parts
            .filter(|(_, value)| *value > 0)
            .map(|(prefix, value)| format!("{prefix}{}", text(value)))
            .collect();
        if parts.is_empty() { "-".to_owned() } else { parts.join(" ") }
    };
    [
        parts([limits.iops, limits.read_iops, limits.write_iops], |value| value.to_string()),
        parts([limits.bandwidth, limits.read_bandwidth, limits.write_bandwidth], bytes),
    ]
}

/// A row for each kind of request that a volume has completed: its quantiles, and how many requests waited before.
fn show_times(volumes: &[VolumeStat]) -> String {
    let titles = ["TIMES OF", "REQUESTS", "P50", "P99", "P99.9", "WAITED", "P99 OF WAITS"];
    let mut table = TextTable::new(&titles, 1);
    let mut any = false;
    for volume in volumes {
        for (operation, stat) in &volume.operations {
            let Some(service) = &stat.service else { continue };
            any = true;
            table.row([
                format!("{} {operation}", volume.name),
                service.count.to_string(),
                time(service.p50_seconds),
                time(service.p99_seconds),
                time(service.p999_seconds),
                stat.queued.as_ref().map_or(0, |queued| queued.count).to_string(),
                stat.queued.as_ref().map_or("-".to_owned(), |queued| time(queued.p99_seconds)),
            ]);
        }
    }
    if any { format!("\n{}", table.text()) } else { String::new() }
}

/// A time with three digits or so.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        0.0..1e-3 => format!("{:.1}us", seconds * 1e6),
        1e-3..1.0 => format!("{:.1}ms", seconds * 1e3),
        _ => format!("{seconds:.1}s"),
    }
}

/// A paragraph for each volume whose store is an NBD server: the state of its connections.
pub(super) fn remotes(volumes: &[VolumeStat]) -> String {
    let mut out = String::new();
    for volume in volumes {
        let Some(remote) = &volume.remote else { continue };
        let state = match remote.condition() {
            RemoteCondition::Idle => "not connected, as no request has needed it yet",
            RemoteCondition::Down => "not connected",
            _ => "connected",
        };
        let state = match remote.silent_seconds {
            0 => state.to_owned(),
            seconds => format!("{state}, no replies for {seconds} s"),
        };
        let last = remote.last_error.as_deref().unwrap_or("none");
        out.push_str(&format!(
            "\n{}: server {}, {state} ({}, for {} s), {}\n  \
             {} in flight, {} sent again, {} not flushed\n  \
             last error: {last}\n",
            volume.name,
            remote.address,
            plural(remote.connections, "connection"),
            remote.since_seconds,
            plural(remote.reconnects, "reconnect"),
            plural(remote.in_flight, "request"),
            remote.replayed,
            plural(remote.unflushed, "write"),
        ));
    }
    out
}

pub(super) fn cache(cache: &CacheStat, volumes: &[VolumeStat]) -> String {
    let limit = match cache.max_bytes {
        0 => String::new(),
        max => format!(" (limit {})", bytes(max)),
    };
    let mut out = format!(
        "\ncache    bufspace {}{limit}, bufwiredspace {}, bufkvaspace {}; {}\n\
         reads    {} hit, {} missed; lent: {} intact, {} discarded; {} evicted, {} of it by proactive reclaim\n",
        bytes(cache.bufspace_bytes),
        bytes(cache.bufwiredspace_bytes),
        bytes(cache.bufkvaspace_bytes),
        cache.state,
        bytes(cache.hit_bytes),
        bytes(cache.miss_bytes),
        bytes(cache.rewire_kept_bytes),
        bytes(cache.rewire_lost_bytes),
        bytes(cache.evicted_bytes),
        bytes(cache.proactively_reclaimed_bytes),
    );
    let titles =
        ["CACHED", "MODE", "DIRTY", "BUFSPACE", "WIRED", "KVA", "HIT", "FOUND", "MISSED", "LOST"];
    let mut table = TextTable::new(&titles, 0b11);
    let mut any = false;
    for volume in volumes {
        let Some(own) = &volume.cache else { continue };
        any = true;
        table.row([
            volume.name.clone(),
            own.mode.clone(),
            bytes(own.dirty_bytes),
            bytes(own.bufspace_bytes),
            bytes(own.bufwiredspace_bytes),
            bytes(own.bufkvaspace_bytes),
            share(own.hit_bytes, own.miss_bytes),
            bytes(own.hit_bytes),
            bytes(own.miss_bytes),
            bytes(own.rewire_lost_bytes),
        ]);
    }
    if any {
        out.push('\n');
        out.push_str(&table.text());
    }
    out
}

/// A row for each worker.
pub(super) fn workers(workers: &[WorkerStat]) -> String {
    let titles = ["WORKER", "STATE", "ENTERS", "OPERATIONS", "POLLS", "UNSUCCESSFUL"];
    let mut table = TextTable::new(&titles, 0b10);
    for worker in workers {
        table.row([
            worker.worker.to_string(),
            if worker.answers { "ok" } else { "does not respond" }.to_owned(),
            worker.enters.to_string(),
            worker.operations.to_string(),
            worker.polls.to_string(),
            worker.unsuccessful_polls.to_string(),
        ]);
    }
    table.text()
}

/// A line for each, with the figures of Linux's `/sys/kernel/debug/bdi/*/stats`.
pub(super) fn bdis(bdis: &[BdiStat]) -> String {
    if bdis.is_empty() {
        return "no volume has a writeback cache\n".to_owned();
    }
    let titles = [
        "BDI",
        "VOLUMES",
        "DIRTY",
        "WRITEBACK",
        "THRESH",
        "RATE/S",
        "SHARE",
        "BUSY",
        "PAUSES",
        "LONGEST",
        "FAILS",
        "MIN",
        "MAX",
        "MAXBYTES",
        "STRICT",
        "STATE",
    ];
    let mut table = TextTable::new(&titles, 0b11);
    let percent = |part: f64| format!("{:.0}%", part * 100.0);
    // The configured value without trailing zeroes.
    let exact = |part: f64| {
        let text = format!("{:.4}", part * 100.0);
        format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
    };
    for bdi in bdis {
        table.row([
            bdi.name.clone(),
            bdi.volumes.join(","),
            bytes(bdi.dirty_bytes),
            bytes(bdi.writeback_bytes),
            bytes(bdi.threshold_bytes),
            bytes(bdi.bandwidth_bytes_per_second),
            percent(bdi.share),
            percent(bdi.utilisation),
            bdi.pauses.to_string(),
            format!("{:.0}ms", bdi.longest_pause_seconds * 1000.0),
            bdi.failures.to_string(),
            exact(bdi.min_ratio),
            exact(bdi.max_ratio),
            bdi.max_bytes.map_or_else(|| "-".to_owned(), bytes),
            if bdi.strict_limit { "yes" } else { "no" }.to_owned(),
            if bdi.stuck { "stuck" } else { "ok" }.to_owned(),
        ]);
    }
    table.text()
}

/// `part` of `part + rest` in percent; `-` if both are 0.
pub(super) fn share(part: u64, rest: u64) -> String {
    match part.saturating_add(rest) {
        0 => "-".to_owned(),
        all => format!("{}%", u128::from(part) * 100 / u128::from(all)),
    }
}

pub(super) fn memory(memory: &MemoryStat) -> String {
    format!(
        "\nmemory   {} wired, {} lent, ceiling {}; {} waiting\n\
         returned  {}, {} emptied\n{}{}",
        bytes(memory.wired_bytes),
        bytes(memory.lent_bytes),
        bytes(memory.ceiling_bytes),
        memory.waiting,
        plural(memory.squeezes, "squeeze"),
        plural(memory.purges, "worker cache"),
        show_zones(&memory.zones),
        show_pools(&memory.pools),
    )
}

/// The columns of FreeBSD's `vmstat -z`, followed by ebbd's own.
fn show_zones(zones: &[ZoneStat]) -> String {
    let titles = [
        "ZONE", "SIZE", "LIMIT", "USED", "FREE", "REQ", "FAIL", "SLEEP", "MISS", "BUCKET", "WSS",
        "EMPTY",
    ];
    let mut table = TextTable::new(&titles, 1);
    for zone in zones {
        table.row([
            zone.name.clone(),
            zone.size.to_string(),
            zone.limit.unwrap_or(0).to_string(),
            zone.used.to_string(),
            zone.free.to_string(),
            zone.requests.to_string(),
            zone.fails.to_string(),
            zone.sleeps.to_string(),
            zone.misses.to_string(),
            zone.bucket.to_string(),
            zone.wss.to_string(),
            format!("{}s", zone.out_of_cache_seconds),
        ]);
    }
    format!("\n{}", table.text())
}

fn show_pools(pools: &[PoolStat]) -> String {
    if pools.is_empty() {
        return String::new();
    }
    let mut table = TextTable::new(&["POOL", "FREE", "LENT", "SQUEEZES", "SQUEEZED"], 1);
    for pool in pools {
        table.row([
            pool.name.clone(),
            pool.free_pages.to_string(),
            pool.lent_pages.to_string(),
            pool.squeezes.to_string(),
            pool.squeezed_pages.to_string(),
        ]);
    }
    format!("\n{}", table.text())
}

/// Says whether a key slot can be opened; `why`: the reason and the remedy, if it cannot.
pub(crate) fn key_state(usable: bool, ignored: bool, why: Option<(&str, &str)>) -> String {
    match (usable, ignored, why) {
        (true, false, _) => "can be opened".to_owned(),
        (true, true, _) => "is not tried, by its priority".to_owned(),
        (false, _, Some((reason, remedy))) => {
            format!("cannot be opened by ebbd, because {reason}: {remedy}")
        }
        (false, _, None) => "cannot be opened by ebbd".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use ebb_api::stat::{LatencyStat, VolumeCacheStat};

    use super::*;

    #[test]
    fn topic_without_tables_says_that_there_are_none() {
        for topic in [StatTopic::Xen, StatTopic::Vhost, StatTopic::Remote, StatTopic::Cluster] {
            assert!(or_none("", Some(topic)).starts_with("no "));
        }
        assert_eq!(or_none("A\n", Some(StatTopic::Limit)), "A\n");
        assert_eq!(or_none("", None), "");
    }

    #[test]
    fn sizes_are_shown_in_short_form() {
        let shown = [0, 1023, 1024, 1536, 1 << 20, (5 << 30) + (1 << 29), u64::MAX].map(bytes);
        let all = ["0", "1023", "1.0K", "1.5K", "1.0M", "5.5G", "16777215.9T"];
        assert_eq!(shown.each_ref().map(String::as_str), all);
    }

    #[test]
    fn times_of_requests_are_shown_by_operation() {
        let service = LatencyStat {
            count: 9,
            p50_seconds: 12.34e-6,
            p99_seconds: 0.0056,
            p999_seconds: 1.25,
            ..LatencyStat::default()
        };
        let queued = LatencyStat { count: 2, p99_seconds: 0.5e-3, ..LatencyStat::default() };
        let read = OperationStat { service: Some(service.clone()), ..OperationStat::default() };
        let write = OperationStat {
            service: Some(service),
            queued: Some(queued),
            ..OperationStat::default()
        };
        let operations = [("read", read), ("write", write), ("flush", OperationStat::default())];
        let volume = VolumeStat {
            name: "disk".into(),
            operations: operations.map(|(name, stat)| (name.to_owned(), stat)).into(),
            ..VolumeStat::default()
        };
        let text = show_times(&[volume]);
        let rows: Vec<Vec<&str>> =
            text.lines().skip(2).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["disk", "read", "9", "12.3us", "5.6ms", "1.2s", "0", "-"]);
        assert_eq!(rows[1], ["disk", "write", "9", "12.3us", "5.6ms", "1.2s", "2", "500.0us"]);
        assert_eq!((rows.len(), show_times(&[])), (2, String::new()));
    }

    #[test]
    fn a_loss_is_shown_with_its_error_and_its_remedy() {
        let loss = ebb_api::stat::LossStat {
            since_seconds: 3.0,
            error: "flush: EIO".into(),
            remedy: "replace the device".into(),
        };
        let volume = VolumeStat {
            name: "disk".into(),
            state: VolumeCondition::Lost,
            loss: Some(loss),
            ..VolumeStat::default()
        };
        let text = show_failures(&[volume]);
        let expected = "\ndisk may have lost writes 3 s ago, and all its flushes fail: flush: EIO\n    replace the device\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn backing_devices_are_shown_with_their_settings() {
        let stat = BdiStat {
            name: "array".into(),
            volumes: vec!["a".into(), "b".into()],
            dirty_bytes: 3 << 20,
            threshold_bytes: 4 << 20,
            share: 0.5,
            min_ratio: 0.005,
            max_ratio: 1.0,
            max_bytes: Some(7 << 20),
            strict_limit: true,
            ..BdiStat::default()
        };
        let text = bdis(&[stat]);
        let words: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        let expected = [
            "array", "a,b", "3.0M", "0", "4.0M", "0", "50%", "0%", "0", "0ms", "0", "0.5%", "100%",
            "7.0M", "yes", "ok",
        ];
        assert_eq!(words, expected, "{text}");
        assert!(bdis(&[]).contains("no volume"));
    }

    #[test]
    fn zones_are_shown_as_by_vmstat() {
        let zone = ZoneStat {
            name: "64K".into(),
            size: 65_536,
            used: 12,
            free: 3,
            requests: 1000,
            ..ZoneStat::default()
        };
        let text = show_zones(&[zone]);
        let lines: Vec<&str> = text.trim().lines().collect();
        assert!(
            lines[0].starts_with("ZONE   SIZE  LIMIT  USED  FREE   REQ  FAIL  SLEEP"),
            "{text}"
        );
        assert!(
            lines[1].starts_with("64K   65536      0    12     3  1000     0      0"),
            "{text}"
        );
    }

    #[test]
    fn the_cache_has_rows_only_for_volumes_that_use_it() {
        let plain = VolumeStat { name: "plain".into(), ..VolumeStat::default() };
        let none = cache(&CacheStat::default(), std::slice::from_ref(&plain));
        assert!(none.contains("bufspace 0") && !none.contains("CACHED"), "{none}");
        let cached = VolumeStat { cache: Some(Default::default()), ..plain.clone() };
        let one = cache(&CacheStat::default(), &[plain, cached]);
        assert_eq!(one.lines().skip_while(|line| !line.starts_with("CACHED")).count(), 2, "{one}");
    }

    #[test]
    fn an_overlay_is_shown_with_what_it_shares() {
        let plain = VolumeStat { name: "plain".into(), layers: 1, ..VolumeStat::default() };
        assert_eq!(overlays(std::slice::from_ref(&plain)), "");
        let overlay = VolumeStat {
            name: "web".into(),
            layers: 3,
            cache: Some(VolumeCacheStat { bufspace_bytes: 1 << 20, ..Default::default() }),
            own_bytes: Some(7 << 20),
            shared_cache_bytes: 5 << 20,
            shared_hit_bytes: 3 << 10,
            shared_miss_bytes: 1 << 10,
            ..VolumeStat::default()
        };
        let text = volumes(&[plain, overlay]);
        let row = text.lines().skip_while(|line| !line.starts_with("OVERLAY")).nth(1).unwrap();
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words, ["web", "7.0M", "3", "1.0M", "5.0M", "75%", "3.0K", "1.0K"], "{text}");
    }

    #[test]
    fn shares_are_shown_in_percent() {
        let shown = [share(0, 0), share(0, 1), share(1, 2), share(u64::MAX, 0)];
        assert_eq!(shown, ["-", "0%", "33%", "100%"]);
    }
}
