//! What is refused, and with which fault; and what is accepted at its limits.

use super::world::{REGIONS, World};
use crate::chain::{Chain, RingFault, flag};
use crate::inflight::InflightFault;
use crate::ring_setup::{RingFeatures, RingSetup, SetupFault};
use crate::virtqueue::Virtqueue;

const SIZE: u16 = 8;
const DATA: u64 = REGIONS[0].0 + 0x18_0000;
const N: u16 = flag::NEXT;
const W: u16 = flag::WRITE;
const I: u16 = flag::INDIRECT;

/// A descriptor: address, length, flags.
type Entry = (u64, u32, u16);

fn world(packed: bool) -> World {
    World::new(SIZE, RingFeatures { packed, indirect: true, event_idx: false })
}

/// Puts one descriptor of a table or ring.
fn put(world: &World, at: u64, number: usize, entry: Entry, mark: u16) {
    let (address, len, flags) = entry;
    let tail = match world.features.packed {
        false => [flags, number as u16 + 1],
        true => [0, flags | mark],
    };
    world.descriptor(at + 16 * number as u64, address, len, tail);
}

/// Takes the one chain of these descriptors of the ring and of a table.
fn take(world: &World, ring: &[Entry], table: &[Entry]) -> Result<Chain, RingFault> {
    world.reset();
    let [descriptors, available, _] = world.rings();
    for (number, entry) in table.iter().enumerate() {
        put(world, world.table(0), number, *entry, 0);
    }
    for (number, entry) in ring.iter().enumerate() {
        put(world, descriptors, number, *entry, 1 << 7);
    }
    if !world.features.packed {
        world.store_u16(available + 2, 1);
    }
    let mut queue = world.try_queue(start(world), true).unwrap();
    let mut chain = Chain::default();
    let before = queue.base();
    let taken = queue.take(&world.memory, &mut chain);
    if taken.is_err() {
        assert_eq!((queue.base(), queue.in_flight()), (before, 0), "as before the call");
        assert_eq!(queue.take(&world.memory, &mut chain), taken);
    }
    taken.map(|token| {
        assert!(token.is_some());
        world.check_spans(&chain);
        chain
    })
}

fn start(world: &World) -> u32 {
    if world.features.packed { 1 << 15 | 1 << 31 } else { 0 }
}

fn fault(world: &World, ring: &[Entry], table: &[Entry]) -> RingFault {
    take(world, ring, table).unwrap_err()
}

#[test]
fn chains_that_virtio_forbids_are_refused() {
    for packed in [false, true] {
        let world = world(packed);
        let table = world.table(0);
        let ok = (DATA, 16, 0);
        let f = |ring: &[Entry], table: &[Entry]| fault(&world, ring, table);
        assert_eq!(f(&[(DATA, 16, W | N), ok], &[]), RingFault::ReadableAfterWritable);
        assert_eq!(f(&[(DATA, 0, W | N), ok], &[]), RingFault::ReadableAfterWritable);
        assert_eq!(f(&[(1, 16, 0)], &[]), RingFault::OutsideMemory);
        assert_eq!(f(&[(u64::MAX - 4, 16, 0)], &[]), RingFault::OutsideMemory);
        let end = REGIONS[1].0 + REGIONS[1].2 as u64;
        assert_eq!(f(&[(end - 4, 5, 0)], &[]), RingFault::OutsideMemory, "the gap behind a region");
        assert_eq!(f(&[(table, 16, I | N), ok], &[ok]), RingFault::TableNotLast);
        assert_eq!(f(&[(table, 16, I)], &[(DATA, 16, I)]), RingFault::NestedTable);
        for len in [0, 8, 24, 16 * 2049] {
            assert_eq!(f(&[(table, len, I)], &[ok]), RingFault::BadTable);
        }
        assert_eq!(f(&[(end - 16, 32, I)], &[]), RingFault::OutsideMemory);
        assert_eq!(f(&[(table, 32, I)], &[(DATA, 1, W | N), ok]), RingFault::ReadableAfterWritable);
        let mut none = World::new(SIZE, RingFeatures { packed, ..RingFeatures::default() });
        assert_eq!(fault(&none, &[(table, 16, I)], &[ok]), RingFault::NoTables);
        none.features.indirect = true;
        assert!(take(&none, &[(table, 16, I)], &[ok]).is_ok());
        let loops: Vec<Entry> = (0..SIZE).map(|_| (DATA, 16, N)).collect();
        let expected = if packed { RingFault::TooLong } else { RingFault::NextOutside };
        assert_eq!(f(&loops, &[]), expected);
    }
}

