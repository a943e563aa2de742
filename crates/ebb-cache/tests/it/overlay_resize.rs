//! Overlays that get other sizes, compared with a byte array, with snapshots of other sizes below them, on stores that held
//! something before; and after a power failure at any of five thousand points.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use common::remains::{Remains, stamped};
use common::{Random, Rig, index, on_a_worker, read};
use ebb_block::{BlockStore, Io, Resize, ResizeError, ZeroFlags};
use ebb_cache::{BaseLayer, BaseLayers, CachedStore, Delta, FillFrom, Layers, Mode, plain_parent};
use ebb_image::{BLOCK, DeltaHeader, Layout, Parent};
use ebb_store::{FileStore, OpenOptions, Store, TestStore};

const SECTOR: u64 = 512;
const LIMIT: Duration = Duration::from_secs(30);
const AT_ONCE: u64 = 256 << 10;
/// Sectors of the largest volume.
const MOST: u64 = 600;

fn resize(to: u64) -> Resize {
    Resize { to: Some(to), shrink: true }
}

/// A disk that is as large as the largest volume needs, with anything where the data of a new delta and the map of a larger
/// one will be.
fn used_disk(seed: u64) -> Arc<TestStore> {
    let layout = Layout::new(MOST * SECTOR).unwrap();
    let disk = TestStore::new(layout.store_size(), seed);
    disk.change(layout.data_start(), &vec![0xdd; index(MOST * SECTOR)]);
    disk.change(layout.map_slot(1, 0), &[0xdd; 3 * 4096]);
    Arc::new(disk)
}

/// An overlay and what is below it.
struct Play {
    io: Io,
    rig: Arc<Rig>,
    mode: Mode,
    random: Random,
    base: Option<Arc<TestStore>>,
    /// From the top on.
    disks: Vec<Arc<TestStore>>,
    bases: BaseLayers,
    layers: Layers,
    model: Vec<u8>,
    /// What the snapshots read as, from the newest on; the first is that of `disks[1]`.
    snapshots: Vec<Vec<u8>>,
    made: u8,
}

/// The layers of `disks` above `base`, read-only or not.
async fn open_chain(
    io: &Io,
    rig: &Rig,
    (disks, base): (&[Arc<TestStore>], Option<&Arc<TestStore>>),
    (mode, read_only): (Mode, bool),
) -> Layers {
    let bases = BaseLayers::new(&rig.cache);
    let (mut parent, mut below) = (Parent::default(), Vec::<BaseLayer>::new());
    if let Some(base) = base {
        let plain = CachedStore::from(Store::Test(base.clone()));
        parent = plain_parent(io, &plain).await.unwrap();
        let store = Store::Test(Arc::new(base.open_anew()));
        below.push(bases.add("base", store, Mode::Writethrough).unwrap());
    }
    let mut deltas = Vec::new();
    for disk in disks[1..].iter().rev() {
        let store = Store::Test(Arc::new(disk.open_anew()));
        let layer = bases.add("delta", store, Mode::Writethrough).unwrap();
        let delta = layer.delta(io).await.unwrap();
        parent = layer.check_parent(&delta, &parent).unwrap();
        deltas.insert(0, delta);
        below.insert(0, layer);
    }
    let store = Store::Test(Arc::new(disks[0].open_anew()));
    let top = CachedStore::new(&rig.cache, "top", store, mode).unwrap();
    let delta = Delta::open(io, &top).await.unwrap();
    delta.check_parent(&top, &parent).unwrap();
    if !read_only {
        delta.begin_writing(io, &top).await.unwrap();
    }
    deltas.insert(0, Arc::new(delta));
    Layers::overlay("disk", top, below, deltas, read_only).unwrap()
}

