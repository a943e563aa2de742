//! The page's connections: their number, their peers, and which one is closed for a new one when all are in use.
//!
//! Any peer that reaches the port can hold connections open. Therefore, when all are in use, a connection is closed after
//! its reply, and a new connection replaces one that waits for a request. A peer with more than its share loses one of
//! its own first, so that it cannot keep other peers from the page.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_volume::Stop;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The identity of a peer: its IPv4 address, or the /64 network of its IPv6 address.
pub(super) type PeerId = u128;

/// The identity of the peer with this address.
pub(super) fn address(ip: IpAddr) -> PeerId {
    match ip.to_canonical() {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => (1 << 64) | (ip.to_bits() >> 64),
    }
}

/// All connections of the page.
#[derive(Debug)]
pub(super) struct PageConnections {
    /// A permit for each connection, returned when it is closed.
    room: Arc<Semaphore>,
    /// How many connections a peer may keep when other peers want to connect.
    share: usize,
    state: Mutex<ConnectionTable>,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    next: u64,
    /// The oldest first.
    entries: BTreeMap<u64, ConnectionEntry>,
}

#[derive(Debug)]
struct ConnectionEntry {
    address: PeerId,
    /// A request is being served.
    busy: bool,
    close: Arc<Stop>,
}

/// A connection that is counted.
#[derive(Debug)]
pub(super) struct PageConnection {
    connections: Arc<PageConnections>,
    number: u64,
    close: Arc<Stop>,
    _permit: OwnedSemaphorePermit,
}

impl PageConnections {
    /// At most `most` connections.
    pub(super) fn new(most: usize) -> Arc<PageConnections> {
        let (room, share) = (Arc::new(Semaphore::new(most)), (most / 4).max(1));
        Arc::new(PageConnections { room, share, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, ConnectionTable> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all connections are in use.
    pub(super) fn is_full(&self) -> bool {
        self.room.available_permits() == 0
    }

    /// Counts a connection. If all are in use, it makes another one close and waits for that; if none can be closed, it
    /// waits for the end of any.
    pub(super) async fn enter(self: &Arc<Self>, address: PeerId) -> Option<PageConnection> {
        if self.is_full() {
            self.close_one_for(address);
        }
        // The semaphore is never closed.
        let permit = self.room.clone().acquire_owned().await.ok()?;
        let close = Arc::<Stop>::default();
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state
            .entries
            .insert(number, ConnectionEntry { address, busy: false, close: close.clone() });
        drop(state);
        Some(PageConnection { connections: self.clone(), number, close, _permit: permit })
    }

    fn close_one_for(&self, newcomer: PeerId) {
        let mut state = self.state();
        if let Some(number) = state.connection_to_close(newcomer, self.share)
            && let Some(entry) = state.entries.remove(&number)
        {
            entry.close.stop();
        }
    }
}

impl ConnectionTable {
    /// The connection to close: the oldest one that waits for a request, of the peer with the most connections if that
    /// has more than its share including the new one, else of all peers. A connection with a request in service is
    /// closed only if its own peer has more than its share.
    fn connection_to_close(&self, newcomer: PeerId, share: usize) -> Option<u64> {
        let mut counts = BTreeMap::from([(newcomer, 1_usize)]);
        for entry in self.entries.values() {
            *counts.entry(entry.address).or_default() += 1;
        }
        let (most, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        let idle = |of: Option<PeerId>| {
            let mut all = self.entries.iter();
            let fits = |entry: &ConnectionEntry| {
                !entry.busy && of.is_none_or(|address| entry.address == address)
            };
            all.find(|(_, entry)| fits(entry)).map(|(number, _)| *number)
        };
        if count <= share {
            return idle(None);
        }
        idle(Some(most)).or_else(|| {
            let mut all = self.entries.iter();
            all.find(|(_, entry)| entry.address == most).map(|(number, _)| *number)
        })
    }
}

impl PageConnection {
    /// Set when it has to close.
    pub(super) fn close(&self) -> &Stop {
        &self.close
    }

    /// Whether all connections are in use.
    pub(super) fn is_full(&self) -> bool {
        self.connections.is_full()
    }

    /// Notes whether a request is being served. Sending the reply to a slow client does not count.
    pub(super) fn set_busy(&self, busy: bool) {
        if let Some(entry) = self.connections.state().entries.get_mut(&self.number) {
            entry.busy = busy;
        }
    }
}

impl Drop for PageConnection {
    fn drop(&mut self) {
        self.connections.state().entries.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(connections: &Arc<PageConnections>, address: PeerId) -> Option<PageConnection> {
        futures_lite::future::block_on(futures_lite::future::poll_once(connections.enter(address)))?
    }

    fn closing(connections: &[PageConnection]) -> Vec<usize> {
        connections
            .iter()
            .enumerate()
            .filter(|(_, connection)| connection.close().is_stopped())
            .map(|(i, _)| i)
            .collect()
    }

    #[test]
    fn the_oldest_idle_connection_of_the_peer_with_the_most_is_closed() {
        let connections = PageConnections::new(8);
        let mut open: Vec<_> =
            [1, 2, 2, 2, 2, 3, 2, 2].map(|of| enter(&connections, of).unwrap()).into();
        assert!(connections.is_full() && closing(&open).is_empty());
        open[1].set_busy(true);
        // It waits until the closed connection has ended.
        assert!(enter(&connections, 4).is_none());
        assert_eq!(closing(&open), [2]);
        drop(open.remove(2));
        open.push(enter(&connections, 4).unwrap());
        // Also if the new connection is from the same peer, and if all of its connections are busy.
        open.iter().for_each(|connection| connection.set_busy(true));
        assert!(enter(&connections, 2).is_none());
        assert_eq!(closing(&open), [1]);
    }

    #[test]
    fn if_no_peer_has_more_than_its_share_only_an_idle_connection_is_closed() {
        let connections = PageConnections::new(8);
        let open: Vec<_> = (0..8).map(|of| enter(&connections, of / 2).unwrap()).collect();
        open.iter().for_each(|connection| connection.set_busy(true));
        assert!(enter(&connections, 9).is_none());
        assert!(closing(&open).is_empty());
        open[3].set_busy(false);
        assert!(enter(&connections, 9).is_none());
        assert_eq!(closing(&open), [3]);
    }

    #[test]
    fn a_peer_is_identified_by_its_ipv4_address_or_its_ipv6_network() {
        let of = |text: &str| address(text.parse().unwrap());
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:3"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
