//! The routes of the history and of the list of volumes, and a sample of the daemon's figures.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{Query, State};
use axum::http::StatusCode;
use ebb_api::stat::{MemoryStat, VolumeStat};
use ebb_api::{DaemonView, HeatmapView, HistoryView, SummaryView, VolumeSummary};
use ebb_config::params::unknown_volume;
use ebb_config::shorten;
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, Named, On, path};
use crate::answer::{Answer, ApiRefusal, json};
use crate::figures::process::resident_bytes;
use crate::figures::{VolumeBrief, remote_stat, volume_stat, worst_remote};
use crate::history::{DaemonFigures, History, Range};

/// The routes.
pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(summary))
        .routes(routes!(history))
        .routes(routes!(heatmap))
        .routes(routes!(daemon))
        .routes(routes!(volume))
}

/// The part of the history that is wanted.
#[derive(Debug, Deserialize)]
struct Wanted {
    range: Option<String>,
    volume: Option<String>,
}

impl Wanted {
    fn range(&self) -> Result<Range, ApiRefusal> {
        let name = self.range.as_deref().unwrap_or("5m");
        Range::parse(name).ok_or_else(|| {
            let message = format!("`{}` is no range of the history", shorten(name));
            let status = StatusCode::UNPROCESSABLE_ENTITY;
            ApiRefusal::new(status, "invalid_value", message, "the ranges are 5m, 1h and 24h")
        })
    }
}

type WantedQuery = Result<Query<Wanted>, axum::extract::rejection::QueryRejection>;

fn query(query: WantedQuery) -> Result<Wanted, ApiRefusal> {
    query.map(|Query(wanted)| wanted).map_err(|error| {
        let message = shorten(&error.body_text());
        let remedy = "use `?range=5m`, and `&volume=NAME` for a volume";
        ApiRefusal::new(StatusCode::BAD_REQUEST, "malformed_query", message, remedy)
    })
}

/// The state of all volumes in few bytes.
#[utoipa::path(get, path = "/v1/summary", tag = "figures", responses((status = 200, body = SummaryView)))]
async fn summary(State(app): On) -> Answer {
    let briefs = (app.shared.briefs)();
    let mut history = app.history();
    history.note_list_viewed();
    let volumes = briefs.iter().map(|brief| summary_of(&history, brief)).collect();
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let (bytes, most) = history.bytes();
    let wide = |bytes: usize| u64::try_from(bytes).unwrap_or(u64::MAX);
    json(&SummaryView { time, history_bytes: wide(bytes), history_most_bytes: wide(most), volumes })
}

/// Figures of the last 5 min, 1 h or 24 h.
#[utoipa::path(
    get,
    path = "/v1/history", tag = "figures",
    params(
        ("range" = Option<String>, Query, description = "`5m`, `1h` or `24h`"),
        ("volume" = Option<String>, Query, description = "the volume; absent for the daemon"),
    ),
    responses((status = 200, body = HistoryView), (status = 404, body = ebb_api::ErrorBody))
)]
async fn history(State(app): On, wanted: WantedQuery) -> Answer {
    let wanted = query(wanted)?;
    let range = wanted.range()?;
    let volume = wanted.volume.as_deref();
    let view = app.history().view(range, volume);
    match (view, volume) {
        (Some(view), _) => json(&view),
        (None, Some(name)) => {
            app.know(name)?;
            json(&app.history().unknown(range))
        }
        (None, None) => json(&HistoryView::default()),
    }
}

/// How long the requests of a volume took, over time.
#[utoipa::path(
    get,
    path = "/v1/volumes/{volume}/heatmap", tag = "figures",
    params(
        ("volume" = String, Path, description = "the volume"),
        ("range" = Option<String>, Query, description = "`5m`, `1h` or `24h`"),
    ),
    responses((status = 200, body = HeatmapView), (status = 404, body = ebb_api::ErrorBody))
)]
async fn heatmap(State(app): On, name: Named<String>, wanted: WantedQuery) -> Answer {
    let (name, range) = (path(name)?, query(wanted)?.range()?);
    let view = app.history().heatmap(range, &name);
    match view {
        Some(view) => json(&view),
        None => {
            app.know(&name)?;
            json(&HeatmapView::default())
        }
    }
}

