//! With writeback, a read of data that is in memory does not depend on a store that accepts no writes, also if it waits for
//! the load of another page.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use common::{Disk, MIB, PAGE, Rig, on_a_worker};
use ebb_block::{BufResult, Operation};
use ebb_cache::{FixedLimit, Mode};
use ebb_io::Io;

/// Only a hang takes longer.
const HANG: Duration = Duration::from_secs(30);

async fn soon<T>(io: &Io, future: impl Future<Output = T>) -> T {
    let (mut future, mut late) = (pin!(future), pin!(io.sleep(HANG)));
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(result) => Poll::Ready(result),
        Poll::Pending => late.as_mut().poll(cx).map(|()| panic!("it hangs")),
    })
    .await
}

fn read(io: &Io, disk: &Disk, offset: u64, length: usize) -> impl Future<Output = BufResult> {
    let (cached, own) = (disk.cached.clone(), io.clone());
    io.spawn(async move {
        let buf = own.pool().get_for_test(length);
        cached.read(&own, buf, offset).await
    })
}

fn write(io: &Io, disk: &Disk, offset: u64, byte: u8) -> impl Future<Output = BufResult> {
    let (cached, own) = (disk.cached.clone(), io.clone());
    io.spawn(async move {
        let mut buf = own.pool().get_for_test(4096);
        buf.fill(byte);
        cached.write(&own, buf, offset, false).await
    })
}

async fn yields(io: &Io) {
    for _ in 0..20 {
        io.yield_now().await;
    }
}

/// Page 0 is dirty. A first read loads page 1, a second one wants both; a write of another page of the frame makes what
/// is being loaded invalid, if `written`; otherwise the load fails. Then the store's writes fail, or hang.
fn reads_both_pages(written: bool, hang: bool) {
    on_a_worker(Rig::new(8 * MIB), move |io, rig| async move {
        let disk = rig.volume_as("disk", MIB, 1, Mode::Writeback);
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        write(&io, &disk, 0, 9).await.0.unwrap();
        disk.test.hang_only(&[Operation::Read]);
        let first = read(&io, &disk, PAGE, 4096);
        while disk.test.hanging() == 0 {
            io.yield_now().await;
        }
        let second = read(&io, &disk, 0, 8192);
        yields(&io).await;
        let mut other = None;
        if written {
            other = Some(write(&io, &disk, 5 * PAGE, 7));
            yields(&io).await;
        } else {
            disk.test.power_cut();
        }
        disk.test.release();
        match hang {
            true => disk.test.hang_only(&[Operation::Write]),
            false => disk.test.write_faults.store(1000, Ordering::Relaxed),
        }
        assert_eq!(soon(&io, first).await.0.is_ok(), written);
        let (result, buf) = soon(&io, second).await;
        result.unwrap();
        assert_eq!(buf[..4096], [9; 4096]);
        disk.test.release();
        disk.test.write_faults.store(0, Ordering::Relaxed);
        if let Some(other) = other {
            soon(&io, other).await.0.unwrap();
        }
    });
}

#[test]
fn a_read_that_waited_for_a_load_needs_no_write_of_the_store() {
    for written in [true, false] {
        for hang in [false, true] {
            reads_both_pages(written, hang);
        }
    }
}
