//! Counts of a request, compared with a committed baseline (`make counts`): a guard against
//! regressions that needs no quiet machine and no other program to compare with.
//!
//! | count of a request | how it is counted |
//! |---|---|
//! | `instructions` | by callgrind, of the worker's thread in user space, with the name of each function |
//! | `system_calls` | by callgrind, of the worker's thread |
//! | `operations` | operations of the ring, by the worker |
//! | `allocations` | calls of the heap that allocate or enlarge |
//! | `copied` | bytes copied by `memcpy` and `memmove`, and out of and into guest memory; see below |
//!
//! `copied` has neither copies of a small constant size, which the compiler makes of single moves,
//! nor zeroing, nor the kernel's copies between sockets, files and this process. Another copy by
//! the kernel needs an operation or a system call, and zeroing takes instructions: these are
//! counted.
//!
//! The three exports serve a null store, a file in memory and such a file with a writeback cache,
//! each with requests of 4 KiB and 128 KiB one at a time, and, except on a file without a cache, of
//! 4 KiB in batches of 16. See [`served`] for why two runs differ little. Instructions depend on
//! the compiler, the C library and valgrind; the baseline names them ([`compare`]).
//!
//! The program is built with the features `sim` of the product's crates, and without link-time
//! optimisation (profile `counts`): its counts are compared with each other only.

pub mod baseline;
pub mod callgrind;
pub mod compare;
pub mod console;
pub mod measure;
pub mod served;
