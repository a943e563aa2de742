//! What a remote store says of changes that the server may have lost, and of requests while it does not reply.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;
use crate::fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use common::{Bench, MIB};
use ebb_block::{BlockStore, ErrorKind, Tracked};
use ebb_io::Worker;
use ebb_store::{LostWrites, NbdAddress, NbdOptions, NbdStore, Store};
use fake::{Act, FLUSH, Fake, MANY_CONNECTIONS, ONE_CONNECTION, READ, WRITE};

const BLOCK: usize = 4096;
const EIO: u32 = 5;
const ENOSPC: u32 = 28;
/// Flags of a server without FUA: a write with FUA is followed by a flush.
const WITHOUT_FUA: u16 = ONE_CONNECTION & !8;

fn options(fake: &Fake) -> NbdOptions {
    NbdOptions::new(NbdAddress::Unix(fake.socket().into()), "")
}

/// A server that closes its first connection with a write unflushed when `ended` is set, and replies to the next flush
/// with EIO, once.
fn forgetful(flags: u16) -> (Fake, Arc<AtomicBool>) {
    let ended = Arc::new(AtomicBool::new(false));
    let (flag, failed) = (ended.clone(), AtomicBool::new(false));
    let fake = Fake::start(MIB, flags, move |request| {
        if flag.swap(false, Ordering::SeqCst) {
            return Act::HangUp;
        }
        let first = request.connection > 0 && request.command == FLUSH;
        match first && !failed.swap(true, Ordering::SeqCst) {
            true => Act::Error(EIO),
            false => Act::Good(7),
        }
    });
    (fake, ended)
}

/// It needs a helper thread, of which all may wait for something else.
#[test]
fn taking_the_first_connection_is_subject_to_the_time_limit() {
    let fake = Fake::start(MIB, ONE_CONNECTION, |_| Act::Good(7));
    let options = NbdOptions { reconnect: Duration::from_secs(1), ..options(&fake) };
    let bench = Bench::new(Store::Nbd(NbdStore::open(options).unwrap().0));
    let (failed, text) = bench.on(|io, store| async move {
        let (release, calls): (Vec<_>, Vec<_>) = (0..8)
            .map(|_| {
                let ((release, wait), own) = (channel::<()>(), io.clone());
                (release, io.spawn(async move { own.offload(move || wait.recv().is_err()).await }))
            })
            .unzip();
        io.yield_now().await;
        let limit = Duration::from_secs(30);
        let outcome = io.timeout(limit, store.read(&io, io.pool().take(BLOCK).await, 0)).await;
        drop(release);
        for call in calls {
            call.await;
        }
        (outcome.is_some(), outcome.map(|(result, _)| format!("{result:?}")))
    });
    assert!(failed, "the request waits for a helper thread");
    assert!(text.is_some_and(|text| text.contains("Err")));
    assert_eq!(bench.read(0, BLOCK).unwrap(), [7; BLOCK]);
}

#[test]
fn request_without_a_server_is_not_counted_as_sent_again() {
    let fake = Fake::start(MIB, ONE_CONNECTION, |request| match request.command {
        WRITE => Act::HangUp,
        _ => Act::Good(7),
    });
    let options = NbdOptions { reconnect: Duration::from_secs(1), ..options(&fake) };
    let bench = Bench::new(Store::Nbd(NbdStore::open(options).unwrap().0));
    bench.read(0, BLOCK).unwrap();
    // The connection is lost with the write, and no other one can be made.
    fake.mute();
    bench.write(0, &[7; BLOCK]).unwrap_err();
    let Store::Nbd(store) = bench.store() else { unreachable!("it is a remote store") };
    let state = store.state();
    assert_eq!((state.lost, state.reconnects, state.replayed), (1, 0, 0));
}

