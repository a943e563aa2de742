//! A stop, and the withdrawal of a volume: devices drain independently, and a caller can stop waiting.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::{HANG, Rig, SIZE, memory, pattern, until};
use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::platform::{Channel, Domain, Grants, Platform, XenStore, XenstoreError};
use ebb_export_xen::shm::World;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::{Backend, BackendOptions, DiskSpec, NextRun, attach, detach, device_number};
use ebb_io::Worker;
use ebb_store::{Store, TestStore};
use ebb_volume::{Volume, VolumeOptions, Volumes};

/// A time longer than any test takes.
const NEVER_US: u64 = 3_600_000_000;

/// A deadline for waits that are expected to time out.
fn soon() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

fn generous() -> Instant {
    Instant::now() + HANG
}

/// A volume whose store can be made to hang.
fn volume(rig: &Rig, name: &str) -> (Arc<Volume>, Arc<TestStore>) {
    let store = Arc::new(TestStore::new(SIZE, 1));
    let volume = Volume::new(name, Store::Test(store.clone()), VolumeOptions::default());
    rig.add(volume.clone());
    (volume, store)
}

/// Sends a write of one page without waiting for its response.
fn send(disk: &mut Frontend, sector: u64, data: &[u8]) -> u32 {
    let page = disk.pages(1)[0];
    let guest = disk.guest().clone();
    assert!(guest.memory().write(ebb_export_xen::shm::frontend::offset(page), data));
    let segment = Segment { gref: page, first: 0, last: 7 };
    let (_, request) = disk.request(op::WRITE, sector, &[segment]);
    disk.queues[0].put(request);
    disk.queues[0].push();
    page
}

/// Two disks of one worker, one on a store that hangs: the other drains at once, a stop ends at its deadline and
/// reports the disk with a request in flight, and a successor repeats that request.
#[test]
fn a_store_that_hangs_delays_only_its_own_disk_at_a_stop() {
    let mut rig = Rig::new();
    let (_, store) = volume(&rig, "hanging");
    let mut disks: Vec<Frontend> = [(1, "hanging"), (2, "disk")]
        .into_iter()
        .map(|(number, volume)| {
            let guest = rig.guest(number, 64);
            let mut disk = rig.attach(&guest, "xvdb", volume, FrontendConfig::default());
            disk.connect().unwrap();
            disk
        })
        .collect();
    store.latency_us.store(NEVER_US, Ordering::SeqCst);
    let data = pattern(5, 4096);
    send(&mut disks[0], 8, &data);
    until("the write is in flight", || store.writes.load(Ordering::SeqCst) > 0);
    assert_eq!(disks[1].transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0);
    let backend = rig.backend.take().unwrap();
    let ending = backend.begin_stop();
    assert!(ending.of("disk").wait_until(generous()), "the other disk did not drain");
    let left = ending.remaining();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!((left[0].guest, &*left[0].volume, left[0].closing), (1, "hanging", true));
    let left = backend.stop(soon());
    assert_eq!(left.len(), 1, "{left:?}");
    // The workers end with the process; their requests get no response.
    rig.workers.clear();
    assert_eq!(disks[0].queues[0].take().unwrap(), None);
    store.latency_us.store(0, Ordering::SeqCst);
    rig.start(1, |_| {});
    assert_eq!(disks[0].queues[0].wait().unwrap().status, 0, "the successor repeats the request");
    let mut back = vec![0; 4096];
    store.look(8 * 512, &mut back);
    assert!(back == data);
    assert_eq!(disks[1].transfer(0, op::READ, 0, &mut back).unwrap(), 0);
    assert!(back == pattern(1, 4096));
}

/// A volume is given up because its store does not respond, and then the store does: the write is not
/// acknowledged, which nothing could make stable any more, and is no error for the guest either. The successor
/// repeats it.
#[test]
fn a_write_of_a_volume_that_was_given_up_is_left_to_the_successor() {
    let mut rig = Rig::new();
    let (hanging, store) = volume(&rig, "hanging");
    let guest = rig.guest(1, 64);
    let mut disk = rig.attach(&guest, "xvdb", "hanging", FrontendConfig::default());
    disk.connect().unwrap();
    store.hang();
    let data = pattern(5, 4096);
    send(&mut disk, 8, &data);
    until("the write is in flight", || hanging.in_flight() > 0);
    let backend = rig.backend.take().unwrap();
    let ending = backend.begin_stop();
    assert!(hanging.abandon());
    ending.note_stable();
    hanging.abort();
    store.release();
    assert!(ending.wait_until(generous()), "the write has not ended");
    assert_eq!(disk.queues[0].take().unwrap(), None, "it has a response");
    assert!(backend.stop(generous()).is_empty());
    rig.workers.clear();
    rig.add(Volume::new("hanging", Store::Test(store.clone()), VolumeOptions::default()));
    rig.start(1, |_| {});
    assert_eq!(disk.queues[0].wait().unwrap().status, 0, "the successor repeats the request");
    let mut back = vec![0; 4096];
    store.look(8 * 512, &mut back);
    assert!(back == data);
}

