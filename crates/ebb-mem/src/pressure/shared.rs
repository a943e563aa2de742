//! The published value: wait-free to read, with a single writer.
//!
//! Level, cause and sequence number share one word, so they are always consistent. The two times are stored
//! *before* that word: a reader that races with a publication may see the times of the new publication,
//! never older ones. That is harmless (a squeeze then counts from a moment ago), and readers never retry.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Cause, Level};

/// The last publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PressureState {
    /// The level that holds now.
    pub level: Level,
    /// Why this was published.
    pub cause: Cause,
    /// When the level was entered.
    pub since: Instant,
    /// Time of the last event ([`Cause::is_event`]); before the first event, the start.
    pub event: Instant,
    /// Number of publications, modulo 2^48. A new number together with [`Cause::is_event`] requires an
    /// action, also if the level is unchanged.
    pub sequence: u64,
}

type Callback = Arc<dyn Fn(PressureState) + Send + Sync>;
type Subscribers = Arc<Vec<(u64, Callback)>>;

const SEQUENCE_BITS: u32 = 48;
const SEQUENCE_MASK: u64 = (1 << SEQUENCE_BITS) - 1;

struct PressureCell {
    /// `cause << 56 | level << 48 | sequence`.
    word: AtomicU64,
    /// Nanoseconds from `epoch`.
    since: AtomicU64,
    event: AtomicU64,
    epoch: Instant,
    /// Replaced as a whole, so that publishing calls subscribers without the lock and without allocating.
    subscribers: Mutex<Subscribers>,
    next_subscriber: AtomicU64,
}

impl PressureCell {
    fn subscribers(&self) -> MutexGuard<'_, Subscribers> {
        // The list is replaced in one assignment: a panic elsewhere cannot leave it inconsistent.
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nanos(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX)
    }

    fn instant(&self, nanos: u64) -> Instant {
        self.epoch.checked_add(Duration::from_nanos(nanos)).unwrap_or(self.epoch)
    }
}

/// The memory pressure of the host as every owner of memory reads it. Cheap to clone.
#[derive(Clone)]
pub struct Pressure(Arc<PressureCell>);

impl Pressure {
    /// A calm value, and the publisher that may change it. The level holds since `now`; earlier times
    /// count as `now`.
    #[must_use]
    pub fn new(now: Instant) -> (Publisher, Self) {
        let shared = Arc::new(PressureCell {
            word: AtomicU64::new(pack(Level::L0, Cause::Start, 0)),
            since: AtomicU64::new(0),
            event: AtomicU64::new(0),
            epoch: now,
            subscribers: Mutex::new(Arc::new(Vec::new())),
            next_subscriber: AtomicU64::new(0),
        });
        (Publisher { shared: Arc::clone(&shared), sequence: 0, level: Level::L0 }, Self(shared))
    }

    /// The level now: one load. For the hot path.
    #[must_use]
    pub fn level(&self) -> Level {
        unpack(self.0.word.load(Ordering::Relaxed)).0
    }

    /// The sequence number now: one load. Differs from a number kept earlier if anything was
    /// published in between.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.0.word.load(Ordering::Relaxed) & SEQUENCE_MASK
    }

    /// The last publication. Three loads, never waits. Level, cause and sequence are consistent; the times
    /// are theirs or those of a publication in progress.
    #[must_use]
    pub fn state(&self) -> PressureState {
        // Acquire pairs with the release in `publish`: the times are at least as new as the word.
        let (level, cause, sequence) = unpack(self.0.word.load(Ordering::Acquire));
        PressureState {
            level,
            cause,
            sequence,
            since: self.0.instant(self.0.since.load(Ordering::Relaxed)),
            event: self.0.instant(self.0.event.load(Ordering::Relaxed)),
        }
    }

    /// Calls `callback` at every publication from now on, in the publisher's thread, after the value has
    /// changed, until the subscription is dropped (a call in progress, or about to start, may complete
    /// later). It must return quickly (wake a task instead of doing the work) and not panic; it may
    /// subscribe and unsubscribe.
    #[must_use = "dropping the subscription ends it"]
    pub fn subscribe(
        &self,
        callback: impl Fn(PressureState) + Send + Sync + 'static,
    ) -> Subscription {
        let id = self.0.next_subscriber.fetch_add(1, Ordering::Relaxed);
        let mut list = self.0.subscribers();
        let mut longer = Vec::with_capacity(list.len().saturating_add(1));
        longer.extend(list.iter().cloned());
        longer.push((id, Arc::new(callback)));
        let old = std::mem::replace(&mut *list, Arc::new(longer));
        drop(list);
        drop(old);
        Subscription { shared: Arc::clone(&self.0), id }
    }
}

impl fmt::Debug for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pressure").field(&self.state()).finish()
    }
}

