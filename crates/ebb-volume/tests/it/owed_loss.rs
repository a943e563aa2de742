//! Losses that a store reports once: a client's flush fails for each, also after another flush did,
//! and so does a close that meets one.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use ebb_cache::{BaseLayers, Cache, CacheOptions, CachedStore, Delta, Layers};
use ebb_io::Worker;
use ebb_mem::{Memory, MemoryOptions};
use ebb_store::{Store, TestStore};
use ebb_volume::{Io, Mode, Resize, Volume, VolumeOptions, ZeroFlags};

const SIZE: u64 = 1 << 20;

fn volume(memory: &Arc<Memory>, mode: Mode) -> (Arc<Volume>, Arc<TestStore>) {
    volume_of(SIZE, memory, mode)
}

fn volume_of(size: u64, memory: &Arc<Memory>, mode: Mode) -> (Arc<Volume>, Arc<TestStore>) {
    let store = Arc::new(TestStore::new(size, 1));
    store.report_once();
    let cache = Cache::without_reclaimer(memory, CacheOptions::new(Instant::now()));
    let cached = CachedStore::new(&cache, "disk", Store::Test(store.clone()), mode).unwrap();
    (Volume::new("disk", cached, VolumeOptions::default()), store)
}

async fn write(volume: &Volume, io: &Io) {
    let mut buf = io.pool().take(4096).await;
    buf.fill(7);
    volume.write(io, buf, 0, false).await.0.unwrap();
}

/// The flush that met the loss still drops what is cached.
#[test]
fn a_flush_fails_while_another_one_returns_the_report_of_a_loss() {
    let memory = Memory::new(MemoryOptions::new(256 << 20, Instant::now())).unwrap();
    let worker = Worker::start("owed", &memory).unwrap();
    let (volume, store) = volume_of(128 << 20, &memory, Mode::Writethrough);
    let done = worker.handle().block_on(move |io| async move {
        let client = volume.told_losses();
        for is_given_up in [false, true] {
            for at in 0..128 {
                let buf = io.pool().take(1 << 20).await;
                volume.write(&io, buf, at << 20, false).await.0.unwrap();
            }
            store.lose();
            let mut first = Box::pin(volume.flush_unasked(&io));
            let polled = poll_fn(|cx| Poll::Ready(first.as_mut().poll(cx))).await;
            assert!(polled.is_pending());
            if is_given_up {
                drop(first);
                volume.flush_for(&io, &client).await.unwrap_err();
            } else {
                volume.flush_for(&io, &client).await.unwrap_err();
                first.await.unwrap_err();
            }
            volume.flush_for(&io, &client).await.unwrap();
        }
    });
    done.unwrap();
}

/// Carries out `test` with a volume in each mode without writeback, whose store has lost a write.
fn with_loss<F: AsyncFnOnce(Io, Arc<Volume>) + Copy + Send + 'static>(test: F) {
    for mode in [Mode::None, Mode::Writethrough] {
        let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
        let worker = Worker::start("owed", &memory).unwrap();
        let (volume, store) = volume(&memory, mode);
        let done = worker.handle().block_on(move |io| async move {
            write(&volume, &io).await;
            store.lose();
            test(io, volume).await;
        });
        done.unwrap();
    }
}

#[test]
fn a_close_that_is_told_of_a_loss_fails_each_time() {
    with_loss(async |io, volume| {
        for _ in 0..3 {
            volume.close(&io).await.unwrap_err();
            assert!(volume.is_lost() && !volume.is_stable());
        }
    });
}

#[test]
fn a_client_is_told_of_a_loss_that_others_were_told_of() {
    with_loss(async |io, volume| {
        for _ in 0..3 {
            let error = volume.flush_unasked(&io).await.unwrap_err().full_text();
            assert_eq!(error.matches("flush").count(), 1, "{error}");
            assert!(volume.owes_loss());
        }
        assert!(!volume.is_lost());
        volume.flush(&io).await.unwrap_err();
        assert!(!volume.owes_loss());
        volume.flush(&io).await.unwrap();
        volume.flush_unasked(&io).await.unwrap();
        volume.close(&io).await.unwrap();
    });
}

