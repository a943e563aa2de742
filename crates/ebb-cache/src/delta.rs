//! [`Delta`]: a layer whose store is a delta (`ebb-image`): its header, and its block map, whose pages are pages of the
//! layer's own cache.
//!
//! # Invariants
//! - A map page is used only after its checksum was verified in this opening, and not any more once it was read again and
//!   was another. Of its two slots the newest valid one counts; which that is takes one byte of memory per page
//!   ([`PageStates`]).
//! - The slot that holds the last stable copy of a page is not written, and counts until the other one is stable
//!   ([`Delta::flush`]): a flush that fails may leave anything there.
//! - A page that an earlier opening wrote may be in the kernel's memory only, if a flush of that opening failed. Before a
//!   flush of this one succeeds, each page that was looked at is written again as it is ([`Delta::rewrite_found`]).
//! - A write of a map page or the header that is dropped before it has completed may still be carried out, over a later one:
//!   no flush succeeds until the delta is opened anew.
//! - Looking up a page that is in memory neither waits nor allocates ([`Delta::find`]).
//! - A flush succeeds only when it is known which header the store has ([`Delta::settle_header`]): after a crash the volume has
//!   the size that it has now.
//! - Bits are not saved after their data may be lost: a flush that fails without a cache that can write the data again puts all
//!   pending blocks in doubt, and no flush succeeds until the delta is reopened. A bit hides the
//!   layers below, also one that is in memory only: pending blocks are forgotten
//!   ([`Delta::lose_pending`]).
//! - A block is added to the blocks whose bits are not stable ([`PendingBlocks`]) only after its data was written; they are
//!   forgotten after the data, then the bits are stable ([`Delta::flush`]).

mod damage;
mod header;
mod own;
mod resize;
mod unsaved;

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use ebb_block::{BlockError, BlockStore, Buf, ErrorKind, Io, Loss, Operation, ZeroFlags};
use ebb_image::{
    BLOCKS_PER_PAGE, BlockRun, DeltaHeader, HEADER_BYTES, HEADER_SLOTS, HeaderError, Layout,
    MapCopy, MapSlot, PAGE, Parent, PendingBlocks, map_page,
};

use self::damage::{damaged_page, has_map, lost_page};
use crate::base_samples::read;
use crate::cached_store::CachedStore;
use crate::delta_error::DeltaError;
use crate::own_blocks::OwnBlocks;
use crate::page_states::{DAMAGED, EMPTY, FIRST, PageStates, SECOND, UNKNOWN, other_slot};
use crate::sync::Mutex;
use crate::throttle::FifoLock;

const SECTOR: u64 = 512;

/// A map page that was loaded for a request, in case the cache does not keep it.
#[derive(Debug)]
pub(crate) struct LoadedPage {
    pub(crate) layer: usize,
    pub(crate) page: u32,
    bits: Option<Buf>,
    /// [`Delta::saves`] before it was read.
    saves: u64,
}

impl LoadedPage {
    /// The run that `block` of the page begins.
    fn run(&self, block: u64, most: u64) -> BlockRun {
        let Some(page) = &self.bits else { return BlockRun { held: false, blocks: most } };
        let (held, blocks) = map_page::run(&page[map_page::HEADER..], block, most);
        BlockRun { held, blocks }
    }
}

