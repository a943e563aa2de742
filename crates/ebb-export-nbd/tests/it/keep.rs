//! Connections that one server keeps and another one continues.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};

use common::{Client, FLUSH, READ, Rig, STYLES, Stream, Style, TRIM, WRITE, memory, pattern};
use ebb_access::{AccessEntry, AccessList};
use ebb_export_nbd::{KeptConnection, ServerLimits, TlsMode};
use ebb_store::{NullStore, Store};
use ebb_volume::{Volume, VolumeOptions, Writer};
use seeded::Random;

const MIB: u64 = 1 << 20;
/// Requests in flight at most, each in a slot of its own.
const SLOTS: u64 = 24;
const SLOT: u64 = 3 << 20;

fn rig(volume: &Arc<Volume>, memory: usize) -> Rig {
    let limits = ServerLimits { connection_memory: memory, ..ServerLimits::default() };
    let rig = Rig::new(limits, TlsMode::Off, None);
    rig.server.volumes().add(volume.clone(), Arc::default());
    rig
}

/// Stops a server that keeps its connections, and returns them as another process would get them.
fn keep(rig: &Rig) -> Vec<KeptConnection> {
    rig.server.keep_connections();
    rig.stop();
    let passed = |kept: KeptConnection| {
        let (socket, rest) = (kept.socket().clone(), kept.rest().into());
        KeptConnection::new(socket, kept.state(), rest).unwrap()
    };
    rig.server.take_kept().into_iter().map(passed).collect()
}

fn adopt(rig: &Rig, kept: Vec<KeptConnection>) {
    let writers = rig.server.claim_writers(&kept);
    rig.server.adopt(kept, &writers, &[rig.worker().handle()]);
}

/// A request in flight: its slot, and of a read what it must return.
struct Sent {
    slot: u64,
    range: Option<(u64, usize)>,
    expected: Option<Vec<u8>>,
    /// What the server must refuse.
    refused: bool,
}

type InFlight = Mutex<BTreeMap<u64, Sent>>;

/// Sends requests of all kinds, in pieces of any length, until `end`, and at last a flush; notes their number.
fn send(
    (style, mut stream): (Style, UnixStream),
    (seed, flight): (u64, &InFlight),
    (freed, end, total): (Receiver<u64>, &AtomicBool, &OnceLock<u64>),
) {
    let header = Client::detached(style);
    let mut random = Random::new(seed);
    let mut free: Vec<u64> = (0..SLOTS).collect();
    let mut content: BTreeMap<u64, (usize, Vec<u8>)> = BTreeMap::new();
    let mut bytes = Vec::new();
    let mut cookie = 0;
    while !end.load(Ordering::SeqCst) {
        while let Ok(slot) = freed.try_recv() {
            free.push(slot);
        }
        if free.is_empty() {
            free.push(freed.recv().unwrap());
        }
        let slot = free.swap_remove(usize::try_from(random.below(free.len() as u64)).unwrap());
        cookie += 1;
        let at = slot * SLOT;
        // Some are received and written in pieces.
        let largest = match random.below(16) {
            0 => 6144,
            1 => 640,
            _ => 32,
        };
        let length = 512 * usize::try_from(1 + random.below(largest)).unwrap();
        let mut sent = Sent { slot, range: None, expected: None, refused: false };
        match random.below(10) {
            0 => bytes.extend(header.header(FLUSH, 0, cookie, 0, 0)),
            1 => {
                // Beyond the end, with data that is skipped.
                sent.refused = true;
                bytes.extend(header.header(WRITE, 0, cookie, SLOTS * SLOT, length as u64));
                bytes.extend(pattern(cookie, length));
            }
            2..6 if content.contains_key(&slot) => {
                let (length, data) = &content[&slot];
                sent.range = Some((at, *length));
                sent.expected = Some(data.clone());
                bytes.extend(header.header(READ, 0, cookie, at, *length as u64));
            }
            _ => {
                let data = pattern(cookie, length);
                bytes.extend(header.header(WRITE, 0, cookie, at, length as u64));
                bytes.extend_from_slice(&data);
                content.insert(slot, (length, data));
            }
        }
        flight.lock().unwrap().insert(cookie, sent);
        // The remainder follows with the next requests.
        let now = usize::try_from(random.below(bytes.len() as u64 + 1)).unwrap();
        stream.write_all(&bytes[..now]).unwrap();
        bytes.drain(..now);
        if free.is_empty() || random.below(16) == 0 {
            stream.write_all(&bytes).unwrap();
            bytes.clear();
        }
    }
    cookie += 1;
    let last = Sent { slot: SLOTS, range: None, expected: None, refused: false };
    flight.lock().unwrap().insert(cookie, last);
    bytes.extend(header.header(FLUSH, 0, cookie, 0, 0));
    total.set(cookie).unwrap();
    stream.write_all(&bytes).unwrap();
}

