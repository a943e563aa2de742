//! The page: the figures of `ebbd stat --watch` as plots in a browser, and the metrics, over TCP.
//!
//! It serves what the control socket does, each request by the role of its token ([`crate::access`]); the page's own files
//! are open to everyone who can connect, so that one can log in. It refers to no other site, and its
//! Content-Security-Policy allows it to load nothing else.
//!
//! To prevent DNS rebinding, it accepts requests only if their Host header is an IP address, a name of this machine or
//! a configured name.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::access::{Arrival, PageGate};
use super::answer::ApiRefusal;
use super::routes::{self, App};

const HTML: &str = include_str!("page/page.html");
const CSS: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

/// The headers of every reply.
const HEADERS: [(HeaderName, &str); 4] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
];

/// The host names of the page at `address` (`HOST:PORT`), including the `further` ones.
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

/// All routes of the page, for the host names `names` and the callers that `gate` admits.
pub(super) fn router(app: Arc<App>, names: Vec<String>, gate: Arc<PageGate>) -> Router {
    let serve = |kind: &'static str, text: &'static str| {
        get(move || async move { ([(header::CONTENT_TYPE, kind)], text) })
    };
    let files = Router::new()
        .route("/", serve("text/html; charset=utf-8", HTML))
        .route("/page.css", serve("text/css; charset=utf-8", CSS))
        .route("/page.js", serve("text/javascript; charset=utf-8", SCRIPT))
        .method_not_allowed_fallback(read_only);
    let routes = files.fallback_service(routes::router(app));
    let names: Arc<[String]> = names.into();
    routes.layer(middleware::from_fn(move |request: Request, next: Next| {
        let (known, gate) = (is_known(&request, &names), gate.clone());
        async move {
            if !known {
                return elsewhere().into_response();
            }
            guarded(admitted(request, next, &gate).await)
        }
    }))
}

/// Serves a request, with the caller that its token names.
async fn admitted(mut request: Request, next: Next, gate: &PageGate) -> Response {
    let arrival = request.extensions().get::<Arrival>().cloned();
    let peer = arrival.as_ref().and_then(|arrival| arrival.peer);
    match gate.caller(request.headers(), peer.unwrap_or(Ipv4Addr::UNSPECIFIED.into())).await {
        Ok(caller) => {
            if let Some(arrival) = arrival {
                request.extensions_mut().insert(Arrival { caller, ..arrival });
            }
            next.run(request).await
        }
        Err(refusal) => refusal.into_response(),
    }
}

fn guarded(mut answer: Response) -> Response {
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

/// Whether the Host header is one of `names` or an IP address, which no other site can use. Browsers always send a Host
/// header.
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

fn elsewhere() -> ApiRefusal {
    let message = "the page is served only for IP addresses and for host names of this machine";
    let remedy = "use the IP address, or add the name to `web_names` in the configuration";
    ApiRefusal::new(StatusCode::MISDIRECTED_REQUEST, "wrong_host", message, remedy)
}

async fn read_only() -> ApiRefusal {
    let message = "the files of the page are read-only";
    let remedy = "the interface is below /v1, see /v1/openapi.json";
    ApiRefusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_refers_to_no_other_site() {
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
    fn only_known_names_and_addresses_are_accepted() {
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
