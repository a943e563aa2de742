//! `/v1/health`, and the same for programs that look at the status only: `/healthz` and `/readyz`.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use ebb_api::{HealthState, HealthView};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, On};
use crate::access::{Arrival, Role};
use crate::answer::{Answer, ApiRefusal, json};
use crate::health::{health, not_ready};

/// How long a health that was found is told.
const FRESH: Duration = Duration::from_secs(1);

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(whole_health))
        .routes(routes!(healthz))
        .routes(routes!(readyz))
}

/// The health of the daemon, with the reasons if it is not ok.
#[utoipa::path(get, path = "/v1/health", tag = "health", responses((status = 200, body = HealthView)))]
async fn whole_health(State(app): On, arrival: Option<Extension<Arrival>>) -> Answer {
    // On the control socket what a command has just changed is seen.
    let fresh = arrival.is_some_and(|Extension(arrival)| arrival.peer.is_none());
    json(&app.health(if fresh { Duration::ZERO } else { FRESH }).await?.view)
}

/// 200 while the daemon is ok or degraded, 503 if a volume fails requests or is not served. A restart of the daemon is
/// seldom the remedy. Without a role only the state is told.
#[utoipa::path(
    get, path = "/healthz", tag = "health",
    responses((status = 200, body = HealthView), (status = 503, body = HealthView))
)]
async fn healthz(State(app): On, arrival: Option<Extension<Arrival>>) -> Answer {
    let view = app.health(FRESH).await?.view;
    let failing = view.state == HealthState::Failing;
    let viewer = arrival.is_some_and(|Extension(arrival)| arrival.caller.role >= Role::View);
    let view =
        if viewer { view } else { HealthView { state: view.state, ..HealthView::default() } };
    let status = if failing { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    Ok((status, json(&view)?).into_response())
}

/// 200 when the daemon has tried to open each volume and listens, 503 before and while it stops.
#[utoipa::path(
    get, path = "/readyz", tag = "health",
    responses((status = 200, body = String), (status = 503, body = String))
)]
async fn readyz(State(app): On) -> Answer {
    Ok(match app.health(FRESH).await?.not_ready {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
    .into_response())
}

/// The health at a moment.
#[derive(Clone, Debug)]
pub(super) struct KnownHealth {
    view: HealthView,
    not_ready: Option<String>,
    at: Instant,
}

impl App {
    /// The health, at most `fresh` old: peers without a token may ask for it, and it takes all statistics.
    async fn health(self: &Arc<Self>, fresh: Duration) -> Result<KnownHealth, ApiRefusal> {
        // Requests at the same time wait for the same statistics.
        let mut known = self.health.lock().await;
        if let Some(known) = known.as_ref().filter(|known| known.at.elapsed() < fresh) {
            return Ok(known.clone());
        }
        let stat = self.stat().await?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let (view, not_ready) = (health(&stat, now), not_ready(&stat));
        Ok(known.insert(KnownHealth { view, not_ready, at: Instant::now() }).clone())
    }
}
