//! The store of docs/guides/adding-a-store.md. The guide's code is this file's; a test compares them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, Capabilities, Extent, Identity, Io, MEMORY_PIECE,
    NONE_REMAINING, Remaining, Resize, ResizeError, SECTOR, Tracked, Tracking, ZeroFlags,
    check_size_change, conformance,
};
use ebb_io::Worker;

/// Bytes copied before the worker's other tasks run.
const COPY_BYTES: usize = 256 << 10;

/// A disk in one vector.
#[derive(Debug)]
struct ExampleStore {
    key: String,
    bytes: Mutex<Vec<u8>>,
    tracking: Tracking,
}

impl ExampleStore {
    fn new(size: usize) -> ExampleStore {
        let key = format!("example {:016x}", ebb_block::nonce());
        ExampleStore { key, bytes: Mutex::new(vec![0; size]), tracking: Tracking::default() }
    }

    /// Never held across an await.
    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl BlockStore for ExampleStore {
    fn size(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: false,
            discard: false,
            fast_zero: true,
            alignment: 1,
            direct: false,
            read_piece: Some(MEMORY_PIECE),
        }
    }

    fn identity(&self) -> Identity {
        Identity::of_key(self.key.clone())
    }

    fn place(&self) -> String {
        "an example".to_owned()
    }

    fn tracking(&self) -> Option<&Tracking> {
        Some(&self.tracking)
    }

    async fn read(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        for (number, part) in buf.chunks_mut(COPY_BYTES).enumerate() {
            if number > 0 {
                io.yield_now().await;
            }
            let at = index(offset) + number * COPY_BYTES;
            part.copy_from_slice(&self.bytes()[at..at + part.len()]);
        }
        (Ok(()), buf)
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, _fua: bool) -> BufResult {
        for (number, part) in buf.chunks(COPY_BYTES).enumerate() {
            if number > 0 {
                io.yield_now().await;
            }
            let at = index(offset) + number * COPY_BYTES;
            self.bytes()[at..at + part.len()].copy_from_slice(part);
        }
        (Ok(()), buf)
    }

    async fn flush(&self, _io: &Io) -> Result<(), BlockError> {
        Ok(())
    }

    async fn zero_range(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        _flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        let (mut at, end) = (index(offset), index(offset + length));
        while at < end {
            let next = end.min(at + COPY_BYTES);
            self.bytes()[at..next].fill(0);
            at = next;
            io.yield_now().await;
        }
        Ok(NONE_REMAINING)
    }

    async fn extents(
        &self,
        _io: &Io,
        offset: u64,
        length: u64,
        _limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let end = index(offset + length.min(COPY_BYTES as u64));
        let hole = self.bytes()[index(offset)..end].iter().all(|byte| *byte == 0);
        Ok(vec![Extent { offset, length: end as u64 - offset, hole }])
    }

    async fn check_resize(&self, _io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let from = self.size();
        let to = order.to.unwrap_or(from);
        check_size_change(from, to, SECTOR, order.shrink).map(|()| to)
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let to = self.check_resize(io, order).await?;
        self.bytes().resize(index(to), 0);
        Ok(to)
    }
}

#[test]
fn the_example_store_conforms() {
    let worker = Worker::start_alone("example").unwrap();
    let store = Tracked(ExampleStore::new(4 << 20));
    let checked = worker.handle().block_on(|io| async move {
        let checked = conformance::check(&io, &store).await;
        checked.unwrap();
    });
    assert!(checked.is_some(), "see the panic above");
}

/// Each block of code in the guide is part of this file.
#[test]
fn the_guide_shows_the_code_of_the_example_store() {
    let guide = include_str!("../../../../docs/guides/adding-a-store.md");
    let code = include_str!("example_store.rs");
    let blocks: Vec<&str> =
        guide.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 4, "{} blocks of code", blocks.len());
    for block in blocks {
        assert!(code.contains(block), "not in example_store.rs:\n{block}");
    }
}