/// Receives replies until all requests have one.
fn receive(
    mut client: Client,
    flight: &InFlight,
    freed: &Sender<u64>,
    (total, received): (&OnceLock<u64>, &AtomicU64),
) {
    let mut replies = 0;
    while total.get() != Some(&replies) {
        let range = |cookie| flight.lock().unwrap().get(&cookie).and_then(|sent| sent.range);
        let reply = client.reply(range).unwrap();
        let sent = flight.lock().unwrap().remove(&reply.cookie).expect("one reply to a request");
        assert_eq!(reply.error != 0, sent.refused, "error {}", reply.error);
        if let Some(expected) = sent.expected {
            assert!(reply.data == expected, "a read of slot {}", sent.slot);
        }
        replies += 1;
        received.store(replies, Ordering::SeqCst);
        // The sender may have ended.
        let _ = freed.send(sent.slot);
    }
}

/// Every request has one reply, and every write its effect, whatever the position in the stream at which a server is
/// replaced by the next one.
#[test]
fn a_client_notices_nothing_of_forty_servers() {
    for (seed, style) in (1..).zip(STYLES) {
        for memory_bytes in [ServerLimits::default().connection_memory, 1 << 20] {
            let volume = memory("disk", SLOTS * SLOT);
            let mut current = rig(&volume, memory_bytes);
            let raw = current.stream();
            let mut boxed: Box<dyn Stream> = Box::new(raw.try_clone().unwrap());
            Client::greet(&mut boxed).unwrap();
            let client = Client::go(boxed, "disk", style).unwrap();
            let (flight, end) = (InFlight::default(), AtomicBool::new(false));
            let (total, received) = (OnceLock::new(), AtomicU64::new(0));
            let mut random = Random::new(seed);
            let (free, freed) = channel();
            std::thread::scope(|scope| {
                scope.spawn(|| send((style, raw), (seed * 77, &flight), (freed, &end, &total)));
                scope.spawn(|| receive(client, &flight, &free, (&total, &received)));
                for _ in 0..40 {
                    let some = received.load(Ordering::SeqCst) + random.below(40);
                    while received.load(Ordering::SeqCst) < some {
                        std::thread::yield_now();
                    }
                    let kept = keep(&current);
                    assert_eq!(kept.len(), 1, "the connection was not kept");
                    current = rig(&volume, memory_bytes);
                    adopt(&current, kept);
                }
                end.store(true, Ordering::SeqCst);
            });
            let count = *total.get().unwrap();
            assert!(count > 100, "only {count} requests");
        }
    }
}

fn simple_client(rig: &Rig) -> (UnixStream, Client) {
    let raw = rig.stream();
    let mut boxed: Box<dyn Stream> = Box::new(raw.try_clone().unwrap());
    Client::greet(&mut boxed).unwrap();
    (raw, Client::go(boxed, "disk", Style::Simple).unwrap())
}

/// One client sends nothing more within a request, another one does not receive its replies: both are closed, and the others
/// are kept.
#[test]
fn clients_that_stall_are_closed_and_delay_no_other() {
    let volume = memory("disk", 64 * MIB);
    let first = rig(&volume, 64 << 20);
    let (mut half, mut of_half) = simple_client(&first);
    let (mut deaf, _of_deaf) = simple_client(&first);
    let (_idle, mut of_idle) = simple_client(&first);
    let header = Client::detached(Style::Simple);
    half.write_all(&header.header(WRITE, 0, 1, 0, 1 << 20)).unwrap();
    half.write_all(&[1; 1000]).unwrap();
    for number in 0..32 {
        deaf.write_all(&header.header(READ, 0, number, 0, MIB)).unwrap();
    }
    of_idle.send(TRIM, 0, 5, 0, 4096);
    assert_eq!(of_idle.reply(|_| None).unwrap().error, 0);
    let kept = keep(&first);
    assert_eq!(kept.len(), 1);
    let second = rig(&volume, 64 << 20);
    adopt(&second, kept);
    assert_eq!(of_idle.ask(FLUSH, 0, 0, 0), 0);
    assert!(of_half.reply(|_| None).is_err(), "its connection is closed");
    assert_eq!(second.server.clients(), 1);
}

/// A reply that is larger than what the kernel holds for a socket, to a client that takes its time for it.
#[test]
fn a_client_that_receives_one_large_reply_slowly_is_kept() {
    const PIECE: usize = 1 << 20;
    let volume = memory("disk", 64 * MIB);
    let first = rig(&volume, 64 << 20);
    let (mut slow, mut client) = simple_client(&first);
    let header = Client::detached(Style::Simple);
    slow.write_all(&header.header(READ, 0, 1, 0, 7 * MIB)).unwrap();
    let mut received = slow.try_clone().unwrap();
    // The server has begun to send it.
    let mut head = [0; 16];
    received.read_exact(&mut head).unwrap();
    let receiving = std::thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        let (_open, nothing) = channel::<()>();
        for _ in 0..7 {
            nothing.recv_timeout(std::time::Duration::from_millis(220)).unwrap_err();
            received.read_exact(&mut piece).unwrap();
        }
    });
    let kept = keep(&first);
    receiving.join().unwrap();
    assert_eq!(kept.len(), 1);
    let second = rig(&volume, 64 << 20);
    adopt(&second, kept);
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
}

