//! Dividing the limit: each device's threshold is its measured rate × one horizon for all.
//!
//! The answer to seed `001`: there is no history to decay, since rates are absolute, so that a share
//! is right as soon as the rate is known, whoever else comes or goes.
//!
//! Invariants, for any input (`tests/invariants.rs`):
//! - Thresholds add up to no more than the limit in force, and each is above 0.
//! - The order of devices does not matter.
//! - A threshold that a busy device fills falls no faster than half its rate, so that its writers are
//!   slowed and not stopped; whoever grows takes only what is left. A limit that was lowered comes
//!   into force as fast as the thresholds follow.

use crate::units::{MILLISECOND, Nanos, bytes_in, mul_div, narrow};

/// What an unmeasured device may have at first, and how much more for each byte it has completed.
const FIRST: u64 = 4 << 20;
const PROVEN_TIMES: u64 = 3;
/// How far the keeper lets a device climb between two divisions, in times of [`FIRST`].
const AHEAD: u64 = 8;
/// What is kept for each device, if memory allows.
const QUANTUM: u64 = 1 << 20;
/// What an idle device may begin with where memory is short, in time of its rate.
const IDLE: Nanos = 50 * MILLISECOND;
/// Part of the limit left for devices that are still to come.
const SPARE: u64 = 32;

/// What a device is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    /// It holds nothing, and nobody has asked for a while.
    Idle,
    /// It has writers.
    Active,
    /// It holds something, and nobody asks for more.
    Draining,
    /// Nothing has completed for long, or everything fails.
    Stuck,
}

/// One device, as the division sees it. Bytes, and bytes per second.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim {
    pub(crate) doing: Doing,
    pub(crate) rate: u64,
    /// Completed so far.
    pub(crate) proven: u64,
    /// Dirty and under writeback.
    pub(crate) dirty: u64,
    /// Kept for it whatever happens (`min_ratio`).
    pub(crate) least: u64,
    /// Never more than this (`max_ratio`, `max_bytes`).
    pub(crate) most: u64,
    /// The threshold so far; 0 for a new one.
    pub(crate) before: u64,
}

/// A device's part: the threshold, and what others must leave free for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Share {
    pub(crate) threshold: u64,
    pub(crate) kept: u64,
}

/// The outcome for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Division {
    /// The limit in force: the goal, or on the way down to it.
    pub(crate) limit: u64,
    /// The common horizon that came out.
    pub(crate) horizon: Nanos,
}

/// What a device that is only just being measured may hold, whatever its threshold: it has to show
/// first that it can take it. `None` once that is more than the threshold.
pub(crate) fn starting(proven: u64, threshold: u64) -> Option<u64> {
    let bound = proven.saturating_mul(PROVEN_TIMES).saturating_add(FIRST);
    (bound < threshold).then_some(bound)
}

/// The bounds within which the horizon decides.
struct Bounds {
    quantum: u64,
    first: u64,
    ahead: u64,
    share: u64,
}

impl Bounds {
    fn new(limit: u64, count: u64) -> Self {
        let share = limit / (8 * count.max(1));
        let (first, ahead) = (FIRST.min(limit / 8).max(1), (AHEAD * FIRST).min(limit / 8).max(1));
        Self { quantum: QUANTUM.min(share).max(1), first, ahead, share }
    }

    /// What stays free for a device even while others want everything.
    fn kept(&self, claim: &Claim) -> u64 {
        claim.least.max(self.quantum).min(claim.most.max(1))
    }

    /// What it needs now, at this horizon.
    fn needed(&self, claim: &Claim, horizon: Nanos) -> u64 {
        let kept = self.kept(claim);
        let idle = || {
            let start = if claim.proven == 0 { self.first } else { bytes_in(claim.rate, IDLE) };
            start.min(self.share)
        };
        let needed = match claim.doing {
            Doing::Idle => idle(),
            Doing::Stuck => claim.dirty.min(claim.before),
            Doing::Draining => {
                let filled = narrow(u128::from(claim.dirty) * 4 / 3);
                bytes_in(claim.rate, horizon).min(filled).max(idle())
            }
            Doing::Active if claim.proven == 0 => self.first.min(self.share),
            Doing::Active => self.full(claim, horizon),
        };
        needed.clamp(kept, claim.most.max(kept))
    }

