//! The URI of an image of a Ceph cluster: `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]`, as `rbd` writes images, with parameters
//! for the options of `rbd`, and for the decisions of a client.

use std::path::PathBuf;
use std::time::Duration;

use super::uri::{UriParameters, bad, decode, encode, push_parameters, seconds};
use super::{BadValue, Choice, KeyFile, path, shorten};

/// How long requests wait for the cluster by default.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
/// The most cluster handles.
const CONNECTIONS_MOST: u32 = 64;
/// The longest name of a pool, a namespace, an image or a snapshot, bytes.
const NAME_BYTES: usize = 255;
/// The form of a URI, as a remedy.
const FORM: &str = "write rbd:POOL/IMAGE, rbd:POOL/NAMESPACE/IMAGE or rbd:POOL/IMAGE@SNAPSHOT";
/// The parameters a URI may have.
const PARAMETERS: [&str; 7] =
    ["conf", "id", "keyring", "connections", "timeout", FORMAT, PASSPHRASE];
/// The parameters of an encrypted image, as the options of `rbd` of these names.
const FORMAT: &str = "encryption-format";
const PASSPHRASE: &str = "encryption-passphrase-file";

/// An image of a Ceph cluster, and how its client connects to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdUri {
    /// The pool.
    pub pool: String,
    /// The namespace in it; empty: none.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// A snapshot of it, which is read-only.
    pub snapshot: Option<String>,
    /// `ceph.conf`; `None`: where Ceph looks for it.
    pub conf: Option<PathBuf>,
    /// The user, without `client.`; `None`: `admin`.
    pub id: Option<String>,
    /// The file with the user's key; `None`: where Ceph looks for it.
    pub keyring: Option<KeyFile>,
    /// How it is encrypted; `None`: it is not, or by a client.
    pub encryption: Option<RbdUriEncryption>,
    /// The cluster handles that the images of a cluster and user share.
    pub connections: u32,
    /// How long requests wait for the cluster before they fail; zero: without limit.
    pub timeout: Duration,
}

/// The encryption of an image by librbd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdUriEncryption {
    /// Its format.
    pub format: LuksVersion,
    /// The file with the passphrase.
    pub passphrase: KeyFile,
}

/// The format of encryption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LuksVersion {
    /// LUKS1.
    Luks1,
    /// LUKS2.
    Luks2,
}

impl Choice for LuksVersion {
    const WHAT: &'static str = "format of encryption";
    const ALL: &'static [(&'static str, Self)] =
        &[("luks1", LuksVersion::Luks1), ("luks2", LuksVersion::Luks2)];
}

/// The encryption that parameters describe.
fn encryption(parameters: &UriParameters) -> Result<Option<RbdUriEncryption>, BadValue> {
    match (parameters.get(FORMAT), parameters.get(PASSPHRASE)) {
        (None, None) => Ok(None),
        (Some(format), Some(file)) => Ok(Some(RbdUriEncryption {
            format: LuksVersion::parse(format)?,
            passphrase: KeyFile::parse(file)?,
        })),
        (Some(_), None) => Err(bad(
            format!("there is {FORMAT} without {PASSPHRASE}"),
            format!("write {PASSPHRASE}=FILE with the file of the passphrase, too"),
        )),
        (None, Some(_)) => Err(bad(
            format!("there is {PASSPHRASE} without {FORMAT}"),
            format!(
                "write {FORMAT}=luks1 or {FORMAT}=luks2, too: the format that `rbd encryption format` was given"
            ),
        )),
    }
}

fn name(what: &str, text: &str) -> Result<String, BadValue> {
    let name = decode(text)?;
    if name.is_empty() {
        return Err(bad(format!("the name of the {what} is empty"), FORM));
    }
    if name.len() > NAME_BYTES {
        let message = format!("the name of the {what} has {} bytes", name.len());
        return Err(bad(message, "names have at most 255 bytes"));
    }
    Ok(name)
}

