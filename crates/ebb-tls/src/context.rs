//! TLS contexts: keys and certificates from the operator's files, read once.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use openssl::ssl::{
    Ssl, SslContext, SslContextBuilder, SslMethod, SslMode, SslOptions, SslSessionCacheMode,
    SslVerifyMode, SslVersion,
};

use crate::pem_files::{self, certificate, existing};
use crate::pem_files::{ExpiringFile, ExpiringKind};
use crate::{TlsError, TlsSession, keys, psk_name};

/// Cipher suites of TLS 1.2 with forward secrecy. All suites of TLS 1.3 have it (with pre-shared keys only
/// `psk_dhe_ke` is enabled).
const FORWARD_SECRET: &str = "DEFAULT:!kRSA:!PSK";
const FORWARD_SECRET_PSK: &str = "kECDHEPSK:kDHEPSK";
/// The subset for servers: suites with finite-field Diffie-Hellman need parameters that the server does not have. A
/// client receives them from its server.
const SERVER: &str = "DEFAULT:!kRSA:!kDHE:!PSK";
const SERVER_PSK: &str = "kECDHEPSK";

/// How a client authenticates, and which servers it trusts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Keys {
    /// Without authentication; trusts the host's CA certificates.
    System,
    /// A directory with `ca-cert.pem`, and if the server requires it `client-cert.pem` and `client-key.pem`.
    Certificates(PathBuf),
    /// A file of pre-shared keys, and the name of the client's key in it.
    Psk {
        /// Lines `name:hex`.
        file: PathBuf,
        /// The name.
        user: String,
    },
}

/// The TLS context of a server.
#[derive(Clone)]
pub struct ServerTls(SslContext);

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServerTls")
    }
}

impl ServerTls {
    /// From `server-cert.pem`, `server-key.pem` and, with `verify_peer`, `ca-cert.pem` in `folder`; with
    /// `verify_peer`, clients must present a certificate signed by the CA that `ca-crl.pem`, if it
    /// exists, does not revoke.
    ///
    /// # Errors
    /// [`TlsError`], naming the file and the remedy.
    pub fn from_certificates(folder: &Path, verify_peer: bool) -> Result<ServerTls, TlsError> {
        let mut builder = server()?;
        let certificate = existing(folder, "server-cert.pem", "the server's certificate (PEM)")?;
        let key = existing(folder, "server-key.pem", "the server's private key (PEM)")?;
        identify(&mut builder, certificate, key)?;
        if verify_peer {
            let ca = existing(folder, "ca-cert.pem", "the CA that signs clients' certificates")?;
            trust(&mut builder, ca)?;
            pem_files::revoke(&mut builder, folder)?;
            builder.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
        }
        Ok(ServerTls(builder.build()))
    }

    /// Checks that the certificates in `folder` that a server presents, and with `verify_peer` trusts, are valid today.
    ///
    /// # Errors
    /// [`TlsError::Expired`], [`TlsError::NotYet`], or those of reading them.
    pub fn check_dates(folder: &Path, verify_peer: bool) -> Result<(), TlsError> {
        check_date(existing(folder, "server-cert.pem", "the server's certificate (PEM)")?)?;
        if verify_peer {
            check_date(existing(
                folder,
                "ca-cert.pem",
                "the CA that signs clients' certificates",
            )?)?;
            pem_files::check_revocation_date(folder)?;
        }
        Ok(())
    }

    /// The files in `folder` that a server needs and that expire: its certificate, and with
    /// `verify_peer` the authority of clients and its revocation list. Without files that cannot be
    /// read.
    pub fn expiring_files(folder: &Path, verify_peer: bool) -> Vec<ExpiringFile> {
        let mut kinds = vec![ExpiringKind::Certificate];
        if verify_peer {
            kinds.extend([ExpiringKind::Authority, ExpiringKind::RevocationList]);
        }
        let file = |kind| pem_files::expiring(folder, kind).ok().flatten();
        kinds.into_iter().filter_map(file).collect()
    }

    /// From a file of pre-shared keys: lines `name:hex`, `#` starts a comment.
    ///
    /// # Errors
    /// [`TlsError`], naming the file, the line and the remedy.
    pub fn from_psk(path: &Path) -> Result<ServerTls, TlsError> {
        let keys = Arc::new(keys::read(path)?);
        let mut builder = server()?;
        // Clients offer suites with and without PSK; without a certificate only those with PSK work.
        builder.set_cipher_list(SERVER_PSK)?;
        let place = psk_name::place()?;
        builder.set_psk_server_callback(move |ssl, identity, out| {
            let Some(name) = identity else { return Ok(0) };
            let Some(key) = keys.get(name) else { return Ok(0) };
            let Some(room) = out.get_mut(..key.len()) else { return Ok(0) };
            room.copy_from_slice(key);
            ssl.set_ex_data(place, name.into());
            Ok(key.len())
        });
        Ok(ServerTls(builder.build()))
    }

