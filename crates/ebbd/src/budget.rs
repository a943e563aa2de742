//! The budget of a daemon under a memory limit: how much of the limit I/O memory may have, and the
//! least limit for a number of volumes and clients.
//!
//! The kernel kills at the limit of a control group, whatever the memory is used for. So I/O memory
//! gets what the limit leaves when everything else has its part: the program, its workers, the
//! structures of volumes and clients, rings and socket buffers in the kernel, and a margin. The
//! parts are bounds of figures that were measured under load (`testbed/tests/it/small_group.rs`), and
//! not averages.
//!
//! # Invariants
//! - The ceiling and everything else are never more than the limit less a margin: no smallest value
//!   overrides that. Where too little is left, there is no ceiling but an error.
//! - They are no more than half of the limit either, unless the ceiling would be less than a
//!   quarter of it: neighbours in the group, page cache and lent memory have the other half.

use std::borrow::Cow;

use ebb_advice::Advice;
use ebb_luks::KeyRoom;
use ebb_mem::pressure::{GroupRoom, Limit, LimitSource, Roots, group_room};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The program: its heap and its threads, those pages of its file that it uses all the time, and
/// the broker.
const BASE: u64 = 14 * MIB;
/// A worker: its thread, and its ring in the kernel.
const WORKER: u64 = MIB;
/// A volume: its structures with those of its cache, its open file, and a guest that is connected
/// to it.
const VOLUME: u64 = 112 * KIB;
/// A client: its connection and tasks, and its socket with replies that it has not received yet.
const CLIENT: u64 = 64 * KIB;

/// The least ceiling: I/O memory that is enough for one large request at a time, and a part for
/// each volume and client, so that none of them has to wait for another one for ever.
const LEAST: u64 = 6 * MIB;
const LEAST_VOLUME: u64 = 32 * KIB;
const LEAST_CLIENT: u64 = 8 * KIB;

/// The margin below a limit is one part in `MARGIN` of it, within these bounds.
const MARGIN: u64 = 8;
const MARGIN_LEAST: u64 = 2 * MIB;
const MARGIN_MOST: u64 = 256 * MIB;

/// The ceiling if no limit of the host is known, and the largest one, bytes.
const CEILING_UNKNOWN: u64 = 1 << 30;
const CEILING_MOST: u64 = 1 << 40;
/// The least ceiling of a program that is not a daemon, bytes: it holds a few requests of 1 MiB.
const TOOL_LEAST: u64 = 8 * MIB;

/// The ceiling falls while less than one part in `LEFT` of a limit is left, within the bounds of
/// the margin: at the limit the kernel discards the program's own pages, and a response comes too
/// late.
const LEFT: u64 = 4;

/// Number of volumes that can still be added while the most clients are connected.
const SPARE_VOLUMES: usize = 4;

/// The part of a limit that nothing may use.
fn margin(limit: u64) -> u64 {
    (limit / MARGIN).clamp(MARGIN_LEAST, MARGIN_MOST)
}

/// Makes derivations of keys wait, or fail, while the control group has too little memory.
pub fn limit_key_memory() {
    ebb_luks::limit_memory(key_room);
}

/// The memory that derivations of keys may use: the rest of the control group's limit, less the
/// margin. Reads files.
fn key_room() -> Option<KeyRoom> {
    let GroupRoom { left, limit } = group_room(&Roots::default())?;
    let bytes = left.saturating_sub(margin(limit.bytes));
    let setting = limit.source.setting().unwrap_or("MemoryMax");
    Some(KeyRoom { bytes, setting, margin: MARGIN })
}

/// The number of parts of a daemon that need memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DaemonLoad {
    pub(crate) workers: usize,
    pub(crate) volumes: usize,
    pub(crate) clients: usize,
}

fn times(count: usize, each: u64) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX).saturating_mul(each)
}

impl DaemonLoad {
    /// The load for which a group must have memory before `volumes` are served: without a client
    /// each they would be of no use.
    pub(crate) fn of_volumes(workers: usize, volumes: usize, clients: usize) -> DaemonLoad {
        DaemonLoad { workers, volumes, clients: clients.max(volumes) }
    }

