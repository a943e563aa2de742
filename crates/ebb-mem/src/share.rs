//! Shares of the ceiling: how much of it the requests of one volume may hold while others want some.
//!
//! All requests take their buffers out of one [`crate::Memory`], whose ceiling is finite. What a
//! volume may hold is therefore counted before a buffer is taken:
//!
//! - Each volume has a **reserve** that only its own requests can use: a volume whose store answers
//!   finds memory within a time that depends on that store alone.
//! - What is not reserved is **common**. Volumes of one store (a disk, a server) form a group, and a
//!   group may hold four times as much of the common part as it leaves free: one that takes all it
//!   can gets four fifths, two get four ninths each. A group alone may use nearly everything.
//! - A quarter of the ceiling is in no share: handshakes, receive buffers, what a store needs beside a
//!   request's own buffer, and spare memory ([`crate::Spares`]).
//!
//! # Invariants
//! - The reserves and the common part add up to the total; nothing is granted beyond either, except
//!   for what was granted before a volume joined.
//! - A request of at most [`Share::reserve`] bytes waits for its own volume only, in line.
//! - A [`QueueShare`] with enough in it is reached without an atomic write; a share is touched by its own
//!   volume only; the common part only once a volume's reserve is used up. Locks are for who waits.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering};

/// The largest reserve: a request of 64 MiB and what it is accounted for beside its data.
const RESERVE_MOST: usize = (64 << 20) + (64 << 10);
/// The smallest: a page and its request.
const RESERVE_LEAST: usize = 8 << 10;
/// A group may hold so many times as much of the common part as it leaves.
const LEAVES: usize = 4;
/// A queue_share keeps at most so much. Where reserves are small none keeps anything, so that idle queues
/// never have what a request of another one waits for.
const PURSE_MOST: usize = 256 << 10;
const PURSE_FROM: usize = 16 << 20;

/// What the ceiling has for requests, shared out among volumes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Shares(Arc<Common>);

#[derive(Debug)]
struct Common {
    total: AtomicUsize,
    /// Of each share.
    reserve: AtomicUsize,
    /// Size of the common part, and what is taken of it.
    room: AtomicUsize,
    used: AtomicUsize,
    /// Who waits, over all shares.
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
    /// What its volumes hold of the common part.
    used: AtomicUsize,
}

/// The share of one volume.
#[derive(Debug)]
pub struct Share {
    common: Arc<Common>,
    group: Arc<Group>,
    /// What is taken of the reserve.
    own: AtomicUsize,
    waiting: AtomicUsize,
    tickets: AtomicU64,
    line: Mutex<VecDeque<(u64, Waker)>>,
}

/// What was granted, in bytes of the reserve and of the common part. One of the two is 0.
#[derive(Clone, Copy, Debug, Default)]
struct Grant {
    own: usize,
    common: usize,
}

impl Shares {
    /// Shares of `total` bytes.
    #[must_use]
    pub fn new(total: usize) -> Shares {
        let shares = Shares(Arc::new(Common {
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

    /// Changes the total. What is held beyond it is not taken away.
    pub fn set_total(&self, total: usize) {
        self.0.total.store(total, Ordering::Relaxed);
        self.0.share_out(&mut self.0.members.lock());
        self.0.wake_all();
    }

    /// Bytes that are shared out.
    #[must_use]
    pub fn total(&self) -> usize {
        self.0.total.load(Ordering::Relaxed)
    }

    /// Bytes that each share has for itself.
    #[must_use]
    pub fn reserve(&self) -> usize {
        self.0.reserve.load(Ordering::Relaxed)
    }

    /// A share for a volume whose store is called `group`: volumes with the same store, which answer
    /// or do not answer together, divide what one of them may have of the common part.
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
            line: Mutex::default(),
        });
        members.shares.push(Arc::downgrade(&share));
        self.0.share_out(&mut members);
        share
    }
}

impl Common {
    fn share_out(&self, members: &mut Members) {
        members.shares.retain(|share| share.strong_count() > 0);
        let total = self.total.load(Ordering::Relaxed);
        let count = members.shares.len().max(1);
        let reserve = (total / 2 / count).clamp(RESERVE_LEAST, RESERVE_MOST);
        self.reserve.store(reserve, Ordering::Relaxed);
        self.room.store(total.saturating_sub(reserve.saturating_mul(count)), Ordering::Relaxed);
    }