    /// A session with a newly connected client.
    ///
    /// # Errors
    /// OpenSSL's.
    pub fn session(&self) -> io::Result<TlsSession> {
        let mut ssl = Ssl::new(&self.0).map_err(io::Error::other)?;
        ssl.set_accept_state();
        TlsSession::new(ssl)
    }
}

/// The TLS context of a client, for one server.
#[derive(Clone)]
pub struct ClientTls {
    context: SslContext,
    /// The host name that the server's certificate must have.
    host: Option<String>,
    verify: bool,
}

impl std::fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClientTls")
    }
}

impl ClientTls {
    /// For the server `host`. Without `verify` any certificate is accepted; pre-shared keys need no further
    /// verification.
    ///
    /// # Errors
    /// [`TlsError`], naming the file and the remedy.
    pub fn new(keys: &Keys, host: Option<String>, verify: bool) -> Result<ClientTls, TlsError> {
        let mut builder = common(SslMethod::tls_client())?;
        let mut verify = verify;
        match keys {
            Keys::System => builder.set_default_verify_paths()?,
            Keys::Certificates(folder) => {
                let ca = existing(folder, "ca-cert.pem", "the CA of the server's certificate")?;
                trust(&mut builder, ca)?;
                pem_files::revoke(&mut builder, folder)?;
                let certificate = folder.join("client-cert.pem");
                if certificate.exists() {
                    let purpose = "the private key of client-cert.pem";
                    let key = existing(folder, "client-key.pem", purpose)?;
                    identify(&mut builder, certificate, key)?;
                }
            }
            Keys::Psk { file, user } => {
                present(&mut builder, file, user)?;
                verify = false;
            }
        }
        let mode = if verify { SslVerifyMode::PEER } else { SslVerifyMode::NONE };
        builder.set_verify(mode);
        Ok(ClientTls { context: builder.build(), host, verify })
    }

    /// A session on a new connection to the server.
    ///
    /// # Errors
    /// OpenSSL's.
    pub fn session(&self) -> io::Result<TlsSession> {
        let mut ssl = Ssl::new(&self.context).map_err(io::Error::other)?;
        if let Some(host) = &self.host {
            let address = host.parse::<std::net::IpAddr>();
            if address.is_err() {
                ssl.set_hostname(host).map_err(io::Error::other)?;
            }
            if self.verify {
                let wanted = match address {
                    Ok(address) => ssl.param_mut().set_ip(address),
                    Err(_) => ssl.param_mut().set_host(host),
                };
                wanted.map_err(io::Error::other)?;
            }
        }
        ssl.set_connect_state();
        TlsSession::new(ssl)
    }
}

fn common(method: SslMethod) -> Result<SslContextBuilder, TlsError> {
    let mut builder = SslContext::builder(method)?;
    builder.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    let never = SslOptions::NO_RENEGOTIATION | SslOptions::NO_COMPRESSION | SslOptions::NO_TICKET;
    builder.set_options(never);
    // Idle connections hold no buffers.
    builder.set_mode(SslMode::RELEASE_BUFFERS);
    builder.set_cipher_list(FORWARD_SECRET)?;
    Ok(builder)
}

fn server() -> Result<SslContextBuilder, TlsError> {
    let mut builder = common(SslMethod::tls_server())?;
    builder.set_cipher_list(SERVER)?;
    // No session resumption: connections to disks are few and long. Neither the server nor the client keeps state by
    // which a session could be resumed.
    builder.set_num_tickets(0)?;
    builder.set_session_cache_mode(SslSessionCacheMode::OFF);
    Ok(builder)
}

fn identify(
    builder: &mut SslContextBuilder,
    certificate: PathBuf,
    key: PathBuf,
) -> Result<(), TlsError> {
    let purpose = "a certificate in PEM form";
    pem_files::read(&certificate, purpose)?;
    builder.set_certificate_chain_file(&certificate).map_err(|e| TlsError::Content {
        path: certificate,
        purpose,
        reason: e.to_string(),
    })?;
    let private = pem_files::private_key(&key)?;
    let fits = builder.set_private_key(&private).and_then(|()| builder.check_private_key());
    fits.map_err(|_| TlsError::Mismatch { path: key })
}

fn trust(builder: &mut SslContextBuilder, ca: PathBuf) -> Result<(), TlsError> {
    let purpose = "a CA certificate in PEM form";
    pem_files::read(&ca, purpose)?;
    builder.set_ca_file(&ca).map_err(|e| TlsError::Content {
        path: ca,
        purpose,
        reason: e.to_string(),
    })
}

