//! Rings of points in few bytes: a value is a number of 16 bits, and a stretch without requests costs a few bytes.
//!
//! # Invariants
//! - A ring has at most [`CHUNKS`] chunks of [`CHUNK`] points. A chunk with requests has a fixed size, other chunks
//!   have no memory of their own.
//! - A value is off by at most 0.05 %, and whole numbers of up to three digits are exact.

use std::collections::VecDeque;

use super::heat::HeatColumn;

/// Points that are shown.
pub(super) const POINTS: u64 = 300;
/// Points of a chunk.
pub(super) const CHUNK: u64 = 30;
/// The most chunks of a ring: one of them is partly filled, and one partly old.
pub(super) const CHUNKS: u64 = POINTS / CHUNK + 1;

/// A value that is not known.
const UNKNOWN: u16 = u16::MAX;
/// Multiples of the unit that are stored as they are.
const EXACT: f64 = 4096.0;
/// Codes for each doubling of larger values: 40 doublings fit.
const PER_DOUBLING: f64 = 1535.0;

/// The series of a point, in order. A volume has the first [`VOLUME_SERIES`] of them.
pub(super) const SERIES: [&str; 14] = [
    "read_iops",
    "write_iops",
    "read_bytes",
    "write_bytes",
    "p50_seconds",
    "p99_seconds",
    "dirty_bytes",
    "errors",
    "clients",
    "hit_ratio",
    "cached_bytes",
    "pressure",
    "lent_bytes",
    "wired_bytes",
];
/// The number of series of a volume.
pub(super) const VOLUME_SERIES: usize = 11;

/// Where a series is in a point.
pub(super) mod at {
    pub(in super::super) const READ_IOPS: usize = 0;
    pub(in super::super) const WRITE_IOPS: usize = 1;
    pub(in super::super) const READ_BYTES: usize = 2;
    pub(in super::super) const WRITE_BYTES: usize = 3;
    pub(in super::super) const P50: usize = 4;
    pub(in super::super) const P99: usize = 5;
    pub(in super::super) const DIRTY: usize = 6;
    pub(in super::super) const ERRORS: usize = 7;
    pub(in super::super) const CLIENTS: usize = 8;
    pub(in super::super) const HIT_RATIO: usize = 9;
    pub(in super::super) const CACHED: usize = 10;
    pub(in super::super) const PRESSURE: usize = 11;
    pub(in super::super) const LENT: usize = 12;
    pub(in super::super) const IN_USE: usize = 13;
}

/// A point; `None`: not known.
pub(super) type Point = [Option<f64>; SERIES.len()];

/// The smallest step of a series.
fn unit(series: usize) -> f64 {
    match series {
        at::P50 | at::P99 => 1e-9,
        at::READ_BYTES | at::WRITE_BYTES | at::DIRTY | at::CACHED | at::LENT | at::IN_USE => 1.0,
        _ => 1e-3,
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to the range of codes"
)]
fn encode(series: usize, value: Option<f64>) -> u16 {
    let Some(value) = value.filter(|value| value.is_finite()) else { return UNKNOWN };
    let units = (value / unit(series)).max(0.0);
    let code = match units < EXACT {
        true => units.round(),
        false => (EXACT + (units / EXACT).log2() * PER_DOUBLING).round(),
    };
    code.clamp(0.0, f64::from(UNKNOWN - 1)) as u16
}

/// The value of a code: of all that have it, the one with the fewest digits.
fn decode(series: usize, code: u16) -> Option<f64> {
    if code == UNKNOWN {
        return None;
    }
    if code == 0 {
        return Some(0.0);
    }
    let number = f64::from(code);
    let units = match number < EXACT {
        true => number,
        false => EXACT * ((number - EXACT) / PER_DOUBLING).exp2(),
    };
    let value = units * unit(series);
    let mut shorter = (1u8..5).map(|digits| rounded(value, digits));
    Some(shorter.find(|short| encode(series, Some(*short)) == code).unwrap_or(value))
}

/// A value rounded to four significant digits.
pub(super) fn four_digits(value: f64) -> f64 {
    rounded(value, 4)
}

/// A value rounded to that many significant digits.
fn rounded(value: f64, digits: u8) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let digits = f64::from(digits) - 1.0 - value.abs().log10().floor();
    // Dividing by a whole number gives the nearest value to the decimal one; multiplying by a fraction does not.
    match digits > 0.0 {
        true => {
            let scale = 10f64.powf(digits);
            (value * scale).round() / scale
        }
        false => {
            let scale = 10f64.powf(-digits);
            (value / scale).round() * scale
        }
    }
}

/// What does not change while a volume is idle: codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct IdleCodes {
    dirty: u16,
    clients: u16,
    cached: u16,
}

impl IdleCodes {
    fn of(point: &Point) -> IdleCodes {
        IdleCodes {
            dirty: encode(at::DIRTY, point[at::DIRTY]),
            clients: encode(at::CLIENTS, point[at::CLIENTS]),
            cached: encode(at::CACHED, point[at::CACHED]),
        }
    }

