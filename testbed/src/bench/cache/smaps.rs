//! Resident memory of the daemon's arena: what `/proc/PID/smaps` counts page by page.
//!
//! The arena is recognised by its properties: its mappings are anonymous, not inherited by children
//! (`dc` of `VmFlags`), and make up one block of addresses, the largest of this kind. A smaller one
//! is its table of saved words, which is not data.

use std::fs;

use super::Error;
use crate::bench::io_context;

/// The arena's mappings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Arena {
    /// Resident memory, including lent pages that were not discarded, bytes.
    pub resident: u64,
    /// Of it, lent pages, bytes.
    pub lent: u64,
    /// First byte and number of bytes of each mapping with memory in it.
    pub ranges: Vec<(u64, u64)>,
}

/// Reads it.
///
/// # Errors
/// [`Error`] when the process has ended or has no such mapping.
pub fn arena(pid: u32) -> Result<Arena, Error> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps"))
        .map_err(io_context(format!("reading the mappings of process {pid}")))?;
    parse(&text)
        .ok_or(Error::Output { from: "/proc/PID/smaps", what: "no arena among them".into() })
}

/// One mapping while its lines are read.
#[derive(Default)]
struct Mapping {
    start: u64,
    bytes: u64,
    anonymous: bool,
    resident: u64,
    lent: u64,
}

fn parse(text: &str) -> Option<Arena> {
    // Blocks of addresses without a gap: where each ends, its bytes, what is in it.
    let mut blocks: Vec<(u64, u64, Arena)> = Vec::new();
    let mut mapping = Mapping::default();
    for line in text.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        let kib = || rest.trim().strip_suffix(" kB").and_then(|n| n.trim().parse::<u64>().ok());
        match first {
            "Rss:" => mapping.resident = kib()? * 1024,
            "LazyFree:" => mapping.lent = kib()? * 1024,
            "VmFlags:" if mapping.anonymous && rest.split(' ').any(|flag| flag == "dc") => {
                if blocks.last().is_none_or(|(end, ..)| *end != mapping.start) {
                    blocks.push((mapping.start, 0, Arena::default()));
                }
                let (end, bytes, arena) = blocks.last_mut()?;
                *end += mapping.bytes;
                *bytes += mapping.bytes;
                arena.resident += mapping.resident;
                arena.lent += mapping.lent;
                if mapping.resident > 0 {
                    arena.ranges.push((mapping.start, mapping.bytes));
                }
            }
            field if field.ends_with(':') => {}
            range => mapping = header(range, rest)?,
        }
    }
    blocks.into_iter().max_by_key(|(_, bytes, _)| *bytes).map(|(.., arena)| arena)
}

/// `7f00-7f10 rw-p 00000000 00:00 0 [name]`: anonymous without an inode.
fn header(range: &str, rest: &str) -> Option<Mapping> {
    let (start, end) = range.split_once('-')?;
    let start = u64::from_str_radix(start, 16).ok()?;
    let bytes = u64::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    let anonymous = rest.split_ascii_whitespace().nth(3)? == "0";
    Some(Mapping { start, bytes, anonymous, ..Mapping::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_arena_counts() {
        let mapping = |head: &str, rss: u64, lazy: u64, flags: &str| {
            format!(
                "{head}\nSize: 9 kB\nRss:     {rss} kB\nLazyFree:  {lazy} kB\nVmFlags: {flags} \n"
            )
        };
        let text = [
            mapping("1000-2000 rw-p 00000000 00:00 0    [heap]", 100, 0, "rd wr mr"),
            mapping("7effff000000-7effff100000 rw-p 00000000 00:00 0 ", 8, 0, "rd wr dc nr nh"),
            mapping("7f0000000000-7f0000200000 rw-p 00000000 00:00 0 ", 40, 12, "rd wr dc nr"),
            mapping("7f0000200000-7f0000400000 rw-p 00000000 00:00 0 ", 0, 0, "rd wr dc nr hg"),
            mapping(
                "7f1000000000-7f1000001000 rw-s 00000000 00:0e 77 anon_inode:[io_uring]",
                4,
                0,
                "rd dc",
            ),
        ]
        .concat();
        let arena = parse(&text).unwrap();
        assert_eq!((arena.resident, arena.lent), (40 * 1024, 12 * 1024));
        assert_eq!(arena.ranges, [(0x7f00_0000_0000, 2 << 20)]);
        assert_eq!(parse(""), None);
    }
}
