//! The tracepoints of the program, and the documents that name them.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::BTreeSet;

/// The names in the program's notes: each note has the provider, the name and the arguments, ended by zero bytes.
fn in_the_program() -> BTreeSet<String> {
    let program = std::fs::read(env!("CARGO_BIN_EXE_ebbd")).unwrap();
    let start = b"stapsdt\0";
    let mut found = BTreeSet::new();
    for (at, _) in program.windows(start.len()).enumerate().filter(|(_, bytes)| bytes == start) {
        // Three addresses of eight bytes precede the names.
        let strings = program.get(at + start.len() + 24..).unwrap_or_default();
        let mut strings = strings.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        if strings.next().as_deref() == Some("ebbd") {
            found.extend(strings.next().map(|name| name.into_owned()));
        }
    }
    found
}

#[test]
fn every_tracepoint_is_documented_and_every_documented_one_exists() {
    let text = include_str!("../../../../docs/tracing.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let documented: BTreeSet<_> = rows.map(|(name, _)| name.to_owned()).collect();
    assert_eq!(documented, in_the_program());
}

#[test]
fn the_example_script_uses_tracepoints_that_exist() {
    let script = include_str!("../../../../docs/tracing/requests.bt");
    let used: Vec<_> = script.lines().filter_map(|line| line.strip_prefix("usdt:")).collect();
    assert_eq!(used.len(), 2);
    let known = in_the_program();
    for line in used {
        let (_, name) = line.rsplit_once(':').unwrap();
        assert!(line.contains(":ebbd:") && known.contains(name), "{line}");
    }
}
