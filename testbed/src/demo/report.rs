//! The report of the two runs: the sheet of plots, a summary, and the verdict.
//!
//! Invariant: each figure comes from the samples and marks of its own run.

use std::fmt::Write as _;

use super::plot::{Curve, Panel, Sheet, number, terminal};
use super::{Course, Demo, MEMORY_MIB, Moment, SAMPLE, WORKING_SET_MIB, svg};
use crate::{Result, check};

/// Names of the runs.
const TITLES: [&str; 2] = ["elastic (the default)", "fixed size (min = max)"];
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

fn head() -> String {
    format!(
        "The cache of ebbd in a guest with {MEMORY_MIB} MiB, next to a program that takes memory"
    )
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

    /// The set-up in a line.
    fn note(&self) -> String {
        let takes = self.takes_mib;
        format!(
            "{WORKING_SET_MIB} MiB of a slow disk are read without end; a neighbour takes {takes} MiB."
        )
    }

    /// The SVG of the plots.
    #[must_use]
    pub fn svg(&self) -> String {
        svg::svg(&self.sheet(), &head(), &self.note())
    }

    /// The plots for a terminal, and the summary.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("{}\n{}\n\n{}\n", head(), self.note(), terminal(&self.sheet()));
        let mut line = |name: &str, [left, right]: [&str; 2]| {
            let _ = writeln!(text, "{name:32}{left:>22} {right:>22}");
        };
        line("", TITLES);
        let mut row = |name: &str, value: &dyn Fn(&Course) -> String| {
            let [left, right] = self.courses.each_ref().map(value);
            line(name, [&left, &right]);
        };
        row("cache before the neighbour", &|run| mib(run.before_kib()));
        row("  next to it, at least", &|run| mib(run.least_kib()));
        row("  at the end", &|run| mib(run.at(u64::MAX).cache_kib));
        row("reads found in the cache, before", &|run| run.hits(run.warm, run.comes));
        row("  while the neighbour is there", &|run| run.hits(run.comes, run.done));
        row("  in the last second", &|run| {
            let end = run.at(u64::MAX).ms;
            run.hits(end.saturating_sub(1000), end)
        });
        row("pages swapped out", &|run| number(run.swapped() as f64));
        row("the neighbour worked for", &|run| {
            format!("{} ms", number((run.worked_us / 1000) as f64))
        });
        text
    }

    /// The result, in two sentences.
    ///
    /// # Errors
    /// They do not show that the elastic cache shrinks and that only the fixed one makes the guest
    /// swap.
    pub fn verdict(&self) -> Result<String> {
        let [elastic, fixed] = &self.courses;
        for (run, which) in self.courses.iter().zip(["elastic", "fixed"]) {
            let (held, all) = (run.before_kib(), u64::from(WORKING_SET_MIB) << 10);
            check(held * 10 >= all * 9, || {
                format!(
                    "the {which} cache held only {} of {} when the neighbour came",
                    mib(held),
                    mib(all)
                )
            })?;
        }
        let (before, least) = (elastic.before_kib(), elastic.least_kib());
        check(least * 3 <= before * 2, || {
            let (before, least) = (mib(before), mib(least));
            format!(
                "the elastic cache did not shrink: {before} before, {least} next to the neighbour"
            )
        })?;
        let (full, kept) = (fixed.before_kib(), fixed.least_kib());
        check(kept * 20 >= full * 19, || {
            format!("the fixed cache shrank from {} to {}", mib(full), mib(kept))
        })?;
        let [out, out_fixed] =
            [elastic.swapped(), fixed.swapped()].map(|pages| number(pages as f64));
        check(fixed.swapped() >= SWAPPING, || {
            format!(
                "the guest had memory to spare: it swapped out {out_fixed} pages with the fixed cache"
            )
        })?;
        check(elastic.swapped() * 100 <= fixed.swapped(), || {
            format!(
                "the guest swapped out {out} pages with the elastic cache, {out_fixed} with the fixed one"
            )
        })?;
        Ok(format!(
            "The elastic cache shrank by {}, and the guest swapped out {out} pages.\n\
             With the cache of fixed size it swapped out {out_fixed}.",
            mib(before - least)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run whose cache holds `full` and then `least` MiB, and in which `out` pages are swapped
    /// out.
    fn course(full: u64, least: u64, out: u64) -> Course {
        let moment = |ms, cache_mib: u64, out| Moment {
            ms,
            cache_kib: cache_mib << 10,
            free_kib: 1000,
            out,
            hit: ms * 3,
            miss: ms,
        };
        // The kernel's counter does not begin at zero.
        let moments = vec![
            moment(0, 0, 5),
            moment(900, full, 5),
            moment(1200, least, 5),
            moment(2100, full, out + 5),
        ];
        Course { moments, warm: 500, comes: 1000, taken: 1500, done: 2000, worked_us: 1_234_567 }
    }

    fn demo(elastic: Course, fixed: Course) -> Demo {
        Demo { takes_mib: 110, courses: [elastic, fixed] }
    }

    #[test]
    fn verdict_has_the_figures_of_both_runs() {
        let text = demo(course(93, 30, 0), course(92, 92, 27_343)).verdict().unwrap();
        assert!(
            text.contains("shrank by 63 MiB") && text.contains("swapped out 0 pages"),
            "{text}"
        );
        assert!(text.contains("27,343"), "{text}");
    }

    #[test]
    fn verdict_fails_and_says_why() {
        let good = || (course(93, 30, 0), course(92, 92, 20_000));
        for (demo, why) in [
            (demo(course(93, 30, 201), good().1), "swapped out 201 pages"),
            (demo(course(93, 70, 0), good().1), "did not shrink: 93 MiB before, 70 MiB"),
            (demo(course(40, 10, 0), good().1), "the elastic cache held only 40 MiB"),
            (demo(good().0, course(40, 40, 20_000)), "the fixed cache held only 40 MiB"),
            (demo(good().0, course(92, 60, 20_000)), "the fixed cache shrank"),
            (demo(good().0, course(92, 92, 20)), "memory to spare"),
            (Demo::default(), "held only 0 MiB"),
        ] {
            let error = demo.verdict().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn summary_counts_from_the_start_of_the_run() {
        let text = demo(course(93, 30, 0), course(92, 92, 27_343)).text();
        let row = |name: &str| text.lines().find(|line| line.trim().starts_with(name)).unwrap();
        let swapped: Vec<&str> =
            text.lines().rfind(|line| line.starts_with("pages")).unwrap().split("  ").collect();
        assert_eq!(swapped.last().map(|word| word.trim()), Some("27,343"), "{text}");
        assert!(row("next to it").contains("30 MiB"), "{text}");
        assert!(row("reads found").contains("75 %"), "{text}");
        assert!(row("the neighbour worked").contains("1,234 ms"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn an_empty_demo_has_plots() {
        assert!(Demo::default().text().contains("pages swapped out"));
        assert!(Demo::default().svg().ends_with("</svg>\n"));
    }
}
