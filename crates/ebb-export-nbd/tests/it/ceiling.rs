//! Memory that the requests of one volume hold does not delay the requests of another volume.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Client, FLUSH, READ, Rig, STYLES, Stream, Style, WRITE, memory, pattern, until};
use ebb_export_nbd::{ServerLimits, TlsMode};
use ebb_io::Worker;
use ebb_mem::{Memory, MemoryOptions};
use ebb_store::{Store, TestStore};
use ebb_volume::{Volume, VolumeOptions};

const MIB: usize = 1 << 20;
const CEILING: usize = 64 * MIB;

/// A server whose requests share a ceiling of 64 MiB.
fn rig(volumes: &[&Arc<Volume>]) -> Rig {
    rig_on(&io_memory(), volumes)
}

fn io_memory() -> Arc<Memory> {
    Memory::new(MemoryOptions::new(CEILING, Instant::now())).unwrap()
}

fn rig_on(memory: &Arc<Memory>, volumes: &[&Arc<Volume>]) -> Rig {
    let worker = Worker::start("nbd-test", memory).unwrap();
    for volume in volumes {
        volume.join(memory.shares(), volume.name());
    }
    let rig = Rig::on(worker, ServerLimits::default(), TlsMode::Off, None);
    volumes.iter().for_each(|volume| rig.server.volumes().add((*volume).clone(), Arc::default()));
    rig
}

/// A volume whose store never completes a request.
fn never_completing(name: &str) -> Arc<Volume> {
    let store = TestStore::new(64 << 20, 1);
    store.latency_us.store(3_600_000_000, Ordering::Relaxed);
    Volume::new(name, Store::Test(Arc::new(store)), VolumeOptions::default())
}

/// Small and large requests of all kinds, on new connections.
fn is_served(rig: &Rig, name: &str) {
    for style in STYLES {
        let mut client = rig.client(name, style);
        assert_eq!(client.write(0, 0, &pattern(1, 4096)), 0);
        assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
        assert!(client.read(0, 4096).unwrap() == pattern(1, 4096));
        let expected = pattern(2, 32 * MIB);
        assert_eq!(client.write(1, 0, &expected), 0, "32 MiB in one request");
        assert!(client.read(0, 32 * MIB).unwrap() == expected, "{style:?}");
        // Several requests at once.
        for cookie in 1..=4 {
            client.send(READ, 0, cookie, (cookie - 1) << 23, 8 << 20);
        }
        for _ in 0..4 {
            let reply = client.reply(|cookie| Some(((cookie - 1) << 23, 8 << 20))).unwrap();
            let at = usize::try_from((reply.cookie - 1) << 23).unwrap();
            assert!(reply.error == 0 && reply.data == expected[at..at + 8 * MIB]);
        }
    }
}

/// A client in the middle of a WRITE of 32 MiB, of whose data it has sent so many bytes.
fn stalled(rig: &Rig, name: &str, sent: usize) -> Client {
    let mut client = rig.client(name, Style::Simple);
    let header = client.header(WRITE, 0, 1, 0, 32 << 20);
    client.stream.write_all(&[&header[..], &vec![7; sent]].concat()).unwrap();
    client
}

#[test]
fn writers_that_stall_within_a_request_do_not_delay_other_volumes() {
    let (attacked, healthy) = (memory("attacked", 64 << 20), memory("healthy", 64 << 20));
    let rig = rig(&[&attacked, &healthy]);
    let stalled: Vec<_> = (0..64).map(|_| stalled(&rig, "attacked", 1000)).collect();
    is_served(&rig, "healthy");
    // New clients of the same volume are not delayed either: stalled connections are closed when these need memory.
    is_served(&rig, "attacked");
    drop(stalled);
}

/// Each writer has sent a first piece and half of a second one, and then sends a byte at a time.
#[test]
fn writers_that_send_a_few_bytes_at_a_time_count_as_stalled() {
    let attacked = memory("attacked", 64 << 20);
    let rig = rig(&[&attacked]);
    let mut slow: Vec<_> = (0..64).map(|_| stalled(&rig, "attacked", 386 << 10)).collect();
    let served = Arc::new(AtomicBool::new(false));
    let until = served.clone();
    let feeder = std::thread::spawn(move || {
        while !until.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(500));
            // Closed ones fail.
            slow.retain_mut(|client| client.stream.write_all(&[7]).is_ok());
        }
        slow.len()
    });
    // It needs memory that the writers hold.
    is_served(&rig, "attacked");
    served.store(true, Ordering::Relaxed);
    assert!(feeder.join().unwrap() < 64, "no slow writer was closed");
}

