//! The first flush of an overlay after it was opened: writes of an earlier daemon to the layers
//! below become stable with it.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use common::{Rig, index, on_a_worker, read};
use ebb_block::{BlockStore, ErrorKind, Operation};
use ebb_cache::{BaseLayers, CachedStore, Delta, Layers, Mode, plain_parent};
use ebb_image::{BLOCK, Layout};
use ebb_io::Io;
use ebb_store::{Faults, Store, TestStore};

const SIZE: u64 = 8 << 20;
const LIMIT: Duration = Duration::from_secs(30);

struct Chain {
    base: Arc<TestStore>,
    own: Arc<TestStore>,
    next: Arc<TestStore>,
}

impl Chain {
    fn new(seed: u64) -> Chain {
        let disk = |size, seed| Arc::new(TestStore::new(size, seed));
        let delta = Layout::new(SIZE).unwrap().store_size();
        Chain { base: disk(SIZE, seed), own: disk(delta, seed + 1), next: disk(delta, seed + 2) }
    }

    fn disks(&self) -> [&Arc<TestStore>; 3] {
        [&self.base, &self.own, &self.next]
    }
}

fn again(disk: &Arc<TestStore>) -> Store {
    Store::Test(Arc::new(disk.open_anew()))
}

fn top_on(rig: &Rig, disk: &Arc<TestStore>) -> CachedStore {
    CachedStore::new(&rig.cache, "top", again(disk), Mode::Writethrough).unwrap()
}

async fn put(io: &Io, layers: &Layers, block: u64, value: u8) {
    let mut buf = io.pool().take(index(BLOCK)).await;
    buf.fill(value);
    layers.write(io, buf, block * BLOCK, false).await.0.unwrap();
}

/// A daemon makes a snapshot of an overlay with some data, and is killed during the flush that
/// follows.
async fn snapshot_and_kill(io: &Io, rig: &Rig, chain: &Chain) {
    let bases = BaseLayers::new(&rig.cache);
    let base = CachedStore::from(again(&chain.base));
    let parent = plain_parent(io, &base).await.unwrap();
    let top = top_on(rig, &chain.own);
    let delta = Delta::create(io, &top, SIZE, parent, [1; 16]).await.unwrap();
    let below = vec![bases.add("base", again(&chain.base), Mode::Writethrough).unwrap()];
    let layers = Layers::overlay("disk", top, below, vec![Arc::new(delta)], false).unwrap();
    let layers = Arc::new(layers);
    put(io, &layers, 3, 7).await;
    let parent = layers.top_as_parent(io).await.unwrap();
    let top = top_on(rig, &chain.next);
    let delta = Delta::create(io, &top, SIZE, parent, [2; 16]).await.unwrap();
    layers.push(io, ("disk", &bases), top, delta, LIMIT).await.unwrap();
    // The data is stable, and the map is written: the flush of that does not complete.
    chain.own.hang_only(&[Operation::Write]);
    let (own, on) = (layers.clone(), io.clone());
    let flush = io.spawn(async move { own.flush(&on).await });
    while chain.own.hanging() == 0 {
        io.yield_now().await;
    }
    chain.own.release();
    chain.own.hang_only(&[Operation::Flush]);
    while chain.own.hanging() == 0 {
        io.yield_now().await;
    }
    drop(flush);
    drop(layers);
    io.yield_now().await;
    chain.own.release();
}

async fn open(io: &Io, rig: &Rig, chain: &Chain) -> Layers {
    let bases = BaseLayers::new(&rig.cache);
    let base = bases.add("base", again(&chain.base), Mode::Writethrough).unwrap();
    let frozen = bases.add("frozen", again(&chain.own), Mode::Writethrough).unwrap();
    let parent = base.as_parent(io).await.unwrap();
    let own = frozen.delta(io).await.unwrap();
    let parent = frozen.check_parent(&own, &parent).unwrap();
    let top = top_on(rig, &chain.next);
    let delta = Delta::open(io, &top).await.unwrap();
    delta.check_parent(&top, &parent).unwrap();
    delta.begin_writing(io, &top).await.unwrap();
    let deltas = vec![Arc::new(delta), own];
    Layers::overlay("disk", top, vec![frozen, base], deltas, false).unwrap()
}

async fn first_byte(io: &Io, layers: &Layers, block: u64) -> u8 {
    read(io, layers, block * BLOCK, BLOCK).await[0]
}

