//! Connections that are still in the handshake: their peers, their limit, and which is closed when it is exceeded.
//!
//! They do not count towards `max_clients`, because any peer that can connect can open them. A new connection is
//! accepted; if there are too many, or the process has no descriptor for a new one, an older handshake is evicted: from
//! the address with the most handshakes two are drawn at random, and the less advanced of the two is closed. If the
//! oldest were evicted, a flood would evict every legitimate handshake from its address that takes longer than the
//! flood needs to reach the limit. If the least advanced of all were evicted, a few advanced handshakes that do not
//! continue would cause each new connection to be evicted by the next.
//!
//! At the limit of descriptors that clients leave to remote volumes there may be room for one or two handshakes only.
//! There a new connection counts as one of its address. If another address has as many, that one loses a handshake,
//! unless the handshake is younger than [`RECENT`] and more recent connections came from the address of the new one: then
//! this address loses another handshake, or the new connection is refused.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_volume::Stop;

/// Handshakes at a time, of all peers and of one address.
const MOST: usize = 256;
const MOST_OF_ONE: usize = 128;
/// How long a connection is recent, and of how many addresses connections are counted.
const RECENT: Duration = Duration::from_secs(1);
const RECENT_ADDRESSES: usize = 1024;

/// The other end of a connection, for the log and for limits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Peer {
    Tcp(SocketAddr),
    Unix { uid: u32, pid: u32 },
    Unknown,
}

impl Peer {
    pub(crate) fn of(socket: impl AsFd) -> Peer {
        if let Some(address) = ebb_access::peer_address(socket.as_fd()) {
            return Peer::Tcp(address);
        }
        match rustix::net::sockopt::socket_peercred(&socket) {
            Ok(peer) => Peer::Unix {
                uid: peer.uid.as_raw(),
                pid: u32::try_from(peer.pid.as_raw_pid()).unwrap_or_default(),
            },
            Err(_) => Peer::Unknown,
        }
    }

    /// The key under which its handshakes are counted: an address, or the /64 network for IPv6, of which one
    /// host can have all addresses.
    pub(crate) fn address(&self) -> ebb_tls::PeerKey {
        match self {
            Peer::Tcp(address) => match address.ip().to_canonical() {
                IpAddr::V4(ip) => u128::from(ip.to_bits()),
                IpAddr::V6(ip) => (1 << 64) | (ip.to_bits() >> 64),
            },
            Peer::Unix { uid, .. } => (2 << 64) | u128::from(*uid),
            Peer::Unknown => u128::MAX,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Tcp(address) => write!(f, "{address}"),
            Peer::Unix { uid, pid } => write!(f, "unix (uid {uid}, pid {pid})"),
            Peer::Unknown => f.write_str("unknown"),
        }
    }
}

/// All handshakes of a server.
#[derive(Debug, Default)]
pub(crate) struct PendingHandshakes(Mutex<PendingState>);

#[derive(Debug, Default)]
struct PendingState {
    next: u64,
    waiting: BTreeMap<u64, HandshakeEntry>,
    recent: RecentConnections,
    /// Source of the random numbers, so that peers cannot predict which handshake is evicted.
    draw: RandomState,
}

/// Connections of each address at the limit of descriptors, in this period of [`RECENT`] and in the one before.
#[derive(Debug, Default)]
struct RecentConnections {
    counts: [HashMap<ebb_tls::PeerKey, u32>; 2],
    since: Option<Instant>,
}

