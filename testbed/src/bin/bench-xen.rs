//! Prints one line per figure on stdout, `name ours peer ratio bar ok|short`, and nothing else
//! there; the log goes to stderr. See [`testbed::xen::bench`].
//!
//! Exit status: 0 when everything ran (a missed bar is said in its line), 1 when something failed
//! to run, 2 for bad usage.

use std::io::{self, Write};
use std::process::ExitCode;
use testbed::Result;
use testbed::bench::daemon_path;
use testbed::bench::figure::Figure;
use testbed::xen::bench::{self, Pressure};

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
            log(&error.to_string());
            return ExitCode::FAILURE;
        }
    };
    let mut status = ExitCode::SUCCESS;
    for part in wanted {
        log(&format!("booting for {part}"));
        let figures = match part {
            "side" => bench::side_by_side(&daemon),
            "cap" => bench::cap(),
            _ => bench::pressure(
                &daemon,
                Pressure {
                    persistent: part != "pressure-copy",
                    idle_memory: if part == "pressure-drop" { "drop" } else { "lend" },
                    rounds: 2,
                },
            ),
        };
        if let Err(error) = figures.and_then(|figures| print(&figures)) {
            log(&format!("{part} FAILED: {error}"));
            status = ExitCode::FAILURE;
        }
    }
    status
}

fn print(figures: &[Figure]) -> Result {
    let mut stdout = io::stdout().lock();
    for figure in figures {
        writeln!(stdout, "{figure}").map_err(testbed::Error::io("write a figure"))?;
    }
    stdout.flush().map_err(testbed::Error::io("write a figure"))
}

fn log(text: &str) {
    // There is nowhere to report an error of stderr.
    let _ = writeln!(io::stderr().lock(), "bench-xen: {text}");
}
