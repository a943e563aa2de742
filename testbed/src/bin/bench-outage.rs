//! Healthy volumes beside dead stores. See [`testbed::bench::outage`].

use std::process::ExitCode;

use testbed::bench::{Options, command, outage};

const HELP: &str = "usage: bench-outage [--rounds N] [--seconds S] [--only PATTERN]\n";

fn main() -> ExitCode {
    command::main(HELP, std::env::args().skip(1), Options::parse, |options, print| {
        outage::run(options, print)
    })
}
