//! The broker: a small process that opens files, connects sockets and makes rings for the daemon, by rules of its own.
//!
//! Once [`Broker::guard`] has returned, no thread of the daemon can open a path, make, bind or connect a socket, change a
//! directory, or make a ring itself. A seccomp filter stops such a call, and the kernel notifies the broker
//! (`SECCOMP_RET_USER_NOTIF`). The broker copies the arguments once, decides by its [`BrokerRules`], makes the call on the copy, and puts the
//! new descriptor into the daemon. So the daemon's code, the C library and librbd make these calls as before.
//!
//! | module | what it does |
//! |---|---|
//! | `guard` | the daemon's side: starts the broker, installs the filter |
//! | `filter` | which calls the broker gets, and which are denied with it |
//! | `serve` | the broker's loop: a thread for each call that waits |
//! | `target` | the daemon as the broker sees it: its memory, its descriptors |
//! | `paths`, `sockets`, `ring` | how each call is made |
//! | `programs` | another process, which runs programs for keys |
//! | `resolve` | where a path leads |
//! | [`BrokerRules`] | what may be opened, connected to and bound |
//! | `sys` | system calls without a safe library; the `unsafe` code |
//!
//! # Invariants
//! - What is decided on is what is done: every argument in the daemon's memory is copied once. A
//!   call is continued in the daemon only if its descriptor can only name a file (`O_PATH`): what
//!   such a descriptor is used for is decided by the path that it names.
//! - A descriptor of the daemon is taken (`pidfd_getfd`) before anything is decided by it: its
//!   number may stand for another file at once.
//! - What the broker itself reads, the daemon changes by no name.
//! - The broker is made before the daemon has read anything foreign, and takes nothing from it but these calls. It reads the
//!   configuration itself.
//! - A call that hangs, as on a dead network file system, delays no other.
//! - The broker opens nothing of its own for the daemon: no `/proc` of the broker or of other processes, and no link of `/proc` to a
//!   descriptor but the daemon's own.
//! - It ends with the daemon.
//!
//! Sources: seccomp_unotify(2), Linux's Documentation/userspace-api/seccomp_filter.rst, kernel/seccomp.c.

mod filter;
mod guard;
mod paths;
mod programs;
mod resolve;
mod ring;
mod rules;
mod serve;
mod sockets;
mod sys;
mod target;

pub use guard::{Broker, BrokerError};
pub use programs::{HelpedProgram, NamesCommand, ProgramHelper};
pub use rules::{BrokerRules, PathRules, RulesSource, ServerRules};
