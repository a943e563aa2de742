//! The test store loses data as disks and kernels do, and reports losses as they do.
#![cfg(feature = "test-store")]
#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebb_block::{BlockStore, ErrorKind, Operation, Resize};
use ebb_io::{Io, Worker};
use ebb_store::{Faults, Store, TestStore};

const SIZE: u64 = 1 << 20;

fn play<Fut: Future<Output = ()> + 'static>(
    seed: u64,
    act: impl FnOnce(Io, Arc<TestStore>, Arc<Store>) -> Fut + Send + 'static,
) {
    let worker = Worker::start_alone("faulty").unwrap();
    let test = Arc::new(TestStore::new(SIZE, seed));
    let store = Arc::new(Store::Test(test.clone()));
    let done = worker.handle().block_on(move |io| act(io, test, store));
    assert!(done.is_some(), "it panicked; see above");
}

async fn write(io: &Io, store: &Store, offset: u64, length: usize, byte: u8, fua: bool) -> bool {
    let mut buf = io.pool().get_for_test(length);
    buf.fill(byte);
    store.write(io, buf, offset, fua).await.0.is_ok()
}

fn sectors_with(bytes: &[u8], byte: u8) -> usize {
    bytes.chunks(512).filter(|sector| sector.iter().all(|b| *b == byte)).count()
}

#[test]
fn a_failed_flush_loses_any_subset() {
    let mut kept = std::collections::BTreeSet::new();
    for seed in 0..60 {
        let (sender, receiver) = std::sync::mpsc::channel();
        play(seed, move |io, test, store| async move {
            assert!(write(&io, &store, 0, 8192, 1, false).await);
            test.lose();
            test.evict();
            let content = test.content();
            assert_eq!(content, test.stable_bytes());
            let lost = test.lost_sectors().len();
            let there = sectors_with(&content[..8192], 1);
            assert_eq!(lost + there, 16);
            assert!(store.flush(&io).await.is_err(), "the loss is reported");
            assert_eq!(test.stable_bytes(), content, "and nothing more becomes stable");
            sender.send(there).unwrap();
        });
        kept.insert(receiver.recv().unwrap());
    }
    assert!(kept.contains(&0) && kept.contains(&16) && kept.len() > 6, "{kept:?}");
}

#[test]
fn what_is_flushed_survives_the_power_and_what_is_not_may() {
    let kept = Arc::new(std::sync::Mutex::new(Vec::new()));
    for seed in 0..20 {
        let kept = kept.clone();
        play(seed, move |io, test, store| async move {
            assert!(write(&io, &store, 0, 65536, 1, false).await);
            assert!(store.flush(&io).await.is_ok());
            assert!(write(&io, &store, 32768, 65536, 2, false).await);
            assert!(write(&io, &store, 1 << 17, 4096, 3, true).await);
            let next = test.reboot();
            let content = next.content();
            assert_eq!(sectors_with(&content[..32768], 1), 64);
            assert_eq!(sectors_with(&content[1 << 17..(1 << 17) + 4096], 3), 8);
            kept.lock().unwrap().push(sectors_with(&content[32768..98304], 2));
        });
    }
    let kept = kept.lock().unwrap();
    assert!(kept.iter().any(|new| *new > 0 && *new < 128), "{kept:?} of 128");
}

