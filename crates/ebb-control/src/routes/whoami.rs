//! `GET /v1/whoami`: what the caller may do.

use std::sync::Arc;

use axum::Extension;
use ebb_api::CallerView;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use crate::access::Arrival;
use crate::answer::{Answer, json};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(whoami))
}

/// The role of the caller.
#[utoipa::path(get, path = "/v1/whoami", tag = "interface", responses((status = 200, body = CallerView)))]
async fn whoami(arrival: Option<Extension<Arrival>>) -> Answer {
    let caller = arrival.map(|Extension(arrival)| arrival.caller).unwrap_or_default();
    json(&CallerView { role: caller.role.into(), identity: caller.identity.clone() })
}
