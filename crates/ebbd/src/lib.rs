//! The library of the program `ebbd`, which tests and tools use, too: the command line, the
//! configuration, the engine that opens and closes volumes, the control socket, and the manual pages
//! generated from the command line and the table of keys.
//!
//! Vocabulary: a *volume* is one disk, exported under its name; a *store* is where its data is;
//! an *override* is a setting of the command line, which overrides the configuration file; a
//! *parameter* is a setting that can be changed while the daemon runs. See `docs/glossary.md`.

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
