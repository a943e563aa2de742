//! A volume's limits: a throttled client's requests stay in its socket, hold nothing, delay no one else, and do not keep
//! the server from anything.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::sync::Arc;

use common::{Client, FLUSH, READ, Rig, Style, TRIM, memory, pattern, read_only, until};
use ebb_volume::{LimitGroup, Operation, RateLimits, RequestCost, RequestKind, Volume};

const MIB: u64 = 1 << 20;

/// Nothing passes for half an hour.
fn exhaust(volume: &Volume) {
    volume.set_rate_limits(RateLimits { bandwidth: 512, ..RateLimits::default() });
    volume.limits().unwrap().take(RequestCost { kind: RequestKind::Read, bytes: MIB });
}

fn throttled(volume: &Volume, count: u64) {
    until("the request is throttled", || volume.limit_figures().unwrap().throttled >= count);
}

fn done(volume: &Volume, operation: Operation) -> u64 {
    volume.stats().of(operation).requests
}

fn flood(client: &mut Client, count: u64) {
    for cookie in 1..=count {
        client.send(READ, 0, cookie, 0, 65_536);
    }
}

#[test]
fn a_throttled_client_holds_no_buffers_and_does_not_delay_its_neighbour() {
    let (slow, other) = (memory("slow", MIB), memory("other", MIB));
    let rig = Rig::with([slow.clone(), other]);
    let mut client = rig.client("slow", Style::Simple);
    let mut neighbour = rig.client("other", Style::Simple);
    assert_eq!(neighbour.read(0, 4096).unwrap().len(), 4096);
    exhaust(&slow);
    let held = |rig: &Rig| {
        rig.run(|_, io| async move {
            io.pool()
                .memory()
                .stats()
                .zones
                .iter()
                .map(|zone| zone.used * zone.item_bytes as u64)
                .sum::<u64>()
        })
    };
    let before = held(&rig);
    flood(&mut client, 64);
    throttled(&slow, 1);
    // What the kernel has not kept is in the receive buffer, which is smaller than one request's data.
    assert!(held(&rig) < before + 65_536, "{} bytes after {before}", held(&rig));
    for _ in 0..100 {
        assert_eq!(neighbour.write(0, 0, &pattern(1, 4096)), 0);
    }
    assert_eq!(done(&slow, Operation::Read), 0);
    assert_eq!(slow.limit_figures().unwrap().throttled, 1, "the others were not looked at");
    slow.set_rate_limits(RateLimits::default());
    // A request that is read from the socket when there is room again may be answered before those that waited for it.
    let reply = |_| client.reply(|_| Some((0, 65_536))).unwrap().cookie;
    let answered: std::collections::BTreeSet<u64> = (0..64).map(reply).collect();
    assert_eq!(answered, (1..=64).collect());
}

#[test]
fn disconnecting_withdrawing_and_stopping_end_a_throttled_wait() {
    let volumes = ["a", "b", "c"].map(|name| memory(name, MIB));
    let rig = Rig::with(volumes.clone());
    let mut clients: Vec<_> = ["a", "b", "c"].map(|name| rig.client(name, Style::Simple)).into();
    for (client, volume) in clients.iter_mut().zip(&volumes) {
        exhaust(volume);
        flood(client, 3);
        throttled(volume, 1);
    }
    drop(clients.remove(0));
    until("the client has left", || rig.server.clients() == 2);
    rig.run(|server, io| async move {
        server.volumes().remove("b");
        server.withdraw(&io, "b").await;
    });
    assert!(clients.remove(0).is_at_end());
    rig.stop();
    assert!(clients.remove(0).is_at_end());
    assert!(volumes.iter().all(|volume| done(volume, Operation::Read) == 0));
}

