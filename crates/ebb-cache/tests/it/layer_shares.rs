//! Shares of volumes that consist of layers: what each volume and base holds while memory is short.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{MIB, PAGE, PageMap, Random, Rig, WholeLayer, on_a_worker, read};
use ebb_block::BlockStore;
use ebb_cache::{BaseLayer, BaseLayers, CachedStore, Layers, Mode, Reclaimer};
use ebb_io::Io;
use ebb_store::{MemoryStore, NullStore, Store, TestStore};

const CACHE: u64 = 12 * MIB;

/// Reads pages at random, through the cache.
struct Reader<'a> {
    io: &'a Io,
    random: Random,
    reclaimer: Reclaimer,
    now: Instant,
}

impl<'a> Reader<'a> {
    fn new(io: &'a Io, rig: &Rig) -> Reader<'a> {
        let reclaimer = Reclaimer::new(&rig.cache, Box::new(|| Some(0)));
        Reader { io, random: Random::new(9), reclaimer, now: rig.start }
    }

    /// One read of each volume at a page of its range, and so on.
    async fn each(&mut self, rig: &Rig, volumes: &[(&Layers, std::ops::Range<u64>)], count: u32) {
        for step in 0..count {
            for (layers, range) in volumes {
                let page = range.start / PAGE + self.random.below((range.end - range.start) / PAGE);
                drop(read(self.io, *layers, page * PAGE, PAGE).await);
            }
            if step % 200 == 0 {
                self.now += Duration::from_millis(300);
                self.reclaimer.run_once(&rig.cache, self.now);
            }
        }
    }
}

fn plain(rig: &Rig, name: &str) -> Layers {
    let store = Store::Memory(MemoryStore::new(64 * MIB));
    CachedStore::new(&rig.cache, name, store, Mode::Writethrough).unwrap().into()
}

/// A volume with 32 MiB of its own followed by 32 MiB of the base.
fn half_clone(rig: &Rig, name: &str, base: BaseLayer) -> Layers {
    let store = Store::Memory(MemoryStore::new(64 * MIB));
    let top = CachedStore::new(&rig.cache, name, store, Mode::Writethrough).unwrap();
    let map =
        PageMap { layers: (0..16384).map(|page| page / 8192).collect(), most: u64::MAX / PAGE / 4 };
    Layers::stack(name, top, vec![base], Box::new(map)).unwrap()
}

fn near(held: u64, expected: u64) -> bool {
    held.abs_diff(expected) <= CACHE / 16
}

#[test]
fn volumes_above_a_base_hold_their_shares_together_in_it() {
    on_a_worker(Rig::new(CACHE), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(64 * MIB, 1));
        let join = || bases.add("golden", Store::Test(test.clone()), Mode::Writethrough).unwrap();
        let kept = join();
        let golden = kept.cache().unwrap();
        let (one, two) = (half_clone(&rig, "one", join()), half_clone(&rig, "two", join()));
        let alone = plain(&rig, "alone");
        let mut reader = Reader::new(&io, &rig);
        let (own, shared) = (0..32 * MIB, 32 * MIB..64 * MIB);
        let held = |layers: &Layers| layers.top().cache().unwrap().stats().bufspace;
        // Two of three volumes read only the base: it has two thirds.
        let all = [(&one, shared.clone()), (&two, shared.clone()), (&alone, own.clone())];
        reader.each(&rig, &all, 12_000).await;
        println!("base {} alone {}", golden.stats().bufspace, held(&alone));
        assert!(near(golden.stats().bufspace, CACHE / 3 * 2), "{}", golden.stats().bufspace);
        assert!(near(held(&alone), CACHE / 3), "{}", held(&alone));
        // The first one reads data of its own, too: the base has the second one's share, and a quarter of the first
        // one's.
        let all = [
            (&one, own.clone()),
            (&one, shared.clone()),
            (&two, shared.clone()),
            (&alone, own.clone()),
        ];
        reader.each(&rig, &all, 12_000).await;
        let found = [held(&one), held(&two), held(&alone), golden.stats().bufspace];
        println!("one {} two {} alone {} base {}", found[0], found[1], found[2], found[3]);
        assert!(near(found[0], CACHE / 4) && found[1] == 0, "{found:?}");
        assert!(near(found[2], CACHE / 3) && near(found[3], CACHE / 12 * 5), "{found:?}");
        // The second one is idle: two volumes with half each, of which the base has a quarter of the first one's.
        let all = [(&one, own.clone()), (&one, shared.clone()), (&alone, own.clone())];
        reader.each(&rig, &all, 16_000).await;
        let found = [held(&one), held(&alone), golden.stats().bufspace];
        println!("one {} alone {} base {}", found[0], found[1], found[2]);
        assert!(near(found[0], CACHE / 8 * 3) && near(found[1], CACHE / 2), "{found:?}");
        assert!(near(found[2], CACHE / 8), "{found:?}");
    });
}

