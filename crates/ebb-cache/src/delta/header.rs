//! The header of a delta that is in use: it is written when the delta is opened for writing, gets another parent, or another
//! size.
//!
//! # Invariants
//! - A header is written to the slot that does not hold the last one, with the next number, and is stable before it counts in
//!   memory. After a write that failed the store may have either: no flush succeeds until the one in memory was written again.

use std::sync::atomic::Ordering;

use ebb_block::{BlockError, BlockStore, ErrorKind, Io, Operation};
use ebb_image::{DeltaHeader, HEADER_BYTES, HEADER_SLOTS, PAGE, Parent};

use super::{Delta, PendingChange};
use crate::cached_store::CachedStore;
use crate::delta_error::DeltaError;
use crate::stats::Mode;

impl Delta {
    /// Prepares it to be written to: writes its header anew, so that layers above it, which rely on its content, are refused
    /// from then on.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn begin_writing(&self, io: &Io, store: &CachedStore) -> Result<(), BlockError> {
        self.write_header(io, store, |_| ()).await
    }

    /// Writes its header with a change, and adopts it.
    ///
    /// # Errors
    /// Those of the store; the header is the one of before then.
    pub(super) async fn write_header(
        &self,
        io: &Io,
        store: &CachedStore,
        change: impl FnOnce(&mut DeltaHeader),
    ) -> Result<(), BlockError> {
        let _turn = self.writing_header.enter().await;
        self.write_header_in_turn(io, store, change).await
    }

    async fn write_header_in_turn(
        &self,
        io: &Io,
        store: &CachedStore,
        change: impl FnOnce(&mut DeltaHeader),
    ) -> Result<(), BlockError> {
        let mut header = self.header();
        let last = || lost_number(store, &header);
        header.number = header.number.checked_add(1).ok_or_else(last)?;
        change(&mut header);
        // The next attempt has the same number, and so replaces what this one has left.
        self.is_header_unsure.store(true, Ordering::SeqCst);
        if store.mode() == Mode::Writeback && store.store().is_lost() {
            // The cache writes lost data again: until then the store's own flushes fail.
            store.flush(io).await?;
        }
        let write = PendingChange::begin(self);
        let written = match put(io, store, &header).await {
            Ok(()) => self.flush_header(io, store).await,
            failed => failed,
        };
        write.end();
        written?;
        self.size.store(header.layout.size(), Ordering::Release);
        self.shown.store(header.shown, Ordering::Release);
        *self.header.lock() = header;
        self.is_header_unsure.store(false, Ordering::SeqCst);
        self.is_written.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Writes its header with another parent: what it does not hold is what that says from now on, zeroes if it is the
    /// default, and zeroes beyond the first `shown` bytes.
    ///
    /// # Errors
    /// Those of the store; the parent is the one of before then.
    pub async fn set_parent(
        &self,
        io: &Io,
        store: &CachedStore,
        (parent, shown): (Parent, u64),
    ) -> Result<(), BlockError> {
        let change = |header: &mut DeltaHeader| {
            header.shown = header.shown.min(shown).min(parent.size);
            header.parent = parent;
        };
        self.write_header(io, store, change).await
    }

    /// Writes its header again if a write of it has failed: a layer above it names the number that the store has, and after a
    /// crash the volume has the size that the store has.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn settle_header(
        &self,
        io: &Io,
        store: &CachedStore,
    ) -> Result<(), BlockError> {
        if !self.is_header_unsure.load(Ordering::SeqCst) {
            return Ok(());
        }
        let _turn = self.writing_header.enter().await;
        // It was being written.
        if !self.is_header_unsure.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.write_header_in_turn(io, store, |_| ()).await
    }

    /// Whether nothing is below it.
    pub fn is_detached(&self) -> bool {
        self.header.lock().parent == Parent::default()
    }

    /// Fails if `found` is not the base that the delta was made for.
    ///
    /// # Errors
    /// [`DeltaError::OtherBase`], [`DeltaError::NotFlattened`].
    pub fn check_parent(&self, store: &CachedStore, found: &Parent) -> Result<(), DeltaError> {
        let expected = self.header().parent;
        if expected.is(found) {
            return Ok(());
        }
        Err(DeltaError::other_base(store.place(), &expected, found))
    }

    /// It as the parent of a delta above it.
    pub fn as_parent(&self, store: &CachedStore) -> Parent {
        let DeltaHeader { number, delta, layout, .. } = self.header();
        Parent { size: layout.size(), delta, number, samples: 0, place: store.place() }
    }
}

/// Writes a header to its slot, and makes it stable.
///
/// # Errors
/// Those of the store.
pub(super) async fn write_to(
    io: &Io,
    store: &CachedStore,
    header: &DeltaHeader,
) -> Result<(), BlockError> {
    put(io, store, header).await?;
    // Not its name: a volume whose folder cannot be flushed is served, and its flushes fail.
    store.store().flush_content(io).await
}

async fn put(io: &Io, store: &CachedStore, header: &DeltaHeader) -> Result<(), BlockError> {
    let mut buf = io.pool().take(HEADER_BYTES).await;
    buf.copy_from_slice(&header.encode());
    let (result, _) = store.store().write(io, buf, HEADER_SLOTS[header.slot()], false).await;
    result
}

/// A number that no delta reaches by itself: layers above it could not tell that it was written to.
#[cold]
fn lost_number(store: &CachedStore, header: &DeltaHeader) -> BlockError {
    let place = store.place();
    let source = std::io::Error::other(format!(
        "the header of {place} has the last number {}: it is damaged or forged; copy the disk into a new delta",
        header.number
    ));
    BlockError::new(ErrorKind::Invalid, Operation::Write, 0, PAGE).caused_by(Some(source))
}
