//! The Xen backend beside those of the kernel and of QEMU. See [`testbed::bench::xen`].

use std::process::ExitCode;

use testbed::Error;
use testbed::bench::xen::{self, Pressure};
use testbed::bench::{command, daemon_path, log};

const HELP: &str = "\
usage: bench-xen [--only side|cap|pressure|pressure-copy|pressure-drop]
Boot Xen and compare ebbd with the kernel's xen-blkback and QEMU's qdisk; measure what a guest past
the cap of grants costs its neighbour; then the test of memory pressure: at the daemon's defaults,
without persistent grants, and with idle memory that only a sign of pressure takes away.
Each is a boot of minutes.
Environment: EBBD_BIN, the daemon to measure (target/release/ebbd).
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let parts = ["side", "cap", "pressure", "pressure-copy", "pressure-drop"];
    let wanted = match words[..] {
        [] => parts.to_vec(),
        ["--only", part] if parts.contains(&part) => vec![part],
        _ => {
            log(HELP);
            return ExitCode::from(2);
        }
    };
    let daemon = match daemon_path() {
        Ok(daemon) => daemon,
        Err(error) => {
            log(error);
            return ExitCode::FAILURE;
        }
    };
    let mut status = ExitCode::SUCCESS;
    for part in wanted {
        log(format_args!("booting for {part}"));
        let figures = match part {
            "side" => xen::side_by_side(&daemon),
            "cap" => xen::cap(),
            _ => xen::pressure(
                &daemon,
                Pressure {
                    persistent: part != "pressure-copy",
                    idle_memory: if part == "pressure-drop" { "drop" } else { "lend" },
                    rounds: 2,
                },
            ),
        };
        let shown = figures.and_then(|figures| {
            figures.iter().try_for_each(command::print).map_err(Error::io("write a figure"))
        });
        if let Err(error) = shown {
            log(format_args!("{part} FAILED: {error}"));
            status = ExitCode::FAILURE;
        }
    }
    status
}
