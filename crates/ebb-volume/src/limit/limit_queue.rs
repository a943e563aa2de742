//! The order in which requests pass a set of limits: a queue for each member, served so that members that want more
//! have equal parts. No clock, no I/O, no waking: the caller passes the time, and is told which waiters may pass.
//!
//! Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): each member has a tag, the time that the limits need for
//! what it has sent; the waiting member with the lowest tag is next. What idle members leave goes to the others; a
//! member that returns is at most [`LAG_PS`] behind.
//!
//! A timer that is late leaves tokens for several requests. Those are not for the member whose task happens to run
//! first: one that is ahead of a member that waited lately passes only if tokens of the time [`RESERVED_FOR_OTHERS_NS`] are left, which
//! a bucket holds without loss.
//!
//! Where there are several members, a large request takes its tokens in pieces of the time [`PIECE_NS`], before it passes:
//! the debt of one that took all of them at once would be waited for by the others.
//!
//! # Invariants
//! - Reads and writes wait in queues of their own, because a limit of one must not delay the other.
//! - Whether a request may pass depends on its kind only, not on its size (`token_bucket.rs`): so no large request
//!   starves.
//! - While waiters exist that may pass at a known time, one of them is timed: its timer calls
//!   [`LimitQueue::dispatch`] then.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::token_bucket::TokenBucket;
use super::{RateLimits, RequestCost, RequestKind};

/// How far a member that was idle may be behind the others, picoseconds of the limits' time: it is preferred until it
/// has caught up.
const LAG_PS: u128 = 100_000_000_000;

/// How far ahead a member may be before it has to leave tokens to others, picoseconds of the limits' time; and the
/// tokens that it leaves, as a time.
const AHEAD_PS: u128 = 1_000_000_000;
const RESERVED_FOR_OTHERS_NS: u64 = 3_000_000;
/// A member that waited within this time counts as one that wants more.
const WAITED_RECENTLY_NS: u64 = 100_000_000;
/// The most bytes that a request of a group takes at once, as the limits' time, and the least that this is, bytes.
const PIECE_NS: u64 = 2_000_000;
const PIECE_LEAST: u64 = 4096;
/// The members that are compared; in a larger group what late timers leave is divided by chance.
const COMPARED: usize = 64;
const _: () = assert!(RESERVED_FOR_OTHERS_NS < super::token_bucket::LEAST_BURST_NS);

const KINDS: [RequestKind; 2] = [RequestKind::Read, RequestKind::Write];

/// A number of requests and a number of bytes.
#[derive(Clone, Copy, Debug, Default)]
struct BucketPair {
    requests: TokenBucket,
    bytes: TokenBucket,
}

/// A member; a number that [`LimitQueue::join`] gave.
pub(super) type MemberId = usize;
/// A waiter; a number that [`LimitQueue::enqueue`] gave.
pub(super) type WaiterId = usize;

#[derive(Debug, Default)]
struct MemberQueue {
    tag: u128,
    queues: [VecDeque<WaiterId>; 2],
    /// When it last had to wait.
    waited_at: Option<u64>,
    /// Whether the heap of a kind has an entry of this member.
    listed: [bool; 2],
}

#[derive(Debug)]
struct Waiter<W> {
    member: MemberId,
    cost: RequestCost,
    /// The bytes for which it has not taken tokens yet.
    left: u64,
    granted: bool,
    waker: Option<W>,
}

/// See the module. `W` wakes a waiter.
#[derive(Debug)]
pub(super) struct LimitQueue<W> {
    /// Of all requests, of reads, of writes.
    buckets: [BucketPair; 3],
    filled_at: u64,
    members: Vec<Option<MemberQueue>>,
    /// How many members there are.
    joined: usize,
    waiters: Vec<Option<Waiter<W>>>,
    free_waiters: Vec<WaiterId>,
    /// The members with waiters of a kind, by tags; a tag may be out of date, and is then lower than the member's.
    order: [BinaryHeap<Reverse<(u128, MemberId)>>; 2],
    /// The tag of the request that passed last.
    virtual_time: u128,
    timed: Option<WaiterId>,
    /// When the timer ends.
    alarm: u64,
}

impl<W> Default for LimitQueue<W> {
    fn default() -> Self {
        Self {
            buckets: Default::default(),
            filled_at: 0,
            members: Vec::new(),
            joined: 0,
            waiters: Vec::new(),
            free_waiters: Vec::new(),
            order: Default::default(),
            virtual_time: 0,
            timed: None,
            alarm: 0,
        }
    }
}

