//! Sharing a device's rate between volumes: generalised processor sharing with a virtual clock.
//!
//! The clock counts cost per unit of weight, and runs at the device's rate divided by the sum of the weights
//! of all volumes that wait. Each write advances its volume's account by its cost; a volume whose account is
//! ahead of the clock waits until the clock reaches it. A volume that uses less than its share is never ahead
//! by more than its own last write, so it does not wait for busy volumes; they share what it leaves.
//!
//! Invariants: O(1) per call; the number of waiting requests does not matter (only the first of a volume
//! calls); an account is at most [`CREDIT`] behind the clock, so idle time cannot be saved for a burst.

use crate::units::{MILLISECOND, Nanos, narrow};

/// Waits shorter than this are not worth a timer: they are carried over as debt.
pub(crate) const SHORTEST: Nanos = MILLISECOND;
/// Unused time that a volume may make up for, since timers fire late.
const CREDIT: Nanos = 10 * MILLISECOND;

/// One volume's account. Costs are in 10⁻⁹ bytes, so that rate × time needs no division.
#[derive(Debug, Clone)]
pub(crate) struct VolumeAccount {
    /// The clock reading at which all writes so far are paid for.
    finish: u128,
    weight: u32,
    /// Included in the clock's sum of weights.
    behind: bool,
}

impl VolumeAccount {
    /// `weight` is at least 1.
    pub(crate) fn new(weight: u32) -> Self {
        Self { finish: 0, weight: weight.max(1), behind: false }
    }
}

/// The virtual clock of one device.
#[derive(Debug, Clone, Default)]
pub(crate) struct VirtualClock {
    reading: u128,
    at: Nanos,
    /// Sum of the weights of accounts that are ahead of the clock.
    weight: u64,
}

impl VirtualClock {
    /// Advances to `now`, at `rate` cost units per second since the last call.
    pub(crate) fn advance(&mut self, rate: u64, now: Nanos) {
        let passed = u128::from(rate) * u128::from(now.saturating_sub(self.at));
        self.reading = self.reading.saturating_add(passed / u128::from(self.weight.max(1)));
        self.at = self.at.max(now);
    }

    /// How long the volume has to wait at `rate` before its next write; 0 if it may write now.
    pub(crate) fn wait(&self, account: &VolumeAccount, rate: u64) -> Nanos {
        let ahead = account.finish.saturating_sub(self.reading);
        let weight = u128::from(self.weight.max(u64::from(account.weight)));
        let wait = narrow(ahead.saturating_mul(weight) / u128::from(rate.max(1)));
        if wait < SHORTEST { 0 } else { wait }
    }

    /// Charges a write of `cost` units.
    pub(crate) fn charge(&mut self, account: &mut VolumeAccount, cost: u64, rate: u64) {
        let credit = u128::from(rate) * u128::from(CREDIT) / u128::from(self.weight.max(1));
        let start = account.finish.max(self.reading.saturating_sub(credit));
        let cost = u128::from(cost) * u128::from(crate::units::SECOND) / u128::from(account.weight);
        account.finish = start.saturating_add(cost);
        self.update_behind(account);
    }

    /// Pacing is off: the volume's debt is forgotten.
    pub(crate) fn forget_debt(&mut self, account: &mut VolumeAccount) {
        account.finish = account.finish.min(self.reading);
        self.update_behind(account);
    }

    /// Updates whether the account counts among the waiting ones. Must be called for each account from time
    /// to time.
    pub(crate) fn update_behind(&mut self, account: &mut VolumeAccount) {
        let behind = account.finish > self.reading;
        if behind != account.behind {
            let weight = u64::from(account.weight);
            self.weight =
                if behind { self.weight + weight } else { self.weight.saturating_sub(weight) };
            account.behind = behind;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::SECOND;

    /// Volumes write `sizes` repeatedly at 1 MB/s for `seconds`; the last one writes only every 100 ms.
    fn race(sizes: &[u64], weights: &[u32], light: bool, seconds: u64) -> Vec<u64> {
        const RATE: u64 = 1_000_000;
        let mut clock = VirtualClock::default();
        let mut accounts: Vec<VolumeAccount> =
            weights.iter().map(|weight| VolumeAccount::new(*weight)).collect();
        let mut done = vec![0; sizes.len()];
        let mut worst_light = 0;
        for now in (0..seconds * SECOND).step_by(1_000_000) {
            clock.advance(RATE, now);
            for (index, size) in sizes.iter().enumerate() {
                let is_light = light && index + 1 == sizes.len();
                if is_light && now % (100 * MILLISECOND) != 0 {
                    continue;
                }
                if is_light {
                    worst_light = worst_light.max(clock.wait(&accounts[index], RATE));
                }
                while clock.wait(&accounts[index], RATE) == 0 {
                    clock.charge(&mut accounts[index], *size, RATE);
                    done[index] += size;
                    if is_light {
                        break;
                    }
                }
            }
            accounts.iter_mut().for_each(|account| clock.update_behind(account));
        }
        assert_eq!(worst_light, 0);
        done
    }

    #[test]
    fn busy_volumes_share_by_weight_whatever_their_write_sizes() {
        let done = race(&[4096, 65536, 16384], &[1, 1, 2], false, 60);
        let total: u64 = done.iter().sum();
        assert!((58_000_000..=62_000_000).contains(&total), "{done:?}");
        assert!(done[0].abs_diff(done[1]) < 600_000, "{done:?}");
        assert!((2 * done[0]).abs_diff(done[2]) < 900_000, "{done:?}");
    }

    #[test]
    fn a_light_volume_does_not_wait_and_the_others_share_what_it_leaves() {
        let done = race(&[65536, 65536, 4096], &[1, 1, 1], true, 60);
        assert_eq!(done[2], 600 * 4096);
        assert!(done.iter().sum::<u64>() > 58_000_000, "{done:?}");
    }
}
