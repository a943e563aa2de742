//! Every way to treat idle memory, in a guest with a neighbour that allocates. See [`testbed::bench::pressure`].

use std::process::ExitCode;

use testbed::bench::{command, log, pressure};
use testbed::{Error, Result};

const HELP: &str = "\
usage: bench-pressure [--rounds N]
The memory-pressure test in a guest: every way to treat idle memory, with a neighbour that allocates.

  --rounds N      boots, each of which runs every way once (3)

Environment: EBBD_BIN, the daemon to measure (built in release if not given).
";

fn run(rounds: usize) -> Result {
    let load = command::beside("guest-pressure")?;
    let mut all = Vec::new();
    for round in 0..rounds {
        log(format_args!("round {} of {rounds}: a guest boots", round + 1));
        for measured in pressure::round(round, &load)? {
            log(format_args!("{} {}", measured.behaviour, measured.line));
            all.push(measured);
        }
    }
    pressure::figures(&all)?.iter().try_for_each(command::print).map_err(Error::io("print"))
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
    command::status(run(rounds))
}
