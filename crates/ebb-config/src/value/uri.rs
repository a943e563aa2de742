//! What the URIs of stores have in common: parameters, and characters that are encoded.

use std::time::Duration;

use super::{BadValue, ConfigErrorKind, StoreUri, shorten, suggest};

/// The longest time a request may wait for a server, seconds: a day.
const MAX_SECONDS: u64 = 86_400;

impl StoreUri {
    /// Returns the store with its path from the root: the next start may have another folder.
    ///
    /// # Errors
    /// The present folder is not known.
    pub fn absolute(&self) -> std::io::Result<StoreUri> {
        Ok(match self {
            StoreUri::File(path) => StoreUri::File(std::path::absolute(path)?),
            StoreUri::Qcow2(path) => StoreUri::Qcow2(std::path::absolute(path)?),
            other => other.clone(),
        })
    }
}

pub(super) fn bad(message: impl Into<String>, remedy: impl Into<String>) -> BadValue {
    BadValue::new(ConfigErrorKind::InvalidValue, message.into(), remedy.into())
}

/// The parameters of a URI, decoded.
#[derive(Default)]
pub(super) struct UriParameters(Vec<(&'static str, String)>);

impl UriParameters {
    /// Those of `query`, each of which must be `known` and be given once. `form` is the remedy where that is not clear.
    pub(super) fn parse(
        query: &str,
        known: &[&'static str],
        form: &'static str,
    ) -> Result<UriParameters, BadValue> {
        let mut list: Vec<(&'static str, String)> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| bad(format!("`{}` is no parameter=value", shorten(pair)), form))?;
            let found = known.iter().find(|known| **known == name).ok_or_else(|| {
                let message = format!("the URI has no parameter `{}`", shorten(name));
                let names = known.iter().copied();
                bad(message, suggest(name, names, "the parameters are"))
            })?;
            if list.iter().any(|(given, _)| given == found) {
                return Err(bad(format!("`{found}` is given twice"), "keep one of them"));
            }
            list.push((found, decode(value)?));
        }
        Ok(UriParameters(list))
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    /// The names of those that are given.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.0.iter().map(|(name, _)| *name)
    }
}

/// Appends parameters, encoded.
pub(super) fn push_parameters(text: &mut String, parameters: Vec<(&'static str, String)>) {
    for (number, (name, value)) in parameters.into_iter().enumerate() {
        let before = if number == 0 { '?' } else { '&' };
        text.push_str(&format!("{before}{name}={}", encode(&value)));
    }
}

pub(super) fn seconds(name: &str, text: &str) -> Result<Duration, BadValue> {
    let digits = text.strip_suffix('s').unwrap_or(text);
    Some(digits)
        .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|digits| digits.parse::<u64>().ok())
        .filter(|seconds| *seconds <= MAX_SECONDS)
        .map(Duration::from_secs)
        .ok_or_else(|| {
            let message = format!("`{}` is not a time in seconds", shorten(text));
            bad(message, format!("write seconds from 0 to 86400, such as {name}=60"))
        })
}

/// `text` with `%XX` decoded; UTF-8 without zero bytes.
pub(super) fn decode(text: &str) -> Result<String, BadValue> {
    let fail = |what: &str| {
        let message = format!("`{}` {what}", shorten(text));
        bad(message, "write % and two hexadecimal digits for a byte, %25 for a % itself")
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|b| char::from(b).to_digit(16));
        let (Some(high), Some(low)) = (digit(), digit()) else {
            return Err(fail("has a % without two hexadecimal digits"));
        };
        bytes.extend(u8::try_from(high * 16 + low).ok());
    }
    if bytes.contains(&0) {
        return Err(fail("has a zero byte in it"));
    }
    String::from_utf8(bytes).map_err(|_| fail("is not UTF-8"))
}

/// `text` with everything encoded that could end it early.
pub(super) fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte);
        if plain {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
