//! The sandbox: what the threads of the daemon may ask of the kernel, so that code that hijacks one gains little.
//!
//! - A **worker** ([`restrict_worker`]) may make the system calls of [`WORKER_CALLS`] only, and open no path, whatever the
//!   call (Landlock). Its ring takes a few operations only; that is `ebb-io`'s part.
//! - **All threads** ([`restrict_process`]) may not make the calls of [`DENIED_CALLS`]: run a
//!   program, read another process, and so on. Nor may they reach other processes in other ways
//!   ([`isolate_process`]), or keep privileges that they do not need ([`give_up_capabilities`]).
//!
//! # Invariants
//! - Nothing here is undone: a thread keeps its rules to its end, and a thread that it makes has them, too. So a worker makes
//!   no thread: [`threads`] makes them for it, by a thread that is no worker.
//! - What a kernel lacks is said ([`Mechanism`]), and the daemon serves without it.
//! - A system call that a worker needs in a rare case only must not be left to be found in that case. In debug builds a
//!   call that is not on the list ends the process ([`Unlisted::Ends`]), so that no test of the daemon passes over it.
//!
//! Sources: seccomp(2), landlock(7), prctl(2); the C library's calls were read in its source (glibc 2.36).

mod capabilities;
mod filter;
mod process;
mod signals;
pub mod threads;
mod worker;

pub use capabilities::give_up_capabilities;
pub use process::{
    DENIED_CALLS, DeniedCall, isolate_process, programs_are_denied, restrict_broker,
    restrict_process,
};
pub use worker::{CallRule, Unlisted, WORKER_CALLS, WorkerCall, restrict_worker};

/// A part of the sandbox: whether it is in force, and if not, why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mechanism {
    /// Its name, for programs: `ring`, `worker_calls`, `worker_paths`, `process_calls`,
    /// `other_processes` `capabilities` or `broker`.
    pub name: &'static str,
    /// Whether it is in force.
    pub in_force: bool,
    /// What it does, or why it is not in force.
    pub detail: String,
}

impl Mechanism {
    /// The restrictions of the workers' rings.
    pub const RING: &str = "ring";
    /// The list of system calls of workers.
    pub const WORKER_CALLS: &str = "worker_calls";
    /// That workers open no path.
    pub const WORKER_PATHS: &str = "worker_paths";
    /// The system calls that no thread may make.
    pub const PROCESS_CALLS: &str = "process_calls";
    /// That no thread reaches another process.
    pub const OTHER_PROCESSES: &str = "other_processes";
    /// That no thread has privileges but a few.
    pub const CAPABILITIES: &str = "capabilities";
    /// That another process opens, connects and makes what the daemon wants (`ebb-broker`).
    pub const BROKER: &str = "broker";

    /// One that is in force.
    pub fn in_force(name: &'static str, detail: impl Into<String>) -> Mechanism {
        Mechanism { name, in_force: true, detail: detail.into() }
    }

    /// One that is not.
    pub fn missing(name: &'static str, why: impl Into<String>) -> Mechanism {
        Mechanism { name, in_force: false, detail: why.into() }
    }
}
