//! What a client is known by.

use std::fmt;
use std::net::IpAddr;
use std::os::fd::AsFd;

use crate::peer_groups;

/// What is known of a client, as far as it has it. A client of TCP has an address, and under TLS perhaps a name; one of a
/// unix socket has a user and groups; a Xen guest has its domain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The identity under TLS: `psk:NAME` or `cn:NAME`.
    pub tls: Option<Box<str>>,
    /// The address of a peer of TCP.
    pub address: Option<IpAddr>,
    /// The process at the other end of a unix socket.
    pub socket: Option<SocketCredentials>,
    /// The domain of a Xen guest.
    pub guest: Option<XenGuest>,
}

/// A process that connected to a unix socket, as the kernel knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketCredentials {
    /// Its number; 0 if it is in another pid namespace.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its supplementary groups.
    pub groups: Box<[u32]>,
}

/// A Xen guest, as xenstore has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenGuest {
    /// The number of its domain.
    pub domain: u32,
    /// Its name.
    pub name: Option<Box<str>>,
    /// Its UUID.
    pub uuid: Option<Box<str>>,
}

impl SocketCredentials {
    /// Those of the process that connected to the other end of a unix socket; `None` of another socket.
    pub fn of(socket: impl AsFd) -> Option<SocketCredentials> {
        let peer = rustix::net::sockopt::socket_peercred(&socket).ok()?;
        // The kernel says so of sockets that have no such peer.
        if peer.uid.as_raw() == u32::MAX {
            return None;
        }
        // A process whose groups are unknown is a member of none.
        let groups = peer_groups::peer_groups(socket.as_fd()).unwrap_or_default();
        Some(SocketCredentials {
            pid: u32::try_from(peer.pid.as_raw_pid()).unwrap_or_default(),
            uid: peer.uid.as_raw(),
            gid: peer.gid.as_raw(),
            groups: groups.into(),
        })
    }
}

/// As the log names it.
impl fmt::Display for ClientIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        let mut part = |text: fmt::Arguments<'_>| {
            let written = write!(f, "{comma}{text}");
            comma = ", ";
            written
        };
        if let Some(name) = &self.tls {
            part(format_args!("{}", name.escape_debug()))?;
        }
        if let Some(address) = self.address {
            part(format_args!("{}", address.to_canonical()))?;
        }
        if let Some(SocketCredentials { pid, uid, .. }) = &self.socket {
            part(format_args!("uid {uid}, pid {pid}"))?;
        }
        if let Some(XenGuest { domain, name, .. }) = &self.guest {
            part(format_args!("Xen guest {domain}"))?;
            if let Some(name) = name {
                part(format_args!("{}", name.escape_debug()))?;
            }
        }
        if comma.is_empty() { f.write_str("unknown") } else { Ok(()) }
    }
}
