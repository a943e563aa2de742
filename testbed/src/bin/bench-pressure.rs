//! Prints one line per figure on stdout, `name ours peer ratio bar ok|short`, and nothing else
//! there; progress, and every round whole, go to stderr. See [`testbed::bench::pressure`].
//!
//! Exit status: 0 when everything ran (a missed bar is said in its line), 1 when something failed
//! to run, 2 for bad usage.

use std::io::{self, Write};
use std::process::ExitCode;

use testbed::bench::pressure;
use testbed::{Error, Result};

const HELP: &str = "\
usage: bench-pressure [--rounds N]
The memory-pressure test in a guest: every way to treat idle memory, with a neighbour that allocates.

  --rounds N      boots, each of which runs every way once (3)

Environment: EBBD_BIN, the daemon to measure (built in release if not given).
";

fn log(text: impl std::fmt::Display) {
    // There is nowhere to report an error of stderr.
    let _ = writeln!(io::stderr().lock(), "bench-pressure: {text}");
}

fn run(rounds: usize) -> Result {
    let me = std::env::current_exe().map_err(Error::io("find myself"))?;
    let load = me.with_file_name("guest-pressure");
    let mut all = Vec::new();
    for round in 0..rounds {
        log(format_args!("round {} of {rounds}: a guest boots", round + 1));
        for measured in pressure::round(round, &load)? {
            log(format_args!("{} {}", measured.behaviour, measured.line));
            all.push(measured);
        }
    }
    let mut stdout = io::stdout().lock();
    for figure in pressure::figures(&all)? {
        writeln!(stdout, "{figure}").map_err(Error::io("print"))?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let rounds = match words.as_slice() {
        [] => Some(3),
        ["--rounds", n] => n.parse().ok().filter(|n| (1..=1000).contains(n)),
        _ => None,
    };
    let Some(rounds) = rounds else {
        let help = matches!(words.as_slice(), ["--help" | "-h"]);
        log(HELP);
        return if help { ExitCode::SUCCESS } else { ExitCode::from(2) };
    };
    match run(rounds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log(&error);
            ExitCode::FAILURE
        }
    }
}
