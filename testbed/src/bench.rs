//! Measures the NBD server and compares it with other servers: `ebbd`, `nbdkit file` and
//! `qemu-storage-daemon` serve the same file over a unix socket, one after the other within each
//! round, under the same fio load.
//!
//! Invariants:
//! - Every server gets the same file, fully written with data that does not compress, fresh for
//!   each run: dirty pages of the previous run are written out, and the page cache is warm.
//! - CPU time is the server's alone (all its threads, kernel and user), divided by the requests fio
//!   counted. System calls are counted in separate runs, whose timing is discarded.
//! - A figure is the median over the rounds; the peer in a line is the better one for that figure.
//! - A missed target is a result, not a failure: the line says `short`. A server or tool that fails
//!   to run is a failure, and no line is printed for it.
//!
//! Measures the targets that `SPEC.md` sets for the NBD data path, busy polling, idle memory and start-up.

pub mod cache;
pub mod cache_guest;
pub mod command;
pub mod elastic;
pub mod encryption;
pub mod figure;
pub mod fio;
pub mod handshake;
pub mod idle;
pub mod image;
pub mod limits;
pub mod load;
pub mod neighbours;
pub mod outage;
pub mod page;
pub mod polling;
pub mod pressure;
pub mod process;
pub mod rbd;
pub mod server;
pub mod student;
pub mod syscalls;
pub mod vhost;
pub mod workdir;
pub mod writeback;
pub mod xen;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use figure::Figure;
use load::Bench;
use server::{Kind, Setup};

/// What went wrong in a measurement, with enough context to repair it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A command line that does not parse.
    #[error("{what}")]
    Usage {
        /// What is wrong with it.
        what: String,
    },
    /// A program that is needed is not there or does not start.
    #[error("cannot run {program}: {source}; {remedy}")]
    Tool {
        /// Name or path of the program.
        program: String,
        /// What the operator can do about it.
        remedy: &'static str,
        /// Why it did not start.
        source: io::Error,
    },
    /// An operating-system call on a file, socket or process failed.
    #[error("{context}: {source}")]
    Io {
        /// What was being done, to what.
        context: String,
        /// The system error.
        source: io::Error,
    },
    /// A program ran, but not as it should have.
    #[error("{program}: {what}")]
    Failed {
        /// Name of the program.
        program: String,
        /// What it did, with the end of its error output where there is any.
        what: String,
    },
    /// Output of a tool or of `/proc` that cannot be understood.
    #[error("cannot read the output of {from}: {what}")]
    Output {
        /// Where the text came from.
        from: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// The place for the test file does not fit.
    #[error("{0}")]
    Place(String),
}

/// Adds what was being done to an operating-system error.
pub(crate) fn io_context(context: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let context = context.into();
    move |source| Error::Io { context, source }
}

/// The command line's options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Rounds per workload, 1 to 1000; each round runs every server once.
    pub rounds: u32,
    /// Length of one fio run, in seconds, 1 to 3600.
    pub seconds: u32,
    /// Only figures whose name contains this text.
    pub only: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 5, seconds: 4, only: None }
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
            let mut value =
                || arguments.next().ok_or_else(|| usage(format!("{name} needs a value")));
            match name.as_str() {
                "--rounds" => options.rounds = number(&name, &value()?, 1000).map_err(usage)?,
                "--seconds" => options.seconds = number(&name, &value()?, 3600).map_err(usage)?,
                "--only" => options.only = Some(value()?),
                _ => return Err(usage(format!("unknown argument {name}"))),
            }
        }
        Ok(options)
    }

    /// Whether a figure of this name was requested.
    #[must_use]
    pub fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|pattern| name.contains(pattern.as_str()))
    }
}

fn number(name: &str, text: &str, most: u32) -> Result<u32, String> {
    text.parse()
        .ok()
        .filter(|value| (1..=most).contains(value))
        .ok_or_else(|| format!("{name} takes a number from 1 to {most}, got {text:?}"))
}

/// Progress on stderr. A closed stderr does not stop a measurement.
pub fn log(text: impl std::fmt::Display) {
    // There is nowhere to report an error of stderr.
    let _ = writeln!(io::stderr().lock(), "bench: {text}");
}

