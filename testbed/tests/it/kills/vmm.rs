//! The frontend of the tests of the export: a VMM with the driver of its guest, and a region of
//! requests in flight.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "shared with the export's tests; this one uses a part"
)]

#[path = "../../../../crates/ebb-export-vhost/tests/it/common/driver.rs"]
pub mod driver;
#[path = "../../../../crates/ebb-export-vhost/tests/it/common/frontend.rs"]
pub mod frontend;
#[path = "../../../../crates/ebb-export-vhost/tests/it/common/fuzzing.rs"]
pub mod fuzzing;
#[path = "../../../../crates/ebb-export-vhost/tests/it/common/guest.rs"]
pub mod guest;
#[path = "../../../../crates/ebb-export-vhost/tests/it/common/packed.rs"]
pub mod packed;

use std::time::Duration;

pub use driver::{Done, kind, status};
pub use frontend::{Base, Frontend, Wishes};
pub use guest::Guest;
pub use packed::PackedPlaces;

/// The time after which a test reports a hang.
pub const HANG: Duration = Duration::from_secs(90);
