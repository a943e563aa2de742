//! Tests of who may do what over TCP, in plain text and under TLS.

use std::path::Path;

use openssl::ssl::{SslConnector, SslMethod, SslVerifyMode};

use super::*;
use crate::access::needed_role;
use crate::routes::described;

/// A daemon with a token for each role, and these.
fn guarded(tls: Option<ebb_tls::ServerTls>) -> (Running, NewToken, NewToken) {
    let view = NewToken::create(Role::View, "viewer").unwrap();
    let operate = NewToken::create(Role::Operate, "operator").unwrap();
    let text = format!("{}{}", view.line, operate.line);
    let tokens = TokenTable::parse(&text, Path::new("tokens")).unwrap();
    let access = PageAccess { tokens: Some(tokens), tls };
    (start_at(None, Vec::new(), access), view, operate)
}

/// Sends a whole request; the status and the reply.
fn exchange(mut stream: impl Read + Write, request: &str) -> (u16, String) {
    // A refusal may come before all is sent.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or(0), answer)
}

fn request(method: &str, path: &str, headers: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n")
}

fn with_token(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

fn page(daemon: &Running) -> std::net::TcpStream {
    let stream = std::net::TcpStream::connect(daemon.page).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream
}

#[test]
fn every_route_is_refused_to_every_role_below_its_own() {
    let (daemon, view, operate) = guarded(None);
    let routes = described();
    assert!(routes.len() > 15, "{routes:?}");
    for (method, path) in &routes {
        let path = path.replace("{volume}", "no-volume").replace("{bdi}", "no-bdi");
        let path = path.replace("{name}", "no-name").replace("{id}", "0");
        let needed = needed_role(&method.parse().unwrap(), &path);
        for (role, headers) in [
            (Role::None, String::new()),
            (Role::View, with_token(&view.secret)),
            (Role::Operate, with_token(&operate.secret)),
        ] {
            // An operator's body is malformed, so that nothing is done.
            let (status, answer) = if method == "GET" && path == "/v1/events" {
                exchange(page(&daemon), &request(method, "/v1/events?limit=1", &headers))
            } else {
                exchange(page(&daemon), &request(method, &path, &headers))
            };
            let refused = [401, 403].contains(&status);
            assert_eq!(refused, role < needed, "{method} {path} as {role:?}: {answer}");
            if refused {
                assert_eq!(status, if role == Role::None { 401 } else { 403 }, "{answer}");
                assert!(!answer.contains("disk"), "{answer}");
                // A refusal may be shown in a browser as well.
                assert!(
                    answer.contains("default-src 'none'") && answer.contains("nosniff"),
                    "{answer}"
                );
            }
        }
    }
}

#[test]
fn an_unknown_path_or_method_tells_nothing_without_a_token() {
    let (daemon, view, _) = guarded(None);
    for (method, path) in [("GET", "/v1/x"), ("GET", "/v1/volumes/disk/x"), ("BREW", "/metrics")] {
        let (status, answer) = exchange(page(&daemon), &request(method, path, ""));
        assert_eq!(status, 401, "{answer}");
        assert!(answer.to_lowercase().contains("www-authenticate: bearer"), "{answer}");
    }
    let (status, _) = exchange(page(&daemon), &request("GET", "/v1/x", &with_token(&view.secret)));
    assert_eq!(status, 404);
    for path in ["/", "/page.css", "/main.js", "/login.js"] {
        let (status, answer) = exchange(page(&daemon), &request("GET", path, ""));
        assert_eq!(status, 200, "the login form needs {path}: {answer}");
    }
}

#[test]
fn callers_are_told_who_they_are() {
    let (daemon, view, operate) = guarded(None);
    for (headers, said) in [
        (String::new(), "{\"role\":\"none\",\"identity\":\"\"}"),
        (with_token(&view.secret), "{\"role\":\"view\",\"identity\":\"token:viewer\"}"),
        (with_token(&operate.secret), "{\"role\":\"operate\",\"identity\":\"token:operator\"}"),
    ] {
        let (status, answer) = exchange(page(&daemon), &request("GET", "/v1/whoami", &headers));
        assert!(status == 200 && answer.contains(said), "{answer}");
    }
    let uid = rustix::process::geteuid().as_raw();
    let own = json!({"role": "operate", "identity": format!("uid:{uid}")});
    assert_eq!(daemon.json("GET", "/v1/whoami", ""), own);
}

#[test]
fn a_change_names_its_caller() {
    let (daemon, _, operate) = guarded(None);
    let headers = with_token(&operate.secret);
    let (status, answer) = exchange(page(&daemon), &request("POST", "/v1/flush", &headers));
    assert!(status == 200 && answer.contains("\"by\":\"token:operator\""), "{answer}");
    let by = format!("uid:{}", rustix::process::geteuid().as_raw());
    assert_eq!(daemon.json("POST", "/v1/flush", "")["by"], by.as_str());
}

/// The daemon reads the file that is named as a key.
#[test]
fn keys_are_not_changed_over_tcp_whatever_the_token() {
    let (daemon, view, operate) = guarded(None);
    let headers = with_token(&operate.secret);
    let body = "{\"key\": \"key-file:/k\"}";
    let head = format!("{headers}Content-Length: {}\r\n", body.len());
    let add = request("POST", "/v1/volumes/disk/keys", &head) + body;
    let change = request("PUT", "/v1/volumes/disk/keys", &head) + body;
    let remove = request("DELETE", "/v1/volumes/disk/keys/3?force=true", &headers);
    for text in [add, change, remove] {
        let (status, answer) = exchange(page(&daemon), &text);
        assert!(status == 403 && answer.contains("on the control socket only"), "{answer}");
    }
    let list = request("GET", "/v1/volumes/disk/keys", &with_token(&view.secret));
    assert_eq!(exchange(page(&daemon), &list).0, 200);
    assert_eq!(daemon.json("GET", "/v1/operations", ""), json!([]));
}

#[test]
fn a_change_over_tcp_needs_the_header_and_the_right_host() {
    let (daemon, _, operate) = guarded(None);
    let path = "/v1/parameters/max_buffer_pages";
    let change = |headers: &str, host: &str| {
        let body = "{\"value\": 7}";
        let length = body.len();
        let text = format!(
            "PUT {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        );
        exchange(page(&daemon), &text).0
    };
    let value = || daemon.parameters.daemon(MAX_BUFFER_PAGES).get();
    let secret = &operate.secret;
    for (headers, host, status) in [
        (format!("Cookie: token={secret}\r\n"), "localhost", 401),
        (format!("Authorization: Basic {secret}\r\n"), "localhost", 401),
        (format!("{0}{0}", with_token(secret)), "localhost", 401),
        (format!("Authorization : Bearer {secret}\r\n"), "localhost", 400),
        (with_token(secret), "evil.example", 421),
    ] {
        assert_eq!(change(&headers, host), status, "{headers}");
        assert_eq!(value(), 1024, "{headers}");
    }
    let asked = request("PUT", &format!("{path}?access_token={secret}"), "");
    assert_eq!(exchange(page(&daemon), &asked).0, 401);
    assert_eq!(change(&with_token(secret), "localhost"), 200);
    assert_eq!(value(), 7);
}

#[test]
fn a_request_hidden_in_another_has_no_role_of_it() {
    let (daemon, _, operate) = guarded(None);
    let hidden = "PUT /v1/parameters/max_buffer_pages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12\r\n\r\n{\"value\": 7}";
    for headers in [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        "Content-Length: 0\r\nContent-Length: 5\r\n",
    ] {
        let first =
            request("POST", "/v1/pressure", &format!("{}{headers}", with_token(&operate.secret)));
        let first = first.replace("Connection: close\r\n", "");
        exchange(page(&daemon), &format!("{first}0\r\n\r\n{hidden}{hidden}"));
        assert_eq!(daemon.parameters.daemon(MAX_BUFFER_PAGES).get(), 1024, "{headers}");
    }
}

#[test]
fn guessing_tokens_does_not_keep_others_from_the_page() {
    let (daemon, view, _) = guarded(None);
    let mut guesses = Vec::new();
    for number in 0..MAX_CONNECTIONS * 2 {
        let mut stream = connect_page(&daemon, [127, 0, 0, 2]);
        let headers = with_token(&format!("ebbd_{number:064}"));
        stream.write_all(request("GET", "/v1/stat", &headers).as_bytes()).unwrap();
        guesses.push(stream);
    }
    let honest = connect_page(&daemon, [127, 0, 0, 3]);
    let (status, answer) = exchange(honest, &request("GET", "/v1/stat", &with_token(&view.secret)));
    assert_eq!(status, 200, "{answer}");
    let statuses: Vec<u16> = guesses.into_iter().map(|stream| exchange(stream, "").0).collect();
    assert!(statuses.iter().all(|status| [0, 401, 429].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&429), "{statuses:?}");
}

/// A folder with a self-signed certificate.
fn certificate() -> tempfile::TempDir {
    use openssl::asn1::Asn1Time;
    use openssl::hash::MessageDigest;
    use openssl::pkey::PKey;
    let folder = tempfile::tempdir().unwrap();
    let group = openssl::ec::EcGroup::from_curve_name(openssl::nid::Nid::X9_62_PRIME256V1).unwrap();
    let key = PKey::from_ec_key(openssl::ec::EcKey::generate(&group).unwrap()).unwrap();
    let mut name = openssl::x509::X509Name::builder().unwrap();
    name.append_entry_by_text("CN", "localhost").unwrap();
    let name = name.build();
    let mut builder = openssl::x509::X509::builder().unwrap();
    builder.set_version(2).unwrap();
    builder.set_subject_name(&name).unwrap();
    builder.set_issuer_name(&name).unwrap();
    builder.set_pubkey(&key).unwrap();
    builder.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::days_from_now(30).unwrap()).unwrap();
    builder.sign(&key, MessageDigest::sha256()).unwrap();
    let write = |name: &str, text: Vec<u8>| std::fs::write(folder.path().join(name), text).unwrap();
    write("server-cert.pem", builder.build().to_pem().unwrap());
    write("server-key.pem", key.private_key_to_pem_pkcs8().unwrap());
    folder
}

#[test]
fn the_page_is_served_under_tls() {
    let folder = certificate();
    let tls = ebb_tls::ServerTls::from_certificates(folder.path(), false).unwrap();
    let (daemon, view, operate) = guarded(Some(tls));
    let mut connector = SslConnector::builder(SslMethod::tls()).unwrap();
    connector.set_ca_file(folder.path().join("server-cert.pem")).unwrap();
    connector.set_verify(SslVerifyMode::PEER);
    let connector = connector.build();
    let connect = || {
        let config = connector.configure().unwrap().verify_hostname(false);
        config.connect("localhost", page(&daemon)).unwrap()
    };
    let (status, answer) =
        exchange(connect(), &request("GET", "/v1/stat", &with_token(&view.secret)));
    assert!(status == 200 && answer.contains("\"workers\""), "{answer}");
    // A large body, and a large reply: more than one record.
    let body = format!("{{\"value\": 7{}}}", " ".repeat(15_000));
    let head = request(
        "PUT",
        "/v1/parameters/max_buffer_pages",
        &format!("{}Content-Length: {}\r\n", with_token(&operate.secret), body.len()),
    );
    assert_eq!(exchange(connect(), &format!("{head}{body}")).0, 200);
    assert_eq!(daemon.parameters.daemon(MAX_BUFFER_PAGES).get(), 7);
    let (status, answer) =
        exchange(connect(), &request("GET", "/v1/openapi.json", &with_token(&view.secret)));
    let document = answer.split_once("\r\n\r\n").unwrap().1;
    assert!(status == 200 && document.len() > 2 * 16_384, "{}", document.len());
    // Plain text gets no page; neither it nor a peer that only connects is in the way of others.
    let plain = request("GET", "/", "");
    let (status, answer) = exchange(page(&daemon), &plain);
    assert!(status == 0 && !answer.contains("html"), "{answer}");
    let silent: Vec<_> =
        (0..MAX_CONNECTIONS).map(|_| connect_page(&daemon, [127, 0, 0, 2])).collect();
    let (status, _) = exchange(connect(), &request("GET", "/", ""));
    assert_eq!(status, 200);
    drop(silent);
}
