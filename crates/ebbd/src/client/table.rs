//! Tables on standard output: they fit the width of a terminal, and have colours there.

use std::io::IsTerminal;

use comfy_table::{
    Attribute, Cell, CellAlignment, Color, ColumnConstraint, ContentArrangement, Table, presets,
};

/// What a row is marked as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tint {
    /// Nothing remarkable.
    #[default]
    Plain,
    /// Worth a look: yellow.
    Warning,
    /// Something fails: red.
    Bad,
}

/// Whether standard output takes colours: a terminal, unless the variable NO_COLOR is set (no-color.org).
fn has_colours() -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    std::io::stdout().is_terminal() && !unwanted
}

/// `text` in the colour of `tint`, where standard output takes colours.
pub(super) fn paint(text: &str, tint: Tint) -> String {
    let code = match tint {
        Tint::Plain => return text.to_owned(),
        Tint::Warning => 33,
        Tint::Bad => 31,
    };
    if has_colours() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

/// Columns as wide as their widest cell; on a terminal that is narrower, cells are wrapped, except the names in the first
/// column.
pub(super) struct TextTable {
    titles: Vec<String>,
    rows: Vec<(Vec<String>, Tint)>,
    /// A bit for each left-aligned column, the lowest for the first column.
    left: u32,
}

impl TextTable {
    /// A table with these titles.
    pub(super) fn new(titles: &[&str], left: u32) -> Self {
        Self::with_titles(titles.iter().map(ToString::to_string).collect(), left)
    }

    /// As [`TextTable::new`].
    pub(super) fn with_titles(titles: Vec<String>, left: u32) -> Self {
        Self { titles, rows: Vec::new(), left }
    }

    /// Adds a row.
    pub(super) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.cells(cells.into());
    }

    /// Adds a row with a cell for each title.
    pub(super) fn cells(&mut self, cells: Vec<String>) {
        self.rows.push((cells, Tint::Plain));
    }

    /// Marks the row that was added last.
    pub(super) fn tint_last(&mut self, tint: Tint) {
        if let Some((_, last)) = self.rows.last_mut() {
            *last = tint;
        }
    }

    /// All of it, a line for each row, and more where cells are wrapped.
    pub(super) fn text(&self) -> String {
        self.rendered(std::io::stdout().is_terminal(), None)
    }

    /// As [`TextTable::text`]; `width` instead of that of the terminal.
    fn rendered(&self, terminal: bool, width: Option<u16>) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        if terminal {
            table.set_content_arrangement(ContentArrangement::Dynamic);
            if let Some(width) = width {
                table.set_width(width);
            }
            if !has_colours() {
                table.force_no_tty();
            }
        } else {
            table.force_no_tty();
        }
        let aligned = |(column, text): (usize, &String)| {
            let align = match self.left >> column & 1 {
                1 => CellAlignment::Left,
                _ => CellAlignment::Right,
            };
            Cell::new(text).set_alignment(align)
        };
        let bold = |cell: Cell| cell.add_attribute(Attribute::Bold);
        table.set_header(self.titles.iter().enumerate().map(aligned).map(bold));
        for (cells, tint) in &self.rows {
            let tinted = |cell: Cell| match tint {
                Tint::Plain => cell,
                Tint::Warning => cell.fg(Color::Yellow),
                Tint::Bad => cell.fg(Color::Red),
            };
            table.add_row(cells.iter().enumerate().map(aligned).map(tinted));
        }
        let last = self.titles.len().saturating_sub(1);
        for (i, column) in table.column_iter_mut().enumerate() {
            if i == 0 {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
            column.set_padding((0, if i == last { 0 } else { 2 }));
        }
        let mut out = String::new();
        for line in table.lines() {
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_fits_its_terminal_without_breaking_names_and_is_plain_elsewhere() {
        let mut table = TextTable::new(&["NAME", "RANGE"], 0b11);
        table.row(["a-name-of-twenty-chars".to_owned(), "one of a, b or c".to_owned()]);
        table.tint_last(Tint::Bad);
        assert_eq!(
            table.rendered(false, None),
            "NAME                    RANGE\na-name-of-twenty-chars  one of a, b or c\n"
        );
        let narrow = table.rendered(true, Some(36));
        assert!(narrow.contains("a-name-of-twenty-chars"), "{narrow}");
        assert!(narrow.lines().count() > 2, "{narrow}");
        assert!(narrow.lines().all(|line| without_colours(line).len() <= 36), "{narrow}");
    }

    /// A line without escape sequences.
    fn without_colours(line: &str) -> String {
        let mut parts = line.split('\x1b');
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |sum, part| sum + part.split_once('m').map_or("", |(_, rest)| rest))
    }
}