/// The URI whose text after `rbd:` is `rest`.
pub(super) fn parse(rest: &str) -> Result<RbdUri, BadValue> {
    if rest.starts_with("//") {
        return Err(bad("an RBD image is named without slashes after `rbd:`", FORM));
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let parameters = UriParameters::parse(query, &PARAMETERS, FORM)?;
    let (rest, snapshot) = match rest.split_once('@') {
        Some((rest, snapshot)) => (rest, Some(name("snapshot", snapshot)?)),
        None => (rest, None),
    };
    let parts: Vec<&str> = rest.split('/').collect();
    let (pool, namespace, image) = match parts[..] {
        [pool, image] => (pool, String::new(), image),
        [pool, namespace, image] => (pool, name("namespace", namespace)?, image),
        _ => return Err(bad(format!("`{}` is no image of a pool", shorten(rest)), FORM)),
    };
    let connections = match parameters.get("connections") {
        None => 1,
        Some(text) => Some(text)
            .filter(|text| text.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|text| text.parse().ok())
            .filter(|number| (1..=CONNECTIONS_MOST).contains(number))
            .ok_or_else(|| {
                let message = format!("`{}` is no number of connections", shorten(text));
                bad(message, "write a number from 1 to 64")
            })?,
    };
    let timeout = parameters.get("timeout").map(|text| seconds("timeout", text)).transpose()?;
    let id = parameters.get("id").map(|id| match id.strip_prefix("client.") {
        Some(short) => Err(bad(
            format!("`{}` is the name of the user, not its id", shorten(id)),
            format!("write id={}", shorten(short)),
        )),
        None => name("user", &encode(id)),
    });
    Ok(RbdUri {
        pool: name("pool", pool)?,
        namespace,
        image: name("image", image)?,
        snapshot,
        conf: parameters.get("conf").map(path).transpose()?,
        id: id.transpose()?,
        keyring: parameters.get("keyring").map(KeyFile::parse).transpose()?,
        encryption: encryption(&parameters)?,
        connections,
        timeout: timeout.unwrap_or(TIMEOUT_DEFAULT),
    })
}

/// A name in the path of a URI.
fn part(name: &str) -> String {
    encode(name).replace('/', "%2F")
}

/// The text of `uri`, with those parameters that are not the default.
pub(super) fn text(uri: &RbdUri) -> String {
    let mut text = format!("rbd:{}", part(&uri.pool));
    for name in [&uri.namespace, &uri.image].into_iter().filter(|name| !name.is_empty()) {
        text.push('/');
        text.push_str(&part(name));
    }
    if let Some(snapshot) = &uri.snapshot {
        text.push('@');
        text.push_str(&part(snapshot));
    }
    let mut parameters = Vec::new();
    if let Some(conf) = &uri.conf {
        parameters.push(("conf", conf.to_string_lossy().into_owned()));
    }
    if let Some(id) = &uri.id {
        parameters.push(("id", id.clone()));
    }
    if let Some(keyring) = &uri.keyring {
        parameters.push(("keyring", keyring.to_string()));
    }
    if uri.connections != 1 {
        parameters.push(("connections", uri.connections.to_string()));
    }
    if uri.timeout != TIMEOUT_DEFAULT {
        parameters.push(("timeout", uri.timeout.as_secs().to_string()));
    }
    if let Some(RbdUriEncryption { format, passphrase }) = &uri.encryption {
        parameters.push((FORMAT, format.name().to_owned()));
        parameters.push((PASSPHRASE, passphrase.to_string()));
    }
    push_parameters(&mut text, parameters);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> RbdUri {
        parse(text).unwrap_or_else(|bad| panic!("{text}: {bad}"))
    }

    #[test]
    fn an_image_has_the_form_that_rbd_uses() {
        let uri = parsed("rbd/disk");
        assert_eq!((uri.pool.as_str(), uri.image.as_str()), ("rbd", "disk"));
        assert!(uri.namespace.is_empty() && uri.snapshot.is_none() && uri.connections == 1);
        assert_eq!(uri.timeout, TIMEOUT_DEFAULT);
        let all = "p/n/i@s?conf=/c&id=me&keyring=/k&connections=4&timeout=0";
        let uri = parsed(all);
        assert_eq!((uri.namespace.as_str(), uri.snapshot.as_deref()), ("n", Some("s")));
        assert_eq!((uri.connections, uri.timeout), (4, Duration::ZERO));
        assert_eq!(text(&uri), format!("rbd:{all}"));
        let encrypted = "p/i?keyring=credential:k&encryption-format=luks2&encryption-passphrase-file=credential:p";
        let uri = parsed(encrypted);
        assert_eq!(uri.keyring, Some(KeyFile::Credential("k".into())));
        let passphrase = KeyFile::Credential("p".into());
        assert_eq!(
            uri.encryption,
            Some(RbdUriEncryption { format: LuksVersion::Luks2, passphrase })
        );
        assert_eq!(text(&uri), format!("rbd:{encrypted}"));
        let odd = "p%2Fq/a%20b%40c@%3F";
        assert_eq!(parsed(odd).image, "a b@c");
        assert_eq!(text(&parsed(odd)), format!("rbd:{odd}"));
    }

    #[test]
    fn what_is_no_image_is_refused_with_the_form() {
        for text in
            ["", "disk", "a/b/c/d", "/disk", "rbd/", "rbd/@s", "//rbd/disk", "rbd/d@", "a//b"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
        for query in [
            "connections=0",
            "connections=65",
            "connections=x",
            "timeout=-1",
            "id=client.me",
            "key=1",
            "conf=",
            "keyring=credential:",
            "encryption-format=luks1",
            "encryption-passphrase-file=/p",
            "encryption-format=luks3&encryption-passphrase-file=/p",
            "encryption-format=luks1&encryption-passphrase-file=",
            "encryption-passphrase=secret",
        ] {
            assert!(parse(&format!("rbd/disk?{query}")).is_err(), "{query}");
        }
        let long = "x".repeat(256);
        assert!(parse(&format!("rbd/{long}")).is_err() && parse("rbd/a%00").is_err());
    }
}