/// The figures of the daemon, without those of each volume.
#[utoipa::path(get, path = "/v1/daemon", tag = "figures", responses((status = 200, body = DaemonView)))]
async fn daemon(State(app): On) -> Answer {
    let (shared, sources) = (&app.shared, &app.shared.sources);
    let memory = sources.memory.as_ref().map(|read| MemoryStat {
        zones: Vec::new(),
        pools: Vec::new(),
        owners: Vec::new(),
        ..read()
    });
    json(&DaemonView {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_seconds: shared.started.elapsed().as_secs_f64(),
        resident_bytes: resident_bytes(),
        clients: u64::try_from(shared.server.clients()).unwrap_or(u64::MAX),
        memory,
        pressure: sources.pressure.as_ref().map(|read| read()),
        cache: sources.cache.as_ref().map(|read| read()),
    })
}

/// The figures of a volume.
#[utoipa::path(
    get,
    path = "/v1/volumes/{volume}/stat", tag = "figures",
    params(("volume" = String, Path, description = "the volume")),
    responses((status = 200, body = VolumeStat), (status = 404, body = ebb_api::ErrorBody))
)]
async fn volume(State(app): On, name: Named<String>) -> Answer {
    let name = path(name)?;
    let shared = &app.shared;
    let briefs = (shared.briefs)();
    let served = briefs.into_iter().find(|brief| brief.name == name);
    let served = served.filter(|brief| brief.state.is_served());
    if let Some((volume, outage, failing)) =
        served.and_then(|brief| Some((brief.volume?, brief.outage, brief.failing_guests)))
    {
        let clients = shared.server.connections(&name) + shared.guests_of(&name);
        return json(&volume_stat(&volume, clients, outage, failing));
    }
    app.know(&name)?;
    // Why a volume is not served is in the list of all.
    match (shared.volumes)().into_iter().find(|stat| stat.name == name) {
        Some(stat) => json(&stat),
        None => json(&VolumeStat { name, ..VolumeStat::default() }),
    }
}

impl App {
    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Samples the history; due each second.
    pub(crate) fn sample(&self) {
        let (shared, sources) = (&self.shared, &self.shared.sources);
        let (lent_bytes, wired_bytes) = sources.arena.as_ref().map_or((0, 0), |read| read());
        let figures = DaemonFigures {
            level: sources.level.as_ref().map_or(0, |read| read()),
            clients: u64::try_from(shared.server.clients()).unwrap_or(u64::MAX),
            lent_bytes,
            wired_bytes,
        };
        let guests = shared.guests();
        let connections = |name: &str| {
            shared.server.connections(name) + guests.get(name).copied().unwrap_or_default()
        };
        let now = ebb_mem::clock::now();
        self.history().sample(now, shared.server.volumes(), &connections, figures);
    }

    /// Refuses a name that no volume has, whether served or not.
    fn know(&self, name: &str) -> Result<(), ApiRefusal> {
        let briefs = (self.shared.briefs)();
        if briefs.iter().any(|brief| brief.name == name) {
            return Ok(());
        }
        Err(unknown_volume(name, briefs.iter().map(|brief| brief.name.as_str())).into())
    }
}

fn summary_of(history: &History, brief: &VolumeBrief) -> VolumeSummary {
    let figures = history.summary(&brief.name).unwrap_or_default();
    let remote = brief.volume.as_deref().and_then(worst_remote);
    VolumeSummary {
        name: brief.name.clone(),
        state: brief.state,
        iops: figures.iops,
        bytes: figures.bytes,
        p99: figures.p99,
        hit_ratio: figures.hit_ratio,
        dirty: figures.dirty,
        clients: figures.clients,
        remote: remote.map(|remote| remote_stat(remote).condition()),
        spark: figures.spark,
    }
}
