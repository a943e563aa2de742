//! The table of `ebbd stat --watch`: rates between two samples of the statistics.

use std::io::IsTerminal;

use ebb_api::stat::{Stat, VolumeCondition};
use ratatui::crossterm::terminal;

use super::rates::{VolumeRates, rates};
use super::show::{bytes, resident, share, time};
use super::table::{TextTable, Tint};
use ebb_config::plural;

/// The rates between `before` and `now`, and the cache memory of each volume now; of one volume if it is named.
pub(super) fn flow(before: &Stat, now: &Stat, name: Option<&str>) -> String {
    let all = rates(before, now).into_iter();
    let all = all.filter(|volume| name.is_none_or(|name| volume.name == name));
    let rows: Vec<_> = all.map(|volume| (row(&volume), tint(&volume))).collect();
    // A file or a pipe has no width.
    let width = std::io::stdout().is_terminal().then(|| terminal::size().ok()).flatten();
    let width = width.map_or(usize::MAX, |(columns, _)| usize::from(columns));
    let shown: Vec<usize> = columns(&rows, width).into_iter().map(|(column, _)| column).collect();
    let only = |cells: &[String; COLUMNS]| -> Vec<String> {
        shown.iter().filter_map(|column| cells.get(*column).cloned()).collect()
    };
    let left = shown.iter().enumerate().filter(|(_, column)| is_left(**column));
    let left = left.fold(0, |bits, (at, _)| bits | 1 << at);
    let mut table = TextTable::with_titles(only(&TITLES.map(str::to_owned)), left);
    for (cells, tint) in &rows {
        table.cells(only(cells));
        table.tint_last(*tint);
    }
    let [load, memory] = summary(now);
    format!("{load}\n{memory}\n{}", table.text())
}

/// The number of columns of the table.
pub(super) const COLUMNS: usize = 14;

/// The titles of the table's columns.
pub(super) const TITLES: [&str; COLUMNS] = [
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

/// The order in which columns are left out of a terminal that is too narrow for all: their indices.
const LEFT_OUT: [usize; 11] = [12, 11, 6, 10, 5, 3, 8, 13, 9, 4, 2];

/// Whether a column is aligned to the left: the name and the words, not the numbers.
pub(super) fn is_left(column: usize) -> bool {
    matches!(column, 0 | 1 | 13)
}

/// The columns that fit in `width`, and the width of each.
pub(super) fn columns(rows: &[([String; COLUMNS], Tint)], width: usize) -> Vec<(usize, usize)> {
    let widest = |column: usize| {
        let cells =
            rows.iter().filter_map(|(row, _)| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(TITLES.get(column).map(|title| title.len())).max().unwrap_or(0)
    };
    let mut columns: Vec<(usize, usize)> =
        (0..COLUMNS).map(|column| (column, widest(column))).collect();
    for out in LEFT_OUT {
        // There are two spaces between columns.
        let needed: usize = columns.iter().map(|(_, width)| width + 2).sum();
        if needed <= width.saturating_add(2) {
            break;
        }
        columns.retain(|(column, _)| *column != out);
    }
    columns
}

/// The lines above the table: what the daemon does, and its memory.
pub(super) fn summary(now: &Stat) -> [String; 2] {
    let serving =
        now.volumes.iter().filter(|volume| volume.state == VolumeCondition::Serving).count();
    let pressure = now.pressure.as_ref().map_or_else(
        || "unknown".to_owned(),
        |pressure| format!("L{} ({})", pressure.level, pressure.name),
    );
    let memory = now.memory.as_ref().map_or_else(String::new, |memory| {
        format!(", {} wired, {} lent", bytes(memory.wired_bytes), bytes(memory.lent_bytes))
    });
    let cache = now.cache.as_ref().map_or_else(String::new, |cache| {
        format!("; cache {} ({})", bytes(cache.bufspace_bytes), cache.state)
    });
    [
        format!(
            "ebbd {}: {serving} of {} serving, {}, pressure {pressure}",
            now.version,
            plural(now.volumes.len() as u64, "volume"),
            plural(now.clients, "client"),
        ),
        format!("memory: {}{memory}{cache}", resident(now.resident_bytes)),
    ]
}

/// The colour of a volume's row.
pub(super) fn tint(volume: &VolumeRates) -> Tint {
    match volume.state {
        VolumeCondition::Failed
        | VolumeCondition::Lost
        | VolumeCondition::Disconnected
        | VolumeCondition::Failing => Tint::Bad,
        _ if volume.errors > 0.0 => Tint::Bad,
        VolumeCondition::Opening | VolumeCondition::Closing | VolumeCondition::Silent => {
            Tint::Warning
        }
        _ if volume.remote.as_ref().is_some_and(|remote| !["up", "idle"].contains(&&**remote)) => {
            Tint::Warning
        }
        _ => Tint::Plain,
    }
}

/// The cells of a volume's row.
pub(super) fn row(volume: &VolumeRates) -> [String; COLUMNS] {
    let none = || "-".to_owned();
    [
        volume.name.clone(),
        volume.state.to_string(),
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
    use ebb_api::stat::VolumeStat;

    use super::*;

    #[test]
    fn a_volume_is_shown_with_times_dirty_data_and_the_state_of_its_server() {
        let disk = VolumeRates {
            name: "disk".into(),
            state: VolumeCondition::Serving,
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

    #[test]
    fn columns_are_left_out_until_the_table_fits() {
        let rows =
            [(row(&VolumeRates { name: "disk".into(), ..VolumeRates::default() }), Tint::Plain)];
        for width in [40, 60, 80, 100, usize::MAX] {
            let shown = columns(&rows, width);
            let needed = shown.iter().map(|(_, width)| width + 2).sum::<usize>() - 2;
            assert!(needed <= width, "{shown:?} in {width}");
            assert!(shown.iter().any(|(column, _)| TITLES[*column] == "P99"), "{shown:?}");
        }
        assert_eq!(columns(&rows, usize::MAX).len(), COLUMNS);
    }

    #[test]
    fn the_lines_above_the_table_fit_a_narrow_terminal() {
        let volume = VolumeStat { state: VolumeCondition::Serving, ..VolumeStat::default() };
        let now =
            Stat { version: "0.1.0".into(), clients: 1, volumes: vec![volume], ..Stat::default() };
        let [load, memory] = summary(&now);
        assert_eq!(load, "ebbd 0.1.0: 1 of 1 volume serving, 1 client, pressure unknown");
        assert_eq!(memory, "memory: resident memory unknown");
    }
}