    /// Bytes that everything except I/O memory uses at most.
    fn outside(self) -> u64 {
        let of = times(self.workers, WORKER).saturating_add(times(self.volumes, VOLUME));
        of.saturating_add(times(self.clients, CLIENT)).saturating_add(BASE)
    }

    /// The least ceiling of I/O memory, bytes.
    pub(crate) fn least_ceiling(self) -> u64 {
        let parts = times(self.volumes, LEAST_VOLUME);
        parts.saturating_add(times(self.clients, LEAST_CLIENT)).saturating_add(LEAST)
    }

    /// The ceiling of I/O memory under `limit`, bytes; `None` if it would be too low.
    pub(crate) fn ceiling(self, limit: u64) -> Option<u64> {
        let left = limit.saturating_sub(margin(limit)).saturating_sub(self.outside());
        let half = (limit / 2).saturating_sub(self.outside());
        let ceiling = half.max(limit / 4).min(left).min(CEILING_MOST);
        let least = self.least_ceiling();
        (least <= left).then_some(ceiling.max(least))
    }

    /// The least limit, bytes, in whole MiB.
    pub(crate) fn needed(self) -> u64 {
        let sum = self.outside().saturating_add(self.least_ceiling());
        let share = sum.saturating_add(sum / (MARGIN - 1)).saturating_add(1);
        let margin = sum.saturating_add(MARGIN_LEAST);
        share.min(sum.saturating_add(MARGIN_MOST)).max(margin).div_ceil(MIB) * MIB
    }

    /// The largest number of clients under `limit`, the other parts being what they are. It leaves
    /// room for some more volumes, except where each volume would have less than one client.
    pub(crate) fn most_clients(self, limit: u64) -> usize {
        let beside = |volumes| {
            let none = DaemonLoad { clients: 0, volumes, ..self };
            let left = limit.saturating_sub(margin(limit));
            let left = left.saturating_sub(none.outside()).saturating_sub(none.least_ceiling());
            usize::try_from(left / (CLIENT + LEAST_CLIENT)).unwrap_or(usize::MAX)
        };
        let with_spare = beside(self.volumes.saturating_add(SPARE_VOLUMES));
        with_spare.max(beside(self.volumes).min(self.volumes))
    }

    /// The ceiling of I/O memory under the limit that applies, while groups are used so, bytes.
    /// Several groups, one within the other, may have limits.
    pub(crate) fn ceiling_now(self, limit: Option<&Limit>, groups: &[MemoryUse]) -> u64 {
        let least = self.least_ceiling();
        let own = |bytes| self.ceiling(bytes).unwrap_or(least.min(bytes / 4));
        let most = limit.map_or(CEILING_UNKNOWN, |limit| own(limit.bytes));
        let each = groups.iter().map(|group| group.ceiling(own(group.limit), least));
        each.fold(most, u64::min)
    }
}

/// A control group that is too small for a daemon.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot serve {volumes} volumes with memory for {clients} clients in {has} MiB ({limit}): {needed} MiB are needed"
)]
pub(crate) struct GroupTooSmall {
    volumes: usize,
    clients: usize,
    has: u64,
    needed: u64,
    limit: String,
    setting: &'static str,
}

impl Advice for GroupTooSmall {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let (setting, needed) = (self.setting, self.needed);
        let fewer = "serve fewer volumes (each has memory for a client or more)";
        Some(format!("raise {setting} to {needed}M or more, or {fewer}").into())
    }
}

/// The ceiling of the I/O memory of a daemon with this load under the limit that applies, bytes.
///
/// # Errors
/// If the limit is one of a control group, and too low.
pub(crate) fn ceiling(limit: Option<&Limit>, load: DaemonLoad) -> Result<u64, GroupTooSmall> {
    let Some(limit) = limit else { return Ok(CEILING_UNKNOWN) };
    match (load.ceiling(limit.bytes), &limit.source) {
        (Some(ceiling), _) => Ok(ceiling),
        (None, LimitSource::Cgroup { dir, file }) => Err(GroupTooSmall {
            volumes: load.volumes,
            clients: load.clients,
            has: limit.bytes / MIB,
            needed: load.needed() / MIB,
            limit: dir.join(file).display().to_string(),
            setting: limit.source.setting().unwrap_or("MemoryMax"),
        }),
        // The host's own parts are not known.
        (None, _) => Ok(limit.bytes / 4),
    }
}

