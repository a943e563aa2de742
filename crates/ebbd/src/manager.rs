//! The daemon's side of the API that changes volumes: each change is an operation, which runs on a worker.

use std::sync::Arc;

use ebb_api::{AddVolumeBody, OperationView, ResizeBody, VolumeView};
use ebb_config::{ConfigError, NewVolume, VolumeConfig, VolumeOrigin, check_name};
use ebb_control::{BegunOperation, Refused, VolumeChange, VolumeManager};
use ebb_export_nbd::Server;
use ebb_io::{Io, WorkerHandle};
use ebb_volume::{Resize, Volumes};
use tokio::sync::oneshot;

use crate::control::volume_stat_of;
use crate::engine::Engine;
use crate::operations::{LongOperation, Operations};

/// What a reload that was applied leaves to be done.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReloadReport {
    /// The keys that need a restart.
    pub(crate) restart: Vec<&'static str>,
    /// The volumes whose stores cannot be opened, with the reasons.
    pub(crate) not_served: Vec<String>,
}

/// What a reload has ended with.
pub(crate) type ReloadOutcome = Result<ReloadReport, Refused>;

/// Requests a reload; false if the daemon stops.
pub(crate) type RequestReload = Box<dyn Fn(oneshot::Sender<ReloadOutcome>) -> bool + Send + Sync>;

/// See the module.
pub(crate) struct Manager {
    pub(crate) engine: Arc<Engine>,
    pub(crate) server: Server,
    pub(crate) volumes: Volumes,
    pub(crate) worker: WorkerHandle,
    pub(crate) operations: Operations,
    pub(crate) reload: RequestReload,
}

impl From<ConfigErrorRefusal> for Refused {
    fn from(ConfigErrorRefusal(error): ConfigErrorRefusal) -> Refused {
        let key = error.key.as_deref().map(|key| format!("{key}: ")).unwrap_or_default();
        Refused::new(422, "invalid_value", format!("{key}{}", error.message), error.remedy)
    }
}

/// A mistake in the settings of a volume.
struct ConfigErrorRefusal(ConfigError);

fn config_of(body: AddVolumeBody) -> Result<VolumeConfig, Refused> {
    let AddVolumeBody { name, store, size, create, read_only, shared, direct, cache, bdi, .. } =
        body;
    let new = NewVolume { name, store, size, create, read_only, shared, direct, cache, bdi };
    new.config().map_err(|error| ConfigErrorRefusal(error).into())
}

