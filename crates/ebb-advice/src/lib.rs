//! [`Advice`]: errors whose message and remedy are two values.
//!
//! # Invariants
//! - `Display` of an error with advice is its message alone; nothing recovers the remedy from a
//!   text.
//! - A text for a log or a terminal has both, joined by [`Advised`] or [`full_text`] and nothing
//!   else.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

/// An error that may have a remedy.
pub trait Advice: Error {
    /// Returns the remedy for an operator; `None` where only the cause and its logs show one.
    fn remedy(&self) -> Option<Cow<'_, str>>;
}

impl<T: Advice + ?Sized> Advice for &T {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        (**self).remedy()
    }
}

impl<T: Advice> Advice for Box<T> {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        (**self).remedy()
    }
}

/// An error that displays its message and its remedy, for readers who see one text.
///
/// Its causes are the error's own.
#[derive(Debug)]
pub struct Advised<E>(pub E);

impl<E: Advice> fmt::Display for Advised<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)?;
        match self.0.remedy() {
            Some(remedy) => write!(f, ": {remedy}"),
            None => Ok(()),
        }
    }
}

impl<E: Advice> Error for Advised<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// Returns the message, the remedy and the causes of an error, in one line. A cause that the text
/// before it contains already is left out: a transparent error has the message of its source, and
/// others quote it.
pub fn full_text(error: &(impl Advice + ?Sized)) -> String {
    let mut text = Advised(error).to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug)]
    struct Unreadable {
        path: &'static str,
        remedy: Option<&'static str>,
        source: io::Error,
    }

    impl fmt::Display for Unreadable {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "cannot read {}", self.path)
        }
    }

    impl Error for Unreadable {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.source)
        }
    }

    impl Advice for Unreadable {
        fn remedy(&self) -> Option<Cow<'_, str>> {
            self.remedy.map(Into::into)
        }
    }

    #[test]
    fn one_text_has_message_remedy_and_each_cause_once() {
        let source = || io::Error::other("no such key");
        let error = Unreadable { path: "/a: b", remedy: Some("check it"), source: source() };
        assert_eq!(error.to_string(), "cannot read /a: b");
        assert_eq!(Advised(&error).to_string(), "cannot read /a: b: check it");
        assert_eq!(full_text(&error), "cannot read /a: b: check it: no such key");
        assert!(Advised(&error).source().is_some());
        let quoting = Unreadable { path: "x: no such key", remedy: None, source: source() };
        assert_eq!(full_text(&quoting), "cannot read x: no such key");
    }
}
