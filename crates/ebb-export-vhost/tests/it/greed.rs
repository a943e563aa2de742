//! Frontends that take more of the process than their share: address space, mappings, descriptors in flight, the time of the
//! control thread.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::os::fd::OwnedFd;
use std::time::Duration;

use common::frontend::{bytes_of, is_readable, receive, send_raw};
use common::guest::memfd;
use common::{Frontend, Rig, SIZE, Wishes, memory_volume, pause, status};
use ebb_vhost_proto::{FrontendMessage as M, InflightArea, LogArea, MemoryRegion};

/// A connection that has said nothing but which features it has.
fn negotiated(rig: &Rig, volume: &str) -> Frontend {
    let mut frontend = rig.frontend(volume, Wishes::default());
    frontend.negotiate();
    frontend
}

fn region(at: u64, bytes: u64) -> M<'static> {
    M::AddMemReg(MemoryRegion { guest_address: at, bytes, user_address: at, mmap_offset: 0 })
}

fn inflight(bytes: u64) -> M<'static> {
    let (queues, queue_size) = (1, 128);
    M::SetInflightFd(InflightArea { mmap_size: bytes, mmap_offset: 0, queues, queue_size })
}

/// Another volume's guest is served.
fn check_other(rig: &Rig) {
    let mut other = rig.frontend("other", Wishes::default());
    other.start();
    assert_eq!(other.write(0, 0, &[1; 4096]), status::OK);
}

fn rig() -> Rig {
    let rig = Rig::new();
    rig.add(memory_volume("other", SIZE, false));
    rig
}

#[test]
fn inflight_regions_and_logs_have_a_greatest_size() {
    let rig = rig();
    let file: OwnedFd = memfd(1 << 46);
    let disk = negotiated(&rig, "disk");
    assert_eq!(disk.set(&inflight(1 << 46), &[&file]), Some(false));
    assert_eq!(disk.set(&inflight(259 << 20), &[&file]), Some(false));
    // 256 queues of 32768 entries of 32 bytes each, and their headers.
    disk.must(&inflight(256 * (32 + 32 * 32768)), &[&file]);
    let log = |size| M::SetLogBase(Some(LogArea { size, offset: 0 }));
    assert!(disk.try_send(&log(4 << 30), false, &[&file]));
    assert!(receive(&disk.socket).is_some());
    assert!(disk.try_send(&log((4 << 30) + 8), false, &[&file]));
    assert!(receive(&disk.socket).is_none(), "the log was accepted");
    check_other(&rig);
}

#[test]
fn one_volume_takes_a_quarter_of_the_address_space_at_most() {
    let rig = rig();
    let file: OwnedFd = memfd(16 << 40);
    let disks: Vec<Frontend> = (0..4).map(|_| negotiated(&rig, "disk")).collect();
    let accepted = disks.iter().map(|disk| disk.set(&region(1 << 44, 16 << 40), &[&file]));
    let accepted: Vec<_> = accepted.collect();
    assert_eq!(accepted, [Some(true), Some(true), Some(false), Some(false)]);
    assert_eq!(disks[0].set(&region(1 << 20, 4096), &[&file]), Some(false), "more than 16 TiB");
    check_other(&rig);
    // What is unmapped is there for others of the same volume.
    disks[0].must(
        &M::RemMemReg(MemoryRegion {
            guest_address: 1 << 44,
            bytes: 16 << 40,
            user_address: 1 << 44,
            mmap_offset: 0,
        }),
        &[],
    );
    // The last reference to the mapping may be dropped by a worker, after the reply.
    let begun = std::time::Instant::now();
    while disks[2].set(&region(1 << 44, 16 << 40), &[&file]) != Some(true) {
        assert!(begun.elapsed() < common::HANG, "the address space of the region is not free");
        pause(Duration::from_millis(10));
    }
}

#[test]
fn a_descriptor_that_is_not_read_delays_further_messages() {
    const MESSAGES: usize = 20;
    let rig = rig();
    let disk = negotiated(&rig, "disk");
    let area = InflightArea { mmap_size: 0, mmap_offset: 0, queues: 1, queue_size: 128 };
    let message = bytes_of(&M::GetInflightFd(area), false);
    assert!(send_raw(&disk.socket, &message.repeat(MESSAGES), &[]));
    assert!(is_readable(&disk.socket, common::HANG));
    pause(Duration::from_millis(300));
    let unread = rustix::io::ioctl_fionread(&disk.socket).unwrap();
    assert!(unread <= 64, "{unread} bytes were sent: more than one reply");
    check_other(&rig);
    for _ in 0..MESSAGES {
        let (_, _, fds) = receive(&disk.socket).unwrap();
        assert_eq!(fds.len(), 1);
    }
}
