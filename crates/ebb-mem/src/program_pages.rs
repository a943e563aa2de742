//! Unmaps the pages of the program and its libraries that only the start has used: the parser of the command line, the
//! configuration, OpenSSL's tables. They stay in the page cache, where the kernel may take them without I/O, and are mapped
//! again when they are used. A daemon that waits for requests has a third of the program mapped.
//!
//! # Invariants
//! - Only mappings without a page of their own (`Anonymous: 0` in smaps) are unmapped: relocated data, and breakpoints of a
//!   debugger or tracer, are such pages, and would be lost.
//!
//! Source: proc(5) for smaps, madvise(2) for `MADV_DONTNEED` of file mappings.

use std::ops::Range;

/// Unmaps them, and returns the bytes of the mappings; 0 where `/proc` cannot be read.
pub fn release_program_pages() -> usize {
    let Ok(smaps) = std::fs::read_to_string("/proc/self/smaps") else { return 0 };
    let all = releasable(&smaps).into_iter();
    all.filter(crate::sys::forget_file_pages).map(|range| range.len()).sum()
}

/// The mappings of files that cannot be written to and have no pages of their own.
fn releasable(smaps: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut candidate = None;
    for line in smaps.lines() {
        if let Some(range) = file_mapping(line) {
            candidate = range;
        } else if let Some(anonymous) = line.strip_prefix("Anonymous:") {
            found.extend(candidate.take().filter(|_| anonymous.trim() == "0 kB"));
        }
    }
    found
}

/// The first line of a mapping: the range, if it is a private mapping of a file that cannot be written to. `None` for a line
/// that is no first one.
fn file_mapping(line: &str) -> Option<Option<Range<usize>>> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let range = address(start)?..address(end)?;
    let permissions = words.next()?;
    let path = words.nth(3).unwrap_or_default();
    let fits =
        matches!(permissions, "r-xp" | "r--p") && path.starts_with('/') && range.start < range.end;
    Some(fits.then_some(range))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0000000-55d0c0100000 r--p 00000000 fe:00 1234                       /usr/bin/ebbd
Size:               1024 kB
Anonymous:             0 kB
VmFlags: rd mr mw me sd
55d0c0100000-55d0c0500000 r-xp 00100000 fe:00 1234                       /usr/bin/ebbd
Anonymous:             4 kB
55d0c0500000-55d0c0510000 r--p 00500000 fe:00 1234                       /usr/bin/ebbd
Anonymous:             0 kB
55d0c0510000-55d0c0520000 rw-p 00510000 fe:00 1234                       /usr/bin/ebbd
Anonymous:             0 kB
7f0000000000-7f0000100000 r--p 00000000 00:00 0
Anonymous:             0 kB
7fff00000000-7fff00002000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
";

    #[test]
    fn only_unwritten_mappings_of_files_are_released() {
        let expected = [0x55d0_c000_0000..0x55d0_c010_0000, 0x55d0_c050_0000..0x55d0_c051_0000];
        assert_eq!(releasable(SMAPS), expected);
        for nonsense in ["", "-", "1-2", "zz-1 r-xp", "5-4 r-xp 0 0 0 /a\nAnonymous: 0 kB"] {
            assert!(releasable(nonsense).is_empty(), "{nonsense}");
        }
    }

    #[test]
    fn the_program_goes_on() {
        assert!(release_program_pages() > 0);
        assert_eq!(releasable(SMAPS).len(), 2);
    }
}