#[test]
fn loops_end() {
    let world = world(false);
    let [descriptors, ..] = world.rings();
    // Each is followed by itself.
    world.descriptor(descriptors, DATA, 16, [N, 0]);
    world.descriptor(descriptors + 16, world.table(0), 64, [I, 0]);
    world.descriptor(world.table(0), DATA, 16, [N, 0]);
    let [_, available, _] = world.rings();
    for (head, expected) in
        [(0, RingFault::TooLong), (1, RingFault::TooLong), (8, RingFault::HeadOutside)]
    {
        world.store_u16(available + 4, head);
        world.store_u16(available + 2, 1);
        let mut queue = world.try_queue(0, false).unwrap();
        assert_eq!(queue.take(&world.memory, &mut Chain::default()), Err(expected));
    }
    world.descriptor(world.table(0), DATA, 16, [N, 4]);
    world.store_u16(available + 4, 1);
    let mut queue = world.try_queue(0, false).unwrap();
    let taken = queue.take(&world.memory, &mut Chain::default());
    assert_eq!(taken, Err(RingFault::NextOutside), "behind its table");
}

#[test]
fn limits_are_accepted() {
    for packed in [false, true] {
        let world = world(packed);
        let table = world.table(0);
        // Longer than the queue; the last entry is followed by none. Not aligned to 8 bytes.
        let entries: Vec<Entry> =
            (0..2048).map(|n| (DATA + n, 1, if n < 2047 { N | W } else { W })).collect();
        let chain = take(&world, &[(table, 16 * 2048, I)], &entries).unwrap();
        assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (0, 2048));
        let shifted = take(&world, &[(DATA, 3, N), (table, 16, I)], &[(DATA + 3, 5, 0)]).unwrap();
        assert_eq!(world.ranges(&shifted.readable), [(DATA, 8)]);
        let ring: Vec<Entry> =
            (0..SIZE).map(|n| (DATA, 4, if n + 1 < SIZE { N } else { W })).collect();
        let whole = take(&world, &ring, &[]).unwrap();
        assert_eq!((whole.readable_bytes(), whole.writable_bytes()), (28, 4));
        let nothing = take(&world, &[(7, 0, 0)], &[]).unwrap();
        assert!(nothing.readable.is_empty() && nothing.writable.is_empty());
        // Across adjacent regions, up to the last byte of both.
        let len = (REGIONS[1].2 + 8) as u32;
        let across = take(&world, &[(REGIONS[1].0 - 8, len, W)], &[]).unwrap();
        assert_eq!((across.writable.len(), across.writable_bytes()), (2, u64::from(len)));
    }
}

#[test]
fn tables_need_not_be_aligned() {
    for packed in [false, true] {
        let world = world(packed);
        let table = world.table(0) + 3;
        let word = 12 | if packed { u64::from(W) << 48 } else { u64::from(W) << 32 };
        world.write(table, &DATA.to_le_bytes());
        world.write(table + 8, &word.to_le_bytes());
        let [descriptors, available, _] = world.rings();
        put(&world, descriptors, 0, (table, 16, I), 1 << 7);
        if !packed {
            world.store_u16(available + 2, 1);
        }
        let mut queue = world.try_queue(start(&world), false).unwrap();
        let mut chain = Chain::default();
        assert!(queue.take(&world.memory, &mut chain).unwrap().is_some());
        assert_eq!(world.ranges(&chain.writable), [(DATA, 12)]);
    }
}

