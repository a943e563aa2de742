//! `make counts`: see [`counts`].

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]

use std::path::Path;
use std::process::ExitCode;

use counts::baseline::Counts;
use counts::compare::compare;
use counts::measure::measure;
use counts::served::Error;

const HELP: &str = "\
usage: counts [--update]
Count instructions, system calls, allocations and copied bytes of a request, and compare them with the baseline.

  --update   write the baseline instead

One line a figure: `name now baseline ratio ok|ok-fell|grew|not-compared`. Exit status 1 if one has grown.
";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let update = match &words[..] {
        [] => false,
        [word] if word == "--update" => true,
        _ => {
            print!("{HELP}");
            return ExitCode::FAILURE;
        }
    };
    match run(update) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("counts: {error}");
            ExitCode::FAILURE
        }
    }
}

/// True if no figure has grown.
fn run(update: bool) -> Result<bool, Error> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.parent().and_then(Path::parent).ok_or("no workspace")?;
    let file = here.join("baseline.txt");
    let program = std::env::current_exe()?;
    let programs = program.parent().ok_or("no directory of programs")?;
    let now = measure(programs, root, |name| eprintln!("counting {name}"))?;
    if update {
        std::fs::write(&file, now.write())?;
        println!("{} figures written to {}", now.counts.len(), file.display());
        return Ok(true);
    }
    let text = std::fs::read_to_string(&file)
        .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let baseline =
        Counts::read(&text).map_err(|line| format!("{} is damaged: {line}", file.display()))?;
    let result = compare(&now, &baseline);
    for line in &result.lines {
        println!("{line}");
    }
    println!("the largest difference is {:.2} %", result.largest * 100.0);
    Ok(result.failed == 0)
}
