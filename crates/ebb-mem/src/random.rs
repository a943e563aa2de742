//! Random numbers from a seed, to spread times, and for simulations: SplitMix64 (Steele, Lea, Flood
//! 2014). Not for secrets.
//!
//! A user keeps the state, adds [`STEP`] to it for each number, and [`mix`]es it.

/// From one state to the next.
pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The number of a state.
#[inline]
#[must_use]
pub fn mix(state: u64) -> u64 {
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::{STEP, mix};

    /// The published sequence of the seed 1234567.
    #[test]
    fn states_give_the_numbers_of_split_mix() {
        assert_eq!(mix(1_234_567 + STEP), 6_457_827_717_110_365_317);
        assert_eq!(
            mix(1_234_567_u64.wrapping_add(STEP.wrapping_mul(2))),
            3_203_168_211_198_807_973
        );
    }
}
