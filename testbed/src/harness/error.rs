//! One error for everything that can go wrong in a test: a text that explains itself.

use std::fmt;
use std::io;

/// What a test reports. The text holds all there is to know (command, output, what was expected).
#[derive(thiserror::Error)]
pub enum Error {
    /// A program that the tests need is not installed.
    #[error("`{program}` is missing: run testbed/install")]
    MissingProgram {
        /// Name of the program, as looked up in `PATH`.
        program: String,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, with the path or peer it was done to.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The NBD client of this crate failed.
    #[error("nbd client: {0}")]
    Nbd(#[from] crate::harness::nbd::Failure),
    /// Something was not as expected.
    #[error("{0}")]
    Unexpected(String),
}

/// Result with this crate's [`Error`]; a test function returns `testbed::Result`.
pub type Result<T = ()> = std::result::Result<T, Error>;

impl Error {
    /// Something was not as expected; `text` says what was expected and what was seen.
    pub fn unexpected(text: impl Into<String>) -> Error {
        Error::Unexpected(text.into())
    }

    /// Wraps a system error with what was being done.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { what: what.into(), source }
    }
}

/// A test that returns an error is printed with `Debug`: show the text, not the structure.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Fails with the text that `message` gives unless `condition` holds.
///
/// # Errors
/// [`Error::Unexpected`] with that text.
pub fn check(condition: bool, message: impl FnOnce() -> String) -> Result {
    if condition { Ok(()) } else { Err(Error::unexpected(message())) }
}
