//! Functions that the documents cite with their file: the function is in that file.
//!
//! A citation is a file of the code in a code span, followed by a colon and by names in code spans:
//! `` `crates/ebb-x/src/disk.rs`: `Disk::read`, `Disk::write` ``. Names that follow with nothing but commas and `and` in
//! between belong to the same file; a citation may go on in the next line.

use super::names::{exists_in, is_file_of};
use super::{Source, read_tree, root};

/// The documents whose citations are checked: the guides, and the walks through the code.
fn is_checked(path: &str) -> bool {
    path == "ARCHITECTURE.md" || (path.starts_with("docs/guides/") && path.ends_with(".md"))
}

/// The pieces of a document outside its fenced blocks: each with its line, and whether it is a code span.
pub(super) fn pieces(document: &str) -> Vec<(usize, bool, &str)> {
    let (mut fenced, mut found) = (false, Vec::new());
    for (index, line) in document.lines().enumerate() {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            let parts = line.trim().split('`').enumerate();
            found.extend(parts.map(|(at, part)| (index + 1, at % 2 == 1, part)));
        }
    }
    found
}

/// The citations of a document: line, file, name.
fn citations(document: &str) -> Vec<(usize, &str, &str)> {
    let (mut file, mut found) = (None, Vec::new());
    // The file was named last, and its colon was not seen yet.
    let mut opens = false;
    for (line, is_span, text) in pieces(document) {
        if is_span {
            if text.ends_with(".rs") && !text.contains(' ') {
                (file, opens) = (Some(text), true);
            } else if let (Some(path), false) = (file, opens) {
                found.push((line, path, text));
            } else {
                file = None;
            }
            continue;
        }
        let between = text.trim().trim_matches('*').trim();
        let goes_on = match opens {
            true if between == ":" => {
                opens = false;
                true
            }
            true => between.is_empty(),
            false => ["", ",", "and", ", and"].contains(&between),
        };
        if !goes_on {
            (file, opens) = (None, false);
        }
    }
    found
}

/// The citations that lead nowhere, a line each.
fn missing(document: &Source, sources: &[Source]) -> Vec<String> {
    let wrong = citations(&document.raw).into_iter().filter(|(_, path, name)| {
        let mut files = sources.iter().filter(|source| is_file_of(source, path));
        !files.any(|source| exists_in(name, source))
    });
    wrong
        .map(|(line, path, name)| format!("{}:{line}: `{name}` in `{path}`", document.path))
        .collect()
}

#[test]
fn a_function_that_a_guide_or_the_architecture_cites_is_in_the_cited_file() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    let documents: Vec<_> = sources.iter().filter(|source| is_checked(&source.path)).collect();
    let count: usize = documents.iter().map(|document| citations(&document.raw).len()).sum();
    assert!(
        documents.len() >= 2 && count >= 60,
        "{count} citations of {} documents",
        documents.len()
    );
    let found: Vec<_> = documents.iter().flat_map(|document| missing(document, &sources)).collect();
    assert!(found.is_empty(), "cited with the wrong file:\n{}", found.join("\n"));
}

/// A guide of the test's own; in pieces, or else it would be cited here.
const GUIDE: &str = concat!("docs/guides/", "a", ".md");

#[test]
fn citations_that_lead_nowhere_are_caught() {
    let tree = [
        Source::new(
            "crates/ebb-x/src/disk.rs",
            "//! A disk.\npub struct Disk;\nimpl Disk { fn read(&self) {} }\n",
        ),
        Source::new(
            "crates/ebb-x/src/other.rs",
            "//! Another.\nimpl Other { fn write(&self) {} }\nfn open() {}\n",
        ),
    ];
    let cite = |text: &str| missing(&Source::new(GUIDE, text), &tree);
    for right in [
        "`crates/ebb-x/src/disk.rs`: `Disk::read`, `Disk` and `cache = \"none\"`",
        "1. **`ebb-x/disk.rs`**: `Disk::read`. In another, `Other::write`",
        "`crates/ebb-x/src/other.rs`:\n   `Other::write`, `open()`",
        "`crates/ebb-x/src/other.rs` is beside `Disk::read`",
        "`crates/ebb-x/src/disk.rs` (`Other::write`)",
    ] {
        assert_eq!(cite(right), [""; 0], "{right}");
    }
    for (wrong, line) in [
        ("`crates/ebb-x/src/disk.rs`: `Disk::write`", 1),
        ("`crates/ebb-x/src/disk.rs`: `Disk::read`, `Other::write`", 1),
        ("**`ebb-x/disk.rs`**: `open()`", 1),
        ("`crates/ebb-x/src/disk.rs`:\n`Disk::read` and\n`Disk::erase`", 3),
        ("`crates/ebb-x/src/none.rs`: `Disk::read`", 1),
    ] {
        let found = cite(wrong);
        assert_eq!(found.len(), 1, "{wrong}: {found:?}");
        assert!(found[0].starts_with(&format!("{GUIDE}:{line}: ")), "{found:?}");
    }
}
