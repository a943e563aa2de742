//! Fuzzed inputs without a fuzzer: a run of many inputs, the same each time.

use std::ops::Range;

use crate::{Random, scaled, seed};

/// A run of fuzzed inputs.
#[derive(Clone, Debug)]
pub struct FuzzRun {
    /// `EBBD_FUZZ_SEED`, or the default of the test.
    pub seed: u64,
    /// The number of inputs.
    pub inputs: u64,
    /// Distinguishes runs of one seed.
    salt: u64,
    /// The length of an input, in words of 8 bytes.
    words: Range<u64>,
}

impl FuzzRun {
    /// A run of `full` inputs at the full scale, each of so many words of 8 bytes.
    #[must_use]
    pub fn new(default_seed: u64, full: u64, words: Range<u64>) -> FuzzRun {
        let seed = seed("EBBD_FUZZ_SEED", default_seed);
        FuzzRun { seed, inputs: scaled(full), salt: 0, words }
    }

    /// The same run with other inputs.
    #[must_use]
    pub fn salted(self, salt: u64) -> FuzzRun {
        FuzzRun { salt, ..self }
    }

    /// Checks each input, up to the first finding.
    ///
    /// # Errors
    /// The finding, with the seed and the input.
    pub fn hunt(&self, mut judge: impl FnMut(&[u8]) -> Result<(), String>) -> Result<(), String> {
        let mut random = Random::new(self.seed ^ self.salt);
        let mut input = Vec::new();
        for number in 0..self.inputs {
            input.clear();
            for _ in 0..self.words.start + random.below(self.words.end - self.words.start) {
                input.extend_from_slice(&random.next().to_le_bytes());
            }
            judge(&input).map_err(|finding| {
                format!("seed {}, input {number}, bytes {input:02x?}:\n{finding}", self.seed)
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::FuzzRun;

    #[test]
    fn inputs_repeat_and_the_first_finding_ends_the_run() {
        let run = FuzzRun::new(7, 500, 2..5);
        let collect = |run: &FuzzRun| {
            let mut inputs = Vec::new();
            let judged = run.hunt(|input| {
                inputs.push(input.to_vec());
                Ok(())
            });
            assert_eq!(judged, Ok(()));
            inputs
        };
        let inputs = collect(&run);
        assert_eq!(inputs.len() as u64, run.inputs);
        assert!(inputs.iter().all(|input| [16, 24, 32].contains(&input.len())));
        assert_eq!(inputs, collect(&run));
        assert_ne!(inputs, collect(&run.clone().salted(1)));
        let finding = run.hunt(|_| Err("broken".to_owned())).unwrap_err();
        assert!(finding.contains("input 0") && finding.ends_with("broken"), "{finding}");
    }
}
