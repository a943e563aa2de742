//! Requests of every kind, in every layout.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::driver::{Buffer, kind};
use common::guest::FAR;
use common::{DATA, Frontend, Rig, SIZE, Wishes, memory_volume, pattern, status};
use ebb_store::{NullStore, Record, Store, TestStore};
use ebb_vhost_proto::{FrontendMessage, VirtioFeatures};
use ebb_volume::{Volume, VolumeOptions};

/// A disk in memory, whose requests are carried out inline; one whose requests need tasks; one on a file, to which the kernel
/// transfers guest memory; one with a cache, from which reads are carried out inline. Direct and indirect chains; with an
/// event index and without; notified and polled; of split and packed rings.
fn disks() -> Vec<(Rig, Frontend)> {
    let mut disks = Vec::new();
    for number in 0..32 {
        let rig = match number & 3 {
            0 => Rig::new(),
            1 => Rig::on_test_store().0,
            2 => Rig::on_file(1),
            _ => Rig::cached(),
        };
        let without = match number & 8 {
            0 => VirtioFeatures::NONE,
            _ => VirtioFeatures::RING_EVENT_IDX,
        };
        let (indirect, polled) = (number & 4 != 0, number & 12 == 8);
        let packed = number & 16 != 0;
        let disk =
            rig.disk(Wishes { queues: 2, without, indirect, polled, packed, ..Wishes::default() });
        disks.push((rig, disk));
    }
    disks
}

#[test]
fn what_is_written_is_read_again() {
    for (_rig, mut disk) in disks() {
        for (number, len) in [512, 1024, 4096, 4608, 32768].into_iter().enumerate() {
            let data = pattern(number as u64 + 1, len);
            let done = disk.transfer(number % 2, kind::WRITE, 8 * number as u64, &mut data.clone());
            assert_eq!((done.status, done.len), (status::OK, 1));
            let mut back = vec![0; len];
            let done = disk.transfer(1, kind::READ, 8 * number as u64, &mut back);
            assert_eq!((done.status, done.len), (status::OK, len as u32 + 1));
            assert!(back == data);
        }
        assert_eq!(disk.flush(0), status::OK);
    }
}

/// Trap 19: the header may span descriptors, the status is the last byte that the device may write, wherever it is, and data
/// may cross regions.
#[test]
fn trap_19_requests_have_any_layout() {
    for (_rig, mut disk) in disks() {
        let data = pattern(7, 1024);
        for at in [DATA + 0x10_0000, DATA - 512, FAR, DATA + 0x10_0003] {
            disk.guest.write(at, &data);
            let head = disk.drivers[0].next_head();
            let (header, status_at) = disk.drivers[0].slot(head);
            disk.drivers[0].header(&disk.guest, head, kind::WRITE, 64);
            let write: [Buffer; 6] = [
                (header, 3, false),
                (header + 3, 0, false),
                (header + 3, 13, false),
                (at, 1, false),
                (at + 1, 1023, false),
                (status_at, 1, true),
            ];
            assert_eq!(disk.chain(0, &write).status, status::OK);
            disk.guest.write(at, &[0; 1024]);
            // The status is behind the data in one descriptor, and the header before data that is not read.
            let head = disk.drivers[0].next_head();
            let (header, status_at) = disk.drivers[0].slot(head);
            disk.drivers[0].header(&disk.guest, head, kind::READ, 64);
            disk.guest.write(at + 1024, &[status::NONE]);
            let read: [Buffer; 4] =
                [(header, 16, false), (at, 5, true), (at + 5, 900, true), (at + 905, 120, true)];
            let done = disk.chain(0, &read);
            assert_eq!((done.len, disk.guest.read(at + 1024, 1)), (1025, vec![status::OK]));
            assert_eq!(disk.guest.read(status_at, 1), [status::NONE]);
            assert!(disk.guest.read(at, 1024) == data, "{at:#x}");
        }
        // The header and the data in one descriptor.
        let at = DATA + 0x20_0000;
        disk.guest.write(at, &u64::from(kind::WRITE).to_le_bytes());
        disk.guest.write(at + 8, &100u64.to_le_bytes());
        disk.guest.write(at + 16, &data);
        let (_, status_at) = disk.drivers[0].slot(disk.drivers[0].next_head());
        assert_eq!(disk.chain(0, &[(at, 1040, false), (status_at, 1, true)]).status, status::OK);
        assert!(disk.read(0, 100, 1024) == data);
    }
}

