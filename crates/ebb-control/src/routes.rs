//! The routes of version 1, and their handlers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, get, post};
use ebb_api::stat::{BdiStat, Stat, WorkerStat};
use ebb_api::{
    ChangeView, MAX_HOLD_SECONDS, ParameterView, PressureBody, ResizeBody, SetBody, Version,
};
use ebb_config::params::{ParameterChange, ParameterOwner, ParameterScope, Reading, TABLE};
use ebb_config::{shorten, suggest};
use ebb_export_xen::Figures;
use ebb_mem::pressure::Level;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::answer::{Answer, ApiRefusal, json};
use super::resize::resize;
use super::{ControlContext, MAX_BODY_BYTES};
use crate::figures::{resident_bytes, xen_stat};
use crate::metrics;

/// How long workers may take to send their counters.
const WORKERS: Duration = Duration::from_millis(500);
/// How often a held level is published: more often than levels fall.
const HOLD: Duration = Duration::from_millis(500);

/// The body that sets a parameter, as a remedy.
const SET_FORM: &str = "send {\"value\": ...}";

/// The state that the handlers share.
pub(super) struct App {
    pub(super) shared: Arc<ControlContext>,
    /// The task that holds a level of pressure at present.
    holder: Mutex<Option<AbortHandle>>,
}

pub(super) type On = State<Arc<App>>;
pub(super) type Named<T> = Result<Path<T>, PathRejection>;
pub(super) type RequestBody = Result<Bytes, BytesRejection>;

/// The existing paths, for suggestions.
const PATHS: [&str; 7] = [
    "/v1/version",
    "/v1/parameters",
    "/v1/volumes",
    "/v1/bdis",
    "/v1/stat",
    "/v1/pressure",
    "/metrics",
];

/// The routes for statistics.
pub(super) fn figures() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/version", get(version))
        .route("/v1/volumes", get(volumes))
        .route("/v1/bdis", get(bdis))
        .route("/v1/stat", get(whole_stat))
        .route("/metrics", get(open_metrics))
}

/// All routes.
pub(super) fn router(app: Arc<App>) -> Router {
    let parameter = get(read_parameter).put(set_parameter).delete(unset_parameter);
    let volume: OwnerOf = |name| ParameterOwner::Volume(name);
    let bdi: OwnerOf = |name| ParameterOwner::Bdi(name);
    figures()
        .route("/v1/parameters", get(list_parameters))
        .route("/v1/parameters/{name}", parameter)
        .route("/v1/volumes/{volume}/parameters", own_parameters(volume))
        .route("/v1/volumes/{volume}/parameters/{name}", own_parameter(volume))
        .route("/v1/bdis/{bdi}/parameters", own_parameters(bdi))
        .route("/v1/bdis/{bdi}/parameters/{name}", own_parameter(bdi))
        .route("/v1/volumes/{volume}/resize", post(resize_volume))
        .route("/v1/pressure", post(pressure))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(app)
}

fn parameter_view(reading: &Reading) -> ParameterView {
    let definition = reading.key.definition();
    ParameterView {
        name: reading.key.name(),
        value: definition.json(reading.value),
        text: definition.text(reading.value),
        origin: reading.origin.as_str().to_owned(),
        default: definition.json(definition.default),
        range: definition.range(),
        unit: definition.unit.to_owned(),
        scope: match definition.scope {
            ParameterScope::Daemon => "daemon".to_owned(),
            ParameterScope::Volume => "volume".to_owned(),
            ParameterScope::Bdi => "bdi".to_owned(),
        },
        since: definition.since.to_owned(),
        effect: definition.effect.to_owned(),
    }
}

async fn version(State(app): On) -> Answer {
    json(&Version {
        name: "ebbd".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api: "v1".to_owned(),
        listen: app.shared.listen.clone(),
    })
}

async fn list_parameters(State(app): On) -> Answer {
    app.list(ParameterOwner::Daemon)
}

async fn read_parameter(State(app): On, name: Named<String>) -> Answer {
    app.read(&path(name)?, ParameterOwner::Daemon)
}

async fn set_parameter(State(app): On, name: Named<String>, body: RequestBody) -> Answer {
    app.set(&path(name)?, ParameterOwner::Daemon, body)
}

async fn unset_parameter(State(app): On, name: Named<String>) -> Answer {
    app.unset(&path(name)?, ParameterOwner::Daemon)
}

/// Makes an owner of parameters of its name.
type OwnerOf = for<'a> fn(&'a str) -> ParameterOwner<'a>;

/// Lists the parameters of an owner, which is named in the path.
fn own_parameters(owner: OwnerOf) -> MethodRouter<Arc<App>> {
    get(move |State(app): On, of: Named<String>| async move { app.list(owner(&path(of)?)) })
}

