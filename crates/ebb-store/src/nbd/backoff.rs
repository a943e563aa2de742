//! Waiting times between attempts to connect: doubling, with a random part so that the clients of a
//! server that restarts do not all connect at once. Pure: the seed is given.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(2);

/// Waiting times between attempts.
#[derive(Debug)]
pub(crate) struct Backoff {
    step: Duration,
    random: u64,
}

impl Backoff {
    pub(crate) fn new(seed: u64) -> Backoff {
        // The generator below must not start from 0.
        Backoff { step: FIRST, random: seed | 1 }
    }

    /// The next waiting time: half of the step, plus a random part of up to as much.
    pub(crate) fn next(&mut self) -> Duration {
        // xorshift64 (Marsaglia, 2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let half = self.step / 2;
        let share = u32::try_from(self.random % 1024).unwrap_or(0);
        self.step = (self.step * 2).min(LONGEST);
        half + half * share / 1024
    }

    /// After a success: begin again.
    pub(crate) fn reset(&mut self) {
        self.step = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_bound_and_differ_by_seed() {
        let (mut a, mut b) = (Backoff::new(1), Backoff::new(2));
        let list: Vec<_> = (0..20).map(|_| a.next()).collect();
        assert_ne!(list, (0..20).map(|_| b.next()).collect::<Vec<_>>());
        let mut step = FIRST;
        for wait in list {
            assert!(wait >= step / 2 && wait <= step, "{wait:?} of {step:?}");
            step = (step * 2).min(LONGEST);
        }
        a.reset();
        assert!(a.next() <= FIRST);
    }
}
