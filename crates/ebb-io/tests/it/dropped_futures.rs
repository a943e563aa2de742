//! Dropped futures leak neither their memory nor the descriptors they would have returned.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::task::Poll;
use std::time::Duration;

use common::{HANG, on_worker, poll_once, until};
use ebb_io::{Gather, Io, fd_from, was_cancelled};

/// Gives the worker time for an iteration; nothing is asserted about it.
async fn some_time(io: &Io) {
    io.sleep(Duration::from_millis(5)).await;
}

#[test]
fn a_dropped_receive_keeps_its_buffer_until_its_completion_arrives() {
    on_worker(|io| async move {
        for peer_writes in [true, false] {
            let (here, mut there) = UnixStream::pair().unwrap();
            let fd = fd_from(here);
            let idle = io.pool().idle_bytes();
            let buf = io.pool().get_for_test(4096);
            let address = buf.as_ptr() as usize;
            let mut receive = Box::pin(io.recv(&fd, buf, 0..4096));
            assert!(poll_once(&mut receive).await.is_pending());
            some_time(&io).await;
            drop(receive);
            // The ring was not entered since: the kernel may write into the buffer at any time.
            assert_eq!(io.pool().used_bytes(), 4096, "still owned by the operation");
            let buffers: Vec<_> = (0..8).map(|_| io.pool().get_for_test(4096)).collect();
            assert!(buffers.iter().all(|b| b.as_ptr() as usize != address), "allocated twice");
            if peer_writes {
                // Now the kernel does write into it.
                there.write_all(b"late").unwrap();
            }
            drop(buffers);
            until(&io, "the buffer is freed", || io.pool().used_bytes() == 0).await;
            assert_eq!(io.pool().idle_bytes(), idle.max(8 * 4096) + 4096 - idle.min(4096));
            drop(there);
        }
    });
}

#[test]
fn the_buffers_of_a_thousand_receives_dropped_at_once_are_all_freed() {
    on_worker(|io| async move {
        for bytes_sent in [0, 500, 2000] {
            let (here, mut there) = UnixStream::pair().unwrap();
            let fd = fd_from(here);
            let mut pending = Vec::new();
            for _ in 0..1000 {
                let mut receive = Box::pin(io.recv(&fd, io.pool().get_for_test(4096), 0..1));
                assert!(poll_once(&mut receive).await.is_pending());
                pending.push(receive);
            }
            some_time(&io).await;
            assert_eq!(io.pool().used_bytes(), 1000 * 4096);
            there.write_all(&vec![7; bytes_sent]).unwrap();
            drop(pending);
            assert!(io.pool().used_bytes() > 0);
            until(&io, "all buffers are freed", || io.pool().used_bytes() == 0).await;
        }
    });
}

#[test]
fn a_receive_that_completed_before_it_is_dropped_frees_its_buffer() {
    on_worker(|io| async move {
        let (here, mut there) = UnixStream::pair().unwrap();
        let fd = fd_from(here);
        let mut receive = Box::pin(io.recv(&fd, io.pool().get_for_test(4096), 0..1));
        assert!(poll_once(&mut receive).await.is_pending());
        there.write_all(b"x").unwrap();
        // It may or may not have completed by now; the buffer is freed in both cases.
        some_time(&io).await;
        drop(receive);
        until(&io, "the buffer is freed", || io.pool().used_bytes() == 0).await;
    });
}

#[test]
fn a_cancelled_receive_loses_no_data() {
    on_worker(|io| async move {
        for round in 0..200_u32 {
            let (here, mut there) = UnixStream::pair().unwrap();
            let fd = fd_from(here);
            let mut receive = Box::pin(io.recv(&fd, io.pool().get_for_test(4096), 0..4096));
            assert!(poll_once(&mut receive).await.is_pending());
            // Before the cancellation, between it and its submission, or after it.
            if round % 3 == 0 {
                there.write_all(&round.to_le_bytes()).unwrap();
            }
            if round % 2 == 0 {
                some_time(&io).await;
            }
            io.cancel_receives(&fd);
            if round % 3 == 1 {
                there.write_all(&round.to_le_bytes()).unwrap();
            }
            let (result, buf) = receive.await;
            match result {
                Ok(count) => assert_eq!(buf[..count], round.to_le_bytes()),
                Err(error) => {
                    assert!(was_cancelled(&error), "{error}");
                    if round % 3 == 2 {
                        there.write_all(&round.to_le_bytes()).unwrap();
                    }
                    let (result, buf) = io.recv(&fd, buf, 0..4096).await;
                    assert_eq!(buf[..result.unwrap()], round.to_le_bytes());
                }
            }
        }
    });
}

