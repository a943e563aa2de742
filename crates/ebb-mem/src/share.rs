//! Shares of the ceiling: how much memory the requests of each volume may hold (docs/adr/0009-shares.md).
//!
//! All requests allocate their buffers from one [`crate::Memory`], whose ceiling is finite. A request is
//! therefore charged to its volume before it allocates a buffer:
//!
//! - Each volume has a **reserve** that only its own requests can use: how long a request waits for
//!   memory depends on its own volume's store alone.
//! - The remainder is the **common** part. Volumes of one store (a disk, a server) form a group, and a
//!   group may hold four times as much of the common part as it leaves free: a single busy group gets
//!   four fifths of it, two get four ninths each.
//! - A quarter of the ceiling is in no share: for handshakes, receive buffers, what a store needs beside
//!   a request's own buffer, and spare memory ([`crate::Spares`]). Where volumes have writeback caches, whose dirty
//!   data may have half of the ceiling, three eighths are divided ([`Shares::set_total`]), and an eighth is in no share.
//!
//! # Invariants
//! - The reserves and the common part add up to the total; nothing is granted beyond either, except
//!   for grants from before a volume joined or the total fell, one request for each volume that
//!   waited then, and one for each volume that held little.
//! - A request of at most [`Share::reserve`] bytes waits for requests of its own volume only, in order.
//! - A [`QueueShare`] that keeps enough is charged without an atomic write. Only the volume's own requests
//!   write to its share, and they write to the common part only when the reserve is used up. Only waiting
//!   requests take locks.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering};

/// The largest reserve: a request of 64 MiB and what it is charged for beside its data.
const RESERVE_MAX: usize = (64 << 20) + (64 << 10);
/// The smallest reserve: a page and its request.
const RESERVE_MIN: usize = 8 << 10;
/// A volume that holds no more than one part in so many of its reserve gets memory for one more
/// request.
const LITTLE_PART: usize = 8;
/// A group may hold this many times as much of the common part as it leaves free.
const FREE_MULTIPLE: usize = 4;
/// How much a [`QueueShare`] keeps at most: enough for 64 requests of 4 KiB. Where reserves are below
/// `KEEP_FROM_RESERVE` it keeps nothing, so that an idle queue never holds memory that a request of another queue
/// waits for.
const KEEP_MAX: usize = 512 << 10;
const KEEP_FROM_RESERVE: usize = 32 << 20;

/// The part of the ceiling that is divided among the requests of volumes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Shares(Arc<ShareTotals>);

#[derive(Debug)]
struct ShareTotals {
    total: AtomicUsize,
    /// The reserve of each share.
    reserve: AtomicUsize,
    /// Size of the common part, and how much of it is charged.
    room: AtomicUsize,
    used: AtomicUsize,
    /// Waiting requests of all shares.
    waiting: AtomicUsize,
    members: Mutex<Members>,
}

#[derive(Debug, Default)]
struct Members {
    shares: Vec<Weak<Share>>,
    groups: HashMap<String, Weak<Group>>,
}

/// Volumes of one store.
#[derive(Debug, Default)]
struct Group {
    /// Bytes of the common part that its volumes hold.
    used: AtomicUsize,
}

/// The share of one volume.
#[derive(Debug)]
pub struct Share {
    common: Arc<ShareTotals>,
    group: Arc<Group>,
    /// Bytes of the reserve that are charged.
    own: AtomicUsize,
    waiting: AtomicUsize,
    tickets: AtomicU64,
    queue: Mutex<VecDeque<(u64, Waker)>>,
}

/// A grant, in bytes of the reserve and of the common part. One of the two is 0.
#[derive(Clone, Copy, Debug, Default)]
struct Grant {
    own: usize,
    common: usize,
}

impl Shares {
    /// Shares of `total` bytes.
    #[must_use]
    pub fn new(total: usize) -> Shares {
        let shares = Shares(Arc::new(ShareTotals {
            total: AtomicUsize::new(total),
            reserve: AtomicUsize::new(0),
            room: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            members: Mutex::default(),
        }));
        shares.0.share_out(&mut shares.0.members.lock());
        shares
    }

    /// Changes the total. Existing grants stay, even beyond it.
    pub fn set_total(&self, total: usize) {
        self.0.total.store(total, Ordering::Relaxed);
        self.0.share_out(&mut self.0.members.lock());
        self.0.wake_all();
    }

    /// Bytes that the shares divide.
    #[must_use]
    pub fn total(&self) -> usize {
        self.0.total.load(Ordering::Relaxed)
    }

