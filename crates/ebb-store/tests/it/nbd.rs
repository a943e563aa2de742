//! The remote store with third-party servers: `nbdkit` with its filters, and `qemu-nbd`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;
use crate::server;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Bench, KIB, MIB};
use ebb_advice::full_text;
use ebb_block::{BlockError, BlockStore, ErrorKind};
use ebb_store::{LostWrites, NbdAddress, NbdOptions, NbdStore, Store};
use server::Server;

fn options(server: &Server) -> NbdOptions {
    NbdOptions::new(NbdAddress::Unix(server.socket().into()), "")
}

fn open(server: &Server) -> NbdStore {
    NbdStore::open(options(server)).unwrap().0
}

fn bench(server: &Server) -> Bench {
    Bench::new(Store::Nbd(open(server)))
}

fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|i| seed.wrapping_add(u8::try_from(i % 251).unwrap())).collect()
}

/// All operations of a store, compared with a byte array.
fn round_trip(bench: &Bench) {
    let size = usize::try_from(bench.store().size()).unwrap();
    let mut oracle = vec![0; size];
    for (number, (offset, length)) in
        [(0, 512), (512, 4096), (65536, 65536), (100 * 512, 512 * 77), (MIB, 3 << 20)]
            .into_iter()
            .enumerate()
    {
        let data = pattern(u8::try_from(number).unwrap(), length);
        bench.write(offset, &data).unwrap();
        let start = usize::try_from(offset).unwrap();
        oracle[start..start + length].copy_from_slice(&data);
    }
    bench.zero(2 * MIB + 512, 64 * KIB, true, false).unwrap();
    let start = (2 << 20) + 512;
    oracle[start..start + (64 << 10)].fill(0);
    bench.zero(3 * MIB, 8 * KIB, false, false).unwrap();
    oracle[3 << 20..(3 << 20) + (8 << 10)].fill(0);
    bench.flush().unwrap();
    for (offset, length) in [(0, size), (512, 512), (2 << 20, 70 << 10), (size - 512, 512)] {
        let read = bench.read(offset as u64, length).unwrap();
        assert!(read == oracle[offset..offset + length], "{length} at {offset}");
    }
    let mut at = 0;
    for (offset, length, hole) in bench.extents(0, size as u64, 10_000).unwrap() {
        assert_eq!(offset, at);
        at += length;
        let range = usize::try_from(offset).unwrap()..usize::try_from(at).unwrap();
        assert!(!hole || oracle[range].iter().all(|byte| *byte == 0));
    }
    assert_eq!(at, size as u64);
    bench.discard(MIB, MIB).unwrap();
    assert_eq!(bench.read(0, 4096).unwrap(), &oracle[..4096]);
}

#[test]
fn nbdkit_with_all_features() {
    let server = Server::nbdkit(&["memory", "8M"]);
    let bench = bench(&server);
    round_trip(&bench);
    let holes = bench.extents(4 * MIB, 4 * MIB, 10).unwrap();
    assert_eq!(holes, [(4 * MIB, 4 * MIB, true)], "block status reports holes");
}

#[test]
fn nbdkit_without_optional_features() {
    // No structured replies, no multi-connection, no FUA, no zeroes, no trim.
    let arguments =
        ["--no-sr", "--filter=nozero", "--filter=fua", "--filter=noextents", "memory", "8M"];
    let server = Server::nbdkit(&[&arguments[..], &["zeromode=none", "fuamode=discard"]].concat());
    let bench = bench(&server);
    round_trip(&bench);
    assert_eq!(bench.extents(0, 8 * MIB, 10).unwrap(), [(0, 8 * MIB, false)]);
    assert_eq!(bench.zero(0, 4096, true, true).unwrap_err().kind, ErrorKind::Unsupported);
}

#[test]
fn block_sizes_are_kept() {
    for minimum in ["512", "4096", "65536"] {
        let minimum = format!("blocksize-minimum={minimum}");
        let server = Server::nbdkit(&[
            "--filter=blocksize-policy",
            "memory",
            "8M",
            &minimum,
            "blocksize-maximum=128K",
            "blocksize-preferred=64K",
            "blocksize-error-policy=error",
        ]);
        round_trip(&bench(&server));
    }
}

#[test]
fn qemu_nbd_with_all_features() {
    let folder = common::folder();
    let image = common::file(&folder, "image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let server = Server::start(
        "qemu-nbd",
        &[
            "-k",
            "SOCKET",
            "-f",
            "raw",
            "--shared=8",
            "-t",
            "--discard=unmap",
            image.to_str().unwrap(),
        ],
    );
    round_trip(&bench(&server));
}

