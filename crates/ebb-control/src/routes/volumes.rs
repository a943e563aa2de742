//! Routes that change volumes, and those of operations.
//!
//! A change is an operation. Its request is answered when it has ended, or, with status 202, after [`ANSWER_WITHIN`].

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ebb_api::{
    AddVolumeBody, ChangeVolumeBody, ErrorBody, OperationState, OperationView, RenameBody,
    ResizeBody, ResizeView, SnapshotBody, TakeoverBody, VolumeView,
};
use ebb_config::StoreUri;
use ebb_config::params::unknown_volume;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, Named, On, RequestBody, parse, path};
use crate::access::{Arrival, OnControlSocket, RequestedBy};
use crate::answer::{Answer, ApiRefusal, json};
use crate::manager::{BegunOperation, Refused, VolumeChange};

/// How long a request waits for its operation.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(add_volume))
        .routes(routes!(show_volume, change_volume, remove_volume))
        .routes(routes!(rename_volume))
        .routes(routes!(snapshot_volume))
        .routes(routes!(flatten_volume))
        .routes(routes!(persist_volume))
        .routes(routes!(commit_volume))
        .routes(routes!(delete_snapshot))
        .routes(routes!(resize_volume))
        .routes(routes!(check_limits))
        .routes(routes!(check_group_limits))
        .routes(routes!(keep_limits, forget_limits))
        .routes(routes!(keep_group_limits, forget_group_limits))
        .routes(routes!(flush_volume))
        .routes(routes!(flush_volumes))
        .routes(routes!(reload))
        .routes(routes!(takeover))
        .routes(routes!(list_operations))
        .routes(routes!(show_operation, cancel_operation))
}

impl From<Refused> for ApiRefusal {
    fn from(refused: Refused) -> ApiRefusal {
        failed(refused.status(), refused.body)
    }
}

/// The reply to what failed with this status.
fn failed(status: u16, body: ErrorBody) -> ApiRefusal {
    let status = StatusCode::from_u16(status);
    ApiRefusal(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), body)
}

/// An operation as a reply with `status`.
pub(super) fn reply(status: StatusCode, view: &OperationView) -> Answer {
    let mut response = json(view)?;
    *response.status_mut() = status;
    if status == StatusCode::ACCEPTED
        && let Ok(place) = HeaderValue::from_str(&format!("/v1/operations/{}", view.id))
    {
        response.headers_mut().insert(header::LOCATION, place);
    }
    Ok(response)
}

/// Begins a change and waits for it for a short time. `done` makes the reply if it has succeeded.
pub(super) async fn change(
    (app, by): (&App, &RequestedBy),
    change: VolumeChange,
    done: impl FnOnce(OperationView) -> Answer,
) -> Answer {
    let manager = &app.shared.manager;
    let BegunOperation { id, ended } = manager.begin(change, by.as_str())?;
    // If it takes longer, it goes on.
    let _ = tokio::time::timeout(ANSWER_WITHIN, ended.wait()).await;
    let Some((view, status)) = manager.operation(id) else { return Err(unknown(id)) };
    match (view.state, &view.failure) {
        (OperationState::Done, _) => done(view),
        (_, Some(failure)) => Err(failed(status, failure.clone())),
        _ => reply(StatusCode::ACCEPTED, &view),
    }
}

pub(super) async fn simple_change(app: &App, by: &RequestedBy, wanted: VolumeChange) -> Answer {
    change((app, by), wanted, |view| reply(StatusCode::OK, &view)).await
}

fn unknown(id: u64) -> ApiRefusal {
    let message = format!("there is no operation {id}");
    let remedy = "`ebbd operation list` shows those of the last ten minutes";
    ApiRefusal::new(StatusCode::NOT_FOUND, "unknown_operation", message, remedy)
}

/// The volume of this name.
fn volume_view(app: &App, name: &str) -> Result<VolumeView, ApiRefusal> {
    app.shared.manager.volume(name).ok_or_else(|| {
        let all = (app.shared.volumes)();
        unknown_volume(name, all.iter().map(|stat| stat.name.as_str())).into()
    })
}

