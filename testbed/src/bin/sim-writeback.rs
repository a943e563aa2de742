//! Runs the scenarios T1 to T12 of the writeback controller in its simulator, under every law: prints
//! the table, writes it with its curves, or says whether what is written is up to date.
//!
//! Exit status: 0 when that was done, 1 when files differ or could not be written, 2 for bad usage.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use writeback_sim::report;

const HELP: &str = "\
usage: sim-writeback [--out FOLDER | --check FOLDER]

Without options the table goes to stdout, in Markdown.
  --out FOLDER    write README.md and one SVG per scenario there
  --check FOLDER  compare with what is there
";

enum Mode {
    Print,
    Out(PathBuf),
    Check(PathBuf),
}

fn parse(arguments: &[String]) -> Option<Mode> {
    match arguments {
        [] => Some(Mode::Print),
        [option, folder] if option == "--out" => Some(Mode::Out(folder.into())),
        [option, folder] if option == "--check" => Some(Mode::Check(folder.into())),
        _ => None,
    }
}

fn write(folder: &Path, files: &[(String, String)]) -> Result<(), String> {
    std::fs::create_dir_all(folder)
        .map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    for (name, content) in files {
        let path = folder.join(name);
        std::fs::write(&path, content)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok(())
}

fn check(folder: &Path, files: &[(String, String)]) -> Result<(), String> {
    let same = |name: &str, content: &str| {
        std::fs::read_to_string(folder.join(name)).is_ok_and(|found| found == content)
    };
    let differ: Vec<&str> = files
        .iter()
        .filter(|(name, content)| !same(name, content))
        .map(|(name, _)| name.as_str())
        .collect();
    if differ.is_empty() {
        return Ok(());
    }
    let folder = folder.display();
    Err(format!("{folder} is not up to date ({}): write it with --out", differ.join(", ")))
}

fn run(mode: &Mode) -> Result<(), String> {
    let all = report::all().map_err(|error| format!("a scenario does not start: {error}"))?;
    match mode {
        Mode::Print => io::stdout()
            .lock()
            .write_all(report::markdown(&all).as_bytes())
            .map_err(|error| format!("cannot write to stdout: {error}")),
        Mode::Out(folder) => write(folder, &report::files(&all)),
        Mode::Check(folder) => check(folder, &report::files(&all)),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(mode) = parse(&arguments) else {
        // There is nowhere to report an error of stderr.
        let _ = io::stderr().lock().write_all(HELP.as_bytes());
        return ExitCode::from(2);
    };
    match run(&mode) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr().lock(), "sim-writeback: {error}");
            ExitCode::FAILURE
        }
    }
}
