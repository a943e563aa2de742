//! The rules about names. In prose: what ARCHITECTURE.md and docs/guides name exists in the code, and each document
//! that a comment or a document cites is in the tree or public. In the code: no two types of the
//! product that another module can see have the same name.

use std::collections::BTreeMap;

use super::lists::SHARED_NAMES;
use super::{Source, item_end, positions, read_tree, root};

/// Names in these documents that are those of the standard library.
const STANDARD: &[&str] = &["File::flush"];

/// Documents of other projects that are cited by their path there.
const PUBLIC: &[(&str, &str)] =
    &[("doc/proto.md", "the NBD project"), ("doc/uri.md", "the NBD project"), ("docs/misc", "Xen")];

/// Citations of documents that are not in the tree. In pieces, so that this file is no finding.
const PRIVATE: &[&str] = &[
    concat!("seed", " `0"),
    concat!("seeds", " `0"),
    concat!("seed", " 00"),
    concat!("design", ", section"),
    concat!("design", " section"),
    concat!("reference", ", 1."),
    concat!("reference", ", 2."),
    concat!("reference", ", 3."),
    concat!("reference", ", 4."),
    concat!("reference", ", 5."),
    concat!("reference", ", 6."),
    concat!("in the", " reference"),
];

/// Words that are not used because the field has a usual one (docs/glossary.md). Requests, clients and tasks are
/// called that.
const UNUSUAL: &[&str] = &[
    "nobody", "somebody", "whoever", "purse", "crew", "keeper", "lane", "lanes", "befall",
    "befalls",
];

/// Places of [`UNUSUAL`] words.
fn unusual_words(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for (index, line) in source.raw.lines().enumerate() {
        let lower = line.to_lowercase();
        let words = lower.split(|letter: char| !letter.is_ascii_alphanumeric());
        let words = words.filter(|word| UNUSUAL.contains(word));
        found.extend(words.map(|word| format!("{}:{}: {word}", source.path, index + 1)));
    }
    found
}

/// The numbered lines of a document outside its fenced blocks, and the code spans of each.
fn spans(document: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let mut found = Vec::new();
    for (index, line) in document.lines().enumerate() {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            found.extend(line.split('`').skip(1).step_by(2).map(|span| (index + 1, span)));
        }
    }
    found
}

