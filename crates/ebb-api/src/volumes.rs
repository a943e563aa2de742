//! Volumes that are made and changed at run time.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::stat::VolumeStat;

/// The body that adds a volume: its name, and the keys of a table `[volume.NAME]` of the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddVolumeBody {
    /// The name it is exported under.
    pub name: String,
    /// Its store, as in the configuration file.
    pub store: String,
    /// The size of the file to create, such as `20G`; only with `create`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
    /// Whether to create the file if it does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create: Option<bool>,
    /// Where the key of an encrypted volume is: `key-file:PATH` or `credential:NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<String>,
    /// The read-only volume below it: it is an overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Whether clients may only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// Whether several guests and clients may write at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<bool>,
    /// The clients that may open it, as in the configuration file; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow: Option<Vec<String>>,
    /// `auto`, `on` or `off`: whether its file is opened with `O_DIRECT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct: Option<String>,
    /// `off`, `writethrough` or `writeback`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// The name of its backing device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bdi: Option<String>,
    /// The path of its socket for vhost-user-blk, or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// Whether to keep it in the state directory, so that the next start serves it, too.
    #[serde(default)]
    pub persist: bool,
}

/// The body that changes a volume that was added at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeVolumeBody {
    /// The clients that may open it, as in the configuration file; `null`: all. Must be given.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schema(required)]
    pub allow: Option<Vec<String>>,
}

/// The body that makes a snapshot of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotBody {
    /// The name of the snapshot: it is served as the read-only volume `VOLUME@NAME`.
    pub name: String,
    /// Whether to keep that volume in the state directory, so that the next start serves it, too.
    #[serde(default)]
    pub persist: bool,
}

/// The body that renames a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RenameBody {
    /// The new name.
    pub name: String,
}

/// A part of a volume that was written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChangedRun {
    /// Where it begins, bytes.
    pub offset: u64,
    /// Its length, bytes.
    pub length: u64,
}

/// What was written to a volume since a snapshot, or between two: one page of the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChangedBlocksView {
    /// The volume.
    pub volume: String,
    /// The snapshot from which on changes count.
    pub since: String,
    /// The snapshot up to which they count; absent: now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<String>,
    /// The size of the volume, bytes.
    pub size_bytes: u64,
    /// The parts that were written, in order. Two that touch are one, except at the border of two pages.
    pub runs: Vec<ChangedRun>,
    /// The sum of their lengths, bytes.
    pub changed_bytes: u64,
    /// The `offset` of the next page; absent in the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_offset: Option<u64>,
}

impl ChangedBlocksView {
    /// The most runs of a page.
    pub const RUNS_MOST: usize = 10_000;
}

/// A volume with its settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VolumeView {
    /// Its state and its counters.
    pub stat: VolumeStat,
    /// Where it is defined: the line of the configuration file, the file in the state directory, or `run time only`.
    pub defined: String,
    /// Its store, as in the configuration file; absent if its file cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// The volume below it, if it is an overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Where the key is that its file is encrypted with; absent if ebbd does not encrypt it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<String>,
    /// Whether several guests and clients may write at the same time.
    pub shared: bool,
    /// The clients that may open it; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow: Option<Vec<String>>,
    /// The volume that this `allow` comes from, if this is a snapshot without its own list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_of: Option<String>,
    /// Whether its file is opened with `O_DIRECT`: `auto`, `on` or `off`; absent if its settings cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct: Option<String>,
    /// `none`, `writethrough` or `writeback`.
    pub cache: String,
    /// The configured name of its backing device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bdi: Option<String>,
    /// The path of its socket for vhost-user-blk, if it has one there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<String>,
    /// Why it has no socket for vhost-user-blk, although it is to have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user_failure: Option<String>,
    /// What the operator should change about it, each with what to do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}