/// See the module. Its methods are given the layer's store, which is where the delta is.
pub struct Delta {
    id: [u8; 16],
    /// As it was when the delta was opened: the places are the same at each size.
    places: Layout,
    /// Bytes of the volume.
    size: AtomicU64,
    /// Bytes of what is below that show.
    shown: AtomicU64,
    header: Mutex<DeltaHeader>,
    pages: PageStates,
    /// Blocks whose bits are not stable.
    pending: Mutex<PendingBlocks>,
    /// Whether there may be some: a delta that is not written to takes no lock.
    has_pending: AtomicBool,
    /// One save at a time.
    saving: FifoLock,
    /// The store may have lost the data of pending blocks.
    loss: Mutex<Option<Loss>>,
    /// Losses of the store that a flush has reported: later writes are not forgotten.
    reported_losses: AtomicU64,
    /// The delta that a snapshot has put above it.
    above: Mutex<Weak<Delta>>,
    /// Saves that have ended: what was loaded before one may lack bits that are not pending any more.
    saves: AtomicU64,
    /// Why a save that no flush had asked for failed: the next flush reports it.
    unreported: Mutex<Option<BlockError>>,
    /// It is written to: what is found in it must be stable before a flush succeeds.
    is_written: AtomicBool,
    /// The pages that were found and not written again yet, with their generations.
    found: Mutex<Vec<(u32, u64)>>,
    /// Whether there may be some.
    has_found: AtomicBool,
    /// A write of a map page was dropped, and may still be carried out.
    is_interrupted: AtomicBool,
    /// It was the top layer until a snapshot, and has not been flushed since.
    is_unflushed: AtomicBool,
    /// A write of the header failed: the store may have that one, or the one of before.
    is_header_unsure: AtomicBool,
    /// One write of the header at a time.
    writing_header: FifoLock,
    own: OwnBlocks,
}

impl std::fmt::Debug for Delta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Delta").field("header", &self.header()).finish_non_exhaustive()
    }
}

impl Delta {
    fn new(header: DeltaHeader, own: OwnBlocks) -> Delta {
        // Of all pages that it may get: a page that was never looked at takes no memory.
        let pages = PageStates::new(header.layout.room());
        Delta {
            id: header.delta,
            places: header.layout,
            size: AtomicU64::new(header.layout.size()),
            shown: AtomicU64::new(header.shown),
            own,
            writing_header: FifoLock::default(),
            header: Mutex::new(header),
            pages,
            pending: Mutex::default(),
            has_pending: AtomicBool::new(false),
            saving: FifoLock::default(),
            loss: Mutex::default(),
            reported_losses: AtomicU64::new(0),
            above: Mutex::default(),
            saves: AtomicU64::new(0),
            unreported: Mutex::default(),
            is_written: AtomicBool::new(false),
            found: Mutex::default(),
            has_found: AtomicBool::new(false),
            is_interrupted: AtomicBool::new(false),
            is_unflushed: AtomicBool::new(false),
            is_header_unsure: AtomicBool::new(false),
        }
    }

    /// Opens the delta that `store` holds.
    ///
    /// # Errors
    /// [`DeltaError`].
    pub async fn open(io: &Io, store: &CachedStore) -> Result<Delta, DeltaError> {
        let place = || store.place();
        if u64::from(store.capabilities().alignment) > PAGE {
            return Err(DeltaError::Blocks { place: place() });
        }
        if store.size() < 2 * PAGE {
            return Err(DeltaError::Header { place: place(), source: HeaderError::NotADelta });
        }
        // Not by way of the cache: the header is not read again, and reading ahead from it would be wasted.
        let slots = read(io, store.store(), HEADER_SLOTS[0], 2 * HEADER_BYTES).await?;
        let header = DeltaHeader::decode([&slots[..HEADER_BYTES], &slots[HEADER_BYTES..]]);
        let header = match header {
            Err(HeaderError::NotADelta) if has_map(io, store).await? => Err(HeaderError::Damaged),
            header => header,
        };
        let header = header.map_err(|source| DeltaError::Header { place: place(), source })?;
        let (size, expected) = (store.size(), header.layout.store_size());
        if size < expected {
            return Err(DeltaError::Truncated { place: place(), size, expected });
        }
        Ok(Delta::new(header, OwnBlocks::uncounted()))
    }

    /// Makes an empty delta of a volume of `size` bytes above `parent` on a store that holds zeroes. The store has the
    /// size that [`Layout::store_size`] says, or more.
    ///
    /// # Errors
    /// [`DeltaError`].
    pub async fn create(
        io: &Io,
        store: &CachedStore,
        size: u64,
        parent: Parent,
        delta: [u8; 16],
    ) -> Result<Delta, DeltaError> {
        let header = DeltaHeader::new(1, delta, Layout::new(size)?, parent);
        Delta::create_as(io, store, header).await
    }

