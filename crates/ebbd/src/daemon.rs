//! The daemon's life: open everything, serve, reload, drain, stop.
//!
//! The main thread waits for signals; workers serve. SIGTERM or SIGINT: nobody is let in any more,
//! requests under way end and are answered, every volume is flushed, exit. A second one while that
//! lasts gives up at once. SIGHUP: the configuration file is read again.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use ebb_export_nbd::{Limits, Server, TlsContext};
use ebb_io::{Worker, WorkerHandle, fd_from};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::cli::ServeArgs;
use crate::config::{Changes, Config, Nbd, Tls};
use crate::listener::{self, Listener};
use crate::stores::open_volume;

/// Changes the level of the log while the daemon runs.
pub type SetLogLevel = Box<dyn Fn(crate::config::LogLevel)>;

struct Daemon {
    config: Config,
    args: ServeArgs,
    inherited: usize,
    server: Server,
    workers: Vec<Worker>,
    set_log_level: SetLogLevel,
}

/// The configuration names something that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("the configuration was checked and cannot be served")]
pub struct CheckFailed;

/// Opens what the configuration names and says `ok` for each on the way, without serving.
///
/// # Errors
/// The first thing that cannot be opened.
pub fn check(config: &Config, say: impl FnMut(String)) -> anyhow::Result<()> {
    open_all(config, say).map_err(|error| error.context(CheckFailed))
}

fn open_all(config: &Config, mut say: impl FnMut(String)) -> anyhow::Result<()> {
    tls_context(&config.nbd)?;
    for (name, volume) in &config.volumes {
        let volume = open_volume(name, volume).with_context(|| format!("volume {name}"))?;
        let direct = if volume.capabilities().direct { ", direct" } else { "" };
        say(format!("ok volume {name}: {} bytes{direct}", volume.size()));
    }
    say("ok configuration".to_owned());
    Ok(())
}

/// Serves until told to stop.
///
/// # Errors
/// What kept it from starting, or data that could not be made stable at the end.
pub fn serve(config: Config, args: ServeArgs, set_log_level: SetLogLevel) -> anyhow::Result<()> {
    raise_descriptor_limit();
    let (give_up, mut signals) = watch_signals()?;
    let inherited = listener::inherited().context("LISTEN_FDS")?;
    let server =
        Server::new(limits(&config.nbd), tls_policy(config.nbd.tls), tls_context(&config.nbd)?);
    for (name, volume) in &config.volumes {
        server.add(open_volume(name, volume).with_context(|| format!("volume {name}"))?);
    }
    server.set_default(config.default_volume());
    let inherited_count = inherited.len();
    let mut listeners = inherited;
    for address in &config.listen {
        listeners.push(listener::open(address)?);
    }
    let workers = (0..config.workers)
        .map(|number| Worker::start(&format!("ebbd-{number}")))
        .collect::<std::io::Result<Vec<_>>>()
        .context("worker")?;
    let daemon =
        Daemon { config, args, inherited: inherited_count, server, workers, set_log_level };
    daemon.listen(&listeners)?;
    tracing::info!(volumes = daemon.config.volumes.len(), "ready");
    // Without a service manager there is nobody to tell.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    daemon.run(&mut signals, &give_up, listeners)
}

fn watch_signals() -> anyhow::Result<(Arc<AtomicBool>, signal_hook::iterator::Signals)> {
    let give_up = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register_conditional_shutdown(signal, 1, give_up.clone())?;
    }
    Ok((give_up, signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])?))
}

/// Each volume and each client takes a descriptor: use what the system allows.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "could not raise the limit of open files");
    }
}

fn limits(nbd: &Nbd) -> Limits {
    Limits {
        max_clients: nbd.max_clients,
        // The configuration allows at most 64 MiB.
        max_request: u32::try_from(nbd.max_request.bytes()).unwrap_or(u32::MAX),
        connection_memory: usize::try_from(nbd.connection_memory.bytes()).unwrap_or(usize::MAX),
    }
}

fn tls_policy(tls: Tls) -> ebb_export_nbd::Tls {
    match tls {
        Tls::Off => ebb_export_nbd::Tls::Off,
        Tls::On => ebb_export_nbd::Tls::On,
        Tls::Require => ebb_export_nbd::Tls::Require,
    }
}

fn tls_context(nbd: &Nbd) -> anyhow::Result<Option<TlsContext>> {
    if nbd.tls == Tls::Off {
        return Ok(None);
    }
    let context = match (&nbd.tls_psk, &nbd.tls_certificates) {
        (Some(file), _) => TlsContext::from_psk(file),
        (None, Some(folder)) => TlsContext::from_certificates(folder, nbd.tls_verify_peer),
        // The configuration demands one of the two.
        (None, None) => return Ok(None),
    };
    Ok(Some(context.context("TLS")?))
}

