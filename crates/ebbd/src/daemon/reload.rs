//! Reloading the configuration file: a thread reads it, the engine applies it on a worker, and the clients that wait are
//! answered.

use std::path::Path;

use ebb_api::Refusal;
use ebb_config::{Config, ConfigError, StateDir};
use ebb_control::{PageAccess, Refused};
use ebb_export_nbd::ServerTls;
use tokio::sync::oneshot;

use super::{Daemon, Event};
use crate::broker_fault::broker_fault;
use crate::control::{certificates, page_access};
use crate::log::reasons;
use crate::manager::{ReloadOutcome, ReloadReport};
use crate::setup::tls_context;

/// The files that a reload has read.
pub(super) struct Loaded {
    config: Config,
    tls: anyhow::Result<Option<ServerTls>>,
    page: anyhow::Result<PageAccess>,
}

impl Daemon {
    /// Begins to read the configuration again, or notes that it is to be read once more.
    pub(super) fn request_reload(
        &self,
        reply: Option<oneshot::Sender<ReloadOutcome>>,
        reading: &mut Option<Vec<oneshot::Sender<ReloadOutcome>>>,
        again: &mut Option<Vec<oneshot::Sender<ReloadOutcome>>>,
    ) {
        if reading.is_none() {
            *reading = self.read_configuration(reply.into_iter().collect());
            return;
        }
        if again.is_none() {
            tracing::info!(
                "the configuration file is still being read: it is read once more afterwards"
            );
        }
        again.get_or_insert_default().extend(reply);
    }

    /// Begins to read the configuration again, on a thread of its own: its file system may hang, and a stop must not
    /// wait for it. Returns the clients that wait; none if the thread cannot be started.
    pub(super) fn read_configuration(
        &self,
        replies: Vec<oneshot::Sender<ReloadOutcome>>,
    ) -> Option<Vec<oneshot::Sender<ReloadOutcome>>> {
        let (args, old, sender) = (self.args.clone(), self.config.clone(), self.sender.clone());
        let state = self.config.state.clone();
        let kept = self.engine.has_kept_volumes();
        self.engine.begin_reading();
        let read = move || {
            let present = state.as_deref().map_or(Ok(()), |path| StateDir::new(path).found(kept));
            let loaded = present.and_then(|()| Config::load_again(&args, state.as_deref()));
            let loaded = loaded.map(|config| Loaded {
                config,
                tls: tls_context(&old.nbd),
                page: page_access(&old),
            });
            // The receiver is dropped when the process ends.
            let _ = sender.send(Event::Loaded(Box::new(loaded)));
        };
        let thread = std::thread::Builder::new().name("ebbd-config".into());
        if let Err(error) = thread.spawn(read) {
            tracing::error!(%error, "not reloaded: cannot start a thread to read the file: raise TasksMax");
            self.engine.end_reading();
            let message = format!("cannot start a thread to read the file: {error}");
            answer(
                replies,
                &Err(Refused::new(Refusal::Failed, "thread", message, "raise TasksMax")),
            );
            return None;
        }
        Some(replies)
    }

    /// Begins to apply what can change while the daemon runs. A mistake in the configuration is logged, and the old
    /// configuration stays in force: then this is false.
    pub(super) fn reload(
        &self,
        loaded: Result<Loaded, ConfigError>,
        replies: Vec<oneshot::Sender<ReloadOutcome>>,
    ) -> bool {
        let Loaded { config: new, tls, page } = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                tracing::error!("not reloaded, the old configuration stays in force: {error}");
                self.engine.end_reading();
                let remedy = "correct it; the old configuration stays in force";
                let (refused, remedy) = match broker_fault() {
                    Some(fault) => {
                        let refused = fault.refusal();
                        let remedy = refused.body.remedy.clone();
                        (refused, remedy)
                    }
                    None => {
                        let again = reload_remedy(self.args.config.as_deref(), &error);
                        (
                            Refused::new(
                                Refusal::Invalid,
                                "configuration",
                                error.to_string(),
                                remedy,
                            ),
                            again,
                        )
                    }
                };
                self.state.reloaded(Err((&refused.body.message, &remedy)));
                answer(replies, &Err(refused));
                return false;
            }
        };
        if let Err(refused) = self.engine.must_have_memory_for(&new) {
            let (message, remedy) = (&refused.body.message, &refused.body.remedy);
            tracing::error!(
                remedy,
                "not reloaded, the old configuration stays in force: {message}"
            );
            self.engine.end_reading();
            self.state.reloaded(Err((message, &format!("{remedy}, and reload again"))));
            answer(replies, &Err(refused));
            return false;
        }
        let refused = self.renew_keys(tls, page);
        self.state.set_certificates(certificates(&self.config));
        crate::sandbox::follow(&new, &self.state);
        let state = self.state.clone();
        self.drive(move |engine, io| async move {
            let volumes = new.volumes.len();
            let ended = engine.reload(&io, new).await;
            if engine.is_stopping() {
                // A stop interrupts a reload.
                let remedy = "start it again";
                let stopping =
                    Refused::new(Refusal::Busy, "stopping", "the daemon is stopping", remedy);
                return Event::Reloaded(replies, Err(stopping));
            }
            tracing::info!(volumes, "reloaded");
            let not_in_force: Vec<_> = refused.into_iter().chain(engine.unchanged()).collect();
            let (not_served, notes) = (engine.not_served(), engine.other_sizes());
            let without_socket = engine.without_socket();
            let not_in_force = (&not_in_force[..], &without_socket[..]);
            let refused = incomplete(not_in_force, &not_served, &ended.restart);
            let report = ReloadReport { ended, not_served, without_socket, notes };
            let outcome = refused.map_or(Ok(report), Err);
            state.reloaded(
                outcome
                    .as_ref()
                    .map(drop)
                    .map_err(|refused| (&*refused.body.message, &*refused.body.remedy)),
            );
            Event::Reloaded(replies, outcome)
        });
        true
    }

    /// Takes over the keys that a reload has read; the reason if some stay as they were.
    fn renew_keys(
        &self,
        tls: anyhow::Result<Option<ServerTls>>,
        page: anyhow::Result<PageAccess>,
    ) -> Option<String> {
        let tls = tls.map(|context| self.server.set_tls_context(context));
        let tls =
            tls.map_err(|error| format!("the old TLS keys stay in force: {}", reasons(&error)));
        let set = |access| self.control.get().map(|control| control.set_page_access(access));
        let page = page.map(set).map_err(|error| {
            let why = reasons(&error);
            format!("the old tokens and certificate of the page stay in force: {why}")
        });
        let refused = [tls.err(), page.err()].into_iter().flatten();
        let refused: Vec<String> = refused.inspect(|why| tracing::error!("{why}")).collect();
        (!refused.is_empty()).then(|| refused.join("; "))
    }
}