/// Reads, sets and unsets a parameter of an owner, both named in the path.
fn own_parameter(owner: OwnerOf) -> MethodRouter<Arc<App>> {
    let read = move |State(app): On, names: Named<(String, String)>| async move {
        let (of, name) = path(names)?;
        app.read(&name, owner(&of))
    };
    let set = move |State(app): On, names: Named<(String, String)>, body: RequestBody| async move {
        let (of, name) = path(names)?;
        app.set(&name, owner(&of), body)
    };
    let unset = move |State(app): On, names: Named<(String, String)>| async move {
        let (of, name) = path(names)?;
        app.unset(&name, owner(&of))
    };
    get(read).put(set).delete(unset)
}

async fn bdis(State(app): On) -> Answer {
    json(&app.bdis())
}

async fn volumes(State(app): On) -> Answer {
    json(&(app.shared.volumes)())
}

async fn whole_stat(State(app): On) -> Answer {
    json(&app.stat().await)
}

async fn open_metrics(State(app): On) -> Answer {
    let failed = |_| {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        ApiRefusal::new(status, "internal", "the metrics cannot be written", "report this as a bug")
    };
    let text = metrics::text(app.stat().await).map_err(failed)?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

async fn pressure(State(app): On, body: RequestBody) -> Answer {
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
    app.inject(level, wanted.seconds.map(Duration::from_secs))
}

async fn no_such_path(uri: Uri) -> ApiRefusal {
    let message = format!("there is nothing at `{}`", shorten(uri.path()));
    let remedy = suggest(uri.path(), PATHS, "the paths are");
    ApiRefusal::new(StatusCode::NOT_FOUND, "not_found", message, remedy)
}

async fn no_such_method(method: Method, uri: Uri) -> ApiRefusal {
    let message = format!("`{}` has no {}", shorten(uri.path()), shorten(method.as_str()));
    let remedy =
        "GET reads, PUT sets and DELETE unsets a parameter, POST publishes pressure and resizes";
    ApiRefusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message, remedy)
}

async fn resize_volume(State(app): On, name: Named<String>, body: RequestBody) -> Answer {
    let name = path(name)?;
    let body: ResizeBody =
        parse(body, "send {\"size\": BYTES}, or {} to adopt the size of its file")?;
    resize(&app.shared, name, body).await
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
            return ApiRefusal::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message, form);
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
        ApiRefusal::new(StatusCode::BAD_REQUEST, kind, shorten(&error.to_string()), form)
    })
}

impl App {
    pub(super) fn new(shared: Arc<ControlContext>) -> Self {
        Self { shared, holder: Mutex::default() }
    }

    fn list(&self, owner: ParameterOwner) -> Answer {
        let readings = self.shared.parameters.list(owner)?;
        json(&readings.iter().map(parameter_view).collect::<Vec<_>>())
    }

    fn read(&self, name: &str, owner: ParameterOwner) -> Answer {
        let reading = self.shared.parameters.get(name, owner)?;
        json(&parameter_view(&reading))
    }

    fn set(&self, name: &str, owner: ParameterOwner, body: RequestBody) -> Answer {
        // An unknown name is reported first, whatever the body.
        TABLE.parse(name)?;
        let body: SetBody = parse(body, SET_FORM)?;
        changed(&self.shared.parameters.set(name, owner, &body.value)?)
    }

    fn unset(&self, name: &str, owner: ParameterOwner) -> Answer {
        changed(&self.shared.parameters.unset(name, owner)?)
    }

    fn bdis(&self) -> Vec<BdiStat> {
        self.shared.sources.bdis.as_ref().map(|read| read()).unwrap_or_default()
    }

    async fn stat(&self) -> Stat {
        let shared = &self.shared;
        Stat {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: shared.started.elapsed().as_secs_f64(),
            resident_bytes: resident_bytes(),
            clients: u64::try_from(shared.server.clients()).unwrap_or(u64::MAX),
            volumes: (self.shared.volumes)(),
            xen: shared.xen.iter().flat_map(Figures::read).map(|disk| xen_stat(&disk)).collect(),
            workers: self.workers().await,
            memory: shared.sources.memory.as_ref().map(|read| read()),
            pressure: shared.sources.pressure.as_ref().map(|read| read()),
            cache: shared.sources.cache.as_ref().map(|read| read()),
            bdis: self.bdis(),
        }
    }

    /// Queries all workers at the same time; one that does not reply in time is reported as such.
    async fn workers(&self) -> Vec<WorkerStat> {
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

    /// Publishes a level once, or repeatedly until the time is over. Then it falls by itself.
    fn inject(&self, level: Level, hold: Option<Duration>) -> Answer {
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
        tracing::info!(%level, seconds, "memory pressure published with `ebbd pressure`");
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

fn changed(change: &ParameterChange) -> Answer {
    let definition = change.key.definition();
    let view = ChangeView {
        name: change.key.name(),
        volume: change.volume.clone(),
        bdi: change.bdi.clone(),
        from: definition.text(change.from),
        to: definition.text(change.to),
    };
    let (volume, bdi) = (change.volume.as_deref(), change.bdi.as_deref());
    let (from, to) = (&view.from, &view.to);
    tracing::info!(parameter = view.name, volume, bdi, from, to, "parameter set");
    json(&view)
}
