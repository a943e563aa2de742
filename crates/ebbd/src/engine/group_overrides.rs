//! The limits of groups that are kept in the state directory. As for volumes: the file is written first, then the limits
//! are those that the configuration in force has.

use std::sync::Arc;

use ebb_api::Refusal;
use ebb_config::params::ParameterError;
use ebb_config::{LimitsConfig, StateDir};
use ebb_control::Refused;
use ebb_io::Io;
use ebb_volume::RESIZE_LIMIT;

use super::definitions::group_name;
use super::manage::{OMIT, blocking, not_kept};
use super::overrides::in_force;
use super::{Engine, lock};
use crate::operations::LongOperation;

impl Engine {
    /// Checks that limits of a group, which need not exist yet, could be kept. Changes nothing.
    ///
    /// # Errors
    /// If there is no state directory, or it cannot be written.
    pub(crate) async fn must_keep_group_limits(&self) -> Result<(), Refused> {
        let state = self.state_dir_or(OMIT)?;
        blocking(move || state.try_out().map_err(|error| not_kept(&error))).await
    }

    /// Keeps the limits that were set of a group, so that the next start has them, too.
    ///
    /// # Errors
    /// If there is no such group, or the state directory cannot be written.
    pub(crate) async fn keep_group_limits(
        self: &Arc<Self>,
        io: &Io,
        group: &str,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let _names = self.reserve_when_free(io, &group_name(group), RESIZE_LIMIT).await?;
        let limits = self.limits.of_group_set_at_run_time(group).map_err(unknown)?;
        let state = self.state_dir_or(OMIT)?;
        operation.step("writing the state file");
        let change = move |kept: &mut LimitsConfig| *kept = limits.over(kept);
        self.change_group(&state, group, change).await.map_err(in_force)?;
        if let Some(config) = &mut lock(&self.definitions).config {
            let own = config.limit_groups.get(group).copied();
            config.replaced_groups.entry(group.to_owned()).or_insert(own);
            let now = limits.over(&own.unwrap_or_default());
            config.limit_groups.insert(group.to_owned(), now);
            self.parameters.configure_limit_group(group, &now);
        }
        let (operation, by) = (operation.id(), operation.by());
        tracing::info!(limit_group = group, operation, by, "limits kept");
        Ok(())
    }

    /// Forgets the limits of a group that were kept: those of its configuration are in force, unless others were set at run
    /// time.
    ///
    /// # Errors
    /// As for [`Engine::keep_group_limits`].
    pub(crate) async fn forget_group_limits(
        self: &Arc<Self>,
        io: &Io,
        group: &str,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let _names = self.reserve_when_free(io, &group_name(group), RESIZE_LIMIT).await?;
        self.limits.of_group_set_at_run_time(group).map_err(unknown)?;
        let state = self.state_dir_or(OMIT)?;
        operation.step("writing the state file");
        self.change_group(&state, group, |kept| *kept = LimitsConfig::default()).await?;
        if let Some(config) = &mut lock(&self.definitions).config
            && let Some(own) = config.replaced_groups.remove(group)
        {
            match own {
                Some(own) => config.limit_groups.insert(group.to_owned(), own),
                None => config.limit_groups.remove(group),
            };
            self.parameters.configure_limit_group(group, &own.unwrap_or_default());
        }
        let (operation, by) = (operation.id(), operation.by());
        tracing::info!(limit_group = group, operation, by, "kept limits forgotten");
        Ok(())
    }

    async fn change_group(
        &self,
        state: &Arc<StateDir>,
        group: &str,
        change: impl FnOnce(&mut LimitsConfig) + Send + 'static,
    ) -> Result<(), Refused> {
        let in_force = {
            let definitions = lock(&self.definitions);
            let config = definitions.config.as_ref();
            config.and_then(|config| config.kept_group_limits(group)).unwrap_or_default()
        };
        let (state, file) = (state.clone(), group.to_owned());
        let write =
            move || state.change_group(&file, in_force, change).map_err(|error| not_kept(&error));
        blocking(write).await?;
        if let Some(config) = &mut lock(&self.definitions).config {
            config.broken_groups.remove(group);
        }
        Ok(())
    }
}

fn unknown(error: ParameterError) -> Refused {
    Refused::new(Refusal::Unknown, error.kind.as_str(), error.message, error.remedy)
}
