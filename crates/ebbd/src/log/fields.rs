//! The fields of a line of text: `name=value`. Numbers, `true` and `false` are written as they are, and every other value
//! in double quotes with escapes, so that a line can be split without knowing its fields.

use std::fmt::{self, Debug, Write};

use tracing::field::{Field, Visit};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TextFields;

impl<'w> FormatFields<'w> for TextFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut line = FieldWriter { writer, first: true, result: Ok(()) };
        fields.record(&mut line);
        line.result
    }
}

struct FieldWriter<'w> {
    writer: Writer<'w>,
    first: bool,
    result: fmt::Result,
}

impl FieldWriter<'_> {
    fn write(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        let space = if std::mem::take(&mut self.first) { "" } else { " " };
        let name = field.name();
        let written = if name == "message" {
            write!(self.writer, "{space}")
                .and_then(|()| write!(Message(&mut self.writer), "{value}"))
        } else if self.writer.has_ansi_escapes() {
            write!(self.writer, "{space}\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m{value}")
        } else {
            write!(self.writer, "{space}{name}={value}")
        };
        self.result = self.result.and(written);
    }
}

impl Visit for FieldWriter<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.write(field, format_args!("{value}")),
            _ => self.write(field, format_args!("{value:?}")),
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.write(field, format_args!("{value}"));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.write(field, format_args!("{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.write(field, format_args!("{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // Times and rates: more digits only look exact.
        self.write(field, format_args!("{}", (value * 1e3).round() / 1e3));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.write(field, format_args!("{value:?}")),
            _ => self.write(field, format_args!("{:?}", format!("{value:?}"))),
        }
    }
}

/// Writes a message with the characters escaped that a terminal would obey: the text may have come from a client.
struct Message<'a, 'w>(&'a mut Writer<'w>);

impl Write for Message<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|character| match character {
            // What follows is no line of its own: the text may come from a client or a foreign image.
            '\n' => self.0.write_str("\n    "),
            '\t' => self.0.write_char(character),
            _ if !ebb_image::is_shown(character) => {
                write!(self.0, "{}", character.escape_default())
            }
            _ => self.0.write_char(character),
        })
    }
}
