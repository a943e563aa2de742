//! Dividing the limit: each device's threshold is its measured rate × one horizon for all devices.
//!
//! Rates are absolute, so there is no history that must decay: a threshold is right as soon as the rate is
//! known, regardless of other devices.
//!
//! Invariants, for any input (`tests/it/invariants.rs`):
//! - The sum of thresholds is at most the limit in force, and each threshold is above 0.
//! - The order of devices does not matter.
//! - A threshold that a busy device fills falls no faster than half its rate, so that its writers are slowed
//!   and not stopped; growing thresholds get only what is free. A lowered limit comes into force as fast as
//!   the thresholds fall.

use crate::units::{MILLISECOND, Nanos, bytes_in, mul_div, narrow};

/// The initial threshold of an unmeasured device, and its growth for each byte it has completed.
const FIRST: u64 = 4 << 20;
const PROVEN_TIMES: u64 = 3;
/// How far a device may climb between two divisions, in multiples of [`FIRST`].
const AHEAD: u64 = 8;
/// Reserved for each device, if memory allows.
const QUANTUM: u64 = 1 << 20;
/// The initial threshold of an idle device where memory is short, in time of its rate.
const IDLE: Nanos = 50 * MILLISECOND;
/// Fraction of the limit left for devices that are added later.
const SPARE: u64 = 32;

/// The activity of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activity {
    /// It holds nothing, and no write was requested for a while.
    Idle,
    /// It has writers.
    Active,
    /// It holds something, and no further write is requested.
    Draining,
    /// Nothing has completed for long, or every write fails.
    Stuck,
}

/// The inputs of the division for one device. Bytes, and bytes per second.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceClaim {
    pub(crate) activity: Activity,
    pub(crate) rate: u64,
    /// Completed so far.
    pub(crate) proven: u64,
    /// Dirty and under writeback.
    pub(crate) dirty: u64,
    /// Reserved in any case (`min_ratio`).
    pub(crate) least: u64,
    /// The upper bound (`max_ratio`, `max_bytes`).
    pub(crate) most: u64,
    /// The current threshold; 0 for a new device.
    pub(crate) before: u64,
}

/// The result for one device: its threshold, and what other devices must leave free for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct DeviceShare {
    pub(crate) threshold: u64,
    pub(crate) kept: u64,
}

/// The result for all devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Division {
    /// The limit in force: the goal, or a value on the way down to it.
    pub(crate) limit: u64,
    /// The resulting common horizon.
    pub(crate) horizon: Nanos,
}

/// What a device may hold while its rate is not established, whatever its threshold: it must first prove its
/// rate. `None` once that is above the threshold.
pub(crate) fn starting(proven: u64, threshold: u64) -> Option<u64> {
    let bound = proven.saturating_mul(PROVEN_TIMES).saturating_add(FIRST);
    (bound < threshold).then_some(bound)
}

/// The bounds within which the horizon decides.
struct DivisionBounds {
    quantum: u64,
    first: u64,
    ahead: u64,
    share: u64,
}

impl DivisionBounds {
    fn new(limit: u64, count: u64) -> Self {
        let share = limit / (8 * count.max(1));
        let (first, ahead) = (FIRST.min(limit / 8).max(1), (AHEAD * FIRST).min(limit / 8).max(1));
        Self { quantum: QUANTUM.min(share).max(1), first, ahead, share }
    }

    /// What stays free for a device even while other devices want everything.
    fn kept(&self, claim: &DeviceClaim) -> u64 {
        claim.least.max(self.quantum).min(claim.most.max(1))
    }

