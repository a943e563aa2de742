//! Limits the log lines about failed requests of one connection or ring: a failing disk must not fill the log.
//!
//! What one peer may cause over all its connections or rings is limited by `LogLimit` in `ebb-volume`.

use std::cell::Cell;

/// Failed requests logged for each connection or ring.
const ERRORS_LOGGED: u32 = 10;

/// What to log for a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorLine {
    /// The request and its error.
    Request,
    /// That further failed requests are not logged.
    Notice,
    /// Nothing.
    Nothing,
}

/// See the module.
#[derive(Debug, Default)]
pub struct ErrorLines {
    failed: Cell<u32>,
}

impl ErrorLines {
    /// What to log for the next failed request.
    pub fn admit(&self) -> ErrorLine {
        let failed = self.failed.get();
        self.failed.set(failed.saturating_add(1));
        match failed {
            0..ERRORS_LOGGED => ErrorLine::Request,
            ERRORS_LOGGED => ErrorLine::Notice,
            _ => ErrorLine::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failed_requests_are_logged_then_one_notice() {
        let lines = ErrorLines::default();
        for _ in 0..ERRORS_LOGGED {
            assert_eq!(lines.admit(), ErrorLine::Request);
        }
        assert_eq!(lines.admit(), ErrorLine::Notice);
        lines.failed.set(u32::MAX - 1);
        for _ in 0..3 {
            assert_eq!(lines.admit(), ErrorLine::Nothing);
        }
    }
}
