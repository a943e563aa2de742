//! The volume itself: checks, then the cache if it has one, then the store.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use ebb_cache::{Mode, VolumeCache};
use ebb_io::{BufPool, Share, Shares};
use ebb_store::{
    BlockError, Buf, BufResult, Capabilities, ErrorKind, Extent, Io, Operation, SECTOR, Store,
    Wanted, ZeroFlags,
};

use crate::gate::{Gate, Pass};
use crate::stats::VolumeStats;
use crate::writer::{Lease, Writer, WriterConflict, Writers};

/// What an operator may say of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeOptions {
    /// Refuse everything that changes data.
    pub read_only: bool,
    /// Let several write at the same time: they expect each other.
    pub shared: bool,
}

/// A disk. Shared by the workers that serve it.
#[derive(Debug)]
pub struct Volume {
    name: Arc<str>,
    pub(crate) store: Arc<Store>,
    pub(crate) cache: Option<Arc<VolumeCache>>,
    options: VolumeOptions,
    pub(crate) gate: Gate,
    writers: Arc<Writers>,
    stats: VolumeStats,
    /// Requests that changed data when the last flush that succeeded began.
    flushed: AtomicU64,
    /// What requests are judged by, once they are inside the gate.
    pub(crate) size: AtomicU64,
    /// Held while it gets another size; and whether that is a smaller one.
    pub(crate) resizing: async_lock::Mutex<()>,
    pub(crate) shrinking: AtomicBool,
    share: OnceLock<Arc<Share>>,
}

impl Volume {
    /// A volume called `name` on `store`, without a cache.
    pub fn new(name: &str, store: Store, options: VolumeOptions) -> Arc<Volume> {
        Volume::build(name, store, options, None)
    }

    /// A volume called `name` on `store`, its reads served from `cache`. The cache must be made for
    /// this volume and this size.
    pub fn with_cache(
        name: &str,
        store: Store,
        options: VolumeOptions,
        cache: Arc<VolumeCache>,
    ) -> Arc<Volume> {
        Volume::build(name, store, options, Some(cache))
    }

    fn build(
        name: &str,
        store: Store,
        options: VolumeOptions,
        cache: Option<Arc<VolumeCache>>,
    ) -> Arc<Volume> {
        Arc::new(Volume {
            name: name.into(),
            size: AtomicU64::new(store.size()),
            store: Arc::new(store),
            cache,
            options,
            gate: Gate::default(),
            writers: Arc::default(),
            stats: VolumeStats::default(),
            flushed: AtomicU64::new(0),
            share: OnceLock::new(),
            resizing: async_lock::Mutex::default(),
            shrinking: AtomicBool::new(false),
        })
    }

    /// The name it is exported under.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Its share of the memory for requests, which exports count against before they take a buffer.
    /// Made here, as that of a store of its own, unless [`Volume::join`] has made it.
    pub fn share(&self, shares: &Shares) -> &Arc<Share> {
        self.share.get_or_init(|| shares.join(&format!("volume {}", self.name)))
    }

    /// Gives it a share of the memory for requests before any is asked; `store` is a name that
    /// volumes with the same disk or server have in common.
    pub fn join(&self, shares: &Shares, store: &str) {
        self.share.get_or_init(|| shares.join(store));
    }

    /// Bytes; a multiple of [`SECTOR`]. See [`Volume::resize`].
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    /// Lets `writer` write until the lease is dropped. The one at a time that may; see [`VolumeOptions::shared`]
    /// and `share`, with which it is let in beside whoever there is.
    ///
    /// # Errors
    /// [`WriterConflict`] if there is another one.
    pub fn claim_writer(&self, writer: Writer, share: bool) -> Result<Lease, WriterConflict> {
        let claimed = self.writers.claim(writer, share || self.options.shared);
        claimed.map_err(|by| WriterConflict { volume: self.name.clone(), by })
    }

    /// Why `writer` may not write now.
    pub fn writer_conflict(&self, writer: &Writer) -> Option<WriterConflict> {
        let by = self.writers.conflict(writer).filter(|_| !self.options.shared)?;
        Some(WriterConflict { volume: self.name.clone(), by })
    }

