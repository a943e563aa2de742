//! Who may do what: roles, the callers of the control socket and of the page, and the check of every request.
//!
//! # Invariants
//! - A request is refused unless its caller has the role that its method needs; a request without a caller has none.
//! - A role over TCP comes from the Authorization header only, which no other site can have a browser send: never from
//!   a cookie, a query or a client certificate.
//! - Tokens are compared by their hashes, all of them, in constant time.

mod failures;
mod tokens;

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use ebb_api::CallerRole;
use ebb_tls::ServerTls;
use tokio::time::Instant;

use self::failures::FailedLogins;
pub use self::tokens::{NewToken, TokenError, TokenTable, token_name};
use crate::answer::ApiRefusal;

/// What a caller may do. Each role includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Nothing, except to ask whether the daemon is healthy.
    #[default]
    None,
    /// Read everything.
    View,
    /// Read and change everything.
    Operate,
}

impl Role {
    /// The role as a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::View => "view",
            Self::Operate => "operate",
        }
    }
}

impl From<Role> for CallerRole {
    fn from(role: Role) -> CallerRole {
        match role {
            Role::None => CallerRole::None,
            Role::View => CallerRole::View,
            Role::Operate => CallerRole::Operate,
        }
    }
}

/// Who sends a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) role: Role,
    /// `uid:0`, `token:NAME`, or empty.
    pub(crate) identity: String,
}

/// The caller of a request, for the log: each change is logged with it as `by`.
#[derive(Clone, Debug)]
pub(crate) struct RequestedBy(Arc<Caller>);

impl RequestedBy {
    /// `uid:0`, `token:NAME`, or empty if a request has no identity.
    pub(crate) fn as_str(&self) -> &str {
        &self.0.identity
    }
}

/// Whether a request came on the control socket, and not over TCP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnControlSocket(bool);

impl OnControlSocket {
    /// Refuses a request that came over TCP. It is a `what`.
    ///
    /// # Errors
    /// The refusal.
    pub(crate) fn must_be(self, what: &str, command: &str) -> Result<(), ApiRefusal> {
        if self.0 {
            return Ok(());
        }
        let message = format!("{what} is accepted on the control socket only");
        let remedy = format!("run `{command}` on the host of the daemon, as its user");
        Err(ApiRefusal::new(StatusCode::FORBIDDEN, "local_only", message, remedy))
    }
}

impl<S: Sync> FromRequestParts<S> for OnControlSocket {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let arrival = parts.extensions.get::<Arrival>();
        Ok(Self(arrival.is_some_and(|arrival| arrival.peer.is_none())))
    }
}

impl<S: Sync> FromRequestParts<S> for RequestedBy {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let arrival = parts.extensions.get::<Arrival>();
        Ok(Self(arrival.map(|arrival| arrival.caller.clone()).unwrap_or_default()))
    }
}

/// The connection that a request came on.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    /// The peer's address; absent on the control socket.
    pub(crate) peer: Option<IpAddr>,
    /// The caller, as far as the connection tells.
    pub(crate) caller: Arc<Caller>,
    /// When the connection is closed.
    pub(crate) ends: Instant,
}

/// Who may use the page, and how it is encrypted.
#[derive(Debug, Default)]
pub struct PageAccess {
    /// The tokens; without them every peer may view.
    pub tokens: Option<TokenTable>,
    /// The certificate; without one the page is not encrypted.
    pub tls: Option<ServerTls>,
}

/// The access to a page in service, which a reload replaces.
#[derive(Debug, Default)]
pub(crate) struct PageGate {
    access: Mutex<Arc<PageAccess>>,
    failures: FailedLogins,
}

impl PageGate {
    pub(crate) fn new(access: PageAccess) -> Self {
        Self { access: Mutex::new(Arc::new(access)), failures: FailedLogins::default() }
    }

    pub(crate) fn set(&self, access: PageAccess) {
        *self.access.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(access);
    }