/// The ceiling of a program that is not a daemon: it holds a few buffers, whatever the limit.
pub(crate) fn tool_ceiling(limit: Option<&Limit>) -> u64 {
    limit.map_or(CEILING_UNKNOWN, |limit| (limit.bytes / 2).clamp(TOOL_LEAST, CEILING_MOST))
}

/// Memory in use under a limit, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryUse {
    pub(crate) limit: u64,
    /// Memory that the limit leaves, where page cache and lent memory count as free.
    pub(crate) available: u64,
    /// Wired I/O memory of this daemon.
    pub(crate) wired: u64,
    /// Dirty data in it, which must be written before it can be freed.
    pub(crate) dirty: u64,
}

impl MemoryUse {
    /// The ceiling while other processes of the group, or parts of this one, use more than their
    /// part: what they leave, but at most `most`, and never less than dirty data and `least`.
    pub(crate) fn ceiling(self, most: u64, least: u64) -> u64 {
        let others = self.limit.saturating_sub(self.available).saturating_sub(self.wired);
        let free = (self.limit / LEFT).clamp(MARGIN_LEAST, MARGIN_MOST);
        let left = self.limit.saturating_sub(free).saturating_sub(others);
        left.max(self.dirty.saturating_add(least)).min(most)
    }
}

#[cfg(test)]
mod tests {
    use ebb_advice::Advised;

    use super::*;
    use proptest::prelude::*;

    fn load(volumes: usize, clients: usize) -> DaemonLoad {
        DaemonLoad { workers: 1, volumes, clients }
    }

    fn group(mib: u64, file: &'static str) -> Limit {
        Limit { bytes: mib * MIB, source: LimitSource::Cgroup { dir: "/g".into(), file } }
    }

    #[test]
    fn no_ceiling_overrides_its_limit() {
        // With 64 MiB, the former smallest ceiling was all of the group.
        for (mib, volumes, clients) in [(64, 100, 34), (64, 34, 34), (96, 100, 34), (40, 1, 1)] {
            let (limit, load) = (mib * MIB, load(volumes, clients));
            let ceiling = load.ceiling(limit).unwrap();
            let half = ceiling + load.outside() <= limit / 2;
            assert!(half || ceiling <= limit / 4, "{mib}");
            assert!(ceiling + load.outside() + margin(limit) <= limit, "{mib}");
        }
        assert_eq!(load(1, 0).ceiling(16 * MIB), None);
        assert_eq!(load(100, 34).ceiling(32 * MIB), None);
        let large = load(1, 0).ceiling(8 << 30).unwrap();
        assert_eq!(large, (4 << 30) - load(1, 0).outside(), "half of a large limit");
    }

    #[test]
    fn a_start_that_fails_names_the_size_and_the_limit() {
        let error = ceiling(Some(&group(16, "memory.max")), load(100, 0)).unwrap_err();
        let needed = load(100, 0).needed() / MIB;
        assert_eq!(
            error.to_string(),
            format!(
                "cannot serve 100 volumes with memory for 0 clients in 16 MiB (/g/memory.max): {needed} MiB are needed"
            )
        );
        let advice = |error: GroupTooSmall| Advised(error).to_string();
        assert!(advice(error).contains(&format!("raise MemoryMax to {needed}M")));
        let high = ceiling(Some(&group(16, "memory.high")), load(1, 0)).unwrap_err();
        assert!(advice(high).contains("raise MemoryHigh"));
        assert!(ceiling(Some(&group(needed, "memory.max")), load(100, 0)).is_ok());
        // A daemon starts on any host, with a part of its memory.
        let host = Limit { bytes: 16 * MIB, source: LimitSource::Ram };
        assert_eq!(ceiling(Some(&host), load(100, 0)), Ok(4 * MIB));
    }

