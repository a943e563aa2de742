//! The vhost-user-blk backend beside other backends. See [`testbed::bench::vhost`].

use std::process::ExitCode;

use testbed::bench::{Options, command, vhost};

const HELP: &str = "\
usage: bench-vhost [--rounds N] [--seconds S] [--only PATTERN]
Compare ebbd with qemu-storage-daemon and Cloud Hypervisor's vhost_user_block, in pairs on this
machine and by instructions in a guest; measure its rings and idle devices.

  --rounds N      rounds per workload; each runs every backend once (5)
  --seconds S     length of one run (4)
  --only PATTERN  only figures whose name contains PATTERN

Environment: EBBD_BIN, the daemon to measure (target/release/ebbd);
             EBBD_ARGS, more arguments for it, such as --sandbox off;
             VHOST_USER_BLOCK, Cloud Hypervisor's program; without it that peer is not run.
";

fn main() -> ExitCode {
    command::main(HELP, std::env::args().skip(1), Options::parse, |options, print| {
        vhost::run(options, print)
    })
}