#[test]
fn reads_writes_and_discards_are_counted_and_flushes_are_not() {
    let volume = memory("disk", MIB);
    let rig = Rig::with([volume.clone()]);
    let mut client = rig.client("disk", Style::Simple);
    // One read, one write, and then nothing for long.
    let limits = RateLimits { read_bandwidth: 512, write_iops: 1, ..RateLimits::default() };
    volume.set_rate_limits(limits);
    assert_eq!(client.read(0, 512 << 10).unwrap().len(), 512 << 10);
    assert_eq!(client.ask(TRIM, 0, 0, 4096), 0, "a write without bytes");
    for _ in 0..100 {
        assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    }
    assert_eq!(volume.limit_figures().unwrap().throttled, 0);
    assert_eq!(client.ask(TRIM, 0, 0, 4096), 0, "the second write of this second");
    assert_eq!(volume.limit_figures().unwrap().throttled, 1);
    client.send(READ, 0, 9, 0, 512);
    throttled(&volume, 2);
    volume.set_rate_limits(RateLimits { read_bandwidth: 1 << 30, ..limits });
    assert_eq!(client.reply(|_| Some((0, 512))).unwrap().cookie, 9);
}

#[test]
fn clients_of_a_group_wait_together_and_a_larger_limit_wakes_all() {
    let volumes = ["a", "b"].map(|name| memory(name, MIB));
    let rig = Rig::with(volumes.clone());
    let group = LimitGroup::new("gold");
    group.set(RateLimits { bandwidth: 512, ..RateLimits::default() });
    volumes.iter().for_each(|volume| volume.set_limit_group(Some(&group)));
    volumes[0].limits().unwrap().take(RequestCost { kind: RequestKind::Write, bytes: MIB });
    let mut clients = ["a", "b"].map(|name| rig.client(name, Style::Simple));
    for (client, volume) in clients.iter_mut().zip(&volumes) {
        client.send_write(0, 5, 0, &pattern(2, 4096));
        throttled(volume, 1);
    }
    assert!(volumes.iter().all(|volume| done(volume, Operation::Write) == 0));
    group.set(RateLimits { iops: 1000, ..RateLimits::default() });
    for client in &mut clients {
        assert_eq!(client.reply(|_| None).unwrap().cookie, 5);
    }
    assert_eq!(group.figures().throttled, 2);
}

#[test]
fn a_client_over_tcp_is_listed_with_its_address() {
    let rig = Rig::with([read_only("disk", MIB)]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    rig.listen(ebb_io::fd_from(listener));
    let stream = std::net::TcpStream::connect(address).unwrap();
    let own = stream.local_addr().unwrap().to_string();
    let mut stream: Box<dyn common::Stream> = Box::new(stream);
    Client::greet(&mut stream).unwrap();
    let mut client = Client::go(stream, "disk", Style::Structured).unwrap();
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    let view = rig.server.list_clients().pop().unwrap();
    assert_eq!((view.address, view.identity, view.pid), (own, None, None));
    assert!(view.read_only && !view.tls);
}

#[test]
fn clients_are_listed_with_their_counters_and_can_be_disconnected() {
    let volume: Arc<Volume> = memory("disk", MIB);
    let rig = Rig::with([volume.clone()]);
    assert!(rig.server.list_clients().is_empty());
    let mut client = rig.client("disk", Style::Extended);
    assert_eq!(client.write(0, 0, &pattern(3, 8192)), 0);
    assert_eq!(client.read(0, 4096).unwrap().len(), 4096);
    assert_eq!(client.ask(READ, 0, 2 * MIB, 512), common::EINVAL, "refused, and counted");
    let found = rig.server.list_clients();
    assert_eq!(found.len(), 1);
    let view = &found[0];
    let uid = rustix::process::getuid().as_raw();
    assert_eq!(
        (view.address.as_str(), view.identity.clone()),
        ("unix", Some(format!("uid:{uid}")))
    );
    assert_eq!(view.pid, Some(std::process::id()));
    assert_eq!((&*view.volume, view.tls, view.read_only), ("disk", false, false));
    assert_eq!((view.requests, view.in_flight), (3, 0));
    assert_eq!((view.read_bytes, view.written_bytes), (4096, 8192));
    exhaust(&volume);
    client.send(READ, 0, 1, 0, 512);
    throttled(&volume, 1);
    assert!(rig.server.end_client(view.number));
    assert!(client.is_at_end());
    until("it is not listed any more", || rig.server.list_clients().is_empty());
    assert!(!rig.server.end_client(view.number) && rig.server.client(view.number).is_none());
}
