//! The file of tokens: lines `ROLE:NAME:SHA256` with the hash of a token in hexadecimal digits; `#` starts a comment.
//!
//! Tokens are 32 random bytes (`ebbd token`), so that their hash need not be slow to compute. The file does not contain
//! them: reading it does not suffice to log in, but writing it does. So only root and the daemon's user may own it.

use std::borrow::Cow;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ebb_advice::Advice;
use openssl::sha::sha256;
use rustix::fs::OFlags;

use super::Role;

/// The longest file, bytes, and the most tokens in it.
const FILE_MAX: u64 = 1 << 20;
const TOKENS_MAX: usize = 1000;
/// The longest name, bytes.
const NAME_MAX: usize = 64;
/// `O_NONBLOCK`.
const NONBLOCK: i32 = OFlags::NONBLOCK.bits().cast_signed();
/// What tokens begin with, so that programs that look for secrets recognise them.
const PREFIX: &str = "ebbd_";

/// Why there are no tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum TokenError {
    /// The file cannot be read.
    #[error("cannot read {path}: `web_tokens` needs a file of tokens")]
    File { path: PathBuf, source: std::io::Error },
    /// Others may write to the file.
    #[error("{path}: other users may write to it, and so log in")]
    Writable { path: PathBuf },
    /// A user who is neither root nor the daemon's owns the file.
    #[error("{path}: user {owner} owns it, and could log in")]
    Owner { path: PathBuf, owner: u32 },
    /// A line is malformed.
    #[error("{path}, line {line}: {what}")]
    Line { path: PathBuf, line: usize, what: &'static str },
    /// The file has no token, or too many.
    #[error("{path} has {}", some_tokens(*count))]
    Count { path: PathBuf, count: usize },
    /// The name of a new token.
    #[error("a name has 1 to {NAME_MAX} letters, digits, `-`, `_`, `.` and `@`")]
    Name,
    /// OpenSSL has no random numbers.
    #[error("cannot make a token: OpenSSL has no random numbers")]
    Random(#[from] openssl::error::ErrorStack),
}

impl Advice for TokenError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            TokenError::File { .. } => "make one with `ebbd token view NAME`".into(),
            TokenError::Writable { .. } => "run `chmod go-w` on it".into(),
            TokenError::Owner { .. } => "run `chown root` on it".into(),
            TokenError::Line { .. } => "make a line with `ebbd token view NAME`".into(),
            TokenError::Count { count: 0, .. } => {
                "append a line made with `ebbd token view NAME`".into()
            }
            TokenError::Count { .. } => "remove lines that are not needed".into(),
            TokenError::Name | TokenError::Random(_) => return None,
        })
    }
}

/// A number of tokens that a file cannot have.
fn some_tokens(count: usize) -> String {
    match count {
        0 => "no token".to_owned(),
        _ => format!("more than {TOKENS_MAX} tokens"),
    }
}

/// The tokens that are accepted.
#[derive(Debug)]
pub struct TokenTable(Vec<TokenEntry>);

#[derive(Debug)]
struct TokenEntry {
    role: Role,
    name: String,
    hash: [u8; 32],
}

impl TokenTable {
    /// Reads the file.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let fail = |source| TokenError::File { path: path.into(), source };
        // Opening a FIFO would wait for a writer otherwise.
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).custom_flags(NONBLOCK).open(path).map_err(fail)?;
        let metadata = file.metadata().map_err(fail)?;
        if !metadata.is_file() {
            return Err(fail(std::io::Error::other("it is not a regular file")));
        }
        if !may_own(metadata.uid()) {
            return Err(TokenError::Owner { path: path.into(), owner: metadata.uid() });
        }
        if metadata.mode() & 0o022 != 0 {
            return Err(TokenError::Writable { path: path.into() });
        }
        let mut text = String::new();
        file.take(FILE_MAX).read_to_string(&mut text).map_err(fail)?;
        Self::parse(&text, path)
    }

    /// The tokens of a file's text.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, TokenError> {
        let mut entries: Vec<TokenEntry> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let bad = |what| TokenError::Line { path: path.into(), line: index + 1, what };
            let entry = entry(line).map_err(bad)?;
            if entries.iter().any(|other| other.name == entry.name) {
                return Err(bad("another line has this name"));
            }
            if entries.len() == TOKENS_MAX {
                return Err(TokenError::Count { path: path.into(), count: TOKENS_MAX + 1 });
            }
            entries.push(entry);
        }
        if entries.is_empty() {
            return Err(TokenError::Count { path: path.into(), count: 0 });
        }
        Ok(Self(entries))
    }

    /// The role and the name of a token. Takes as long whether there is one or not.
    pub(super) fn find(&self, token: &str) -> Option<(Role, &str)> {
        let hash = sha256(token.as_bytes());
        self.0.iter().fold(None, |found, entry| {
            let same = openssl::memcmp::eq(&entry.hash, &hash);
            if same { Some((entry.role, entry.name.as_str())) } else { found }
        })
    }
}

