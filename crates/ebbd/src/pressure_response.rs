//! The daemon's response to memory pressure, and its lines in the log.
//!
//! Each event of the ladder (`ebb_mem::pressure`) squeezes the page pools and shrinks the caches. An
//! episode begins when the level rises above L0 and ends when it is back at L0. A line is logged when
//! an episode begins or its level rises, and one when it ends, with the I/O memory before and after.
//! Frequent episodes do not fill the log: after [`EPISODES`] of them, one in ten seconds is logged, and
//! the next line counts the omitted ones.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_cache::Cache;
use ebb_export_xen::XenParameters;
use ebb_mem::pressure::{Cause, Level, Monitor, PressureState, Subscription};
use ebb_mem::{ArenaStats, Memory, Reclaim};

use crate::bdi::Bdis;

/// Episodes that may be logged one after the other, and the time after which one more may be.
const EPISODES: u32 = 5;
const EPISODE_EVERY: Duration = Duration::from_secs(10);

/// Applies each event to the memory and the cache, until the subscription is dropped.
pub(crate) fn subscribe(
    monitor: &Monitor,
    memory: &Arc<Memory>,
    cache: &Arc<Cache>,
    bdis: &Arc<Bdis>,
    grants: &Arc<XenParameters>,
) -> Subscription {
    let (memory, cache) = (Arc::clone(memory), Arc::clone(cache));
    let (bdis, grants) = (Arc::clone(bdis), Arc::clone(grants));
    let log = Mutex::new(PressureLog::new(ebb_mem::clock::now()));
    monitor.pressure().subscribe(move |state| {
        let before = memory.arena_stats();
        act(&memory, &cache, state);
        bdis.pressure(state.level);
        shrink(&grants, state);
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = log.note(ebb_mem::clock::now(), state.level, state.cause, &before) {
            log_line(&line);
        }
    })
}

/// Unmaps idle grants at L2 and above: a mapped page cannot be freed by its guest.
pub(crate) fn shrink(grants: &XenParameters, state: PressureState) {
    if state.cause.is_event() && state.level > Level::L1 {
        grants.shrink();
    }
}

pub(crate) fn act(memory: &Memory, cache: &Cache, state: PressureState) {
    if !state.cause.is_event() {
        if state.level == Level::L0 {
            memory.calm();
            cache.pressure(Level::L0, state.event);
        }
        return;
    }
    let now = state.event;
    // Closed connections and volumes have left free memory in the heap.
    ebb_mem::trim_heap();
    match (state.level, state.cause) {
        (Level::L0, _) => {}
        // These signs do not mean that the host needs our memory: where the page cache fills all
        // free memory, they recur for ever. So idle buffers are only lent, and the kernel decides.
        (Level::L1, Cause::Notice | Cause::FreeNearTarget) => cache.lend_idle(),
        (level, _) => cache.pressure(level, now),
    }
    let reclaim = match state.level {
        Level::L0 => return memory.tick(now),
        Level::L1 => Reclaim::Trim,
        Level::L2 => Reclaim::Drain,
        Level::L3 => Reclaim::DrainWorkers,
    };
    memory.squeeze(now);
    memory.reclaim(reclaim, now);
}

/// A line for the log. Sizes are bytes.
#[derive(Debug, PartialEq, Eq)]
enum PressureLine {
    /// An episode begins, or its level rises.
    Up { level: Level, cause: Cause, wired: usize, lent: usize, left_out: u32 },
    /// It has ended; (wired, lent) bytes at its beginning and now.
    Over { events: u32, lasted: Duration, was: [usize; 2], is: [usize; 2] },
}

fn log_line(line: &PressureLine) {
    match line {
        PressureLine::Up { level, cause, wired, lent, left_out } => tracing::info!(
            level = level.as_str(),
            cause = cause.as_str(),
            wired_bytes = wired,
            lent_bytes = lent,
            left_out,
            "memory pressure: returning idle I/O memory"
        ),
        PressureLine::Over { events, lasted, was, is } => tracing::info!(
            events,
            milliseconds = u64::try_from(lasted.as_millis()).unwrap_or(u64::MAX),
            wired_bytes_before = was[0],
            wired_bytes = is[0],
            lent_bytes = is[1],
            returned_bytes = (was[0] + was[1]).saturating_sub(is[0] + is[1]),
            "memory pressure has ended"
        ),
    }
}

/// The time from a rise above L0 to the return to it.
struct Episode {
    began: Instant,
    /// The highest level so far.
    level: Level,
    events: u32,
    /// (wired, lent) bytes when it began.
    was: [usize; 2],
    logged: bool,
}

/// Decides which events are logged.
struct PressureLog {
    episode: Option<Episode>,
    /// Episodes that may still be logged, and when that number was last raised.
    allowed: u32,
    raised: Instant,
    left_out: u32,
}

impl PressureLog {
    fn new(now: Instant) -> PressureLog {
        PressureLog { episode: None, allowed: EPISODES, raised: now, left_out: 0 }
    }

