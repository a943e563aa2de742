//! Hostile frontends and guests: messages and rings of any content. Other frontends are served meanwhile, and nothing panics.
//!
//! `EBB_HOSTILE=<number>` sets the number of messages, `EBBD_FUZZ_SEED=<number>` the seed.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test")]

use crate::common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use common::driver::kind;
use common::frontend::{bytes_of, event, is_readable, receive, send_raw, take_event};
use common::guest::{DATA, USER, memfd};
use common::{
    Frontend, Guest, HANG, Random, Rig, SIZE, Wishes, memory_volume, number, pause, status, until,
};
use ebb_vhost_proto::{
    ConfigRange, FrontendMessage as M, InflightArea, LogArea, MemoryRegion, ProtocolFeatures,
    VirtioFeatures, VringAddress, VringFile, VringState,
};

/// A number that is small, or of any size.
fn word(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => random.next(),
        1 => u64::MAX - random.below(3),
        2 => 1 << random.below(64),
        _ => random.below(4),
    }
}

/// A message that may be right.
fn message<'a>(random: &mut Random, bytes: &'a [u8]) -> M<'a> {
    let index = word(random) as u32;
    let state = VringState {
        index,
        number: [1, 4, 64, 256, word(random) as u32][random.below(5) as usize],
    };
    let file = VringFile { index: index & 0xff, has_descriptor: random.below(4) > 0 };
    let place = |random: &mut Random| {
        (Guest::rings(0) + USER)
            .wrapping_add([0, 0x4000, 0x8000, word(random)][random.below(4) as usize])
    };
    let region = MemoryRegion {
        guest_address: DATA.wrapping_add(word(random) << 20),
        bytes: [4096, 1 << 20, word(random)][random.below(3) as usize],
        user_address: (DATA + USER).wrapping_add(word(random) << 20),
        mmap_offset: word(random),
    };
    let area = InflightArea {
        mmap_size: [1 << 16, word(random)][random.below(2) as usize],
        mmap_offset: word(random),
        queues: word(random) as u16,
        queue_size: state.number as u16,
    };
    let range = ConfigRange {
        offset: [0, 32, index][random.below(3) as usize],
        size: bytes.len() as u32,
        flags: 0,
    };
    match random.below(30) {
        0 => M::GetFeatures,
        1 => M::SetFeatures(VirtioFeatures(0x5_7400_7e44 & random.next())),
        2 => M::SetOwner,
        3 => M::ResetOwner,
        4 => M::SetLogBase(Some(LogArea { size: area.mmap_size, offset: area.mmap_offset })),
        5 => M::SetLogBase(None),
        6 => M::SetLogFd,
        7 => M::SetVringNum(state),
        8 => M::SetVringAddr(VringAddress {
            index,
            flags: word(random) as u32,
            descriptor: place(random),
            used: place(random),
            available: place(random),
            log: word(random),
        }),
        9 => M::SetVringBase(state),
        10 => M::GetVringBase(index),
        11 => M::SetVringKick(file),
        12 => M::SetVringCall(file),
        13 => M::SetVringErr(file),
        14 => M::GetProtocolFeatures,
        15 => M::SetProtocolFeatures(ProtocolFeatures(random.next() & 0xb22b | 8)),
        16 => M::GetQueueNum,
        17 | 18 => M::SetVringEnable { index, enabled: random.below(3) > 0 },
        19 => M::GetConfig(ConfigRange { size: word(random) as u32, ..range }),
        20 => M::SetConfig(range, bytes),
        21 => M::GetInflightFd(area),
        22 => M::SetInflightFd(area),
        23 => M::ResetDevice,
        24 => M::GetMaxMemSlots,
        25 => M::AddMemReg(region),
        26 => M::RemMemReg(region),
        27 => M::SetStatus(index as u8),
        28 => M::SetBackendReqFd,
        _ => M::Unsupported(index),
    }
}

/// A conversation; returns the number of its messages.
fn converse(path: &Path, random: &mut Random, files: &[OwnedFd]) -> u64 {
    let mut frontend =
        Frontend::connect(path, Guest::new(2), Wishes { queues: 2, ..Wishes::default() });
    let hello = bytes_of(&M::GetFeatures, false);
    if !send_raw(&frontend.socket, &hello, &[]) || receive(&frontend.socket).is_none() {
        // Connections that were closed may still be counted: this one was refused.
        pause(std::time::Duration::from_millis(1));
        return 0;
    }
    if random.below(2) == 0 {
        frontend.negotiate();
        frontend.start();
        frontend.request(0, kind::WRITE, 0, 4096);
        frontend.publish(0);
    }
    frontend.socket.set_nonblocking(true).unwrap();
    let (mut sent, most) = (0, 1 + random.below(200));
    let mut replies = [0; 16384];
    while sent < most {
        let payload = replies;
        let payload = &payload[..random.below(64) as usize];
        let message = message(random, payload);
        let mut bytes = bytes_of(&message, random.below(2) == 0);
        match random.below(24) {
            0 => {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] = random.next() as u8;
            }
            1 => bytes.truncate(1 + random.below(bytes.len() as u64) as usize),
            2 => bytes.extend(random.next().to_le_bytes()),
            _ => {}
        }
        let count = match random.below(6) {
            0 => random.below(9) as usize,
            _ => message.descriptors(),
        };
        let fds: Vec<BorrowedFd<'_>> =
            (0..count).map(|_| files[random.below(files.len() as u64) as usize].as_fd()).collect();
        // A message that finds no room ends the conversation, as one that is refused does.
        if !send_raw(&frontend.socket, &bytes, &fds) {
            break;
        }
        sent += 1;
        while matches!(rustix::io::read(&frontend.socket, &mut replies), Ok(1..)) {}
        if random.below(16) == 0 {
            frontend.kick(0);
        }
    }
    sent
}