/// A disk may report an error to one flush only: the flush that follows a reconnect must not use it up.
#[test]
fn an_error_of_the_flush_after_a_reconnect_lasts_as_any_flush_error() {
    let (fake, ended) = forgetful(ONE_CONNECTION);
    let store = Tracked(Store::Nbd(NbdStore::open(options(&fake)).unwrap().0));
    let worker = Worker::start_alone("w").unwrap();
    let all = worker.handle().block_on(move |io| async move {
        store.write(&io, io.pool().take(BLOCK).await, 0, false).await.0.unwrap();
        ended.store(true, Ordering::SeqCst);
        store.read(&io, io.pool().take(BLOCK).await, 0).await.0.unwrap();
        let error = store.flush(&io).await.unwrap_err();
        assert!(
            error.source.as_ref().is_some_and(|why| why.to_string().contains("after reconnecting"))
        );
        for _ in 0..3 {
            let error = store.flush(&io).await.unwrap_err();
            assert_eq!(error.kind, ErrorKind::Lost, "{error:?}");
        }
    });
    all.expect("see the panic above");
}

#[test]
fn a_write_with_fua_does_not_take_the_error_that_a_flush_is_to_report() {
    let (fake, ended) = forgetful(WITHOUT_FUA);
    let bench = Bench::new(Store::Nbd(NbdStore::open(options(&fake)).unwrap().0));
    bench.write(0, &[7; BLOCK]).unwrap();
    ended.store(true, Ordering::SeqCst);
    bench.read(0, BLOCK).unwrap();
    let write = bench.on(|io, store| async move {
        let buf = io.pool().take(BLOCK).await;
        store.write(&io, buf, 8192, true).await.0
    });
    write.expect("its own data is stable");
    assert!(bench.flush().is_err(), "the loss was forgotten");
}

/// A write is sent without FUA and then flushed: a server that fails the write has lost nothing
/// that was acknowledged.
#[test]
fn a_failed_fua_write_leaves_later_flushes_alone() {
    for (flags, error) in [(ONE_CONNECTION, EIO), (MANY_CONNECTIONS, ENOSPC), (WITHOUT_FUA, EIO)] {
        let full = Arc::new(AtomicBool::new(true));
        let flag = full.clone();
        let fake = Fake::start(MIB, flags, move |request| {
            match request.command == WRITE && request.offset > 0 && flag.load(Ordering::SeqCst) {
                true => Act::Error(error),
                false => Act::Good(7),
            }
        });
        let bench = Bench::new(Store::Nbd(NbdStore::open(options(&fake)).unwrap().0));
        let write = |offset| {
            bench.on(move |io, store| async move {
                let buf = io.pool().take(BLOCK).await;
                store.write(&io, buf, offset, true).await.0
            })
        };
        write(0).unwrap();
        assert_eq!(fake.count(FLUSH), 1, "the write is not stable");
        write(8192).unwrap_err();
        bench.flush().expect("nothing that was acknowledged is lost");
        full.store(false, Ordering::SeqCst);
        write(8192).unwrap();
        bench.flush().unwrap();
        assert!(fake.requests().iter().all(|request| request.flags == 0), "a write with FUA");
    }
}

/// Without the flag the write would not be stable, and no flush could follow it.
#[test]
fn server_without_flush_gets_the_fua_flag() {
    let fake = Fake::start(MIB, ONE_CONNECTION & !4, |_| Act::Good(7));
    let bench = Bench::new(Store::Nbd(NbdStore::open(options(&fake)).unwrap().0));
    let write = bench.on(|io, store| async move {
        let buf = io.pool().take(BLOCK).await;
        store.write(&io, buf, 0, true).await.0
    });
    write.unwrap();
    let writes = fake.requests().into_iter().filter(|request| request.command == WRITE);
    assert_eq!(writes.map(|request| request.flags).collect::<Vec<_>>(), [1]);
    assert_eq!(fake.count(FLUSH), 0);
}

/// The flush of a write with FUA covers all data: its failure is a loss as of any flush.
#[test]
fn a_failed_flush_of_a_fua_write_is_a_loss() {
    let failed = AtomicBool::new(false);
    let fake = Fake::start(MIB, ONE_CONNECTION, move |request| {
        match request.command == FLUSH && !failed.swap(true, Ordering::SeqCst) {
            true => Act::Error(ENOSPC),
            false => Act::Good(7),
        }
    });
    let bench = Bench::new(Store::Nbd(NbdStore::open(options(&fake)).unwrap().0));
    let write = bench.on(|io, store| async move {
        let buf = io.pool().take(BLOCK).await;
        store.write(&io, buf, 0, true).await.0
    });
    assert_eq!(write.unwrap_err().kind, ErrorKind::NoSpace);
    assert_eq!(bench.flush().unwrap_err().kind, ErrorKind::Lost);
}

