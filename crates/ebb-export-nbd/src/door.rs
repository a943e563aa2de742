//! Peers that have not logged in: who they are, how many there may be, and who goes when they are too many.
//!
//! They are counted apart from clients: whoever can connect can be one, so that their number says
//! nothing. The newest is always let in; an older one goes for it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_volume::Stop;

/// Handshakes at a time, of all peers and of one address.
const MOST: usize = 256;
const MOST_OF_ONE: usize = 128;
/// So many lines of the log in such a time; more are counted.
const LINES: u32 = 10;
const LINES_TIME: Duration = Duration::from_secs(10);

/// Who is at the other end of a connection.
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

    /// What its connections have in common: an address, or a network where a host has many.
    pub(crate) fn address(&self) -> ebb_tls::Peer {
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
pub(crate) struct Door(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// The oldest first.
    waiting: BTreeMap<u64, (ebb_tls::Peer, Arc<Stop>)>,
}

/// A handshake that is counted; `leave` is sent when it has to go for a newer one.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    door: &'a Door,
    number: u64,
    pub(crate) leave: Arc<Stop>,
}

impl Door {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a handshake; where there are too many, sends an older one away.
    pub(crate) fn enter(&self, peer: ebb_tls::Peer) -> Entered<'_> {
        let mut state = self.state();
        if let Some(oldest) = state.too_many(peer)
            && let Some((_, leave)) = state.waiting.remove(&oldest)
        {
            leave.stop();
        }
        let (number, leave) = (state.next, Arc::<Stop>::default());
        state.next += 1;
        state.waiting.insert(number, (peer, leave.clone()));
        Entered { door: self, number, leave }
    }

    #[cfg(test)]
    fn inside(&self) -> usize {
        self.state().waiting.len()
    }
}

impl State {
    /// Who must go: the oldest of an address that has too many, else of the one that has most.
    fn too_many(&self, newcomer: ebb_tls::Peer) -> Option<u64> {
        let oldest_of = |peer| {
            self.waiting.iter().find(|(_, waiting)| waiting.0 == peer).map(|(number, _)| *number)
        };
        if self.waiting.values().filter(|(peer, _)| *peer == newcomer).count() >= MOST_OF_ONE {
            return oldest_of(newcomer);
        }
        if self.waiting.len() < MOST {
            return None;
        }
        let mut counts = HashMap::new();
        for (peer, _) in self.waiting.values() {
            *counts.entry(*peer).or_insert(0usize) += 1;
        }
        counts.into_iter().max_by_key(|(_, count)| *count).and_then(|(peer, _)| oldest_of(peer))
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.door.state().waiting.remove(&self.number);
    }
}

/// Keeps what anybody can cause from filling the log.
#[derive(Debug, Default)]
pub(crate) struct Lines(Mutex<(Option<Instant>, u32, u64)>);

impl Lines {
    /// Whether a line may be written now; with how many were not since the last one.
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

    fn is_sent_away(entered: &Entered<'_>) -> bool {
        block_on(poll_once(entered.leave.wait())).is_some()
    }

    #[test]
    fn the_oldest_of_an_address_goes_when_it_has_too_many() {
        let door = Door::default();
        let other = door.enter(7);
        let flood: Vec<_> = (0..MOST_OF_ONE + 10).map(|_| door.enter(1)).collect();
        assert_eq!(flood.iter().filter(|entered| is_sent_away(entered)).count(), 10);
        assert!(flood[..10].iter().all(is_sent_away), "the oldest");
        assert!(!is_sent_away(&other));
        assert_eq!(door.inside(), MOST_OF_ONE + 1);
        drop((flood, other));
        assert_eq!(door.inside(), 0);
    }

    #[test]
    fn among_many_addresses_the_one_with_most_makes_room() {
        let door = Door::default();
        let honest: Vec<_> = (1000..1010).map(|peer| door.enter(peer)).collect();
        let flood: Vec<_> = (0..2000).map(|number| door.enter(number % 20)).collect();
        assert!(!honest.iter().any(is_sent_away));
        assert_eq!(door.inside(), MOST);
        drop(flood);
    }

    #[test]
    fn the_log_has_a_few_lines_and_the_number_of_the_others() {
        let (lines, now) = (Lines::default(), Instant::now());
        let written = (0..1000).filter(|_| lines.may_write(now).is_some()).count();
        assert_eq!(written, 10);
        assert_eq!(lines.may_write(now + LINES_TIME), Some(990));
        assert_eq!(lines.may_write(now + LINES_TIME), Some(0));
    }
}
