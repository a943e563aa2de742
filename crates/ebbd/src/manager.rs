//! The daemon's side of the API that changes volumes: each change is an operation, which runs on a worker.

use std::path::Path;
use std::sync::Arc;

use ebb_api::{
    AddVolumeBody, ChangeVolumeBody, KeyBody, KeySlotsView, OperationView, Refusal, ResizeBody,
    TakeoverBody, VolumeView,
};
use ebb_config::{
    ConfigError, NewVolume, VolumeConfig, VolumeOrigin, allow_list, check_name,
    key_named_at_run_time,
};
use ebb_control::{BegunOperation, Refused, VolumeChange, VolumeManager};
use ebb_export_nbd::Server;
use ebb_io::{Io, WorkerHandle};
use ebb_volume::{Resize, Volumes};
use futures_lite::future::or;
use tokio::sync::oneshot;

use crate::broker_fault::broker_fault;
use crate::control::volume_stat_of;
use crate::engine::{EndedReload, Engine};
use crate::handover::takeover::Successor;
use crate::operations::{FlushTurn, LongOperation, Operations};
use crate::outages::Outages;

/// What a reload that was applied leaves to be done.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReloadReport {
    /// The keys that need a restart, and whether a later reload goes on.
    pub(crate) ended: EndedReload,
    /// The volumes whose stores cannot be opened or are not open yet, with the reasons.
    pub(crate) not_served: Vec<String>,
    /// The volumes whose vhost-user sockets cannot be opened, with the reasons.
    pub(crate) without_socket: Vec<String>,
    /// Settings that are not in force, each with the remedy.
    pub(crate) notes: Vec<String>,
}

impl ReloadReport {
    /// The last step of a reload.
    fn step(&self) -> String {
        let mut step = match self.ended.is_superseded {
            false => "reloaded".to_owned(),
            true => "superseded by a later reload, or SIGHUP: see `ebbd status`".to_owned(),
        };
        if !self.ended.restart.is_empty() {
            let keys = self.ended.restart.join(", ");
            step = format!("{step}; these take effect at the next start: {keys}");
        }
        self.notes.iter().fold(step, |step, note| format!("{step}; {note}"))
    }
}

/// What a reload has ended with.
pub(crate) type ReloadOutcome = Result<ReloadReport, Refused>;

/// Requests a reload; false if the daemon stops.
pub(crate) type RequestReload = Box<dyn Fn(oneshot::Sender<ReloadOutcome>) -> bool + Send + Sync>;

/// Passes a successor to the main thread; false if the daemon stops.
pub(crate) type RequestTakeover = Box<dyn Fn(Successor) -> bool + Send + Sync>;

/// See the module.
pub(crate) struct Manager {
    pub(crate) engine: Arc<Engine>,
    pub(crate) server: Server,
    pub(crate) volumes: Volumes,
    pub(crate) worker: WorkerHandle,
    pub(crate) operations: Operations,
    pub(crate) outages: Outages,
    pub(crate) reload: RequestReload,
    pub(crate) takeover: RequestTakeover,
}

/// The manager of an engine without a main thread, which has no reload and no takeover: for one that a test drives.
pub fn manager_of(
    engine: &Arc<Engine>,
    (server, volumes): (Server, Volumes),
    worker: WorkerHandle,
) -> Arc<dyn VolumeManager> {
    let (engine, operations, outages) = (engine.clone(), Operations::default(), Outages::default());
    let (reload, takeover): (RequestReload, RequestTakeover) =
        (Box::new(|_| false), Box::new(|_| false));
    Arc::new(Manager { engine, server, volumes, worker, operations, outages, reload, takeover })
}

impl From<ConfigErrorRefusal> for Refused {
    fn from(ConfigErrorRefusal(error): ConfigErrorRefusal) -> Refused {
        let key = error.key.as_deref().map(|key| format!("{key}: ")).unwrap_or_default();
        Refused::new(
            Refusal::Invalid,
            "invalid_value",
            format!("{key}{}", error.message),
            error.remedy,
        )
    }
}

/// Whether a change opens, makes or deletes files, or may. Adding a volume fails without harm where
/// its store is a file.
fn needs_broker(change: &VolumeChange) -> bool {
    !matches!(change, VolumeChange::Add(_) | VolumeChange::Flush(_) | VolumeChange::FlushAll)
}

