//! Parts of a whole as people write them: `10`, `0.5`, `12.25%`.
//!
//! One type serves parameters and the configuration file. It counts in parts per million (1/10000 of a
//! percent), is read and written digit by digit, and so loses nothing. What [`Percent`] displays, it
//! also parses.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, Visitor};

/// Parts per million that are one percent.
const ONE: u32 = 10_000;
/// Digits after the point.
const DIGITS: usize = 4;

/// A part of a whole, 0 to 100 percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Percent(u32);

impl Percent {
    /// The whole.
    pub const WHOLE: Percent = Percent(100 * ONE);

    /// So many parts per million; more than the whole counts as the whole.
    pub const fn new(parts_per_million: u32) -> Percent {
        if parts_per_million > Percent::WHOLE.0 {
            Percent::WHOLE
        } else {
            Percent(parts_per_million)
        }
    }

    /// Parts per million, 0 to 1000000.
    pub const fn parts_per_million(self) -> u32 {
        self.0
    }
}

/// A text is no percentage. The message names the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no percentage from 0 to 100")]
pub struct PercentError(String);

impl PercentError {
    /// What to write instead.
    pub fn remedy(&self) -> &'static str {
        "write a number from 0 to 100 with at most four digits after the point, such as 10 or 0.5"
    }
}

impl FromStr for Percent {
    type Err = PercentError;

    fn from_str(text: &str) -> Result<Self, PercentError> {
        let wrong = || PercentError(crate::shorten(text));
        let number = text.strip_suffix('%').unwrap_or(text);
        let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
        // A number that was a float before may end in zeroes.
        let part = part.trim_end_matches('0');
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || number.ends_with('.') || part.len() > DIGITS {
            return Err(wrong());
        }
        if !digits(whole) || !digits(part) {
            return Err(wrong());
        }
        let whole: u32 = whole.parse().map_err(|_| wrong())?;
        let part: u32 = format!("{part:0<DIGITS$}").parse().map_err(|_| wrong())?;
        let parts = whole.checked_mul(ONE).and_then(|whole| whole.checked_add(part));
        parts.map(Percent).filter(|parts| *parts <= Percent::WHOLE).ok_or_else(wrong)
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / ONE, self.0 % ONE);
        if part == 0 {
            return write!(f, "{whole}");
        }
        let part = format!("{part:0DIGITS$}");
        write!(f, "{whole}.{}", part.trim_end_matches('0'))
    }
}

impl<'de> Deserialize<'de> for Percent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PercentVisitor;

        impl Visitor<'_> for PercentVisitor {
            type Value = Percent;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a percentage")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Percent, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Percent, E> {
                self.visit_str(&number.to_string())
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Percent, E> {
                self.visit_str(&number.to_string())
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Percent, E> {
                // The shortest text that is this number: what was written, if it had few digits.
                self.visit_str(&number.to_string())
            }
        }

        deserializer.deserialize_any(PercentVisitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentages_are_parsed_and_invalid_ones_are_refused() {
        for (text, parts) in
            [("0", 0), ("100", 1_000_000), ("0.0001", 1), ("12.5%", 125_000), ("7.10", 71_000)]
        {
            assert_eq!(
                text.parse::<Percent>().map(Percent::parts_per_million),
                Ok(parts),
                "{text}"
            );
        }
        for text in ["", "%", ".", "5.", ".5", "100.0001", "101", "-1", "+1", "1.00001", "1e1", "٣"]
        {
            assert!(text.parse::<Percent>().is_err(), "{text}");
        }
        assert_eq!(Percent::new(u32::MAX), Percent::WHOLE);
        assert_eq!(Percent::new(5_050).to_string(), "0.505");
    }

    #[test]
    fn from_json() {
        let read = |json: &str| serde_json::from_str::<Percent>(json).ok();
        assert_eq!(read("0.3"), Some(Percent::new(3_000)));
        assert_eq!(read("40"), Some(Percent::new(400_000)));
        assert_eq!(read("\"99.5%\""), Some(Percent::new(995_000)));
        for json in ["-1", "100.5", "1e9", "true", "null"] {
            assert_eq!(read(json), None, "{json}");
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read(parts in 0u32..=1_000_000) {
            prop_assert_eq!(Percent::new(parts).to_string().parse(), Ok(Percent::new(parts)));
        }

        #[test]
        fn no_text_panics(text in "\\PC*|[0-9]{0,12}[.]?[0-9]{0,12}%?") {
            if let Ok(percent) = text.parse::<Percent>() {
                prop_assert!(percent <= Percent::WHOLE);
            }
        }
    }
}
