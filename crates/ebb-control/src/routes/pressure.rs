//! `POST /v1/pressure`: publishes a level of memory pressure.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use ebb_api::{MAX_HOLD_SECONDS, PressureBody};
use ebb_config::shorten;
use ebb_mem::pressure::Level;
use tokio::time::Instant;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, On, RequestBody, parse};
use crate::access::RequestedBy;
use crate::answer::{Answer, ApiRefusal, json};

/// How often a held level is published: more often than levels fall.
const HOLD: Duration = Duration::from_millis(500);

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(pressure))
}

/// Publishes a level of memory pressure, once or for a time.
#[utoipa::path(
    post, path = "/v1/pressure", tag = "memory",
    request_body = PressureBody, responses((status = 200, body = PressureBody))
)]
async fn pressure(State(app): On, by: RequestedBy, body: RequestBody) -> Answer {
    let form = "send {\"level\": \"L1\"}, and \"seconds\" to hold the level";
    let wanted: PressureBody = parse(body, form)?;
    let invalid = |message: String, remedy: String| {
        ApiRefusal::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_value", message, remedy)
    };
    let number = wanted.level.strip_prefix(['L', 'l']).unwrap_or(&wanted.level);
    let level = number.parse().ok().and_then(Level::from_number).ok_or_else(|| {
        let message = format!("`{}` is no level of memory pressure", shorten(&wanted.level));
        invalid(message, "the levels are L0, L1, L2 and L3".to_owned())
    })?;
    if let Some(seconds) = wanted.seconds
        && !(1..=MAX_HOLD_SECONDS).contains(&seconds)
    {
        let remedy = format!("choose 1 to {MAX_HOLD_SECONDS}");
        return Err(invalid(format!("{seconds} seconds is out of range"), remedy));
    }
    app.inject(level, wanted.seconds.map(Duration::from_secs), &by)
}

impl App {
    /// Publishes a level once, or repeatedly until the time is over. Then it falls by itself.
    fn inject(&self, level: Level, hold: Option<Duration>, by: &RequestedBy) -> Answer {
        let Some(inject) = &self.shared.sources.inject else {
            let remedy = "start the daemon with its pressure monitor";
            let message = "the daemon does not monitor memory pressure";
            let status = StatusCode::SERVICE_UNAVAILABLE;
            return Err(ApiRefusal::new(status, "unavailable", message, remedy));
        };
        let mut holder = self.holder.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(earlier) = holder.take() {
            earlier.abort();
        }
        inject(level);
        let seconds = hold.map(|hold| hold.as_secs());
        let by = by.as_str();
        tracing::info!(%level, seconds, by, "memory pressure published with `ebbd pressure`");
        if let Some(hold) = hold.filter(|_| level != Level::L0) {
            let shared = self.shared.clone();
            let end = Instant::now() + hold;
            let task = tokio::spawn(async move {
                while Instant::now() + HOLD < end {
                    tokio::time::sleep(HOLD).await;
                    shared.sources.inject.iter().for_each(|inject| inject(level));
                }
            });
            *holder = Some(task.abort_handle());
        }
        json(&PressureBody { level: format!("L{}", level.number()), seconds })
    }
}