impl Play {
    async fn new(io: Io, rig: Arc<Rig>, seed: u64) -> Play {
        let mut random = Random::new(seed);
        let mode = if seed.is_multiple_of(2) { Mode::Writethrough } else { Mode::Writeback };
        let content: Vec<u8> = (0..SECTOR * (1 + random.below(MOST)))
            .map(|_| u8::try_from(1 + random.below(255)).unwrap())
            .collect();
        let base = Arc::new(TestStore::new(content.len() as u64, seed));
        base.change(0, &content);
        let size = (1 + random.below(MOST)) * SECTOR;
        let disk = used_disk(seed);
        let plain = CachedStore::from(Store::Test(base.clone()));
        let parent = plain_parent(&io, &plain).await.unwrap();
        let store = Store::Test(Arc::new(disk.open_anew()));
        let top = CachedStore::new(&rig.cache, "new", store, mode).unwrap();
        Delta::create(&io, &top, size, parent, [99; 16]).await.unwrap();
        drop(top);
        let (disks, base) = (vec![disk], Some(base));
        let layers = open_chain(&io, &rig, (&disks, base.as_ref()), (mode, false)).await;
        let mut model = content;
        model.resize(index(size), 0);
        let bases = BaseLayers::new(&rig.cache);
        let snapshots = Vec::new();
        Play { io, rig, mode, random, base, disks, bases, layers, model, snapshots, made: 0 }
    }

    fn part(&mut self) -> (u64, u64) {
        let sectors = self.model.len() as u64 / SECTOR;
        let first = self.random.below(sectors);
        let most = (sectors - first).min(if self.random.chance(300, 1000) { 200 } else { 12 });
        (first * SECTOR, (1 + self.random.below(most)) * SECTOR)
    }

    async fn write(&mut self) {
        let (offset, length) = self.part();
        let range = index(offset)..index(offset + length);
        if self.random.chance(200, 1000) {
            let flags = ZeroFlags { may_unmap: self.random.chance(500, 1000), fast_only: false };
            self.layers.write_zeroes(&self.io, offset, length, flags).await.unwrap();
            self.model[range].fill(0);
            return;
        }
        let mut buf = self.io.pool().take(index(length)).await;
        buf.fill(u8::try_from(1 + self.random.below(255)).unwrap());
        self.model[range].copy_from_slice(&buf);
        self.layers.write(&self.io, buf, offset, false).await.0.unwrap();
    }

    async fn resize(&mut self) {
        let size = match self.random.below(3) {
            // Near the end.
            0 => (self.model.len() as u64 / SECTOR + self.random.below(9)).saturating_sub(4),
            _ => self.random.below(MOST + 1),
        };
        let size = size.clamp(1, MOST) * SECTOR;
        let done = self.layers.resize(&self.io, resize(size)).await;
        assert_eq!(done.unwrap(), size);
        assert_eq!(self.layers.size(), size);
        self.model.resize(index(size), 0);
    }

    async fn reopen(&mut self) {
        self.layers.flush(&self.io).await.unwrap();
        let chain = (&self.disks[..], self.base.as_ref());
        // The former one is closed first.
        let place = CachedStore::from(Store::Test(self.disks[0].clone()));
        self.layers = Layers::from(place);
        self.layers = open_chain(&self.io, &self.rig, chain, (self.mode, false)).await;
        self.bases = BaseLayers::new(&self.rig.cache);
    }

    fn new_disk(&mut self) -> (Arc<TestStore>, CachedStore) {
        self.made += 1;
        let disk = used_disk(u64::from(self.made));
        let store = Store::Test(Arc::new(disk.open_anew()));
        let top = CachedStore::new(&self.rig.cache, "next", store, self.mode).unwrap();
        (disk, top)
    }

    async fn snapshot(&mut self) {
        let (disk, top) = self.new_disk();
        let parent = self.layers.top_as_parent(&self.io).await.unwrap();
        let (size, id) = (self.layers.size(), [self.made; 16]);
        let delta = Delta::create(&self.io, &top, size, parent, id).await.unwrap();
        self.layers.push(&self.io, ("disk", &self.bases), top, delta, LIMIT).await.unwrap();
        self.layers.flush(&self.io).await.unwrap();
        self.disks.insert(0, disk);
        self.snapshots.insert(0, self.model.clone());
    }