    /// The code of a series while the volume is idle.
    fn code(self, series: usize) -> u16 {
        match series {
            at::DIRTY => self.dirty,
            at::CLIENTS => self.clients,
            at::CACHED => self.cached,
            at::READ_IOPS | at::WRITE_IOPS | at::READ_BYTES | at::WRITE_BYTES | at::ERRORS => 0,
            _ => UNKNOWN,
        }
    }
}

/// Whether a point has no requests, and no figure that only the daemon has.
fn is_idle(point: &Point) -> bool {
    let none = |series: usize| point[series].is_none_or(|value| value == 0.0);
    let rates = [at::READ_IOPS, at::WRITE_IOPS, at::READ_BYTES, at::WRITE_BYTES, at::ERRORS];
    rates.into_iter().all(none) && point[VOLUME_SERIES..].iter().all(Option::is_none)
}

#[derive(Debug)]
struct Busy {
    /// The codes of [`CHUNK`] points.
    codes: Box<[u16]>,
    /// Their columns of the heat map; empty if none was recorded.
    heat: Box<[HeatColumn]>,
}

#[derive(Debug)]
enum Chunk {
    Idle(IdleCodes),
    Busy(Box<Busy>),
}

/// See the module. Points are numbered from 0, the start of the history.
#[derive(Debug)]
pub(super) struct Ring {
    /// Series of a point.
    width: usize,
    /// The first point that is known.
    first: u64,
    /// The point after the last one that was pushed.
    next: u64,
    /// The first point of the first chunk, a multiple of [`CHUNK`].
    base: u64,
    chunks: VecDeque<Chunk>,
    last: IdleCodes,
}

impl Ring {
    /// A ring whose first point is `first`.
    pub(super) fn new(width: usize, first: u64) -> Ring {
        let base = first / CHUNK * CHUNK;
        let chunks = VecDeque::new();
        Ring { width, first, next: first, base, chunks, last: IdleCodes::default() }
    }

    /// Frees its memory; only for a ring whose points have all become old or idle: that is what they are from now on.
    pub(super) fn clear(&mut self) {
        self.chunks = VecDeque::new();
        self.base = self.next / CHUNK * CHUNK;
    }

    /// Forgets all points before `next`.
    pub(super) fn forget(&mut self, next: u64) {
        *self = Ring { last: self.last, ..Ring::new(self.width, next.max(self.next)) };
    }

    /// Forgets the columns of the heat map.
    pub(super) fn forget_heat(&mut self) {
        for chunk in &mut self.chunks {
            if let Chunk::Busy(busy) = chunk {
                busy.heat = Box::default();
            }
        }
    }

    /// Adds point `number` and its column of the heat map. Points that were left out were idle.
    pub(super) fn push(&mut self, number: u64, point: &Point, heat: Option<&HeatColumn>) {
        if number < self.next {
            return;
        }
        self.next = self.next.max(number.saturating_sub(POINTS));
        while self.next < number {
            self.put(None, None);
        }
        self.last = IdleCodes::of(point);
        self.put(Some(point).filter(|point| !is_idle(point)), heat);
    }

    /// Writes point `next`; without `point` it is idle.
    fn put(&mut self, point: Option<&Point>, heat: Option<&HeatColumn>) {
        let oldest = self.next.saturating_sub(CHUNKS * CHUNK - CHUNK) / CHUNK * CHUNK;
        while self.base < oldest {
            self.chunks.pop_front();
            self.base += CHUNK;
        }
        let (chunk, within) = self.place(self.next);
        while self.chunks.len() <= chunk {
            self.chunks.push_back(Chunk::Idle(self.last));
        }
        let (width, last) = (self.width, self.last);
        self.next += 1;
        let Some(chunk) = self.chunks.get_mut(chunk) else { return };
        if let Chunk::Idle(still) = *chunk {
            if point.is_none() && still == last {
                return;
            }
            let one: Vec<u16> = (0..width).map(|series| still.code(series)).collect();
            let codes = one.repeat(usize::try_from(CHUNK).unwrap_or(1)).into_boxed_slice();
            *chunk = Chunk::Busy(Box::new(Busy { codes, heat: Box::default() }));
        }
        let Chunk::Busy(busy) = chunk else { return };
        let codes = busy.codes.iter_mut().skip(within * width).take(width);
        for (series, code) in codes.enumerate() {
            *code = match point {
                Some(point) => encode(series, point[series]),
                None => last.code(series),
            };
        }
        if let Some(heat) = heat.filter(|heat| !heat.is_empty()) {
            if busy.heat.is_empty() {
                let columns = usize::try_from(CHUNK).unwrap_or(1);
                busy.heat = vec![HeatColumn::default(); columns].into_boxed_slice();
            }
            if let Some(column) = busy.heat.get_mut(within) {
                *column = *heat;
            }
        }
    }

