//! The names that values of parameters refer to. A value fits into one atomic, so a name is a number here: its place in a
//! list that only grows, and is bounded.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most names of a process, and the longest one.
const NAMES_MAX: usize = 4096;
const NAME_MAX_BYTES: usize = 255;

/// The text for no name.
const NONE: &str = "none";

static NAMES: Mutex<Vec<Box<str>>> = Mutex::new(Vec::new());

fn names() -> MutexGuard<'static, Vec<Box<str>>> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of a name, 0 for `none`; `None` if it is no name, or if there have been too many.
pub fn name_number(name: &str) -> Option<u64> {
    if name == NONE {
        return Some(0);
    }
    if name.is_empty() || name.len() > NAME_MAX_BYTES || name.contains(char::is_control) {
        return None;
    }
    let mut names = names();
    let at = match names.iter().position(|known| **known == *name) {
        Some(at) => at,
        None if names.len() >= NAMES_MAX => return None,
        None => {
            names.push(name.into());
            names.len() - 1
        }
    };
    u64::try_from(at + 1).ok()
}

/// The name of this number; `None` for 0.
pub fn name_of(number: u64) -> Option<String> {
    let at = usize::try_from(number.checked_sub(1)?).ok()?;
    names().get(at).map(|name| name.to_string())
}

/// Why a new name has no number, if there have been too many of them.
pub(super) fn too_many_names() -> Option<(String, String)> {
    (names().len() >= NAMES_MAX).then(|| {
        let message =
            format!("there have been {NAMES_MAX} names of groups since the daemon started");
        (message, "use a group that exists, or restart the daemon".to_owned())
    })
}

pub(super) fn name_text(number: u64) -> String {
    name_of(number).unwrap_or_else(|| NONE.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_number_and_what_is_no_name_has_none() {
        let (gold, silver) = (name_number("gold").unwrap(), name_number("silver").unwrap());
        assert!(gold != silver && gold != 0);
        assert_eq!(name_number("gold"), Some(gold));
        assert_eq!((name_text(gold), name_text(0)), ("gold".to_owned(), "none".to_owned()));
        assert_eq!((name_number("none"), name_of(0)), (Some(0), None));
        let long = "x".repeat(256);
        for bad in ["", "a\nb", &long] {
            assert_eq!(name_number(bad), None);
        }
    }
}