/// A withdrawn volume drains independently of other disks, and a task can await that.
#[test]
fn a_withdrawn_volume_drains_independently_and_its_guest_is_notified() {
    let rig = Rig::new();
    let (_, store) = volume(&rig, "slow");
    let (first, second) = (rig.guest(1, 64), rig.guest(2, 64));
    let mut slow = rig.attach(&first, "xvdb", "slow", FrontendConfig::default());
    slow.connect().unwrap();
    let mut other = rig.attach(&second, "xvdb", "disk", FrontendConfig::default());
    other.connect().unwrap();
    store.waits.store(1, Ordering::SeqCst);
    store.latency_us.store(50_000, Ordering::SeqCst);
    send(&mut slow, 0, &[1; 4096]);
    until("the write is in flight", || store.writes.load(Ordering::SeqCst) > 0);
    let backend = rig.backend.as_ref().unwrap();
    let withdrawn = rig.volumes.remove("slow").unwrap();
    let ending = backend.withdraw(&withdrawn);
    assert_eq!(other.transfer(0, op::WRITE, 0, &mut [2; 4096]).unwrap(), 0);
    // Awaited by a task, as the daemon does.
    let waited = ending.clone();
    rig.workers[0].handle().block_on(move |_| async move { waited.drained().await }).unwrap();
    assert!(ending.is_drained() && ending.remaining().is_empty());
    assert_eq!(slow.queues[0].wait().unwrap().status, 0, "the request in flight completed");
    slow.await_backend("5").unwrap();
    let reported = rig.world.tree.get("/local/domain/0/error/backend/ebbd/1/51728/error").unwrap();
    assert!(reported.contains("`slow` is not served any more"), "{reported}");
    assert!(backend.withdraw(&withdrawn).is_drained(), "no request is in flight");
    // As if a device had looked the volume up just before: it is not attached again.
    rig.add(withdrawn);
    let attach_again = || {
        rig.world.tree.remove_all("/local/domain/0/error");
        let mut store = rig.world.xenstore().unwrap();
        detach(&mut *store, 1, "xvdb", true).unwrap();
        let order = DiskSpec { volume: "slow", name: "xvdb", read_only: false };
        attach(&mut *store, 1, &order).unwrap();
    };
    slow.set("state", "6");
    attach_again();
    until("the disk is refused", || {
        rig.world.tree.get("/local/domain/0/error/backend/ebbd/1/51728/error").is_some()
    });
    slow.await_backend("6").unwrap();
    assert_eq!(other.transfer(0, op::WRITE, 0, &mut [3; 4096]).unwrap(), 0);
    // A new volume of that name is attached.
    rig.add(memory("slow", SIZE, false));
    attach_again();
    slow.connect().unwrap();
    assert_eq!(slow.transfer(0, op::WRITE, 0, &mut [4; 4096]).unwrap(), 0);
}

/// A platform whose xenstored can be made to hang.
#[derive(Clone, Default)]
struct Stuck {
    world: World,
    gate: Arc<(Mutex<bool>, Condvar)>,
    waiting: Arc<AtomicBool>,
}

impl Stuck {
    fn shut(&self, shut: bool) {
        *self.gate.0.lock().unwrap() = shut;
        self.gate.1.notify_all();
    }

    fn pass(&self) {
        let mut shut = self.gate.0.lock().unwrap();
        while *shut {
            self.waiting.store(true, Ordering::SeqCst);
            shut = self.gate.1.wait(shut).unwrap();
        }
    }
}

impl Platform for Stuck {
    fn grants(&self, guest: Domain) -> io::Result<Arc<dyn Grants>> {
        self.world.grants(guest)
    }

