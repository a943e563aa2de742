//! How much memory is free before the kernel begins to reclaim, for owners that release memory before
//! that: of the host here, of control groups in `rooms.rs`.
//!
//! The ladder detects that memory is short; these figures show how much remains until reclaim begins, which
//! slows down allocations of every process. One sample reads one open file and takes about 10 µs.

use std::io;
use std::path::{Path, PathBuf};

use super::files::{LARGE, OpenFile, Roots, read};
use super::host::not_understood;
use super::parse;

/// A sample of memory in bytes: of the host, or of what a control group may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// All memory the kernel manages, or the group's limit.
    pub total: u64,
    /// Free memory; of a group, what it may still use.
    pub free: u64,
    /// Memory available without swapping; lent pages are part of it.
    pub available: u64,
    /// Free memory at which the kernel begins to reclaim: the zones' low watermarks and their lowmem
    /// reserves. In a control group reclaim begins at the limit: 0.
    pub floor: u64,
    /// The largest error of these figures: the kernel adds them up in batches per processor.
    pub behind: u64,
}

impl Room {
    /// Free memory until the kernel begins to reclaim.
    #[must_use]
    pub fn headroom(&self) -> u64 {
        self.free.saturating_sub(self.floor)
    }

    /// What the kernel can reclaim without swapping, lent pages included.
    #[must_use]
    pub fn reclaimable(&self) -> u64 {
        self.available.saturating_sub(self.headroom())
    }
}

/// Samples the host's memory: see the module.
pub struct HostMemoryReader {
    meminfo: OpenFile,
    zoneinfo: PathBuf,
    floor: u64,
    /// Samples since the floor was read.
    samples: u32,
}

/// The host's figures may be off by one part in `BEHIND_SHARE` of all memory.
const BEHIND_SHARE: u64 = 1 << 14;
/// The watermarks are read again after this many samples: a balloon, hotplug or an operator changes them.
const FLOOR_EVERY: u32 = 100;

fn floor(zoneinfo: &Path) -> io::Result<u64> {
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(u64::MAX);
    parse::reclaim_floor(&read(zoneinfo, LARGE)?, page).ok_or_else(not_understood)
}

impl HostMemoryReader {
    /// Opens its files. The watermarks are read now, and again every 100 samples.
    ///
    /// # Errors
    /// A file cannot be read or parsed.
    pub fn open(roots: &Roots) -> io::Result<HostMemoryReader> {
        let zoneinfo = roots.proc.join("zoneinfo");
        let floor = floor(&zoneinfo)?;
        let meminfo = OpenFile::open(&roots.proc.join("meminfo"))?;
        let mut reader = HostMemoryReader { meminfo, zoneinfo, floor, samples: 0 };
        reader.now()?;
        Ok(reader)
    }

    /// The host's memory now.
    ///
    /// # Errors
    /// As [`HostMemoryReader::open`].
    pub fn now(&mut self) -> io::Result<Room> {
        self.samples += 1;
        if self.samples >= FLOOR_EVERY {
            self.samples = 0;
            // If they can no longer be read, the last values are used.
            self.floor = floor(&self.zoneinfo).unwrap_or(self.floor);
        }
        let text = self.meminfo.read_text()?;
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

impl std::fmt::Debug for HostMemoryReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostMemoryReader").field("floor", &self.floor).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_low_watermarks_plus_the_lowmem_reserves() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write(
            "zoneinfo",
            // The reserve of the first zone is larger than the zone.
            "Node 0, zone      DMA\n  pages free     3840\n        boost    0\n        min      10\n        \
             low      20\n        high     30\n        managed  240\n        protection: (0, 200, 250, 250)\n      pagesets\n    \
             cpu: 0\n              high:  0\nNode 0, zone    DMA32\n        min      100\n        \
             low      200\n        high     300\n        protection: (0, 0, 50, 50)\n",
        );
        write("meminfo", "MemTotal: 1000 kB\nMemFree: 800 kB\nMemAvailable: 900 kB\nX: 1 kB\n");
        let roots = Roots { proc: dir.path().to_path_buf(), ..Roots::default() };
        let page = u64::try_from(rustix::param::page_size()).unwrap();
        let mut reader = HostMemoryReader::open(&roots).unwrap();
        let room = reader.now().unwrap();
        assert_eq!(room.floor, (240 + 250) * page);
        assert_eq!((room.free, room.available), (800 << 10, 900 << 10));
        assert_eq!(room.headroom(), 0);
        assert_eq!(room.reclaimable(), 900 << 10);
        write("meminfo", "MemTotal: 1000 kB\nMemFree: 800 kB\n");
        assert!(reader.now().is_err() || reader.now().is_err(), "`MemAvailable` is missing");
    }

    #[test]
    fn changed_watermarks_are_read_again() {
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
        let mut reader = HostMemoryReader::open(&roots).unwrap();
        let mut floors =
            |samples: u32| (0..samples).map(|_| reader.now().unwrap().floor).last().unwrap();
        let before = floors(1);
        zones(100);
        assert_eq!(floors(FLOOR_EVERY) * 2, before);
        write("zoneinfo", "nothing");
        assert_eq!(floors(FLOOR_EVERY) * 2, before, "the last value that could be parsed");
    }

    #[test]
    fn the_memory_of_this_host_can_be_sampled() {
        let room = HostMemoryReader::open(&Roots::default()).unwrap().now().unwrap();
        assert!(room.floor > 0 && room.total > room.free, "{room:?}");
    }
}
