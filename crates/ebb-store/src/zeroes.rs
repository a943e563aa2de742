//! Writing zeroes, also to stores that can only write them as data.
//!
//! # Invariants
//! - Zeroes that are written as data take no memory, however long the range: whole blocks are sent
//!   from a shared zero page. Only a part of a block, which is read, modified and written, takes a
//!   buffer for a moment.
//! - A limited number of ranges of a store are written at a time; requests that wait for their
//!   permit hold no memory.
//! - Between two pieces it is checked whether the zeroes are still wanted: the request ends early
//!   if its client has disconnected or its volume is being closed, however long the range.

use std::ops::Range;

use async_lock::{Semaphore, SemaphoreGuard};

use crate::{BlockError, ErrorKind, Io, Operation, Store, ZeroFlags};

/// The most bytes written at a time.
pub(crate) const PIECE_BYTES: usize = 1 << 20;
const PIECE: u64 = PIECE_BYTES as u64;
/// Ranges of a store that are written at a time.
const AT_ONCE: usize = 4;

/// Whether the zeroes of a request are still wanted.
pub type Wanted<'a> = &'a dyn Fn() -> bool;

/// Permits for writing zeroes as data.
#[derive(Debug)]
pub(crate) struct ZeroPermits(Semaphore);

impl Default for ZeroPermits {
    fn default() -> Self {
        ZeroPermits(Semaphore::new(AT_ONCE))
    }
}

impl ZeroPermits {
    async fn acquire(&self) -> SemaphoreGuard<'_> {
        self.0.acquire().await
    }
}

/// What remains to be written as data: two ends of a range, both of which may be empty.
pub(crate) type Remaining = [Range<u64>; 2];

/// Nothing remains.
pub(crate) const NONE_REMAINING: Remaining = [0..0, 0..0];

/// The unit of writing zeroes as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZeroPiece {
    /// Bytes of whole blocks.
    Whole(u64),
    /// Bytes within one block.
    Part(u64),
}

impl ZeroPiece {
    /// The first piece of a range that is not empty, for a store with blocks of `block` bytes that
    /// accepts `most` bytes per write.
    fn first_of(range: &Range<u64>, block: u64, most: u64) -> ZeroPiece {
        let length = range.end - range.start;
        let into = range.start % block;
        if into > 0 || length < block {
            return ZeroPiece::Part((block - into).min(length));
        }
        let most = PIECE.min(most).min(length);
        ZeroPiece::Whole((most - most % block).max(block))
    }

    fn bytes(self) -> u64 {
        match self {
            ZeroPiece::Whole(bytes) | ZeroPiece::Part(bytes) => bytes,
        }
    }
}

impl Store {
    /// Makes a range read as zeroes.
    pub async fn write_zeroes(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<(), BlockError> {
        self.write_zeroes_while(io, offset, length, flags, &|| true).await
    }

    /// As [`Store::write_zeroes`]; fails with [`ErrorKind::Closing`] if zeroes must be written as
    /// data and `wanted` returns false. The range then holds old data or zeroes.
    pub async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let tracked = self.begin();
        let left = match self {
            Store::File(s) => s.zero_quickly(io, offset, length, flags).await,
            Store::Nbd(s) => s.zero_quickly(io, offset, length, flags).await,
            #[cfg(feature = "test-store")]
            Store::Test(s) => {
                s.zero(io, Operation::WriteZeroes, offset, length).await.map(|()| NONE_REMAINING)
            }
            Store::Memory(s) => {
                s.discard(io, offset, length).await;
                Ok(NONE_REMAINING)
            }
            Store::Null(_) => Ok(NONE_REMAINING),
        };
        let left = tracked.end(left)?;
        if left.iter().all(Range::is_empty) {
            return Ok(());
        }
        // Boxed: few stores need it, and it would enlarge the future of every request.
        Box::pin(self.write_out(io, left, wanted)).await
    }

