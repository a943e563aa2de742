//! TLS with OpenSSL on the client's side: certificates and pre-shared keys, data both ways.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::path::Path;

use common::{Client, FLUSH, Rig, STYLES, Stream, Style, memory, pattern};
use ebb_access::{AccessEntry, AccessList};
use ebb_export_nbd::{ServerLimits, ServerTls, TlsMode};
use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::ssl::{Ssl, SslContext, SslContextBuilder, SslMethod, SslVerifyMode, SslVersion};
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509NameBuilder};

const MIB: u64 = 1 << 20;

struct Identity {
    key: PKey<Private>,
    certificate: X509,
}

/// A certificate for `name`, signed by `issuer`, or by itself as a CA.
fn identity(name: &str, issuer: Option<&Identity>) -> Identity {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    let key = PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap();
    let mut subject = X509NameBuilder::new().unwrap();
    subject.append_entry_by_text("CN", name).unwrap();
    let subject = subject.build();
    let mut builder = X509::builder().unwrap();
    builder.set_version(2).unwrap();
    let serial = BigNum::from_u32(u32::try_from(name.len()).unwrap()).unwrap();
    builder.set_serial_number(&serial.to_asn1_integer().unwrap()).unwrap();
    builder.set_subject_name(&subject).unwrap();
    builder.set_pubkey(&key).unwrap();
    builder.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::days_from_now(2).unwrap()).unwrap();
    match issuer {
        None => {
            builder.set_issuer_name(&subject).unwrap();
            builder
                .append_extension(BasicConstraints::new().critical().ca().build().unwrap())
                .unwrap();
            builder.sign(&key, MessageDigest::sha256()).unwrap();
        }
        Some(issuer) => {
            builder.set_issuer_name(issuer.certificate.subject_name()).unwrap();
            let context = builder.x509v3_context(Some(&issuer.certificate), None);
            let names = SubjectAlternativeName::new().dns(name).build(&context).unwrap();
            builder.append_extension(names).unwrap();
            builder.sign(&issuer.key, MessageDigest::sha256()).unwrap();
        }
    }
    Identity { key, certificate: builder.build() }
}

/// Writes the three files of a server's directory.
fn write_folder(folder: &Path, ca: &Identity, server: &Identity) {
    let write = |name: &str, content: Vec<u8>| std::fs::write(folder.join(name), content).unwrap();
    write("ca-cert.pem", ca.certificate.to_pem().unwrap());
    write("server-cert.pem", server.certificate.to_pem().unwrap());
    write("server-key.pem", server.key.private_key_to_pem_pkcs8().unwrap());
}

fn with_ca(ca: &Identity, version: SslVersion) -> SslContextBuilder {
    let mut builder = SslContext::builder(SslMethod::tls_client()).unwrap();
    builder.set_min_proto_version(Some(version)).unwrap();
    builder.set_max_proto_version(Some(version)).unwrap();
    builder.cert_store_mut().add_cert(ca.certificate.clone()).unwrap();
    builder.set_verify(SslVerifyMode::PEER);
    builder
}

/// Requests TLS and does its handshake.
fn upgrade(rig: &Rig, context: &SslContext) -> Result<Box<dyn Stream>, String> {
    let mut stream: Box<dyn Stream> = Box::new(rig.stream());
    Client::greet(&mut stream).unwrap();
    assert_eq!(Client::option(&mut stream, 5, b"").unwrap(), [(1, vec![])], "STARTTLS");
    let mut ssl = Ssl::new(context).unwrap();
    ssl.param_mut().set_host("ebbd.test").unwrap();
    let stream = ssl.connect(stream).map_err(|error| error.to_string())?;
    Ok(Box::new(stream))
}

