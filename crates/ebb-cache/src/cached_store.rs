//! [`CachedStore`]: a store and its part of the cache, used as one store.
//!
//! # Invariants
//! - Ranges arrive checked, as at every store; the store below counts its own requests.
//! - All requests of a volume with a cache go through its `CachedStore`: the cache would not know of others. Without a cache
//!   they may go to the store at once ([`CachedStore::uncached`]).
//! - A read that is in memory costs what it costs in [`StoreCache::read_cached`]; without a cache a request costs what
//!   it costs in the store.

use std::sync::{Arc, Weak};

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, Capabilities, DeviceIdentity, Extent, Identity, Io,
    Loss, Resize, ResizeError, Wanted, ZeroFlags,
};
use ebb_store::Store;

use crate::cache::{Cache, CacheError};
use crate::size::Edge;
use crate::stats::Mode;
use crate::volume::{StoreCache, VolumeCache};
use crate::writeback_state::WritebackControl;

/// A store, and its part of the cache if it has one.
#[derive(Debug)]
pub struct CachedStore {
    store: Arc<Store>,
    cache: Option<StoreCache>,
}

impl From<Store> for CachedStore {
    /// Without a cache.
    fn from(store: Store) -> CachedStore {
        CachedStore { store: Arc::new(store), cache: None }
    }
}

impl CachedStore {
    /// A store with a part of `cache`, called `name` there; without one if the mode is [`Mode::None`].
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn new(
        cache: &Arc<Cache>,
        name: &str,
        store: Store,
        mode: Mode,
    ) -> Result<CachedStore, CacheError> {
        if mode == Mode::None {
            return Ok(store.into());
        }
        let store = Arc::new(store);
        let cache = Some(cache.volume(name, &store, mode)?);
        Ok(CachedStore { store, cache })
    }

    /// As [`CachedStore::new`], for a store that volumes share as a layer.
    pub(crate) fn shared(
        cache: &Arc<Cache>,
        name: &str,
        store: Store,
        mode: Mode,
    ) -> Result<CachedStore, CacheError> {
        let store = Arc::new(store);
        let cache = match mode {
            Mode::None => None,
            mode => Some(cache.shared_layer(name, &store, mode)?),
        };
        Ok(CachedStore { store, cache })
    }

    /// Flushes the data, whether or not the name of its file is stable.
    pub(crate) async fn flush_content(&self, io: &Io) -> Result<(), BlockError> {
        match &self.cache {
            Some(cache) => cache.flush(io).await,
            None => self.store.flush_content(io).await,
        }
    }

    /// The store below the cache.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The store, if it has no cache.
    #[inline]
    pub fn uncached(&self) -> Option<&Store> {
        if self.cache.is_none() { Some(&self.store) } else { None }
    }

    /// Its part of the cache.
    pub fn cache(&self) -> Option<&Arc<VolumeCache>> {
        self.cache.as_ref().map(StoreCache::pages)
    }

    /// An empty part of `cache`, called `name`, for a store that is used without one: a volume's place among those that
    /// share the cache.
    pub(crate) fn empty_part(
        &self,
        cache: &Arc<Cache>,
        name: &str,
    ) -> Result<Arc<VolumeCache>, CacheError> {
        Ok(cache.volume(name, &self.store, Mode::None)?.pages().clone())
    }

    /// Reads what is wholly in memory; false: nothing was read. At most [`StoreCache::AT_ONCE`] bytes.
    #[inline]
    pub(crate) fn read_cached(&self, io: &Io, buf: &mut [u8], offset: u64) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.read_cached(io, buf, offset))
    }

    /// Whether it has a cache in which reads may be found, see [`CachedStore::read_cached_pieces`].
    #[inline]
    pub fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    /// Passes `length` bytes at `offset` to `put` if all are in memory, in pieces with their places in the request, in any
    /// order; false if not: then `put` may have had some of them. At most [`StoreCache::AT_ONCE`] bytes.
    #[inline]
    pub fn read_cached_pieces(
        &self,
        io: &Io,
        range: (u64, usize),
        put: &mut impl FnMut(usize, &[u8]),
    ) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.read_cached_pieces(io, range, put))
    }

    /// Its cache mode.
    pub fn mode(&self) -> Mode {
        self.cache.as_ref().map_or(Mode::None, |cache| cache.mode())
    }

    /// True if a flush has failed, so that the data it was to make stable may be lost: all flushes fail until
    /// the store is opened anew.
    pub fn is_lost(&self) -> bool {
        match &self.cache {
            Some(cache) => cache.is_lost(),
            None => self.store.is_lost(),
        }
    }

    /// When and why [`CachedStore::is_lost`] became true.
    pub fn loss(&self) -> Option<Loss> {
        if self.is_lost() { self.store.loss() } else { None }
    }

    /// In writeback mode, starts writeback in the background, on this worker; `control` decides how much is written
    /// and when. Ends when the store is dropped, or by [`CachedStore::end_writeback`].
    pub fn start_writeback(&self, io: &Io, control: Arc<dyn WritebackControl>) {
        if let Some(cache) = self.cache.as_ref().filter(|cache| cache.mode() == Mode::Writeback) {
            cache.set_control(control);
            io.spawn(cache.clone().run_flusher(io.clone())).detach();
        }
    }

    /// Ends writeback in the background. Dirty data stays dirty.
    pub fn end_writeback(&self) {
        if let Some(cache) = &self.cache {
            cache.end_flusher();
        }
    }

    /// The store, to see when it is dropped: writeback in the background holds it while it writes.
    pub fn downgrade(&self) -> Weak<Store> {
        Arc::downgrade(&self.store)
    }

    /// Writes back what is dirty below `end`: the first step of shrinking.
    ///
    /// # Errors
    /// Those of the store; the data is kept.
    pub async fn write_below(&self, io: &Io, end: u64) -> Result<(), BlockError> {
        match &self.cache {
            Some(cache) => cache.write_below(io, end).await,
            None => Ok(()),
        }
    }

    /// Prepares a resize to `to` bytes: holds the page at the smaller of both ends. To shrink, the caller has waited
    /// until no request beyond the new end is in flight.
    ///
    /// # Errors
    /// Those of the store: the page is dirty and could not be written.
    pub async fn prepare_resize(&self, io: &Io, to: u64) -> Result<PreparedResize<'_>, BlockError> {
        let cached = match &self.cache {
            Some(cache) => {
                let edge = cache.hold_edge(io, to.min(cache.size())).await?;
                Some((cache, edge, cache.size()))
            }
            None => None,
        };
        Ok(PreparedResize { store: self, to, cached })
    }
}

