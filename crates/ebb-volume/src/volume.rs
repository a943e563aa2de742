//! The volume: checks, gate, limits and counters of requests, which its layers ([`Layers`]) carry out.

mod in_place;
mod losses;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, Capabilities, ErrorKind, Extent, Identity, Io, Loss,
    Operation, SECTOR, StoreHealth, Wanted, ZeroFlags, nonce,
};
use ebb_cache::{CachedStore, Layers, Mode, ReadStep, VolumeCache};
use ebb_io::{BufPool, Share, Shares};

pub use self::in_place::{CachedAccess, DirectAccess};
use crate::changes::ChangeCount;
use crate::gate::{Gate, Pass};
use crate::limit::{LimitFigures, LimitGroup, RateLimits, VolumeLimits};
use crate::owed_loss::OwedLoss;
use crate::stats::{Started, VolumeStats};
use crate::tracepoints;
use crate::writer::{Lease, Writer, WriterConflict, Writers};

/// What an operator can configure of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeOptions {
    /// Refuse requests that change data.
    pub read_only: bool,
    /// Allow several writers at the same time, which are prepared for each other.
    pub shared: bool,
}

/// A virtual disk, shared by the workers that serve it.
#[derive(Debug)]
pub struct Volume {
    name: Arc<str>,
    opening: u64,
    pub(crate) store: Layers,
    options: VolumeOptions,
    pub(crate) gate: Gate,
    writers: Arc<Writers>,
    stats: VolumeStats,
    changes: ChangeCount,
    pub(crate) owed: OwedLoss,
    /// The size that requests are checked against, inside the gate.
    pub(crate) size: AtomicU64,
    /// Held while the volume is resized; and whether it is being shrunk.
    pub(crate) resizing: tokio::sync::Mutex<()>,
    pub(crate) shrinking: AtomicBool,
    /// See [`Volume::plan_size`]; `u64::MAX`: it keeps its size.
    pub(crate) planned_size: AtomicU64,
    share: OnceLock<Arc<Share>>,
    /// Whether a limit is in force; the limits, from the first one on.
    limited: AtomicBool,
    limits: OnceLock<Box<VolumeLimits>>,
}

impl Volume {
    /// A volume called `name` on `store`, which may have a cache and several layers. Read-only if the store is.
    pub fn new(name: &str, store: impl Into<Layers>, options: VolumeOptions) -> Arc<Volume> {
        let store = store.into();
        let read_only = options.read_only || store.capabilities().read_only;
        let options = VolumeOptions { read_only, ..options };
        Arc::new(Volume {
            name: name.into(),
            opening: nonce(),
            size: AtomicU64::new(store.size()),
            store,
            options,
            gate: Gate::default(),
            writers: Arc::default(),
            stats: VolumeStats::default(),
            changes: ChangeCount::default(),
            owed: OwedLoss::default(),
            share: OnceLock::new(),
            resizing: tokio::sync::Mutex::default(),
            shrinking: AtomicBool::new(false),
            planned_size: AtomicU64::new(u64::MAX),
            limited: AtomicBool::new(false),
            limits: OnceLock::new(),
        })
    }

    /// The name under which it is exported.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Its share of the memory for requests, against which exports charge their buffers. Created here, as that
    /// of a store of its own, unless [`Volume::join`] has created it.
    pub fn share(&self, shares: &Shares) -> &Arc<Share> {
        self.share.get_or_init(|| shares.join(&format!("volume {}", self.name)))
    }

    /// Creates its share of the memory for requests before the first request; `store` is a name that volumes
    /// on the same disk or server have in common.
    pub fn join(&self, shares: &Shares, store: &str) {
        self.share.get_or_init(|| shares.join(store));
    }

    /// Bytes; a multiple of [`SECTOR`]. See [`Volume::resize`].
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    /// Lets `writer` write until the lease is dropped. Only one writer at a time may, unless the volume is
    /// [`VolumeOptions::shared`] or `share` is true, with which the writer is allowed beside others.
    ///
    /// # Errors
    /// [`WriterConflict`] if there is another writer.
    pub fn claim_writer(&self, writer: Writer, share: bool) -> Result<Lease, WriterConflict> {
        let claimed = self.writers.claim(writer, share || self.options.shared);
        claimed.map_err(|by| WriterConflict { volume: self.name.clone(), by })
    }