#[test]
fn requests_hang_until_they_are_released_or_dropped() {
    play(4, |io, test, store| async move {
        test.hang();
        let (late, other) = (io.clone(), store.clone());
        let task = io.spawn(async move { write(&late, &other, 0, 4096, 1, false).await });
        let buf = io.pool().get_for_test(512);
        let given_up = io.timeout(Duration::from_millis(5), store.read(&io, buf, 0)).await;
        assert!(given_up.is_none());
        assert_eq!(test.hanging(), 1, "a dropped request does not hang");
        test.power_cut();
        test.release();
        assert!(!task.await, "a request succeeded although the power failed");
        assert_eq!(sectors_with(&test.content(), 0), 2048);
        test.hang_only(&[Operation::Flush]);
        assert!(write(&io, &store, 0, 4096, 1, false).await);
        let (late, other) = (io.clone(), store.clone());
        let task = io.spawn(async move { other.flush(&late).await.is_ok() });
        while test.hanging() == 0 {
            io.yield_now().await;
        }
        test.release();
        assert!(task.await);
        test.faults(&Faults { hangs: 1000, late: 500, late_us: 100, ..Faults::default() });
        let (late, other) = (io.clone(), store.clone());
        let task = io.spawn(async move { write(&late, &other, 0, 4096, 2, false).await });
        while test.hanging() == 0 {
            io.yield_now().await;
        }
        test.release();
        assert!(task.await);
    });
}

#[test]
fn a_full_store_says_so_and_has_room_again() {
    play(5, |io, test, store| async move {
        test.set_room(Some(4096));
        assert!(write(&io, &store, 0, 4096, 1, false).await);
        let buf = io.pool().get_for_test(512);
        let error = store.write(&io, buf, 8192, false).await.0.unwrap_err();
        assert_eq!(error.kind, ebb_block::ErrorKind::NoSpace);
        test.set_room(None);
        assert!(write(&io, &store, 8192, 512, 1, false).await);
        assert_eq!(test.writes.load(Ordering::Relaxed), 3);
        let order = Resize { to: Some(SIZE / 2), shrink: true };
        assert_eq!(store.resize(&io, order).await.unwrap(), SIZE / 2);
        assert!(!write(&io, &store, SIZE / 2, 512, 1, false).await);
        let order = Resize { to: Some(SIZE), shrink: false };
        assert_eq!(store.resize(&io, order).await.unwrap(), SIZE);
        assert!(write(&io, &store, SIZE / 2, 512, 1, false).await);
    });
}

#[test]
fn no_flush_succeeds_after_a_failed_one() {
    play(6, |io, test, store| async move {
        assert!(write(&io, &store, 0, 65536, 1, false).await);
        test.faults(&Faults { flushes: 1000, ..Faults::default() });
        let error = store.flush(&io).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Io);
        test.faults(&Faults::default());
        for _ in 0..3 {
            let error = store.flush(&io).await.unwrap_err();
            assert_eq!(error.kind, ErrorKind::Lost);
            assert!(error.to_string().contains("reopen the volume"), "{error}");
        }
        assert!(store.is_lost());
        assert_eq!(
            test.flushes.load(Ordering::Relaxed),
            1,
            "a flush was sent to the disk, where the kernel reports success"
        );
        // A write with FUA can report its own data as stable.
        assert!(write(&io, &store, 1 << 17, 4096, 2, true).await);
        assert_eq!(sectors_with(&test.stable_bytes(), 2), 8);
        // After all data was written again a flush succeeds.
        let seen = store.losses();
        assert!(write(&io, &store, 0, 65536, 1, false).await);
        store.flush_rewritten(&io, seen).await.unwrap();
        assert_eq!(sectors_with(&test.stable_bytes(), 1), 128);
        store.flush(&io).await.unwrap();
    });
}

#[test]
fn a_write_with_fua_that_reports_an_earlier_loss_counts_as_a_failed_flush() {
    play(7, |io, test, store| async move {
        assert!(write(&io, &store, 0, 65536, 1, false).await);
        test.lose();
        assert!(!write(&io, &store, 1 << 17, 4096, 2, true).await);
        let error = store.flush(&io).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Lost);
    });
}