    /// Empties the places of the header and the block map of a volume of `size` bytes, on a store that may hold something
    /// there or elsewhere: what is not held is not read.
    ///
    /// # Errors
    /// [`DeltaError`]; nothing is changed if the store is too small.
    pub async fn clear(io: &Io, store: &CachedStore, size: u64) -> Result<(), DeltaError> {
        let layout = Layout::new(size)?;
        let (has, needed) = (store.size(), layout.store_size());
        if has < needed {
            let place = store.place();
            return Err(DeltaError::TooSmall { place, size: has, volume: size, needed });
        }
        let flags = ZeroFlags { may_unmap: true, fast_only: false };
        let end = layout.map_slot(layout.map_pages(), 0);
        store.write_zeroes(io, HEADER_SLOTS[0], end, flags).await?;
        Ok(store.flush(io).await?)
    }

    /// As [`Delta::create`], with this header.
    ///
    /// # Errors
    /// [`DeltaError`].
    pub async fn create_as(
        io: &Io,
        store: &CachedStore,
        header: DeltaHeader,
    ) -> Result<Delta, DeltaError> {
        let (size, needed) = (store.size(), header.layout.store_size());
        if u64::from(store.capabilities().alignment) > PAGE {
            return Err(DeltaError::Blocks { place: store.place() });
        }
        if size < needed {
            let (place, volume) = (store.place(), header.layout.size());
            return Err(DeltaError::TooSmall { place, size, volume, needed });
        }
        header::write_to(io, store, &header).await?;
        Ok(Delta::new(header, OwnBlocks::none()))
    }

    /// Its header.
    pub fn header(&self) -> DeltaHeader {
        self.header.lock().clone()
    }

    /// As the volume is now.
    #[inline]
    pub(crate) fn layout(&self) -> Layout {
        let size = self.size.load(Ordering::Acquire);
        self.places.resized(size).unwrap_or(self.places)
    }

    /// Bytes of what is below that show where it holds nothing; beyond are zeroes.
    #[inline]
    pub(crate) fn shown(&self) -> u64 {
        self.shown.load(Ordering::Acquire)
    }

    fn state(&self, page: u32) -> Option<&AtomicU8> {
        self.pages.state(page)
    }

    /// Whether the layer holds `block` of page `page`, counted from the page's first, and how many blocks from there are
    /// alike, at most `most` and not beyond the page; `None` if the page has to be loaded first.
    #[inline]
    pub(crate) fn find(
        &self,
        io: &Io,
        store: &CachedStore,
        (page, block): (u32, u64),
        most: u64,
    ) -> Option<BlockRun> {
        let pending = self.find_pending(page, block, most);
        if pending.held {
            return Some(pending);
        }
        let most = pending.blocks;
        let slot = match self.pages.load(page)? {
            EMPTY => return Some(BlockRun { held: false, blocks: most }),
            FIRST => 0,
            SECOND => 1,
            _ => return None,
        };
        let (byte, _) = map_page::place(block);
        let sector = byte as u64 / SECTOR * SECTOR;
        let first = block - (sector * 8).saturating_sub(map_page::HEADER as u64 * 8);
        let skip = if sector == 0 { map_page::HEADER } else { 0 };
        let range = (self.layout().map_slot(page, slot) + sector, 512);
        let mut found = None;
        // A sector is one piece.
        let is_cached = store.read_cached_pieces(io, range, &mut |_, bytes| {
            found = Some(map_page::run(&bytes[skip..], first, most));
        });
        let (held, blocks) = found.filter(|_| is_cached)?;
        Some(BlockRun { held, blocks })
    }

    /// As [`Delta::find`], among the blocks whose bits are not stable.
    #[inline]
    fn find_pending(&self, page: u32, block: u64, most: u64) -> BlockRun {
        let most = most.min(BLOCKS_PER_PAGE - block);
        if !self.has_pending.load(Ordering::Acquire) {
            return BlockRun { held: false, blocks: most };
        }
        self.pending.lock().run(u64::from(page) * BLOCKS_PER_PAGE + block, most)
    }

