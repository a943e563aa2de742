//! The limit on clients, in all and per volume.
//!
//! # Invariants
//! - There are never more clients than `max_clients`.
//! - Where several volumes are served, a volume's clients are at most [`PER_FREE`] times the number of connections that
//!   remain free: so the clients of one volume cannot use up all connections. A volume without a client needs one free
//!   connection only.

use std::sync::atomic::{AtomicUsize, Ordering};

use ebb_param::Parameter;

/// Clients that a volume may have per connection that remains free.
const PER_FREE: usize = 4;

/// Limits on clients, as they are when a client connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Connections at a time in the transmission phase; handshakes have their own limit. Where several volumes are
    /// served, the connections to one of them are at most four times the number of connections that remain free.
    pub max_clients: usize,
    /// The largest READ or WRITE, bytes: 4 KiB to 64 MiB.
    pub max_request: u32,
    /// Memory the requests of one connection may hold, bytes.
    pub connection_memory: usize,
}

impl Default for ServerLimits {
    fn default() -> Self {
        ServerLimits { max_clients: 256, max_request: 32 << 20, connection_memory: 64 << 20 }
    }
}

/// The limits on clients as parameters. Changes apply to new connections.
#[derive(Clone, Debug)]
pub struct ServerParameters {
    /// [`ServerLimits::max_clients`].
    pub max_clients: Parameter<usize>,
    /// [`ServerLimits::max_request`].
    pub max_request: Parameter<u32>,
    /// [`ServerLimits::connection_memory`].
    pub connection_memory: Parameter<usize>,
}

impl From<ServerLimits> for ServerParameters {
    fn from(limits: ServerLimits) -> Self {
        Self {
            max_clients: Parameter::new(limits.max_clients),
            max_request: Parameter::new(limits.max_request),
            connection_memory: Parameter::new(limits.connection_memory),
        }
    }
}

impl ServerParameters {
    /// The values in force.
    pub fn now(&self) -> ServerLimits {
        ServerLimits {
            max_clients: self.max_clients.get(),
            max_request: self.max_request.get(),
            connection_memory: self.connection_memory.get(),
        }
    }
}

/// The number of clients in the transmission phase: of all volumes, or of one.
#[derive(Debug, Default)]
pub(crate) struct ClientCount(AtomicUsize);

/// Counts one client, in all and of its volume, until it is dropped.
#[derive(Debug)]
pub(crate) struct CountedClient<'a>(&'a ClientCount, &'a ClientCount);

/// Why a client is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClientLimitError {
    #[error("max_clients ({0}) reached: raise it, or disconnect clients")]
    Full(usize),
    #[error(
        "volume {volume} has {held} of {most} connections, and the remaining {free} are kept for other \
         volumes: raise max_clients ({most})"
    )]
    Kept { volume: String, held: usize, free: usize, most: usize },
}

/// A request to admit one more client to the volume `name`; `alone` if no other volume is served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdmissionRequest<'a> {
    pub(crate) name: &'a str,
    pub(crate) own: &'a ClientCount,
    pub(crate) alone: bool,
    pub(crate) most: usize,
}

impl AdmissionRequest<'_> {
    /// Whether one more client is allowed beside `all` clients, of which `own` are the volume's.
    fn check(&self, all: usize, own: usize) -> Result<(), ClientLimitError> {
        let most = self.most;
        if all >= most {
            return Err(ClientLimitError::Full(most));
        }
        let free = most - all;
        if self.alone || own == 0 || own < (free - 1).saturating_mul(PER_FREE) {
            return Ok(());
        }
        Err(ClientLimitError::Kept { volume: self.name.to_owned(), held: own, free, most })
    }
}

impl ClientCount {
    /// The number of clients.
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether a client would be admitted now.
    pub(crate) fn check(&self, request: AdmissionRequest<'_>) -> Result<(), ClientLimitError> {
        request.check(self.count(), request.own.count())
    }

    /// Counts a client, if it is admitted.
    pub(crate) fn admit<'a>(
        &'a self,
        request: AdmissionRequest<'a>,
    ) -> Result<CountedClient<'a>, ClientLimitError> {
        let more = |all: usize| (all < request.most).then_some(all + 1);
        let all = self.0.try_update(Ordering::Relaxed, Ordering::Relaxed, more);
        let all = all.map_err(|_| ClientLimitError::Full(request.most))?;
        // Counted from here on: dropping the guard undoes both counts, also after an error below.
        let own = request.own.0.fetch_add(1, Ordering::Relaxed);
        let counted = CountedClient(self, request.own);
        request.check(all, own).map(|()| counted)
    }
}

impl Drop for CountedClient<'_> {
    fn drop(&mut self) {
        self.1.0.fetch_sub(1, Ordering::Relaxed);
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill<'a>(
        all: &'a ClientCount,
        own: &'a ClientCount,
        alone: bool,
        most: usize,
    ) -> Vec<CountedClient<'a>> {
        let request = AdmissionRequest { name: "disk", own, alone, most };
        std::iter::from_fn(|| {
            let checked = all.check(request);
            let admitted = all.admit(request);
            assert_eq!(checked.err().as_ref(), admitted.as_ref().err());
            admitted.ok()
        })
        .collect()
    }

    #[test]
    fn limits_say_which_parameter_to_raise() {
        let kept = ClientLimitError::Kept { volume: "a".into(), held: 1, free: 1, most: 2 };
        for error in [kept, ClientLimitError::Full(2)] {
            let text = error.to_string();
            assert!(text.contains("max_clients (2)") && text.contains("raise"), "{text}");
            assert!(!text.contains("(2) reached for volume"), "{text}");
        }
    }

    #[test]
    fn a_volume_keeps_connections_free_for_other_volumes_unless_it_is_the_only_one() {
        for (most, first, second) in [(256, 204, 41), (10, 8, 1), (2, 1, 1), (1, 1, 0)] {
            let (all, one, two) =
                (ClientCount::default(), ClientCount::default(), ClientCount::default());
            let held = fill(&all, &one, false, most);
            assert_eq!((held.len(), fill(&all, &two, false, most).len()), (first, second));
            assert_eq!((all.count(), two.count()), (first, 0), "refusals are not counted");
            drop(held);
            assert_eq!(fill(&all, &one, true, most).len(), most);
            assert_eq!((all.count(), one.count()), (0, 0));
        }
    }
}
