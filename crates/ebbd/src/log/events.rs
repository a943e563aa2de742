//! Keeps what is logged at `info` and above as events ([`ebb_control::EventLog`]).

use std::collections::BTreeMap;
use std::fmt::{Debug, Write};
use std::time::SystemTime;

use ebb_api::EventView;
use ebb_control::EventLog;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// The longest value that is formatted, bytes: whatever is logged, an event stays small.
const VALUE_MOST: usize = 4096;

/// The layer of a subscriber that keeps events.
#[derive(Debug)]
pub struct EventLayer(pub EventLog);

impl<S: Subscriber> Layer<S> for EventLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let level = *event.metadata().level();
        if level > Level::INFO {
            return;
        }
        let mut texts = EventTexts::default();
        event.record(&mut texts);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.0.add(EventView {
            id: 0,
            time: now.map_or(0.0, |since| since.as_secs_f64()),
            level: level.as_str().to_lowercase(),
            message: texts.message,
            fields: texts.fields,
        });
    }
}

#[derive(Default)]
struct EventTexts {
    message: String,
    fields: BTreeMap<String, String>,
}

impl EventTexts {
    fn set(&mut self, field: &Field, value: String) {
        if field.name() == "message" {
            self.message = value;
        } else {
            self.fields.insert(field.name().to_owned(), value);
        }
    }
}

impl Visit for EventTexts {
    fn record_str(&mut self, field: &Field, value: &str) {
        let mut text = Shortened::default();
        // It fails when there is no more room: the rest is left out.
        let _ = text.write_str(value);
        self.set(field, text.0);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let mut text = Shortened::default();
        let _ = write!(text, "{value:?}");
        self.set(field, text.0);
    }
}

/// Text that ends when it is full.
#[derive(Default)]
struct Shortened(String);

impl Write for Shortened {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = VALUE_MOST.saturating_sub(self.0.len());
        let end = (0..=room.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
        let part = text.get(..end.unwrap_or(0)).unwrap_or_default();
        self.0.push_str(part);
        if part.len() < text.len() { Err(std::fmt::Error) } else { Ok(()) }
    }
}
