//! Curves of a scenario as SVG: the threshold and what is held, one line per law.
//!
//! Invariant: the same curves give the same text on any machine; coordinates are whole numbers.

use std::fmt::Write;

use crate::world::{SAMPLE, Sample};
use ebb_writeback::units::{Nanos, SECOND, mul_div};

const WIDTH: u64 = 880;
const PANEL: u64 = 220;
const LEFT: u64 = 70;
const TOP: u64 = 50;
const GAP: u64 = 50;
/// Number of horizontal positions with a point.
const POINTS: u64 = 220;
/// Colours that colour-blind readers can distinguish, the last one for the horizon law.
const COLOURS: [&str; 5] = ["#bbbbbb", "#ccaa44", "#44aa99", "#4477aa", "#cc3311"];

/// One law's samples of the plotted device.
#[derive(Debug, Clone)]
pub struct Curve {
    /// The law's name.
    pub name: String,
    /// Its samples.
    pub samples: Vec<Sample>,
}

/// The next number of the form 1, 2 or 5 × 10ⁿ.
fn round_up(value: u64) -> u64 {
    let mut unit = 1_u64;
    loop {
        for step in [1, 2, 5] {
            let candidate = unit.saturating_mul(step);
            if candidate >= value {
                return candidate;
            }
        }
        unit = unit.saturating_mul(10);
    }
}

fn amount(bytes: u64) -> String {
    let (unit, name) = match bytes {
        1_000_000_000.. => (1_000_000_000, "GB"),
        1_000_000.. => (1_000_000, "MB"),
        _ => (1000, "kB"),
    };
    let hundredths = bytes / (unit / 100);
    match (hundredths / 100, hundredths % 100) {
        (whole, 0) => format!("{whole} {name}"),
        (whole, part) if part % 10 == 0 => format!("{whole}.{} {name}", part / 10),
        (whole, part) => format!("{whole}.{part:02} {name}"),
    }
}

/// The SVG of one scenario.
#[must_use]
pub fn svg(title: &str, lines: &[Curve]) -> String {
    let longest = lines.iter().map(|line| line.samples.len()).max().unwrap_or(0);
    let length = SAMPLE * u64::try_from(longest.max(2) - 1).unwrap_or(1);
    let height = TOP + 2 * PANEL + 2 * GAP;
    let total = LEFT + WIDTH + 20;
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {total} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{total}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"18\" font-size=\"14\">{title}</text>\n"
    );
    for ((x, line), colour) in (LEFT..).step_by(120).zip(lines).zip(COLOURS) {
        let name = &line.name;
        let (end, text) = (x + 18, x + 24);
        let _ = writeln!(
            out,
            "<path d=\"M{x} 33H{end}\" stroke=\"{colour}\" stroke-width=\"3\"/>\
             <text x=\"{text}\" y=\"37\">{name}</text>"
        );
    }
    panel(&mut out, (TOP, "threshold"), length, lines, |sample| sample.threshold);
    let second = TOP + PANEL + GAP;
    panel(&mut out, (second, "dirty and under writeback"), length, lines, |sample| sample.held);
    out.push_str("</svg>\n");
    out
}

fn panel(
    out: &mut String,
    (top, name): (u64, &str),
    length: Nanos,
    lines: &[Curve],
    what: impl Fn(&Sample) -> u64,
) {
    let all = lines.iter().flat_map(|line| &line.samples);
    let most = round_up(all.map(&what).max().unwrap_or(1).max(1));
    let bottom = top + PANEL;
    let right = LEFT + WIDTH;
    for step in 0..=4 {
        let y = bottom - PANEL * step / 4;
        let (label, x, text) = (amount(most * step / 4), LEFT - 6, y + 4);
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {y}H{right}\" stroke=\"#dddddd\"/>\
             <text x=\"{x}\" y=\"{text}\" text-anchor=\"end\">{label}</text>"
        );
    }
    let every = round_up(length / SECOND / 12).max(1);
    for second in (0..=length / SECOND).step_by(usize::try_from(every).unwrap_or(1)) {
        let x = LEFT + mul_div(WIDTH, second * SECOND, length);
        let y = bottom + 16;
        let _ = write!(out, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{second} s</text>");
    }
    let (x, y) = (LEFT + 6, top + 14);
    let _ = writeln!(out, "\n<text x=\"{x}\" y=\"{y}\" fill=\"#666666\">{name}</text>");
    for (line, colour) in lines.iter().zip(COLOURS) {
        let path = path(&line.samples, length, &what, |value| bottom - mul_div(PANEL, value, most));
        let _ = writeln!(
            out,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>"
        );
    }
}

/// A path through the largest sample of each position; points within a level section are omitted.
fn path(
    samples: &[Sample],
    length: Nanos,
    what: impl Fn(&Sample) -> u64,
    y: impl Fn(u64) -> u64,
) -> String {
    let count = length / SAMPLE + 1;
    let each = usize::try_from(count.div_ceil(POINTS)).unwrap_or(1).max(1);
    let mut points: Vec<(u64, u64)> = Vec::new();
    for (place, chunk) in (0_u64..).zip(samples.chunks(each)) {
        let value = chunk.iter().map(&what).max().unwrap_or(0);
        let at = place * u64::try_from(each).unwrap_or(1) * SAMPLE;
        let point = (LEFT + mul_div(WIDTH, at, length), y(value));
        if let [.., before, last] = points[..]
            && before.1 == last.1
            && last.1 == point.1
        {
            points.pop();
        }
        points.push(point);
    }
    let mut path = String::new();
    for (index, (x, y)) in points.into_iter().enumerate() {
        let _ = write!(path, "{}{x} {y}", if index == 0 { "M" } else { "L" });
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_ends() {
        assert_eq!([1, 3, 7, 11, 782].map(round_up), [1, 5, 10, 20, 1000]);
        assert_eq!(amount(1_500_000_000), "1.5 GB");
        assert_eq!(amount(20_000_000), "20 MB");
        assert_eq!(amount(12_500_000), "12.5 MB");
        assert_eq!(amount(3_750_000), "3.75 MB");
        assert_eq!(amount(0), "0 kB");
    }

    #[test]
    fn level_stretches_are_two_points() {
        let sample = |held| Sample { held, ..Sample::default() };
        let samples: Vec<Sample> = [5, 5, 5, 5, 9].map(sample).to_vec();
        let path = path(&samples, 4 * SAMPLE, |sample| sample.held, |value| 100 - value);
        assert_eq!(path, "M70 95L730 95L950 91");
        assert!(svg("x", &[Curve { name: "a".into(), samples }]).ends_with("</svg>\n"));
    }
}