/// A client that sends a byte now and then does not keep others waiting for longer than a silent one.
#[test]
fn a_client_that_sends_byte_by_byte_is_closed() {
    let volume = memory("disk", 64 * MIB);
    let first = rig(&volume, 64 << 20);
    let (mut slow, _of_slow) = simple_client(&first);
    let header = Client::detached(Style::Simple);
    slow.write_all(&header.header(WRITE, 0, 1, 0, 32 << 20)).unwrap();
    slow.write_all(&[1; 1000]).unwrap();
    let (stop, stopped) = channel::<()>();
    let mut sent = slow.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        let pause = std::time::Duration::from_millis(10);
        let goes_on = Err(std::sync::mpsc::RecvTimeoutError::Timeout);
        let mut bytes = 0;
        // As long as the connection is open.
        while bytes < 600 && stopped.recv_timeout(pause) == goes_on && sent.write_all(&[1]).is_ok()
        {
            bytes += 1;
        }
        bytes
    });
    assert!(keep(&first).is_empty());
    let bytes = sending.join().unwrap();
    drop((stop, slow));
    assert!(bytes < 600, "it was waited for");
}

/// A guest that waits for a volume does not become its writer in the place of the clients that are about to be continued.
#[test]
fn no_guest_writes_to_a_volume_whose_clients_are_continued() {
    let volume = memory("disk", MIB);
    let first = rig(&volume, 64 << 20);
    let (_raw, mut client) = simple_client(&first);
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    let kept = keep(&first);
    let guest = || volume.claim_writer(Writer { name: "Xen guest 3".into(), group: None }, false);
    assert!(guest().is_ok(), "no client is connected");
    let second = rig(&volume, 64 << 20);
    let writers = second.server.claim_writers(&kept);
    assert!(guest().is_err());
    second.server.adopt(kept, &writers, &[second.worker().handle()]);
    drop(writers);
    assert!(guest().is_err());
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    drop((client, _raw));
    while guest().is_err() {
        std::thread::yield_now();
    }
}

/// A volume that is not what its clients were told, or that they may not open any more.
#[test]
fn clients_of_a_volume_that_has_changed_are_closed() {
    // Null stores are alike.
    let null = |size, read_only| {
        let options = VolumeOptions { read_only, ..VolumeOptions::default() };
        Volume::new("disk", Store::Null(NullStore::new(size)), options)
    };
    let volume = null(MIB, false);
    let nexts = [
        ("the same", null(MIB, false), Some("uid:0")),
        ("smaller", null(MIB / 2, false), None),
        ("read-only", null(MIB, true), None),
        ("of another client", null(MIB, false), Some("uid:4000000000")),
        ("with another store", memory("disk", MIB), None),
    ];
    let own = format!("uid:{}", rustix::process::geteuid().as_raw());
    for (number, (what, changed, allowed)) in nexts.into_iter().enumerate() {
        let first = rig(&volume, 64 << 20);
        let (mut raw, mut client) = simple_client(&first);
        assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
        let kept = keep(&first);
        let second = rig(&changed, 64 << 20);
        if let Some(entry) = allowed {
            let entry = if number == 0 { &*own } else { entry };
            let entries = vec![AccessEntry::parse(entry).unwrap()];
            second.server.volumes().set_allowed("disk", Some(AccessList::new(entries).unwrap()));
        }
        adopt(&second, kept);
        // It may be closed by now.
        let sent = raw.write_all(&client.header(FLUSH, 0, 9, 0, 0));
        assert!(sent.is_ok() || number > 0, "{what}");
        assert_eq!(client.reply(|_| None).is_ok(), number == 0, "{what}");
    }
}

#[test]
fn clients_of_a_volume_that_is_gone_and_clients_in_plain_text_where_tls_is_required_are_closed() {
    let volume = memory("disk", MIB);
    let nexts = [("the same", "disk", TlsMode::Off), ("gone", "other", TlsMode::Off)];
    for (what, name, policy) in nexts.into_iter().chain([("TLS", "disk", TlsMode::Require)]) {
        let first = rig(&volume, 64 << 20);
        let (mut raw, mut client) = simple_client(&first);
        assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
        let kept = keep(&first);
        let limits = ServerLimits { connection_memory: 64 << 20, ..ServerLimits::default() };
        let second = Rig::new(limits, policy, None);
        let served = if name == "disk" { volume.clone() } else { memory(name, MIB) };
        second.server.volumes().add(served, Arc::default());
        adopt(&second, kept);
        // It may be closed by now.
        let _ = raw.write_all(&client.header(FLUSH, 0, 9, 0, 0));
        assert_eq!(client.reply(|_| None).is_ok(), what == "the same", "{what}");
    }
}
