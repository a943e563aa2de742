//! Drivers and peers that write anything anywhere: nothing panics, and every span is within memory.

use super::driver::{Driver, Layout};
use super::world::{Random, World};
use crate::chain::{Chain, SPANS_MAX, Token};
use crate::ring_setup::RingFeatures;
use crate::virtqueue::Virtqueue;

/// Chains and faults of each kind of queue.
const ROUNDS: u64 = 600_000;

/// A number that is likely to matter.
fn number(random: &mut Random, size: u16) -> u16 {
    match random.below(6) {
        0 => random.next() as u16,
        1 => size.wrapping_sub(1).wrapping_add(random.below(3) as u16),
        2 => 1 << random.below(16),
        _ => random.below(u64::from(size) + 1) as u16,
    }
}

/// Changes one number of the rings, a table, or the inflight regions.
fn corrupt(world: &World, random: &mut Random) {
    let size = u64::from(world.size);
    let [descriptors, driver, device] = world.rings();
    let value = number(random, world.size);
    let address = match random.below(6) {
        0..2 => descriptors + 2 * random.below(8 * size),
        2 => driver + 2 * random.below(if world.features.packed { 2 } else { 3 + size }),
        3 => device + 2 * random.below(4),
        4 => world.table(random.below(size) as u16) + 2 * random.below(64),
        _ => {
            let words = world.inflight.bytes() as u64 / 2;
            let bound = if random.below(2) == 0 { 16 } else { words / 2 };
            let at = words / 2 + random.below(bound);
            world.inflight.store_u16(2 * at as usize, value);
            return;
        }
    };
    world.store_u16(address, value);
}

/// A queue over what is there, after a correct driver has filled it and something was changed.
fn refill(world: &World, random: &mut Random, fresh: bool) -> Option<Virtqueue> {
    if fresh {
        world.reset();
    }
    let mut driver = Driver::new(world, if fresh { random.next() as u16 } else { 0 });
    let base = match random.below(4) {
        0 => random.next() as u32,
        _ => driver.base(),
    };
    while driver.room() > 0 && random.below(8) > 0 {
        let layout = Layout::random(random, driver.room(), world.features.indirect);
        driver.add(world, layout);
    }
    driver.publish(world);
    (0..random.below(4)).for_each(|_| corrupt(world, random));
    world.try_queue(base, random.below(3) > 0).ok()
}

#[test]
fn nothing_that_is_shared_is_trusted() {
    for (seed, packed) in [(3, false), (5, true)] {
        let features = RingFeatures { packed, indirect: true, event_idx: true };
        let world = World::new(16, features);
        let (mut random, mut chain) = (Random::new(seed), Chain::default());
        let (mut chains, mut faults) = (0, 0);
        while chains + faults < ROUNDS {
            let fresh = random.below(4) > 0;
            let Some(mut queue) = refill(&world, &mut random, fresh) else {
                faults += 1;
                continue;
            };
            let mut tokens: Vec<Token> = Vec::new();
            for _ in 0..random.below(64) {
                match random.below(8) {
                    0..4 => match queue.take(&world.memory, &mut chain) {
                        Ok(Some(token)) => {
                            world.check_spans(&chain);
                            assert!(chain.readable.len() + chain.writable.len() <= SPANS_MAX);
                            tokens.push(token);
                            assert!(tokens.len() <= world.size.into(), "more than the queue has");
                            chains += 1;
                        }
                        Ok(None) => {}
                        Err(_) => {
                            faults += 1;
                            break;
                        }
                    },
                    4 => drop(tokens.pop().map(|token| queue.complete(token, 1))),
                    5 => drop(queue.publish()),
                    6 => drop(queue.arm()),
                    _ => corrupt(&world, &mut random),
                }
            }
            assert!(queue.in_flight() <= 16);
        }
        assert!(faults > ROUNDS / 50 && chains > ROUNDS / 4, "{chains} chains, {faults} faults");
    }
}
