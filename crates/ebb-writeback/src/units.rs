//! Time, bytes and fractions: unsigned integers, and sums that saturate instead of wrapping.
//!
//! Invariant: no function here panics or overflows, for any arguments.

/// Monotonic time in nanoseconds, from any fixed origin. It must not go backwards; where the clocks of
/// threads differ a little, negative differences count as zero.
pub type Nanos = u64;

/// One millisecond.
pub const MILLISECOND: Nanos = 1_000_000;

/// One second.
pub const SECOND: Nanos = 1_000_000_000;

/// The whole of something, in parts per million: the unit of ratios (1/10000 of a percent).
pub const WHOLE: u32 = 1_000_000;

/// The highest rate assumed of any device, in bytes per second: sums of a few rates stay far below overflow.
pub const RATE_MOST: u64 = 1 << 50;

/// `a × b / c`, rounded down, without overflow in between; a divisor of 0 counts as 1.
#[must_use]
pub fn mul_div(a: u64, b: u64, c: u64) -> u64 {
    // Divisions of 128 bits are slow, and seldom needed.
    match a.checked_mul(b) {
        Some(product) => product / c.max(1),
        None => narrow(u128::from(a) * u128::from(b) / u128::from(c.max(1))),
    }
}

/// The value, or the maximum of the type.
#[must_use]
pub fn narrow(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// This many parts per million of `whole`.
#[must_use]
pub fn part(whole: u64, ppm: u32) -> u64 {
    mul_div(whole, u64::from(ppm), u64::from(WHOLE))
}

/// The bytes that `rate` bytes per second make in `time`.
#[must_use]
pub fn bytes_in(rate: u64, time: Nanos) -> u64 {
    mul_div(rate, time, SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_saturate() {
        assert_eq!(mul_div(u64::MAX, u64::MAX, 1), u64::MAX);
        assert_eq!(mul_div(7, 3, 0), 21);
        assert_eq!(part(1000, WHOLE / 4), 250);
        assert_eq!(bytes_in(50, 2 * SECOND), 100);
    }
}
