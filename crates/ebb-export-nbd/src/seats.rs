//! The limit on clients, in all and per volume.
//!
//! # Invariants
//! - There are never more clients than `max_clients`.
//! - Where several volumes are served, a volume's clients are at most [`LEAVES`] times the number of connections that
//!   remain free: so the clients of one volume cannot use up all connections. A volume without a client needs one free
//!   connection only.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Clients that a volume may have per connection that remains free.
const LEAVES: usize = 4;

/// The number of clients in the transmission phase: of all volumes, or of one.
#[derive(Debug, Default)]
pub(crate) struct Seats(AtomicUsize);

/// Counts one client, in all and of its volume, until it is dropped.
#[derive(Debug)]
pub(crate) struct Seat<'a>(&'a Seats, &'a Seats);

/// Why a client is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoSeat {
    #[error("max_clients ({0}) reached")]
    Full(usize),
    #[error(
        "max_clients ({most}) reached for volume {volume}: it has {held} clients, and the remaining {free} connections \
             are kept for other volumes"
    )]
    Kept { volume: String, held: usize, free: usize, most: usize },
}

/// A request to admit one more client to the volume `name`; `alone` if no other volume is served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) name: &'a str,
    pub(crate) own: &'a Seats,
    pub(crate) alone: bool,
    pub(crate) most: usize,
}

impl Wanted<'_> {
    /// Whether one more client is allowed beside `all` clients, of which `own` are the volume's.
    fn check(&self, all: usize, own: usize) -> Result<(), NoSeat> {
        let most = self.most;
        if all >= most {
            return Err(NoSeat::Full(most));
        }
        let free = most - all;
        if self.alone || own == 0 || own < (free - 1).saturating_mul(LEAVES) {
            return Ok(());
        }
        Err(NoSeat::Kept { volume: self.name.to_owned(), held: own, free, most })
    }
}

impl Seats {
    /// The number of clients.
    pub(crate) fn taken(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether a client would be admitted now.
    pub(crate) fn check(&self, wanted: Wanted<'_>) -> Result<(), NoSeat> {
        wanted.check(self.taken(), wanted.own.taken())
    }

    /// Counts a client, if it is admitted.
    pub(crate) fn admit<'a>(&'a self, wanted: Wanted<'a>) -> Result<Seat<'a>, NoSeat> {
        let more = |all: usize| (all < wanted.most).then_some(all + 1);
        let all = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        let all = all.map_err(|_| NoSeat::Full(wanted.most))?;
        // Counted from here on: dropping the guard undoes both counts, also after an error below.
        let own = wanted.own.0.fetch_add(1, Ordering::Relaxed);
        let seat = Seat(self, wanted.own);
        wanted.check(all, own).map(|()| seat)
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.1.0.fetch_sub(1, Ordering::Relaxed);
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill<'a>(all: &'a Seats, own: &'a Seats, alone: bool, most: usize) -> Vec<Seat<'a>> {
        let wanted = Wanted { name: "disk", own, alone, most };
        std::iter::from_fn(|| {
            let checked = all.check(wanted);
            let admitted = all.admit(wanted);
            assert_eq!(checked.err().as_ref(), admitted.as_ref().err());
            admitted.ok()
        })
        .collect()
    }

    #[test]
    fn a_volume_keeps_connections_free_for_other_volumes_unless_it_is_the_only_one() {
        for (most, first, second) in [(256, 204, 41), (10, 8, 1), (2, 1, 1), (1, 1, 0)] {
            let (all, one, two) = (Seats::default(), Seats::default(), Seats::default());
            let held = fill(&all, &one, false, most);
            assert_eq!((held.len(), fill(&all, &two, false, most).len()), (first, second));
            assert_eq!((all.taken(), two.taken()), (first, 0), "refusals are not counted");
            drop(held);
            assert_eq!(fill(&all, &one, true, most).len(), most);
            assert_eq!((all.taken(), one.taken()), (0, 0));
        }
    }
}