    /// The lease is one of this volume.
    pub fn is_leased(&self, lease: &Lease) -> bool {
        lease.is_of(&self.writers)
    }

    /// Which store its bytes are in.
    pub fn store_identity(&self) -> ebb_store::Identity {
        self.store.identity()
    }

    /// True when nothing may change it.
    pub fn read_only(&self) -> bool {
        self.options.read_only
    }

    /// What its store can do.
    pub fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    /// Bytes of memory that a READ or WRITE takes beside its own buffer, see [`Store::bounce_bytes`]; 0 for most.
    pub fn bounce_footprint(&self, offset: u64, length: usize) -> usize {
        match self.store.bounce_bytes(offset, length) {
            0 => 0,
            bytes => BufPool::footprint(bytes),
        }
    }

    /// Its cache, if it has one.
    pub fn cache(&self) -> Option<&Arc<VolumeCache>> {
        self.cache.as_ref()
    }

    /// How it is cached.
    pub fn cache_mode(&self) -> Mode {
        self.cache.as_ref().map_or(Mode::None, |cache| cache.mode())
    }

    /// How its store fares, if that is behind a network.
    pub fn store_state(&self) -> Option<ebb_store::StoreState> {
        self.store.state()
    }

    /// What can be seen of its store from outside; `None` for those in memory.
    pub fn watched(&self) -> Option<&ebb_store::StoreHealth> {
        self.store.health()
    }

    /// The file or server its store is at, for messages.
    pub fn place(&self) -> String {
        self.store.place()
    }

    /// Starts writing back in the background, on this worker; `control` decides how much and when. For
    /// a volume whose cache is in writeback mode; ends when the volume has gone.
    pub fn start_writeback(&self, io: &Io, control: Arc<dyn ebb_cache::WritebackControl>) {
        if let Some(cache) = self.cache.as_ref().filter(|cache| cache.mode() == Mode::Writeback) {
            cache.set_control(control);
            io.spawn(cache.clone().run_flusher(io.clone(), self.store.clone())).detach();
        }
    }

    /// Its counters.
    pub fn stats(&self) -> &VolumeStats {
        &self.stats
    }

    /// True once it is being closed.
    pub fn is_closing(&self) -> bool {
        self.gate.is_shut()
    }