#[test]
fn a_close_fails_for_a_loss_that_no_client_was_told_of() {
    with_loss(async |io, volume| {
        volume.flush_unasked(&io).await.unwrap_err();
        volume.close(&io).await.unwrap_err();
        assert!(volume.is_lost());
    });
}

#[test]
fn a_client_that_was_told_of_a_loss_is_told_once() {
    with_loss(async |io, volume| {
        volume.flush(&io).await.unwrap_err();
        volume.flush(&io).await.unwrap();
        volume.close(&io).await.unwrap();
    });
}

/// The error of such a request says nothing of earlier writes.
#[test]
fn a_change_with_fua_that_meets_a_loss_leaves_it_to_a_flush() {
    with_loss(async |io, volume| {
        volume.discard(&io, 4096, 4096, true).await.unwrap_err();
        volume.flush(&io).await.unwrap_err();
        volume.flush(&io).await.unwrap();
    });
    with_loss(async |io, volume| {
        let flags = ZeroFlags::default();
        volume.write_zeroes(&io, 4096, 4096, flags, true).await.unwrap_err();
        volume.flush(&io).await.unwrap_err();
        volume.flush(&io).await.unwrap();
    });
    with_loss(async |io, volume| {
        let mut buf = io.pool().take(4096).await;
        buf.fill(8);
        volume.write(&io, buf, 4096, true).await.0.unwrap_err();
        volume.flush(&io).await.unwrap_err();
        volume.flush(&io).await.unwrap();
    });
}

/// Carries out `test` with an overlay whose blocks 0 and 1 are held and stable, and the store of
/// its delta.
fn with_overlay<F>(test: F)
where
    F: AsyncFnOnce(Io, Arc<Volume>, Arc<TestStore>) + Copy + Send + 'static,
{
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let worker = Worker::start("owed", &memory).unwrap();
    let cache = Cache::without_reclaimer(&memory, CacheOptions::new(Instant::now()));
    let done = worker.handle().block_on(move |io| async move {
        let bases = BaseLayers::new(&cache);
        let base = Store::Test(Arc::new(TestStore::new(SIZE, 1)));
        let base = bases.add("base", base, Mode::Writethrough).unwrap();
        let store = Arc::new(TestStore::new(4 * SIZE, 1));
        let top = CachedStore::new(&cache, "disk", Store::Test(store.clone()), Mode::Writethrough)
            .unwrap();
        let parent = base.as_parent(&io).await.unwrap();
        let delta = Arc::new(Delta::create(&io, &top, SIZE, parent, [9; 16]).await.unwrap());
        let layers = Layers::overlay("disk", top, vec![base], vec![delta], false).unwrap();
        let volume = Volume::new("disk", layers, VolumeOptions::default());
        write(&volume, &io).await;
        let mut buf = io.pool().take(4096).await;
        buf.fill(7);
        volume.write(&io, buf, 4096, true).await.0.unwrap();
        write(&volume, &io).await;
        test(io, volume, store).await;
    });
    done.unwrap();
}

#[test]
fn an_overlay_leaves_a_loss_that_others_met_to_a_flush() {
    with_overlay(async |io, volume, store| {
        store.report_once();
        store.lose();
        let mut buf = io.pool().take(4096).await;
        buf.fill(8);
        volume.write(&io, buf, 4096, true).await.0.unwrap_err();
        volume.flush(&io).await.unwrap_err();
        volume.flush(&io).await.unwrap();
    });
    with_overlay(async |io, volume, store| {
        store.report_once();
        store.lose();
        let detach = volume.layers().detach(&io, "disk", Duration::from_secs(60));
        volume.exchange_layers(&io, detach).await.unwrap_err();
        volume.flush(&io).await.unwrap_err();
        volume.flush(&io).await.unwrap();
    });
    with_overlay(async |io, volume, store| {
        store.report_once();
        store.lose();
        let order = Resize { to: Some(SIZE / 2), shrink: true };
        volume.resize(&io, order).await.unwrap_err();
        volume.flush(&io).await.unwrap_err();
    });
}

