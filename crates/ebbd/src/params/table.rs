//! The one table of run-time parameters, and how their values read.
//!
//! A value is a `u64` whatever it means: a number, bytes, or the place of a word in its list. So
//! every parameter fits one atomic.

use std::fmt;

use serde_json::Value;

use super::error::{ParameterError, ParameterErrorKind as ErrorKind};
use crate::config::{closest, shorten, suggest};
use crate::size::Size;

/// A parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// Free pages each queue keeps.
    MaxBufferPages,
    /// How long pools keep nothing after a sign of memory pressure.
    BufferSqueezeDurationMs,
    /// The memory the blocks of one size may take.
    ZoneLimitBytes(SizeClass),
    /// The most the cache may hold.
    CacheMax,
    /// What the cache keeps under memory pressure.
    CacheMin,
    /// Pages of a guest that each of its rings keeps mapped.
    MaxPersistentGrants,
    /// How long a page that is kept mapped may lie idle.
    PersistentGrantUnusedSeconds,
    /// Whether guests are offered that their pages stay mapped.
    FeaturePersistent,
    /// Connections at a time.
    MaxClients,
    /// The largest READ or WRITE.
    MaxRequest,
    /// The memory the requests of one connection may hold.
    ConnectionMemory,
    /// What goes to the log.
    Log,
}

/// A size of blocks that I/O memory is handed out in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SizeClass(u8);

/// The size classes as they are written, from small to large.
const CLASSES: [&str; 9] = ["4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K", "1M"];

/// Whom a parameter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The daemon as a whole.
    Daemon,
    /// The daemon, and each volume may have its own value.
    Volume,
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number.
    Number,
    /// A number of bytes, also written with a unit: "32M".
    Size,
    /// A word out of these; the number of a value counts them from 0.
    Word(&'static [&'static str]),
}

/// What is said of a parameter.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// The name. Those of a family are written `NAME.MEMBER`.
    pub name: &'static str,
    /// What tells the members of a family apart; empty for a single parameter.
    pub members: &'static [&'static str],
    /// Whom it belongs to.
    pub scope: Scope,
    /// What its values are.
    pub kind: Kind,
    /// What is counted.
    pub unit: &'static str,
    /// The value if nobody says anything.
    pub default: u64,
    /// The smallest value.
    pub minimum: u64,
    /// The largest value.
    pub maximum: u64,
    /// What 0 means if it is allowed below `minimum`.
    pub zero: Option<&'static str>,
    /// The key of the configuration file, as written there.
    pub config: Option<&'static str>,
    /// The version of ebbd that had it first.
    pub since: &'static str,
    /// When a change takes effect: sentences.
    pub effect: &'static str,
    /// What it does: paragraphs, separated by an empty line.
    pub doc: &'static str,
}

const SWITCH: &[&str] = &["off", "on"];
const LEVELS: &[&str] = &["error", "warn", "info", "debug"];

const MAX_BUFFER_PAGES: Definition = Definition {
    name: "max_buffer_pages",
    members: &[],
    scope: Scope::Volume,
    kind: Kind::Number,
    unit: "pages of 4096 bytes, for each queue",
    default: 1024,
    minimum: 0,
    maximum: 1 << 20,
    zero: None,
    config: Some("max_buffer_pages"),
    since: "0.1.0",
    effect: "The next time a queue has no request under way, 100 ms later at most. A smaller \
             value gives pages back then, a larger one lets the pool keep more of what requests \
             bring.",
    doc: "How many free pages each queue keeps for the requests to come. A queue's pool starts \
          with none and grows on demand while requests are carried out: the value does not limit \
          how much memory requests take, only how much stays behind them.\n\n\
          0 keeps nothing. Under memory pressure the limit is 0 for buffer_squeeze_duration_ms, \
          whatever the value.",
};

const BUFFER_SQUEEZE_DURATION_MS: Definition = Definition {
    name: "buffer_squeeze_duration_ms",
    members: &[],
    scope: Scope::Volume,
    kind: Kind::Number,
    unit: "milliseconds",
    default: 10,
    minimum: 0,
    maximum: 60_000,
    zero: None,
    config: Some("buffer_squeeze_duration_ms"),
    since: "0.1.0",
    effect: "At the next sign of memory pressure. A squeeze that is under way keeps its end.",
    doc: "How long pools of free pages keep nothing after a sign of memory pressure. Each further \
          sign starts the time again. Idle queues are woken to give back theirs.\n\n\
          A longer time gives back more of what requests bring meanwhile and costs more \
          allocations. 0 gives back what is free at the moment of the sign and lets pools grow at \
          once again.",
};

