//! Compares eviction policies on seeded traces: hit ratio, behaviour when the cache shrinks or loses pages
//! to the kernel, and cost per hit and miss. The figures of ADR 0002 come from here.
//!
//! `policy-bench [hits|scan|elastic|idle|tuning|time]`, all of them without an argument; `policy-bench cost POLICY hit|miss N`
//! does N accesses of one kind, to be counted by `valgrind --tool=callgrind`.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench: figures go to stdout")]
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small traces")]

mod clockpro;
mod sim;
mod simple;
mod trace;

use std::time::Instant;

use ebb_cache::policy::{EvictionPolicy, S3Fifo};

use crate::clockpro::ClockPro;
use crate::sim::{Count, Sim};
use crate::simple::{Clock, Lru, Sieve};
use crate::trace::{Access, PAGES, Random, Zipf};

const SEED: u64 = 20;
const LENGTH: usize = 1_500_000;

/// Does `$call::<Policy>($args)` for each policy and gives name and result.
macro_rules! each {
    ($call:ident($($arg:expr),*)) => {
        [
            ("lru", $call::<Lru>($($arg),*)),
            ("clock", $call::<Clock<1>>($($arg),*)),
            ("clock-3", $call::<Clock<3>>($($arg),*)),
            ("sieve", $call::<Sieve>($($arg),*)),
            ("clock-pro", $call::<ClockPro>($($arg),*)),
            ("s3-fifo", $call::<S3Fifo<10, 0, 100>>($($arg),*)),
            ("s3-window", $call::<S3Fifo<10, 50, 100>>($($arg),*)),
        ]
    };
}

/// Parameters of the chosen policy, each against the default: mean hit ratio over all traces.
fn tuning() {
    println!("\nmean hit % (parameters)     1/20    1/10     1/3");
    let row = |name: &str, run: &dyn Fn(&[Access], u32) -> f64| {
        let mean = [20, 10, 3].map(|part| {
            let traces = trace::all(PAGES / part, LENGTH / 3, SEED);
            traces.iter().map(|(_, trace)| run(trace, PAGES / part)).sum::<f64>()
                / traces.len() as f64
        });
        println!("{name:<24} {:7.2} {:7.2} {:7.2}", mean[0], mean[1], mean[2]);
    };
    row("default", &|trace, cache| hit_ratio::<S3Fifo>(trace, cache, false));
    row("small 5 %", &|trace, cache| hit_ratio::<S3Fifo<5>>(trace, cache, false));
    row("small 20 %", &|trace, cache| hit_ratio::<S3Fifo<20>>(trace, cache, false));
    row("window 0", &|trace, cache| hit_ratio::<S3Fifo<10, 0>>(trace, cache, false));
    row("window 25 %", &|trace, cache| hit_ratio::<S3Fifo<10, 25>>(trace, cache, false));
    row("window 75 %", &|trace, cache| hit_ratio::<S3Fifo<10, 75>>(trace, cache, false));
    row("ghosts 50 %", &|trace, cache| hit_ratio::<S3Fifo<10, 50, 50>>(trace, cache, false));
    row("ghosts 200 %", &|trace, cache| hit_ratio::<S3Fifo<10, 50, 200>>(trace, cache, false));
}

/// Hit ratio of the last three quarters of a trace.
fn hit_ratio<P: EvictionPolicy>(trace: &[Access], cache: u32, hints: bool) -> f64 {
    let mut sim = Sim::<P>::new(cache, hints);
    let (warm, rest) = trace.split_at(trace.len() / 4);
    sim.run(warm);
    sim.run(rest).ratio()
}

/// One line: a name and a figure of each policy.
fn row(name: &str, figures: &[(&str, f64)]) {
    let figures: Vec<String> = figures.iter().map(|(_, figure)| format!("{figure:9.2}")).collect();
    println!("{name:<22} {}", figures.join(" "));
}

fn heading(what: &str, figures: &[(&str, f64)]) {
    let names: Vec<String> = figures.iter().map(|(name, _)| format!("{name:>9}")).collect();
    println!("\n{what:<22} {}", names.join(" "));
}

fn hits() {
    for part in [20, 10, 3] {
        let cache = PAGES / part;
        let mut sums: Vec<(&str, f64)> = Vec::new();
        let traces = trace::all(cache, LENGTH, SEED);
        for (name, trace) in &traces {
            let figures = each!(hit_ratio(trace, cache, false));
            if sums.is_empty() {
                heading(&format!("hit % at 1/{part}"), &figures);
                sums = figures.map(|(name, _)| (name, 0.0)).to_vec();
            }
            row(name, &figures);
            for (sum, figure) in sums.iter_mut().zip(&figures) {
                sum.1 += figure.1 / traces.len() as f64;
            }
            if trace.iter().any(|access| access.once) {
                row(&format!("{name} (hinted)"), &each!(hit_ratio(trace, cache, true)));
            }
        }
        row("mean without hints", &sums);
    }
}

