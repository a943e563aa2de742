//! The daemon's control socket and page: their sockets, and what they show of the engine.
//!
//! # Invariants
//! - Only root, the daemon's user and its group can open the control socket: its mode is 0660 before it is bound.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use anyhow::Context;
use ebb_advice::Advised;
use ebb_api::stat::{
    CertificateKind, CertificateStat, DaemonPhase, DefinedIn, FailureStat, LossStat, ReloadStat,
    SandboxStat, VolumeCondition, VolumeStat,
};
use ebb_api::{LimitGroupStat, LimitStat};
use ebb_config::{Config, TlsSetting};
use ebb_control::figures::{VolumeBrief, limit_stat, remote_stat, volume_stat, worst_remote};
use ebb_control::{
    ControlContext, ControlError, ControlServer, ControlSocket, PageAccess, PageSocket,
    SocketPeers, TokenTable,
};
use ebb_export_nbd::{ExpiringKind, Server, ServerTls};
use ebb_volume::Volume;

use crate::engine::{Engine, VolumePhase, VolumeState};
use crate::listener::{self, ListenError, Listener};
use crate::outages::Outages;
use crate::socket_file::SocketPlace;

/// The sockets of the control socket and the page, as far as they are configured. Dropping them removes the socket's
/// file.
pub(crate) struct ControlSockets {
    control: Option<Listener>,
    page: Vec<Listener>,
}

impl ControlSockets {
    /// Opens them; `end` ends the wait for another server to close the control socket.
    ///
    /// # Errors
    /// [`ListenError`].
    pub(crate) fn open(config: &Config, end: &AtomicBool) -> Result<Self, ListenError> {
        let control = config.control.as_deref().map(|path| listener::open_private(path, end));
        let control = control.transpose().map_err(|error| error.of_key("control"))?;
        let page = config.web.as_deref().map(listener::open_tcp).transpose();
        let page = page.map_err(|error| error.of_key("web"))?;
        Ok(Self { control, page: page.unwrap_or_default() })
    }

    /// The place of the control socket's file.
    pub(crate) fn place(&self) -> Option<SocketPlace> {
        self.control.as_ref()?.place()
    }

    /// Serves them, if there is one.
    ///
    /// # Errors
    /// [`ControlError`].
    pub(crate) fn serve(
        &self,
        config: &Config,
        context: ControlContext,
        access: PageAccess,
    ) -> Result<Option<ControlServer>, ControlError> {
        let control = self.control.as_ref().map(socket);
        let page = config.web.as_deref().map(|address| PageSocket {
            sockets: self.page.iter().map(socket).collect(),
            address,
            names: &config.web_names,
            access,
        });
        if control.is_none() && page.is_none() {
            return Ok(None);
        }
        ControlServer::start(control, page, Arc::new(context)).map(Some)
    }
}

/// The tokens and the certificate of the page.
///
/// # Errors
/// If they cannot be read.
pub(crate) fn page_access(config: &Config) -> anyhow::Result<PageAccess> {
    if config.web.is_none() {
        return Ok(PageAccess::default());
    }
    let tokens = config.web_tokens.as_deref().map(TokenTable::read).transpose();
    let folder = config.web_tls_certificates.as_deref();
    let tls = folder.map(|folder| ServerTls::from_certificates(folder, false)).transpose();
    Ok(PageAccess {
        tokens: tokens.map_err(Advised).context("web_tokens")?,
        tls: tls.map_err(Advised).context("web_tls_certificates")?,
    })
}

/// Who may use the control socket.
pub(crate) fn socket_peers() -> SocketPeers {
    SocketPeers {
        owner: rustix::process::geteuid().as_raw(),
        group: rustix::process::getegid().as_raw(),
        has_group: listener::peer_has_group,
    }
}

/// When the files expire by which the daemon and its clients authenticate; without those that
/// cannot be read.
pub(crate) fn certificates(config: &Config) -> Vec<CertificateStat> {
    let nbd = config.nbd.tls_certificates.as_ref().filter(|_| config.nbd.tls != TlsSetting::Off);
    let web = config.web_tls_certificates.as_ref().filter(|_| config.web.is_some());
    let of = |purpose: &'static str, folder: &PathBuf, verifies: bool| {
        let files = ServerTls::expiring_files(folder, verifies).into_iter();
        files.map(move |file| CertificateStat {
            purpose: purpose.to_owned(),
            kind: match file.kind {
                ExpiringKind::Certificate => CertificateKind::Certificate,
                ExpiringKind::Authority => CertificateKind::Authority,
                ExpiringKind::RevocationList => CertificateKind::RevocationList,
            },
            path: file.path.display().to_string(),
            expires: file.expires,
        })
    };
    let nbd = nbd.map(|folder| of("nbd", folder, config.nbd.tls_verify_peer));
    let web = web.map(|folder| of("web", folder, false));
    nbd.into_iter().flatten().chain(web.into_iter().flatten()).collect()
}

