//! The log lines about a guest that connects and disconnects without end are limited.

use std::sync::atomic::{AtomicU32, Ordering};

use ebb_export_xen::shm::frontend::FrontendConfig;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::common::Rig;

static LINES: AtomicU32 = AtomicU32::new(0);

/// Counts the lines that operators see.
struct Count;

impl Subscriber for Count {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO && metadata.target().starts_with("ebb_export_xen")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        LINES.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn log_lines_about_a_guest_that_reconnects_without_end_are_limited() {
    tracing::subscriber::set_global_default(Count).unwrap();
    let rig = Rig::new();
    let begun = std::time::Instant::now();
    let mut disk = rig.disk(FrontendConfig::default());
    for _ in 0..30 {
        disk.close().unwrap();
        disk.connect().unwrap();
    }
    let lines = LINES.load(Ordering::Relaxed);
    // On a slow machine there are more periods of ten seconds, each with its lines.
    let periods = u32::try_from(begun.elapsed().as_secs() / 10).unwrap() + 1;
    assert!((2..=20 * periods).contains(&lines), "{lines} lines for 30 rounds");
}
