//! Shows a cache that gives its memory to a program that needs it. See [`testbed::demo`].

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use testbed::bench::command::beside;
use testbed::{Error, Result, demo};

const HELP: &str = "\
usage: demo [SVG]
A small guest, a disk behind a slow store, and a program that takes memory: once with ebbd's elastic cache,
once with a cache of fixed size. Prints curves and a summary, and writes the curves to the file SVG
(demo/demo.svg in the target directory). The exit status is 1 if the runs do not show what they should.

Environment: EBBD_BIN, the daemon (the one built next to this program).
";

fn say(text: &str) -> Result {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(Error::io("print"))
}

/// `demo/demo.svg` in the target directory.
fn default_svg() -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(Error::io("find this program"))?;
    let target = own.ancestors().nth(2).ok_or_else(|| Error::unexpected("no target directory"))?;
    Ok(target.join("demo/demo.svg"))
}

fn run(svg: Option<PathBuf>) -> Result {
    let svg = svg.map_or_else(default_svg, Ok)?;
    let daemon =
        std::env::var_os("EBBD_BIN").map_or_else(|| beside("ebbd"), |path| Ok(path.into()))?;
    let shown = demo::run(&daemon, &beside("guest-cache")?, |text| {
        // Progress only.
        let _ = writeln!(io::stderr().lock(), "demo: {text}");
    })?;
    if let Some(folder) = svg.parent() {
        std::fs::create_dir_all(folder).map_err(Error::io(folder.display().to_string()))?;
    }
    std::fs::write(&svg, shown.svg()).map_err(Error::io(svg.display().to_string()))?;
    say(&format!("\n{}", shown.text()))?;
    say(&format!("The same as a picture: {}", svg.display()))?;
    say(&shown.verdict()?)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        [] => run(None),
        ["--help" | "-h"] => say(HELP.trim_end()),
        [svg] if !svg.starts_with('-') => run(Some(svg.into())),
        _ => {
            let _ = write!(io::stderr().lock(), "{HELP}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is closed, the exit status still shows it.
            let _ = writeln!(io::stderr().lock(), "demo: {error}");
            ExitCode::FAILURE
        }
    }
}
