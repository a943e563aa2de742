//! The committed seeds of the fuzz targets: small inputs from which a fuzzer starts.
//!
//! A seed is named after the field of the target's tally that it makes greater than 0, so that the
//! seeds together reach each outcome; `finding-NAME` is an input that once was a finding. The smoke
//! tests check both. `EBBD_FUZZ_SEEDS=write` makes the seeds again, after a change of the choices.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};

use seeded::Random;

/// Bytes of the shortest seed: choices for a fuzzer to vary.
const SHORTEST: usize = 16;

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target)
}

/// Runs the seeds of a target: each must lead to the outcome it is named after, and each field of
/// the tally must have its seed.
pub fn check<T: Debug, E: Debug>(target: &str, mut run: impl FnMut(&[u8]) -> Result<T, E>) {
    let mut run = |input: &[u8]| match run(input) {
        Ok(tally) => fields(&tally),
        Err(finding) => panic!("{target}, bytes {input:02x?}:\n{finding:?}"),
    };
    let outcomes = run(&[]).into_iter().map(|(name, _)| name);
    let outcomes = outcomes.collect::<Vec<_>>();
    if std::env::var("EBBD_FUZZ_SEEDS").is_ok_and(|value| value == "write") {
        outcomes.iter().for_each(|outcome| write(target, outcome, &mut run));
    }
    let again = "make the seeds again: EBBD_FUZZ_SEEDS=write with this test";
    let mut names = Vec::new();
    for entry in fs::read_dir(folder(target)).expect("the folder of the seeds") {
        let entry = entry.expect("a seed");
        let name = entry.file_name().into_string().expect("the name of a seed");
        let reached = run(&fs::read(entry.path()).expect("a seed"));
        let is_as_named = reached.contains(&(name.clone(), true)) || name.starts_with("finding-");
        assert!(is_as_named, "{target}/{name} reaches {reached:?}: {again}");
        names.push(name);
    }
    for outcome in outcomes {
        assert!(names.contains(&outcome), "{target} has no seed {outcome}: {again}");
    }
}

/// The fields of a tally, each with whether it is greater than 0, as `Debug` shows them.
fn fields<T: Debug>(tally: &T) -> Vec<(String, bool)> {
    let text = format!("{tally:?}");
    let inside = text.split_once(" { ").map_or("", |(_, inside)| inside.trim_end_matches(" }"));
    let fields = inside.split(", ").filter_map(|field| field.split_once(": "));
    fields.map(|(name, count)| (name.to_owned(), count != "0")).collect()
}

/// Writes the shortest beginning of the first of many inputs that leads to an outcome.
fn write(target: &str, outcome: &str, run: &mut impl FnMut(&[u8]) -> Vec<(String, bool)>) {
    let mut random = Random::new(0);
    let mut reaches = |input: &[u8]| run(input).contains(&(outcome.to_owned(), true));
    for _ in 0..100_000 {
        let mut input = random.bytes(96 * 8);
        if !reaches(&input) {
            continue;
        }
        while input.len() > SHORTEST && reaches(&input[..input.len() - 1]) {
            input.pop();
        }
        fs::create_dir_all(folder(target)).expect("a folder");
        fs::write(folder(target).join(outcome), input).expect("a seed");
        return;
    }
    panic!("{target}: no input leads to {outcome}");
}
