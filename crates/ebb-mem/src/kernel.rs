//! A kernel bug that concerns direct I/O into pages marked `MADV_FREE`.
//!
//! Before Linux 5.18 the kernel may discard a page that was marked `MADV_FREE` and into which direct I/O
//! has read since: the device does not set the dirty bit of the page table entry, so the page still
//! counts as clean when it is reclaimed (fixed by "mm: fix race between MADV_FREE reclaim and blkdev
//! direct IO read"). On such kernels this crate writes to every page that it takes back, which cancels
//! the mark. A distribution may have backported the fix, which the release number does not show; the
//! write costs less than a microsecond per page.

/// Whether a kernel of this release keeps data that direct I/O reads into a lent page.
fn keeps(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (5, 18),
        // A release that cannot be parsed may be an older one.
        _ => false,
    }
}

/// Whether pages must be written to when they are taken back.
pub(crate) fn touches() -> bool {
    !keeps(&rustix::system::uname().release().to_string_lossy())
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn pages_are_written_to_below_linux_5_18() {
        for release in
            ["5.15.0", "5.15.0-91-generic", "5.17.15", "4.18.0-553.el8", "3.10", "", "x.y"]
        {
            assert!(!keeps(release), "{release}");
        }
        for release in ["5.18.0", "5.18-rc1", "5.19.17+", "6.1.0-18-amd64", "6.18.44", "10.0"] {
            assert!(keeps(release), "{release}");
        }
    }
}
