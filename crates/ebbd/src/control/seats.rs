//! The page's connections: how many there are, of which addresses, and which one makes way when all are taken.
//!
//! Whoever reaches the port can hold connections open. So nobody has them for good: when all are taken, none is kept
//! for a further request, and a newcomer takes the place of one that waits for a request. An address that has more
//! than its share loses one of its own first, so that one peer keeps no other from the figures.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_volume::Stop;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What connections of one peer have in common: an address, or a network where a host has many.
pub(super) type Address = u128;

/// That of a peer.
pub(super) fn address(ip: IpAddr) -> Address {
    match ip.to_canonical() {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => (1 << 64) | (ip.to_bits() >> 64),
    }
}

/// All connections of the page.
#[derive(Debug)]
pub(super) struct Seats {
    /// A permit for each; that of one which makes way comes back when it is closed.
    room: Arc<Semaphore>,
    /// How many an address may keep when others want in.
    share: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// The oldest first.
    taken: BTreeMap<u64, Taken>,
}

#[derive(Debug)]
struct Taken {
    address: Address,
    /// An answer is being made.
    busy: bool,
    leave: Arc<Stop>,
}

/// A connection that is counted.
#[derive(Debug)]
pub(super) struct Seat {
    seats: Arc<Seats>,
    number: u64,
    leave: Arc<Stop>,
    _permit: OwnedSemaphorePermit,
}

impl Seats {
    /// At most `most` connections.
    pub(super) fn new(most: usize) -> Arc<Seats> {
        let (room, share) = (Arc::new(Semaphore::new(most)), (most / 4).max(1));
        Arc::new(Seats { room, share, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all are taken.
    pub(super) fn is_full(&self) -> bool {
        self.room.available_permits() == 0
    }

    /// Counts a connection. If all are taken, another one is told to leave, and its end is waited for; if none can be
    /// told, the next end of any.
    pub(super) async fn enter(self: &Arc<Self>, address: Address) -> Option<Seat> {
        if self.is_full() {
            self.make_way(address);
        }
        // It is never closed.
        let permit = self.room.clone().acquire_owned().await.ok()?;
        let leave = Arc::<Stop>::default();
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.taken.insert(number, Taken { address, busy: false, leave: leave.clone() });
        drop(state);
        Some(Seat { seats: self.clone(), number, leave, _permit: permit })
    }

    fn make_way(&self, newcomer: Address) {
        let mut state = self.state();
        if let Some(number) = state.who_leaves(newcomer, self.share)
            && let Some(taken) = state.taken.remove(&number)
        {
            taken.leave.stop();
        }
    }
}

impl State {
    /// Of the address that has the most, if that is more than its share with the newcomer, else of all: the oldest
    /// that waits for a request. One whose answer is being made leaves only for its own address's excess.
    fn who_leaves(&self, newcomer: Address, share: usize) -> Option<u64> {
        let mut counts = BTreeMap::from([(newcomer, 1_usize)]);
        for taken in self.taken.values() {
            *counts.entry(taken.address).or_default() += 1;
        }
        let (most, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        let idle = |of: Option<Address>| {
            let mut all = self.taken.iter();
            let fits =
                |taken: &Taken| !taken.busy && of.is_none_or(|address| taken.address == address);
            all.find(|(_, taken)| fits(taken)).map(|(number, _)| *number)
        };
        if count <= share {
            return idle(None);
        }
        idle(Some(most)).or_else(|| {
            let mut all = self.taken.iter();
            all.find(|(_, taken)| taken.address == most).map(|(number, _)| *number)
        })
    }
}

impl Seat {
    /// Sent when it has to make way.
    pub(super) fn leave(&self) -> &Stop {
        &self.leave
    }

    /// Whether all connections are taken.
    pub(super) fn is_full(&self) -> bool {
        self.seats.is_full()
    }

    /// Whether an answer is being made. One that its client does not take counts as no answer.
    pub(super) fn set_busy(&self, busy: bool) {
        if let Some(taken) = self.seats.state().taken.get_mut(&self.number) {
            taken.busy = busy;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.state().taken.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(seats: &Arc<Seats>, address: Address) -> Option<Seat> {
        futures_lite::future::block_on(futures_lite::future::poll_once(seats.enter(address)))?
    }

    fn told(seats: &[Seat]) -> Vec<usize> {
        seats
            .iter()
            .enumerate()
            .filter(|(_, seat)| seat.leave().is_stopped())
            .map(|(i, _)| i)
            .collect()
    }

    #[test]
    fn the_oldest_idle_connection_of_the_address_with_the_most_makes_way() {
        let seats = Seats::new(8);
        let mut taken: Vec<_> =
            [1, 2, 2, 2, 2, 3, 2, 2].map(|of| enter(&seats, of).unwrap()).into();
        assert!(seats.is_full() && told(&taken).is_empty());
        taken[1].set_busy(true);
        // It waits for the end of the one that is told.
        assert!(enter(&seats, 4).is_none());
        assert_eq!(told(&taken), [2]);
        drop(taken.remove(2));
        taken.push(enter(&seats, 4).unwrap());
        // Also if it comes from there itself, and if all of those have answers to come.
        taken.iter().for_each(|seat| seat.set_busy(true));
        assert!(enter(&seats, 2).is_none());
        assert_eq!(told(&taken), [1]);
    }

    #[test]
    fn where_none_has_more_than_its_share_only_an_idle_one_makes_way() {
        let seats = Seats::new(8);
        let taken: Vec<_> = (0..8).map(|of| enter(&seats, of / 2).unwrap()).collect();
        taken.iter().for_each(|seat| seat.set_busy(true));
        assert!(enter(&seats, 9).is_none());
        assert!(told(&taken).is_empty());
        taken[3].set_busy(false);
        assert!(enter(&seats, 9).is_none());
        assert_eq!(told(&taken), [3]);
    }

    #[test]
    fn a_host_is_known_by_its_address_or_its_network() {
        let of = |text: &str| address(text.parse().unwrap());
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:3"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
