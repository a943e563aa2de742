//! Base layers: read-only stores that volumes share, each open and cached once however many volumes are above it.
//!
//! # Invariants
//! - There is one base for each store in use, so that a page of it is read and held once. Two uses of a store with
//!   different cache modes are two bases.
//! - A base is aborted when all of its users are; the requests of one aborted user are ended by its own signal
//!   (`abort_signal.rs`). Its lock is released when its last user has ended its use, which an aborted one does when it
//!   is closed: until then it may have requests in flight. It is closed when the last user is dropped.
//! - A base that was the top layer of a volume has no other users before it is stable.
//! - A base that was aborted or released is not used again: the next user opens it anew.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Poll;

use ebb_block::{BlockError, BlockStore, Identity, Io};
use ebb_image::Parent;
use ebb_io::Task;
use ebb_store::Store;

use crate::base_samples::plain_parent;
use crate::cache::{Cache, CacheError};
use crate::cached_store::CachedStore;
use crate::delta::Delta;
use crate::delta_error::DeltaError;
use crate::stats::Mode;
use crate::sync::Mutex;
use crate::volume::VolumeCache;

/// The users of a base.
#[derive(Debug)]
struct BaseUse {
    /// 0: it was released.
    count: usize,
    /// How many of them were aborted.
    aborted: usize,
    /// Its store was aborted.
    is_aborted: bool,
}

impl BaseUse {
    /// Whether the store is to be aborted now: no user needs it any more.
    fn must_abort(&mut self) -> bool {
        let now = self.count > 0 && self.aborted == self.count && !self.is_aborted;
        self.is_aborted |= now;
        now
    }
}

#[derive(Debug)]
struct SharedBase {
    identity: Identity,
    store: Arc<CachedStore>,
    /// The delta that it holds, once a user has opened it as one.
    delta: OnceLock<Arc<Delta>>,
    /// What a delta above it records, once a user has asked: nothing writes to it.
    parent: OnceLock<Parent>,
    /// An earlier daemon may have written to it without a flush, and no flush of it has
    /// succeeded since it was opened.
    is_unflushed: AtomicBool,
    users: Mutex<BaseUse>,
}

/// The use of a base layer by one volume. Dropping it ends the use.
#[derive(Debug)]
pub struct BaseLayer {
    base: Arc<SharedBase>,
    /// Both are changed with the users' lock held.
    aborted: AtomicBool,
    left: AtomicBool,
}

impl BaseLayer {
    fn new(base: Arc<SharedBase>) -> BaseLayer {
        BaseLayer { base, aborted: AtomicBool::new(false), left: AtomicBool::new(false) }
    }

    /// Another user; `None` if the base was released or aborted.
    fn join(base: Arc<SharedBase>) -> Option<BaseLayer> {
        {
            let mut users = base.users.lock();
            if users.count == 0 || users.is_aborted {
                return None;
            }
            users.count = users.count.checked_add(1)?;
        }
        Some(BaseLayer::new(base))
    }

    /// The same layer, for another stack of the volume; `None` if it was released or aborted.
    pub(crate) fn again(&self) -> Option<BaseLayer> {
        BaseLayer::join(self.base.clone())
    }

    /// Its part of the cache, which it shares with all users of this base.
    pub fn cache(&self) -> Option<&Arc<VolumeCache>> {
        self.base.store.cache()
    }

    /// The delta that it holds. It is opened once for all users.
    ///
    /// # Errors
    /// [`DeltaError`].
    pub async fn delta(&self, io: &Io) -> Result<Arc<Delta>, DeltaError> {
        if let Some(delta) = self.base.delta.get() {
            return Ok(delta.clone());
        }
        let opened = Arc::new(Delta::open(io, &self.base.store).await?);
        Ok(self.base.delta.get_or_init(|| opened).clone())
    }

    /// Checks that its delta is above `parent`, and returns it as the parent of a layer above.
    ///
    /// # Errors
    /// [`DeltaError::OtherBase`].
    pub fn check_parent(&self, delta: &Delta, parent: &Parent) -> Result<Parent, DeltaError> {
        delta.check_parent(&self.base.store, parent)?;
        Ok(delta.as_parent(&self.base.store))
    }

