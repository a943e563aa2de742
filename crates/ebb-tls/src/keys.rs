//! Files of pre-shared keys: lines `name:hex`, `#` starts a comment.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use crate::TlsError;

/// Longest file of pre-shared keys, bytes.
const FILE_MAX: u64 = 1 << 20;

/// The keys of a file by name.
pub(crate) fn read(path: &Path) -> Result<HashMap<Vec<u8>, Vec<u8>>, TlsError> {
    let fail = |source| {
        let purpose = "a file of pre-shared keys (create one with `psktool`)";
        TlsError::File { path: path.into(), purpose, source }
    };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(fail)?;
    file.take(FILE_MAX).read_to_string(&mut text).map_err(fail)?;
    let mut keys = HashMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let bad = || TlsError::Psk { path: path.into(), line: index + 1 };
        let (name, hex) = line.rsplit_once(':').ok_or_else(bad)?;
        let key = from_hex(hex).ok_or_else(bad)?;
        if name.is_empty() || key.is_empty() {
            return Err(bad());
        }
        keys.insert(name.as_bytes().to_vec(), key);
    }
    if keys.is_empty() {
        return Err(TlsError::Content {
            path: path.into(),
            purpose: "a file of pre-shared keys",
            reason: "it contains no key".into(),
        });
    }
    Ok(keys)
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) {
        return None;
    }
    let digits: Option<Vec<u32>> = text.chars().map(|c| c.to_digit(16)).collect();
    digits?.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Result<HashMap<Vec<u8>, Vec<u8>>, TlsError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read(file.path())
    }

    #[test]
    fn keys_are_read_by_name() {
        let keys = keys("# keys\nalice:0aFF\n\nb:o:b:01\n").unwrap();
        assert_eq!(keys[b"alice".as_slice()], [0x0a, 0xff]);
        assert_eq!(keys[b"b:o:b".as_slice()], [1]);
    }

    #[test]
    fn the_error_names_the_malformed_line() {
        for text in ["alice", "alice:", ":00", "alice:0", "alice:zz", "ok:00\nalice:é0"] {
            let line = text.lines().count();
            match keys(text) {
                Err(TlsError::Psk { line: found, .. }) => assert_eq!(found, line, "{text:?}"),
                other => panic!("{text:?}: {other:?}"),
            }
        }
        assert!(matches!(keys("# nothing\n"), Err(TlsError::Content { .. })));
    }
}
