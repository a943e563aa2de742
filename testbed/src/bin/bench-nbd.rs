//! The NBD server beside other servers. See [`testbed::bench`].

use std::process::ExitCode;

use testbed::bench::{self, Options, command};

const HELP: &str = "\
usage: bench-nbd [--rounds N] [--seconds S] [--only PATTERN]
Compare ebbd with nbdkit and qemu-storage-daemon under fio, in pairs within one run.

  --rounds N      rounds per workload; each runs every server once (5)
  --seconds S     length of one fio run (4)
  --only PATTERN  only figures whose name contains PATTERN

Environment: EBBD_BIN, the daemon to measure (target/release/ebbd);
             TMPDIR, where the 1 GiB test file goes, on a disk (the target directory).
";

fn main() -> ExitCode {
    command::main(HELP, std::env::args().skip(1), Options::parse, |options, print| {
        bench::run(options, print)
    })
}
