//! Hypercalls counted: reads what `xentrace` wrote in dom0.
//!
//! A record is a word of 32 bits (28 for the event, 3 for the number of words that follow, 1 that says
//! whether a time of 64 bits stands before them). A record of its own says which processor those after
//! it come from; dom0 has processor 0 for itself.

use std::collections::BTreeMap;

/// Hypercalls of one processor, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hypercalls(BTreeMap<u32, u64>);

/// Grant-table operations: map, unmap, copy.
pub const GRANT_TABLE: u32 = 20;
/// Event-channel operations: a notification, an unmask.
pub const EVENT_CHANNEL: u32 = 32;
/// Return from the kernel to a process: one for each system call that takes the slow way.
pub const IRET: u32 = 23;

const CPU_CHANGE: u32 = 0x1f003;
const HYPERCALL: u32 = 0x20100d;

impl Hypercalls {
    /// Counts those of processor `cpu` in a trace, which may be cut off at its end.
    #[must_use]
    pub fn read(trace: &[u8], cpu: u32) -> Hypercalls {
        let mut counts = BTreeMap::new();
        let mut words =
            trace.chunks_exact(4).filter_map(|w| w.try_into().ok().map(u32::from_le_bytes));
        let mut current = None;
        while let Some(head) = words.next() {
            let (event, extra, timed) = (head & 0x0fff_ffff, head >> 28 & 7, head >> 31 == 1);
            if timed && words.by_ref().take(2).count() < 2 {
                break;
            }
            let values: Vec<u32> = words.by_ref().take(extra.try_into().unwrap_or(0)).collect();
            match (event, values.first()) {
                (CPU_CHANGE, Some(cpu)) => current = Some(*cpu),
                (HYPERCALL, Some(call)) if current == Some(cpu) => {
                    *counts.entry(call & 0xf_ffff).or_default() += 1;
                }
                _ => {}
            }
        }
        Hypercalls(counts)
    }

    /// Calls of one number.
    #[must_use]
    pub fn of(&self, number: u32) -> u64 {
        self.0.get(&number).copied().unwrap_or(0)
    }

    /// All calls.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.0.values().sum()
    }

    /// What is left without those of `idle`, a trace of the same length without the load.
    #[must_use]
    pub fn without(&self, idle: &Hypercalls) -> Hypercalls {
        let rest =
            |(&number, &count): (&u32, &u64)| (number, count.saturating_sub(idle.of(number)));
        Hypercalls(self.0.iter().map(rest).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_processor() {
        let record = |event: u32, values: &[u32], timed: bool| {
            let extra = u32::try_from(values.len()).unwrap();
            let mut words = vec![event | extra << 28 | u32::from(timed) << 31];
            if timed {
                words.extend([1, 2]);
            }
            words.extend(values);
            words
        };
        let words: Vec<u32> = [
            record(HYPERCALL, &[20], true),
            record(CPU_CHANGE, &[0], false),
            record(HYPERCALL, &[20], true),
            record(HYPERCALL, &[0x10_0000 | 32, 5, 6], true),
            record(0x20_200e, &[20], true),
            record(CPU_CHANGE, &[1], false),
            record(HYPERCALL, &[20, 1], true),
            record(CPU_CHANGE, &[0], false),
            record(HYPERCALL, &[20, 1], false),
            vec![HYPERCALL | 3 << 28, 20],
        ]
        .concat();
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.push(1);
        let found = Hypercalls::read(&bytes, 0);
        assert_eq!((found.of(20), found.of(32), found.all()), (3, 1, 4), "the cut one counts, too");
        let idle = Hypercalls::read(&bytes, 1);
        assert_eq!((idle.of(20), found.without(&idle).of(20)), (1, 2));
        assert_eq!(Hypercalls::read(&[], 0), Hypercalls::default());
    }
}
