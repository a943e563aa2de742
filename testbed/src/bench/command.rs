//! What the programs `bench-*` have in common. On stdout there is one line for each figure, `name ours peer ratio bar
//! ok|short`, and nothing else; progress and the log go to stderr.
//!
//! Exit status: 0 when everything ran (a missed bar is shown in its line), 1 when something failed to run, 2 for bad
//! usage.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use super::figure::Figure;
use super::{Error, log};

/// Prints a figure; flushed, so that a long run can be followed through a pipe.
///
/// # Errors
/// Those of stdout.
pub fn print(figure: &Figure) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{figure}")?;
    stdout.flush()
}

/// The path of another program that was built together with this one.
///
/// # Errors
/// If this program has no path.
pub fn beside(name: &str) -> crate::Result<std::path::PathBuf> {
    let own = std::env::current_exe().map_err(crate::Error::io("find this program"))?;
    Ok(own.with_file_name(name))
}

/// The end of a program: 0, or 1 with the error in the log.
pub fn status(outcome: Result<(), impl Display>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log(error);
            ExitCode::FAILURE
        }
    }
}

/// Parses `arguments` (without the name of the program), runs the bench, and prints its figures. `run` returns the number of
/// measurements that failed.
pub fn main<O, E: Display>(
    help: &str,
    arguments: impl IntoIterator<Item = String>,
    parse: impl FnOnce(Vec<String>) -> Result<O, Error>,
    run: impl FnOnce(&O, fn(&Figure) -> io::Result<()>) -> Result<usize, E>,
) -> ExitCode {
    let arguments: Vec<String> = arguments.into_iter().collect();
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        return status(io::stdout().lock().write_all(help.as_bytes()));
    }
    let options = match parse(arguments) {
        Ok(options) => options,
        Err(error) => {
            log(error);
            log(help);
            return ExitCode::from(2);
        }
    };
    status(match run(&options, print) {
        Ok(0) => Ok(()),
        Ok(failed) => Err(format!("{failed} measurements failed to run")),
        Err(error) => Err(error.to_string()),
    })
}