    /// Lets the first in line of every share look again.
    fn wake_all(&self) {
        let shares: Vec<_> = self.members.lock().shares.iter().filter_map(Weak::upgrade).collect();
        shares.iter().for_each(|share| share.wake());
    }
}

impl Share {
    /// Bytes that no other volume can take: what asks for no more is sure to get it.
    #[must_use]
    pub fn reserve(&self) -> usize {
        self.common.reserve.load(Ordering::Relaxed)
    }

    /// Bytes its requests hold, queue_shares included.
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
        if self.own.fetch_update(Ordering::SeqCst, Ordering::Relaxed, fits(reserve)).is_ok() {
            return Some(Grant { own: bytes, common: 0 });
        }
        let common = &self.common;
        let room = common.room.load(Ordering::Relaxed);
        let taken = common.used.fetch_update(Ordering::SeqCst, Ordering::Relaxed, fits(room));
        let free = room.saturating_sub(taken.ok()?.saturating_add(bytes));
        let group = self.group.used.fetch_add(bytes, Ordering::SeqCst).saturating_add(bytes);
        let grant = Grant { own: 0, common: bytes };
        if group > free.saturating_mul(LEAVES) {
            self.give(grant);
            return None;
        }
        Some(grant)
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
        let first = self.line.lock().front().map(|(_, waker)| waker.clone());
        if let Some(waker) = first {
            waker.wake();
        }
    }

    /// Waits in line for `bytes`.
    async fn wait(&self, bytes: usize) -> Grant {
        let place = Place { share: self, ticket: self.tickets.fetch_add(1, Ordering::Relaxed) };
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.common.waiting.fetch_add(1, Ordering::SeqCst);
        poll_fn(|cx| {
            let first = {
                let mut line = self.line.lock();
                match line.iter_mut().find(|(ticket, _)| *ticket == place.ticket) {
                    Some((_, waker)) => waker.clone_from(cx.waker()),
                    None => line.push_back((place.ticket, cx.waker().clone())),
                }
                line.front().is_some_and(|(ticket, _)| *ticket == place.ticket)
            };
            // Counted as waiting before this look: what is given back after it wakes us.
            match if first { self.take_now(bytes) } else { None } {
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

/// A place in line: leaving it, served or cancelled, lets the next one look.
struct Place<'a> {
    share: &'a Share,
    ticket: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.share.line.lock().retain(|(ticket, _)| *ticket != self.ticket);
        self.share.waiting.fetch_sub(1, Ordering::SeqCst);
        self.share.common.waiting.fetch_sub(1, Ordering::SeqCst);
        self.share.wake();
    }
}

/// One queue's way to its volume's share: keeps a little, so that small requests write to nothing
/// that other threads use. Stays on its thread.
#[derive(Debug)]
pub struct QueueShare {
    share: Arc<Share>,
    /// Taken of the share's reserve, and held by no request.
    free: Cell<usize>,
}

/// Memory granted to a request; dropping it gives it back.
#[derive(Debug)]
pub struct Charge {
    queue_share: Rc<QueueShare>,
    grant: Grant,
}

impl QueueShare {
    /// An empty queue_share.
    #[must_use]
    pub fn new(share: Arc<Share>) -> Rc<QueueShare> {
        Rc::new(QueueShare { share, free: Cell::new(0) })
    }

    /// The share behind it.
    #[must_use]
    pub fn share(&self) -> &Share {
        &self.share
    }

    /// `bytes`, if they are there now and nobody of this volume waits.
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

    /// `bytes`, at most [`Share::reserve`], after those who came before. More than the reserve is
    /// granted only if the common part has it: a caller that needs more takes it in pieces.
    pub async fn take(self: &Rc<Self>, bytes: usize) -> Charge {
        if let Some(held) = self.try_take(bytes) {
            return held;
        }
        // Those in front have better use for what is kept here.
        self.empty();
        self.held(self.share.wait(bytes).await)
    }

    fn held(self: &Rc<Self>, grant: Grant) -> Charge {
        Charge { queue_share: self.clone(), grant }
    }

    /// Gives back what it keeps.
    pub fn empty(&self) {
        let free = self.free.take();
        if free > 0 {
            self.share.release(Grant { own: free, common: 0 });
        }
    }

    #[inline]
    fn put(&self, grant: Grant) {
        let keeps = self.free.get() + grant.own;
        let most = if self.share.reserve() < PURSE_FROM { 0 } else { PURSE_MOST };
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
    fn drop(&mut self) {
        self.queue_share.put(self.grant);
    }
}