#[test]
fn errors_of_the_server_are_errors() {
    let server = Server::nbdkit(&[
        "--filter=error",
        "memory",
        "8M",
        "error-pread=ENOSPC",
        "error-pread-rate=100%",
        "error-pwrite=EIO",
        "error-pwrite-rate=100%",
    ]);
    let bench = bench(&server);
    assert_eq!(bench.read(0, 4096).unwrap_err().kind, ErrorKind::NoSpace);
    assert_eq!(bench.write(0, &[1; 4096]).unwrap_err().kind, ErrorKind::Io);
    bench.flush().unwrap();
}

#[test]
fn errors_now_and_then_never_give_wrong_bytes() {
    let server = Server::nbdkit(&["--filter=error", "pattern", "8M", "error-rate=20%"]);
    let mut options_used = options(&server);
    options_used.read_only = true;
    let bench = Bench::new(Store::Nbd(NbdStore::open(options_used).unwrap().0));
    let (mut good, mut bad) = (0, 0);
    for number in 0..200u64 {
        let offset = number * 512 % (8 << 20);
        match bench.read(offset, 4096) {
            Ok(data) => {
                good += 1;
                for (index, eight) in data.chunks(8).enumerate() {
                    let expected = (offset + index as u64 * 8).to_be_bytes();
                    assert_eq!(eight, expected);
                }
            }
            Err(_) => bad += 1,
        }
    }
    assert!(good > 50 && bad > 5, "{good} good, {bad} bad");
}

