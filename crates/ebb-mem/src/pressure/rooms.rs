//! Samples all memory that this process shares with other processes: the host's, and that of each control
//! group with a limit that contains this process. A group can be short of memory on a host that has plenty.
//!
//! A sample reads one open file for the host and two for each group with a limit, about 10 µs each. Groups
//! without a limit, or with one that is not below the host's memory, are left out. The groups and their
//! limits are read again every 100 samples.

use std::io;
use std::path::PathBuf;

use super::cgroup::{Names, levels};
use super::files::{OpenFile, Roots};
use super::host::{not_understood, total_and_available};
use super::parse;
use super::report::SourceKind;
use super::room::{HostMemoryReader, Room};

/// Limits are read again after this many samples, unless another number is set.
const LIMITS_EVERY: u32 = 100;
/// Largest number of groups sampled, from the process's own group upwards.
const GROUPS: usize = 8;
/// The kernel charges a group in batches of this many pages per processor (`MEMCG_CHARGE_BATCH`).
const BATCH_PAGES: u64 = 64;

/// Samples the host's memory and that of the control groups: see the module.
pub struct Rooms {
    roots: Roots,
    host: Option<HostMemoryReader>,
    groups: Vec<LimitedGroup>,
    behind: u64,
    limits_every: u32,
    /// Samples since the limits were read.
    samples: u32,
    /// Number of entries in the last sample.
    seen: usize,
}

/// A control group with a limit.
struct LimitedGroup {
    kind: SourceKind,
    dir: PathBuf,
    limit: u64,
    used: OpenFile,
    stat: OpenFile,
}

impl LimitedGroup {
    fn open(kind: SourceKind, dir: PathBuf, limit: u64) -> io::Result<LimitedGroup> {
        let used = OpenFile::open(&dir.join(Names::of(kind).used))?;
        let stat = OpenFile::open(&dir.join("memory.stat"))?;
        Ok(LimitedGroup { kind, dir, limit, used, stat })
    }

    /// What the group may still use, and what the kernel can reclaim from it without swapping: as for
    /// `MemAvailable`, active and inactive page cache. Lent pages are on the list of inactive file pages.
    fn room(&mut self, behind: u64) -> io::Result<Room> {
        let used = parse::size(self.used.read_text()?).ok_or_else(not_understood)?;
        let text = self.stat.read_text()?;
        let file = Names::of(self.kind).reclaimable(text).ok_or_else(not_understood)?;
        Ok(Room {
            total: self.limit,
            free: self.limit.saturating_sub(used),
            available: self.limit.saturating_sub(used.saturating_sub(file)),
            floor: 0,
            behind,
        })
    }
}

impl Rooms {
    /// Opens the files that exist. Where neither the host nor a group can be read, every sample is empty.
    #[must_use]
    pub fn open(roots: &Roots) -> Rooms {
        let page = u64::try_from(rustix::param::page_size()).unwrap_or(u64::MAX);
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let batches = u64::try_from(processors).unwrap_or(1).saturating_mul(BATCH_PAGES);
        let mut rooms = Rooms {
            roots: roots.clone(),
            host: HostMemoryReader::open(roots).ok(),
            groups: Vec::new(),
            behind: batches.saturating_mul(page),
            limits_every: LIMITS_EVERY,
            samples: 0,
            seen: 0,
        };
        rooms.read_limits();
        rooms
    }

    /// Reads the limits again after this many samples; the default is 100.
    #[must_use]
    pub fn reading_limits_every(mut self, samples: u32) -> Rooms {
        self.limits_every = samples;
        self
    }

    /// Replaces the content of `list` with a new sample, the host first. False if its entries are not those of
    /// the previous sample: then the figures must not be compared with it.
    pub fn now(&mut self, list: &mut Vec<Room>) -> bool {
        list.clear();
        self.samples += 1;
        let mut same = true;
        if self.samples >= self.limits_every {
            self.samples = 0;
            same = self.read_limits();
        }
        list.extend(self.host.as_mut().and_then(|host| host.now().ok()));
        let behind = self.behind;
        // A group that was removed or can no longer be read is searched again with the limits.
        self.groups.retain_mut(|group| match group.room(behind) {
            Ok(room) => {
                list.push(room);
                true
            }
            Err(_) => false,
        });
        same & (std::mem::replace(&mut self.seen, list.len()) == list.len())
    }

    /// As [`Rooms::now`], of the groups only.
    pub fn groups_now(&mut self, list: &mut Vec<Room>) {
        self.now(list);
        let hosts = list.len().saturating_sub(self.groups.len());
        list.drain(..hosts);
    }

