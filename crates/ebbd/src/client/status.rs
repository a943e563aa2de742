//! `ebbd status`: the health of the daemon, as text and as exit status.

use ebb_api::{HealthReason, HealthState, HealthView};
use ebb_config::plural;

use super::table::{Tint, paint};
use super::{ClientError, DaemonClient, json_text};
use crate::cli::StatusArgs;
use crate::exit_status;

/// The text to print, and the exit status.
///
/// # Errors
/// [`ClientError`].
pub fn status(args: &StatusArgs) -> Result<(String, u8), ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let health: HealthView = daemon.json("GET", "/v1/health", None)?;
    let text = match args.json {
        true => json_text(&health),
        false => show(&health),
    };
    Ok((text, code(&health)))
}

fn code(health: &HealthView) -> u8 {
    match health.state {
        HealthState::Ok => exit_status::DONE,
        HealthState::Degraded => exit_status::DEGRADED,
        _ => exit_status::FAILING,
    }
}

fn tint(state: HealthState) -> Tint {
    match state {
        HealthState::Ok => Tint::Plain,
        HealthState::Degraded => Tint::Warning,
        _ => Tint::Bad,
    }
}

fn show(health: &HealthView) -> String {
    let mut out = format!(
        "{}: {} of {} serving\n",
        paint(health.state.as_str(), tint(health.state)),
        health.serving,
        plural(health.volumes, "volume")
    );
    for reason in &health.reasons {
        out.push_str(&line(reason));
    }
    if health.more > 0 {
        out.push_str(&format!("and {} more\n", health.more));
    }
    out
}

fn line(reason: &HealthReason) -> String {
    let volume = reason.volume.as_ref().map_or_else(String::new, |name| format!("volume {name}: "));
    let since =
        reason.since_seconds.map_or_else(String::new, |since| format!(" (for {since:.0} s)"));
    let state = paint(reason.state.as_str(), tint(reason.state));
    format!("{state}: {volume}{}{since}; {}\n", reason.message, reason.remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_one_line_with_its_remedy_and_the_worst_is_the_exit_status() {
        let reason = HealthReason {
            state: HealthState::Failing,
            kind: "remote_down".into(),
            volume: Some("z".into()),
            message: "no connection to nbd://a/z".into(),
            remedy: "check that server".into(),
            since_seconds: Some(12.3),
        };
        let mut health = HealthView {
            state: HealthState::Failing,
            reasons: vec![reason],
            more: 3,
            serving: 4,
            volumes: 5,
        };
        let expected = "failing: 4 of 5 volumes serving\n\
                        failing: volume z: no connection to nbd://a/z (for 12 s); check that server\nand 3 more\n";
        assert_eq!((show(&health).as_str(), code(&health)), (expected, exit_status::FAILING));
        health.state = HealthState::Degraded;
        assert_eq!(code(&health), exit_status::DEGRADED);
        health.state = HealthState::Ok;
        assert_eq!(code(&health), exit_status::DONE);
    }
}
