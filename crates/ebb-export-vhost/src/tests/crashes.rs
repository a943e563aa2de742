//! A device dies after every store to shared memory, and successors continue: no request is lost, none is completed twice,
//! and those that were in flight are taken again in their order.

use super::device::Device;
use super::driver::{Driver, Layout};
use super::world::{Random, World};
use crate::area::crash;
use crate::ring_setup::RingFeatures;

/// Steps of a device before it dies otherwise.
const STEPS: usize = 36;

/// What the driver does beside a device, or while there is none.
fn drive(world: &World, driver: &mut Driver, random: &mut Random) {
    match random.below(3) {
        0 if driver.room() > 0 => {
            let layout = Layout::random(random, driver.room().min(3), world.features.indirect);
            driver.add(world, layout);
            driver.publish(world);
        }
        1 => drop(driver.poll(world)),
        _ => {}
    }
}

/// Devices die after these numbers of stores, one after the other; the last one lives. False if one of them did not come
/// to its last store.
fn run(world: &World, seed: u64, deaths: &[u64]) -> bool {
    world.reset();
    let mut driver = Driver::new(world, if world.features.packed { 3 } else { 65530 });
    let (base, mut random) = (driver.base(), Random::new(seed));
    for death in deaths {
        crash::die_after(*death);
        let mut device = Device::new(world, base, true);
        for _ in 0..STEPS {
            if crash::is_dead() {
                break;
            }
            drive(world, &mut driver, &mut random);
            match random.below(5) {
                0 | 1 => drop(device.take(world, &mut driver)),
                2 => drop(device.complete(&mut random)),
                3 => {
                    device.complete(&mut random);
                    device.complete(&mut random);
                }
                _ => drop(device.queue.publish()),
            }
        }
        if crash::revive() {
            return false;
        }
        driver.requests().forget_takes();
        (0..random.below(4)).for_each(|_| drive(world, &mut driver, &mut random));
    }
    let mut device = Device::new(world, base, true);
    for _ in 0..200 {
        drive(world, &mut driver, &mut random);
        while device.take(world, &mut driver) {}
        while device.complete(&mut random) {}
        let _ = device.queue.publish();
    }
    while driver.poll(world).is_some() {}
    assert!(driver.requests().is_idle(), "a request is lost");
    assert_eq!(device.queue.in_flight(), 0);
    true
}

fn worlds() -> impl Iterator<Item = World> {
    // The chains of the last one may be as long as its ring: the used index is then the same, in the next lap.
    let kinds =
        [(false, 8, false), (false, 4, true), (true, 8, false), (true, 5, true), (true, 3, false)];
    kinds.into_iter().map(|(packed, size, indirect)| {
        World::new(size, RingFeatures { packed, indirect, event_idx: true })
    })
}

#[test]
fn a_successor_continues_after_a_death_at_every_store() {
    for world in worlds() {
        let mut deaths = 0;
        for seed in 1..=60 {
            deaths += (0..).take_while(|death| run(&world, seed * 7919, &[*death])).count();
        }
        assert!(deaths > 2000, "{deaths}");
    }
}

/// The second death may be while the region is being recovered.
#[test]
fn a_successor_may_die_at_every_store_too() {
    for world in worlds() {
        let mut deaths = 0;
        for seed in (1..=4).map(|seed| seed * 104_729) {
            for first in (0..).take_while(|first| run(&world, seed, &[*first])) {
                let seconds = (0..).take_while(|second| run(&world, seed, &[first, *second]));
                deaths += seconds.count();
            }
        }
        assert!(deaths > 4000, "{deaths}");
    }
}
