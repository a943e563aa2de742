//! Snapshots, deletions of them and flattening, with writers in between: each read returns what was written last, whatever
//! layers are exchanged meanwhile, and so does the volume when it is opened again.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use common::{Random, Rig, index, on_a_worker, read};
use ebb_block::{BlockStore, ZeroFlags};
use ebb_cache::{BaseLayers, CachedStore, Delta, FillFrom, Layers, Mode, plain_parent};
use ebb_image::{BLOCK, DeltaHeader, Layout, Parent};
use ebb_io::Io;
use ebb_store::{Faults, Store, TestStore};

const SECTOR: u64 = 512;
const WRITERS: u64 = 6;
/// Sectors of a writer: every block has parts of all writers.
const SECTORS: u64 = 12;
const SIZE: u64 = WRITERS * SECTORS * SECTOR;
const LIMIT: Duration = Duration::from_secs(30);
const AT_ONCE: u64 = 4 * BLOCK;

fn disk(bytes: u64, seed: u64) -> Arc<TestStore> {
    let disk = TestStore::new(bytes, seed);
    // Requests overlap.
    disk.faults(&Faults { late: 300, late_us: 50, ..Faults::default() });
    Arc::new(disk)
}

fn of_base(sector: u64) -> u64 {
    1 << 40 | sector
}

fn stamped(value: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
    bytes
}

/// The value of a sector, which is whole.
fn value(bytes: &[u8], what: &str) -> u64 {
    let value = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(*bytes == stamped(value)[..], "{what}: a torn sector");
    value
}

/// A volume, and the stores that it has layers on, from the top on.
struct World<'a> {
    io: Io,
    rig: &'a Rig,
    mode: Mode,
    bases: BaseLayers,
    layers: Rc<Layers>,
    chain: RefCell<Vec<Arc<TestStore>>>,
    seed: u64,
    made: Cell<u8>,
}

impl World<'_> {
    fn new_disk(&self) -> (Arc<TestStore>, CachedStore) {
        let disk = disk(Layout::new(SIZE).unwrap().store_size(), self.seed);
        let store = Store::Test(disk.clone());
        let top = CachedStore::new(&self.rig.cache, "next", store, self.mode).unwrap();
        (disk, top)
    }

    async fn snapshot(&self) {
        self.made.set(self.made.get() + 1);
        let (disk, top) = self.new_disk();
        let parent = self.layers.top_as_parent(&self.io).await.unwrap();
        let delta =
            Delta::create(&self.io, &top, SIZE, parent, [self.made.get(); 16]).await.unwrap();
        self.layers.push(&self.io, ("disk", &self.bases), top, delta, LIMIT).await.unwrap();
        self.layers.flush(&self.io).await.unwrap();
        self.chain.borrow_mut().insert(0, disk);
    }

    /// Deletes the layer `number` from the top.
    async fn delete(&self, number: usize) {
        let (io, layers) = (&self.io, &self.layers);
        if number == 1 {
            let mut at = 0;
            while at < SIZE {
                at += layers.fill(io, at, AT_ONCE, FillFrom::Next).await.unwrap();
                io.yield_now().await;
            }
            layers.remove_next(io, "disk", LIMIT).await.unwrap();
            self.chain.borrow_mut().remove(1);
            return;
        }
        let (disk, top) = self.new_disk();
        let deltas = layers.deltas();
        let parent = deltas[number].header.parent.clone();
        let header = DeltaHeader { parent, ..deltas[number - 1].header.clone() };
        let delta = Arc::new(Delta::create_as(io, &top, header).await.unwrap());
        let merged = Layers::overlay("merged", top, Vec::new(), vec![delta], false).unwrap();
        let pair = layers.pair(number - 1).unwrap();
        let mut at = 0;
        while at < SIZE {
            at += pair.copy_held(io, (at, AT_ONCE), (&merged, false)).await.unwrap();
            io.yield_now().await;
        }
        merged.flush(io).await.unwrap();
        let names = ("disk", &self.bases);
        layers.replace_pair(io, names, number - 1, &merged, LIMIT).await.unwrap();
        self.chain.borrow_mut().splice(number - 1..=number, [disk]);
    }

    async fn flatten(&self) {
        let mut at = 0;
        while at < SIZE {
            at += self.layers.fill(&self.io, at, AT_ONCE, FillFrom::All).await.unwrap();
            self.io.yield_now().await;
        }
        self.layers.detach(&self.io, "disk", LIMIT).await.unwrap();
        self.chain.borrow_mut().truncate(1);
    }
}

