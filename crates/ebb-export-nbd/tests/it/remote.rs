//! Clients of a volume on another NBD server disconnect while that server owes replies.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;
use crate::fake;

use std::sync::Arc;
use std::time::Duration;

use common::{BLOCK_STATUS, CACHE, DISC, Rig, Style};
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};
use ebb_volume::{Volume, VolumeOptions};
use fake::{Act, ESHUTDOWN, Fake, MANY_CONNECTIONS, wait_for};

const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
/// `NBD_FLAG_SEND_CACHE`.
const OFFERS_CACHE: u16 = 1 << 10;

/// A volume on this server.
fn remote(fake: &Fake) -> Arc<Volume> {
    let options = NbdOptions::new(NbdAddress::Unix(fake.socket().into()), "");
    let store = Store::Nbd(NbdStore::open(options).unwrap().0);
    Volume::new("disk", store, VolumeOptions::default())
}

/// A server that never replies to CACHE.
fn silent_to_cache() -> Fake {
    let flags = MANY_CONNECTIONS | OFFERS_CACHE;
    Fake::start(8 * TIB, flags, |asked| match asked.command {
        CACHE => Act::Silence,
        _ => Act::Good(0),
    })
}

#[test]
fn block_status_requests_end_when_their_client_disconnects() {
    // One of three requests never receives a reply.
    let fake = Fake::start(8 * TIB, MANY_CONNECTIONS, |asked| {
        std::thread::park_timeout(Duration::from_millis(1));
        match asked.offset >> 30 & 3 {
            0 => Act::Silence,
            _ => Act::Status(vec![(asked.length, 3)]),
        }
    });
    let rig = Rig::with([remote(&fake)]);
    let mut client = rig.client("disk", Style::Extended);
    for number in 0..200u64 {
        client.send(BLOCK_STATUS, 0, number, number << 30, 8 * TIB - (number << 30));
    }
    wait_for("requests", || !fake.requests().is_empty());
    drop(client);
    // The connection has ended: it does not wait for the server's replies.
    wait_for("the end of the connection", || rig.server.clients() == 0);
    let asked = fake.count(fake::BLOCK_STATUS);
    assert!(asked <= 200 * 4, "{asked} requests");
    rig.stop();
}

#[test]
fn cache_requests_end_when_their_client_disconnects() {
    let fake = silent_to_cache();
    let rig = Rig::with([remote(&fake)]);
    for politely in [false, true] {
        let mut client = rig.client("disk", Style::Extended);
        let before = fake.count(CACHE);
        for number in 0..100u64 {
            client.send(CACHE, 0, number, number << 32, 4 * GIB - 512);
        }
        wait_for("requests", || fake.count(CACHE) > before);
        if politely {
            client.send(DISC, 0, 0, 0, 0);
        }
        drop(client);
        wait_for("the end of the connection", || rig.server.clients() == 0);
    }
    rig.stop();
}

#[test]
fn a_stop_and_the_removal_of_a_volume_end_cache_requests_with_an_error() {
    for removal in [false, true] {
        let fake = silent_to_cache();
        let rig = Rig::with([remote(&fake)]);
        let mut client = rig.client("disk", Style::Simple);
        client.send(CACHE, 0, 1, 0, 4 * GIB - 512);
        wait_for("a request", || fake.count(CACHE) > 0);
        if removal {
            rig.run(|server, io| async move {
                let disk = server.volumes().remove("disk").unwrap();
                server.withdraw(&io, "disk").await;
                disk.close(&io).await
            })
            .unwrap();
        } else {
            rig.stop();
        }
        let reply = client.reply(|_| None).unwrap();
        assert_eq!((reply.cookie, reply.error), (1, ESHUTDOWN));
        assert!(client.is_at_end());
    }
}
