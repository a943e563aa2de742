//! The page: health, history and volumes in a browser, and the metrics, over TCP. Its files are in `page/`: plain
//! modules without a build step, and uPlot 1.6.32 (MIT) for plots.
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

/// The other files: path, type, text.
const FILES: [(&str, &str, &str); 20] = [
    ("/page.css", CSS, include_str!("page/page.css")),
    ("/uplot/uPlot.min.css", CSS, include_str!("page/uplot/uPlot.min.css")),
    ("/uplot/uPlot.iife.min.js", SCRIPT, include_str!("page/uplot/uPlot.iife.min.js")),
    ("/actions.js", SCRIPT, include_str!("page/actions.js")),
    ("/api.js", SCRIPT, include_str!("page/api.js")),
    ("/dialogs.js", SCRIPT, include_str!("page/dialogs.js")),
    ("/dom.js", SCRIPT, include_str!("page/dom.js")),
    ("/format.js", SCRIPT, include_str!("page/format.js")),
    ("/health.js", SCRIPT, include_str!("page/health.js")),
    ("/heatmap.js", SCRIPT, include_str!("page/heatmap.js")),
    ("/list.js", SCRIPT, include_str!("page/list.js")),
    ("/login.js", SCRIPT, include_str!("page/login.js")),
    ("/main.js", SCRIPT, include_str!("page/main.js")),
    ("/memory.js", SCRIPT, include_str!("page/memory.js")),
    ("/overview.js", SCRIPT, include_str!("page/overview.js")),
    ("/parameters.js", SCRIPT, include_str!("page/parameters.js")),
    ("/plots.js", SCRIPT, include_str!("page/plots.js")),
    ("/specs.js", SCRIPT, include_str!("page/specs.js")),
    ("/table.js", SCRIPT, include_str!("page/table.js")),
    ("/volume.js", SCRIPT, include_str!("page/volume.js")),
];
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

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
    let page = Router::new().route("/", serve("text/html; charset=utf-8", HTML));
    let with = |routes: Router<_>, (path, kind, text)| routes.route(path, serve(kind, text));
    let files = FILES.into_iter().fold(page, with).method_not_allowed_fallback(read_only);
    let routes = files.fallback_service(routes::router(app));
    let names: Arc<[String]> = names.into();
    routes.layer(middleware::from_fn(move |request: Request, next: Next| {
        let (known, gate) = (is_known(&request, &names), gate.clone());
        async move {
            if !known {
                return guarded(elsewhere().into_response());
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
        let own = FILES.into_iter().filter(|(path, ..)| !path.starts_with("/uplot/"));
        for (name, _, text) in own.chain([("/", "", HTML)]) {
            let rest = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!rest.contains("//www.") && !rest.contains("http:"), "{name}");
            assert!(!rest.contains("https:"), "{name}");
            for forbidden in
                ["innerHTML", "outerHTML", "document.write", "eval(", "@import", "url("]
            {
                assert!(!text.contains(forbidden), "{name}: {forbidden}");
            }
        }
        assert!(include_str!("page/uplot/LICENSE").starts_with("The MIT License"));
        assert!(!HTML.contains("style=") && !HTML.contains("onload"), "its policy forbids them");
    }

    #[test]
    fn every_file_that_the_page_loads_is_served() {
        let served = |path: &str| FILES.iter().any(|(known, ..)| *known == path);
        for (name, _, text) in FILES.into_iter().chain([("/", "", HTML)]) {
            if name.starts_with("/uplot/") {
                continue;
            }
            let imports = text.lines().filter_map(|line| line.split_once(" from \"./"));
            for path in imports.filter_map(|(_, rest)| rest.strip_suffix("\";")) {
                assert!(served(&format!("/{path}")), "{name}: {path}");
            }
            for attribute in [" src=\"", "\"stylesheet\" href=\""] {
                for rest in text.split(attribute).skip(1).filter(|_| name == "/") {
                    let path = rest.split('"').next().unwrap();
                    assert!(served(path), "{name}: {path}");
                }
            }
        }
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
