//! Writeback on real devices: slow stores made with `nbdkit`, behind a real daemon, under real
//! writers; and the same scenario in the simulator.
//!
//! Invariants:
//! - A scenario is one value, a simulator's [`Setup`](writeback_sim::world::Setup): the
//!   devices, the daemon and the writers are made from it, and so is the simulated run. No
//!   parameter is fitted.
//! - Figures of both are computed by the same functions from the same kind of samples.
//! - Their difference is measured in two ways, each with a target of 20 %. For a curve: the mean
//!   distance of the dirty data (and of the thresholds) over the whole run, relative to the
//!   device's threshold at the end of its load. For a figure with a target: the distance relative
//!   to that target.
//! - Two variants are compared in the order A B A B in one run.

pub mod curves;
pub mod devices;
pub mod speed;

use std::io;
use std::path::PathBuf;

use super::figure::{Bar, Figure};
use super::workdir::Workdir;
use super::{Error, daemon_path, io_context, log, place, process};
use crate::guest::journal::kill_daemons;
use crate::harness::binary::Build;

/// The command line's options.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// Only figures whose name contains this text.
    pub only: Option<String>,
    /// Where to write plots and the table of real runs.
    pub out: Option<PathBuf>,
}

impl Options {
    fn wants(&self, prefix: &str, names: &[&str]) -> bool {
        let Some(only) = &self.only else { return true };
        prefix.contains(only.as_str())
            || names.iter().any(|name| format!("{prefix}{name}").contains(only.as_str()))
    }

    fn wants_one(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }
}

/// File systems of a guest that are not clean after their daemon was killed, of twenty.
const KILLS: &str = "writeback_ext4_not_clean_of_20_kills";

/// Kills daemons under a guest's file systems.
fn killed() -> Result<Vec<Figure>, Error> {
    let report = kill_daemons(20, Build::Release, seeded::seed("EBBD_TEST_SEED", 0xebb_b011))?;
    for broken in &report.broken {
        log(broken);
    }
    log(format_args!("{KILLS}: {} kills, {} promises", report.kills, report.promised));
    let (ours, bar) = (report.broken.len() as f64, Bar::AtMost(0.0));
    Ok(vec![Figure { name: KILLS.into(), ours, peer: None, bar }])
}

/// Runs everything the options ask for and hands each finished figure to `print`.
///
/// Returns the number of measurements that failed to run; each was logged.
///
/// # Errors
/// [`Error`] when nothing can be measured at all: a tool or the daemon is missing, no directory can
/// be made, or `print` fails.
pub fn run(
    options: &Options,
    mut print: impl FnMut(&Figure) -> io::Result<()>,
) -> Result<usize, Error> {
    let daemon = daemon_path()?;
    process::describe_machine(&daemon, &["fio", "nbdkit"])?;
    let work = Workdir::without_disk(&place()?)?;
    let mut failed = 0;
    let mut report = |name: &str, result: Result<Vec<Figure>, Error>| match result {
        Ok(figures) => figures
            .iter()
            .filter(|figure| options.wants_one(&figure.name))
            .try_for_each(&mut print)
            .map_err(io_context("writing a figure to stdout")),
        Err(error) => {
            failed += 1;
            log(format_args!("{name} FAILED: {error}"));
            Ok(())
        }
    };
    curves::all(&daemon, &work, options, &mut report)?;
    if speed::NAMES.iter().any(|name| options.wants("", &[name])) {
        report("speed", speed::all(&daemon, &work))?;
    }
    if options.wants("", &[KILLS]) {
        report(KILLS, killed())?;
    }
    process::describe_load();
    Ok(failed)
}