    /// Deletes the snapshot `number` from the top.
    async fn delete(&mut self, number: usize) {
        let (mut at, size) = (0, self.layers.size());
        self.snapshots.remove(number - 1);
        if number == 1 {
            while at < size {
                at += self.layers.fill(&self.io, at, AT_ONCE, FillFrom::Next).await.unwrap();
            }
            self.layers.remove_next(&self.io, "disk", LIMIT).await.unwrap();
            self.disks.remove(1);
            return;
        }
        let (disk, top) = self.new_disk();
        let deltas = self.layers.deltas();
        let (above, own) = (&deltas[number - 1].header, &deltas[number].header);
        let (parent, shown) = (own.parent.clone(), own.shown.min(above.shown));
        let header = DeltaHeader { parent, shown, ..above.clone() };
        let delta = Arc::new(Delta::create_as(&self.io, &top, header).await.unwrap());
        let merged = Layers::overlay("merged", top, Vec::new(), vec![delta], false).unwrap();
        let pair = self.layers.pair(number - 1).unwrap();
        // The volume may be smaller now.
        while at < pair.size() {
            at += pair.copy_held(&self.io, (at, AT_ONCE), (&merged, false)).await.unwrap();
        }
        merged.flush(&self.io).await.unwrap();
        let names = ("disk", &self.bases);
        let replaced = self.layers.replace_pair(&self.io, names, number - 1, &merged, LIMIT);
        replaced.await.unwrap();
        self.disks.splice(number - 1..=number, [disk]);
    }

    async fn flatten(&mut self) {
        let (mut at, size) = (0, self.layers.size());
        while at < size {
            at += self.layers.fill(&self.io, at, AT_ONCE, FillFrom::All).await.unwrap();
        }
        self.layers.detach(&self.io, "disk", LIMIT).await.unwrap();
        self.disks.truncate(1);
        self.snapshots.clear();
        self.base = None;
    }

    async fn verify(&mut self, what: &str) {
        let found = read(&self.io, &self.layers, 0, self.model.len() as u64).await;
        let same = found.iter().zip(&self.model).take_while(|(one, other)| one == other).count();
        assert_eq!(same, self.model.len(), "{what}: at {}", same / 512);
        let mut at = 0;
        while at < self.model.len() as u64 {
            let rest = self.model.len() as u64 - at;
            let extents = self.layers.extents(&self.io, at, rest, 100).await.unwrap();
            for extent in extents {
                let range = index(extent.offset)..index(extent.offset + extent.length);
                assert!(!extent.hole || self.model[range].iter().all(|byte| *byte == 0), "{what}");
                at = extent.offset + extent.length;
            }
        }
    }

    /// The count of the blocks that the delta holds is that of one that was just opened.
    async fn verify_own(&mut self, what: &str) {
        self.layers.flush(&self.io).await.unwrap();
        while !self.layers.count_own(&self.io).await.unwrap() {}
        let found = self.layers.own_bytes().unwrap();
        self.reopen().await;
        assert_eq!(self.layers.own_bytes(), None);
        while !self.layers.count_own(&self.io).await.unwrap() {}
        assert_eq!(self.layers.own_bytes(), Some(found), "{what}");
        assert!(found <= (self.model.len() as u64).next_multiple_of(BLOCK));
    }
}

#[test]
fn an_overlay_of_other_sizes_reads_as_a_byte_array() {
    on_a_worker(Rig::new(16 << 20), async |io, rig| {
        for seed in 1..=150u64 {
            let mut play = Play::new(io.clone(), rig.clone(), seed).await;
            for step in 0..60 {
                let what = format!("seed {seed}, step {step}");
                let depth = play.snapshots.len();
                match play.random.below(100) {
                    0..45 => play.write().await,
                    45..70 => play.resize().await,
                    70..75 => play.layers.flush(&play.io).await.unwrap(),
                    75..80 => play.reopen().await,
                    80..88 if depth < 4 => play.snapshot().await,
                    88..93 if depth > 0 => {
                        let number = 1 + index(play.random.below(depth as u64));
                        play.delete(number).await;
                    }
                    93..95 => play.verify_own(&what).await,
                    95 => play.flatten().await,
                    _ => {}
                }
                play.verify(&what).await;
            }
            play.layers.flush(&play.io).await.unwrap();
            for (number, content) in play.snapshots.iter().enumerate() {
                let chain = (&play.disks[number + 1..], play.base.as_ref());
                let frozen = open_chain(&play.io, &play.rig, chain, (play.mode, true)).await;
                assert_eq!(frozen.size(), content.len() as u64);
                let found = read(&play.io, &frozen, 0, frozen.size()).await;
                assert!(*found == content[..], "seed {seed}, snapshot {number}");
            }
        }
    });
}

