//! The encoder of messages, which the fuzzer has.

#[path = "../../../../../fuzz/src/choices.rs"]
pub mod choices;
#[path = "../../../../../fuzz/src/vhost.rs"]
pub mod vhost;

/// What the fuzzer finds.
#[derive(Debug)]
pub struct Finding(pub String);
