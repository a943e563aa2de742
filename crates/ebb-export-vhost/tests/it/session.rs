//! The protocol: negotiation, the config space, sizes, descriptors, frontends that misbehave beside others that do not.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test")]

use crate::common;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::driver::kind;
use common::frontend::{bytes_of, event, is_readable, receive, send_raw};
use common::{Frontend, Rig, SIZE, Wishes, memory_volume, pause, status, until};
use ebb_vhost_proto::{
    ConfigRange, FrontendMessage as M, InflightArea, ProtocolFeatures, VirtioFeatures, VringFile,
    VringState,
};
use ebb_volume::Resize;

const SHORT: Duration = Duration::from_millis(50);

fn resize(rig: &Rig, to: u64) {
    let volume = rig.volumes.get("disk").unwrap().volume;
    let order = Resize { to: Some(to), shrink: true };
    let worker = rig.workers[0].handle();
    worker.block_on(move |io| async move { volume.resize(&io, order).await.unwrap() }).unwrap();
    rig.backend.as_ref().unwrap().announce_sizes();
}

fn changed(disk: &Frontend) {
    assert_eq!(receive(disk.backend.as_ref().unwrap()).unwrap().0, 2, "CONFIG_CHANGE_MSG");
}

/// Trap 9: QEMU reads the size only after a message, so there is one after a change, and one after each connect: a frontend
/// that was not connected has missed it.
#[test]
fn trap_9_a_changed_size_is_announced_and_so_it_is_after_a_reconnect() {
    let (mut rig, _store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    changed(&disk);
    assert_eq!(disk.capacity(), SIZE);
    resize(&rig, 2 * SIZE);
    changed(&disk);
    assert_eq!(disk.capacity(), 2 * SIZE);
    assert_eq!(disk.write(0, SIZE / 512, &[1; 512]), status::OK);
    rig.backend.as_ref().unwrap().announce_sizes();
    disk.number(&M::GetFeatures);
    rig.stop();
    rig.start(1);
    disk.reconnect(&rig.path("disk"));
    changed(&disk);
    assert_eq!(disk.capacity(), 2 * SIZE);
    let once = disk.backend.as_ref().unwrap();
    assert!(!is_readable(once, SHORT), "one message for all queues");
    resize(&rig, SIZE);
    changed(&disk);
    assert_eq!(disk.capacity(), SIZE);
    assert_eq!(disk.write(1, SIZE / 512, &[1; 512]), status::IO_ERROR);
    // A frontend that does not read its messages delays nothing.
    (1..400).for_each(|more| resize(&rig, SIZE + more * 4096));
    assert_eq!(disk.write(1, 0, &[1; 512]), status::OK);
}

/// Trap 14: any part of the config space may be read.
#[test]
fn trap_14_config_reads_have_any_offset_and_length() {
    let rig = Rig::new();
    let disk = rig.disk(Wishes::default());
    let whole = disk.config(0, 256);
    for (offset, size) in [(0, 60), (0, 64), (1, 3), (0, 0), (255, 1), (32, 1), (100, 156)] {
        let end = (offset + size) as usize;
        assert_eq!(disk.config(offset, size), whole[offset as usize..end]);
    }
    for (offset, size) in [(0, 257), (256, 1), (u32::MAX, 2)] {
        let (_, body, _) = disk.ask(&M::GetConfig(ConfigRange { offset, size, flags: 0 }));
        assert!(body.is_empty(), "a reply for {size} bytes at {offset}");
    }
    assert_eq!(whole[..8], (SIZE / 512).to_le_bytes());
    // Trap 20.
    assert_eq!(whole[12..16], 126u32.to_le_bytes());
    let range = ConfigRange { offset: 0, size: 64, flags: 0 };
    let mut all = whole[..64].to_vec();
    all[32] = 0;
    disk.must(&M::SetConfig(range, &all), &[]);
    assert_eq!(disk.config(32, 1), [0], "a write of the whole space has the cache mode in it");
    disk.must(&M::SetConfig(ConfigRange { offset: 33, size: 1, flags: 0 }, &[1]), &[]);
    assert_eq!(disk.config(32, 1), [0]);
}

/// Trap 15: a guest may have as many queues as processors, and need not use them all; firmware uses one.
#[test]
fn trap_15_many_queues_are_offered_and_any_of_them_may_stay_unused() {
    let rig = Rig::new();
    let mut disk = rig.frontend("disk", Wishes { queues: 60, size: 4, ..Wishes::default() });
    assert_eq!(disk.number(&M::GetQueueNum), 256);
    disk.must(&M::SetFeatures(disk.features), &[]);
    disk.create_inflight();
    let (fd, area) = disk.inflight.clone().unwrap();
    disk.must(&M::SetInflightFd(area), &[&fd]);
    disk.share_memory();
    for queue in [59, 0, 30] {
        disk.start_queue(queue, 0);
        assert_eq!(disk.write(queue, 0, &[1; 512]), status::OK);
    }
    disk.enable(7, true);
    assert_eq!(disk.stop_queue(7), 0);
    assert_eq!(disk.stop_queue(59), 1);
    let state = VringState { index: 256, number: 4 };
    assert_eq!(disk.set(&M::SetVringNum(state), &[]), Some(false));
    assert_eq!(disk.write(30, 0, &[1; 512]), status::OK);
}

/// Trap 16: descriptors beyond those of a message are closed, and so is everything when a connection ends.
#[test]
fn trap_16_surplus_descriptors_are_closed() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    let (reader, writer) = std::io::pipe().unwrap();
    let writer = OwnedFd::from(writer);
    let fds: Vec<_> = (0..8).map(|_| writer.as_fd()).collect();
    for message in [
        M::GetFeatures,
        M::GetQueueNum,
        M::Unsupported(99),
        M::SetVringCall(VringFile { index: 0, has_descriptor: false }),
    ] {
        for _ in 0..50 {
            assert!(send_raw(&disk.socket, &bytes_of(&message, false), &fds));
            if matches!(message, M::GetFeatures | M::GetQueueNum) {
                receive(&disk.socket).unwrap();
            }
        }
    }
    disk.number(&M::GetFeatures);
    drop(fds);
    drop(writer);
    assert!(is_readable(&reader, SHORT), "a descriptor is kept");
    let call = VringFile { index: 0, has_descriptor: true };
    disk.must(&M::SetVringCall(call), &[&disk.calls[0]]);
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    // Of half a message, when the connection ends.
    let (reader, writer) = std::io::pipe().unwrap();
    assert!(send_raw(&disk.socket, &[5, 0], &[writer.as_fd()]));
    drop((disk, writer));
    until("it is closed", || is_readable(&reader, SHORT));
}