/// A clone that is larger than the delta below it reads as what it holds, also behind the end of that.
#[test]
fn what_is_held_behind_the_end_of_a_lower_delta_is_read() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let mut play = Play::new(io.clone(), rig.clone(), 4).await;
        play.layers.resize(&io, resize(40 * BLOCK)).await.unwrap();
        play.model.resize(index(40 * BLOCK), 0);
        play.snapshot().await;
        play.layers.resize(&io, resize(70 * BLOCK)).await.unwrap();
        play.model.resize(index(70 * BLOCK), 0);
        let mut buf = io.pool().take(4096).await;
        buf.fill(7);
        play.layers.write(&io, buf, 50 * BLOCK, false).await.0.unwrap();
        play.model[index(50 * BLOCK)..index(51 * BLOCK)].fill(7);
        play.verify("behind the end").await;
    });
}

/// What a resize adds has changed since a snapshot, and what it takes away and adds again; nothing has beyond the end of the
/// later snapshot.
#[test]
fn what_a_resize_adds_has_changed() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let mut play = Play::new(io.clone(), rig.clone(), 4).await;
        play.layers.resize(&io, resize(40 * BLOCK)).await.unwrap();
        let push = async |play: &mut Play, name: &str| {
            let (disk, top) = play.new_disk();
            let mut parent = play.layers.top_as_parent(&io).await.unwrap();
            parent.place = format!("/disk@{name}");
            let (size, id) = (play.layers.size(), [play.made; 16]);
            let delta = Delta::create(&io, &top, size, parent, id).await.unwrap();
            play.layers.push(&io, ("disk", &play.bases), top, delta, LIMIT).await.unwrap();
            play.disks.insert(0, disk);
        };
        push(&mut play, "one").await;
        play.layers.resize(&io, resize(10 * BLOCK)).await.unwrap();
        play.layers.resize(&io, resize(30 * BLOCK)).await.unwrap();
        push(&mut play, "two").await;
        play.layers.resize(&io, resize(60 * BLOCK)).await.unwrap();
        let all = async |since, until| {
            let (layers, range) = (&play.layers, (0, 60 * BLOCK));
            let list = layers.changes(&io, (since, until), range, 10).await.unwrap();
            list.into_iter().map(|(length, is)| (length / BLOCK, is)).collect::<Vec<_>>()
        };
        assert_eq!(all("one", Some("two")).await, [(10, false), (20, true), (30, false)]);
        assert_eq!(all("one", None).await, [(10, false), (50, true)]);
        assert_eq!(all("two", None).await, [(30, false), (30, true)]);
    });
}

/// A store that cannot grow says how large it has to be, a map that has no room which size is possible, and a size is needed.
#[test]
fn a_size_that_is_not_possible_is_refused() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let play = Play::new(io.clone(), rig.clone(), 2).await;
        let refused = async |order| play.layers.resize(&io, order).await.unwrap_err();
        let size = play.layers.size();
        let none = refused(Resize { to: None, shrink: true }).await;
        assert!(matches!(none, ResizeError::Unsupported { .. }), "{none}");
        let shrinks = refused(Resize { to: Some(SECTOR), shrink: false }).await;
        assert!(matches!(shrinks, ResizeError::Shrinks { .. }), "{shrinks}");
        let odd = refused(resize(size + 1)).await;
        assert!(matches!(odd, ResizeError::Sectors { .. }), "{odd}");
        let most = Layout::new(size).unwrap().largest();
        let large = refused(resize(most + SECTOR)).await;
        assert!(matches!(large, ResizeError::Room { most: said } if said == most), "{large}");
        assert_eq!(play.layers.size(), size);
        let frozen = (&play.disks[..], play.base.as_ref());
        let frozen = open_chain(&io, &rig, frozen, (Mode::Writethrough, true)).await;
        let refused = frozen.resize(&io, resize(size + BLOCK)).await.unwrap_err();
        assert!(matches!(refused, ResizeError::Unsupported { .. }), "{refused}");
    });
}