impl RecentConnections {
    fn of(&self, peer: ebb_tls::PeerKey) -> u32 {
        let counts = self.counts.iter().filter_map(|counts| counts.get(&peer));
        counts.fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Forgets what is no longer recent.
    fn expire(&mut self, now: Instant) {
        let since = *self.since.get_or_insert(now);
        let periods = now.saturating_duration_since(since).as_nanos() / RECENT.as_nanos();
        if periods > 0 || self.counts[1].len() >= RECENT_ADDRESSES {
            self.counts.swap(0, 1);
            self.counts[1].clear();
            if periods > 1 {
                self.counts[0].clear();
            }
            self.since = Some(now);
        }
    }

    fn note(&mut self, peer: ebb_tls::PeerKey) {
        let count = self.counts[1].entry(peer).or_default();
        *count = count.saturating_add(1);
    }
}

#[derive(Debug)]
struct HandshakeEntry {
    peer: ebb_tls::PeerKey,
    since: Instant,
    stage: HandshakeStage,
    evicted: Arc<Stop>,
}

/// How far a handshake has advanced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HandshakeStage {
    Connected,
    /// The peer sent valid bytes of the NBD handshake.
    Understood,
    /// The TLS handshake has completed.
    Encrypted,
}

/// A counted handshake; `evicted` is set when it is evicted for a newer one.
#[derive(Debug)]
pub(crate) struct PendingHandshake<'a> {
    pending: &'a PendingHandshakes,
    number: u64,
    pub(crate) evicted: Arc<Stop>,
}

impl PendingHandshakes {
    fn state(&self) -> MutexGuard<'_, PendingState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a handshake; if there are too many, evicts an older one.
    pub(crate) fn enter(&self, peer: ebb_tls::PeerKey, now: Instant) -> PendingHandshake<'_> {
        let mut state = self.state();
        if let Some(one) = state.too_many(peer) {
            state.evict(one);
        }
        let (number, evicted) = (state.next, Arc::<Stop>::default());
        state.next += 1;
        let stage = HandshakeStage::Connected;
        let entry = HandshakeEntry { peer, since: now, stage, evicted: evicted.clone() };
        state.waiting.insert(number, entry);
        PendingHandshake { pending: self, number, evicted }
    }

    /// Evicts a handshake of the address that has the most, if there is any: the process has no descriptor for a
    /// newer connection.
    pub(crate) fn evict_one(&self) {
        let mut state = self.state();
        let one = state.draw_from_most();
        state.evict_drawn(one);
    }

    /// Evicts a handshake for a new connection of `newcomer`, which counts as one of its address. False if there is
    /// none, or if the newcomer is to be refused instead.
    pub(crate) fn evict_for(&self, newcomer: ebb_tls::PeerKey, now: Instant) -> bool {
        let mut state = self.state();
        state.recent.expire(now);
        let one = state.draw_for(newcomer, now);
        state.recent.note(newcomer);
        state.evict_drawn(one)
    }

    #[cfg(test)]
    fn inside(&self) -> usize {
        self.state().waiting.len()
    }
}

impl PendingState {
    /// The handshake to evict, if any: one of the new peer's address if that has too many; otherwise, if there are too
    /// many in all, one of the address that has the most.
    fn too_many(&self, newcomer: ebb_tls::PeerKey) -> Option<u64> {
        let of_newcomer = self.waiting.values().filter(|waiting| waiting.peer == newcomer).count();
        if of_newcomer >= MOST_OF_ONE {
            return self.draw_from(newcomer, of_newcomer);
        }
        if self.waiting.len() < MOST { None } else { self.draw_from_most() }
    }

    /// False if none was drawn.
    fn evict_drawn(&mut self, drawn: Option<u64>) -> bool {
        let Some(one) = drawn else { return false };
        self.evict(one);
        // The next draw is another one.
        self.next += 1;
        true
    }

    fn evict(&mut self, number: u64) {
        if let Some(waiting) = self.waiting.remove(&number) {
            waiting.evicted.stop();
        }
    }

    /// How many handshakes each address has.
    fn counts(&self) -> HashMap<ebb_tls::PeerKey, usize> {
        let mut counts = HashMap::new();
        for waiting in self.waiting.values() {
            *counts.entry(waiting.peer).or_insert(0) += 1;
        }
        counts
    }

    /// A handshake of the address that has the most.
    fn draw_from_most(&self) -> Option<u64> {
        let (peer, count) = self.counts().into_iter().max_by_key(|(_, count)| *count)?;
        self.draw_from(peer, count)
    }

