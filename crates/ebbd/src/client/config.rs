//! `ebbd config show` and `ebbd config diff` of a running daemon.

use ebb_api::{ConfigChange, ConfigView};
use ebb_config::toml_to_json;

use super::table::{Tint, paint};
use super::terminal::restored;
use super::{ClientError, DaemonClient, json_text};
use crate::cli::{ConfigDiffArgs, ConfigShowArgs};

/// The configuration in force.
///
/// # Errors
/// [`ClientError`].
pub fn show_config(args: &ConfigShowArgs) -> Result<String, ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let view: ConfigView = daemon.json("GET", "/v1/config", None)?;
    // TOML has escapes for control characters of strings.
    let text = restored(&view.text);
    match (args.json, toml_to_json(&text)) {
        (false, _) => Ok(text),
        (true, Some(value)) => Ok(json_text(value)),
        (true, None) => Err(daemon.invalid("its configuration is not TOML")),
    }
}

/// What a reload would change.
///
/// # Errors
/// [`ClientError`]; a mistake in the file is one.
pub fn diff_config(args: &ConfigDiffArgs) -> Result<String, ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let changes: Vec<ConfigChange> = daemon.json("GET", "/v1/config/diff", None)?;
    if args.json {
        return Ok(json_text(changes));
    }
    let view: ConfigView = daemon.json("GET", "/v1/config", None)?;
    Ok(show(&changes) + &kept(&view.kept_keys, &changes))
}

/// The settings that differ from the file, and that a reload leaves so.
fn kept(keys: &[String], changes: &[ConfigChange]) -> String {
    let stays = |key: &&str| !changes.iter().any(|change| change.key == **key);
    let keys: Vec<&str> = keys.iter().map(String::as_str).filter(stays).collect();
    match &keys[..] {
        [] => String::new(),
        keys => format!("from the state directory instead of the file: {}\n", keys.join(", ")),
    }
}

fn show(changes: &[ConfigChange]) -> String {
    if changes.is_empty() {
        return "the daemon has the configuration of its file\n".to_owned();
    }
    let line = |change: &ConfigChange| {
        let key = &change.key;
        let text = match (&change.from, &change.to) {
            (Some(from), Some(to)) => format!("{key}: {from} -> {to}"),
            (None, Some(to)) => format!("{key}: added, {to}"),
            (Some(from), None) => format!("{key}: removed, {from}"),
            (None, None) => key.clone(),
        };
        match change.needs_restart {
            true => paint(&format!("{text} (needs a restart)"), Tint::Warning) + "\n",
            false => text + "\n",
        }
    };
    changes.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_is_a_line() {
        let change = |from: Option<&str>, to: Option<&str>, needs_restart| ConfigChange {
            key: "k".into(),
            from: from.map(Into::into),
            to: to.map(Into::into),
            needs_restart,
        };
        let all = [
            change(Some("1"), Some("2"), true),
            change(None, Some("2"), false),
            change(Some("1"), None, false),
        ];
        let expected = "k: 1 -> 2 (needs a restart)\nk: added, 2\nk: removed, 1\n";
        assert_eq!(show(&all), expected);
        assert!(show(&[]).contains("of its file"));
        assert_eq!(kept(&[], &[]), "");
        let both = ["volume.a.size", "volume.b.limit_iops"].map(str::to_owned);
        assert!(kept(&both, &all).ends_with("file: volume.a.size, volume.b.limit_iops\n"));
        let replaced = ConfigChange { key: "volume.a.size".into(), ..all[0].clone() };
        assert!(kept(&both, &[replaced]).ends_with("file: volume.b.limit_iops\n"));
    }
}
