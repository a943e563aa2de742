//! One entry of a list.

use std::fmt;

use crate::ENTRY_BYTES_MAX;
use crate::error::AccessError;
use crate::identity::ClientIdentity;
use crate::names::{NameLookup, SystemNames};
use crate::network::Network;
use crate::pattern;

/// A kind of client that may open a volume, as the key `allow` has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessEntry {
    /// As it was written.
    text: Box<str>,
    rule: Rule,
}

/// What a client is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// The name of a pre-shared key.
    Psk(Box<str>),
    /// A pattern for the common name of a certificate.
    CommonName(Box<str>),
    User(u32),
    Group(u32),
    Network(Network),
    Domain(u32),
    /// The UUID of a Xen guest, in lower case.
    Uuid(Box<str>),
    /// The name of a Xen guest.
    GuestName(Box<str>),
    /// No client: the user or group is not known.
    Unknown(AccessError),
}

/// How TLS names a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsIdentity {
    /// By the name of its pre-shared key.
    Psk,
    /// By the common name of its certificate, which the server asks for.
    Certificate,
}

impl AccessEntry {
    /// The entry with this text. Looks names of users and groups up, and so may block.
    ///
    /// # Errors
    /// Text that is no entry, or a name that the host does not have.
    pub fn parse(text: &str) -> Result<AccessEntry, AccessError> {
        AccessEntry::parse_with(text, &SystemNames)
    }

    /// As [`AccessEntry::parse`], but if the user or group is not known, or cannot be looked up now, the entry matches no
    /// client, and [`AccessEntry::unknown`] says why: the other entries of its list are in force.
    ///
    /// # Errors
    /// Text that is no entry.
    pub fn parse_known_later(text: &str) -> Result<AccessEntry, AccessError> {
        match AccessEntry::parse(text) {
            Err(error @ (AccessError::UnknownName { .. } | AccessError::LookUp { .. })) => {
                Ok(AccessEntry { text: text.into(), rule: Rule::Unknown(error) })
            }
            parsed => parsed,
        }
    }

    /// Why the user or group of the entry is not known, if so.
    pub fn unknown(&self) -> Option<&AccessError> {
        match &self.rule {
            Rule::Unknown(why) => Some(why),
            _ => None,
        }
    }

    /// The identity that only TLS gives a client, if the entry asks for one.
    pub fn tls_identity(&self) -> Option<TlsIdentity> {
        match &self.rule {
            Rule::Psk(_) => Some(TlsIdentity::Psk),
            Rule::CommonName(_) => Some(TlsIdentity::Certificate),
            _ => None,
        }
    }

    /// As [`AccessEntry::parse`], with another source of names.
    ///
    /// # Errors
    /// The same.
    pub fn parse_with(text: &str, names: &dyn NameLookup) -> Result<AccessEntry, AccessError> {
        if text.len() > ENTRY_BYTES_MAX {
            return Err(AccessError::TooLong);
        }
        if text.chars().any(char::is_control) {
            return Err(AccessError::Control);
        }
        let (kind, value) = text.split_once(':').ok_or(AccessError::NoKind)?;
        let filled = |kind: &'static str| match value {
            "" => Err(AccessError::Empty { kind }),
            value => Ok(value),
        };
        let rule = match kind {
            "psk" => Rule::Psk(filled("psk")?.into()),
            "cn" => Rule::CommonName(filled("cn")?.into()),
            "uid" => Rule::User(number_of("user", filled("uid")?, |name| names.user(name))?),
            "gid" => Rule::Group(number_of("group", filled("gid")?, |name| names.group(name))?),
            "net" => Rule::Network(Network::parse(filled("net")?)?),
            "xen" => guest(filled("xen")?),
            _ => return Err(AccessError::UnknownKind),
        };
        Ok(AccessEntry { text: text.into(), rule })
    }

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the client is of this kind.
    pub fn matches(&self, client: &ClientIdentity) -> bool {
        let tls = |kind: &str| client.tls.as_deref().and_then(|name| name.strip_prefix(kind));
        let (socket, guest) = (client.socket.as_ref(), client.guest.as_ref());
        match &self.rule {
            Rule::Psk(name) => tls("psk:") == Some(&**name),
            Rule::CommonName(wanted) => {
                tls("cn:").is_some_and(|name| pattern::matches(wanted, name))
            }
            Rule::User(user) => socket.is_some_and(|peer| peer.uid == *user),
            Rule::Group(group) => {
                socket.is_some_and(|peer| peer.gid == *group || peer.groups.contains(group))
            }
            Rule::Network(network) => {
                client.address.is_some_and(|address| network.contains(address))
            }
            Rule::Domain(number) => guest.is_some_and(|guest| guest.domain == *number),
            Rule::Uuid(wanted) => guest
                .and_then(|guest| guest.uuid.as_deref())
                .is_some_and(|uuid| uuid.eq_ignore_ascii_case(wanted)),
            Rule::GuestName(name) => {
                guest.is_some_and(|guest| guest.name.as_deref() == Some(&**name))
            }
            Rule::Unknown(_) => false,
        }
    }
}

impl fmt::Display for AccessEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The number of a user or group that is given by number or name.
fn number_of(
    what: &'static str,
    text: &str,
    look_up: impl FnOnce(&str) -> std::io::Result<Option<u32>>,
) -> Result<u32, AccessError> {
    if is_number(text) {
        // The last number stands for no user and no group.
        let number = text.parse().ok().filter(|number| *number != u32::MAX);
        return number.ok_or(AccessError::BadNumber { what });
    }
    match look_up(text) {
        Ok(Some(number)) => Ok(number),
        Ok(None) => Err(AccessError::UnknownName { what }),
        Err(error) => Err(AccessError::LookUp { what, why: error.to_string() }),
    }
}

/// A guest by its domain's number, its UUID or its name.
fn guest(text: &str) -> Rule {
    match text.parse() {
        Ok(number) if is_number(text) => Rule::Domain(number),
        _ if is_uuid(text) => Rule::Uuid(text.to_ascii_lowercase().into()),
        _ => Rule::GuestName(text.into()),
    }
}

fn is_uuid(text: &str) -> bool {
    let dashes = [8, 13, 18, 23];
    text.len() == 36
        && text.bytes().enumerate().all(|(at, byte)| match dashes.contains(&at) {
            true => byte == b'-',
            false => byte.is_ascii_hexdigit(),
        })
}
