//! The memory and the drivers of guests, as the tests of the export have them.

#![allow(dead_code, unreachable_pub, reason = "the tests of the export use the rest")]

#[path = "../../../../../crates/ebb-export-vhost/tests/it/common/driver.rs"]
pub mod driver;
#[path = "../../../../../crates/ebb-export-vhost/tests/it/common/fuzzing.rs"]
pub mod fuzzing;
#[path = "../../../../../crates/ebb-export-vhost/tests/it/common/guest.rs"]
pub mod guest;
#[path = "../../../../../crates/ebb-export-vhost/tests/it/common/packed.rs"]
pub mod packed;