/// Whether a store names a configuration of Ceph. Text that is no store fails later.
fn names_ceph_configuration(store: &str) -> bool {
    matches!(store.parse(), Ok(StoreUri::Rbd(uri)) if uri.conf.is_some())
}

#[utoipa::path(post, path = "/v1/volumes", tag = "volumes", request_body = AddVolumeBody, responses(
    (status = 201, description = "it is served", body = VolumeView),
    (status = 202, description = "its store is still being opened", body = OperationView),
    (status = 409, description = "another volume has its name or file", body = ErrorBody),
    (status = 422, description = "a setting, or its store, cannot be used", body = ErrorBody),
))]
/// Adds a volume.
async fn add_volume(
    State(app): On,
    arrival: Option<Extension<Arrival>>,
    by: RequestedBy,
    body: RequestBody,
) -> Answer {
    let form = "send {\"name\": \"disk\", \"store\": \"file:/path/to/image\"}, and other keys of a volume, \
         sizes as text such as \"size\": \"1G\"";
    let body: AddVolumeBody = parse(body, form)?;
    let by_token = arrival.is_some_and(|Extension(arrival)| arrival.peer.is_some());
    if by_token && names_ceph_configuration(&body.store) {
        return Err(ApiRefusal::new(
            StatusCode::FORBIDDEN,
            "conf",
            "`conf` of an rbd store names a file that librados obeys, which may have it write anywhere",
            "add the volume on the control socket, or name it in the configuration file",
        ));
    }
    let name = body.name.clone();
    change((&app, &by), VolumeChange::Add(body), |_| {
        let mut response = json(&volume_view(&app, &name)?)?;
        *response.status_mut() = StatusCode::CREATED;
        Ok(response)
    })
    .await
}

#[utoipa::path(get, path = "/v1/volumes/{volume}", tag = "volumes", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "the volume", body = VolumeView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
))]
/// Shows a volume with its settings.
async fn show_volume(State(app): On, name: Named<String>) -> Answer {
    json(&volume_view(&app, &path(name)?)?)
}

#[utoipa::path(patch, path = "/v1/volumes/{volume}", tag = "volumes", params(("volume" = String, Path, description = "its name")),
    request_body = ChangeVolumeBody, responses(
    (status = 200, description = "it is changed, and clients that may not open it any more are being disconnected", body = OperationView),
    (status = 202, description = "it is still being changed", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "it is defined in the configuration file", body = ErrorBody),
    (status = 422, description = "an entry cannot be used", body = ErrorBody),
))]
/// Changes who may open a volume that was added at run time.
async fn change_volume(
    State(app): On,
    by: RequestedBy,
    name: Named<String>,
    body: RequestBody,
) -> Answer {
    let name = path(name)?;
    let body: ChangeVolumeBody =
        parse(body, "send {\"allow\": [\"psk:alice\"]}, or {\"allow\": null} for all clients")?;
    simple_change(&app, &by, VolumeChange::Change(name, body)).await
}

