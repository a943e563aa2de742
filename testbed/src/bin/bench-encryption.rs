//! Encrypted volumes beside plain ones, and beside OpenSSL alone. See [`testbed::bench::encryption`].

use std::process::ExitCode;

use testbed::bench::{Options, command, encryption};

const HELP: &str = "usage: bench-encryption [--rounds N] [--seconds S] [--only PATTERN]\n";

fn main() -> ExitCode {
    let arguments = std::env::args().skip(1);
    command::main(HELP, arguments, Options::parse, |options, print| encryption::run(options, print))
}
