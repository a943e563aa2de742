//! Prints one line per figure on stdout, `name ours peer ratio bar ok|short`, and nothing else
//! there; progress and the log go to stderr. See [`testbed::bench`].
//!
//! Exit status: 0 when everything ran (a missed bar is said in its line), 1 when something failed
//! to run, 2 for bad usage.

use std::io::{self, Write};
use std::process::ExitCode;

use testbed::bench::{self, Error, Options};

const HELP: &str = "\
Compare ebbd with nbdkit and qemu-storage-daemon under fio, in pairs within one run.

  --rounds N      rounds per workload; each runs every server once (5)
  --seconds S     length of one fio run (4)
  --only PATTERN  only figures whose name contains PATTERN

Environment: EBBD_BIN, the daemon to measure (target/release/ebbd);
             TMPDIR, where the 1 GiB test file goes, on a disk (the target directory).
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        let shown = write!(io::stdout().lock(), "usage: {}\n{HELP}", bench::USAGE);
        return if shown.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let print = |figure: &bench::figure::Figure| {
        // Flushed line by line, so that a long run can be followed through a pipe.
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{figure}")?;
        stdout.flush()
    };
    match Options::parse(arguments).and_then(|options| bench::run(&options, print)) {
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
