//! The driver of one split virtqueue: 4 KiB requests, of one direction.
//!
//! It notifies and sleeps as Linux's `virtio_blk` does: a notification only if the device's event index asks for it, an
//! interrupt only once all completions were taken. Descriptors are written once, at the start: a request then costs its
//! driver little, so that what is measured is the backend.
//!
//! Source: virtio 1.2, section 2.7.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;

use ebb_guest_ring::{SharedMemory, full_barrier, read_barrier, write_barrier};

/// Descriptors of a ring: as QEMU's default.
pub const RING_SIZE: u16 = 128;
/// Most requests in flight in a queue: a chain has three descriptors.
pub const MOST_IN_FLIGHT: u16 = RING_SIZE / 3;
/// Shared memory of a queue.
pub const QUEUE_BYTES: usize = 1 << 18;
/// Bytes of a request.
pub const BLOCK: usize = 4096;

const AVAILABLE: usize = 0x1000;
const USED: usize = 0x2000;
const HEADERS: usize = 0x3000;
const STATUS: usize = 0x4000;
const TABLES: usize = 0x5000;
const DATA: usize = 0x8000;
/// Bytes of an indirect table, rounded up.
const TABLE: usize = 64;

const NEXT: u64 = 1;
const WRITABLE: u64 = 2;
const INDIRECT: u64 = 4;
/// `VIRTQ_USED_F_NO_NOTIFY` and `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const SUPPRESS: u16 = 1;
const KIND_READ: u64 = 0;
const KIND_WRITE: u64 = 1;
/// A status that no backend writes.
const UNSET: u8 = 0xff;

/// What was negotiated for rings.
#[derive(Debug, Clone, Copy)]
pub struct RingFormat {
    /// Notifications by index.
    pub event_idx: bool,
    /// A chain is in a table of its own.
    pub indirect: bool,
}

/// See the module. A slot is a place for a request in flight. All accesses are within the queue's memory, so that none of
/// them fails.
#[derive(Debug)]
pub struct DriverQueue {
    memory: Arc<SharedMemory>,
    base: usize,
    format: RingFormat,
    kick: OwnedFd,
    call: OwnedFd,
    write: bool,
    available: u16,
    /// Up to here the device was notified of requests.
    notified: u16,
    used: u16,
}

fn size() -> usize {
    usize::from(RING_SIZE)
}

fn ring_slot(index: u16) -> usize {
    usize::from(index % RING_SIZE)
}

impl DriverQueue {
    /// A queue in the shared memory from `base` on, with the descriptors of notifications (kick, call).
    pub(super) fn new(
        memory: &Arc<SharedMemory>,
        base: usize,
        format: RingFormat,
        [kick, call]: [OwnedFd; 2],
        write: bool,
    ) -> DriverQueue {
        let memory = Arc::clone(memory);
        let queue = DriverQueue {
            memory,
            base,
            format,
            kick,
            call,
            write,
            available: 0,
            notified: 0,
            used: 0,
        };
        (0..MOST_IN_FLIGHT).for_each(|slot| queue.describe(slot));
        queue
    }

    pub(super) fn addresses(&self) -> [u64; 3] {
        [0, AVAILABLE, USED].map(|at| (self.base + at) as u64)
    }