impl Daemon {
    fn first_worker(&self) -> WorkerHandle {
        // There is at least one: the configuration says so.
        self.workers[0].handle()
    }

    fn listen(&self, listeners: &[Listener]) -> anyhow::Result<()> {
        for listener in listeners {
            let fd: OwnedFd = listener.fd.try_clone().context("socket")?;
            rustix::net::listen(&fd, 1024).context("socket")?;
            let (server, fd) = (self.server.clone(), fd_from(fd));
            let workers = self.workers.iter().map(Worker::handle).collect();
            self.first_worker()
                .spawn(move |io| async move { server.listen(io, fd, workers).await });
            tracing::info!(address = listener.name, "listening");
        }
        Ok(())
    }

    fn run(
        mut self,
        signals: &mut signal_hook::iterator::Signals,
        give_up: &AtomicBool,
        listeners: Vec<Listener>,
    ) -> anyhow::Result<()> {
        for signal in signals.forever() {
            if signal == SIGHUP {
                self.reload();
            } else {
                break;
            }
        }
        give_up.store(true, Ordering::SeqCst);
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        tracing::info!(clients = self.server.clients(), "stopping: draining requests");
        drop(listeners);
        self.stop()
    }

    fn stop(self) -> anyhow::Result<()> {
        let server = self.server.clone();
        let errors = self.first_worker().block_on(move |io| async move {
            server.stop().await;
            server.close_volumes(&io).await
        });
        let errors = errors.context("a worker ended before the volumes were closed")?;
        for error in &errors {
            let cause = error.source.as_ref().map(ToString::to_string).unwrap_or_default();
            tracing::error!(%error, cause, "not everything could be made stable");
        }
        anyhow::ensure!(errors.is_empty(), "{} volume(s) could not be flushed", errors.len());
        tracing::info!("stopped: all volumes flushed");
        Ok(())
    }

    /// Reads the configuration again and does what can be done while running. What is wrong with
    /// it is logged, and the old one stays in force.
    fn reload(&mut self) {
        let overrides = self.args.overrides(self.inherited);
        let new = match Config::load(self.args.config.as_deref(), &overrides) {
            Ok(new) => new,
            Err(error) => {
                tracing::error!("not reloaded, the old configuration stays: {error}");
                return;
            }
        };
        let changes = self.config.reload_diff(&new);
        for key in &changes.needs_restart {
            tracing::warn!(key, "changed in the configuration: takes effect at the next start");
        }
        match tls_context(&self.config.nbd) {
            Ok(context) => self.server.set_tls_context(context),
            Err(error) => tracing::error!("the old TLS keys stay: {error:#}"),
        }
        self.server.set_limits(limits(&new.nbd));
        if changes.log_changed {
            (self.set_log_level)(new.log);
        }
        self.reload_volumes(&new, &changes);
        tracing::info!(volumes = self.config.volumes.len(), "reloaded");
    }

    fn reload_volumes(&mut self, new: &Config, changes: &Changes) {
        for name in changes.volumes_removed.iter().chain(&changes.volumes_changed) {
            let (server, removed) = (self.server.clone(), name.clone());
            let result = self
                .first_worker()
                .block_on(move |io| async move { server.remove(&io, &removed).await });
            if let Some(Err(error)) = result {
                tracing::error!(%error, "not everything could be made stable");
            }
            self.config.volumes.remove(name);
            tracing::info!(volume = name, "withdrawn");
        }
        for name in changes.volumes_added.iter().chain(&changes.volumes_changed) {
            let Some(volume) = new.volumes.get(name) else { continue };
            match open_volume(name, volume) {
                Ok(opened) => {
                    self.server.add(opened);
                    self.config.volumes.insert(name.clone(), volume.clone());
                    tracing::info!(volume = name, "offered");
                }
                Err(error) => tracing::error!(volume = name, "not offered: {error}"),
            }
        }
        self.config.nbd.max_clients = new.nbd.max_clients;
        self.config.nbd.max_request = new.nbd.max_request;
        self.config.nbd.connection_memory = new.nbd.connection_memory;
        self.config.log = new.log;
        for (name, volume) in &mut self.config.volumes {
            volume.default = new.volumes.get(name).is_some_and(|v| v.default);
        }
        self.server.set_default(self.config.default_volume());
    }
}