    /// The conflict because of which `writer` may not write now.
    pub fn writer_conflict(&self, writer: &Writer) -> Option<WriterConflict> {
        let by = self.writers.conflict(writer).filter(|_| !self.options.shared)?;
        Some(WriterConflict { volume: self.name.clone(), by })
    }

    /// Whether the lease is one of this volume.
    pub fn is_leased(&self, lease: &Lease) -> bool {
        lease.is_of(&self.writers)
    }

    /// The identity of its store.
    pub fn store_identity(&self) -> Identity {
        self.store.identity()
    }

    /// True if requests that change data are refused.
    pub fn read_only(&self) -> bool {
        self.options.read_only
    }

    /// What its store can do.
    #[inline]
    pub fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    /// Bytes of memory that a read or write needs beside its own buffer, see [`BlockStore::bounce_bytes`]; usually 0.
    #[inline]
    pub fn bounce_footprint(&self, offset: u64, length: usize) -> usize {
        match self.store.bounce_bytes(offset, length) {
            0 => 0,
            bytes => BufPool::footprint(bytes),
        }
    }

    /// Its cache, if it has one.
    pub fn cache(&self) -> Option<Arc<VolumeCache>> {
        self.store.top().cache().cloned()
    }

    /// Its layers, for what changes them.
    pub fn layers(&self) -> &Layers {
        &self.store
    }

    /// Runs something that copies or exchanges its layers; closing waits for it.
    ///
    /// # Errors
    /// [`ErrorKind::Closing`] if it is being closed.
    pub async fn with_layers<T>(
        &self,
        io: &Io,
        work: impl Future<Output = T>,
    ) -> Result<T, BlockError> {
        let request = self.admit(io, Operation::Prefetch, 0, 0)?;
        let result = work.await;
        request.complete(Ok(result))
    }

    /// Bytes of acknowledged data that its store does not have.
    pub fn dirty(&self) -> u64 {
        self.store.dirty()
    }

    /// Bytes that its store has and that are not known to be stable there.
    pub fn unstable(&self) -> u64 {
        self.store.unstable()
    }

    /// Its cache mode.
    pub fn cache_mode(&self) -> Mode {
        self.store.top().mode()
    }

    /// Returns true if a kill of the daemon may lose writes that were acknowledged and not flushed.
    #[inline]
    pub fn loses_by_kill(&self) -> bool {
        self.store.loses_by_kill()
    }

    /// A number that no other opening of a volume has, in this process or another.
    pub fn opening(&self) -> u64 {
        self.opening
    }

    /// The state of its store, if that is remote.
    pub fn store_state(&self) -> Option<ebb_store::StoreState> {
        self.store.top().store().state()
    }

    /// The states of the remote stores of its layers, from the top on.
    pub fn layer_states(&self) -> Vec<ebb_store::StoreState> {
        self.store.each_store(ebb_store::Store::state).into_iter().flatten().collect()
    }

    /// Whether its store has lost its right to the data, for good: see [`ErrorKind::Offline`].
    pub fn is_offline(&self) -> bool {
        self.store_state().is_some_and(|state| state.offline)
    }

    /// Refuses new requests of a volume that is offline, also those that the cache could complete: another client may have
    /// written the data since.
    pub fn refuse_offline(&self) {
        self.gate.shut();
    }

    /// True once after the size of its store may have changed elsewhere.
    pub fn take_store_changed(&self) -> bool {
        self.store.top().store().take_changed()
    }

    /// Passes how the state of the store of each layer can be observed to `of`, from the top on,
    /// with `None` for stores in memory. Volumes may have lower layers in common.
    pub fn each_health<T>(&self, mut of: impl FnMut(Option<&StoreHealth>) -> T) -> Vec<T> {
        self.store.each_store(|store| of(store.health()))
    }

    /// The file or server its store is at, for messages.
    pub fn place(&self) -> String {
        self.store.place()
    }

    /// Starts writeback in the background, on this worker; `control` decides how much is written and when. For
    /// a volume whose cache is in writeback mode; ends when the volume is dropped.
    pub fn start_writeback(&self, io: &Io, control: Arc<dyn ebb_cache::WritebackControl>) {
        self.store.top().start_writeback(io, control);
    }

    /// The limits that its requests have to pass before an export receives or consumes them; `None` if there are none.
    #[inline]
    pub fn limits(&self) -> Option<&VolumeLimits> {
        if !self.limited.load(Ordering::Relaxed) {
            return None;
        }
        self.limits.get().map(|limits| &**limits)
    }

