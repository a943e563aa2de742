//! Measures the Ceph store on a cluster of one monitor and one OSD with its objects in memory: the daemon compared with
//! fio's `rbd` engine, which calls librbd in fio's own process; hits of its cache compared with those of a file volume;
//! and how long a kill, a second writer and a resize take.
//!
//! - [`rates`]: rates without a cache, with writeback, and of hits.
//! - [`moments`]: times of single events.
//!
//! Invariants:
//! - Both sides use the same librbd, without librbd's cache, and images of the same size that are fully written.
//! - Each side has an image of its own: the daemon holds the exclusive lock of its image.
//! - Rates are compared in pairs within each round, every other round in reverse order; a figure is the median. A time
//!   is the longest of all rounds.

pub mod moments;
pub mod rates;
pub mod rig;

use std::io;

use super::figure::Figure;
use super::workdir::Workdir;
use super::{Error, Options, daemon_path, io_context, log, place, process};
use rig::Rig;

/// Parses command-line arguments, without the program's name.
///
/// # Errors
/// As [`Options::parse`]; or no figure has the name.
pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Options, Error> {
    let options = Options::parse(arguments)?;
    if !MEASUREMENTS.iter().any(|(names, _)| wants(&options, names)) {
        return Err(Error::Usage { what: "no figure has this in its name".into() });
    }
    Ok(options)
}

fn wants(options: &Options, names: &[&str]) -> bool {
    names.iter().any(|name| options.wants(name))
}

type Measurement = fn(&Rig<'_>) -> Result<Vec<Figure>, Error>;

/// Every measurement with the names of its figures, in the order they run.
const MEASUREMENTS: &[(&[&str], Measurement)] = &[
    (&rates::UNCACHED, rates::uncached),
    (&[rates::WRITEBACK], rates::writeback),
    (&[rates::HITS], rates::hits),
    (&[moments::AFTER_KILL], moments::after_kill),
    (&[moments::SECOND_WRITER], moments::second_writer),
    (&[moments::RESIZE], moments::resize),
];

/// Runs everything the options ask for and hands each finished figure to `print`. Returns the number of measurements that
/// failed to run; each was logged.
///
/// # Errors
/// [`Error`] when nothing can be measured at all: a tool or the daemon is missing, the cluster does not start, or `print`
/// fails.
pub fn run(
    options: &Options,
    mut print: impl FnMut(&Figure) -> io::Result<()>,
) -> Result<usize, Error> {
    let daemon = daemon_path()?;
    process::describe_machine(&daemon, &["fio"])?;
    let work = Workdir::without_disk(&place()?)?;
    let rig = Rig::new(&daemon, &work, options)?;
    let mut failed = 0;
    for (names, measure) in MEASUREMENTS.iter().filter(|(names, _)| wants(options, names)) {
        match measure(&rig) {
            Ok(figures) => figures
                .iter()
                .filter(|figure| options.wants(&figure.name))
                .try_for_each(&mut print)
                .map_err(io_context("writing a figure to stdout"))?,
            Err(error) => {
                failed += 1;
                log(format_args!("{names:?} FAILED: {error}"));
            }
        }
        process::describe_load();
    }
    Ok(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_choose_measurements() {
        let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let options = parse(words(&["--only", "writeback", "--rounds", "2"])).unwrap();
        let wanted = MEASUREMENTS.iter().filter(|(names, _)| wants(&options, names));
        assert_eq!(wanted.count(), 1);
        assert!(matches!(parse(words(&["--only", "nbd_"])), Err(Error::Usage { .. })));
    }
}
