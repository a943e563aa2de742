//! Limits of requests and bytes per second, of a volume and of a group of volumes.
//!
//! An export lets each request pass the limits before it receives the request's data, or consumes the request from a
//! ring: so a throttled request holds no buffer, and back pressure is where the client feels it. A flush, and requests
//! that move no data and change nothing, are no requests here; discards and zeroes are writes without bytes. A request
//! passes the limits of its volume first and then those of the group, so that the group is fair among those that its
//! members' own limits let pass.
//!
//! # Invariants
//! - A volume without limits pays one relaxed load for each request ([`crate::Volume::limits`]).
//! - The limits of a volume, or of a group, have one lock, for all workers; it is held for a calculation.
//! - A change wakes those that wait.
//! - A waiter that is dropped loses nothing for others; one that waits for long checks every [`CHECK`] whether it is
//!   still wanted.

mod limit_queue;
mod token_bucket;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use ebb_io::Io;

use self::limit_queue::{LimitQueue, MemberId, WaiterId};

/// How often a waiter checks whether it is still wanted.
const CHECK: Duration = Duration::from_millis(100);

/// Limits; 0: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Requests per second, reads and writes together.
    pub iops: u64,
    /// Reads per second.
    pub read_iops: u64,
    /// Writes per second.
    pub write_iops: u64,
    /// Bytes per second, reads and writes together.
    pub bandwidth: u64,
    /// Bytes per second of reads.
    pub read_bandwidth: u64,
    /// Bytes per second of writes.
    pub write_bandwidth: u64,
    /// The time whose requests and bytes may pass at once after an idle period, milliseconds.
    pub burst_ms: u64,
}

impl RateLimits {
    /// Whether one of them is a limit.
    pub fn is_limited(&self) -> bool {
        let Self { iops, read_iops, write_iops, .. } = *self;
        let Self { bandwidth, read_bandwidth, write_bandwidth, .. } = *self;
        (iops | read_iops | write_iops | bandwidth | read_bandwidth | write_bandwidth) != 0
    }
}

/// Which limits a request has to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// Those of reads.
    Read,
    /// Those of writes.
    Write,
}

/// One request, as limits count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestCost {
    /// Its kind.
    pub kind: RequestKind,
    /// Its bytes; 0 for a discard or zeroes.
    pub bytes: u64,
}

/// Limits in force, and what they have done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitFigures {
    /// The group, if the volume is in one.
    pub group: Option<Arc<str>>,
    /// The limits.
    pub limits: RateLimits,
    /// Requests that waited.
    pub throttled: u64,
    /// The time in which at least one waited.
    pub throttled_time: Duration,
}

/// Requests that waited, and the time in which at least one did.
#[derive(Debug, Default)]
struct ThrottleTime {
    requests: u64,
    waiting: u64,
    since: Option<Instant>,
    time: Duration,
}

impl ThrottleTime {
    fn begin(&mut self, now: Instant) {
        self.requests += 1;
        self.waiting += 1;
        self.since.get_or_insert(now);
    }

    fn end(&mut self, now: Instant) {
        self.waiting = self.waiting.saturating_sub(1);
        if self.waiting == 0
            && let Some(since) = self.since.take()
        {
            self.time += now.saturating_duration_since(since);
        }
    }

