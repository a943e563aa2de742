//! `POST /v1/volumes/VOLUME/resize`: another size for a volume in use.

use axum::extract::State;
use axum::http::StatusCode;
use ebb_volume::{Resize, ResizeError};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::answer::{Answer, Refusal, json};
use super::routes::{Body, Named, On, parse, path};
use crate::params::unknown_volume;

/// The body: absent fields mean what [`Resize`] says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResizeBody {
    size: Option<u64>,
    #[serde(default)]
    shrink: bool,
}

/// A volume's size, as it goes over the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizeView {
    /// The volume.
    pub name: String,
    /// Bytes, before.
    pub from: u64,
    /// Bytes, now.
    pub size: u64,
}

pub(super) async fn resize(State(app): On, name: Named<String>, body: Body) -> Answer {
    let name = path(name)?;
    let body: ResizeBody = parse(body, "send {\"size\": BYTES}, or {} to look how large it is")?;
    let volumes = app.shared.server.volumes();
    let found = volumes.iter().find(|(volume, _)| **volume.name() == *name);
    let Some((volume, _)) = found else {
        let states = app.shared.engine.iter().flat_map(|engine| engine.states());
        if let Some(state) = states.into_iter().find(|state| state.name == name) {
            let why = state.failure.map(|failure| failure.reason);
            let message = format!("the volume is {}", state.phase.as_str());
            let remedy = why.as_deref().unwrap_or("try again in a moment");
            return Err(Refusal::new(StatusCode::CONFLICT, "not_served", &message, remedy));
        }
        let names: Vec<&str> = volumes.iter().map(|(volume, _)| &**volume.name()).collect();
        return Err(unknown_volume(&name, names.into_iter()).into());
    };
    let (volume, from) = (volume.clone(), volume.size());
    let order = Resize { to: body.size, shrink: body.shrink };
    let (sender, receiver) = oneshot::channel();
    if let Some(worker) = app.shared.workers.first() {
        worker.spawn(move |io| async move {
            let _ = sender.send(volume.resize(&io, order).await);
        });
    }
    match receiver.await {
        Ok(Ok(size)) => {
            if size != from {
                tracing::info!(volume = name, from, size, "resized");
            }
            json(&ResizeView { name, from, size })
        }
        Ok(Err(error)) => Err(refusal(&error)),
        Err(_) => Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "stopping",
            "no worker answers",
            "the daemon is being stopped: ask again when it runs",
        )),
    }
}

fn refusal(error: &ResizeError) -> Refusal {
    let (status, kind) = match error {
        ResizeError::Sectors { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_value"),
        ResizeError::Io(_) => (StatusCode::INTERNAL_SERVER_ERROR, "io"),
        _ => (StatusCode::CONFLICT, "not_resized"),
    };
    let text = error.to_string();
    let cause = std::error::Error::source(error).map(ToString::to_string);
    let (message, remedy) = text.split_once(": ").unwrap_or((&text, "see the daemon's log"));
    let message = cause.map_or_else(|| message.to_owned(), |cause| format!("{message} ({cause})"));
    Refusal::new(status, kind, message, remedy)
}
