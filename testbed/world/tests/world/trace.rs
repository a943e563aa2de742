//! The trace of a world: a hash of all events, and the last ones as text.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::OnceLock;

/// The number of lines kept.
const LINES: usize = 120;

/// See the module.
#[derive(Default)]
pub(crate) struct Trace {
    hash: u64,
    lines: VecDeque<String>,
    /// Whether events are kept as text: formatting takes time, so it is only done to examine a failure.
    words: bool,
    /// Each line is printed at once, between those of the daemon's log.
    told: bool,
}

/// Whether each event is to be printed at once.
pub(crate) fn is_told() -> bool {
    static TOLD: OnceLock<bool> = OnceLock::new();
    *TOLD.get_or_init(|| std::env::var_os("EBBD_WORLD_LOG").is_some())
}

impl Trace {
    pub(crate) fn new(words: bool) -> Trace {
        let told = words && is_told();
        Trace { words, told, ..Trace::default() }
    }

    pub(crate) fn note(&mut self, at: u64, what: std::fmt::Arguments<'_>) {
        if self.words {
            if self.lines.len() == LINES {
                self.lines.pop_front();
            }
            let line = format!("{:>12.6} ms  {what}", at as f64 / 1e6);
            if self.told {
                println!("{line}");
            }
            self.lines.push_back(line);
        }
    }

    /// Adds a number to the hash: it must be the same in every run of the seed.
    pub(crate) fn mix(&mut self, number: u64) {
        self.hash = (self.hash ^ number).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn text(&self) -> String {
        self.lines.iter().fold(String::new(), |mut text, line| {
            let _ = writeln!(text, "{line}");
            text
        })
    }
}
