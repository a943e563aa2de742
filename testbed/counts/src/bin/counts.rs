//! `make counts`: see [`counts`].

use std::path::Path;
use std::process::ExitCode;

use counts::baseline::Counts;
use counts::compare::compare;
use counts::console::{note, result};
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
            result(format_args!("{HELP}"));
            return ExitCode::FAILURE;
        }
    };
    match run(update) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            note(format_args!("counts: {error}"));
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
    let now = measure(programs, root, |name| note(format_args!("counting {name}")))?;
    if update {
        std::fs::write(&file, now.write())?;
        result(format_args!("{} figures written to {}", now.counts.len(), file.display()));
        return Ok(true);
    }
    let text = std::fs::read_to_string(&file)
        .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let baseline =
        Counts::read(&text).map_err(|line| format!("{} is damaged: {line}", file.display()))?;
    let compared = compare(&now, &baseline);
    for line in &compared.lines {
        result(format_args!("{line}"));
    }
    result(format_args!("the largest difference is {:.2} %", compared.largest * 100.0));
    Ok(compared.failed == 0)
}