fn index(kind: RequestKind) -> usize {
    match kind {
        RequestKind::Read => 0,
        RequestKind::Write => 1,
    }
}

impl<W: Clone> LimitQueue<W> {
    /// Changes the limits at the time `now`.
    pub(super) fn set(&mut self, now: u64, limits: &RateLimits) {
        self.fill(now);
        let burst = limits.burst_ms.saturating_mul(1_000_000);
        let rates = [
            (limits.iops, limits.bandwidth),
            (limits.read_iops, limits.read_bandwidth),
            (limits.write_iops, limits.write_bandwidth),
        ];
        for (pair, (requests, bytes)) in self.buckets.iter_mut().zip(rates) {
            pair.requests.set(requests, burst);
            pair.bytes.set(bytes, burst);
        }
    }

    /// Adds a member.
    pub(super) fn join(&mut self) -> MemberId {
        self.joined += 1;
        let member = MemberQueue { tag: self.virtual_time, ..MemberQueue::default() };
        match self.members.iter().position(Option::is_none) {
            Some(place) => {
                // Entries of an earlier member of this number may be in the heaps.
                for heap in &mut self.order {
                    heap.retain(|Reverse((_, member))| *member != place);
                }
                self.members[place] = Some(member);
                place
            }
            None => {
                self.members.push(Some(member));
                self.members.len() - 1
            }
        }
    }

    /// Removes a member that has no waiters.
    pub(super) fn leave(&mut self, member: MemberId) {
        if self.members.get_mut(member).is_some_and(|place| place.take().is_some()) {
            self.joined -= 1;
        }
    }

    /// Lets a request pass at once, or returns false.
    pub(super) fn try_take(
        &mut self,
        now: u64,
        member: MemberId,
        cost: RequestCost,
        wake: impl FnMut(W),
    ) -> bool {
        self.dispatch(now, wake);
        // After that no request waits that may pass, nor one that is to pass before this one.
        if self.wait_ns(cost.kind, member) > 0 || cost.bytes > self.piece(cost.kind) {
            return false;
        }
        self.take(member, cost);
        true
    }

    /// Takes the tokens of a request that passes whatever the level is.
    pub(super) fn take(&mut self, member: MemberId, cost: RequestCost) {
        self.advance(member, self.time_ps(cost));
        self.charge(cost.kind, 1, cost.bytes);
    }

    /// Adds the time of a request to what a member has sent.
    fn advance(&mut self, member: MemberId, time: u128) {
        let least = self.virtual_time.saturating_sub(LAG_PS);
        if let Some(member) = self.members.get_mut(member).and_then(Option::as_mut) {
            let start = member.tag.max(least);
            member.tag = start.saturating_add(time);
            self.virtual_time = self.virtual_time.max(start);
        }
    }

    /// Adds a waiter.
    pub(super) fn enqueue(&mut self, member: MemberId, cost: RequestCost) -> WaiterId {
        let left = cost.bytes;
        let waiter = Some(Waiter { member, cost, left, granted: false, waker: None });
        let id = match self.free_waiters.pop() {
            Some(id) => {
                self.waiters[id] = waiter;
                id
            }
            None => {
                self.waiters.push(waiter);
                self.waiters.len() - 1
            }
        };
        let (kind, least) = (index(cost.kind), self.virtual_time.saturating_sub(LAG_PS));
        if let Some(queue) = self.members.get_mut(member).and_then(Option::as_mut) {
            queue.waited_at = Some(self.filled_at);
            if queue.queues.iter().all(VecDeque::is_empty) {
                queue.tag = queue.tag.max(least);
            }
            queue.queues[kind].push_back(id);
            if !std::mem::replace(&mut queue.listed[kind], true) {
                self.order[kind].push(Reverse((queue.tag, member)));
            }
        }
        id
    }

    /// Whether a waiter may pass. If not, `waker` will be woken, and the result is the time until which it has to set a
    /// timer, if it is the timed waiter; then it has to call [`LimitQueue::dispatch`].
    pub(super) fn poll(&mut self, now: u64, id: WaiterId, waker: &W) -> Result<(), Option<u64>> {
        if let Some(waiter) = self.waiters.get_mut(id).and_then(Option::as_mut) {
            if waiter.granted {
                return Ok(());
            }
            waiter.waker = Some(waker.clone());
        }
        let next = self.next(now).unwrap_or(u64::MAX);
        if self.timed.is_none_or(|timed| timed == id) || next < self.alarm {
            (self.timed, self.alarm) = (Some(id), next);
            return Err(Some(next));
        }
        Err(None)
    }

