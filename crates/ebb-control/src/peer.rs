//! The peers of the control socket: their credentials, and the roles that these give.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use tokio::net::UnixStream;

use crate::access::{Caller, Role};

/// Who may use the control socket. Root and the daemon's user may operate, members of its group may view, others
/// nothing.
#[derive(Clone, Copy, Debug)]
pub struct SocketPeers {
    /// The user of the daemon.
    pub owner: u32,
    /// The group of the daemon.
    pub group: u32,
    /// Whether a peer has this group among its supplementary groups.
    pub has_group: fn(BorrowedFd<'_>, u32) -> io::Result<bool>,
}

impl SocketPeers {
    /// The caller at the other end; `None` if it has no role.
    pub(crate) fn caller(&self, stream: &UnixStream) -> Option<Caller> {
        let peer = stream.peer_cred().ok()?;
        let role = self.role(peer.uid(), peer.gid(), || {
            (self.has_group)(stream.as_fd(), self.group).unwrap_or(false)
        });
        if role == Role::None {
            // Only if someone has changed the mode of the socket's file.
            tracing::info!(uid = peer.uid(), pid = peer.pid(), "refused at the control socket");
            return None;
        }
        Some(Caller { role, identity: format!("uid:{}", peer.uid()) })
    }

    fn role(&self, uid: u32, gid: u32, has_group: impl FnOnce() -> bool) -> Role {
        if uid == 0 || uid == self.owner {
            Role::Operate
        } else if gid == self.group || has_group() {
            Role::View
        } else {
            Role::None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_owner_operate_the_group_views_and_others_do_nothing() {
        let peers = SocketPeers { owner: 970, group: 971, has_group: |_, _| Ok(false) };
        for (uid, gid, supplementary, role) in [
            (0, 0, false, Role::Operate),
            (970, 5, false, Role::Operate),
            (1000, 971, false, Role::View),
            (1000, 1000, true, Role::View),
            (1000, 1000, false, Role::None),
            (971, 970, false, Role::None),
        ] {
            assert_eq!(peers.role(uid, gid, || supplementary), role, "{uid}:{gid}");
        }
    }
}
