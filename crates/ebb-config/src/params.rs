//! Parameters that can be read and written while the daemon runs.
//!
//! One table (`params/table.rs`) defines all parameters: name, scope, unit, default, range, and when a change
//! takes effect. The control socket, the command line, the configuration and the pages in
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
//! - Code that uses a parameter reads it through a [`Live`]: one atomic load, no lock, always current.
//! - Changes are made one at a time, and watchers see them in that order.

mod error;
pub mod pages;
mod set;
mod table;

pub use self::error::{ParameterError, ParameterErrorKind};
pub use self::set::{
    BdiLive, Configured, Live, Origin, ParameterChange, Parameters, Reading, unknown_volume,
};
pub use self::table::{Definition, Key, Kind, ParameterScope, SizeClass};
