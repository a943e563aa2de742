//! `cargo xtask test`: builds all test programs of the workspace at once and runs their tests, a
//! process for each, as many at a time as there are processors.
//!
//! - `programs`: what cargo builds, and the tests in it.
//! - `plan`: how each test is run (`xtask/tests.toml`).
//! - `schedule`: which test starts when, and how it ended.
//! - `report`: prints the results, and keeps the times of the jobs for the next run.
//!
//! `cargo xtask subjects`: checks the subjects of commits (`subjects`).

mod plan;
mod programs;
mod report;
mod schedule;
mod subjects;

use std::process::{Child, Command, ExitCode, Stdio};

use plan::{Plan, Tier};
use programs::Programs;

const USAGE: &str = "\
usage: cargo xtask test [--all | --rest] [--list] [FILTER]

Installs what the tests need and runs the quick ones, or those whose name (PACKAGE/PROGRAM TEST)
contains FILTER.
  --all   run all tests, at full scale
  --rest  run those that are not quick, and at full scale those that have a scale
  --list  print their names and do not run them

EBBD_TEST_SCALE sets the scale: 1, or 50 with --all and --rest.

usage: cargo xtask subjects [RANGE]

Checks the subjects of the commits in RANGE; without it, of those that are not on origin/main, or of
the latest 20 if there is no origin/main.";

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
            Tiers::Quick => tier != Tier::Full,
            Tiers::Rest => tier != Tier::Quick,
        };
        wanted && self.filter.as_ref().is_none_or(|filter| name.contains(filter))
    }
}

fn main() -> ExitCode {
    let Some(outcome) = run(std::env::args().skip(1)) else {
        report::error(USAGE);
        return ExitCode::from(2);
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            report::error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Runs a command; `None` if the words name none.
fn run(mut words: impl Iterator<Item = String>) -> Option<Result<bool>> {
    match words.next()?.as_str() {
        "test" => Some(test(&Options::parse(words)?)),
        "subjects" => {
            let range = words.next();
            let is_flag = range.as_ref().is_some_and(|range| range.starts_with('-'));
            (!is_flag && words.next().is_none()).then(|| subjects::check(range.as_deref()))
        }
        _ => None,
    }
}

/// Starts to install the clients, servers and guests that the tests need, while cargo builds.
fn install(tiers: Tiers) -> Result<Child> {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../testbed/install"));
    if tiers == Tiers::Quick {
        command.arg("--quick");
    }
    let started = command.stdin(Stdio::null()).spawn();
    started.map_err(|error| format!("testbed/install cannot be started: {error}"))
}

/// Returns true if all tests passed.
fn test(options: &Options) -> Result<bool> {
    let plan = Plan::read()?;
    let installing = (!options.list).then(|| install(options.tiers)).transpose()?;
    let programs = Programs::build()?;
    if let Some(mut installing) = installing {
        let status = installing.wait().map_err(|error| error.to_string())?;
        if !status.success() {
            return Err("testbed/install has failed".into());
        }
    }
    let is_full_scale = options.tiers != Tiers::Quick && options.filter.is_none();
    let mut jobs = plan.jobs(&programs, is_full_scale)?;
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
    let outcome = schedule::run(jobs, &programs, is_full_scale)?;
    report::finish(&outcome)
}