    /// Bytes that are reserved for each share.
    #[must_use]
    pub fn reserve(&self) -> usize {
        self.0.reserve.load(Ordering::Relaxed)
    }

    /// A share for a volume whose store is called `group`. Volumes with the same store, which would stall
    /// together, divide what one group may hold of the common part.
    #[must_use]
    pub fn join(&self, group: &str) -> Arc<Share> {
        let mut members = self.0.members.lock();
        let found = members.groups.get(group).and_then(Weak::upgrade);
        let group = found.unwrap_or_else(|| {
            members.groups.retain(|_, group| group.strong_count() > 0);
            let new = Arc::<Group>::default();
            members.groups.insert(group.to_owned(), Arc::downgrade(&new));
            new
        });
        let share = Arc::new(Share {
            common: self.0.clone(),
            group,
            own: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            tickets: AtomicU64::new(0),
            queue: Mutex::default(),
        });
        members.shares.push(Arc::downgrade(&share));
        self.0.share_out(&mut members);
        share
    }
}

impl ShareTotals {
    fn share_out(&self, members: &mut Members) {
        members.shares.retain(|share| share.strong_count() > 0);
        let total = self.total.load(Ordering::Relaxed);
        let count = members.shares.len().max(1);
        let reserve = (total / 2 / count).clamp(RESERVE_MIN, RESERVE_MAX);
        self.reserve.store(reserve, Ordering::Relaxed);
        self.room.store(total.saturating_sub(reserve.saturating_mul(count)), Ordering::Relaxed);
    }

    /// Wakes the first waiting request of every share, which then tries again.
    fn wake_all(&self) {
        let shares: Vec<_> = self.members.lock().shares.iter().filter_map(Weak::upgrade).collect();
        shares.iter().for_each(|share| share.wake());
    }
}

impl Share {
    /// Bytes that no other volume can use: a request of at most this size always gets its memory.
    #[must_use]
    pub fn reserve(&self) -> usize {
        self.common.reserve.load(Ordering::Relaxed)
    }

    /// Bytes of the reserve that its requests hold, including what its [`QueueShare`]s keep.
    #[must_use]
    pub fn used(&self) -> usize {
        self.own.load(Ordering::Relaxed)
    }

    /// Whether a request of this volume waits for memory.
    #[must_use]
    pub fn has_waiters(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    fn take_now(&self, bytes: usize) -> Option<Grant> {
        let reserve = self.reserve();
        let fits =
            |limit: usize| move |used: usize| used.checked_add(bytes).filter(|&used| used <= limit);
        if self.own.try_update(Ordering::SeqCst, Ordering::Relaxed, fits(reserve)).is_ok() {
            return Some(Grant { own: bytes, common: 0 });
        }
        let common = &self.common;
        let room = common.room.load(Ordering::Relaxed);
        let taken = common.used.try_update(Ordering::SeqCst, Ordering::Relaxed, fits(room));
        let free = room.saturating_sub(taken.ok()?.saturating_add(bytes));
        let group = self.group.used.fetch_add(bytes, Ordering::SeqCst).saturating_add(bytes);
        let grant = Grant { own: 0, common: bytes };
        if group > free.saturating_mul(FREE_MULTIPLE) {
            self.give(grant);
            return None;
        }
        Some(grant)
    }

    /// `bytes` beyond the reserve, without which the request could wait for ever: if it needs more
    /// than the reserve, which has shrunk since the caller read its size; or if the volume holds
    /// little, which may be held by requests that wait behind this one.
    fn take_excess(&self, bytes: usize) -> Option<Grant> {
        let reserve = self.reserve();
        let most = if bytes > reserve { reserve } else { reserve / LITTLE_PART };
        let more = |used: usize| used.checked_add(bytes).filter(|_| used <= most);
        self.own.try_update(Ordering::SeqCst, Ordering::Relaxed, more).ok()?;
        Some(Grant { own: bytes, common: 0 })
    }

    fn give(&self, grant: Grant) {
        if grant.common > 0 {
            self.group.used.fetch_sub(grant.common, Ordering::SeqCst);
            self.common.used.fetch_sub(grant.common, Ordering::SeqCst);
        }
        if grant.own > 0 {
            self.own.fetch_sub(grant.own, Ordering::SeqCst);
        }
    }

    fn release(&self, grant: Grant) {
        self.give(grant);
        if grant.common > 0 && self.common.waiting.load(Ordering::SeqCst) > 0 {
            self.common.wake_all();
        } else if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    fn wake(&self) {
        let first = self.queue.lock().front().map(|(_, waker)| waker.clone());
        if let Some(waker) = first {
            waker.wake();
        }
    }

    /// Waits in the queue for `bytes`.
    async fn wait(&self, bytes: usize) -> Grant {
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let place = QueuePosition { share: self, ticket };
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.common.waiting.fetch_add(1, Ordering::SeqCst);
        poll_fn(|cx| {
            let first = {
                let mut queue = self.queue.lock();
                match queue.iter_mut().find(|(ticket, _)| *ticket == place.ticket) {
                    Some((_, waker)) => waker.clone_from(cx.waker()),
                    None => queue.push_back((place.ticket, cx.waker().clone())),
                }
                queue.front().is_some_and(|(ticket, _)| *ticket == place.ticket)
            };
            // The request was counted as waiting before this check: memory released later wakes it.
            let granted =
                if first { self.take_now(bytes).or_else(|| self.take_excess(bytes)) } else { None };
            match granted {
                Some(grant) => Poll::Ready(grant),
                None => Poll::Pending,
            }
        })
        .await
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.common.share_out(&mut self.common.members.lock());
        if self.common.waiting.load(Ordering::SeqCst) > 0 {
            self.common.wake_all();
        }
    }
}

/// A position in the queue. Dropping it, granted or cancelled, wakes the next request.
struct QueuePosition<'a> {
    share: &'a Share,
    ticket: u64,
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        self.share.queue.lock().retain(|(ticket, _)| *ticket != self.ticket);
        self.share.waiting.fetch_sub(1, Ordering::SeqCst);
        self.share.common.waiting.fetch_sub(1, Ordering::SeqCst);
        self.share.wake();
    }
}