/// The map of a volume of several map pages grows over what the store held there.
#[test]
fn a_map_of_several_pages_grows_and_shrinks() {
    use std::os::unix::fs::FileExt;

    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("delta");
        let file = std::fs::File::create_new(&path).unwrap();
        let page = 126u64 << 20;
        let layout = Layout::new(page / 2).unwrap();
        file.set_len(layout.store_size()).unwrap();
        for number in 1..8 {
            file.write_all_at(&[0xdd; 8192], layout.map_slot(number, 0)).unwrap();
        }
        let open = || {
            let (store, _) = FileStore::open(&path, &OpenOptions::default()).unwrap();
            CachedStore::new(&rig.cache, "top", Store::File(store), Mode::Writeback).unwrap()
        };
        let overlay = |top, delta| {
            Layers::overlay("disk", top, Vec::new(), vec![Arc::new(delta)], false).unwrap()
        };
        let top = open();
        let delta = Delta::create(&io, &top, page / 2, Parent::default(), [7; 16]).await.unwrap();
        let mut layers = overlay(top, delta);
        let write = async |layers: &Layers, offset: u64, byte: u8| {
            let mut buf = io.pool().take(8192).await;
            buf.fill(byte);
            layers.write(&io, buf, offset, false).await.0.unwrap();
        };
        let is = async |layers: &Layers, offset: u64, byte: u8| {
            assert_eq!(*read(&io, layers, offset, 8192).await, [byte; 8192], "{offset}");
        };
        let steps = [(3 * page, 2 * page + 4096), (page + 4096, 4096), (5 * page, 4 * page)];
        for (round, (size, at)) in (1u8..).zip(steps) {
            layers.resize(&io, resize(size)).await.unwrap();
            for number in 0..size / page {
                if round != 2 {
                    is(&layers, number * page + page / 2 + 4096, 0).await;
                }
            }
            write(&layers, at, round).await;
            is(&layers, at, round).await;
            if round == 1 {
                write(&layers, page + 4096 - 8192, 9).await;
                write(&layers, page + 8192, 9).await;
            }
            layers.flush(&io).await.unwrap();
            while !layers.count_own(&io).await.unwrap() {}
            drop(layers);
            let top = open();
            let delta = Delta::open(&io, &top).await.unwrap();
            delta.begin_writing(&io, &top).await.unwrap();
            layers = overlay(top, delta);
            while !layers.count_own(&io).await.unwrap() {}
            assert_eq!(layers.own_bytes(), Some(8192 * [3, 2, 3][usize::from(round) - 1]));
        }
        is(&layers, page + 4096 - 8192, 9).await;
        is(&layers, 4096, 2).await;
        is(&layers, page + 8192, 0).await;
        is(&layers, 2 * page + 4096, 0).await;
        is(&layers, 4 * page, 3).await;
        // Given back.
        assert!(
            std::fs::metadata(&path).unwrap().len()
                == layout.resized(5 * page).unwrap().store_size()
        );
    });
}

/// Sector values by time: the value, the length of the record when it was submitted, and when a flush promised it.
type Values = Vec<(u64, usize, usize)>;

const BASE: u64 = 32 * BLOCK;
const RUNS: u64 = 6;
const POINTS_PER_RUN: usize = 900;

/// A size whose end is in one of two sectors of the map page.
fn some_size(random: &mut Random) -> u64 {
    let block =
        if random.chance(500, 1000) { 12 + random.below(24) } else { 3600 + random.below(30) };
    block * BLOCK + if random.chance(500, 1000) { random.below(8) * SECTOR } else { 0 }
}

const LARGEST: u64 = 3640 * BLOCK;