    fn time(&self, now: Instant) -> Duration {
        self.time + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

#[derive(Debug, Default)]
struct LimiterState {
    queue: LimitQueue<Waker>,
    limits: RateLimits,
    throttled: ThrottleTime,
}

/// A set of limits that requests of several members pass, on any worker.
#[derive(Debug)]
struct Limiter {
    state: Mutex<LimiterState>,
    /// Time zero of [`Limiter::now`].
    since: Instant,
}

impl Default for Limiter {
    fn default() -> Self {
        Self { state: Mutex::default(), since: ebb_mem::clock::now() }
    }
}

impl Limiter {
    fn lock(&self) -> MutexGuard<'_, LimiterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        u64::try_from(ebb_mem::clock::since(self.since).as_nanos()).unwrap_or(u64::MAX)
    }

    fn set(&self, limits: RateLimits) {
        let now = self.now();
        let mut state = self.lock();
        state.limits = limits;
        state.queue.set(now, &limits);
        state.queue.dispatch(now, Waker::wake);
        state.queue.wake_timed(Waker::wake);
    }

    fn try_take(&self, member: MemberId, cost: RequestCost) -> bool {
        let now = self.now();
        self.lock().queue.try_take(now, member, cost, Waker::wake)
    }

    fn take(&self, member: MemberId, cost: RequestCost) {
        self.lock().queue.take(member, cost);
    }

    /// Waits until a request may pass. Ends with the result of `end_of_wait` when that has one; it is called from time to
    /// time.
    async fn wait(
        &self,
        io: &Io,
        member: MemberId,
        cost: RequestCost,
        end_of_wait: impl Fn() -> Option<bool>,
    ) -> bool {
        let waiter = {
            let mut state = self.lock();
            state.throttled.begin(ebb_mem::clock::now());
            QueuedWaiter { limiter: self, id: state.queue.enqueue(member, cost) }
        };
        let mut check = ebb_mem::clock::now() + CHECK;
        let mut sleep = io.sleep(CHECK);
        let mut until = check;
        poll_fn(|cx| {
            loop {
                let now = self.now();
                let alarm = {
                    let mut state = self.lock();
                    state.queue.dispatch(now, Waker::wake);
                    match state.queue.poll(now, waiter.id, cx.waker()) {
                        Ok(()) => return Poll::Ready(true),
                        Err(alarm) => alarm,
                    }
                };
                if ebb_mem::clock::now() >= check {
                    if let Some(result) = end_of_wait() {
                        return Poll::Ready(result);
                    }
                    check = ebb_mem::clock::now() + CHECK;
                }
                let wanted = alarm.and_then(|at| self.since.checked_add(Duration::from_nanos(at)));
                let wanted = wanted.map_or(check, |at| at.min(check));
                if wanted != until {
                    until = wanted;
                    sleep = io.sleep(until.saturating_duration_since(ebb_mem::clock::now()));
                }
                if Pin::new(&mut sleep).poll(cx).is_pending() {
                    return Poll::Pending;
                }
                // The timer has ended: it is set anew.
                until = self.since;
            }
        })
        .await
    }

    fn figures(&self) -> LimitFigures {
        let state = self.lock();
        LimitFigures {
            group: None,
            limits: state.limits,
            throttled: state.throttled.requests,
            throttled_time: state.throttled.time(ebb_mem::clock::now()),
        }
    }
}

/// A waiter in the queue of a limiter, until it is dropped.
struct QueuedWaiter<'a> {
    limiter: &'a Limiter,
    id: WaiterId,
}

impl Drop for QueuedWaiter<'_> {
    fn drop(&mut self) {
        let mut state = self.limiter.lock();
        state.throttled.end(ebb_mem::clock::now());
        state.queue.remove(self.id, Waker::wake);
    }
}

/// Limits that several volumes share. Members that want more than the limits allow have equal parts; what others leave
/// goes to them.
#[derive(Debug)]
pub struct LimitGroup {
    name: Arc<str>,
    limiter: Limiter,
}

impl LimitGroup {
    /// A group without limits.
    pub fn new(name: &str) -> Arc<LimitGroup> {
        Arc::new(LimitGroup { name: name.into(), limiter: Limiter::default() })
    }

    /// Its name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Changes its limits; waiting requests follow at once.
    pub fn set(&self, limits: RateLimits) {
        self.limiter.set(limits);
    }

    /// Its limits, and what they have done.
    pub fn figures(&self) -> LimitFigures {
        self.limiter.figures()
    }
}

/// A volume's place in a group.
#[derive(Debug)]
struct GroupMember {
    group: Arc<LimitGroup>,
    member: MemberId,
}

impl Drop for GroupMember {
    fn drop(&mut self) {
        self.group.limiter.lock().queue.leave(self.member);
    }
}

/// Where a request has to wait. `None`: in the volume's own limits; `Some`: in those of its group.
#[derive(Debug)]
pub struct LimitStage(Option<Arc<GroupMember>>);