/// More requests than a connection has slots, and a server that replies to nothing: they all fail when the time is over,
/// not those with a slot first, the next ones after that time again, and so on. Connections are counted, not seconds.
#[test]
fn requests_that_wait_for_a_slot_fail_with_those_that_have_one() {
    let silent = Arc::new(AtomicBool::new(false));
    let flag = silent.clone();
    let fake = Fake::start(MIB, ONE_CONNECTION, move |_| match flag.load(Ordering::SeqCst) {
        true => Act::Silence,
        false => Act::Good(7),
    });
    // Longer than a connection must last to be counted as a success.
    let limits = NbdOptions {
        silence: Some(Duration::from_secs(6)),
        reconnect: Duration::from_secs(5),
        ..options(&fake)
    };
    let store = Arc::new(Store::Nbd(NbdStore::open(limits).unwrap().0));
    let worker = Worker::start_alone("w").unwrap();
    let (sender, outcomes) = channel();
    let own = store.clone();
    worker.handle().block_on(move |io| async move {
        own.write(&io, io.pool().take(BLOCK).await, 0, false).await.0.unwrap();
    });
    silent.store(true, Ordering::SeqCst);
    let connections = Arc::new(AtomicUsize::new(0));
    let own = store.clone();
    worker.handle().spawn(move |io| async move {
        for _ in 0..600 {
            let (own_io, own, sender) = (io.clone(), own.clone(), sender.clone());
            let read = async move {
                let buf = own_io.pool().take(512).await;
                let _ = sender.send(own.read(&own_io, buf, 0).await.0);
            };
            io.spawn(read).detach();
        }
    });
    for number in 0..600 {
        let result = outcomes.recv_timeout(Duration::from_secs(90));
        result.unwrap_or_else(|error| panic!("{number}: {error}")).unwrap_err();
        if number == 0 {
            connections.store(fake.accepted(), Ordering::SeqCst);
        }
    }
    // All other ones fail before the next connection is silent for its time.
    let later = fake.accepted() - connections.load(Ordering::SeqCst);
    assert!(later <= 1, "{later} connections later");
}

/// Chunks that are not the last one of a reply and have no data are no reply.
#[test]
fn a_server_that_never_completes_a_reply_counts_as_silent() {
    let broken = Arc::new(AtomicBool::new(false));
    let flag = broken.clone();
    let fake = Fake::start(MIB, MANY_CONNECTIONS, move |request| {
        match flag.load(Ordering::SeqCst) && request.command == READ {
            true => Act::Unfinished,
            false => Act::Good(7),
        }
    });
    let limits = NbdOptions {
        silence: Some(Duration::from_secs(2)),
        reconnect: Duration::from_secs(1),
        ..options(&fake)
    };
    let bench = Bench::new(Store::Nbd(NbdStore::open(limits).unwrap().0));
    bench.read(0, BLOCK).unwrap();
    broken.store(true, Ordering::SeqCst);
    let (sender, outcome) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| sender.send(bench.read(0, BLOCK)).unwrap());
        let result = outcome.recv_timeout(Duration::from_secs(60));
        fake.close();
        result.expect("the read fails in time").unwrap_err();
    });
}

/// A server's host that restarts does not close its connections: a flush of one worker would succeed on a new
/// connection, while another worker's writes were lost with the old one.
#[test]
fn lost_writes_are_reported_by_the_connection_that_all_workers_use() {
    for (lost_writes, connections) in [(LostWrites::Flush, 2), (LostWrites::Report, 1)] {
        let fake = Fake::start(MIB, MANY_CONNECTIONS, |_| Act::Good(7));
        let limits = NbdOptions { lost_writes, ..options(&fake) };
        let store = Arc::new(Store::Nbd(NbdStore::open(limits).unwrap().0));
        let workers = ["a", "b"].map(|name| Worker::start_alone(name).unwrap());
        for worker in &workers {
            let own = store.clone();
            let write = worker.handle().block_on(move |io| async move {
                own.write(&io, io.pool().take(BLOCK).await, 0, false).await.0
            });
            write.expect("the worker runs").unwrap();
        }
        // The first one read the properties of the export.
        assert_eq!(fake.accepted() - 1, connections, "{lost_writes:?}");
    }
}
