//! Sizes as people write them: `512`, `64K`, `64M`, `1G`, `2T`.
//!
//! One type serves the command line and the configuration file, so that a size means the same
//! in both. Units are binary: `K` is 1024 bytes, and `Ki` and `KiB` say the same. Decimal units
//! (`KB`, `MB`) are refused, since people disagree about what they mean. What [`Size`] displays,
//! it also parses, without loss.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, Visitor};

/// A number of bytes, written with or without a binary unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(u64);

/// The units from large to small, with the power of two each stands for.
const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

impl Size {
    /// The size of `bytes` bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

/// Why a text is no size. The message names the text; [`SizeError::remedy`] says what to write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Nothing was written.
    #[error("the size is empty")]
    Empty,
    /// The number is below zero.
    #[error("size `{0}` is negative")]
    Negative(String),
    /// The number has a fraction.
    #[error("size `{0}` is not a whole number")]
    Fraction(String),
    /// The number is followed by something that is no unit.
    #[error("size `{0}` has no known unit")]
    Unit(String),
    /// The size does not fit into 64 bits.
    #[error("size `{0}` is too large")]
    Overflow(String),
    /// The text does not start with a number.
    #[error("`{0}` is not a size")]
    NotANumber(String),
}

impl SizeError {
    /// What to write instead.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Empty | Self::Negative(_) | Self::NotANumber(_) => {
                "write a number of bytes or a number with a unit, such as 512, 64K, 32M, 1G or 2T"
            }
            Self::Fraction(_) => "use the next smaller unit, such as 1536M for one and a half G",
            Self::Unit(_) => {
                "the units are K, M, G and T (or KiB, MiB, GiB and TiB), each 1024 times the last"
            }
            Self::Overflow(_) => "the largest size is 16777215T",
        }
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let quoted = || crate::shorten(text);
        if text.is_empty() {
            return Err(SizeError::Empty);
        }
        if let Some(rest) = text.strip_prefix('-')
            && rest.starts_with(|c: char| c.is_ascii_digit())
        {
            return Err(SizeError::Negative(quoted()));
        }
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(end);
        if unit.starts_with(['.', ',']) {
            return Err(SizeError::Fraction(quoted()));
        }
        if digits.is_empty() {
            return Err(SizeError::NotANumber(quoted()));
        }
        let shift = unit_shift(unit).ok_or_else(|| SizeError::Unit(quoted()))?;
        // Only digits are left, so the one way for this to fail is a number beyond 64 bits.
        let number: u64 = digits.parse().map_err(|_| SizeError::Overflow(quoted()))?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| SizeError::Overflow(quoted()))
    }
}

/// The power of two of a unit in any of its spellings; 0 for no unit.
fn unit_shift(unit: &str) -> Option<u32> {
    let mut letters = unit.chars();
    let Some(first) = letters.next() else { return Some(0) };
    let first = first.to_ascii_uppercase();
    let shift = UNITS.iter().find(|(letter, _)| *letter == first).map(|(_, shift)| *shift)?;
    matches!(letters.as_str(), "" | "i" | "iB").then_some(shift)
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (letter, shift) in UNITS {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{letter}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeVisitor;
        impl Visitor<'_> for SizeVisitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"64M\" or a number of bytes")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Size, E> {
                u64::try_from(bytes)
                    .map(Size)
                    .map_err(|_| E::custom(SizeError::Negative(bytes.to_string())))
            }
        }
        deserializer.deserialize_any(SizeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error as ValueError, I64Deserializer, StrDeserializer};

    use super::*;

    fn parse(text: &str) -> Result<u64, SizeError> {
        text.parse().map(Size::bytes)
    }

    #[test]
    fn every_unit_and_spelling() {
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("512"), Ok(512));
        assert_eq!(parse("64K"), Ok(65_536));
        assert_eq!(parse("64k"), Ok(65_536));
        assert_eq!(parse("64Ki"), Ok(65_536));
        assert_eq!(parse("64KiB"), Ok(65_536));
        assert_eq!(parse("64M"), Ok(67_108_864));
        assert_eq!(parse("1G"), Ok(1_073_741_824));
        assert_eq!(parse("1GiB"), Ok(1_073_741_824));
        assert_eq!(parse("2T"), Ok(2_199_023_255_552));
        assert_eq!(parse("18446744073709551615"), Ok(u64::MAX));
        assert_eq!(parse("16777215T"), Ok(16_777_215 << 40));
    }

    #[test]
    fn invalid_sizes_are_refused() {
        assert_eq!(parse(""), Err(SizeError::Empty));
        assert_eq!(parse("-1"), Err(SizeError::Negative("-1".into())));
        assert_eq!(parse("1.5G"), Err(SizeError::Fraction("1.5G".into())));
        assert_eq!(parse("1,5G"), Err(SizeError::Fraction("1,5G".into())));
        assert_eq!(parse(".5G"), Err(SizeError::Fraction(".5G".into())));
        assert_eq!(parse("16777216T"), Err(SizeError::Overflow("16777216T".into())));
        assert_eq!(
            parse("18446744073709551616"),
            Err(SizeError::Overflow("18446744073709551616".into()))
        );
        for text in ["1KB", "1 G", "1P", "1GG", "1Gib", "1B", "1\u{212a}"] {
            assert_eq!(parse(text), Err(SizeError::Unit(text.into())), "{text}");
        }
        for text in ["G", "+1", " 1", "one", "-", "-G"] {
            assert_eq!(parse(text), Err(SizeError::NotANumber(text.into())), "{text}");
        }
    }

    #[test]
    fn the_advice_of_the_remedy_works() {
        assert_eq!(parse("1536M"), Ok(3 << 29));
        assert!(SizeError::Overflow(String::new()).remedy().contains("16777215T"));
        assert!(parse("16777215T").is_ok());
    }

    #[test]
    fn a_long_text_is_not_repeated_in_full() {
        let error = parse(&"x".repeat(100_000)).unwrap_err();
        assert!(error.to_string().len() < 200);
    }

    #[test]
    fn from_strings_and_integers() {
        let from_str = |text: &'static str| {
            let source: StrDeserializer<'_, ValueError> = text.into_deserializer();
            Size::deserialize(source)
        };
        let from_int = |number: i64| {
            let source: I64Deserializer<ValueError> = number.into_deserializer();
            Size::deserialize(source)
        };
        assert_eq!(from_str("4K").unwrap(), Size(4096));
        assert_eq!(from_int(4096).unwrap(), Size(4096));
        assert!(from_int(-1).unwrap_err().to_string().contains("negative"));
        assert!(from_str("4X").unwrap_err().to_string().contains("unit"));
    }

    proptest! {
        #[test]
        fn what_is_displayed_parses_back(bytes: u64, shift in 0u32..64) {
            for value in [bytes, bytes << shift, bytes >> shift] {
                prop_assert_eq!(parse(&Size(value).to_string()), Ok(value));
            }
        }

        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = parse(&text);
        }

        #[test]
        fn no_text_like_a_size_panics(text in "-?[0-9]{0,22}[.,]?[0-9]{0,3}[KMGTkmgtPB]?i?B?") {
            let _ = parse(&text);
        }
    }
}
