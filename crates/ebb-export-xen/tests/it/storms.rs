//! The work that guests cause for xenstored and the backend's xenstore side is bounded, whatever they write and how often.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{SIZE, memory, pattern};
use ebb_export_xen::abi::op;
use ebb_export_xen::platform::wire::{Header, kind};
use ebb_export_xen::platform::xenbus::XenbusConnection;
use ebb_export_xen::platform::{Platform, XenStore};
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::shm::{Guest, World};
use ebb_export_xen::{
    Backend, BackendOptions, DiskSpec, NextRun, XenstoreControl, attach, device_number,
};
use ebb_io::Worker;
use ebb_volume::Volumes;

/// A backend whose xenstore side runs when the test calls it, with the test's own clock.
struct Stage {
    world: World,
    _backend: Backend,
    control: XenstoreControl,
    now: Instant,
    _worker: Worker,
}

impl Stage {
    fn new() -> Stage {
        let world = World::default();
        let worker = Worker::start_alone("xen").unwrap();
        let volumes = Volumes::default();
        for name in ["disk", "other"] {
            volumes.add(memory(name, SIZE, false), Arc::default());
        }
        let platform = Arc::new(world.clone());
        let options = BackendOptions::new(platform, vec![worker.handle()], volumes);
        let (backend, control) = Backend::prepare(options).unwrap();
        Stage { world, _backend: backend, control, now: Instant::now(), _worker: worker }
    }

    fn attach(&self, number: u16, volume: &str, wishes: FrontendConfig) -> (Arc<Guest>, Frontend) {
        let guest = self.world.guest(number, 600).unwrap();
        let order = DiskSpec { volume, name: "xvdb", read_only: false };
        attach(&mut *self.world.xenstore().unwrap(), number, &order).unwrap();
        let device = device_number("xvdb").unwrap();
        (guest.clone(), Frontend::new(&self.world, &guest, device, wishes))
    }

    /// Runs everything that is due now.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            match self.control.run_once(self.now) {
                NextRun::Wait(Some(at)) if at <= self.now => {}
                _ => return,
            }
        }
        panic!("the xenstore side does not become idle");
    }

    /// Lets time pass; runs only what is due.
    fn pass(&mut self, span: Duration) {
        let end = self.now + span;
        for _ in 0..100_000 {
            self.settle();
            match self.control.run_once(self.now) {
                NextRun::Wait(Some(at)) if at <= end => self.now = self.now.max(at),
                _ => break,
            }
        }
        self.now = end;
        self.settle();
    }

    /// Lets time pass until `done`; returns how much.
    fn until(&mut self, what: &str, mut done: impl FnMut() -> bool) -> Duration {
        let (begun, clock) = (self.now, Instant::now());
        while !done() {
            // Rings run on a worker of their own, in real time: the test's clock is not faster.
            assert!(clock.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(1));
            self.pass(Duration::from_millis(1));
        }
        self.now - begun
    }

    /// Waits until the worker has made `done` true; the test's clock stands still.
    fn until_ended(&mut self, what: &str, mut done: impl FnMut() -> bool) {
        let clock = Instant::now();
        while !done() {
            assert!(clock.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::yield_now();
            self.settle();
        }
    }

    fn connect(&mut self, disk: &mut Frontend) -> Duration {
        self.until("it connects", || disk.step_connect().unwrap())
    }
}

/// All rings that a disk may have, of the largest size: 16 pages each.
const LARGE: FrontendConfig =
    FrontendConfig { abi: ebb_export_xen::abi::Abi::X86_64, order: 4, queues: 8, persistent: true };

/// A guest that repeatedly writes the state it already has: slowly, as fast as it is checked, and faster.
#[test]
fn writing_the_same_state_again_costs_xenstored_no_more_than_it_costs_the_guest() {
    let mut stage = Stage::new();
    let (_, mut disk) = stage.attach(1, "disk", LARGE);
    stage.connect(&mut disk);
    stage.pass(Duration::from_secs(10));
    let before = stage.world.tree.requests();
    let mut writes = 0;
    for pause in [1000, 100, 7, 1] {
        for _ in 0..500 {
            disk.set("state", "4");
            writes += 1;
            stage.pass(Duration::from_millis(pause));
        }
    }
    let requests = stage.world.tree.requests() - before;
    // One request for each write, and some for the nodes of the rings.
    assert!(requests <= 3 * writes, "{requests} requests for {writes} writes");
    // The guest is served, and its later changes are handled.
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0);
    stage.until("it closes", || disk.step_close());
    stage.connect(&mut disk);
}