    /// As [`Delta::find`], in a page that was loaded; `None` if it has to be loaded again.
    pub(crate) fn find_loaded(
        &self,
        loaded: &LoadedPage,
        block: u64,
        most: u64,
    ) -> Option<BlockRun> {
        let pending = self.find_pending(loaded.page, block, most);
        if pending.held {
            return Some(pending);
        }
        // In this order: a save that ends after the look at the pending blocks changes nothing that was not seen.
        let is_current = self.saves.load(Ordering::SeqCst) == loaded.saves;
        is_current.then(|| loaded.run(block, pending.blocks))
    }

    /// Loads a map page.
    ///
    /// # Errors
    /// Those of the store; [`ErrorKind::Io`] if the page was valid and no longer is.
    pub(crate) async fn load(
        &self,
        io: &Io,
        store: &CachedStore,
        (layer, page): (usize, u32),
    ) -> Result<LoadedPage, BlockError> {
        let saves = self.saves.load(Ordering::SeqCst);
        let bits = self.newest(io, store, page).await?.map(|(buf, _)| buf);
        Ok(LoadedPage { layer, page, bits, saves })
    }

    /// The newest valid copy of a page, with its generation; `None` if it was never written.
    async fn newest(
        &self,
        io: &Io,
        store: &CachedStore,
        page: u32,
    ) -> Result<Option<(Buf, u64)>, BlockError> {
        let Some(state) = self.state(page) else { return Ok(None) };
        let (layout, delta) = (self.layout(), self.id);
        let saves = self.saves.load(Ordering::SeqCst);
        let known = state.load(Ordering::Acquire);
        let slot = match known {
            EMPTY => return Ok(None),
            FIRST => 0,
            SECOND => 1,
            DAMAGED => return Err(damaged_page(page, layout.map_slot(page, 0))),
            _ => {
                let mut both =
                    read(io, store, layout.map_slot(page, 0), 2 * map_page::BYTES).await?;
                let of = |bytes| MapSlot::of(bytes, page, delta);
                let slots = [of(&both[..map_page::BYTES]), of(&both[map_page::BYTES..])];
                let (new, found) = match (MapCopy::of(slots), slots) {
                    (MapCopy::Slot(0), [MapSlot::Valid(generation), _]) => {
                        (FIRST, Some((generation, FIRST)))
                    }
                    (MapCopy::Slot(_), [_, MapSlot::Valid(generation)]) => {
                        (SECOND, Some((generation, SECOND)))
                    }
                    (MapCopy::Never, _) => (EMPTY, None),
                    (MapCopy::Lost | MapCopy::Slot(_), _) => (DAMAGED, None),
                };
                // Another request may have loaded the page, and a save may have written it since.
                if !self.note_found(state, new, (page, found.map(|(generation, _)| generation))) {
                    return Box::pin(self.newest(io, store, page)).await;
                }
                let Some((generation, slot)) = found else {
                    let damaged = || damaged_page(page, layout.map_slot(page, 0));
                    return if new == DAMAGED { Err(damaged()) } else { Ok(None) };
                };
                let whole = both.window();
                let start = if slot == FIRST { 0 } else { map_page::BYTES };
                both.set_window(whole, start..start + map_page::BYTES);
                return Ok(Some((both, generation)));
            }
        };
        let offset = layout.map_slot(page, slot);
        let buf = read(io, store, offset, map_page::BYTES).await?;
        match map_page::generation(&buf, page, delta) {
            Some(generation) => Ok(Some((buf, generation))),
            // Saves that ended meanwhile have written the slot.
            None if self.saves.load(Ordering::SeqCst) != saves => {
                Box::pin(self.newest(io, store, page)).await
            }
            None => {
                // It is in the cache now, where a later request would use it.
                let _ = state.compare_exchange(known, DAMAGED, Ordering::AcqRel, Ordering::Acquire);
                Err(damaged_page(page, offset))
            }
        }
    }