fn begun(operation: &LongOperation) -> BegunOperation {
    BegunOperation { id: operation.id(), ended: operation.ended() }
}

/// A mistake in the settings of a volume.
struct ConfigErrorRefusal(ConfigError);

fn config_of(body: AddVolumeBody) -> Result<VolumeConfig, Refused> {
    let AddVolumeBody {
        name,
        store,
        base,
        size,
        create,
        encryption,
        read_only,
        shared,
        allow,
        direct,
        cache,
        bdi,
        vhost_user,
        persist: _,
    } = body;
    let new = NewVolume {
        name,
        store,
        base,
        size,
        create,
        encryption,
        read_only,
        shared,
        allow,
        direct,
        cache,
        bdi,
        vhost_user,
    };
    let config = new.config().map_err(ConfigErrorRefusal)?;
    let store = config.store.absolute().map_err(|error| {
        let message = format!("cannot make the path of {} absolute: {error}", config.store);
        Refused::new(Refusal::Failed, "no_folder", message, "give the path from the root")
    })?;
    Ok(VolumeConfig { store, ..config })
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
        Ok(self.carry_out(operation, work))
    }

    /// Runs `work` for an operation that has begun on the worker.
    fn carry_out<Fut>(
        &self,
        operation: Arc<LongOperation>,
        work: impl FnOnce(Arc<Engine>, Io, Arc<LongOperation>) -> Fut + Send + 'static,
    ) -> BegunOperation
    where
        Fut: Future<Output = Result<(), Refused>> + 'static,
    {
        let begun = begun(&operation);
        let engine = self.engine.clone();
        self.worker.spawn(move |io| {
            let work = work(engine, io, operation.clone());
            async move { operation.finish(work.await) }
        });
        begun
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

    fn change(
        &self,
        name: String,
        body: ChangeVolumeBody,
        by: &str,
    ) -> Result<BegunOperation, Refused> {
        let allowed = body.allow.map(|texts| allow_list(&texts)).transpose();
        let allowed = allowed.map_err(ConfigErrorRefusal)?;
        self.run(("allow", by), Some(&name.clone()), move |engine, io, operation| async move {
            engine.allow(&io, (&name, allowed), &operation).await
        })
    }

    fn use_key(&self, name: String, body: &KeyBody, by: &str) -> Result<BegunOperation, Refused> {
        let source = key_named_at_run_time(&body.key).map_err(ConfigErrorRefusal)?;
        self.run(("use key", by), Some(&name.clone()), move |engine, io, operation| async move {
            engine.use_key(&io, (&name, source), &operation).await
        })
    }

    fn add_key(&self, name: String, body: &KeyBody, by: &str) -> Result<BegunOperation, Refused> {
        let source = key_named_at_run_time(&body.key).map_err(ConfigErrorRefusal)?;
        self.run(("add key", by), Some(&name.clone()), move |engine, io, operation| async move {
            engine.add_key(&io, (&name, source), &operation).await
        })
    }

    fn flush(&self, name: String, by: &str) -> Result<BegunOperation, Refused> {
        if self.volumes.get(&name).is_none() {
            return Err(self.engine.unknown(&name));
        }
        let (operation, after) = match self.operations.begin_flush(&name, by)? {
            FlushTurn::Joined(operation) => return Ok(begun(&operation)),
            FlushTurn::Begun { operation, after } => (operation, after),
        };
        let volumes = self.volumes.clone();
        Ok(self.carry_out(operation, move |engine, io, operation| async move {
            operation.allow_cancel();
            if let Some(after) = after {
                operation.step("waiting for an earlier flush of the volume");
                or(after.over(), operation.cancelled()).await;
            }
            operation.set_under_way()?;
            // If another volume has the name by now, the data of the former one was written when that was closed.
            let served = volumes.get(&name).ok_or_else(|| engine.unknown(&name))?;
            engine.flush_volumes(&io, vec![served.volume], &operation).await
        }))
    }

    fn flush_all(&self, by: &str) -> Result<BegunOperation, Refused> {
        let volumes = self.volumes.list();
        self.run(("flush", by), None, move |engine, io, operation| async move {
            engine.flush_volumes(&io, volumes, &operation).await
        })
    }

    /// Checks that limits of a volume, or of a group, could be kept.
    fn check_limits(&self, volume: Option<String>, by: &str) -> Result<BegunOperation, Refused> {
        self.run(("check limit", by), volume.clone().as_deref(), move |engine, _, _| async move {
            match volume {
                Some(name) => engine.must_keep_limits(&name).await,
                None => engine.must_keep_group_limits().await,
            }
        })
    }

    fn take_over(&self, body: &TakeoverBody, by: &str) -> Result<BegunOperation, Refused> {
        if std::env::var_os("NOTIFY_SOCKET").is_some() {
            // It would take the end of this process for that of the service.
            let message = "the daemon runs under a service manager";
            let remedy = "use `systemctl restart`, which keeps connections, too";
            return Err(Refused::new(Refusal::Conflict, "managed", message, remedy));
        }
        self.engine.must_keep_all()?;
        if let Some(state) = &body.state {
            self.engine.must_share_state(state)?;
        }
        let operation = self.operations.begin("takeover", None, by)?;
        // Does not block: a socket that listens has room for one connection, or refuses it.
        let successor = Successor::connect(Path::new(&body.socket));
        match successor {
            Ok(mut successor) => {
                for volume in self.engine.volumes_in_memory() {
                    tracing::warn!(
                        volume,
                        "the successor will not have its data, which is in memory"
                    );
                }
                tracing::info!(
                    operation = operation.id(),
                    by = operation.by(),
                    "takeover requested"
                );
                let refusal = successor.refusal();
                // The successor notices if the daemon stops.
                let _ = (self.takeover)(successor);
                operation.step("writing dirty data before the handover");
                Ok(self.carry_out(operation, move |engine, _, operation| async move {
                    let refused = async { Some(refusal.await) };
                    let stopping = async {
                        engine.wait_for_stop().await;
                        None
                    };
                    let Some(why) = or(refused, stopping).await else {
                        // It ends with the daemon.
                        operation.step("handing over: completing requests and closing volumes");
                        return std::future::pending().await;
                    };
                    let why = why.unwrap_or_else(|_| "the successor has ended".to_owned());
                    let remedy = "correct that, and start the successor again";
                    Err(Refused::new(Refusal::Conflict, "no_takeover", why, remedy))
                }))
            }
            Err(error) => {
                let message =
                    format!("cannot connect to the successor at {}: {error}", body.socket);
                let remedy = "start it with `ebbd serve --takeover`, as the user of the daemon";
                let refused = Refused::new(Refusal::Invalid, "no_successor", message, remedy);
                operation.finish(Err(refused.clone()));
                Err(refused)
            }
        }
    }

    fn reload(&self, by: &str) -> Result<BegunOperation, Refused> {
        let operation = self.operations.begin("reload", None, by)?;
        let (sender, outcome) = oneshot::channel();
        // The sender is dropped if the daemon stops.
        let _ = (self.reload)(sender);
        Ok(self.carry_out(operation, move |_, _, operation| async move {
            tracing::info!(operation = operation.id(), by = operation.by(), "reload requested");
            operation.step("reading the configuration, and changing volumes");
            let stopping = || {
                Refused::new(Refusal::Busy, "stopping", "the daemon is stopping", "start it again")
            };
            let report = outcome.await.map_err(|_| stopping())??;
            operation.step(&report.step());
            operation.note_not_served(report.not_served);
            operation.note_without_socket(report.without_socket);
            Ok(())
        }))
    }
}

