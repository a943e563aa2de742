//! Connections that are still in the handshake: their peers, their limit, and which is closed when it is exceeded.
//!
//! They do not count towards `max_clients`, because any peer that can connect can open them. A new connection is always
//! accepted; if there are too many, or the process has no descriptor for a new one, an older handshake is evicted: from
//! the address with the most handshakes two are drawn at random, and the less advanced of the two is closed. If the
//! oldest were evicted, a flood would evict every legitimate handshake from its address that takes longer than the
//! flood needs to reach the limit. If the least advanced of all were evicted, a few advanced handshakes that do not
//! continue would cause each new connection to be evicted by the next.

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
/// Log lines per period; further ones are counted.
const LINES: u32 = 10;
const LINES_TIME: Duration = Duration::from_secs(10);

/// The other end of a connection, for the log and for limits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Peer {
    Tcp(SocketAddr),
    Unix { uid: u32, pid: u32 },
    Unknown,
}

impl Peer {
    pub(crate) fn of(socket: impl AsFd) -> Peer {
        let address = rustix::net::getpeername(&socket).ok().flatten();
        if let Some(address) = address.and_then(|any| SocketAddr::try_from(any).ok()) {
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
    /// Source of the random numbers, so that peers cannot predict which handshake is evicted.
    draw: RandomState,
}

#[derive(Debug)]
struct HandshakeEntry {
    peer: ebb_tls::PeerKey,
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
    pub(crate) fn enter(&self, peer: ebb_tls::PeerKey) -> PendingHandshake<'_> {
        let mut state = self.state();
        if let Some(one) = state.too_many(peer) {
            state.evict(one);
        }
        let (number, evicted) = (state.next, Arc::<Stop>::default());
        state.next += 1;
        let stage = HandshakeStage::Connected;
        state.waiting.insert(number, HandshakeEntry { peer, stage, evicted: evicted.clone() });
        PendingHandshake { pending: self, number, evicted }
    }

    /// Evicts a handshake of the address that has the most, if there is any: the process has no descriptor for a
    /// newer connection. False if there is none.
    pub(crate) fn evict_one(&self) -> bool {
        let mut state = self.state();
        let Some(one) = state.draw_from_most() else { return false };
        state.evict(one);
        // The next draw is another one.
        state.next += 1;
        true
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

    fn evict(&mut self, number: u64) {
        if let Some(waiting) = self.waiting.remove(&number) {
            waiting.evicted.stop();
        }
    }

    /// A handshake of the address that has the most.
    fn draw_from_most(&self) -> Option<u64> {
        let mut counts = HashMap::new();
        for waiting in self.waiting.values() {
            *counts.entry(waiting.peer).or_insert(0usize) += 1;
        }
        let (peer, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        self.draw_from(peer, count)
    }

    /// The less advanced of two random handshakes of an address, which has `count` of them.
    fn draw_from(&self, peer: ebb_tls::PeerKey, count: usize) -> Option<u64> {
        // The remainders are below `count`.
        let below = |most: usize, what: u8| {
            let drawn = self.draw.hash_one((self.next, what)) % u64::try_from(most.max(1)).ok()?;
            usize::try_from(drawn).ok()
        };
        let first = below(count, 0)?;
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

/// Limits log lines that any peer can cause, so that they cannot fill the log.
#[derive(Debug, Default)]
pub(crate) struct RefusalLog(Mutex<(Option<Instant>, u32, u64)>);

impl RefusalLog {
    /// Whether a line may be written now; if so, how many were suppressed since the last one.
    pub(crate) fn may_write(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, written, unwritten) = &mut *state;
        if since.is_none_or(|since| now.saturating_duration_since(since) >= LINES_TIME) {
            (*since, *written) = (Some(now), 0);
        }
        if *written >= LINES {
            *unwritten += 1;
            return None;
        }
        *written += 1;
        Some(std::mem::take(unwritten))
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
        let other = pending.enter(7);
        let flood: Vec<_> = (0..MOST_OF_ONE + 10).map(|_| pending.enter(1)).collect();
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
            let honest = pending.enter(1);
            honest.reached(stage);
            // A stage never goes back.
            honest.reached(HandshakeStage::Connected);
            let mut flood: Vec<_> = (0..MOST_OF_ONE).map(|_| pending.enter(1)).collect();
            for _ in 0..100 {
                flood.drain(..64);
                flood.extend((0..64).map(|_| pending.enter(1)));
                flood.extend((0..64).map(|_| pending.enter(1)));
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
            let honest = pending.enter(1);
            let flood: Vec<_> = (0..MOST_OF_ONE + 10).map(|_| pending.enter(1)).collect();
            stayed += usize::from(!is_evicted(&honest));
            let more: Vec<_> = (0..MOST_OF_ONE * 20).map(|_| pending.enter(1)).collect();
            assert!(is_evicted(&honest), "thousands of handshakes came after it");
            drop((flood, more));
        }
        // About 29 of 32: each of eleven new handshakes evicts one of 128.
        assert!(stayed > 12, "{stayed} of 32 survived eleven new handshakes");
    }

    #[test]
    fn among_many_addresses_the_one_with_most_handshakes_loses_one() {
        let pending = PendingHandshakes::default();
        let honest: Vec<_> = (1000..1010).map(|peer| pending.enter(peer)).collect();
        let flood: Vec<_> = (0..2000).map(|number| pending.enter(number % 20)).collect();
        assert!(!honest.iter().any(is_evicted));
        assert_eq!(pending.inside(), MOST);
        drop(flood);
    }

    #[test]
    fn without_descriptors_the_address_with_most_handshakes_loses_one() {
        let pending = PendingHandshakes::default();
        pending.evict_one();
        let honest = pending.enter(7);
        let advanced = pending.enter(1);
        advanced.reached(HandshakeStage::Understood);
        let flood: Vec<_> = (0..20).map(|_| pending.enter(1)).collect();
        for evicted in 1..=10 {
            pending.evict_one();
            assert_eq!(flood.iter().filter(|entered| is_evicted(entered)).count(), evicted);
        }
        assert!(!is_evicted(&honest) && !is_evicted(&advanced));
        assert_eq!(pending.inside(), 12);
    }

    #[test]
    fn the_log_has_a_few_lines_and_the_number_of_suppressed_ones() {
        let (lines, now) = (RefusalLog::default(), Instant::now());
        let written = (0..1000).filter(|_| lines.may_write(now).is_some()).count();
        assert_eq!(written, 10);
        assert_eq!(lines.may_write(now + LINES_TIME), Some(990));
        assert_eq!(lines.may_write(now + LINES_TIME), Some(0));
    }
}
