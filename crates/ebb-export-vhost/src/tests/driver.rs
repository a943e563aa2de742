//! What drivers of both formats share: requests, and what they are made of.

use super::packed_driver::PackedDriver;
use super::split_driver::SplitDriver;
use super::world::{REGIONS, Random, TABLE_ENTRIES, World, join};
use crate::chain::Chain;

/// A buffer of the guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) write: bool,
}

/// How many of a chain's buffers are descriptors of the ring; a table has the others.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) direct: usize,
    pub(super) buffers: Vec<Buffer>,
}

impl Layout {
    /// Descriptors of the ring that it needs.
    pub(super) fn descriptors(&self) -> usize {
        self.direct + usize::from(self.direct < self.buffers.len())
    }

    /// A random one with at most `most` descriptors of the ring, which is more than 0.
    pub(super) fn random(random: &mut Random, most: usize, indirect: bool) -> Layout {
        let limit = if indirect { TABLE_ENTRIES } else { most as u64 };
        let few = limit.min(6);
        let bound = if random.below(8) == 0 { limit } else { few };
        let count = 1 + random.below(bound) as usize;
        let writable_from = random.below(count as u64 + 1) as usize;
        let buffers = (0..count).map(|number| Buffer::random(random, number >= writable_from));
        let buffers = buffers.collect();
        let direct = match random.below(3) {
            _ if !indirect => count,
            0 if count <= most => count,
            1 => random.below(count.min(most) as u64) as usize,
            _ => 0,
        };
        Layout { direct, buffers }
    }
}

impl Buffer {
    fn random(random: &mut Random, write: bool) -> Buffer {
        let (first, second) = (REGIONS[0], REGIONS[1]);
        let (address, len) = match random.below(16) {
            // Across both adjacent regions.
            0 => (second.0 - 1 - random.below(5000), 5001 + random.below(9000)),
            1 => (REGIONS[2].0 + random.below(0x8_0000), random.below(3) * 4096),
            2 => (REGIONS[2].0 + random.below(0x8_0000), random.below(0x8_0000)),
            _ => (first.0 + 0x18_0000 + random.below(0x6_0000), 1 + random.below(8192)),
        };
        Buffer { address, len: len as u32, write }
    }
}

/// A request of the driver that is not completed.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) number: u64,
    pub(super) buffers: Vec<Buffer>,
    /// By the device that lives, and by any.
    taken: bool,
    executed: bool,
}

/// The requests in flight, by what names them to the device.
#[derive(Default)]
pub(super) struct Requests {
    in_flight: Vec<Option<Request>>,
    /// The number of the request that the device has taken last.
    last_taken: Option<u64>,
    pub(super) sent: u64,
    pub(super) done: u64,
}

impl Requests {
    pub(super) fn add(&mut self, id: u16, layout: Layout) {
        let id = usize::from(id);
        if self.in_flight.len() <= id {
            self.in_flight.resize(id + 1, None);
        }
        let request =
            Request { number: self.sent, buffers: layout.buffers, taken: false, executed: false };
        assert!(self.in_flight[id].replace(request).is_none(), "a name is used twice");
        self.sent += 1;
    }

    /// The device has completed `id`.
    pub(super) fn finish(&mut self, id: u16, written: u32) -> Request {
        let request = self.in_flight[usize::from(id)].take();
        let request = request.unwrap_or_else(|| panic!("{id} is completed twice"));
        assert_eq!(written, (request.number * 7) as u32, "the length of another request");
        assert!(request.executed, "a request is completed that no device has taken");
        self.done += 1;
        request
    }

    /// The device has taken `id`: checks the chain. Returns the length that it is to report.
    pub(super) fn take(&mut self, world: &World, id: u16, chain: &Chain) -> u32 {
        let request = self.in_flight[usize::from(id)].as_mut();
        let request = request.unwrap_or_else(|| panic!("{id} is not in flight"));
        assert!(!std::mem::replace(&mut request.taken, true), "{id} is taken twice");
        request.executed = true;
        let before = self.last_taken.replace(request.number);
        assert!(before < Some(request.number), "{id} is taken out of order");
        for (write, spans) in [(false, &chain.readable), (true, &chain.writable)] {
            let buffers = request.buffers.iter().filter(|buffer| buffer.write == write);
            let expected = join(buffers.map(|buffer| (buffer.address, u64::from(buffer.len))));
            assert_eq!(world.ranges(spans), expected);
        }
        world.check_spans(chain);
        (request.number * 7) as u32
    }

    /// The device has died: another one may take what it had taken. What was executed stays so.
    pub(super) fn forget_takes(&mut self) {
        self.in_flight.iter_mut().flatten().for_each(|request| request.taken = false);
        self.last_taken = None;
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.iter().all(Option::is_none)
    }
}

/// A correct driver of either format.
pub(super) enum Driver {
    Split(SplitDriver),
    Packed(PackedDriver),
}

macro_rules! either {
    ($driver:expr, $inner:ident => $do:expr) => {
        match $driver {
            Driver::Split($inner) => $do,
            Driver::Packed($inner) => $do,
        }
    };
}

impl Driver {
    /// A driver whose indices begin at `start`.
    pub(super) fn new(world: &World, start: u16) -> Driver {
        match world.features.packed {
            false => Driver::Split(SplitDriver::new(world, start)),
            true => Driver::Packed(PackedDriver::new(world, start)),
        }
    }

    /// What the device begins with.
    pub(super) fn base(&self) -> u32 {
        either!(self, driver => driver.base())
    }

    /// Free descriptors of the ring.
    pub(super) fn room(&self) -> usize {
        either!(self, driver => driver.room())
    }

    /// Prepares a request for which there is room.
    pub(super) fn add(&mut self, world: &World, layout: Layout) {
        either!(self, driver => driver.add(world, layout));
    }

    /// Makes the prepared requests available; true if the device has to be notified.
    pub(super) fn publish(&mut self, world: &World) -> bool {
        either!(self, driver => driver.publish(world))
    }

    /// Takes one completion.
    pub(super) fn poll(&mut self, world: &World) -> Option<Request> {
        either!(self, driver => driver.poll(world))
    }

    /// Asks for a notification; true if there is a completion already.
    pub(super) fn arm(&mut self, world: &World) -> bool {
        either!(self, driver => driver.arm(world))
    }

    pub(super) fn disarm(&mut self, world: &World) {
        either!(self, driver => driver.disarm(world));
    }

    pub(super) fn requests(&mut self) -> &mut Requests {
        either!(self, driver => &mut driver.requests)
    }
}
