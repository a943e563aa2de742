//! The progress of a copy on a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use ebb_config::Size;

/// The time between two updates.
const PAUSE: Duration = Duration::from_millis(200);

/// See the module. It is shown on standard error if that is a terminal.
pub(super) struct CopyProgress {
    total: u64,
    done: u64,
    is_shown: bool,
    next: Instant,
}

impl CopyProgress {
    pub(super) fn new(total: u64) -> CopyProgress {
        let is_shown = std::io::stderr().is_terminal();
        CopyProgress { total, done: 0, is_shown, next: Instant::now() }
    }

    /// So many bytes more are copied.
    pub(super) fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if self.is_shown && Instant::now() >= self.next {
            self.next = Instant::now() + PAUSE;
            let text = share(self.done, self.total);
            // An error of the terminal does not end the copy.
            let _ = write!(std::io::stderr().lock(), "\r{text}\x1b[K");
        }
    }

    /// Takes the line away.
    pub(super) fn end(&mut self) {
        if self.is_shown {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K");
        }
    }
}

fn share(done: u64, total: u64) -> String {
    let tenths = u128::from(done) * 1000 / u128::from(total.max(1));
    format!("{}.{}% of {}", tenths / 10, tenths % 10, Size::new(total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_exact_for_any_size() {
        assert_eq!(share(0, 0), "0.0% of 0");
        assert_eq!(share(1, 3), "33.3% of 3");
        assert_eq!(share(u64::MAX, u64::MAX), format!("100.0% of {}", u64::MAX));
        assert_eq!(share(32 << 20, 64 << 20), "50.0% of 64M");
    }
}
