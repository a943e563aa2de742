//! The parts of the program `ebbd` that tests and tools use beside the program itself: the
//! command line, the configuration, and the manual pages made from both.
//!
//! Vocabulary: a *volume* is one disk, exported under its name; a *store* is where its bytes live;
//! an *override* is a setting of the command line, which wins over the configuration file; a
//! *parameter* is a setting that can be changed while the daemon runs.

mod bdi;
mod ceiling;
pub mod check;
pub mod cli;
pub mod client;
pub mod config;
pub mod control;
pub mod daemon;
pub mod engine;
mod guests;
pub mod listener;
pub mod log;
pub mod man;
pub mod metrics;
mod outages;
pub mod params;
pub mod percent;
mod pressure_response;
pub mod size;
pub mod stat;
pub mod stores;
pub mod xen;
