//! What a power failure may leave of a recorded run.

use ebb_store::{Record, TestStore};

use super::{Random, index};

const SECTOR: u64 = 512;

/// A sector with this stamp.
pub fn stamped(stamp: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat(64)
}

/// What a crash may leave: for each sector the stable content, and what was written since, in order.
pub struct Remains {
    /// Zeroes elsewhere.
    stable: std::collections::BTreeMap<u64, Vec<u8>>,
    later: std::collections::BTreeMap<u64, Vec<(usize, Vec<u8>)>>,
}

impl Remains {
    /// Of a disk on which everything is stable.
    pub fn of(disk: &TestStore) -> Remains {
        let content = disk.content();
        let sectors = (0..).zip(content.chunks(index(SECTOR)).map(<[u8]>::to_vec));
        let stable = sectors.filter(|(_, data)| data.iter().any(|byte| *byte != 0)).collect();
        Remains { stable, later: Default::default() }
    }

    /// Carries out the next record, the one of this number.
    pub fn take(&mut self, number: usize, record: &Record) {
        match record {
            Record::Write { offset, data, fua } => {
                assert!(!fua, "an overlay flushes");
                for (at, bytes) in (offset / SECTOR..).zip(data.chunks(index(SECTOR))) {
                    self.later.entry(at).or_default().push((number, bytes.to_vec()));
                }
            }
            Record::Left { .. } => panic!("no write fails"),
            Record::Flush { covers } => {
                for (sector, writes) in &mut self.later {
                    let count = writes.iter().take_while(|(number, _)| number < covers).count();
                    if let Some((_, data)) = writes.drain(..count).next_back() {
                        self.stable.insert(*sector, data);
                    }
                }
                self.later.retain(|_, writes| !writes.is_empty());
            }
        }
    }

    /// A store as a crash may leave it.
    pub fn crash(&self, random: &mut Random, size: u64) -> TestStore {
        let store = TestStore::new(size, 1);
        let change = |sector: &u64, data: &[u8]| store.change(sector * SECTOR, data);
        self.stable.iter().for_each(|(sector, data)| change(sector, data));
        let all = random.below(4);
        for (sector, writes) in &self.later {
            let kept = match all {
                0 => writes.len(),
                1 => 0,
                _ => index(random.below(writes.len() as u64 + 1)),
            };
            if let Some((_, data)) = kept.checked_sub(1).map(|last| &writes[last]) {
                change(sector, data);
            }
        }
        store
    }
}