    /// See [`PendingHandshakes::evict_for`].
    fn draw_for(&self, newcomer: ebb_tls::PeerKey, now: Instant) -> Option<u64> {
        let mut counts = self.counts();
        let own = counts.remove(&newcomer).unwrap_or_default();
        let recent = |peer| self.recent.of(peer);
        let most = counts.into_iter().max_by_key(|(peer, count)| (*count, recent(*peer)));
        // The newcomer counts with its address.
        let other = most.filter(|(_, count)| *count > own).and_then(|(peer, count)| {
            let drawn = self.draw_from(peer, count)?;
            let age = now.saturating_duration_since(self.waiting.get(&drawn)?.since);
            let spared = count == own + 1 && age < RECENT && recent(newcomer) > recent(peer);
            (!spared).then_some(drawn)
        });
        other.or_else(|| self.draw_from(newcomer, own))
    }

    /// The less advanced of two random handshakes of an address, which has `count` of them.
    fn draw_from(&self, peer: ebb_tls::PeerKey, count: usize) -> Option<u64> {
        // The remainders are below `count`.
        let below = |most: usize, what: u8| {
            let drawn = self.draw.hash_one((self.next, what)) % u64::try_from(most.max(1)).ok()?;
            usize::try_from(drawn).ok()
        };
        let first = if count > 0 { below(count, 0)? } else { return None };
        // A different one, if there is more than one.
        let second = (first + 1 + below(count.saturating_sub(1), 1)?) % count.max(1);
        let nth = |place| self.waiting.iter().filter(|(_, one)| one.peer == peer).nth(place);
        let least = [nth(first)?, nth(second)?].into_iter().min_by_key(|(_, one)| one.stage);
        least.map(|(number, _)| *number)
    }
}

impl PendingHandshake<'_> {
    /// Notes that the handshake has advanced to this stage.
    pub(crate) fn reached(&self, stage: HandshakeStage) {
        if let Some(waiting) = self.pending.state().waiting.get_mut(&self.number) {
            waiting.stage = waiting.stage.max(stage);
        }
    }
}