    fn bind(&self, guest: Domain, port: u32) -> io::Result<Box<dyn Channel>> {
        self.world.bind(guest, port)
    }

    fn xenstore(&self) -> io::Result<Box<dyn XenStore>> {
        Ok(Box::new(StuckStore(self.clone(), self.world.xenstore()?)))
    }
}

struct StuckStore(Stuck, Box<dyn XenStore>);

impl XenStore for StuckStore {
    fn read(&mut self, within: u32, path: &str) -> Result<Vec<u8>, XenstoreError> {
        self.0.pass();
        self.1.read(within, path)
    }

    fn write(&mut self, within: u32, path: &str, value: &str) -> Result<(), XenstoreError> {
        self.1.write(within, path, value)
    }

    fn list(&mut self, within: u32, path: &str) -> Result<Vec<String>, XenstoreError> {
        self.1.list(within, path)
    }

    fn remove(&mut self, within: u32, path: &str) -> Result<(), XenstoreError> {
        self.1.remove(within, path)
    }

    fn set_permissions(
        &mut self,
        within: u32,
        path: &str,
        a: Domain,
        b: Domain,
    ) -> Result<(), XenstoreError> {
        self.1.set_permissions(within, path, a, b)
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        self.1.watch(path, token)
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        self.1.unwatch(path, token)
    }

    fn begin(&mut self) -> Result<u32, XenstoreError> {
        self.1.begin()
    }

    fn end(&mut self, transaction: u32, commit: bool) -> Result<(), XenstoreError> {
        self.1.end(transaction, commit)
    }

    fn event(&mut self) -> Result<Option<(String, String)>, XenstoreError> {
        self.1.event()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.1.fd()
    }
}

/// While xenstored hangs, disks drain all the same, and a stop ends at its deadline.
#[test]
fn a_stop_does_not_wait_for_xenstored() {
    let stuck = Stuck::default();
    let platform = stuck.clone();
    let mut rig = Rig::in_world(stuck.world.clone(), 1, |options| {
        options.platform = Arc::new(platform.clone());
    });
    let mut disk = rig.disk(FrontendConfig::default());
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut [1; 4096]).unwrap(), 0);
    stuck.shut(true);
    disk.set("state", "4");
    until("the thread waits for xenstored", || stuck.waiting.load(Ordering::SeqCst));
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut [1; 4096]).unwrap(), 0, "disks are served");
    let backend = rig.backend.take().unwrap();
    assert!(backend.begin_stop().wait_until(generous()));
    assert!(backend.stop(soon()).is_empty(), "no disk has requests in flight");
    stuck.shut(false);
}

/// The xenstore side without its thread, at times that the test chooses: a disk is attached, used and detached.
#[test]
fn the_xenstore_side_can_be_run_one_iteration_at_a_time() {
    let world = World::default();
    let worker = Worker::start_alone("xen").unwrap();
    let volumes = Volumes::default();
    volumes.add(memory("disk", SIZE, false), Arc::default());
    let options = BackendOptions::new(Arc::new(world.clone()), vec![worker.handle()], volumes);
    let (backend, mut control) = Backend::prepare(options).unwrap();
    let guest = world.guest(1, 64).unwrap();
    let order = DiskSpec { volume: "disk", name: "xvdb", read_only: false };
    attach(&mut *world.xenstore().unwrap(), 1, &order).unwrap();
    let mut disk =
        Frontend::new(&world, &guest, device_number("xvdb").unwrap(), FrontendConfig::default());
    let mut now = Instant::now();
    let begun = Instant::now();
    let mut go = |done: &mut dyn FnMut() -> bool| {
        while !done() {
            // The ring runs on a worker of its own, in real time.
            assert!(begun.elapsed() < HANG, "it does not become idle");
            std::thread::yield_now();
            // The clock is set to the time that the call returned, without waiting.
            match control.run_once(now) {
                NextRun::Wait(Some(at)) => now = now.max(at),
                NextRun::Wait(None) => {}
                NextRun::Ended => return true,
            }
        }
        false
    };
    go(&mut || disk.step_connect().unwrap());
    let mut data = pattern(3, 4096);
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut data).unwrap(), 0);
    go(&mut || disk.step_close() && guest.mapped() == 0);
    go(&mut || disk.step_connect().unwrap());
    let mut back = vec![0; 4096];
    assert_eq!(disk.transfer(0, op::READ, 0, &mut back).unwrap(), 0);
    assert!(back == data);
    assert!(backend.begin_stop().wait_until(generous()));
    assert!(go(&mut || false), "the end is not reported");
    assert_eq!(guest.mapped(), 0);
}

