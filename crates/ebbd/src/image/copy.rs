//! The copy of a disk, for import and export.
//!
//! # Invariants
//! - [`DEPTH`] requests are in flight, each with a buffer of at most [`PIECE`] bytes, whatever the size of the disk.
//! - Each byte of the destination is written at most once. What reads as zeroes is not written where the destination holds
//!   zeroes already, and elsewhere is written without a transfer if the destination can do that.
//! - The first failure ends the copy. It succeeds only after the destination was flushed.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ebb_block::{BlockStore, Buf, ZeroFlags};
use ebb_cache::CachedStore;
use ebb_io::Io;
use tokio::sync::Mutex;

use super::chain::{DiskRun, ImageChain, RunContent};
use super::error::ImageError;
use super::interrupt::Interrupt;
use super::progress::CopyProgress;

/// Requests in flight.
const DEPTH: usize = 8;
/// Bytes of a piece that is copied at once.
const PIECE: u64 = 1 << 20;
/// Bytes of zeroes that are written at once.
const ZEROES: u64 = 256 << 20;
/// The unit in which zeroes are looked for, as in `qemu-img convert`.
const UNIT: usize = 4096;

/// What is copied next.
enum CopyPiece {
    /// From a store and its offset to an offset, so many bytes.
    Data(Arc<CachedStore>, u64, u64, u64),
    Zeroes(u64, u64),
}

/// Divides a disk into pieces.
struct Pieces {
    chain: ImageChain,
    at: u64,
    run: Option<DiskRun>,
}

impl Pieces {
    /// The next piece; `None` at the end.
    async fn next(&mut self, io: &Io) -> Result<Option<CopyPiece>, ImageError> {
        if self.at >= self.chain.size() {
            return Ok(None);
        }
        let mut run = match self.run.take() {
            Some(run) => run,
            None => self.chain.run(io, self.at).await?,
        };
        let at = self.at;
        let (piece, length) = match &mut run.content {
            RunContent::Data(store, from) => {
                let length = run.length.min(PIECE - at % PIECE).max(1);
                let piece = CopyPiece::Data(store.clone(), *from, at, length);
                *from += length;
                (piece, length)
            }
            // A chain is opened with all that is below it.
            RunContent::Zero | RunContent::Below => {
                let length = run.length.clamp(1, ZEROES);
                (CopyPiece::Zeroes(at, length), length)
            }
            RunContent::Lost { store, page } => {
                let (place, page) = (store.place(), *page);
                return Err(ImageError::LostPage { place, page, first: at });
            }
        };
        self.at += length;
        run.length -= length;
        self.run = Some(run).filter(|run| run.length > 0);
        Ok(Some(piece))
    }
}

/// What the tasks of a copy share.
struct CopyState {
    pieces: Mutex<Pieces>,
    dest: Arc<CachedStore>,
    is_zero: bool,
    interrupt: Arc<Interrupt>,
    failure: RefCell<Option<ImageError>>,
    /// Bytes that were written.
    written: Cell<u64>,
    progress: RefCell<CopyProgress>,
}

/// Copies a disk to a store that has its size or more; `is_zero`: it holds zeroes only. Returns the bytes of data that were
/// written, which are stable then.
///
/// # Errors
/// Those of the stores, with place and offset; [`ImageError::Interrupted`].
pub(super) async fn copy_disk(
    io: &Io,
    chain: ImageChain,
    (dest, is_zero): (Arc<CachedStore>, bool),
    interrupt: Arc<Interrupt>,
) -> Result<u64, ImageError> {
    let progress = RefCell::new(CopyProgress::new(chain.size()));
    let state = Rc::new(CopyState {
        pieces: Mutex::new(Pieces { chain, at: 0, run: None }),
        dest: dest.clone(),
        is_zero,
        interrupt: interrupt.clone(),
        failure: RefCell::default(),
        written: Cell::new(0),
        progress,
    });
    let tasks: Vec<_> = (0..DEPTH)
        .map(|_| {
            let (on, state) = (io.clone(), state.clone());
            let copy = async move {
                if let Err(error) = Box::pin(copy_pieces(&on, &state)).await {
                    state.failure.borrow_mut().get_or_insert(error);
                }
            };
            io.spawn(copy)
        })
        .collect();
    for task in tasks {
        task.await;
    }
    state.progress.borrow_mut().end();
    let failure = state.failure.borrow_mut().take();
    if interrupt.is_set() {
        return Err(ImageError::Interrupted(""));
    }
    failure.map_or(Ok(()), Err)?;
    dest.flush(io).await.map_err(ImageError::of(dest.place()))?;
    Ok(state.written.get())
}

