//! Prints one line per figure of the cache on stdout, `name ours peer ratio bar ok|short`, and
//! nothing else there; progress and the log go to stderr. See [`testbed::bench::cache`].
//!
//! Exit status: 0 when everything ran (a missed bar is said in its line), 1 when something failed
//! to run, 2 for bad usage.

use std::io::{self, Write};
use std::process::ExitCode;

use testbed::bench::cache::{self, Options};
use testbed::bench::{self, Error};

const HELP: &str = "\
Measure the buffer cache of ebbd in front of a remote store (nbdkit), in pairs within one run.

  --rounds N      rounds of each comparison (5)
  --seconds S     length of one fio run (4)
  --minutes M     length of the accounting run (1; 10 for the acceptance)
  --seed X        where the random numbers of our own client begin (1)
  --only PATTERN  only figures whose name contains PATTERN

Environment: EBBD_BIN, the daemon to measure (target/release/ebbd);
             TMPDIR, where sockets and the cache file of nbdkit's filter go (the target directory).
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        let shown = write!(io::stdout().lock(), "usage: {}\n{HELP}", cache::USAGE);
        return if shown.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let print = |figure: &bench::figure::Figure| {
        // Flushed line by line, so that a long run can be followed through a pipe.
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{figure}")?;
        stdout.flush()
    };
    match Options::parse(arguments).and_then(|options| cache::run(&options, print)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            bench::log(format_args!("{failed} measurements failed to run"));
            ExitCode::FAILURE
        }
        Err(error) => {
            bench::log(&error);
            ExitCode::from(if matches!(error, Error::Usage { .. }) { 2 } else { 1 })
        }
    }
}