impl Manager {
    /// Begins an operation, and runs `work` for it on the worker.
    fn run<Fut>(
        &self,
        (kind, by): (&'static str, &str),
        volume: Option<&str>,
        work: impl FnOnce(Arc<Engine>, Io, Arc<LongOperation>) -> Fut + Send + 'static,
    ) -> Result<BegunOperation, Refused>
    where
        Fut: Future<Output = Result<(), Refused>> + 'static,
    {
        let operation = self.operations.begin(kind, volume, by)?;
        let begun = BegunOperation { id: operation.id(), ended: operation.ended() };
        let engine = self.engine.clone();
        self.worker.spawn(move |io| {
            let work = work(engine, io, operation.clone());
            async move { operation.finish(work.await) }
        });
        Ok(begun)
    }

    fn add(&self, body: AddVolumeBody, by: &str) -> Result<BegunOperation, Refused> {
        let (name, keep) = (body.name.clone(), body.persist);
        let config = config_of(body)?;
        self.run(("add", by), Some(&name.clone()), move |engine, io, operation| async move {
            engine.add_volume(&io, &name, (config, keep), &operation).await
        })
    }

    fn rename(&self, from: String, to: String, by: &str) -> Result<BegunOperation, Refused> {
        check_name(&to).map_err(ConfigErrorRefusal)?;
        self.run(("rename", by), Some(&from.clone()), move |engine, io, operation| async move {
            engine.rename_volume(&io, (&from, &to), &operation).await
        })
    }

    fn resize(&self, name: String, body: &ResizeBody, by: &str) -> Result<BegunOperation, Refused> {
        let order = Resize { to: body.size, shrink: body.shrink };
        self.run(("resize", by), Some(&name.clone()), move |engine, io, operation| async move {
            engine.resize_volume(&io, (&name, order), &operation).await
        })
    }

    fn flush(&self, name: Option<&str>, by: &str) -> Result<BegunOperation, Refused> {
        let volumes = match name {
            None => self.volumes.list(),
            Some(name) => match self.volumes.get(name) {
                Some(served) => vec![served.volume],
                None => return Err(self.engine.unknown(name)),
            },
        };
        self.run(("flush", by), name, move |engine, io, operation| async move {
            engine.flush_volumes(&io, volumes, &operation).await
        })
    }

    fn reload(&self, by: &str) -> Result<BegunOperation, Refused> {
        let (sender, outcome) = oneshot::channel();
        if !(self.reload)(sender) {
            return Err(Refused::new(503, "stopping", "the daemon is stopping", "start it again"));
        }
        self.run(("reload", by), None, move |_, _, operation| async move {
            tracing::info!(operation = operation.id(), by = operation.by(), "reload requested");
            operation.step("reading the configuration, and changing volumes");
            // The sender is dropped if the daemon stops.
            let stopping =
                || Refused::new(503, "stopping", "the daemon is stopping", "start it again");
            let ReloadReport { restart, not_served } = outcome.await.map_err(|_| stopping())??;
            operation.note_not_served(not_served);
            if restart.is_empty() {
                operation.step("reloaded");
            } else {
                let keys = restart.join(", ");
                operation.step(&format!("reloaded; these take effect at the next start: {keys}"));
            }
            Ok(())
        })
    }
}

impl VolumeManager for Manager {
    fn begin(&self, change: VolumeChange, by: &str) -> Result<BegunOperation, Refused> {
        if self.engine.is_stopping() {
            let remedy = "try again when it runs";
            return Err(Refused::new(503, "stopping", "the daemon is stopping", remedy));
        }
        match change {
            VolumeChange::Add(body) => self.add(body, by),
            VolumeChange::Remove(name) => self.run(
                ("remove", by),
                Some(&name.clone()),
                move |engine, io, operation| async move {
                    engine.remove_volume(&io, &name, &operation).await
                },
            ),
            VolumeChange::Rename(from, to) => self.rename(from, to, by),
            VolumeChange::Resize(name, body) => self.resize(name, &body, by),
            VolumeChange::KeepLimits(name) => self.run(
                ("limit", by),
                Some(&name.clone()),
                move |engine, io, operation| async move {
                    engine.keep_limits(&io, &name, &operation).await
                },
            ),
            VolumeChange::ForgetLimits(name) => self.run(
                ("limit", by),
                Some(&name.clone()),
                move |engine, io, operation| async move {
                    engine.forget_limits(&io, &name, &operation).await
                },
            ),
            VolumeChange::KeepGroupLimits(group) => {
                self.run(("limit", by), None, move |engine, io, operation| async move {
                    engine.keep_group_limits(&io, &group, &operation).await
                })
            }
            VolumeChange::ForgetGroupLimits(group) => {
                self.run(("limit", by), None, move |engine, io, operation| async move {
                    engine.forget_group_limits(&io, &group, &operation).await
                })
            }
            VolumeChange::Flush(name) => self.flush(Some(&name), by),
            VolumeChange::FlushAll => self.flush(None, by),
            VolumeChange::Reload => self.reload(by),
        }
    }

    fn volume(&self, name: &str) -> Option<VolumeView> {
        let stat = volume_stat_of(&self.server, &self.engine, name)?;
        let state = || self.engine.state_dir().ok().map(|state| state.path_of(name));
        let file = || state().map(|path| path.display().to_string()).unwrap_or_default();
        let Some((config, origin)) = self.engine.definition(name) else {
            return Some(VolumeView { stat, defined: file(), ..VolumeView::default() });
        };
        Some(VolumeView {
            stat,
            defined: match origin {
                VolumeOrigin::Configuration(place) => place.into(),
                VolumeOrigin::State => file(),
                VolumeOrigin::RunTime => "run time only".to_owned(),
            },
            store: Some(config.store.to_string()),
            shared: config.shared,
            cache: config.cache.to_string(),
            bdi: config.bdi,
        })
    }

    fn operations(&self) -> Vec<OperationView> {
        self.operations.list()
    }

    fn operation(&self, id: u64) -> Option<(OperationView, u16)> {
        self.operations.get(id)
    }

    fn cancel(&self, id: u64) -> Result<OperationView, Refused> {
        self.operations.cancel(id)
    }
}