/// Points of hit ratio that a pass over 10 x the cache costs Zipf 0.99: beside it, and after it for as many accesses
/// as the cache has pages.
fn scan_cost<P: EvictionPolicy>(cache: u32, hints: bool, beside: bool) -> f64 {
    let (zipf, mut random) = (Zipf::new(PAGES, 0.99, SEED), Random(SEED + 1));
    let mut hot = |n: u32| -> Vec<Access> {
        let access = |page| Access { page, once: false, counts: true };
        (0..n).map(|_| access(zipf.next(&mut random))).collect()
    };
    let (warm, during, after) = (hot(1 << 20), hot(10 * cache), hot(cache));
    let mut calm = Sim::<P>::new(cache, hints);
    calm.run(&warm);
    let mut sim = Sim::<P>::new(cache, hints);
    sim.run(&warm);
    let (mut alone, mut seen) = (Count::default(), Count::default());
    if beside {
        alone = calm.run(&during);
    }
    for (page, access) in (PAGES..).zip(&during) {
        sim.access(Access { page, once: true, counts: false });
        if beside {
            seen.all += 1;
            seen.hits += u32::from(sim.access(*access));
        }
    }
    if !beside {
        (alone, seen) = (calm.run(&after), sim.run(&after));
    }
    alone.ratio() - seen.ratio()
}

fn scan() {
    for (part, first) in [(20, true), (10, false), (3, false)] {
        for (beside, hints) in [(true, false), (true, true), (false, false), (false, true)] {
            let figures = each!(scan_cost(PAGES / part, hints, beside));
            if first && beside && !hints {
                heading("points lost to a scan", &figures);
            }
            let when = if beside { "beside" } else { "after" };
            let hinted = if hints { "hinted" } else { "" };
            row(&format!("1/{part} {when} {hinted}"), &figures);
        }
    }
}

/// The effect of an event on the hit ratio.
#[derive(Clone, Copy)]
enum Event {
    /// Hit ratio of the next `cache` accesses after the limit was halved.
    Halved,
    /// The same once it is warm at half.
    HalvedWarm,
    /// After a long time at half and back: accesses until 90 % of the hit ratio, in sizes of the cache.
    Regrown,
    /// Hit ratio of the next `cache` accesses after the kernel discarded the coldest half.
    TookColdest,
    /// The same after it discarded a random half.
    TookRandom,
    /// Share of hits, of the next `cache` accesses, that are on the half called the coldest.
    Coldest,
}

fn elastic<P: EvictionPolicy>(trace: &[Access], cache: u32, event: Event) -> f64 {
    let mut sim = Sim::<P>::new(cache, true);
    let step = cache as usize;
    let (warm, rest) = trace.split_at(trace.len() / 3);
    sim.run(&warm[..warm.len() - 4 * step]);
    let before = sim.run(&warm[warm.len() - 4 * step..]).ratio();
    match event {
        Event::Halved => {
            sim.resize(cache / 2);
            sim.run(&rest[..step]).ratio()
        }
        Event::HalvedWarm => {
            sim.resize(cache / 2);
            sim.run(&rest[..8 * step]);
            sim.run(&rest[8 * step..16 * step]).ratio()
        }
        Event::Regrown => {
            sim.resize(cache / 2);
            sim.run(&rest[..4 * step]);
            sim.resize(cache);
            let pieces = rest[4 * step..].chunks(step / 20);
            let mut ratios = pieces.map(|piece| sim.run(piece).ratio());
            ratios.position(|ratio| ratio >= 0.95 * before).unwrap() as f64 / 20.0
        }
        Event::TookColdest => {
            sim.lose_coldest();
            sim.run(&rest[..step]).ratio()
        }
        Event::TookRandom => {
            sim.lose_random(SEED);
            sim.run(&rest[..step]).ratio()
        }
        Event::Coldest => {
            let mut lent = vec![false; 1 << 22];
            for page in sim.coldest_half() {
                lent[page as usize] = true;
            }
            let (mut hits, mut on_lent) = (0, 0);
            for access in &rest[..step] {
                if sim.access(*access) {
                    hits += 1;
                    on_lent += u32::from(lent[access.page as usize]);
                }
                // Once it is read again, it is no longer among the coldest.
                lent[access.page as usize] = false;
            }
            100.0 * f64::from(on_lent) / f64::from(hits)
        }
    }
}