    /// Removes a waiter, whether it may pass or not.
    pub(super) fn remove(&mut self, id: WaiterId, wake: impl FnMut(W)) {
        let Some(waiter) = self.waiters.get_mut(id).and_then(Option::take) else { return };
        self.free_waiters.push(id);
        if !waiter.granted
            && let Some(member) = self.members.get_mut(waiter.member).and_then(Option::as_mut)
        {
            member.queues[index(waiter.cost.kind)].retain(|other| *other != id);
        }
        if self.timed == Some(id) {
            self.timed = None;
        }
        self.choose_timed(wake);
    }

    /// Lets all waiters of a member pass, without taking tokens.
    pub(super) fn release(&mut self, member: MemberId, mut wake: impl FnMut(W)) {
        let Some(member) = self.members.get_mut(member).and_then(Option::as_mut) else { return };
        for id in member.queues.iter_mut().flat_map(|queue| queue.drain(..)) {
            if let Some(waiter) = self.waiters.get_mut(id).and_then(Option::as_mut) {
                waiter.granted = true;
                waiter.waker.take().into_iter().for_each(&mut wake);
            }
            if self.timed == Some(id) {
                self.timed = None;
            }
        }
        self.choose_timed(wake);
    }

    /// Lets those waiters pass that may pass at the time `now`, in their order.
    pub(super) fn dispatch(&mut self, now: u64, mut wake: impl FnMut(W)) {
        self.fill(now);
        while let Some((kind, member)) = self.first() {
            let most = self.piece(kind);
            let Some(queue) = self.members.get_mut(member).and_then(Option::as_mut) else { break };
            let queue = &mut queue.queues[index(kind)];
            let Some(id) = queue.front().copied() else { break };
            let waiter = self.waiters.get_mut(id).and_then(Option::as_mut);
            let piece = waiter.map(|waiter| {
                let (is_first, bytes) = (waiter.left == waiter.cost.bytes, waiter.left.min(most));
                waiter.left -= bytes;
                (waiter.cost, is_first, bytes, waiter.left == 0)
            });
            if piece.is_none_or(|(.., is_last)| is_last) {
                queue.pop_front();
            }
            let Some((cost, is_first, bytes, is_last)) = piece else { continue };
            let part = |time: u128| {
                time.saturating_mul(u128::from(bytes)).checked_div(u128::from(cost.bytes))
            };
            let time = self.time_ps(cost);
            self.advance(member, part(time).unwrap_or(time));
            self.charge(kind, u64::from(is_first), bytes);
            if !is_last {
                continue;
            }
            if let Some(waiter) = self.waiters.get_mut(id).and_then(Option::as_mut) {
                waiter.granted = true;
                waiter.waker.take().into_iter().for_each(&mut wake);
            }
            if self.timed == Some(id) {
                self.timed = None;
            }
        }
        self.choose_timed(wake);
    }

    /// Wakes the timed waiter, so that it sets its timer again.
    pub(super) fn wake_timed(&mut self, mut wake: impl FnMut(W)) {
        let timed = self.timed.take();
        self.choose_timed(&mut wake);
        // The one before may be another one.
        let waiter = timed.and_then(|id| self.waiters.get(id).and_then(Option::as_ref));
        waiter.and_then(|waiter| waiter.waker.clone()).into_iter().for_each(wake);
    }

    /// Whether a limit is set.
    pub(super) fn is_limited(&self) -> bool {
        self.buckets.iter().any(|pair| pair.requests.is_limited() || pair.bytes.is_limited())
    }

