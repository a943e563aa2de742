//! The constants of the ladder, each with its default and the reason for it.

use std::time::Duration;

/// When the ladder changes its level. Shares are in permille (thousandths).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Length of the windows over which stalls are summed; 10 ms to 60 s. Default 1 s,
    /// between the shortest window of a pressure trigger (500 ms) and that of unprivileged processes (2 s).
    pub window: Duration,
    /// Stall time per window that is a first sign (L1). Default 1 ms: shorter stalls occur without any
    /// swapping after them; after stalls of this length, swapping starts within 60 ms.
    pub first_stall: Duration,
    /// Stall time per window that counts towards L2. Default 20 ms, as in the trigger (`psi.rs`).
    pub strong_stall: Duration,
    /// Time per window in which all tasks stalled that leads to L2 at once. Default 10 ms: in a cgroup with
    /// a single running thread every stall is a full one, so a single page fault must not suffice.
    pub full_stall: Duration,
    /// Free memory at or below this share of the zones' high watermark is near the target (L1).
    /// Default 2000 (twice): passed 30 to 150 ms before the first page is swapped out. At least 1000:
    /// the sign must precede the kernel's reclaim.
    pub free_near: u32,
    /// Share of all memory at or below which available memory is low (L1). Default 100 (10 %): passed
    /// 350 to 450 ms before the first page is swapped out, when processes allocate 100 MB/s.
    pub available_low: u32,
    /// Share of all memory, or of the cgroup's limit, at or below which available memory counts
    /// towards L2 by itself. Default 50.
    pub available_drain: u32,
    /// Share of all memory, or of the cgroup's limit, at or below which available memory leads to
    /// L3. Default 20.
    pub available_last: u32,
    /// Share of all memory by which available memory must fall further, once low, to count as continuing
    /// pressure. Default 10 (1 %).
    pub available_fall: u32,
    /// Share of the cgroup's limit from which its use is near the limit (L1). Default 950.
    pub cgroup_near: u32,
    /// How long after the first event a second confirmed sign counts as continuing pressure. Default
    /// 100 ms: time for the first response to take effect.
    pub again_after: Duration,
    /// Longest delay before the response to a sign that all daemons of a host see at once. Each daemon waits
    /// a random part of it and checks again, since the response of the first one may be enough. Default
    /// 20 ms, below the shortest lead of the first sign (30 ms). At most 50 ms. L2 waits up to five times as
    /// long; L3, signs of the process's own cgroup and levels requested by hand do not wait.
    pub herd_delay: Duration,
    /// Shortest time between two responses to unconfirmed signs of one kind. Doubles with each, up to
    /// `hint_gap_max`, and is reset by a confirmed sign or a long time without signs. Default 1 s.
    pub hint_gap: Duration,
    /// Longest time between responses to unconfirmed signs of one kind. Default 30 s.
    pub hint_gap_max: Duration,
    /// Time until L2 is published again while confirmed signs continue. Doubles with each up to
    /// `repeat_max`. Default 250 ms.
    pub repeat: Duration,
    /// Longest time between two publications of L2 while signs continue. Default 4 s.
    pub repeat_max: Duration,
    /// Shortest time between two L3. Default 1 s.
    pub last_gap: Duration,
    /// How long L1 holds after its last sign. Default 1 s.
    pub hold_squeeze: Duration,
    /// How long L2 holds after its last sign. Default 2 s: the window of an unprivileged trigger, so that
    /// the next notification of continuing pressure arrives while L2 holds.
    pub hold_drain: Duration,
    /// How long L3 holds after its last sign. Default 2 s.
    pub hold_last: Duration,
    /// Time between two decay ticks while calm, varied by up to a quarter. Default 20 s, the period of
    /// UMA's working-set estimate (`UMA_TIMEOUT`).
    pub decay: Duration,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(1),
            first_stall: Duration::from_millis(1),
            strong_stall: Duration::from_millis(20),
            full_stall: Duration::from_millis(10),
            free_near: 2000,
            available_low: 100,
            available_drain: 50,
            available_last: 20,
            available_fall: 10,
            cgroup_near: 950,
            again_after: Duration::from_millis(100),
            herd_delay: Duration::from_millis(20),
            hint_gap: Duration::from_secs(1),
            hint_gap_max: Duration::from_secs(30),
            repeat: Duration::from_millis(250),
            repeat_max: Duration::from_secs(4),
            last_gap: Duration::from_secs(1),
            hold_squeeze: Duration::from_secs(1),
            hold_drain: Duration::from_secs(2),
            hold_last: Duration::from_secs(2),
            decay: Duration::from_secs(20),
        }
    }
}

