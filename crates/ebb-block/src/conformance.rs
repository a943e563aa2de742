//! What every store must do, as a suite that the tests of a store run (feature `conformance`).
//!
//! ```text
//! ebb_block::conformance::check(&io, &Tracked(store)).await.unwrap();
//! ```
//!
//! The suite compares the store with an array of bytes, through the interface that callers use. It reports the first
//! thing that differs. It cannot see whether a flush makes data stable: that needs a power cut, or a server that is
//! killed, and a test of the store's own.

mod read_only;
mod requests;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use ebb_io::{Buf, Io};

use crate::error::ErrorKind;
use crate::resize::{Resize, ResizeError};
use crate::store::BlockStore;
use crate::{BLOCK, SECTOR};

/// Bytes of a store that are written and compared. A store must have at least that many.
pub const AREA: u64 = 1 << 20;
/// Bytes by which the size is changed.
const GROWTH: u64 = 1 << 20;

/// What a store did that it must not, or the reverse.
pub type Violation = String;

/// `Err` with the text unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(crate) use ensure;

/// Checks a writable store of at least [`AREA`] bytes that no other task uses. Its content is overwritten.
///
/// # Errors
/// The first [`Violation`].
pub async fn check<S: BlockStore>(io: &Io, store: &S) -> Result<(), Violation> {
    Suite::new(io, store, true).run().await
}

/// As [`check`], for a store that keeps nothing: reads return zeroes whatever was written.
///
/// # Errors
/// The first [`Violation`].
pub async fn check_forgetful<S: BlockStore>(io: &Io, store: &S) -> Result<(), Violation> {
    Suite::new(io, store, false).run().await
}

/// Checks a read-only store that no other task uses: whatever of the suite needs no write, and that it refuses all
/// changes. `content` is what its first [`AREA`] bytes hold.
///
/// # Errors
/// The first [`Violation`].
pub async fn check_read_only<S: BlockStore>(
    io: &Io,
    store: &S,
    content: &[u8],
) -> Result<(), Violation> {
    let mut suite = Suite::new(io, store, true);
    ensure!(content.len() == suite.model.len(), "a content of {} bytes", content.len());
    suite.model.copy_from_slice(content);
    suite.unknown.fill(false);
    suite.run_read_only().await
}

/// The store, and what it must hold.
struct Suite<'a, S> {
    io: &'a Io,
    store: &'a S,
    keeps: bool,
    /// The content of the first [`AREA`] bytes.
    model: Vec<u8>,
    /// Sectors of it whose content is not known.
    unknown: Vec<bool>,
    seed: u64,
}

fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// The content of a write: differs from byte to byte, from place to place and from write to write, and is never 0.
fn fill(buf: &mut [u8], seed: u64) {
    for (at, byte) in buf.iter_mut().enumerate() {
        let mixed = (at as u64 / 7 + seed * 31 + at as u64 / SECTOR * 13) % 255;
        *byte = u8::try_from(mixed).unwrap_or(0) + 1;
    }
}

