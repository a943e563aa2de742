//! Measures the buffer cache: the daemon in front of a remote store (`nbdkit`), compared with
//! `nbdkit memory`, `nbdkit --filter=cache` and the daemon without a cache.
//!
//! Invariants:
//! - Whether data came from the cache is read from the daemon's counters, never inferred from time;
//!   a run that should have found everything in the cache and did not is a failure, not a figure.
//! - Hit ratios come from counted requests of a seeded client, so that a slow host changes nothing.
//! - Rates are compared in pairs within each round, every other round in reverse order.
//!
//! Measures the acceptance targets of the cache: hits, a slow store, scans, neighbours, accounting.

pub mod accounting;
pub mod hits;
pub mod ratio;
pub mod reclaim;
pub mod rig;
pub mod slow;
pub mod smaps;
pub mod stat;

use std::io;

use super::figure::Figure;
use super::workdir::Workdir;
use super::{Error, daemon_path, io_context, log, number, place, process};
use rig::Rig;

/// The command line's options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Rounds of each comparison, 1 to 1000.
    pub rounds: u32,
    /// Length of one fio run, in seconds, 1 to 3600.
    pub seconds: u32,
    /// Length of the accounting run, in minutes, 1 to 1000.
    pub minutes: u32,
    /// Where the random numbers of our own client begin, 1 to 2^32 - 1.
    pub seed: u32,
    /// Only figures whose name contains this text.
    pub only: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 5, seconds: 4, minutes: 1, seed: 1, only: None }
    }
}

impl Options {
    /// Parses command-line arguments, without the program's name.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown option, a missing value or a number out of range.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self, Error> {
        let mut options = Self::default();
        let mut arguments = arguments.into_iter();
        while let Some(name) = arguments.next() {
            let usage = |what: String| Error::Usage { what };
            let value = arguments.next().ok_or_else(|| usage(format!("{name} needs a value")));
            let count = |most| number(&name, value.as_deref().unwrap_or_default(), most);
            match name.as_str() {
                "--rounds" => options.rounds = count(1000).map_err(usage)?,
                "--seconds" => options.seconds = count(3600).map_err(usage)?,
                "--minutes" => options.minutes = count(1000).map_err(usage)?,
                "--seed" => options.seed = count(u32::MAX).map_err(usage)?,
                "--only" => options.only = Some(value?),
                _ => return Err(usage(format!("unknown argument {name}"))),
            }
        }
        if !MEASUREMENTS.iter().any(|(names, _)| options.wants(names)) {
            let what = "no figure has this in its name".to_owned();
            return Err(Error::Usage { what });
        }
        Ok(options)
    }

    fn wants(&self, names: &[&str]) -> bool {
        let wanted =
            |name: &&str| self.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
        names.iter().any(wanted)
    }
}

type Measurement = fn(&Rig<'_>) -> Result<Vec<Figure>, Error>;

/// Every measurement with the names of its figures, in the order they run.
const MEASUREMENTS: &[(&[&str], Measurement)] = &[
    (&hits::DEEP, hits::deep),
    (&hits::SINGLE, hits::single),
    (&[slow::SINGLE], slow::single),
    (&[slow::DEEP], slow::deep),
    (&[slow::READ_AHEAD], slow::read_ahead),
    (&[ratio::SCAN_ALONE], ratio::scan_alone),
    (&[ratio::SCAN_BESIDE_LOAD], ratio::scan_beside_load),
    (&[ratio::NOISY_NEIGHBOUR], ratio::noisy_neighbour),
    (&accounting::FIGURES, accounting::measure),
];

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
    let rig = Rig::new(&daemon, &work, options);
    let mut failed = 0;
    for (names, measure) in MEASUREMENTS.iter().filter(|(names, _)| options.wants(names)) {
        match measure(&rig) {
            Ok(figures) => figures
                .iter()
                .filter(|figure| options.wants(&[&figure.name]))
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

    fn parse(arguments: &[&str]) -> Result<Options, Error> {
        Options::parse(arguments.iter().map(ToString::to_string))
    }

    #[test]
    fn options_parse_and_choose() {
        assert_eq!(parse(&[]).unwrap(), Options::default());
        let options = parse(&["--minutes", "10", "--only", "noisy", "--seed", "7"]).unwrap();
        assert_eq!((options.minutes, options.seed), (10, 7));
        let wanted = MEASUREMENTS.iter().filter(|(names, _)| options.wants(names));
        assert_eq!(wanted.count(), 1);
    }

    #[test]
    fn options_refuse_what_they_do_not_know() {
        let refused: [&[&str]; 6] = [
            &["--minutes"],
            &["--minutes", "0"],
            &["--seed", "x"],
            &["--fast"],
            &["-5"],
            &["--only", "hits"],
        ];
        for arguments in refused {
            let error = parse(arguments).unwrap_err();
            assert!(matches!(error, Error::Usage { .. }), "{arguments:?}: {error}");
        }
    }
}
