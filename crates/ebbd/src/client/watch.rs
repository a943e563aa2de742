//! The table of `ebbd stat --watch`: rates between two samples of the statistics.

use ebb_api::stat::Stat;
use ebb_config::plural;

use super::rates::{VolumeRates, rates};
use super::show::{bytes, share, time};
use super::table::{TextTable, Tint};

/// The rates between `before` and `now`, and the cache memory of each volume now; of one volume if it is named.
pub(super) fn flow(before: &Stat, now: &Stat, name: Option<&str>) -> String {
    let titles = [
        "VOLUME",
        "STATE",
        "READS/s",
        "READ/s",
        "WRITES/s",
        "WRITTEN/s",
        "P50",
        "P99",
        "ERRORS/s",
        "DIRTY",
        "HIT",
        "BUFSPACE",
        "CHANGE",
        "REMOTE",
    ];
    let mut table = TextTable::new(&titles, 0b10_0000_0000_0011);
    let all = rates(before, now).into_iter();
    for volume in all.filter(|volume| name.is_none_or(|name| volume.name == name)) {
        table.row(row(&volume));
        table.tint_last(tint(&volume));
    }
    format!("{}{}", summary(now), table.text())
}

/// The line above the table.
pub(super) fn summary(now: &Stat) -> String {
    let pressure = now.pressure.as_ref().map_or_else(
        || "pressure unknown".to_owned(),
        |pressure| format!("L{} ({})", pressure.level, pressure.name),
    );
    let memory = now.memory.as_ref().map_or_else(String::new, |memory| {
        format!(", {} wired, {} lent", bytes(memory.wired_bytes), bytes(memory.lent_bytes))
    });
    let cache = now.cache.as_ref().map_or_else(String::new, |cache| {
        format!("; cache {} ({})", bytes(cache.bufspace_bytes), cache.state)
    });
    format!(
        "{pressure}, {} resident{memory}{cache}, {}\n",
        bytes(now.resident_bytes),
        plural(now.clients, "client")
    )
}

/// The colour of a volume's row.
pub(super) fn tint(volume: &VolumeRates) -> Tint {
    use ebb_api::stat::VolumeStat;
    match &*volume.state {
        VolumeStat::FAILED | VolumeStat::LOST => Tint::Bad,
        _ if volume.errors > 0.0 => Tint::Bad,
        VolumeStat::OPENING | VolumeStat::CLOSING => Tint::Warning,
        _ if volume.remote.as_ref().is_some_and(|remote| !["up", "idle"].contains(&&**remote)) => {
            Tint::Warning
        }
        _ => Tint::Plain,
    }
}

/// The cells of a volume's row.
pub(super) fn row(volume: &VolumeRates) -> [String; 14] {
    let none = || "-".to_owned();
    [
        volume.name.clone(),
        volume.state.clone(),
        whole(volume.reads).to_string(),
        bytes(whole(volume.read_bytes)),
        whole(volume.writes).to_string(),
        bytes(whole(volume.written_bytes)),
        volume.p50.map_or_else(none, time),
        volume.p99.map_or_else(none, time),
        whole(volume.errors.ceil()).to_string(),
        bytes(volume.dirty),
        volume.hits.map_or_else(none, |(hits, misses)| share(hits, misses)),
        volume.cached.map_or_else(none, |(space, _)| bytes(space)),
        volume.cached.map_or_else(none, |(_, change)| signed(change)),
        volume.remote.clone().unwrap_or_else(none),
    ]
}

fn signed(change: i64) -> String {
    let sign = match change {
        0 => "",
        1.. => "+",
        _ => "-",
    };
    format!("{sign}{}", bytes(change.unsigned_abs()))
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate for people; casts of floats saturate"
)]
pub(super) fn whole(rate: f64) -> u64 {
    rate as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_shown_with_times_dirty_data_and_the_state_of_its_server() {
        let disk = VolumeRates {
            name: "disk".into(),
            state: "serving".into(),
            reads: 100.0,
            read_bytes: 409_600.0,
            p50: Some(0.001),
            p99: Some(0.5),
            errors: 0.5,
            dirty: 4096,
            hits: Some((3, 1)),
            cached: Some((1 << 19, -(1 << 19))),
            remote: Some("up".into()),
            ..VolumeRates::default()
        };
        let expected = [
            "disk", "serving", "100", "400.0K", "0", "0", "1.0ms", "500.0ms", "1", "4.0K", "75%",
            "512.0K", "-512.0K", "up",
        ];
        assert_eq!(row(&disk), expected);
        assert_eq!(tint(&disk), Tint::Bad);
        assert_eq!(tint(&VolumeRates { errors: 0.0, ..disk.clone() }), Tint::Plain);
        let silent = VolumeRates { errors: 0.0, remote: Some("silent 3 s".into()), ..disk };
        assert_eq!(tint(&silent), Tint::Warning);
        assert_eq!(signed(5), "+5");
    }
}
