//! The page over TCP.

use super::*;

/// Asks the page; the whole answer.
fn ask_page(daemon: &Running, method: &str, path: &str, host: &str) -> String {
    ask_page_at(daemon.page, method, path, host)
}

fn ask_page_at(page: std::net::SocketAddr, method: &str, path: &str, host: &str) -> String {
    let mut stream = std::net::TcpStream::connect(page).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn page_is_served_at_each_of_its_sockets() {
    let daemon = start();
    for page in [daemon.page, daemon.second_page] {
        let answer = ask_page_at(page, "GET", "/metrics", "localhost:9477");
        assert!(answer.starts_with("HTTP/1.1 200"), "{page}: {answer}");
    }
}

#[test]
fn the_page_without_tokens_shows_everything_and_changes_nothing() {
    let daemon = start();
    for path in [
        "/",
        "/page.css",
        "/main.js",
        "/v1/daemon",
        "/v1/volumes/disk/stat",
        "/v1/version",
        "/v1/volumes",
        "/v1/stat",
        "/metrics",
    ] {
        let answer = ask_page(&daemon, "GET", path, "localhost:9477");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        assert!(answer.contains("default-src 'none'") && answer.contains("nosniff"), "{path}");
    }
    let stat = ask_page(&daemon, "GET", "/v1/stat", "127.0.0.1");
    let stat: Stat = serde_json::from_str(stat.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(stat.volumes.len(), 2);
    for (method, path, status) in [
        ("GET", "/v1/parameters", 200),
        ("GET", "/v1/nothing", 404),
        ("PUT", "/v1/parameters/max_buffer_pages", 403),
        ("POST", "/v1/pressure", 403),
        ("POST", "/v1/stat", 403),
        ("DELETE", "/", 405),
    ] {
        let answer = ask_page(&daemon, method, path, "localhost");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{method} {path}: {answer}");
    }
    assert_eq!(daemon.parameters.daemon(MAX_BUFFER_PAGES).get(), 1024);
    let answer = ask_page(&daemon, "GET", "/v1/stat", "Proxy.example:443");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answer = ask_page(&daemon, "GET", "/v1/stat", "evil.example");
    assert!(answer.starts_with("HTTP/1.1 421") && !answer.contains("disk"), "{answer}");
    assert!(answer.to_lowercase().contains("content-security-policy: "), "{answer}");
}
