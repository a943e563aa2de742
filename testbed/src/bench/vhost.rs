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
pub mod device;
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
    let mut parts: Vec<Part<'_>> = Vec::new();
    if counted::is_wanted(|name| options.wants(name)) {
        parts.push((
            "instructions in a guest",
            Box::new(|| counted::measure(&programs, COUNTED_ROUNDS)),
        ));
    }
    if device::IDLE.iter().any(|name| options.wants(name)) {
        parts.push(("idle devices", Box::new(|| device::idle(&programs))));
    }
    if options.wants(device::ALLOCATED) {
        parts.push(("allocations", Box::new(|| Ok(vec![device::allocations()?]))));
    }
    if options.only.as_deref().is_none_or(is_of_rings) {
        parts.push(("rings", Box::new(device::rings)));
    }
    for (name, measure) in parts {
        match measure() {
            Ok(figures) => show(options, &figures, print)?,
            Err(error) => {
                log(format_args!("{name} FAILED: {error}"));
                failed += 1;
            }
        }
    }
    failed += host::run(options, &programs, print)?;
    process::describe_load();
    Ok(failed)
}

/// A part of the bench: its name, and what gives its figures.
type Part<'a> = (&'static str, Box<dyn Fn() -> crate::Result<Vec<Figure>> + 'a>);

/// Whether a pattern may mean a figure of rings.
fn is_of_rings(pattern: &str) -> bool {
    pattern.contains(device::RING) || device::RING.contains(pattern)
}

fn show(
    options: &Options,
    figures: &[Figure],
    print: fn(&Figure) -> io::Result<()>,
) -> Result<(), Error> {
    let mut wanted = figures.iter().filter(|figure| options.wants(&figure.name));
    wanted.try_for_each(print).map_err(io_context("printing a figure"))
}
