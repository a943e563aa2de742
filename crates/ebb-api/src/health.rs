//! Health: whether everything is served as configured, and if not, why.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::HealthState;

/// The health of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HealthView {
    /// `ok`, `degraded` or `failing`: the worst of the reasons.
    pub state: HealthState,
    /// Why it is not ok, the worst first; at most [`HealthView::MAX_REASONS`].
    pub reasons: Vec<HealthReason>,
    /// Reasons that are not listed, because there are too many.
    pub more: u64,
    /// Volumes that are served.
    pub serving: u64,
    /// Volumes that are configured.
    pub volumes: u64,
}

impl HealthView {
    /// The most reasons that are listed.
    pub const MAX_REASONS: usize = 100;
}

/// A reason why the daemon is not ok.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HealthReason {
    /// `degraded` or `failing`.
    pub state: HealthState,
    /// The kind, for programs: `volume_not_served`, `data_lost`, `remote_down`, `store_silent`, `certificate_expires`,
    /// `memory_pressure`, `reload_failed` and so on.
    pub kind: String,
    /// The volume it concerns, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
    /// Seconds since it began; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_seconds: Option<f64>,
}
