//! `GET /v1/volumes/VOLUME/changes`: what was written to a volume since a snapshot, or between two.
//!
//! # Invariants
//! - A page has a bounded number of runs, and a bounded number of runs was looked at for it. A list that does not fit, says
//!   where the next page begins.
//! - A worker makes the page: it may have to load block maps. The pages that are being made at a time are bounded, and one
//!   ends early if that takes long.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use ebb_api::{ChangedBlocksView, ChangedRun, ErrorBody};
use ebb_config::{shorten, suggest};
use ebb_io::Io;
use ebb_volume::{BlockError, ErrorKind, Volume};
use serde::Deserialize;
use tokio::sync::oneshot;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, Named, On, path};
use crate::answer::{Answer, ApiRefusal, json};

/// Pages that may be made at a time.
pub(super) const LISTS_MOST: usize = 4;
/// Runs of a page, if the client does not say how many.
const RUNS: usize = 1000;
/// Calls of the volume for one page, each of which looks at some thousand runs at most.
const CALLS_MOST: usize = 256;
/// What offsets are rounded down to.
const BLOCK: u64 = 4096;
/// How long a page is made before it ends early: block maps may have to be loaded from a slow store.
const MAKE_WITHIN: Duration = Duration::from_secs(2);
/// How long the store may take: it may not respond.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(changed_blocks))
}

/// What is wanted.
#[derive(Clone, Debug, Deserialize)]
struct WantedChanges {
    since: String,
    until: Option<String>,
    offset: Option<u64>,
    limit: Option<usize>,
}

type ChangesQuery = Result<Query<WantedChanges>, axum::extract::rejection::QueryRejection>;

fn query(query: ChangesQuery) -> Result<WantedChanges, ApiRefusal> {
    let Query(wanted) = query.map_err(|error| {
        let message = shorten(&error.body_text());
        let remedy =
            "use `?since=SNAPSHOT`, with `&until=SNAPSHOT`, `&offset=BYTES` and `&limit=RUNS`";
        ApiRefusal::new(StatusCode::BAD_REQUEST, "malformed_query", message, remedy)
    })?;
    let most = ChangedBlocksView::RUNS_MOST;
    if wanted.limit.is_some_and(|limit| limit == 0 || limit > most) {
        let message = "a page cannot have this number of runs";
        let remedy = format!("`limit` is 1 to {most}");
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        return Err(ApiRefusal::new(status, "out_of_range", message, remedy));
    }
    Ok(wanted)
}

/// Refuses names that are no snapshots below a volume, or not in this order. `all` is from the newest snapshot on.
fn check_names(name: &str, all: &[String], wanted: &WantedChanges) -> Result<(), ApiRefusal> {
    let find = |snapshot: &String| {
        all.iter().position(|own| own == snapshot).ok_or_else(|| {
            let message =
                format!("there is no snapshot `{}` below volume `{name}`", shorten(snapshot));
            let remedy = match all.is_empty() {
                true => "it has none; `ebbd volume snapshot` makes one of an overlay".to_owned(),
                false => suggest(snapshot, all.iter().map(String::as_str), "the snapshots are"),
            };
            ApiRefusal::new(StatusCode::NOT_FOUND, "unknown_snapshot", message, remedy)
        })
    };
    let since = find(&wanted.since)?;
    let until = wanted.until.as_ref().map(find).transpose()?;
    if until.is_some_and(|until| until >= since) {
        let message = "`until` is not newer than `since`";
        let remedy = format!("the snapshots are, from the newest on: {}", all.join(", "));
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        return Err(ApiRefusal::new(status, "invalid_value", message, remedy));
    }
    Ok(())
}

/// What was written to an overlay since a snapshot, or between two.
#[utoipa::path(
    get,
    path = "/v1/volumes/{volume}/changes", tag = "volumes",
    params(
        ("volume" = String, Path, description = "its name"),
        ("since" = String, Query, description = "the snapshot from which on changes count"),
        ("until" = Option<String>, Query, description = "the later snapshot up to which they count; absent: now"),
        ("offset" = Option<u64>, Query, description = "where to begin, a multiple of 4096: `next_offset` of the page before"),
        ("limit" = Option<usize>, Query, description = "the most runs of the page, 1 to 10000; 1000 if it is absent"),
    ),
    responses(
        (status = 200, body = ChangedBlocksView),
        (status = 404, description = "there is no such volume or snapshot", body = ErrorBody),
        (status = 409, description = "it is not served", body = ErrorBody),
        (status = 422, description = "the snapshots are not in this order, or `limit` is out of range", body = ErrorBody),
        (status = 503, description = "too many lists are being made, or its store does not respond", body = ErrorBody),
    )
)]
async fn changed_blocks(State(app): On, name: Named<String>, wanted: ChangesQuery) -> Answer {
    let (name, wanted) = (path(name)?, query(wanted)?);
    let shared = &app.shared;
    crate::resize::check_served(shared, &name)?;
    let busy = |message: &str| {
        let remedy = "see whether its store responds, and try again";
        ApiRefusal::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message, remedy)
    };
    let served = shared.server.volumes().get(&name);
    let volume = served.ok_or_else(|| busy("the volume is being closed"))?.volume;
    check_names(&name, &volume.snapshots(), &wanted)?;
    let permit = app.change_lists.clone().try_acquire_owned();
    let permit = permit.map_err(|_| busy("too many lists of changed blocks are being made"))?;
    let worker = shared.workers.first().ok_or_else(|| busy("there is no worker"))?;
    let (mut sender, page) = oneshot::channel();
    worker.spawn(move |io| async move {
        // It ends when the reply is given up: a store that hangs would keep the place of another list.
        let page = async { Some(Box::pin(make_page(&io, &volume, wanted)).await) };
        let given_up = async {
            sender.closed().await;
            None
        };
        if let Some(page) = futures_lite::future::or(page, given_up).await {
            let _ = sender.send(page);
        }
        drop(permit);
    });
    match tokio::time::timeout(ANSWER_WITHIN, page).await {
        Ok(Ok(page)) => json(&page.map_err(|error| refusal(&error))?),
        _ => Err(busy("the block maps of the volume could not be loaded in time")),
    }
}

