//! The bodies of requests and replies, other than statistics. A request with an unknown field is refused.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::CallerRole;

/// The program that replies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// `ebbd`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The version of the interface: `v1`.
    pub api: String,
    /// The addresses that NBD clients connect to: `unix:/path` or `tcp:HOST:PORT`.
    #[serde(default)]
    pub listen: Vec<String>,
}

/// Who sends a request, and what that may do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CallerView {
    /// Its role.
    pub role: CallerRole,
    /// `uid:NUMBER` on the control socket, `token:NAME` on the page; empty without a token.
    pub identity: String,
}

/// The body of a failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The kind of failure, for programs.
    pub error: String,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

/// A parameter in a reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ParameterView {
    /// Its name.
    pub name: String,
    /// The value in force: a number, or a string for a word.
    pub value: Value,
    /// The value in its text form.
    pub text: String,
    /// Its origin: `default` if the configuration has no other value than the built-in one, `configuration`, `run-time` or,
    /// for a volume, `daemon`.
    pub origin: String,
    /// The default value.
    pub default: Value,
    /// The range in words.
    pub range: String,
    /// The unit of the value.
    pub unit: String,
    /// `daemon`, `volume` if volumes may have values of their own (limits: groups, too), or `bdi` if backing devices have
    /// it.
    pub scope: String,
    /// The version that introduced it.
    pub since: String,
    /// When a change takes effect.
    pub effect: String,
}

/// The body that sets a parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetBody {
    /// The value: a number, or a string with its text form.
    pub value: Value,
}

/// The body that changes several parameters of one owner, all or none: values by name, as in [`SetBody`]; `null` unsets a
/// parameter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct ChangeBody(pub BTreeMap<String, Value>);

/// A change of a parameter in a reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ChangeView {
    /// Its name.
    pub name: String,
    /// The volume whose own value it is; absent for the daemon's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The backing device whose value it is; absent for other parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bdi: Option<String>,
    /// The group of limits whose value it is; absent for other parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_group: Option<String>,
    /// The value before, in its text form.
    pub from: String,
    /// The value in force now, in its text form.
    pub to: String,
}

/// The body that publishes a level of memory pressure. The reply repeats it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PressureBody {
    /// The level, `L0` to `L3`.
    pub level: String,
    /// For how long to hold it, 1 to [`MAX_HOLD_SECONDS`](crate::MAX_HOLD_SECONDS); absent to publish it once.
    pub seconds: Option<u64>,
}

/// The body that resizes a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeBody {
    /// The size, bytes; absent to adopt the size of its file or device.
    pub size: Option<u64>,
    /// Whether a smaller size is allowed.
    #[serde(default)]
    pub shrink: bool,
}

/// A volume's size before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResizeView {
    /// The volume.
    pub name: String,
    /// The size before, bytes.
    pub from: u64,
    /// The size now, bytes.
    pub size: u64,
}

/// The configuration in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigView {
    /// The text of a configuration file with all settings, in TOML.
    pub text: String,
    /// The keys that have their value from the state directory instead of the configuration file: sizes of volumes that were
    /// resized, and limits that are kept.
    #[serde(default)]
    pub kept_keys: Vec<String>,
}

/// A setting that the configuration file has with another value than the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigChange {
    /// The key, such as `volume.disk.cache`.
    pub key: String,
    /// The value in force, as in a file; absent if the daemon does not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The value of the file; absent if the file does not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Whether it takes effect at the next start, and not at a reload.
    #[serde(default)]
    pub needs_restart: bool,
}

/// The body of `POST /v1/takeover`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeoverBody {
    /// The path of the unix socket at which the successor listens.
    pub socket: String,
    /// The state directory of the successor. Absent: it is not compared with the daemon's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<SuccessorState>,
}

/// The state directory of a successor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SuccessorState {
    /// Its path; absent if the successor has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The device and the inode of its folder of volumes; absent if there is none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<(u64, u64)>,
}