/// Awaits all of them at once.
async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<Pin<Box<F>>> = futures.into_iter().map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let Poll::Ready(value) = future.as_mut().poll(cx)
            {
                *output = Some(value);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

impl<'a, S: BlockStore> Suite<'a, S> {
    fn new(io: &'a Io, store: &'a S, keeps: bool) -> Suite<'a, S> {
        let (model, unknown) = (vec![0; index(AREA)], vec![true; index(AREA / SECTOR)]);
        Suite { io, store, keeps, model, unknown, seed: 0 }
    }

    async fn run(mut self) -> Result<(), Violation> {
        self.description()?;
        self.write(0, AREA, false).await?;
        self.compare(0, AREA).await?;
        self.lengths_and_offsets().await?;
        self.the_end().await?;
        self.refused_ranges().await?;
        self.flushes().await?;
        self.zeroes().await?;
        self.discards().await?;
        self.extents().await?;
        self.prefetches().await?;
        self.direct_access().await?;
        self.concurrent_requests().await?;
        self.overlapping_writes().await?;
        self.compare(0, AREA).await?;
        self.resizes().await?;
        self.cancelled_requests().await?;
        self.compare(0, AREA).await?;
        self.stable().await
    }

    /// What the store says of itself.
    fn description(&self) -> Result<(), Violation> {
        let (size, capabilities) = (self.store.size(), self.store.capabilities());
        ensure!(size.is_multiple_of(SECTOR), "a size of {size} bytes: no multiple of {SECTOR}");
        ensure!(size >= AREA, "a size of {size} bytes: the suite needs at least {AREA}");
        let block = u64::from(capabilities.alignment);
        ensure!(block > 0 && block <= AREA / 8, "an alignment of {block} bytes");
        ensure!(self.store.capabilities() == capabilities, "the capabilities change");
        let identity = self.store.identity();
        ensure!(!identity.key.is_empty(), "an identity without a key");
        ensure!(self.store.identity() == identity, "the identity changes");
        ensure!(!self.store.place().is_empty(), "no place for messages");
        for length in [block, block * 3, block * 8] {
            let bytes = self.store.bounce_bytes(block, index(length));
            ensure!(bytes == 0, "a bounce buffer for whole blocks");
        }
        for (offset, length) in [(512, 512), (512, 8192), (0, 1024), (3584, 1 << 16)] {
            let bytes = self.store.bounce_bytes(offset, index(length)) as u64;
            ensure!(bytes <= 2 * block, "a bounce buffer of {bytes} bytes for blocks of {block}");
        }
        Ok(())
    }

    async fn buffer(&mut self, length: u64) -> (Buf, u64) {
        self.seed += 1;
        let mut buf = self.io.pool().take(index(length)).await;
        fill(&mut buf, self.seed);
        (buf, self.seed)
    }

    fn sectors(offset: u64, length: u64) -> std::ops::Range<usize> {
        index(offset / SECTOR)..index((offset + length) / SECTOR)
    }

    /// A range of the model holds this now; `None`: something unknown.
    fn note(&mut self, offset: u64, length: u64, data: Option<&[u8]>) {
        let range = index(offset)..index(offset + length);
        self.unknown[Self::sectors(offset, length)].fill(data.is_none());
        match data {
            Some(data) if self.keeps => self.model[range].copy_from_slice(data),
            _ => self.model[range].fill(0),
        }
    }

    /// Writes within the area.
    async fn write(&mut self, offset: u64, length: u64, fua: bool) -> Result<(), Violation> {
        let (buf, seed) = self.buffer(length).await;
        let (result, buf) = self.store.write(self.io, buf, offset, fua).await;
        ensure!(result.is_ok(), "write of {length} at {offset}, fua {fua}: {result:?}");
        let mut data = vec![0; index(length)];
        fill(&mut data, seed);
        ensure!(*buf == *data, "a write of {length} at {offset} changed its buffer");
        self.note(offset, length, Some(&data));
        Ok(())
    }

    async fn read(&self, offset: u64, length: u64) -> Result<Buf, Violation> {
        let mut buf = self.io.pool().take(index(length)).await;
        buf.fill(0xee);
        let (result, buf) = self.store.read(self.io, buf, offset).await;
        ensure!(result.is_ok(), "read of {length} at {offset}: {result:?}");
        ensure!(buf.len() as u64 == length, "a read of {length} returned {} bytes", buf.len());
        Ok(buf)
    }

    /// Reads a range of the area and compares it with the model, where that is known.
    async fn compare(&self, offset: u64, length: u64) -> Result<(), Violation> {
        let buf = self.read(offset, length).await?;
        for sector in Self::sectors(offset, length) {
            let at = sector * index(SECTOR);
            let here = at - index(offset)..at - index(offset) + index(SECTOR);
            let right = buf[here] == self.model[at..at + index(SECTOR)];
            ensure!(right || self.unknown[sector], "a read at {at} returned other data");
        }
        Ok(())
    }

    /// A range and what surrounds it.
    async fn compare_around(&self, offset: u64, length: u64) -> Result<(), Violation> {
        let start = offset.saturating_sub(2 * BLOCK);
        self.compare(start, (offset + length + 2 * BLOCK).min(AREA) - start).await
    }

    async fn stable(&self) -> Result<(), Violation> {
        let result = self.store.flush(self.io).await;
        ensure!(result.is_ok(), "flush: {result:?}");
        Ok(())
    }

    async fn resizes(&mut self) -> Result<(), Violation> {
        let from = self.store.size();
        let order = |to, shrink| Resize { to: Some(to), shrink };
        for to in [0, from + 100] {
            let resized = self.store.resize(self.io, order(to, true)).await;
            ensure!(resized.is_err(), "resized to {to} bytes: {resized:?}");
        }
        let larger = order(from + GROWTH, false);
        if self.store.check_resize(self.io, larger).await.is_err() {
            let resized = self.store.resize(self.io, larger).await;
            ensure!(resized.is_err(), "resized although the check refused it");
            ensure!(self.store.size() == from, "a refused resize changed the size");
            return Ok(());
        }
        ensure!(self.store.size() == from, "the check of a resize changed the size");
        let resized = self.store.resize(self.io, larger).await;
        ensure!(matches!(resized, Ok(to) if to == from + GROWTH), "grown: {resized:?}");
        ensure!(self.store.size() == from + GROWTH, "a size of {} bytes", self.store.size());
        let added = self.read(from, GROWTH).await?;
        ensure!(added.iter().all(|byte| *byte == 0), "what was added does not read as zeroes");
        self.write_and_read(from + GROWTH - 4096, 4096).await?;
        let refused = self.store.resize(self.io, order(from, false)).await;
        let shrinks = matches!(refused, Err(ResizeError::Shrinks { .. }));
        ensure!(shrinks, "shrunk without the flag: {refused:?}");
        let shrunk = self.store.resize(self.io, order(from, true)).await;
        ensure!(matches!(shrunk, Ok(to) if to == from), "shrunk: {shrunk:?}");
        ensure!(self.store.size() == from, "a size of {} bytes", self.store.size());
        self.refused(from, SECTOR, ErrorKind::OutOfRange).await?;
        // Data that was cut off does not return.
        let grown = self.store.resize(self.io, larger).await;
        ensure!(grown.is_ok(), "grown again: {grown:?}");
        let added = self.read(from, GROWTH).await?;
        ensure!(added.iter().all(|byte| *byte == 0), "data beyond the end returned");
        let back = self.store.resize(self.io, order(from, true)).await;
        ensure!(back.is_ok(), "shrunk again: {back:?}");
        self.compare(0, AREA).await
    }
}