    /// The number of waiters that may not pass yet.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.members.iter().flatten().flat_map(|member| &member.queues).map(VecDeque::len).sum()
    }

    /// Chooses the timed waiter if there is none, and wakes it.
    fn choose_timed(&mut self, mut wake: impl FnMut(W)) {
        if self.timed.is_some() {
            return;
        }
        for kind in KINDS {
            let Some((_, member)) = self.front(index(kind)) else { continue };
            let queue = self.members.get(member).and_then(Option::as_ref);
            let Some(id) = queue.and_then(|queue| queue.queues[index(kind)].front().copied())
            else {
                continue;
            };
            // Without a waker it has not been polled yet, and becomes the timed waiter then.
            let waiter = self.waiters.get(id).and_then(Option::as_ref);
            let Some(waker) = waiter.and_then(|waiter| waiter.waker.clone()) else { continue };
            // It sets its timer when it is polled: until then no later waiter relies on it.
            (self.timed, self.alarm) = (Some(id), u64::MAX);
            wake(waker);
            return;
        }
    }

    fn fill(&mut self, now: u64) {
        let elapsed = now.saturating_sub(self.filled_at);
        if elapsed > 0 {
            self.filled_at = now;
            for pair in &mut self.buckets {
                pair.requests.fill(elapsed);
                pair.bytes.fill(elapsed);
            }
        }
    }

    /// The time until a request of a member may pass, nanoseconds.
    fn wait_ns(&self, kind: RequestKind, member: MemberId) -> u64 {
        let floor = if self.is_ahead(member) { RESERVED_FOR_OTHERS_NS } else { 0 };
        let pairs = [&self.buckets[0], &self.buckets[1 + index(kind)]];
        let waits = pairs.map(|pair| pair.requests.wait_ns(floor).max(pair.bytes.wait_ns(floor)));
        waits[0].max(waits[1])
    }

    /// Whether a member has to leave tokens to another one that wants more.
    fn is_ahead(&self, member: MemberId) -> bool {
        let least = self.virtual_time.saturating_sub(LAG_PS);
        let Some(own) = self.members.get(member).and_then(Option::as_ref) else { return false };
        let most = own.tag.max(least).saturating_sub(AHEAD_PS);
        let others = self.members.iter().take(COMPARED).enumerate();
        let mut others = others.filter(|(id, _)| *id != member).filter_map(|(_, o)| o.as_ref());
        others.any(|other| {
            other.tag.max(least) < most
                && (other.queues.iter().any(|queue| !queue.is_empty())
                    || other.waited_at.is_some_and(|at| self.filled_at < at + WAITED_RECENTLY_NS))
        })
    }

    /// When the first waiter may pass.
    fn next(&mut self, now: u64) -> Option<u64> {
        let waits = KINDS.map(|kind| {
            let (_, member) = self.front(index(kind))?;
            Some(now.saturating_add(self.wait_ns(kind, member)))
        });
        waits.into_iter().flatten().min()
    }

    /// The most bytes for which a request takes tokens at once.
    fn piece(&self, kind: RequestKind) -> u64 {
        if self.joined < 2 {
            return u64::MAX;
        }
        let pairs = [&self.buckets[0], &self.buckets[1 + index(kind)]];
        let [all, of_kind] = pairs.map(|pair| pair.bytes.tokens_in(PIECE_NS));
        all.min(of_kind).max(PIECE_LEAST)
    }

    /// The time that the limits need for a request, picoseconds.
    fn time_ps(&self, cost: RequestCost) -> u128 {
        let pairs = [&self.buckets[0], &self.buckets[1 + index(cost.kind)]];
        let times = pairs.map(|pair| pair.requests.time_ps(1).max(pair.bytes.time_ps(cost.bytes)));
        times[0].max(times[1])
    }

    /// Takes tokens.
    fn charge(&mut self, kind: RequestKind, requests: u64, bytes: u64) {
        for at in [0, 1 + index(kind)] {
            self.buckets[at].requests.take(requests);
            self.buckets[at].bytes.take(bytes);
        }
    }

    /// The waiter that is next among those that may pass.
    fn first(&mut self) -> Option<(RequestKind, MemberId)> {
        let ready = KINDS.map(|kind| {
            let (tag, member) = self.front(index(kind))?;
            (self.wait_ns(kind, member) == 0).then_some((tag, kind, member))
        });
        let first = ready.into_iter().flatten().min_by_key(|(tag, ..)| *tag);
        first.map(|(_, kind, member)| (kind, member))
    }

    /// The member with the lowest tag that has waiters of a kind.
    fn front(&mut self, kind: usize) -> Option<(u128, MemberId)> {
        loop {
            let Reverse((tag, id)) = *self.order[kind].peek()?;
            let member = self.members.get_mut(id).and_then(Option::as_mut);
            match member {
                Some(member) if !member.queues[kind].is_empty() => {
                    if member.tag == tag {
                        return Some((tag, id));
                    }
                    let entry = Reverse((member.tag, id));
                    self.order[kind].pop();
                    self.order[kind].push(entry);
                }
                member => {
                    if let Some(member) = member {
                        member.listed[kind] = false;
                    }
                    self.order[kind].pop();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
