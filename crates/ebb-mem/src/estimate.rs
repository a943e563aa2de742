//! Estimates how many of a zone's cached blocks are its working set, after FreeBSD's UMA
//! (`zone_domain_update_wss` in `sys/vm/uma_core.c`).
//!
//! Only allocation runs count, not free runs: a mass free says nothing about what will be needed. The
//! estimate also keeps the time since the zone last (nearly) ran out of cached blocks, which decides the
//! order in which zones are reclaimed.

/// The estimate for one zone's depot. Units are blocks; a tick is one call of
/// [`Estimate::update`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Estimate {
    /// Blocks cached now.
    items: u64,
    /// Peak since the last update (softened over the period's edge), and trough.
    max: u64,
    min: u64,
    /// Trough since the last new peak.
    trough: u64,
    wss: u64,
    /// Misses since the last new peak.
    short: u64,
    /// Largest allocation run that ended in a new peak since the last update.
    run: u64,
    /// Cached blocks that were not needed for a long time.
    limin: u64,
    /// Ticks since the zone last ran out of cached blocks.
    timin: u32,
    /// The zone ran out since the last update.
    missed: bool,
}

impl Estimate {
    /// Blocks cached now.
    pub(crate) fn items(&self) -> u64 {
        self.items
    }

    /// Blocks that the zone needs to cache: the largest recent allocation run.
    pub(crate) fn wss(&self) -> u64 {
        self.wss
    }

    /// Blocks that were not needed for hours, or since the zone last ran out of cached blocks.
    pub(crate) fn limin(&self) -> u64 {
        self.limin
    }

    /// Ticks since the zone last ran out of cached blocks.
    pub(crate) fn timin(&self) -> u32 {
        self.timin
    }

    /// `count` blocks were added to the cache.
    pub(crate) fn put(&mut self, count: u64) {
        self.items += count;
        if self.items > self.max {
            // A new peak ends an allocation run.
            self.run = self.run.max(self.current());
            self.short = 0;
            self.wss = self.wss.max(self.run);
            self.max = self.items;
            self.trough = self.items;
        }
    }

    /// `count` blocks were allocated from the cache.
    pub(crate) fn take(&mut self, count: u64) {
        self.items = self.items.saturating_sub(count);
        self.min = self.min.min(self.items);
        self.trough = self.trough.min(self.items);
    }

    /// The allocation run since the last new peak. Misses count for up to half as much again: otherwise a
    /// cache that is too small would seem large enough, while a single burst from an empty cache is still
    /// no working set.
    fn current(&self) -> u64 {
        let run = self.max.saturating_sub(self.trough);
        run + self.short.min(run / 2)
    }

    /// An allocation found no cached block.
    pub(crate) fn miss(&mut self) {
        self.short += 1;
        self.missed = true;
        self.timin = 0;
    }

    /// `count` blocks were reclaimed: shifts all bounds, so that reclaim does not count as use.
    pub(crate) fn reclaimed(&mut self, count: u64) {
        self.items = self.items.saturating_sub(count);
        self.max = self.max.saturating_sub(count);
        self.min = self.min.saturating_sub(count);
        self.trough = self.trough.saturating_sub(count);
    }

    /// Ends a period.
    pub(crate) fn update(&mut self) {
        // Three quarters, rounded down, so that an unused zone reaches zero.
        // UMA lets a run that ended in a new peak decay at once. Here it is kept for its period, so that
        // repeated trims under a steady load take the surplus only.
        let run = self.current().max(self.run);
        self.short = 0;
        self.wss = (self.wss - self.wss.div_ceil(4)).max(run);
        self.run = 0;
        // The middle between the old peak and now, so that a run across two periods is not cut in two.
        self.max = self.max.midpoint(self.items);
        let spare = self.min.checked_sub(self.wss).filter(|_| !self.missed);
        match spare {
            Some(spare) => {
                self.limin =
                    if self.limin >= spare { spare } else { (255 * self.limin + spare) / 256 };
                if self.limin == 0 {
                    self.limin = spare;
                }
                self.timin = self.timin.saturating_add(1);
            }
            None => {
                self.limin = 0;
                self.timin = 0;
            }
        }
        self.min = self.items;
        self.trough = self.items;
        self.missed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_allocation_runs_count() {
        let mut e = Estimate::default();
        e.put(10_000);
        e.update();
        assert_eq!(e.wss(), 0, "a mass free is no working set");
        e.take(300);
        e.put(300);
        e.update();
        assert_eq!(e.wss(), 300);
    }

    #[test]
    fn the_working_set_decays_by_a_quarter_a_tick_and_reaches_zero() {
        let mut e = Estimate::default();
        e.put(1000);
        e.update();
        e.take(400);
        e.put(400);
        e.update();
        let mut last = e.wss();
        for _ in 0..40 {
            e.update();
            assert!(e.wss() <= last - last / 4);
            last = e.wss();
        }
        assert_eq!(last, 0);
    }

    #[test]
    fn the_time_since_the_zone_ran_out_is_counted_in_ticks() {
        let mut e = Estimate::default();
        e.put(100);
        e.update();
        let t = e.timin();
        for _ in 0..5 {
            e.update();
        }
        assert_eq!(e.timin(), t + 5);
        assert!(e.limin() > 0);
        e.take(100);
        e.miss();
        e.update();
        assert_eq!((e.timin(), e.limin()), (0, 0));
    }

    #[test]
    fn a_cache_that_is_too_small_grows_and_a_burst_from_an_empty_cache_does_not_count() {
        let mut e = Estimate::default();
        (0..1000).for_each(|_| e.miss());
        e.put(1000);
        e.update();
        assert_eq!(e.wss(), 0);
        e.reclaimed(900);
        for expected in [150, 225, 256] {
            let items = e.items();
            e.take(items);
            (items..256).for_each(|_| e.miss());
            e.put(256);
            e.update();
            assert_eq!(e.wss(), expected);
            e.reclaimed(256 - expected);
        }
    }

    #[test]
    fn reclaim_is_not_mistaken_for_use() {
        let mut e = Estimate::default();
        e.put(1000);
        e.update();
        e.reclaimed(900);
        e.update();
        assert_eq!((e.items(), e.wss()), (100, 0));
    }
}