/// Makes sessions authenticate as `user`, with the key of that name.
fn present(builder: &mut SslContextBuilder, file: &Path, user: &str) -> Result<(), TlsError> {
    let key = keys::read(file)?.remove(user.as_bytes());
    let user = user.to_owned();
    let Some(key) = key else { return Err(TlsError::NoKey { path: file.into(), user }) };
    // Without certificates only these suites work.
    builder.set_cipher_list(FORWARD_SECRET_PSK)?;
    builder.set_psk_client_callback(move |_, _, identity, out| {
        let (name, end) = (user.as_bytes(), user.len());
        let (Some(place), Some(room)) = (identity.get_mut(..=end), out.get_mut(..key.len())) else {
            return Ok(0);
        };
        place[..end].copy_from_slice(name);
        place[end] = 0;
        room.copy_from_slice(&key);
        Ok(key.len())
    });
    Ok(())
}

fn check_date(path: PathBuf) -> Result<(), TlsError> {
    let certificate = certificate(&path)?;
    let now = openssl::asn1::Asn1Time::days_from_now(0)?;
    if certificate.not_after() < now {
        return Err(TlsError::Expired { path, date: certificate.not_after().to_string() });
    }
    if certificate.not_before() > now {
        return Err(TlsError::NotYet { path, date: certificate.not_before().to_string() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_error_names_a_missing_certificate() {
        let folder = tempfile::tempdir().unwrap();
        let error = ServerTls::from_certificates(folder.path(), false).unwrap_err();
        assert!(error.to_string().contains("server-cert.pem"), "{error}");
        let keys = Keys::Certificates(folder.path().into());
        let error = ClientTls::new(&keys, None, true).unwrap_err();
        assert!(error.to_string().contains("ca-cert.pem"), "{error}");
    }

    /// The cipher suites of TLS 1.2 that a cipher list selects: those that a client configured with it offers.
    fn suites(list: &str) -> BTreeSet<[u8; 2]> {
        let mut builder = SslContext::builder(SslMethod::tls_client()).unwrap();
        builder.set_max_proto_version(Some(SslVersion::TLS1_2)).unwrap();
        builder.set_cipher_list(list).unwrap();
        builder.set_psk_client_callback(|_, _, _, _| Ok(0));
        let mut ssl = Ssl::new(&builder.build()).unwrap();
        ssl.set_connect_state();
        let mut session = TlsSession::new(ssl).unwrap();
        assert!(!session.handshake().unwrap());
        let mut hello = [0; 4096];
        let count = session.take_output(&mut hello);
        // After the headers of record and message, version and random: the session's name, then the suites.
        let mut rest = &hello[5 + 4 + 2 + 32..count];
        rest = &rest[1 + usize::from(rest[0])..];
        let length = usize::from(u16::from_be_bytes([rest[0], rest[1]]));
        let signal = [0, 0xff];
        let all = rest[2..2 + length].chunks(2).map(|suite| [suite[0], suite[1]]);
        all.filter(|suite| *suite != signal).collect()
    }

    #[test]
    fn a_server_lists_no_suite_that_needs_diffie_hellman_parameters() {
        let needless = &suites("kDHEPSK") | &suites("kDHE");
        assert!(needless.len() > 8, "{needless:?}");
        for list in [SERVER, SERVER_PSK] {
            let listed = suites(list);
            assert!(listed.len() > 3, "{listed:?}");
            assert!(listed.is_disjoint(&needless), "{list}: {:?}", &listed & &needless);
        }
    }

    #[test]
    fn a_handshake_with_pre_shared_keys_succeeds_only_if_the_keys_are_equal() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "alice:0102030405060708\n").unwrap();
        let other = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(other.path(), "alice:ff02030405060708\n").unwrap();
        let server = ServerTls::from_psk(file.path()).unwrap();
        for (path, fits) in [(file.path(), true), (other.path(), false)] {
            let keys = Keys::Psk { file: path.into(), user: "alice".into() };
            let client = ClientTls::new(&keys, None, true).unwrap();
            let mut ends = [client.session().unwrap(), server.session().unwrap()];
            let mut established = Ok(false);
            for _ in 0..8 {
                let results = ends.each_mut().map(TlsSession::handshake);
                for (from, to) in [(0, 1), (1, 0)] {
                    let mut bytes = [0; 4096];
                    let count = ends[from].take_output(&mut bytes);
                    ends[to].feed(&bytes[..count]);
                }
                let [one, two] = results;
                established = one.and_then(|one| Ok(one & two?));
                if !matches!(established, Ok(false)) {
                    break;
                }
            }
            assert_eq!(established.is_ok_and(|done| done), fits, "{path:?}");
        }
        let keys = Keys::Psk { file: file.path().into(), user: "bob".into() };
        let error = ClientTls::new(&keys, None, true).unwrap_err();
        assert!(error.to_string().contains("`bob`"), "{error}");
    }
}
