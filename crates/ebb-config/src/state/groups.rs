//! The groups of limits in the state directory: `DIR/groups` has a file for each group whose limits are kept, with the
//! keys of a table `[limit_group.NAME]` that replace those of the configuration. Names and files are as for volumes.

use std::fs::File;

use super::{StateDir, StateError, StateFiles, StoredVolume, VolumeOverrides, failed};
use crate::{Config, ConfigError, LimitsConfig};

impl StateDir {
    /// The directory of the groups' files, used as one of volumes that the configuration defines.
    pub(super) fn groups(&self) -> StateDir {
        StateDir { volumes: self.volumes.with_file_name("groups") }
    }

    /// Changes the limits of a group that are kept; its file is removed when none is left. A file that makes no sense is
    /// replaced by what is `in_force` with the change. Blocks. One call for a group at a time.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn change_group(
        &self,
        group: &str,
        in_force: LimitsConfig,
        change: impl FnOnce(&mut LimitsConfig),
    ) -> Result<(), StateError> {
        let groups = self.groups();
        if !groups.volumes.exists() {
            groups.create()?;
            // So that the directory is there after a power cut, too.
            if let Some(parent) = groups.volumes.parent() {
                let synced = File::open(parent).and_then(|folder| folder.sync_all());
                synced.map_err(failed("write", parent))?;
            }
        }
        let in_force = VolumeOverrides { limits: in_force, ..VolumeOverrides::default() };
        groups.change_overrides(group, in_force, |kept| change(&mut kept.limits))
    }
}

impl Config {
    /// The limits of a group that are in force instead of those that the configuration has.
    pub fn kept_group_limits(&self, group: &str) -> Option<LimitsConfig> {
        let own = self.replaced_groups.get(group)?.unwrap_or_default();
        Some(self.limit_groups.get(group)?.where_other_than(&own))
    }
}

/// Gives the groups of `config` the limits that are kept of them.
pub(super) fn merge(config: &mut Config, state: &StateDir) -> Result<(), ConfigError> {
    let groups = state.groups();
    let StateFiles { volumes: kept, foreign } = groups.read()?;
    config.note_foreign(foreign);
    for (name, stored) in kept {
        let path = groups.path_of(&name);
        let limits = match stored {
            Ok(StoredVolume::Overrides(kept)) => match *kept {
                VolumeOverrides { size: None, size_replaces: None, limits, limit_group: None } => {
                    Ok(limits)
                }
                _ => Err("it has keys other than limits: remove these, and reload".to_owned()),
            },
            Ok(StoredVolume::Whole(_)) => {
                Err("it has keys of a volume: remove the file, and reload".to_owned())
            }
            Err(error) => Err(error.to_string()),
        };
        match limits {
            Ok(limits) => {
                let own = config.limit_groups.get(&name).copied();
                config.limit_groups.insert(name.clone(), limits.over(&own.unwrap_or_default()));
                config.replaced_groups.insert(name, own);
            }
            Err(why) => {
                let warning = format!(
                    "{}: the limits of the group that are kept cannot be used: {why}",
                    path.display()
                );
                config.warnings.push(warning.clone());
                config.broken_groups.insert(name, warning);
            }
        }
    }
    Ok(())
}
