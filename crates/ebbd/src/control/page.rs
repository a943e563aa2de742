//! The page: what `ebbd stat --watch` shows, as plots in a browser, and the metrics beside it, over TCP.
//!
//! Read only, and for everybody who can connect: the same figures as on the control socket, no parameter
//! and no pressure. It refers to nothing outside itself, and its policy lets it load nothing else.
//!
//! It answers only to addresses, to names of this machine and to those it was told, so that no other site
//! can have a browser read it under a name of its own, which it makes point here ("DNS rebinding").

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::answer::Refusal;
use super::routes::{App, figures};

const HTML: &str = include_str!("page/page.html");
const CSS: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

/// What every answer carries.
const HEADERS: [(HeaderName, &str); 4] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
];

/// The names the page at `address` (`HOST:PORT`) answers to, with the `further` ones.
pub(super) fn names(address: &str, further: &[String]) -> Vec<String> {
    let uname = rustix::system::uname();
    let own = uname.nodename().to_string_lossy().into_owned();
    let short = own.split('.').next().unwrap_or_default().to_owned();
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned();
    let mut names = vec!["localhost".to_owned(), own, short, host];
    names.extend_from_slice(further);
    names.retain(|name| !name.is_empty());
    names
}

/// All routes of the page, which answers to `names`.
pub(super) fn router(app: Arc<App>, names: Vec<String>) -> Router {
    let serve = |kind: &'static str, text: &'static str| {
        get(move || async move { ([(header::CONTENT_TYPE, kind)], text) })
    };
    let routes = figures()
        .route("/", serve("text/html; charset=utf-8", HTML))
        .route("/page.css", serve("text/css; charset=utf-8", CSS))
        .route("/page.js", serve("text/javascript; charset=utf-8", SCRIPT))
        .fallback(nothing_there)
        .method_not_allowed_fallback(read_only)
        .with_state(app);
    let names: Arc<[String]> = names.into();
    routes.layer(middleware::from_fn(move |request: Request, next: Next| {
        let known = is_known(&request, &names);
        async move {
            if !known {
                return elsewhere().into_response();
            }
            guarded(next.run(request).await)
        }
    }))
}

fn guarded(mut answer: Response) -> Response {
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

/// Whether the name the client used is one of `names`, or an address, which no other site can make its own.
/// Browsers always give one.
fn is_known(request: &Request, names: &[String]) -> bool {
    let Some(host) = request.headers().get(header::HOST) else { return true };
    let Ok(host) = host.to_str() else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    let name = name.strip_suffix('.').unwrap_or(name);
    let known = names.iter().any(|known| known.eq_ignore_ascii_case(name));
    known || name.parse::<IpAddr>().is_ok()
}

fn elsewhere() -> Refusal {
    let message = "the page answers to addresses and to names of this machine only";
    let remedy = "use the address, or add the name to `web_names` in the configuration";
    Refusal::new(StatusCode::MISDIRECTED_REQUEST, "wrong_host", message, remedy)
}

async fn nothing_there() -> Refusal {
    let remedy = "the paths are /, /v1/version, /v1/volumes, /v1/bdis, /v1/stat and /metrics";
    Refusal::new(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path", remedy)
}

async fn read_only() -> Refusal {
    let message = "this address is for looking only";
    let remedy = "change parameters on the control socket: `ebbd set`";
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_refers_to_nothing_outside_itself() {
        for (name, text) in [("html", HTML), ("css", CSS), ("js", SCRIPT)] {
            let rest = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!rest.contains("//www.") && !rest.contains("http"), "{name}");
            for forbidden in
                ["innerHTML", "outerHTML", "document.write", "eval(", "@import", "url("]
            {
                assert!(!text.contains(forbidden), "{name}: {forbidden}");
            }
        }
        assert!(!HTML.contains("style=") && !HTML.contains("onload"), "its policy forbids them");
    }

    #[test]
    fn only_known_names_and_addresses_pass() {
        let further = ["storage.example".to_owned()];
        let names = names("page.example:9477", &further);
        let asked = |host: &str| {
            let request = Request::builder().header(header::HOST, host);
            is_known(&request.body(axum::body::Body::empty()).unwrap(), &names)
        };
        for host in [
            "localhost",
            "LOCALHOST:9477",
            "localhost.",
            "127.0.0.1:1",
            "192.0.2.7:9477",
            "[::1]:9477",
            "page.example:9477",
            "Storage.example",
        ] {
            assert!(asked(host), "{host}");
        }
        let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
        assert!(asked(&own) && asked(&format!("{own}:9477")), "{own}");
        for host in ["ebbd.example", "localhost.example:80", "127.0.0.1.example", "", "a:b"] {
            assert!(!asked(host), "{host}");
        }
    }
}
