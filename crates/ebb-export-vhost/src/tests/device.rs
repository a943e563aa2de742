//! A device that takes chains and completes them in any order.

use super::driver::Driver;
use super::world::{Random, World};
use crate::chain::{Chain, Token};
use crate::virtqueue::Virtqueue;

pub(super) struct Device {
    pub(super) queue: Virtqueue,
    chain: Chain,
    pub(super) taken: Vec<(Token, u32)>,
}

impl Device {
    pub(super) fn new(world: &World, base: u32, inflight: bool) -> Device {
        let queue = world.try_queue(base, inflight).unwrap();
        Device { queue, chain: Chain::default(), taken: Vec::new() }
    }

    /// Takes a chain, if there is one.
    pub(super) fn take(&mut self, world: &World, driver: &mut Driver) -> bool {
        let waiting = self.queue.waiting().unwrap();
        let token = self.queue.take(&world.memory, &mut self.chain).unwrap();
        assert_eq!(waiting > 0, token.is_some());
        let Some(token) = token else { return false };
        let written = driver.requests().take(world, token.id, &self.chain);
        self.taken.push((token, written));
        true
    }

    /// Completes a random chain, if there is one.
    pub(super) fn complete(&mut self, random: &mut Random) -> bool {
        if self.taken.is_empty() {
            return false;
        }
        let at = random.below(self.taken.len() as u64) as usize;
        let (token, written) = self.taken.swap_remove(at);
        self.queue.complete(token, written);
        true
    }
}
