//! What this kernel does with lent memory that is read into.
//!
//! Before Linux 5.18 a page that is lent (`MADV_FREE`) and then read into by direct I/O may be thrown away with
//! what was read: the device writes behind the page table's back, so that the page still counts as
//! clean when it is reclaimed ("mm: fix race between MADV_FREE reclaim and blkdev direct IO read"). There
//! every page is written to on its way back, which takes it off loan. A distribution may have mended an
//! older kernel; its number does not say so, and a write costs less than a microsecond a page.

/// Whether a kernel of this release keeps what direct I/O reads into a lent page.
fn keeps(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (5, 18),
        // One that does not say may be older.
        _ => false,
    }
}

/// Whether pages must be written to when they come back from a loan.
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