/// A threshold outside its range, or two that contradict each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("memory pressure threshold `{name}` {problem}")]
pub struct ThresholdsError {
    /// The field's name.
    pub name: &'static str,
    /// What is wrong with it.
    pub problem: &'static str,
}

impl Thresholds {
    /// Checks ranges and order.
    ///
    /// # Errors
    /// The first field that is out of range or contradicts another.
    pub fn check(&self) -> Result<(), ThresholdsError> {
        let ms = Duration::from_millis;
        let long = Duration::from_secs(24 * 3600);
        let rules = [
            ("window", self.window >= ms(10) && self.window <= ms(60_000), "must be 10 ms to 60 s"),
            ("first_stall", !self.first_stall.is_zero(), "must be above 0"),
            ("strong_stall", self.strong_stall >= self.first_stall, "is below `first_stall`"),
            ("full_stall", !self.full_stall.is_zero(), "must be above 0"),
            ("free_near", (1000..=100_000).contains(&self.free_near), "must be 1000 to 100000"),
            ("available_low", self.available_low <= 900, "must be 900 or less"),
            (
                "available_drain",
                self.available_drain <= self.available_low,
                "is above `available_low`",
            ),
            (
                "available_last",
                self.available_last <= self.available_drain,
                "is above `available_drain`",
            ),
            ("available_fall", self.available_fall > 0, "must be above 0"),
            ("cgroup_near", (500..=1000).contains(&self.cgroup_near), "must be 500 to 1000"),
            ("again_after", self.again_after <= ms(10_000), "must be 10 s or less"),
            ("herd_delay", self.herd_delay <= ms(50), "must be 50 ms or less"),
            ("hint_gap", self.hint_gap >= ms(100), "must be 100 ms or more"),
            (
                "hint_gap_max",
                self.hint_gap_max >= self.hint_gap && self.hint_gap_max <= long,
                "must be between `hint_gap` and one day",
            ),
            ("repeat", self.repeat >= ms(10), "must be 10 ms or more"),
            (
                "repeat_max",
                self.repeat_max >= self.repeat && self.repeat_max <= long,
                "must be between `repeat` and one day",
            ),
            (
                "last_gap",
                self.last_gap >= ms(1000) && self.last_gap <= long,
                "must be between 1 s and one day",
            ),
            ("hold_squeeze", self.hold_squeeze <= long, "must be one day or less"),
            ("hold_drain", self.hold_drain <= long, "must be one day or less"),
            ("hold_last", self.hold_last <= long, "must be one day or less"),
            (
                "decay",
                self.decay >= ms(100) && self.decay <= long,
                "must be between 100 ms and one day",
            ),
        ];
        match rules.iter().find(|(_, holds, _)| !holds) {
            Some((name, _, problem)) => Err(ThresholdsError { name, problem }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_pass_and_contradictions_do_not() {
        assert_eq!(Thresholds::default().check(), Ok(()));
        let bad = |change: fn(&mut Thresholds)| {
            let mut t = Thresholds::default();
            change(&mut t);
            t.check().unwrap_err().name
        };
        assert_eq!(bad(|t| t.available_last = 60), "available_last");
        assert_eq!(bad(|t| t.strong_stall = Duration::ZERO), "strong_stall");
        assert_eq!(bad(|t| t.last_gap = Duration::from_millis(999)), "last_gap");
        assert_eq!(bad(|t| t.decay = Duration::MAX), "decay");
        assert_eq!(bad(|t| t.window = Duration::ZERO), "window");
    }
}