#[utoipa::path(delete, path = "/v1/volumes/{volume}", tag = "volumes", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "it is removed", body = OperationView),
    (status = 202, description = "its data is still being written", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "it is defined in the configuration file", body = ErrorBody),
))]
/// Removes a volume: its requests complete, its clients are disconnected, and its data is written.
async fn remove_volume(State(app): On, by: RequestedBy, name: Named<String>) -> Answer {
    simple_change(&app, &by, VolumeChange::Remove(path(name)?)).await
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/rename", tag = "volumes", params(("volume" = String, Path, description = "its name")),
    request_body = RenameBody, responses(
    (status = 200, description = "it is renamed", body = OperationView),
    (status = 202, description = "its data is still being written", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "it is in use, or the new name is", body = ErrorBody),
))]
/// Renames a volume that no client uses.
async fn rename_volume(
    State(app): On,
    by: RequestedBy,
    name: Named<String>,
    body: RequestBody,
) -> Answer {
    let name = path(name)?;
    let body: RenameBody = parse(body, "send {\"name\": \"new-name\"}")?;
    simple_change(&app, &by, VolumeChange::Rename(name, body.name)).await
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/snapshot", tag = "volumes", params(("volume" = String, Path, description = "its name")),
    request_body = SnapshotBody, responses(
    (status = 200, description = "the snapshot is stable, and served", body = OperationView),
    (status = 202, description = "its data is still being written", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "it is no overlay on a file, or there is such a snapshot", body = ErrorBody),
))]
/// Makes a snapshot of an overlay while it is in use: the state of all writes that were acknowledged before.
async fn snapshot_volume(
    State(app): On,
    by: RequestedBy,
    name: Named<String>,
    body: RequestBody,
) -> Answer {
    let name = path(name)?;
    let body: SnapshotBody = parse(body, "send {\"name\": \"monday\"}")?;
    simple_change(&app, &by, VolumeChange::Snapshot(name, body)).await
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/flatten", tag = "volumes", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "it no longer needs a base", body = OperationView),
    (status = 202, description = "it is still being copied", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "it is no overlay that is written to", body = ErrorBody),
))]
/// Copies what is below an overlay into it, so that it no longer needs a base.
async fn flatten_volume(State(app): On, by: RequestedBy, name: Named<String>) -> Answer {
    simple_change(&app, &by, VolumeChange::Flatten(path(name)?)).await
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/persist", tag = "volumes", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "the next start serves it, too", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "there is no state directory", body = ErrorBody),
))]
/// Keeps a volume that was added at run time, and those below it, for the next start.
async fn persist_volume(State(app): On, by: RequestedBy, name: Named<String>) -> Answer {
    simple_change(&app, &by, VolumeChange::Persist(path(name)?)).await
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/commit", tag = "volumes", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "its base holds what it held, and it is empty", body = OperationView),
    (status = 202, description = "it is still being copied", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "it or its base is in use, or it is no overlay of a plain file", body = ErrorBody),
))]
/// Writes what an overlay holds into its base, while no client uses either.
async fn commit_volume(State(app): On, by: RequestedBy, name: Named<String>) -> Answer {
    simple_change(&app, &by, VolumeChange::Commit(path(name)?)).await
}

#[utoipa::path(delete, path = "/v1/volumes/{volume}/snapshots/{snapshot}", tag = "volumes", params(
    ("volume" = String, Path, description = "its name"),
    ("snapshot" = String, Path, description = "the name of the snapshot"),
), responses(
    (status = 200, description = "it is deleted", body = OperationView),
    (status = 202, description = "it is still being copied", body = OperationView),
    (status = 404, description = "there is no such volume or snapshot", body = ErrorBody),
    (status = 409, description = "it is in use", body = ErrorBody),
))]
/// Deletes a snapshot; the volume and its other snapshots keep what they read as.
async fn delete_snapshot(
    State(app): On,
    by: RequestedBy,
    names: Named<(String, String)>,
) -> Answer {
    let (name, snapshot) = path(names)?;
    simple_change(&app, &by, VolumeChange::DeleteSnapshot(name, snapshot)).await
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/resize", tag = "volumes", params(("volume" = String, Path, description = "its name")),
    request_body = ResizeBody, responses(
    (status = 200, description = "it is resized", body = ResizeView),
    (status = 202, description = "it is still being resized", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "it cannot have this size now", body = ErrorBody),
))]
/// Resizes a volume in use.
async fn resize_volume(
    State(app): On,
    by: RequestedBy,
    name: Named<String>,
    body: RequestBody,
) -> Answer {
    let name = path(name)?;
    let body: ResizeBody =
        parse(body, "send {\"size\": BYTES}, or {} to adopt the size of its file or device")?;
    crate::resize::check_served(&app.shared, &name)?;
    change((&app, &by), VolumeChange::Resize(name, body), |view| match &view.resized {
        Some(resized) => json(resized),
        None => reply(StatusCode::OK, &view),
    })
    .await
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/limits/keep/check", tag = "limits", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "they could be kept", body = OperationView),
    (status = 202, description = "that is still being checked", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "the volume itself is not kept, or there is no state directory", body = ErrorBody),
))]
/// Checks that limits of a volume could be kept in the state directory, and changes nothing.
async fn check_limits(State(app): On, by: RequestedBy, name: Named<String>) -> Answer {
    simple_change(&app, &by, VolumeChange::CheckLimits(path(name)?)).await
}

