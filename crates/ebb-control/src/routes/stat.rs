//! The statistics, `/v1/stat` and its parts, and the same as metrics.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use ebb_api::Version;
use ebb_api::stat::{BdiStat, ClusterStat, DaemonPhase, Stat, VolumeStat, WorkerStat};
use ebb_export_vhost::VhostFigures;
use ebb_export_xen::Figures;
use tokio::sync::oneshot;
use tokio::time::Instant;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, On, aside, list};
use crate::access::Arrival;
use crate::answer::{Answer, ApiRefusal, json};
use crate::figures::cluster::cluster_stats;
use crate::figures::process::{process_stat, resident_bytes};
use crate::figures::{vhost_stat, xen_stat};
use crate::metrics;

/// How long workers may take to send their counters.
const WORKERS: Duration = Duration::from_millis(500);

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(version))
        .routes(routes!(volumes))
        .routes(routes!(bdis))
        .routes(routes!(clusters))
        .routes(routes!(whole_stat))
        .routes(routes!(open_metrics))
}

/// The program and its version.
#[utoipa::path(get, path = "/v1/version", tag = "figures", responses((status = 200, body = Version)))]
async fn version(State(app): On) -> Answer {
    json(&Version {
        name: "ebbd".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api: "v1".to_owned(),
        listen: app.shared.listen.clone(),
    })
}

/// The backing devices.
#[utoipa::path(get, path = "/v1/bdis", tag = "figures", responses((status = 200, body = Vec<BdiStat>)))]
async fn bdis(State(app): On) -> Answer {
    json(&app.bdis())
}

/// The Ceph clusters that volumes have their images in.
#[utoipa::path(get, path = "/v1/clusters", tag = "figures", responses((status = 200, body = Vec<ClusterStat>)))]
async fn clusters() -> Answer {
    json(&cluster_stats())
}

/// The volumes with their counters.
#[utoipa::path(get, path = "/v1/volumes", tag = "figures", responses((status = 200, body = Vec<VolumeStat>)))]
async fn volumes(State(app): On, arrival: Option<Extension<Arrival>>) -> Answer {
    list(&app, arrival, |app| json(&(app.shared.volumes)())).await
}

/// All statistics.
#[utoipa::path(get, path = "/v1/stat", tag = "figures", responses((status = 200, body = Stat)))]
async fn whole_stat(State(app): On, arrival: Option<Extension<Arrival>>) -> Answer {
    let workers = app.workers().await;
    list(&app, arrival, move |app| json(&app.stat_with(workers))).await
}

/// The statistics as OpenMetrics text.
#[utoipa::path(
    get, path = "/metrics", tag = "figures",
    responses((status = 200, body = String, content_type = "application/openmetrics-text"))
)]
async fn open_metrics(State(app): On, arrival: Option<Extension<Arrival>>) -> Answer {
    let failed = |_| {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        ApiRefusal::new(status, "internal", "the metrics cannot be written", "report this as a bug")
    };
    let workers = app.workers().await;
    list(&app, arrival, move |app| {
        let text = metrics::text(app.stat_with(workers)).map_err(failed)?;
        Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
    })
    .await
}

impl App {
    fn bdis(&self) -> Vec<BdiStat> {
        self.shared.sources.bdis.as_ref().map(|read| read()).unwrap_or_default()
    }

    /// All statistics, at once: for what waits for no list.
    pub(super) async fn stat(self: &Arc<Self>) -> Result<Stat, ApiRefusal> {
        let (workers, app) = (self.workers().await, self.clone());
        aside(move || app.stat_with(workers)).await
    }

    fn stat_with(&self, workers: Vec<WorkerStat>) -> Stat {
        let shared = &self.shared;
        Stat {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: shared.started.elapsed().as_secs_f64(),
            resident_bytes: resident_bytes(),
            clients: u64::try_from(shared.server.clients()).unwrap_or(u64::MAX),
            volumes: (self.shared.volumes)(),
            xen: shared
                .xen
                .get()
                .into_iter()
                .flat_map(Figures::read)
                .map(|disk| xen_stat(&disk))
                .collect(),
            vhost: shared
                .vhost
                .get()
                .into_iter()
                .flat_map(VhostFigures::read)
                .map(|disk| vhost_stat(&disk))
                .collect(),
            workers,
            memory: shared.sources.memory.as_ref().map(|read| read()),
            pressure: shared.sources.pressure.as_ref().map(|read| read()),
            cache: shared.sources.cache.as_ref().map(|read| read()),
            bdis: self.bdis(),
            clusters: cluster_stats(),
            limit_groups: (shared.limit_groups)(),
            certificates: shared
                .sources
                .certificates
                .as_ref()
                .map(|read| read())
                .unwrap_or_default(),
            reload: shared.sources.reload.as_ref().and_then(|read| read()),
            lost_sockets: shared
                .sources
                .lost_sockets
                .as_ref()
                .map(|read| read())
                .unwrap_or_default(),
            problems: shared.sources.problems.as_ref().map(|read| read()).unwrap_or_default(),
            sandbox: shared.sources.sandbox.as_ref().map(|read| read()).unwrap_or_default(),
            process: process_stat(shared.started),
            phase: shared.sources.phase.as_ref().map_or(DaemonPhase::Serving, |read| read()),
        }
    }

    /// Queries all workers at the same time; one that does not reply in time is reported as such.
    pub(super) async fn workers(&self) -> Vec<WorkerStat> {
        let ask = |handle: &ebb_io::WorkerHandle| {
            let (sender, receiver) = oneshot::channel();
            handle.spawn(move |io| async move {
                let _ = sender.send(io.stats());
            });
            receiver
        };
        let asked: Vec<_> = self.shared.workers.iter().map(ask).collect();
        let deadline = Instant::now() + WORKERS;
        let mut workers = Vec::new();
        for (worker, receiver) in asked.into_iter().enumerate() {
            let answer = tokio::time::timeout_at(deadline, receiver).await;
            workers.push(match answer {
                Ok(Ok(stats)) => WorkerStat {
                    worker,
                    answers: true,
                    enters: stats.enters,
                    operations: stats.operations,
                    polls: stats.polls,
                    unsuccessful_polls: stats.unsuccessful_polls,
                },
                _ => WorkerStat { worker, ..WorkerStat::default() },
            });
        }
        workers
    }
}
