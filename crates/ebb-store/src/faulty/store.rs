//! The test store as a store.

use std::sync::atomic::Ordering;

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, Capabilities, Extent, Identity, Io, LaterFlushes,
    NONE_REMAINING, Operation, Remaining, Resize, ResizeError, SECTOR, Tracking, ZeroFlags,
    check_size_change,
};

use super::TestStore;

impl BlockStore for TestStore {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: false,
            discard: true,
            fast_zero: true,
            alignment: self.alignment.load(Ordering::Relaxed),
            direct: !self.indirect.load(Ordering::Relaxed),
            read_piece: None,
        }
    }

    /// The number of the disk, however often it is opened.
    fn identity(&self) -> Identity {
        let number = self.disk.number.load(Ordering::Relaxed);
        let numbered = || Identity::of_key(format!("test {number}"));
        self.disk.file_identity().unwrap_or_else(numbered)
    }

    fn place(&self) -> String {
        "a test".to_owned()
    }

    fn tracking(&self) -> Option<&Tracking> {
        Some(&self.tracking)
    }

    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        self.disk.read(io, buf, offset).await
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        self.disk.write(io, buf, offset, fua).await
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        if self.disk.silent.load(Ordering::SeqCst) {
            let source = std::io::ErrorKind::TimedOut.into();
            return Err(BlockError::from_io(source, Operation::Flush, 0, 0));
        }
        self.disk.flush(io).await
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        self.disk.zero(io, Operation::Discard, offset, length).await
    }

    async fn zero_range(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        _flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        self.disk.zero(io, Operation::WriteZeroes, offset, length).await.map(|()| NONE_REMAINING)
    }

    async fn extents(
        &self,
        _io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let all = || vec![Extent { offset, length, hole: false }];
        Ok(self.disk.file_extents(offset, length, limit).unwrap_or_else(all))
    }

    fn later_flushes(&self, error: &BlockError) -> LaterFlushes {
        match (self.lost_nothing(error), self.reports_lost_writes()) {
            (true, _) => LaterFlushes::Succeed,
            (false, true) => LaterFlushes::Hide,
            (false, false) => LaterFlushes::Fail,
        }
    }

    async fn has_no_unreported_error(&self, _io: &Io) -> bool {
        self.disk.has_no_unreported_error()
    }

    async fn check_resize(&self, _io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let to = order.to.unwrap_or(self.size());
        check_size_change(self.size(), to, SECTOR, order.shrink).map(|()| to)
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let to = self.check_resize(io, order).await?;
        self.set_size(to);
        Ok(to)
    }

    fn abort(&self) {
        self.aborts.fetch_add(1, Ordering::Relaxed);
    }
}