    /// Writes a map page with other bits, which `set` changes, to the slot that does not count. One call at a time.
    ///
    /// # Errors
    /// Those of the store.
    async fn write_page(
        &self,
        io: &Io,
        store: &CachedStore,
        page: u32,
        set: impl FnOnce(&mut [u8]),
    ) -> Result<WrittenPage, BlockError> {
        let Some(state) = self.state(page) else { return Ok(WrittenPage::none(page)) };
        let (mut buf, generation) = match self.newest(io, store, page).await? {
            Some(found) => found,
            None => {
                let mut buf = io.pool().take(map_page::BYTES).await;
                buf.fill(0);
                (buf, 0)
            }
        };
        let before = state.load(Ordering::Acquire);
        let slot = other_slot(before);
        let offset = self.slot_offset(page, slot);
        if before == DAMAGED {
            return Err(damaged_page(page, offset));
        }
        // Only a page that was made up has the last generation.
        let generation = generation.checked_add(1).ok_or_else(|| lost_page(page, offset))?;
        let count = |page: &[u8]| map_page::count(&page[map_page::HEADER..], BLOCKS_PER_PAGE);
        let had = count(&buf);
        set(&mut buf);
        let has = count(&buf);
        map_page::seal(&mut buf, page, self.id, generation);
        self.write_slot(io, store, buf, offset).await?;
        Ok(WrittenPage { page, slot, more: has.saturating_sub(had) })
    }

    /// Where a page is in the slot that a state names.
    fn slot_offset(&self, page: u32, state: u8) -> u64 {
        self.layout().map_slot(page, usize::from(state == SECOND))
    }

    async fn write_slot(
        &self,
        io: &Io,
        store: &CachedStore,
        buf: Buf,
        offset: u64,
    ) -> Result<(), BlockError> {
        let write = PendingChange::begin(self);
        let (result, _) = store.write(io, buf, offset, false).await;
        write.end();
        result
    }

    /// Sets the state of a page that was looked at, and its generation if there is one; false: another request was first.
    fn note_found(&self, state: &AtomicU8, new: u8, (page, found): (u32, Option<u64>)) -> bool {
        let mut pages = self.found.lock();
        let is_written = self.is_written.load(Ordering::SeqCst);
        if is_written && found.is_some() {
            // Before the state: a request that sees the state relies on the page, and the next flush has to write the page again.
            self.has_found.store(true, Ordering::Release);
        }
        let set = state.compare_exchange(UNKNOWN, new, Ordering::AcqRel, Ordering::Acquire);
        if set.is_ok() && is_written {
            pages.extend(found.map(|generation| (page, generation)));
        }
        set.is_ok()
    }

    /// Writes the pages that were found again as they are; the next flush of the store makes them stable. Returns how many
    /// there are. A torn write changes nothing: the data is the same.
    ///
    /// # Errors
    /// Those of the store; [`ErrorKind::Io`] if a page was in the kernel's memory only, and is lost.
    async fn rewrite_found(&self, io: &Io, store: &CachedStore) -> Result<usize, BlockError> {
        let mut count = 0;
        loop {
            let next = self.found.lock().get(count).copied();
            let Some((page, generation)) = next else { return Ok(count) };
            count += 1;
            let Some(state) = self.state(page) else { continue };
            let offset = self.slot_offset(page, state.load(Ordering::Acquire));
            match self.newest(io, store, page).await? {
                Some((buf, found)) if found == generation => {
                    self.write_slot(io, store, buf, offset).await?;
                }
                _ => return Err(lost_page(page, offset)),
            }
        }
    }

    /// The first `count` of the pages that were found are stable.
    fn forget_found(&self, count: usize) {
        let mut found = self.found.lock();
        found.drain(..count);
        self.has_found.store(!found.is_empty(), Ordering::Release);
    }

    /// Makes the pages that were found stable, and all that was written.
    async fn make_found_stable(&self, io: &Io, store: &CachedStore) -> Result<(), BlockError> {
        let found = self.rewrite_found(io, store).await?;
        self.flush_store(io, store).await?;
        self.forget_found(found);
        Ok(())
    }

    /// Notes that a page is stable in the slot that was written: not the opposite of the state, since a read may have set DAMAGED
    /// meanwhile.
    fn note_stable(&self, written: &WrittenPage) {
        if let Some(state) = self.state(written.page) {
            state.store(written.slot, Ordering::Release);
        }
        self.own.note_saved(written.page, written.more);
    }