/// Descriptors of the wrong kind are refused, and change nothing.
#[test]
fn wrong_descriptors_are_refused() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    let (reader, writer) = std::io::pipe().unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let file = VringFile { index: 0, has_descriptor: true };
    let wrong: [OwnedFd; 5] = [
        tempfile::tempfile().unwrap().into(),
        reader.into(),
        writer.into(),
        socket.into(),
        common::guest::memfd(4096),
    ];
    for fd in &wrong {
        for message in [M::SetVringKick(file), M::SetVringCall(file), M::SetVringErr(file)] {
            assert_eq!(disk.set(&message, &[fd]), Some(false), "{message:?}");
        }
        let area = InflightArea { mmap_size: 8192, mmap_offset: 0, queues: 1, queue_size: 64 };
        assert_eq!(disk.set(&M::SetInflightFd(area), &[fd]), Some(false));
    }
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    // Without acknowledgements the connection ends: the frontend would believe that they were accepted.
    let without_protocol = ProtocolFeatures::REPLY_ACK;
    let disk = rig.frontend("disk", Wishes { without_protocol, ..Wishes::default() });
    disk.set(&M::SetVringCall(file), &[&wrong[0]]);
    assert!(disk.is_closed());
}

/// Trap 17: what is unknown is ignored, or refused if the frontend wants to know.
#[test]
fn trap_17_unknown_requests_and_features_do_no_harm() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    for number in [19, 22, 28, 33, 41, 44, 45, 1000, u32::MAX] {
        assert!(disk.try_send(&M::Unsupported(number), false, &[]));
        assert!(disk.try_send(&M::Unsupported(number), true, &[]));
        assert_eq!(receive(&disk.socket).unwrap().1, [1, 0, 0, 0, 0, 0, 0, 0]);
    }
    let offered = ProtocolFeatures(disk.number(&M::GetProtocolFeatures));
    assert!(!offered.contains(ProtocolFeatures::GET_VRING_BASE_INFLIGHT));
    assert!(!offered.contains(ProtocolFeatures::PAGEFAULT), "trap 27");
    let more = disk.features.with(VirtioFeatures::BLK_SECURE_ERASE);
    assert_eq!(disk.set(&M::SetFeatures(more), &[]), Some(false));
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    // A frontend that did not negotiate acknowledgements gets none, whatever it asks for.
    let without_protocol = ProtocolFeatures::REPLY_ACK;
    let disk = rig.frontend("disk", Wishes { without_protocol, ..Wishes::default() });
    assert!(disk.try_send(&M::Unsupported(1000), true, &[]));
    assert!(disk.try_send(&M::SetOwner, true, &[]));
    assert_eq!(disk.ask(&M::GetQueueNum).0, 17);
}