/// A guest that cycles through all states makes each of its writes cost many requests: these are rate-limited, and
/// another guest is not delayed.
#[test]
fn a_guest_that_cycles_through_all_states_is_rate_limited_alone() {
    let mut stage = Stage::new();
    let (_, mut disk) = stage.attach(1, "disk", LARGE);
    stage.connect(&mut disk);
    stage.pass(Duration::from_secs(60));
    let before = stage.world.tree.requests();
    for round in 0..4000 {
        disk.set("state", ["6", "1", "3", "4", "x", "6", "1", "5"][round % 8]);
        stage.pass(Duration::from_millis(10));
    }
    let requests = stage.world.tree.requests() - before;
    // 1,000 at once, 100 a second for 40 seconds, and a step of the state machine.
    assert!(requests < 1000 + 4000 + 500, "{requests} requests in 40 seconds");
    // Now with another guest, which connects and disconnects: its requests are limited separately.
    let (other, mut neighbour) = stage.attach(2, "other", FrontendConfig::default());
    let mut round = 0;
    let mut storm = || {
        round += 1;
        disk.set("state", ["6", "1", "3", "4"][round % 4]);
    };
    let took = stage.until("the other guest connects", || {
        storm();
        neighbour.step_connect().unwrap()
    });
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(neighbour.transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0);
    stage.until("the other guest disconnects", || {
        storm();
        neighbour.step_close() && other.mapped() == 0
    });
}

/// A frontend that restarted so fast that only its last state is seen, which is the one it had: its new rings are found.
#[test]
fn an_unseen_restart_of_a_frontend_is_detected_by_its_rings() {
    for (rewrites, patience) in [(0, 1), (3, 1), (50, 60)] {
        let mut stage = Stage::new();
        let (_, mut disk) = stage.attach(1, "disk", FrontendConfig::default());
        stage.connect(&mut disk);
        stage.pass(Duration::from_secs(1));
        for _ in 0..rewrites {
            disk.set("state", "4");
            stage.pass(Duration::from_millis(10));
        }
        assert_eq!(disk.backend("state").as_deref(), Some("4"));
        disk.set("state", "6");
        disk.set("ring-ref", "99");
        disk.set("state", "4");
        stage.pass(Duration::from_secs(patience));
        // It is found by now. The ring ends on its worker, in real time, and the test's clock stands still meanwhile.
        stage.until_ended("the old ring is disconnected", || {
            disk.backend("state").as_deref() != Some("4")
        });
    }
}

/// A guest whose rings were refused restarts so fast that its closing is not seen: the disk is offered to it again. To
/// one that only waits it is not offered repeatedly.
#[test]
fn a_refused_guest_whose_restart_was_not_seen_is_served() {
    let mut stage = Stage::new();
    let (_, mut disk) = stage.attach(1, "disk", FrontendConfig::default());
    let shows = |disk: &Frontend, state: &str| disk.backend("state").as_deref() == Some(state);
    stage.until("it is offered", || shows(&disk, "2"));
    disk.share().unwrap();
    disk.set("ring-ref", "x");
    disk.set("state", "3");
    stage.until("it is refused", || shows(&disk, "5"));
    disk.set("state", "6");
    disk.set("state", "1");
    stage.until("it is offered again", || shows(&disk, "2"));
    let pages = std::mem::take(&mut disk.queues).remove(0).ring;
    disk.free_pages(&pages);
    stage.connect(&mut disk);
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0);
    // A disk without a volume: refused once, though its guest waits.
    let (_, waiting) = stage.attach(2, "none", FrontendConfig::default());
    stage.until("it is refused", || shows(&waiting, "6"));
    stage.pass(Duration::from_secs(1));
    let before = stage.world.tree.requests();
    stage.pass(Duration::from_secs(60));
    assert_eq!(stage.world.tree.requests(), before, "there are requests although nothing changes");
}

