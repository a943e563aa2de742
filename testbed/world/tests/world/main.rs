//! The whole daemon simulated from one seed.
//!
//! `EBBD_WORLD_SEED=n` runs one seed and tells what happened; `EBBD_WORLD_SECONDS=n` goes on for so long
//! (`make world SECONDS=7200`). Why it is made so: `docs/adr/0007-world.md`.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a test: what is unexpected ends it"
)]

mod client;
mod daemon;
mod oracle;
mod random;
mod trace;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use world::{Outcome, World};

/// Requests of a world.
const REQUESTS: u64 = 600;

fn run(seed: u64, words: bool) -> Result<Outcome, String> {
    let before = descriptors();
    let mut text = String::new();
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(seed, words);
        let result = world.run(REQUESTS);
        text = world.trace.text();
        result
    }));
    let result = result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(format!("panic: {}", text.unwrap_or_default()))
    });
    let after = descriptors();
    let result = result.and_then(|outcome| match after == before {
        true => Ok(outcome),
        false => Err(format!("{before} descriptors before, {after} after")),
    });
    result.map_err(|error| format!("seed {seed}: {error}\n{text}"))
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

#[test]
fn worlds_keep_their_promises() {
    if let Some(seed) = number("EBBD_WORLD_SEED") {
        return match run(seed, true) {
            Ok(outcome) => println!("{outcome:?}"),
            Err(error) => panic!("{error}"),
        };
    }
    let begun = Instant::now();
    let seconds = number("EBBD_WORLD_SECONDS").unwrap_or(0);
    let count = number("EBBD_WORLD_SEEDS").unwrap_or(200);
    let from = number("EBBD_WORLD_FROM").unwrap_or(0);
    let (mut total, mut seeds, mut failed) = (Outcome::default(), 0, 0);
    for seed in from.. {
        if seeds >= count && begun.elapsed() >= Duration::from_secs(seconds) {
            break;
        }
        seeds += 1;
        match run(seed, false) {
            Ok(outcome) => {
                total.requests += outcome.requests;
                total.succeeded += outcome.succeeded;
                total.checked += outcome.checked;
                total.lives += outcome.lives;
                total.simulated += outcome.simulated;
                total.slowest = total.slowest.max(outcome.slowest);
            }
            Err(error) => {
                println!("{error}");
                failed += 1;
            }
        }
    }
    println!("{seeds} seeds in {:?}: {total:?}", begun.elapsed());
    assert_eq!(failed, 0, "worlds that failed; EBBD_WORLD_SEED=… tells of one");
}