    /// True if the groups with a limit are unchanged.
    fn read_limits(&mut self) -> bool {
        let most = total_and_available(&self.roots).map_or(u64::MAX, |(total, _)| total);
        let found: Vec<_> = levels(&self.roots)
            .into_iter()
            .filter_map(|(kind, dir)| Names::of(kind).limit(&dir).map(|limit| (kind, dir, limit)))
            .filter(|(_, _, limit)| *limit < most)
            .take(GROUPS)
            .collect();
        let now = found.iter().map(|(kind, dir, _)| (*kind, dir));
        if self.groups.iter().map(|group| (group.kind, &group.dir)).eq(now) {
            for (group, (_, _, limit)) in self.groups.iter_mut().zip(found) {
                group.limit = limit;
            }
            return true;
        }
        let open = |(kind, dir, limit)| LimitedGroup::open(kind, dir, limit).ok();
        self.groups = found.into_iter().filter_map(open).collect();
        false
    }
}

impl std::fmt::Debug for Rooms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let groups: Vec<_> = self.groups.iter().map(|group| (&group.dir, group.limit)).collect();
        f.debug_struct("Rooms").field("host", &self.host).field("groups", &groups).finish()
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    const MIB: u64 = 1 << 20;

    /// A host of 1 GiB with made-up files.
    struct FakeFiles {
        dir: tempfile::TempDir,
        roots: Roots,
    }

    impl FakeFiles {
        fn new(own: &str) -> FakeFiles {
            let dir = tempfile::tempdir().unwrap();
            let roots = Roots { proc: dir.path().join("proc"), cgroup: dir.path().join("cgroup") };
            let files = FakeFiles { dir, roots };
            files.put("proc/zoneinfo", "Node 0, zone DMA\n low 1\n high 2\n protection: (0)\n");
            files.host(800, 900);
            files.put("proc/self/cgroup", own);
            files
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn host(&self, free: u64, available: u64) {
            let (free, available) = (free << 10, available << 10);
            let text =
                format!("MemTotal: 1048576 kB\nMemFree: {free} kB\nMemAvailable: {available} kB\n");
            self.put("proc/meminfo", &text);
        }

        /// FakeFiles of version 2; sizes in MiB, but for the limits' text.
        fn group(&self, path: &str, [high, max]: [&str; 2], used: u64, [active, lent]: [u64; 2]) {
            let at = |name: &str| format!("cgroup/{path}{name}");
            self.put("cgroup/cgroup.controllers", "memory\n");
            self.put(&at("memory.high"), high);
            self.put(&at("memory.max"), max);
            self.put(&at("memory.current"), &format!("{}\n", used * MIB));
            let text = format!(
                "anon 1\nfile 2\ninactive_anon 3\nactive_anon 4\ninactive_file {}\nactive_file {}\n",
                lent * MIB,
                active * MIB
            );
            self.put(&at("memory.stat"), &text);
        }

        fn group_v1(&self, path: &str, limit: &str, used: u64, [active, lent]: [u64; 2]) {
            let at = |name: &str| format!("cgroup/memory/{path}{name}");
            self.put(&at("memory.limit_in_bytes"), limit);
            self.put(&at("memory.usage_in_bytes"), &format!("{}\n", used * MIB));
            let text = format!(
                "cache 1\ninactive_file 5\nactive_file 6\ntotal_inactive_file {}\ntotal_active_file {}\n",
                lent * MIB,
                active * MIB
            );
            self.put(&at("memory.stat"), &text);
        }
    }

    /// MiB: all of it, free, available.
    fn figures(rooms: &[Room]) -> Vec<[u64; 3]> {
        rooms.iter().map(|r| [r.total / MIB, r.free / MIB, r.available / MIB]).collect()
    }

    fn sample(rooms: &mut Rooms) -> (Vec<[u64; 3]>, bool) {
        let mut list = vec![Room::default(); 3];
        let same = rooms.now(&mut list);
        (figures(&list), same)
    }

    #[test]
    fn the_host_and_each_group_with_a_limit_are_sampled() {
        let files = FakeFiles::new("0::/a/b/c\n");
        files.group("a/b/c/", ["max", "256M"], 1, [0, 0]);
        files.group("a/b/c/", [&(128 * MIB).to_string(), "268435456"], 100, [10, 30]);
        files.group("a/b/", ["max", "max"], 300, [0, 0]);
        files.group("a/", ["max", &(512 * MIB).to_string()], 500, [20, 80]);
        let mut rooms = Rooms::open(&files.roots);
        let all = vec![[1024, 800, 900], [128, 28, 68], [512, 12, 112]];
        assert_eq!(sample(&mut rooms), (all.clone(), false), "there was no previous sample");
        assert_eq!(sample(&mut rooms), (all, true));
        // Another process in the upper group uses 12 MiB, above the limit: lent pages are discarded.
        files.group("a/", ["max", &(512 * MIB).to_string()], 516, [20, 76]);
        assert_eq!(sample(&mut rooms).0.last(), Some(&[512, 0, 92]));
        let mut list = Vec::new();
        rooms.now(&mut list);
        assert!(list.iter().all(|room| room.behind > 0), "{list:?}");
        assert_eq!(list.last().map(Room::headroom), Some(0));
    }

    #[test]
    fn groups_of_version_1_are_sampled_with_their_children() {
        let files = FakeFiles::new("4:memory:/a/b\n0::/\n");
        let no_limit = (i64::MAX as u64 / 4096 * 4096).to_string();
        files.group_v1("", &no_limit, 700, [0, 0]);
        files.group_v1("a/", &(256 * MIB).to_string(), 250, [5, 45]);
        files.group_v1("a/b/", &no_limit, 200, [5, 45]);
        let mut rooms = Rooms::open(&files.roots);
        assert_eq!(sample(&mut rooms).0, [[1024, 800, 900], [256, 6, 56]]);
    }

    #[test]
    fn limits_that_are_set_changed_and_removed_are_followed() {
        let files = FakeFiles::new("0::/a\n");
        let limit = |text: &str| files.group("a/", ["max", text], 100, [0, 50]);
        limit("max");
        let mut rooms = Rooms::open(&files.roots);
        let samples = |rooms: &mut Rooms| -> (Vec<[u64; 3]>, u32) {
            let mut others = 0;
            let last = (0..LIMITS_EVERY).map(|_| {
                let (list, same) = sample(rooms);
                others += u32::from(!same);
                list
            });
            (last.last().unwrap(), others)
        };
        assert_eq!(samples(&mut rooms), (vec![[1024, 800, 900]], 1));
        limit(&(200 * MIB).to_string());
        assert_eq!(samples(&mut rooms), (vec![[1024, 800, 900], [200, 100, 150]], 1));
        limit(&(160 * MIB).to_string());
        assert_eq!(samples(&mut rooms), (vec![[1024, 800, 900], [160, 60, 110]], 0));
        // A limit above the host's memory does not count.
        limit(&(2048 * MIB).to_string());
        assert_eq!(samples(&mut rooms), (vec![[1024, 800, 900]], 1));
        // The process is moved to another group.
        files.group("b/", ["max", &(300 * MIB).to_string()], 100, [0, 0]);
        files.put("proc/self/cgroup", "0::/b\n");
        assert_eq!(samples(&mut rooms), (vec![[1024, 800, 900], [300, 200, 200]], 1));
    }

    #[test]
    fn unreadable_groups_and_hosts_are_left_out() {
        let files = FakeFiles::new("0::/a\n");
        files.group("a/", ["max", &(200 * MIB).to_string()], 100, [0, 50]);
        let mut rooms = Rooms::open(&files.roots);
        assert_eq!(sample(&mut rooms).0.len(), 2);
        files.put("cgroup/a/memory.stat", "nothing known 1\n");
        assert_eq!(sample(&mut rooms), (vec![[1024, 800, 900]], false));
        assert_eq!(sample(&mut rooms), (vec![[1024, 800, 900]], true));
        files.put("proc/meminfo", "MemTotal: 1 GB\n");
        assert_eq!(sample(&mut rooms), (vec![], false));
        files.host(1, 2);
        assert_eq!(sample(&mut rooms), (vec![[1024, 1, 2]], false));
        // Groups are sampled even where the host's files cannot be parsed.
        let files = FakeFiles::new("0::/a\n");
        files.put("proc/zoneinfo", "");
        files.group("a/", ["18446744073709551615", "4096"], u64::MAX / MIB, [u64::MAX / MIB; 2]);
        let mut rooms = Rooms::open(&files.roots);
        assert_eq!(sample(&mut rooms).0, [[0, 0, 0]]);
        let nothing = Roots { proc: Path::new("/nowhere").into(), cgroup: "/nowhere".into() };
        assert_eq!(sample(&mut Rooms::open(&nothing)), (vec![], true));
    }
}
