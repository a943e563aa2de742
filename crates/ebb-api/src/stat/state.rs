//! The state of a volume as one word, computed here for every surface: list, status, statistics, page and metrics.

use super::{FailingGuests, OutageStat, RemoteCondition, RemoteStat, VolumeStat};

/// The words of [`VolumeStat::state`].
impl VolumeStat {
    /// The store is being opened for the first time.
    pub const OPENING: &str = "opening";
    /// Served, and the store replies.
    pub const SERVING: &str = "serving";
    /// Served; the store fails requests, or a guest's requests fail until it is reset.
    pub const FAILING: &str = "failing";
    /// Served, and the store does not reply: requests wait.
    pub const SILENT: &str = "silent";
    /// Served, and the server of the store is not connected: requests wait.
    pub const DISCONNECTED: &str = "disconnected";
    /// Served, and acknowledged writes may be lost.
    pub const LOST: &str = "lost";
    /// The store cannot be opened; ebbd tries again.
    pub const FAILED: &str = "failed";
    /// The volume is being withdrawn.
    pub const CLOSING: &str = "closing";

    /// Returns true if a volume in `state` accepts clients, whether or not its store replies.
    pub fn is_served(state: &str) -> bool {
        ![Self::OPENING, Self::FAILED, Self::CLOSING, ""].contains(&state)
    }

    /// Returns the state of a volume that is served, worst condition first.
    pub fn condition(
        lost: bool,
        remote: Option<&RemoteStat>,
        outage: Option<&OutageStat>,
        guests: FailingGuests,
    ) -> &'static str {
        let remote = remote.map(RemoteStat::condition);
        let is_silent = outage.is_some_and(|outage| outage.silent_seconds > 0.0);
        if lost {
            Self::LOST
        } else if remote == Some(RemoteCondition::Down) {
            Self::DISCONNECTED
        } else if is_silent || remote == Some(RemoteCondition::Silent) {
            Self::SILENT
        } else if outage.is_some_and(|outage| outage.failed > 0) || guests.count() > 0 {
            Self::FAILING
        } else {
            Self::SERVING
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_the_worst_condition() {
        let up = RemoteStat { connections: 1, ..RemoteStat::default() };
        let down = RemoteStat { last_error: Some("refused".into()), ..RemoteStat::default() };
        let fails = OutageStat { failed: 1, ..OutageStat::default() };
        let hangs = OutageStat { silent_seconds: 4.0, ..fails.clone() };
        let quiet = RemoteStat { silent_seconds: 11, ..up.clone() };
        let state = |lost, remote: Option<&RemoteStat>, outage: Option<&OutageStat>| {
            VolumeStat::condition(lost, remote, outage, FailingGuests::default())
        };
        assert_eq!(state(false, None, None), VolumeStat::SERVING);
        assert_eq!(state(false, Some(&up), Some(&OutageStat::default())), VolumeStat::SERVING);
        assert_eq!(state(false, Some(&up), Some(&fails)), VolumeStat::FAILING);
        assert_eq!(state(false, Some(&up), Some(&hangs)), VolumeStat::SILENT);
        assert_eq!(state(false, Some(&quiet), None), VolumeStat::SILENT);
        assert_eq!(state(false, Some(&down), Some(&hangs)), VolumeStat::DISCONNECTED);
        assert_eq!(state(true, Some(&down), Some(&hangs)), VolumeStat::LOST);
        for guests in [FailingGuests { vhost: 1, xen: 0 }, FailingGuests { vhost: 0, xen: 1 }] {
            assert_eq!(VolumeStat::condition(false, None, None, guests), VolumeStat::FAILING);
        }
    }

    #[test]
    fn volume_with_dead_store_is_still_served() {
        let served = [VolumeStat::SERVING, VolumeStat::DISCONNECTED, VolumeStat::LOST];
        assert!(served.into_iter().all(VolumeStat::is_served));
        let not = [VolumeStat::OPENING, VolumeStat::FAILED, VolumeStat::CLOSING];
        assert!(!not.into_iter().any(VolumeStat::is_served));
    }
}