/// A connection that is served: those that were closed before may still be counted for a moment.
fn accepted(path: &Path) -> UnixStream {
    let mut accepted = None;
    until("a connection is accepted", || {
        let socket = UnixStream::connect(path).unwrap();
        let served =
            send_raw(&socket, &bytes_of(&M::GetFeatures, false), &[]) && receive(&socket).is_some();
        accepted = served.then_some(socket);
        served
    });
    accepted.unwrap()
}

/// A frontend that sends half a message, or does not read its replies, or sends without end, delays no other one.
#[test]
fn rude_frontends_delay_no_others() {
    let rig = Rig::new();
    rig.add(memory_volume("rude", SIZE, false));
    let whole = bytes_of(&M::GetConfig(ConfigRange { offset: 0, size: 256, flags: 0 }), false);
    let halves: Vec<UnixStream> = (1..8)
        .map(|part| {
            let socket = UnixStream::connect(rig.path("rude")).unwrap();
            assert!(send_raw(&socket, &whole[..part * 3], &[]));
            socket
        })
        .collect();
    let mut disk = rig.disk(Wishes::default());
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    drop(halves);
    // One that reads no replies: it is not read either, when its socket is full.
    let deaf = accepted(&rig.path("rude"));
    deaf.set_nonblocking(true).unwrap();
    let many = whole.repeat(100);
    let mut sent = 0u64;
    until("its socket is full", || match rustix::io::write(&deaf, &many) {
        Ok(more) => {
            sent += more as u64;
            false
        }
        Err(_) => !{
            pause(SHORT);
            rustix::event::poll(
                &mut [rustix::event::PollFd::new(&deaf, rustix::event::PollFlags::OUT)],
                Some(&rustix::fs::Timespec::default()),
            )
            .unwrap()
                > 0
        },
    });
    assert!(sent < 16 << 20, "{sent} bytes were accepted");
    assert_eq!(disk.number(&M::GetQueueNum), 256);
    drop(deaf);
    // One that never pauses.
    let (end, path) = (Arc::new(AtomicBool::new(false)), rig.path("rude"));
    let flood = std::thread::spawn({
        let end = end.clone();
        move || {
            let socket = accepted(&path);
            let many = bytes_of(&M::SetOwner, false).repeat(2000);
            while !end.load(Ordering::Relaxed) && send_raw(&socket, &many, &[]) {}
        }
    });
    pause(SHORT);
    for _ in 0..20 {
        let other = rig.disk_of_another();
        assert_eq!(other.number(&M::GetQueueNum), 256);
        other.must(&M::SetOwner, &[]);
        assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    }
    end.store(true, Ordering::Relaxed);
    flood.join().unwrap();
}