/// Two backends for the same guests: the second is refused, until the first has ended.
#[test]
fn a_second_backend_is_refused_while_there_is_one() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    let start = || {
        let workers = rig.workers.iter().map(Worker::handle).collect();
        let volumes = Volumes::default();
        let mut options = BackendOptions::new(Arc::new(rig.world.clone()), workers, volumes);
        options.journals = Some(rig.journals.path().to_owned());
        Backend::start(options)
    };
    let error = start().err().unwrap().to_string();
    assert!(error.contains("another ebbd serves the Xen guests of this host"), "{error}");
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut [1; 4096]).unwrap(), 0);
    assert_eq!(disk.backend("state").as_deref(), Some("4"), "the disk stays connected");
}

/// The host with a lock that all its backends share, as they share Xen's devices.
struct Locked(World, PathBuf);

impl Platform for Locked {
    fn grants(&self, guest: Domain) -> io::Result<Arc<dyn Grants>> {
        self.0.grants(guest)
    }
    fn bind(&self, guest: Domain, port: u32) -> io::Result<Box<dyn Channel>> {
        self.0.bind(guest, port)
    }
    fn xenstore(&self) -> io::Result<Box<dyn XenStore>> {
        self.0.xenstore()
    }
    fn lock_file(&self) -> io::Result<Option<(File, PathBuf)>> {
        Ok(Some((File::open(&self.1)?, self.1.clone())))
    }
}

/// Two backends with directories of their own exclude each other by the host's lock, which a stop or a kill releases.
#[test]
fn a_second_backend_with_directories_of_its_own_is_refused_until_the_first_has_ended() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let world = World::default();
    let worker = Worker::start_alone("xen").unwrap();
    let folders = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    let start = |folder: usize| {
        let platform = Arc::new(Locked(world.clone(), file.path().to_owned()));
        let mut options = BackendOptions::new(platform, vec![worker.handle()], Volumes::default());
        options.journals = Some(folders[folder].path().to_owned());
        Backend::start(options)
    };
    let refused = |folder| {
        let error = start(folder).err().unwrap().to_string();
        assert!(error.contains(&file.path().display().to_string()), "{error}");
    };
    let first = start(0).unwrap();
    refused(1);
    drop(first);
    drop(start(1).unwrap());
    // Held by another process, which is killed.
    let mut holder = Command::new("flock")
        .arg("--no-fork")
        .arg(file.path())
        .args(["sh", "-c", "echo held; exec sleep 600"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let reported = &mut [0; 1];
    holder.stdout.take().unwrap().read_exact(reported).unwrap();
    refused(0);
    holder.kill().unwrap();
    holder.wait().unwrap();
    drop(start(0).unwrap());
}

/// A guest's flush fails while a stop closes its volume: this daemon or the next one reports that to the guest. A
/// flush that the next daemon repeats would succeed over lost data.
#[test]
fn a_flush_that_fails_while_the_volume_is_closed_is_reported_to_the_guest() {
    let mut rig = Rig::new();
    let (volume, store) = volume(&rig, "failing");
    let guest = rig.guest(1, 64);
    let mut disk = rig.attach(&guest, "xvdb", "failing", FrontendConfig::default());
    disk.connect().unwrap();
    let mut data = pattern(5, 4096);
    assert_eq!(disk.transfer(0, op::WRITE, 8, &mut data).unwrap(), 0, "acknowledged");
    store.hang();
    let (_, request) = disk.request(op::FLUSH_DISKCACHE, 0, &[]);
    disk.queues[0].put(request);
    disk.queues[0].push();
    until("the flush is in flight", || volume.in_flight() > 0);
    let backend = rig.backend.take().unwrap();
    let ending = backend.begin_stop();
    // The time limit of the stop has expired: it closes the volume.
    let (sender, closed) = std::sync::mpsc::channel();
    let closing = volume.clone();
    rig.workers[0].handle().spawn(move |io| async move {
        let _ = sender.send(closing.close(&io).await);
    });
    until("it closes", || volume.is_closing());
    store.flush_faults.store(1000, Ordering::SeqCst);
    store.release();
    assert!(ending.wait_until(generous()));
    let outcome = closed.recv_timeout(HANG).unwrap();
    assert!(outcome.is_err() && !store.lost_sectors().is_empty());
    assert_eq!(disk.queues[0].take().unwrap().map(|response| response.status), Some(-1));
    assert!(backend.stop(generous()).is_empty());
    rig.workers.clear();
    store.flush_faults.store(0, Ordering::SeqCst);
    let anew = Store::Test(Arc::new(store.open_anew()));
    rig.add(Volume::new("failing", anew, VolumeOptions::default()));
    rig.start(1, |_| {});
    let status = disk.transfer(0, op::WRITE, 80, &mut pattern(6, 4096)).unwrap();
    assert_eq!(status, -1, "the next daemon reports the failure");
}

/// A volume is withdrawn and replaced while the thread for xenstore connects a device to the new one: the device stays
/// with the new volume, and can be detached.
#[test]
fn a_device_of_a_new_volume_is_not_withdrawn_with_the_old_one() {
    let mut rig = Rig::new();
    rig.add(memory("swap", SIZE, false));
    rig.stop();
    let states = Arc::new([const { AtomicBool::new(false) }; 3]);
    let shared = states.clone();
    rig.start(1, |options| {
        let [armed, inside, go] = [0, 1, 2];
        let shared = shared.clone();
        options.awaited = Arc::new(move |name: &str| {
            // On xenstore's thread, while it checks guest 1's device: xenstored is slow here.
            if name == "absent" && shared[armed].swap(false, Ordering::SeqCst) {
                shared[inside].store(true, Ordering::SeqCst);
                until("go", || shared[go].load(Ordering::SeqCst));
            }
            true
        });
    });
    let (one, two) = (rig.guest(1, 64), rig.guest(2, 64));
    let absent = rig.attach(&one, "xvdb", "absent", FrontendConfig::default());
    let mut disk = rig.attach(&two, "xvdb", "swap", FrontendConfig::default());
    absent.set("state", "1");
    disk.set("state", "1");
    disk.await_backend("2").unwrap();
    states[0].store(true, Ordering::SeqCst);
    rig.backend.as_ref().unwrap().recheck_devices();
    until("the thread checks guest 1", || states[1].load(Ordering::SeqCst));
    disk.share().unwrap();
    disk.set("state", "3");
    let old = rig.volumes.remove("swap").unwrap();
    assert!(rig.backend.as_ref().unwrap().withdraw(&old).is_drained());
    rig.add(memory("swap", SIZE, false));
    rig.backend.as_ref().unwrap().recheck_devices();
    states[2].store(true, Ordering::SeqCst);
    disk.await_backend("4").unwrap();
    disk.set("state", "4");
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0, "it is served");
    until("the disk is detached", || disk.step_close());
}

