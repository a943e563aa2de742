//! What the table says of a parameter, its key, and the text form of its values.
//!
//! A value is a `u64` whatever it means: a number, bytes, or the index of a word in its list, so
//! that every parameter fits in one atomic.

use std::fmt;
use std::marker::PhantomData;

use ebb_param::ParameterValue;
use serde_json::Value;

use super::error::{ParameterError, ParameterErrorKind as ErrorKind};
use super::names::{name_number, name_text, too_many_names};
use crate::keys;
use crate::{Choice, LogLevel, Percent, Size};
use crate::{closest, shorten, suggest};

/// What a parameter applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ParameterScope {
    /// The daemon as a whole.
    Daemon,
    /// The daemon; each volume may have its own value.
    Volume,
    /// Each backing device; the daemon has no value of its own.
    Bdi,
    /// The daemon, each volume, and each group of volumes with limits in common.
    VolumeAndGroup,
    /// Each group of volumes with limits in common; the daemon has no value that a group uses.
    LimitGroup,
}

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A whole number.
    Number,
    /// A number of bytes, also written with a unit: "32M".
    Size,
    /// A part of a whole in percent, as a [`Percent`] counts it: in parts per million.
    Percent,
    /// One of these words; the number of a value is its index.
    Word(&'static [&'static str]),
    /// A name, or `none`; the number of a value is that of the name in this process ([`super::name_number`]), 0 for none.
    Name,
}

/// The definition of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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

/// A parameter: a definition, or one member of a family.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    definition: &'static Definition,
    member: usize,
}

/// A parameter with the type of its values.
#[derive(Clone, Copy)]
pub struct TypedKey<T> {
    key: Key,
    value: PhantomData<fn() -> T>,
}

/// A list of parameters.
#[derive(Clone, Copy, Debug)]
pub struct ParameterTable(pub(super) &'static [&'static Definition]);