    /// Fails if the data of pending blocks may be lost, or if a change of the map or the header was dropped: it may still be
    /// carried out, over a later one.
    fn must_be_uninterrupted(&self) -> Result<(), BlockError> {
        if self.is_interrupted.load(Ordering::SeqCst) {
            return Err(self.lost());
        }
        self.must_not_be_in_doubt()
    }

    /// Fails if the data of blocks that were pending may be lost.
    fn must_not_be_in_doubt(&self) -> Result<(), BlockError> {
        if self.is_in_doubt() { Err(self.lost()) } else { Ok(()) }
    }

    fn lost(&self) -> BlockError {
        BlockError::new(ErrorKind::Lost, Operation::Flush, 0, self.layout().size())
    }

    /// As [`Delta::flush`], of a frozen layer. Other processes can open it afterwards.
    ///
    /// # Errors
    /// As those of [`Delta::flush`].
    pub(crate) async fn flush_frozen(
        &self,
        io: &Io,
        store: &CachedStore,
    ) -> Result<(), BlockError> {
        self.flush(io, store).await?;
        // That its data is stable counts here; the operation that makes a snapshot reports an
        // error.
        let _ = store.store().share_lock();
        self.is_unflushed.store(false, Ordering::SeqCst);
        store.end_writeback();
        Ok(())
    }

    /// Makes its content stable: the data, then the map. The name of its file is the caller's
    /// business.
    ///
    /// # Errors
    /// Those of the store. A writeback cache writes the data again, and a later flush saves the blocks; without one their data is
    /// in doubt, and later flushes fail, too.
    pub(crate) async fn flush(&self, io: &Io, store: &CachedStore) -> Result<(), BlockError> {
        if let Some(error) = self.unreported.lock().take() {
            return Err(error);
        }
        self.save(io, store).await
    }

    async fn save(&self, io: &Io, store: &CachedStore) -> Result<(), BlockError> {
        self.settle_header(io, store).await?;
        if !self.has_pending.load(Ordering::Acquire) && !self.has_found.load(Ordering::Acquire) {
            self.flush_store(io, store).await?;
            // Blocks whose data may be lost are no longer pending.
            return self.must_be_uninterrupted();
        }
        let _turn = self.saving.enter().await;
        self.must_be_uninterrupted()?;
        let pages = self.pending.lock().begin_save();
        for page in &pages {
            // Now, since what is found has to be stable before the other slot is written.
            if self.pages.load(*page) == Some(UNKNOWN) {
                self.newest(io, store, *page).await?;
            }
        }
        self.make_found_stable(io, store).await?;
        if pages.is_empty() {
            return self.must_be_uninterrupted();
        }
        let mut written = Vec::with_capacity(pages.len());
        for page in pages {
            let set = |bits: &mut [u8]| self.pending.lock().set_in(page, bits);
            written.push(self.write_page(io, store, page, set).await?);
        }
        self.flush_store(io, store).await?;
        // Another flush, such as one for a header, may have failed meanwhile.
        self.must_not_be_in_doubt()?;
        written.iter().for_each(|page| self.note_stable(page));
        let mut pending = self.pending.lock();
        self.saves.fetch_add(1, Ordering::SeqCst);
        pending.end_save();
        self.has_pending.store(!pending.is_empty(), Ordering::Release);
        Ok(())
    }
}

/// A map page that was written, and is not stable yet.
struct WrittenPage {
    page: u32,
    /// The state that names its slot.
    slot: u8,
    /// Bits that it has more than before.
    more: u64,
}

impl WrittenPage {
    fn none(page: u32) -> WrittenPage {
        WrittenPage { page, slot: EMPTY, more: 0 }
    }
}

/// A change of the map or the header in flight.
struct PendingChange<'a> {
    delta: &'a Delta,
    is_over: bool,
}

impl PendingChange<'_> {
    fn begin(delta: &Delta) -> PendingChange<'_> {
        PendingChange { delta, is_over: false }
    }

    /// It succeeded or failed.
    fn end(mut self) {
        self.is_over = true;
    }
}

impl Drop for PendingChange<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.delta.is_interrupted.store(true, Ordering::SeqCst);
        }
    }
}
