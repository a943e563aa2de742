//! Tests that need access to the slots.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::Wake;

use super::*;
use crate::buf::{BufPool, private_pool};
use crate::op::fd_from;

struct NoopWake;

impl Wake for NoopWake {
    fn wake(self: Arc<Self>) {}
}

fn waker() -> Waker {
    Arc::new(NoopWake).into()
}

/// Moves a ring to another thread.
struct SendRing<'a>(&'a IoRing);
// SAFETY: the thread that owns the ring waits until the other thread has ended.
unsafe impl Send for SendRing<'_> {}

/// Runs `use_ring` on another thread, whose submissions the kernel refuses: a ring has a single issuer.
fn on_another_thread(ring: &IoRing, use_ring: impl FnOnce(&IoRing) + Send) {
    let ring = SendRing(ring);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let SendRing(ring) = { ring };
            use_ring(ring);
        });
    });
}

/// Starts a receive that never completes by itself.
fn receive(ring: &IoRing, pool: &BufPool, fd: &Fd) -> OpKey {
    use std::os::fd::AsRawFd;
    let buf = pool.get_for_test(4096);
    let entry = opcode::Recv::new(io_uring::types::Fd(fd.as_raw_fd()), buf.addr(), 1).build();
    let (memory, fd) = (OpMemory::Buf(buf), Some(fd.clone()));
    // SAFETY: the entry points into `memory`, and its descriptor is `fd`'s.
    match unsafe { ring.start(&entry, OpClass::Wait, memory, fd, &waker()) } {
        Ok(key) => key,
        Err(_) => panic!("an idle ring has room"),
    }
}

#[test]
fn slots_are_reused_and_are_as_many_as_were_needed_at_once() {
    let (ring, pool) = (IoRing::new(true).unwrap(), private_pool());
    let (here, _there) = UnixStream::pair().unwrap();
    let fd = fd_from(here);
    for _ in 0..100 {
        let keys: Vec<_> = (0..40).map(|_| receive(&ring, &pool, &fd)).collect();
        ring.enter(0, None, None);
        keys.into_iter().for_each(|key| ring.abandon(key));
        while ring.orphans() > 0 {
            ring.enter(1, Some(Duration::from_millis(20)), None);
            ring.reap();
        }
        assert_eq!(pool.used_bytes(), 0);
    }
    assert_eq!(ring.slots.borrow().list.len(), 40);
}

/// Storage operations of one file never use more slots than their limit, and leave room for other files.
#[test]
fn storage_operations_beyond_the_limit_of_a_file_are_refused_and_other_files_find_room() {
    use std::os::fd::AsRawFd;
    let (ring, pool) = (IoRing::new(true).unwrap(), private_pool());
    let start = |fd: &Fd| {
        let buf = pool.get_for_test(1);
        let entry = opcode::Read::new(io_uring::types::Fd(fd.as_raw_fd()), buf.addr(), 1).build();
        // SAFETY: the entry points into the memory, and its descriptor is `fd`'s.
        unsafe {
            ring.start(&entry, OpClass::Storage, OpMemory::Buf(buf), Some(fd.clone()), &waker())
        }
        .is_ok()
    };
    let pipes: Vec<_> = (0..8).map(|_| std::io::pipe().unwrap()).collect();
    let ends: Vec<_> = pipes.iter().map(|pipe| fd_from(pipe.0.try_clone().unwrap())).collect();
    for fd in &ends {
        let started = (0..file_queue::PER_FILE + 100).filter(|_| start(fd)).count();
        assert_eq!(started, file_queue::PER_FILE as usize);
    }
    assert_eq!(ring.slots.borrow().list.len(), file_queue::PER_FILE as usize * ends.len());
    ring.shut_down(Duration::from_secs(10));
    assert_eq!(pool.used_bytes(), 0, "a ring that was shut down has released all buffers");
}

/// Memory that the kernel does not release in time is leaked; a future that is dropped after that finds
/// no slot, and must not panic.
#[test]
fn a_future_may_be_dropped_after_its_operation_was_leaked() {
    let (ring, pool) = (IoRing::new(true).unwrap(), private_pool());
    let (here, _there) = UnixStream::pair().unwrap();
    let key = receive(&ring, &pool, &fd_from(here));
    ring.enter(0, None, None);
    ring.shut_down(Duration::ZERO);
    ring.abandon(key);
    assert_eq!(pool.used_bytes(), 4096, "leaked, not reused");
}

/// A cancellation for which there is no room is submitted later.
#[test]
fn a_cancellation_waits_while_the_submission_queue_is_full() {
    let (ring, pool) = (IoRing::new(true).unwrap(), private_pool());
    let (here, _there) = UnixStream::pair().unwrap();
    let fd = fd_from(here);
    let keys: Vec<_> = (0..setup::SQ_ENTRIES).map(|_| receive(&ring, &pool, &fd)).collect();
    keys.into_iter().for_each(|key| ring.abandon(key));

    // The kernel refuses what another thread submits, so that the queue stays full.
    on_another_thread(&ring, IoRing::push_cancels);
    assert_eq!(ring.cancels.borrow().len(), setup::SQ_ENTRIES as usize, "none is lost");
    while ring.orphans() > 0 {
        ring.enter(1, Some(Duration::from_millis(20)), None);
        ring.reap();
    }
    assert_eq!(pool.used_bytes(), 0);
}

/// The kernel reads an alarm's timeout when it consumes the entry, which may be long after it was queued.
#[test]
fn an_alarm_that_is_submitted_late_keeps_its_timeout() {
    /// Overwrites the part of the stack that earlier calls have used.
    #[inline(never)]
    fn scribble(depth: u32) -> u64 {
        let garbage = std::hint::black_box([u64::MAX; 256]);
        if depth == 0 { garbage[7] } else { garbage[depth as usize] & scribble(depth - 1) }
    }
    let ring = IoRing::new(true).unwrap();
    let now = Instant::now();
    on_another_thread(&ring, |ring| {
        assert!(ring.wake_at(now + Duration::from_millis(30), now));
        std::hint::black_box(scribble(8));
        // When this thread ends, its stack is freed, too.
    });
    assert!(ring.wants_enter(), "the kernel has not consumed the entry");
    ring.enter(1, Some(Duration::from_secs(20)), None);
    let result = ring.uring.borrow_mut().completion().next().map(|entry| entry.result());
    assert_eq!(result, Some(-libc::ETIME), "it expired, after a valid timeout");
}