    /// The chunk of a point from `base` on, and its place within.
    fn place(&self, number: u64) -> (usize, usize) {
        let from = number.saturating_sub(self.base);
        let index = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        (index(from / CHUNK), index(from % CHUNK))
    }

    /// A value of point `number`; `None`: not known. A point after the last one is idle.
    pub(super) fn value(&self, number: u64, series: usize) -> Option<f64> {
        if number < self.first || series >= self.width {
            return None;
        }
        // A point that is needed and has no chunk was cleared.
        if number >= self.next || number < self.base {
            return decode(series, self.last.code(series));
        }
        let (chunk, within) = self.place(number);
        match self.chunks.get(chunk) {
            None => decode(series, self.last.code(series)),
            Some(Chunk::Idle(still)) => decode(series, still.code(series)),
            Some(Chunk::Busy(busy)) => {
                decode(series, *busy.codes.get(within * self.width + series)?)
            }
        }
    }

    /// The column of the heat map of point `number`; `None`: not known.
    pub(super) fn heat(&self, number: u64) -> Option<HeatColumn> {
        if number < self.first {
            return None;
        }
        let (chunk, within) = self.place(number);
        match self.chunks.get(chunk) {
            Some(Chunk::Busy(busy)) if (self.base..self.next).contains(&number) => {
                Some(busy.heat.get(within).copied().unwrap_or_default())
            }
            _ => Some(HeatColumn::default()),
        }
    }

    /// Whether no chunk has memory of its own.
    pub(super) fn is_idle(&self) -> bool {
        self.chunks.iter().all(|chunk| matches!(chunk, Chunk::Idle(_)))
    }

    /// Its memory, bytes.
    pub(super) fn bytes(&self) -> usize {
        let of = |chunk: &Chunk| match chunk {
            Chunk::Idle(_) => 0,
            Chunk::Busy(busy) => {
                size_of::<Busy>() + size_of_val(&*busy.codes) + size_of_val(&*busy.heat)
            }
        };
        let own = self.chunks.capacity() * size_of::<Chunk>();
        own + self.chunks.iter().map(of).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn busy(iops: f64) -> Point {
        let mut point = Point::default();
        point[at::READ_IOPS] = Some(iops);
        point[at::P99] = Some(0.000_25);
        point
    }

    proptest! {
        #[test]
        fn a_value_survives_its_code(value in 1e-3..1e15f64) {
            let found = decode(at::READ_BYTES, encode(at::READ_BYTES, Some(value))).unwrap();
            prop_assert!((found / value - 1.0).abs() < 0.001 || (found - value).abs() <= 5e-4, "{found} of {value}");
        }

        /// Against a list of all points.
        #[test]
        fn a_ring_has_the_last_points(steps in prop::collection::vec((0u64..70, 0u32..3), 1..200)) {
            let mut ring = Ring::new(VOLUME_SERIES, 7);
            let mut all = vec![None; 7];
            for (skip, iops) in steps {
                all.resize(all.len() + usize::try_from(skip).unwrap(), Some(0.0));
                let iops = f64::from(iops);
                ring.push(all.len() as u64, &busy(iops), None);
                all.push(Some(iops));
                for (number, value) in all.iter().enumerate().skip(all.len().saturating_sub(300)) {
                    prop_assert_eq!(ring.value(number as u64, at::READ_IOPS), *value, "{}", number);
                }
                prop_assert!(ring.chunks.len() as u64 <= CHUNKS);
            }
        }
    }

    #[test]
    fn whole_numbers_and_what_is_unknown_are_exact() {
        for value in (0..1000).map(f64::from) {
            assert_eq!(decode(at::CLIENTS, encode(at::CLIENTS, Some(value))), Some(value));
        }
        for nothing in [None, Some(f64::NAN), Some(f64::INFINITY)] {
            assert_eq!(decode(at::P50, encode(at::P50, nothing)), None);
        }
        assert_eq!(
            decode(at::DIRTY, encode(at::DIRTY, Some(1e300))).map(|most| most > 1e15),
            Some(true)
        );
    }

    #[test]
    fn an_idle_stretch_costs_no_chunk() {
        let mut ring = Ring::new(VOLUME_SERIES, 0);
        ring.push(0, &busy(5.0), None);
        let one = ring.bytes();
        let mut idle = busy(0.0);
        idle[at::DIRTY] = Some(4096.0);
        for number in 1..=400 {
            ring.push(number, &idle, None);
        }
        assert_eq!(ring.value(400, at::DIRTY), Some(4096.0));
        assert_eq!((ring.value(400, at::P99), ring.value(400, at::READ_IOPS)), (None, Some(0.0)));
        assert!(ring.is_idle() && ring.bytes() < one, "{} bytes", ring.bytes());
        ring.clear();
        assert_eq!(
            (ring.value(200, at::READ_IOPS), ring.value(400, at::DIRTY)),
            (Some(0.0), Some(4096.0))
        );
        ring.forget(401);
        assert_eq!((ring.value(400, at::DIRTY), ring.value(401, at::DIRTY)), (None, Some(4096.0)));
    }
}