/// What the daemon does as a whole, for the statistics.
#[derive(Debug, Default)]
pub(crate) struct DaemonState {
    phase: Mutex<Option<DaemonPhase>>,
    reload: Mutex<Option<ReloadStat>>,
    certificates: Mutex<Vec<CertificateStat>>,
    sandbox: Mutex<Vec<SandboxStat>>,
    lost_sockets: Mutex<Vec<String>>,
}

impl DaemonState {
    pub(crate) fn phase(&self) -> DaemonPhase {
        lock(&self.phase).unwrap_or(DaemonPhase::Starting)
    }

    pub(crate) fn set_phase(&self, phase: DaemonPhase) {
        *lock(&self.phase) = Some(phase);
    }

    pub(crate) fn reload(&self) -> Option<ReloadStat> {
        lock(&self.reload).clone()
    }

    /// Notes the end of a reload; `Err`: its error and the remedy.
    pub(crate) fn reloaded(&self, result: Result<(), (&str, &str)>) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let time = now.map_or(0.0, |since| since.as_secs_f64());
        let mut state = lock(&self.reload);
        let earlier = state.as_ref().and_then(|earlier| earlier.last_success);
        let success = result.is_ok();
        let last_success = if success { Some(time) } else { earlier };
        let (error, remedy) = result.err().unzip();
        let (error, remedy) = (error.map(str::to_owned), remedy.unwrap_or_default().to_owned());
        *state = Some(ReloadStat { success, time, last_success, error, remedy });
    }

    pub(crate) fn certificates(&self) -> Vec<CertificateStat> {
        lock(&self.certificates).clone()
    }

    pub(crate) fn set_certificates(&self, certificates: Vec<CertificateStat>) {
        *lock(&self.certificates) = certificates;
    }

    /// The paths of listening sockets at which no client can connect.
    pub(crate) fn lost_sockets(&self) -> Vec<String> {
        lock(&self.lost_sockets).clone()
    }

    pub(crate) fn set_lost_sockets(&self, paths: Vec<String>) {
        *lock(&self.lost_sockets) = paths;
    }

    pub(crate) fn sandbox(&self) -> Vec<SandboxStat> {
        lock(&self.sandbox).clone()
    }

    /// Sets one part, as its state has changed.
    pub(crate) fn set_sandbox_part(&self, part: &SandboxStat) {
        lock(&self.sandbox)
            .iter_mut()
            .filter(|known| known.mechanism == part.mechanism)
            .for_each(|known| *known = part.clone());
    }

    pub(crate) fn set_sandbox(&self, sandbox: Vec<SandboxStat>) {
        *lock(&self.sandbox) = sandbox;
    }
}

fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn socket(listener: &Listener) -> ControlSocket<'_> {
    ControlSocket { fd: listener.fd.as_fd(), name: &listener.name }
}

/// The figures of all volumes of the engine.
pub(crate) fn volume_stats(server: &Server, engine: &Engine, outages: &Outages) -> Vec<VolumeStat> {
    let now = ebb_mem::clock::now();
    let (disks, failing) = (engine.disks_of_guests(), engine.failing_guests());
    let stat = |state: &VolumeState| {
        let guests = disks.get(&state.name).copied().unwrap_or_default();
        let clients = server.connections(&state.name) + guests;
        let failing = failing.get(&state.name).copied().unwrap_or_default();
        let outage = outages.of(&state.name);
        engine_stat(state, now, |volume| volume_stat(volume, clients, outage, failing))
    };
    engine.states().iter().map(stat).collect()
}

/// The figures of one volume of the engine.
pub(crate) fn volume_stat_of(
    server: &Server,
    engine: &Engine,
    outages: &Outages,
    name: &str,
) -> Option<VolumeStat> {
    let states = engine.states();
    let state = states.iter().find(|state| state.name == name)?;
    let clients = server.connections(name) + engine.disks_of(name);
    let failing = engine.failing_guests().get(name).copied().unwrap_or_default();
    let stat = |volume: &Volume| volume_stat(volume, clients, outages.of(name), failing);
    Some(engine_stat(state, ebb_mem::clock::now(), stat))
}

/// The figures of the groups of limits.
pub(crate) fn limit_group_stats(engine: &Engine) -> Vec<LimitGroupStat> {
    let states = engine.states();
    let stat = |name: String, limits: LimitStat| {
        let in_it = |state: &&VolumeState| {
            let figures = state.volume.as_ref().and_then(|volume| volume.limit_figures());
            figures.and_then(|figures| figures.group).is_some_and(|group| *group == *name)
        };
        let volumes = states.iter().filter(in_it).map(|state| state.name.clone()).collect();
        LimitGroupStat { name, volumes, limits }
    };
    let limits = |name: &str| match engine.limits().known(name) {
        Some(group) => limit_stat(&group.figures()),
        // No volume has been in it.
        None => engine.limits().configured(name),
    };
    engine.limits().names().into_iter().map(|name| stat(name.clone(), limits(&name))).collect()
}

