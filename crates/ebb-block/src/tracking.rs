//! What is known of a store's requests: a field of each store that can fail.

use ebb_io::Io;

use crate::error::BlockError;
#[cfg(doc)]
use crate::flush_state::LaterFlushes;
use crate::flush_state::{FlushState, Loss};
use crate::outage_counters::{InFlightRequest, StoreHealth};
use crate::zeroes::ZeroPermits;

/// The requests in flight, failures and failed syncs of a store. A store has one as a field, returns it from
/// [`BlockStore::tracking`](crate::BlockStore::tracking), and does nothing else with it.
#[derive(Debug, Default)]
pub struct Tracking {
    pub(crate) health: StoreHealth,
    pub(crate) syncs: FlushState,
    pub(crate) zero_permits: ZeroPermits,
}

impl Tracking {
    /// Counters from which outages are detected.
    pub fn health(&self) -> &StoreHealth {
        &self.health
    }

    /// The number of losses so far: failed syncs. See [`tracked::flush_rewritten`](crate::tracked::flush_rewritten).
    pub fn losses(&self) -> u64 {
        self.syncs.losses()
    }

    /// True while every flush fails because changes may be lost.
    pub fn is_lost(&self) -> bool {
        self.syncs.is_lost()
    }

    /// Returns true once after losses that only one flush reported: see [`LaterFlushes::Hide`].
    pub fn take_reports(&self) -> bool {
        self.syncs.take_reports()
    }

    /// The first loss that was not repaired by writing the data again.
    pub fn loss(&self) -> Option<Loss> {
        self.syncs.loss()
    }
}

/// A request in flight, counted if the store has counters.
pub(crate) struct CountedRequest<'a>(Option<InFlightRequest<'a>>);

impl<'a> CountedRequest<'a> {
    #[inline]
    pub(crate) fn begin(tracking: Option<&'a Tracking>, io: &Io) -> CountedRequest<'a> {
        CountedRequest(tracking.map(|tracking| tracking.health.begin(io.slot())))
    }

    /// Ends the request; counts a failure.
    pub(crate) fn end<T>(self, result: Result<T, BlockError>) -> Result<T, BlockError> {
        if let (Some(request), Err(error)) = (&self.0, &result) {
            request.health.note(error);
        }
        result
    }
}