#[test]
fn a_write_with_fua_that_finds_no_room_loses_nothing_unless_something_is_lost() {
    play(9, |io, test, store| async move {
        assert!(write(&io, &store, 0, 65536, 1, false).await);
        test.set_room(Some(0));
        assert!(!write(&io, &store, 1 << 17, 4096, 2, true).await);
        assert!(!store.is_lost());
        store.flush(&io).await.unwrap();
        assert_eq!(sectors_with(&test.stable_bytes(), 1), 128);
        // "No space" may report the loss of older data.
        test.set_room(None);
        assert!(write(&io, &store, 0, 65536, 3, false).await);
        test.faults(&Faults { told_as_full: true, ..Faults::default() });
        test.lose();
        assert!(!write(&io, &store, 1 << 17, 4096, 2, true).await);
        assert_eq!(store.flush(&io).await.unwrap_err().kind, ErrorKind::Lost);
    });
    play(10, |io, test, store| async move {
        assert!(write(&io, &store, 0, 65536, 1, false).await);
        test.faults(&Faults { told_as_full: true, ..Faults::default() });
        // A full store and a loss at the same time.
        test.set_room(Some(0));
        test.lose();
        assert!(!write(&io, &store, 1 << 17, 4096, 2, true).await);
        assert_eq!(store.flush(&io).await.unwrap_err().kind, ErrorKind::Lost);
    });
}

/// The kernel reports the error to only one of them; the success of the other ones is wrong.
#[test]
fn of_concurrent_flushes_none_succeeds_if_one_fails() {
    for seed in 0..50 {
        play(seed, |io, test, store| async move {
            assert!(write(&io, &store, 0, 65536, 1, false).await);
            test.waits.store(8, Ordering::Relaxed);
            test.faults(&Faults { flushes: 300, late: 500, late_us: 300, ..Faults::default() });
            let tasks: Vec<_> = (0..8)
                .map(|number| {
                    let (io_, store) = (io.clone(), store.clone());
                    io.spawn(async move {
                        match number % 2 {
                            0 => store.flush(&io_).await.is_ok(),
                            _ => write(&io_, &store, 1 << 18, 4096, 2, true).await,
                        }
                    })
                })
                .collect();
            let mut went_well = false;
            for (number, task) in tasks.into_iter().enumerate() {
                went_well |= task.await && number % 2 == 0;
            }
            if went_well {
                assert_eq!(sectors_with(&test.stable_bytes()[..65536], 1), 128);
            }
        });
    }
}

#[test]
fn a_cancelled_flush_counts_as_a_loss() {
    play(8, |io, test, store| async move {
        assert!(write(&io, &store, 0, 4096, 1, false).await);
        test.hang();
        assert!(io.timeout(Duration::from_millis(5), store.flush(&io)).await.is_none());
        test.release();
        assert_eq!(store.flush(&io).await.unwrap_err().kind, ErrorKind::Lost);
    });
}

/// Its result, and the number of polls it took.
async fn polls<T>(future: impl Future<Output = T>) -> (T, u64) {
    let (mut future, mut count) = (std::pin::pin!(future), 0);
    std::future::poll_fn(|cx| {
        count += 1;
        future.as_mut().poll(cx).map(|result| (result, count))
    })
    .await
}

/// Releases all requests that hang, also those that begin to hang meanwhile.
async fn release_all(io: &Io, test: &TestStore, mut done: impl FnMut() -> bool) {
    while !done() {
        test.release();
        io.yield_now().await;
    }
}

const MANY: u64 = 2000;

