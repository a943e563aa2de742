//! Clients of a volume on another NBD server disconnect while that server owes replies.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
#[path = "../../ebb-store/tests/common/fake.rs"]
mod fake;

use std::time::Duration;

use common::{BLOCK_STATUS, Rig, Style};
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};
use ebb_volume::{Volume, VolumeOptions};
use fake::{Act, Fake, MANY_CONNECTIONS, wait_for};

const TIB: u64 = 1 << 40;

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
    let options = NbdOptions::new(NbdAddress::Unix(fake.socket().into()), "");
    let store = Store::Nbd(NbdStore::open(options).unwrap().0);
    let volume = Volume::new("disk", store, VolumeOptions::default());
    let rig = Rig::with([volume.clone()]);
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
