//! `ebbd limit`: sets the parameters of limits, or shows the limits in force.

use ebb_api::{ChangeView, LimitStat, OperationView, SetBody};
use ebb_config::{Size, plural};

use super::show::bytes;
use super::table::TextTable;
use super::{ClientError, DaemonClient, encoded, text};
use crate::cli::LimitArgs;

/// The parameters of limits.
const NAMES: [&str; 7] = [
    "limit_iops",
    "limit_read_iops",
    "limit_write_iops",
    "limit_bandwidth",
    "limit_read_bandwidth",
    "limit_write_bandwidth",
    "limit_burst_ms",
];

/// Sets limits, and returns the changes as text; without one, returns the limits.
///
/// # Errors
/// [`ClientError`].
pub fn limit(args: &LimitArgs) -> Result<String, ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let owner = match (&args.volume, &args.group) {
        (Some(volume), _) => format!("/v1/volumes/{}", encoded(volume)),
        (None, Some(group)) => format!("/v1/limit-groups/{}", encoded(group)),
        (None, None) => String::new(),
    };
    let mut changes = Vec::new();
    let mut change = |name: &str, value: Option<String>| {
        let target = format!("{owner}/parameters/{name}");
        let body = value.map(|value| text(SetBody { value: value.into() }));
        let method = if body.is_some() { "PUT" } else { "DELETE" };
        changes.push(daemon.json::<ChangeView>(method, &target, body.as_deref())?);
        Ok::<_, ClientError>(())
    };
    if args.clear && args.persist {
        let _: OperationView = daemon.json("DELETE", &format!("{owner}/limits/keep"), None)?;
    }
    if args.clear {
        for name in NAMES {
            change(name, None)?;
        }
        if args.volume.is_some() && args.group.is_none() && !args.no_group {
            change("limit_group", None)?;
        }
    }
    if args.no_group {
        change("limit_group", Some("none".to_owned()))?;
    } else if let (Some(_), Some(group)) = (&args.volume, &args.group) {
        change("limit_group", Some(group.clone()))?;
    }
    let size = |size: Option<Size>| size.map(Size::bytes);
    let given = [
        args.iops,
        args.read_iops,
        args.write_iops,
        size(args.bandwidth),
        size(args.read_bandwidth),
        size(args.write_bandwidth),
        args.burst,
    ];
    let moved = args.no_group || args.volume.is_some() && args.group.is_some();
    let others = moved || given.iter().any(Option::is_some);
    for (name, value) in NAMES.into_iter().zip(given) {
        if let Some(value) = value {
            change(name, Some(value.to_string()))?;
        }
    }
    if args.persist && (others || !args.clear) {
        let _: OperationView = daemon.json("POST", &format!("{owner}/limits/keep"), None)?;
    }
    if changes.is_empty() && !args.persist {
        let stat: LimitStat = daemon.json("GET", &format!("{owner}/limits"), None)?;
        return Ok(if args.json { format!("{}\n", text(&stat)) } else { shown(&stat) });
    }
    if args.json {
        return Ok(format!("{}\n", text(&changes)));
    }
    let line = |change: &ChangeView| format!("{}: {} -> {}\n", change.name, change.from, change.to);
    let lines: String = changes.iter().filter(|one| one.from != one.to).map(line).collect();
    let cleared = args.clear && !others && lines.is_empty();
    Ok(match (cleared, args.persist) {
        (false, _) => lines,
        (true, false) => "no limits were set\n".to_owned(),
        (true, true) => "no limits are kept\n".to_owned(),
    })
}

/// Limits as a table: a row for reads and writes together, reads, and writes.
fn shown(stat: &LimitStat) -> String {
    let number = |value: u64| if value == 0 { "-".to_owned() } else { value.to_string() };
    let size = |value: u64| if value == 0 { "-".to_owned() } else { bytes(value) };
    let mut table = TextTable::new(&["LIMIT OF", "REQUESTS/S", "BYTES/S"], 1);
    table.row(["all".to_owned(), number(stat.iops), size(stat.bandwidth)]);
    table.row(["reads".to_owned(), number(stat.read_iops), size(stat.read_bandwidth)]);
    table.row(["writes".to_owned(), number(stat.write_iops), size(stat.write_bandwidth)]);
    let group = stat.group.as_deref().map(|group| format!("group {group}\n")).unwrap_or_default();
    format!(
        "{}{group}burst {} ms; {} throttled, for {:.1} s\n",
        table.text(),
        stat.burst_ms,
        plural(stat.throttled_requests, "request"),
        stat.throttled_seconds
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_shown_with_what_they_have_done() {
        let stat = LimitStat {
            group: Some("gold".into()),
            iops: 5000,
            write_bandwidth: 200 << 20,
            burst_ms: 100,
            throttled_requests: 3,
            throttled_seconds: 1.25,
            ..LimitStat::default()
        };
        let text = shown(&stat);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["all", "5000", "-"]);
        assert_eq!(lines[3], ["writes", "-", "200.0M"]);
        assert!(
            text.ends_with("group gold\nburst 100 ms; 3 requests throttled, for 1.2 s\n"),
            "{text}"
        );
    }
}