fn is_name(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Whether the code has `head`, and not as the beginning of a longer name.
fn has(code: &str, head: &str) -> bool {
    positions(code, head).into_iter().any(|at| {
        let next = code.as_bytes().get(at + head.len()).copied().unwrap_or(b' ');
        !next.is_ascii_alphanumeric() && next != b'_'
    })
}

/// Whether a block that begins with one of `heads` has `inside` in it.
fn block_has(code: &str, heads: &[String], inside: &str) -> bool {
    let begins = heads.iter().flat_map(|head| positions(code, head));
    begins.into_iter().any(|at| has(&code[at..item_end(code, at)], inside))
}

/// Whether an `impl` of the type, or its definition, has `inside` in it.
fn type_has(code: &str, name: &str, inside: &str) -> bool {
    let defined = [format!("trait {name}"), format!("enum {name}")];
    let of_type = |at: &usize| {
        let header = code[*at..].split('{').next().unwrap_or_default();
        has(header, name) && has(&code[*at..item_end(code, *at)], inside)
    };
    block_has(code, &defined, inside) || positions(code, "impl").iter().any(of_type)
}

/// Whether the file or name in a code span exists. True for spans that are neither a file nor a name.
fn exists(span: &str, sources: &[Source]) -> bool {
    let rust = || sources.iter().filter(|source| source.is_rust());
    if STANDARD.contains(&span) || span.contains("NAME") {
        return true;
    }
    if span.ends_with(".rs") && !span.contains(' ') {
        return rust().any(|source| is_file_of(source, span));
    }
    if span.starts_with("ebb-") && !span.contains(' ') {
        return sources.iter().any(|source| source.path.starts_with(&format!("crates/{span}/")));
    }
    rust().any(|source| exists_in(span, source))
}

/// Whether a file is the one that a code span names: by its path, or by the end of it without `src`.
pub(super) fn is_file_of(source: &Source, span: &str) -> bool {
    let suffix = format!("/{span}");
    let (whole, short) = (&source.path, source.path.replace("/src/", "/"));
    whole == span || whole.ends_with(&suffix) || short.ends_with(&suffix)
}

/// Whether a file has what a code span names. True for spans that are no name.
pub(super) fn exists_in(span: &str, source: &Source) -> bool {
    let (path, is_call) = match span.strip_suffix("()") {
        Some(path) => (path, true),
        None => (span, false),
    };
    let names: Vec<&str> = path.split("::").collect();
    if !names.iter().all(|name| is_name(name)) {
        return true;
    }
    let capital = |name: &str| name.starts_with(|first: char| first.is_ascii_uppercase());
    match names[..] {
        [.., of, name] if capital(of) => {
            let inside = if capital(name) { name.to_owned() } else { format!("fn {name}") };
            source.code.contains(of) && type_has(&source.code, of, &inside)
        }
        [.., name] if is_call => has(&source.code, &format!("fn {name}")),
        [.., name] if capital(name) && name.contains(|c: char| c.is_ascii_lowercase()) => {
            let kinds = ["struct", "enum", "trait", "type"];
            kinds.iter().any(|kind| has(&source.code, &format!("{kind} {name}")))
        }
        // A constant, a parameter, a call of the kernel, a test.
        [.., name] => has(&source.raw, name),
        [] => true,
    }
}

/// The code spans of a document whose file or name is not in the tree, each with its line.
fn missing_names(document: &str, sources: &[Source]) -> Vec<String> {
    let missing = spans(document).into_iter().filter(|(_, span)| !exists(span, sources));
    missing.map(|(line, span)| format!("{line}: `{span}`")).collect()
}

/// The files of the code that a document names and that are not in the tree, each with its line.
fn missing_files(document: &Source, sources: &[Source]) -> Vec<String> {
    let files = spans(&document.raw).into_iter().filter(|(_, span)| span.ends_with(".rs"));
    let missing = files.filter(|(_, span)| !exists(span, sources));
    missing.map(|(line, span)| format!("{}:{line}: `{span}`", document.path)).collect()
}

/// The path of `target` as seen from the folder of `file`.
pub(super) fn relative(file: &str, target: &str) -> String {
    let mut parts: Vec<&str> = file.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Whether a cited path is a file or a folder of the tree, or public.
fn is_there(file: &str, target: &str, sources: &[Source]) -> bool {
    let known = |path: &str| {
        let folder = format!("{path}/");
        sources.iter().any(|source| source.path == path || source.path.starts_with(&folder))
    };
    // A name alone: the text of a link, or a file that the code makes.
    let named = || {
        let suffix = format!("/{target}");
        !target.contains('/') && sources.iter().any(|source| source.path.ends_with(&suffix))
    };
    PUBLIC.iter().any(|(public, _)| target.starts_with(public))
        || known(target)
        || known(&relative(file, target))
        || named()
}

/// The paths in a line that are cited as documents.
fn cited(line: &str) -> Vec<&str> {
    let of_path = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    let words = line.split(|c| !of_path(c));
    let words = words.map(|word| word.trim_end_matches(['.', '/', '-']));
    // The rest of an address of the web begins with two slashes.
    let words = words.filter(|word| !word.starts_with("//"));
    words
        .filter(|word| word.starts_with("docs/") || (word.ends_with(".md") && word.len() > 3))
        .collect()
}

/// The numbers of decisions in a line: `ADR 7`.
fn decisions(line: &str) -> Vec<u32> {
    let numbers = line
        .split("ADR ")
        .skip(1)
        .map(|rest| rest.chars().take_while(char::is_ascii_digit).collect::<String>());
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// Citations in a file of documents that do not exist, a line each.
fn missing_documents(source: &Source, sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for (index, line) in source.raw.lines().enumerate() {
        let mut missing: Vec<String> = cited(line)
            .into_iter()
            .filter(|target| !is_there(&source.path, target, sources))
            .map(ToOwned::to_owned)
            .collect();
        missing.extend(decisions(line).into_iter().filter_map(|number| {
            let head = format!("docs/adr/{number:04}-");
            let known = sources.iter().any(|source| source.path.starts_with(&head));
            (!known).then(|| format!("ADR {number}"))
        }));
        let lower = line.to_lowercase();
        let private = PRIVATE.iter().filter(|text| lower.contains(*text));
        missing.extend(private.map(|text| (*text).to_owned()));
        found.extend(missing.iter().map(|what| format!("{}:{}: {what}", source.path, index + 1)));
    }
    found
}

/// The types of the product in a file that other modules can see, with their lines. Without those of
/// tests.
fn visible_types(source: &Source) -> Vec<(&str, usize)> {
    let mut found = Vec::new();
    for at in positions(&source.code, "pub") {
        let rest = &source.code[at + 3..];
        let rest = match rest.strip_prefix('(').and_then(|inside| inside.split_once(')')) {
            Some(("self", _)) => continue,
            Some((_, rest)) => rest,
            None => rest,
        };
        let mut words = rest.split_whitespace().filter(|word| *word != "unsafe");
        let is_type = |word| ["struct", "enum", "union", "trait", "type"].contains(&word);
        let (true, Some(name)) = (words.next().is_some_and(is_type), words.next()) else {
            continue;
        };
        let name = name.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        // A macro's `$name` is no name.
        let name = name.into_iter().next().filter(|name| !name.is_empty());
        found.extend(name.map(|name| (name, source.line_at(at))));
    }
    let in_product = source.is_product() && source.path.contains("/src/");
    found.retain(|(_, line)| in_product && !source.is_test(*line));
    found
}

/// Names that several types of the product have, each with its places; and exceptions that are not
/// needed.
fn shared_names(sources: &[Source], allowed: &[(&str, &str)]) -> Vec<String> {
    let mut places: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for source in sources.iter().filter(|source| source.is_rust()) {
        for (name, line) in visible_types(source) {
            places.entry(name).or_default().push(format!("{}:{line}", source.path));
        }
    }
    places.retain(|_, places| places.len() > 1);
    let unused = allowed.iter().filter(|(name, _)| !places.contains_key(name));
    let unused = unused.map(|(name, why)| format!("{name}: needs no exception any more ({why})"));
    let unused: Vec<String> = unused.collect();
    places.retain(|name, _| !allowed.iter().any(|(known, _)| known == name));
    let shared = places.iter().map(|(name, places)| format!("{name}: {}", places.join(", ")));
    shared.chain(unused).collect()
}

#[test]
fn no_two_types_of_the_product_share_a_name() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    let types: usize = sources.iter().map(|source| visible_types(source).len()).sum();
    assert!(types > 300, "{types} types were read");
    let shared = shared_names(&sources, SHARED_NAMES);
    assert!(shared.is_empty(), "say in the name what each of them is:\n{}", shared.join("\n"));
}

#[test]
fn types_that_share_a_name_are_caught() {
    let (one, two) = ("crates/ebb-x/src/one.rs", "crates/ebb-y/src/two.rs");
    let shared = |first: &str, path: &str, second: &str, allowed: &[(&str, &str)]| {
        let first = format!("//! Why.\n{first}\n");
        let second = format!("//! Why.\n\n{second}\n");
        shared_names(&[Source::new(one, &first), Source::new(path, &second)], allowed)
    };
    let places = "Disk: crates/ebb-x/src/one.rs:2, crates/ebb-y/src/two.rs:3";
    for second in [
        "pub struct Disk;",
        "pub(crate) struct Disk(u8);",
        "pub(super) enum Disk { A }",
        "pub(in crate::a) struct Disk<T> { a: T }",
        "    pub unsafe trait Disk: Send {}",
        "pub type Disk = u8;",
        "pub type Disk<T> = Result<T, u8>;",
    ] {
        assert_eq!(shared("pub struct Disk;", two, second, &[]), [places], "{second}");
    }
    for second in [
        "struct Disk;",
        "pub(self) struct Disk;",
        "pub struct Disks;",
        "pub use one::Disk;",
        "pub fn disk() -> Disk {}",
        "// pub struct Disk;",
        "impl Open for One { type Disk = u8; }",
        "#[cfg(test)]\nmod tests { pub struct Disk; }",
        "pub struct $name;",
    ] {
        assert_eq!(shared("pub struct Disk;", two, second, &[]), [""; 0], "{second}");
    }
    // Twice in one file; in a test, and outside the product.
    assert_eq!(shared("pub struct A; mod b { pub struct A; }", two, "", &[]).len(), 1);
    for path in ["crates/ebb-y/tests/two.rs", "crates/ebb-y/src/tests.rs", "testbed/src/two.rs"] {
        assert_eq!(shared("pub struct Disk;", path, "pub struct Disk;", &[]), [""; 0], "{path}");
    }
    let allowed = [("Disk", "the same one")];
    assert_eq!(shared("pub struct Disk;", two, "pub enum Disk {}", &allowed), [""; 0]);
    let unused = "Disk: needs no exception any more (the same one)";
    assert_eq!(shared("pub struct Disk;", two, "", &allowed), [unused]);
}

#[test]
fn what_the_architecture_and_the_guides_name_is_in_the_code() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    let named = |source: &&Source| {
        source.path == "ARCHITECTURE.md" || source.path.starts_with("docs/guides/")
    };
    let documents: Vec<&Source> = sources.iter().filter(named).collect();
    assert!(documents.len() > 1, "both were read");
    for document in documents {
        let missing = missing_names(&document.raw, &sources);
        let list = missing.join("\n");
        assert!(missing.is_empty(), "{} names what does not exist:\n{list}", document.path);
    }
}

#[test]
fn every_document_and_file_that_is_cited_is_in_the_tree() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    let mut missing: Vec<_> =
        sources.iter().flat_map(|source| missing_documents(source, &sources)).collect();
    // The changelog names files of earlier versions.
    let documents = sources.iter().filter(|source| source.path.ends_with(".md"));
    let documents = documents.filter(|source| source.path != "CHANGELOG.md");
    missing.extend(documents.flat_map(|source| missing_files(source, &sources)));
    assert!(missing.is_empty(), "cited, and not in the tree:\n{}", missing.join("\n"));
}