    /// It as the parent of a layer above, if it is a plain store.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn as_parent(&self, io: &Io) -> Result<Parent, BlockError> {
        if let Some(parent) = self.base.parent.get() {
            return Ok(parent.clone());
        }
        let parent = plain_parent(io, &self.base.store).await?;
        Ok(self.base.parent.get_or_init(|| parent).clone())
    }

    #[inline]
    pub(crate) fn store(&self) -> &CachedStore {
        &self.base.store
    }

    pub(crate) fn shared_store(&self) -> Arc<CachedStore> {
        self.base.store.clone()
    }

    /// Returns true if an earlier daemon may have written to it without a flush, and this one has
    /// not flushed it.
    #[inline]
    pub(crate) fn is_unflushed(&self) -> bool {
        self.base.is_unflushed.load(Ordering::Acquire)
    }

    /// Makes the writes of earlier daemons to it stable. The flush goes on if this is dropped: a
    /// dropped flush is a loss, for all users.
    ///
    /// # Errors
    /// Those of the store. A failed flush fails for good, as in each store.
    pub(crate) async fn flush_earlier_writes(&self, io: &Io) -> Result<(), BlockError> {
        let (base, on) = (self.base.clone(), io.clone());
        let flush = async move {
            let flushed = base.store.store().flush_earlier_writes(&on).await;
            if flushed.is_ok() {
                base.is_unflushed.store(false, Ordering::Release);
            }
            flushed
        };
        let mut flush = DetachedTask(Some(io.spawn(flush)));
        poll_fn(|cx| match &mut flush.0 {
            Some(task) => Pin::new(task).poll(cx),
            None => Poll::Pending,
        })
        .await
    }

    /// Whether both use the same base.
    pub(crate) fn is_same(&self, other: &BaseLayer) -> bool {
        Arc::ptr_eq(&self.base, &other.base)
    }

    /// This user is aborted: it makes no new requests and ends those that wait. The store is aborted once all users are.
    pub(crate) fn abort(&self) {
        let must_abort = {
            let mut users = self.base.users.lock();
            if self.left.load(Ordering::SeqCst) || self.aborted.swap(true, Ordering::SeqCst) {
                return;
            }
            users.aborted += 1;
            users.must_abort()
        };
        if must_abort {
            self.base.store.abort();
        }
    }

    /// Ends this use, which has no request in flight.
    pub(crate) fn leave(&self) {
        let (must_abort, is_last) = {
            let mut users = self.base.users.lock();
            if self.left.swap(true, Ordering::SeqCst) {
                return;
            }
            users.count -= 1;
            users.aborted -= usize::from(self.aborted.load(Ordering::SeqCst));
            (users.must_abort(), users.count == 0)
        };
        if must_abort {
            self.base.store.abort();
        }
        if is_last {
            self.base.store.release();
        }
    }
}

/// A task that goes on when this is dropped.
struct DetachedTask<T>(Option<Task<T>>);

impl<T> Drop for DetachedTask<T> {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Task::detach);
    }
}

impl Drop for BaseLayer {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The base layers in use over one cache. There must be one list for each cache.
#[derive(Debug)]
pub struct BaseLayers {
    cache: Arc<Cache>,
    list: Mutex<Vec<Weak<SharedBase>>>,
}

impl BaseLayers {
    /// None yet.
    #[must_use]
    pub fn new(cache: &Arc<Cache>) -> BaseLayers {
        BaseLayers { cache: cache.clone(), list: Mutex::default() }
    }

    /// The base on the store with this identity and size, if it is stable and in use with this
    /// cache mode: then it need not be opened. For stores whose identity is known without opening
    /// them. May block, as closing a store may.
    #[must_use]
    pub fn find(&self, identity: &Identity, size: u64, mode: Mode) -> Option<BaseLayer> {
        find(&self.list.lock(), identity, size, of_base(mode))
    }

    /// The base that was the top layer of a volume until now: its store is not written to any more.
    pub(crate) fn adopt(&self, store: &Arc<CachedStore>, delta: &Arc<Delta>) -> BaseLayer {
        let users = Mutex::new(BaseUse { count: 1, aborted: 0, is_aborted: false });
        let (identity, store) = (store.identity(), store.clone());
        let delta = OnceLock::from(delta.clone());
        let base = Arc::new(SharedBase {
            identity,
            store,
            delta,
            parent: OnceLock::new(),
            // Its delta knows.
            is_unflushed: AtomicBool::new(false),
            users,
        });
        let mut list = self.list.lock();
        list.retain(|base| base.strong_count() > 0);
        list.push(Arc::downgrade(&base));
        BaseLayer::new(base)
    }

    /// The base on `store`: the one that is in use with this cache mode, and `store` is closed; or else a new one, called
    /// `name` in the statistics. The options with which the first user opened the store hold for all. Nothing may write
    /// to the store as long as the base is used. [`Mode::Writeback`] is as [`Mode::Writethrough`]. May block, as closing
    /// a store may.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn add(&self, name: &str, store: Store, mode: Mode) -> Result<BaseLayer, CacheError> {
        let (identity, size) = (store.identity(), store.size());
        let mode = of_base(mode);
        let mut list = self.list.lock();
        if let Some(base) = find(&list, &identity, size, mode) {
            // Closing the store may block.
            drop(list);
            drop(store);
            return Ok(base);
        }
        let store = CachedStore::shared(&self.cache, name, store, mode)?;
        let users = Mutex::new(BaseUse { count: 1, aborted: 0, is_aborted: false });
        let store = Arc::new(store);
        let base = Arc::new(SharedBase {
            identity,
            store,
            delta: OnceLock::new(),
            parent: OnceLock::new(),
            is_unflushed: AtomicBool::new(true),
            users,
        });
        list.retain(|base| base.strong_count() > 0);
        list.push(Arc::downgrade(&base));
        Ok(BaseLayer::new(base))
    }
}

/// The mode of a base that is to be used with `mode`.
fn of_base(mode: Mode) -> Mode {
    if mode == Mode::None { mode } else { Mode::Writethrough }
}

fn find(
    list: &[Weak<SharedBase>],
    identity: &Identity,
    size: u64,
    mode: Mode,
) -> Option<BaseLayer> {
    let is_it = |base: &Arc<SharedBase>| {
        let store = &base.store;
        // One that was a top layer keeps its mode.
        let is_cached = (store.mode() != Mode::None) == (mode != Mode::None);
        let is_stable = base.delta.get().is_none_or(|delta| !delta.is_unflushed());
        base.identity == *identity && store.size() == size && is_cached && is_stable
    };
    list.iter().filter_map(Weak::upgrade).filter(is_it).find_map(BaseLayer::join)
}
