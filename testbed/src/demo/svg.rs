//! The plots as an SVG: a file by itself, with text as text, for light and dark pages.
//!
//! Invariants: as in [`super::plot`]; samples further apart than [`Sheet::gap`] are not
//! joined, and one with no neighbours in time is a dot.

use std::fmt::Write as _;

use super::plot::{Curve, Sheet, number};

/// The sizes of a plot, and the place around it.
const WIDTH: f64 = 380.0;
const HEIGHT: f64 = 120.0;
const LEFT: f64 = 68.0;
const TOP: f64 = 84.0;
/// From one plot to the next, across and down.
const ACROSS: f64 = 50.0;
const DOWN: f64 = 48.0;

const STYLE: &str = "\
svg { font: 13px system-ui, sans-serif; fill: #24292f; }
.page { fill: #ffffff; } .axis { stroke: #57606a; fill: none; } .grid { stroke: #d0d7de; }
.visit { fill: #afb8c1; opacity: .3; } .note, .number { fill: #57606a; font-size: 12px; }
.title { font-size: 15px; font-weight: 600; } .head { font-size: 17px; font-weight: 600; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .area { stroke: none; opacity: .18; }
.c0 { stroke: #0969da; fill: #0969da; } .c1 { stroke: #1a7f37; fill: #1a7f37; } .c2 { stroke: #cf222e; fill: #cf222e; }
.c0.line, .c1.line, .c2.line { fill: none; } .c0.area, .c1.area, .c2.area { stroke: none; }
@media (prefers-color-scheme: dark) {
svg { fill: #e6edf3; } .page { fill: #0d1117; } .axis { stroke: #8d96a0; } .grid { stroke: #30363d; }
.visit { fill: #6e7681; } .note, .number { fill: #9aa4af; }
.c0 { stroke: #58a6ff; fill: #58a6ff; } .c1 { stroke: #3fb950; fill: #3fb950; } .c2 { stroke: #ff7b72; fill: #ff7b72; }
}
";

/// Text with the signs of XML escaped.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Parts of a curve whose samples are at most `gap` apart.
fn parts(curve: &Curve, gap: f64) -> impl Iterator<Item = &[(f64, f64)]> {
    curve.chunk_by(move |before, after| after.0 - before.0 <= gap)
}

/// Where one plot is.
struct Place {
    x: f64,
    y: f64,
    seconds: f64,
    most: f64,
}

impl Place {
    fn x(&self, at: f64) -> f64 {
        self.x + at / self.seconds * WIDTH
    }

    fn y(&self, value: f64) -> f64 {
        self.y + HEIGHT - value / self.most * HEIGHT
    }

    /// A curve: lines with the area below, and dots.
    fn curve(&self, curve: &Curve, gap: f64, class: &str) -> String {
        let mut text = String::new();
        for part in parts(curve, gap) {
            let points: Vec<String> = part
                .iter()
                .map(|(at, value)| format!("{:.1},{:.1}", self.x(*at), self.y(*value)))
                .collect();
            let points = points.join(" ");
            let (first, last) = (part[0], part[part.len() - 1]);
            let _ = match part.len() {
                1 => {
                    let (x, y) = (self.x(first.0), self.y(first.1));
                    writeln!(text, r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="2"/>"#)
                }
                _ => {
                    let (from, to, bottom) = (self.x(first.0), self.x(last.0), self.y(0.0));
                    writeln!(
                        text,
                        "<polygon class=\"{class} area\" points=\"{from:.1},{bottom:.1} {points} \
                         {to:.1},{bottom:.1}\"/>\n<polyline class=\"{class} line\" points=\"{points}\"/>"
                    )
                }
            };
        }
        text
    }

    /// Lines and numbers of the axes; numbers of values for the left plot only.
    fn axes(&self, ticks: impl Iterator<Item = f64>, is_left: bool, is_lowest: bool) -> String {
        let (mut text, bottom, right) = (String::new(), self.y + HEIGHT, self.x + WIDTH);
        for value in [self.most, self.most / 2.0] {
            let y = self.y(value);
            let _ = writeln!(text, r#"<path class="grid" d="M{:.1} {y:.1}H{right:.1}"/>"#, self.x);
        }
        for value in [self.most, self.most / 2.0, 0.0].into_iter().filter(|_| is_left) {
            let (x, y, value) = (self.x - 8.0, self.y(value) + 4.0, number(value));
            let _ = writeln!(
                text,
                r#"<text class="number" x="{x:.1}" y="{y:.1}" text-anchor="end">{value}</text>"#
            );
        }
        for at in ticks {
            let x = self.x(at);
            let _ = writeln!(text, r#"<path class="axis" d="M{x:.1} {bottom:.1}v4"/>"#);
            if is_lowest {
                let y = bottom + 18.0;
                let at = number(at);
                let _ = writeln!(
                    text,
                    r#"<text class="number" x="{x:.1}" y="{y:.1}" text-anchor="middle">{at} s</text>"#
                );
            }
        }
        let _ = writeln!(
            text,
            r#"<path class="axis" d="M{:.1} {:.1}V{bottom:.1}H{right:.1}"/>"#,
            self.x, self.y
        );
        text
    }
}

/// The SVG; `head` is its first line, `note` the second one.
#[must_use]
pub fn svg(sheet: &Sheet, head: &str, note: &str) -> String {
    let rows = sheet.panels.len() as f64;
    let width = LEFT + 2.0 * WIDTH + ACROSS + 24.0;
    let height = TOP + rows * (HEIGHT + DOWN) + 10.0;
    let (head, note) = (escaped(head), escaped(note));
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\">\n<title>{head}</title>\n<style>\n{STYLE}</style>\n\
         <rect class=\"page\" width=\"{width}\" height=\"{height}\"/>\n\
         <text class=\"head\" x=\"14\" y=\"26\">{head}</text>\n\
         <text class=\"note\" x=\"14\" y=\"46\">{note}</text>\n"
    );
    let seconds = sheet.seconds();
    for run in 0..2 {
        let x = LEFT + if run == 0 { 0.0 } else { WIDTH + ACROSS };
        let title = escaped(sheet.titles[run]);
        let y = TOP - 12.0;
        let _ = writeln!(text, r#"<text class="title" x="{x}" y="{y}">{title}</text>"#);
        for (row, panel) in sheet.panels.iter().enumerate() {
            let y = TOP + 20.0 + row as f64 * (HEIGHT + DOWN);
            let place = Place { x, y, seconds, most: panel.most() };
            let (from, to) = sheet.visits[run];
            if to > from {
                let (x, wide) = (place.x(from), place.x(to) - place.x(from));
                let _ = writeln!(
                    text,
                    r#"<rect class="visit" x="{x:.1}" y="{y:.1}" width="{wide:.1}" height="{HEIGHT}"/>"#
                );
                let middle = x + wide / 2.0;
                if row == 0 {
                    let y = y - 6.0;
                    let _ = writeln!(
                        text,
                        r#"<text class="note" x="{middle:.1}" y="{y:.1}" text-anchor="middle">neighbour</text>"#
                    );
                }
            }
            let lowest = row + 1 == sheet.panels.len();
            text += &place.axes(sheet.ticks(), run == 0, lowest);
            text += &place.curve(&panel.curves[run], sheet.gap, &format!("c{row}"));
            if run == 0 {
                let (y, title) = (y - 13.0, escaped(panel.title));
                let _ = writeln!(text, r#"<text x="14" y="{y:.1}">{title}</text>"#);
            }
        }
    }
    text + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::super::plot::Panel;
    use super::*;

    fn of(curve: Curve) -> String {
        let panels = vec![Panel { title: "cache, MiB", curves: [curve, vec![]] }];
        let visits = [(1.0, 2.0), (0.0, 0.0)];
        svg(&Sheet { titles: ["one", "two"], visits, panels, gap: 0.5 }, "a < b & c", "note")
    }

    #[test]
    fn no_samples_give_axes_only() {
        let text = of(vec![]);
        assert!(!text.contains("<polyline") && !text.contains("<circle"), "{text}");
        assert!(text.contains(r#"class="axis""#) && text.ends_with("</svg>\n"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        let none = Sheet { titles: ["", ""], visits: [(0.0, 0.0); 2], panels: vec![], gap: 1.0 };
        assert!(!svg(&none, "", "").contains("NaN"));
    }

    #[test]
    fn a_single_sample_is_a_dot() {
        let text = of(vec![(3.0, 7.0)]);
        assert_eq!((text.matches("<circle").count(), text.matches("<polyline").count()), (1, 0));
    }

    #[test]
    fn zeros_are_a_line_at_the_bottom() {
        let text = of(vec![(0.0, 0.0), (0.4, 0.0), (0.8, 0.0)]);
        let bottom = format!("{:.1}", TOP + 20.0 + HEIGHT);
        let line = text.lines().find(|line| line.contains("<polyline")).unwrap();
        assert_eq!(line.matches(&format!(",{bottom}")).count(), 3, "{line}");
    }

    #[test]
    fn samples_far_apart_are_not_joined() {
        let text = of(vec![(0.0, 1.0), (0.4, 1.0), (2.0, 1.0), (2.4, 1.0), (4.0, 1.0)]);
        assert_eq!((text.matches("<circle").count(), text.matches("<polyline").count()), (1, 2));
    }

    #[test]
    fn text_is_escaped() {
        assert!(of(vec![]).contains("a &lt; b &amp; c</title>"));
    }
}
