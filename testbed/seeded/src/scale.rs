//! How much tests with seeds do: inputs, kills, rounds. `EBBD_TEST_SCALE` is the one setting: 1 if
//! it is not set, as for `make test`; [`FULL`] for `make test-all`; more for a long search.

/// The scale of `make test-all`.
pub const FULL: u64 = 50;

/// What a test does that does `full` at the full scale: in proportion to the scale, and at least 1.
///
/// # Panics
/// If `EBBD_TEST_SCALE` is not a positive number: a mistake would make a long search a short one.
#[must_use]
pub fn scaled(full: u64) -> u64 {
    let scale = std::env::var("EBBD_TEST_SCALE").map_or(1, |text| match text.parse() {
        Ok(scale) if scale > 0 => scale,
        _ => panic!("EBBD_TEST_SCALE is a positive number, not {text:?}"),
    });
    part(full, scale)
}

fn part(full: u64, scale: u64) -> u64 {
    (full.saturating_mul(scale) / FULL).max(1)
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn counts_follow_the_scale_and_are_never_zero() {
        assert_eq!((part(1_000_000, 1), part(1_000_000, 50)), (20_000, 1_000_000));
        assert_eq!((part(3, 1), part(3, 50), part(15, 3334)), (1, 3, 1000));
        assert_eq!(part(u64::MAX, 100), u64::MAX / 50);
    }
}