/// Where the daemon under test is: `EBBD_BIN`, or the release build in the target directory that
/// holds this program.
///
/// # Errors
/// [`Error::Tool`] when nothing is there.
pub fn daemon_path() -> Result<PathBuf, Error> {
    let path = match std::env::var_os("EBBD_BIN") {
        Some(path) => PathBuf::from(path),
        None => target_directory()?.join("release/ebbd"),
    };
    path.canonicalize().map_err(|source| Error::Tool {
        program: path.display().to_string(),
        remedy: "build it with `cargo build --release -p ebbd`, or set EBBD_BIN",
        source,
    })
}

/// The cargo target directory this program was built into (`target/<profile>/bench-nbd`).
fn target_directory() -> Result<PathBuf, Error> {
    let own = std::env::current_exe().map_err(io_context("finding this program's own path"))?;
    own.ancestors().nth(2).map(Path::to_path_buf).ok_or_else(|| {
        Error::Place(format!("{} is in no cargo target directory; set TMPDIR", own.display()))
    })
}

/// Where the directory of a run goes: `TMPDIR`, or the target directory.
fn place() -> Result<PathBuf, Error> {
    match std::env::var_os("TMPDIR") {
        Some(directory) if !directory.is_empty() => Ok(PathBuf::from(directory)),
        _ => target_directory(),
    }
}

/// Runs everything the options ask for and hands each finished figure to `print`.
///
/// Returns the number of measurements that failed to run; each was logged.
///
/// # Errors
/// [`Error`] when nothing can be measured at all: a tool or the daemon is missing, the test file
/// cannot be made, or `print` fails.
pub fn run(
    options: &Options,
    mut print: impl FnMut(&Figure) -> io::Result<()>,
) -> Result<usize, Error> {
    let daemon = daemon_path()?;
    process::describe_machine(&daemon, &["fio", "nbdkit", "qemu-storage-daemon"])?;
    let work = workdir::Workdir::create(&place()?)?;
    let counter = syscalls::Counter::choose();
    let mut failed = 0;
    let mut report = |name: &str, result: Result<Vec<Figure>, Error>| -> Result<(), Error> {
        match result {
            Ok(figures) => figures
                .iter()
                .filter(|figure| options.wants(&figure.name))
                .try_for_each(&mut print)
                .map_err(io_context("writing a figure to stdout"))?,
            Err(error) => {
                failed += 1;
                log(format_args!("{name} FAILED: {error}"));
            }
        }
        Ok(())
    };

    if options.wants(idle::RSS) {
        report(idle::RSS, idle::resident(&daemon, &work, options.rounds))?;
    }
    if idle::VOLUME_FIGURES.iter().any(|name| options.wants(name)) {
        report("1,000 volumes", idle::thousand_volumes(&daemon, &work, options.rounds))?;
    }
    if polling::FIGURES.iter().any(|name| options.wants(name)) {
        report("busy polling", polling::measure(options, &daemon, &work))?;
    }
    for group in [Setup::PageCache, Setup::Direct] {
        let servers: &[Kind] = match group {
            Setup::PageCache => &[Kind::Ebbd, Kind::Nbdkit, Kind::Qemu],
            Setup::Direct => &[Kind::Ebbd, Kind::Qemu],
        };
        for workload in load::WORKLOADS {
            let bench = Bench { options, daemon: &daemon, work: &work, counter, group, servers };
            if bench.figure_names(workload).iter().any(|name| options.wants(name)) {
                report(&bench.prefix(workload), bench.measure(workload))?;
            }
        }
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
    fn options_parse_and_have_defaults() {
        assert_eq!(parse(&[]).unwrap(), Options { rounds: 5, seconds: 4, only: None });
        let all = parse(&["--rounds", "7", "--seconds", "2", "--only", "qd1_"]).unwrap();
        assert_eq!(all, Options { rounds: 7, seconds: 2, only: Some("qd1_".into()) });
        assert!(all.wants("nbd_randread_4k_qd1_iops"));
        assert!(!all.wants("nbd_randread_4k_qd64x4_iops"));
    }

    #[test]
    fn options_refuse_what_they_do_not_know() {
        let refused: [&[&str]; 5] =
            [&["--rounds"], &["--rounds", "0"], &["--seconds", "x"], &["--fast"], &["-5"]];
        for arguments in refused {
            let error = parse(arguments).unwrap_err();
            assert!(matches!(error, Error::Usage { .. }), "{arguments:?}: {error}");
        }
    }
}