#[test]
fn a_reader_of_a_large_base_takes_no_share_of_another_volume() {
    on_a_worker(Rig::new(CACHE), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let golden = Store::Memory(MemoryStore::new(64 * MIB));
        let golden = bases.add("golden", golden, Mode::Writethrough).unwrap();
        let pages = golden.cache().unwrap().clone();
        // Its own layer has no cache: the volume counts all the same.
        let top = CachedStore::from(Store::Null(NullStore::new(64 * MIB)));
        let noisy = Layers::stack("noisy", top, vec![golden], Box::new(WholeLayer(1))).unwrap();
        let quiet = plain(&rig, "quiet");
        let mut reader = Reader::new(&io, &rig);
        // A little less than the quiet one's half.
        let hot = 0..CACHE * 2 / 5;
        reader.each(&rig, &[(&quiet, hot.clone())], 8_000).await;
        let stats = || quiet.top().cache().unwrap().stats();
        for _ in 0..200 {
            reader.each(&rig, &[(&noisy, 0..64 * MIB)], 50).await;
            reader.each(&rig, &[(&quiet, hot.clone())], 5).await;
        }
        let before = stats();
        reader.each(&rig, &[(&noisy, 0..64 * MIB), (&quiet, hot.clone())], 2000).await;
        let hits = stats().hits - before.hits;
        println!("{hits} hits of 2000, base {}", pages.stats().bufspace);
        assert!(hits >= 1900, "{hits} hits of 2000 beside the reader of the base");
        assert!(near(pages.stats().bufspace, CACHE - stats().bufspace), "the rest is the base's");
        // Hits in the base keep its volume active: nothing of it is evicted for the other one beyond the halves.
        let hot_base = 0..CACHE * 2 / 5;
        reader.each(&rig, &[(&noisy, hot_base.clone())], 12_000).await;
        let misses = pages.stats().misses;
        for _ in 0..200 {
            reader.each(&rig, &[(&noisy, hot_base.clone())], 5).await;
            reader.each(&rig, &[(&quiet, 0..64 * MIB)], 50).await;
        }
        let missed = pages.stats().misses - misses;
        println!("{missed} misses of 1000 in the base");
        assert!(missed <= 100, "{missed} misses of 1000 in the base");
    });
}

#[test]
fn layers_between_a_volume_and_a_base_are_charged_to_it() {
    on_a_worker(Rig::new(CACHE), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let [middle, bottom] = [1, 2].map(|seed| Arc::new(TestStore::new(64 * MIB, seed)));
        let join = |name: &str, test: &Arc<TestStore>| {
            bases.add(name, Store::Test(test.clone()), Mode::Writethrough).unwrap()
        };
        let stack = |name: &str| {
            let store = Store::Memory(MemoryStore::new(64 * MIB));
            let top = CachedStore::new(&rig.cache, name, store, Mode::Writethrough).unwrap();
            let map =
                PageMap { layers: (0..16384).map(|page| 1 + page / 8192).collect(), most: 8192 };
            let below = vec![join("middle", &middle), join("bottom", &bottom)];
            Layers::stack(name, top, below, Box::new(map)).unwrap()
        };
        let (one, two) = (stack("one"), stack("two"));
        let [middle, bottom] = [join("middle", &middle), join("bottom", &bottom)];
        let alone = plain(&rig, "alone");
        let mut reader = Reader::new(&io, &rig);
        let (first, second) = (0..32 * MIB, 32 * MIB..64 * MIB);
        let all = [
            (&one, first.clone()),
            (&one, second.clone()),
            (&two, first.clone()),
            (&two, second.clone()),
            (&alone, first.clone()),
        ];
        reader.each(&rig, &all, 8_000).await;
        let top = alone.top();
        let held = [middle.cache(), bottom.cache(), top.cache()];
        let [middle, bottom, alone] = held.map(|cache| cache.unwrap().stats().bufspace);
        println!("middle {middle} bottom {bottom} alone {alone}");
        assert!(near(alone, CACHE / 3), "{alone}");
        assert!(near(middle + bottom, CACHE / 3 * 2), "{middle} + {bottom}");
    });
}