/// Trap 21: the used length has the status in it; a request that fails writes nothing else.
#[test]
fn trap_21_requests_that_are_refused_have_a_status_and_its_length() {
    let end = SIZE / 512;
    for (_rig, mut disk) in disks() {
        for (kind, sector, len, expected) in [
            (kind::READ, end, 512, status::IO_ERROR),
            (kind::READ, end - 1, 1024, status::IO_ERROR),
            (kind::WRITE, end, 512, status::IO_ERROR),
            (kind::WRITE, u64::MAX, 512, status::IO_ERROR),
            (kind::READ, u64::MAX / 512, 512, status::IO_ERROR),
            (kind::READ, 0, 511, status::IO_ERROR),
            (kind::WRITE, 0, 513, status::IO_ERROR),
            (kind::WRITE, 0, 0, status::IO_ERROR),
            (kind::READ, 0, 0, status::IO_ERROR),
            (77, 0, 512, status::UNSUPPORTED),
            (14, 0, 16, status::UNSUPPORTED),
        ] {
            let mut data = pattern(1, len);
            let done = disk.transfer(0, kind, sector, &mut data);
            assert_eq!((done.status, done.len), (expected, 1), "{kind} at {sector}, {len} bytes");
            assert!(data == pattern(1, len), "a refused request changed guest memory");
        }
        // Without room for a status, or with half a header, the chain is used and nothing is written.
        let (header, status_at) = disk.drivers[0].slot(disk.drivers[0].next_head());
        assert_eq!(disk.chain(0, &[(header, 16, false)]).len, 0);
        assert_eq!(disk.chain(0, &[(header, 15, false), (status_at, 1, true)]).len, 0);
        assert_eq!(disk.flush(0), status::OK, "the ring is served on");
    }
}

#[test]
fn the_name_of_a_disk_is_that_of_its_volume() {
    for (_rig, mut disk) in disks() {
        let mut id = [7; 20];
        let done = disk.transfer(0, kind::GET_ID, 0, &mut id);
        assert_eq!((done.status, done.len), (status::OK, 21));
        assert_eq!(&id[..5], b"disk\0");
        let mut short = [7; 3];
        assert_eq!(disk.transfer(0, kind::GET_ID, 0, &mut short).status, status::OK);
        assert_eq!(&short, b"dis");
    }
}

#[test]
fn a_read_only_volume_is_offered_as_such_and_refuses_changes() {
    let rig = Rig::empty(1);
    rig.add(memory_volume("disk", SIZE, true));
    let mut disk = rig.disk(Wishes::default());
    assert!(disk.features.contains(VirtioFeatures::BLK_READ_ONLY));
    assert!(!disk.features.contains(VirtioFeatures::BLK_WRITE_ZEROES));
    assert_eq!(disk.write(0, 0, &[1; 512]), status::IO_ERROR);
    assert_ne!(
        disk.transfer(0, kind::WRITE_ZEROES, 0, &mut ranges(&[(0, 8, 0)])).status,
        status::OK
    );
    assert_eq!(disk.read(0, 0, 512), [0; 512]);
    assert_eq!(disk.flush(0), status::OK);
    // It needs no right to write: another one is served.
    let mut second = rig.disk(Wishes::default());
    assert_eq!(second.read(0, 0, 512), [0; 512]);
}

/// Ranges: sector, count, flags.
fn ranges(all: &[(u64, u32, u32)]) -> Vec<u8> {
    let one = |(sector, count, flags): &(u64, u32, u32)| {
        [sector.to_le_bytes().to_vec(), count.to_le_bytes().into(), flags.to_le_bytes().into()]
    };
    all.iter().flat_map(one).flatten().collect()
}

/// Trap 23: unknown flags are unsupported; ranges, their number and their sizes are checked before the first is changed.
#[test]
fn trap_23_ranges_are_checked_before_they_are_zeroed() {
    let end = SIZE / 512;
    for (_rig, mut disk) in disks() {
        let data = pattern(5, 32768);
        assert_eq!(disk.write(0, 0, &data), status::OK);
        let many = vec![(0, 8, 0); 33];
        for (bad, expected) in [
            (ranges(&[(0, 8, 0), (end, 1, 0)]), status::IO_ERROR),
            (ranges(&[(0, 8, 0), (u64::MAX, 8, 0)]), status::IO_ERROR),
            (ranges(&[(0, 8, 0), (8, u32::MAX, 0)]), status::IO_ERROR),
            (ranges(&[(0, 8, 0), (8, 8, 2)]), status::UNSUPPORTED),
            (ranges(&many), status::IO_ERROR),
            (ranges(&[(0, 8, 0)])[..15].to_vec(), status::IO_ERROR),
            (vec![], status::IO_ERROR),
        ] {
            for kind in [kind::WRITE_ZEROES, kind::DISCARD] {
                assert_eq!(disk.transfer(0, kind, 0, &mut bad.clone()).status, expected);
            }
        }
        let flagged = ranges(&[(0, 8, 1)]);
        assert_eq!(
            disk.transfer(0, kind::DISCARD, 0, &mut flagged.clone()).status,
            status::UNSUPPORTED
        );
        assert!(disk.read(0, 0, 32768) == data);
        let mut two = ranges(&[(8, 8, 1), (24, 8, 0)]);
        assert_eq!(disk.transfer(0, kind::WRITE_ZEROES, 0, &mut two).status, status::OK);
        let mut expected = data.clone();
        expected[4096..8192].fill(0);
        expected[12288..16384].fill(0);
        assert!(disk.read(0, 0, 32768) == expected);
        if disk.features.contains(VirtioFeatures::BLK_DISCARD) {
            let mut one = ranges(&[(0, 8, 0)]);
            assert_eq!(disk.transfer(0, kind::DISCARD, 0, &mut one).status, status::OK);
        }
    }
}

