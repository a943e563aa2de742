//! The life of a process that serves: as the successor of another daemon, and until its own successor serves, or until it
//! is stopped. See [`crate::handover`].

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use ebb_advice::{Advised, full_text};
use ebb_api::SuccessorState;
use ebb_config::params::ParameterChange;
use ebb_config::{Config, Listen, ServeArgs, StateDir};
use ebb_export_nbd::{KeptConnection, KeptWriters};
use ebb_luks::RememberedKeys;

use super::stop::StoppedDaemon;
use super::{Daemon, DroppedLast, Event, LogHandle, PassedSocket, RunEnd};
use crate::client::request_takeover;
use crate::control::page_access;
use crate::engine::{MemoryStores, place_of};
use crate::handover::derived_keys::derive_keys;
use crate::handover::takeover::{HandoverEnd, Predecessor, READY_LIMIT, Successor, TakeoverError};
use crate::handover::{HandedListener, HandedOver, LeftFile, service_manager};
use crate::listener::{self, Listener, SocketFile};
use crate::log::reasons;
use crate::resolved_names::ResolvedNames;
use crate::setup::{self, tls_context};
use crate::signals::EarlySignals;

/// How long a start waits for the addresses of names to listen at, and one that continues
/// connections, whose clients wait.
const RESOLVE_LIMIT: Duration = Duration::from_secs(30);
const RESOLVE_PATIENCE: Duration = Duration::from_secs(1);
/// How long a start that continues connections waits in all while keys of encrypted volumes are
/// read or derived: their clients would lose their connections.
const KEY_PATIENCE: Duration = Duration::from_secs(300);

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a daemon begins with.
#[derive(Debug, Default)]
pub(super) struct Inheritance {
    pub(super) handed: HandedOver,
    /// It waits until this daemon can serve.
    predecessor: Option<Predecessor>,
    /// Its successor has failed.
    pub(super) is_back: bool,
    /// The service manager has the connections, too, until they are used.
    stored: bool,
    /// Parameters and limits that were set at run time, if it serves again.
    set: Vec<ParameterChange>,
    /// The stores in memory of its volumes, if it serves again.
    pub(super) memory: MemoryStores,
    /// The keys of volumes, until those were opened.
    keys: Option<RememberedKeys>,
    /// The addresses of the names of hosts to listen at.
    pub(super) resolved: ResolvedNames,
}

/// `--takeover` without the control socket of the running daemon.
#[derive(Debug, thiserror::Error)]
#[error(
    "--takeover needs the control socket of the running daemon: set `control` in the configuration"
)]
pub struct NoControlSocket;

impl Inheritance {
    /// What the service manager or a running daemon has for this process.
    fn receive(config: &Config, args: &ServeArgs, end: &AtomicBool) -> anyhow::Result<Inheritance> {
        let (handed, stored) = service_manager::passed()?.take_over();
        let mut inheritance = Inheritance { handed, stored, ..Inheritance::default() };
        if args.takeover {
            inheritance.take_over(config, end)?;
        } else if !inheritance.handed.listeners.is_empty() {
            // Clients of kept connections wait.
            let is_awaited = !inheritance.handed.connections.is_empty();
            let limit = if is_awaited { RESOLVE_PATIENCE } else { RESOLVE_LIMIT };
            inheritance.resolved = ResolvedNames::of(&config.listen, limit);
        }
        Ok(inheritance)
    }

    fn take_over(&mut self, config: &Config, end: &AtomicBool) -> anyhow::Result<()> {
        let control = config.control.as_deref().ok_or(NoControlSocket)?;
        let mut path = control.as_os_str().to_owned();
        path.push(format!(".takeover-{}", std::process::id()));
        let path = Path::new(&path);
        let listener = listener::open_private(path, end).map_err(Advised).context("--takeover")?;
        // What this daemon could not start with, found before the other one stops.
        tls_context(&config.nbd)?;
        page_access(config)?;
        // While the other one serves: it takes seconds, or minutes where a name server does not
        // respond or the processors are busy.
        self.resolved = ResolvedNames::of(&config.listen, RESOLVE_LIMIT);
        self.keys = Some(RememberedKeys::begin());
        derive_keys(config.volumes.values(), end);
        let state = state_of(config);
        if !request_takeover(control, path, state).context("--takeover")? {
            // One that has another control socket may run.
            tracing::info!(
                socket = %control.display(),
                "no daemon answers at the control socket, so nothing is taken over: if a daemon runs, set `control` to \
                 its socket"
            );
            return Ok(());
        }
        let accepted = Predecessor::accept(&listener, end);
        // Its file is not needed any more.
        drop(listener);
        let received =
            accepted.and_then(|predecessor| Ok((predecessor.receive(end)?, predecessor)));
        match received {
            Ok((handed, predecessor)) => {
                let connections = handed.connections.len();
                tracing::info!(connections, "taking over from the running daemon");
                self.handed.listeners.extend(handed.listeners);
                self.handed.connections.extend(handed.connections);
                self.predecessor = Some(predecessor);
                Ok(())
            }
            Err(TakeoverError::Gone) => {
                tracing::warn!(
                    "the running daemon has ended without a handover: clients have to connect again"
                );
                Ok(())
            }
            Err(error) => Err(Advised(error)).context("--takeover"),
        }
    }