async fn make_page(
    io: &Io,
    volume: &Volume,
    wanted: WantedChanges,
) -> Result<ChangedBlocksView, BlockError> {
    let WantedChanges { since, until, offset, limit } = wanted;
    // What is said between two snapshots is the same at any size of the volume.
    let size = until.as_deref().and_then(|until| volume.snapshot_size(until));
    let (limit, size) = (limit.unwrap_or(RUNS), size.unwrap_or_else(|| volume.size()));
    let mut at = offset.map_or(0, |offset| offset - offset % BLOCK).min(size);
    let mut runs = Vec::<ChangedRun>::new();
    let began = ebb_mem::clock::now();
    for call in 0..CALLS_MOST {
        let passed = ebb_mem::clock::now().saturating_duration_since(began);
        // Each page has at least what one call found.
        if at >= size || runs.len() >= limit || call > 0 && passed > MAKE_WITHIN {
            break;
        }
        // Every other one has not changed, so that those that have fit the page.
        let most = 2 * (limit - runs.len());
        let names = (since.as_str(), until.as_deref());
        let found = Box::pin(volume.changes(io, names, (at, size - at), most)).await?;
        for (length, changed) in found {
            match runs.last_mut() {
                _ if !changed => {}
                Some(last) if last.offset + last.length == at => last.length += length,
                _ => runs.push(ChangedRun { offset: at, length }),
            }
            at += length;
        }
        io.yield_iteration().await;
    }
    Ok(ChangedBlocksView {
        volume: volume.name().to_string(),
        since,
        until,
        size_bytes: size,
        changed_bytes: runs.iter().map(|run| run.length).sum(),
        runs,
        next_offset: (at < size).then_some(at),
    })
}

fn refusal(error: &BlockError) -> ApiRefusal {
    let (status, kind, remedy) = match error.kind {
        ErrorKind::Invalid => {
            (StatusCode::CONFLICT, "changed", "its snapshots have changed meanwhile: try again")
        }
        ErrorKind::Closing => (StatusCode::CONFLICT, "not_served", "try again when it is served"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "io", "see whether its store responds"),
    };
    ApiRefusal::new(status, kind, error.full_text(), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(since: &str, until: Option<&str>) -> WantedChanges {
        let (since, until) = (since.to_owned(), until.map(str::to_owned));
        WantedChanges { since, until, offset: None, limit: None }
    }

    #[test]
    fn names_are_checked_and_the_snapshots_listed() {
        let all = ["weekly".to_owned(), "tuesday".to_owned(), "monday".to_owned()];
        let refused = |since: &str, until: Option<&str>| {
            let ApiRefusal(status, body) =
                check_names("disk", &all, &wanted(since, until)).unwrap_err();
            (status.as_u16(), body)
        };
        for (since, until) in
            [("monday", None), ("monday", Some("tuesday")), ("monday", Some("weekly"))]
        {
            assert!(check_names("disk", &all, &wanted(since, until)).is_ok());
        }
        for (since, until) in [("never", None), ("monday", Some("never"))] {
            let (status, body) = refused(since, until);
            assert_eq!((status, body.error.as_str()), (404, "unknown_snapshot"));
            assert_eq!(body.remedy, "the snapshots are: weekly, tuesday, monday");
        }
        assert_eq!(refused("mondy", None).1.remedy, "did you mean `monday`?");
        for (since, until) in [("monday", "monday"), ("weekly", "tuesday")] {
            let (status, body) = refused(since, Some(until));
            assert_eq!((status, body.error.as_str()), (422, "invalid_value"));
        }
        let none = check_names("disk", &[], &wanted("a", None)).unwrap_err();
        assert!(none.1.remedy.contains("it has none"), "{}", none.1.remedy);
    }
}