impl VolumeManager for Manager {
    fn begin(&self, change: VolumeChange, by: &str) -> Result<BegunOperation, Refused> {
        if self.engine.is_stopping() {
            let remedy = "try again when it runs";
            return Err(Refused::new(Refusal::Busy, "stopping", "the daemon is stopping", remedy));
        }
        // Before a step that cannot be undone: a volume that is closed could not be opened again.
        if let Some(fault) = broker_fault()
            && needs_broker(&change)
        {
            return Err(fault.refusal());
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
            VolumeChange::Snapshot(name, body) => self.run(
                ("snapshot", by),
                Some(&name.clone()),
                move |engine, io, operation| async move {
                    let snapshot = (body.name.as_str(), body.persist);
                    engine.snapshot_volume(&io, &name, snapshot, &operation).await
                },
            ),
            VolumeChange::Flatten(name) => self.run(
                ("flatten", by),
                Some(&name.clone()),
                move |engine, io, operation| async move {
                    engine.flatten_volume(&io, &name, &operation).await
                },
            ),
            VolumeChange::Persist(name) => self.run(
                ("persist", by),
                Some(&name.clone()),
                move |engine, _, operation| async move {
                    engine.persist_volume(&name, &operation).await
                },
            ),
            VolumeChange::Commit(name) => self.run(
                ("commit", by),
                Some(&name.clone()),
                move |engine, io, operation| async move {
                    engine.commit_volume(&io, &name, &operation).await
                },
            ),
            VolumeChange::DeleteSnapshot(name, snapshot) => self.run(
                ("delete snapshot", by),
                Some(&name.clone()),
                move |engine, io, operation| async move {
                    engine.delete_snapshot(&io, (&name, &snapshot), &operation).await
                },
            ),
            VolumeChange::Resize(name, body) => self.resize(name, &body, by),
            VolumeChange::Change(name, body) => self.change(name, body, by),
            VolumeChange::AddKey(name, body) => self.add_key(name, &body, by),
            VolumeChange::UseKey(name, body) => self.use_key(name, &body, by),
            VolumeChange::RemoveKey(name, slot, force) => self.run(
                ("remove key", by),
                Some(&name.clone()),
                move |engine, io, operation| async move {
                    engine.remove_key(&io, (&name, slot, force), &operation).await
                },
            ),
            VolumeChange::CheckLimits(name) => self.check_limits(Some(name), by),
            VolumeChange::CheckGroupLimits => self.check_limits(None, by),
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
            VolumeChange::Flush(name) => self.flush(name, by),
            VolumeChange::FlushAll => self.flush_all(by),
            VolumeChange::Reload => self.reload(by),
            VolumeChange::Takeover(body) => self.take_over(&body, by),
        }
    }