/// What the store got since the last call: whether a write was to be stable, and the number of flushes.
fn recorded(store: &TestStore) -> (bool, usize) {
    let record = store.take_record();
    store.start_record();
    let flushes = record.iter().filter(|one| matches!(one, Record::Flush { .. })).count();
    (record.iter().any(|one| matches!(one, Record::Write { fua: true, .. })), flushes)
}

/// Trap 23: a range is as long as it was offered, at most.
#[test]
fn trap_23_a_range_that_is_longer_than_offered_is_refused() {
    let rig = Rig::empty(1);
    let store = Store::Null(NullStore::new(4 << 30));
    rig.add(Volume::new("disk", store, VolumeOptions::default()));
    let mut disk = rig.disk(Wishes::default());
    let most = u32::from_le_bytes(disk.config(48, 4).try_into().unwrap());
    for (count, expected) in [(most, status::OK), (most + 1, status::IO_ERROR)] {
        let mut one = ranges(&[(8, count, 0)]);
        assert_eq!(disk.transfer(0, kind::WRITE_ZEROES, 0, &mut one).status, expected, "{count}");
    }
}

/// Trap 22: a guest that sends no flushes, or has switched the cache off, has each write stable before its completion.
#[test]
fn trap_22_writes_are_stable_if_the_guest_does_not_flush() {
    let (flush, wce) = (VirtioFeatures::BLK_FLUSH, VirtioFeatures::BLK_CONFIG_WCE);
    for (without, stable) in
        [(VirtioFeatures::NONE, false), (wce, false), (flush, true), (flush.with(wce), true)]
    {
        let (rig, store) = Rig::on_test_store();
        let mut disk = rig.disk(Wishes { without, ..Wishes::default() });
        store.start_record();
        assert_eq!(disk.write(0, 0, &[1; 4096]), status::OK);
        assert_eq!(recorded(&store), (stable, 0), "{without:?}");
        assert_eq!(disk.flush(0), status::OK);
        assert_eq!(recorded(&store), (false, 1));
        if without.is_none() {
            assert_eq!(disk.config(32, 1), [1]);
            disk.set_cache(false);
            assert_eq!(disk.config(32, 1), [0]);
            assert_eq!(disk.write(0, 0, &[1; 4096]), status::OK);
            assert_eq!(recorded(&store), (true, 0));
            let mut zeroes = ranges(&[(0, 8, 0)]);
            assert_eq!(disk.transfer(0, kind::WRITE_ZEROES, 0, &mut zeroes).status, status::OK);
            assert_eq!(recorded(&store), (false, 1), "zeroes are stable by a flush");
            disk.set_cache(true);
            assert_eq!(disk.write(0, 0, &[1; 4096]), status::OK);
            assert_eq!(recorded(&store), (false, 0));
        }
    }
}

/// The cache mode that the guest selected outlives the backend: QEMU does not send it again.
#[test]
fn trap_22_a_cache_that_was_switched_off_stays_off_after_a_reconnect() {
    for killed in [false, true] {
        let (mut rig, store) = Rig::on_test_store();
        let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
        disk.set_cache(false);
        assert_eq!(disk.write(0, 0, &[1; 4096]), status::OK);
        if killed {
            rig.kill();
        } else {
            rig.stop();
        }
        rig.start(1);
        disk.reconnect(&rig.path("disk"));
        store.start_record();
        assert_eq!(disk.config(32, 1), [0], "the guest sees the mode that it selected");
        for queue in 0..2 {
            assert_eq!(disk.write(queue, 0, &[1; 4096]), status::OK);
            assert_eq!(recorded(&store), (true, 0), "killed: {killed}");
        }
        // The guest may switch it on again; a reset does not, since the VMM does not either.
        disk.set_cache(true);
        assert_eq!(disk.write(1, 0, &[1; 4096]), status::OK);
        assert_eq!(recorded(&store), (false, 0));
        disk.set_cache(false);
        disk.must(&FrontendMessage::ResetDevice, &[]);
        disk.drivers.iter_mut().for_each(|driver| driver.reset(&disk.guest));
        disk.inflight = None;
        disk.start();
        assert_eq!(disk.write(0, 0, &[1; 4096]), status::OK);
        assert_eq!(recorded(&store), (true, 0));
    }
}

/// Reads that fail at the store fail in the guest, as do writes and flushes.
#[test]
fn errors_of_the_store_reach_the_guest() {
    let (rig, store) = Rig::on_test_store();
    let store: Arc<TestStore> = store;
    let mut disk = rig.disk(Wishes::default());
    store.read_faults.store(1000, Ordering::SeqCst);
    store.write_faults.store(1000, Ordering::SeqCst);
    store.flush_faults.store(1000, Ordering::SeqCst);
    let done = disk.transfer(0, kind::READ, 0, &mut [0; 512]);
    assert_eq!((done.status, done.len), (status::IO_ERROR, 1));
    assert_eq!(disk.write(0, 0, &[1; 512]), status::IO_ERROR);
    assert_eq!(disk.flush(0), status::IO_ERROR);
    assert_eq!(rig.figures().stats.errors, 3);
}