async fn write_and_read(
    io: &Io,
    layers: &Layers,
    random: &mut Random,
    writer: u64,
    own: &RefCell<Vec<u64>>,
) {
    for stamp in 1..=80 {
        let sector = random.below(SECTORS) * WRITERS + writer;
        let zeroes = random.chance(200, 1000);
        let new = if zeroes { 0 } else { stamp };
        if zeroes {
            let flags = ZeroFlags { may_unmap: true, fast_only: false };
            layers.write_zeroes(io, sector * SECTOR, SECTOR, flags).await.unwrap();
        } else {
            let mut buf = io.pool().take(512).await;
            buf.copy_from_slice(&stamped(new));
            layers.write(io, buf, sector * SECTOR, random.chance(50, 1000)).await.0.unwrap();
        }
        own.borrow_mut()[index(sector)] = new;
        if random.chance(300, 1000) {
            io.yield_now().await;
        }
        let sector = random.below(SECTORS) * WRITERS + writer;
        let found = read(io, layers, sector * SECTOR, SECTOR).await;
        let what = format!("writer {writer}, sector {sector}");
        assert_eq!(value(&found, &what), own.borrow()[index(sector)], "{what}");
        if random.chance(60, 1000) {
            layers.flush(io).await.unwrap();
        }
    }
}

/// Opens a chain of stores as the volume was closed.
async fn open_again(io: &Io, rig: &Rig, chain: &[Arc<TestStore>], base: &Arc<TestStore>) -> Layers {
    let bases = BaseLayers::new(&rig.cache);
    let plain = CachedStore::from(Store::Test(Arc::new(base.open_anew())));
    let mut parent = plain_parent(io, &plain).await.unwrap();
    let top = Store::Test(Arc::new(chain[0].open_anew()));
    let top = CachedStore::new(&rig.cache, "top", top, Mode::Writethrough).unwrap();
    let own = Delta::open(io, &top).await.unwrap();
    if own.is_detached() {
        return Layers::overlay("again", top, Vec::new(), vec![Arc::new(own)], true).unwrap();
    }
    let (mut below, mut deltas) = (Vec::new(), Vec::new());
    let store = Store::Test(Arc::new(base.open_anew()));
    below.push(bases.add("base", store, Mode::Writethrough).unwrap());
    for disk in chain[1..].iter().rev() {
        let store = Store::Test(Arc::new(disk.open_anew()));
        let layer = bases.add("delta", store, Mode::Writethrough).unwrap();
        let delta = layer.delta(io).await.unwrap();
        if delta.is_detached() {
            (below, deltas, parent) = (Vec::new(), Vec::new(), ebb_image::Parent::default());
        }
        parent = layer.check_parent(&delta, &parent).unwrap();
        deltas.insert(0, delta);
        below.insert(0, layer);
    }
    own.check_parent(&top, &parent).unwrap();
    deltas.insert(0, Arc::new(own));
    Layers::overlay("again", top, below, deltas, true).unwrap()
}