/// The data is there, and a later flush covers it.
#[test]
fn a_resize_that_only_got_no_reply_leaves_no_loss() {
    with_overlay(async |io, volume, store| {
        store.silent.store(true, Ordering::SeqCst);
        let order = Resize { to: Some(SIZE / 2), shrink: true };
        volume.resize(&io, order).await.unwrap_err();
        store.silent.store(false, Ordering::SeqCst);
        volume.flush(&io).await.unwrap();
    });
}

/// A store that reports lost writes does so to one opening.
#[test]
fn a_close_without_a_reply_leaves_a_loss_to_no_other_opening() {
    with_loss(async |io, volume| {
        volume.flush(&io).await.unwrap_err();
        volume.flush(&io).await.unwrap();
        assert!(volume.may_hide_loss());
    });
    with_overlay(async |io, volume, store| {
        for reports in [false, true] {
            store.silent.store(true, Ordering::SeqCst);
            let error = volume.flush(&io).await.unwrap_err();
            assert_eq!(volume.leaves_no_loss(&error), !reports);
            store.silent.store(false, Ordering::SeqCst);
            store.report_once();
        }
    });
}

#[test]
fn each_client_is_told_of_a_loss_once() {
    with_loss(async |io, volume| {
        let clients = [volume.told_losses(), volume.told_losses()];
        for client in &clients {
            assert!(volume.flush_for(&io, client).await.is_err());
        }
        // It has connected since.
        let third = volume.told_losses();
        for client in clients.iter().chain([&third]) {
            volume.flush_for(&io, client).await.unwrap();
            assert!(!volume.owes_loss_to(client));
        }
        volume.close(&io).await.unwrap();
    });
}

/// A client whose flush was only not answered repeats it, or its next daemon does.
#[test]
fn a_loss_stays_owed_where_a_clients_flush_got_no_reply() {
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let worker = Worker::start("owed", &memory).unwrap();
    let (volume, store) = volume(&memory, Mode::None);
    let done = worker.handle().block_on(move |io| async move {
        let client = volume.told_losses();
        write(&volume, &io).await;
        store.lose();
        volume.flush_unasked(&io).await.unwrap_err();
        assert!(volume.owes_loss_to(&client));
        store.silent.store(true, Ordering::SeqCst);
        let error = volume.flush_for(&io, &client).await.unwrap_err();
        assert!(!volume.may_report_loss(&error), "it may be repeated");
        store.silent.store(false, Ordering::SeqCst);
        assert!(volume.owes_loss_to(&client), "it does not know of the loss");
        volume.flush_for(&io, &client).await.unwrap_err();
    });
    done.unwrap();
}

/// A snapshot asks for it before anything else.
#[test]
fn a_loss_that_the_header_of_an_overlay_has_met_is_left_to_a_flush() {
    with_overlay(async |io, volume, store| {
        volume.flush(&io).await.unwrap();
        store.write_faults.store(1000, Ordering::SeqCst);
        let detach = volume.layers().detach(&io, "disk", Duration::from_secs(60));
        volume.exchange_layers(&io, detach).await.unwrap_err();
        store.write_faults.store(0, Ordering::SeqCst);
        write(&volume, &io).await;
        store.report_once();
        store.lose();
        let parent = volume.layers().top_as_parent(&io);
        volume.exchange_layers(&io, parent).await.unwrap_err();
        volume.flush(&io).await.unwrap_err();
    });
}