struct CrashPlay {
    io: Io,
    rig: Arc<Rig>,
    mode: Mode,
    base: Arc<TestStore>,
    history: BTreeMap<u64, Values>,
    /// The size, and the lengths of the record when its resize began and had ended.
    sizes: Vec<(u64, usize, usize)>,
}

/// The base's sectors have stamps, too; beyond its end are zeroes.
fn of_base(sector: u64) -> u64 {
    if sector < BASE / SECTOR { 1 << 40 | sector } else { 0 }
}

impl CrashPlay {
    async fn record(&mut self, layers: &Layers, delta: &TestStore, random: &mut Random) {
        let mut stamp = 0;
        for _ in 0..110 {
            let at = delta.recorded();
            let (size, _, _) = self.sizes[self.sizes.len() - 1];
            if random.chance(150, 1000) {
                layers.flush(&self.io).await.unwrap();
                self.promise(delta.recorded(), 0);
                continue;
            }
            if random.chance(120, 1000) {
                let to = some_size(random);
                if to < size {
                    for sector in to / SECTOR..BASE / SECTOR {
                        self.history.entry(sector).or_default();
                    }
                    for values in self.history.range_mut(to / SECTOR..).map(|(_, values)| values) {
                        values.push((0, at, usize::MAX));
                    }
                }
                layers.resize(&self.io, resize(to)).await.unwrap();
                self.sizes.push((to, at, delta.recorded()));
                if to < size {
                    self.promise(delta.recorded(), to / SECTOR);
                }
                continue;
            }
            let end = size / SECTOR;
            let last = end.min(3616 * 8);
            let first = if random.chance(500, 1000) {
                random.below(40 * 8)
            } else {
                last - 1 - random.below(40)
            };
            let count = if random.chance(500, 1000) { 8 } else { 1 + random.below(12) };
            let first = if count == 8 { first / 8 * 8 } else { first };
            if first >= end {
                continue;
            }
            let count = count.min(end - first);
            let zero = random.chance(150, 1000);
            stamp += 1;
            let value = if zero { 0 } else { stamp };
            for sector in first..first + count {
                self.history.entry(sector).or_default().push((value, at, usize::MAX));
            }
            let (offset, length) = (first * SECTOR, count * SECTOR);
            if zero {
                let flags = ZeroFlags { may_unmap: true, fast_only: false };
                layers.write_zeroes(&self.io, offset, length, flags).await.unwrap();
            } else {
                let mut buf = self.io.pool().take(index(length)).await;
                for chunk in buf.chunks_mut(512) {
                    chunk.copy_from_slice(&stamped(value));
                }
                layers.write(&self.io, buf, offset, false).await.0.unwrap();
            }
        }
        layers.flush(&self.io).await.unwrap();
    }

    /// What was written from a sector on is stable.
    fn promise(&mut self, at: usize, first: u64) {
        let values = self.history.range_mut(first..);
        for (_, _, promised) in values.filter_map(|(_, values)| values.last_mut()) {
            *promised = (*promised).min(at);
        }
    }

