//! `cargo xtask test`: builds all test programs of the workspace at once and runs their tests, a
//! process for each, as many at a time as there are processors.
//!
//! - `programs`: what cargo builds, and the tests in it.
//! - `plan`: how each test is run (`xtask/tests.toml`).
//! - `schedule`: which test starts when, and how it ended.
//! - `report`: prints the results, and keeps the times of this run for the next one.

mod plan;
mod programs;
mod report;
mod schedule;

use std::process::ExitCode;

use plan::{Plan, Tier};
use programs::Programs;

const USAGE: &str = "\
usage: cargo xtask test [--all | --rest] [--list] [FILTER]

Runs the quick tests, or those whose name (PACKAGE/PROGRAM TEST) contains FILTER.
  --all   run all tests
  --rest  run those that are not quick
  --list  print their names and do not run them";

/// What a command reports when it fails: a sentence for the last line.
type Result<T> = std::result::Result<T, String>;

/// The arguments of `test`.
#[derive(Debug, Default)]
struct Options {
    tiers: Tiers,
    list: bool,
    filter: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Tiers {
    #[default]
    Quick,
    Rest,
    All,
}

impl Options {
    fn parse(words: impl Iterator<Item = String>) -> Option<Options> {
        let mut options = Options::default();
        for word in words {
            match word.as_str() {
                "--all" => options.tiers = Tiers::All,
                "--rest" => options.tiers = Tiers::Rest,
                "--list" => options.list = true,
                flag if flag.starts_with('-') => return None,
                _ if options.filter.is_some() => return None,
                _ => options.filter = Some(word),
            }
        }
        // A test that is asked for by name runs, quick or not.
        if options.filter.is_some() && options.tiers == Tiers::Quick {
            options.tiers = Tiers::All;
        }
        Some(options)
    }

    fn wants(&self, name: &str, tier: Tier) -> bool {
        let wanted = match self.tiers {
            Tiers::All => true,
            Tiers::Quick => tier == Tier::Quick,
            Tiers::Rest => tier == Tier::Full,
        };
        wanted && self.filter.as_ref().is_none_or(|filter| name.contains(filter))
    }
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let options = match words.next().as_deref() {
        Some("test") => Options::parse(words),
        _ => None,
    };
    let Some(options) = options else {
        report::error(USAGE);
        return ExitCode::from(2);
    };
    match test(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            report::error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Returns true if all tests passed.
fn test(options: &Options) -> Result<bool> {
    let plan = Plan::read()?;
    let programs = Programs::build()?;
    let mut jobs = plan.jobs(&programs)?;
    jobs.retain_mut(|job| {
        job.tests.retain(|test| options.wants(&job.program.full_name(test), job.tier));
        !job.tests.is_empty()
    });
    if options.list {
        for job in &jobs {
            job.tests.iter().for_each(|test| report::say(&job.program.full_name(test)));
        }
        return Ok(true);
    }
    if jobs.is_empty() {
        return Err("no test has such a name".into());
    }
    let outcome = schedule::run(jobs, &programs)?;
    report::finish(&outcome)
}