/// Whether the user may own a file of tokens.
fn may_own(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

fn entry(line: &str) -> Result<TokenEntry, &'static str> {
    let mut parts = line.split(':');
    let (Some(role), Some(name), Some(hash), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err("expected `ROLE:NAME:SHA256`");
    };
    let role = match role {
        "view" => Role::View,
        "operate" => Role::Operate,
        _ => return Err("the roles are `view` and `operate`"),
    };
    if !is_name(name) {
        return Err("a name has 1 to 64 letters, digits, `-`, `_`, `.` and `@`");
    }
    let hash = from_hex(hash).ok_or("the hash is not 64 hexadecimal digits")?;
    Ok(TokenEntry { role, name: name.to_owned(), hash })
}

fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(fits)
}

/// The name of a token, if `text` is one.
///
/// # Errors
/// [`TokenError::Name`].
pub fn token_name(text: &str) -> Result<String, TokenError> {
    if is_name(text) { Ok(text.to_owned()) } else { Err(TokenError::Name) }
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|digit| u8::try_from(digit.to_digit(16)?).ok()).collect();
    let bytes: Vec<u8> =
        digits?.chunks(2).map(|pair| pair.iter().fold(0, |sum, digit| sum << 4 | digit)).collect();
    if text.len() == 64 { bytes.try_into().ok() } else { None }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A token that was just made.
#[derive(Debug)]
pub struct NewToken {
    /// The token, for who logs in.
    pub secret: String,
    /// Its line in the file.
    pub line: String,
}

impl NewToken {
    /// Makes a token.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn create(role: Role, name: &str) -> Result<Self, TokenError> {
        let name = token_name(name)?;
        let mut random = [0; 32];
        openssl::rand::rand_bytes(&mut random)?;
        let secret = format!("{PREFIX}{}", to_hex(&random));
        let line = format!("{}:{name}:{}\n", role.as_str(), to_hex(&sha256(secret.as_bytes())));
        Ok(Self { secret, line })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{FileType, Mode};

    use super::*;

    fn parse(text: &str) -> Result<TokenTable, TokenError> {
        TokenTable::parse(text, Path::new("tokens"))
    }

    #[test]
    fn tokens_are_found_by_what_was_made_and_by_nothing_else() {
        let ops = NewToken::create(Role::Operate, "ops@host").unwrap();
        let read = NewToken::create(Role::View, "prometheus").unwrap();
        assert_ne!(ops.secret, read.secret);
        let text = format!("# comment\n\n{}{}", ops.line, read.line);
        let table = parse(&text).unwrap();
        assert_eq!(table.find(&ops.secret), Some((Role::Operate, "ops@host")));
        assert_eq!(table.find(&read.secret), Some((Role::View, "prometheus")));
        let hash = ops.line.trim().rsplit(':').next().unwrap();
        for wrong in ["", "x", hash, &ops.secret[1..], &ops.secret.to_uppercase()] {
            assert_eq!(table.find(wrong), None, "{wrong}");
        }
        assert!(!text.contains(&ops.secret), "the file contains the token");
    }

    #[test]
    fn a_malformed_line_is_told_with_its_place_and_a_remedy() {
        let good = NewToken::create(Role::View, "a").unwrap().line;
        let hash = "0".repeat(64);
        for (text, place, what) in [
            ("view:a", "line 1", "ROLE:NAME:SHA256"),
            (&format!("\nadmin:a:{hash}"), "line 2", "`view` and `operate`"),
            (&format!("view::{hash}"), "line 1", "letters"),
            (&format!("view:a b:{hash}"), "line 1", "letters"),
            (&format!("view:a:{}", &hash[1..]), "line 1", "64 hexadecimal"),
            (&format!("view:a:{}ü", &hash[2..]), "line 1", "64 hexadecimal"),
            (&format!("view:a:{hash}:x"), "line 1", "ROLE:NAME:SHA256"),
            (&format!("{good}{good}"), "line 2", "another line"),
            ("# nothing\n", "tokens", "no token"),
        ] {
            let said = ebb_advice::full_text(&parse(text).unwrap_err());
            assert!(said.contains(place) && said.contains(what), "{text}: {said}");
            assert!(said.contains("ebbd token"), "{said}");
        }
        let lines = (0..=TOKENS_MAX).map(|number| format!("view:a{number}:{hash}\n"));
        let error = parse(&lines.collect::<String>()).unwrap_err();
        assert_eq!(error.to_string(), format!("tokens has more than {TOKENS_MAX} tokens"));
        assert!(NewToken::create(Role::View, "a:b").is_err());
    }

    #[test]
    fn a_file_that_others_may_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        assert!(matches!(TokenTable::read(&path), Err(TokenError::File { .. })));
        std::fs::write(&path, NewToken::create(Role::View, "a").unwrap().line).unwrap();
        for (mode, fits) in [(0o640, true), (0o644, true), (0o660, false), (0o602, false)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let read = TokenTable::read(&path);
            assert_eq!(read.is_ok(), fits, "{mode:o}: {read:?}");
            assert!(fits || matches!(read, Err(TokenError::Writable { .. })));
        }
        let me = rustix::process::geteuid().as_raw();
        assert!(may_own(0) && may_own(me) && !may_own(me + 1), "{me}");
    }

    #[test]
    fn a_file_that_is_not_a_regular_one_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::from(0o600), 0).unwrap();
        let error = TokenTable::read(&path).unwrap_err();
        assert!(format!("{error:?}").contains("not a regular file"), "{error:?}");
    }
}
