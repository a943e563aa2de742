//! Migration: the log of pages, two connections to one disk.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test")]

use crate::common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::driver::kind;
use common::frontend::{is_readable, receive, take_event};
use common::guest::memfd;
use common::{DATA, Rig, Wishes, pattern, pause, status, until};
use ebb_vhost_proto::{FrontendMessage as M, LogArea, VirtioFeatures};

const SHORT: Duration = Duration::from_millis(50);

/// Trap 26: the pages of data, status and used ring are in the log when a request has completed, inline or in a task.
#[test]
fn trap_26_written_pages_are_logged() {
    for inline in [true, false] {
        let rig = if inline { Rig::new() } else { Rig::on_test_store().0 };
        let mut disk = rig.disk(Wishes::default());
        assert_eq!(disk.write(0, 0, &pattern(1, 8192)), status::OK);
        disk.start_log();
        // A write changes the status and the used ring only.
        let head = disk.drivers[0].next_head();
        assert_eq!(disk.write(0, 0, &pattern(1, 8192)), status::OK);
        let (status_page, used) = (disk.drivers[0].slot(head).1, disk.drivers[0].rings()[2]);
        assert!(disk.is_logged(status_page) && disk.is_logged(used));
        assert!(!disk.is_logged(disk.drivers[0].data(head)));
        // Data of a read, in two places, one of which crosses a page.
        let data = [(DATA + 0x40_0ffe, 1024, true), (DATA + 0x50_0000, 3072, true)];
        disk.drivers[0].request(&disk.guest, kind::READ, 0, &data);
        disk.publish(0);
        assert_eq!(disk.wait(0).status, status::OK);
        for page in [0x40_0000, 0x40_1000, 0x50_0000] {
            assert!(disk.is_logged(DATA + page), "{page:#x}");
        }
        assert!(!disk.is_logged(DATA + 0x40_2000) && !disk.is_logged(DATA + 0x50_1000));
        disk.must(&M::SetVringAddr(disk.addresses(0)), &[]);
        // Switched off again.
        disk.features = disk.features.beyond(VirtioFeatures::LOG_ALL);
        disk.must(&M::SetFeatures(disk.features), &[]);
        disk.drivers[0].request(&disk.guest, kind::READ, 0, &[(DATA + 0x60_0000, 512, true)]);
        disk.publish(0);
        assert_eq!(disk.wait(0).status, status::OK);
        assert!(!disk.is_logged(DATA + 0x60_0000));
    }
}

/// Trap 26: what completes after the frontend was told that the log is on is in the log, also if the request was in flight when
/// it was switched on, or when it was replaced.
#[test]
fn trap_26_requests_in_flight_are_logged_in_the_log_that_was_acknowledged() {
    for replaced in [false, true] {
        let (_rig, store) = Rig::on_test_store();
        let mut disk = _rig.disk(Wishes { queues: 2, ..Wishes::default() });
        if replaced {
            disk.start_log();
        }
        store.hang();
        disk.drivers[0].request(&disk.guest, kind::READ, 0, &[(DATA + 0x40_0000, 4096, true)]);
        disk.publish(0);
        until("the read is in flight", || store.hanging() == 1);
        let file = memfd(256 << 10);
        let log = ebb_guest_ring::SharedMemory::map(
            std::os::fd::AsFd::as_fd(&file),
            0,
            256 << 10,
            std::sync::Arc::default(),
        )
        .unwrap();
        let message = M::SetLogBase(Some(LogArea { size: 256 << 10, offset: 0 }));
        assert!(disk.try_send(&message, false, &[&file]));
        let mut replied = 1;
        if !replaced {
            receive(&disk.socket).unwrap();
            disk.features = disk.features.with(VirtioFeatures::LOG_ALL);
            assert!(disk.try_send(&M::SetFeatures(disk.features), true, &[]));
        }
        if is_readable(&disk.socket, SHORT) {
            receive(&disk.socket).unwrap();
            replied = 0;
        }
        disk.log = Some(log);
        store.release();
        assert_eq!(disk.wait(0).status, status::OK);
        assert!(replied == 1 || disk.is_logged(DATA + 0x40_0000), "replaced: {replaced}");
        if replied == 1 {
            receive(&disk.socket).unwrap();
        }
        disk.drivers[1].request(&disk.guest, kind::READ, 0, &[(DATA + 0x50_0000, 4096, true)]);
        disk.publish(1);
        assert_eq!(disk.wait(1).status, status::OK);
        assert!(disk.is_logged(DATA + 0x50_0000));
    }
}

/// Within one host: the destination's queues start when the source's have ended, at their bases.
#[test]
fn a_second_writer_waits_until_the_first_has_stopped() {
    let (rig, store) = Rig::on_test_store();
    let mut source = rig.disk(Wishes { inflight: false, ..Wishes::default() });
    assert_eq!(source.write(0, 0, &pattern(1, 4096)), status::OK);
    source.start_log();
    store.hang();
    source.request(0, kind::WRITE, 8, 512);
    source.publish(0);
    until("the write is in flight", || store.hanging() == 1);
    // The destination shares the guest's memory here, as if it had been copied.
    let mut destination = rig.frontend("disk", Wishes { inflight: false, ..Wishes::default() });
    destination.guest = source.guest.clone();
    assert!(source.try_send(&M::GetVringBase(0), false, &[]));
    destination.must(&M::SetFeatures(destination.features), &[]);
    destination.share_memory();
    destination.start_queue(0, 2);
    assert!(!is_readable(&source.socket, SHORT));
    assert_eq!(store.writes.load(Ordering::SeqCst), 2, "the second is in flight");
    store.release();
    let base = receive(&source.socket).unwrap().1[4];
    assert_eq!(base, 2);
    std::mem::swap(&mut source.drivers, &mut destination.drivers);
    assert_eq!(destination.wait(0).status, status::OK);
    assert_eq!(destination.write(0, 16, &[2; 512]), status::OK);
    // The completion of the request in flight may have notified the source.
    take_event(&source.calls[0]);
    // The source goes on, after a migration that was given up, when the destination has stopped.
    source.start_queue(0, 3);
    std::mem::swap(&mut source.drivers, &mut destination.drivers);
    source.request(0, kind::WRITE, 8, 512);
    source.publish(0);
    assert!(!is_readable(&source.calls[0], SHORT), "two writers");
    destination.stop_queue(0);
    assert_eq!(source.wait(0).status, status::OK);
}

/// A frontend that does not want to write any more does not take the right to write.
#[test]
fn a_writer_that_waited_and_was_stopped_does_not_keep_others_waiting() {
    let rig = Rig::new();
    let mut first = rig.disk(Wishes { inflight: false, ..Wishes::default() });
    let second = rig.disk(Wishes { inflight: false, ..Wishes::default() });
    assert_eq!(second.stop_queue(0), 0);
    assert_eq!(first.write(0, 0, &[1; 512]), status::OK);
    assert_eq!(first.stop_queue(0), 1);
    // Longer than the second one waits between two attempts.
    pause(4 * SHORT);
    first.start_queue(0, 1);
    assert_eq!(first.write(0, 0, &[1; 512]), status::OK);
    // When one that waits has gone, nothing is kept either.
    let second = rig.disk(Wishes::default());
    drop(second);
    first.stop_queue(0);
    first.start_queue(0, 2);
    assert_eq!(first.write(0, 0, &[1; 512]), status::OK);
}
