//! Names of volumes as names of files, percent-encoded: they have no `/` and do not begin with a point.

/// A name as that of a file.
pub(super) fn encode(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len());
    for (at, byte) in name.bytes().enumerate() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') || byte == b'.' && at > 0 {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// The name that was encoded; `None` if the text is not encoded, or not UTF-8. [`encode`] may have made another text of it.
pub(super) fn decode(encoded: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), encoded.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'%' {
            let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = rest.get(2..)?;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_and_has_no_separator() {
        for name in ["disk", ".hidden", "a/b", "install cd", "100%", "ü", "a.b"] {
            let encoded = encode(name);
            assert!(!encoded.contains('/') && !encoded.starts_with('.'), "{encoded}");
            assert_eq!(decode(&encoded).as_deref(), Some(name));
        }
        assert!(decode("%4").is_none() && decode("%zz").is_none() && decode("%FF").is_none());
    }
}
