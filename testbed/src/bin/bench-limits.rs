//! Limits, asked and measured. See [`testbed::bench::limits`].

use std::process::ExitCode;

use testbed::bench::{Options, command, limits};

const HELP: &str = "usage: bench-limits [--rounds N] [--seconds S] [--only PATTERN]\n";

fn main() -> ExitCode {
    let arguments =
        ["--seconds".to_owned(), "10".to_owned()].into_iter().chain(std::env::args().skip(1));
    command::main(HELP, arguments, Options::parse, |options, print| limits::run(options, print))
}