    /// Compares what a crash after `number` requests has left.
    async fn verify(&self, left: &Arc<TestStore>, number: usize, seed: u64) {
        let chain = ([left.clone()], Some(&self.base));
        let chain = (&chain.0[..], chain.1);
        let layers = open_chain(&self.io, &self.rig, chain, (self.mode, false)).await;
        let size = layers.size();
        let done = self.sizes.iter().rposition(|(_, _, ended)| *ended <= number).unwrap_or(0);
        let mut sizes = self.sizes[done..].iter().filter(|(_, began, _)| *began <= number);
        assert!(
            sizes.any(|(one, _, _)| *one == size),
            "seed {seed}, {number}: {size}: {:?}",
            self.sizes
        );
        for (sector, values) in self.history.range(..size / SECTOR) {
            let found = read(&self.io, &layers, sector * SECTOR, SECTOR).await;
            let value = u64::from_le_bytes(found[..8].try_into().unwrap());
            assert!(*found == stamped(value)[..], "a torn sector");
            let last = values.iter().rposition(|(_, _, promised)| *promised <= number);
            let mut allowed = values[last.unwrap_or(0)..]
                .iter()
                .filter(|(_, submitted, _)| *submitted <= number)
                .map(|(value, _, _)| *value);
            // Of a base that is larger than the volume was at first, the rest does not show.
            let shows = sector * SECTOR < self.sizes[0].0;
            let is_base = last.is_none() && value == if shows { of_base(*sector) } else { 0 };
            assert!(
                is_base || allowed.any(|one| one == value),
                "seed {seed}: after {number} requests sector {sector} holds {value:x}: {values:?}; {:?}",
                self.sizes
            );
        }
        if !number.is_multiple_of(3) {
            return;
        }
        // What is beyond the end has no meaning.
        layers.resize(&self.io, resize(LARGEST)).await.unwrap();
        let near = size.next_multiple_of(SECTOR)..(size + 20 * BLOCK).min(LARGEST);
        let far = size.max(3590 * BLOCK)..LARGEST;
        for range in [near, far] {
            let length = range.end.saturating_sub(range.start);
            let found = read(&self.io, &layers, range.start, length).await;
            let first = found.iter().position(|byte| *byte != 0);
            assert_eq!(
                first, None,
                "seed {seed}, {number}: {size}, beyond the end: {:?}",
                self.sizes
            );
        }
    }
}

async fn crash_run(io: &Io, rig: &Arc<Rig>, seed: u64) -> usize {
    let mode = if seed.is_multiple_of(2) { Mode::Writethrough } else { Mode::Writeback };
    let mut random = Random::new(seed);
    let base = Arc::new(TestStore::new(BASE, seed));
    let content: Vec<u8> = (0..BASE / SECTOR).flat_map(|sector| stamped(of_base(sector))).collect();
    base.change(0, &content);
    let layout = Layout::new(LARGEST).unwrap();
    let disk = TestStore::new(layout.store_size(), seed);
    // What was there before, in whole sectors.
    for block in (0..64).chain(3590..3640) {
        disk.change(layout.data_start() + block * BLOCK, &stamped(7 << 50).repeat(8));
    }
    let disk = Arc::new(disk);
    let plain = CachedStore::from(Store::Test(base.clone()));
    let parent = plain_parent(io, &plain).await.unwrap();
    let store = Store::Test(Arc::new(disk.open_anew()));
    let top = CachedStore::new(&rig.cache, "new", store, mode).unwrap();
    let size = some_size(&mut random);
    Delta::create(io, &top, size, parent, [9; 16]).await.unwrap();
    drop(top);
    let (rig, io) = (rig.clone(), io.clone());
    let (history, sizes) = (BTreeMap::new(), vec![(size, 0, 0)]);
    let mut play = CrashPlay { io, rig, mode, base, history, sizes };
    let chain = ([disk.clone()], Some(&play.base));
    let layers = open_chain(&play.io, &play.rig, (&chain.0, chain.1), (mode, false)).await;
    layers.flush(&play.io).await.unwrap();
    let mut remains = Remains::of(&disk);
    disk.start_record();
    play.record(&layers, &disk, &mut random).await;
    drop(layers);
    let record = disk.take_record();
    let mut points = 0;
    let each = POINTS_PER_RUN.div_ceil(record.len());
    for number in 0..=record.len() {
        for _ in 0..each {
            points += 1;
            let left = Arc::new(remains.crash(&mut random, layout.store_size()));
            play.verify(&left, number, seed).await;
            // Reads ahead, which have the disk open, end.
            for _ in 0..4 {
                play.io.yield_iteration().await;
            }
        }
        if let Some(record) = record.get(number) {
            remains.take(number, record);
        }
    }
    points
}

#[test]
fn a_power_failure_leaves_the_size_of_before_or_the_new_one_and_what_was_flushed() {
    on_a_worker(Rig::new(16 << 20), async |io, rig| {
        let mut points = 0;
        for seed in 1..=RUNS {
            points += crash_run(&io, &rig, seed).await;
        }
        println!("{points} points");
        assert!(points >= 5_000, "{points} points only");
    });
}
