//! The cache in a guest, beside no cache and a static one. See [`testbed::bench::cache_guest`].

use std::process::ExitCode;

use testbed::bench::cache_guest::{self, JOBS, test_name};
use testbed::bench::{command, log};
use testbed::{Error, Result};

const HELP: &str = "\
usage: bench-cache-guest [--rounds N] [--only TEST]
The evaluation of the cache in a guest: a build, or a neighbour that allocates, beside an I/O job, with
no cache, a static one, and ours.

  --rounds N      boots, each of which runs every test with every cache once (1)
  --only TEST     j1, j10, j20, j30 or neighbour

Environment: EBBD_BIN, the daemon to measure (built in release if not given).
";

fn run(rounds: usize, only: Option<&str>) -> Result {
    let load = command::beside("guest-cache")?;
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
    cache_guest::figures(&measured)?.iter().try_for_each(command::print).map_err(Error::io("print"))
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
    command::status(run(rounds, only))
}
