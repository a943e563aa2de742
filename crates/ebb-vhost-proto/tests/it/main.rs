//! Tests of the messages and requests of vhost-user.
#![expect(unreachable_pub, reason = "a fuzz target has the modules as well")]

#[allow(dead_code, reason = "the fuzz targets share it, and each uses its part")]
#[path = "../../../../fuzz/src/choices.rs"]
mod choices;
#[path = "../../../../fuzz/src/seeds.rs"]
mod seeds;
#[allow(clippy::cast_possible_truncation, reason = "a fuzzer's numbers")]
#[path = "../../../../fuzz/src/vhost.rs"]
mod vhost;

mod fuzz_smoke;
mod messages;
mod round_trip;

/// What the code did that it must not.
#[derive(Debug)]
pub struct Finding(pub String);
