//! Parsers for the kernel's text files. Nothing here does I/O. Text that cannot be parsed gives `None` or
//! is skipped: formats gain fields, and a missing figure is no reason to fail.

use std::time::Duration;

use super::signals::{Stall, Watermarks};

/// Totals of a pressure file, counted from boot: `some avg10=.. avg60=.. avg300=.. total=<us>` and,
/// where there is one, the same for `full`.
pub(super) fn psi(text: &str) -> Option<Stall> {
    let mut some = None;
    let mut full = None;
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let slot = match words.next() {
            Some("some") => &mut some,
            Some("full") => &mut full,
            _ => continue,
        };
        let total = words.find_map(|word| word.strip_prefix("total="));
        if let Some(total) = total.and_then(number) {
            *slot = Some(Duration::from_micros(total));
        }
    }
    Some(Stall { some: some?, full: full.unwrap_or_default() })
}

/// The figure after `key` in lines of `key value`, as in `memory.events`.
pub(super) fn flat(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == key).then(|| words.next().and_then(number)).flatten()
    })
}

/// The figure after `key:` in `/proc/meminfo`, in bytes.
pub(super) fn meminfo(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?.strip_prefix(':')?;
        let mut words = rest.split_ascii_whitespace();
        let value = words.next().and_then(number)?;
        match words.next() {
            Some("kB") => value.checked_mul(1024),
            None => Some(value),
            Some(_) => None,
        }
    })
}

/// A file with one figure. `max`, and version 1's figure for "no limit", give `u64::MAX`.
pub(super) fn size(text: &str) -> Option<u64> {
    /// Version 1 writes the largest number of whole pages, in bytes, for "no limit".
    const NO_LIMIT: u64 = 1 << 60;
    let word = text.trim_ascii();
    if word == "max" {
        return Some(u64::MAX);
    }
    number(word).map(|bytes| if bytes >= NO_LIMIT { u64::MAX } else { bytes })
}

/// Watermarks summed over all zones of `/proc/zoneinfo`, in bytes. `None` without any zone.
pub(super) fn zoneinfo(text: &str, page_size: u64) -> Option<Watermarks> {
    let mut marks = Watermarks::default();
    let mut found = false;
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        // Lists of per-CPU page sets also have `high`, but with a colon.
        let slot = match words.next() {
            Some("min") => &mut marks.min,
            Some("low") => &mut marks.low,
            Some("high") => &mut marks.high,
            _ => continue,
        };
        if let Some(pages) = words.next().and_then(number) {
            *slot = slot.saturating_add(pages.saturating_mul(page_size));
            found = true;
        }
    }
    // A target of 0 can never be reached, and watermarks in another order are invalid.
    (found && marks.high > 0 && marks.min <= marks.low && marks.low <= marks.high).then_some(marks)
}

/// Free memory at which the kernel begins to reclaim, from `/proc/zoneinfo`, in bytes: of each zone its low
/// watermark and its largest lowmem reserve (`protection: (0, 224, 224)`), but at most its size. `None`
/// without any zone.
pub(super) fn reclaim_floor(text: &str, page_size: u64) -> Option<u64> {
    let (mut low, mut managed) = (0, u64::MAX);
    let mut floor = None;
    for line in text.lines() {
        let line = line.trim_ascii();
        if let Some(list) = line.strip_prefix("protection: (") {
            let words = list.trim_end_matches(')').split(',');
            let kept = words.filter_map(|word| number(word.trim_ascii())).max().unwrap_or(0);
            let zone = managed.min(kept.saturating_add(low)).saturating_mul(page_size);
            floor = Some(floor.unwrap_or(0_u64).saturating_add(zone));
            (low, managed) = (0, u64::MAX);
        } else if let Some(pages) = line.strip_prefix("low ") {
            low = number(pages.trim_ascii()).unwrap_or(0);
        } else if let Some(pages) = line.strip_prefix("managed ") {
            managed = number(pages.trim_ascii()).unwrap_or(u64::MAX);
        }
    }
    floor.filter(|&floor| floor > 0)
}

/// The process's path in the unified hierarchy (version 2) and in version 1's memory hierarchy, from
/// `/proc/self/cgroup`: lines of `id:controllers:path`.
pub(super) fn own_cgroups(text: &str) -> (Option<&str>, Option<&str>) {
    let mut unified = None;
    let mut memory = None;
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        if !path.starts_with('/') {
            continue;
        }
        if id == "0" && controllers.is_empty() {
            unified = Some(path);
        } else if controllers.split(',').any(|c| c == "memory") {
            memory = Some(path);
        }
    }
    (unified, memory)
}

/// RFC 4648 Base64 with padding, as in `MEMORY_PRESSURE_WRITE`. White space is ignored.
pub(super) fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3 + 3);
    let (mut bits, mut held, mut symbols, mut padding) = (0u32, 0u32, 0usize, 0usize);
    for byte in text.iter().copied().filter(|b| !b.is_ascii_whitespace()) {
        symbols += 1;
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' => {
                padding += 1;
                continue;
            }
            _ => return None,
        };
        if padding > 0 {
            return None;
        }
        bits = (bits << 6) | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            let [.., low] = (bits >> held).to_be_bytes();
            out.push(low);
            bits &= (1 << held) - 1;
        }
    }
    // Whole groups of four, at most two pads, and no non-zero bits remaining.
    (symbols % 4 == 0 && padding <= 2 && usize::try_from(held) == Ok(padding * 2) && bits == 0)
        .then_some(out)
}