/// One watch event as xenstored sends it.
fn message(path: &str, token: &str) -> Vec<u8> {
    let payload = format!("{path}\0{token}\0");
    let len = u32::try_from(payload.len()).unwrap();
    let header = Header { kind: kind::WATCH_EVENT, request: 0, transaction: 0, len };
    [&header.encode()[..], payload.as_bytes()].concat()
}

fn connection() -> (UnixStream, XenbusConnection) {
    let (far, near) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    (far, XenbusConnection::over(near.into()))
}

/// The kernel's device registers a watch itself, and replies without the number of the request.
#[test]
fn a_watch_is_answered_by_the_kernels_device_as_by_xenstored() {
    let (mut far, mut connection) = connection();
    for (kind, request) in [(kind::WATCH, 0), (kind::UNWATCH, 0), (kind::WATCH, 3)] {
        let reply = Header { kind, request, transaction: 0, len: 3 };
        far.write_all(&[&reply.encode()[..], b"OK\0"].concat()).unwrap();
        let path = "/local/domain/1/device/vbd/51728/state";
        match kind {
            kind::WATCH => connection.watch(path, "token").unwrap(),
            _ => connection.unwatch(path, "token").unwrap(),
        }
    }
    // No reply to a request of another kind.
    for (kind, request) in [(kind::WATCH, 0), (kind::READ, 0), (kind::READ, 4)] {
        let payload = if request == 0 { b"1" } else { b"2" };
        let reply = Header { kind, request, transaction: 0, len: 1 };
        far.write_all(&[&reply.encode()[..], payload].concat()).unwrap();
    }
    assert_eq!(connection.read(0, "domid").unwrap(), b"2");
}

/// A guest repeats one event faster than it is read: it is returned repeatedly, so that the caller can do its other work.
#[test]
fn an_event_that_repeats_without_end_is_returned_in_between() {
    let (mut far, mut connection) = connection();
    let one = message("/local/domain/1/device/vbd/51728/state", "ebbd-1-51728");
    let mut refill = || {
        far.set_nonblocking(true).unwrap();
        while let Ok(count) = far.write(&one) {
            if count < one.len() {
                // The rest of a message must follow.
                far.set_nonblocking(false).unwrap();
                return;
            }
        }
    };
    refill();
    let waiting =
        |connection: &XenbusConnection| rustix::io::ioctl_fionread(connection.fd()).unwrap();
    let full = waiting(&connection);
    assert!(full > 10_000, "{full} bytes");
    assert!(connection.event().unwrap().is_some());
    assert!(waiting(&connection) > 0, "all {full} bytes were read before one event was returned");
}

/// A guest that changes many nodes below its state takes one place in the queue of events; other guests' events stay.
#[test]
fn a_guest_with_many_nodes_displaces_no_events_of_other_guests() {
    let (mut far, mut connection) = connection();
    let sender = std::thread::spawn(move || {
        for number in 0..10_000 {
            let path = format!("/local/domain/1/device/vbd/51728/state/{number}");
            far.write_all(&message(&path, "ebbd-1-51728")).unwrap();
            let path = format!("/local/domain/0/backend/ebbd/2/51728/node-{number}");
            far.write_all(&message(&path, "backend")).unwrap();
        }
        far.write_all(&message("/local/domain/3/device/vbd/51712/state", "ebbd-3-51712")).unwrap();
        let answer = Header { kind: kind::READ, request: 1, transaction: 0, len: 1 };
        far.write_all(&[&answer.encode()[..], b"0"].concat()).unwrap();
        far
    });
    // The events are read while a request waits for its reply.
    assert_eq!(connection.read(0, "domid").unwrap(), b"0");
    let events: Vec<_> = std::iter::from_fn(|| connection.event().unwrap()).collect();
    drop(sender.join().unwrap());
    let expected = [
        ("/local/domain/1/device/vbd/51728/state/0", "ebbd-1-51728"),
        ("/local/domain/0/backend/ebbd/2/51728", "backend"),
        ("/local/domain/3/device/vbd/51712/state", "ebbd-3-51712"),
    ];
    let events: Vec<_> = events.iter().map(|(path, token)| (&path[..], &token[..])).collect();
    assert_eq!(events[..events.len().min(9)], expected, "{} events", events.len());
}
