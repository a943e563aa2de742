//! `GET /v1/events`: the last events, as a list, or as a stream of server-sent events (the HTML standard's
//! `text/event-stream`).
//!
//! # Invariants
//! - A stream ends, at an event, before its connection's time is over; a client then connects again with the header
//!   `Last-Event-ID` and misses nothing that is still kept.
//! - The number of streams is limited, and what a stream has waiting: one piece of at most [`PIECE`] events. A client that
//!   does not read is told later, and its connection ends with its time.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use ebb_api::EventView;
use ebb_config::shorten;
use futures_lite::Stream;
use futures_lite::stream::unfold;
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::Instant;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{App, On};
use crate::access::Arrival;
use crate::answer::{Answer, ApiRefusal, json};
use crate::events::EventLog;
use crate::shares::CallerShare;

/// Streams at a time: half of the connections of a socket.
pub(super) const STREAMS_MOST: usize = 16;
/// The most events in one piece of a stream, and in a list without `limit`.
const PIECE: usize = 100;
/// A comment is sent after so long without an event, so that a client can tell a dead connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// A stream ends so long before its connection.
const MARGIN: Duration = Duration::from_secs(5);
/// How long a client waits before it connects again, milliseconds.
const RETRY: &str = "retry: 1000\n\n";

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(events))
}

#[derive(Debug, Deserialize)]
struct EventQuery {
    since: Option<u64>,
    limit: Option<usize>,
}

/// The last events, or those after one. With `Accept: text/event-stream` a stream, which ends after about a minute.
#[utoipa::path(
    get, path = "/v1/events", tag = "health",
    params(
        ("since" = Option<u64>, Query, description = "Only events after the one with this number"),
        ("limit" = Option<u64>, Query, description = "At most so many events; 100 without it, 1,000 at most")
    ),
    responses((status = 200, body = Vec<EventView>))
)]
async fn events(
    State(app): On,
    arrival: Option<Extension<Arrival>>,
    headers: HeaderMap,
    query: Result<Query<EventQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query.map_err(|error| {
        let (status, message) = (StatusCode::BAD_REQUEST, shorten(&error.body_text()));
        ApiRefusal::new(status, "malformed_query", message, "write ?since=NUMBER&limit=NUMBER")
    })?;
    let log = &app.shared.events;
    let accepted = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    if !accepted.is_some_and(|accept| accept.contains("text/event-stream")) {
        let limit = query.limit.unwrap_or(PIECE);
        let found = match query.since {
            Some(since) => log.after(since, limit),
            None => log.latest(limit),
        };
        return json(&found.iter().map(|event| &**event).collect::<Vec<_>>());
    }
    let caller = arrival.as_ref().map(|Extension(arrival)| arrival.caller.clone());
    let Some(permit) = app.streams.enter(&caller.unwrap_or_default()) else {
        let message = "the streams of events that this caller may open are open";
        let remedy = "close one, or ask for the list without `Accept: text/event-stream`";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        return Err(ApiRefusal::new(status, "too_many", message, remedy));
    };
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.trim().parse().ok());
    let ends = arrival.map_or_else(Instant::now, |Extension(arrival)| arrival.ends) - MARGIN;
    let stream = EventStream::new(log.clone(), last.or(query.since), ends, permit);
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CONNECTION, "close")];
    Ok((headers, Body::from_stream(stream.pieces())).into_response())
}

/// A stream of events.
struct EventStream {
    log: EventLog,
    news: watch::Receiver<u64>,
    /// The number of the last event that was sent.
    sent: u64,
    begun: bool,
    ends: Instant,
    _permit: CallerShare,
}

impl EventStream {
    /// Without `since` it begins with the next event.
    fn new(log: EventLog, since: Option<u64>, ends: Instant, permit: CallerShare) -> Self {
        let news = log.watch();
        let latest = *news.borrow();
        // A number from before a restart of the daemon: its events are over.
        let sent = since.map_or(latest, |since| if since > latest { 0 } else { since });
        Self { log, news, sent, begun: false, ends, _permit: permit }
    }

    fn pieces(self) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> {
        unfold(self, |mut stream| async {
            let piece = stream.next_piece().await?;
            Some((Ok(piece), stream))
        })
    }

    /// What is sent next; `None` at the end.
    async fn next_piece(&mut self) -> Option<Bytes> {
        if !std::mem::replace(&mut self.begun, true) {
            return Some(Bytes::from_static(RETRY.as_bytes()));
        }
        loop {
            if Instant::now() >= self.ends {
                return None;
            }
            // Before the list is read, so that an event after that is not missed.
            self.news.mark_unchanged();
            let events = self.log.after(self.sent, PIECE);
            if let Some(last) = events.last() {
                self.sent = last.id;
                return Some(events.iter().map(|event| text(event)).collect::<String>().into());
            }
            let pause = self.ends.min(Instant::now() + KEEP_ALIVE);
            match tokio::time::timeout_at(pause, self.news.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return None,
                Err(_) if pause < self.ends => return Some(Bytes::from_static(b":\n\n")),
                Err(_) => return None,
            }
        }
    }
}

/// An event as text. JSON has no line breaks outside of strings, where they are escaped.
fn text(event: &EventView) -> String {
    let data = serde_json::to_string(event).unwrap_or_default();
    format!("id: {}\ndata: {data}\n\n", event.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Caller;
    use crate::shares::CallerShares;

    fn stream(log: &EventLog, since: Option<u64>, seconds: u64) -> EventStream {
        let permit = CallerShares::new(1).enter(&Caller::default()).unwrap();
        let ends = Instant::now() + Duration::from_secs(seconds);
        EventStream::new(log.clone(), since, ends, permit)
    }

    fn add(log: &EventLog, message: &str) {
        log.add(EventView { message: message.to_owned(), ..EventView::default() });
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_has_every_event_once_and_ends_by_itself() {
        let log = EventLog::default();
        add(&log, "before");
        let mut stream = stream(&log, None, 40);
        assert_eq!(stream.next_piece().await.unwrap(), RETRY);
        let other = log.clone();
        let (piece, ()) = tokio::join!(stream.next_piece(), async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            add(&other, "line\nbreak");
        });
        let piece = String::from_utf8(piece.unwrap().to_vec()).unwrap();
        assert!(piece.starts_with("id: 2\ndata: {\"id\":2,"), "{piece}");
        assert!(piece.contains("line\\nbreak") && piece.ends_with("}\n\n"), "{piece}");
        assert_eq!(piece.lines().count(), 3, "{piece}");
        // Comments at 18 and 33 s, and the end at 40 s.
        assert_eq!(stream.next_piece().await.unwrap(), ":\n\n");
        assert_eq!(stream.next_piece().await.unwrap(), ":\n\n");
        assert_eq!(stream.next_piece().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_continues_after_the_last_event_that_was_seen() {
        let log = EventLog::default();
        (0..250).for_each(|_| add(&log, "x"));
        for (since, first) in [(7, "id: 8\n"), (0, "id: 1\n"), (251, "id: 1\n")] {
            let mut stream = stream(&log, Some(since), 40);
            stream.next_piece().await.unwrap();
            let piece = stream.next_piece().await.unwrap();
            assert!(piece.starts_with(first.as_bytes()), "{since}");
            let text = String::from_utf8(piece.to_vec()).unwrap();
            assert_eq!(text.matches("data: ").count(), PIECE, "a piece is bounded");
        }
    }
}