/// Ends its callback when dropped.
pub struct Subscription {
    shared: Arc<PressureCell>,
    id: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut list = self.shared.subscribers();
        let shorter = list.iter().filter(|(id, _)| *id != self.id).cloned().collect();
        let old = std::mem::replace(&mut *list, Arc::new(shorter));
        // Dropping the callback may run any code: not under the lock.
        drop(list);
        drop(old);
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The only writer of a [`Pressure`]. Not cloneable; publishing needs exclusive access.
pub struct Publisher {
    shared: Arc<PressureCell>,
    sequence: u64,
    level: Level,
}

impl Publisher {
    /// Publishes a level. Stores it before it calls subscribers: a callback, or a reader that sees the new
    /// sequence number, sees the new level. Publishing the current level again is a new event at that level.
    pub fn publish(&mut self, level: Level, cause: Cause, now: Instant) -> PressureState {
        let at = self.shared.nanos(now);
        if level != self.level {
            self.shared.since.store(at, Ordering::Relaxed);
            self.level = level;
        }
        if cause.is_event() {
            self.shared.event.store(at, Ordering::Relaxed);
        }
        self.sequence = self.sequence.wrapping_add(1) & SEQUENCE_MASK;
        self.shared.word.store(pack(level, cause, self.sequence), Ordering::Release);
        let name = cause.as_str();
        probe::probe!(ebbd, pressure, level.number(), name.as_ptr(), name.len());
        let state = self.pressure().state();
        let subscribers = Arc::clone(&self.shared.subscribers());
        for (_, callback) in subscribers.iter() {
            callback(state);
        }
        state
    }

    /// The value this publisher changes.
    #[must_use]
    pub fn pressure(&self) -> Pressure {
        Pressure(Arc::clone(&self.shared))
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("state", &self.pressure().state()).finish()
    }
}

fn pack(level: Level, cause: Cause, sequence: u64) -> u64 {
    (u64::from(cause.number()) << 56)
        | (u64::from(level.number()) << SEQUENCE_BITS)
        | (sequence & SEQUENCE_MASK)
}

fn unpack(word: u64) -> (Level, Cause, u64) {
    let [cause, level, ..] = word.to_be_bytes();
    // Only `pack` makes the word, so the level is one of four.
    let level = Level::from_number(level).unwrap_or_default();
    (level, Cause::from_number(cause), word & SEQUENCE_MASK)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_state_survives_packing() {
        for level in Level::ALL {
            for cause in Cause::ALL {
                for sequence in [0, 1, SEQUENCE_MASK] {
                    assert_eq!(unpack(pack(level, cause, sequence)), (level, cause, sequence));
                }
            }
        }
    }

    #[test]
    fn level_and_event_have_separate_times() {
        let start = Instant::now();
        let later = |ms| start + Duration::from_millis(ms);
        let (mut publisher, pressure) = Pressure::new(start);
        assert_eq!(pressure.state().sequence, 0);
        publisher.publish(Level::L1, Cause::Stall, later(10));
        publisher.publish(Level::L1, Cause::Stall, later(30));
        let state = pressure.state();
        assert_eq!((state.since, state.event, state.sequence), (later(10), later(30), 2));
        publisher.publish(Level::L0, Cause::Easing, later(50));
        let state = pressure.state();
        assert_eq!((state.since, state.event, state.sequence), (later(50), later(30), 3));
    }

    #[test]
    fn the_sequence_wraps_without_touching_the_level() {
        let (mut publisher, pressure) = Pressure::new(Instant::now());
        publisher.sequence = SEQUENCE_MASK;
        publisher.publish(Level::L2, Cause::Stall, Instant::now());
        assert_eq!((pressure.level(), pressure.sequence()), (Level::L2, 0));
    }

    #[test]
    fn a_dropped_subscription_is_not_called_and_frees_its_callback() {
        let (mut publisher, pressure) = Pressure::new(Instant::now());
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let subscription = pressure.subscribe(move |state| {
            assert_eq!(state.level, Level::L1);
            counted.fetch_add(1, Ordering::Relaxed);
        });
        publisher.publish(Level::L1, Cause::Stall, Instant::now());
        drop(subscription);
        publisher.publish(Level::L2, Cause::Stall, Instant::now());
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(Arc::strong_count(&calls), 1);
    }

    #[test]
    fn a_callback_may_subscribe_and_read() {
        let (mut publisher, pressure) = Pressure::new(Instant::now());
        let inner = pressure.clone();
        let kept = Mutex::new(Vec::new());
        let _subscription = pressure.subscribe(move |state| {
            assert_eq!(inner.state().sequence, state.sequence);
            kept.lock().unwrap().push(inner.subscribe(|_| {}));
        });
        publisher.publish(Level::L1, Cause::Stall, Instant::now());
        publisher.publish(Level::L1, Cause::Stall, Instant::now());
    }
}
