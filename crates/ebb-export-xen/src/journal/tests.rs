//! The journal and the ring as a model, killed between any two steps.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::abi::{Abi, Body, Request, Response, Segment, op};
use crate::platform::Grants;
use crate::ring::BlkifRing;
use crate::shm::World;
use crate::shm::frontend::FrontQueue;

/// A backend that takes one small step at a time, in an arbitrary order.
struct Backend {
    ring: BlkifRing,
    journal: Journal,
    /// Entries of running requests, with the requests' ids.
    running: Vec<(u32, u64)>,
    /// Entries whose response is written and not published.
    written: Vec<u32>,
    free: Vec<u32>,
}

fn id_of(slot: &Slot) -> u64 {
    Request::from_words(Abi::X86_64, slot).id
}

impl Backend {
    fn take(&mut self) {
        if self.ring.waiting().unwrap() == 0 {
            return;
        }
        let Some(entry) = self.free.pop() else { return };
        let slot = self.ring.copy_next();
        self.journal.take(entry, self.ring.req_cons(), &slot);
        self.ring.advance();
        self.running.push((entry, id_of(&slot)));
    }

    /// Completes one of the running requests; killed before the response is written if `killed`.
    fn answer(&mut self, which: usize, killed: bool) {
        if self.running.is_empty() {
            return;
        }
        let (entry, id) = self.running.swap_remove(which % self.running.len());
        self.journal.begin_response(entry, self.ring.rsp_prod());
        if killed {
            return;
        }
        self.ring.respond(Response { id, operation: op::WRITE, status: 0 });
        self.written.push(entry);
    }

    /// Publishes; killed after `freed` entries were freed, if that is not all of them.
    fn publish(&mut self, freed: usize) {
        self.ring.publish();
        for entry in self.written.drain(..).take(freed) {
            self.journal.free(entry);
            self.free.push(entry);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send(u8),
    Take(u8),
    Answer(usize),
    Publish,
    /// A kill: during a response, during a publication, or in between.
    Kill(u8, usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1u8..8).prop_map(Step::Send),
        3 => (1u8..8).prop_map(Step::Take),
        6 => any::<usize>().prop_map(Step::Answer),
        3 => Just(Step::Publish),
        1 => (0u8..3, any::<usize>()).prop_map(|(what, which)| Step::Kill(what, which)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// In whatever order requests complete and wherever the backend is killed, each gets one response.
    #[test]
    fn every_request_gets_one_response_across_kills(steps in prop::collection::vec(step(), 1..200)) {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("journal");
        let world = World::default();
        let guest = world.guest(1, 16).unwrap();
        guest.grant(8, true);
        let mut front = FrontQueue::on(&guest, vec![8], 0, Abi::X86_64);
        let identity = RingIdentity { guest: 1, slots: 32, slot_bytes: 112, ..RingIdentity::default() };
        let backing = Backing::default();
        let fresh = |resume: bool| {
            let mut ring = BlkifRing::new(guest.map(&[8], true).unwrap(), Abi::X86_64);
            if !resume {
                let journal = Journal::create(Some(&path), &identity, &backing).unwrap();
                journal.reset(0);
                let free = (0..32).collect();
                return Backend { ring, journal, running: vec![], written: vec![], free };
            }
            let journal = Journal::open(&path, &identity, &backing).unwrap();
            let (_, published) = ring.shared_numbers();
            let (req_cons, left) = journal.resume(published).unwrap();
            ring.resume(req_cons, published);
            let free = (0..32).filter(|entry| !left.contains(entry)).collect();
            let running = left.iter().map(|entry| (*entry, id_of(&journal.slot(*entry)))).collect();
            Backend { ring, journal, running, written: vec![], free }
        };
        let mut backend = fresh(false);
        let mut sent = 0u64;
        let mut responses = BTreeMap::<u64, u32>::new();
        for step in steps.into_iter().chain(std::iter::repeat_n(Step::Answer(0), 64)) {
            match step {
                Step::Send(count) => {
                    for _ in 0..count {
                        let (put, taken) = front.numbers();
                        if put.wrapping_sub(taken) >= 32 {
                            break;
                        }
                        let body = Body::Direct {
                            sector: sent,
                            count: 1,
                            segments: [Segment::default(); 11],
                        };
                        let request = Request { id: sent, operation: op::WRITE, body };
                        front.put_raw(request.encode(Abi::X86_64));
                        sent += 1;
                    }
                    front.push();
                }
                Step::Take(count) => (0..count).for_each(|_| backend.take()),
                Step::Answer(which) => backend.answer(which, false),
                Step::Publish => backend.publish(usize::MAX),
                Step::Kill(what, which) => {
                    match what {
                        0 => backend.answer(which, true),
                        1 => backend.publish(which % 4),
                        _ => {}
                    }
                    backend = fresh(true);
                }
            }
            while let Some(response) = front.take_raw() {
                *responses.entry(response.id).or_default() += 1;
            }
        }
        // At the end all requests are consumed, completed and published.
        for _ in 0..128 {
            backend.take();
            backend.answer(0, false);
        }
        backend.publish(usize::MAX);
        while let Some(response) = front.take_raw() {
            *responses.entry(response.id).or_default() += 1;
        }
        let expected: BTreeMap<u64, u32> = (0..sent).map(|id| (id, 1)).collect();
        prop_assert_eq!(responses, expected);
    }
}

#[test]
fn a_journal_of_another_ring_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let identity = RingIdentity { guest: 1, slots: 32, slot_bytes: 112, ..RingIdentity::default() };
    let backing = Backing::default();
    assert!(matches!(Journal::open(&path, &identity, &backing), Err(ResumeError::Foreign)));
    let journal = Journal::create(Some(&path), &identity, &backing).unwrap();
    journal.reset(5);
    assert!(Journal::open(&path, &identity, &backing).is_ok());
    for other in [
        RingIdentity { guest: 2, ..identity },
        RingIdentity { device: 1, ..identity },
        RingIdentity { queue: 1, ..identity },
        RingIdentity { port: 1, ..identity },
        RingIdentity { ring: 1, ..identity },
        RingIdentity { slots: 64, ..identity },
        RingIdentity { slot_bytes: 108, ..identity },
    ] {
        assert!(
            matches!(Journal::open(&path, &other, &backing), Err(ResumeError::Foreign)),
            "{other:?}"
        );
    }
    let again = Journal::open(&path, &identity, &backing).unwrap();
    assert_eq!(again.resume(5).unwrap(), (5, vec![]));
    assert!(matches!(again.resume(4), Err(ResumeError::Contradiction { open: 0, expected: 1 })));
    std::fs::write(&path, b"short").unwrap();
    assert!(matches!(Journal::open(&path, &identity, &backing), Err(ResumeError::Foreign)));
}