#[utoipa::path(post, path = "/v1/limit-groups/{group}/limits/keep/check", tag = "limits", params(("group" = String, Path, description = "its name")), responses(
    (status = 200, description = "they could be kept", body = OperationView),
    (status = 202, description = "that is still being checked", body = OperationView),
    (status = 409, description = "the daemon has no state directory", body = ErrorBody),
))]
/// Checks that limits of a group could be kept in the state directory, and changes nothing.
async fn check_group_limits(State(app): On, by: RequestedBy, group: Named<String>) -> Answer {
    path(group)?;
    simple_change(&app, &by, VolumeChange::CheckGroupLimits).await
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/limits/keep", tag = "limits", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "the next start has them, too", body = OperationView),
    (status = 202, description = "they are still being written", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
    (status = 409, description = "the volume itself is not kept", body = ErrorBody),
))]
/// Keeps the limits that a volume has of its own in the state directory.
async fn keep_limits(State(app): On, by: RequestedBy, name: Named<String>) -> Answer {
    simple_change(&app, &by, VolumeChange::KeepLimits(path(name)?)).await
}

#[utoipa::path(delete, path = "/v1/volumes/{volume}/limits/keep", tag = "limits", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "the next start has those of the configuration", body = OperationView),
    (status = 202, description = "it is still being written", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
))]
/// Forgets the limits of a volume that were kept in the state directory.
async fn forget_limits(State(app): On, by: RequestedBy, name: Named<String>) -> Answer {
    simple_change(&app, &by, VolumeChange::ForgetLimits(path(name)?)).await
}

#[utoipa::path(post, path = "/v1/limit-groups/{group}/limits/keep", tag = "limits", params(("group" = String, Path, description = "its name")), responses(
    (status = 200, description = "the next start has them, too", body = OperationView),
    (status = 202, description = "they are still being written", body = OperationView),
    (status = 404, description = "there is no such group", body = ErrorBody),
    (status = 409, description = "the daemon has no state directory", body = ErrorBody),
))]
/// Keeps the limits of a group that were set at run time in the state directory.
async fn keep_group_limits(State(app): On, by: RequestedBy, group: Named<String>) -> Answer {
    simple_change(&app, &by, VolumeChange::KeepGroupLimits(path(group)?)).await
}

#[utoipa::path(delete, path = "/v1/limit-groups/{group}/limits/keep", tag = "limits", params(("group" = String, Path, description = "its name")), responses(
    (status = 200, description = "the next start has those of the configuration", body = OperationView),
    (status = 202, description = "it is still being written", body = OperationView),
    (status = 404, description = "there is no such group", body = ErrorBody),
    (status = 409, description = "the daemon has no state directory", body = ErrorBody),
))]
/// Forgets the limits of a group that were kept in the state directory.
async fn forget_group_limits(State(app): On, by: RequestedBy, group: Named<String>) -> Answer {
    simple_change(&app, &by, VolumeChange::ForgetGroupLimits(path(group)?)).await
}

#[utoipa::path(post, path = "/v1/volumes/{volume}/flush", tag = "volumes", params(("volume" = String, Path, description = "its name")), responses(
    (status = 200, description = "everything that was acknowledged before is stable", body = OperationView),
    (status = 202, description = "its data is still being written", body = OperationView),
    (status = 404, description = "there is no such volume", body = ErrorBody),
))]
/// Makes everything stable that was acknowledged to the clients of a volume.
async fn flush_volume(State(app): On, by: RequestedBy, name: Named<String>) -> Answer {
    let name = path(name)?;
    crate::resize::check_served(&app.shared, &name)?;
    simple_change(&app, &by, VolumeChange::Flush(name)).await
}

#[utoipa::path(post, path = "/v1/flush", tag = "volumes", responses(
    (status = 200, description = "everything that was acknowledged before is stable", body = OperationView),
    (status = 202, description = "data is still being written", body = OperationView),
))]
/// Flushes all volumes.
async fn flush_volumes(State(app): On, by: RequestedBy) -> Answer {
    simple_change(&app, &by, VolumeChange::FlushAll).await
}