    /// Changes its own limits; waiting requests follow at once.
    pub fn set_rate_limits(&self, limits: RateLimits) {
        self.change_limits(limits.is_limited(), |all| all.set(limits));
    }

    /// Changes the group whose limits its requests have to pass, too.
    pub fn set_limit_group(&self, group: Option<&Arc<LimitGroup>>) {
        self.change_limits(group.is_some(), |all| all.set_group(group));
    }

    /// Limits are allocated when the first one is set.
    fn change_limits(&self, any: bool, change: impl FnOnce(&VolumeLimits)) {
        let limits = match self.limits.get() {
            None if !any => return,
            _ => self.limits.get_or_init(Box::default),
        };
        change(limits);
        self.limited.store(limits.is_limited(), Ordering::Relaxed);
    }

    /// The limits in force and what they have done; `None` if there has been none since the volume was opened.
    pub fn limit_figures(&self) -> Option<LimitFigures> {
        self.limits.get().map(|limits| limits.figures())
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
    pub async fn read(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let length = buf.len() as u64;
        let request = match self.admit(io, Operation::Read, offset, length) {
            Ok(request) => request,
            Err(error) => return (Err(error), buf),
        };
        // What is left of a step after this needs no drop: it takes no room in the future of a request.
        let (layer, store) = match self.store.start_read(io, &mut buf, offset) {
            ReadStep::Layer(layer) => (Some(layer), None),
            ReadStep::Store(store) => (None, Some(store)),
            ReadStep::Complete => (None, None),
            ReadStep::Remaining(remaining) => {
                let (result, buf) = remaining.read(io, buf).await;
                return (request.complete(result), buf);
            }
        };
        let (result, buf) = match (layer, store) {
            (Some(layer), _) => layer.read(io, buf, offset).await,
            (None, Some(store)) => store.read(io, buf, offset).await,
            (None, None) => (Ok(()), buf),
        };
        (request.complete(result), buf)
    }

    /// Writes the whole buffer at `offset`; with `fua` it is stable on return.
    pub async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let length = buf.len() as u64;
        let request = match self.admit(io, Operation::Write, offset, length) {
            Ok(request) => request,
            Err(error) => return (Err(error), buf),
        };
        let layer = self.store.only();
        let (result, buf) = match (layer.and_then(CachedStore::uncached), layer) {
            (Some(store), _) => store.write(io, buf, offset, fua).await,
            (None, Some(layer)) => layer.write(io, buf, offset, fua).await,
            (None, None) => self.store.write(io, buf, offset, fua).await,
        };
        (request.complete(result), buf)
    }

