//! A peer that sends thousands of records at once: the worker serves other tasks in between.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ebb_io::{Worker, fd_from};
use ebb_tls::{ServerTls, Transport};
use openssl::ssl::SslVersion;
use sealer::{DATA, Library, Sealer};

use crate::sealer;

/// The time after which a test reports a hang.
const HANG: Duration = Duration::from_secs(180);
/// Records of one flood: fewer bytes than the server receives at a time.
const RECORDS: usize = 1000;

/// Sends `RECORDS` records that `say` makes, and one of two bytes, at once; returns how many iterations the loop of
/// the worker, which then serves its other tasks and completions, did while the server received them.
fn iterations_in_between(say: fn(&mut Sealer) -> Vec<u8>) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, sealer::KEY_LINE).unwrap();
    let session = ServerTls::from_psk(&keys).unwrap().session().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let worker = Worker::start_alone("tls-test").unwrap();
    let (sent, all_sent) = std::sync::mpsc::channel::<()>();
    let (result, turns) = std::sync::mpsc::channel();
    worker.handle().spawn(move |io| async move {
        let mut transport = Transport::new(fd_from(ours), None);
        transport.start_tls(&io, session, 1).await.unwrap();
        let received = io.offload(move || all_sent.recv()).await;
        received.unwrap();
        let receiver = async {
            loop {
                let buf = io.pool().take(4096).await;
                match transport.recv(&io, buf, 0..4096).await.0.unwrap() {
                    0 => panic!("the stream ended"),
                    1 => {}
                    _ => return,
                }
            }
        };
        let mut turns = 0;
        let neighbour = async {
            loop {
                io.next_iteration().await;
                turns += 1;
            }
        };
        futures_lite::future::or(receiver, neighbour).await;
        result.send(turns).unwrap();
    });
    theirs.set_read_timeout(Some(HANG)).unwrap();
    theirs.set_write_timeout(Some(HANG)).unwrap();
    let library = Library::new(SslVersion::TLS1_3);
    let mut client = library.client(&theirs);
    client.do_handshake().unwrap();
    let mut sealer = library.sealer(client.ssl());
    let mut flood: Vec<u8> = (0..RECORDS).flat_map(|_| say(&mut sealer)).collect();
    flood.extend(sealer.seal(DATA, &[7; 2]));
    assert!(flood.len() < 32 << 10, "{} bytes: more than one read of the socket", flood.len());
    (&theirs).write_all(&flood).unwrap();
    sent.send(()).unwrap();
    turns.recv_timeout(HANG).expect("the server does not receive")
}

#[test]
fn a_flood_of_records_lets_other_tasks_run_in_between() {
    let updates = iterations_in_between(|sealer| sealer.update(false));
    let bytes = iterations_in_between(|sealer| sealer.seal(DATA, &[7]));
    println!("iterations: {updates} with key updates, {bytes} with records of 1 byte");
    assert!(updates >= RECORDS / 8, "{updates} iterations while {RECORDS} key updates were read");
    assert!(
        bytes >= RECORDS / 64,
        "{bytes} iterations while {RECORDS} records of 1 byte were read"
    );
}
