//! The requests that a KVM guest submits.

use std::time::{Duration, Instant};

use ebb_vhost_proto::VirtioFeatures;

use super::drivers::driver::{Buffer, Driver, kind};
use super::drivers::guest::DATA;
use super::{FAILURES, ID_BYTES, Kind, KvmGuest, Request};
use crate::oracle::{Change, Oracle, SECTOR};
use crate::random::Random;

/// Bytes of the memory for data.
const DATA_BYTES: u64 = 8 << 20;
/// Most descriptors of a request.
const DESCRIPTORS: usize = 5;

impl KvmGuest {
    /// Whether a queue has room for a request.
    pub(super) fn room(&self, driver: &Driver) -> bool {
        let needed = if self.wishes.indirect { 1 } else { DESCRIPTORS };
        driver.room() >= needed
    }

    pub(super) fn submit_all(&mut self, oracle: &mut Oracle, now: Instant) -> bool {
        let mut asked = false;
        while self.wants().is_some_and(|at| at <= now) {
            let queue = self.random.index(self.wishes.queues);
            if !self.room(&self.drivers[queue]) {
                break;
            }
            self.submit(queue, oracle, now);
            asked = true;
            let pause = self.random.below(self.manner.pause_us + 1);
            if pause > 0 {
                self.next_at = now + Duration::from_micros(pause);
            }
        }
        for (driver, kick) in self.drivers.iter_mut().zip(&self.kicks).filter(|_| asked) {
            if driver.publish(&self.memory) {
                rustix::io::write(kick, &1u64.to_ne_bytes()).unwrap();
            }
        }
        if self.failures >= FAILURES {
            self.failures = 0;
            self.reset();
        }
        asked
    }

    fn submit(&mut self, queue: usize, oracle: &mut Oracle, now: Instant) {
        // By the size that it knows: requests may lie beyond the end after a shrink.
        let size = self.size;
        let features = self.features.unwrap_or(VirtioFeatures::NONE);
        let random = &mut self.random;
        let count = 1 + random.index(self.manner.longest.min(size));
        let first = random.index(self.manner.reach.min(size)).min(size - count);
        let (first, count) = if random.chance(70) && size >= 8 {
            let first = first / 8 * 8;
            (first, count.next_multiple_of(8).min((size - first) / 8 * 8).max(8).min(size - first))
        } else {
            (first, count)
        };
        // A device without flushes makes each change stable.
        let fua = !self.wishes.flushes;
        let change =
            |change, oracle: &mut Oracle| Kind::Change(oracle.begin(change, first, count, fua));
        let (kind, number) = if self.wishes.flushes && random.chance(self.manner.flushes) {
            (Kind::Flush { begun: oracle.now() }, kind::FLUSH)
        } else if random.chance(self.manner.reads) {
            (Kind::Read { begun: oracle.begin_read() }, kind::READ)
        } else {
            match random.below(24) {
                0 | 1 if features.contains(VirtioFeatures::BLK_DISCARD) => {
                    (change(Change::Discard, oracle), kind::DISCARD)
                }
                2 | 3 if features.contains(VirtioFeatures::BLK_WRITE_ZEROES) => {
                    (change(Change::Zeroes, oracle), kind::WRITE_ZEROES)
                }
                4 => (Kind::Id, kind::GET_ID),
                _ => (change(Change::Data, oracle), kind::WRITE),
            }
        };
        self.send(queue, kind, (number, first, count), oracle, now);
    }

    fn send(
        &mut self,
        queue: usize,
        kind: Kind,
        (number, first, count): (u32, usize, usize),
        oracle: &Oracle,
        now: Instant,
    ) {
        let driver = &mut self.drivers[queue];
        let (size, resizes) = oracle.end_and_resizes();
        let ranged = !matches!(kind, Kind::Flush { .. } | Kind::Id);
        let beyond = (ranged && first + count > size).then_some(resizes);
        let rooms = self.wishes.queues as u64 * u64::from(self.wishes.size);
        let room = DATA_BYTES / rooms;
        let place = queue as u64 * u64::from(self.wishes.size) + u64::from(driver.next_head());
        let at = DATA + place * room;
        let (bytes, sector) = match number {
            kind::WRITE => {
                let mut data = vec![0; count * SECTOR];
                if let Kind::Change(writing) = &kind {
                    Oracle::fill(writing.number, first, &mut data);
                }
                (data, first as u64)
            }
            kind::READ => (vec![0xee; count * SECTOR], first as u64),
            kind::DISCARD | kind::WRITE_ZEROES => {
                let unmap = u32::from(number == kind::WRITE_ZEROES && self.random.chance(50));
                let range = [first as u64, count as u64 | u64::from(unmap) << 32];
                (range.map(u64::to_le_bytes).concat(), 0)
            }
            kind::GET_ID => (vec![0xee; ID_BYTES], 0),
            _ => (Vec::new(), 0),
        };
        self.memory.write(at, &bytes);
        let from_device = [kind::READ, kind::GET_ID].contains(&number);
        let buffers = pieces(&mut self.random, at, bytes.len(), from_device);
        let head = driver.request(&self.memory, number, sector, &buffers);
        if self.told {
            println!("    guest {} submits {queue}/{head}: {number} {first}+{count}", self.number);
        }
        let request = Request { kind, first, count, data: at, beyond, sent: now };
        let before = self.open.insert((queue, head), request);
        assert!(before.is_none(), "a head is free");
    }
}

/// Up to three buffers of these bytes.
fn pieces(random: &mut Random, at: u64, bytes: usize, write: bool) -> Vec<Buffer> {
    let sectors = bytes / SECTOR;
    let mut buffers = Vec::new();
    let mut from = 0;
    for _ in 0..2 {
        let rest = sectors.saturating_sub(from / SECTOR);
        if rest > 1 && random.chance(40) {
            let length = random.between(1, rest as u64 - 1) as usize * SECTOR;
            buffers.push((at + from as u64, length as u32, write));
            from += length;
        }
    }
    if bytes > from {
        buffers.push((at + from as u64, (bytes - from) as u32, write));
    }
    buffers
}