#[utoipa::path(post, path = "/v1/reload", tag = "volumes", responses(
    (status = 200, description = "the configuration is in force; `not_served` lists volumes whose stores cannot be opened, `without_socket` those whose sockets cannot", body = OperationView),
    (status = 202, description = "volumes are still being changed", body = OperationView),
    (status = 422, description = "the configuration has a mistake; the old one stays in force", body = ErrorBody),
    (status = 409, description = "some volumes could not be changed, or keys not be read: the old ones are in force", body = ErrorBody),
))]
/// Reads the configuration again, as SIGHUP does.
async fn reload(State(app): On, by: RequestedBy) -> Answer {
    simple_change(&app, &by, VolumeChange::Reload).await
}

#[utoipa::path(post, path = "/v1/takeover", tag = "volumes", request_body = TakeoverBody, responses(
    (status = 200, description = "the takeover has begun; the successor learns at its socket how it goes on", body = OperationView),
    (status = 403, description = "the request came over TCP", body = ErrorBody),
    (status = 409, description = "the daemon runs under a service manager, whose restart keeps connections", body = ErrorBody),
    (status = 422, description = "no successor of the daemon's user listens at this path", body = ErrorBody),
))]
/// Hands over to a successor that listens at a socket, as `ebbd serve --takeover` does, and exits.
async fn takeover(
    State(app): On,
    by: RequestedBy,
    socket: OnControlSocket,
    body: RequestBody,
) -> Answer {
    let body: TakeoverBody = parse(body, "send {\"socket\": \"/run/ebbd/successor\"}")?;
    socket.must_be("a takeover", "ebbd serve --takeover")?;
    // It ends with this daemon: the successor is to go on at its socket meanwhile.
    let manager = &app.shared.manager;
    let id = manager.begin(VolumeChange::Takeover(body), by.as_str())?.id;
    let Some((view, _)) = manager.operation(id) else { return Err(unknown(id)) };
    reply(StatusCode::OK, &view)
}

#[utoipa::path(get, path = "/v1/operations", tag = "volumes", responses(
    (status = 200, description = "operations in progress, and those that ended in the last ten minutes",
     body = Vec<OperationView>),
))]
/// Lists operations.
async fn list_operations(State(app): On) -> Answer {
    json(&app.shared.manager.operations())
}

/// The number of an operation in a path.
fn number(id: Named<String>) -> Result<u64, ApiRefusal> {
    let text = path(id)?;
    text.parse().map_err(|_| {
        let message = format!("`{}` is not the number of an operation", ebb_config::shorten(&text));
        let remedy = "`ebbd operation list` shows the numbers";
        ApiRefusal::new(StatusCode::NOT_FOUND, "unknown_operation", message, remedy)
    })
}

#[utoipa::path(get, path = "/v1/operations/{id}", tag = "volumes", params(("id" = u64, Path, description = "its number")), responses(
    (status = 200, description = "the operation", body = OperationView),
    (status = 404, description = "there is no such operation", body = ErrorBody),
))]
/// Shows an operation.
async fn show_operation(State(app): On, id: Named<String>) -> Answer {
    let id = number(id)?;
    let (view, _) = app.shared.manager.operation(id).ok_or_else(|| unknown(id))?;
    json(&view)
}

#[utoipa::path(delete, path = "/v1/operations/{id}", tag = "volumes", params(("id" = u64, Path, description = "its number")), responses(
    (status = 200, description = "it is cancelled", body = OperationView),
    (status = 404, description = "there is no such operation", body = ErrorBody),
    (status = 409, description = "it has ended already, or cannot be cancelled now", body = ErrorBody),
))]
/// Cancels an operation.
async fn cancel_operation(
    State(app): On,
    by: RequestedBy,
    id: Named<String>,
) -> Result<Response, ApiRefusal> {
    let view = app.shared.manager.cancel(number(id)?)?;
    tracing::info!(operation = view.id, by = by.as_str(), "operation cancelled");
    Ok(json(&view)?.into_response())
}
