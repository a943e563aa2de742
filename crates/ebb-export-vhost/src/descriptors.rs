//! The file descriptors that frontends hold: a frontend may have up to three for each of its queues, and the rest of the
//! process needs some, too.
//!
//! The daemon sets a limit, which changes as other parts open and close descriptors. Below it a volume's frontends may hold
//! no more than what is left to those of other volumes: so one guest takes half of the limit at most, and one more finds
//! some in any case. Source: Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, 1998.
//!
//! Invariants: a descriptor counts until its last user has dropped it, also if the frontend has replaced it. What a message
//! brings is reserved for each connection, before the message is received. Guest memory is mapped and its descriptors are
//! closed at once; they count as part of the message.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use ebb_io::Fd;
use ebb_vhost_proto::MAX_DESCRIPTORS;

/// Reserved for each connection: its socket, the one for requests of the backend, the one of a reply, those of a message.
pub(crate) const RESERVED: usize = 3 + MAX_DESCRIPTORS;
/// What a frontend needs to be of any use: those of one queue, beside the reserved ones.
const LEAST: usize = RESERVED + 3;

/// The limit of descriptors that all frontends together may hold, and how many they hold. Without a limit at first.
#[derive(Debug)]
pub struct FrontendDescriptors {
    most: AtomicUsize,
    reserved: AtomicUsize,
    open: AtomicUsize,
}

impl Default for FrontendDescriptors {
    fn default() -> FrontendDescriptors {
        FrontendDescriptors {
            most: AtomicUsize::new(usize::MAX),
            reserved: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
        }
    }
}

impl FrontendDescriptors {
    /// Sets the limit. Frontends that are connected keep what they have.
    pub fn limit(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// Those that count against the limit: the open ones, and what is reserved for messages.
    pub fn reserved(&self) -> usize {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Those that are open now.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

/// What the frontends of each volume hold; on the control thread.
#[derive(Debug, Default)]
pub(crate) struct DescriptorBudget {
    shared: Arc<FrontendDescriptors>,
    volumes: BTreeMap<Arc<str>, usize>,
}

impl DescriptorBudget {
    pub(crate) fn new(shared: Arc<FrontendDescriptors>) -> DescriptorBudget {
        DescriptorBudget { shared, volumes: BTreeMap::new() }
    }

    /// Whether a further frontend of a volume may connect.
    pub(crate) fn admits_frontend(&self, volume: &str) -> bool {
        self.admits(volume, LEAST)
    }

    /// Whether the frontends of a volume may hold this many more.
    pub(crate) fn admits(&self, volume: &str, more: usize) -> bool {
        let own = self.volumes.get(volume).copied().unwrap_or_default();
        let most = self.shared.most.load(Ordering::Relaxed);
        let left = most.saturating_sub(self.shared.reserved());
        own.saturating_add(more) <= left.saturating_sub(more) || (own == 0 && more <= left)
    }

    /// Counts what a connection holds now.
    pub(crate) fn update(&mut self, volume: &Arc<str>, held: &mut HeldDescriptors) {
        let before = held.counted;
        held.counted = held.count();
        self.replace(volume, before, held.counted);
    }

    /// A connection has ended.
    pub(crate) fn release(&mut self, volume: &Arc<str>, held: &HeldDescriptors) {
        self.replace(volume, held.counted, DescriptorCount::default());
        if self.volumes.get(volume) == Some(&0) {
            self.volumes.remove(volume);
        }
    }

    fn replace(&mut self, volume: &Arc<str>, before: DescriptorCount, now: DescriptorCount) {
        let own = self.volumes.entry(volume.clone()).or_default();
        *own = (*own + now.reserved).saturating_sub(before.reserved);
        // Only this thread writes.
        let change = |counter: &AtomicUsize, before: usize, now: usize| {
            let all = counter.load(Ordering::Relaxed);
            counter.store((all + now).saturating_sub(before), Ordering::Relaxed);
        };
        change(&self.shared.reserved, before.reserved, now.reserved);
        change(&self.shared.open, before.open, now.open);
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DescriptorCount {
    open: usize,
    reserved: usize,
}

/// What one connection holds.
#[derive(Debug, Default)]
pub(crate) struct HeldDescriptors {
    /// Those of queues; a running queue uses a replaced one for some time.
    events: Vec<Weak<OwnedFd>>,
    /// It has one for requests of the backend.
    pub(crate) has_backend_requests: bool,
    counted: DescriptorCount,
}

impl HeldDescriptors {
    pub(crate) fn add(&mut self, event: &Fd) {
        self.events.push(Arc::downgrade(event));
    }

    fn count(&mut self) -> DescriptorCount {
        self.events.retain(|event| event.strong_count() > 0);
        let events = self.events.len();
        let open = 1 + usize::from(self.has_backend_requests) + events;
        DescriptorCount { open, reserved: RESERVED + events }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_io::fd_from;

    fn event() -> Fd {
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        fd_from(rustix::event::eventfd(0, flags).unwrap())
    }

    #[test]
    fn a_descriptor_counts_until_its_last_user_has_dropped_it() {
        let shared = Arc::<FrontendDescriptors>::default();
        let mut budget = DescriptorBudget::new(shared.clone());
        let (volume, mut held) = (Arc::from("disk"), HeldDescriptors::default());
        budget.update(&volume, &mut held);
        assert_eq!((shared.open(), shared.reserved()), (1, RESERVED));
        let (kick, call) = (event(), event());
        let in_use = kick.clone();
        held.add(&kick);
        held.add(&call);
        drop(kick);
        budget.update(&volume, &mut held);
        assert_eq!((shared.open(), shared.reserved()), (3, RESERVED + 2));
        drop(in_use);
        budget.update(&volume, &mut held);
        assert_eq!(shared.open(), 2);
        budget.release(&volume, &held);
        assert_eq!((shared.open(), shared.reserved()), (0, 0));
        assert!(budget.volumes.is_empty());
    }

    #[test]
    fn the_frontends_of_one_volume_leave_half_of_the_limit_to_others() {
        let shared = Arc::<FrontendDescriptors>::default();
        let mut budget = DescriptorBudget::new(shared.clone());
        shared.limit(200);
        let (greedy, mut held) = (Arc::from("greedy"), HeldDescriptors::default());
        budget.update(&greedy, &mut held);
        let mut events = Vec::new();
        while budget.admits(&greedy, 1) {
            events.push(event());
            held.add(events.last().unwrap());
            budget.update(&greedy, &mut held);
        }
        assert_eq!(shared.reserved(), 100, "half of the limit");
        assert!(!budget.admits_frontend(&greedy));
        let (other, mut second) = (Arc::from("other"), HeldDescriptors::default());
        assert!(budget.admits_frontend(&other));
        budget.update(&other, &mut second);
        assert!(budget.admits(&other, 3 * 10), "ten queues");
        shared.limit(shared.reserved() + LEAST - 1);
        assert!(!budget.admits_frontend("third"));
        shared.limit(shared.reserved() + LEAST);
        assert!(budget.admits_frontend("third"), "the last one gets all that is left");
    }
}