#[test]
fn the_usual_words_are_used() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    let is_ours = |source: &&Source| {
        source.path.starts_with("crates/")
            || source.path.ends_with(".md") && source.path != "CHANGELOG.md"
    };
    let found: Vec<_> = sources.iter().filter(is_ours).flat_map(unusual_words).collect();
    assert!(found.is_empty(), "say it in the usual words:\n{}", found.join("\n"));
    let source = Source::new("crates/x.rs", "A task waits.\nNobody's crew, laned.\n");
    assert_eq!(unusual_words(&source), ["crates/x.rs:2: nobody", "crates/x.rs:2: crew"]);
}

#[test]
fn names_and_citations_that_lead_nowhere_are_caught() {
    let tree = [
        Source::new(
            "crates/ebb-x/src/a/disk.rs",
            "//! ADR 3\nimpl<T> Disk<T> { fn read(&self) {} }\n",
        ),
        Source::new(
            "crates/ebb-x/src/b.rs",
            "pub enum Level { Calm }\nstruct Other;\nfn write() {}\n",
        ),
        Source::new("docs/adr/0003-writeback-law.md", concat!("See [it](../glossary", ".md).\n")),
        Source::new("docs/glossary.md", "no `name`\n"),
    ];
    let there = "`disk.rs` `a/disk.rs` `ebb-x/b.rs` `ebb-x` `Disk::read` `Level::Calm` `write()` `Other`\n\
        `File::flush`, `some words`, `cache = \"none\"`\n```\n`no_such_name`\n```\n";
    assert_eq!(missing_names(there, &tree), Vec::<String>::new());
    for gone in [
        "c.rs",
        "b/disk.rs",
        "ebb-y",
        "Disk::write",
        "Other::read",
        "Level::Hot",
        "read_all()",
        "Disks",
        "no_such_name",
    ] {
        let text = format!("one line\nand `{gone}`\n");
        assert_eq!(missing_names(&text, &tree), [format!("2: `{gone}`")], "{gone}");
    }
    let text = "one line\nand `a/disk.rs`, and `disks.rs`\n";
    let document = Source::new("docs/adr/0003-writeback-law.md", text);
    let gone = ["docs/adr/0003-writeback-law.md:2: `disks.rs`"];
    assert_eq!(missing_files(&document, &tree), gone);
    let cites = |line: &str| {
        let source = Source::new("crates/ebb-x/src/c.rs", line);
        missing_documents(&source, &tree)
    };
    for line in [
        "docs/adr/0003-writeback-law.md, docs/adr, docs/glossary.md. (ADR 3)",
        "`doc/proto.md` of NBD, docs/misc/xenstore.txt of Xen, https://example.org/docs/c.md",
        "a seed of 7, and a reference to it",
    ] {
        assert_eq!(cites(line), Vec::<String>::new(), "{line}");
    }
    assert_eq!(missing_documents(&tree[2], &tree), Vec::<String>::new());
    for line in [
        concat!("see doc", "s/c", ".md"),
        concat!("see c", ".md"),
        concat!("see docs/adr/", "0004-y"),
        concat!("see AD", "R 4"),
        concat!("see Seed", " `000`"),
        concat!("see the design", ", section 4"),
        concat!("see the reference", ", 5.1"),
    ] {
        assert_eq!(cites(line).len(), 1, "{line}");
    }
}
