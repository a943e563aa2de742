//! `ebbd config show` and `ebbd config diff` of a running daemon.

use ebb_api::{ConfigChange, ConfigView};

use super::table::{Tint, paint};
use super::{ClientError, DaemonClient, text};
use crate::cli::{ConfigDiffArgs, ConfigShowArgs};

/// The configuration in force.
///
/// # Errors
/// [`ClientError`].
pub fn show_config(args: &ConfigShowArgs) -> Result<String, ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let view: ConfigView = daemon.json("GET", "/v1/config", None)?;
    Ok(view.text)
}

/// What a reload would change.
///
/// # Errors
/// [`ClientError`]; a mistake in the file is one.
pub fn diff_config(args: &ConfigDiffArgs) -> Result<String, ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let changes: Vec<ConfigChange> = daemon.json("GET", "/v1/config/diff", None)?;
    Ok(match args.json {
        true => text(changes) + "\n",
        false => show(&changes),
    })
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
    }
}
