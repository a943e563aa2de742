//! Zeroes, also on stores that know no other way than to write them out.
//!
//! # Invariants
//! - Zeroes that are written out take no memory, however many are asked for: whole blocks are sent from where all is
//!   zero. Only a part of a block, which is read and written again, takes a buffer for a moment.
//! - A few ranges of a store are written out at a time; requests that wait for that hold nothing.
//! - Who asked is looked for between two pieces: zeroes for a client that is gone, or of a volume that is
//!   closed, end there, however long the range.

use std::ops::Range;

use async_lock::{Semaphore, SemaphoreGuard};

use crate::{BlockError, ErrorKind, Io, Operation, Store, ZeroFlags};

/// The most that is written at a time, bytes.
pub(crate) const PIECE_BYTES: usize = 1 << 20;
const PIECE: u64 = PIECE_BYTES as u64;
/// Ranges of a store that are written out at a time.
const AT_ONCE: usize = 4;

/// Whether zeroes that were asked for are still wanted.
pub type Wanted<'a> = &'a dyn Fn() -> bool;

/// Turns at writing zeroes out.
#[derive(Debug)]
pub(crate) struct Zeroing(Semaphore);

impl Default for Zeroing {
    fn default() -> Self {
        Zeroing(Semaphore::new(AT_ONCE))
    }
}

impl Zeroing {
    async fn turn(&self) -> SemaphoreGuard<'_> {
        self.0.acquire().await
    }
}

/// What of a range is left to write out: two ends of it, of which both may be empty.
pub(crate) type Left = [Range<u64>; 2];

/// Nothing is left.
pub(crate) const NOTHING: Left = [0..0, 0..0];

/// What is written at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// So many bytes of whole blocks.
    Whole(u64),
    /// So many bytes within a block.
    Part(u64),
}

impl Piece {
    /// The first piece of a range that is not empty, on a store with blocks of `block` bytes that takes `most`
    /// bytes at a time.
    fn first_of(range: &Range<u64>, block: u64, most: u64) -> Piece {
        let length = range.end - range.start;
        let into = range.start % block;
        if into > 0 || length < block {
            return Piece::Part((block - into).min(length));
        }
        let most = PIECE.min(most).min(length);
        Piece::Whole((most - most % block).max(block))
    }

    fn bytes(self) -> u64 {
        match self {
            Piece::Whole(bytes) | Piece::Part(bytes) => bytes,
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

    /// As [`Store::write_zeroes`], and ends with [`ErrorKind::Closing`] when zeroes have to be written out and
    /// are not wanted any more; what is in the range then is what was there, or zeroes.
    pub async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let watch = self.begin();
        let left = match self {
            Store::File(s) => s.zero_quickly(io, offset, length, flags).await,
            Store::Nbd(s) => s.zero_quickly(io, offset, length, flags).await,
            #[cfg(feature = "test-store")]
            Store::Test(s) => {
                s.zero(io, Operation::WriteZeroes, offset, length).await.map(|()| NOTHING)
            }
            Store::Memory(s) => {
                s.discard(io, offset, length).await;
                Ok(NOTHING)
            }
            Store::Null(_) => Ok(NOTHING),
        };
        let left = watch.ended(left)?;
        if left.iter().all(Range::is_empty) {
            return Ok(());
        }
        // In a box: few stores need it, and all requests hold what their longest way needs.
        Box::pin(self.write_out(io, left, wanted)).await
    }

    async fn write_out(&self, io: &Io, left: Left, wanted: Wanted<'_>) -> Result<(), BlockError> {
        let (zeroing, block, most) = match self {
            Store::File(s) => (s.zeroing(), u64::from(s.capabilities().alignment), PIECE),
            Store::Nbd(s) => (s.zeroing(), u64::from(s.capabilities().alignment), s.write_most()),
            _ => return Ok(()),
        };
        let _turn = zeroing.turn().await;
        for mut range in left {
            while !range.is_empty() {
                let piece = Piece::first_of(&range, block.max(1), most);
                if !wanted() {
                    let (kind, operation) = (ErrorKind::Closing, Operation::WriteZeroes);
                    let left = range.end - range.start;
                    return Err(BlockError::new(kind, operation, range.start, left));
                }
                let watch = self.begin();
                let result = self.write_out_piece(io, range.start, piece).await;
                watch.ended(result)?;
                range.start += piece.bytes();
            }
        }
        Ok(())
    }

    async fn write_out_piece(&self, io: &Io, at: u64, piece: Piece) -> Result<(), BlockError> {
        let result = match (self, piece) {
            (Store::File(s), Piece::Whole(length)) => s.zero_blocks(io, at, length).await,
            (Store::Nbd(s), Piece::Whole(length)) => s.zero_blocks(io, at, length).await,
            (_, Piece::Part(length)) => {
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

    /// On a store that takes little at a time.
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

    fn pieces(mut range: Range<u64>, block: u64, most: u64) -> Vec<Piece> {
        let mut all = Vec::new();
        while !range.is_empty() {
            let piece = Piece::first_of(&range, block, most);
            range.start += piece.bytes();
            all.push(piece);
        }
        all
    }

    #[test]
    fn whole_blocks_are_whole_and_ends_are_parts() {
        use Piece::{Part, Whole};
        let mib = 1 << 20;
        assert_eq!(pieces(512..512 + mib, 1, PIECE), [Whole(mib)]);
        assert_eq!(pieces(0..2 * mib + 512, 512, PIECE), [Whole(mib), Whole(mib), Whole(512)]);
        assert_eq!(pieces(512..1024, 4096, PIECE), [Part(512)]);
        assert_eq!(pieces(3584..8704, 4096, PIECE), [Part(512), Whole(4096), Part(512)]);
        assert_eq!(pieces(0..12288, 4096, 9000), [Whole(8192), Whole(4096)]);
        assert_eq!(pieces(0..131_072, 65536, 65536), [Whole(65536), Whole(65536)]);
    }
}
