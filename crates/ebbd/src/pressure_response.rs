//! What the daemon does about memory pressure (design, section 3), and says about it.
//!
//! Each event of the ladder squeezes the page pools and has the caches cut; the log gets a line when
//! pressure begins or becomes worse, and one when it is over, with what I/O memory was before and
//! is after. Pressure that comes and goes does not fill the log: after a few bouts, one in ten seconds
//! is logged, and those left out are counted in the next line.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_cache::Cache;
use ebb_export_xen::XenParameters;
use ebb_mem::pressure::{Cause, Level, Monitor, PressureState, Subscription};
use ebb_mem::{ArenaStats, Memory, Reclaim};

use crate::bdi::Bdis;

/// Bouts of pressure that are logged one after the other, and the time in which one more may be.
const BOUTS: u32 = 5;
const BOUT_EVERY: Duration = Duration::from_secs(10);

/// Has the memory and the cache answer each event, until the subscription is dropped.
pub(crate) fn answer(
    monitor: &Monitor,
    memory: &Arc<Memory>,
    cache: &Arc<Cache>,
    bdis: &Arc<Bdis>,
    grants: &Arc<XenParameters>,
) -> Subscription {
    let (memory, cache) = (Arc::clone(memory), Arc::clone(cache));
    let (bdis, grants) = (Arc::clone(bdis), Arc::clone(grants));
    let log = Mutex::new(Log::new(ebb_mem::clock::now()));
    monitor.pressure().subscribe(move |state| {
        let before = memory.arena_stats();
        act(&memory, &cache, state);
        bdis.pressure(state.level);
        shrink(&grants, state);
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = log.note(ebb_mem::clock::now(), state.level, state.cause, &before) {
            say(&line);
        }
    })
}

