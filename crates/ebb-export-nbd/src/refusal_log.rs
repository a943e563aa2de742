//! Limits the log lines about refused connections, which any peer that can connect can cause without end.
//!
//! # Invariants
//! - A peer that causes many lines does not suppress those of another one: each has a limit of its own, below that of
//!   all together.
//! - Memory is bounded: only peers with a line in this period are known.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::pending_handshakes::Peer;

/// Lines of one peer and of all peers per period; further ones are counted.
const LINES_OF_ONE: u32 = 10;
const LINES: u32 = 50;
const PERIOD: Duration = Duration::from_secs(10);

/// A peer as the log tells peers apart: the address, or the user and the process on a Unix socket.
type LogKey = (ebb_tls::PeerKey, u32);

#[derive(Debug, Default)]
pub(crate) struct RefusalLog(Mutex<RefusalLogState>);

#[derive(Debug, Default)]
struct RefusalLogState {
    /// When the period began.
    since: Option<Instant>,
    /// Lines written in it, of all peers and of each.
    written: u32,
    peers: BTreeMap<LogKey, u32>,
    /// Lines suppressed since the last one that was written.
    suppressed: u64,
}

impl RefusalLog {
    /// Whether a line about this peer may be written now; if so, the number of lines, of all peers, suppressed since the
    /// last one.
    pub(crate) fn admit(&self, peer: &Peer, now: Instant) -> Option<u64> {
        let pid = if let Peer::Unix { pid, .. } = peer { *pid } else { 0 };
        let key = (peer.address(), pid);
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| now.saturating_duration_since(since) >= PERIOD) {
            *state = RefusalLogState {
                since: Some(now),
                suppressed: state.suppressed,
                ..RefusalLogState::default()
            };
        }
        let of_peer = state.peers.get(&key).copied().unwrap_or_default();
        if state.written >= LINES || of_peer >= LINES_OF_ONE {
            state.suppressed = state.suppressed.saturating_add(1);
            return None;
        }
        state.written += 1;
        state.peers.insert(key, of_peer + 1);
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(last: u8) -> Peer {
        Peer::Tcp(([192, 0, 2, last], 4000).into())
    }

    #[test]
    fn a_peer_has_a_few_lines_and_those_of_another_one_are_still_written() {
        let (log, now) = (RefusalLog::default(), Instant::now());
        let storm = |peer: Peer, now| (0..1000).filter(|_| log.admit(&peer, now).is_some()).count();
        assert_eq!(storm(tcp(1), now), 10);
        assert_eq!(log.admit(&tcp(2), now), Some(990), "it counts the suppressed ones");
        assert_eq!(storm(Peer::Unix { uid: 0, pid: 1 }, now), 10);
        assert_eq!(storm(Peer::Unix { uid: 0, pid: 2 }, now), 10, "another process");
        let later = now + PERIOD;
        assert_eq!(log.admit(&tcp(1), later), Some(990));
        assert_eq!(log.admit(&tcp(1), later), Some(0));
    }

    #[test]
    fn the_lines_and_the_memory_of_all_peers_are_bounded() {
        let (log, now) = (RefusalLog::default(), Instant::now());
        let written =
            (0..10_000).filter(|pid| log.admit(&Peer::Unix { uid: 1, pid: *pid }, now).is_some());
        assert_eq!(written.count(), 50);
        assert_eq!(log.0.lock().unwrap().peers.len(), 50);
    }
}