#[test]
fn writers_to_a_store_that_never_completes_do_not_delay_other_volumes() {
    let (dead, healthy) = (never_completing("dead"), memory("healthy", 64 << 20));
    let rig = rig(&[&dead, &healthy]);
    let writers: Vec<_> = (0..16)
        .map(|_| {
            let mut client = rig.client("dead", Style::Simple);
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                for cookie in 1..=2 {
                    bytes.extend(client.header(WRITE, 0, cookie, 0, 31 << 20));
                    bytes.extend(std::iter::repeat_n(7, 31 * MIB));
                }
                // Blocks at some point, until the server closes the connection.
                let _ = client.stream.write_all(&bytes);
            })
        })
        .collect();
    let readers: Vec<_> = (0..8)
        .map(|_| {
            let mut client = rig.client("dead", Style::Structured);
            for cookie in 1..=8 {
                client.send(READ, 0, cookie, 0, 4 << 20);
            }
            client
        })
        .collect();
    is_served(&rig, "healthy");
    let _still_greeted: Client = rig.client("dead", Style::Simple);
    drop((readers, rig));
    writers.into_iter().for_each(|writer| writer.join().unwrap());
}

#[test]
fn readers_that_receive_no_replies_do_not_delay_other_volumes() {
    let (attacked, healthy) = (memory("attacked", 64 << 20), memory("healthy", 64 << 20));
    let rig = rig(&[&attacked, &healthy]);
    assert_eq!(rig.client("attacked", Style::Simple).write(0, 0, &pattern(1, 32 * MIB)), 0);
    let greedy: Vec<_> = (0..32)
        .map(|number| {
            let mut client = rig.client("attacked", STYLES[number % 3]);
            for cookie in 1..=20 {
                client.send(READ, 0, cookie, 0, 16 << 20);
            }
            client
        })
        .collect();
    is_served(&rig, "healthy");
    drop(greedy);
}

/// Linux, and all clients that do not ask for the maximum payload, may send 32 MiB, whatever the
/// maximum is.
#[test]
fn a_client_that_asks_no_block_size_may_send_32_mib() {
    for memory_bytes in [4 << 10, 64 << 10, MIB] {
        let limits = ServerLimits {
            max_request: 4 << 10,
            connection_memory: memory_bytes,
            ..ServerLimits::default()
        };
        let rig = Rig::new(limits, TlsMode::Off, None);
        rig.server.volumes().add(memory("disk", 64 << 20), Arc::default());
        for style in STYLES {
            let mut stream: Box<dyn Stream> = Box::new(rig.stream());
            Client::greet(&mut stream).unwrap();
            let mut client = Client::enter(stream, "disk", style, &[0, 0]).unwrap();
            let data = pattern(memory_bytes as u64, 32 * MIB);
            assert_eq!(client.write(1, 4096, &data), 0, "{memory_bytes} {style:?}");
            assert!(client.read(4096, 32 * MIB).unwrap() == data, "{memory_bytes} {style:?}");
            // Several at a time, each of which needs all memory of the connection.
            for cookie in 1..=3 {
                client.send(READ, 0, cookie, 4096, 8 << 20);
            }
            for _ in 0..3 {
                let reply = client.reply(|_| Some((4096, 8 * MIB))).unwrap();
                assert!(reply.error == 0 && reply.data == data[..8 * MIB], "{style:?}");
            }
            assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
        }
    }
}

/// An error after the first piece of a simple reply cannot be reported: the connection ends. In
/// chunks it can.
#[test]
fn a_long_read_that_fails_is_never_a_short_reply() {
    let store = Arc::new(TestStore::new(64 << 20, 1));
    let flaky = Volume::new("flaky", Store::Test(store.clone()), VolumeOptions::default());
    let limits = ServerLimits { connection_memory: 256 << 10, ..ServerLimits::default() };
    let rig = Rig::new(limits, TlsMode::Off, None);
    rig.server.volumes().add(flaky, Arc::default());
    store.read_faults.store(20, Ordering::Relaxed);
    let mut broken = 0;
    for _ in 0..20 {
        let mut client = rig.client("flaky", Style::Simple);
        client.send(READ, 0, 1, 0, 32 << 20);
        match client.reply(|_| Some((0, 32 * MIB))) {
            Ok(reply) => assert!(reply.error != 0 || reply.data.len() == 32 * MIB),
            Err(_) => broken += 1,
        }
        for style in [Style::Structured, Style::Extended] {
            let mut client = rig.client("flaky", style);
            client.send(READ, 0, 1, 0, 32 << 20);
            let reply = client.reply(|_| Some((0, 32 * MIB))).unwrap();
            assert!(reply.error != 0 || reply.data.len() == 32 * MIB);
            assert_eq!(client.ask(FLUSH, 0, 0, 0), 0, "the connection goes on");
        }
    }
    assert!(broken > 0, "no connection ended");
}

