//! `ebbd stat --watch`: rates between two samples of the statistics.

use ebb_api::stat::{OperationStat, Stat, VolumeCacheStat, VolumeStat};

use super::show::{TextTable, bytes, share};

/// The rates between `before` and `now`, and the cache memory of each volume now. The counters of a
/// new volume begin at 0.
pub(super) fn flow(before: &Stat, now: &Stat) -> String {
    let seconds = now.uptime_seconds - before.uptime_seconds;
    // After a restart of the daemon its uptime is shorter, and its counters begin at 0.
    let (before, seconds) =
        if seconds > 0.0 { (before, seconds) } else { (&Stat::default(), now.uptime_seconds) };
    let mut out = summary(now);
    let titles = [
        "VOLUME",
        "READS/s",
        "READ/s",
        "WRITES/s",
        "WRITTEN/s",
        "HIT",
        "BUFSPACE",
        "CHANGE",
        "WIRED",
        "LOST/s",
    ];
    let mut table = TextTable::new(&titles, 1);
    for volume in &now.volumes {
        let empty = VolumeStat::default();
        let old = before.volumes.iter().find(|old| old.name == volume.name).unwrap_or(&empty);
        table.row(row(old, volume, seconds));
    }
    out.push_str(&table.text());
    out
}

fn summary(now: &Stat) -> String {
    let pressure = now.pressure.as_ref().map_or_else(
        || "pressure unknown".to_owned(),
        |pressure| format!("L{} ({})", pressure.level, pressure.name),
    );
    let memory = now.memory.as_ref().map_or_else(String::new, |memory| {
        format!(", {} wired, {} lent", bytes(memory.wired_bytes), bytes(memory.unwired_bytes))
    });
    let cache = now.cache.as_ref().map_or_else(String::new, |cache| {
        format!("; cache {} ({})", bytes(cache.bufspace_bytes), cache.state)
    });
    format!(
        "{pressure}, {} resident{memory}{cache}, {} client(s)\n",
        bytes(now.resident_bytes),
        now.clients
    )
}

fn row(old: &VolumeStat, new: &VolumeStat, seconds: f64) -> [String; 10] {
    let of = |volume: &VolumeStat, name| -> OperationStat {
        volume.operations.get(name).cloned().unwrap_or_default()
    };
    let (reads, writes) =
        ((of(old, "read"), of(new, "read")), (of(old, "write"), of(new, "write")));
    let per_second = |from: u64, to: u64| rate(to.saturating_sub(from), seconds);
    let cells = |from: &OperationStat, to: &OperationStat| {
        [
            per_second(from.requests, to.requests).to_string(),
            bytes(per_second(from.bytes, to.bytes)),
        ]
    };
    let [reads, read] = cells(&reads.0, &reads.1);
    let [writes, written] = cells(&writes.0, &writes.1);
    let none = VolumeCacheStat::default();
    let was = old.cache.as_ref().unwrap_or(&none);
    let [hit, space, change, wired, lost] = match &new.cache {
        None => ["-", "-", "-", "-", "-"].map(str::to_owned),
        Some(is) => [
            share(
                is.hit_bytes.saturating_sub(was.hit_bytes),
                is.miss_bytes.saturating_sub(was.miss_bytes),
            ),
            bytes(is.bufspace_bytes),
            change(was.bufspace_bytes, is.bufspace_bytes),
            bytes(is.bufwiredspace_bytes),
            bytes(per_second(was.rewire_lost_bytes, is.rewire_lost_bytes)),
        ],
    };
    [new.name.clone(), reads, read, writes, written, hit, space, change, wired, lost]
}

fn change(from: u64, to: u64) -> String {
    match to.checked_sub(from) {
        Some(0) => "0".to_owned(),
        Some(more) => format!("+{}", bytes(more)),
        None => format!("-{}", bytes(from - to)),
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a rate for people; casts of floats saturate"
)]
fn rate(count: u64, seconds: f64) -> u64 {
    (count as f64 / seconds) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(uptime_seconds: f64, reads: u64, bufspace: u64, hits: u64, misses: u64) -> Stat {
        let operation =
            OperationStat { requests: reads, bytes: reads * 4096, ..OperationStat::default() };
        let cache = VolumeCacheStat {
            bufspace_bytes: bufspace,
            hit_bytes: hits,
            miss_bytes: misses,
            ..VolumeCacheStat::default()
        };
        let volume = VolumeStat {
            name: "disk".to_owned(),
            operations: [("read".to_owned(), operation)].into(),
            cache: Some(cache),
            ..VolumeStat::default()
        };
        Stat { uptime_seconds, volumes: vec![volume], ..Stat::default() }
    }

    fn cells(text: &str) -> Vec<&str> {
        text.lines().last().unwrap().split_whitespace().collect()
    }

    #[test]
    fn rates_and_changes_are_those_of_the_time_between() {
        let text = flow(&stat(10.0, 100, 1 << 20, 0, 100), &stat(12.0, 300, 1 << 19, 300, 200));
        let expected = ["disk", "100", "400.0K", "0", "0", "75%", "512.0K", "-512.0K", "0", "0"];
        assert_eq!(cells(&text), expected, "{text}");
    }

    #[test]
    fn after_a_restart_rates_begin_at_zero() {
        let text = flow(&stat(10.0, 100, 1 << 20, 0, 100), &stat(2.0, 20, 4096, 0, 0));
        let expected = ["disk", "10", "40.0K", "0", "0", "-", "4.0K", "+4.0K", "0", "0"];
        assert_eq!(cells(&text), expected, "{text}");
    }
}