#[test]
fn flushes_that_arrive_together_are_merged() {
    play(11, |io, test, store| async move {
        assert!(write(&io, &store, 0, 4096, 1, false).await);
        test.hang_only(&[Operation::Flush]);
        let flush = |byte: u8| {
            let (own, store) = (io.clone(), store.clone());
            io.spawn(async move {
                // Acknowledged before the flush is submitted.
                assert!(write(&own, &store, 65536, 512, byte, false).await);
                polls(store.flush(&own)).await
            })
        };
        let first = flush(2);
        while test.hanging() == 0 {
            io.yield_now().await;
        }
        let later: Vec<_> = (0..MANY).map(|_| flush(3)).collect();
        while test.writes.load(Ordering::Relaxed) < MANY + 2 {
            io.yield_now().await;
        }
        // Cancelled before they began: that is no loss.
        let (own, other) = (io.clone(), store.clone());
        let cancelled = io.spawn(async move { other.flush(&own).await });
        io.yield_now().await;
        drop(cancelled);
        assert!(!first.is_finished() && later.iter().all(|task| !task.is_finished()));
        assert_eq!(test.flushes.load(Ordering::Relaxed), 1, "other flushes wait for the next");
        test.release();
        let mut count = first.await.1;
        for task in later {
            let (result, polls) = task.await;
            result.unwrap();
            count += polls;
        }
        assert!(count <= 4 * MANY, "{count} polls for {MANY} flushes");
        assert_eq!(test.flushes.load(Ordering::Relaxed), 2);
        assert_eq!(sectors_with(&test.stable_bytes(), 3), 1, "each covers what came before it");
        assert_eq!(store.losses(), 0);
        store.flush(&io).await.unwrap();
        assert_eq!(test.flushes.load(Ordering::Relaxed), 3);
    });
}

/// If the flush in flight fails or is cancelled, all that have arrived since fail, without a
/// request to the disk.
#[test]
fn flushes_that_wait_fail_with_the_one_before_them() {
    for given_up in [false, true] {
        play(13, move |io, test, store| async move {
            assert!(write(&io, &store, 0, 4096, 1, false).await);
            test.hang_only(&[Operation::Flush]);
            let flush = || {
                let (own, store) = (io.clone(), store.clone());
                io.spawn(async move { store.flush(&own).await })
            };
            let first = flush();
            while test.hanging() == 0 {
                io.yield_now().await;
            }
            let later: Vec<_> = (0..50).map(|_| flush()).collect();
            io.yield_now().await;
            if given_up {
                drop(first);
            } else {
                test.lose();
                test.release();
                assert_eq!(first.await.unwrap_err().kind, ErrorKind::Io);
            }
            for task in later {
                let kind = task.await.unwrap_err().kind;
                assert_eq!(kind, if given_up { ErrorKind::Lost } else { ErrorKind::Io });
            }
            assert_eq!(test.flushes.load(Ordering::Relaxed), 1);
            assert_eq!(store.losses(), 1);
            assert_eq!(store.flush(&io).await.unwrap_err().kind, ErrorKind::Lost);
        });
    }
}

/// Waiting flushes are cancelled at any moment: another one continues in their place.
#[test]
fn a_flush_cancelled_while_it_waits_delays_no_other() {
    for seed in 0..40u64 {
        play(seed, move |io, test, store| async move {
            test.hang_only(&[Operation::Flush, Operation::Write]);
            let (own, other) = (io.clone(), store.clone());
            let fua = io.spawn(async move { write(&own, &other, 0, 512, 1, true).await });
            let mut tasks: Vec<_> = (0..8)
                .map(|_| {
                    let (own, store) = (io.clone(), store.clone());
                    io.spawn(async move { store.flush(&own).await.is_ok() })
                })
                .collect();
            while test.hanging() < 2 {
                io.yield_now().await;
            }
            // The first is in flight and is not cancelled.
            let mut random = seed;
            while tasks.len() > 3 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let number = 1 + usize::try_from(random >> 33).unwrap() % (tasks.len() - 1);
                drop(tasks.remove(number));
                if random & (1 << 20) > 0 {
                    test.release();
                    io.yield_now().await;
                    test.hang_only(&[Operation::Flush, Operation::Write]);
                }
            }
            let mut went = 0;
            let (own, released) = (io.clone(), test.clone());
            let done = std::rc::Rc::new(std::cell::Cell::new(false));
            let seen = done.clone();
            let releaser =
                io.spawn(async move { release_all(&own, &released, || seen.get()).await });
            for task in tasks {
                went += u64::from(task.await);
            }
            let _ = fua.await;
            done.set(true);
            releaser.await;
            // Cancelling one in flight is a loss; otherwise all succeed.
            assert!(went == 3 || store.losses() > 0, "{went}");
        });
    }
}
