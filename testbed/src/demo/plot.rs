//! The plots of two runs next to each other: the data of both kinds, and the plot for terminals.
//!
//! Invariants:
//! - Both runs have the same axes, so that equal heights are equal values.
//! - A column of the terminal shows the last sample that falls into it, and is blank if none does.
//! - No line is wider than 80 columns.

use std::fmt::Write as _;

/// Samples: seconds and values, in order of time.
pub type Curve = Vec<(f64, f64)>;

/// One quantity in both runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// The quantity with its unit, such as `cache, MiB`.
    pub title: &'static str,
    /// Its samples in each run.
    pub curves: [Curve; 2],
}

/// All that is plotted.
#[derive(Debug, Clone, PartialEq)]
pub struct Sheet {
    /// Names of the runs.
    pub titles: [&'static str; 2],
    /// From when to when the neighbour was there, in seconds.
    pub visits: [(f64, f64); 2],
    /// Quantities, one below the other.
    pub panels: Vec<Panel>,
    /// Samples further apart than this, in seconds, are not joined.
    pub gap: f64,
}

/// Columns for the numbers of the vertical axis, and columns and rows of a plot.
const LABEL: usize = 9;
const COLUMNS: usize = 33;
const ROWS: usize = 4;
/// From one plot to the next one.
const BETWEEN: &str = "  ";
/// Eighths of a row.
const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

impl Panel {
    /// The end of the vertical axis: a round number, not below any value.
    #[must_use]
    pub fn most(&self) -> f64 {
        let values = self.curves.iter().flatten().map(|(_, value)| *value);
        round_up(values.fold(0.0, f64::max))
    }
}

impl Sheet {
    /// The end of the time axis, whole seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        let curves = self.panels.iter().flat_map(|panel| panel.curves.iter().flatten());
        curves.map(|(at, _)| *at).fold(1.0, f64::max).ceil()
    }