    /// What it would use if there were no others.
    fn full(&self, claim: &Claim, horizon: Nanos) -> u64 {
        let kept = self.kept(claim);
        let full = match claim.doing {
            Doing::Stuck => claim.dirty.min(claim.before),
            _ if claim.proven == 0 => self.ahead,
            _ => {
                let proven = claim.proven.saturating_mul(PROVEN_TIMES).saturating_add(self.ahead);
                bytes_in(claim.rate, horizon).min(proven)
            }
        };
        full.clamp(kept, claim.most.max(kept))
    }
}

/// Divides `goal` among the claims; `before` is the limit in force so far, `passed` the time since.
pub(crate) fn divide(
    claims: &[Claim],
    shares: &mut [Share],
    (before, goal): (u64, u64),
    longest: Nanos,
    passed: Nanos,
) -> Division {
    let count = u64::try_from(claims.len()).unwrap_or(u64::MAX);
    let bounds = Bounds::new(goal, count);
    let room = goal - goal / SPARE;
    let sum = |what: &dyn Fn(&Claim) -> u64| -> u64 {
        claims.iter().fold(0, |sum, claim| sum.saturating_add(what(claim)))
    };
    let needed = |horizon: Nanos| sum(&|claim| bounds.needed(claim, horizon));
    let horizon = largest_horizon(longest, room, needed);
    let all = needed(horizon);
    let more =
        sum(&|claim| bounds.full(claim, horizon).saturating_sub(bounds.needed(claim, horizon)));
    let wanted = |claim: &Claim| {
        let needed = bounds.needed(claim, horizon);
        if all > room {
            // Minimum shares alone may be more than there is: then all are cut alike.
            return mul_div(needed, room, all).max(1);
        }
        // What nobody needs is lent to those who may need it next.
        let lent = bounds.full(claim, horizon).saturating_sub(needed);
        needed + if more > room - all { mul_div(lent, room - all, more) } else { lent }
    };

    // Whoever must give way does so at its own pace; the others share what that leaves.
    let (mut settled, mut asked) = (0_u64, 0_u64);
    for (claim, share) in claims.iter().zip(shares.iter_mut()) {
        let wanted = wanted(claim);
        share.kept = bounds.kept(claim);
        share.threshold =
            if wanted < claim.before { falling(claim, wanted, passed) } else { wanted };
        if wanted > claim.before {
            settled = settled.saturating_add(claim.before);
            asked = asked.saturating_add(wanted - claim.before);
        } else {
            settled = settled.saturating_add(share.threshold);
        }
    }
    let in_force = goal.max(settled.min(before));
    let left = in_force.saturating_sub(settled);
    if asked > left {
        for (claim, share) in claims.iter().zip(shares.iter_mut()) {
            if share.threshold > claim.before {
                let grown = mul_div(share.threshold - claim.before, left, asked);
                share.threshold = claim.before + grown;
            }
        }
    }
    for share in shares.iter_mut() {
        // What is to be kept for a device has to be freed first, too.
        share.kept = share.kept.min(share.threshold);
    }
    Division { limit: in_force, horizon }
}

/// The longest horizon, in steps of a millionth of the longest, whose thresholds fit into `room`.
fn largest_horizon(longest: Nanos, room: u64, sum: impl Fn(Nanos) -> u64) -> Nanos {
    if sum(longest) <= room {
        return longest;
    }
    let (mut fits, mut exceeds) = (0, longest);
    while exceeds - fits > longest / 1_000_000 + 1 {
        let middle = fits + (exceeds - fits) / 2;
        if sum(middle) <= room {
            fits = middle;
        } else {
            exceeds = middle;
        }
    }
    fits
}

/// The next value of a threshold on its way down to `wanted`.
fn falling(claim: &Claim, wanted: u64, passed: Nanos) -> u64 {
    if claim.doing == Doing::Stuck {
        // What it holds cannot be had, whatever is wanted.
        return wanted.max(claim.dirty.min(claim.before));
    }
    // What is not filled can be taken at once: at three quarters writers run at the device's rate.
    let filled = narrow(u128::from(claim.dirty) * 4 / 3);
    let slowed = claim.before.saturating_sub(bytes_in(claim.rate, passed) / 2);
    wanted.max(filled.min(slowed))
}
