//! Measures copy-on-write overlays: the daemon compared with `qemu-nbd` on qcow2 and with nbdkit's `cow` filter, and with
//! itself serving the base alone; and what clones of one base share.
//!
//! - [`writes`]: first writes, rewrites, and the size of a delta.
//! - [`reads`]: reads through an empty overlay and through a chain.
//! - [`boots`]: many guests that boot from one base over a slow store.
//! - [`snapshots`]: snapshots and clones while a volume is written.
//! - [`clones`]: bytes fetched and cached for many clones, and the memory of an unused one.
//!
//! The client is our own ([`client`]): it knows what each block holds, costs little, and is the same for all servers.
//!
//! Invariants:
//! - All data that is read is verified.
//! - Every server has the same base, in the page cache, and an overlay that is empty at the start.
//! - Rates are compared in pairs within each round, every other round in reverse order; a figure is the median.
//! - A missed bar is a result: the line says `short`. A server that fails to run is a failure.

pub mod boots;
pub mod client;
pub mod clones;
pub mod reads;
pub mod rig;
pub mod snapshots;
pub mod writes;

use std::io;

use super::figure::Figure;
use super::workdir::Workdir;
use super::{Error, daemon_path, io_context, log, place, process};
use rig::Rig;

/// The command line's options.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// Those of all benches.
    pub common: super::Options,
    /// A small base, for a trial.
    pub quick: bool,
}

impl Options {
    /// Parses command-line arguments, without the program's name.
    ///
    /// # Errors
    /// As those of all benches; or no figure has the name.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self, Error> {
        let (quick, others): (Vec<String>, Vec<String>) =
            arguments.into_iter().partition(|argument| argument == "--quick");
        let options = Self { common: super::Options::parse(others)?, quick: !quick.is_empty() };
        if !MEASUREMENTS.iter().any(|(names, _)| options.wants(names)) {
            return Err(Error::Usage { what: "no figure has this in its name".into() });
        }
        Ok(options)
    }

    fn wants(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.common.wants(name))
    }
}

type Measurement = fn(&Rig<'_>) -> Result<Vec<Figure>, Error>;

/// Every measurement with the names of its figures, in the order they run.
const MEASUREMENTS: &[(&[&str], Measurement)] = &[
    (&writes::RATES, writes::rates),
    (&[writes::SIZE], writes::size),
    (&[reads::CACHED], reads::cached),
    (&[reads::UNCACHED], reads::uncached),
    (&[reads::CHAIN], reads::chain),
    (&snapshots::FIGURES, snapshots::snapshots),
    (&clones::READ, clones::read),
    (&[clones::UNTOUCHED], clones::untouched),
    (&[boots::BOOTS], boots::boots),
];

/// Runs everything the options ask for and hands each finished figure to `print`. Returns the number of measurements that
/// failed to run; each was logged.
///
/// # Errors
/// [`Error`] when nothing can be measured at all: a tool or the daemon is missing, no directory can be made, or `print`
/// fails.
pub fn run(
    options: &Options,
    mut print: impl FnMut(&Figure) -> io::Result<()>,
) -> Result<usize, Error> {
    let daemon = daemon_path()?;
    process::describe_machine(&daemon, &["qemu-nbd", "nbdkit"])?;
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
        let options = parse(&["--only", "first_write", "--quick", "--rounds", "2"]).unwrap();
        assert!(options.quick && options.common.rounds == 2);
        let wanted = MEASUREMENTS.iter().filter(|(names, _)| options.wants(names));
        assert_eq!(wanted.count(), 1);
        for refused in [&["--only", "nbd_"][..], &["--fast"], &["--rounds", "0"]] {
            assert!(matches!(parse(refused), Err(Error::Usage { .. })), "{refused:?}");
        }
    }
}
