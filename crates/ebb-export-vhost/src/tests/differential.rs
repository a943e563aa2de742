//! Split queues beside the implementation of rust-vmm: both find the same descriptors in a million chains.

use std::fs::File;

use virtio_queue::{Queue, QueueT};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use super::driver::{Driver, Layout};
use super::world::{REGIONS, Random, World, join};
use crate::chain::Chain;
use crate::ring_setup::RingFeatures;

const CHAINS: u64 = 1_000_000;

fn peer_memory(world: &World) -> GuestMemoryMmap {
    let region = |(fd, &(guest, _, bytes)): (&std::os::fd::OwnedFd, &(u64, u64, usize))| {
        let file = File::from(fd.try_clone().unwrap());
        (GuestAddress(guest), bytes, Some(FileOffset::new(file, 0)))
    };
    let regions: Vec<_> = world.files.iter().zip(&REGIONS).map(region).collect();
    GuestMemoryMmap::from_ranges_with_files(regions).unwrap()
}

fn peer_queue(world: &World, base: u16) -> Queue {
    let [descriptors, available, used] = world.rings().map(|address| Some(address as u32));
    let mut queue = Queue::new(world.size).unwrap();
    queue.set_size(world.size);
    queue.set_desc_table_address(descriptors, Some(0));
    queue.set_avail_ring_address(available, Some(0));
    queue.set_used_ring_address(used, Some(0));
    queue.set_next_avail(base);
    queue.set_ready(true);
    queue
}

#[test]
fn split_chains_are_those_that_another_implementation_finds() {
    let features = RingFeatures { packed: false, indirect: true, event_idx: false };
    let world = World::new(128, features);
    let peer_memory = peer_memory(&world);
    let mut driver = Driver::new(&world, 65_000);
    let mut peer = peer_queue(&world, 65_000);
    let mut queue = world.try_queue(driver.base(), false).unwrap();
    let (mut random, mut chain) = (Random::new(11), Chain::default());
    while driver.requests().done < CHAINS {
        while driver.room() > 0 {
            driver.add(&world, Layout::random(&mut random, driver.room(), true));
        }
        driver.publish(&world);
        while let Some(token) = queue.take(&world.memory, &mut chain).unwrap() {
            let other = peer.pop_descriptor_chain(&peer_memory).unwrap();
            assert_eq!(other.head_index(), token.id);
            let descriptors: Vec<_> = other.collect();
            for (write, spans) in [(false, &chain.readable), (true, &chain.writable)] {
                let same = descriptors.iter().filter(|other| other.is_write_only() == write);
                let expected = join(same.map(|other| (other.addr().0, u64::from(other.len()))));
                assert_eq!(world.ranges(spans), expected);
            }
            let written = driver.requests().take(&world, token.id, &chain);
            queue.complete(token, written);
        }
        assert!(peer.pop_descriptor_chain(&peer_memory).is_none());
        assert!(queue.publish());
        while driver.poll(&world).is_some() {}
    }
    assert!(driver.requests().is_idle());
}

/// There is no other implementation of packed queues at hand: the driver's own notes are compared.
#[test]
fn packed_chains_are_those_that_the_driver_has_sent() {
    let features = RingFeatures { packed: true, indirect: true, event_idx: false };
    let world = World::new(100, features);
    let mut driver = Driver::new(&world, 0);
    let mut queue = world.try_queue(driver.base(), true).unwrap();
    let (mut random, mut chain) = (Random::new(13), Chain::default());
    while driver.requests().done < CHAINS {
        while driver.room() > 0 {
            driver.add(&world, Layout::random(&mut random, driver.room(), true));
        }
        driver.publish(&world);
        while let Some(token) = queue.take(&world.memory, &mut chain).unwrap() {
            let written = driver.requests().take(&world, token.id, &chain);
            queue.complete(token, written);
        }
        assert!(queue.publish());
        while driver.poll(&world).is_some() {}
    }
    assert!(driver.requests().is_idle());
}
