//! Certificates that their CA has revoked, and files that OpenSSL would ask a passphrase for.
//!
//! The files in `revoked/` are valid for 100 years.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;

use ebb_advice::Advice;
use ebb_tls::{ClientTls, ExpiringKind, Keys, ServerTls, TlsError, TlsSession};
use openssl::pkey::PKey;
use openssl::symm::Cipher;

const CA: &str = include_str!("revoked/ca-cert.pem");
const LIST: &str = include_str!("revoked/ca-crl.pem");
const GOOD: [&str; 2] =
    [include_str!("revoked/good-cert.pem"), include_str!("revoked/good-key.pem")];
const REVOKED: [&str; 2] =
    [include_str!("revoked/revoked-cert.pem"), include_str!("revoked/revoked-key.pem")];

/// A folder with the CA, and this certificate for both sides.
fn folder([certificate, key]: [&str; 2], list: Option<&str>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("ca-cert.pem", CA);
    for side in ["server", "client"] {
        write(&format!("{side}-cert.pem"), certificate);
        write(&format!("{side}-key.pem"), key);
    }
    if let Some(list) = list {
        write("ca-crl.pem", list);
    }
    folder
}

fn server(folder: &Path) -> Result<ServerTls, TlsError> {
    ServerTls::from_certificates(folder, true)
}

fn client(folder: &Path) -> Result<ClientTls, TlsError> {
    ClientTls::new(&Keys::Certificates(folder.into()), None, true)
}

/// Whether a handshake between them succeeds.
fn connects(client: &Path, server: &Path) -> bool {
    let mut ends = [
        self::client(client).unwrap().session().unwrap(),
        self::server(server).unwrap().session().unwrap(),
    ];
    let mut done = false;
    // With TLS 1.3 a client knows of a refusal only afterwards.
    for _ in 0..8 {
        let results = ends.each_mut().map(TlsSession::handshake);
        for (from, to) in [(0, 1), (1, 0)] {
            let mut bytes = [0; 8192];
            let count = ends[from].take_output(&mut bytes);
            ends[to].feed(&bytes[..count]);
        }
        let [Ok(one), Ok(two)] = results else { return false };
        done = one && two;
    }
    done
}

#[test]
fn a_revoked_certificate_is_rejected_on_both_sides() {
    let [good, revoked] = [GOOD, REVOKED].map(|pair| folder(pair, None));
    let listed = folder(GOOD, Some(LIST));
    let (good, revoked, listed) = (good.path(), revoked.path(), listed.path());
    assert!(connects(revoked, good) && connects(good, revoked), "without the list");
    assert!(connects(good, listed) && connects(listed, good), "with a good certificate");
    assert!(!connects(revoked, listed), "a revoked client");
    assert!(!connects(listed, revoked), "a revoked server");
}

#[test]
fn a_malformed_list_of_revoked_certificates_is_an_error() {
    for text in ["", "no list", &LIST[..LIST.len() / 2], CA] {
        let folder = folder(GOOD, Some(text));
        for error in [server(folder.path()).unwrap_err(), client(folder.path()).unwrap_err()] {
            assert!(error.to_string().contains("ca-crl.pem is not a list"), "{error}");
        }
    }
    let folder = folder(GOOD, None);
    std::fs::create_dir(folder.path().join("ca-crl.pem")).unwrap();
    assert!(matches!(server(folder.path()), Err(TlsError::File { .. })));
}

#[test]
fn certificate_authority_and_revocation_list_expire() {
    let kinds = |list, verifies| -> Vec<ExpiringKind> {
        let folder = folder(GOOD, list);
        let files = ServerTls::expiring_files(folder.path(), verifies);
        // The year 2100.
        assert!(files.iter().all(|file| file.expires > 4_102_444_800), "{files:?}");
        assert!(files.iter().all(|file| file.path.exists()), "{files:?}");
        files.into_iter().map(|file| file.kind).collect()
    };
    let all = [ExpiringKind::Certificate, ExpiringKind::Authority, ExpiringKind::RevocationList];
    assert_eq!(kinds(Some(LIST), true), all);
    assert_eq!(kinds(None, true), all[..2]);
    assert_eq!(kinds(Some("no list"), true), all[..2]);
    assert_eq!(kinds(Some(LIST), false), all[..1]);
}

#[test]
fn an_encrypted_file_is_rejected_without_a_prompt() {
    let key = PKey::private_key_from_pem(GOOD[1].as_bytes()).unwrap();
    let cipher = Cipher::aes_128_cbc();
    let modern = key.private_key_to_pem_pkcs8_passphrase(cipher, b"secret").unwrap();
    let old = key.ec_key().unwrap().private_key_to_pem_passphrase(cipher, b"secret").unwrap();
    let headers =
        "\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00112233445566778899AABBCCDDEEFF\n\n";
    let certificate = GOOD[0].replacen('\n', headers, 1);
    for pair in [
        [GOOD[0], std::str::from_utf8(&modern).unwrap()],
        [GOOD[0], std::str::from_utf8(&old).unwrap()],
        [&certificate, GOOD[1]],
    ] {
        let folder = folder(pair, None);
        for error in [server(folder.path()).unwrap_err(), client(folder.path()).unwrap_err()] {
            assert!(matches!(error, TlsError::Encrypted { .. }), "{error}");
            assert!(error.remedy().is_some_and(|it| it.contains("openssl pkey")), "{error}");
        }
    }
    let folder = folder([&certificate, GOOD[1]], None);
    assert_eq!(ServerTls::expiring_files(folder.path(), false), []);
}
