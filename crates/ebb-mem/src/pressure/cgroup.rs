//! The memory cgroup of this process, version 1 or 2.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::fs::OFlags;

use super::files::{OpenFile, Roots, SMALL, open, read};
use super::parse;
use super::psi::write_once;
use super::report::{SourceKind, SourceReport};
use super::signals::{Cgroup, Signals};
use super::source::{Source, SourceLost};

/// Largest age of the limits: an operator may change them at any time.
const LIMIT_AGE: Duration = Duration::from_secs(1);

/// A hierarchy, and the directory of this process's cgroup in it.
#[derive(Debug)]
pub(super) struct CgroupPlace {
    pub(super) mount: PathBuf,
    pub(super) own: PathBuf,
}

impl CgroupPlace {
    /// The path below `mount`; the mount itself where the path does not exist there (a container that sees
    /// its own cgroup as the root) or leads out of it.
    fn new(mount: PathBuf, path: &str) -> Self {
        let relative = Path::new(path.trim_start_matches('/'));
        let plain = relative.components().all(|part| matches!(part, Component::Normal(_)));
        let own = mount.join(relative);
        let below = plain && own != mount && own.is_dir();
        let own = if below { own } else { mount.clone() };
        Self { mount, own }
    }

    /// The cgroup's directory and those above it, up to the mount.
    pub(super) fn levels(&self) -> impl Iterator<Item = &Path> {
        self.own.ancestors().take_while(|dir| dir.starts_with(&self.mount))
    }

    pub(super) fn is_root(&self) -> bool {
        self.own == self.mount
    }
}

/// This process's cgroups in the unified hierarchy and in version 1's memory hierarchy.
pub(super) fn places(roots: &Roots) -> (Option<CgroupPlace>, Option<CgroupPlace>) {
    places_of(roots, "self")
}

/// As [`places`], of the process in the folder `process` of `/proc`.
fn places_of(roots: &Roots, process: &str) -> (Option<CgroupPlace>, Option<CgroupPlace>) {
    let Ok(text) = read(&roots.proc.join(process).join("cgroup"), SMALL) else {
        return (None, None);
    };
    let (unified, memory) = parse::own_cgroups(&text);
    let v2 = unified.and_then(|path| {
        [roots.cgroup.clone(), roots.cgroup.join("unified")]
            .into_iter()
            .find(|mount| mount.join("cgroup.controllers").exists())
            .map(|mount| CgroupPlace::new(mount, path))
    });
    let v1 = memory.and_then(|path| {
        let mount = roots.cgroup.join("memory");
        mount.join("memory.usage_in_bytes").exists().then(|| CgroupPlace::new(mount, path))
    });
    (v2, v1)
}

/// This process's cgroups of both versions and those above them; of each version, the lowest first.
pub(super) fn levels(roots: &Roots) -> Vec<(SourceKind, PathBuf)> {
    levels_of(roots, "self")
}

/// As [`levels`], of the process in the folder `process` of `/proc`.
pub(super) fn levels_of(roots: &Roots, process: &str) -> Vec<(SourceKind, PathBuf)> {
    let (v2, v1) = places_of(roots, process);
    let list = |kind, place: Option<CgroupPlace>| {
        place
            .map(|place| place.levels().map(|dir| (kind, dir.to_path_buf())).collect::<Vec<_>>())
            .unwrap_or_default()
    };
    let mut all = list(SourceKind::CgroupV2, v2);
    all.extend(list(SourceKind::CgroupV1, v1));
    all
}

/// A figure in a small file; `None` if it is missing or cannot be parsed.
pub(super) fn figure(path: &Path) -> Option<u64> {
    parse::size(&read(path, SMALL).ok()?)
}

/// The file names of one version.
pub(super) struct Names {
    pub(super) used: &'static str,
    limits: &'static [&'static str],
    /// Counters of reached limits: `key value` lines in version 2, one figure in version 1.
    events: &'static str,
    /// The keys of active and inactive page cache in `memory.stat`. Without `total_`, version 1's
    /// figures exclude child groups.
    file_pages: [&'static str; 2],
}

const V2: Names = Names {
    used: "memory.current",
    limits: &["memory.high", "memory.max"],
    events: "memory.events",
    file_pages: ["active_file", "inactive_file"],
};

const V1: Names = Names {
    used: "memory.usage_in_bytes",
    limits: &["memory.limit_in_bytes"],
    events: "memory.failcnt",
    file_pages: ["total_active_file", "total_inactive_file"],
};

