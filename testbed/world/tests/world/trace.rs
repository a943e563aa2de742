//! What happened in a world: a hash of all of it, and the last of it in words.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::OnceLock;

/// Lines that are kept.
const LINES: usize = 120;

/// See the module.
#[derive(Default)]
pub(crate) struct Trace {
    hash: u64,
    lines: VecDeque<String>,
    /// Formatting costs time: it is only done to examine a failure.
    words: bool,
    /// Each line is printed as it comes, between those of the daemon's log.
    told: bool,
}

/// Whether everything is to be printed as it comes.
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

    /// Something that must be the same each time the seed is run.
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
