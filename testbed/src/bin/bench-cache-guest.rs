//! Prints one line per figure on stdout, `name ours peer ratio bar ok|short`, and nothing else
//! there; progress, and every run whole, go to stderr. See [`testbed::bench::cache_guest`].
//!
//! Exit status: 0 when everything ran (a missed bar is said in its line), 1 when something failed
//! to run, 2 for bad usage.

use std::io::{self, Write};
use std::process::ExitCode;

use testbed::bench::cache_guest::{self, JOBS, test_name};
use testbed::{Error, Result};

const HELP: &str = "\
usage: bench-cache-guest [--rounds N] [--only TEST]
The evaluation of the cache in a guest: a build, or a neighbour that allocates, beside an I/O job, with
no cache, a static one, and ours.

  --rounds N      boots, each of which runs every test with every cache once (1)
  --only TEST     j1, j10, j20, j30 or neighbour

Environment: EBBD_BIN, the daemon to measure (built in release if not given).
";

fn log(text: impl std::fmt::Display) {
    // There is nowhere to report an error of stderr.
    let _ = writeln!(io::stderr().lock(), "bench-cache-guest: {text}");
}

fn run(rounds: usize, only: Option<&str>) -> Result {
    let me = std::env::current_exe().map_err(Error::io("find myself"))?;
    let load = me.with_file_name("guest-cache");
    let root = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    cache_guest::build_root(root.path())?;
    let all = std::iter::once(None).chain(JOBS.iter().map(|jobs| Some(*jobs)));
    let tests: Vec<_> =
        all.filter(|test| only.is_none_or(|only| test_name(*test) == only)).collect();
    if tests.is_empty() {
        return Err(Error::unexpected("--only to name a test; see --help"));
    }
    let mut measured = Vec::new();
    for round in 0..rounds {
        let busy = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        log(format_args!("round {}; load {}", round + 1, busy.trim()));
        for one in cache_guest::round(round, &tests, &load, root.path())? {
            log(format_args!("{} {} {}", one.test, one.cache, one.line));
            measured.push(one);
        }
    }
    let mut stdout = io::stdout().lock();
    for figure in cache_guest::figures(&measured)? {
        writeln!(stdout, "{figure}").map_err(Error::io("print"))?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut words = arguments.iter().map(String::as_str);
    let (mut rounds, mut only) = (Some(1), None);
    while let Some(word) = words.next() {
        match (word, words.next()) {
            ("--rounds", Some(n)) => rounds = n.parse().ok().filter(|n| (1..=1000).contains(n)),
            ("--only", Some(test)) => only = Some(test),
            ("--help" | "-h", _) => {
                log(HELP);
                return ExitCode::SUCCESS;
            }
            _ => rounds = None,
        }
    }
    let Some(rounds) = rounds else {
        log(HELP);
        return ExitCode::from(2);
    };
    match run(rounds, only) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log(&error);
            ExitCode::FAILURE
        }
    }
}
