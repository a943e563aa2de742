//! A look at free memory, for owners who give back ahead of the kernel: the host's here, that of
//! control groups in `rooms.rs`.
//!
//! The ladder asks whether memory is short; this says how much there is until the kernel begins to look
//! for more by itself, which costs whoever allocates. One look reads one open file, some 10 µs.

use std::io;
use std::path::{Path, PathBuf};

use super::files::{LARGE, Roots, Watched, read};
use super::host::not_understood;
use super::parse;

/// Memory at a moment, in bytes: the host's, or what a control group may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// All memory the kernel manages, or the group's limit.
    pub total: u64,
    /// Free memory: of a group, what it may use more.
    pub free: u64,
    /// Memory available without swapping; lent pages are part of it.
    pub available: u64,
    /// Free memory at which the kernel begins to reclaim: the zones' low watermarks, and what lower zones
    /// keep for those who can use nothing else. In a control group it begins at the limit: 0.
    pub floor: u64,
    /// By so much these figures may be behind: the kernel sums up in batches, for each processor.
    pub behind: u64,
}

impl Room {
    /// Free memory until the kernel begins to reclaim.
    #[must_use]
    pub fn headroom(&self) -> u64 {
        self.free.saturating_sub(self.floor)
    }

    /// What the kernel can take without swapping, lent pages included.
    #[must_use]
    pub fn reclaimable(&self) -> u64 {
        self.available.saturating_sub(self.headroom())
    }
}

/// See the module.
pub struct HostLook {
    meminfo: Watched,
    zoneinfo: PathBuf,
    floor: u64,
    /// Looks since the floor was read.
    looks: u32,
}

/// One part in so many of all memory is what the host's figures may be behind.
const BEHIND_SHARE: u64 = 1 << 14;
/// The watermarks are read again after so many looks: a balloon, hotplug or an operator moves them.
const FLOOR_EVERY: u32 = 100;

fn floor(zoneinfo: &Path) -> io::Result<u64> {
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(u64::MAX);
    parse::reclaim_floor(&read(zoneinfo, LARGE)?, page).ok_or_else(not_understood)
}

impl HostLook {
    /// Opens what it reads. The watermarks are read now, and again from time to time.
    ///
    /// # Errors
    /// A file cannot be read or is not understood: a host that does not say.
    pub fn open(roots: &Roots) -> io::Result<HostLook> {
        let zoneinfo = roots.proc.join("zoneinfo");
        let floor = floor(&zoneinfo)?;
        let meminfo = Watched::open(&roots.proc.join("meminfo"))?;
        let mut look = HostLook { meminfo, zoneinfo, floor, looks: 0 };
        look.now()?;
        Ok(look)
    }

    /// The host's memory now.
    ///
    /// # Errors
    /// As [`HostLook::open`].
    pub fn now(&mut self) -> io::Result<Room> {
        self.looks += 1;
        if self.looks >= FLOOR_EVERY {
            self.looks = 0;
            // Where it cannot be read any more, what was read last is the best there is.
            self.floor = floor(&self.zoneinfo).unwrap_or(self.floor);
        }
        let text = self.meminfo.look()?;
        let value = |key| parse::meminfo(text, key).ok_or_else(not_understood);
        let total = value("MemTotal")?;
        Ok(Room {
            total,
            free: value("MemFree")?,
            available: value("MemAvailable")?,
            floor: self.floor,
            behind: total / BEHIND_SHARE,
        })
    }
}

impl std::fmt::Debug for HostLook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostLook").field("floor", &self.floor).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_where_the_kernel_begins_and_what_lower_zones_keep() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write(
            "zoneinfo",
            // The first keeps more than there is of it.
            "Node 0, zone      DMA\n  pages free     3840\n        boost    0\n        min      10\n        \
             low      20\n        high     30\n        managed  240\n        protection: (0, 200, 250, 250)\n      pagesets\n    \
             cpu: 0\n              high:  0\nNode 0, zone    DMA32\n        min      100\n        \
             low      200\n        high     300\n        protection: (0, 0, 50, 50)\n",
        );
        write("meminfo", "MemTotal: 1000 kB\nMemFree: 800 kB\nMemAvailable: 900 kB\nX: 1 kB\n");
        let roots = Roots { proc: dir.path().to_path_buf(), ..Roots::default() };
        let page = u64::try_from(rustix::param::page_size()).unwrap();
        let mut look = HostLook::open(&roots).unwrap();
        let room = look.now().unwrap();
        assert_eq!(room.floor, (240 + 250) * page);
        assert_eq!((room.free, room.available), (800 << 10, 900 << 10));
        assert_eq!(room.headroom(), 0);
        assert_eq!(room.reclaimable(), 900 << 10);
        write("meminfo", "MemTotal: 1000 kB\nMemFree: 800 kB\n");
        assert!(look.now().is_err() || look.now().is_err(), "a figure is missing");
    }

    #[test]
    fn watermarks_that_move_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let zones = |low: u32| {
            let text = "Node 0, zone   Normal\n  pages free     3840\n        min      10\n        \
                        low      LOW\n        high     300\n        managed  9999\n        \
                        protection: (0, 0)\n";
            write("zoneinfo", &text.replace("LOW", &low.to_string()));
        };
        zones(200);
        write("meminfo", "MemTotal: 1000 kB\nMemFree: 800 kB\nMemAvailable: 900 kB\n");
        let roots = Roots { proc: dir.path().to_path_buf(), ..Roots::default() };
        let mut look = HostLook::open(&roots).unwrap();
        let mut floors = |looks: u32| (0..looks).map(|_| look.now().unwrap().floor).last().unwrap();
        let before = floors(1);
        zones(100);
        assert_eq!(floors(FLOOR_EVERY) * 2, before);
        write("zoneinfo", "nothing");
        assert_eq!(floors(FLOOR_EVERY) * 2, before, "the last one that was understood");
    }

    #[test]
    fn this_host_says() {
        let room = HostLook::open(&Roots::default()).unwrap().now().unwrap();
        assert!(room.floor > 0 && room.total > room.free, "{room:?}");
    }
}
