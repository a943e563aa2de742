//! A look at all the memory that this process shares: the host's, and that of each control group with a
//! limit that it is in. A neighbour in one's own group may be short of memory on a host that has plenty.
//!
//! A look reads one open file for the host and two for each group with a limit, some 10 µs each. Groups that
//! have no limit, or one that is not below the host's memory, are left out. Limits, and which groups they are,
//! are read anew from time to time.

use std::io;
use std::path::PathBuf;

use super::cgroup::{Names, levels};
use super::files::{Roots, Watched};
use super::host::{not_understood, total_and_available};
use super::look::{HostLook, Room};
use super::parse;
use super::report::SourceKind;

/// Limits are read again after so many looks.
const LIMITS_EVERY: u32 = 100;
/// Groups that are looked at, from the own one upwards.
const GROUPS: usize = 8;
/// The kernel charges a group, and sums up what it holds, in so many pages for each processor.
const BATCH_PAGES: u64 = 64;

/// See the module.
pub struct Rooms {
    roots: Roots,
    host: Option<HostLook>,
    groups: Vec<Group>,
    behind: u64,
    /// Looks since the limits were read.
    looks: u32,
    /// Places seen at the last look.
    seen: usize,
}

/// A control group with a limit.
struct Group {
    kind: SourceKind,
    dir: PathBuf,
    limit: u64,
    used: Watched,
    stat: Watched,
}

impl Group {
    fn open(kind: SourceKind, dir: PathBuf, limit: u64) -> io::Result<Group> {
        let used = Watched::open(&dir.join(Names::of(kind).used))?;
        let stat = Watched::open(&dir.join("memory.stat"))?;
        Ok(Group { kind, dir, limit, used, stat })
    }

