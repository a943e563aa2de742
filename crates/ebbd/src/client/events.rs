//! `ebbd events`: what the daemon has logged, and with `--follow` what it logs from now on.
//!
//! Following asks for what is new twice a second. A daemon that is restarted is waited for. It begins to count its events
//! anew; then all of its events are printed.

use std::time::Duration;

use ebb_api::EventView;
use ebb_image::{is_shown, shown_text};

use super::persistent::PersistentClient;
use super::table::{Tint, paint};
use super::terminal::restored;
use super::{ClientError, DaemonClient};
use crate::cli::EventsArgs;

/// The pause between two requests.
const PAUSE: Duration = Duration::from_millis(500);

/// Passes the text of the events to `show`, until `show` returns false or there are no more to follow.
///
/// # Errors
/// [`ClientError`]; when it follows, after the first reply only a refusal.
pub fn events(args: &EventsArgs, mut show: impl FnMut(&str) -> bool) -> Result<(), ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let all: Vec<EventView> = daemon.json("GET", "/v1/events?since=0&limit=10000", None)?;
    let mut last = all.last().cloned().unwrap_or_default();
    let wanted: Vec<EventView> = all.into_iter().filter(|event| is_wanted(args, event)).collect();
    let most = usize::try_from(args.lines).unwrap_or(usize::MAX);
    let text = text(args, wanted.get(wanted.len().saturating_sub(most)..).unwrap_or_default());
    let mut goes_on = text.is_empty() || show(&text);
    let daemon = PersistentClient::new(daemon);
    while args.follow && goes_on {
        std::thread::sleep(PAUSE);
        let (new, _) = daemon.ask(|daemon| since(daemon, &last))?;
        let Some(newest) = new.last() else { continue };
        last = newest.clone();
        let wanted: Vec<EventView> =
            new.into_iter().filter(|event| is_wanted(args, event)).collect();
        let text = self::text(args, &wanted);
        goes_on = text.is_empty() || show(&text);
    }
    Ok(())
}

/// The events after `last`; all, if the daemon has not had that one.
fn since(daemon: &DaemonClient, last: &EventView) -> Result<Vec<EventView>, ClientError> {
    // The last one is asked for, too: a daemon that has it has not been restarted.
    let target = format!("/v1/events?since={}&limit=10000", last.id.saturating_sub(1));
    let new: Vec<EventView> = daemon.json("GET", &target, None)?;
    match is_restarted(last, &new) {
        true => daemon.json("GET", "/v1/events?since=0&limit=10000", None),
        false => Ok(new.into_iter().filter(|event| event.id > last.id).collect()),
    }
}

/// Whether the events from the number of `last` on are those of another daemon than the one that had `last`.
fn is_restarted(last: &EventView, new: &[EventView]) -> bool {
    match new.first() {
        None => last.id > 0,
        Some(first) => first.id == last.id && first.time.to_bits() != last.time.to_bits(),
    }
}

fn is_wanted(args: &EventsArgs, event: &EventView) -> bool {
    let Some(volume) = &args.volume else { return true };
    event.fields.get("volume") == Some(volume)
}

fn text(args: &EventsArgs, events: &[EventView]) -> String {
    let line = |event: &EventView| match args.json {
        true => format!("{}\n", super::text(event)),
        false => line(event),
    };
    events.iter().map(line).collect()
}

fn line(event: &EventView) -> String {
    let tint = match &*event.level {
        "error" => Tint::Bad,
        "warn" => Tint::Warning,
        _ => Tint::Plain,
    };
    let fields: String = event
        .fields
        .iter()
        .map(|(name, value)| format!(" {name}={}", shown_value(value)))
        .collect();
    let level = paint(&format!("{:5}", event.level.to_uppercase()), tint);
    format!("{} {level} {}{fields}\n", time(event.time), shown_text(&event.message))
}

/// The value of a field, which a client may have chosen: quoted and escaped if it could be taken for more than one value.
fn shown_value(value: &str) -> String {
    let is_plain = |c: char| is_shown(c) && !c.is_whitespace() && !matches!(c, '"' | '\\' | '=');
    let value = restored(value);
    if value.chars().all(is_plain) { value } else { format!("{value:?}") }
}

/// A time in UTC, as in the log.
fn time(seconds: f64) -> String {
    let time = std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default();
    let time = jiff::Timestamp::from_millisecond(i64::try_from(time.as_millis()).unwrap_or(0));
    time.map(|time| format!("{time:.3}")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_was_restarted_has_another_event_of_the_same_number() {
        let event = |id, time| EventView { id, time, ..EventView::default() };
        let last = event(7, 1.5);
        assert!(!is_restarted(&last, &[event(7, 1.5), event(8, 2.0)]));
        assert!(!is_restarted(&last, &[event(9, 2.0)]), "the oldest have made way");
        assert!(is_restarted(&last, &[event(7, 9.5), event(8, 9.5)]));
        assert!(is_restarted(&last, &[]));
        assert!(
            !is_restarted(&EventView::default(), &[])
                && !is_restarted(&EventView::default(), &[last])
        );
    }

    /// A client chooses the name of an export.
    #[test]
    fn an_event_stays_one_line_whatever_a_client_has_sent() {
        let name = "x\n2023-11-14T22:13:20.250Z ERROR forged volume=a\u{1b}[2J\u{202e}".to_owned();
        let fields = [("name".to_owned(), name.clone())].into();
        let event =
            EventView { level: "warn".into(), message: name, fields, ..EventView::default() };
        let line = line(&event);
        assert!(
            line.ends_with('\n') && !line.trim_end().contains(['\n', '\u{1b}', '\u{202e}']),
            "{line:?}"
        );
        assert!(line.contains(" name=\"x\\n2023-"), "{line}");
        assert_eq!((shown_value("a b"), shown_value("a=b")), ("\"a b\"".into(), "\"a=b\"".into()));
    }

    #[test]
    fn an_event_is_a_line_with_its_fields() {
        let event = EventView {
            id: 7,
            time: 1_700_000_000.25,
            level: "warn".into(),
            message: "the connection to the server was lost".into(),
            fields: [("volume".to_owned(), "a".to_owned())].into(),
        };
        let expected =
            "2023-11-14T22:13:20.250Z WARN  the connection to the server was lost volume=a\n";
        assert_eq!(line(&event), expected);
        let args = EventsArgs { volume: Some("b".into()), ..EventsArgs::default() };
        assert!(!is_wanted(&args, &event) && is_wanted(&EventsArgs::default(), &event));
        let json =
            text(&EventsArgs { json: true, ..EventsArgs::default() }, std::slice::from_ref(&event));
        assert_eq!(serde_json::from_str::<EventView>(&json).unwrap(), event);
    }
}
