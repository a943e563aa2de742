//! What the two runs of the demo show: the sheet of plots, a summary, and the verdict.

use std::fmt::Write as _;

use super::plot::{Curve, Panel, Sheet, number, terminal};
use super::{Course, Demo, MEMORY_MIB, Moment, SAMPLE, WORKING_SET_MIB, svg};
use crate::{Result, check};

/// What the runs are called.
const TITLES: [&str; 2] = ["ebbd's elastic cache", "a cache of fixed size"];
/// Fewer pages than this are not swapping: then the guest had memory to spare.
const SWAPPING: u64 = 1000;

impl Course {
    /// The last sample at or before `ms`, or else the first one.
    fn at(&self, ms: u64) -> Moment {
        let earlier = self.moments.iter().rfind(|moment| moment.ms <= ms);
        earlier.or(self.moments.first()).copied().unwrap_or_default()
    }

    /// KiB in the cache before the neighbour comes.
    fn before_kib(&self) -> u64 {
        self.at(self.comes).cache_kib
    }

    /// The fewest KiB in the cache while the neighbour is there.
    fn least_kib(&self) -> u64 {
        let beside = self.moments.iter().filter(|m| (self.comes..=self.done).contains(&m.ms));
        beside.map(|moment| moment.cache_kib).min().unwrap_or_default()
    }

    /// Pages swapped out.
    fn swapped(&self) -> u64 {
        self.at(u64::MAX).out.saturating_sub(self.at(0).out)
    }

    /// Seconds from the neighbour's start to its end.
    fn neighbour_seconds(&self) -> f64 {
        self.done.saturating_sub(self.comes) as f64 / 1000.0
    }

    /// Part of the bytes read between two moments that the cache had, such as `98 %`.
    fn hits(&self, from: u64, to: u64) -> String {
        let (before, after) = (self.at(from), self.at(to));
        let hit = after.hit.saturating_sub(before.hit);
        let all = hit + after.miss.saturating_sub(before.miss);
        (hit * 100).checked_div(all).map_or("-".to_owned(), |percent| format!("{percent} %"))
    }

    fn curve(&self, value: impl Fn(&Moment) -> f64) -> Curve {
        self.moments.iter().map(|moment| (moment.ms as f64 / 1000.0, value(moment))).collect()
    }
}

fn mib(kib: u64) -> String {
    format!("{} MiB", number((kib as f64 / 1024.0).round()))
}

impl Demo {
    /// The plots of both runs.
    #[must_use]
    pub fn sheet(&self) -> Sheet {
        let panel = |title, value: fn(&Course, &Moment) -> f64| Panel {
            title,
            curves: self.courses.each_ref().map(|run| run.curve(|moment| value(run, moment))),
        };
        let seconds = |ms: u64| ms as f64 / 1000.0;
        Sheet {
            titles: TITLES,
            visits: self.courses.each_ref().map(|run| (seconds(run.comes), seconds(run.done))),
            panels: vec![
                panel("cache, MiB", |_, moment| moment.cache_kib as f64 / 1024.0),
                panel("free memory, MiB", |_, moment| moment.free_kib as f64 / 1024.0),
                panel("pages swapped out", |run, moment| {
                    moment.out.saturating_sub(run.at(0).out) as f64
                }),
            ],
            // Two samples that are missing.
            gap: 3.0 * SAMPLE.as_secs_f64(),
        }
    }

    /// The SVG of the plots.
    #[must_use]
    pub fn svg(&self) -> String {
        let [takes, _] = self.courses.each_ref().map(|run| run.takes_mib);
        let note = format!(
            "A guest with {MEMORY_MIB} MiB; {WORKING_SET_MIB} MiB of its disk are read without end. The neighbour \
             takes {takes} MiB, uses them, and ends."
        );
        svg::svg(&self.sheet(), "A cache beside a program that needs its memory", &note)
    }

    /// The plots for a terminal, and the summary.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = terminal(&self.sheet()) + "\n";
        let mut line = |name: &str, [left, right]: [&str; 2]| {
            let _ = writeln!(text, "{name:32}{left:>22} {right:>22}");
        };
        line("", TITLES);
        let mut row = |name: &str, value: &dyn Fn(&Course) -> String| {
            let [left, right] = self.courses.each_ref().map(value);
            line(name, [&left, &right]);
        };
        row("cache before the neighbour", &|run| mib(run.before_kib()));
        row("  beside it, at least", &|run| mib(run.least_kib()));
        row("  at the end", &|run| mib(run.at(u64::MAX).cache_kib));
        row("reads found in the cache, before", &|run| run.hits(run.warm, run.comes));
        row("  beside the neighbour", &|run| run.hits(run.comes, run.done));
        row("  in the last second", &|run| {
            let end = run.at(u64::MAX).ms;
            run.hits(end.saturating_sub(1000), end)
        });
        row("pages swapped out", &|run| number(run.swapped() as f64));
        row("the neighbour took", &|run| format!("{:.2} s", run.neighbour_seconds()));
        text
    }

    /// What the runs show, in a sentence.
    ///
    /// # Errors
    /// They do not show that the elastic cache shrinks and that only the fixed one makes the guest swap.
    pub fn verdict(&self) -> Result<String> {
        let [elastic, fixed] = &self.courses;
        for (run, title) in self.courses.iter().zip(TITLES) {
            let (held, all) = (run.before_kib(), u64::from(WORKING_SET_MIB) << 10);
            check(held * 10 >= all * 9, || {
                format!("{title} held only {} when the neighbour came, not {}", mib(held), mib(all))
            })?;
        }
        let (before, least) = (elastic.before_kib(), elastic.least_kib());
        check(least * 3 <= before * 2, || {
            format!(
                "{} did not shrink: {} before, {} beside the neighbour",
                TITLES[0],
                mib(before),
                mib(least)
            )
        })?;
        let (kept_before, kept) = (fixed.before_kib(), fixed.least_kib());
        check(kept * 20 >= kept_before * 19, || {
            format!("{} shrank from {} to {}", TITLES[1], mib(kept_before), mib(kept))
        })?;
        let [out, out_fixed] =
            [elastic.swapped(), fixed.swapped()].map(|pages| number(pages as f64));
        check(fixed.swapped() >= SWAPPING, || {
            format!("the guest had memory to spare: {out_fixed} pages swapped beside {}", TITLES[1])
        })?;
        check(elastic.swapped() * 100 <= fixed.swapped(), || {
            format!(
                "the guest swapped {out} pages beside {}, {out_fixed} beside {}",
                TITLES[0], TITLES[1]
            )
        })?;
        Ok(format!(
            "The elastic cache gave {} to the neighbour, and the guest swapped {out} pages; beside a cache \
             of fixed size it swapped {out_fixed}.",
            mib(before - least)
        ))
    }
}
