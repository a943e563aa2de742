//! The library of the program `ebbd`, which tests and tools use, too: the command line, the
//! engine that opens and closes volumes, start, stop and reload, and the manual pages
//! generated from the command line and the table of keys. The configuration is in `ebb-config`, the
//! control socket in `ebb-control`.
//!
//! Vocabulary: a *volume* is one disk, exported under its name; a *store* is where its data is; a
//! *parameter* is a setting that can be changed while the daemon runs. See `docs/glossary.md`.

mod bdi;
mod blank;
mod broker;
mod broker_fault;
mod budget;
mod ceiling;
pub mod check;
pub mod cli;
pub mod client;
pub mod completion;
mod config_source;
mod control;
mod credentials;
pub mod daemon;
mod delta_file;
mod descriptors;
pub mod doctor;
pub mod engine;
pub mod exit_status;
mod guests;
pub mod handover;
pub mod image;
mod key_files;
mod key_programs;
mod limits;
pub mod listener;
pub mod log;
pub mod man;
mod manager;
mod notify;
mod operations;
mod outages;
pub mod parameters;
mod pressure_response;
mod resolved_names;
pub mod sandbox;
mod setup;
pub mod signals;
mod socket_file;
mod socket_watch;
pub mod stores;
mod ticks;
mod vhost;
pub mod vhost_program;
pub mod volume_bench;
mod volume_key;
pub mod xen;

pub use budget::limit_key_memory;
pub use manager::manager_of;
