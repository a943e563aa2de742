//! Parameters that can be read and written while the daemon runs.
//!
//! One table ([`table`]) says what there is: name, scope, unit, default, range, when a change takes
//! effect. The control socket, the command line, the configuration and the pages in
//! `docs/parameters` all read it. It answers seed 000, whose parameters are files below
//! `/sys/module`.
//!
//! # Where a value comes from
//! The configuration (file, then command line) gives each parameter its value, or leaves it at the
//! default. [`Parameters::set`] replaces it at run time; [`Parameters::unset`] goes back to the
//! configuration. When the configuration is read again, **whoever spoke last counts**: a value set
//! at run time stays, unless the configuration's value of that very parameter is another than it
//! was before. A volume's own value wins over the daemon's; a volume without one follows the
//! daemon's.
//!
//! # Invariants
//! - A value in force is within its range, and `max_request` fits into `connection_memory`.
//! - A user reads its value through a [`Live`]: one atomic load, no lock, always current.
//! - Changes are made one at a time, and whoever watches them sees them in that order.

mod error;
pub mod pages;
mod set;
pub mod table;

pub use self::error::{ParameterError, ParameterErrorKind};
pub(crate) use self::set::unknown_volume;
pub use self::set::{BdiLive, Change, Configured, Live, Origin, Parameters, Reading};
pub use self::table::{Definition, Key, Kind, Scope, SizeClass};