    pub(super) fn kick(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    pub(super) fn call(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    fn data(&self, slot: u16) -> usize {
        self.base + DATA + usize::from(slot) * BLOCK
    }

    /// Writes a descriptor.
    fn put(&self, at: usize, address: usize, bytes: usize, flags: u64, next: u64) {
        let word = bytes as u64 | flags << 32 | next << 48;
        let _ = self.memory.write_words(self.base + at, &[address as u64, word]);
    }

    /// Writes the descriptors of a slot.
    fn describe(&self, slot: u16) {
        let at = usize::from(slot);
        let first = u64::from(slot) * 3;
        let data_flag = if self.write { 0 } else { WRITABLE };
        let parts = [
            (self.base + HEADERS + 16 * at, 16, NEXT),
            (self.data(slot), BLOCK, NEXT | data_flag),
            (self.base + STATUS + at, 1, WRITABLE),
        ];
        for (index, (address, bytes, flags)) in parts.into_iter().enumerate() {
            let next = index as u64 + 1;
            if self.format.indirect {
                self.put(TABLES + at * TABLE + 16 * index, address, bytes, flags, next);
            } else {
                self.put(16 * (3 * at + index), address, bytes, flags, first + next);
            }
        }
        if self.format.indirect {
            self.put(16 * at, self.base + TABLES + at * TABLE, 48, INDIRECT, 0);
        }
        let kind = if self.write { KIND_WRITE } else { KIND_READ };
        let _ = self.memory.write_words(self.base + HEADERS + 16 * at, &[kind, 0]);
    }

    /// Makes a request of `block` available. A written block begins with its number.
    pub fn submit(&mut self, slot: u16, block: u64) {
        let at = usize::from(slot);
        self.memory.store_u64(self.base + HEADERS + 16 * at + 8, block * 8);
        let _ = self.memory.write(self.base + STATUS + at, &[UNSET]);
        if self.write {
            self.memory.store_u64(self.data(slot), block);
        }
        let head = if self.format.indirect { slot } else { 3 * slot };
        let entry = self.base + AVAILABLE + 4 + 2 * ring_slot(self.available);
        self.memory.store_u16(entry, head);
        self.available = self.available.wrapping_add(1);
    }

    /// Publishes what was submitted, and notifies the device if it asks for that.
    ///
    /// # Errors
    /// Of the system call.
    pub fn publish(&mut self) -> io::Result<()> {
        write_barrier();
        self.memory.store_u16(self.base + AVAILABLE + 2, self.available);
        full_barrier();
        let (old, new) = (self.notified, self.available);
        self.notified = new;
        let asked = if self.format.event_idx {
            let event = self.memory.load_u16(self.base + USED + 4 + 8 * size());
            // `vring_need_event` of the standard.
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.memory.load_u16(self.base + USED) & SUPPRESS == 0
        };
        if asked {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Takes all completions; `done` gets each slot. Returns how many failed.
    pub fn reap(&mut self, done: &mut Vec<u16>) -> u64 {
        let mut failures = 0;
        loop {
            let index = self.memory.load_u16(self.base + USED + 2);
            if index == self.used {
                return failures;
            }
            read_barrier();
            while self.used != index {
                let entry = self.base + USED + 4 + 8 * ring_slot(self.used);
                let head = self.memory.load(entry);
                let slot = if self.format.indirect { head } else { head / 3 };
                let slot = u16::try_from(slot).ok().filter(|slot| *slot < MOST_IN_FLIGHT);
                let mut status = [UNSET];
                if let Some(slot) = slot {
                    let _ = self.memory.read(self.base + STATUS + usize::from(slot), &mut status);
                    done.push(slot);
                }
                failures += u64::from(status != [0]);
                self.used = self.used.wrapping_add(1);
            }
        }
    }

    /// The first word of a slot's data.
    #[must_use]
    pub fn first_word(&self, slot: u16) -> u64 {
        self.memory.load_u64(self.data(slot))
    }

    /// Asks for an interrupt at the next completion, and waits for it if there is none yet.
    ///
    /// # Errors
    /// Of the system call.
    pub fn wait(&mut self) -> io::Result<()> {
        if self.format.event_idx {
            self.memory.store_u16(self.base + AVAILABLE + 4 + 2 * size(), self.used);
            full_barrier();
            if self.memory.load_u16(self.base + USED + 2) != self.used {
                return Ok(());
            }
        }
        loop {
            match rustix::io::read(&self.call, &mut [0; 8]) {
                // The backend, which shares the open file, wants no calls of its own to block.
                Err(Errno::AGAIN) => fcntl_setfl(&self.call, OFlags::empty())?,
                other => return Ok(other.map(drop)?),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn queue(event_idx: bool, indirect: bool) -> DriverQueue {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, QUEUE_BYTES as u64).unwrap();
        let memory = SharedMemory::map(fd.as_fd(), 0, QUEUE_BYTES, Arc::default()).unwrap();
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let format = RingFormat { event_idx, indirect };
        DriverQueue::new(&Arc::new(memory), 0, format, [event(), event()], false)
    }

    /// Completes the request with this head, as a device.
    fn complete(queue: &DriverQueue, slot: u16, head: u16, used: u16, status: u8) {
        let memory = &queue.memory;
        assert!(memory.write(STATUS + usize::from(slot), &[status]));
        memory.store(USED + 4 + 8 * ring_slot(used), head.into());
        memory.store_u16(USED + 2, used.wrapping_add(1));
    }

    #[test]
    fn a_request_is_described_and_its_completion_taken() {
        for indirect in [false, true] {
            let mut queue = queue(true, indirect);
            queue.submit(5, 77);
            queue.publish().unwrap();
            let head = queue.memory.load_u16(AVAILABLE + 4);
            assert_eq!(head, if indirect { 5 } else { 15 });
            let table = if indirect { TABLES + 5 * TABLE } else { 16 * 15 };
            let mut descriptors = [0; 6];
            assert!(queue.memory.read_words(table, &mut descriptors));
            let header = usize::try_from(descriptors[0]).unwrap();
            assert_eq!(queue.memory.load_u64(header + 8), 77 * 8, "in sectors");
            assert_eq!(descriptors[2], queue.data(5) as u64);
            assert_eq!(descriptors[3] & 0xffff_ffff, BLOCK as u64);
            let mut done = Vec::new();
            assert_eq!(queue.reap(&mut done), 0);
            assert!(done.is_empty());
            complete(&queue, 5, head, 0, 0);
            assert_eq!(queue.reap(&mut done), 0);
            assert_eq!(done, [5]);
            queue.submit(5, 1);
            complete(&queue, 5, head, 1, 1);
            assert_eq!(queue.reap(&mut done), 1, "an I/O error");
        }
    }

    #[test]
    fn the_device_is_notified_only_if_it_asks() {
        let mut queue = queue(true, true);
        let kicked = |queue: &DriverQueue| rustix::io::read(&queue.kick, &mut [0; 8]).is_ok();
        queue.submit(0, 0);
        queue.publish().unwrap();
        assert!(kicked(&queue));
        queue.submit(1, 0);
        queue.publish().unwrap();
        assert!(!kicked(&queue), "its event index is that of the first request");
        queue.memory.store_u16(USED + 4 + 8 * size(), 2);
        queue.submit(2, 0);
        queue.publish().unwrap();
        assert!(kicked(&queue));
    }
}