    /// Whether the predecessor has a socket at this address.
    pub(super) fn has_listener(&self, address: &Listen) -> bool {
        self.handed.has_listener(address)
    }
}

/// The state directory of a successor, which its predecessor compares with its own.
fn state_of(config: &Config) -> SuccessorState {
    let path = config.state.as_deref();
    SuccessorState {
        path: path.map(place_of),
        folder: path.and_then(|path| StateDir::new(path).folder_number()),
    }
}

/// Serves until a signal stops the daemon, or until a successor serves; `passed` as well as the sockets of the
/// configuration.
///
/// # Errors
/// If it cannot start, or if data could not be flushed at the end.
pub fn serve(
    config: &Config,
    args: &ServeArgs,
    log: &LogHandle,
    signals: &EarlySignals,
    mut passed: Option<PassedSocket>,
) -> anyhow::Result<()> {
    // Before the sockets of a predecessor are received.
    setup::raise_descriptor_limit();
    let mut inheritance = Inheritance::receive(config, args, &signals.end)?;
    let mut again = None;
    let failure = inheritance.predecessor.as_ref().map(Predecessor::failure_report);
    loop {
        let config = again.as_ref().unwrap_or(config);
        // A volume that has failed by now is no reason not to serve the others again.
        let args = ServeArgs { strict: args.strict && !inheritance.is_back, ..args.clone() };
        let ended = serve_once(config, &args, log, signals, (inheritance, passed.take()));
        if let (Some(report), Err(error)) = (&failure, &ended) {
            report.send(&reasons(error));
        }
        let (successor, stopped) = match ended? {
            ServeEnd::Stopped => return Ok(()),
            ServeEnd::Stored(stopped) => {
                match service_manager::store(stopped.handed) {
                    Ok(connections) => tracing::info!(connections, "passed to the service manager"),
                    Err(error) => {
                        tracing::warn!(%error, "cannot pass connections to the service manager");
                    }
                }
                return stopped.rest.end();
            }
            ServeEnd::Takeover(successor, stopped) => (successor, stopped),
        };
        let StoppedDaemon { handed, rest } = stopped;
        let connections = handed.connections.len();
        // Not what its file has by now, with which the successor may have failed.
        let in_force = rest.daemon.engine.config();
        let set = rest.daemon.parameters.set_at_run_time();
        let memory = rest.daemon.engine.memory_stores();
        // A store that does not respond may still have its requests.
        let is_clean = rest.failure.is_none();
        let end = successor.hand_over(handed, is_clean, &signals.end);
        let ended = rest.end();
        match end {
            HandoverEnd::Done => {
                tracing::info!(connections, "handed over to the successor");
                return ended;
            }
            HandoverEnd::Back(..) if !is_clean => return ended,
            HandoverEnd::Back(handed, error) => {
                let error = full_text(&error);
                tracing::warn!(error, "the takeover has failed: serving again");
                let kept = Inheritance { set, memory, ..Inheritance::default() };
                inheritance = Inheritance { handed: *handed, is_back: true, ..kept };
            }
        }
        again = Some(in_force.unwrap_or_else(|| config.clone()));
    }
}

/// How a daemon has ended.
enum ServeEnd {
    Stopped,
    /// The service manager is to keep this for the next daemon.
    Stored(StoppedDaemon),
    Takeover(Successor, StoppedDaemon),
}

