//! A successor goes on where a killed daemon stopped: the journal and the ring as a model, killed
//! between any two steps, and the whole backend leaving its guests to another.

#![allow(clippy::unwrap_used, reason = "this is a test")]

mod common;

use std::collections::BTreeMap;

use common::{Rig, pattern, until};
use ebb_export_xen::abi::{Abi, Body, Request, Response, Segment, Slot, op};
use ebb_export_xen::journal::{Identity, Journal, ResumeError};
use ebb_export_xen::platform::Grants;
use ebb_export_xen::ring::Ring;
use ebb_export_xen::shm::World;
use ebb_export_xen::shm::frontend::{FrontQueue, Wishes};
use proptest::prelude::*;

/// A backend that does one small step at a time, in an order of its own.
struct Backend {
    ring: Ring,
    journal: Journal,
    /// Entries whose request runs, with its id.
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

    /// Answers any of those that run; killed before the response is written if `killed`.
    fn answer(&mut self, which: usize, killed: bool) {
        if self.running.is_empty() {
            return;
        }
        let (entry, id) = self.running.swap_remove(which % self.running.len());
        self.journal.answer(entry, self.ring.rsp_prod());
        if killed {
            return;
        }
        self.ring.respond(Response { id, operation: op::WRITE, status: 0 });
        self.written.push(entry);
    }

    /// Publishes; killed before all entries are freed if `freed` is less than they are.
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
    /// A kill, in the middle of what: an answer, a publication, or nothing.
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

    /// However requests are answered and wherever the backend is killed, each is answered once.
    #[test]
    fn every_request_is_answered_once_across_kills(steps in prop::collection::vec(step(), 1..200)) {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("journal");
        let world = World::default();
        let guest = world.guest(1, 16).unwrap();
        guest.grant(8, true);
        let mut front = FrontQueue::on(&guest, vec![8], 0, Abi::X86_64);
        let identity = Identity { guest: 1, slots: 32, slot_bytes: 112, ..Identity::default() };
        let fresh = |resume: bool| {
            let mut ring = Ring::new(guest.map(&[8], true).unwrap(), Abi::X86_64);
            if !resume {
                let journal = Journal::create(Some(&path), &identity).unwrap();
                journal.reset(0);
                let free = (0..32).collect();
                return Backend { ring, journal, running: vec![], written: vec![], free };
            }
            let journal = Journal::open(&path, &identity).unwrap();
            let (_, published) = ring.shared_numbers();
            let (req_cons, left) = journal.resume(published).unwrap();
            ring.resume(req_cons, published);
            let free = (0..32).filter(|entry| !left.contains(entry)).collect();
            let running = left.iter().map(|entry| (*entry, id_of(&journal.slot(*entry)))).collect();
            Backend { ring, journal, running, written: vec![], free }
        };
        let mut backend = fresh(false);
        let mut sent = 0u64;
        let mut answers = BTreeMap::<u64, u32>::new();
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
                *answers.entry(response.id).or_default() += 1;
            }
        }
        // At the end everything is taken, answered and published.
        for _ in 0..128 {
            backend.take();
            backend.answer(0, false);
        }
        backend.publish(usize::MAX);
        while let Some(response) = front.take_raw() {
            *answers.entry(response.id).or_default() += 1;
        }
        let expected: BTreeMap<u64, u32> = (0..sent).map(|id| (id, 1)).collect();
        prop_assert_eq!(answers, expected);
    }
}

#[test]
fn a_journal_of_another_ring_is_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let identity = Identity { guest: 1, slots: 32, slot_bytes: 112, ..Identity::default() };
    assert!(matches!(Journal::open(&path, &identity), Err(ResumeError::Foreign)));
    let journal = Journal::create(Some(&path), &identity).unwrap();
    journal.reset(5);
    assert!(Journal::open(&path, &identity).is_ok());
    for other in [
        Identity { guest: 2, ..identity },
        Identity { device: 1, ..identity },
        Identity { queue: 1, ..identity },
        Identity { port: 1, ..identity },
        Identity { ring: 1, ..identity },
        Identity { slots: 64, ..identity },
        Identity { slot_bytes: 108, ..identity },
    ] {
        assert!(matches!(Journal::open(&path, &other), Err(ResumeError::Foreign)), "{other:?}");
    }
    let again = Journal::open(&path, &identity).unwrap();
    assert_eq!(again.resume(5).unwrap(), (5, vec![]));
    assert!(matches!(again.resume(4), Err(ResumeError::Contradiction { open: 0, expected: 1 })));
    std::fs::write(&path, b"short").unwrap();
    assert!(matches!(Journal::open(&path, &identity), Err(ResumeError::Foreign)));
}

/// An upgrade: one backend leaves, another comes, and guests see neither.
#[test]
fn guests_stay_connected_while_the_backend_is_replaced() {
    let mut rig = Rig::new();
    let mut disk = rig.disk(Wishes { queues: 2, order: 1, ..Wishes::default() });
    for round in 0..5u64 {
        let mut data = pattern(round, 65536);
        assert_eq!(disk.transfer(0, op::WRITE, round * 128, &mut data).unwrap(), 0);
        rig.stop();
        // The guest does not know and goes on asking.
        let page = disk.pages(1)[0];
        let segment = Segment { gref: page, first: 0, last: 7 };
        for queue in 0..2 {
            let (_, request) = disk.request(op::WRITE, 8000 + round, &[segment]);
            disk.queues[queue].put(request);
            disk.queues[queue].push();
        }
        assert_eq!(disk.backend("state").as_deref(), Some("4"), "nobody took leave");
        rig.start(1, |_| {});
        for queue in 0..2 {
            assert_eq!(disk.queues[queue].wait().unwrap().status, 0);
        }
        let mut back = vec![0; 65536];
        assert_eq!(disk.transfer(1, op::READ, round * 128, &mut back).unwrap(), 0);
        assert!(back == data);
    }
    disk.close().unwrap();
    assert_eq!(std::fs::read_dir(rig.journals.path()).unwrap().count(), 0);
}

/// Without its journal only an idle ring is taken over.
#[test]
fn a_ring_without_its_journal_is_taken_over_only_when_idle() {
    let mut rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    let forget = |rig: &Rig| {
        for file in std::fs::read_dir(rig.journals.path()).unwrap() {
            std::fs::remove_file(file.unwrap().path()).unwrap();
        }
    };
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
    rig.stop();
    forget(&rig);
    rig.start(1, |_| {});
    until("taken over", || !rig.backend.as_ref().unwrap().stats().is_empty());
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
    rig.stop();
    forget(&rig);
    let (_, request) = disk.request(op::FLUSH_DISKCACHE, 0, &[]);
    disk.queues[0].put(request);
    disk.queues[0].push();
    rig.start(1, |_| {});
    disk.await_backend("5").unwrap();
}