/// The exports that a client with this identity sees, of volumes that are for one kind of client each.
fn visible(rig: &Rig, context: &SslContext) -> String {
    let mut stream = upgrade(rig, context).unwrap();
    let replies = Client::option(&mut stream, 3, b"").unwrap();
    let names = replies.iter().filter(|(kind, _)| *kind == 2).map(|(_, text)| &text[4..]);
    let names: Vec<_> = names.map(|name| std::str::from_utf8(name).unwrap().to_owned()).collect();
    for (name, _) in ALLOWED {
        let length = u32::try_from(name.len()).unwrap().to_be_bytes();
        let request = [&length[..], name.as_bytes(), &[0, 0]].concat();
        let (kind, _) = Client::option(&mut stream, 6, &request).unwrap().pop().unwrap();
        assert_eq!(kind == 1, names.iter().any(|one| one == name), "{name}");
    }
    names.join(" ")
}

const ALLOWED: [(&str, &str); 5] = [
    ("for-alice", "psk:alice"),
    ("for-bob", "psk:bob"),
    ("for-client", "cn:c*t"),
    ("for-hosts", "cn:*.host"),
    ("for-psk-cn", "psk:cn:client"),
];

fn add_allowed(rig: &Rig) {
    for (name, entry) in ALLOWED {
        let entry = AccessEntry::parse(entry).unwrap();
        let volumes = rig.server.volumes();
        volumes.set_allowed(name, Some(AccessList::new(vec![entry]).unwrap()));
        volumes.add(memory(name, MIB), std::sync::Arc::default());
    }
}

/// Writes and reads several MiB, in small and large requests.
/// Writes and reads as the client that the server is to know as `who`.
fn round_trip(rig: &Rig, context: &SslContext, style: Style, who: &str) {
    let stream = upgrade(rig, context).unwrap();
    let mut client = Client::go(stream, "disk", style).unwrap();
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0, "it is served, and so listed");
    let view = rig.server.list_clients().pop().unwrap();
    assert_eq!((view.identity.as_deref(), view.tls), (Some(who), true));
    let expected = pattern(3, 6 << 20);
    assert_eq!(client.write(0, 0, &expected[..4 << 20]), 0);
    for (number, piece) in expected[4 << 20..].chunks(12_800).enumerate() {
        let length = piece.len() - piece.len() % 512;
        assert_eq!(client.write(1, 4 * MIB + number as u64 * 12_800, &piece[..length]), 0);
    }
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    assert!(client.read(0, 6 << 20).unwrap()[..6 << 20] == expected);
    // Several requests at once.
    for cookie in 1..=32 {
        client.send(0, 0, cookie, cookie * 65_536, 64 << 10);
    }
    for _ in 0..32 {
        let reply = client.reply(|cookie| Some((cookie * 65_536, 64 << 10))).unwrap();
        let at = usize::try_from(reply.cookie * 65_536).unwrap();
        assert!(reply.data == expected[at..at + (64 << 10)]);
    }
    client.send(2, 0, 9, 0, 0);
    assert!(client.is_at_end(), "TLS ends with close_notify");
}

const VERSIONS: [SslVersion; 2] = [SslVersion::TLS1_2, SslVersion::TLS1_3];

#[test]
fn certificates() {
    let folder = tempfile::tempdir().unwrap();
    let ca = identity("the CA", None);
    write_folder(folder.path(), &ca, &identity("ebbd.test", Some(&ca)));
    let context = ServerTls::from_certificates(folder.path(), false).unwrap();
    let rig = Rig::new(ServerLimits::default(), TlsMode::Require, Some(context));
    rig.server.volumes().add(memory("disk", 16 * MIB), std::sync::Arc::default());
    // Without a certificate a client is known by its socket.
    let uid = format!("uid:{}", rustix::process::getuid().as_raw());
    for version in VERSIONS {
        for style in STYLES {
            round_trip(&rig, &with_ca(&ca, version).build(), style, &uid);
        }
    }
    // The server's certificate is not signed by another CA.
    let stranger = with_ca(&identity("another CA", None), SslVersion::TLS1_3).build();
    assert!(upgrade(&rig, &stranger).err().unwrap().contains("certificate verify failed"));
    // Without TLS, options are refused with the requirement of TLS.
    let mut stream: Box<dyn Stream> = Box::new(rig.stream());
    Client::greet(&mut stream).unwrap();
    let refused = Client::option(&mut stream, 3, b"").unwrap();
    assert_eq!(refused[0].0, (1 << 31) + 5, "TLS_REQD");
}

