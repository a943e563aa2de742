//! The checks of a read-only store.

use super::{AREA, GROWTH, Suite, Violation, all, ensure, index};
use crate::error::{BlockError, ErrorKind};
use crate::resize::Resize;
use crate::store::{BlockStore, ZeroFlags};

/// Ranges of the area: parts of blocks, whole blocks, and more than a copying store does at once.
const RANGES: [(u64, u64); 9] = [
    (0, 512),
    (512, 4096),
    (3584, 1024),
    (4096, 4096),
    (8192, 65_536),
    (65_024, 66_048),
    (131_072, 262_144),
    (400_384, 300_032),
    (0, AREA),
];

impl<S: BlockStore> Suite<'_, S> {
    pub(super) async fn run_read_only(mut self) -> Result<(), Violation> {
        self.description()?;
        ensure!(self.store.capabilities().read_only, "a read-only store that does not say so");
        for (offset, length) in RANGES {
            self.compare(offset, length).await?;
            self.refuses_changes(offset, length).await?;
        }
        self.refused_ranges().await?;
        for limit in [1, 2, 100] {
            let mut at = 0;
            while at < AREA {
                at = self.some_extents(at, AREA, limit).await?;
            }
        }
        self.prefetches().await?;
        self.in_place().await?;
        for result in all(RANGES.map(|(offset, length)| self.compare(offset, length))).await {
            result?;
        }
        self.keeps_its_size().await?;
        self.cancelled_reads().await?;
        self.stable().await?;
        self.compare(0, AREA).await
    }

    async fn refuses_changes(&mut self, offset: u64, length: u64) -> Result<(), Violation> {
        let (buf, _) = self.buffer(length).await;
        let (io, store) = (self.io, self.store);
        let flags = ZeroFlags { may_unmap: true, fast_only: false };
        let (written, buf) = store.write(io, buf, offset, false).await;
        ensure!(buf.len() as u64 == length, "a refused write returned {} bytes", buf.len());
        let results: [(&str, Result<(), BlockError>); 3] = [
            ("write", written),
            ("discard", store.discard(io, offset, length).await),
            ("write-zeroes", store.write_zeroes(io, offset, length, flags).await),
        ];
        for (name, result) in results {
            let found = result.as_ref().err().map(|error| error.kind);
            ensure!(
                found == Some(ErrorKind::ReadOnly),
                "{name} of {length} at {offset}: {result:?}"
            );
        }
        self.compare(offset, length).await
    }

    async fn in_place(&self) -> Result<(), Violation> {
        let mut seen = Vec::new();
        let direct = self.store.has_direct_access();
        let done = self.store.read_in_place(512, 70_144, |part| seen.extend_from_slice(part));
        ensure!(done == direct, "read in place: {done}, access: {direct}");
        let right = seen == self.model[512..512 + 70_144];
        ensure!(right || !direct, "a read in place returned other data");
        let written = self.store.write_in_place(0, 512, |part| part.fill(0));
        ensure!(!written, "a read-only store was written in place");
        Ok(())
    }

    async fn keeps_its_size(&self) -> Result<(), Violation> {
        let from = self.store.size();
        for to in [from + GROWTH, from / 2] {
            let resized = self.store.resize(self.io, Resize { to: Some(to), shrink: true }).await;
            ensure!(resized.is_err(), "a read-only store was resized: {resized:?}");
        }
        ensure!(self.store.size() == from, "a refused resize changed the size");
        Ok(())
    }

    /// Reads whose future is dropped leave the store usable.
    async fn cancelled_reads(&self) -> Result<(), Violation> {
        for polls in 1..8 {
            for (offset, length) in RANGES {
                let buf = self.io.pool().take(index(length)).await;
                let read = self.store.read(self.io, buf, offset);
                super::requests::begin_and_drop(self.io, read, polls).await;
                let extents = self.store.extents(self.io, offset, length, 8);
                super::requests::begin_and_drop(self.io, extents, polls).await;
            }
            self.compare(0, AREA).await?;
        }
        Ok(())
    }
}