impl Names {
    pub(super) fn of(kind: SourceKind) -> &'static Self {
        if kind == SourceKind::CgroupV1 { &V1 } else { &V2 }
    }

    /// The lowest limit set in this directory, in bytes.
    pub(super) fn limit(&self, dir: &Path) -> Option<u64> {
        self.limit_and_file(dir).map(|(limit, _)| limit)
    }

    /// As [`Names::limit`], with the name of its file.
    pub(super) fn limit_and_file(&self, dir: &Path) -> Option<(u64, &'static str)> {
        self.limits
            .iter()
            .filter_map(|name| Some((figure(&dir.join(name))?, *name)))
            .filter(|(limit, _)| *limit != u64::MAX)
            .min()
    }

    /// Page cache and slab that the kernel can reclaim, from `memory.stat`, bytes; lent pages are
    /// part of it. Version 1 does not tell slab.
    pub(super) fn reclaimable(&self, stat: &str) -> Option<u64> {
        let [active, inactive] = self.file_pages;
        let inactive = parse::flat(stat, inactive)?;
        let others = [active, "slab_reclaimable"].map(|key| parse::flat(stat, key).unwrap_or(0));
        Some(others.into_iter().fold(inactive, u64::saturating_add))
    }

    pub(super) fn used(&self, dir: &Path) -> Option<u64> {
        figure(&dir.join(self.used))
    }
}

/// The limits that are set, in bytes.
#[derive(Clone, Copy, Default)]
struct GroupLimits {
    lowest: Option<u64>,
    hard: Option<u64>,
}

/// The files of one cgroup: usage, limits, and counters of reached limits.
pub(super) struct CgroupFiles {
    kind: SourceKind,
    dir: PathBuf,
    used: Option<OpenFile>,
    /// With each, whether it is a hard limit.
    limits: Vec<(OpenFile, bool)>,
    limit: Option<(Instant, GroupLimits)>,
    /// Version 2: `memory.events`, which also wakes. Version 1: `memory.failcnt`.
    events: Option<OpenFile>,
    /// Version 1: `memory.oom_control`.
    oom: Option<OpenFile>,
    /// `memory.stat`, read only where much of the limit is in use: the kernel adds it up when it is
    /// read.
    stat: Option<OpenFile>,
    counted: Option<(u64, u64)>,
}

impl CgroupFiles {
    /// Watches the directory with the lowest limit, which is reached first; without any limit, the
    /// process's own.
    pub(super) fn probe(
        kind: SourceKind,
        place: &CgroupPlace,
        report: &mut SourceReport,
    ) -> Option<Self> {
        let names = Names::of(kind);
        let bound = place
            .levels()
            .filter_map(|dir| names.limit(dir).map(|limit| (limit, dir)))
            .min_by_key(|(limit, _)| *limit);
        let dir = bound.map_or(place.own.as_path(), |(_, dir)| dir);
        let watch = |name: &str| OpenFile::open(&dir.join(name)).ok();
        let files = Self {
            kind,
            dir: dir.to_path_buf(),
            used: watch(names.used),
            limits: names
                .limits
                .iter()
                .filter_map(|name| Some((watch(name)?, *name != "memory.high")))
                .collect(),
            limit: None,
            events: watch(names.events),
            oom: if kind == SourceKind::CgroupV1 { watch("memory.oom_control") } else { None },
            stat: watch("memory.stat"),
            counted: None,
        };
        if files.used.is_none() && files.events.is_none() {
            let detail = "no memory controller here".to_owned();
            report.missing(kind, Some(files.dir), detail);
            return None;
        }
        let detail = match bound {
            Some((limit, _)) => format!("limit {} KiB", limit / 1024),
            None => "no limit set".to_owned(),
        };
        report.found(kind, Some(files.dir.clone()), detail);
        Some(files)
    }

    fn limit(&mut self, now: Instant) -> Result<GroupLimits, SourceLost> {
        if let Some((at, limit)) = self.limit
            && now.duration_since(at) < LIMIT_AGE
        {
            return Ok(limit);
        }
        let mut found = GroupLimits::default();
        for (file, hard) in &mut self.limits {
            let value = parse::size(read_text(file)?).filter(|value| *value != u64::MAX);
            found.lowest = found.lowest.into_iter().chain(value).min();
            if *hard {
                found.hard = value;
            }
        }
        self.limit = Some((now, found));
        Ok(found)
    }

