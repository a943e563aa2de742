//! Repairs of the table of a configuration file, so that its other mistakes are found, too (`mistakes.rs`).
//!
//! A wrong value is replaced with the example of its key, so that settings that need this one do not report it as
//! missing; what cannot be repaired so is removed.

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::error::{ConfigError, ConfigErrorKind};
use super::keys;
use super::lines::Lines;
use super::shorten::shorten;

/// Repairs of a parsed file, each at a key and its line.
#[derive(Debug, Default)]
pub(super) struct Repairs(Vec<Repair>);

#[derive(Debug)]
struct Repair {
    key: Box<str>,
    line: usize,
    how: RepairKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RepairKind {
    Example,
    Remove,
}

impl Repairs {
    /// Adds the repair of a mistake; false if there is none.
    pub(super) fn add(&mut self, error: &ConfigError) -> bool {
        let (Some(key), Some(line), Some(_)) = (&error.key, error.line, &error.file) else {
            return false;
        };
        let how = match is_value(error) && !self.has(key, line) {
            true => RepairKind::Example,
            false => RepairKind::Remove,
        };
        self.0.push(Repair { key: key.clone(), line, how });
        true
    }

    fn has(&self, key: &str, line: usize) -> bool {
        self.0.iter().any(|repair| *repair.key == *key && repair.line == line)
    }

    /// Whether a repair has caused this error: the example does not fit the other settings.
    pub(super) fn lead_to(&self, error: &ConfigError) -> bool {
        let repaired = error.key.as_deref().zip(error.line);
        let is_at_one = repaired.is_some_and(|(key, line)| self.has(key, line));
        !is_value(error) && is_at_one
            || self.has_left_without_size(error)
            || self.has_left_size(error)
    }

    /// Returns true if a size has no use because the creation of the file was removed.
    fn has_left_size(&self, error: &ConfigError) -> bool {
        let volume = error.key.as_deref().and_then(|key| key.strip_suffix(".size"));
        let is_create = |repair: &Repair| {
            repair.how == RepairKind::Remove && repair.key.strip_suffix(".create") == volume
        };
        error.kind == ConfigErrorKind::Conflict && volume.is_some() && self.0.iter().any(is_create)
    }

    /// Returns true if a new file needs a size because the base of its volume was removed.
    fn has_left_without_size(&self, error: &ConfigError) -> bool {
        let volume = error.key.as_deref().and_then(|key| key.strip_suffix(".create"));
        let is_base = |repair: &Repair| {
            repair.how == RepairKind::Remove && repair.key.strip_suffix(".base") == volume
        };
        error.kind == ConfigErrorKind::Missing && volume.is_some() && self.0.iter().any(is_base)
    }

    /// Applies them to the table of a file with these `lines`.
    pub(super) fn apply(&self, table: &mut DeTable<'_>, lines: &Lines) {
        for repair in &self.0 {
            repair.apply(table, "", &mut Vec::new(), lines);
        }
    }
}

/// Whether the value itself is wrong, whatever the other settings.
fn is_value(error: &ConfigError) -> bool {
    use ConfigErrorKind::{InvalidValue, OutOfRange, UnknownChoice};
    matches!(error.kind, InvalidValue | UnknownChoice | OutOfRange)
}

impl Repair {
    /// Repairs the entry of its key in `table` or a table in it; true if it was found. The parser bounds how deep tables
    /// nest.
    fn apply(
        &self,
        table: &mut DeTable<'_>,
        prefix: &str,
        path: &mut Vec<String>,
        lines: &Lines,
    ) -> bool {
        let mut own = None;
        for (key, value) in table.iter_mut() {
            let name = format!("{prefix}{}", shorten(key.get_ref()));
            path.push(key.get_ref().to_string());
            let span = value.span();
            let within = lines.number(span.start)..=lines.number(span.end.max(span.start + 1) - 1);
            if name == *self.key
                && (within.contains(&self.line) || lines.number(key.span().start) == self.line)
            {
                let done = match (value.get_mut(), self.how) {
                    // One element of a list is wrong.
                    (DeValue::Array(array), _) if !array.is_empty() => {
                        let wrong = |one: &Spanned<DeValue<'_>>| {
                            lines.number(one.span().start) == self.line
                        };
                        let at = array.iter().position(wrong);
                        let all = std::mem::replace(array, DeArray::new()).into_iter().enumerate();
                        for (_, one) in all.filter(|(i, _)| Some(*i) != at) {
                            array.push(one);
                        }
                        at.is_some()
                    }
                    (DeValue::Table(_), _) | (_, RepairKind::Remove) => false,
                    (there, RepairKind::Example) => match example(path) {
                        Some(example) => {
                            *there = example;
                            true
                        }
                        None => false,
                    },
                };
                if done {
                    return true;
                }
                own = Some(key.clone());
            } else if let DeValue::Table(inner) = value.get_mut()
                && self.key.starts_with(&name)
                && self.apply(inner, &format!("{name}."), path, lines)
            {
                return true;
            }
            path.pop();
            if own.is_some() {
                break;
            }
        }
        own.is_some_and(|key| table.remove(&key).is_some())
    }
}

/// The example of a key, which is a valid value of it.
fn example(path: &[String]) -> Option<DeValue<'static>> {
    let (_, text) = keys::expected(path).split_once(": ")?;
    // The first of several examples.
    let first = text.split(", ").next()?;
    let table = DeTable::parse(text).or_else(|_| DeTable::parse(first)).ok()?.into_inner();
    table.into_iter().next().map(|(_, value)| Spanned::into_inner(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_an_example_that_is_valid() {
        for (section, path) in [
            (&keys::TOP, vec![]),
            (&keys::NBD, vec!["nbd".to_owned()]),
            (&keys::BDI, vec!["bdi".to_owned(), "x".to_owned()]),
            (&keys::VOLUME, vec!["volume".to_owned(), "x".to_owned()]),
        ] {
            for key in section.keys {
                let path = [path.clone(), vec![key.name.to_owned()]].concat();
                assert!(example(&path).is_some(), "{path:?}: {}", key.expected);
            }
        }
    }
}