#[test]
fn layers_are_exchanged_below_writers_that_notice_nothing() {
    on_a_worker(Rig::new(16 << 20), async |io, rig| {
        for seed in 1..=120u64 {
            let mode = if seed.is_multiple_of(2) { Mode::Writethrough } else { Mode::Writeback };
            let base = disk(SIZE, seed);
            for sector in 0..SIZE / SECTOR {
                let mut buf = io.pool().take(512).await;
                buf.copy_from_slice(&stamped(of_base(sector)));
                base.write(&io, buf, sector * SECTOR, false).await.0.unwrap();
            }
            let bases = BaseLayers::new(&rig.cache);
            let plain = CachedStore::from(Store::Test(Arc::new(base.open_anew())));
            let parent = plain_parent(&io, &plain).await.unwrap();
            let first = disk(Layout::new(SIZE).unwrap().store_size(), seed);
            let top =
                CachedStore::new(&rig.cache, "top", Store::Test(first.clone()), mode).unwrap();
            let delta = Delta::create(&io, &top, SIZE, parent, [99; 16]).await.unwrap();
            let store = Store::Test(Arc::new(base.open_anew()));
            let below = vec![bases.add("base", store, Mode::Writethrough).unwrap()];
            let layers = Layers::overlay("disk", top, below, vec![Arc::new(delta)], false);
            let world = World {
                io: io.clone(),
                rig: &rig,
                mode,
                bases,
                layers: Rc::new(layers.unwrap()),
                chain: RefCell::new(vec![first]),
                seed,
                made: Cell::new(0),
            };
            let start = (0..SIZE / SECTOR).map(of_base).collect();
            let own = Rc::new(RefCell::new(start));
            let ended = Rc::new(Cell::new(0));
            for writer in 0..WRITERS {
                let (io, layers, own) = (io.clone(), world.layers.clone(), own.clone());
                let ended = ended.clone();
                let mut random = Random::new(seed * 100 + writer);
                let task = async move {
                    write_and_read(&io, &layers, &mut random, writer, &own).await;
                    ended.set(ended.get() + 1);
                };
                world.io.spawn(task).detach();
            }
            let mut random = Random::new(seed);
            let (mut depth, mut has_base) = (1, true);
            while ended.get() < WRITERS {
                match random.below(8) {
                    0..=3 if depth < 6 => {
                        world.snapshot().await;
                        depth += 1;
                    }
                    4..=6 if depth > 1 => {
                        let number = 1 + index(random.below(depth - 1));
                        world.delete(number).await;
                        depth -= 1;
                    }
                    7 => {
                        world.flatten().await;
                        (depth, has_base) = (1, false);
                    }
                    _ => io.yield_now().await,
                }
                let layers = usize::from(has_base) + index(depth);
                assert_eq!(world.layers.depth(), layers, "seed {seed}");
            }
            world.layers.flush(&io).await.unwrap();
            let chain = world.chain.borrow().clone();
            drop(world);
            let again = open_again(&io, &rig, &chain, &base).await;
            let own = own.borrow().clone();
            for (sector, own) in (0..).zip(&own) {
                let found = read(&io, &again, sector * SECTOR, SECTOR).await;
                assert_eq!(value(&found, "again"), *own, "seed {seed}: sector {sector}, again");
            }
        }
    });
}

/// What becomes a snapshot is locked, and no volume reads it, before a flush has succeeded.
#[test]
fn a_frozen_layer_is_shared_when_it_is_stable() {
    use std::sync::atomic::Ordering;
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let size = Layout::new(SIZE).unwrap().store_size();
        let (own, next) = (disk(size, 1), disk(size, 2));
        let open = |disk: &Arc<TestStore>| {
            let store = Store::Test(disk.clone());
            CachedStore::new(&rig.cache, "disk", store, Mode::Writeback).unwrap()
        };
        let top = open(&own);
        let delta = Delta::create(&io, &top, SIZE, Parent::default(), [1; 16]).await.unwrap();
        let layers =
            Layers::overlay("disk", top, Vec::new(), vec![Arc::new(delta)], false).unwrap();
        let bases = BaseLayers::new(&rig.cache);
        let mut buf = io.pool().take(4096).await;
        buf.fill(7);
        layers.write(&io, buf, 0, false).await.0.unwrap();
        let parent = layers.top_as_parent(&io).await.unwrap();
        let top = open(&next);
        let delta = Delta::create(&io, &top, SIZE, parent, [2; 16]).await.unwrap();
        layers.push(&io, ("disk", &bases), top, delta, LIMIT).await.unwrap();
        let is_free = || {
            let found = bases.find(&own.identity(), size, Mode::Writethrough);
            (own.shared.load(Ordering::SeqCst), found.is_some())
        };
        assert_eq!(is_free(), (false, false));
        own.write_faults.store(1000, Ordering::SeqCst);
        layers.flush(&io).await.unwrap_err();
        assert_eq!(is_free(), (false, false));
        own.write_faults.store(0, Ordering::SeqCst);
        layers.flush(&io).await.unwrap();
        assert_eq!(is_free(), (true, true));
    });
}
