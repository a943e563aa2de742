//! The one table of run-time parameters, and the text form of their values.
//!
//! A value is a `u64` whatever it means: a number, bytes, or the index of a word in its list, so
//! that every parameter fits in one atomic.

use std::fmt;

use serde_json::Value;

use self::definitions::{
    BUFFER_SQUEEZE_DURATION_MS, CACHE_MAX, CACHE_MIN, CONNECTION_MEMORY, FEATURE_PERSISTENT, LOG,
    MAX_BUFFER_PAGES, MAX_BYTES, MAX_CLIENTS, MAX_PERSISTENT_GRANTS, MAX_RATIO, MAX_REQUEST,
    MIN_RATIO, PERSISTENT_GRANT_UNUSED_SECONDS, POLL_US, STRICT_LIMIT, ZONE_LIMIT_BYTES,
};
use super::error::{ParameterError, ParameterErrorKind as ErrorKind};
use crate::{Percent, Size};
use crate::{closest, shorten, suggest};

mod definitions;

/// A parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// Free pages that each queue keeps.
    MaxBufferPages,
    /// How long page pools keep nothing after a sign of memory pressure.
    BufferSqueezeDurationMs,
    /// The memory that the blocks of one size may occupy.
    ZoneLimitBytes(SizeClass),
    /// The maximum size of the cache.
    CacheMax,
    /// The size down to which the cache shrinks under memory pressure.
    CacheMin,
    /// Pages of a guest that each of its rings keeps mapped.
    MaxPersistentGrants,
    /// How long an unused page of a guest stays mapped.
    PersistentGrantUnusedSeconds,
    /// Whether persistent grants are offered to guests.
    FeaturePersistent,
    /// How long an empty ring of a guest is polled.
    PollUs,
    /// Part of the limit of dirty data that is reserved for a backing device.
    MinRatio,
    /// Largest part of it that a backing device may have.
    MaxRatio,
    /// Limit of the dirty data of a backing device.
    MaxBytes,
    /// Whether no write may exceed a backing device's threshold.
    StrictLimit,
    /// The maximum number of connections at a time.
    MaxClients,
    /// The largest READ or WRITE.
    MaxRequest,
    /// The memory the requests of one connection may hold.
    ConnectionMemory,
    /// The log level.
    Log,
}

/// One of the block sizes in which I/O memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SizeClass(u8);

/// The size classes as they are written, from small to large.
const CLASSES: [&str; 9] = ["4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K", "1M"];

/// What a parameter applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterScope {
    /// The daemon as a whole.
    Daemon,
    /// The daemon; each volume may have its own value.
    Volume,
    /// Each backing device; the daemon has no value of its own.
    Bdi,
}

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number.
    Number,
    /// A number of bytes, also written with a unit: "32M".
    Size,
    /// A part of a whole in percent, as a [`Percent`] counts it: in parts per million.
    Percent,
    /// One of these words; the number of a value is its index.
    Word(&'static [&'static str]),
}

/// The definition of a parameter.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// The name. Those of a family are written `NAME.MEMBER`.
    pub name: &'static str,
    /// The members of a family; empty for a single parameter.
    pub members: &'static [&'static str],
    /// What it applies to.
    pub scope: ParameterScope,
    /// The type of its values.
    pub kind: Kind,
    /// The unit of its values.
    pub unit: &'static str,
    /// The value if none is configured or set.
    pub default: u64,
    /// The smallest value.
    pub minimum: u64,
    /// The largest value.
    pub maximum: u64,
    /// What 0 means if it is allowed below `minimum`.
    pub zero: Option<&'static str>,
    /// The key of the configuration file, as written there.
    pub config: Option<&'static str>,
    /// The version of ebbd that introduced it.
    pub since: &'static str,
    /// When a change takes effect: sentences.
    pub effect: &'static str,
    /// What it does: paragraphs, separated by an empty line.
    pub doc: &'static str,
}

/// All definitions, in the order they are listed.
pub(super) const DEFINITIONS: [&Definition; 17] = [
    &MAX_BUFFER_PAGES,
    &BUFFER_SQUEEZE_DURATION_MS,
    &ZONE_LIMIT_BYTES,
    &CACHE_MAX,
    &CACHE_MIN,
    &MAX_PERSISTENT_GRANTS,
    &PERSISTENT_GRANT_UNUSED_SECONDS,
    &FEATURE_PERSISTENT,
    &POLL_US,
    &MIN_RATIO,
    &MAX_RATIO,
    &MAX_BYTES,
    &STRICT_LIMIT,
    &MAX_CLIENTS,
    &MAX_REQUEST,
    &CONNECTION_MEMORY,
    &LOG,
];