fn serve_once(
    config: &Config,
    args: &ServeArgs,
    log: &LogHandle,
    signals: &EarlySignals,
    (inheritance, passed): (Inheritance, Option<PassedSocket>),
) -> anyhow::Result<ServeEnd> {
    // Held until the end.
    let state = setup::prepare_state(config).map_err(Advised)?;
    // Another daemon may have changed it. One that serves again has the configuration that was in force.
    let changed = (state.waited && !inheritance.is_back) || inheritance.predecessor.is_some();
    let again = changed.then(|| Config::load(args)).transpose()?;
    let config = again.as_ref().unwrap_or(config);
    let log = log.clone();
    let Some(mut daemon) = Daemon::create(config, args.clone(), log, signals, inheritance)? else {
        tracing::info!("stopped before anything was served");
        return Ok(ServeEnd::Stopped);
    };
    daemon.passed = passed.into();
    // Dropped after the daemon has stopped, so that the control socket shows what a stop waits for.
    let mut last: DroppedLast = daemon.attend();
    let mut end = RunEnd::Signal;
    if daemon.start(config, signals, &mut last)? {
        end = daemon.run(&signals.end)?;
    }
    let store = service_manager::capacity() > 0;
    if matches!(end, RunEnd::Signal) && store {
        // So that clients wait for less.
        daemon.write_dirty_data()?;
    }
    let keep = store || matches!(end, RunEnd::Takeover(_));
    let stopped = daemon.stop(keep)?;
    drop(last);
    Ok(match (stopped, end) {
        (None, _) => ServeEnd::Stopped,
        (Some(stopped), RunEnd::Signal) => ServeEnd::Stored(stopped),
        (Some(stopped), RunEnd::Takeover(successor)) => ServeEnd::Takeover(successor, stopped),
    })
}

/// The successor, if all dirty data was written and it still waits.
pub(super) fn accepted(successor: Successor, flushed: Result<(), String>) -> Option<Successor> {
    if !successor.is_waiting() {
        tracing::warn!("the successor has ended before the takeover");
        return None;
    }
    let Err(why) = flushed else { return Some(successor) };
    tracing::warn!("no takeover: {why}");
    successor.refuse(&format!("the running daemon goes on: {why}; correct that and try again"));
    None
}

/// A successor that waits until all dirty data is written.
#[derive(Debug)]
pub(super) struct WaitingSuccessor<S> {
    waiting: Option<S>,
    /// It came while data was being written for an earlier one: an error may be older than its
    /// request.
    joined: bool,
}

/// The step after an attempt to write all dirty data.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AfterFlush<S> {
    /// No successor waits.
    Nothing,
    /// It is tried again.
    Again,
    /// The successor gets the outcome.
    Answer(S, Result<(), String>),
}

impl<S> WaitingSuccessor<S> {
    pub(super) const NONE: WaitingSuccessor<S> = WaitingSuccessor { waiting: None, joined: false };

    pub(super) fn get(&self) -> Option<&S> {
        self.waiting.as_ref()
    }

    /// Takes the place of an earlier one; true if no data is being written yet.
    pub(super) fn replace(&mut self, successor: S) -> bool {
        self.joined = self.waiting.replace(successor).is_some();
        !self.joined
    }

    pub(super) fn flushed(&mut self, outcome: Result<(), String>) -> AfterFlush<S> {
        let joined = std::mem::take(&mut self.joined);
        match (self.waiting.take(), outcome) {
            (None, _) => AfterFlush::Nothing,
            (waiting, Err(_)) if joined => {
                self.waiting = waiting;
                AfterFlush::Again
            }
            (Some(waiting), outcome) => AfterFlush::Answer(waiting, outcome),
        }
    }
}

impl Daemon {
    /// Writes all dirty data while clients are served, and sends [`Event::Flushed`].
    pub(super) fn flush_everything(&self) {
        let limit = Duration::from_secs(self.args.drain);
        self.flush_within(limit);
    }

    fn flush_within(&self, limit: Duration) {
        self.drive(move |engine, io| async move {
            Event::Flushed(engine.flush_everything(&io, limit).await)
        });
    }

    /// Writes dirty data for a part of the time that a stop may take, or until a signal arrives.
    fn write_dirty_data(&self) -> anyhow::Result<()> {
        self.flush_within(Duration::from_secs(self.args.drain) / 4);
        loop {
            match self.next_event()? {
                // A stop reports what cannot be written.
                Event::Flushed(_) => return Ok(()),
                Event::TakeoverRequested(successor) => successor.refuse("the daemon is stopping"),
                event @ Event::Signal(number) if number != signal_hook::consts::SIGHUP => {
                    // `self` has the receiver.
                    let _ = self.sender.send(event);
                    return Ok(());
                }
                _ => {}
            }
        }
    }