#[test]
fn first_flush_after_a_kill_covers_frozen_layers() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        for seed in 1..20 {
            let chain = Chain::new(seed * 10);
            snapshot_and_kill(&io, &rig, &chain).await;
            let layers = open(&io, &rig, &chain).await;
            assert_eq!(first_byte(&io, &layers, 3).await, 7, "seed {seed}");
            layers.flush(&io).await.unwrap();
            let flushes = chain.own.flushes.load(std::sync::atomic::Ordering::SeqCst);
            layers.flush(&io).await.unwrap();
            let later = chain.own.flushes.load(std::sync::atomic::Ordering::SeqCst);
            assert_eq!(flushes, later, "once is enough");
            drop(layers);
            chain.disks().into_iter().for_each(|disk| disk.power_cut());
            let layers = open(&io, &rig, &chain).await;
            assert_eq!(first_byte(&io, &layers, 3).await, 7, "seed {seed}: after the power cut");
        }
    });
}

/// The base was a volume of this host: its last writes may be in the page cache.
#[test]
fn first_flush_covers_a_base_that_was_written() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        for seed in 1..20 {
            let chain = Chain::new(seed * 10);
            let base = CachedStore::from(again(&chain.base));
            let mut buf = io.pool().take(index(BLOCK)).await;
            buf.fill(5);
            base.write(&io, buf, 4 * BLOCK, false).await.0.unwrap();
            drop(base);
            snapshot_and_kill(&io, &rig, &chain).await;
            let layers = open(&io, &rig, &chain).await;
            layers.flush(&io).await.unwrap();
            drop(layers);
            chain.disks().into_iter().for_each(|disk| disk.power_cut());
            let layers = open(&io, &rig, &chain).await;
            assert_eq!(first_byte(&io, &layers, 4).await, 5, "seed {seed}");
        }
    });
}

/// Data that a layer has lost is not stable after a second try.
#[test]
fn no_flush_succeeds_after_a_frozen_layer_lost_data() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let chain = Chain::new(1);
        snapshot_and_kill(&io, &rig, &chain).await;
        let layers = open(&io, &rig, &chain).await;
        chain.own.faults(&Faults { flushes: 1000, ..Faults::default() });
        layers.flush(&io).await.unwrap_err();
        chain.own.faults(&Faults::default());
        let error = layers.flush(&io).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Lost);
        assert!(layers.is_lost() && layers.loss().is_some());
    });
}

/// The other volumes above a layer go on when one of them is aborted while the layer hangs.
#[test]
fn aborted_first_flush_is_no_loss_for_other_volumes() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let chain = Chain::new(1);
        snapshot_and_kill(&io, &rig, &chain).await;
        let bases = BaseLayers::new(&rig.cache);
        let open_above = async |number: u8| {
            let delta = Layout::new(SIZE).unwrap().store_size();
            let base = bases.add("base", again(&chain.base), Mode::Writethrough).unwrap();
            let parent = base.as_parent(&io).await.unwrap();
            let disk = Arc::new(TestStore::new(delta, 9));
            let top = top_on(&rig, &disk);
            let made = Delta::create(&io, &top, SIZE, parent, [number; 16]).await.unwrap();
            Layers::overlay("clone", top, vec![base], vec![Arc::new(made)], false).unwrap()
        };
        let (one, other) = (Arc::new(open_above(1).await), open_above(2).await);
        chain.base.hang_only(&[Operation::Flush]);
        let (own, on) = (one.clone(), io.clone());
        let flush = io.spawn(async move { own.flush(&on).await });
        while chain.base.hanging() == 0 {
            io.yield_now().await;
        }
        one.abort();
        assert_eq!(flush.await.unwrap_err().kind, ErrorKind::Closing);
        chain.base.release();
        other.flush(&io).await.unwrap();
    });
}

/// The map is saved for the end of the daemon, which a base that hangs must not prevent.
#[test]
fn map_is_saved_while_the_base_hangs() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let chain = Chain::new(1);
        snapshot_and_kill(&io, &rig, &chain).await;
        let layers = open(&io, &rig, &chain).await;
        put(&io, &layers, 5, 9).await;
        chain.base.hang_only(&[Operation::Flush]);
        layers.save_map(&io).await;
        assert_eq!(chain.base.hanging(), 0);
        drop(layers);
        chain.base.release();
        let layers = open(&io, &rig, &chain).await;
        assert_eq!(first_byte(&io, &layers, 5).await, 9);
    });
}