impl Drop for PendingHandshake<'_> {
    fn drop(&mut self) {
        self.pending.state().waiting.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_lite::future::{block_on, poll_once};

    fn is_evicted(entered: &PendingHandshake<'_>) -> bool {
        block_on(poll_once(entered.evicted.wait())).is_some()
    }

    #[test]
    fn a_handshake_of_an_address_that_has_too_many_is_evicted() {
        let pending = PendingHandshakes::default();
        let other = pending.enter(7, Instant::now());
        let flood: Vec<_> =
            (0..MOST_OF_ONE + 10).map(|_| pending.enter(1, Instant::now())).collect();
        assert_eq!(flood.iter().filter(|entered| is_evicted(entered)).count(), 10);
        assert!(!is_evicted(&flood[MOST_OF_ONE + 9]), "the newest is accepted");
        assert!(!is_evicted(&other));
        assert_eq!(pending.inside(), MOST_OF_ONE + 1);
        drop((flood, other));
        assert_eq!(pending.inside(), 0);
    }

    #[test]
    fn a_handshake_survives_a_flood_of_less_advanced_ones_from_its_address() {
        for stage in [HandshakeStage::Understood, HandshakeStage::Encrypted] {
            let pending = PendingHandshakes::default();
            let honest = pending.enter(1, Instant::now());
            honest.reached(stage);
            // A stage never goes back.
            honest.reached(HandshakeStage::Connected);
            let mut flood: Vec<_> =
                (0..MOST_OF_ONE).map(|_| pending.enter(1, Instant::now())).collect();
            for _ in 0..100 {
                flood.drain(..64);
                flood.extend((0..64).map(|_| pending.enter(1, Instant::now())));
                flood.extend((0..64).map(|_| pending.enter(1, Instant::now())));
                flood.retain(|entered| !is_evicted(entered));
                assert!(!is_evicted(&honest), "{stage:?}");
            }
        }
    }

    /// Each is equally likely to be evicted: not always the first, and none is kept for long.
    #[test]
    fn among_equally_advanced_handshakes_the_evicted_one_is_random() {
        let samples: [PendingHandshakes; 32] =
            std::array::from_fn(|_| PendingHandshakes::default());
        let mut stayed = 0;
        for pending in &samples {
            let honest = pending.enter(1, Instant::now());
            let flood: Vec<_> =
                (0..MOST_OF_ONE + 10).map(|_| pending.enter(1, Instant::now())).collect();
            stayed += usize::from(!is_evicted(&honest));
            let more: Vec<_> =
                (0..MOST_OF_ONE * 20).map(|_| pending.enter(1, Instant::now())).collect();
            assert!(is_evicted(&honest), "thousands of handshakes came after it");
            drop((flood, more));
        }
        // About 29 of 32: each of eleven new handshakes evicts one of 128.
        assert!(stayed > 12, "{stayed} of 32 survived eleven new handshakes");
    }

    #[test]
    fn among_many_addresses_the_one_with_most_handshakes_loses_one() {
        let pending = PendingHandshakes::default();
        let honest: Vec<_> = (1000..1010).map(|peer| pending.enter(peer, Instant::now())).collect();
        let flood: Vec<_> =
            (0..2000).map(|number| pending.enter(number % 20, Instant::now())).collect();
        assert!(!honest.iter().any(is_evicted));
        assert_eq!(pending.inside(), MOST);
        drop(flood);
    }

    #[test]
    fn without_descriptors_the_address_with_most_handshakes_loses_one() {
        let pending = PendingHandshakes::default();
        pending.evict_one();
        let honest = pending.enter(7, Instant::now());
        let advanced = pending.enter(1, Instant::now());
        advanced.reached(HandshakeStage::Understood);
        let flood: Vec<_> = (0..20).map(|_| pending.enter(1, Instant::now())).collect();
        for evicted in 1..=10 {
            pending.evict_one();
            assert_eq!(flood.iter().filter(|entered| is_evicted(entered)).count(), evicted);
        }
        assert!(!is_evicted(&honest) && !is_evicted(&advanced));
        assert_eq!(pending.inside(), 12);
    }

    /// There is room for a single handshake.
    #[test]
    fn a_flood_does_not_evict_the_only_handshake_of_another_address() {
        let (pending, start) = (PendingHandshakes::default(), Instant::now());
        let mut last = pending.enter(1, start);
        for round in 0..50 {
            let now = start + Duration::from_millis(round * 100);
            assert!(pending.evict_for(1, now), "its own address has another one");
            assert!(is_evicted(&last));
            last = pending.enter(1, now);
        }
        let now = start + Duration::from_millis(4999);
        assert!(pending.evict_for(7, now) && is_evicted(&last));
        let honest = pending.enter(7, now);
        for millis in 0..999 {
            assert!(!pending.evict_for(1, now + Duration::from_millis(millis)), "it is refused");
            assert!(!is_evicted(&honest));
        }
        assert!(pending.evict_for(1, now + RECENT) && is_evicted(&honest), "it had its time");
        assert!(!pending.evict_for(1, now + 5 * RECENT), "there is none");
        assert_eq!(pending.state().recent.counts.each_ref().map(HashMap::len), [0, 1]);
    }

    /// The peer that has the only place is silent, and has connected once.
    #[test]
    fn a_new_connection_evicts_the_only_handshake_of_an_address_that_is_as_active() {
        let (pending, start) = (PendingHandshakes::default(), Instant::now());
        for (newcomer, later) in [(7, 0), (8, 1), (9, 500), (10, 2000)] {
            let silent = pending.enter(1, start);
            assert!(pending.evict_for(newcomer, start + Duration::from_millis(later)), "{later}");
            assert!(is_evicted(&silent), "{later}");
        }
    }

    #[test]
    fn the_addresses_of_recent_connections_are_bounded() {
        let (pending, now) = (PendingHandshakes::default(), Instant::now());
        for peer in 0..10_000 {
            pending.evict_for(peer, now);
        }
        let counts = pending.state().recent.counts.each_ref().map(HashMap::len);
        assert!(counts.iter().all(|count| *count <= RECENT_ADDRESSES), "{counts:?}");
    }
}