/// Digits only: `parse` alone would accept a leading plus.
fn number(word: &str) -> Option<u64> {
    (word.as_bytes().first()?.is_ascii_digit()).then(|| word.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pressure_files() {
        let text = "some avg10=0.12 avg60=0.00 avg300=0.00 total=123456\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=789\n";
        let stall = psi(text).unwrap();
        assert_eq!(stall.some, Duration::from_micros(123_456));
        assert_eq!(stall.full, Duration::from_micros(789));
        // Before Linux 5.13 the system's file may lack the second line.
        assert_eq!(psi("some total=5").unwrap().full, Duration::ZERO);
        for bad in ["", "full total=5", "some total=", "some total=-1", "some", "some total=x\n"] {
            assert_eq!(psi(bad), None, "{bad:?}");
        }
        assert_eq!(psi("some total=99999999999999999999999"), None);
    }

    #[test]
    fn cgroup_files() {
        let events = "low 0\nhigh 17\nmax 3\noom 1\noom_kill 2\n";
        assert_eq!(flat(events, "high"), Some(17));
        assert_eq!(flat(events, "oom"), Some(1));
        assert_eq!(flat(events, "oom_group_kill"), None);
        assert_eq!(flat("under_oom\n", "under_oom"), None);
        assert_eq!(size("max\n"), Some(u64::MAX));
        assert_eq!(size("9223372036854771712\n"), Some(u64::MAX));
        assert_eq!(size("4096\n"), Some(4096));
        assert_eq!(size("-1\n"), None);
        assert_eq!(size(""), None);
    }

    #[test]
    fn own_cgroup_in_each_kind_of_hierarchy() {
        assert_eq!(own_cgroups("0::/system.slice/x.service\n").0, Some("/system.slice/x.service"));
        let hybrid = "9:name=systemd:/\n4:cpu,memory:/a:b/c\n0::/u\n";
        assert_eq!(own_cgroups(hybrid), (Some("/u"), Some("/a:b/c")));
        assert_eq!(own_cgroups("0::\n:::\n4:memory\nmemory:/\n"), (None, None));
    }

    #[test]
    fn meminfo_and_zoneinfo() {
        let text =
            "MemTotal:  1000 kB\nMemFree: 7 kB\nMemAvailable:     12 kB\nHugePages_Total: 3\n";
        assert_eq!(meminfo(text, "MemAvailable"), Some(12 * 1024));
        assert_eq!(meminfo(text, "Mem"), None);
        assert_eq!(meminfo(text, "HugePages_Total"), Some(3));
        assert_eq!(meminfo("MemFree: 18446744073709551615 kB", "MemFree"), None);
        let zones = "Node 0, zone      DMA\n  pages free     10\n        boost    0\n        min      1\n\
                     \x20       low      2\n        high     3\n        spanned  9\n  pagesets\n    cpu: 0\n\
                     \x20             count:    0\n              high:     99\n\
                     Node 0, zone   Normal\n        min      10\n        low      20\n        high     30\n";
        let marks = zoneinfo(zones, 4096).unwrap();
        assert_eq!(marks, Watermarks { min: 11 * 4096, low: 22 * 4096, high: 33 * 4096 });
        assert_eq!(zoneinfo("Node 0, zone DMA\n", 4096), None);
        assert_eq!(zoneinfo("min 5\nlow 3\nhigh 1\n", 4096), None);
    }

    #[test]
    fn base64_of_systemd() {
        assert_eq!(base64(b"c29tZSAyMDAwMDAgMjAwMDAwMAA=").unwrap(), b"some 200000 2000000\0");
        assert_eq!(base64(b"").unwrap(), b"");
        assert_eq!(base64(b"Zm9v").unwrap(), b"foo");
        assert_eq!(base64(b"Zg==").unwrap(), b"f");
        for bad in [&b"Zg"[..], b"Zg=", b"Zg===", b"Z===", b"=Zg=", b"Zh==", b"Zm9v!", b"===="] {
            assert_eq!(base64(bad), None, "{}", String::from_utf8_lossy(bad));
        }
    }

    fn encode(bytes: &[u8]) -> String {
        const SET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut out = String::new();
        for group in bytes.chunks(3) {
            let word =
                group.iter().fold(0u32, |w, b| (w << 8) | u32::from(*b)) << (8 * (3 - group.len()));
            for i in 0..4 {
                let at = usize::try_from((word >> (18 - 6 * i)) & 63).unwrap();
                out.push(if i > group.len() { '=' } else { char::from(SET[at]) });
            }
        }
        out
    }

    proptest! {
        #[test]
        fn any_bytes_survive_base64(bytes: Vec<u8>) {
            prop_assert_eq!(base64(encode(&bytes).as_bytes()), Some(bytes));
        }

        #[test]
        fn no_text_panics(
            text in "(some|full|high|min|low|Node|MemFree:|total=|[0-9]{1,25}|kB|max|0::|4:memory:|/|:|=|-|[ \n]|\\PC){0,60}",
            raw: Vec<u8>,
        ) {
            for text in [text.as_str(), &String::from_utf8_lossy(&raw)] {
                let _ = psi(text);
                let _ = flat(text, "high");
                let _ = meminfo(text, "MemFree");
                let _ = size(text);
                let _ = zoneinfo(text, 4096);
                let _ = own_cgroups(text);
                let _ = base64(text.as_bytes());
            }
            let _ = base64(&raw);
        }

        #[test]
        fn figures_come_back(some: u64, full: u64) {
            let text = format!("some avg10=1.00 total={some}\nfull avg10=0.00 total={full}\n");
            let stall = psi(&text).unwrap();
            prop_assert_eq!(stall.some, Duration::from_micros(some));
            prop_assert_eq!(stall.full, Duration::from_micros(full));
        }
    }
}