    /// Counters since the cgroup was created: how often a limit was reached, and out-of-memory events.
    fn counters(&mut self) -> Result<Option<(u64, u64)>, SourceLost> {
        let Some(file) = &mut self.events else {
            return Ok(None);
        };
        let text = read_text(file)?;
        if self.kind == SourceKind::CgroupV1 {
            return Ok(parse::size(text).map(|count| (count, 0)));
        }
        let met = |key| parse::flat(text, key);
        let reclaims = match (met("high"), met("max")) {
            (None, None) => return Ok(None),
            (high, max) => high.unwrap_or(0).saturating_add(max.unwrap_or(0)),
        };
        Ok(Some((reclaims, parse::flat(text, "oom").unwrap_or(0))))
    }
}

fn read_text(file: &mut OpenFile) -> Result<&str, SourceLost> {
    file.read_text().map_err(|error| SourceLost(error.to_string()))
}

impl Source for CgroupFiles {
    fn kind(&self) -> SourceKind {
        self.kind
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.dir)
    }

    fn wait(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        // Reading the file clears the event. The kernel always sets POLLERR with it.
        let events = self.events.as_ref().filter(|_| self.kind == SourceKind::CgroupV2)?;
        Some((events.fd(), PollFlags::PRI))
    }

    fn sample(&mut self, now: Instant, _: bool, s: &mut Signals) -> Result<(), SourceLost> {
        let limits = self.limit(now)?;
        let limit = limits.lowest;
        let used = match &mut self.used {
            Some(file) => parse::size(read_text(file)?),
            None => None,
        };
        let mut cgroup = Cgroup { used, limit, ..Cgroup::default() };
        if let (Some(used), Some(limit), Some(file)) = (used, limit, &mut self.stat) {
            let cache = if used >= limit / 4 * 3 {
                file.read_text().ok().and_then(|text| Names::of(self.kind).reclaimable(text))
            } else {
                Some(0)
            };
            let left = |limit: u64, cache| limit.saturating_sub(used.saturating_sub(cache));
            cgroup.available = cache.map(|cache| left(limit, cache));
            if limits.hard != Some(limit) {
                let to_max = |cache| limits.hard.map_or(u64::MAX, |hard| left(hard, cache));
                cgroup.available_to_max = cache.map(to_max);
            }
        }
        if let Some((reclaims, oom)) = self.counters()? {
            if let Some((reclaims_before, oom_before)) = self.counted {
                cgroup.reclaims = reclaims.saturating_sub(reclaims_before);
                cgroup.out_of_memory = oom.saturating_sub(oom_before);
            }
            self.counted = Some((reclaims, oom));
        }
        if let Some(file) = &mut self.oom {
            cgroup.under_oom = parse::flat(read_text(file)?, "under_oom").is_some_and(|v| v != 0);
        }
        s.cgroup = Some(cgroup);
        Ok(())
    }
}

/// Version 1's pressure notification at level `medium`: the kernel swaps or evicts active pages.
pub(super) struct V1Pressure {
    event: OwnedFd,
    /// Kept open, as the kernel's documentation requires.
    _level: OwnedFd,
    dir: PathBuf,
}

impl V1Pressure {
    pub(super) fn arm(dir: &Path) -> io::Result<Self> {
        let level = open(&dir.join("memory.pressure_level"), OFlags::RDONLY)?;
        let control = open(&dir.join("cgroup.event_control"), OFlags::WRONLY)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let request = format!("{} {} medium", event.as_raw_fd(), level.as_raw_fd());
        write_once(control.as_fd(), request.as_bytes())?;
        Ok(Self { event, _level: level, dir: dir.to_path_buf() })
    }
}

impl Source for V1Pressure {
    fn kind(&self) -> SourceKind {
        SourceKind::CgroupV1Pressure
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.dir)
    }

    fn wait(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        Some((self.event.as_fd(), PollFlags::IN))
    }

    fn ready(&mut self, _: PollFlags, _: Instant, s: &mut Signals) -> Result<(), SourceLost> {
        let mut count = [0; 8];
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.event, &mut count)) {
            Ok(_) => s.notices = s.notices.saturating_add(1),
            Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(SourceLost(error.to_string())),
        }
        // Removing the cgroup signals once more.
        if self.dir.exists() { Ok(()) } else { Err(SourceLost("the cgroup was removed".into())) }
    }
}
