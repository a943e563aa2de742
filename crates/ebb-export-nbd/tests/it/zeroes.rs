//! Zeroes that a store has to write as data: they use no memory, however many are requested, and end when
//! their client disconnects or their volume is closed.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;
use crate::fake;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Client, Rig, Style, WRITE_ZEROES, memory, pattern};
use ebb_export_nbd::{ServerLimits, TlsMode};
use ebb_io::Worker;
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};
use ebb_volume::{Volume, VolumeOptions};
use fake::{Act, Fake, MANY_CONNECTIONS, wait_for};

const MIB: usize = 1 << 20;
const GIB: u64 = 1 << 30;
const ESHUTDOWN: u32 = 108;

/// A volume on a server without WRITE_ZEROES.
fn remote(fake: &Fake) -> Arc<Volume> {
    let options = NbdOptions::new(NbdAddress::Unix(fake.socket().into()), "");
    let store = Store::Nbd(NbdStore::open(options).unwrap().0);
    Volume::new("remote", store, VolumeOptions::default())
}

/// A slow server.
fn slow() -> Fake {
    Fake::start(8 << 40, MANY_CONNECTIONS, |_| {
        std::thread::park_timeout(Duration::from_millis(1));
        Act::Good(0)
    })
}

fn ask_for_zeroes(client: &mut Client, requests: u64) {
    let headers = (0..requests).flat_map(|n| client.header(WRITE_ZEROES, 0, n, n * GIB, GIB));
    let headers: Vec<u8> = headers.collect();
    client.stream.write_all(&headers).unwrap();
}

#[test]
fn zeroes_for_a_server_that_never_replies_use_no_memory() {
    let fake = Fake::start(8 << 40, MANY_CONNECTIONS, |_| Act::Silence);
    let (dead, healthy) = (remote(&fake), memory("healthy", 64 << 20));
    let shared =
        ebb_mem::Memory::new(ebb_mem::MemoryOptions::new(64 * MIB, Instant::now())).unwrap();
    let worker = Worker::start("nbd-test", &shared).unwrap();
    [&dead, &healthy].into_iter().for_each(|v| v.join(shared.shares(), v.name()));
    let rig = Rig::on(worker, ServerLimits::default(), TlsMode::Off, None);
    [&dead, &healthy].into_iter().for_each(|v| rig.server.volumes().add(v.clone(), Arc::default()));
    let clients: Vec<_> = (0..16)
        .map(|_| {
            let mut client = rig.client("remote", Style::Simple);
            ask_for_zeroes(&mut client, 256);
            client
        })
        .collect();
    wait_for("all requests", || dead.in_flight() == 16 * 256);
    wait_for("a write", || fake.requests().iter().any(|asked| asked.zeroes));
    let taken = rig.run(|_, io| async move { io.pool().used_bytes() });
    // A buffer for zeroes would be 1 MiB, even if only a few ranges at a time had one; the remaining memory is that of
    // the connections.
    assert!(taken < MIB, "{taken} bytes are allocated");
    let mut client = rig.client("healthy", Style::Simple);
    let expected = pattern(1, 16 * MIB);
    assert_eq!(client.write(0, 0, &expected), 0);
    assert!(client.read(0, 16 * MIB).unwrap() == expected);
    let used = shared.arena_stats().wired;
    // A buffer of zeroes per request would be 1 MiB each.
    assert!(used < 40 * MIB, "{used} bytes");
    assert!(fake.count(fake::WRITE) <= 8, "a few ranges at a time");
    drop(clients);
    dead.abort();
    rig.stop();
}

#[test]
fn writing_zeroes_ends_when_the_client_disconnects() {
    let fake = slow();
    let rig = Rig::with([remote(&fake)]);
    // More than are executed at a time: the end of the stream comes after requests that have not been read.
    let mut client = rig.client("remote", Style::Simple);
    ask_for_zeroes(&mut client, 1000);
    wait_for("zeroes", || fake.count(fake::WRITE) > 0);
    drop(client);
    wait_for("the end of the connection", || rig.server.clients() == 0);
    let asked = fake.count(fake::WRITE);
    assert!(asked < 256 << 10, "{asked} pieces of {} that were requested", 1000 << 10);
    rig.stop();
}

#[test]
fn writing_zeroes_ends_when_the_volume_is_closed() {
    let fake = slow();
    let volume = remote(&fake);
    let rig = Rig::with([volume.clone()]);
    let mut client = rig.client("remote", Style::Simple);
    ask_for_zeroes(&mut client, 200);
    wait_for("zeroes", || fake.count(fake::WRITE) > 0);
    rig.run(move |_, io| async move { volume.close(&io).await }).unwrap();
    let errors: Vec<_> = (0..200).map(|_| client.reply(|_| None).unwrap().error).collect();
    assert!(errors.iter().all(|error| *error == ESHUTDOWN), "{errors:?}");
    rig.stop();
}
