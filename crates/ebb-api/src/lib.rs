//! What ebbd and its command line say to each other: the interface of the control socket, version 1, which is HTTP with
//! JSON bodies. Plain data for both ends; nothing here connects, serves or measures.
//!
//! | request | reply |
//! |---|---|
//! | `GET /v1/version` | the program and its version: [`Version`] |
//! | `GET /v1/parameters`, `GET /v1/parameters/NAME` | parameters with value, range, origin: [`ParameterView`] |
//! | `PUT /v1/parameters/NAME` with [`SetBody`] | sets it: [`ChangeView`] |
//! | `PATCH /v1/parameters` with [`ChangeBody`] | changes several, all or none: [`ChangeView`]s |
//! | `DELETE /v1/parameters/NAME` | unsets it, so that the configuration applies: [`ChangeView`] |
//! | the same below `/v1/volumes/VOLUME/parameters` | those of a volume |
//! | the same below `/v1/bdis/BDI/parameters` | those of a backing device |
//! | the same below `/v1/limit-groups/GROUP/parameters` | those of a group of limits; a `PUT` makes the group |
//! | `GET /v1/volumes/VOLUME/limits`, `GET /v1/limit-groups/GROUP/limits` | limits in force: [`LimitStat`] |
//! | `POST /v1/volumes/VOLUME/limits/keep` | keeps them in the state directory: [`OperationView`] |
//! | `POST /v1/volumes/VOLUME/limits/keep/check` | checks that they could be kept: [`OperationView`] |
//! | `DELETE /v1/volumes/VOLUME/limits/keep` | forgets those that were kept: [`OperationView`] |
//! | the same below `/v1/limit-groups/GROUP/limits/keep` | those of a group |
//! | `GET /v1/limit-groups` | the groups of limits: [`LimitGroupStat`] |
//! | `GET /v1/clients`, `GET /v1/clients/ID` | who is connected: [`ClientView`] |
//! | `DELETE /v1/clients/ID` | disconnects an NBD client: its [`ClientView`] |
//! | `GET /v1/volumes` | the volumes with their counters: [`VolumeStat`](stat::VolumeStat) |
//! | `GET /v1/bdis` | the backing devices: [`BdiStat`](stat::BdiStat) |
//! | `GET /v1/clusters` | the Ceph clusters of volumes: [`ClusterStat`](stat::ClusterStat) |
//! | `POST /v1/volumes` with [`AddVolumeBody`] | adds a volume: 201, [`VolumeView`] |
//! | `GET /v1/volumes/VOLUME` | one volume: [`VolumeView`] |
//! | `PATCH /v1/volumes/VOLUME` with [`ChangeVolumeBody`] | changes who may open it: [`OperationView`] |
//! | `DELETE /v1/volumes/VOLUME` | removes it, when its data is written: [`OperationView`] |
//! | `POST /v1/volumes/VOLUME/rename` with [`RenameBody`] | renames it: [`OperationView`] |
//! | `POST /v1/volumes/VOLUME/snapshot` with [`SnapshotBody`] | makes a snapshot of an overlay: [`OperationView`] |
//! | `DELETE /v1/volumes/VOLUME/snapshots/NAME` | deletes a snapshot: [`OperationView`] |
//! | `POST /v1/volumes/VOLUME/commit` | writes an overlay into its base: [`OperationView`] |
//! | `POST /v1/volumes/VOLUME/persist` | keeps one that was added at run time, and those below it: [`OperationView`] |
//! | `POST /v1/volumes/VOLUME/flatten` | copies what is below an overlay into it: [`OperationView`] |
//! | `GET /v1/volumes/VOLUME/changes?since=SNAPSHOT&until=SNAPSHOT&offset=N&limit=N` | what was written since a snapshot: [`ChangedBlocksView`] |
//! | `POST /v1/volumes/VOLUME/resize` with [`ResizeBody`] | resizes it: [`ResizeView`] |
//! | `GET /v1/volumes/VOLUME/keys` | the key slots of an encrypted volume: [`KeySlotsView`] |
//! | `POST /v1/volumes/VOLUME/keys` with [`KeyBody`] | adds a key slot; only over the control socket: [`KeyChangeView`] |
//! | `PUT /v1/volumes/VOLUME/keys` with [`KeyBody`] | names the key of a volume that was added at run time; only over the control socket: [`OperationView`] |
//! | `DELETE /v1/volumes/VOLUME/keys/SLOT?force=true` | removes one; only over the control socket: [`OperationView`] |
//! | `POST /v1/volumes/VOLUME/flush`, `POST /v1/flush` | flushes one volume, or all: [`OperationView`] |
//! | `POST /v1/takeover` with [`TakeoverBody`] | hands over to a successor: [`OperationView`] |
//! | `POST /v1/reload` | reads the configuration again: [`OperationView`] |
//! | `GET /v1/config`, `GET /v1/config/diff` | the configuration in force: [`ConfigView`]; what a reload would change: [`ConfigChange`] |
//! | `GET /v1/operations`, `GET /v1/operations/ID` | operations: [`OperationView`] |
//! | `DELETE /v1/operations/ID` | cancels one: [`OperationView`] |
//! | `GET /v1/stat` | everything: [`Stat`](stat::Stat) |
//! | `GET /v1/daemon` | the figures of the daemon, without those of each volume: [`DaemonView`] |
//! | `GET /v1/volumes/VOLUME/stat` | those of a volume: [`VolumeStat`](stat::VolumeStat) |
//! | `GET /v1/summary` | the state of all volumes in few bytes: [`SummaryView`] |
//! | `GET /v1/history?range=5m&volume=VOLUME` | figures of the last `5m`, `1h` or `24h`, of a volume or of the daemon: [`HistoryView`] |
//! | `GET /v1/volumes/VOLUME/heatmap?range=5m` | how long its requests took: [`HeatmapView`] |
//! | `POST /v1/pressure` with [`PressureBody`] | publishes a level of memory pressure |
//! | `GET /v1/health`; `/healthz`, `/readyz` | the health: [`HealthView`]; as a status, 200 or 503 |
//! | `GET /v1/events?since=ID&limit=N` | the last events: [`EventView`]; a stream with `Accept: text/event-stream` |
//! | `GET /v1/whoami` | what the caller may do: [`CallerView`] |
//! | `GET /v1/openapi.json` | all of this as an OpenAPI document |
//! | `GET /metrics` | OpenMetrics text |
//! | `GET /` | the page; over TCP only |
//!
//! GET needs the role `view`, everything else `operate`. On the control socket root and the daemon's user may operate, and
//! members of the daemon's group view. Over TCP a token in `Authorization: Bearer TOKEN` has a role; where no tokens are
//! configured, which only a loopback address permits, everyone may view.
//!
//! A change that takes longer than a second is answered with 202 and its [`OperationView`].
//! A failure is an [`ErrorBody`], with a status 4xx if the request is at fault and 5xx otherwise. Names in paths are
//! percent-encoded. Fields may be added; existing fields keep their meaning.