#[test]
fn a_base_in_use_by_no_volume_is_evicted_first() {
    on_a_worker(Rig::new(CACHE), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(64 * MIB, 1));
        let join = || bases.add("golden", Store::Test(test.clone()), Mode::Writethrough).unwrap();
        let kept = join();
        let pages = kept.cache().unwrap().clone();
        let user = half_clone(&rig, "one", join());
        let mut reader = Reader::new(&io, &rig);
        reader.each(&rig, &[(&user, 32 * MIB..64 * MIB)], 8_000).await;
        assert!(near(pages.stats().bufspace, CACHE));
        // Released: it does not count any more, although its cache still exists.
        user.release();
        let other = plain(&rig, "other");
        reader.each(&rig, &[(&other, 0..32 * MIB)], 16_000).await;
        assert_eq!(pages.stats().bufspace, 0);
    });
}

#[test]
fn own_data_does_not_keep_a_base_out_of_the_cache() {
    on_a_worker(Rig::new(CACHE), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let golden =
            bases.add("golden", Store::Memory(MemoryStore::new(64 * MIB)), Mode::Writethrough);
        let golden = golden.unwrap();
        let base = golden.cache().unwrap().clone();
        let one = half_clone(&rig, "one", golden);
        let top = one.top();
        let own = top.cache().unwrap();
        let mut reader = Reader::new(&io, &rig);
        // Own data fills the cache, and is not read again.
        reader.each(&rig, &[(&one, 0..32 * MIB)], 12_000).await;
        assert!(near(own.stats().bufspace, CACHE), "{}", own.stats().bufspace);
        // An eighth of the cache of the base is read again and again: less than the quarter it may hold.
        let hot = 32 * MIB..32 * MIB + CACHE / 8;
        reader.each(&rig, &[(&one, hot.clone())], 6_000).await;
        let misses = base.stats().misses;
        reader.each(&rig, &[(&one, hot.clone()), (&one, 0..32 * MIB)], 2_000).await;
        let missed = base.stats().misses - misses;
        println!("own {} base {} missed {missed}", own.stats().bufspace, base.stats().bufspace);
        assert!(missed <= 100, "{missed} misses of 2000 in the base");
        // The base is not read any more: what it holds is the first to go.
        reader.each(&rig, &[(&one, 0..32 * MIB)], 16_000).await;
        let found = [own.stats().bufspace, base.stats().bufspace];
        println!("own {} base {}", found[0], found[1]);
        assert!(near(found[0], CACHE), "{found:?}");
    });
}

#[test]
fn volumes_that_use_their_layers_differently_hold_no_more_than_their_shares() {
    on_a_worker(Rig::new(CACHE), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let [middle, bottom] = [1, 2].map(|seed| Arc::new(TestStore::new(64 * MIB, seed)));
        let join = |name: &str, test: &Arc<TestStore>| {
            bases.add(name, Store::Test(test.clone()), Mode::Writethrough).unwrap()
        };
        // A third of each is of one layer.
        let part = 21 * MIB;
        let stack = |name: &str| {
            let store = Store::Memory(MemoryStore::new(64 * MIB));
            let top = CachedStore::new(&rig.cache, name, store, Mode::Writethrough).unwrap();
            let layers = (0..16384).map(|page| (page * 4096 / (21 << 20)).min(2)).collect();
            let map = PageMap { layers, most: 8192 };
            let below = vec![join("middle", &middle), join("bottom", &bottom)];
            Layers::stack(name, top, below, Box::new(map)).unwrap()
        };
        let (one, two) = (stack("one"), stack("two"));
        let alone = plain(&rig, "alone");
        let mut reader = Reader::new(&io, &rig);
        // The first volume uses all of its share for own data, the second one has none.
        let all = [
            (&one, 0..part),
            (&one, 0..part),
            (&two, part..2 * part),
            (&two, 2 * part..3 * part),
            (&alone, 0..32 * MIB),
        ];
        reader.each(&rig, &all, 16_000).await;
        let held = [one.top().cache(), alone.top().cache()].map(|c| c.unwrap().stats().bufspace);
        let shared = [join("middle", &middle), join("bottom", &bottom)]
            .map(|base| base.cache().unwrap().stats().bufspace);
        println!("own {} alone {} shared {shared:?}", held[0], held[1]);
        assert!(near(held[1], CACHE / 3), "{held:?} {shared:?}");
        assert!(near(held[0] + shared[0] + shared[1], CACHE / 3 * 2), "{held:?} {shared:?}");
        assert!(shared.iter().all(|held| *held >= CACHE / 16), "{shared:?}");
    });
}