/// The last flush of a stop fails while the guest has none in flight: the next daemon reports the loss to the guest.
#[test]
fn what_the_last_flush_of_a_stop_loses_is_noticed_by_the_guest_of_the_next_daemon() {
    let mut rig = Rig::new();
    let (volume, store) = volume(&rig, "failing");
    let guest = rig.guest(1, 64);
    let mut disk = rig.attach(&guest, "xvdb", "failing", FrontendConfig::default());
    disk.connect().unwrap();
    let mut data = pattern(5, 4096);
    assert_eq!(disk.transfer(0, op::WRITE, 8, &mut data).unwrap(), 0, "acknowledged");
    let backend = rig.backend.take().unwrap();
    let ending = backend.begin_stop();
    assert!(ending.wait_until(generous()));
    store.flush_faults.store(1000, Ordering::SeqCst);
    let closing = volume.clone();
    let outcome = rig.workers[0]
        .handle()
        .block_on(move |io| async move { closing.close(&io).await })
        .unwrap();
    assert!(outcome.is_err() && volume.is_lost());
    ending.note_lost();
    assert!(backend.stop(generous()).is_empty());
    rig.workers.clear();
    store.flush_faults.store(0, Ordering::SeqCst);
    let anew = Store::Test(Arc::new(store.open_anew()));
    rig.add(Volume::new("failing", anew, VolumeOptions::default()));
    rig.start(1, |_| {});
    let status = disk.flush(op::FLUSH_DISKCACHE).unwrap();
    let lost = store.stable_bytes()[8 * 512..][..4096] != data[..];
    assert!(!(lost && status == 0), "the flush succeeds although acknowledged data is lost");
}
