//! Measures the vhost-user-blk backend beside other backends, and its own costs.
//!
//! - [`host`]: rates, latency and CPU time on this machine, beside `qemu-storage-daemon` and Cloud Hypervisor's
//!   `vhost_user_block`.
//! - [`counted`]: instructions of client, kernel and backend for a request, in one guest whose clock counts them.
//! - [`device`]: what a ring costs, allocations, and idle devices.
//!
//! The client is our own frontend ([`frontend`], [`ring`], [`client`]), in the program `vhost-load`: it costs little and
//! the same with every backend.
//!
//! Invariants:
//! - All backends have the same data, queues and client, and an enabled write cache.
//! - Backends alternate within each round; a figure is the median of its rounds, the peer the better one.
//! - A missed bar is a result: the line says `short`. A backend that fails to run is a failure.

pub mod client;
pub mod counted;
//pub mod device;
pub mod frontend;
pub mod host;
pub mod ring;
pub mod servers;

use std::io;

use super::figure::Figure;
use super::{Error, Options, io_context, log, process};
use servers::Programs;

/// Rounds in the guest, whose figures repeat.
const COUNTED_ROUNDS: usize = 2;

/// Runs everything the options ask for and hands each finished figure to `print`. Returns the number of measurements that
/// failed to run; each was logged.
///
/// # Errors
/// A program is missing, or `print` fails.
pub fn run(options: &Options, print: fn(&Figure) -> io::Result<()>) -> Result<usize, Error> {
    let programs = Programs::find()?;
    process::describe_machine(&super::daemon_path()?, &["qemu-storage-daemon"])?;
    let mut failed = 0;
    if counted::is_wanted(|name| options.wants(name)) {
        match counted::measure(&programs, COUNTED_ROUNDS) {
            Ok(figures) => show(options, &figures, print)?,
            Err(error) => {
                log(format_args!("instructions in a guest FAILED: {error}"));
                failed += 1;
            }
        }
    }
    failed += host::run(options, &programs, print)?;
    process::describe_load();
    Ok(failed)
}

fn show(
    options: &Options,
    figures: &[Figure],
    print: fn(&Figure) -> io::Result<()>,
) -> Result<(), Error> {
    let mut wanted = figures.iter().filter(|figure| options.wants(&figure.name));
    wanted.try_for_each(print).map_err(io_context("printing a figure"))
}
