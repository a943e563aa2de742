//! The daemon that runs with a configuration, or with an earlier one: a check of it as another user
//! may find what the daemon does not, and a reload needs more than a start.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_api::ConfigView;
use ebb_api::stat::{DefinedIn, Stat};
use ebb_config::{Config, StateDir, toml_to_json};

use super::CheckLine;
use crate::client::DaemonClient;

/// The longest wait for its reply.
const PATIENCE: Duration = Duration::from_secs(5);

/// A daemon; without one, or if this user may not ask it, nothing is known of it.
#[derive(Default)]
pub(super) struct RunningDaemon {
    stat: Stat,
    /// Its state directory.
    state: Option<PathBuf>,
}

impl RunningDaemon {
    /// The daemon at the control socket of this configuration.
    pub(super) fn of(config: &Config) -> RunningDaemon {
        let ask = |path: &Path| {
            let daemon = DaemonClient::new(path.to_str()).ok()?.within(PATIENCE);
            let stat = daemon.json("GET", "/v1/stat", None).ok()?;
            let view: ConfigView = daemon.json("GET", "/v1/config", None).ok()?;
            let settings = toml_to_json(&view.text)?;
            let state = settings.get("state").and_then(|path| path.as_str()).map(PathBuf::from);
            Some(RunningDaemon { stat, state: state.filter(|path| path.is_absolute()) })
        };
        config.control.as_deref().and_then(ask).unwrap_or_default()
    }

    /// Checks that a reload finds the volumes that the state directory keeps.
    ///
    /// # Errors
    /// As for the reload.
    pub(super) fn check_state(&self) -> anyhow::Result<()> {
        let keeps = self.stat.volumes.iter().any(|it| it.origin == DefinedIn::State);
        let Some(state) = self.state.as_deref().map(StateDir::new) else { return Ok(()) };
        // In an existing directory this would make missing files.
        let is_missing = state.folder().try_exists().is_ok_and(|there| !there);
        match keeps && is_missing {
            true => state.found(true).map_err(|error| anyhow::Error::msg(error.to_string())),
            false => Ok(()),
        }
    }

    /// Replaces the finding of a volume that the running daemon does not serve.
    pub(super) fn compare(&self, name: &str, found: CheckLine) -> CheckLine {
        let volumes = self.stat.volumes.iter();
        let failure = volumes.filter(|it| it.name == name).find_map(|it| it.failure.as_ref());
        match (found, failure) {
            (CheckLine::Ok(text), Some(failure)) => {
                let user = rustix::process::geteuid().as_raw();
                CheckLine::Warning(format!(
                    "{text}, as user {user}; the running daemon does not serve it: {}",
                    failure.reason
                ))
            }
            (line, _) => line,
        }
    }
}

#[cfg(test)]
mod tests {
    use ebb_api::stat::{FailureStat, VolumeStat};

    use super::*;

    fn with(volume: VolumeStat) -> RunningDaemon {
        let stat = Stat { volumes: vec![volume], ..Stat::default() };
        RunningDaemon { stat, ..RunningDaemon::default() }
    }

    #[test]
    fn volume_that_the_daemon_does_not_serve_is_no_good_one() {
        let failure = FailureStat { reason: "permission denied".into(), ..FailureStat::default() };
        let failed =
            with(VolumeStat { name: "a".into(), failure: Some(failure), ..VolumeStat::default() });
        let good = || CheckLine::Ok("volume a: 512 bytes".to_owned());
        let CheckLine::Warning(text) = failed.compare("a", good()) else { panic!("not a warning") };
        assert!(text.starts_with("volume a: 512 bytes, as user "), "{text}");
        assert!(text.ends_with("does not serve it: permission denied"), "{text}");
        assert_eq!(failed.compare("b", good()), good());
        assert_eq!(RunningDaemon::default().compare("a", good()), good());
        let bad = || CheckLine::Mistake("volume a: no such file".to_owned());
        assert_eq!(failed.compare("a", bad()), bad());
    }

    #[test]
    fn state_directory_that_a_reload_does_not_find_is_a_mistake() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let of = |origin| RunningDaemon {
            state: Some(state.clone()),
            ..with(VolumeStat { origin, ..VolumeStat::default() })
        };
        let (kept, other) = (of(DefinedIn::State), of(DefinedIn::RunTime));
        let why = kept.check_state().unwrap_err().to_string();
        assert!(why.contains("state directory") && why.contains("mount or restore it"), "{why}");
        assert!(other.check_state().is_ok() && !state.exists(), "nothing is made");
        std::fs::create_dir_all(state.join("volumes")).unwrap();
        assert!(kept.check_state().is_ok());
    }
}