const ZONE_LIMIT_BYTES: Definition = Definition {
    name: "zone_limit_bytes",
    members: &CLASSES,
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 2 << 20,
    maximum: 1 << 40,
    zero: Some("no limit"),
    config: None,
    since: "0.1.0",
    effect: "At once for memory to be taken. Memory above a smaller limit stays until it is free.",
    doc: "The most memory that blocks of one size may take, in use and free together. There is \
          one parameter for each size of blocks: zone_limit_bytes.4K to zone_limit_bytes.1M.\n\n\
          A request that finds its zone at the limit waits until a block is free; requests wait in \
          their order. The smallest limit, 2M, is the unit in which zones take memory. 0 is no \
          limit: memory pressure alone decides.",
};

const CACHE_MAX: Definition = Definition {
    name: "cache_max",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 1 << 20,
    maximum: 1 << 40,
    zero: Some("as the host allows"),
    config: Some("cache_max"),
    since: "0.1.0",
    effect: "At once. What the cache holds above a smaller value goes within a second, the coldest \
             first.",
    doc: "The most memory the cache of all volumes together may hold, wired or lent \
          (`bufspace`).\n\n\
          0 leaves it to the host: the cache grows while memory is free, up to four fifths of \
          what the host, or the daemon's control group, has. Most of it is lent to the kernel, \
          which takes it back by itself when others need it, so that there is seldom a reason to \
          set a limit.",
};

const CACHE_MIN: Definition = Definition {
    name: "cache_min",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 0,
    minimum: 0,
    maximum: 1 << 40,
    zero: None,
    config: Some("cache_min"),
    since: "0.1.0",
    effect: "At the next sign of memory pressure.",
    doc: "What the cache keeps at levels L1 and L2 of memory pressure; it must not be more than \
          cache_max. The last resort, L3, gives back all of it.\n\n\
          The memory is not reserved: the cache only stops shrinking there. What the kernel takes \
          of the lent part by itself it takes whatever the value.",
};

const MAX_PERSISTENT_GRANTS: Definition = Definition {
    name: "max_persistent_grants",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Number,
    unit: "grants, for each ring of a Xen guest",
    default: 1056,
    minimum: 0,
    maximum: 1 << 20,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "At once for grants to be mapped. A ring that holds more gives back the excess and 5 % \
             of the value, the least recently used first, within 100 ms.",
    doc: "How many pages of a Xen guest each of its rings keeps mapped, so that requests that use \
          them again need no call of the hypervisor. It applies to guests that agreed on \
          persistent grants (feature_persistent); 1056 is what one ring page of requests with 32 \
          segments each, and their descriptors, can name.\n\n\
          A guest that uses more pages than that is served as well: what finds no place is copied \
          by the hypervisor, and each 100 ms the least recently used 5 % of the value make room. 0 \
          keeps nothing mapped.",
};

const PERSISTENT_GRANT_UNUSED_SECONDS: Definition = Definition {
    name: "persistent_grant_unused_seconds",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Number,
    unit: "seconds",
    default: 60,
    minimum: 0,
    maximum: 86_400,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "Within 100 ms, also for grants that are mapped already.",
    doc: "How long a page of a Xen guest stays mapped that no request uses. Then it is unmapped, \
          and the guest can have it back. 0 is for ever, but memory pressure of the second level \
          unmaps everything that is idle, whatever the value.",
};

const FEATURE_PERSISTENT: Definition = Definition {
    name: "feature_persistent",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Word(SWITCH),
    unit: "switch",
    default: 1,
    minimum: 0,
    maximum: 1,
    zero: None,
    config: None,
    since: "0.1.0",
    effect: "For disks that connect from then on. Those connected keep what they agreed on, also \
             across a restart of the daemon.",
    doc: "Whether Xen guests are offered persistent grants: that pages they use for requests stay \
          mapped by the daemon and are used again. Both sides have to want it; a guest without \
          them has its pages copied by the hypervisor, several requests at a time.",
};