    async fn write_out(
        &self,
        io: &Io,
        left: Remaining,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let (zero_permits, block, most) = match self {
            Store::File(s) => (s.zero_permits(), u64::from(s.capabilities().alignment), PIECE),
            Store::Nbd(s) => {
                (s.zero_permits(), u64::from(s.capabilities().alignment), s.write_most())
            }
            _ => return Ok(()),
        };
        let _permit = zero_permits.acquire().await;
        for mut range in left {
            while !range.is_empty() {
                let piece = ZeroPiece::first_of(&range, block.max(1), most);
                if !wanted() {
                    let (kind, operation) = (ErrorKind::Closing, Operation::WriteZeroes);
                    let left = range.end - range.start;
                    return Err(BlockError::new(kind, operation, range.start, left));
                }
                let tracked = self.begin();
                let result = self.write_out_piece(io, range.start, piece).await;
                tracked.end(result)?;
                range.start += piece.bytes();
            }
        }
        Ok(())
    }

    async fn write_out_piece(&self, io: &Io, at: u64, piece: ZeroPiece) -> Result<(), BlockError> {
        let result = match (self, piece) {
            (Store::File(s), ZeroPiece::Whole(length)) => s.zero_blocks(io, at, length).await,
            (Store::Nbd(s), ZeroPiece::Whole(length)) => s.zero_blocks(io, at, length).await,
            (_, ZeroPiece::Part(length)) => {
                // Less than a block.
                let mut buf = io.pool().take(usize::try_from(length).unwrap_or(usize::MAX)).await;
                buf.fill(0);
                match self {
                    Store::File(s) => s.write(io, buf, at, false).await.0,
                    Store::Nbd(s) => s.write(io, buf, at, false).await.0,
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        };
        result.map_err(|error| BlockError { operation: Operation::WriteZeroes, ..error })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::Read;

    use super::*;

    /// A pipe accepts little at a time.
    #[test]
    fn zeroes_take_no_memory_and_end_when_they_are_not_wanted() {
        let (mut read_end, write_end) = std::io::pipe().unwrap();
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            read_end.read_to_end(&mut all).unwrap();
            all
        });
        let worker = ebb_io::Worker::start_alone("zeroes").unwrap();
        worker
            .handle()
            .block_on(|io| async move {
                let store = Store::File(crate::file::tests::over(write_end));
                let looks = Cell::new(0);
                let wanted = || {
                    looks.set(looks.get() + 1);
                    assert_eq!(io.pool().used_bytes(), 0, "memory for zeroes");
                    looks.get() <= 2
                };
                let ended = store.write_out(&io, [0..1 << 40, 0..0], &wanted).await;
                let error = ended.unwrap_err();
                let (kind, at) = (ErrorKind::Closing, 2 << 20);
                assert_eq!((error.kind, error.offset, looks.get()), (kind, at, 3));
                store.write_out(&io, [0..512, 1024..5120], &|| true).await.unwrap();
            })
            .unwrap();
        let all = reader.join().unwrap();
        assert_eq!(all.len(), (2 << 20) + 512 + 4096);
        assert!(all.iter().all(|byte| *byte == 0));
    }

    fn pieces(mut range: Range<u64>, block: u64, most: u64) -> Vec<ZeroPiece> {
        let mut all = Vec::new();
        while !range.is_empty() {
            let piece = ZeroPiece::first_of(&range, block, most);
            range.start += piece.bytes();
            all.push(piece);
        }
        all
    }

    #[test]
    fn whole_blocks_are_whole_and_ends_are_parts() {
        use ZeroPiece::{Part, Whole};
        let mib = 1 << 20;
        assert_eq!(pieces(512..512 + mib, 1, PIECE), [Whole(mib)]);
        assert_eq!(pieces(0..2 * mib + 512, 512, PIECE), [Whole(mib), Whole(mib), Whole(512)]);
        assert_eq!(pieces(512..1024, 4096, PIECE), [Part(512)]);
        assert_eq!(pieces(3584..8704, 4096, PIECE), [Part(512), Whole(4096), Part(512)]);
        assert_eq!(pieces(0..12288, 4096, 9000), [Whole(8192), Whole(4096)]);
        assert_eq!(pieces(0..131_072, 65536, 65536), [Whole(65536), Whole(65536)]);
    }
}