/// All volumes of the engine, without their figures.
pub(crate) fn volume_briefs(engine: &Engine, outages: &Outages) -> Vec<VolumeBrief> {
    let failing = engine.failing_guests();
    let brief = |state: VolumeState| {
        let outage = outages.of(&state.name);
        let failing_guests = failing.get(&state.name).copied().unwrap_or_default();
        let served = state.volume.as_ref().filter(|_| state.phase == VolumePhase::Serving);
        let word = served.map_or(state.phase.condition(), |volume| {
            let remote = worst_remote(volume).map(remote_stat);
            let (lost, outage) = (volume.is_lost(), outage.as_ref());
            VolumeCondition::of_served(lost, remote.as_ref(), outage, failing_guests)
        });
        let VolumeState { name, volume, .. } = state;
        VolumeBrief { state: word, outage, failing_guests, name, volume }
    };
    engine.states().into_iter().map(brief).collect()
}

/// The figures of a volume of the engine; `stat` reads an open volume's.
fn engine_stat(
    state: &VolumeState,
    now: Instant,
    stat: impl FnOnce(&Volume) -> VolumeStat,
) -> VolumeStat {
    let of_volume = state.volume.as_deref().map(stat);
    let failure = state.failure.as_ref().map(|failure| FailureStat {
        reason: failure.reason.clone(),
        attempts: failure.attempts,
        removed: failure.removed,
        since_seconds: now.saturating_duration_since(failure.since).as_secs_f64(),
        next_seconds: failure.next.map(|next| next.saturating_duration_since(now).as_secs_f64()),
    });
    let of_volume = of_volume.unwrap_or_default();
    let remedy = |loss| LossStat { remedy: loss_remedy(&state.name, state.origin), ..loss };
    let loss = of_volume.loss.map(remedy);
    let word = match state.phase {
        VolumePhase::Serving if state.volume.is_some() => of_volume.state,
        phase => phase.condition(),
    };
    VolumeStat {
        name: state.name.clone(),
        closing: state.phase == VolumePhase::Closing,
        state: word,
        origin: state.origin,
        failure,
        waits_for: state.waits_for.clone(),
        loss,
        ..of_volume
    }
}

/// The remedy for a volume with a loss. A restart reopens only what the next start serves.
fn loss_remedy(name: &str, origin: DefinedIn) -> String {
    let reopen = match origin {
        DefinedIn::Configuration => {
            "remove the volume from the configuration, reload, add it again and reload, or restart \
             ebbd"
                .to_owned()
        }
        DefinedIn::State => {
            format!("run `ebbd volume remove {name}` and add it again, or restart ebbd")
        }
        _ => format!("run `ebbd volume remove {name}` and add it again"),
    };
    format!("repair the device, then {reopen}, and check the guest's file systems")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_of_a_loss_suits_the_origin_of_the_volume() {
        let remedy = |origin| loss_remedy("L2", origin);
        let (file, kept) = (remedy(DefinedIn::Configuration), remedy(DefinedIn::State));
        assert!(file.contains("from the configuration, reload") && file.contains("or restart"));
        assert!(kept.contains("`ebbd volume remove L2`") && kept.contains("or restart"), "{kept}");
        let added = remedy(DefinedIn::RunTime);
        assert!(added.contains("`ebbd volume remove L2`"), "{added}");
        assert!(!added.contains("restart") && !added.contains("configuration"), "{added}");
    }

    #[test]
    fn authority_and_revocation_list_are_among_certificates() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("server-cert.pem", include_str!("../../ebb-tls/tests/it/revoked/good-cert.pem")),
            ("ca-cert.pem", include_str!("../../ebb-tls/tests/it/revoked/ca-cert.pem")),
            ("ca-crl.pem", include_str!("../../ebb-tls/tests/it/revoked/ca-crl.pem")),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let text = "listen = ['unix:/never']\n[volume.a]\nstore = 'null:1M'\n";
        let args = ebb_config::ServeArgs::default();
        let mut config = Config::parse(text, std::path::Path::new("test"), &args).unwrap();
        config.nbd.tls = TlsSetting::On;
        config.nbd.tls_certificates = Some(folder.path().into());
        let names = |config: &Config| -> Vec<String> {
            let file = |one: CertificateStat| one.path.rsplit_once('/').unwrap().1.to_owned();
            certificates(config).into_iter().map(file).collect()
        };
        assert_eq!(names(&config), ["server-cert.pem"]);
        config.nbd.tls_verify_peer = true;
        assert_eq!(names(&config), ["server-cert.pem", "ca-cert.pem", "ca-crl.pem"]);
    }
}
