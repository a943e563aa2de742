//! The frontend and the driver of the vhost-user backend's own tests.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "only a part is used here")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "test code")]

use std::time::Duration;

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

/// Time after which a wait is reported as a hang.
pub const HANG: Duration = Duration::from_secs(90);
