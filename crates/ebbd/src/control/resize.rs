//! `POST /v1/volumes/VOLUME/resize`: another size for a volume in use.

use std::io;

use axum::extract::State;
use axum::http::StatusCode;
use ebb_volume::{RESIZE_LIMIT, Resize, ResizeError, Resized};
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
    let volume = volume.clone();
    let order = Resize { to: body.size, shrink: body.shrink };
    let (sender, receiver) = oneshot::channel();
    if let Some(worker) = app.shared.workers.first() {
        worker.spawn(move |io| async move {
            let _ = sender.send(volume.resize_within(&io, order, RESIZE_LIMIT).await);
        });
    }
    match receiver.await {
        Ok(Ok(Resized { from, to: size })) => {
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
    let (message, remedy) = text.split_once(": ").unwrap_or((&text, ""));
    let Some(cause) = std::error::Error::source(error) else {
        let remedy = if remedy.is_empty() { "its size is that of its store" } else { remedy };
        return Refusal::new(status, kind, message, remedy);
    };
    let remedy = match error {
        ResizeError::Io(error) => for_the_file(error),
        _ => "the store does not take what is written: see to it, then ask again",
    };
    Refusal::new(status, kind, format!("{message} ({cause})"), remedy)
}

/// What to do when the system resizes no file.
fn for_the_file(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::FileTooLarge => {
            "its file system, or LimitFSIZE= of the service, allows no file of this size: ask for a smaller one, or \
             move the image"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room on its file system, then ask again"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "its file system, or a flag of the file (lsattr), keeps the daemon from writing to it: change that, then \
             ask again"
        }
        _ => "see to its file system, then ask again",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(error: &ResizeError) -> String {
        let Refusal(_, failure) = refusal(error);
        assert!(!failure.message.is_empty() && !failure.remedy.is_empty(), "{failure:?}");
        format!("{}; {}", failure.message, failure.remedy)
    }

    #[test]
    fn a_size_that_is_refused_is_refused_with_the_cause_and_a_remedy() {
        for (code, cause, remedy) in [
            (rustix::io::Errno::FBIG, "File too large", "smaller"),
            (rustix::io::Errno::NOSPC, "No space left", "make room"),
            (rustix::io::Errno::DQUOT, "quota", "make room"),
            (rustix::io::Errno::PERM, "not permitted", "lsattr"),
            (rustix::io::Errno::IO, "Input/output error", "file system"),
        ] {
            let said = refused(&ResizeError::Io(code.into()));
            assert!(said.contains(cause) && said.contains(remedy), "{said}");
            assert!(!said.contains("log"), "nothing of it is logged: {said}");
        }
        let said = refused(&ResizeError::Unsupported("a null store keeps its size"));
        assert_eq!(said, "a null store keeps its size; its size is that of its store");
        let said = refused(&ResizeError::Device { size: 512 });
        assert!(said.starts_with("the device has 512 bytes; resize the device itself"), "{said}");
    }
}
