//! A store that keeps nothing, for benchmarks of the layers above it.

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, Capabilities, Extent, Identity, Io, MEMORY_PIECE,
    NONE_REMAINING, Remaining, Resize, ResizeError, ZeroFlags,
};

use crate::COPY_BYTES;

const ZEROES: &[u8; 4096] = &[0; 4096];

/// Reads return zeroes, writes are discarded.
#[derive(Debug)]
pub struct NullStore {
    size: u64,
}

impl NullStore {
    /// A store of `size` bytes.
    pub fn new(size: u64) -> NullStore {
        NullStore { size }
    }
}

impl BlockStore for NullStore {
    fn size(&self) -> u64 {
        self.size
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: false,
            discard: true,
            fast_zero: true,
            alignment: 1,
            direct: false,
            read_piece: Some(MEMORY_PIECE),
        }
    }

    fn identity(&self) -> Identity {
        Identity::of_key("null".to_owned())
    }

    fn place(&self) -> String {
        "memory".to_owned()
    }

    async fn read(&self, io: &Io, mut buf: Buf, _offset: u64) -> BufResult {
        let mut at = 0;
        loop {
            let end = buf.len().min(at + COPY_BYTES);
            buf[at..end].fill(0);
            if end == buf.len() {
                return (Ok(()), buf);
            }
            at = end;
            io.yield_now().await;
        }
    }

    async fn write(&self, _io: &Io, buf: Buf, _offset: u64, _fua: bool) -> BufResult {
        (Ok(()), buf)
    }

    async fn flush(&self, _io: &Io) -> Result<(), BlockError> {
        Ok(())
    }

    async fn zero_range(
        &self,
        _io: &Io,
        _offset: u64,
        _length: u64,
        _flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        Ok(NONE_REMAINING)
    }

    async fn extents(
        &self,
        _io: &Io,
        offset: u64,
        length: u64,
        _limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        Ok(vec![Extent { offset, length, hole: true }])
    }

    fn has_direct_access(&self) -> bool {
        true
    }

    fn read_in_place(&self, _offset: u64, length: u64, mut see: impl FnMut(&[u8])) -> bool {
        let mut left = usize::try_from(length).unwrap_or(usize::MAX);
        while left > 0 {
            let here = left.min(ZEROES.len());
            see(&ZEROES[..here]);
            left -= here;
        }
        true
    }

    fn write_in_place(&self, _offset: u64, length: u64, mut put: impl FnMut(&mut [u8])) -> bool {
        let mut forgotten = [0; ZEROES.len()];
        let mut left = usize::try_from(length).unwrap_or(usize::MAX);
        while left > 0 {
            let here = left.min(forgotten.len());
            put(&mut forgotten[..here]);
            left -= here;
        }
        true
    }

    async fn check_resize(&self, _io: &Io, _order: Resize) -> Result<u64, ResizeError> {
        Err(ResizeError::Unsupported {
            why: "a null store keeps its size",
            remedy: "remove the volume, and add it with the store `null:SIZE`",
        })
    }
}