impl Key {
    /// Its definition.
    pub const fn definition(self) -> &'static Definition {
        self.definition
    }

    /// The name of a member of a family, such as "4K"; empty for a single parameter.
    pub fn member(self) -> &'static str {
        self.definition.members.get(self.member).copied().unwrap_or_default()
    }

    /// The name: that of the definition, with the member of a family.
    pub fn name(self) -> String {
        match self.member() {
            "" => self.definition.name.to_owned(),
            member => format!("{}.{member}", self.definition.name),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl<T> TypedKey<T> {
    /// The key of a single parameter.
    pub(super) const fn new(definition: &'static Definition) -> Self {
        Self { key: Key { definition, member: 0 }, value: PhantomData }
    }

    /// The key without its type.
    pub const fn key(self) -> Key {
        self.key
    }

    /// Its definition.
    pub const fn definition(self) -> &'static Definition {
        self.key.definition
    }

    /// The keys of a family.
    pub fn members(self) -> impl Iterator<Item = Self> {
        let Key { definition, .. } = self.key;
        let key = move |member| Key { definition, member };
        (0..definition.members.len()).map(move |at| Self { key: key(at), value: PhantomData })
    }
}

impl ParameterTable {
    /// All parameters, in the order they are listed.
    pub fn keys(self) -> impl Iterator<Item = Key> {
        self.0.iter().flat_map(|definition| {
            (0..definition.members.len().max(1)).map(|member| Key { definition, member })
        })
    }

    /// Those that the owners of a kind have values of, in order.
    pub fn keys_of(self, owner: ParameterScope) -> impl Iterator<Item = Key> {
        self.keys().filter(move |key| match (owner, key.definition.scope) {
            (ParameterScope::Daemon, scope) => scope != ParameterScope::Bdi,
            (
                ParameterScope::Volume | ParameterScope::LimitGroup,
                ParameterScope::VolumeAndGroup,
            ) => true,
            (owner, scope) => owner == scope,
        })
    }

    /// The parameter called `name`.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownParameter`] with the name that was probably meant.
    pub fn parse(self, name: &str) -> Result<Key, ParameterError> {
        if let Some(key) = self.keys().find(|key| key.name() == name) {
            return Ok(key);
        }
        let names: Vec<String> = self.keys().map(Key::name).collect();
        let family = self.0.iter().find(|d| d.name == name && !d.members.is_empty());
        let remedy = match family {
            Some(family) => format!(
                "it is a family: name a member, {name}.{} to {name}.{}",
                family.members.first().unwrap_or(&""),
                family.members.last().unwrap_or(&""),
            ),
            None => match closest(name, names.iter().map(String::as_str)) {
                _ if keys::top_names().any(|key| key == name) => {
                    "it is a key of the configuration file: change it there, and `ebbd reload` reports \
                     whether it needs a restart"
                        .to_owned()
                }
                Some(name) => format!("did you mean `{name}`?"),
                None => {
                    let all: Vec<&str> = self.0.iter().map(|d| d.name).collect();
                    format!("the parameters are {}", all.join(", "))
                }
            },
        };
        let message = format!("there is no parameter `{}`", shorten(name));
        Err(ParameterError::new(ErrorKind::UnknownParameter, message, remedy))
    }
}

impl ParameterValue for LogLevel {
    fn from_bits(bits: u64) -> LogLevel {
        let level = usize::try_from(bits).ok().and_then(|at| LogLevel::ALL.get(at));
        level.map_or(LogLevel::Debug, |(_, level)| *level)
    }

    fn to_bits(self) -> u64 {
        let at = LogLevel::ALL.iter().position(|(_, level)| *level == self);
        at.map_or(0, ParameterValue::to_bits)
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
            Kind::Name => name_text(value),
        }
    }

    /// A value as JSON: a number, or a string for a word.
    pub fn json(&self, value: u64) -> Value {
        match self.kind {
            Kind::Number | Kind::Size => value.into(),
            // A JSON number: the text form of a percentage always is one.
            Kind::Percent => serde_json::from_str(&percent(value).to_string()).unwrap_or_default(),
            Kind::Word(_) | Kind::Name => self.text(value).into(),
        }
    }

    /// The range in words: `0 to 60000`.
    pub fn range(&self) -> String {
        if let Kind::Word(words) = self.kind {
            return words.join(", ");
        }
        if self.kind == Kind::Name {
            return "a name, or none".to_owned();
        }
        let zero = self.zero.map(|what| format!("0 ({what}) or ")).unwrap_or_default();
        if self.maximum == u64::MAX {
            return format!("{zero}{} or more", self.text(self.minimum));
        }
        format!("{zero}{} to {}", self.text(self.minimum), self.text(self.maximum))
    }

    /// Whether `value` is within the range.
    pub fn allows(&self, value: u64) -> bool {
        (self.minimum..=self.maximum).contains(&value)
            || self.kind == Kind::Name
            || (value == 0 && self.zero.is_some())
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
            Value::Number(number) if !matches!(self.kind, Kind::Word(_) | Kind::Name) => {
                number.as_u64()
            }
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
                (Kind::Name, _) => {
                    "write a name of 1 to 255 bytes without control characters, or none".to_owned()
                }
                (Kind::Number, _) => format!("write a whole number: {}", self.range()),
                (Kind::Percent, _) => format!("write a number of percent: {}", self.range()),
                (Kind::Size, _) => {
                    format!("write a number of bytes or a size such as 32M: {}", self.range())
                }
            };
            if let (Kind::Name, Some((message, remedy))) = (self.kind, too_many_names()) {
                return ParameterError::new(ErrorKind::InvalidValue, message, remedy);
            }
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
            Kind::Name => name_number(text),
            Kind::Word(words) => {
                words.iter().position(|word| *word == text).and_then(|at| u64::try_from(at).ok())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::table::{
        BLOCK_SIZES, LEVELS, LOG, MAX_BUFFER_PAGES, MAX_CLIENTS, MAX_REQUEST, TABLE,
        ZONE_LIMIT_BYTES,
    };
    use super::*;
    use crate::keys::SECTIONS;

    #[test]
    fn every_definition_is_listed_and_consistent() {
        let source = include_str!("table.rs");
        let defined = source.lines().filter_map(|line| line.strip_prefix("pub const "));
        let defined = defined.filter_map(|line| line.split_once(": TypedKey<"));
        let listed = |name: &str| source.contains(&format!("    {name}.definition(),\n"));
        let names: Vec<&str> = defined.map(|(name, _)| name).collect();
        assert_eq!(names.len(), TABLE.0.len());
        for (name, definition) in names.iter().zip(TABLE.0) {
            assert!(listed(name), "{name} is not in TABLE");
            assert_eq!(name.to_lowercase(), definition.name, "they are listed in their order");
        }
        for key in TABLE.keys() {
            let definition = key.definition();
            assert!(definition.allows(definition.default), "{key}");
            assert!(definition.minimum <= definition.maximum, "{key}");
            assert!(definition.effect.ends_with('.') && definition.doc.ends_with('.'), "{key}");
            assert!(!definition.unit.is_empty() && !definition.since.is_empty(), "{key}");
            assert_eq!(TABLE.parse(&key.name()), Ok(key));
            for value in [definition.default, definition.minimum, definition.maximum] {
                let text = Value::String(definition.text(value));
                assert_eq!(definition.parse(&text), Ok(value), "{key}");
                assert_eq!(definition.parse(&definition.json(value)), Ok(value), "{key}");
            }
        }
        for (class, written) in BLOCK_SIZES.iter().enumerate() {
            assert_eq!(written.parse::<Size>().unwrap().bytes(), 4096 << class);
        }
    }

    #[test]
    fn a_log_level_is_the_word_with_its_number() {
        for (word, level) in LogLevel::ALL {
            assert_eq!(LOG.definition().text(level.to_bits()), *word);
            assert_eq!(LogLevel::from_bits(level.to_bits()), *level);
        }
    }

    #[test]
    fn the_words_and_defaults_are_those_of_the_configuration() {
        assert!(LogLevel::names().eq(LEVELS.iter().copied()));
        for definition in TABLE.0 {
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
                matches!(definition.scope, ParameterScope::Volume | ParameterScope::VolumeAndGroup),
                "{path} in [volume.NAME]"
            );
        }
    }

    #[test]
    fn unknown_names_get_a_suggestion() {
        let remedy = |name: &str| TABLE.parse(name).unwrap_err().remedy;
        assert_eq!(remedy("max_bufer_pages"), "did you mean `max_buffer_pages`?");
        assert_eq!(remedy("max-clients"), "did you mean `max_clients`?");
        assert!(remedy("zone_limit_bytes").contains("zone_limit_bytes.4K to zone_limit_bytes.1M"));
        assert!(remedy("zebra").starts_with("the parameters are max_buffer_pages, "));
        let error = TABLE.parse(&"x\n".repeat(100_000)).unwrap_err();
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
        assert_eq!(parse(MAX_BUFFER_PAGES.key(), "0"), 0);
        assert_eq!(parse(MAX_BUFFER_PAGES.key(), "\"1048576\""), 1 << 20);
        assert_eq!(parse(MAX_REQUEST.key(), "\"1M\""), 1 << 20);
        assert_eq!(parse(MAX_REQUEST.key(), "1048576"), 1 << 20);
        assert_eq!(parse(LOG.key(), "\"debug\""), 3);
        let zone = ZONE_LIMIT_BYTES.key();
        assert_eq!(parse(zone, "0"), 0);
        assert_eq!(parse(zone, "\"2M\""), 2 << 20);
        assert_eq!(refused(zone, "1").0, ErrorKind::OutOfRange);
        assert_eq!(refused(MAX_BUFFER_PAGES.key(), "1048577").0, ErrorKind::OutOfRange);
        assert_eq!(refused(MAX_CLIENTS.key(), "0").1, "choose 1 to 65536");
        for json in ["-1", "1.5", "null", "true", "[]", "{}", "\"+1\"", "\"1K\"", "\"\"", "1e99"] {
            assert_eq!(refused(MAX_BUFFER_PAGES.key(), json).0, ErrorKind::InvalidValue, "{json}");
        }
        assert_eq!(refused(LOG.key(), "\"inof\"").1, "did you mean `info`?");
        assert_eq!(refused(LOG.key(), "2").0, ErrorKind::InvalidValue);
    }

    proptest! {
        #[test]
        fn no_text_panics_and_every_parsed_value_is_in_range(text in "\\PC*|[0-9]{0,22}[KMGT]?") {
            for key in TABLE.keys() {
                let definition = key.definition();
                if let Ok(value) = definition.parse(&Value::String(text.clone())) {
                    prop_assert!(definition.allows(value));
                    prop_assert_eq!(definition.parse(&definition.json(value)), Ok(value));
                }
            }
        }
    }
}
