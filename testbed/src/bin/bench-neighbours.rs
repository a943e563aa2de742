//! Prints one line per figure on stdout, `name ours peer ratio bar ok|short`, and nothing else there;
//! progress and the log go to stderr. See [`testbed::bench::neighbours`].
//!
//! Exit status: 0 when everything ran (a missed bar is said in its line), 1 when something failed to
//! run, 2 for bad usage.

use std::io::{self, Write};
use std::process::ExitCode;

use testbed::bench::{self, Error, Options, neighbours};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.next_if(|first| first == neighbours::flood::ARGUMENT).is_some() {
        return neighbours::flood::main(arguments);
    }
    let print = |figure: &bench::figure::Figure| {
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{figure}")?;
        stdout.flush()
    };
    match Options::parse(arguments).and_then(|options| neighbours::run(&options, print)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            bench::log(format_args!("{failed} measurements failed to run"));
            ExitCode::FAILURE
        }
        Err(error) => {
            bench::log(&error);
            bench::log(format_args!("usage: {}", neighbours::USAGE));
            ExitCode::from(if matches!(error, Error::Usage { .. }) { 2 } else { 1 })
        }
    }
}