    /// What the group may use more, and what of its own the kernel can take without swapping: as for
    /// `MemAvailable`, the page cache whether in use or not. Lent pages are on the list of inactive file pages.
    fn room(&mut self, behind: u64) -> io::Result<Room> {
        let used = parse::size(self.used.look()?).ok_or_else(not_understood)?;
        let text = self.stat.look()?;
        let [active, inactive] = match self.kind {
            // Version 1 has figures without those of groups below, too.
            SourceKind::CgroupV1 => ["total_active_file", "total_inactive_file"],
            _ => ["active_file", "inactive_file"],
        };
        let inactive = parse::flat(text, inactive).ok_or_else(not_understood)?;
        let file = inactive.saturating_add(parse::flat(text, active).unwrap_or(0));
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
    /// Opens what there is. Where neither the host nor a group says anything, each look finds nothing.
    #[must_use]
    pub fn open(roots: &Roots) -> Rooms {
        let page = u64::try_from(rustix::param::page_size()).unwrap_or(u64::MAX);
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let batches = u64::try_from(processors).unwrap_or(1).saturating_mul(BATCH_PAGES);
        let mut rooms = Rooms {
            roots: roots.clone(),
            host: HostLook::open(roots).ok(),
            groups: Vec::new(),
            behind: batches.saturating_mul(page),
            looks: 0,
            seen: 0,
        };
        rooms.read_limits();
        rooms
    }

    /// Puts what there is now into `list`, the host first, in place of what is in it. False if the places are not
    /// those of the look before: then figures must not be compared with those before.
    pub fn now(&mut self, list: &mut Vec<Room>) -> bool {
        list.clear();
        self.looks += 1;
        let mut same = true;
        if self.looks >= LIMITS_EVERY {
            self.looks = 0;
            same = self.read_limits();
        }
        list.extend(self.host.as_mut().and_then(|host| host.now().ok()));
        let behind = self.behind;
        // A group that has gone, or says nothing any more, is looked for again with the limits.
        self.groups.retain_mut(|group| match group.room(behind) {
            Ok(room) => {
                list.push(room);
                true
            }
            Err(_) => false,
        });
        same & (std::mem::replace(&mut self.seen, list.len()) == list.len())
    }

    /// True if the groups with a limit are those that they were.
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
        let open = |(kind, dir, limit)| Group::open(kind, dir, limit).ok();
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
    struct Files {
        dir: tempfile::TempDir,
        roots: Roots,
    }

    impl Files {
        fn new(own: &str) -> Files {
            let dir = tempfile::tempdir().unwrap();
            let roots = Roots { proc: dir.path().join("proc"), cgroup: dir.path().join("cgroup") };
            let files = Files { dir, roots };
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

        /// Files of version 2; sizes in MiB, but for the limits' text.
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

    fn look(rooms: &mut Rooms) -> (Vec<[u64; 3]>, bool) {
        let mut list = vec![Room::default(); 3];
        let same = rooms.now(&mut list);
        (figures(&list), same)
    }

    #[test]
    fn each_group_with_a_limit_is_looked_at_beside_the_host() {
        let files = Files::new("0::/a/b/c\n");
        files.group("a/b/c/", ["max", "256M"], 1, [0, 0]);
        files.group("a/b/c/", [&(128 * MIB).to_string(), "268435456"], 100, [10, 30]);
        files.group("a/b/", ["max", "max"], 300, [0, 0]);
        files.group("a/", ["max", &(512 * MIB).to_string()], 500, [20, 80]);
        let mut rooms = Rooms::open(&files.roots);
        let all = vec![[1024, 800, 900], [128, 28, 68], [512, 12, 112]];
        assert_eq!(look(&mut rooms), (all.clone(), false), "there was none before");
        assert_eq!(look(&mut rooms), (all, true));
        // A neighbour in the upper group takes 12 MiB, and more than its limit: lent pages go.
        files.group("a/", ["max", &(512 * MIB).to_string()], 516, [20, 76]);
        assert_eq!(look(&mut rooms).0.last(), Some(&[512, 0, 92]));
        let mut list = Vec::new();
        rooms.now(&mut list);
        assert!(list.iter().all(|room| room.behind > 0), "{list:?}");
        assert_eq!(list.last().map(Room::headroom), Some(0));
    }

    #[test]
    fn groups_of_version_1_are_looked_at_with_all_below_them() {
        let files = Files::new("4:memory:/a/b\n0::/\n");
        let no_limit = (i64::MAX as u64 / 4096 * 4096).to_string();
        files.group_v1("", &no_limit, 700, [0, 0]);
        files.group_v1("a/", &(256 * MIB).to_string(), 250, [5, 45]);
        files.group_v1("a/b/", &no_limit, 200, [5, 45]);
        let mut rooms = Rooms::open(&files.roots);
        assert_eq!(look(&mut rooms).0, [[1024, 800, 900], [256, 6, 56]]);
    }

    #[test]
    fn limits_that_come_change_and_go_are_followed() {
        let files = Files::new("0::/a\n");
        let limit = |text: &str| files.group("a/", ["max", text], 100, [0, 50]);
        limit("max");
        let mut rooms = Rooms::open(&files.roots);
        let looks = |rooms: &mut Rooms| -> (Vec<[u64; 3]>, u32) {
            let mut others = 0;
            let last = (0..LIMITS_EVERY).map(|_| {
                let (list, same) = look(rooms);
                others += u32::from(!same);
                list
            });
            (last.last().unwrap(), others)
        };
        assert_eq!(looks(&mut rooms), (vec![[1024, 800, 900]], 1));
        limit(&(200 * MIB).to_string());
        assert_eq!(looks(&mut rooms), (vec![[1024, 800, 900], [200, 100, 150]], 1));
        limit(&(160 * MIB).to_string());
        assert_eq!(looks(&mut rooms), (vec![[1024, 800, 900], [160, 60, 110]], 0));
        // A limit beyond the host's memory is none.
        limit(&(2048 * MIB).to_string());
        assert_eq!(looks(&mut rooms), (vec![[1024, 800, 900]], 1));
        // It is moved to another group.
        files.group("b/", ["max", &(300 * MIB).to_string()], 100, [0, 0]);
        files.put("proc/self/cgroup", "0::/b\n");
        assert_eq!(looks(&mut rooms), (vec![[1024, 800, 900], [300, 200, 200]], 1));
    }

    #[test]
    fn what_says_nothing_or_nonsense_is_left_out() {
        let files = Files::new("0::/a\n");
        files.group("a/", ["max", &(200 * MIB).to_string()], 100, [0, 50]);
        let mut rooms = Rooms::open(&files.roots);
        assert_eq!(look(&mut rooms).0.len(), 2);
        files.put("cgroup/a/memory.stat", "nothing known 1\n");
        assert_eq!(look(&mut rooms), (vec![[1024, 800, 900]], false));
        assert_eq!(look(&mut rooms), (vec![[1024, 800, 900]], true));
        files.put("proc/meminfo", "MemTotal: 1 GB\n");
        assert_eq!(look(&mut rooms), (vec![], false));
        files.host(1, 2);
        assert_eq!(look(&mut rooms), (vec![[1024, 1, 2]], false));
        // Without a host that says anything, groups still do.
        let files = Files::new("0::/a\n");
        files.put("proc/zoneinfo", "");
        files.group("a/", ["18446744073709551615", "4096"], u64::MAX / MIB, [u64::MAX / MIB; 2]);
        let mut rooms = Rooms::open(&files.roots);
        assert_eq!(look(&mut rooms).0, [[0, 0, 0]]);
        let nothing = Roots { proc: Path::new("/nowhere").into(), cgroup: "/nowhere".into() };
        assert_eq!(look(&mut Rooms::open(&nothing)), (vec![], true));
    }
}