fn elasticity() {
    for part in [10, 3] {
        let cache = PAGES / part;
        let traces = trace::all(cache, LENGTH, SEED);
        for (name, trace) in traces.iter().filter(|(name, _)| {
            ["zipf-0.99", "streams+random", "correlated", "block-mix"].contains(name)
        }) {
            for (label, event) in [
                ("halved", Event::Halved),
                ("halved, warm", Event::HalvedWarm),
                ("regrown after", Event::Regrown),
                ("kernel took coldest", Event::TookColdest),
                ("kernel took any", Event::TookRandom),
                ("% hits on lent half", Event::Coldest),
            ] {
                let figures = each!(elastic(trace, cache, event));
                if label == "halved" {
                    heading(&format!("{name} 1/{part}"), &figures);
                }
                row(label, &figures);
            }
        }
    }
}

/// A cache that was never full is halved, long after the hot pages changed: hit ratio of the next accesses.
/// `turns`: how often all slots were aged in between.
fn halved_from_ease<P: EvictionPolicy>(turns: usize) -> f64 {
    let (zipf, mut random) = (Zipf::new(PAGES, 0.99, SEED), Random(SEED + 1));
    let mut sim = Sim::<P>::new(PAGES, false);
    let mut phase = |shift: u32, n: usize| -> Vec<Access> {
        let page = |page| Access { page: (page + shift) % PAGES, once: false, counts: true };
        (0..n).map(|_| page(zipf.next(&mut random))).collect()
    };
    let (old, new, then) =
        (phase(0, 1 << 20), phase(7919, 1 << 20), phase(7919, PAGES as usize / 4));
    sim.run(&old);
    for piece in new.chunks(new.len() / 64) {
        sim.run(piece);
        sim.age(PAGES * turns as u32 / 64);
    }
    sim.resize(PAGES / 4);
    sim.run(&then).ratio()
}

fn idle() {
    let figures = each!(halved_from_ease(0));
    heading("to 1/4 from ease", &figures);
    row("not aged", &figures);
    for turns in [1, 4, 16] {
        row(&format!("aged {turns} times"), &each!(halved_from_ease(turns)));
    }
}

/// Does `n` hits on a warm cache, or else `n` misses with an eviction each.
fn accesses<P: EvictionPolicy>(hits: bool, n: u32) -> f64 {
    let cache = PAGES / 10;
    let mut sim = Sim::<P>::new(cache, false);
    let access = |page| Access { page, once: false, counts: true };
    let zipf = Zipf::new(PAGES, 0.9, SEED);
    let mut random = Random(SEED);
    for _ in 0..8 * cache {
        sim.access(access(zipf.next(&mut random)));
    }
    // Pages generated beforehand: only the cache is measured.
    let mut pages: Vec<u32> = Vec::new();
    if hits {
        sim.resize(cache);
        let mut resident = sim.coldest_half();
        resident.truncate(4096);
        pages.extend((0..n).map(|at| resident[(at as usize * 17) % resident.len()]));
    } else {
        // A tenth is read again soon.
        for at in 0..n {
            let back = pages.len().checked_sub(cache as usize).filter(|_| at % 10 == 0);
            pages.push(back.map_or(PAGES + at, |back| pages[back]));
        }
        let last = PAGES + n;
        sim.access(access(last));
    }
    let start = Instant::now();
    for page in &pages {
        sim.access(access(*page));
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(n.max(1))
}

fn time() {
    for (what, hits) in [("ns per hit", true), ("ns per miss", false)] {
        let mut rounds = Vec::new();
        for _ in 0..7 {
            rounds.push(each!(accesses(hits, 1 << 19)));
        }
        let mut figures = rounds[0];
        for (at, figure) in figures.iter_mut().enumerate() {
            let mut values: Vec<f64> = rounds.iter().map(|round| round[at].1).collect();
            values.sort_by(f64::total_cmp);
            figure.1 = values[values.len() / 2];
        }
        if hits {
            heading("cost with the lookup", &figures);
        }
        row(what, &figures);
    }
}

fn cost(policy: &str, what: &str, n: u32) {
    let hits = what == "hit";
    match policy {
        "lru" => accesses::<Lru>(hits, n),
        "clock" => accesses::<Clock<1>>(hits, n),
        "sieve" => accesses::<Sieve>(hits, n),
        "clock-pro" => accesses::<ClockPro>(hits, n),
        "s3-fifo" => accesses::<S3Fifo<10, 0, 100>>(hits, n),
        _ => accesses::<S3Fifo>(hits, n),
    };
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["cost", policy, what, n] => cost(policy, what, n.parse().unwrap()),
        ["hits"] => hits(),
        ["scan"] => scan(),
        ["elastic"] => elasticity(),
        ["time"] => time(),
        ["tuning"] => tuning(),
        ["idle"] => idle(),
        _ => {
            hits();
            scan();
            elasticity();
            idle();
            tuning();
            time();
        }
    }
}
