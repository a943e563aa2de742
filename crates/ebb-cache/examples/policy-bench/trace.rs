//! Seeded traces: what the clients of a volume might read, as 4 KiB page numbers.

use std::f64::consts::PI;

/// One access: the page; whether the cache would know it as one-pass data; whether it counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) page: u32,
    pub(crate) once: bool,
    pub(crate) counts: bool,
}

/// Pages of the usual footprint: 256 MiB.
pub(crate) const PAGES: u32 = 1 << 16;

/// splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, n: u32) -> u32 {
        (((self.next() >> 32) * u64::from(n)) >> 32) as u32
    }

    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }
}

/// Zipf's law over `n` pages in random order.
pub(crate) struct Zipf {
    sums: Vec<f64>,
    pages: Vec<u32>,
}

impl Zipf {
    pub(crate) fn new(n: u32, exponent: f64, seed: u64) -> Zipf {
        let mut sum = 0.0;
        let sums = (1..=n).map(|rank| {
            sum += f64::from(rank).powf(-exponent);
            sum
        });
        let sums = sums.collect();
        let mut pages: Vec<u32> = (0..n).collect();
        let mut random = Random(seed);
        for at in (1..n).rev() {
            pages.swap(at as usize, random.below(at + 1) as usize);
        }
        Zipf { sums, pages }
    }

    pub(crate) fn next(&self, random: &mut Random) -> u32 {
        let at = random.unit() * self.sums.last().unwrap();
        self.pages[self.sums.partition_point(|sum| *sum < at).min(self.pages.len() - 1)]
    }
}

fn counted(page: u32) -> Access {
    Access { page, once: false, counts: true }
}

fn uncounted(page: u32, once: bool) -> Access {
    Access { page, once, counts: false }
}

/// All traces by name, `length` accesses each (the scan's is longer). `cache` in pages: some depend on it.
pub(crate) fn all(cache: u32, length: usize, seed: u64) -> Vec<(&'static str, Vec<Access>)> {
    let zipf = |exponent| {
        let (zipf, mut random) = (Zipf::new(PAGES, exponent, seed), Random(seed + 1));
        (0..length).map(|_| counted(zipf.next(&mut random))).collect::<Vec<_>>()
    };
    vec![
        ("zipf-0.6", zipf(0.6)),
        ("zipf-0.9", zipf(0.9)),
        ("zipf-0.99", zipf(0.99)),
        ("zipf-1.1", zipf(1.1)),
        ("zipf+scans", with_scans(cache, length, seed)),
        ("loop-1.2x", looping(cache, length, seed)),
        ("shifting", shifting(length, seed)),
        ("streams+random", streams(length, seed)),
        ("noisy-neighbour", neighbours(length, seed)),
        ("correlated", correlated(length, seed)),
        ("journal", journal(length, seed)),
        ("block-mix", block_mix(length, seed)),
    ]
}

/// Zipf 0.99; every fifth of the trace a pass over 10 x the cache, 1:1 with it. Hot accesses count.
pub(crate) fn with_scans(cache: u32, length: usize, seed: u64) -> Vec<Access> {
    let (zipf, mut random) = (Zipf::new(PAGES, 0.99, seed), Random(seed + 1));
    let (mut trace, mut scan) = (Vec::new(), PAGES);
    for at in 0..length {
        trace.push(counted(zipf.next(&mut random)));
        if at % (length / 5) < 10 * cache as usize {
            trace.push(uncounted(scan, true));
            scan += 1;
        }
    }
    trace
}

/// A loop over 1.2 x the cache, with a fifth of Zipf 0.99 accesses elsewhere.
fn looping(cache: u32, length: usize, seed: u64) -> Vec<Access> {
    let (zipf, mut random) = (Zipf::new(PAGES, 0.99, seed), Random(seed + 1));
    let (mut at, around) = (0, cache * 12 / 10);
    let mut next = || {
        if random.chance(0.2) {
            return zipf.next(&mut random);
        }
        at = (at + 1) % around;
        PAGES + at
    };
    (0..length).map(|_| counted(next())).collect()
}

/// Zipf 0.99 whose hot pages are others after each eighth of the trace.
fn shifting(length: usize, seed: u64) -> Vec<Access> {
    let (zipf, mut random) = (Zipf::new(PAGES, 0.99, seed), Random(seed + 1));
    let shift = |at: usize| (at / (length / 8)) as u32 * 7919;
    (0..length).map(|at| counted((zipf.next(&mut random) + shift(at)) % PAGES)).collect()
}

