//! Patterns for common names.

/// Whether `pattern` matches the whole `name`: each `*` stands for one or more characters of any kind, also dots, and
/// everything else for itself. Upper and lower case differ.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.chars(), name.chars());
    // What follows the last star, and the name after the characters that the star has taken so far. Only the last star has
    // to take more: what an earlier one leaves is the same or less.
    let mut again = None;
    loop {
        match (pattern.next(), name.next()) {
            (None, None) => return true,
            (Some('*'), Some(_)) => again = Some((pattern.clone(), name.clone())),
            (Some(wanted), Some(found)) if wanted == found => {}
            (Some(_), None) => return false,
            _ => {
                let Some((after, mut rest)) = again.take() else { return false };
                if rest.next().is_none() {
                    return false;
                }
                (pattern, name) = (after.clone(), rest.clone());
                again = Some((after, rest));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_one_or_more_characters() {
        for (pattern, name, expected) in [
            ("a.host", "a.host", true),
            ("a.host", "A.host", false),
            ("*.host", "a.host", true),
            ("*.host", "a.b.host", true),
            ("*.host", ".host", false),
            ("*.host", "a.host.evil", false),
            ("*.host", "ahost", false),
            ("*", "x", true),
            ("*", "", false),
            ("**", "x", false),
            ("**", "xy", true),
            ("a*b*c", "a1b2b3c", true),
            ("a*b*c", "abc", false),
            ("a*", "a", false),
            ("*é", "éé", true),
            ("**", "é", false),
            ("*aab", "aaaab", true),
            ("x", "", false),
            ("", "", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
