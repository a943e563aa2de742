//! Sharing a device's pace between volumes: generalised processor sharing with a virtual clock.
//!
//! The clock counts cost per unit of weight and runs at the device's pace divided by the weight of
//! those who are behind. Each write moves its volume's tab forward; a volume whose tab is ahead of the
//! clock waits until the clock is there. One that asks for less than its share is never ahead for
//! longer than its own last write, so it does not wait for the greedy ones; what it leaves is
//! theirs.
//!
//! Invariants: O(1) per call; the number of waiting requests does not matter (only the first of a
//! volume asks); a tab is at most [`CREDIT`] behind the clock, so idleness saves up no burst.

use crate::units::{MILLISECOND, Nanos, narrow};

/// Waits shorter than this are not worth a timer: they are carried as debt.
pub(crate) const SHORTEST: Nanos = MILLISECOND;
/// How much of unused pace a volume may catch up, for timers that are late.
const CREDIT: Nanos = 10 * MILLISECOND;

/// One volume's place. Costs are in 10⁻⁹ bytes, so that rate × time needs no division.
#[derive(Debug, Clone)]
pub(crate) struct Tab {
    /// The clock's reading at which everything so far is paid.
    finish: u128,
    weight: u32,
    /// Counted in the clock's weight.
    behind: bool,
}

impl Tab {
    /// `weight` is at least 1.
    pub(crate) fn new(weight: u32) -> Self {
        Self { finish: 0, weight: weight.max(1), behind: false }
    }
}

/// The virtual clock of one device.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock {
    reading: u128,
    at: Nanos,
    /// Sum of the weights of tabs that are ahead of the clock.
    weight: u64,
}

impl Clock {
    /// Moves on to `now`, at `rate` cost units per second since the last call.
    pub(crate) fn advance(&mut self, rate: u64, now: Nanos) {
        let passed = u128::from(rate) * u128::from(now.saturating_sub(self.at));
        self.reading = self.reading.saturating_add(passed / u128::from(self.weight.max(1)));
        self.at = self.at.max(now);
    }

    /// How long the volume has to wait at `rate` before its next write; 0 when it may go.
    pub(crate) fn wait(&self, tab: &Tab, rate: u64) -> Nanos {
        let ahead = tab.finish.saturating_sub(self.reading);
        let weight = u128::from(self.weight.max(u64::from(tab.weight)));
        let wait = narrow(ahead.saturating_mul(weight) / u128::from(rate.max(1)));
        if wait < SHORTEST { 0 } else { wait }
    }

    /// Charges a write of `cost` units.
    pub(crate) fn charge(&mut self, tab: &mut Tab, cost: u64, rate: u64) {
        let credit = u128::from(rate) * u128::from(CREDIT) / u128::from(self.weight.max(1));
        let start = tab.finish.max(self.reading.saturating_sub(credit));
        let cost = u128::from(cost) * u128::from(crate::units::SECOND) / u128::from(tab.weight);
        tab.finish = start.saturating_add(cost);
        self.look(tab);
    }

    /// Nothing is paced: whatever the volume owed is forgotten.
    pub(crate) fn forgive(&mut self, tab: &mut Tab) {
        tab.finish = tab.finish.min(self.reading);
        self.look(tab);
    }

    /// Counts the tab among those behind, or no longer. To be called for each tab now and then.
    pub(crate) fn look(&mut self, tab: &mut Tab) {
        let behind = tab.finish > self.reading;
        if behind != tab.behind {
            let weight = u64::from(tab.weight);
            self.weight =
                if behind { self.weight + weight } else { self.weight.saturating_sub(weight) };
            tab.behind = behind;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::SECOND;

    /// Volumes write `sizes` again and again at 1 MB/s for `seconds`; the last asks only each 100 ms.
    fn race(sizes: &[u64], weights: &[u32], light: bool, seconds: u64) -> Vec<u64> {
        const RATE: u64 = 1_000_000;
        let mut clock = Clock::default();
        let mut tabs: Vec<Tab> = weights.iter().map(|weight| Tab::new(*weight)).collect();
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
                    worst_light = worst_light.max(clock.wait(&tabs[index], RATE));
                }
                while clock.wait(&tabs[index], RATE) == 0 {
                    clock.charge(&mut tabs[index], *size, RATE);
                    done[index] += size;
                    if is_light {
                        break;
                    }
                }
            }
            tabs.iter_mut().for_each(|tab| clock.look(tab));
        }
        assert_eq!(worst_light, 0);
        done
    }

    #[test]
    fn greedy_volumes_share_by_weight_whatever_their_sizes() {
        let done = race(&[4096, 65536, 16384], &[1, 1, 2], false, 60);
        let total: u64 = done.iter().sum();
        assert!((58_000_000..=62_000_000).contains(&total), "{done:?}");
        assert!(done[0].abs_diff(done[1]) < 600_000, "{done:?}");
        assert!((2 * done[0]).abs_diff(done[2]) < 900_000, "{done:?}");
    }

    #[test]
    fn a_light_volume_waits_for_nobody_and_the_rest_take_what_it_leaves() {
        let done = race(&[65536, 65536, 4096], &[1, 1, 1], true, 60);
        assert_eq!(done[2], 600 * 4096);
        assert!(done.iter().sum::<u64>() > 58_000_000, "{done:?}");
    }
}