    #[test]
    fn other_programs_do_not_demand_the_budget_of_a_daemon() {
        assert_eq!(tool_ceiling(Some(&group(16, "memory.max"))), 8 * MIB);
        assert_eq!(tool_ceiling(Some(&group(256, "memory.max"))), 128 * MIB);
    }

    #[test]
    fn clients_lower_the_ceiling_until_the_most_are_connected() {
        let limit = 64 * MIB;
        let most = load(10, 0).most_clients(limit);
        assert!(most > 100, "{most}");
        assert!(load(10, most).ceiling(limit).unwrap() < load(10, 0).ceiling(limit).unwrap());
        assert!(load(10 + SPARE_VOLUMES, most).ceiling(limit).is_some());
        assert_eq!(load(10 + SPARE_VOLUMES, most + 1).ceiling(limit), None);
    }

    #[test]
    fn the_needed_size_admits_a_client_for_each_volume() {
        for (volumes, mib) in [(1, 25), (100, 49)] {
            let load = DaemonLoad::of_volumes(1, volumes, 0);
            assert_eq!(load.needed(), mib * MIB, "the figures in docs/book/src/concepts/memory.md");
            assert!(load.most_clients(load.needed()) >= volumes, "{volumes}");
        }
        assert_eq!(DaemonLoad::of_volumes(1, 2, 5).clients, 5);
    }

    #[test]
    fn the_ceiling_follows_a_limit_that_is_raised_or_removed() {
        let load = load(1, 1);
        let at = |mib| load.ceiling_now(Some(&group(mib, "memory.max")), &[]);
        assert!(at(64) < at(256) && at(256) < at(8192));
        let host = Limit { bytes: 8 << 30, source: LimitSource::Ram };
        assert_eq!(load.ceiling_now(Some(&host), &[]), at(8192));
    }

    #[test]
    fn each_of_nested_groups_lowers_the_ceiling() {
        let load = load(1, 1);
        // The outer one has less left, the inner one allows less.
        let inner = MemoryUse { limit: 64 * MIB, available: 60 * MIB, ..MemoryUse::default() };
        let outer = MemoryUse { limit: 1 << 30, available: 50 * MIB, ..MemoryUse::default() };
        let limit = group(64, "memory.max");
        let both = load.ceiling_now(Some(&limit), &[inner, outer]);
        assert!(both <= load.ceiling(64 * MIB).unwrap(), "{both}");
        let full = MemoryUse { available: MIB, ..outer };
        assert_eq!(load.ceiling_now(Some(&limit), &[inner, full]), load.least_ceiling());
    }

    #[test]
    fn a_neighbour_lowers_the_ceiling_but_not_below_dirty_data() {
        let (limit, wired) = (64 * MIB, 20 * MIB);
        let now = |available, dirty| MemoryUse { limit, available, wired, dirty };
        // 20 MiB are wired, 16 MiB are used by everything else.
        assert_eq!(now(28 * MIB, 0).ceiling(28 * MIB, 6 * MIB), 28 * MIB);
        // A neighbour uses 20 MiB more: 36 MiB in all.
        assert_eq!(now(8 * MIB, 0).ceiling(28 * MIB, 6 * MIB), 12 * MIB);
        assert_eq!(now(0, 0).ceiling(28 * MIB, 6 * MIB), 6 * MIB);
        assert_eq!(now(0, 10 * MIB).ceiling(28 * MIB, 6 * MIB), 16 * MIB);
        assert_eq!(now(0, 60 * MIB).ceiling(28 * MIB, 6 * MIB), 28 * MIB);
    }

    proptest! {
        #[test]
        fn the_needed_size_is_enough_and_a_smaller_one_is_not(
            workers in 1_usize..64, volumes in 0_usize..20_000, clients in 0_usize..5_000,
        ) {
            let load = DaemonLoad { workers, volumes, clients };
            prop_assert!(load.ceiling(load.needed()).is_some());
            prop_assert_eq!(load.ceiling(load.needed() - 2 * MIB), None);
        }
    }
}
