//! A load that is cut off at any moment, and verified.

use std::collections::BTreeMap;

use super::driver::kind;
use super::{Done, Frontend, Random, pattern, status};

/// A guest that writes different data to each of its heads' places, and knows what must be there.
#[derive(Default)]
pub struct Load {
    pub written: u64,
    /// By queue and head, the data that is being written.
    flying: BTreeMap<(usize, u16), u64>,
    /// By place, the data that was written last.
    stored: BTreeMap<u64, u64>,
}

impl Load {
    fn sector(queue: usize, head: u16) -> u64 {
        (queue as u64 * 64 + u64::from(head)) * 16
    }

    pub fn submit(&mut self, disk: &mut Frontend, queue: usize, random: &mut Random) {
        for _ in 0..random.below(12) {
            if disk.drivers[queue].room() < 4 {
                break;
            }
            let head = disk.drivers[queue].next_head();
            let len = 512 * (1 + random.below(16)) as usize;
            match random.below(4) {
                0 => _ = disk.request(queue, kind::READ, Load::sector(queue, head), len as u32),
                1 => _ = disk.request(queue, kind::FLUSH, 0, 0),
                _ => {
                    self.written += 1;
                    let at = disk.drivers[queue].data(head);
                    disk.guest.write(at, &pattern(self.written, 8192));
                    disk.request(queue, kind::WRITE, Load::sector(queue, head), 8192);
                    self.flying.insert((queue, head), self.written);
                }
            }
        }
        disk.publish(queue);
    }

    fn note(&mut self, queue: usize, done: Done) {
        assert_eq!(done.status, status::OK);
        if let Some(data) = self.flying.remove(&(queue, done.head)) {
            self.stored.insert(Load::sector(queue, done.head), data);
        }
    }

    pub fn take(&mut self, disk: &mut Frontend, queue: usize) {
        while let Some(done) = disk.drivers[queue].take(&disk.guest) {
            self.note(queue, done);
        }
    }

    pub fn finish(&mut self, disk: &mut Frontend) {
        for queue in 0..disk.drivers.len() {
            while !disk.drivers[queue].busy.is_empty() {
                let done = disk.wait(queue);
                self.note(queue, done);
            }
        }
    }

    /// Reads what was written.
    pub fn verify(&self, disk: &mut Frontend) {
        for (sector, data) in &self.stored {
            assert!(disk.read(0, *sector, 8192) == pattern(*data, 8192), "sector {sector}");
        }
    }
}
