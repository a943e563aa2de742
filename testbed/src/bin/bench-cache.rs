//! The buffer cache before a remote store. See [`testbed::bench::cache`].

use std::process::ExitCode;

use testbed::bench::cache::{self, Options};
use testbed::bench::command;

const HELP: &str = "\
usage: bench-cache [--rounds N] [--seconds S] [--minutes M] [--seed X] [--only PATTERN]
Measure the buffer cache of ebbd in front of a remote store (nbdkit), in pairs within one run.

  --rounds N      rounds of each comparison (5)
  --seconds S     length of one fio run (4)
  --minutes M     length of the accounting run (1; 10 for the acceptance)
  --seed X        where the random numbers of our own client begin (1)
  --only PATTERN  only figures whose name contains PATTERN

Environment: EBBD_BIN, the daemon to measure (target/release/ebbd);
             TMPDIR, where sockets and the cache file of nbdkit's filter go (the target directory).
";

fn main() -> ExitCode {
    command::main(HELP, std::env::args().skip(1), Options::parse, |options, print| {
        cache::run(options, print)
    })
}