/// The remedy of a reload that failed with `error`, for what may show it later: the text of the
/// error has the remedy of its cause.
fn reload_remedy(file: Option<&Path>, error: &ConfigError) -> String {
    match file.filter(|file| error.file.as_deref() == Some(file)) {
        Some(file) => format!(
            "correct it, check it with `ebbd config check {}`, and reload again: `ebbd reload`",
            file.display()
        ),
        // The configuration file is not the cause.
        None => "correct that, and reload again: `ebbd reload`".to_owned(),
    }
}

pub(super) fn answer(replies: Vec<oneshot::Sender<ReloadOutcome>>, outcome: &ReloadOutcome) {
    for reply in replies {
        // The client does not wait any more.
        let _ = reply.send(outcome.clone());
    }
}

/// The failure of a reload of which something is not in force. Volumes whose stores or sockets
/// cannot be opened are none: they have their new configuration, and are tried again; the failure
/// lists these also.
fn incomplete(
    (not_in_force, without_socket): (&[String], &[String]),
    not_served: &[String],
    restart: &[&str],
) -> Option<Refused> {
    /// The most that are listed.
    const SHOWN: usize = 5;
    let not_served = not_served.iter().map(|why| format!("not served: {why}"));
    let problems = not_in_force.iter().cloned().chain(not_served);
    let problems: Vec<_> = problems.chain(without_socket.iter().cloned()).collect();
    let shown = problems[..problems.len().min(SHOWN)].join("; ");
    let more = match problems.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let later = match restart {
        [] => String::new(),
        keys => format!("; these take effect at the next start: {}", keys.join(", ")),
    };
    let remedy = "everything else is in force; correct these, and reload again";
    let message = format!("{shown}{more}{later}");
    (!not_in_force.is_empty())
        .then(|| Refused::new(Refusal::Conflict, "incomplete", message, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_reload_lists_what_is_not_served() {
        let [kept, gone] = ["volume a: not changed: x", "volume b: y"].map(str::to_owned);
        let (kept, gone) = (std::slice::from_ref(&kept), std::slice::from_ref(&gone));
        let refused = incomplete((kept, &[]), gone, &[]).unwrap();
        let all = "volume a: not changed: x; not served: volume b: y";
        assert_eq!(refused.body.message, all);
        let later = "; these take effect at the next start: workers";
        assert_eq!(
            incomplete((kept, &[]), gone, &["workers"]).unwrap().body.message,
            format!("{all}{later}")
        );
        assert_eq!(incomplete((&[], gone), gone, &[]), None);
        let served = ["volume c: not served over vhost-user: z".to_owned()];
        let message = incomplete((kept, &served), &[], &[]).unwrap().body.message;
        assert_eq!(message, "volume a: not changed: x; volume c: not served over vhost-user: z");
    }

    #[test]
    fn remedy_names_the_check_only_for_the_configuration_file() {
        let folder = tempfile::tempdir().unwrap();
        let (file, state) = (folder.path().join("e.toml"), folder.path().join("state"));
        std::fs::write(&file, "listen = [").unwrap();
        let args = ebb_config::ServeArgs { config: Some(file.clone()), ..Default::default() };
        let error = Config::load_again(&args, None).unwrap_err();
        let check = format!("`ebbd config check {}`", file.display());
        assert!(reload_remedy(Some(&file), &error).contains(&check), "{error}");
        let error = StateDir::new(&state).found(true).unwrap_err();
        assert!(!reload_remedy(Some(&file), &error).contains("check"), "{error}");
    }
}
