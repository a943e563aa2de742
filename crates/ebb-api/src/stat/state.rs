//! The derivation of a volume's [`VolumeCondition`].

use super::{FailingGuests, OutageStat, RemoteCondition, RemoteStat, VolumeCondition};

impl VolumeCondition {
    /// Returns true if a volume in this state accepts clients, whether or not its store replies.
    pub const fn is_served(self) -> bool {
        !matches!(self, Self::Opening | Self::Failed | Self::Closing | Self::Unset)
    }

    /// Returns the state of a volume that is served, worst condition first.
    pub fn of_served(
        lost: bool,
        remote: Option<&RemoteStat>,
        outage: Option<&OutageStat>,
        guests: FailingGuests,
    ) -> VolumeCondition {
        let remote = remote.map(RemoteStat::condition);
        let is_silent = outage.is_some_and(|outage| outage.silent_seconds > 0.0);
        if lost {
            Self::Lost
        } else if remote == Some(RemoteCondition::Down) {
            Self::Disconnected
        } else if is_silent || remote == Some(RemoteCondition::Silent) {
            Self::Silent
        } else if outage.is_some_and(|outage| outage.failed > 0) || guests.count() > 0 {
            Self::Failing
        } else {
            Self::Serving
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
            VolumeCondition::of_served(lost, remote, outage, FailingGuests::default())
        };
        assert_eq!(state(false, None, None), VolumeCondition::Serving);
        assert_eq!(state(false, Some(&up), Some(&OutageStat::default())), VolumeCondition::Serving);
        assert_eq!(state(false, Some(&up), Some(&fails)), VolumeCondition::Failing);
        assert_eq!(state(false, Some(&up), Some(&hangs)), VolumeCondition::Silent);
        assert_eq!(state(false, Some(&quiet), None), VolumeCondition::Silent);
        assert_eq!(state(false, Some(&down), Some(&hangs)), VolumeCondition::Disconnected);
        assert_eq!(state(true, Some(&down), Some(&hangs)), VolumeCondition::Lost);
        for guests in [FailingGuests { vhost: 1, xen: 0 }, FailingGuests { vhost: 0, xen: 1 }] {
            assert_eq!(
                VolumeCondition::of_served(false, None, None, guests),
                VolumeCondition::Failing
            );
        }
    }

    #[test]
    fn volume_with_dead_store_is_still_served() {
        let served =
            [VolumeCondition::Serving, VolumeCondition::Disconnected, VolumeCondition::Lost];
        assert!(served.into_iter().all(VolumeCondition::is_served));
        let not = [VolumeCondition::Opening, VolumeCondition::Failed, VolumeCondition::Closing];
        assert!(!not.into_iter().any(VolumeCondition::is_served));
    }
}
