//! The cost of elastic memory and its response time, on a running daemon. See [`testbed::bench::elastic`].

use std::process::ExitCode;

use testbed::bench::{Options, command, elastic};

const HELP: &str = "\
usage: bench-pool [--rounds N] [--seconds S] [--only PATTERN]
Measures elastic memory on a running daemon.

  --rounds N      runs of each setting, rounds of each event (5)
  --seconds S     seconds of writing in one run of one setting (4)
  --only PATTERN  only figures whose name contains PATTERN

Environment: EBBD_BIN, the daemon to measure (built from this workspace if it is not set).
";

fn main() -> ExitCode {
    command::main(HELP, std::env::args().skip(1), Options::parse, |options, print| {
        elastic::run(options, print)
    })
}
