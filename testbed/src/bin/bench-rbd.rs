//! The Ceph store beside fio's `rbd` engine. See [`testbed::bench::rbd`].

use std::process::ExitCode;

use testbed::bench::{command, rbd};

const HELP: &str = "\
usage: bench-rbd [--rounds N] [--seconds S] [--only PATTERN]
Compare ebbd before a Ceph cluster with fio's rbd engine, in pairs within one run, and measure how
long a kill, a second writer and a resize take. The cluster is started from Debian's packages.

  --rounds N      rounds of each comparison; each runs both sides once (5)
  --seconds S     length of one fio run (4)
  --only PATTERN  only figures whose name contains PATTERN

Environment: EBBD_BIN, the daemon to measure (target/release/ebbd);
             TMPDIR, where sockets and logs go (the target directory).
";

fn main() -> ExitCode {
    command::main(HELP, std::env::args().skip(1), rbd::parse, |options, print| {
        rbd::run(options, print)
    })
}