    /// Waits until the connections of a predecessor are this daemon's.
    ///
    /// # Errors
    /// The predecessor serves again.
    pub(super) fn await_turn(
        &self,
        end: &AtomicBool,
    ) -> anyhow::Result<(HandedOver, Option<Predecessor>)> {
        let inherited = std::mem::take(&mut *lock(&self.inherited));
        let Inheritance { mut handed, predecessor, stored, set, .. } = inherited;
        for (lost, error) in self.parameters.restore(&set) {
            let (parameter, value) = (lost.key.name(), lost.key.definition().text(lost.to));
            let (volume, bdi, group) = (lost.volume, lost.bdi, lost.limit_group);
            tracing::warn!(
                parameter, value, volume, bdi, group, %error,
                "was set at run time, and is not in force any more: set it again"
            );
        }
        if let Some(predecessor) = &predecessor {
            predecessor.ready(end).map_err(Advised).context("--takeover")?;
        }
        if stored && let Err(error) = service_manager::empty_store() {
            tracing::warn!(%error, "cannot empty the service manager's store: clients have to connect again");
            handed.connections.clear();
        }
        Ok((handed, predecessor))
    }

    /// How long a start waits in all while keys are read or derived. Only for connections that were
    /// kept the clients of other volumes wait, too.
    pub(super) fn key_patience(&self) -> Duration {
        let inherited = lock(&self.inherited);
        match (inherited.handed.connections.is_empty(), &inherited.predecessor) {
            (true, _) => Duration::ZERO,
            (false, Some(_)) => KEY_PATIENCE.min(READY_LIMIT / 2),
            (false, None) => KEY_PATIENCE,
        }
    }

    /// Checks that the clients of encrypted volumes can go on: `late` if a key is still being read
    /// or derived.
    ///
    /// # Errors
    /// The predecessor, which still waits, serves them again.
    pub(super) fn check_keys(&self, late: bool) -> anyhow::Result<()> {
        let (waited, waits) = (self.key_patience(), lock(&self.inherited).predecessor.is_some());
        anyhow::ensure!(
            !late || !waits,
            "--takeover: cannot unlock all encrypted volumes within {} s: try again when the processors have less to do",
            waited.as_secs()
        );
        Ok(())
    }

    /// Continues connections, spread over the workers.
    pub(super) fn adopt(&self, connections: Vec<KeptConnection>, writers: &KeptWriters) {
        if connections.is_empty() {
            return;
        }
        tracing::info!(connections = connections.len(), "continuing connections");
        self.server.adopt(connections, writers, &self.handles());
    }

    /// Takes over listening sockets, and returns their files, which are the predecessor's as long as it may serve again.
    pub(super) fn inherit_listeners(&self, handed: Vec<HandedListener>) -> Vec<LeftFile> {
        let (listeners, files): (Vec<_>, Vec<_>) =
            handed.into_iter().map(HandedListener::into_listener).unzip();
        lock(&self.listeners).extend(listeners);
        files.into_iter().flatten().collect()
    }

    /// Makes the files of inherited sockets its own, and closes sockets that the configuration does not have.
    pub(super) fn own_files(&self, config: &Config, files: Vec<LeftFile>) {
        let mut listeners = lock(&self.listeners);
        for (path, number) in files {
            let address = Listen::Unix(path.clone()).to_string();
            let of_it = |listener: &&mut Listener| listener.address.as_deref() == Some(&*address);
            let file = SocketFile::left(path, number);
            if let Some(listener) = listeners.iter_mut().find(of_it) {
                listener.own_file(file);
            }
        }
        listeners.retain(|listener| listener.is_wanted(config));
    }

    /// The names of all listening sockets.
    pub(super) fn listener_names(&self) -> Vec<String> {
        let own = lock(&self.listeners);
        let inherited = lock(&self.inherited);
        let handed = inherited.handed.listeners.iter().map(HandedListener::name);
        own.iter().map(|listener| &*listener.name).chain(handed).map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn successor_is_not_answered_with_an_error_from_before_it_came() {
        let old = || Err("volume disk: flush: the store failed".to_owned());
        let mut waiting = WaitingSuccessor::NONE;
        assert!(waiting.replace("first"));
        assert!(!waiting.replace("second"), "the data is being written already");
        assert_eq!(waiting.flushed(old()), AfterFlush::Again);
        assert_eq!(waiting.get(), Some(&"second"));
        assert_eq!(waiting.flushed(old()), AfterFlush::Answer("second", old()));
        assert_eq!(waiting.flushed(Ok(())), AfterFlush::Nothing);
        assert!(waiting.replace("third"));
        assert!(!waiting.replace("fourth"));
        assert_eq!(waiting.flushed(Ok(())), AfterFlush::Answer("fourth", Ok(())));
    }
}
