//! Changes and their operations: a change that takes long is followed by its operation, on a terminal as one line that is
//! rewritten, elsewhere as a line for each step. Only an operation that is done succeeds.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use ebb_api::{KeyChangeView, OperationState, OperationView, ResizeView, VolumeView};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::table::TextTable;
use super::volume::path;
use super::{ClientError, DaemonClient, json_text};
use crate::cli::volume::{ChangeArgs, OperationCommand};

/// The status of a failure without one: a daemon of an earlier version has begun the operation.
const FAILED: u16 = 500;
/// How often an operation is looked at.
const INTERVAL: Duration = Duration::from_millis(250);
/// The characters of a progress bar.
const BAR: usize = 24;

/// Carries out `ebbd operation`, and returns what it prints.
///
/// # Errors
/// [`ClientError`].
pub fn operation(command: &OperationCommand) -> Result<String, ClientError> {
    match command {
        OperationCommand::List(args) => {
            let daemon = DaemonClient::new(args.control.as_deref())?;
            let all: Vec<OperationView> = daemon.json("GET", "/v1/operations", None)?;
            Ok(if args.json { json_text(&all) } else { operations(&all) })
        }
        OperationCommand::Show(args) => {
            let daemon = DaemonClient::new(args.output.control.as_deref())?;
            let mut view: OperationView = daemon.json("GET", &operation_path(args.id), None)?;
            if args.wait {
                view = follow(&daemon, view)?;
            }
            Ok(if args.output.json { json_text(&view) } else { operations(&[view]) })
        }
        OperationCommand::Cancel(args) => {
            let daemon = DaemonClient::new(args.output.control.as_deref())?;
            let view: OperationView = daemon.json("DELETE", &operation_path(args.id), None)?;
            Ok(if args.output.json { json_text(&view) } else { operations(&[view]) })
        }
    }
}

fn operation_path(id: u64) -> String {
    format!("/v1/operations/{id}")
}

/// What a change replies with when it is done.
pub(super) trait Outcome: Serialize + DeserializeOwned {
    /// The same, of an operation that has ended.
    fn of(daemon: &DaemonClient, view: OperationView) -> Result<Self, ClientError>;
}

impl Outcome for OperationView {
    fn of(_: &DaemonClient, view: OperationView) -> Result<Self, ClientError> {
        Ok(view)
    }
}

impl Outcome for ResizeView {
    fn of(daemon: &DaemonClient, view: OperationView) -> Result<Self, ClientError> {
        view.resized.ok_or_else(|| daemon.invalid("it does not say the size".to_owned()))
    }
}

impl Outcome for KeyChangeView {
    fn of(daemon: &DaemonClient, view: OperationView) -> Result<Self, ClientError> {
        view.key_added.ok_or_else(|| daemon.invalid("it does not say the key slot".to_owned()))
    }
}

impl Outcome for VolumeView {
    fn of(daemon: &DaemonClient, view: OperationView) -> Result<Self, ClientError> {
        daemon.json("GET", &path(&view.volume.unwrap_or_default(), ""), None)
    }
}

/// Requests a change. A reply that it is done is of type `T`, and printed by `show`; otherwise it is an operation.
pub(super) fn change<T: Outcome>(
    args: &ChangeArgs,
    method: &str,
    target: &str,
    body: Option<&str>,
    show: impl FnOnce(&T) -> String,
) -> Result<String, ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    Ok(match request(&daemon, args, method, target, body)? {
        Requested::Done(done) if args.json => json_text(&done),
        Requested::Done(done) => show(&done),
        Requested::Ended(view) if args.json => json_text(&view),
        Requested::Ended(view) => show(&T::of(&daemon, *view)?),
        Requested::Continues(text) => text,
    })
}

/// Requests a change without a body, and waits for its end.
pub(super) fn carry_out(
    daemon: &DaemonClient,
    method: &str,
    target: &str,
) -> Result<(), ClientError> {
    let args = ChangeArgs::default();
    request::<OperationView>(daemon, &args, method, target, None).map(drop)
}

/// The reply to a request for a change.
pub(super) enum Requested<T> {
    /// It is done.
    Done(T),
    /// Its operation has ended well.
    Ended(Box<OperationView>),
    /// Its operation continues; the text says so.
    Continues(String),
}

/// Requests a change, and follows its operation unless the arguments say otherwise.
pub(super) fn request<T: DeserializeOwned>(
    daemon: &DaemonClient,
    args: &ChangeArgs,
    method: &str,
    target: &str,
    body: Option<&str>,
) -> Result<Requested<T>, ClientError> {
    let (status, bytes) = daemon.exchange(method, target, body)?;
    let unreadable = |error: serde_json::Error| daemon.invalid(error.to_string());
    if status != 202 {
        return serde_json::from_slice(&bytes).map(Requested::Done).map_err(unreadable);
    }
    let begun: OperationView = serde_json::from_slice(&bytes).map_err(unreadable)?;
    if args.no_wait {
        let id = begun.id;
        return Ok(Requested::Continues(match args.json {
            true => json_text(&begun),
            false => {
                format!("operation {id} continues: `ebbd operation show {id} --wait` follows it\n")
            }
        }));
    }
    follow(daemon, begun).map(|view| Requested::Ended(Box::new(view)))
}

/// Waits for an operation, and shows its progress on stderr.
fn follow(daemon: &DaemonClient, mut view: OperationView) -> Result<OperationView, ClientError> {
    let mut stderr = io::stderr();
    let terminal = stderr.is_terminal();
    let mut shown = String::new();
    while view.state == OperationState::Running {
        // What is shown is no part of the result.
        if terminal {
            let _ = write!(stderr, "\r{}\x1b[K", progress(&view)).and_then(|()| stderr.flush());
        } else if shown != view.step {
            let _ = writeln!(stderr, "{}", view.step);
            shown.clone_from(&view.step);
        }
        std::thread::sleep(INTERVAL);
        view = daemon.json("GET", &operation_path(view.id), None)?;
    }
    if terminal {
        let _ = write!(stderr, "\r\x1b[K");
    }
    ended(daemon, view)
}