    /// The line for one event, if there is one; `memory` as it was before the response.
    fn note(
        &mut self,
        now: Instant,
        level: Level,
        cause: Cause,
        memory: &ArenaStats,
    ) -> Option<PressureLine> {
        let figures = [memory.wired, memory.unwired];
        if level == Level::L0 {
            let episode = self.episode.take()?;
            return episode.logged.then(|| PressureLine::Over {
                events: episode.events,
                lasted: now.saturating_duration_since(episode.began),
                was: episode.was,
                is: figures,
            });
        }
        if self.episode.is_none() {
            let logged = self.allow(now);
            self.left_out += u32::from(!logged);
            let began = now;
            self.episode =
                Some(Episode { began, level: Level::L0, events: 0, was: figures, logged });
        }
        let episode = self.episode.as_mut()?;
        episode.events = episode.events.saturating_add(u32::from(cause.is_event()));
        let worse = level > episode.level;
        episode.level = episode.level.max(level);
        // The last resort is always logged.
        if level == Level::L3 && !episode.logged {
            episode.logged = true;
            self.left_out -= 1;
        }
        (worse && episode.logged).then(|| PressureLine::Up {
            level,
            cause,
            wired: figures[0],
            lent: figures[1],
            left_out: std::mem::take(&mut self.left_out),
        })
    }

    /// Whether another episode may be logged: a few at once, then one in [`EPISODE_EVERY`].
    fn allow(&mut self, now: Instant) -> bool {
        while self.allowed < EPISODES
            && let Some(due) = self.raised.checked_add(EPISODE_EVERY)
            && due <= now
        {
            self.allowed += 1;
            self.raised = due;
        }
        if self.allowed == EPISODES {
            self.raised = now;
        }
        if self.allowed == 0 {
            return false;
        }
        self.allowed -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(wired: usize, unwired: usize) -> ArenaStats {
        ArenaStats { wired, unwired, ..ArenaStats::default() }
    }

    #[test]
    fn an_episode_is_logged_when_it_begins_when_its_level_rises_and_when_it_ends() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut log = PressureLog::new(start);
        let mut note =
            |ms, level, cause, wired, lent| log.note(at(ms), level, cause, &memory(wired, lent));
        assert_eq!(note(0, Level::L0, Cause::Decay, 9, 0), None);
        let up = |level, cause, wired, lent| {
            Some(PressureLine::Up { level, cause, wired, lent, left_out: 0 })
        };
        let first = note(10, Level::L1, Cause::Stall, 900, 50);
        assert_eq!(first, up(Level::L1, Cause::Stall, 900, 50));
        assert_eq!(note(20, Level::L1, Cause::Stall, 200, 700), None, "the same again");
        let worse = note(30, Level::L2, Cause::FullStall, 200, 700);
        assert_eq!(worse, up(Level::L2, Cause::FullStall, 200, 700));
        assert_eq!(note(40, Level::L1, Cause::Easing, 100, 0), None, "it falls");
        assert_eq!(note(50, Level::L2, Cause::Stall, 100, 0), None, "as bad as before");
        let over = PressureLine::Over {
            events: 4,
            lasted: Duration::from_millis(1000),
            was: [900, 50],
            is: [80, 20],
        };
        assert_eq!(note(1010, Level::L0, Cause::Easing, 80, 20), Some(over));
        assert_eq!(note(1020, Level::L0, Cause::Decay, 80, 20), None);
    }

    #[test]
    fn frequent_episodes_do_not_fill_the_log() {
        let start = Instant::now();
        let mut log = PressureLog::new(start);
        let mut lines = 0;
        let mut left_out = 0;
        // An hour, with an episode each second.
        for second in 0..3600 {
            let now = start + Duration::from_secs(second);
            if let Some(line) = log.note(now, Level::L1, Cause::Notice, &memory(1, 1)) {
                lines += 1;
                let PressureLine::Up { left_out: count, .. } = line else { panic!("{line:?}") };
                left_out += count;
            }
            log.note(now + Duration::from_millis(500), Level::L0, Cause::Easing, &memory(1, 1));
        }
        assert!((300..=400).contains(&lines), "{lines} lines");
        assert_eq!(lines + left_out + log.left_out, 3600, "each is logged or counted");
        // The last resort is always logged.
        let now = start + Duration::from_secs(3600);
        (0..10).for_each(|_| {
            log.note(now, Level::L1, Cause::Notice, &memory(1, 1));
            log.note(now, Level::L0, Cause::Easing, &memory(1, 1));
        });
        assert_eq!(log.note(now, Level::L1, Cause::Notice, &memory(1, 1)), None);
        let line = log.note(now, Level::L3, Cause::AvailableLow, &memory(1, 1));
        assert!(matches!(line, Some(PressureLine::Up { level: Level::L3, .. })), "{line:?}");
    }
}
