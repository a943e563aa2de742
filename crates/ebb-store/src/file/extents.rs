//! Data and holes of a file.

use ebb_block::{Extent, SECTOR, push_extent, whole_sectors};
use ebb_io::Fd;
use rustix::fs::SeekFrom;

/// Data and holes by `SEEK_DATA` and `SEEK_HOLE`. Moving the shared file position is harmless,
/// because all I/O gives its offset.
pub(super) fn walk(fd: &Fd, start: u64, end: u64, limit: usize) -> rustix::io::Result<Vec<Extent>> {
    let mut list = Vec::new();
    let mut at = start;
    while at < end && list.len() < limit {
        let data = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            Err(rustix::io::Errno::NXIO) => end,
            Err(error) => return Err(error),
        };
        if data > at {
            push_extent(&mut list, Extent { offset: at, length: data - at, hole: true });
            at = data;
            continue;
        }
        // A file that changes meanwhile may report a hole here: it then counts as data, and the
        // walk advances by at least a sector.
        let hole = rustix::fs::seek(fd, SeekFrom::Hole(at))?.clamp(at + SECTOR, end);
        push_extent(&mut list, Extent { offset: at, length: hole - at, hole: false });
        at = hole;
    }
    Ok(whole_sectors(list))
}
