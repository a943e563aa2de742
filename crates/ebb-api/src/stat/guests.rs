//! Guests of a volume whose requests fail by rule.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Numbers of guests whose writes and flushes fail until they are reset, since acknowledged writes
/// were lost, or that are refused, since their disk is another one than before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailingGuests {
    /// Guests over vhost-user.
    pub vhost: u64,
    /// Xen guests.
    pub xen: u64,
}

impl FailingGuests {
    /// Returns the number of guests.
    pub const fn count(self) -> u64 {
        self.vhost.saturating_add(self.xen)
    }
}