    pub(crate) fn access(&self) -> Arc<PageAccess> {
        self.access.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The caller of a request over TCP.
    ///
    /// # Errors
    /// A refusal, if it presents something other than one of the tokens.
    pub(crate) async fn caller(
        &self,
        headers: &HeaderMap,
        peer: IpAddr,
    ) -> Result<Arc<Caller>, ApiRefusal> {
        let access = self.access();
        let Some(tokens) = &access.tokens else {
            return Ok(Arc::new(Caller { role: Role::View, identity: String::new() }));
        };
        let mut given = headers.get_all(header::AUTHORIZATION).iter();
        let found = match (given.next(), given.next()) {
            (None, _) => return Ok(Arc::default()),
            (Some(one), None) => bearer(one).and_then(|token| tokens.find(token)),
            (Some(_), Some(_)) => None,
        };
        if let Some((role, name)) = found {
            return Ok(Arc::new(Caller { role, identity: format!("token:{name}") }));
        }
        Err(self.failures.refuse(peer).await)
    }
}

/// The token of an Authorization header.
fn bearer(value: &HeaderValue) -> Option<&str> {
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// What anyone may ask for.
const PUBLIC: [&str; 3] = ["/healthz", "/readyz", "/v1/whoami"];

/// The role that a request needs.
pub(crate) fn needed_role(method: &Method, path: &str) -> Role {
    match *method {
        Method::GET | Method::HEAD if PUBLIC.contains(&path) => Role::None,
        Method::GET | Method::HEAD => Role::View,
        _ => Role::Operate,
    }
}

/// Refuses a request whose caller lacks the role that it needs.
pub(crate) async fn check(request: Request, next: Next) -> Response {
    let arrival = request.extensions().get::<Arrival>();
    let role = arrival.map_or(Role::None, |arrival| arrival.caller.role);
    let needed = needed_role(request.method(), request.uri().path());
    if role >= needed {
        return next.run(request).await;
    }
    let remote = arrival.is_some_and(|arrival| arrival.peer.is_some());
    refusal(role, needed, remote).into_response()
}

fn refusal(role: Role, needed: Role, remote: bool) -> ApiRefusal {
    if role == Role::None {
        return unauthorized("this needs a token");
    }
    let message =
        format!("this needs the role {}, and yours is {}", needed.as_str(), role.as_str());
    let remedy = if remote {
        "send a token with that role, made with `ebbd token` and listed in the file `web_tokens`; or use the control \
         socket"
    } else {
        "run this as root, or as the user of the daemon"
    };
    ApiRefusal::new(StatusCode::FORBIDDEN, "forbidden", message, remedy)
}

pub(super) fn unauthorized(message: &str) -> ApiRefusal {
    let remedy = "send `Authorization: Bearer TOKEN` with a token made with `ebbd token`";
    ApiRefusal::new(StatusCode::UNAUTHORIZED, "unauthorized", message, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_needs_view_and_everything_else_operate() {
        for (method, path, role) in [
            ("GET", "/v1/stat", Role::View),
            ("HEAD", "/metrics", Role::View),
            ("GET", "/healthz", Role::None),
            ("HEAD", "/readyz", Role::None),
            ("POST", "/healthz", Role::Operate),
            ("GET", "/healthz/", Role::View),
            ("GET", "//healthz", Role::View),
            ("PUT", "/v1/parameters/log", Role::Operate),
            ("OPTIONS", "/v1/stat", Role::Operate),
            ("BREW", "/v1/whoami", Role::Operate),
        ] {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            assert_eq!(needed_role(&method, path), role, "{method} {path}");
        }
        assert!(Role::None < Role::View && Role::View < Role::Operate);
    }

    #[test]
    fn a_token_is_taken_from_a_bearer_header_only() {
        let of = |text: &str| HeaderValue::from_str(text).unwrap();
        assert_eq!(bearer(&of("Bearer abc")), Some("abc"));
        assert_eq!(bearer(&of("bearer  abc ")), Some("abc"));
        for bad in ["abc", "Basic abc", "Bearer", ""] {
            assert_eq!(bearer(&of(bad)), None, "{bad}");
        }
    }

    #[tokio::test]
    async fn two_headers_or_a_wrong_token_are_refused_and_none_has_no_role() {
        let token = NewToken::create(Role::Operate, "ops").unwrap();
        let tokens = TokenTable::parse(&token.line, std::path::Path::new("t")).unwrap();
        let gate = PageGate::new(PageAccess { tokens: Some(tokens), tls: None });
        let peer = IpAddr::from([127, 0, 0, 1]);
        let asked = async |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            }
            gate.caller(&headers, peer).await
        };
        let good = format!("Bearer {}", token.secret);
        let caller = asked(&[&good]).await.unwrap();
        assert_eq!((caller.role, caller.identity.as_str()), (Role::Operate, "token:ops"));
        assert_eq!(asked(&[]).await.unwrap().role, Role::None);
        for bad in [&[good.as_str(), &good][..], &[&good[..good.len() - 1]], &["Bearer "], &["x"]] {
            assert!(asked(bad).await.is_err(), "{bad:?}");
        }
        gate.set(PageAccess::default());
        assert_eq!(asked(&[]).await.unwrap().role, Role::View, "without tokens all may view");
    }
}
