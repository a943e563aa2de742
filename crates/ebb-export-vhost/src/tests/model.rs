//! Random sequences of what a correct driver and a device do: every chain is taken and completed once, with its id and
//! length, and neither side sleeps while there is something for it to do.

use proptest::prelude::*;

use super::device::Device;
use super::driver::{Driver, Layout};
use super::world::{Random, World};
use crate::ring_setup::RingFeatures;

/// Both sides. A side that sleeps does nothing until it is notified.
struct Sides {
    world: World,
    driver: Driver,
    device: Device,
    random: Random,
    driver_sleeps: bool,
    device_sleeps: bool,
    notifications: u64,
}

impl Sides {
    fn new(world: World, start: u16, seed: u64, inflight: bool) -> Sides {
        let driver = Driver::new(&world, start);
        let device = Device::new(&world, driver.base(), inflight);
        let random = Random::new(seed);
        Sides {
            world,
            driver,
            device,
            random,
            driver_sleeps: false,
            device_sleeps: false,
            notifications: 0,
        }
    }

    fn add(&mut self) {
        let room = self.driver.room();
        if room > 0 && !self.driver_sleeps {
            let indirect = self.world.features.indirect;
            let layout = Layout::random(&mut self.random, room, indirect);
            self.driver.add(&self.world, layout);
        }
    }

    fn kick(&mut self) {
        if !self.driver_sleeps && self.driver.publish(&self.world) {
            self.device_sleeps = false;
            self.notifications += 1;
        }
    }

    fn poll(&mut self) -> bool {
        !self.driver_sleeps && self.driver.poll(&self.world).is_some()
    }

    fn driver_sleep(&mut self) {
        self.kick();
        self.driver_sleeps = self.driver_sleeps || !self.driver.arm(&self.world);
    }

    fn take(&mut self) -> bool {
        !self.device_sleeps && self.device.take(&self.world, &mut self.driver)
    }

    fn publish(&mut self) {
        if self.device.queue.publish() {
            self.notifications += 1;
            if std::mem::take(&mut self.driver_sleeps) {
                self.driver.disarm(&self.world);
            }
        }
    }

    fn device_sleep(&mut self) {
        if !self.device_sleeps {
            self.device_sleeps = !self.device.queue.arm().unwrap();
        }
    }

    fn step(&mut self, action: u8) {
        match action % 12 {
            0..3 => self.add(),
            3 => self.kick(),
            4 => drop(self.poll()),
            5 => while self.poll() {},
            6 => self.driver_sleep(),
            7 => drop(self.take()),
            8 => while self.take() {},
            // Requests complete while the loop that takes them sleeps.
            9 => drop(self.device.complete(&mut self.random)),
            10 => {
                while self.device.complete(&mut self.random) {}
                self.publish();
            }
            _ => match self.random.below(4) {
                0 if !self.device_sleeps => self.device.queue.disarm(),
                1 => self.publish(),
                2 => self.device.queue.relocate(&self.world.memory).unwrap(),
                _ => self.device_sleep(),
            },
        }
    }

    /// Both sides do what they can, and sleep. In the end nothing is in flight.
    fn finish(&mut self) {
        self.kick();
        for _ in 0..1000 {
            while self.take() {}
            self.device_sleep();
            while self.device.complete(&mut self.random) {}
            self.publish();
            while self.poll() {}
            self.driver_sleep();
            if self.driver_sleeps && self.device_sleeps {
                break;
            }
        }
        let requests = self.driver.requests();
        assert!(requests.is_idle(), "a notification is missing");
        assert_eq!(requests.sent, requests.done);
        assert_eq!(self.device.queue.in_flight(), 0);
        assert_eq!(self.device.queue.base(), self.driver.base());
    }
}

fn features() -> impl Strategy<Value = RingFeatures> {
    let features = |(packed, indirect, event_idx)| RingFeatures { packed, indirect, event_idx };
    (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(features)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn every_chain_is_served_once(
        features in features(),
        order in 0u32..8,
        odd in any::<bool>(),
        start: u16,
        inflight: bool,
        seed: u64,
        actions in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let size = match features.packed {
            // A packed queue may have any size.
            true => (1 << order) + u16::from(odd),
            false => 1 << order,
        };
        let mut sides = Sides::new(World::new(size, features), start, seed, inflight);
        for action in actions {
            sides.step(action);
        }
        sides.finish();
    }
}

/// A busy driver and device are notified once per batch at most, and not at all while they ask for nothing.
#[test]
fn notifications_are_suppressed() {
    for (packed, event_idx) in [(false, false), (false, true), (true, false), (true, true)] {
        let features = RingFeatures { packed, indirect: true, event_idx };
        let mut sides = Sides::new(World::new(64, features), 0, 5, false);
        // The position of the first event is passed in the first round.
        sides.device.queue.disarm();
        sides.driver.disarm(&sides.world);
        for round in 0..200 {
            for _ in 0..16 {
                sides.add();
            }
            sides.kick();
            while sides.take() {}
            while sides.device.complete(&mut sides.random) {}
            sides.publish();
            while sides.poll() {}
            assert!(sides.notifications <= 2, "round {round}: {}", sides.notifications);
        }
        sides.finish();
    }
}
