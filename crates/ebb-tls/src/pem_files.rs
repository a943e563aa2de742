//! PEM files of the operator: certificates, keys and lists of revoked certificates.
//!
//! # Invariants
//! - OpenSSL never asks for a passphrase: no one could type it, it would wait for ever, and its
//!   prompt replaces the handlers of signals. An encrypted file is rejected before OpenSSL reads it.

use std::path::{Path, PathBuf};

use openssl::asn1::{Asn1Time, Asn1TimeRef};
use openssl::error::ErrorStack;
use openssl::pkey::{PKey, Private};
use openssl::ssl::{SslContextBuilder, SslFiletype};
use openssl::x509::store::X509Lookup;
use openssl::x509::verify::X509VerifyFlags;
use openssl::x509::{X509, X509Crl};

use crate::TlsError;

/// Certificates that the CA has revoked; the name that GnuTLS programs of NBD use.
const REVOKED: &str = "ca-crl.pem";
const REVOKED_PURPOSE: &str = "a list of revoked certificates in PEM form";
/// Marks of encrypted content: of the traditional form, and of PKCS #8.
const ENCRYPTED: [&[u8]; 2] = [b"Proc-Type: 4,ENCRYPTED", b"BEGIN ENCRYPTED PRIVATE KEY"];

/// The content of a file that expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiringKind {
    /// The server's certificate.
    Certificate,
    /// The certificate of the CA that signs clients' certificates.
    Authority,
    /// Certificates that the CA has revoked, until its next list.
    RevocationList,
}

/// A file with its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpiringFile {
    /// Its content.
    pub kind: ExpiringKind,
    /// Its path.
    pub path: PathBuf,
    /// When it expires, seconds since 1970.
    pub expires: i64,
}

/// Reads when a file in `folder` expires; `None` if there is no such file or it never expires.
///
/// # Errors
/// [`TlsError`].
pub(crate) fn expiring(
    folder: &Path,
    kind: ExpiringKind,
) -> Result<Option<ExpiringFile>, TlsError> {
    let name = match kind {
        ExpiringKind::Certificate => "server-cert.pem",
        ExpiringKind::Authority => "ca-cert.pem",
        ExpiringKind::RevocationList => {
            let Some((path, list)) = revoked(folder)? else { return Ok(None) };
            let next = list.next_update().map(seconds).transpose()?;
            return Ok(next.map(|expires| ExpiringFile { kind, path, expires }));
        }
    };
    let path = folder.join(name);
    let expires = seconds(certificate(&path)?.not_after())?;
    Ok(Some(ExpiringFile { kind, path, expires }))
}

/// Seconds from 1970 to `time`.
fn seconds(time: &Asn1TimeRef) -> Result<i64, TlsError> {
    let since = Asn1Time::from_unix(0)?.diff(time)?;
    Ok(i64::from(since.days) * 86_400 + i64::from(since.secs))
}

/// Reads a PEM file whose content is not encrypted.
///
/// # Errors
/// [`TlsError::File`], [`TlsError::Encrypted`].
pub(crate) fn read(path: &Path, purpose: &'static str) -> Result<Vec<u8>, TlsError> {
    let text = std::fs::read(path).map_err(|source| TlsError::File {
        path: path.into(),
        purpose,
        source,
    })?;
    let has = |mark: &&[u8]| text.windows(mark.len()).any(|part| part == *mark);
    if ENCRYPTED.iter().any(has) {
        return Err(TlsError::Encrypted { path: path.into() });
    }
    Ok(text)
}

/// Reads a private key.
///
/// # Errors
/// [`TlsError`].
pub(crate) fn private_key(path: &Path) -> Result<PKey<Private>, TlsError> {
    let purpose = "a private key in PEM form that belongs to the certificate in the same directory";
    let text = read(path, purpose)?;
    // Marks of encryption that this version does not know end here, and not at a prompt.
    let never = |_: &mut [u8]| Err(ErrorStack::get());
    PKey::private_key_from_pem_callback(&text, never)
        .map_err(|reason| content(path, purpose, &reason))
}

/// Reads the first certificate of a file.
///
/// # Errors
/// [`TlsError`].
pub(crate) fn certificate(path: &Path) -> Result<X509, TlsError> {
    let purpose = "a certificate (PEM)";
    X509::from_pem(&read(path, purpose)?).map_err(|reason| content(path, purpose, &reason))
}

/// Has each certificate of a peer's chain checked against the lists in [`REVOKED`], if `folder` has that file.
///
/// # Errors
/// [`TlsError`] if the file cannot be read or has no list.
pub(crate) fn revoke(builder: &mut SslContextBuilder, folder: &Path) -> Result<(), TlsError> {
    let Some((path, _)) = revoked(folder)? else { return Ok(()) };
    let store = builder.cert_store_mut();
    let lookup = store.add_lookup(X509Lookup::file())?;
    let count = lookup.load_crl_file(&path, SslFiletype::PEM);
    count.map_err(|reason| content(&path, REVOKED_PURPOSE, &reason))?;
    store.set_flags(X509VerifyFlags::CRL_CHECK | X509VerifyFlags::CRL_CHECK_ALL)?;
    Ok(())
}

/// Checks that the list of revoked certificates, if there is one, is valid today: OpenSSL rejects all peers with one that is not.
///
/// # Errors
/// [`TlsError::OldList`], or those of reading it.
pub(crate) fn check_revocation_date(folder: &Path) -> Result<(), TlsError> {
    let Some((path, list)) = revoked(folder)? else { return Ok(()) };
    let now = openssl::asn1::Asn1Time::days_from_now(0)?;
    match list.next_update().filter(|next| *next < now) {
        Some(next) => Err(TlsError::OldList { path, date: next.to_string() }),
        None => Ok(()),
    }
}

fn revoked(folder: &Path) -> Result<Option<(PathBuf, X509Crl)>, TlsError> {
    let path = folder.join(REVOKED);
    if std::fs::symlink_metadata(&path)
        .is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
    {
        return Ok(None);
    }
    let text = read(&path, REVOKED_PURPOSE)?;
    let list =
        X509Crl::from_pem(&text).map_err(|reason| content(&path, REVOKED_PURPOSE, &reason))?;
    Ok(Some((path, list)))
}

fn content(path: &Path, purpose: &'static str, reason: &ErrorStack) -> TlsError {
    TlsError::Content { path: path.into(), purpose, reason: reason.to_string() }
}

/// The path of a file that must exist.
///
/// # Errors
/// [`TlsError::File`].
pub(crate) fn existing(
    folder: &Path,
    name: &str,
    purpose: &'static str,
) -> Result<PathBuf, TlsError> {
    let path = folder.join(name);
    match std::fs::File::open(&path) {
        Ok(_) => Ok(path),
        Err(source) => Err(TlsError::File { path, purpose, source }),
    }
}
