//! A backend in a process of its own, which is killed (SIGKILL) at any moment, and its successors.
//!
//! `EBB_SIGKILLS=<number>` sets how often, `EBBD_FUZZ_SEED=<number>` the seed.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ebb_export_vhost::{VhostBackend, VhostOptions, VolumeSocket};
use ebb_io::Worker;
use ebb_store::{FileStore, OpenOptions, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};

use crate::common::load::Load;
use crate::common::{Base, Frontend, Guest, Random, SIZE, Wishes, number, pause, until};

/// Names the directory to serve, in the process that is killed.
const SERVE: &str = "EBB_SERVE";

/// Not a test: what the process that is killed does.
#[test]
#[ignore = "run by the other test, in a process of its own"]
fn serves_until_it_is_killed() {
    let Ok(folder) = std::env::var(SERVE) else { return };
    let path = |name: &str| Path::new(&folder).join(name);
    let store = FileStore::open(&path("disk"), &OpenOptions::default()).unwrap().0;
    let worker = Worker::start_alone("worker").unwrap();
    let volumes = Volumes::default();
    let volume = Volume::new("disk", Store::File(store), VolumeOptions::default());
    volumes.add(volume, std::sync::Arc::default());
    let backend = VhostBackend::start(VhostOptions::new(vec![worker.handle()], volumes)).unwrap();
    let _ = std::fs::remove_file(path("socket"));
    let listening = UnixListener::bind(path("socket")).unwrap();
    backend.listen(VolumeSocket::new(listening.into(), &path("socket"), "disk").unwrap());
    std::fs::write(path("ready"), "").unwrap();
    // Until its parent ends, if it is not killed before.
    let _ = std::io::stdin().read(&mut [0]);
}

fn serve(folder: &Path) -> Child {
    let _ = std::fs::remove_file(folder.join("ready"));
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sigkill::serves_until_it_is_killed", "--ignored", "--test-threads=1"])
        .env(SERVE, folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("it serves", || folder.join("ready").exists());
    child
}

/// What a kill cuts off is repeated by the successor: nothing is lost, doubled or left hanging. Traps 1 to 5.
#[test]
fn trap_1_to_5_a_killed_process_loses_no_request() {
    let (kills, seed) = (number("EBB_SIGKILLS", 25), number("EBBD_FUZZ_SEED", 1));
    let mut random = Random::new(seed);
    // On a disk, where direct requests complete in any order.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::File::create(folder.path().join("disk")).unwrap().set_len(SIZE).unwrap();
    let mut child = serve(folder.path());
    let socket = folder.path().join("socket");
    let wishes = Wishes { queues: 2, indirect: true, ..Wishes::default() };
    let mut disk = Frontend::connect(&socket, Guest::new(wishes.queues), wishes);
    disk.negotiate();
    disk.start();
    let (mut load, mut cut) = (Load::default(), 0);
    for round in 0..kills {
        let begun = Instant::now();
        let time = Duration::from_micros(random.below(4000));
        loop {
            for queue in 0..2 {
                load.submit(&mut disk, queue, &mut random);
                load.take(&mut disk, queue);
            }
            if begun.elapsed() >= time {
                break;
            }
            pause(Duration::from_micros(random.below(50)));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        (0..2).for_each(|queue| load.take(&mut disk, queue));
        cut += disk.drivers.iter().map(|driver| driver.busy.len()).sum::<usize>();
        child = serve(folder.path());
        disk.wishes.base = if random.below(2) == 0 { Base::Used } else { Base::Available };
        disk.reconnect(&socket);
        if round % 8 == 7 {
            load.finish(&mut disk);
        }
    }
    load.finish(&mut disk);
    load.verify(&mut disk);
    child.kill().unwrap();
    child.wait().unwrap();
    println!("{kills} kills, {cut} requests cut off, {} written", load.written);
    assert!(cut > 0, "no request was in flight at a kill: the test shows nothing");
}