    fn volume(&self, name: &str) -> Option<VolumeView> {
        let stat = volume_stat_of(&self.server, &self.engine, &self.outages, name)?;
        let state = || self.engine.state_dir().ok().map(|state| state.path_of(name));
        let file = || state().map(|path| path.display().to_string()).unwrap_or_default();
        let Some((config, origin)) = self.engine.definition(name) else {
            return Some(VolumeView { stat, defined: file(), ..VolumeView::default() });
        };
        let config = self.engine.in_force(name).unwrap_or(config);
        let (allow, allow_of) = self.engine.allowed(name);
        let vhost_user_failure = self.engine.socket_failure(name);
        let socket = self.engine.socket_of(name, &config).filter(|_| vhost_user_failure.is_none());
        Some(VolumeView {
            stat,
            defined: match origin {
                VolumeOrigin::Configuration(place) => place.into(),
                VolumeOrigin::State => file(),
                VolumeOrigin::RunTime => "run time only".to_owned(),
            },
            store: Some(config.store.to_string()),
            base: config.base,
            encryption: config.encryption.as_ref().map(ToString::to_string),
            shared: config.shared,
            allow: allow.map(|list| list.texts().map(str::to_owned).collect()),
            allow_of,
            direct: Some(config.direct.to_string()),
            cache: config.cache.to_string(),
            vhost_user: socket.map(|path| path.display().to_string()),
            vhost_user_failure,
            warnings: self.engine.warnings_of(name),
            bdi: config.bdi,
        })
    }

    fn key_slots(&self, name: &str) -> Result<KeySlotsView, Refused> {
        self.engine.key_slots(name)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_an_added_volume_is_kept_from_the_root() {
        let folder = std::env::current_dir().unwrap();
        for scheme in ["file", "qcow2"] {
            let store = format!("{scheme}:relative.img");
            let body = AddVolumeBody { name: "a".to_owned(), store, ..AddVolumeBody::default() };
            let path = folder.join("relative.img");
            let kept = config_of(body).unwrap().store.to_string();
            assert_eq!(kept, format!("{scheme}:{}", path.display()));
        }
    }

    #[test]
    fn reload_says_which_settings_are_not_in_force() {
        assert_eq!(ReloadReport::default().step(), "reloaded");
        let report = ReloadReport {
            ended: EndedReload { restart: vec!["web"], is_superseded: false },
            notes: vec!["resize it".to_owned()],
            ..ReloadReport::default()
        };
        let step = "reloaded; these take effect at the next start: web; resize it";
        assert_eq!(report.step(), step);
        let ended = EndedReload { is_superseded: true, ..EndedReload::default() };
        let report = ReloadReport { ended, ..ReloadReport::default() };
        assert!(report.step().starts_with("superseded by a later reload"));
    }
}