    /// Reads `buf.len()` bytes at `offset`.
    pub async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        let length = buf.len() as u64;
        let _pass = match self.admit(Operation::Read, offset, length) {
            Ok(pass) => pass,
            Err(error) => return (Err(error), buf),
        };
        let (result, buf) = match &self.cache {
            Some(cache) => {
                let mut buf = buf;
                let short = buf.len() <= VolumeCache::AT_ONCE;
                if short && cache.read_cached(io, &self.store, &mut buf, offset) {
                    (Ok(()), buf)
                } else {
                    cache.read(io, &self.store, buf, offset).await
                }
            }
            None => self.store.read(io, buf, offset).await,
        };
        (self.account(Operation::Read, length, result), buf)
    }

    /// Writes the whole buffer at `offset`; with `fua` it is stable on return.
    pub async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let length = buf.len() as u64;
        let _pass = match self.admit(Operation::Write, offset, length) {
            Ok(pass) => pass,
            Err(error) => return (Err(error), buf),
        };
        let (result, buf) = match &self.cache {
            Some(cache) => cache.write(io, &self.store, buf, offset, fua).await,
            None => self.store.write(io, buf, offset, fua).await,
        };
        (self.account(Operation::Write, length, result), buf)
    }

    /// Makes everything acknowledged before stable.
    pub async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        let mut pass = self.admit(Operation::Flush, 0, 0)?;
        while self.shrinking.load(Ordering::SeqCst) {
            // Data beyond the new end is held back until the store is cut, and stays if that fails: a
            // flush that has come in between waits for it, outside.
            drop(pass);
            drop(self.resizing.lock().await);
            pass = self.admit(Operation::Flush, 0, 0)?;
        }
        let result = self.make_stable(io).await;
        self.account(Operation::Flush, 0, result)
    }

    /// Gives the space of a range back if the store can.
    pub async fn discard(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        fua: bool,
    ) -> Result<(), BlockError> {
        let _pass = self.admit(Operation::Discard, offset, length)?;
        let mut result = Ok(());
        if length > 0 {
            result = match &self.cache {
                Some(cache) => cache.discard(io, &self.store, offset, length).await,
                None => self.store.discard(io, offset, length).await,
            };
        }
        if fua && result.is_ok() {
            result = self.make_stable(io).await;
        }
        self.account(Operation::Discard, length, result)
    }

    /// Makes a range read as zeroes; with `fua` they are stable on return.
    pub async fn write_zeroes(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        fua: bool,
    ) -> Result<(), BlockError> {
        self.write_zeroes_while(io, offset, length, flags, fua, &|| true).await
    }

    /// As [`Volume::write_zeroes`]. Where the store has to write zeroes out, which takes long, it ends with
    /// [`ErrorKind::Closing`] as soon as they are not wanted any more, or the volume is being closed.
    pub async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        fua: bool,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let _pass = self.admit(Operation::WriteZeroes, offset, length)?;
        let wanted: Wanted<'_> = &|| !self.is_closing() && wanted();
        let mut result = Ok(());
        if length > 0 {
            result = match &self.cache {
                Some(cache) => {
                    let store = &self.store;
                    cache.write_zeroes_while(io, store, offset, length, flags, wanted).await
                }
                None => self.store.write_zeroes_while(io, offset, length, flags, wanted).await,
            };
        }
        if fua && result.is_ok() {
            result = self.make_stable(io).await;
        }
        self.account(Operation::WriteZeroes, length, result)
    }

    /// Data and holes of a range in order, at most `limit` runs.
    pub async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let _pass = self.admit(Operation::Extents, offset, length)?;
        let result = match &self.cache {
            Some(cache) => cache.extents(io, &self.store, offset, length, limit).await,
            None => self.store.extents(io, offset, length, limit).await,
        };
        self.account(Operation::Extents, length, result)
    }

    /// Announces that a range will be read soon.
    pub async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let _pass = self.admit(Operation::Prefetch, offset, length)?;
        let result = match &self.cache {
            Some(cache) => cache.prefetch(io, &self.store, offset, length).await,
            None => self.store.prefetch(io, offset, length).await,
        };
        self.account(Operation::Prefetch, length, result)
    }

    /// Refuses new requests, waits for those in flight, flushes, and takes the store's lock off, so that a
    /// successor can open it. Safe to call twice: data of a writeback cache that could not be written is
    /// tried again.
    ///
    /// # Errors
    /// That of the last flush: data acknowledged without a flush may then not be stable.
    pub async fn close(&self, io: &Io) -> Result<(), BlockError> {
        self.gate.shut();
        self.gate.empty().await;
        // Who is about to shrink it gives up.
        let _alone = self.resizing.lock().await;
        if !self.options.read_only {
            let stable = match self.make_stable(io).await {
                // What failed in the background before is told once, also if all of it was written since.
                Err(_) if !self.is_lost() && self.cache().is_some_and(|c| c.dirty() == 0) => {
                    self.make_stable(io).await
                }
                stable => stable,
            };
            stable.map_err(|e| self.name_it(e))?;
            if let Some(cache) = &self.cache {
                cache.end_flusher();
            }
        }
        self.store.release();
        Ok(())
    }

    /// Gives the volume up, from any thread: new requests are refused, and those that wait for a remote
    /// store fail at once with [`ErrorKind::Closing`], [`Volume::close`] included. What was acknowledged and
    /// not flushed may be lost. Operations of a file or device are the kernel's: they end in their time.
    pub fn abort(&self) {
        self.gate.shut();
        self.store.abort();
    }

    /// Everything acknowledged is on the store, and stable there.
    async fn make_stable(&self, io: &Io) -> Result<(), BlockError> {
        let changes = self.stats.changes();
        match &self.cache {
            Some(cache) => cache.flush(io, &self.store).await?,
            None => self.store.flush(io).await?,
        }
        // What ended before the flush began is stable now.
        self.flushed.fetch_max(changes, Ordering::Relaxed);
        Ok(())
    }

    /// True if nothing that was acknowledged may be missing on the store after a crash: it is read-only, or all
    /// requests that changed data ended before a flush that succeeded began.
    pub fn is_stable(&self) -> bool {
        self.options.read_only || self.flushed.load(Ordering::Relaxed) == self.stats.changes()
    }

    /// True if a flush has failed, and what it was to make stable may be lost for good: no flush goes well
    /// until the volume is opened anew.
    pub fn is_lost(&self) -> bool {
        match &self.cache {
            Some(cache) => cache.is_lost(&self.store),
            None => self.store.is_lost(),
        }
    }

    /// Since when and why [`Volume::is_lost`].
    pub fn loss(&self) -> Option<ebb_store::Loss> {
        if self.is_lost() { self.store.loss() } else { None }
    }

    /// Requests that are under way.
    pub fn under_way(&self) -> u64 {
        self.gate.inside()
    }

    /// The verdict on a request, and the pass that keeps the volume open for it.
    fn admit(
        &self,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Result<Pass<'_>, BlockError> {
        let pass = self.gate.enter().ok_or_else(|| {
            self.name_it(BlockError::new(ErrorKind::Closing, operation, offset, length))
        })?;
        // From inside: who has the volume shrunk waits for those judged by the size before.
        self.judge(operation, offset, length)?;
        Ok(pass)
    }

    fn judge(&self, operation: Operation, offset: u64, length: u64) -> Result<(), BlockError> {
        let refuse = |kind| Err(self.name_it(BlockError::new(kind, operation, offset, length)));
        let changes =
            matches!(operation, Operation::Write | Operation::Discard | Operation::WriteZeroes);
        if changes && self.options.read_only {
            return refuse(ErrorKind::ReadOnly);
        }
        if !offset.is_multiple_of(SECTOR) || !length.is_multiple_of(SECTOR) {
            return refuse(ErrorKind::Invalid);
        }
        if offset.checked_add(length).is_none_or(|end| end > self.size()) {
            return refuse(ErrorKind::OutOfRange);
        }
        Ok(())
    }

    /// The data itself, if it lies in this process and no cache stands before it: for requests done
    /// at once, without a buffer and without waiting. `None` otherwise, and once it is being closed.
    pub fn direct_access(&self) -> Option<AtHand<'_>> {
        if self.cache.is_some() || !self.store.has_direct_access() {
            return None;
        }
        Some(AtHand { volume: self, _pass: self.gate.enter()? })
    }

    fn account<T>(
        &self,
        operation: Operation,
        length: u64,
        result: Result<T, BlockError>,
    ) -> Result<T, BlockError> {
        self.stats.count(operation, length, result.is_ok());
        result.map_err(|e| self.name_it(e))
    }

    fn name_it(&self, error: BlockError) -> BlockError {
        BlockError { volume: Some(self.name.clone()), ..error }
    }
}