mod bodies;
mod clients;
mod events;
mod health;
mod history;
mod keys;
mod limits;
mod operations;
mod refusal;
pub mod stat;
mod volumes;
mod words;

pub use self::bodies::{
    CallerView, ChangeBody, ChangeView, ConfigChange, ConfigView, ErrorBody, ParameterView,
    PressureBody, ResizeBody, ResizeView, SetBody, SuccessorState, TakeoverBody, Version,
};
pub use self::clients::ClientView;
pub use self::events::EventView;
pub use self::health::{HealthReason, HealthView};
pub use self::history::{DaemonView, HeatmapView, HistoryView, SummaryView, VolumeSummary};
pub use self::keys::{KeyBody, KeyChangeView, KeySlotView, KeySlotsView};
pub use self::limits::{LimitGroupStat, LimitStat};
pub use self::operations::OperationView;
pub use self::refusal::Refusal;
pub use self::volumes::{
    AddVolumeBody, ChangeVolumeBody, ChangedBlocksView, ChangedRun, RenameBody, SnapshotBody,
    VolumeView,
};
pub use self::words::{CallerRole, HealthState, OperationState};

/// The default path of the control socket.
pub const DEFAULT_PATH: &str = "/run/ebbd/control.sock";

/// The longest time for which `ebbd pressure` holds a level, seconds.
pub const MAX_HOLD_SECONDS: u64 = 86_400;
