//! `ebbd limit`: sets the parameters of limits, or shows the limits in force.

use std::collections::BTreeMap;

use ebb_api::{ChangeBody, ChangeView, LimitStat, ParameterView};
use ebb_config::{Size, plural};
use serde_json::Value;

use super::operation::carry_out;
use super::show::{bytes, limit_values};
use super::table::TextTable;
use super::{ClientError, DaemonClient, encoded, json_text, text};
use crate::cli::{LimitArgs, StatArgs, StatTopic};

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
        (None, None) => return all_limits(args),
    };
    if args.persist {
        // Before anything is changed.
        carry_out(&daemon, "POST", &format!("{owner}/limits/keep/check"))?;
    }
    // All are made, or none.
    let change = |wanted: BTreeMap<String, Value>| -> Result<Vec<ChangeView>, ClientError> {
        let body = text(ChangeBody(wanted));
        daemon.json("PATCH", &format!("{owner}/parameters"), Some(&body))
    };
    let set = wanted(args);
    let mut changes = Vec::new();
    let mut before = BTreeMap::new();
    if args.clear && args.persist {
        before = texts(&daemon, &owner)?;
        // A mistake is refused before anything is forgotten.
        changes = change(set.clone())?;
        carry_out(&daemon, "DELETE", &format!("{owner}/limits/keep"))?;
    }
    let mut all = BTreeMap::new();
    if args.clear {
        let group = args.volume.as_ref().map(|_| "limit_group");
        all.extend(NAMES.into_iter().chain(group).map(|name| (name.to_owned(), Value::Null)));
    }
    all.extend(set.clone());
    if !all.is_empty() {
        changes.extend(change(all)?);
    }
    if args.persist && (!set.is_empty() || !args.clear) {
        carry_out(&daemon, "POST", &format!("{owner}/limits/keep"))?;
    }
    if args.clear && args.persist {
        changes = differences(&before, &texts(&daemon, &owner)?, args);
    }
    // The group first, then as in the help text.
    changes.sort_by_key(|change| NAMES.iter().position(|name| *name == change.name));
    if changes.is_empty() && !args.persist {
        let stat: LimitStat = daemon.json("GET", &format!("{owner}/limits"), None)?;
        return if args.json { Ok(json_text(&stat)) } else { in_force(args, &daemon, &stat) };
    }
    if args.json {
        return Ok(json_text(&changes));
    }
    let cleared = args.clear && set.is_empty();
    let text = changed(&changes, cleared, args.persist);
    match (text.is_empty(), args.persist) {
        (true, true) => return Ok(KEPT.to_owned()),
        (true, false) if cleared => {}
        _ => return Ok(text),
    }
    let stat: LimitStat = daemon.json("GET", &format!("{owner}/limits"), None)?;
    Ok(not_cleared(&stat, &target(args)))
}

/// The values of all parameters of a volume or group, in their text form.
fn texts(daemon: &DaemonClient, owner: &str) -> Result<BTreeMap<String, String>, ClientError> {
    let values: Vec<ParameterView> = daemon.json("GET", &format!("{owner}/parameters"), None)?;
    Ok(values.into_iter().map(|value| (value.name, value.text)).collect())
}

/// The limits whose values differ. Forgetting kept limits changes values, which the changes of
/// parameters do not list.
fn differences(
    before: &BTreeMap<String, String>,
    after: &BTreeMap<String, String>,
    args: &LimitArgs,
) -> Vec<ChangeView> {
    let limit_group = args.group.clone().filter(|_| args.volume.is_none());
    let names = NAMES.into_iter().chain(["limit_group"]);
    let change = |name: &str| {
        Some(ChangeView {
            name: name.to_owned(),
            volume: args.volume.clone(),
            bdi: None,
            limit_group: limit_group.clone(),
            from: before.get(name)?.clone(),
            to: after.get(name)?.clone(),
        })
    };
    names.filter_map(change).filter(|change| change.from != change.to).collect()
}

/// What `--persist` prints if it changes no limit.
const KEPT: &str = "the limits in force are kept for the next start\n";

/// The text of a command that has cleared nothing: limits that were not set at run time stay.
fn not_cleared(stat: &LimitStat, target: &str) -> String {
    let is_limited = stat.group.is_some() || limit_values(stat).iter().any(|value| value != "-");
    match is_limited {
        false => "no limits were set\n".to_owned(),
        true => format!(
            "no limits were set that are not kept: those in force are kept, or of the configuration; forget kept ones with \
             `ebbd limit {target} --clear --persist`\n"
        ),
    }
}

/// The volume or group, as on the command line.
fn target(args: &LimitArgs) -> String {
    match (&args.volume, &args.group) {
        (Some(volume), _) => volume.clone(),
        (None, group) => format!("--group {}", group.as_deref().unwrap_or_default()),
    }
}

/// A line for each value that is another one now.
fn changed(changes: &[ChangeView], cleared: bool, persist: bool) -> String {
    let line = |change: &ChangeView| format!("{}: {} -> {}\n", change.name, change.from, change.to);
    let lines: String = changes.iter().filter(|one| one.from != one.to).map(line).collect();
    match (lines.is_empty() && cleared, persist) {
        (false, _) => lines,
        (true, false) => String::new(),
        (true, true) => "no limit has changed, and none is kept\n".to_owned(),
    }
}

