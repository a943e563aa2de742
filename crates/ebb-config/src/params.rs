//! Parameters that can be read and written while the daemon runs.
//!
//! One table (`params/table.rs`) defines all parameters: name, scope, unit, default, range, and when a change
//! takes effect. How to add one is in `docs/guides/adding-a-parameter.md`. The control socket, the command line, the configuration and the pages in
//! `docs/parameters` are made from it. The parameters of Xen disks have the names and meanings of
//! those of Linux's xen-blkback, which are files below `/sys/module`.
//!
//! # Origin of a value
//! The configuration (file, then command line) gives each parameter its value, or leaves it at the
//! default. [`Parameters::set`] replaces it at run time; [`Parameters::unset`] goes back to the
//! configuration. After a reload **the latest change is in force**: a value set at run time stays,
//! unless the configuration's value of that parameter differs from the value of the previous load.
//! A volume's own value overrides the daemon's; a volume without one uses the daemon's.
//!
//! # Invariants
//! - A value in force is within its range, and `max_request` is at most `connection_memory`.
//! - Code that uses a parameter has a handle to it, an [`ebb_param::Parameter`]: it reads the value with one atomic
//!   load, or watches it.
//! - Changes are made one at a time, and watchers see them in that order. Values that change together are all in
//!   force before the first watcher is called.

mod configured;
mod definition;
mod error;
mod names;
pub mod pages;
mod set;
mod table;
#[cfg(test)]
mod tests;

pub use self::configured::Configured;
pub use self::definition::{Definition, Key, Kind, ParameterScope, ParameterTable, TypedKey};
pub use self::error::{ParameterError, ParameterErrorKind};
pub use self::names::{name_number, name_of};
pub use self::set::{Origin, ParameterChange, ParameterOwner, Parameters, Reading, unknown_volume};
pub use self::table::*;
