//! The routes of version 1. Each module below has some of them with their handlers; the interface is described by
//! the document that [`openapi`] makes of them.

mod changes;
mod clients;
mod config;
mod events;
mod health;
pub(super) mod history;
mod keys;
mod limits;
mod openapi;
mod parameters;
mod pressure;
mod stat;
mod volumes;
mod whoami;

use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{Method, StatusCode, Uri};
use axum::{Extension, Router};
use ebb_config::{shorten, suggest};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use utoipa_axum::router::OpenApiRouter;

use self::health::KnownHealth;
use super::access::{self, Arrival};
use super::answer::{Answer, ApiRefusal};
use super::{ControlContext, MAX_BODY_BYTES};
use crate::history::History;
use crate::shares::{CallerShares, CallerTurns};

/// The state that the handlers share.
pub(super) struct App {
    pub(super) shared: Arc<ControlContext>,
    /// The task that holds a level of pressure at present.
    holder: Mutex<Option<AbortHandle>>,
    /// The permit to read the configuration file.
    config_reader: Arc<Semaphore>,
    /// A permit for each header that is being read.
    header_readers: Arc<Semaphore>,
    /// A permit for each list of changed blocks that is being made.
    change_lists: Arc<Semaphore>,
    /// Those of events.
    streams: Arc<CallerShares>,
    /// Turns for answers that list all volumes or clients.
    lists: CallerTurns,
    /// The health, as it was last found.
    health: tokio::sync::Mutex<Option<KnownHealth>>,
    /// The history; only the control thread takes this lock.
    history: Mutex<History>,
}

pub(super) type On = State<Arc<App>>;
pub(super) type Named<T> = Result<Path<T>, PathRejection>;
pub(super) type RequestBody = Result<Bytes, BytesRejection>;

/// All routes.
fn all() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .merge(openapi::routes())
        .merge(changes::routes())
        .merge(clients::routes())
        .merge(config::routes())
        .merge(limits::routes())
        .merge(events::routes())
        .merge(health::routes())
        .merge(history::routes())
        .merge(keys::routes())
        .merge(stat::routes())
        .merge(parameters::routes())
        .merge(pressure::routes())
        .merge(volumes::routes())
        .merge(whoami::routes())
}

/// All routes, each behind the check of its caller's role.
pub(super) fn router(app: Arc<App>) -> Router {
    Router::from(all())
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(axum::middleware::from_fn(access::check))
        .with_state(app)
}

#[cfg(test)]
pub(super) use self::openapi::described;

async fn no_such_path(uri: Uri) -> ApiRefusal {
    let message = format!("there is nothing at `{}`", shorten(uri.path()));
    let paths = openapi::paths_like(uri.path());
    let mut remedy = suggest(uri.path(), paths.iter().map(String::as_str), "the paths are");
    if remedy.starts_with("the paths are") {
        remedy.push_str("; /v1/openapi.json has those with names in them");
    }
    ApiRefusal::new(StatusCode::NOT_FOUND, "not_found", message, remedy)
}

async fn no_such_method(method: Method, uri: Uri) -> ApiRefusal {
    let message = format!("`{}` has no {}", shorten(uri.path()), shorten(method.as_str()));
    let remedy = "GET reads, PUT sets and DELETE unsets a parameter, POST publishes pressure and changes volumes, PATCH \
                  changes who may open one, DELETE disconnects a client; /v1/openapi.json lists what each path has";
    ApiRefusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message, remedy)
}

/// The names in a path, decoded.
pub(super) fn path<T>(names: Named<T>) -> Result<T, ApiRefusal> {
    names.map(|Path(names)| names).map_err(|error| {
        let remedy = "percent-encode the name as UTF-8";
        ApiRefusal::new(
            StatusCode::BAD_REQUEST,
            "malformed_path",
            shorten(&error.body_text()),
            remedy,
        )
    })
}

/// The JSON of a body, whatever its Content-Type header. `form` is the remedy.
pub(super) fn parse<T: DeserializeOwned>(body: RequestBody, form: &str) -> Result<T, ApiRefusal> {
    let bytes = body.map_err(|error| {
        if error.status() == StatusCode::PAYLOAD_TOO_LARGE {
            let message = format!("the body has more than {MAX_BODY_BYTES} bytes");
            let remedy = "send a shorter one: /v1/openapi.json describes the bodies";
            return ApiRefusal::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message, remedy);
        }
        ApiRefusal::new(
            StatusCode::BAD_REQUEST,
            "malformed_body",
            shorten(&error.body_text()),
            form,
        )
    })?;
    serde_json::from_slice(&bytes).map_err(|error| {
        let kind = if error.is_data() { "invalid_body" } else { "malformed_json" };
        let message = without_type_name(&error.to_string());
        ApiRefusal::new(StatusCode::BAD_REQUEST, kind, shorten(&message), form)
    })
}

/// A message of serde without the name of a type of this program.
fn without_type_name(message: &str) -> String {
    match message.split_once("expected struct ") {
        Some((before, after)) => {
            let rest = after.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
            format!("{before}expected an object{rest}")
        }
        None => message.to_owned(),
    }
}

/// Carries out what takes long, such as a list of thousands of volumes, while the control thread
/// answers others.
pub(super) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiRefusal> {
    tokio::task::spawn_blocking(work).await.map_err(|_| {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        ApiRefusal::new(status, "internal", "the answer cannot be made", "report this as a bug")
    })
}

/// Makes an answer that lists all volumes or clients, in the caller's turn.
pub(super) async fn list(
    app: &Arc<App>,
    arrival: Option<Extension<Arrival>>,
    make: impl FnOnce(&App) -> Answer + Send + 'static,
) -> Answer {
    let caller = arrival.map(|Extension(arrival)| arrival.caller).unwrap_or_default();
    let turn = app.lists.take(&caller.identity).await;
    let app = app.clone();
    aside(move || {
        let answer = make(&app);
        // Also if the client has gone meanwhile.
        drop(turn);
        answer
    })
    .await?
}

impl App {
    pub(super) fn new(shared: Arc<ControlContext>) -> Self {
        crate::figures::process::open();
        let streams = CallerShares::new(events::STREAMS_MOST);
        let lists = CallerTurns::default();
        let history = Mutex::new(History::new(ebb_mem::clock::now()));
        let health = tokio::sync::Mutex::default();
        let config_reader = Arc::new(Semaphore::new(1));
        let change_lists = Arc::new(Semaphore::new(changes::LISTS_MOST));
        let header_readers = Arc::new(Semaphore::new(keys::READERS_MOST));
        let holder = Mutex::default();
        Self {
            shared,
            holder,
            config_reader,
            header_readers,
            change_lists,
            streams,
            lists,
            health,
            history,
        }
    }
}