/// Copies pieces until there are no more, or until one fails.
async fn copy_pieces(io: &Io, state: &CopyState) -> Result<(), ImageError> {
    let bytes = usize::try_from(PIECE).unwrap_or(0);
    let mut buf = io.pool().take(bytes).await;
    while state.failure.borrow().is_none() && !state.interrupt.is_set() {
        let Some(piece) = state.pieces.lock().await.next(io).await? else { break };
        let length = match piece {
            CopyPiece::Data(store, from, to, length) => {
                buf.set_len(usize::try_from(length).unwrap_or(bytes).min(bytes));
                let (result, back) = store.read(io, buf, from).await;
                result.map_err(ImageError::of(store.place()))?;
                buf = Box::pin(write_piece(io, state, back, to)).await?;
                length
            }
            CopyPiece::Zeroes(at, length) => {
                write_zeroes(io, state, at, length).await?;
                length
            }
        };
        state.progress.borrow_mut().add(length);
    }
    Ok(())
}

/// Writes what is not zero of a piece.
async fn write_piece(io: &Io, state: &CopyState, mut buf: Buf, at: u64) -> Result<Buf, ImageError> {
    let whole = buf.window();
    let mut done = 0;
    while let Some((range, is_zero)) = next_run(&buf, done) {
        done = range.end;
        let (offset, length) = (at + range.start as u64, range.len() as u64);
        if is_zero {
            write_zeroes(io, state, offset, length).await?;
            continue;
        }
        buf.set_window(whole, range);
        let (result, back) = state.dest.write(io, buf, offset, false).await;
        buf = back;
        buf.restore(whole);
        result.map_err(ImageError::of(state.dest.place()))?;
        state.written.set(state.written.get() + length);
    }
    Ok(buf)
}

/// The units from `start` on that are alike, and whether they are zero; `None` at the end.
fn next_run(bytes: &[u8], start: usize) -> Option<(Range<usize>, bool)> {
    let mut units = bytes.get(start..)?.chunks(UNIT);
    let is_zero = |unit: &[u8]| unit.iter().all(|byte| *byte == 0);
    let first = units.next()?;
    let zero = is_zero(first);
    let more: usize = units.take_while(|unit| is_zero(unit) == zero).map(<[u8]>::len).sum();
    Some((start..start + first.len() + more, zero))
}

async fn write_zeroes(
    io: &Io,
    state: &CopyState,
    offset: u64,
    length: u64,
) -> Result<(), ImageError> {
    if state.is_zero {
        return Ok(());
    }
    let flags = ZeroFlags { may_unmap: true, fast_only: false };
    let wanted = || !state.interrupt.is_set();
    let dest = &state.dest;
    let written = dest.write_zeroes_while(io, offset, length, flags, &wanted).await;
    written.map_err(ImageError::of(dest.place()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_zeroes_are_found_in_units() {
        let mut bytes = vec![0; 5 * UNIT + 512];
        bytes[UNIT] = 1;
        bytes[3 * UNIT - 1] = 1;
        let (mut runs, mut at) = (Vec::new(), 0);
        while let Some((range, zero)) = next_run(&bytes, at) {
            at = range.end;
            runs.push((range.len(), zero));
        }
        assert_eq!(runs, [(UNIT, true), (2 * UNIT, false), (2 * UNIT + 512, true)]);
        assert_eq!(next_run(&[], 0), None);
        assert_eq!(next_run(&[0, 1], 0), Some((0..2, false)));
    }
}
