//! Requests without a buffer: the kernel transfers guest memory from and to files, and reads that the cache holds are copied
//! once.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test")]

use crate::common;

use std::os::fd::AsFd;

use common::driver::kind;
use common::{DATA, Rig, Wishes, pattern, status, until};
use rustix::fs::ftruncate;

/// Transfers of any layout, for a file of bytes and one of sectors of 4 KiB: what is not aligned takes a buffer.
#[test]
fn a_file_is_read_and_written_in_guest_memory() {
    for (alignment, unaligned) in [(1, true), (512, false), (4096, false)] {
        let rig = Rig::on_file(alignment);
        let mut disk = rig.disk(Wishes { indirect: true, ..Wishes::default() });
        let mut random = common::Random::new(7);
        let mut expected = vec![0; 1 << 20];
        for round in 0..300_u64 {
            let sector = random.below(2040);
            let length = 512 * (1 + random.below(8)) as usize;
            let range = 512 * sector as usize..512 * sector as usize + length;
            // Aligned, or not; in one piece, or several.
            let at = DATA + 0x20_0000 + [0, 0, 512, 3][random.below(4) as usize];
            let cut = 1 + random.below(length as u64 - 1);
            let mut parts = vec![(at, length as u32, false)];
            if random.below(2) == 0 {
                parts =
                    vec![(at, cut as u32, false), (at + cut, length as u32 - cut as u32, false)];
            }
            let head = disk.drivers[0].next_head();
            let (header, status_at) = disk.drivers[0].slot(head);
            let write = random.below(2) == 0;
            let operation = if write { kind::WRITE } else { kind::READ };
            disk.drivers[0].header(&disk.guest, head, operation, sector);
            let mut chain = vec![(header, 16, false)];
            chain.extend(parts.iter().map(|(at, length, _)| (*at, *length, !write)));
            chain.push((status_at, 1, true));
            if write {
                let data = pattern(round + 1, length);
                disk.guest.write(at, &data);
                expected[range].copy_from_slice(&data);
                assert_eq!(disk.chain(0, &chain).status, status::OK);
            } else {
                disk.guest.write(at, &vec![0xaa; length]);
                let done = disk.chain(0, &chain);
                assert_eq!((done.status, done.len), (status::OK, length as u32 + 1));
                assert!(disk.guest.read(at, length) == expected[range], "round {round}");
            }
        }
        let stats = rig.figures().stats;
        assert!(stats.direct > 0, "{alignment}: {stats:?}");
        assert_eq!(stats.direct == 300, unaligned, "{alignment}: {stats:?}");
    }
}

#[test]
fn a_transfer_beyond_the_end_of_a_file_changes_no_guest_memory() {
    let rig = Rig::on_file(1);
    let mut disk = rig.disk(Wishes::default());
    let mut data = pattern(1, 8192);
    let end = common::SIZE / 512;
    assert_eq!(disk.transfer(0, kind::READ, end - 8, &mut data).status, status::IO_ERROR);
    assert!(data == pattern(1, 8192));
    assert_eq!(disk.write(0, end - 8, &pattern(2, 4096)), status::OK);
    assert!(disk.read(0, end - 8, 4096) == pattern(2, 4096));
}

/// A guest without a volatile cache has each write stable: such writes take a buffer, for one sync each.
#[test]
fn writes_of_a_guest_that_does_not_flush_are_stable() {
    let rig = Rig::on_file(1);
    let mut disk = rig.disk(Wishes::default());
    disk.set_cache(false);
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
    assert_eq!(rig.figures().stats.direct, 0);
    disk.set_cache(true);
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
    assert_eq!(rig.figures().stats.direct, 1);
}

/// Trap 24: the kernel cannot access memory that was truncated. That ends the connection, and no other.
#[test]
fn trap_24_memory_that_is_truncated_under_a_transfer_ends_its_connection_only() {
    for operation in [kind::READ, kind::WRITE] {
        let rig = Rig::on_file(1);
        rig.add(common::memory_volume("other", common::SIZE, false));
        let mut other = rig.frontend("other", Wishes::default());
        other.start();
        let mut disk = rig.disk(Wishes::default());
        assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
        // The rings are in another region than the data.
        ftruncate(disk.guest.regions[1].file.as_fd(), 0).unwrap();
        disk.request(0, operation, 0, 4096);
        disk.publish(0);
        assert!(disk.is_closed());
        until("it is not served", || rig.served() == 1);
        assert_eq!(other.write(0, 0, &[1; 512]), status::OK);
        assert_eq!(rig.disk(Wishes::default()).write(0, 0, &[1; 512]), status::OK);
    }
}

/// What was read is logged for a live migration.
#[test]
fn trap_26_pages_that_the_kernel_wrote_are_logged() {
    let rig = Rig::on_file(1);
    let mut disk = rig.disk(Wishes::default());
    disk.start_log();
    let data = disk.drivers[0].data(disk.drivers[0].next_head());
    assert!(!disk.is_logged(data));
    disk.read(0, 0, 4096);
    assert!(disk.is_logged(data), "{:?}", rig.figures().stats);
    assert!(rig.figures().stats.direct > 0);
}

#[test]
fn reads_that_the_cache_holds_are_carried_out_at_once() {
    let rig = Rig::cached();
    let mut disk = rig.disk(Wishes { indirect: true, ..Wishes::default() });
    for (number, length) in [4096, 512, 131_072, 32_768].into_iter().enumerate() {
        let (sector, data) =
            (3 + 512 * number as u64, pattern(number as u64 + 1, length.min(32_768)));
        assert_eq!(disk.write(0, sector, &data), status::OK);
        // The first one may load the rest of its pages.
        assert!(disk.read(0, sector, data.len()) == data);
        let before = rig.figures().stats.inline;
        assert!(disk.read(0, sector, data.len()) == data);
        assert!(
            disk.read(0, sector + 1, data.len().min(512))
                == [&data[512.min(data.len())..], &[0; 512]].concat()[..512]
        );
        assert_eq!(rig.figures().stats.inline, before + 2, "{length}");
    }
}
