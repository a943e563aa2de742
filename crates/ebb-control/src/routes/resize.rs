//! `POST /v1/volumes/VOLUME/resize`: resizes a volume in use.

use std::io;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use ebb_api::{ResizeBody, ResizeView};
use ebb_config::params::unknown_volume;
use ebb_volume::{RESIZE_LIMIT, Resize, ResizeError, Resized, ServedVolume};
use tokio::sync::oneshot;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, Named, On, RequestBody, parse, path};
use crate::ControlContext;
use crate::answer::{Answer, ApiRefusal, json};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(resize_volume))
}

/// Resizes a volume in use.
#[utoipa::path(
    post, path = "/v1/volumes/{volume}/resize", tag = "volumes",
    params(("volume" = String, Path, description = "The volume")),
    request_body = ResizeBody, responses((status = 200, body = ResizeView))
)]
async fn resize_volume(State(app): On, name: Named<String>, body: RequestBody) -> Answer {
    let name = path(name)?;
    let body: ResizeBody =
        parse(body, "send {\"size\": BYTES}, or {} to adopt the size of its file")?;
    resize(&app.shared, name, body).await
}

/// Resizes the volume of that name.
async fn resize(shared: &ControlContext, name: String, body: ResizeBody) -> Answer {
    let Some(ServedVolume { volume, .. }) = shared.server.volumes().get(&name) else {
        if let Some(stat) = (shared.volumes)().into_iter().find(|stat| stat.name == name) {
            let why = stat.failure.map(|failure| failure.reason);
            let message = format!("the volume is {}", stat.state);
            let remedy = why.as_deref().unwrap_or("try again in a moment");
            return Err(ApiRefusal::new(StatusCode::CONFLICT, "not_served", &message, remedy));
        }
        let volumes = shared.server.volumes().list();
        return Err(unknown_volume(&name, volumes.iter().map(|volume| &**volume.name())).into());
    };
    let order = Resize { to: body.size, shrink: body.shrink };
    let (sender, receiver) = oneshot::channel();
    if let Some(worker) = shared.workers.first() {
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
        Err(_) => Err(ApiRefusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "stopping",
            "no worker responds",
            "the daemon is stopping: try again when it runs",
        )),
    }
}

fn refusal(error: &ResizeError) -> ApiRefusal {
    let (status, kind) = match error {
        ResizeError::Sectors { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_value"),
        ResizeError::Io(_) | ResizeError::Remote(_) => (StatusCode::INTERNAL_SERVER_ERROR, "io"),
        _ => (StatusCode::CONFLICT, "not_resized"),
    };
    let text = error.to_string();
    let (message, remedy) = text.split_once(": ").unwrap_or((&text, ""));
    let Some(cause) = std::error::Error::source(error) else {
        let remedy = if remedy.is_empty() { "its size is that of its store" } else { remedy };
        return ApiRefusal::new(status, kind, message, remedy);
    };
    let remedy = match error {
        ResizeError::Io(error) => for_the_file(error),
        ResizeError::Remote(_) => {
            "its requests go on with the former size: see the cause, then try again"
        }
        _ => "writes to the store fail: check the store, then try again",
    };
    ApiRefusal::new(status, kind, format!("{message} ({cause})"), remedy)
}

/// The remedy when the system cannot resize the file.
fn for_the_file(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::FileTooLarge => {
            "its file system, or LimitFSIZE= of the service, allows no file of this size: choose a smaller size, or \
             move the image"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on its file system, then try again"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "its file system, or an attribute of the file (lsattr), makes it read-only: change that, then try again"
        }
        _ => "check its file system, then try again",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(error: &ResizeError) -> String {
        let ApiRefusal(_, failure) = refusal(error);
        assert!(!failure.message.is_empty() && !failure.remedy.is_empty(), "{failure:?}");
        format!("{}; {}", failure.message, failure.remedy)
    }

    #[test]
    fn a_refused_size_is_reported_with_its_cause_and_a_remedy() {
        for (code, cause, remedy) in [
            (rustix::io::Errno::FBIG, "File too large", "smaller"),
            (rustix::io::Errno::NOSPC, "No space left", "free space"),
            (rustix::io::Errno::DQUOT, "quota", "free space"),
            (rustix::io::Errno::PERM, "not permitted", "lsattr"),
            (rustix::io::Errno::IO, "Input/output error", "file system"),
        ] {
            let said = refused(&ResizeError::Io(code.into()));
            assert!(said.contains(cause) && said.contains(remedy), "{said}");
            assert!(!said.contains("log"), "the error is not in the log: {said}");
        }
        let said = refused(&ResizeError::Unsupported("a null store keeps its size"));
        assert_eq!(said, "a null store keeps its size; its size is that of its store");
        let said = refused(&ResizeError::Device { size: 512 });
        assert!(said.starts_with("the device has 512 bytes; resize the device itself"), "{said}");
    }
}