    /// Makes everything that was acknowledged before stable, for the only client. See
    /// [`Volume::flush_for`] for one of several, and [`Volume::flush_unasked`] for others.
    ///
    /// # Errors
    /// The store's; once after each loss that [`Volume::flush_unasked`] or a resize has met.
    pub async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        self.flush_for(io, &self.told_losses()).await
    }

    pub(crate) async fn flush_admitted(&self, io: &Io) -> Result<(), BlockError> {
        let mut request = self.admit(io, Operation::Flush, 0, 0)?;
        while self.shrinking.load(Ordering::SeqCst) {
            // Data beyond the new end is not written until the store is truncated, and is kept if that fails: a
            // flush that begins in between waits for the outcome, outside the gate.
            drop(request);
            drop(self.resizing.lock().await);
            request = self.admit(io, Operation::Flush, 0, 0)?;
        }
        let result = self.make_stable(io).await;
        request.complete(result)
    }

    /// Deallocates the space of a range if the store can.
    pub async fn discard(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        fua: bool,
    ) -> Result<(), BlockError> {
        let request = self.admit(io, Operation::Discard, offset, length)?;
        let mut result = Ok(());
        if length > 0 {
            result = self.store.discard(io, offset, length).await;
        }
        if fua && result.is_ok() {
            result = self.make_stable(io).await;
        }
        request.complete(result)
    }

    /// Makes a range read as zeroes; with `fua` the zeroes are stable on return.
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

    /// As [`Volume::write_zeroes`]. Where the store has to write zeroes, which takes long, it ends with
    /// [`ErrorKind::Closing`] as soon as `wanted` returns false or the volume is being closed.
    pub async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        fua: bool,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let request = self.admit(io, Operation::WriteZeroes, offset, length)?;
        let wanted: Wanted<'_> = &|| !self.is_closing() && wanted();
        let mut result = Ok(());
        if length > 0 {
            result = self.store.write_zeroes_while(io, offset, length, flags, wanted).await;
        }
        if fua && result.is_ok() {
            result = self.make_stable(io).await;
        }
        request.complete(result)
    }

    /// Data and hole extents of a range in order, at most `limit`.
    pub async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let request = self.admit(io, Operation::Extents, offset, length)?;
        let result = self.store.extents(io, offset, length, limit).await;
        request.complete(result)
    }

    /// The snapshots below it, from the newest on.
    pub fn snapshots(&self) -> Vec<String> {
        self.store.snapshots()
    }

    /// The size that it had when a snapshot was made; `None` if there is no such snapshot.
    pub fn snapshot_size(&self, name: &str) -> Option<u64> {
        self.store.snapshot_size(name)
    }

    /// Which parts of a range have been written since a snapshot, in order, at most `limit`: their lengths, and whether they
    /// have. With `until` only what was written before that later snapshot. The list may end before the range does.
    ///
    /// # Errors
    /// Those of the stores; [`ErrorKind::Invalid`] if there are no such snapshots, or not in this order.
    pub async fn changes(
        &self,
        io: &Io,
        (since, until): (&str, Option<&str>),
        (offset, length): (u64, u64),
        limit: usize,
    ) -> Result<Vec<(u64, bool)>, BlockError> {
        // The later snapshot may be larger than the volume is now.
        let range = if until.is_some() { (0, 0) } else { (offset, length) };
        let request = self.admit(io, Operation::Extents, range.0, range.1)?;
        let result = self.store.changes(io, (since, until), (offset, length), limit).await;
        request.complete(result)
    }

    /// Hints that a range will be read soon.
    pub async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let request = self.admit(io, Operation::Prefetch, offset, length)?;
        let result = self.store.prefetch(io, offset, length).await;
        request.complete(result)
    }

    /// Refuses new requests, waits for those in flight, flushes, and releases the store's lock, so that a
    /// successor can open it. Can be called again: data of a writeback cache that could not be written is then
    /// written again.
    ///
    /// # Errors
    /// The error of the last flush: data acknowledged without a flush may then not be stable.
    pub async fn close(&self, io: &Io) -> Result<(), BlockError> {
        self.gate.shut();
        self.gate.empty().await;
        // A resize that is waiting ends because the gate is shut.
        let _alone = self.resizing.lock().await;
        if !self.options.read_only {
            let stable = match self.make_stable(io).await {
                // A failed background write of the block map is reported once, even if repeated.
                Err(error) if self.is_repaired(&error) => self.make_stable(io).await,
                stable => stable,
            };
            self.kept_for_a_client(stable).map_err(|e| self.with_volume_name(e))?;
            self.store.end_writeback();
        }
        self.store.release();
        Ok(())
    }

    /// Returns true if all data that `error` may be about was written again since.
    fn is_repaired(&self, error: &BlockError) -> bool {
        let is_kept = !self.is_lost() && !self.is_only_report(error);
        is_kept && self.cache().is_some() && self.dirty() == 0
    }

    /// Aborts the volume, from any thread: new requests are refused, and those that wait for a remote store
    /// fail at once with [`ErrorKind::Closing`], also those of [`Volume::close`]. Data that was acknowledged
    /// and not flushed may be lost. Requests to a file or device are in the kernel and cannot be aborted.
    pub fn abort(&self) {
        self.gate.shut();
        self.store.abort();
    }

    /// Ends writeback of a volume that could not be closed: dirty data is given up with the volume. Returns the store, which
    /// may have writes in flight until it is dropped.
    pub fn give_up(&self) -> Weak<ebb_store::Store> {
        self.gate.shut();
        self.store.end_writeback();
        self.store.top().downgrade()
    }

    /// Writes everything that was acknowledged to the store and makes it stable there.
    async fn make_stable(&self, io: &Io) -> Result<(), BlockError> {
        let changes = self.changes.count();
        tracepoints::flush_begin(&self.name);
        let flushed = self.store.flush(io).await;
        let result = flushed.and_then(|()| self.meets_no_report());
        tracepoints::flush_end(&self.name, result.is_ok());
        if result.is_ok() {
            self.changes.note_flushed(changes);
        }
        result
    }

    /// Returns true if no data that this volume acknowledged can be missing on the store after a
    /// crash: it is read-only, or all requests that changed data completed before a successful
    /// flush began, or it was abandoned. For data that an earlier process acknowledged see
    /// [`Volume::has_flushed`].
    pub fn is_stable(&self) -> bool {
        self.changes.are_flushed() && !self.owed.is_owed()
    }

    /// Gives the volume up without its store, if no acknowledged data can be missing there: then requests in
    /// flight that change data fail with [`ErrorKind::Closing`] even if the store completes them, and the result
    /// is true. Otherwise changes nothing.
    pub fn abandon(&self) -> bool {
        !self.owed.is_owed() && self.changes.seal()
    }

    /// True if a flush has failed, so that the data it was to make stable may be lost: all flushes
    /// fail until the volume is reopened. During a close also if such a failure was not reported to
    /// a client.
    pub fn is_lost(&self) -> bool {
        self.store.is_lost() || (self.is_closing() && self.owed.is_owed())
    }

    /// When and why [`Volume::is_lost`] became true.
    pub fn loss(&self) -> Option<Loss> {
        self.store.loss()
    }

    /// The number of requests in flight.
    pub fn in_flight(&self) -> u64 {
        self.gate.inside()
    }

    /// Checks a request, and keeps the volume open for it.
    #[inline(always)]
    fn admit<'a>(
        &'a self,
        io: &'a Io,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Result<AdmittedRequest<'a>, BlockError> {
        let Some(pass) = self.gate.enter(io.slot()) else {
            return Err(self.shut_refusal(operation, offset, length));
        };
        // Inside the gate: shrinking waits for requests that were checked against the size before.
        self.validate(operation, offset, length)?;
        tracepoints::request_begin(&self.name, operation, offset, length);
        let started = Started::new(io, operation);
        Ok(AdmittedRequest { volume: self, io, started, offset, length, _pass: pass })
    }

    #[cold]
    fn shut_refusal(&self, operation: Operation, offset: u64, length: u64) -> BlockError {
        let kind = if self.is_offline() { ErrorKind::Offline } else { ErrorKind::Closing };
        self.refusal(kind, operation, offset, length)
    }

    #[cold]
    fn refusal(
        &self,
        kind: ErrorKind,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> BlockError {
        self.with_volume_name(BlockError::new(kind, operation, offset, length))
    }

    #[inline]
    fn validate(&self, operation: Operation, offset: u64, length: u64) -> Result<(), BlockError> {
        let refuse = |kind| Err(self.refusal(kind, operation, offset, length));
        if changes_data(operation) && self.options.read_only {
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

    #[inline(always)]
    fn account<T>(
        &self,
        io: &Io,
        started: Started,
        (offset, length): (u64, u64),
        result: Result<T, BlockError>,
    ) -> Result<T, BlockError> {
        let operation = started.operation();
        let service = self.stats.complete(io, started, length, result.is_ok());
        tracepoints::request_end(&self.name, operation, (offset, length), service, result.is_ok());
        if changes_data(operation) && !self.changes.complete_with(result.is_ok()) {
            return Err(self.refusal(ErrorKind::Closing, operation, offset, length));
        }
        result.map_err(|error| self.failure(operation, error))
    }

    #[cold]
    fn failure(&self, operation: Operation, error: BlockError) -> BlockError {
        if changes_data(operation) {
            self.owe(&error);
        }
        self.with_volume_name(error)
    }

    #[cold]
    fn with_volume_name(&self, mut error: BlockError) -> BlockError {
        error.volume = Some(self.name.clone());
        error
    }
}

#[inline]
fn changes_data(operation: Operation) -> bool {
    matches!(operation, Operation::Write | Operation::Discard | Operation::WriteZeroes)
}

/// A request in flight, which keeps its volume open.
struct AdmittedRequest<'a> {
    volume: &'a Volume,
    io: &'a Io,
    started: Started,
    offset: u64,
    length: u64,
    _pass: Pass<'a>,
}

impl AdmittedRequest<'_> {
    #[inline(always)]
    fn complete<T>(self, result: Result<T, BlockError>) -> Result<T, BlockError> {
        self.volume.account(self.io, self.started, (self.offset, self.length), result)
    }
}
