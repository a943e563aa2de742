//! How each test is run: `xtask/tests.toml`, and the defaults.
//!
//! # Invariants
//! - Every entry applies to at least one test: one that no longer does is an error.
//! - A test belongs to one job. The tests of a job share a process.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::programs::{Program, Programs};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests.toml");

/// Which command runs a test.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Tier {
    /// By `make test`.
    #[default]
    Quick,
    /// By `make test-all` only.
    Full,
    /// By both, in `make test-all` at full scale.
    Both,
}

/// An entry of the file, for the tests whose full name begins with `name`. Of several, the longest
/// name applies.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(default)]
    tier: Tier,
    /// How long it takes, for the order of the first run on a machine.
    #[serde(default)]
    seconds: Option<u32>,
    /// Processors that it keeps busy; 0 if it mostly waits. Without it: as in the last run, or 1.
    #[serde(default)]
    processors: Option<u8>,
    /// Nothing else runs meanwhile: it needs all processors, or something that only one may use.
    #[serde(default)]
    alone: bool,
    /// Of a group one job runs at a time: they would wait for one another.
    #[serde(default)]
    group: Option<String>,
    /// The tests share a process.
    #[serde(default)]
    together: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    #[serde(rename = "test")]
    entries: Vec<Entry>,
}

/// Tests that are run by one process.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) program: Arc<Program>,
    /// For reports: what its tests have in common.
    label: String,
    pub(crate) tests: Vec<String>,
    pub(crate) tier: Tier,
    pub(crate) seconds: f64,
    /// Its part of the machine: processors that it keeps busy.
    pub(crate) processors: f64,
    pub(crate) alone: bool,
    pub(crate) group: Option<String>,
}

/// The time that the last run of a job took.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Taken {
    pub(crate) seconds: f64,
    /// Processor time of its process, and of those that it has waited for.
    pub(crate) processor_seconds: f64,
}

/// The least part of a machine that a job gets: it limits how many run at a time.
const LEAST: f64 = 0.4;
/// That of a job of which nothing is known, but that it mostly waits.
const WAITS: f64 = 0.5;

impl Job {
    /// Its name in reports.
    pub(crate) fn name(&self) -> String {
        match &self.tests[..] {
            [test] => self.program.full_name(test),
            _ => self.label.clone(),
        }
    }
}

impl Plan {
    pub(crate) fn read() -> Result<Plan> {
        let text = std::fs::read_to_string(FILE).map_err(|error| format!("{FILE}: {error}"))?;
        toml::from_str(&text).map_err(|error| format!("{FILE}: {error}"))
    }

    /// The jobs for all tests. What they take comes from the previous run, if there was one.
    pub(crate) fn jobs(&self, programs: &Programs, is_full_scale: bool) -> Result<Vec<Job>> {
        let taken = taken(&programs.target);
        let mut used = vec![false; self.entries.len()];
        let mut jobs: Vec<Job> = Vec::new();
        // Jobs of several tests, by program and entry.
        let mut shared = HashMap::new();
        for program in &programs.list {
            for test in &program.tests {
                let name = program.full_name(test);
                let at = self.entry_of(&name);
                if let Some(at) = at {
                    used[at] = true;
                }
                let entry = at.map(|at| self.entries[at].clone()).unwrap_or_default();
                if program.is_unit || entry.together {
                    let job = *shared.entry((program.name.clone(), at)).or_insert(jobs.len());
                    if let Some(job) = jobs.get_mut(job) {
                        job.tests.push(test.clone());
                        continue;
                    }
                }
                let wanted = entry.processors.map(|number| f64::from(number).max(WAITS));
                let label = if entry.together { &entry.name } else { &program.name };
                jobs.push(Job {
                    label: label.clone(),
                    program: program.clone(),
                    tests: vec![test.clone()],
                    tier: entry.tier,
                    seconds: f64::from(entry.seconds.unwrap_or(1)),
                    processors: wanted.unwrap_or(1.0),
                    alone: entry.alone,
                    group: entry.group,
                });
            }
        }
        for job in &mut jobs {
            let Some(last) = taken.get(&key(&job.name(), is_full_scale)) else { continue };
            job.seconds = last.seconds;
            // One that needs several processors may wait for them most of the time.
            if job.processors <= 1.0 {
                job.processors = (last.processor_seconds / last.seconds).clamp(LEAST, 1.0);
            }
        }
        match used.iter().position(|used| !used) {
            Some(at) => Err(format!("{FILE}: no test is called {}", self.entries[at].name)),
            None => Ok(jobs),
        }
    }

    fn entry_of(&self, name: &str) -> Option<usize> {
        let matching = self.entries.iter().enumerate().filter(|(_, e)| name.starts_with(&e.name));
        matching.max_by_key(|(_, entry)| entry.name.len()).map(|(at, _)| at)
    }
}

/// The name of a job in the file of what jobs have taken.
pub(crate) fn key(name: &str, is_full_scale: bool) -> String {
    if is_full_scale { format!("{name} (full scale)") } else { name.to_owned() }
}

/// Where it is kept what jobs have taken.
pub(crate) fn taken_file(target: &Path) -> std::path::PathBuf {
    target.join("test-times.json")
}

pub(crate) fn taken(target: &Path) -> BTreeMap<String, Taken> {
    let text = std::fs::read(taken_file(target)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}
