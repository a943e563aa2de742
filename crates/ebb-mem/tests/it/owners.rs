//! Owners: there are as many as are registered, and each is counted exactly, by workers created before and after it.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::time::Instant;

use ebb_mem::{Memory, MemoryError, MemoryOptions, WorkerMemory};

#[test]
fn there_are_as_many_owners_as_are_registered_and_each_is_counted() {
    const MANY: i64 = 5000;
    let memory = Memory::new(MemoryOptions::new(256 << 20, Instant::now())).unwrap();
    let old = memory.worker(|| ());
    let owners: Vec<_> = (0..MANY).map(|n| memory.owner(&format!("v{n}")).unwrap()).collect();
    let young = memory.worker(|| ());
    let take = |worker: &WorkerMemory| {
        let blocks = owners.iter().map(|&owner| worker.alloc(4096, owner).unwrap());
        blocks.collect::<Vec<_>>()
    };
    let (first, second) = (take(&old), take(&young));
    let wired = || {
        let stats = memory.stats();
        let named = stats.owners.into_iter().filter(|owner| owner.name.starts_with('v'));
        named.map(|owner| owner.wired).collect::<Vec<_>>()
    };
    assert_eq!(wired(), vec![8192; usize::try_from(MANY).unwrap()]);
    // The counts of a worker that has ended are kept.
    first.into_iter().for_each(|block| young.free(block));
    drop(old);
    assert_eq!(wired(), vec![4096; usize::try_from(MANY).unwrap()]);
    second.into_iter().for_each(|block| young.free(block));
    assert_eq!(wired(), vec![0; usize::try_from(MANY).unwrap()]);
}

#[test]
fn a_released_owner_number_is_reused_and_the_limit_is_reported() {
    let options = MemoryOptions { owners: 3, ..MemoryOptions::new(64 << 20, Instant::now()) };
    let memory = Memory::new(options).unwrap();
    let (one, two) = (memory.owner("one").unwrap(), memory.owner("two").unwrap());
    assert!(matches!(memory.owner("three"), Err(MemoryError::Owners(3))));
    memory.release_owner(one);
    memory.release_owner(one);
    assert_eq!(memory.owner("three").unwrap(), one);
    assert!(matches!(memory.owner("four"), Err(MemoryError::Owners(3))), "released once only");
    memory.release_owner(two);
    let names: Vec<_> = memory.stats().owners.into_iter().map(|owner| owner.name).collect();
    assert_eq!(names, ["cache", "three"]);
}