/// The limits that the requests of a volume pass: its own and those of its group.
#[derive(Debug)]
pub struct VolumeLimits {
    own: Limiter,
    /// The volume's connections and rings are one member of its own limits.
    only: MemberId,
    group: Mutex<Option<Arc<GroupMember>>>,
    /// Of both.
    throttled: Mutex<ThrottleTime>,
}

impl Default for VolumeLimits {
    fn default() -> Self {
        let own = Limiter::default();
        let only = own.lock().queue.join();
        Self { own, only, group: Mutex::default(), throttled: Mutex::default() }
    }
}

impl VolumeLimits {
    fn group(&self) -> Option<Arc<GroupMember>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn throttled(&self) -> MutexGuard<'_, ThrottleTime> {
        self.throttled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_limited(&self) -> bool {
        self.own.lock().queue.is_limited() || self.group().is_some()
    }

    pub(crate) fn set(&self, limits: RateLimits) {
        self.own.set(limits);
    }

    pub(crate) fn set_group(&self, group: Option<&Arc<LimitGroup>>) {
        let new = group.map(|group| {
            let member = group.limiter.lock().queue.join();
            Arc::new(GroupMember { group: group.clone(), member })
        });
        let old = {
            let mut place = self.group.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *place, new)
        };
        if let Some(old) = old {
            // Those that wait in it pass: at most one of each connection and ring.
            old.group.limiter.lock().queue.release(old.member, Waker::wake);
        }
    }

    pub(crate) fn figures(&self) -> LimitFigures {
        let throttled = self.throttled();
        LimitFigures {
            group: self.group().map(|member| member.group.name.clone()),
            limits: self.own.lock().limits,
            throttled: throttled.requests,
            throttled_time: throttled.time(ebb_mem::clock::now()),
        }
    }

    /// Lets a request pass if it need not wait. Otherwise it has to wait with [`VolumeLimits::wait`].
    ///
    /// # Errors
    /// Where it has to wait.
    pub fn try_take(&self, cost: RequestCost) -> Result<(), LimitStage> {
        if !self.own.try_take(self.only, cost) {
            return Err(LimitStage(None));
        }
        self.pass_group(cost)
    }

    fn pass_group(&self, cost: RequestCost) -> Result<(), LimitStage> {
        match self.group() {
            Some(member) if !member.group.limiter.try_take(member.member, cost) => {
                Err(LimitStage(Some(member)))
            }
            _ => Ok(()),
        }
    }

    /// Takes a request's part of the limits without waiting: later requests wait for it.
    pub fn take(&self, cost: RequestCost) {
        self.own.take(self.only, cost);
        if let Some(member) = self.group() {
            member.group.limiter.take(member.member, cost);
        }
    }

    /// Waits until a request may pass that [`VolumeLimits::try_take`] did not let pass; false if it is no longer
    /// `wanted`, which is asked from time to time. It may be dropped at any time.
    pub async fn wait(
        &self,
        io: &Io,
        cost: RequestCost,
        LimitStage(stage): LimitStage,
        wanted: impl Fn() -> bool,
    ) -> bool {
        let _throttled = ThrottledRequest::new(self);
        let gone = || (!wanted()).then_some(false);
        let mut stage = stage;
        if stage.is_none() {
            if !self.own.wait(io, self.only, cost, gone).await {
                return false;
            }
            match self.pass_group(cost) {
                Ok(()) => return true,
                Err(LimitStage(next)) => stage = next,
            }
        }
        let Some(member) = stage else { return true };
        let end_of_wait = || {
            let stays = self.group().is_some_and(|now| Arc::ptr_eq(&now, &member));
            gone().or((!stays).then_some(true))
        };
        member.group.limiter.wait(io, member.member, cost, end_of_wait).await
    }
}

/// A throttled request of a volume, until it is dropped.
struct ThrottledRequest<'a>(&'a VolumeLimits);

impl<'a> ThrottledRequest<'a> {
    fn new(limits: &'a VolumeLimits) -> Self {
        limits.throttled().begin(ebb_mem::clock::now());
        Self(limits)
    }
}

impl Drop for ThrottledRequest<'_> {
    fn drop(&mut self) {
        self.0.throttled().end(ebb_mem::clock::now());
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
