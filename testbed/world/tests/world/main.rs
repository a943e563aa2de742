//! The whole daemon simulated from one seed.
//!
//! `EBBD_WORLD_SEED=n` runs one seed and prints its result, and its last steps if it fails;
//! `EBBD_WORLD_LOG=1` adds every step and the daemon's log. `EBBD_WORLD_SECONDS=n` runs seeds for
//! that long (`make world SECONDS=7200`), starting at `EBBD_WORLD_FROM`; with `EBBD_WORLD_EVERY=40`
//! each 40th, which has one theme (`world/theme.rs`). The reasons are in
//! `docs/adr/0007-world.md`.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a test: anything unexpected ends it"
)]

mod broker;
mod client;
mod daemon;
mod disks;
mod folder;
mod frontends;
mod guest;
mod kvm;
mod manner;
mod oracle;
mod random;
mod remote;
mod state;
mod trace;
mod world;

use std::io::{BufRead as _, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use world::{Outcome, World};

/// Requests that a world completes before it is checked.
const REQUESTS: u64 = 600;
/// Worlds in a run by default.
const SEEDS: u64 = 2_000;
/// A run stops after this many failed worlds.
const FAILURES: u64 = 20;

fn run(seed: u64, words: bool) -> Result<Outcome, String> {
    let before = descriptors();
    let mut text = String::new();
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(seed, words);
        let result = catch_unwind(AssertUnwindSafe(|| world.run(REQUESTS)));
        text = world.trace.text();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
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

/// Every `parts`th world, starting with `part`. A world that fails prints its message, and the next one runs.
fn some_worlds(part: u64, parts: u64) {
    let begun = Instant::now();
    let seconds = Duration::from_secs(number("EBBD_WORLD_SECONDS").unwrap_or(0));
    let seeds = seeded::scaled(SEEDS);
    let from = number("EBBD_WORLD_FROM").unwrap_or(0);
    let every = number("EBBD_WORLD_EVERY").unwrap_or(1);
    let (mut total, mut done, mut failed) = (Outcome::default(), 0, 0);
    for nth in (part..).step_by(usize::try_from(parts).unwrap()) {
        let over = if seconds.is_zero() { nth >= seeds } else { begun.elapsed() >= seconds };
        if over || failed >= FAILURES {
            break;
        }
        done += 1;
        let seed = from + nth * every;
        match run(seed, false) {
            Ok(outcome) => total.add(&outcome),
            Err(_) => {
                // Run again, with the trace as text.
                let error = run(seed, true).err();
                let passed = || format!("seed {seed}: failed once and passed when repeated");
                println!("{}", error.unwrap_or_else(passed));
                failed += 1;
            }
        }
    }
    println!(
        "TOTAL {done} {failed} {} {} {} {} {} {} {} {} {} {} {} {} {}",
        total.requests,
        total.succeeded,
        total.checked,
        total.lives,
        total.simulated.as_millis(),
        total.slowest.as_millis(),
        total.guests,
        total.handed_over,
        total.deprived,
        total.kvm_guests,
        total.kvm_handed_over,
        total.kvm_deprived,
        total.continued
    );
}

#[test]
fn worlds_keep_their_promises() {
    if let Some(seed) = number("EBBD_WORLD_SEED") {
        if std::env::var_os("EBBD_WORLD_LOG").is_some() {
            tracing_subscriber::fmt().without_time().with_writer(std::io::stdout).init();
        }
        return match run(seed, true) {
            Ok(outcome) => println!("{outcome:?}"),
            Err(error) => panic!("{error}"),
        };
    }
    // One process per part: descriptors are counted, and threads would share them.
    let parts = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    if let Some(part) = number("EBBD_WORLD_PART") {
        return some_worlds(part, parts);
    }
    let begun = Instant::now();
    let children: Vec<_> = (0..parts)
        .map(|part| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "worlds_keep_their_promises", "--nocapture"])
                .env("EBBD_WORLD_PART", part.to_string())
                .env("RUST_BACKTRACE", "0")
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut sums = [0; 15];
    for mut child in children {
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut told = false;
        for line in lines.by_ref().map_while(Result::ok) {
            match line.strip_prefix("TOTAL ") {
                Some(numbers) => {
                    told = true;
                    for (sum, number) in sums.iter_mut().zip(numbers.split(' ')) {
                        *sum += number.parse::<u64>().unwrap();
                    }
                }
                None => println!("{line}"),
            }
        }
        assert!(
            child.wait().unwrap().success() && told,
            "a process ended before it had run its worlds"
        );
    }
    let [worlds, failed, requests, succeeded, sectors, lives, simulated, _, rest @ ..] = sums;
    println!(
        "{worlds} worlds in {:?}: {requests} requests, {succeeded} succeeded, {sectors} sectors compared, \
         {lives} lives, {} s simulated, {} connections continued",
        begun.elapsed(),
        simulated / 1000,
        rest.last().copied().unwrap_or(0)
    );
    for (kind, sums) in ["Xen", "KVM"].iter().zip(rest.chunks(3)) {
        let &[guests, handed_over, deprived] = sums else { continue };
        println!(
            "{guests} requests of {kind} guests; when a daemon ended, guests had \
             requests in flight {handed_over} times, and unflushed data in its memory {deprived} times"
        );
    }
    assert_eq!(failed, 0, "worlds failed: repeat one with EBBD_WORLD_SEED=…");
    let many = worlds >= 1_000;
    assert!(
        !many || rest.iter().all(|sum| *sum > 0),
        "guests completed no request or never met the end of a daemon, or no connection was continued"
    );
    assert!(
        requests >= worlds * REQUESTS * 9 / 10,
        "worlds completed fewer than nine tenths of their requests"
    );
}

#[test]
fn a_seed_is_the_same_world_each_time() {
    if number("EBBD_WORLD_PART").is_none() {
        // In a process of its own, so that no other test opens descriptors meanwhile.
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_seed_is_the_same_world_each_time", "--nocapture"])
            .env("EBBD_WORLD_PART", "0")
            .status();
        return assert!(status.unwrap().success(), "a seed differs between two runs: see above");
    }
    // The second ones have KVM guests.
    for seed in (0..50).map(|nth| nth * 61).chain((0..10).map(|nth| 10 + nth * 70)) {
        let outcome = run(seed, false);
        assert_eq!(run(seed, false), outcome, "seed {seed}");
    }
}