/// The part of a volume's share that one queue keeps, so that small requests write to no memory that
/// other threads use. Stays on its thread.
#[derive(Debug)]
pub struct QueueShare {
    share: Arc<Share>,
    /// Bytes of the share's reserve that are kept here, and held by no request.
    free: Cell<usize>,
}

/// Memory granted to a request; dropping it releases the memory.
#[derive(Debug)]
pub struct Charge {
    queue_share: Rc<QueueShare>,
    grant: Grant,
}

impl QueueShare {
    /// One that keeps nothing yet.
    #[must_use]
    pub fn new(share: Arc<Share>) -> Rc<QueueShare> {
        Rc::new(QueueShare { share, free: Cell::new(0) })
    }

    /// The volume's share.
    #[must_use]
    pub fn share(&self) -> &Share {
        &self.share
    }

    /// `bytes`, if they are available now and no request of this volume waits.
    #[inline]
    pub fn try_take(self: &Rc<Self>, bytes: usize) -> Option<Charge> {
        if self.share.has_waiters() {
            return None;
        }
        if let Some(free) = self.free.get().checked_sub(bytes) {
            self.free.set(free);
            return Some(self.held(Grant { own: bytes, common: 0 }));
        }
        self.share.take_now(bytes).map(|grant| self.held(grant))
    }

    /// `bytes`, at most [`Share::reserve`], after earlier requests. More than the reserve is granted only
    /// if the common part has it: a caller that needs more takes it in pieces.
    pub async fn take(self: &Rc<Self>, bytes: usize) -> Charge {
        if let Some(held) = self.try_take(bytes) {
            return held;
        }
        // Earlier requests may need what is kept here.
        self.empty();
        self.held(self.share.wait(bytes).await)
    }

    #[inline]
    fn held(self: &Rc<Self>, grant: Grant) -> Charge {
        Charge { queue_share: self.clone(), grant }
    }

    /// Releases what it keeps.
    pub fn empty(&self) {
        let free = self.free.take();
        if free > 0 {
            self.share.release(Grant { own: free, common: 0 });
        }
    }

    #[inline]
    fn put(&self, grant: Grant) {
        let keeps = self.free.get() + grant.own;
        let most = if self.share.reserve() < KEEP_FROM_RESERVE { 0 } else { KEEP_MAX };
        if grant.common == 0 && keeps <= most && !self.share.has_waiters() {
            self.free.set(keeps);
        } else {
            self.share.release(grant);
            if self.share.has_waiters() {
                self.empty();
            }
        }
    }
}

impl Drop for QueueShare {
    fn drop(&mut self) {
        self.empty();
    }
}

impl Charge {
    /// Bytes granted.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.grant.own + self.grant.common
    }
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        self.queue_share.put(self.grant);
    }
}
