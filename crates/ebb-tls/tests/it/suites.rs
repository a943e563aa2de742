//! What a server negotiates: only cipher suites with forward secrecy, and no session resumption.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};

use ebb_tls::{ServerTls, TlsRead, TlsSession};
use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::hash::MessageDigest;
use openssl::pkey::PKey;
use openssl::rsa::Rsa;
use openssl::ssl::{
    Ssl, SslContext, SslContextBuilder, SslMethod, SslSession, SslSessionCacheMode, SslStream,
    SslVersion,
};
use openssl::x509::{X509, X509NameBuilder};
use sealer::Wire;

use crate::sealer;

fn deliver(server: &mut TlsSession, client: &mut SslStream<Wire>) {
    let said = std::mem::take(&mut client.get_mut().to_server);
    server.feed(&said);
    let mut bytes = [0; 4096];
    loop {
        match server.take_output(&mut bytes) {
            0 => return,
            count => client.get_mut().to_client.extend_from_slice(&bytes[..count]),
        }
    }
}

/// Does a handshake, then sends a byte in each direction; returns the client's side, or the server's error.
fn connect(
    server: &ServerTls,
    client: &SslContext,
    resumed: Option<&SslSession>,
) -> Result<SslStream<Wire>, String> {
    let mut server = server.session().unwrap();
    let mut ssl = Ssl::new(client).unwrap();
    if let Some(session) = resumed {
        // SAFETY: the session comes from the same context.
        unsafe { ssl.set_session(session) }.unwrap();
    }
    let mut client = SslStream::new(ssl, Wire::default()).unwrap();
    for _ in 0..8 {
        let _ = client.connect();
        let said = std::mem::take(&mut client.get_mut().to_server);
        server.feed(&said);
        let done = server.handshake();
        deliver(&mut server, &mut client);
        if done.map_err(|error| error.to_string())? && client.ssl().is_init_finished() {
            break;
        }
    }
    assert!(client.ssl().is_init_finished(), "the handshake does not end");
    client.write_all(b"?").unwrap();
    server.write(b"!").unwrap();
    deliver(&mut server, &mut client);
    assert_eq!(server.read(&mut [0; 8]).unwrap(), TlsRead::Data(1));
    client.read_exact(&mut [0]).unwrap();
    // As NBD clients do: an aborted connection invalidates its session.
    let _ = client.shutdown();
    Ok(client)
}

/// A server with a self-signed RSA certificate.
fn with_certificate(folder: &Path) -> ServerTls {
    let key = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
    let mut name = X509NameBuilder::new().unwrap();
    name.append_entry_by_text("CN", "a server").unwrap();
    let name = name.build();
    let mut builder = X509::builder().unwrap();
    builder.set_version(2).unwrap();
    builder.set_serial_number(&BigNum::from_u32(1).unwrap().to_asn1_integer().unwrap()).unwrap();
    builder.set_subject_name(&name).unwrap();
    builder.set_issuer_name(&name).unwrap();
    builder.set_pubkey(&key).unwrap();
    builder.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::days_from_now(2).unwrap()).unwrap();
    builder.sign(&key, MessageDigest::sha256()).unwrap();
    std::fs::write(folder.join("server-cert.pem"), builder.build().to_pem().unwrap()).unwrap();
    std::fs::write(folder.join("server-key.pem"), key.private_key_to_pem_pkcs8().unwrap()).unwrap();
    ServerTls::from_certificates(folder, false).unwrap()
}

fn with_keys(folder: &Path) -> ServerTls {
    let keys = folder.join("keys");
    std::fs::write(&keys, "alice:0102030405060708\n").unwrap();
    ServerTls::from_psk(&keys).unwrap()
}

fn client(version: SslVersion, suites: &str) -> SslContextBuilder {
    let mut builder = SslContext::builder(SslMethod::tls_client()).unwrap();
    builder.set_min_proto_version(Some(version)).unwrap();
    builder.set_max_proto_version(Some(version)).unwrap();
    builder.set_cipher_list(suites).unwrap();
    builder.set_psk_client_callback(|_, _, identity, key| {
        identity[..6].copy_from_slice(b"alice\0");
        key[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        Ok(8)
    });
    builder
}

#[test]
fn suites_without_forward_secrecy_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, keys) = (with_certificate(folder.path()), with_keys(folder.path()));
    let refused = [
        (&certificate, "AES128-GCM-SHA256:AES256-SHA"),
        (&keys, "PSK-AES128-GCM-SHA256:PSK-AES256-CBC-SHA"),
        (&keys, "RSA-PSK-AES128-GCM-SHA256:AES128-GCM-SHA256"),
    ];
    for (server, suites) in refused {
        let outcome = connect(server, &client(SslVersion::TLS1_2, suites).build(), None);
        let error = outcome.map(|_| ()).expect_err(suites);
        assert!(error.contains("no shared cipher"), "{suites}: {error}");
    }
    let accepted = [
        (&certificate, "ECDHE-RSA-AES128-GCM-SHA256"),
        (&keys, "ECDHE-PSK-CHACHA20-POLY1305"),
        (&keys, "ECDHE-PSK-AES128-CBC-SHA256"),
    ];
    for (server, suites) in accepted {
        let outcome = connect(server, &client(SslVersion::TLS1_2, suites).build(), None);
        outcome.map(drop).expect(suites);
    }
}

#[test]
fn no_session_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, keys) = (with_certificate(folder.path()), with_keys(folder.path()));
    for (server, suites) in [(&certificate, "ECDHE-RSA-AES128-GCM-SHA256"), (&keys, "kECDHEPSK")] {
        for version in [SslVersion::TLS1_2, SslVersion::TLS1_3] {
            let tickets = Arc::<Mutex<Vec<SslSession>>>::default();
            let mut builder = client(version, suites);
            builder.set_session_cache_mode(SslSessionCacheMode::CLIENT);
            let kept = tickets.clone();
            builder.set_new_session_callback(move |_, session| kept.lock().unwrap().push(session));
            let context = builder.build();
            let first = connect(server, &context, None).unwrap();
            let mut sessions = std::mem::take(&mut *tickets.lock().unwrap());
            if version == SslVersion::TLS1_3 {
                assert!(sessions.is_empty(), "a ticket was given: {suites}");
            }
            sessions.extend(first.ssl().session().map(ToOwned::to_owned));
            assert!(!sessions.is_empty(), "nothing was tried");
            // With TLS 1.3, a pre-shared key counts as a resumed session, even the first time.
            let reused = first.ssl().session_reused();
            assert_eq!(reused, version == SslVersion::TLS1_3 && suites == "kECDHEPSK");
            for session in sessions {
                let again = connect(server, &context, Some(&session)).unwrap();
                assert_eq!(again.ssl().session_reused(), reused, "{version:?} {suites}");
            }
        }
    }
}
