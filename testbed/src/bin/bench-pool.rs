//! `bench-pool`: the cost of elastic memory and its response time, on a running daemon.
//!
//! Figures go to stdout, one line each (`name ours peer ratio bar ok|short`); progress and single
//! rounds to stderr. A missed target is a result: the exit status shows only whether every
//! measurement ran.

use std::io::{self, Write};
use std::process::ExitCode;

use testbed::bench::{self, Options, elastic};

const HELP: &str = "\
usage: bench-pool [--rounds N] [--seconds S] [--only PATTERN]
Measures elastic memory on a running daemon.

  --rounds N      runs of each setting, rounds of each event (5)
  --seconds S     seconds of writing in one run of one setting (4)
  --only PATTERN  only figures whose name contains PATTERN

Environment: EBBD_BIN, the daemon to measure (built from this workspace if it is not set).
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        let shown = io::stdout().lock().write_all(HELP.as_bytes());
        return if shown.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let options = match Options::parse(arguments) {
        Ok(options) => options,
        Err(error) => {
            bench::log(&error);
            return ExitCode::from(2);
        }
    };
    let print = |figure: &bench::figure::Figure| {
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{figure}")?;
        stdout.flush()
    };
    match elastic::run(&options, print) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            bench::log(format_args!("{failed} measurements failed to run"));
            ExitCode::FAILURE
        }
        Err(error) => {
            bench::log(&error);
            ExitCode::FAILURE
        }
    }
}
