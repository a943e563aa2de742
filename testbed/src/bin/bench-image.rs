//! Copy-on-write overlays beside other servers. See [`testbed::bench::image`].

use std::process::ExitCode;

use testbed::bench::command;
use testbed::bench::image::{self, Options};

const HELP: &str = "\
usage: bench-image [--rounds N] [--seconds S] [--only PATTERN] [--quick]
Compare copy-on-write overlays of ebbd with qemu-nbd on qcow2, with nbdkit's cow filter and with
their own base, in pairs within one run; measure what clones of one base share.

  --rounds N      rounds of each comparison; each runs every server once (5)
  --seconds S     length of one run of reads or rewrites (4)
  --only PATTERN  only figures whose name contains PATTERN
  --quick         a base of 256 MiB instead of 1 GiB, and other sizes in proportion: a trial

Environment: EBBD_BIN, the daemon to measure (target/release/ebbd);
             TMPDIR, where the images go, on a disk (the target directory).
";

fn main() -> ExitCode {
    command::main(HELP, std::env::args().skip(1), Options::parse, |options, print| {
        image::run(options, print)
    })
}