impl Rig {
    /// A frontend of the first disk, without queues.
    fn disk_of_another(&self) -> Frontend {
        self.frontend("disk", Wishes::default())
    }
}

/// The number of connections to one disk is bounded.
#[test]
fn connections_to_one_disk_are_bounded() {
    let rig = Rig::new();
    let all: Vec<Frontend> = (0..8).map(|_| rig.disk_of_another()).collect();
    let ninth = UnixStream::connect(rig.path("disk")).unwrap();
    assert!(receive(&ninth).is_none(), "it is refused");
    drop(all);
    accepted(&rig.path("disk"));
}

/// Trap 18 on a live queue: a ring that is invalid is not served, its error descriptor says so, and it is served again when it is
/// configured anew; the other queue does not notice.
#[test]
fn trap_18_an_invalid_ring_is_left_alone_until_it_is_configured_anew() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes { queues: 2, inflight: false, ..Wishes::default() });
    let err = event();
    disk.stop_queue(0);
    disk.must(&M::SetVringErr(VringFile { index: 0, has_descriptor: true }), &[&err]);
    disk.start_queue(0, 0);
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    let breaks: [fn(&mut Frontend); 5] = [
        // More available than the ring has.
        |disk| disk.drivers[0].available = disk.drivers[0].available.wrapping_add(1000),
        // A head outside of the table.
        |disk| disk.drivers[0].offer(&disk.guest, 64),
        // A loop.
        |disk| {
            let table = disk.drivers[0].rings()[0];
            let buffer = (common::DATA, 1, false);
            common::driver::Driver::descriptor(&disk.guest, table, buffer, 1, 0);
            disk.drivers[0].offer(&disk.guest, 0);
        },
        // Outside of memory.
        |disk| _ = disk.drivers[0].add(&disk.guest, &[(1, 16, false)]),
        // A descriptor that is read behind one that is written.
        |disk| {
            let wrong = [(common::DATA, 16, true), (common::DATA, 16, false)];
            disk.drivers[0].add(&disk.guest, &wrong);
        },
    ];
    for (number, act) in breaks.into_iter().enumerate() {
        act(&mut disk);
        disk.publish(0);
        disk.kick(0);
        assert!(is_readable(&err, common::HANG), "fault {number} is not reported");
        common::frontend::take_event(&err);
        assert_eq!(disk.write(1, 0, &[1; 512]), status::OK);
        disk.stop_queue(0);
        disk.drivers[0].reset(&disk.guest);
        disk.start_queue(0, 0);
        assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    }
}

/// Trap 6: a region that is smaller than the queues is refused for the queue, and no other memory is changed.
#[test]
fn trap_6_an_inflight_region_for_smaller_queues_is_not_used() {
    let rig = Rig::new();
    for (queue_size, bytes) in [(4, 4096), (0, 4096), (64, 64), (u16::MAX, 4096)] {
        let mut disk = rig.frontend("disk", Wishes { queues: 2, ..Wishes::default() });
        let fd = Arc::new(common::guest::memfd(bytes));
        disk.inflight = Some((
            fd.clone(),
            InflightArea { mmap_size: bytes, mmap_offset: 0, queues: 2, queue_size },
        ));
        disk.start();
        disk.request(0, kind::GET_ID, 0, 20);
        disk.publish(0);
        disk.kick(0);
        assert_eq!(disk.stop_queue(0), 0, "a queue of 64 with a region for {queue_size}");
        let mut all = vec![0; bytes as usize];
        rustix::io::pread(&*fd, &mut all, 0).unwrap();
        assert!(all.iter().all(|byte| *byte == 0), "it was written to");
    }
    assert_eq!(rig.disk(Wishes::default()).write(0, 0, &[1; 512]), status::OK);
}
