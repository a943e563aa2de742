//! A client beside a peer that only begins TLS handshakes. See [`testbed::bench::neighbours`].

use std::process::ExitCode;

use testbed::bench::{Options, command, neighbours};

const HELP: &str = "usage: bench-neighbours [--rounds N] [--seconds S] [--only PATTERN]\n";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.next_if(|first| first == neighbours::flood::ARGUMENT).is_some() {
        return neighbours::flood::main(arguments);
    }
    command::main(HELP, arguments, Options::parse, |options, print| neighbours::run(options, print))
}