#[test]
fn hostile_messages_harm_no_other_frontend() {
    let most = number("EBB_HOSTILE", 500_000);
    let rig = Rig::new();
    for name in ["a", "b"] {
        rig.add(memory_volume(name, SIZE, false));
    }
    let mut disk = rig.disk(Wishes::default());
    let count: u64 = std::thread::scope(|scope| {
        let run = |name: &'static str| {
            let path = rig.path(name);
            scope.spawn(move || {
                let mut random =
                    Random::new(number("EBBD_FUZZ_SEED", 1) * 7919 + u64::from(name.as_bytes()[0]));
                let files: Vec<OwnedFd> = vec![
                    event(),
                    event(),
                    event(),
                    event(),
                    memfd(1 << 20),
                    memfd(1 << 20),
                    memfd(4096),
                    tempfile::tempfile().unwrap().into(),
                    std::io::pipe().unwrap().1.into(),
                ];
                let mut count = 0;
                while count < most / 2 {
                    count += converse(&path, &mut random, &files);
                }
                count
            })
        };
        let threads = [run("a"), run("b")];
        while !threads.iter().all(|thread| thread.is_finished()) {
            assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
            disk.must(&M::SetOwner, &[]);
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    eprintln!("{count} messages");
    assert!(count >= most / 2 * 2, "{count} messages");
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    until("the others have ended", || rig.served() == 1);
}

/// A guest scribbles on the rings of live queues.
#[test]
fn hostile_rings_harm_no_other_frontend() {
    let most = number("EBB_HOSTILE", 500_000);
    let rig = Rig::new();
    rig.add(memory_volume("a", SIZE, false));
    let mut disk = rig.disk(Wishes::default());
    let mut random = Random::new(number("EBBD_FUZZ_SEED", 1) | 1);
    let wishes = Wishes { queues: 2, size: 16, inflight: false, ..Wishes::default() };
    let mut hostile = rig.frontend("a", wishes);
    hostile.start();
    for round in 0..most {
        let queue = random.below(2) as usize;
        let [table, available, used] = hostile.drivers[queue].rings();
        for _ in 0..random.below(4) {
            let head = random.below(17) as u16;
            let address = match random.below(4) {
                0 => word(&mut random),
                1 => table,
                _ => DATA + random.below(1 << 20),
            };
            let len = [16, 512, 1, 4096, word(&mut random) as u32][random.below(5) as usize];
            let flags = [0, 1, 1, 2, 3, 4, 5, word(&mut random) as u16][random.below(8) as usize];
            let at = table + 16 * u64::from(head);
            let next = random.below(17) as u16;
            common::driver::Driver::descriptor(
                &hostile.guest,
                at,
                (address, len, false),
                flags,
                next,
            );
            hostile.drivers[queue].offer(&hostile.guest, head);
        }
        match random.below(12) {
            0 => hostile.guest.store_u16(available + 2, random.next() as u16),
            1 => hostile.guest.store_u16(used + 2, random.next() as u16),
            2 => hostile.guest.store_u16(DATA + 2 * random.below(1 << 19), random.next() as u16),
            _ => {}
        }
        hostile.drivers[queue].publish(&hostile.guest);
        hostile.kick(queue);
        if round % 16 == 0 {
            assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
            // It configures the queue anew.
            let base = hostile.stop_queue(queue);
            hostile.drivers[queue].reset(&hostile.guest);
            let _ = base;
            hostile.start_queue(queue, 0);
        }
    }
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
}

/// A frontend makes its eventfds blocking again, and fills their counters: no thread waits for them, and it is notified again when
/// it has looked.
#[test]
fn an_eventfd_that_is_full_and_blocking_holds_no_worker() {
    let rig = Rig::new();
    rig.add(memory_volume("other", SIZE, false));
    let mut other = rig.frontend("other", Wishes::default());
    other.start();
    let without = VirtioFeatures::RING_EVENT_IDX;
    let mut disk = rig.disk(Wishes { without, ..Wishes::default() });
    let call = &disk.calls[0];
    assert!(is_readable(call, HANG) && take_event(call), "the signal of the start");
    rustix::io::write(call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let flags = rustix::fs::fcntl_getfl(call).unwrap();
    rustix::fs::fcntl_setfl(call, flags.difference(rustix::fs::OFlags::NONBLOCK)).unwrap();
    for _ in 0..20 {
        disk.request(0, kind::WRITE, 0, 512);
        disk.publish(0);
        until("it completes without a notification", || {
            disk.drivers[0].take(&disk.guest).is_some()
        });
        assert_eq!(other.write(0, 0, &[1; 512]), status::OK);
    }
    assert!(take_event(&disk.calls[0]), "it was full");
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    assert_eq!(other.write(0, 0, &[1; 512]), status::OK);
    // A queue ends without waiting for it.
    rustix::io::write(&disk.calls[0], &(u64::MAX - 2).to_ne_bytes()).unwrap();
    disk.request(0, kind::WRITE, 0, 512);
    disk.publish(0);
    disk.stop_queue(0);
}