#[test]
fn more_available_than_fits_is_a_fault_of_the_ring() {
    let world = world(false);
    let [_, available, _] = world.rings();
    let mut queue = world.try_queue(0, false).unwrap();
    let mut chain = Chain::default();
    world.store_u16(available + 2, SIZE + 1);
    assert_eq!(queue.waiting(), Err(RingFault::Overrun));
    world.store_u16(available + 2, SIZE);
    assert_eq!(queue.waiting(), Ok(SIZE.into()));
    let token = queue.take(&world.memory, &mut chain).unwrap().unwrap();
    world.store_u16(available + 2, SIZE + 1);
    assert_eq!(queue.waiting(), Err(RingFault::Overrun), "one is in flight");
    queue.complete(token, 0);
    assert_eq!(queue.waiting(), Err(RingFault::Overrun), "the driver does not know that it is not");
    let _ = queue.publish();
    assert_eq!(queue.waiting(), Ok(SIZE.into()));
}

#[test]
fn queues_that_cannot_be_are_refused() {
    let setup = |size, packed, change: fn(&mut World), base| {
        let mut world = World::new(size, RingFeatures { packed, ..RingFeatures::default() });
        change(&mut world);
        world.try_queue(base, true).map(drop)
    };
    let same = |_: &mut World| ();
    assert_eq!(setup(0, false, same, 0), Err(SetupFault::Size));
    assert_eq!(setup(6, false, same, 0), Err(SetupFault::Size), "not a power of two");
    assert_eq!(setup(6, true, same, 0), Ok(()));
    assert_eq!(setup(0, true, same, 0), Err(SetupFault::Size));
    assert_eq!(setup(8, false, same, 1 << 16), Err(SetupFault::Base));
    assert_eq!(setup(8, true, same, 8), Err(SetupFault::Base));
    let version = |world: &mut World| {
        let at = world.inflight.bytes() / 2 + 8;
        world.inflight.store_u16(at, 2);
    };
    assert_eq!(setup(8, false, version, 0), Err(InflightFault::Version.into()));
    assert_eq!(setup(8, true, version, 0), Err(InflightFault::Version.into()));
    let other_size = |world: &mut World| {
        let at = world.inflight.bytes() / 2 + 8;
        world.inflight.store(at, 1 | 16 << 16);
    };
    assert_eq!(setup(8, false, other_size, 0), Err(InflightFault::Size.into()));
    let world = world(false);
    let small = crate::inflight::QueueInflight::find(&world.inflight, false, 2, SIZE);
    assert_eq!(small.map(drop), Err(InflightFault::TooSmall));
    let queue = |change: fn(&mut crate::ring_setup::RingAddresses)| {
        let mut addresses = world.addresses();
        change(&mut addresses);
        let (memory, features) = (&world.memory, world.features);
        let setup = RingSetup { memory, addresses, size: SIZE, features, base: 0, inflight: None };
        Virtqueue::new(setup).map(drop)
    };
    assert_eq!(queue(|_| ()), Ok(()));
    assert_eq!(queue(|at| at.descriptors += 8), Err(SetupFault::Address));
    assert_eq!(queue(|at| at.driver += 1), Err(SetupFault::Address));
    assert_eq!(queue(|at| at.device += 2), Err(SetupFault::Address));
    assert_eq!(queue(|at| at.descriptors = 0), Err(SetupFault::Address));
    let end = REGIONS[2].1 + REGIONS[2].2 as u64;
    assert_eq!(queue(|at| at.device = REGIONS[2].1), Ok(()));
    assert!(end.is_multiple_of(16));
    assert_eq!(
        queue(|at| at.descriptors = REGIONS[2].1 + 0x10_0000 - 64),
        Err(SetupFault::Address)
    );
}
