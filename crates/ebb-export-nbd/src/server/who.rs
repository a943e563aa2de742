//! The identity of a client, as far as it is known.

use ebb_access::{ClientIdentity, SocketCredentials};
use ebb_io::Fd;

use super::Peer;

/// The identity of a client before TLS.
pub(super) fn identity(socket: &Fd, peer: Peer) -> ClientIdentity {
    match peer {
        Peer::Tcp(address) => {
            ClientIdentity { address: Some(address.ip()), ..ClientIdentity::default() }
        }
        Peer::Unix { .. } => {
            ClientIdentity { socket: SocketCredentials::of(socket), ..ClientIdentity::default() }
        }
        Peer::Unknown => ClientIdentity::default(),
    }
}

/// An addition to the reason why a client may not open a volume. A server that requests
/// certificates refuses clients without one, and the name of a pre-shared key is an identity.
pub(super) fn certificate_hint(is_encrypted: bool, who: &ClientIdentity) -> &'static str {
    match is_encrypted && who.tls.is_none() {
        true => "; its certificate was not requested, since `tls_verify_peer` is false",
        false => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clients_without_a_name_over_tls_get_the_hint() {
        let unnamed = ClientIdentity::default();
        assert!(certificate_hint(true, &unnamed).contains("`tls_verify_peer` is false"));
        assert_eq!(certificate_hint(false, &unnamed), "");
    }
}