const MAX_CLIENTS: Definition = Definition {
    name: "max_clients",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Number,
    unit: "connections",
    default: 256,
    minimum: 1,
    maximum: 65_536,
    zero: None,
    config: Some("nbd.max_clients"),
    since: "0.1.0",
    effect: "For the next client. Nobody who is connected is sent away.",
    doc: "The number of NBD connections the daemon holds at a time. One more is closed before its \
          handshake, and the log says so.",
};

const MAX_REQUEST: Definition = Definition {
    name: "max_request",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 32 << 20,
    minimum: 4 << 10,
    maximum: 64 << 20,
    zero: None,
    config: Some("nbd.max_request"),
    since: "0.1.0",
    effect: "For connections to come: a client is told the value in its handshake.",
    doc: "The largest payload of one READ or WRITE request. It must fit into connection_memory.",
};

const CONNECTION_MEMORY: Definition = Definition {
    name: "connection_memory",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Size,
    unit: "bytes",
    default: 64 << 20,
    minimum: 4 << 10,
    maximum: u64::MAX,
    zero: None,
    config: Some("nbd.connection_memory"),
    since: "0.1.0",
    effect: "For connections to come.",
    doc: "The memory the requests of one connection may hold, max_request or more. Requests that \
          would need more wait in the socket.",
};

const LOG: Definition = Definition {
    name: "log",
    members: &[],
    scope: Scope::Daemon,
    kind: Kind::Word(LEVELS),
    unit: "level",
    default: 2,
    minimum: 0,
    maximum: 3,
    zero: None,
    config: Some("log"),
    since: "0.1.0",
    effect: "At once.",
    doc: "What goes to the log on stderr, each level with all before it: error (what the daemon \
          could not do), warn (what an operator should look at), info (start, stop, reload, \
          connections), debug (why).",
};

/// All definitions, in the order they are listed.
pub const DEFINITIONS: [&Definition; 12] = [
    &MAX_BUFFER_PAGES,
    &BUFFER_SQUEEZE_DURATION_MS,
    &ZONE_LIMIT_BYTES,
    &CACHE_MAX,
    &CACHE_MIN,
    &MAX_PERSISTENT_GRANTS,
    &PERSISTENT_GRANT_UNUSED_SECONDS,
    &FEATURE_PERSISTENT,
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
            ])
            .chain([Self::MaxClients, Self::MaxRequest, Self::ConnectionMemory, Self::Log])
    }

    /// Those a volume may have its own value of.
    pub fn per_volume() -> impl Iterator<Item = Self> {
        Self::all().filter(|key| key.definition().scope == Scope::Volume)
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

impl Definition {
    /// A value as people write it: `1024`, `32M`, `info`.
    pub fn text(&self, value: u64) -> String {
        match self.kind {
            Kind::Number => value.to_string(),
            Kind::Size => Size::new(value).to_string(),
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

    /// The value that somebody wrote: a JSON number, or a string in the form of [`Self::text`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidValue`] or [`ErrorKind::OutOfRange`].
    pub fn parse(&self, given: &Value) -> Result<u64, ParameterError> {
        let value = match given {
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
                (Kind::Size, _) => {
                    format!("write a number of bytes or a size such as 32M: {}", self.range())
                }
            };
            let message = format!("`{given}` is no value of {}", self.name);
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
    use crate::config::keys::SECTIONS;
    use crate::config::{Choice, LogLevel};

    #[test]
    fn the_table_is_in_order() {
        let mut names: Vec<&str> = Key::all().map(|key| key.definition().name).collect();
        names.dedup();
        let listed: Vec<&str> = DEFINITIONS.iter().map(|definition| definition.name).collect();
        assert_eq!(names, listed, "each definition has its keys and its place");
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
        assert!(LogLevel::names().eq(LEVELS.iter().copied()));
        for definition in DEFINITIONS {
            let Some(path) = definition.config else { continue };
            let (header, name) = path.rsplit_once('.').unwrap_or(("", path));
            let section = SECTIONS.iter().find(|section| section.header == header).unwrap();
            let key = section.find(name).unwrap_or_else(|| panic!("no key {path}"));
            assert_eq!(key.default, definition.text(definition.default), "{path}");
            let volume = SECTIONS.iter().find(|section| section.header == "volume.NAME").unwrap();
            assert_eq!(
                volume.find(name).is_some(),
                definition.scope == Scope::Volume,
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
    fn values_and_what_is_none() {
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
        fn no_text_panics_and_what_is_taken_is_allowed(text in "\\PC*|[0-9]{0,22}[KMGT]?") {
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
