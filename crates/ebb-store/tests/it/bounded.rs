//! The work of a store between two yields to other tasks does not depend on its size: polls are
//! counted.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::future::Future;
use std::pin::pin;

use ebb_block::{BlockStore, ZeroFlags};
use ebb_io::{Io, Worker};
use ebb_store::{MemoryStore, NullStore, Store};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;
/// Chunks of 64 KiB in the store.
const CHUNKS: u32 = 512;

/// The result, and the number of polls it took.
async fn polls<T>(future: impl Future<Output = T>) -> (T, u32) {
    let (mut future, mut count) = (pin!(future), 0);
    std::future::poll_fn(|cx| {
        count += 1;
        future.as_mut().poll(cx).map(|result| (result, count))
    })
    .await
}

async fn fill(io: &Io, store: &Store) {
    for at in (0..SIZE).step_by(1 << 20) {
        let mut buf = io.pool().take(1 << 20).await;
        buf.fill(1);
        store.write(io, buf, at, false).await.0.unwrap();
    }
}

/// Long requests yield to other tasks, and short ones complete in one poll.
#[test]
fn long_requests_of_memory_are_copied_some_at_a_time() {
    const LONG: usize = 16 << 20;
    let worker = Worker::start_alone("copies").unwrap();
    let done = worker.handle().block_on(|io| async move {
        let pattern = |at: usize| u8::try_from(at / 4096 % 251).unwrap() + 1;
        // The second one ends within a block.
        for (length, pieces) in [(LONG, 64), ((4 << 20) + 512, 17)] {
            let store = Store::Memory(MemoryStore::new(1 << 30));
            let mut buf = io.pool().take(length).await;
            buf.iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at));
            let ((written, mut buf), count) = polls(store.write(&io, buf, 512, false)).await;
            written.unwrap();
            assert_eq!(count, pieces, "polls for a write of {length}");
            buf.fill(0);
            let ((read, buf), count) = polls(store.read(&io, buf, 512)).await;
            read.unwrap();
            assert_eq!(count, pieces, "polls for a read of {length}");
            assert!(buf.iter().enumerate().all(|(at, byte)| *byte == pattern(at)));
            let ((read, buf), count) =
                polls(Store::Null(NullStore::new(1 << 30)).read(&io, buf, 0)).await;
            read.unwrap();
            assert_eq!(count, pieces, "polls for zeroes");
            assert!(buf.iter().all(|byte| *byte == 0));
        }
        for store in
            [Store::Memory(MemoryStore::new(1 << 30)), Store::Null(NullStore::new(1 << 30))]
        {
            for length in [512, 4096, 256 << 10] {
                let buf = io.pool().take(length).await;
                let ((written, buf), writing) = polls(store.write(&io, buf, 0, false)).await;
                let ((read, _), reading) = polls(store.read(&io, buf, 0)).await;
                written.and(read).unwrap();
                assert_eq!((writing, reading), (1, 1), "{length}");
            }
        }
    });
    assert!(done.is_some(), "the run panicked; see above");
}

#[test]
fn discards_and_extents_of_memory_do_some_at_a_time() {
    let worker = Worker::start_alone("bounded").unwrap();
    let done = worker.handle().block_on(|io| async move {
        let store = Store::Memory(MemoryStore::new(1 << 40));
        fill(&io, &store).await;
        // Only a small range: the rest of the store does not count.
        let (freed, count) = polls(store.discard(&io, 4096, 65536)).await;
        freed.unwrap();
        assert_eq!(count, 1);
        let (freed, count) = polls(store.discard(&io, SIZE, (1 << 40) - SIZE)).await;
        freed.unwrap();
        assert_eq!(count, 1, "there is nothing to free");
        let (list, count) = polls(store.extents(&io, 0, 1 << 40, 10)).await;
        assert_eq!(list.unwrap().len(), 4);
        assert!(count > CHUNKS / 256, "{count} polls");
        let flags = ZeroFlags { may_unmap: true, fast_only: false };
        let (freed, count) = polls(store.write_zeroes(&io, 0, 1 << 40, flags)).await;
        freed.unwrap();
        assert!(count >= CHUNKS / 16, "{count} polls to free {CHUNKS} chunks");
        let Store::Memory(memory) = &store else { panic!("it is memory") };
        assert_eq!(memory.allocated(), 0);
    });
    assert!(done.is_some(), "the run panicked; see above");
}