/// What the options set.
fn wanted(args: &LimitArgs) -> BTreeMap<String, Value> {
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
    let limits = NAMES.into_iter().zip(given);
    let mut set: BTreeMap<String, Value> =
        limits.filter_map(|(name, value)| Some((name.to_owned(), Value::from(value?)))).collect();
    let group = match (&args.volume, &args.group) {
        (Some(_), Some(group)) => Some(group.as_str()),
        _ => args.no_group.then_some("none"),
    };
    if let Some(group) = group {
        set.insert("limit_group".to_owned(), group.into());
    }
    set
}

/// The limits of a volume in force, and what they have done.
///
/// # Errors
/// [`ClientError`]; there is no such volume.
pub fn limits_of(control: Option<&str>, volume: &str) -> Result<LimitStat, ClientError> {
    let target = format!("/v1/volumes/{}/limits", encoded(volume));
    DaemonClient::new(control)?.json("GET", &target, None)
}

/// The limits of a volume and of its group, or of a group.
fn in_force(
    args: &LimitArgs,
    daemon: &DaemonClient,
    stat: &LimitStat,
) -> Result<String, ClientError> {
    let Some(volume) = &args.volume else {
        return Ok(shown(&format!("group {}", args.group.as_deref().unwrap_or_default()), stat));
    };
    let own = shown(volume, stat);
    let Some(group) = &stat.group else { return Ok(own) };
    let target = format!("/v1/limit-groups/{}/limits", encoded(group));
    let of_group: LimitStat = daemon.json("GET", &target, None)?;
    Ok(format!("{own}\n{}", shown(&format!("group {group}"), &of_group)))
}

/// The limits of all volumes and groups: what `ebbd stat limit` prints.
fn all_limits(args: &LimitArgs) -> Result<String, ClientError> {
    let limits = super::stat(&StatArgs {
        what: Some(StatTopic::Limit),
        json: args.json,
        control: args.control.clone(),
        ..StatArgs::default()
    })?;
    let none = "no volume and no group has limits\n";
    Ok(if limits.is_empty() { none.to_owned() } else { limits })
}

/// The limits of a volume or a group as a table: a row for reads and writes together, reads, and writes.
fn shown(owner: &str, stat: &LimitStat) -> String {
    let number = |value: u64| if value == 0 { "-".to_owned() } else { value.to_string() };
    let size = |value: u64| if value == 0 { "-".to_owned() } else { bytes(value) };
    let mut table = TextTable::new(&[&format!("LIMITS OF {owner}"), "REQUESTS/S", "BYTES/S"], 1);
    table.row(["all".to_owned(), number(stat.iops), size(stat.bandwidth)]);
    table.row(["reads".to_owned(), number(stat.read_iops), size(stat.read_bandwidth)]);
    table.row(["writes".to_owned(), number(stat.write_iops), size(stat.write_bandwidth)]);
    format!(
        "{}burst {} ms; {} throttled, for {:.1} s\n",
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
            iops: 5000,
            write_bandwidth: 200 << 20,
            burst_ms: 100,
            throttled_requests: 3,
            throttled_seconds: 1.25,
            ..LimitStat::default()
        };
        let text = shown("disk", &stat);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["all", "5000", "-"]);
        assert_eq!(lines[3], ["writes", "-", "200.0M"]);
        assert!(
            text.starts_with("LIMITS OF disk")
                && text.ends_with("burst 100 ms; 3 requests throttled, for 1.2 s\n"),
            "{text}"
        );
    }

    #[test]
    fn limits_that_were_not_cleared_are_not_denied() {
        let none = LimitStat::default();
        assert_eq!(not_cleared(&none, "p1"), "no limits were set\n");
        let kept = not_cleared(&LimitStat { iops: 52, ..none }, "p1");
        assert!(kept.contains("in force") && kept.contains("`ebbd limit p1 --clear --persist`"));
    }

    fn change(name: &str, from: &str, to: &str) -> ChangeView {
        ChangeView {
            name: name.into(),
            from: from.into(),
            to: to.into(),
            volume: None,
            bdi: None,
            limit_group: None,
        }
    }

    #[test]
    fn only_changes_are_printed() {
        let all = [change("limit_iops", "5", "0"), change("limit_read_iops", "0", "0")];
        assert_eq!(changed(&all, true, false), "limit_iops: 5 -> 0\n");
        assert_eq!(changed(&all[1..], true, false), "");
        assert_eq!(changed(&all[1..], false, false), "");
    }

    #[test]
    fn forgotten_limits_are_printed_with_those_that_were_set() {
        let values = |iops: &str, reads: &str| -> BTreeMap<String, String> {
            let all = [("limit_iops", iops), ("limit_read_iops", reads), ("log", iops)];
            all.map(|(name, text)| (name.to_owned(), text.to_owned())).into()
        };
        let told = |before, after| {
            let args = LimitArgs { volume: Some("a".to_owned()), ..LimitArgs::default() };
            changed(&differences(&before, &after, &args), true, true)
        };
        let both = "limit_iops: 100 -> 0\nlimit_read_iops: 3 -> 0\n";
        assert_eq!(told(values("100", "3"), values("0", "0")), both);
        let none = "no limit has changed, and none is kept\n";
        assert_eq!(told(values("0", "3"), values("0", "3")), none);
    }
}