/// A resize whose end page is held, see [`CachedStore::prepare_resize`]. If it is dropped instead of carried out or
/// cancelled, that page is never cached again.
#[must_use]
pub struct PreparedResize<'a> {
    store: &'a CachedStore,
    to: u64,
    /// The cache, its end page, and its size.
    cached: Option<(&'a StoreCache, Edge<'a>, u64)>,
}

impl PreparedResize<'_> {
    /// To shrink: waits until nothing beyond the new end is being written back.
    pub async fn seal(&self) {
        if let Some((cache, _, _)) = &self.cached {
            cache.seal(self.to).await;
        }
    }

    /// Resizes the store, and the cache with it. Returns the new size.
    ///
    /// # Errors
    /// [`ResizeError`]; the size is unchanged then.
    pub async fn resize(self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let resized = self.store.store.resize(io, order).await;
        let Some((cache, edge, from)) = self.cached else { return resized };
        match resized {
            Ok(size) if size >= from => cache.grow(io, size, edge),
            Ok(size) => cache.cut(io, size, edge).await,
            Err(_) => cache.keep_size(io, from, edge),
        }
        resized
    }

    /// The store keeps its size.
    pub fn cancel(self, io: &Io) {
        if let Some((cache, edge, from)) = self.cached {
            cache.keep_size(io, from, edge);
        }
    }
}

impl BlockStore for CachedStore {
    fn size(&self) -> u64 {
        self.store.size()
    }

    #[inline]
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    fn identity(&self) -> Identity {
        self.store.identity()
    }

    fn place(&self) -> String {
        self.store.place()
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        self.store.device_identity()
    }

    #[inline]
    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        self.store.bounce_bytes(offset, length)
    }

    async fn read(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let Some(cache) = &self.cache else { return self.store.read(io, buf, offset).await };
        let short = buf.len() <= StoreCache::AT_ONCE;
        if short && cache.read_cached(io, &mut buf, offset) {
            return (Ok(()), buf);
        }
        cache.read(io, buf, offset).await
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        match &self.cache {
            Some(cache) => cache.write(io, buf, offset, fua).await,
            None => self.store.write(io, buf, offset, fua).await,
        }
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        // First, since it may ask for a whole flush. Data is flushed even if the folder cannot be.
        let named = self.store.make_name_stable(io).await;
        self.flush_content(io).await?;
        named
    }

    async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        match &self.cache {
            Some(cache) => cache.discard(io, offset, length).await,
            None => self.store.discard(io, offset, length).await,
        }
    }

    async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        match &self.cache {
            Some(cache) => cache.write_zeroes_while(io, offset, length, flags, wanted).await,
            None => self.store.write_zeroes_while(io, offset, length, flags, wanted).await,
        }
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        match &self.cache {
            Some(cache) => cache.extents(io, offset, length, limit).await,
            None => self.store.extents(io, offset, length, limit).await,
        }
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        match &self.cache {
            Some(cache) => cache.prefetch(io, offset, length).await,
            None => self.store.prefetch(io, offset, length).await,
        }
    }

    /// Only without a cache.
    fn has_direct_access(&self) -> bool {
        self.cache.is_none() && self.store.has_direct_access()
    }

    fn read_in_place(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> bool {
        self.cache.is_none() && self.store.read_in_place(offset, length, see)
    }

    fn write_in_place(&self, offset: u64, length: u64, put: impl FnMut(&mut [u8])) -> bool {
        self.cache.is_none() && self.store.write_in_place(offset, length, put)
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        self.store.check_resize(io, order).await
    }

    /// Waits for writeback beyond the new end without a limit. A volume, which has one, takes these steps itself.
    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let to = self.check_resize(io, order).await?;
        let order = Resize { to: Some(to), ..order };
        if to < self.size() {
            self.write_below(io, to).await.map_err(ResizeError::Unsaved)?;
        }
        let shrinks = to < self.size();
        let prepared = self.prepare_resize(io, to).await.map_err(ResizeError::Unsaved)?;
        if shrinks {
            prepared.seal().await;
        }
        prepared.resize(io, order).await
    }

    fn abort(&self) {
        self.store.abort();
    }

    fn release(&self) {
        self.store.release();
    }
}
