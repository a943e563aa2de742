//! A peer that causes OpenSSL to send replies, and never receives them.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ebb_io::{Worker, fd_from};
use ebb_tls::{ServerTls, Transport};
use foreign_types::ForeignTypeRef;
use openssl::ssl::{Ssl, SslContext, SslMethod, SslStream, SslVersion};

unsafe extern "C" {
    fn SSL_key_update(ssl: *mut openssl_sys::SSL, kind: std::ffi::c_int) -> std::ffi::c_int;
}

const MUCH: usize = 8 << 20;

/// A socket that can be switched to collect what is written instead of sending it.
#[derive(Debug)]
struct Tap {
    socket: UnixStream,
    collected: Rc<RefCell<Option<Vec<u8>>>>,
}

impl Read for Tap {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        match *self.collected.borrow() {
            Some(_) => Err(ErrorKind::WouldBlock.into()),
            None => self.socket.read(buf),
        }
    }
}

impl Write for Tap {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        match &mut *self.collected.borrow_mut() {
            Some(bytes) => bytes.extend_from_slice(buf),
            None => return self.socket.write(buf),
        }
        Ok(buf.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Sends up to `MUCH` bytes that `say` makes the client produce; returns the most bytes that the server had
/// queued for it.
fn flood(version: SslVersion, say: fn(&mut SslStream<Tap>)) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "alice:0102030405060708090a0b0c0d0e0f10\n").unwrap();
    let server = ServerTls::from_psk(&keys).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let worker = Worker::start_alone("tls-test").unwrap();
    let (most, queued) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (seen, now) = (most.clone(), queued.clone());
    worker.handle().spawn(move |io| async move {
        let mut transport = Transport::new(fd_from(ours), None);
        transport.start_tls(&io, server.session().unwrap(), 1).await.unwrap();
        let transport = Rc::new(transport);
        let sender = {
            let (transport, io) = (transport.clone(), io.clone());
            async move {
                loop {
                    transport.wants_send().await;
                    if transport.send_pending(&io).await.is_err() {
                        return;
                    }
                }
            }
        };
        let receiver = async {
            loop {
                let buf = io.pool().take(4096).await;
                if !matches!(transport.recv(&io, buf, 0..4096).await.0, Ok(1..)) {
                    return;
                }
            }
        };
        let watch = async {
            loop {
                io.sleep(Duration::from_millis(1)).await;
                seen.fetch_max(transport.queued_bytes(), Ordering::Relaxed);
                now.store(transport.queued_bytes(), Ordering::Relaxed);
            }
        };
        futures_lite::future::or(receiver, futures_lite::future::or(sender, watch)).await;
    });
    let mut builder = SslContext::builder(SslMethod::tls_client()).unwrap();
    builder.set_min_proto_version(Some(version)).unwrap();
    builder.set_max_proto_version(Some(version)).unwrap();
    builder.set_cipher_list("ECDHE-PSK-CHACHA20-POLY1305").unwrap();
    builder.set_psk_client_callback(|_, _, identity, key| {
        identity[..6].copy_from_slice(b"alice\0");
        key[..16].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        Ok(16)
    });
    theirs.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut socket = theirs.try_clone().unwrap();
    let collected = Rc::<RefCell<Option<Vec<u8>>>>::default();
    let tap = Tap { socket: theirs, collected: collected.clone() };
    let mut stream = SslStream::new(Ssl::new(&builder.build()).unwrap(), tap).unwrap();
    stream.connect().unwrap();
    let mut sent = 0;
    while sent < MUCH {
        collected.replace(Some(Vec::new()));
        while collected.borrow().as_ref().is_some_and(|bytes| bytes.len() < 64 << 10) {
            say(&mut stream);
        }
        let bytes = collected.take().unwrap();
        match socket.write_all(&bytes) {
            Ok(()) => sent += bytes.len(),
            // The server has stopped receiving, or has closed the connection.
            Err(_) => break,
        }
    }
    most.load(Ordering::Relaxed).max(queued.load(Ordering::Relaxed))
}

#[test]
fn a_client_that_does_not_read_replies_to_key_updates_is_held_back() {
    let queued = flood(SslVersion::TLS1_3, |stream| {
        // SAFETY: a live session that is not shared; 1 requests a reply.
        assert_eq!(unsafe { SSL_key_update(stream.ssl().as_ptr(), 1) }, 1);
        stream.ssl_write(&[7]).unwrap();
    });
    assert!(queued <= 256 << 10, "{queued} bytes are queued for a client that never reads");
}