    /// From one number of the time axis to the next.
    #[must_use]
    pub fn step(&self) -> f64 {
        let most = self.seconds() / 4.0;
        [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
            .into_iter()
            .find(|step| *step >= most)
            .unwrap_or(most)
    }

    /// The numbers of the time axis.
    pub fn ticks(&self) -> impl Iterator<Item = f64> {
        let (step, end) = (self.step(), self.seconds());
        (0_u16..).map(move |n| f64::from(n) * step).take_while(move |at| *at <= end)
    }
}

/// The next round number: few digits, and half of it has few digits as well. At least 1.
fn round_up(value: f64) -> f64 {
    let mut unit = 1.0;
    while unit * 10.0 < value {
        unit *= 10.0;
    }
    let steps = [1.0, 1.2, 1.6, 2.0, 2.4, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];
    let fits = steps.into_iter().map(|step| step * unit).find(|most| *most >= value);
    fits.unwrap_or(value).max(1.0)
}

/// A number with commas between groups of three digits; a tenth only if there is one.
#[must_use]
pub fn number(value: f64) -> String {
    let text = format!("{value:.1}");
    let (whole, tenth) = text.split_once('.').unwrap_or((&text, "0"));
    let mut grouped = String::new();
    for (place, digit) in whole.chars().enumerate() {
        if place > 0 && (whole.len() - place) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if tenth != "0" {
        let _ = write!(grouped, ".{tenth}");
    }
    grouped
}

/// The largest whole number not above `value`, from 0 to `most`.
fn whole(value: f64, most: usize) -> usize {
    (1..=most).rfind(|number| *number as f64 <= value).unwrap_or(0)
}

/// The column of a moment; the end belongs to the last one.
fn column(at: f64, seconds: f64) -> usize {
    whole(at / seconds * COLUMNS as f64, COLUMNS - 1)
}

/// The values that the columns show.
fn columns(curve: &Curve, seconds: f64) -> [Option<f64>; COLUMNS] {
    let mut columns = [None; COLUMNS];
    for (at, value) in curve {
        columns[column(*at, seconds)] = Some(*value);
    }
    columns
}

/// The part of a column that is in a row: row 0 is the lowest. Zero is a line at the bottom.
fn cell(value: Option<f64>, most: f64, row: usize) -> char {
    match value {
        None => ' ',
        Some(value) if value > 0.0 => {
            let all = ROWS * 8;
            let eighths = whole((value / most * all as f64).round().max(1.0), all);
            BLOCKS[eighths.saturating_sub(row * 8).min(8)]
        }
        Some(_) if row == 0 => '_',
        Some(_) => ' ',
    }
}

/// A line that shows when the neighbour was there.
fn visit((from, to): (f64, f64), seconds: f64) -> String {
    const NAMES: [&str; 2] = [" neighbour ", "neighbour"];
    let (from, to) = (column(from, seconds), column(to, seconds));
    let mut line = [' '; COLUMNS];
    if to <= from {
        return line.iter().collect();
    }
    line[from..=to].fill('─');
    line[from] = '├';
    line[to] = '┤';
    let inside = to - from - 1;
    if let Some(name) = NAMES.into_iter().find(|name| name.len() <= inside) {
        let start = from + 1 + (inside - name.len()) / 2;
        line[start..].iter_mut().zip(name.chars()).for_each(|(place, sign)| *place = sign);
    }
    line.iter().collect()
}

/// The time axis: its line, and its numbers.
fn time_axis(sheet: &Sheet) -> [String; 2] {
    let seconds = sheet.seconds();
    let mut line = ['─'; COLUMNS];
    let mut numbers = vec![' '; COLUMNS + BETWEEN.len()];
    for at in sheet.ticks() {
        let place = column(at, seconds);
        line[place] = '┬';
        let text = if at == 0.0 { "0 s".to_owned() } else { number(at) };
        if place + text.len() <= numbers.len() {
            numbers[place..].iter_mut().zip(text.chars()).for_each(|(place, sign)| *place = sign);
        }
    }
    [line.iter().collect(), numbers.iter().collect()]
}

/// The plot for a terminal; lines end without blanks.
#[must_use]
pub fn terminal(sheet: &Sheet) -> String {
    let seconds = sheet.seconds();
    let blank = " ".repeat(LABEL + 1);
    let mut lines = Vec::new();
    let both = |start: &str, [left, right]: [String; 2]| {
        // The vertical axis of the right plot takes a column.
        format!("{start}{left:COLUMNS$}{BETWEEN} {right}")
    };
    lines.push(both(&blank, sheet.titles.map(str::to_owned)));
    lines.push(both(&blank, sheet.visits.map(|span| visit(span, seconds))));
    for panel in &sheet.panels {
        let most = panel.most();
        let shown = [&panel.curves[0], &panel.curves[1]].map(|curve| columns(curve, seconds));
        lines.push(panel.title.to_owned());
        for row in (0..ROWS).rev() {
            let label = match row {
                0 => "0".to_owned(),
                row if row == ROWS - 1 => number(most),
                _ => String::new(),
            };
            let [left, right] =
                shown.map(|values| values.map(|value| cell(value, most, row)).iter().collect());
            let right: String = right;
            lines.push(both(&format!("{label:>LABEL$}│"), [left, String::new()]));
            if let Some(line) = lines.last_mut() {
                line.pop();
                let _ = write!(line, "│{right}");
            }
        }
    }
    let [line, numbers] = time_axis(sheet);
    lines.push(format!("{:LABEL$}└{line}{BETWEEN}└{line}", ""));
    lines.push(format!("{blank}{numbers} {numbers}"));
    lines.iter().fold(String::new(), |text, line| text + line.trim_end() + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sheet(curves: [Curve; 2]) -> Sheet {
        let panels = vec![Panel { title: "cache, MiB", curves }];
        Sheet { titles: ["one", "two"], visits: [(1.0, 9.0), (0.0, 0.0)], panels, gap: 0.5 }
    }

    fn widest(text: &str) -> usize {
        text.lines().map(|line| line.chars().count()).max().unwrap()
    }

    #[test]
    fn round_numbers_hold_their_values() {
        let pairs = [(0.0, 1.0), (0.3, 1.0), (1.0, 1.0), (96.0, 100.0), (101.0, 120.0)];
        for (value, most) in pairs.into_iter().chain([(171.0, 200.0), (18_830.0, 20_000.0)]) {
            assert_eq!(round_up(value), most, "{value}");
        }
        assert_eq!(number(18_830.0), "18,830");
        assert_eq!(number(0.0), "0");
        assert_eq!(number(999.5), "999.5");
        assert_eq!(number(1_234_567.0), "1,234,567");
    }

    #[test]
    fn no_samples_give_empty_plots() {
        let text = terminal(&sheet([vec![], vec![]]));
        assert!(!text.contains(['█', '▁', '_']), "{text}");
        assert!(text.contains("cache, MiB") && text.contains("0 s"), "{text}");
        let none = Sheet { panels: vec![], ..sheet([vec![], vec![]]) };
        assert!(terminal(&none).contains("one"));
    }

    #[test]
    fn one_sample_fills_one_column() {
        let text = terminal(&sheet([vec![(0.0, 50.0)], vec![]]));
        assert_eq!(text.matches('█').count(), ROWS, "{text}");
        assert!(!text.contains('_'), "{text}");
        assert!(widest(&text) <= 80);
    }

    #[test]
    fn zeros_are_a_line_and_not_blank() {
        let zeros: Curve = (0..100_u8).map(|n| (f64::from(n) / 10.0, 0.0)).collect();
        let text = terminal(&sheet([zeros, vec![]]));
        assert_eq!(text.matches('_').count(), COLUMNS, "{text}");
        assert!(!text.contains('▁'), "{text}");
    }

    #[test]
    fn a_missing_sample_leaves_its_column_blank() {
        let curve = |n: u8| (f64::from(n) / 10.0, 8.0);
        let all: Curve = (0..=100).map(curve).collect();
        let some: Curve = (0..=100).filter(|n| !(40..60).contains(n)).map(curve).collect();
        let [all, some] = [columns(&all, 10.0), columns(&some, 10.0)];
        assert_eq!(all.iter().flatten().count(), COLUMNS);
        assert_eq!(some.iter().flatten().count(), COLUMNS - 6);
        assert!(some.iter().flatten().all(|value| *value == 8.0));
    }

    #[test]
    fn heights_are_in_proportion() {
        let heights = |value: f64| -> Vec<char> {
            (0..ROWS).map(|row| cell(Some(value), 32.0, row)).collect()
        };
        assert_eq!(heights(32.0), ['█'; ROWS]);
        assert_eq!(heights(9.0), ['█', '▁', ' ', ' ']);
        // Little is more than nothing.
        assert_eq!(heights(0.01), ['▁', ' ', ' ', ' ']);
        assert_eq!(heights(0.0), ['_', ' ', ' ', ' ']);
    }

    #[test]
    fn lines_fit_and_show_the_neighbour() {
        let curve: Curve = (0..180_u8).map(|n| (f64::from(n) / 10.0, 1e6)).collect();
        let text = terminal(&sheet([curve.clone(), curve]));
        assert!(widest(&text) <= 80, "{text}");
        assert_eq!(text.matches(" neighbour ").count(), 1, "{text}");
        assert_eq!(visit((0.0, 3.0), 10.0).trim_end(), "├────────┤");
        assert_eq!(visit((0.0, 3.1), 10.0).trim_end(), "├neighbour┤");
        assert_eq!(visit((3.0, 3.0), 10.0).trim_end(), "");
    }
}
