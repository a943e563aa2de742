//! The page with 5,000 volumes, and the cost of its history. See [`testbed::bench::console`].

use std::process::ExitCode;

use testbed::bench::{command, console};

const HELP: &str = "usage: bench-console\n";

fn main() -> ExitCode {
    command::main(HELP, std::env::args().skip(1), console::parse, |options, print| {
        console::run(options, print)
    })
}
