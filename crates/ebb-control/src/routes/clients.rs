//! Who is connected, and disconnecting a client.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use ebb_api::{ClientView, ErrorBody};
use ebb_config::shorten;
use ebb_export_nbd::{NbdClient, NbdConnectionId};
use ebb_export_vhost::{VhostDisk, VhostFigures};
use ebb_export_xen::{DeviceStats, Figures};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, Named, On, list, path};
use crate::access::{Arrival, RequestedBy};
use crate::answer::{Answer, ApiRefusal, json};

/// How long the requests in flight of a client that is disconnected may take.
const COMPLETE: Duration = Duration::from_secs(5);
/// What the identifiers of Xen disks begin with.
const XEN: &str = "xen-";
/// What the identifiers of frontends of vhost-user begin with.
const VHOST: &str = "vhost-";

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_clients))
        .routes(routes!(show_client, disconnect_client))
}

fn nbd_view(client: NbdClient) -> ClientView {
    ClientView {
        id: NbdConnectionId(client.number).to_string(),
        export: "nbd".to_owned(),
        volume: client.volume.to_string(),
        address: client.address,
        identity: client.identity,
        pid: client.pid,
        tls: client.tls,
        read_only: client.read_only,
        waits_for: None,
        connected_seconds: ebb_mem::clock::since(client.since).as_secs_f64(),
        in_flight: client.in_flight,
        requests: client.requests,
        read_bytes: client.read_bytes,
        written_bytes: client.written_bytes,
    }
}

fn xen_view(disk: &DeviceStats) -> ClientView {
    let stats = &disk.stats;
    ClientView {
        id: format!("{XEN}{}-{}", disk.guest, disk.device),
        export: "xen".to_owned(),
        volume: disk.volume.to_string(),
        address: format!("domain {}", disk.guest),
        identity: Some(format!("xen:{}", disk.guest)),
        pid: None,
        tls: false,
        read_only: disk.read_only,
        waits_for: None,
        connected_seconds: ebb_mem::clock::since(disk.since).as_secs_f64(),
        in_flight: stats.consumed.saturating_sub(stats.responses),
        requests: stats.responses,
        read_bytes: stats.rd_sect.saturating_mul(512),
        written_bytes: stats.wr_sect.saturating_mul(512),
    }
}

fn vhost_view(disk: &VhostDisk) -> ClientView {
    let stats = &disk.stats;
    ClientView {
        id: format!("{VHOST}{}", disk.number),
        export: "vhost-user".to_owned(),
        volume: disk.volume.to_string(),
        address: disk.socket.to_string(),
        identity: disk.uid.map(|uid| format!("uid:{uid}")),
        pid: disk.pid,
        tls: false,
        read_only: disk.read_only,
        waits_for: disk.waits_for.as_deref().map(str::to_owned),
        connected_seconds: ebb_mem::clock::since(disk.since).as_secs_f64(),
        in_flight: stats.consumed.saturating_sub(stats.completed),
        requests: stats.completed,
        read_bytes: stats.read_bytes,
        written_bytes: stats.written_bytes,
    }
}

impl App {
    fn clients(&self) -> Vec<ClientView> {
        let nbd = self.shared.server.list_clients().into_iter().map(nbd_view);
        let xen = self.shared.xen.get().into_iter().flat_map(Figures::read);
        let vhost = self.shared.vhost.get().into_iter().flat_map(VhostFigures::read);
        let guests = xen.map(|disk| xen_view(&disk)).chain(vhost.map(|disk| vhost_view(&disk)));
        nbd.chain(guests).collect()
    }

    fn client(&self, id: &str) -> Result<ClientView, ApiRefusal> {
        let found = match NbdConnectionId::parse(id) {
            Some(NbdConnectionId(number)) => self.shared.server.client(number).map(nbd_view),
            None => self.clients().into_iter().find(|client| client.id == id),
        };
        found.ok_or_else(|| unknown_client(id))
    }

    /// Begins to disconnect a frontend of vhost-user. It is not cut off: its requests in flight use the guest's memory.
    fn disconnect_frontend(&self, client: &ClientView, by: &str) -> Result<(), ApiRefusal> {
        let number = client.id.strip_prefix(VHOST).and_then(|number| number.parse().ok());
        if !number.is_some_and(|number| (self.shared.disconnect_frontend)(number)) {
            // It has ended meanwhile.
            return Err(unknown_client(&client.id));
        }
        let (connection, volume) = (&*client.id, &*client.volume);
        tracing::info!(connection, volume, by, "disconnecting a client");
        Ok(())
    }
}

fn unknown_client(id: &str) -> ApiRefusal {
    let message = format!("there is no client `{}`", shorten(id));
    let remedy = "`ebbd client list` shows who is connected";
    ApiRefusal::new(StatusCode::NOT_FOUND, "unknown_client", message, remedy)
}

/// The clients and guests that use volumes.
#[utoipa::path(get, path = "/v1/clients", tag = "clients", responses((status = 200, body = [ClientView])))]
async fn list_clients(State(app): On, arrival: Option<Extension<Arrival>>) -> Answer {
    list(&app, arrival, |app| json(&app.clients())).await
}

/// One of them.
#[utoipa::path(
    get,
    path = "/v1/clients/{id}",
    tag = "clients",
    params(("id" = String, Path, description = "The client")),
    responses((status = 200, body = ClientView), (status = 404, body = ErrorBody))
)]
async fn show_client(State(app): On, id: Named<String>) -> Answer {
    json(&app.client(&path(id)?)?)
}

/// Disconnects an NBD client after its requests in flight, or after five seconds; a frontend of vhost-user after its
/// requests in flight.
#[utoipa::path(
    delete,
    path = "/v1/clients/{id}",
    tag = "clients",
    params(("id" = String, Path, description = "The client")),
    responses(
        (status = 200, body = ClientView),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)
    )
)]
async fn disconnect_client(State(app): On, by: RequestedBy, id: Named<String>) -> Answer {
    let id = path(id)?;
    let client = app.client(&id)?;
    if client.id.starts_with(VHOST) {
        app.disconnect_frontend(&client, by.as_str())?;
        return json(&client);
    }
    let Some(NbdConnectionId(number)) = NbdConnectionId::parse(&id) else {
        let message = format!("{id} is a disk of a Xen guest");
        let remedy =
            "detach it with `ebbd xen detach DOMAIN DISK`, which asks the guest to close it";
        return Err(ApiRefusal::new(StatusCode::CONFLICT, "not_disconnected", message, remedy));
    };
    if app.shared.server.end_client(number) {
        let (volume, by) = (&*client.volume, by.as_str());
        tracing::info!(connection = client.id, volume, by, "disconnecting a client");
        let server = app.shared.server.clone();
        tokio::spawn(async move {
            tokio::time::sleep(COMPLETE).await;
            // Nothing if it has ended.
            server.cut_client(number);
        });
    }
    json(&client)
}