/// Mappings of guests' pages cost them memory only while they are short of it.
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
    // What closed connections and volumes have left in the heap is idle memory, too.
    ebb_mem::trim_heap();
    match (state.level, state.cause) {
        (Level::L0, _) => {}
        // Nothing says that it is our memory they need, and on a host whose page cache fills all
        // that is free these signs come for ever: the kernel may take what is idle, and decides.
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
enum Line {
    /// Pressure begins or is worse.
    Up { level: Level, cause: Cause, wired: usize, lent: usize, left_out: u32 },
    /// It is over; (wired, lent) bytes at its beginning and now.
    Over { events: u32, lasted: Duration, was: [usize; 2], is: [usize; 2] },
}

fn say(line: &Line) {
    match line {
        Line::Up { level, cause, wired, lent, left_out } => tracing::info!(
            level = level.as_str(),
            cause = cause.as_str(),
            wired_bytes = wired,
            lent_bytes = lent,
            left_out,
            "memory pressure: giving back idle I/O memory"
        ),
        Line::Over { events, lasted, was, is } => tracing::info!(
            events,
            milliseconds = u64::try_from(lasted.as_millis()).unwrap_or(u64::MAX),
            wired_bytes_before = was[0],
            wired_bytes = is[0],
            lent_bytes = is[1],
            returned_bytes = (was[0] + was[1]).saturating_sub(is[0] + is[1]),
            "memory pressure is over"
        ),
    }
}

/// A stretch of time without calm.
struct Bout {
    began: Instant,
    /// The highest level so far.
    level: Level,
    events: u32,
    /// (wired, lent) bytes when it began.
    was: [usize; 2],
    logged: bool,
}

/// Which publications are worth a line.
struct Log {
    bout: Option<Bout>,
    /// Bouts that may still be logged, and when the count was last raised.
    allowed: u32,
    raised: Instant,
    left_out: u32,
}

impl Log {
    fn new(now: Instant) -> Log {
        Log { bout: None, allowed: BOUTS, raised: now, left_out: 0 }
    }

    /// One publication; `memory` as it was before the answer.
    fn note(
        &mut self,
        now: Instant,
        level: Level,
        cause: Cause,
        memory: &ArenaStats,
    ) -> Option<Line> {
        let figures = [memory.wired, memory.unwired];
        if level == Level::L0 {
            let bout = self.bout.take()?;
            return bout.logged.then(|| Line::Over {
                events: bout.events,
                lasted: now.saturating_duration_since(bout.began),
                was: bout.was,
                is: figures,
            });
        }
        if self.bout.is_none() {
            let logged = self.allow(now);
            self.left_out += u32::from(!logged);
            let began = now;
            self.bout = Some(Bout { began, level: Level::L0, events: 0, was: figures, logged });
        }
        let bout = self.bout.as_mut()?;
        bout.events = bout.events.saturating_add(u32::from(cause.is_event()));
        let worse = level > bout.level;
        bout.level = bout.level.max(level);
        // The last resort is never kept quiet.
        if level == Level::L3 && !bout.logged {
            bout.logged = true;
            self.left_out -= 1;
        }
        (worse && bout.logged).then(|| Line::Up {
            level,
            cause,
            wired: figures[0],
            lent: figures[1],
            left_out: std::mem::take(&mut self.left_out),
        })
    }

    /// Whether another bout may be logged: a few at once, then one in [`BOUT_EVERY`].
    fn allow(&mut self, now: Instant) -> bool {
        while self.allowed < BOUTS
            && let Some(due) = self.raised.checked_add(BOUT_EVERY)
            && due <= now
        {
            self.allowed += 1;
            self.raised = due;
        }
        if self.allowed == BOUTS {
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
    fn a_line_when_it_begins_gets_worse_and_is_over() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut log = Log::new(start);
        let mut note =
            |ms, level, cause, wired, lent| log.note(at(ms), level, cause, &memory(wired, lent));
        assert_eq!(note(0, Level::L0, Cause::Decay, 9, 0), None);
        let up =
            |level, cause, wired, lent| Some(Line::Up { level, cause, wired, lent, left_out: 0 });
        let first = note(10, Level::L1, Cause::Stall, 900, 50);
        assert_eq!(first, up(Level::L1, Cause::Stall, 900, 50));
        assert_eq!(note(20, Level::L1, Cause::Stall, 200, 700), None, "the same again");
        let worse = note(30, Level::L2, Cause::FullStall, 200, 700);
        assert_eq!(worse, up(Level::L2, Cause::FullStall, 200, 700));
        assert_eq!(note(40, Level::L1, Cause::Easing, 100, 0), None, "it falls");
        assert_eq!(note(50, Level::L2, Cause::Stall, 100, 0), None, "as bad as before");
        let over = Line::Over {
            events: 4,
            lasted: Duration::from_millis(1000),
            was: [900, 50],
            is: [80, 20],
        };
        assert_eq!(note(1010, Level::L0, Cause::Easing, 80, 20), Some(over));
        assert_eq!(note(1020, Level::L0, Cause::Decay, 80, 20), None);
    }

    #[test]
    fn bouts_that_come_and_go_do_not_fill_the_log() {
        let start = Instant::now();
        let mut log = Log::new(start);
        let mut lines = 0;
        let mut left_out = 0;
        // An hour, with a bout each second.
        for second in 0..3600 {
            let now = start + Duration::from_secs(second);
            if let Some(line) = log.note(now, Level::L1, Cause::Notice, &memory(1, 1)) {
                lines += 1;
                let Line::Up { left_out: count, .. } = line else { panic!("{line:?}") };
                left_out += count;
            }
            log.note(now + Duration::from_millis(500), Level::L0, Cause::Easing, &memory(1, 1));
        }
        assert!((300..=400).contains(&lines), "{lines} lines");
        assert_eq!(lines + left_out + log.left_out, 3600, "none is forgotten");
        // The last resort is always worth one.
        let now = start + Duration::from_secs(3600);
        (0..10).for_each(|_| {
            log.note(now, Level::L1, Cause::Notice, &memory(1, 1));
            log.note(now, Level::L0, Cause::Easing, &memory(1, 1));
        });
        assert_eq!(log.note(now, Level::L1, Cause::Notice, &memory(1, 1)), None);
        let line = log.note(now, Level::L3, Cause::AvailableLow, &memory(1, 1));
        assert!(matches!(line, Some(Line::Up { level: Level::L3, .. })), "{line:?}");
    }
}
