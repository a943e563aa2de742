//! The life of a process that serves: as the successor of another daemon, and until its own successor serves, or until it
//! is stopped. See [`crate::handover`].

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use ebb_config::{Config, Listen, ServeArgs};
use ebb_export_nbd::KeptConnection;

use super::{Daemon, DroppedLast, Event, LogHandle, PassedSocket, RunEnd};
use crate::client::request_takeover;
use crate::handover::takeover::{HandoverEnd, Predecessor, Successor, TakeoverError};
use crate::handover::{HandedListener, HandedOver, service_manager};
use crate::listener::{self, Listener};
use crate::setup;
use crate::signals::EarlySignals;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a daemon begins with.
#[derive(Debug, Default)]
pub(super) struct Inheritance {
    pub(super) handed: HandedOver,
    /// It waits until this daemon can serve.
    predecessor: Option<Predecessor>,
}

impl Inheritance {
    /// What the service manager or a running daemon has for this process.
    fn receive(config: &Config, args: &ServeArgs, end: &AtomicBool) -> anyhow::Result<Inheritance> {
        let handed = service_manager::passed().context("LISTEN_FDS")?.take_over();
        let mut inheritance = Inheritance { handed, predecessor: None };
        if args.takeover {
            inheritance.take_over(config, end)?;
        }
        Ok(inheritance)
    }

    fn take_over(&mut self, config: &Config, end: &AtomicBool) -> anyhow::Result<()> {
        let control = config.control.as_deref().context(
            "--takeover needs the control socket of the running daemon: set `control` in the configuration",
        )?;
        let mut path = control.as_os_str().to_owned();
        path.push(format!(".takeover-{}", std::process::id()));
        let path = Path::new(&path);
        let listener = listener::open_private(path, end).context("--takeover")?;
        if !request_takeover(control, path).context("--takeover")? {
            tracing::info!("no daemon is running that could be taken over from");
            return Ok(());
        }
        let predecessor = Predecessor::accept(&listener, end).context("--takeover")?;
        match predecessor.receive(end) {
            Ok(handed) => {
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
            Err(error) => Err(error).context("--takeover"),
        }
    }

    /// Whether the predecessor has a socket at this address.
    pub(super) fn has_listener(&self, address: &Listen) -> bool {
        self.handed.has_listener(address)
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
    let mut inheritance = Inheritance::receive(config, args, &signals.end)?;
    let mut again = None;
    loop {
        let config = again.as_ref().unwrap_or(config);
        let ended = serve_once(config, args, log, signals, (inheritance, passed.take()))?;
        let (successor, handed, daemon) = match ended {
            ServeEnd::Stopped => return Ok(()),
            ServeEnd::Stored(handed, daemon) => {
                let stored = service_manager::store(handed);
                drop(daemon);
                match stored {
                    Ok(connections) => tracing::info!(connections, "passed to the service manager"),
                    Err(error) => {
                        tracing::warn!(%error, "cannot pass connections to the service manager");
                    }
                }
                return Ok(());
            }
            ServeEnd::Takeover(successor, handed, daemon) => (successor, handed, daemon),
        };
        let connections = handed.connections.len();
        let end = successor.hand_over(handed, &signals.end);
        drop(daemon);
        match end {
            HandoverEnd::Done => {
                tracing::info!(connections, "handed over to the successor");
                return Ok(());
            }
            HandoverEnd::Back(handed, error) => {
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::warn!(error, "the takeover has failed: serving again");
                inheritance = Inheritance { handed: *handed, predecessor: None };
            }
        }
        again = Config::load(args).ok().or_else(|| Some(config.clone()));
    }
}

/// How a daemon has ended.
enum ServeEnd {
    Stopped,
    /// The service manager is to keep this for the next daemon.
    Stored(HandedOver, Daemon),
    Takeover(Successor, HandedOver, Daemon),
}

fn serve_once(
    config: &Config,
    args: &ServeArgs,
    log: &LogHandle,
    signals: &EarlySignals,
    (inheritance, passed): (Inheritance, Option<PassedSocket>),
) -> anyhow::Result<ServeEnd> {
    // Held until the end.
    let state = setup::prepare_state(config)?;
    // The predecessor may have changed it.
    let changed = state.waited || inheritance.predecessor.is_some();
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
        end = daemon.run()?;
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
        (Some((handed, daemon)), RunEnd::Signal) => ServeEnd::Stored(handed, daemon),
        (Some((handed, daemon)), RunEnd::Takeover(successor)) => {
            ServeEnd::Takeover(successor, handed, daemon)
        }
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
    let remedy = "correct that, or stop the running daemon and start this one without --takeover";
    successor.refuse(&format!("the running daemon goes on: {why}; {remedy}"));
    None
}

impl Daemon {
    /// Writes all dirty data while clients are served, and sends [`Event::Flushed`].
    pub(super) fn flush_everything(&self) {
        self.drive(|engine, io| async move { Event::Flushed(engine.flush_everything(&io).await) });
    }

    /// As [`Daemon::flush_everything`], and waits until that has ended, or a signal arrives.
    fn write_dirty_data(&self) -> anyhow::Result<()> {
        self.flush_everything();
        loop {
            match self.next_event()? {
                // A stop reports what cannot be written.
                Event::Flushed(_) => return Ok(()),
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
        let Inheritance { handed, predecessor } = std::mem::take(&mut *lock(&self.inherited));
        if let Some(predecessor) = &predecessor {
            predecessor.ready(end).context("--takeover")?;
        }
        Ok((handed, predecessor))
    }

    /// Continues connections, spread over the workers.
    pub(super) fn adopt(&self, connections: Vec<KeptConnection>) {
        if connections.is_empty() {
            return;
        }
        tracing::info!(connections = connections.len(), "continuing connections");
        let workers = self.handles();
        for (connection, worker) in connections.into_iter().zip(workers.iter().cycle()) {
            self.server.adopt(connection, worker);
        }
    }

    /// Takes over listening sockets; those that the configuration does not have are closed.
    pub(super) fn inherit_listeners(&self, config: &Config, handed: Vec<HandedListener>) {
        let wanted = |listener: &Listener| {
            config.listen.iter().any(|address| listener.address == Some(address.to_string()))
        };
        let listeners = handed.into_iter().map(HandedListener::into_listener);
        lock(&self.listeners).extend(listeners.filter(wanted));
    }

    /// The names of all listening sockets.
    pub(super) fn listener_names(&self) -> Vec<String> {
        let own = lock(&self.listeners);
        let inherited = lock(&self.inherited);
        let handed = inherited.handed.listeners.iter().map(HandedListener::name);
        own.iter().map(|listener| &*listener.name).chain(handed).map(str::to_owned).collect()
    }
}
