//! The key slots of encrypted volumes that are open. A request names where a key is and never has one; changes are accepted
//! on the control socket only, since the daemon reads any file that is named as a key.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use ebb_api::{ErrorBody, KeyBody, KeyChangeView, KeySlotsView, OperationView};
use ebb_config::shorten;
use serde::Deserialize;
use tokio::sync::oneshot;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::volumes::{change, reply, simple_change};
use super::{App, Named, On, RequestBody, parse, path};
use crate::access::{OnControlSocket, RequestedBy};
use crate::answer::{Answer, ApiRefusal, json};
use crate::manager::VolumeChange;

/// Headers that may be read at a time: those whose disks hang do not add up.
pub(super) const READERS_MOST: usize = 4;
/// How long reading a header may take.
const READ_TIMEOUT: Duration = Duration::from_secs(25);

/// What a body is.
const FORM: &str = "send {\"key\": \"key-file:/etc/ebbd/new.key\"}";

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(list_keys, add_key, use_key)).routes(routes!(remove_key))
}

#[utoipa::path(get, path = "/v1/volumes/{volume}/keys", tag = "volumes", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "its key slots", body = KeySlotsView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "it is not encrypted by ebbd, or not served", body = ErrorBody),
    (status = 503, description = "its disk does not respond, or too many headers are being read", body = ErrorBody),
))]
/// Lists the key slots of an encrypted volume.
async fn list_keys(State(app): On, name: Named<String>) -> Answer {
    let name = path(name)?;
    crate::resize::check_served(&app.shared, &name)?;
    let busy = |message: &str| {
        let remedy = "see whether its disk responds, and try again";
        ApiRefusal::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message, remedy)
    };
    let permit = app.header_readers.clone().try_acquire_owned();
    let permit = permit.map_err(|_| busy("too many headers are being read"))?;
    let (sender, outcome) = oneshot::channel();
    let manager = app.shared.manager.clone();
    let read = move || {
        // The client may not wait any more.
        let _ = sender.send(manager.key_slots(&name));
        drop(permit);
    };
    let thread = std::thread::Builder::new().name("ebbd-header".into()).spawn(read);
    thread.map_err(|_| busy("cannot start a thread to read the header"))?;
    match tokio::time::timeout(READ_TIMEOUT, outcome).await {
        Ok(Ok(Ok(slots))) => json(&slots),
        Ok(Ok(Err(refused))) => Err(refused.into()),
        _ => Err(busy("the header could not be read in time")),
    }
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/keys", tag = "volumes", params(("volume" = String, Path, description = "its name")),
    request_body = KeyBody, responses(
    (status = 200, description = "the slot that was added", body = KeyChangeView),
    (status = 202, description = "it is still being added", body = OperationView),
    (status = 403, description = "the request came over TCP", body = ErrorBody),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "it is not encrypted by ebbd, read-only or not served, or has no free slot", body = ErrorBody),
    (status = 422, description = "the key cannot be read or used", body = ErrorBody),
))]
/// Adds a key to an encrypted volume while it is in use.
async fn add_key(
    State(app): On,
    by: RequestedBy,
    socket: OnControlSocket,
    name: Named<String>,
    body: RequestBody,
) -> Answer {
    let name = path(name)?;
    let body: KeyBody = parse(body, FORM)?;
    socket.must_be("a change of keys", "ebbd volume key")?;
    change((&app, &by), VolumeChange::AddKey(name, body), |view| match &view.key_added {
        Some(added) => json(added),
        None => reply(StatusCode::OK, &view),
    })
    .await
}

#[utoipa::path(put, path = "/v1/volumes/{volume}/keys", tag = "volumes", params(("volume" = String, Path, description = "its name")),
    request_body = KeyBody, responses(
    (status = 200, description = "it is opened with this key from now on", body = OperationView),
    (status = 202, description = "the key is still being tried", body = OperationView),
    (status = 403, description = "the request came over TCP", body = ErrorBody),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "the key does not open it, it is not encrypted by ebbd, or defined in the configuration file", body = ErrorBody),
    (status = 422, description = "the key cannot be read or used", body = ErrorBody),
))]
/// Names the key that a volume that was added at run time is opened with; it stays open.
async fn use_key(
    State(app): On,
    by: RequestedBy,
    socket: OnControlSocket,
    name: Named<String>,
    body: RequestBody,
) -> Answer {
    let name = path(name)?;
    let body: KeyBody = parse(body, FORM)?;
    socket.must_be("a change of keys", "ebbd volume key")?;
    simple_change(&app, &by, VolumeChange::UseKey(name, body)).await
}

/// What is wanted of the removal of a key.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveQuery {
    #[serde(default)]
    force: bool,
}

#[utoipa::path(delete, path = "/v1/volumes/{volume}/keys/{slot}", tag = "volumes", params(
    ("volume" = String, Path, description = "its name"),
    ("slot" = u32, Path, description = "the number of the slot"),
    ("force" = Option<bool>, Query, description = "whether to remove also the only slot that the configured key opens"),
), responses(
    (status = 200, description = "it is removed, and its key material overwritten", body = OperationView),
    (status = 202, description = "it is still being removed", body = OperationView),
    (status = 403, description = "the request came over TCP", body = ErrorBody),
    (status = 404, description = "there is no such volume or slot", body = ErrorBody),
    (status = 409, description = "it is the last slot, or the only one that the configured key opens", body = ErrorBody),
))]
/// Removes a key from an encrypted volume while it is in use.
async fn remove_key(
    State(app): On,
    by: RequestedBy,
    socket: OnControlSocket,
    names: Named<(String, String)>,
    wanted: Result<Query<RemoveQuery>, QueryRejection>,
) -> Answer {
    let (name, slot) = path(names)?;
    let slot: u32 = slot.parse().map_err(|_| {
        let message = format!("`{}` is not the number of a key slot", shorten(&slot));
        let remedy = "`ebbd volume key list` shows the numbers";
        ApiRefusal::new(StatusCode::NOT_FOUND, "unknown_slot", message, remedy)
    })?;
    let Query(RemoveQuery { force }) = wanted.map_err(|error| {
        let message = shorten(&error.body_text());
        let remedy = "use `?force=true`, or no query";
        ApiRefusal::new(StatusCode::BAD_REQUEST, "malformed_query", message, remedy)
    })?;
    socket.must_be("a change of keys", "ebbd volume key")?;
    simple_change(&app, &by, VolumeChange::RemoveKey(name, slot, force)).await
}
