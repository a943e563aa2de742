//! The loop that serves one ring: it consumes requests in batches until the ring is empty, polls it while that is
//! worthwhile ([`PollSource`]), asks the guest for an event, and waits for it.
//!
//! # Invariants
//! - After the guest was asked for an event the ring is checked once more, so that no request waits without one.
//! - An iteration of the worker serves a ring for a time slice at most ([`TimeSlice`]).
//! - A guest that sends events without requests is served more slowly, and with no more than one wakeup per iteration.
//! - A ring that is broken is not served any more; the loop ends.

use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use ebb_io::{Io, PollSource};

use crate::time_slice::TimeSlice;

/// Events in a row without a request after which a guest's events are awaited more slowly.
const SPURIOUS: u32 = 16;
/// By how much more slowly; and how long a guest is delayed whose requests are mostly refused.
pub const THROTTLE: Duration = Duration::from_millis(1);

/// What [`GuestRing::take_batch`] has done.
#[derive(Clone, Copy, Debug)]
pub struct Consumed<A> {
    /// Requests consumed.
    pub count: u32,
    /// The ring is to yield to other work.
    pub make_way: bool,
    /// What has to be done before further requests are consumed, such as a barrier.
    pub after: A,
}

/// A ring in shared memory, as its protocol defines it.
pub trait GuestRing: 'static {
    /// Why a ring cannot be served any more.
    type Broken;
    /// See [`Consumed::after`].
    type After;

    /// Requests consumed before the completed ones are published and other work of the ring is done. Fewer let the guest work
    /// on the first completions while the rest are carried out, and cost more notifications.
    const BATCH: u32;

    /// Its worker.
    fn io(&self) -> &Io;

    /// True from when no more requests are to be consumed.
    fn is_stopping(&self) -> bool;

    /// Requests that the guest has sent and that were not consumed, by the guest's index.
    ///
    /// # Errors
    /// If the index is invalid.
    fn waiting(&self) -> Result<u32, Self::Broken>;

    /// Requests an event for the next request; true if there is a request already.
    ///
    /// # Errors
    /// As [`GuestRing::waiting`].
    fn arm(&self) -> Result<bool, Self::Broken>;

    /// Waits until the guest sends an event, or the ring is to stop.
    ///
    /// # Errors
    /// If no more events can be received.
    fn event(&self) -> impl Future<Output = Result<(), Self::Broken>>;

    /// Whether there are requests or the ring is broken. Called between other tasks while the empty ring is polled.
    fn has_requests(&self) -> bool;

    /// Notes that polling found requests, so that the guest had to send no event.
    fn note_polled(&self);

    /// Consumes at most `most` requests, which the guest has sent, and begins or completes each; ends early when
    /// [`TimeSlice::spend`] says so. A count of 0: there is no room for another request.
    fn take_batch(self: &Rc<Self>, most: u32, slice: &mut TimeSlice) -> Consumed<Self::After>;

    /// Publishes the completed requests.
    fn publish(&self);

    /// Does what the batch left to be done.
    fn after_batch(self: &Rc<Self>, after: Self::After) -> impl Future<Output = ()>;
}

/// Serves a ring until it is stopped.
///
/// # Errors
/// When the ring cannot be served any more. Requests that were begun may still be in flight then.
pub async fn serve_ring<R: GuestRing>(ring: &Rc<R>) -> Result<(), R::Broken> {
    let polled = ring.clone();
    // A stop ends a poll as well.
    let check = move || polled.is_stopping() || polled.has_requests();
    let source = ring.io().poll_source_in_memory(check);
    let mut spurious = 0;
    while !ring.is_stopping() {
        match take_requests(ring, &source).await? {
            0 => spurious += 1,
            _ => spurious = 0,
        }
        if spurious > SPURIOUS {
            ring.io().sleep(THROTTLE).await;
        }
        ring.event().await?;
    }
    Ok(())
}

/// Consumes requests until the ring is empty and the guest was asked for an event.
async fn take_requests<R: GuestRing>(ring: &Rc<R>, source: &PollSource) -> Result<u32, R::Broken> {
    let (mut taken, mut slice) = (0u32, TimeSlice::default());
    while !ring.is_stopping() {
        let waiting = ring.waiting()?;
        if waiting == 0 {
            if poll(&**ring, source, &mut slice).await || ring.arm()? {
                continue;
            }
            break;
        }
        let Consumed { count, make_way, after } =
            ring.take_batch(waiting.min(R::BATCH), &mut slice);
        source.note_requests(count);
        taken = taken.saturating_add(count);
        ring.publish();
        ring.after_batch(after).await;
        if make_way || count == 0 {
            slice.renew();
            ring.io().yield_iteration().await;
        }
    }
    Ok(taken)
}

/// Polls the empty ring while that is worthwhile, without asking the guest for an event; true if requests were found.
async fn poll<R: GuestRing>(ring: &R, source: &PollSource, slice: &mut TimeSlice) -> bool {
    if ring.is_stopping() || !source.poll().await {
        return false;
    }
    ring.note_polled();
    if !source.is_light() {
        // Its time slice has ended: other tasks come first.
        slice.renew();
        ring.io().yield_iteration().await;
    }
    true
}

#[cfg(test)]
mod tests;
