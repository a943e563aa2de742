//! The page with 5,000 volumes, and the cost of its history. See [`testbed::bench::page`].

use std::process::ExitCode;

use testbed::bench::{command, page};

const HELP: &str = "usage: bench-page\n";

fn main() -> ExitCode {
    command::main(HELP, std::env::args().skip(1), page::parse, |options, print| {
        page::run(options, print)
    })
}