    /// What it needs now, at this horizon.
    fn needed(&self, claim: &DeviceClaim, horizon: Nanos) -> u64 {
        let kept = self.kept(claim);
        let idle = || {
            let start = if claim.proven == 0 { self.first } else { bytes_in(claim.rate, IDLE) };
            start.min(self.share)
        };
        let needed = match claim.activity {
            Activity::Idle => idle(),
            Activity::Stuck => claim.dirty.min(claim.before),
            Activity::Draining => {
                let filled = narrow(u128::from(claim.dirty) * 4 / 3);
                bytes_in(claim.rate, horizon).min(filled).max(idle())
            }
            Activity::Active if claim.proven == 0 => self.first.min(self.share),
            Activity::Active => self.full(claim, horizon),
        };
        needed.clamp(kept, claim.most.max(kept))
    }

    /// What it would use if it were alone.
    fn full(&self, claim: &DeviceClaim, horizon: Nanos) -> u64 {
        let kept = self.kept(claim);
        let full = match claim.activity {
            Activity::Stuck => claim.dirty.min(claim.before),
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
    claims: &[DeviceClaim],
    shares: &mut [DeviceShare],
    (before, goal): (u64, u64),
    longest: Nanos,
    passed: Nanos,
) -> Division {
    let count = u64::try_from(claims.len()).unwrap_or(u64::MAX);
    let bounds = DivisionBounds::new(goal, count);
    let room = goal - goal / SPARE;
    let sum = |what: &dyn Fn(&DeviceClaim) -> u64| -> u64 {
        claims.iter().fold(0, |sum, claim| sum.saturating_add(what(claim)))
    };
    let needed = |horizon: Nanos| sum(&|claim| bounds.needed(claim, horizon));
    let horizon = largest_horizon(longest, room, needed);
    let all = needed(horizon);
    let more =
        sum(&|claim| bounds.full(claim, horizon).saturating_sub(bounds.needed(claim, horizon)));
    let wanted = |claim: &DeviceClaim| {
        let needed = bounds.needed(claim, horizon);
        if all > room {
            // The reserved parts alone may exceed the goal: then all are reduced in proportion.
            return mul_div(needed, room, all).max(1);
        }
        // Unneeded parts are given to devices that may need them next.
        let lent = bounds.full(claim, horizon).saturating_sub(needed);
        needed + if more > room - all { mul_div(lent, room - all, more) } else { lent }
    };

    // Devices that must shrink do so at their own rate; the others share what is free then.
    let (mut settled, mut requested) = (0_u64, 0_u64);
    for (claim, share) in claims.iter().zip(shares.iter_mut()) {
        let wanted = wanted(claim);
        share.kept = bounds.kept(claim);
        share.threshold =
            if wanted < claim.before { falling(claim, wanted, passed) } else { wanted };
        if wanted > claim.before {
            settled = settled.saturating_add(claim.before);
            requested = requested.saturating_add(wanted - claim.before);
        } else {
            settled = settled.saturating_add(share.threshold);
        }
    }
    let in_force = goal.max(settled.min(before));
    let left = in_force.saturating_sub(settled);
    if requested > left {
        for (claim, share) in claims.iter().zip(shares.iter_mut()) {
            if share.threshold > claim.before {
                let grown = mul_div(share.threshold - claim.before, left, requested);
                share.threshold = claim.before + grown;
            }
        }
    }
    for share in shares.iter_mut() {
        // A reserved part that is in use has to be freed first, too.
        share.kept = share.kept.min(share.threshold);
    }
    Division { limit: in_force, horizon }
}

/// The longest horizon, in steps of a millionth of the maximum, whose thresholds fit into `room`.
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
fn falling(claim: &DeviceClaim, wanted: u64, passed: Nanos) -> u64 {
    if claim.activity == Activity::Stuck {
        // What the device holds cannot be taken from it.
        return wanted.max(claim.dirty.min(claim.before));
    }
    // The unfilled part can be taken at once: at three quarters writers run at the device's rate.
    let filled = narrow(u128::from(claim.dirty) * 4 / 3);
    let slowed = claim.before.saturating_sub(bytes_in(claim.rate, passed) / 2);
    wanted.max(filled.min(slowed))
}
