//! Holes, discards and zeroes on real file systems.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use common::{Bench, KIB, MIB, allocated, create, file, folder, tmpfs_folder};
use ebb_block::{BlockStore, ErrorKind};
use ebb_store::{Direct, MemoryStore, Store};

const SIZE: u64 = 4 * MIB;

fn extents_follow_the_data(bench: &Bench) {
    assert_eq!(bench.extents(0, SIZE, 100).unwrap(), [(0, SIZE, true)]);
    bench.write(MIB, &[1; 64 << 10]).unwrap();
    bench.write(2 * MIB, &[2; 4 << 10]).unwrap();
    bench.flush().unwrap();
    let all = [
        (0, MIB, true),
        (MIB, 64 * KIB, false),
        (MIB + 64 * KIB, MIB - 64 * KIB, true),
        (2 * MIB, 4 * KIB, false),
        (2 * MIB + 4 * KIB, 2 * MIB - 4 * KIB, true),
    ];
    assert_eq!(bench.extents(0, SIZE, 100).unwrap(), all);
    for limit in 1..=5 {
        assert_eq!(bench.extents(0, SIZE, limit).unwrap(), all[..limit]);
    }
    // From the middle of a run to the middle of another.
    assert_eq!(
        bench.extents(MIB + 512, 128 * KIB, 100).unwrap(),
        [(MIB + 512, 64 * KIB - 512, false), (MIB + 64 * KIB, 64 * KIB + 512, true)]
    );
    assert_eq!(bench.extents(SIZE - 512, 512, 1).unwrap(), [(SIZE - 512, 512, true)]);
    bench.discard(MIB, 64 * KIB).unwrap();
    bench.discard(2 * MIB, 512).unwrap();
    assert_eq!(bench.extents(0, 2 * MIB, 100).unwrap(), [(0, 2 * MIB, true)]);
    assert_eq!(bench.read(MIB, 64 << 10).unwrap(), [0; 64 << 10]);
    // A discard of part of a block changes no other bytes.
    assert_eq!(bench.read(2 * MIB + 512, 3584).unwrap(), [2; 3584]);
    assert_eq!(bench.store().size(), SIZE);
}

#[test]
fn extents_of_a_file() {
    let folder = folder();
    for direct in [Direct::Off, Direct::Auto] {
        let path = file(&folder, &format!("{direct:?}"));
        extents_follow_the_data(&Bench::new(create(&path, SIZE, direct)));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
    }
}

#[test]
fn extents_of_a_file_on_tmpfs() {
    let folder = tmpfs_folder();
    extents_follow_the_data(&Bench::new(create(&file(&folder, "image"), SIZE, Direct::Off)));
}

#[test]
fn extents_of_memory() {
    extents_follow_the_data(&Bench::new(Store::Memory(MemoryStore::new(SIZE))));
}

/// Fills the store, and returns how much is allocated afterwards.
fn filled(bench: &Bench, path: &std::path::Path) -> u64 {
    bench.write(0, &vec![3; usize::try_from(SIZE).unwrap()]).unwrap();
    bench.flush().unwrap();
    let full = allocated(path);
    assert!(full >= SIZE);
    full
}

fn zeroes_where_zeroes_were_written(bench: &Bench) {
    let data = bench.read(0, 2 << 20).unwrap();
    assert!(data[..512] == [3; 512] && data[512 + (1 << 20)..] == vec![3; (1 << 20) - 512]);
    assert!(data[512..512 + (1 << 20)].iter().all(|b| *b == 0));
}

#[test]
fn discarding_frees_space() {
    for folder in [folder(), tmpfs_folder()] {
        let path = file(&folder, "image");
        let bench = Bench::new(create(&path, SIZE, Direct::Off));
        let full = filled(&bench, &path);
        bench.discard(0, 2 * MIB).unwrap();
        assert!(allocated(&path) <= full - 2 * MIB);
    }
}

