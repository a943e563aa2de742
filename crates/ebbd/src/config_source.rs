//! The configuration in force, and what a reload would change, for the API.

use std::sync::Arc;

use ebb_api::{ConfigChange, Refusal};
use ebb_config::{Config, KeySource, ServeArgs, VolumeOrigin};
use ebb_control::{ConfigSource, Refused};

use crate::broker_fault::broker_refusal;
use crate::engine::Engine;
use crate::key_programs;

/// See the module.
pub(crate) struct DaemonConfig {
    pub(crate) engine: Arc<Engine>,
    /// The daemon's command line.
    pub(crate) args: ServeArgs,
}

impl ConfigSource for DaemonConfig {
    fn text(&self) -> String {
        self.engine.config().map(|config| config.to_toml()).unwrap_or_default()
    }

    fn kept_keys(&self) -> Vec<String> {
        self.engine.config().map(|config| kept_keys(&config)).unwrap_or_default()
    }

    fn changes(&self) -> Result<Vec<ConfigChange>, Refused> {
        let Some(old) = self.engine.config() else { return Ok(Vec::new()) };
        match Config::load_again(&self.args, old.state.as_deref()) {
            Ok(new) => {
                let new = self.engine.with_run_time_volumes(new);
                Ok(changes(&old, &new, key_programs::can_run()))
            }
            Err(error) => {
                let unread = error.source.as_ref();
                if let Some(refused) = unread.and_then(|error| broker_refusal(error)) {
                    return Err(refused);
                }
                let mistakes = Config::mistakes(&self.args);
                let lines: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
                let remedy = "correct it; `ebbd config check` checks more";
                Err(Refused::new(Refusal::Invalid, "configuration", lines.join("\n"), remedy))
            }
        }
    }
}

/// The keys whose value the state directory has instead of the configuration file.
fn kept_keys(config: &Config) -> Vec<String> {
    let mut file = config.clone();
    let of_file =
        |name: &String| matches!(config.origins.get(name), Some(VolumeOrigin::Configuration(_)));
    // A volume that only the state directory defines is in no other place.
    let replaced = config.replaced.iter().filter(|(name, _)| of_file(name));
    file.volumes.extend(replaced.map(|(name, volume)| (name.clone(), volume.clone())));
    changes(&file, config, true).into_iter().map(|change| change.key).collect()
}

/// The settings that differ, in the order of their keys. A daemon in its sandbox may be unable to
/// run programs for keys until it is started again.
fn changes(old: &Config, new: &Config, runs_programs: bool) -> Vec<ConfigChange> {
    let restart = old.reload_diff(new).needs_restart;
    let by_program = |name: &str| {
        let volume = new.volumes.get(name);
        volume.is_some_and(|volume| matches!(volume.encryption, Some(KeySource::Command(_))))
    };
    let is_denied = |key: &str| {
        let name = key.strip_prefix("volume.").and_then(|rest| rest.strip_suffix(".encryption"));
        !runs_programs && name.is_some_and(by_program)
    };
    let mut all = std::collections::BTreeMap::<String, ConfigChange>::new();
    for (key, value) in old.settings() {
        all.entry(key).or_default().from = Some(value);
    }
    for (key, value) in new.settings() {
        all.entry(key).or_default().to = Some(value);
    }
    let differs = all.into_iter().filter(|(_, change)| change.from != change.to);
    let named = differs.map(|(key, change)| {
        let needs_restart = restart.contains(&key.as_str()) || is_denied(&key);
        ConfigChange { key, needs_restart, ..change }
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_settings_that_differ_are_told_and_whether_they_need_a_restart() {
        let config =
            |text: &str| Config::parse(text, Path::new("f"), &ServeArgs::default()).unwrap();
        let old = config(
            "listen = ['unix:/s']\n[volume.a]\nstore = 'memory:1M'\n[volume.b]\nstore = 'null:1M'\n",
        );
        let new =
            config("listen = ['unix:/t']\ncache_max = '1G'\n[volume.a]\nstore = 'memory:2M'\n");
        let all = changes(&old, &new, true);
        let of = |key: &str| all.iter().find(|change| change.key == key).unwrap();
        assert!(of("listen").needs_restart && !of("cache_max").needs_restart);
        assert_eq!(of("volume.a.store").to.as_deref(), Some("\"memory:2M\""));
        assert_eq!(
            (of("volume.b.store").from.as_deref(), &of("volume.b.store").to),
            (Some("\"null:1M\""), &None)
        );
        assert!(changes(&old, &old, true).is_empty());
    }

    #[test]
    fn program_for_a_key_that_cannot_run_yet_needs_a_restart() {
        let config = |key: &str| {
            let text = format!(
                "listen = ['unix:/s']\n[volume.a]\nstore = 'file:/a'\nencryption = '{key}'\n"
            );
            Config::parse(&text, Path::new("f"), &ServeArgs::default()).unwrap()
        };
        let (file, program) = (config("key-file:/k"), config("command:/bin/cat /k"));
        for (old, new, runs_programs, needs_restart) in [
            (&file, &program, false, true),
            (&file, &program, true, false),
            (&program, &file, false, false),
        ] {
            let [change] = &changes(old, new, runs_programs)[..] else { panic!("one") };
            assert_eq!(change.key, "volume.a.encryption");
            assert_eq!(change.needs_restart, needs_restart, "{change:?}");
        }
    }

    #[test]
    fn what_the_state_directory_has_instead_of_the_file_is_told() {
        let text = "listen = ['unix:/s']\n[volume.a]\nstore = 'memory:1M'\n";
        let mut config = Config::parse(text, Path::new("f"), &ServeArgs::default()).unwrap();
        assert!(kept_keys(&config).is_empty());
        let own = config.volumes["a"].clone();
        config.replaced.insert("a".to_owned(), own);
        config.volumes.get_mut("a").unwrap().limits.iops = Some(5);
        assert_eq!(kept_keys(&config), ["volume.a.limit_iops"]);
        config.origins.insert("a".to_owned(), VolumeOrigin::State);
        assert!(kept_keys(&config).is_empty());
    }
}