impl SizeClass {
    /// The classes from small to large.
    pub fn all() -> impl Iterator<Item = Self> {
        (0u8..).take(CLASSES.len()).map(Self)
    }

    /// The place among the classes, from 0.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The class as it is written: "4K" to "1M".
    pub fn as_str(self) -> &'static str {
        CLASSES.get(self.index()).copied().unwrap_or_default()
    }

    /// The size of a block, bytes: 4096 to 1048576.
    pub fn bytes(self) -> u64 {
        4096 << self.0
    }
}

impl Key {
    /// All parameters, in the order they are listed.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::MaxBufferPages, Self::BufferSqueezeDurationMs]
            .into_iter()
            .chain(SizeClass::all().map(Self::ZoneLimitBytes))
            .chain([Self::CacheMax, Self::CacheMin])
            .chain([
                Self::MaxPersistentGrants,
                Self::PersistentGrantUnusedSeconds,
                Self::FeaturePersistent,
                Self::PollUs,
            ])
            .chain(Self::per_bdi())
            .chain([Self::MaxClients, Self::MaxRequest, Self::ConnectionMemory, Self::Log])
    }

    /// Those a volume may have its own value of.
    pub fn per_volume() -> impl Iterator<Item = Self> {
        Self::all().filter(|key| key.definition().scope == ParameterScope::Volume)
    }

    /// Those the daemon has a value of.
    pub fn of_daemon() -> impl Iterator<Item = Self> {
        Self::all().filter(|key| key.definition().scope != ParameterScope::Bdi)
    }

    /// Those a backing device has a value of.
    pub fn per_bdi() -> impl Iterator<Item = Self> {
        [Self::MinRatio, Self::MaxRatio, Self::MaxBytes, Self::StrictLimit].into_iter()
    }

    /// What is said of it.
    pub fn definition(self) -> &'static Definition {
        match self {
            Self::MaxBufferPages => &MAX_BUFFER_PAGES,
            Self::BufferSqueezeDurationMs => &BUFFER_SQUEEZE_DURATION_MS,
            Self::ZoneLimitBytes(_) => &ZONE_LIMIT_BYTES,
            Self::CacheMax => &CACHE_MAX,
            Self::CacheMin => &CACHE_MIN,
            Self::MaxPersistentGrants => &MAX_PERSISTENT_GRANTS,
            Self::PersistentGrantUnusedSeconds => &PERSISTENT_GRANT_UNUSED_SECONDS,
            Self::FeaturePersistent => &FEATURE_PERSISTENT,
            Self::PollUs => &POLL_US,
            Self::MinRatio => &MIN_RATIO,
            Self::MaxRatio => &MAX_RATIO,
            Self::MaxBytes => &MAX_BYTES,
            Self::StrictLimit => &STRICT_LIMIT,
            Self::MaxClients => &MAX_CLIENTS,
            Self::MaxRequest => &MAX_REQUEST,
            Self::ConnectionMemory => &CONNECTION_MEMORY,
            Self::Log => &LOG,
        }
    }

    /// The name: that of the definition, with the member of a family.
    pub fn name(self) -> String {
        let name = self.definition().name;
        match self {
            Self::ZoneLimitBytes(class) => format!("{name}.{}", class.as_str()),
            _ => name.to_owned(),
        }
    }

    /// The parameter called `name`.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownParameter`] with the name that was probably meant.
    pub fn parse(name: &str) -> Result<Self, ParameterError> {
        if let Some(key) = Self::all().find(|key| key.name() == name) {
            return Ok(key);
        }
        let names: Vec<String> = Self::all().map(Self::name).collect();
        let family = DEFINITIONS.iter().find(|d| d.name == name && !d.members.is_empty());
        let remedy = match family {
            Some(family) => format!(
                "it is a family: name a member, {name}.{} to {name}.{}",
                family.members.first().unwrap_or(&""),
                family.members.last().unwrap_or(&""),
            ),
            None => match closest(name, names.iter().map(String::as_str)) {
                Some(name) => format!("did you mean `{name}`?"),
                None => {
                    let all: Vec<&str> = DEFINITIONS.iter().map(|d| d.name).collect();
                    format!("the parameters are {}", all.join(", "))
                }
            },
        };
        let message = format!("there is no parameter `{}`", shorten(name));
        Err(ParameterError::new(ErrorKind::UnknownParameter, message, remedy))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

fn percent(value: u64) -> Percent {
    Percent::new(u32::try_from(value).unwrap_or(u32::MAX))
}

impl Definition {
    /// The text form of a value: `1024`, `32M`, `info`.
    pub fn text(&self, value: u64) -> String {
        match self.kind {
            Kind::Number => value.to_string(),
            Kind::Size => Size::new(value).to_string(),
            Kind::Percent => percent(value).to_string(),
            Kind::Word(words) => {
                let at = usize::try_from(value).unwrap_or(usize::MAX);
                words.get(at).copied().unwrap_or_default().to_owned()
            }
        }
    }

    /// A value as JSON: a number, or a string for a word.
    pub fn json(&self, value: u64) -> Value {
        match self.kind {
            Kind::Number | Kind::Size => value.into(),
            // A JSON number: the text form of a percentage always is one.
            Kind::Percent => serde_json::from_str(&percent(value).to_string()).unwrap_or_default(),
            Kind::Word(_) => self.text(value).into(),
        }
    }

    /// The range in words: `0 to 60000`.
    pub fn range(&self) -> String {
        if let Kind::Word(words) = self.kind {
            return words.join(", ");
        }
        let zero = self.zero.map(|what| format!("0 ({what}) or ")).unwrap_or_default();
        if self.maximum == u64::MAX {
            return format!("{zero}{} or more", self.text(self.minimum));
        }
        format!("{zero}{} to {}", self.text(self.minimum), self.text(self.maximum))
    }

    /// Whether `value` is within the range.
    pub fn allows(&self, value: u64) -> bool {
        (self.minimum..=self.maximum).contains(&value) || (value == 0 && self.zero.is_some())
    }

    /// Parses a value: a JSON number, or a string in the form of [`Self::text`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidValue`] or [`ErrorKind::OutOfRange`].
    pub fn parse(&self, given: &Value) -> Result<u64, ParameterError> {
        let value = match given {
            Value::Number(number) if self.kind == Kind::Percent => {
                self.parse_text(&number.to_string())
            }
            Value::Number(number) if !matches!(self.kind, Kind::Word(_)) => number.as_u64(),
            Value::String(text) => self.parse_text(text),
            _ => None,
        };
        let given = match given {
            Value::String(text) => shorten(text),
            other => shorten(&other.to_string()),
        };
        let value = value.ok_or_else(|| {
            let remedy = match (self.kind, given.as_str()) {
                (Kind::Word(words), text) => suggest(text, words.iter().copied(), "the values are"),
                (Kind::Number, _) => format!("write a whole number: {}", self.range()),
                (Kind::Percent, _) => format!("write a number of percent: {}", self.range()),
                (Kind::Size, _) => {
                    format!("write a number of bytes or a size such as 32M: {}", self.range())
                }
            };
            let message = format!("`{given}` is not a value of {}", self.name);
            ParameterError::new(ErrorKind::InvalidValue, message, remedy)
        })?;
        if self.allows(value) {
            return Ok(value);
        }
        Err(ParameterError::new(
            ErrorKind::OutOfRange,
            format!("{} of {} is out of range", given, self.name),
            format!("choose {}", self.range()),
        ))
    }

    fn parse_text(&self, text: &str) -> Option<u64> {
        match self.kind {
            // `u64::from_str` also takes a plus sign.
            Kind::Number if text.starts_with('+') => None,
            Kind::Number => text.parse().ok(),
            Kind::Size => text.parse().ok().map(Size::bytes),
            Kind::Percent => {
                text.parse().ok().map(|part: Percent| u64::from(part.parts_per_million()))
            }
            Kind::Word(words) => {
                words.iter().position(|word| *word == text).and_then(|at| u64::try_from(at).ok())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::keys::SECTIONS;
    use crate::{Choice, LogLevel};

    #[test]
    fn every_definition_is_listed_and_consistent() {
        let mut names: Vec<&str> = Key::all().map(|key| key.definition().name).collect();
        names.dedup();
        let listed: Vec<&str> = DEFINITIONS.iter().map(|definition| definition.name).collect();
        assert_eq!(names, listed, "each definition is listed once, in the order of its keys");
        for key in Key::all() {
            let definition = key.definition();
            assert!(definition.allows(definition.default), "{key}");
            assert!(definition.minimum <= definition.maximum, "{key}");
            assert!(definition.effect.ends_with('.') && definition.doc.ends_with('.'), "{key}");
            assert_eq!(Key::parse(&key.name()), Ok(key));
            for value in [definition.default, definition.minimum, definition.maximum] {
                let text = Value::String(definition.text(value));
                assert_eq!(definition.parse(&text), Ok(value), "{key}");
                assert_eq!(definition.parse(&definition.json(value)), Ok(value), "{key}");
            }
        }
        let classes: Vec<u64> = SizeClass::all().map(SizeClass::bytes).collect();
        let written: Vec<u64> =
            CLASSES.iter().map(|class| class.parse::<Size>().unwrap().bytes()).collect();
        assert_eq!(classes, written);
    }

    #[test]
    fn the_words_and_defaults_are_those_of_the_configuration() {
        assert!(LogLevel::names().eq(definitions::LEVELS.iter().copied()));
        for definition in DEFINITIONS {
            let Some(path) = definition.config else { continue };
            let (header, name) = path.rsplit_once('.').unwrap_or(("", path));
            let section = SECTIONS.iter().find(|section| section.header == header).unwrap();
            let key = section.find(name).unwrap_or_else(|| panic!("no key {path}"));
            let default = match definition.kind {
                // The file has a switch as true or false.
                Kind::Word(["off", "on"]) => (definition.default == 1).to_string(),
                _ => definition.text(definition.default),
            };
            assert_eq!(key.default, default, "{path}");
            let volume = SECTIONS.iter().find(|section| section.header == "volume.NAME").unwrap();
            if definition.scope == ParameterScope::Bdi {
                assert_eq!(header, "bdi.NAME");
                continue;
            }
            assert_eq!(
                volume.find(name).is_some(),
                definition.scope == ParameterScope::Volume,
                "{path} in [volume.NAME]"
            );
        }
    }

    #[test]
    fn unknown_names_get_a_suggestion() {
        let remedy = |name: &str| Key::parse(name).unwrap_err().remedy;
        assert_eq!(remedy("max_bufer_pages"), "did you mean `max_buffer_pages`?");
        assert_eq!(remedy("max-clients"), "did you mean `max_clients`?");
        assert!(remedy("zone_limit_bytes").contains("zone_limit_bytes.4K to zone_limit_bytes.1M"));
        assert!(remedy("zebra").starts_with("the parameters are max_buffer_pages, "));
        let error = Key::parse(&"x\n".repeat(100_000)).unwrap_err();
        assert!(error.message.len() < 300 && !error.message.contains('\n'));
    }

    #[test]
    fn values_are_parsed_and_invalid_ones_are_refused() {
        let refused = |key: Key, json: &str| {
            let error = key.definition().parse(&serde_json::from_str(json).unwrap()).unwrap_err();
            (error.kind, error.remedy)
        };
        let parse = |key: Key, json: &str| {
            key.definition().parse(&serde_json::from_str(json).unwrap()).unwrap()
        };
        assert_eq!(parse(Key::MaxBufferPages, "0"), 0);
        assert_eq!(parse(Key::MaxBufferPages, "\"1048576\""), 1 << 20);
        assert_eq!(parse(Key::MaxRequest, "\"1M\""), 1 << 20);
        assert_eq!(parse(Key::MaxRequest, "1048576"), 1 << 20);
        assert_eq!(parse(Key::Log, "\"debug\""), 3);
        let zone = Key::ZoneLimitBytes(SizeClass(0));
        assert_eq!(parse(zone, "0"), 0);
        assert_eq!(parse(zone, "\"2M\""), 2 << 20);
        assert_eq!(refused(zone, "1").0, ErrorKind::OutOfRange);
        assert_eq!(refused(Key::MaxBufferPages, "1048577").0, ErrorKind::OutOfRange);
        assert_eq!(refused(Key::MaxClients, "0").1, "choose 1 to 65536");
        for json in ["-1", "1.5", "null", "true", "[]", "{}", "\"+1\"", "\"1K\"", "\"\"", "1e99"] {
            assert_eq!(refused(Key::MaxBufferPages, json).0, ErrorKind::InvalidValue, "{json}");
        }
        assert_eq!(refused(Key::Log, "\"inof\"").1, "did you mean `info`?");
        assert_eq!(refused(Key::Log, "2").0, ErrorKind::InvalidValue);
    }

    proptest! {
        #[test]
        fn no_text_panics_and_every_parsed_value_is_in_range(text in "\\PC*|[0-9]{0,22}[KMGT]?") {
            for key in Key::all() {
                let definition = key.definition();
                if let Ok(value) = definition.parse(&Value::String(text.clone())) {
                    prop_assert!(definition.allows(value));
                    prop_assert_eq!(definition.parse(&definition.json(value)), Ok(value));
                }
            }
        }
    }
}