#[test]
fn zeroes_may_leave_a_hole() {
    for folder in [folder(), tmpfs_folder()] {
        let path = file(&folder, "image");
        let bench = Bench::new(create(&path, SIZE, Direct::Off));
        let full = filled(&bench, &path);
        // Both ends in the middle of a block.
        bench.zero(512, MIB, true, false).unwrap();
        zeroes_where_zeroes_were_written(&bench);
        assert!(allocated(&path) <= full - MIB + 8 * KIB);
    }
}

#[test]
fn zeroes_without_a_hole_keep_the_space_and_take_it_where_there_was_none() {
    for folder in [folder(), tmpfs_folder()] {
        for direct in [Direct::Off, Direct::Auto] {
            let path = file(&folder, &format!("{direct:?}"));
            let bench = Bench::new(create(&path, SIZE, direct));
            bench.zero(MIB, MIB, false, false).unwrap();
            assert!(allocated(&path) >= MIB, "no space was allocated for a range that was a hole");
            let full = filled(&bench, &path);
            bench.zero(512, MIB, false, false).unwrap();
            zeroes_where_zeroes_were_written(&bench);
            assert_eq!(allocated(&path), full, "and none was freed");
        }
    }
}

#[test]
fn fast_zeroes_are_fast_or_refused() {
    // A real file system supports both, with and without holes.
    let here = folder();
    let path = file(&here, "image");
    let bench = Bench::new(create(&path, SIZE, Direct::Off));
    filled(&bench, &path);
    bench.zero(512, MIB, false, true).unwrap();
    zeroes_where_zeroes_were_written(&bench);
    bench.zero(0, SIZE, true, true).unwrap();
    assert_eq!(allocated(&path), 0);

    // tmpfs can only punch holes.
    let there = tmpfs_folder();
    let path = file(&there, "image");
    let bench = Bench::new(create(&path, SIZE, Direct::Off));
    filled(&bench, &path);
    let error = bench.zero(512, MIB, false, true).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported);
    let data = bench.read(0, 2 << 20).unwrap();
    assert!(data.iter().all(|b| *b == 3), "a refused request has changed nothing");
    bench.zero(512, MIB, true, true).unwrap();
    zeroes_where_zeroes_were_written(&bench);
}

/// Where sectors have 4 KiB, smaller writes are read-modify-write: they must not overwrite
/// concurrent zeroes in neighbouring sectors.
#[test]
fn zeroes_beside_an_unaligned_write_stay() {
    let folder = folder();
    let path = file(&folder, "image");
    let bench = Bench::new(create(&path, SIZE, Direct::Off).assume_alignment(4096));
    for round in 0..300u64 {
        let base = round % 64 * 4096;
        bench.write(base, &[9; 4096]).unwrap();
        bench.on(move |io, store| async move {
            let zero = {
                let (io, store) = (io.clone(), store.clone());
                async move {
                    let flags = ebb_block::ZeroFlags { may_unmap: true, fast_only: false };
                    store.write_zeroes(&io, base, 512, flags).await.unwrap();
                }
            };
            let write = {
                let (io, store) = (io.clone(), store.clone());
                async move {
                    let mut buf = io.pool().get_for_test(512);
                    buf.fill(5);
                    store.write(&io, buf, base + 512, false).await.0.unwrap();
                }
            };
            let first = io.spawn(write);
            for _ in 0..round % 4 {
                io.yield_now().await;
            }
            let second = io.spawn(zero);
            first.await;
            second.await;
        });
        let block = bench.read(base, 4096).unwrap();
        assert!(block[..512].iter().all(|b| *b == 0), "round {round}: the zeroes are lost");
        assert!(block[512..1024].iter().all(|b| *b == 5), "round {round}: the write is lost");
        assert!(block[1024..].iter().all(|b| *b == 9), "round {round}: other bytes have changed");
    }
}
