//! A peer that causes replies, never reads them, and disconnects: receiving ends, too.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ebb_io::{Worker, fd_from};
use ebb_tls::{ServerTls, Transport};
use openssl::ssl::SslVersion;
use sealer::{HANDSHAKE, Library, hello};

use crate::sealer;

/// The time after which the test reports a hang.
const HANG: Duration = Duration::from_secs(60);

#[test]
fn receiving_ends_when_sending_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, sealer::KEY_LINE).unwrap();
    let session = ServerTls::from_psk(&keys).unwrap().session().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let worker = Worker::start_alone("tls-test").unwrap();
    let (result, received) = std::sync::mpsc::channel();
    worker.handle().spawn(move |io| async move {
        let mut transport = Transport::new(fd_from(ours), None);
        transport.start_tls(&io, session, 1).await.unwrap();
        let receiver = async {
            loop {
                let buf = io.pool().take(4096).await;
                match transport.recv(&io, buf, 0..4096).await.0 {
                    Ok(1..) => {}
                    end => return end,
                }
            }
        };
        let sender = async {
            while transport.send_pending(&io).await.is_ok() {
                transport.wants_send().await;
            }
            std::future::pending().await
        };
        let _ = result.send(futures_lite::future::or(receiver, sender).await);
    });
    theirs.set_write_timeout(Some(Duration::from_secs(3))).unwrap();
    let library = Library::new(SslVersion::TLS1_2);
    let mut client = library.client(&theirs);
    client.do_handshake().unwrap();
    let mut sealer = library.sealer(client.ssl());
    // Each is answered with an alert.
    let mut flood = || (0..100).flat_map(|_| sealer.seal(HANDSHAKE, &hello())).collect::<Vec<u8>>();
    let mut floods = 0;
    while floods < 2000 && (&theirs).write_all(&flood()).is_ok() {
        floods += 1;
    }
    assert!(floods < 2000, "the server reads on, although its replies are not read");
    drop(client);
    drop(theirs);
    let end = received.recv_timeout(HANG).expect("receiving did not end");
    assert!(!matches!(end, Ok(1..)), "{end:?}");
}
