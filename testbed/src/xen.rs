//! Real Xen: hypervisor, dom0 and guests under QEMU, made of Debian's packages, which are
//! downloaded and unpacked but not installed.
//!
//! A [`Machine`] boots, runs one shell script in dom0 (the *job*), and powers off. What it leaves in
//! dom0's `/out` comes back, with the whole console and the job's status. `xen-lab` does it by hand.
//!
//! | file | what it is |
//! |---|---|
//! | `xen/fetch.sh`, `xen/build.sh` | packages to a directory, and from there to what the machine boots |
//! | `xen/dom0-init.sh`, `xen/domu-init.sh` | first processes; a change to them is a new build |
//! | `xen/dom0-lib.sh`, `xen/guest-lib.sh` | what scripts of a job can call: `say`, `guest`, `blkback`, ... |
//! | `xen/hotplug.sh` | all that disks of the kernel's backend need of a hotplug script |
//! | `bench/xen/` | jobs and scripts of `bench-xen`; those of the test are in `tests/xen/` |
//!
//! Time in the machine is the number of instructions executed ([`Clock::Instructions`]): figures
//! repeat whatever else the host does, and waiting costs nothing. What such a figure cannot show:
//! cache misses and TLB shootdowns are free, privilege changes cost about two copies of 4 KiB, and
//! processors run one after the other.
//!
//! Invariants, each bought with a crash:
//! * No SMAP, SMEP (dom0 panics) and ERMS (`rep movsb` is emulated byte by byte).
//! * dom0 and every virtual processor of a guest have a processor of their own: two that share one
//!   lose the base of a segment register now and then.
//! * Guests use the time-stamp counter untrapped (`tsc_mode='native'`).
//! * Machines run one at a time, over all test programs.

mod artefacts;
mod machine;
pub mod trace;

pub use artefacts::{Artefacts, cache};
pub use machine::{Clock, Machine, Outcome};