/// Half of it four streams of pages read once; half Zipf 0.9, which counts.
fn streams(length: usize, seed: u64) -> Vec<Access> {
    let (zipf, mut random) = (Zipf::new(PAGES, 0.9, seed), Random(seed + 1));
    let mut at = [0, 1, 2, 3].map(|stream| PAGES + stream * (1 << 19));
    let mut next = || {
        if random.chance(0.5) {
            return counted(zipf.next(&mut random));
        }
        let stream = &mut at[random.below(4) as usize];
        *stream += 1;
        uncounted(*stream, true)
    };
    (0..length).map(|_| next()).collect()
}

/// A fifth is a quiet volume's Zipf 0.99 over a quarter of the pages, which counts; the rest a noisy one's,
/// evenly over four times the pages.
fn neighbours(length: usize, seed: u64) -> Vec<Access> {
    let (zipf, mut random) = (Zipf::new(PAGES / 4, 0.99, seed), Random(seed + 1));
    let mut next = || {
        if random.chance(0.2) {
            return counted(zipf.next(&mut random));
        }
        uncounted(PAGES + random.below(4 * PAGES), false)
    };
    (0..length).map(|_| next()).collect()
}

/// Adds accesses to `trace`, each page again up to three times within the next 64.
fn again(
    trace: &mut Vec<Access>,
    length: usize,
    random: &mut Random,
    mut next: impl FnMut(&mut Random) -> u32,
) {
    let mut ahead: Vec<Option<u32>> = vec![None; 64];
    for at in 0..length {
        if let Some(page) = ahead[at % 64].take() {
            trace.push(counted(page));
            continue;
        }
        let page = next(random);
        trace.push(counted(page));
        if random.chance(0.6) {
            for _ in 0..=random.below(3) {
                let when = (at + 1 + random.below(62) as usize) % 64;
                ahead[when].get_or_insert(page);
            }
        }
    }
}

/// Zipf 0.8, most pages again one to three times within the next 64 accesses.
fn correlated(length: usize, seed: u64) -> Vec<Access> {
    let (zipf, mut random) = (Zipf::new(PAGES, 0.8, seed), Random(seed + 1));
    let mut trace = Vec::new();
    again(&mut trace, length, &mut random, |random| zipf.next(random));
    trace
}

/// A file system with a journal: 40 % a circular log of an eighth of the pages, its tail rewritten once or
/// twice; 15 % metadata, Zipf 1.1 over 1/32 of the pages; the rest data, Zipf 0.8.
fn journal(length: usize, seed: u64) -> Vec<Access> {
    let (data, meta) = (Zipf::new(PAGES, 0.8, seed), Zipf::new(PAGES / 32, 1.1, seed + 2));
    let (mut random, mut log, mut trace) = (Random(seed + 1), 0, Vec::new());
    while trace.len() < length {
        let what = random.unit();
        if what < 0.2 {
            log = (log + 1) % (PAGES / 8);
            for _ in 0..=random.below(3) {
                trace.push(counted(2 * PAGES + log));
            }
        } else if what < 0.35 {
            trace.push(counted(PAGES + meta.next(&mut random)));
        } else {
            trace.push(counted(data.next(&mut random)));
        }
    }
    trace
}

/// A busy guest: correlated re-reads over Zipf 0.9 data, a tenth of runs of 16 pages, a slow change of the
/// hot pages, and streams that are read once.
pub(crate) fn block_mix(length: usize, seed: u64) -> Vec<Access> {
    let zipf = Zipf::new(PAGES, 0.9, seed);
    let (mut random, mut run, mut stream, mut asked) = (Random(seed + 1), 0..0, 4 * PAGES, 0);
    let mut trace = Vec::new();
    again(&mut trace, length, &mut random, |random| {
        asked += 1;
        if let Some(page) = run.next() {
            return page;
        }
        if random.chance(0.25) {
            stream += 1;
            return stream;
        }
        let swing = (f64::from(asked) / 100_000.0 * PI).sin() * 2000.0 + 2000.0;
        let page = zipf.next(random) + swing as u32;
        if random.chance(0.1) {
            run = page + 1..page + 16;
        }
        page
    });
    trace
}