/// So many volumes that a volume's reserve is smaller than a large request.
#[test]
fn large_requests_are_executed_in_pieces_when_memory_is_scarce() {
    let volumes: Vec<_> = (0..40).map(|n| memory(&format!("disk {n}"), 64 << 20)).collect();
    let dead =
        [never_completing("dead"), never_completing("dead too"), never_completing("as well")];
    let rig = rig(&volumes.iter().chain(&dead).collect::<Vec<_>>());
    let hold = |name: &str| {
        let mut client = rig.client(name, Style::Simple);
        for cookie in 1..=60 {
            client.send(READ, 0, cookie, 0, 1 << 19);
        }
        client
    };
    let held: Vec<_> = ["dead", "dead too", "as well"].map(hold).into_iter().collect();
    is_served(&rig, "disk 7");
    drop((held, rig));
}

/// A read is admitted to be sent in pieces, waits behind stalled writes, and then there is memory
/// for all of it.
#[test]
fn a_read_whose_memory_grows_while_it_waits_is_sent_whole() {
    const LENGTH: usize = 64 << 10;
    let (volume, memory) = (memory("disk", 64 << 20), io_memory());
    let (rig, shares) = (rig_on(&memory, &[&volume]), memory.shares());
    let mut client = rig.client("disk", Style::Simple);
    // The reserve is what one of the writes needs, and no second one fits into the common part.
    shares.set_total(2 * (LENGTH + ebb_export::REQUEST_BYTES));
    let stalled = [1, 2].map(|_| {
        let mut writer = rig.client("disk", Style::Simple);
        let header = writer.header(WRITE, 0, 1, 0, LENGTH as u64);
        writer.stream.write_all(&header).unwrap();
        writer
    });
    let share = volume.share(shares);
    until("a write waits", || share.has_waiters());
    client.send(READ, 0, 1, 0, 2 * LENGTH as u64);
    let begun = || rig.server.list_clients().iter().map(|client| client.in_flight).sum::<u64>();
    until("the read has begun", || begun() == 3);
    shares.set_total(64 << 20);
    let reply = client.reply(|_| Some((0, 2 * LENGTH))).unwrap();
    assert_eq!((reply.error, reply.data.len()), (0, 2 * LENGTH));
    assert_eq!(client.read(0, 4096).unwrap(), vec![0; 4096], "the connection continues");
    drop(stalled);
}

#[test]
fn an_idle_connection_gives_its_receive_buffer_back() {
    let (volume, memory) = (memory("disk", 64 << 20), io_memory());
    let (rig, shares) = (rig_on(&memory, &[&volume]), memory.shares());
    let mut client = rig.client("disk", Style::Simple);
    let share = volume.share(shares);
    let mut burst = Vec::new();
    for cookie in 0..256 {
        burst.extend(client.header(WRITE, 0, cookie, 0, 4096));
        burst.extend(pattern(cookie, 4096));
    }
    client.stream.write_all(&burst).unwrap();
    (0..256).for_each(|_| assert_eq!(client.reply(|_| None).unwrap().error, 0));
    assert!(share.used() > 0, "the burst has made the buffer larger");
    until("its memory is given back", || share.used() == 0);
    assert_eq!(client.write(0, 0, &pattern(1, 4096)), 0);
    assert_eq!(client.read(0, 4096).unwrap(), pattern(1, 4096));
}

#[test]
fn a_read_that_fails_after_its_first_piece_ends_the_connection() {
    let store = Arc::new(TestStore::new(64 << 20, 1));
    let flaky = Volume::new("flaky", Store::Test(store.clone()), VolumeOptions::default());
    let volumes: Vec<_> = (0..40).map(|n| memory(&format!("disk {n}"), MIB as u64)).collect();
    let rig = rig(&volumes.iter().chain([&flaky]).collect::<Vec<_>>());
    store.read_faults.store(100, Ordering::Relaxed);
    let (mut whole, mut refused, mut broken) = (0, 0, 0);
    for _ in 0..60 {
        let mut client = rig.client("flaky", Style::Simple);
        client.send(READ, 0, 1, 0, 60 << 20 >> 1);
        match client.reply(|_| Some((0, 30 * MIB))) {
            Ok(reply) if reply.error == 0 => {
                assert!(reply.data.iter().all(|byte| *byte == 0));
                whole += 1;
            }
            Ok(_) => refused += 1,
            Err(_) => broken += 1,
        }
    }
    assert!(broken > 0, "{whole} {refused} {broken}");
    store.read_faults.store(0, Ordering::Relaxed);
    let mut client = rig.client("flaky", Style::Simple);
    assert_eq!(client.read(0, 30 * MIB).unwrap().len(), 30 * MIB);
    let _: &dyn Stream = &client.stream;
}