#[test]
fn certificates_of_clients() {
    let folder = tempfile::tempdir().unwrap();
    let ca = identity("the CA", None);
    write_folder(folder.path(), &ca, &identity("ebbd.test", Some(&ca)));
    let context = ServerTls::from_certificates(folder.path(), true).unwrap();
    let rig = Rig::new(ServerLimits::default(), TlsMode::On, Some(context));
    rig.server.volumes().add(memory("disk", 16 * MIB), std::sync::Arc::default());
    for version in VERSIONS {
        let with = |client: &Identity| {
            let mut builder = with_ca(&ca, version);
            builder.set_certificate(&client.certificate).unwrap();
            builder.set_private_key(&client.key).unwrap();
            builder.build()
        };
        round_trip(&rig, &with(&identity("client", Some(&ca))), Style::Structured, "cn:client");
        let other_ca = identity("another CA", None);
        for bad in [with(&identity("client", Some(&other_ca))), with_ca(&ca, version).build()] {
            // With TLS 1.3, the client receives the alert with its first read.
            let refused = match upgrade(&rig, &bad) {
                Err(_) => true,
                Ok(mut stream) => Client::option(&mut stream, 3, b"").is_err(),
            };
            assert!(refused, "{version:?}");
        }
    }
    add_allowed(&rig);
    for (name, expected) in
        [("client", "disk for-client"), ("a.b.host", "disk for-hosts"), (".host", "disk")]
    {
        let client = identity(name, Some(&ca));
        let mut builder = with_ca(&ca, SslVersion::TLS1_3);
        builder.set_certificate(&client.certificate).unwrap();
        builder.set_private_key(&client.key).unwrap();
        assert_eq!(visible(&rig, &builder.build()), expected, "{name}");
    }
    // TLS is offered, not required.
    assert_eq!(rig.client("disk", Style::Extended).ask(FLUSH, 0, 0, 0), 0);
}

#[test]
fn pre_shared_keys() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.psk");
    std::fs::write(&path, "alice:00112233445566778899aabbccddeeff\nbob:ff\n").unwrap();
    let context = ServerTls::from_psk(&path).unwrap();
    let rig = Rig::new(ServerLimits::default(), TlsMode::Require, Some(context));
    rig.server.volumes().add(memory("disk", 16 * MIB), std::sync::Arc::default());
    let alice: Vec<u8> = (0..16).map(|n| n * 0x11).collect();
    let with = |name: &'static str, key: Vec<u8>, version| {
        let mut builder = SslContext::builder(SslMethod::tls_client()).unwrap();
        builder.set_min_proto_version(Some(version)).unwrap();
        builder.set_max_proto_version(Some(version)).unwrap();
        builder.set_cipher_list("PSK").unwrap();
        builder.set_psk_client_callback(move |_, _, identity, out| {
            identity[..name.len()].copy_from_slice(name.as_bytes());
            identity[name.len()] = 0;
            out[..key.len()].copy_from_slice(&key);
            Ok(key.len())
        });
        builder.build()
    };
    add_allowed(&rig);
    for version in VERSIONS {
        assert_eq!(visible(&rig, &with("alice", alice.clone(), version)), "disk for-alice");
        assert_eq!(visible(&rig, &with("bob", vec![0xff], version)), "disk for-bob");
        for style in STYLES {
            round_trip(&rig, &with("alice", alice.clone(), version), style, "psk:alice");
        }
        for (name, key) in [("alice", vec![1; 16]), ("mallory", alice.clone())] {
            assert!(upgrade(&rig, &with(name, key, version)).is_err(), "{name} {version:?}");
        }
    }
}