#[test]
fn requests_wait_for_a_slow_server() {
    let server = Server::nbdkit(&[
        "--filter=delay",
        "--filter=rate",
        "memory",
        "8M",
        "rdelay=20ms",
        "rate=400M",
    ]);
    let bench = bench(&server);
    let all = bench.on(|io, store| async move {
        let tasks: Vec<_> = (0..300u64)
            .map(|number| {
                let (own, store) = (io.clone(), store.clone());
                io.spawn(async move {
                    let buf = own.pool().take(4096).await;
                    store.read(&own, buf, number * 4096).await.0.is_ok()
                })
            })
            .collect();
        let mut good = 0;
        for task in tasks {
            good += u32::from(task.await);
        }
        good
    });
    assert_eq!(all, 300);
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(90);
    while !done() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// Writes and reads while the server restarts: no errors, and correct data.
fn survives(end: impl Fn(&mut Server) + Send + Clone + 'static) {
    let folder = common::folder();
    let image = common::file(&folder, "image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let mut server = Server::nbdkit(&["file", image.to_str().unwrap()]);
    let bench = Arc::new(Bench::new(Store::Nbd(open(&server))));
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let told = stop.clone();
    let user = bench.clone();
    let user = std::thread::spawn(move || {
        user.on(move |io, store| async move {
            let tasks: Vec<_> = (0..16u64)
                .map(|task| {
                    let (io_, store, stop) = (io.clone(), store.clone(), stop.clone());
                    io.spawn(async move {
                        let mut round = 0u8;
                        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                            round = round.wrapping_add(1);
                            let offset = task * (512 << 10) + u64::from(round % 16) * 32768;
                            let data = pattern(round ^ u8::try_from(task).unwrap(), 32768);
                            let mut buf = io_.pool().take(data.len()).await;
                            buf.copy_from_slice(&data);
                            let (result, mut buf) =
                                store.write(&io_, buf, offset, round.is_multiple_of(5)).await;
                            result.unwrap();
                            if round.is_multiple_of(7) {
                                store.flush(&io_).await.unwrap();
                            }
                            buf.fill(0xee);
                            let (result, buf) = store.read(&io_, buf, offset).await;
                            result.unwrap();
                            assert!(data == *buf, "task {task} round {round}");
                        }
                        u64::from(round)
                    })
                })
                .collect();
            let mut rounds = 0;
            for task in tasks {
                rounds += task.await;
            }
            rounds
        })
    });
    for round in 1..=4 {
        std::thread::park_timeout(Duration::from_millis(150));
        end(&mut server);
        std::thread::park_timeout(Duration::from_millis(50));
        server.restart();
        wait_for("the connection", || bench.store().state().unwrap().reconnects >= round);
    }
    std::thread::park_timeout(Duration::from_millis(150));
    told.store(true, std::sync::atomic::Ordering::Relaxed);
    let rounds = user.join().unwrap();
    bench.flush().unwrap();
    let state = bench.store().state().unwrap();
    assert!(rounds > 0 && state.reconnects >= 4, "{state:?}");
    assert_eq!((state.connections, state.in_flight, state.unflushed), (1, 0, 0), "{state:?}");
    drop((bench, server));
}

#[test]
fn a_killed_server_is_survived() {
    survives(Server::kill);
}

#[test]
fn a_server_that_shuts_down_is_survived() {
    survives(Server::terminate);
}

/// A server that shuts down waits for its clients: idle connections of other workers must not keep
/// it alive while the busy one waits for its successor.
#[test]
fn idle_connections_do_not_delay_a_server_that_shuts_down() {
    let folder = common::folder();
    let image = common::file(&folder, "image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let mut server = Server::nbdkit(&["file", image.to_str().unwrap()]);
    let store = Arc::new(Store::Nbd(open(&server)));
    let workers: Vec<_> =
        (0..4).map(|n| ebb_io::Worker::start_alone(&format!("w{n}")).unwrap()).collect();
    let ask_each = || {
        for worker in &workers {
            let store = store.clone();
            let read = worker.handle().block_on(move |io| async move {
                store.read(&io, io.pool().take(4096).await, 0).await.0.is_ok()
            });
            assert_eq!(read, Some(true));
        }
        assert_eq!(store.state().unwrap().connections, 4);
    };
    for round in 0..3 {
        ask_each();
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (told, own) = (stop.clone(), store.clone());
        let (sender, rounds) = std::sync::mpsc::channel();
        workers[0].handle().spawn(move |io| async move {
            let mut rounds = 0u64;
            let mut result = Ok(());
            while result.is_ok() && !told.load(std::sync::atomic::Ordering::Relaxed) {
                let buf = io.pool().take(4096).await;
                result = own.write(&io, buf, rounds % 64 * 4096, rounds.is_multiple_of(3)).await.0;
                rounds += 1;
            }
            let _ = sender.send(result.map(|()| rounds));
        });
        std::thread::park_timeout(Duration::from_millis(100));
        server.ask_to_end();
        // Some servers complete requests in flight first: for a moment both may run.
        let deadline = Instant::now() + Duration::from_secs(90);
        while !server.has_ended() {
            assert!(Instant::now() < deadline, "round {round}: idle connections keep the server");
            std::thread::park_timeout(Duration::from_millis(10));
        }
        server.restart();
        let before = store.state().unwrap().reconnects;
        wait_for("the connection", || store.state().unwrap().reconnects > before);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let rounds = rounds.recv_timeout(Duration::from_secs(90)).unwrap().unwrap();
        assert!(rounds > 0);
    }
}

#[test]
fn requests_fail_without_a_server_and_succeed_after_its_return() {
    let mut server = Server::nbdkit(&["memory", "8M"]);
    let mut options_used = options(&server);
    options_used.reconnect = Duration::from_millis(300);
    let bench = Bench::new(Store::Nbd(NbdStore::open(options_used).unwrap().0));
    bench.read(0, 512).unwrap();
    server.kill();
    let error = bench.read(0, 512).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Io);
    let cause = error.source.as_ref().unwrap().to_string();
    assert!(cause.contains("no reply") && cause.contains("0.3 s"), "{cause}");
    assert_eq!(bench.store().state().unwrap().connections, 0);
    assert!(bench.write(0, &[0; 512]).is_err(), "at once");
    server.restart();
    wait_for("the connection", || bench.read(0, 512).is_ok());
    // A smaller export is refused: requests were validated against the size.
    server.kill();
    server.change("8M", "4M");
    server.restart();
    // The limit may have expired before there was an attempt.
    let refused = |error: BlockError| {
        let cause = error.source.as_ref().unwrap().to_string();
        cause.contains("4194304 bytes instead of 8388608")
    };
    wait_for("the refusal", || refused(bench.read(0, 512).unwrap_err()));
}

#[test]
fn what_a_flush_after_a_reconnect_says() {
    for policy in [LostWrites::Flush, LostWrites::Report] {
        let mut server = Server::nbdkit(&["memory", "8M"]);
        let mut options_used = options(&server);
        options_used.lost_writes = policy;
        let bench = Bench::new(Store::Nbd(NbdStore::open(options_used).unwrap().0));
        bench.write(0, &[1; 512]).unwrap();
        bench.flush().unwrap();
        server.kill();
        server.restart();
        wait_for("the connection", || bench.store().state().unwrap().reconnects == 1);
        bench.flush().expect("all was flushed before the connection was lost");
        bench.write(0, &[1; 512]).unwrap();
        bench.write(512, &[1; 512]).unwrap();
        server.kill();
        server.restart();
        wait_for("the connection", || bench.store().state().unwrap().reconnects == 2);
        match policy {
            LostWrites::Flush => {
                let state = || bench.store().state().unwrap();
                wait_for("the flush of the new connection", || state().unflushed == 0);
                bench.flush().unwrap();
            }
            LostWrites::Report => {
                let error = bench.flush().unwrap_err();
                assert_eq!(error.kind, ErrorKind::Io);
                let cause = error.source.as_ref().unwrap().to_string();
                assert!(cause.contains("when 2 changes (numbers 2 to 3"), "{cause}");
                bench.flush().expect("the loss is reported once");
            }
        }
    }
}

#[test]
fn several_workers_use_their_own_connections_or_share_one() {
    for multi in ["multi-conn-mode=emulate", "multi-conn-mode=disable"] {
        let server = Server::nbdkit(&["--filter=multi-conn", "memory", "8M", multi]);
        let store = Arc::new(Store::Nbd(open(&server)));
        let workers: Vec<_> =
            (0..3).map(|n| ebb_io::Worker::start_alone(&format!("w{n}")).unwrap()).collect();
        for round in 0..20u64 {
            for (number, worker) in workers.iter().enumerate() {
                let (store, seed) = (store.clone(), u8::try_from(number).unwrap());
                let offset = (round * 3 + number as u64) * 8192;
                let done = worker.handle().block_on(move |io| async move {
                    let mut buf = io.pool().take(8192).await;
                    buf.copy_from_slice(&pattern(seed, 8192));
                    store.write(&io, buf, offset, false).await.0.unwrap();
                    store.flush(&io).await.unwrap();
                    store.extents(&io, 0, 8 << 20, 100).await.unwrap().len()
                });
                assert!(done.is_some());
            }
        }
        for (number, worker) in workers.iter().rev().enumerate() {
            let store = store.clone();
            let ok = worker.handle().block_on(move |io| async move {
                let mut good = true;
                for written in 0..60u64 {
                    let buf = io.pool().take(8192).await;
                    let (result, buf) = store.read(&io, buf, written * 8192).await;
                    result.unwrap();
                    good &= *buf == pattern(u8::try_from(written % 3).unwrap(), 8192);
                }
                good
            });
            assert_eq!(ok, Some(true), "{multi}, worker {number}");
        }
        let connections = store.state().unwrap().connections;
        assert_eq!(connections, if multi.ends_with("emulate") { 3 } else { 1 });
    }
}

#[test]
fn unusable_exports_are_refused_with_a_remedy() {
    let refused = |options: NbdOptions| full_text(&NbdStore::open(options).unwrap_err());
    let nowhere = NbdOptions::new(NbdAddress::Unix("/nonexistent/socket".into()), "");
    assert!(refused(nowhere).contains("is it running"));
    let server = Server::nbdkit(&["-r", "memory", "8M"]);
    assert!(refused(options(&server)).contains("read_only = true"));
    let server = Server::nbdkit(&["memory", "1000"]);
    assert!(refused(options(&server)).contains("multiple of 512"));
    let server = Server::nbdkit(&[
        "--filter=exportname",
        "memory",
        "8M",
        "exportname-strict=true",
        "exportname=a",
    ]);
    let mut other = options(&server);
    other.export = "b".to_owned();
    assert!(refused(other).contains("export `b`"));
}

/// A connected server that does not reply is reported, and disconnected after the configured time.
#[test]
fn a_silent_server_is_reported_and_disconnected_after_the_configured_time() {
    let server = Server::nbdkit(&["--filter=delay", "memory", "1M", "rdelay=3600"]);
    let limits = NbdOptions {
        silence: Some(Duration::from_secs(3)),
        reconnect: Duration::from_secs(1),
        ..options(&server)
    };
    let store = NbdStore::open(limits).unwrap().0;
    let bench = Bench::new(Store::Nbd(store));
    let state = || match bench.store() {
        Store::Nbd(store) => store.state(),
        _ => unreachable!("it is a remote store"),
    };
    bench.write(0, &pattern(1, 4096)).unwrap();
    assert_eq!(state().silent_seconds, 0, "it answers");
    let silent = std::thread::scope(|scope| {
        let read = scope.spawn(|| bench.read(0, 4096));
        let mut silent = 0;
        while !read.is_finished() {
            silent = silent.max(state().silent_seconds);
            std::thread::park_timeout(Duration::from_millis(50));
        }
        let error = read.join().unwrap().unwrap_err();
        assert_eq!(error.kind, ErrorKind::Io, "{error:?}");
        assert!(error.source.as_ref().is_some_and(|why| why.to_string().contains("no reply")));
        silent
    });
    assert!(silent >= 2, "silence was not reported");
    let state = state();
    let why = state.last_error.unwrap_or_default();
    assert!(why.contains("did not reply for") && why.contains("set a larger `silence`"), "{why}");
    assert!(state.is_reached, "it runs");
    // It still runs: later requests complete.
    bench.write(0, &pattern(2, 4096)).unwrap();
}
