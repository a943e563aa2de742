//! How many clients there may be at a time, and how many of them one volume's.
//!
//! # Invariants
//! - No more clients get in than `max_clients`.
//! - Where several volumes are served, the clients of one get in as long as they are at most [`LEAVES`] times as many as
//!   the places they leave free: whatever one volume's clients do, those of another one find some. A volume without a
//!   client needs one free place, and no more.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A volume may have so many times as many clients as it leaves places free.
const LEAVES: usize = 4;

/// Clients that have logged in: of all volumes, or of one.
#[derive(Debug, Default)]
pub(crate) struct Seats(AtomicUsize);

/// A client that is counted, as one of all and as one of its volume.
#[derive(Debug)]
pub(crate) struct Seat<'a>(&'a Seats, &'a Seats);

/// Why a client does not get in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoSeat {
    #[error("max_clients ({0}) reached")]
    Full(usize),
    #[error(
        "max_clients ({most}) reached for volume {volume}: with {held} clients of it, the {free} places left are \
             kept for other volumes"
    )]
    Kept { volume: String, held: usize, free: usize, most: usize },
}

/// What clients ask for: a place of the volume `name`, which `alone` says is the only one served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) name: &'a str,
    pub(crate) own: &'a Seats,
    pub(crate) alone: bool,
    pub(crate) most: usize,
}

impl Wanted<'_> {
    /// Whether one more is too many where `all` and `own` are those there are.
    fn judge(&self, all: usize, own: usize) -> Result<(), NoSeat> {
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
    /// Clients at the moment.
    pub(crate) fn taken(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether a client would get in now.
    pub(crate) fn look(&self, wanted: Wanted<'_>) -> Result<(), NoSeat> {
        wanted.judge(self.taken(), wanted.own.taken())
    }

    /// Counts a client, if it may come in.
    pub(crate) fn take<'a>(&'a self, wanted: Wanted<'a>) -> Result<Seat<'a>, NoSeat> {
        let more = |all: usize| (all < wanted.most).then_some(all + 1);
        let all = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        let all = all.map_err(|_| NoSeat::Full(wanted.most))?;
        // From here on it is counted, and no more when the seat is dropped.
        let own = wanted.own.0.fetch_add(1, Ordering::Relaxed);
        let seat = Seat(self, wanted.own);
        wanted.judge(all, own).map(|()| seat)
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
            let looked = all.look(wanted);
            let taken = all.take(wanted);
            assert_eq!(looked.err().as_ref(), taken.as_ref().err());
            taken.ok()
        })
        .collect()
    }

    #[test]
    fn a_volume_leaves_places_to_the_next_one_and_takes_all_where_it_is_alone() {
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