/// A volume's data where it lies, see [`Volume::direct_access`]. Closing waits for it: not to be kept
/// across a wait.
#[derive(Debug)]
pub struct AtHand<'a> {
    volume: &'a Volume,
    _pass: Pass<'a>,
}

impl AtHand<'_> {
    /// Shows `length` bytes at `offset`, in order, in pieces of at most a page.
    ///
    /// # Errors
    /// As [`Volume::read`]; then nothing was shown.
    pub fn read(&self, offset: u64, length: u64, see: impl FnMut(&[u8])) -> Result<(), BlockError> {
        self.volume.judge(Operation::Read, offset, length)?;
        self.volume.store.read_in_place(offset, length, see);
        self.volume.stats.count(Operation::Read, length, true);
        Ok(())
    }

    /// Has `length` bytes at `offset` overwritten, in order, in pieces of at most a page.
    ///
    /// # Errors
    /// As [`Volume::write`]; then nothing was overwritten.
    pub fn write(
        &self,
        offset: u64,
        length: u64,
        put: impl FnMut(&mut [u8]),
    ) -> Result<(), BlockError> {
        self.volume.judge(Operation::Write, offset, length)?;
        self.volume.store.write_in_place(offset, length, put);
        self.volume.stats.count(Operation::Write, length, true);
        Ok(())
    }
}