/// Returns an operation that has succeeded. Each other end is an error.
fn ended(daemon: &DaemonClient, view: OperationView) -> Result<OperationView, ClientError> {
    match (view.state, view.failure.clone()) {
        (OperationState::Done, None) => Ok(view),
        (OperationState::Cancelled, _) => {
            Err(ClientError::Cancelled { id: view.id, kind: view.kind })
        }
        (_, Some(failure)) => {
            Err(ClientError::of_status(view.failure_status.unwrap_or(FAILED), failure))
        }
        (state, None) => Err(daemon.invalid(format!("operation {} is `{state}`", view.id))),
    }
}

/// The progress of an operation as one line.
fn progress(view: &OperationView) -> String {
    if view.total == 0 {
        return format!("{} ({:.0} s)", view.step, view.since_seconds);
    }
    let part = |whole: usize| {
        let done = u128::from(view.done.min(view.total)) * whole as u128;
        usize::try_from(done / u128::from(view.total)).unwrap_or(whole)
    };
    let full = part(BAR);
    let rest = BAR.saturating_sub(full);
    let eta = view.eta_seconds.map(|eta| format!(", {eta:.0} s left")).unwrap_or_default();
    let bar = format!("[{}{}]", "=".repeat(full), " ".repeat(rest));
    format!("{bar} {:3} % {}{eta}", part(100), view.step)
}

fn operations(all: &[OperationView]) -> String {
    let mut table = TextTable::new(
        &["ID", "OPERATION", "VOLUME", "BY", "STATE", "SECONDS", "DONE", "TOTAL", "STEP"],
        0b1_0001_1110,
    );
    for view in all {
        let or_none = |value: &str, known: bool| if known { value } else { "-" }.to_owned();
        let step = match &view.failure {
            Some(failure) => failure.message.clone(),
            None => or_none(&view.step, !view.step.is_empty()),
        };
        table.row([
            view.id.to_string(),
            view.kind.clone(),
            view.volume.clone().unwrap_or_else(|| "-".to_owned()),
            or_none(&view.by, !view.by.is_empty()),
            view.state.to_string(),
            format!("{:.1}", view.since_seconds),
            or_none(&view.done.to_string(), view.total > 0),
            or_none(&view.total.to_string(), view.total > 0),
            step,
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use ebb_api::ErrorBody;

    use super::*;

    #[test]
    fn only_an_operation_that_is_done_succeeds() {
        let daemon = DaemonClient::new(Some("/nowhere")).unwrap();
        let end = |state: OperationState, failure: Option<ErrorBody>| {
            let kind = "flatten".to_owned();
            ended(
                &daemon,
                OperationView { id: 3, kind, state, failure, ..OperationView::default() },
            )
        };
        assert!(end(OperationState::Done, None).is_ok());
        let cancelled = end(OperationState::Cancelled, None).unwrap_err();
        assert!(matches!(cancelled, ClientError::Cancelled { .. }), "{cancelled}");
        assert_eq!(cancelled.to_string(), "operation 3 (flatten) was cancelled before it was done");
        let body =
            ErrorBody { error: "io".into(), message: "full".into(), remedy: "free space".into() };
        let failed = end(OperationState::Failed, Some(body.clone())).unwrap_err();
        assert!(matches!(failed, ClientError::Failed { .. }), "{failed}");
        // As if it had been rejected at once.
        for (failure_status, status) in [(409, 2), (422, 2), (500, 1), (503, 1)] {
            let view = OperationView {
                state: OperationState::Failed,
                failure: Some(body.clone()),
                failure_status: Some(failure_status),
                ..OperationView::default()
            };
            assert_eq!(ended(&daemon, view).unwrap_err().exit_status(), status, "{failure_status}");
        }
        use OperationState::{Failed, Other, Running, Unset};
        for other in [Failed, Running, Other, Unset] {
            let error = end(other, None).unwrap_err();
            assert!(matches!(error, ClientError::InvalidReply { .. }), "{other}: {error}");
        }
    }

    #[test]
    fn an_operation_shows_who_requested_it_and_a_dash_where_nothing_is_known() {
        let mut view = OperationView { id: 7, kind: "add".to_owned(), ..OperationView::default() };
        view.state = OperationState::Done;
        let row = |view: &OperationView| {
            let text = operations(std::slice::from_ref(view));
            let row = text.lines().nth(1).unwrap();
            row.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(row(&view), ["7", "add", "-", "-", "done", "0.0", "-", "-", "-"]);
        (view.by, view.total, view.step) = ("uid:0".to_owned(), 4096, "opening".to_owned());
        assert_eq!(row(&view), ["7", "add", "-", "uid:0", "done", "0.0", "0", "4096", "opening"]);
    }

    #[test]
    fn progress_is_one_line_of_bounded_length() {
        let mut view =
            OperationView { step: "writing dirty data".to_owned(), ..OperationView::default() };
        view.since_seconds = 7.4;
        assert_eq!(progress(&view), "writing dirty data (7 s)");
        (view.done, view.total, view.eta_seconds) = (50, 100, Some(9.6));
        let half = "=".repeat(12) + &" ".repeat(12);
        assert_eq!(progress(&view), format!("[{half}]  50 % writing dirty data, 10 s left"));
        (view.done, view.eta_seconds) = (300, None);
        assert_eq!(progress(&view), format!("[{}] 100 % writing dirty data", "=".repeat(24)));
    }
}
