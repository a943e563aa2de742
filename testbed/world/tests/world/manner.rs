//! How a client of a world behaves: request sizes, mix and rate.

use crate::random::Random;

/// The longest request of all, sectors: 4 MiB, which the server splits into pieces.
pub(crate) const LARGEST: usize = 8192;

/// The behaviour of one client, drawn once.
#[derive(Clone, Debug)]
pub(crate) struct Manner {
    /// Requests in flight at a time.
    pub(crate) depth: usize,
    /// Reads, of 100 requests.
    pub(crate) reads: u64,
    /// Longest request, sectors.
    pub(crate) longest: usize,
    /// Requests of up to [`LARGEST`] sectors, of 1,000.
    pub(crate) large: u64,
    /// Flushes, of 100 requests.
    pub(crate) flushes: u64,
    /// Microseconds between two requests, at most.
    pub(crate) pause_us: u64,
    /// The part of the volume that it uses: this many sectors at most, at the beginning or at the end.
    pub(crate) reach: usize,
    pub(crate) at_end: bool,
}

impl Manner {
    pub(crate) fn draw(random: &mut Random, sectors: usize) -> Manner {
        Manner {
            depth: random.pick(&[1, 1, 2, 4, 16]),
            reads: random.pick(&[10, 40, 40, 80]),
            longest: random.pick(&[8, 8, 32, 128]),
            large: random.pick(&[0, 0, 0, 10]),
            flushes: random.pick(&[1, 5, 15]),
            pause_us: random.pick(&[0, 50, 1000, 20_000]),
            reach: random.pick(&[64, 512, sectors]).min(sectors),
            at_end: random.chance(25),
        }
    }

    /// Uses a small part of the volume, mostly its end.
    pub(crate) fn at_end(random: &mut Random, sectors: usize) -> Manner {
        let at_end = random.chance(70);
        Manner { at_end, reach: 64.min(sectors), ..Manner::draw(random, sectors) }
    }

    /// Reads only, and seldom.
    pub(crate) fn reader(random: &mut Random, sectors: usize) -> Manner {
        let (reads, depth, flushes) = (100, 1, 0);
        Manner { reads, depth, flushes, pause_us: 200_000, ..Manner::draw(random, sectors) }
    }

    /// Sends few requests at a time, so that many operations happen between them.
    pub(crate) fn slow(random: &mut Random, sectors: usize) -> Manner {
        let (depth, pause_us) = (random.pick(&[1, 2, 4]), random.pick(&[2_000, 20_000]));
        Manner { depth, pause_us, ..Manner::draw(random, sectors) }
    }

    /// Sends its requests without a pause.
    pub(crate) fn brief(sectors: usize) -> Manner {
        Manner { depth: 2, reads: 30, longest: 16, flushes: 5, reach: sectors, ..Manner::told() }
    }

    /// Sends only what it is told to.
    pub(crate) fn told() -> Manner {
        Manner {
            depth: 0,
            reads: 100,
            longest: 8,
            large: 0,
            flushes: 0,
            pause_us: 0,
            reach: 8,
            at_end: false,
        }
    }

    /// Also uses the whole volume with large requests.
    pub(crate) fn with_large(self, sectors: usize) -> Manner {
        Manner { large: 50, reach: sectors, at_end: false, ..self }
    }

    /// Has more in flight than there is memory for.
    pub(crate) fn greedy(random: &mut Random, sectors: usize) -> Manner {
        Manner {
            depth: 48,
            longest: 512,
            large: 0,
            pause_us: 0,
            reach: sectors,
            ..Manner::draw(random, sectors)
        }
    }

    /// Sends one or two requests at a time, with long pauses.
    pub(crate) fn modest(random: &mut Random, sectors: usize) -> Manner {
        Manner { depth: random.pick(&[1, 2]), pause_us: 200_000, ..Manner::draw(random, sectors) }
    }
}