#[test]
fn only_the_receives_of_one_socket_are_cancelled() {
    on_worker(|io| async move {
        let [(one, _of_one), (other, mut of_other)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        let (one, other) = (fd_from(one), fd_from(other));
        let mut first = Box::pin(io.recv(&one, io.pool().get_for_test(4096), 0..1));
        let mut second = Box::pin(io.recv(&other, io.pool().get_for_test(4096), 0..1));
        assert!(poll_once(&mut first).await.is_pending());
        assert!(poll_once(&mut second).await.is_pending());
        io.cancel_receives(&one);
        assert!(was_cancelled(&first.await.0.unwrap_err()));
        some_time(&io).await;
        assert!(poll_once(&mut second).await.is_pending());
        of_other.write_all(b"x").unwrap();
        assert_eq!(second.await.0.unwrap(), 1);
    });
}

#[test]
fn a_dropped_send_keeps_its_message_until_its_completion_arrives() {
    on_worker(|io| async move {
        let (here, mut there) = UnixStream::pair().unwrap();
        let fd = fd_from(here);
        // More than a socket holds, so that the send waits for the reader.
        let buf = io.pool().get_for_test(8 << 20);
        let mut message = Box::<Gather>::default();
        let index = message.hold(buf);
        message.push_range(index, 0..8 << 20);
        // What the socket has room for is sent at once; the rest waits in the ring.
        let send = loop {
            let mut send = Box::pin(io.send(&fd, message));
            match poll_once(&mut send).await {
                Poll::Pending => break send,
                Poll::Ready((result, rest)) => {
                    message = rest;
                    message.advance(result.unwrap());
                    assert!(!message.is_empty(), "no socket holds that much");
                }
            }
        };
        some_time(&io).await;
        drop(send);
        assert_eq!(io.pool().used_bytes(), 8 << 20, "still owned by the operation");
        until(&io, "the buffer is freed", || io.pool().used_bytes() == 0).await;
        drop(fd);
        let mut rest = Vec::new();
        there.read_to_end(&mut rest).unwrap();
        assert!(rest.len() < 8 << 20 && rest.iter().all(|b| *b == 0));
    });
}

/// The end of the stream, or a reset: the other end was closed.
fn is_hung_up(client: &mut UnixStream) -> bool {
    client.set_read_timeout(Some(HANG)).unwrap();
    match client.read(&mut [0; 1]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// A client that connects while the accept is dropped must not be left with an open connection that no task owns.
#[test]
fn a_connection_accepted_by_a_dropped_accept_is_closed() {
    on_worker(|io| async move {
        for drop_first in [false, true] {
            let path = std::env::temp_dir()
                .join(format!("ebb-io-accept-{}-{drop_first}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            let listener = fd_from(UnixListener::bind(&path).unwrap());
            let mut accept = Box::pin(io.accept(&listener));
            assert!(poll_once(&mut accept).await.is_pending());
            some_time(&io).await;
            let mut client;
            if drop_first {
                drop(accept);
                client = UnixStream::connect(&path).unwrap();
            } else {
                client = UnixStream::connect(&path).unwrap();
                some_time(&io).await;
                drop(accept);
            }
            some_time(&io).await;
            drop(listener);
            std::fs::remove_file(&path).unwrap();
            let closed = io.offload(move || is_hung_up(&mut client)).await;
            assert!(
                closed,
                "the client waits without end (accept dropped before it connected: {drop_first})"
            );
        }
    });
}

#[test]
fn a_timeout_drops_the_future_it_limits() {
    on_worker(|io| async move {
        let (here, _there) = UnixStream::pair().unwrap();
        let fd = fd_from(here);
        let receive = io.recv(&fd, io.pool().get_for_test(4096), 0..1);
        assert!(io.timeout(Duration::from_millis(5), receive).await.is_none());
        until(&io, "the buffer is freed", || io.pool().used_bytes() == 0).await;
        let quick = io.timeout(HANG, async { 7 }).await;
        assert_eq!(quick, Some(7));
    });
}
