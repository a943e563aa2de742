//! Rules for the tree: reads all files and reports each violation with its line and a remedy. The
//! tests at the end show each rule a violation, so that each rule can fail.
//!
//! Rules see code with comments and the content of strings blanked out. An exception is listed in
//! [`ALLOWED`] with its reason and the number of occurrences; an unused exception is itself a
//! violation.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use lists::{ALLOWED, Allowed, DATA_PATH, MAY_KNOW, UNSAFE};

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/citations.rs"]
mod citations;
#[path = "tidy/guards.rs"]
mod guards;
#[path = "tidy/links.rs"]
mod links;
#[path = "tidy/lists.rs"]
mod lists;
#[path = "tidy/log_lines.rs"]
mod log_lines;
#[path = "tidy/names.rs"]
mod names;

/// Longest source file and function, in lines.
const FILE_LINES: usize = 650;
const FUNCTION_LINES: usize = 100;

/// One place that breaks a rule. `line` counts from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    rule: &'static str,
    path: String,
    line: usize,
    text: String,
    hint: &'static str,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { rule, path, line, text, hint } = self;
        write!(f, "{path}:{line}: {rule}: {}\n    instead: {hint}", text.trim())
    }
}

/// A file of the tree; for Rust also the code that the rules check.
struct Source {
    path: String,
    raw: String,
    /// `raw` with comments and strings blanked out, of the same length.
    code: String,
    /// The offset of each line.
    starts: Vec<usize>,
    /// For each line whether it is built for tests only.
    tests: Vec<bool>,
}

impl Source {
    fn new(path: &str, raw: &str) -> Source {
        let (path, raw, code) = (path.to_owned(), raw.to_owned(), blank(raw));
        let starts = code.match_indices('\n').map(|(at, _)| at + 1);
        let starts: Vec<usize> = std::iter::once(0).chain(starts).collect();
        // Models are tests.
        let all =
            path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("/models.rs");
        let tests = vec![all; starts.len()];
        let mut source = Source { path, raw, code, starts, tests };
        source.mark_tests();
        source
    }

    /// Marks the lines behind `cfg(test)`.
    fn mark_tests(&mut self) {
        for mark in ["#[cfg(test)]", "#[cfg(all(test"] {
            for at in positions(&self.code, mark) {
                let close = self.code[at..].find(']').map_or(at, |close| at + close + 1);
                let last = self.line_at(item_end(&self.code, close) - 1);
                let first = self.line_at(at);
                self.tests[first - 1..last].fill(true);
            }
        }
    }

    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn is_product(&self) -> bool {
        self.path.starts_with("crates/")
    }

    fn is_within(&self, places: &[&str]) -> bool {
        places.iter().any(|place| self.path.starts_with(place))
    }

    /// The number of the line at a byte of the code.
    fn line_at(&self, at: usize) -> usize {
        self.starts.partition_point(|start| *start <= at)
    }

    fn is_test(&self, line: usize) -> bool {
        self.tests.get(line - 1).copied().unwrap_or(false)
    }

    fn finding(&self, rule: &'static str, line: usize, hint: &'static str) -> Finding {
        let text = self.raw.lines().nth(line - 1).unwrap_or_default().to_owned();
        Finding { rule, path: self.path.clone(), line, text, hint }
    }

    /// A finding for each line of the code that has one of `words`, if `counts` is true for the line.
    fn words(
        &self,
        rule: &'static str,
        words: &[&str],
        hint: &'static str,
        counts: impl Fn(usize) -> bool,
    ) -> Vec<Finding> {
        let mut lines: Vec<usize> = words
            .iter()
            .flat_map(|word| positions(&self.code, word))
            .map(|at| self.line_at(at))
            .filter(|line| counts(*line))
            .collect();
        lines.sort_unstable();
        lines.dedup();
        lines.into_iter().map(|line| self.finding(rule, line, hint)).collect()
    }
}

/// The offsets of `word` in `code`, except at the end of a longer name.
fn positions(code: &str, word: &str) -> Vec<usize> {
    let name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let within = |at: usize| at > 0 && name(word.as_bytes()[0]) && name(code.as_bytes()[at - 1]);
    code.match_indices(word).map(|(at, _)| at).filter(|at| !within(*at)).collect()
}

/// Blanks out comments, strings and characters; line ends stay, and so do the opening quotes.
fn blank(text: &str) -> String {
    let raw = text.as_bytes();
    let mut code = raw.to_vec();
    let mut at = 0;
    while at < raw.len() {
        let (skip, end) = literal(raw, at);
        for byte in &mut code[(at + skip).min(end)..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    // Literals are blanked out as a whole, so that no character is split.
    String::from_utf8_lossy(&code).into_owned()
}

/// The comment, string or character literal that begins at `at`: how many bytes of it to keep, and its
/// end. For anything else one byte.
fn literal(raw: &[u8], at: usize) -> (usize, usize) {
    let rest = &raw[at..];
    let find = |from: usize, what: &[u8]| {
        rest[from..].windows(what.len()).position(|w| w == what).map(|p| from + p + what.len())
    };
    let is_name = at > 0 && (raw[at - 1].is_ascii_alphanumeric() || raw[at - 1] == b'_');
    if rest.starts_with(b"//") {
        return (0, at + find(0, b"\n").map_or(rest.len(), |end| end - 1));
    }
    if rest.starts_with(b"/*") {
        return (0, at + find(2, b"*/").unwrap_or(rest.len()));
    }
    if rest[0] == b'r' && (!is_name || raw[at - 1] == b'b') {
        let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
            let end = find(2 + hashes, &close).unwrap_or(rest.len());
            return (2 + hashes, at + end);
        }
    }
    if rest[0] == b'"' {
        let mut end = 1;
        while end < rest.len() && rest[end] != b'"' {
            end += if rest[end] == b'\\' { 2 } else { 1 };
        }
        return (1, at + (end + 1).min(rest.len()));
    }
    if rest[0] == b'\'' {
        // A character literal, or else a lifetime.
        let end = match rest.get(1) {
            Some(b'\\') => find(3, b"'"),
            _ => find(2, b"'").filter(|end| *end <= 6 && (*end == 3 || !rest[1].is_ascii())),
        };
        return (1, at + end.unwrap_or(1));
    }
    (1, at + 1)
}

/// The offset after the block or the statement that begins at or after `from`.
fn item_end(code: &str, from: usize) -> usize {
    let mut depth = 0usize;
    for (at, byte) in code.bytes().enumerate().skip(from) {
        match byte {
            b'{' | b'(' | b'[' => depth += 1,
            b'}' | b')' | b']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 && byte == b'}' {
                    return at + 1;
                }
            }
            b';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

fn flush(source: &Source) -> Vec<Finding> {
    // The flush of a store or a volume has the worker as an argument; that of `Write` has none.
    let words = [".flush()", "Write::flush", "File::flush", "fn flush(&mut self)"];
    let hint =
        "`File::flush` does nothing: `volume.flush(io)`, `store.flush(io)`, `io.fdatasync(fd)`";
    let within = source.is_within(DATA_PATH);
    source.words("flush", &words, hint, |line| within && !source.is_test(line))
}

fn panics(source: &Source) -> Vec<Finding> {
    let words = [".unwrap()", ".expect(", ".unwrap_err()", "panic!", "unreachable!"];
    let hint = "an error with its remedy, or `unwrap_or` with a value that is safe";
    source.words("panic", &words, hint, |line| source.is_product() && !source.is_test(line))
}

fn prints(source: &Source) -> Vec<Finding> {
    let words = ["println!", "eprintln!", "print!", "eprint!"];
    let hint = "`tracing` for the log; `writeln!` to a locked stdout for requested output";
    let mut found = source.words("print", &words, hint, |line| !source.is_test(line));
    found.extend(source.words("print", &["dbg!"], "take it out", |_| true));
    found
}

fn sleeps(source: &Source) -> Vec<Finding> {
    let hint = "`io.sleep` on a worker; in a test wait for the event itself";
    let words = ["thread::sleep", "sleep_ms("];
    source.words("sleep", &words, hint, |_| !source.path.starts_with("testbed/"))
}

fn ignored(source: &Source) -> Vec<Finding> {
    let hint = "repair the test or remove it: one that does not run protects nothing";
    source.words("ignore", &["#[ignore"], hint, |_| true)
}

fn unfinished(source: &Source) -> Vec<Finding> {
    let hint = "remove it: what does not exist yet has no stub and no variant";
    source.words("todo", &["todo!", "unimplemented!"], hint, |_| true)
}

/// Casts that may lose bits. A cast to 64 bits or more loses none here, and the standard library has no
/// other conversion from `usize`; clippy's lints check signs.
fn casts(source: &Source) -> Vec<Finding> {
    let types = ["u8", "u16", "u32", "usize", "i8", "i16", "i32", "i64", "isize"];
    let hint = "`from` if no bits can be lost, else `try_from`, and handle values that do not fit";
    let words: Vec<String> = types.iter().map(|name| format!(" as {name}")).collect();
    let ends = |at: usize, word: &str| {
        let next = source.code.as_bytes().get(at + word.len()).copied().unwrap_or(b' ');
        !next.is_ascii_alphanumeric() && next != b'_'
    };
    let found = words.iter().flat_map(|word| {
        let places = positions(&source.code, word).into_iter();
        places.filter(move |at| ends(*at, word)).map(|at| source.line_at(at)).collect::<Vec<_>>()
    });
    // The value of a constant is known before run time.
    let constant = |line: usize| {
        let text = source.raw.lines().nth(line - 1).unwrap_or_default().trim_start();
        ["const ", "pub const ", "pub(crate) const "].iter().any(|head| text.starts_with(head))
            && !text.contains("fn ")
    };
    let counts = |line: &usize| source.is_product() && !source.is_test(*line) && !constant(*line);
    found.filter(counts).map(|line| source.finding("cast", line, hint)).collect()
}

fn unsafe_code(source: &Source) -> Vec<Finding> {
    let hint =
        "the safe call of `rustix` or `ebb_io`; a module that needs unsafe is listed in UNSAFE";
    let known = UNSAFE.contains(&source.path.as_str());
    let words = ["unsafe {", "unsafe fn", "unsafe impl"];
    source.words("unsafe", &words, hint, |line| !known && !source.is_test(line))
}

fn long_files(source: &Source) -> Vec<Finding> {
    let lines = source.raw.lines().count();
    let hint = "split it along its ideas; tests may go into a file of their own";
    let long = lines > FILE_LINES;
    long.then(|| source.finding("long file", FILE_LINES + 1, hint)).into_iter().collect()
}

fn long_functions(source: &Source) -> Vec<Finding> {
    let hint = "give its steps names and functions of their own";
    let mut found = Vec::new();
    for at in positions(&source.code, "fn ") {
        // A type such as `fn (u8)` has no name.
        if !source.code[at + 3..].starts_with(|c: char| c.is_alphabetic() || c == '_') {
            continue;
        }
        let (first, last) = (source.line_at(at), source.line_at(item_end(&source.code, at) - 1));
        if last - first + 1 > FUNCTION_LINES {
            found.push(source.finding("long function", first, hint));
        }
    }
    found
}

fn headings(source: &Source) -> Vec<Finding> {
    let hint = "open it with `//!`: what it is for, its invariants, its source";
    let opens = source.raw.starts_with("//!") || source.path.ends_with("/tests.rs");
    let bare = source.is_product() && !opens;
    bare.then(|| source.finding("heading", 1, hint)).into_iter().collect()
}

/// Paths that exist on one machine only, in every text file including comments.
fn machine_paths(source: &Source) -> Vec<Finding> {
    // In pieces, so that this file is no finding.
    let words = [concat!("/wo", "rk/"), concat!("/tm", "p/t/"), concat!("/ro", "ot/")];
    let hint = "a path relative to the repository, a temporary directory, or an example path";
    let lines = source.raw.lines().enumerate();
    let hits = lines.filter(|(_, text)| words.iter().any(|word| text.contains(word)));
    hits.map(|(index, _)| source.finding("machine path", index + 1, hint)).collect()
}

/// The dependencies between crates, from a `Cargo.toml`.
fn arrows(source: &Source) -> Vec<Finding> {
    let Some(name) =
        source.path.strip_prefix("crates/").and_then(|p| p.strip_suffix("/Cargo.toml"))
    else {
        return Vec::new();
    };
    let Some(place) = MAY_KNOW.iter().position(|(known, _)| *known == name) else {
        let hint = "add the crate to MAY_KNOW here, and to ARCHITECTURE.md";
        return vec![source.finding("arrow", 1, hint)];
    };
    let hint = "dependencies go down only: exports, volume, store, io, mem; use the crate between";
    let mut found = Vec::new();
    let (mut in_dependencies, mut in_tests) = (false, false);
    for (index, text) in source.raw.lines().enumerate() {
        if let Some(section) = text.strip_prefix('[') {
            in_dependencies = section.contains("dependencies");
            in_tests = section.contains("dev-dependencies");
        }
        let key = text.split(['=', '.', ' ']).next().unwrap_or_default();
        let ours = key == "ebbd" || key.starts_with("ebb-") || key == "testbed";
        // A crate may depend on itself, with features for its own tests.
        let itself = in_tests && key == name;
        let below = in_tests && MAY_KNOW[..place].iter().any(|(name, _)| *name == key);
        if in_dependencies && ours && !itself && !below && !MAY_KNOW[place].1.contains(&key) {
            found.push(source.finding("arrow", index + 1, hint));
        }
        if in_dependencies && !in_tests && text.contains("/testbed/") {
            let hint = "crates of the testbed are dev-dependencies only";
            found.push(source.finding("arrow", index + 1, hint));
        }
    }
    if !source.raw.contains("[lints]\nworkspace = true") {
        let hint = "end it with `[lints]` and `workspace = true`";
        found.push(source.finding("lints", 1, hint));
    }
    found
}

/// All findings of a file, exceptions included.
fn judge(source: &Source) -> Vec<Finding> {
    let mut found = machine_paths(source);
    found.extend(arrows(source));
    if source.is_rust() {
        let rules = [
            flush,
            panics,
            prints,
            sleeps,
            ignored,
            unfinished,
            casts,
            unsafe_code,
            long_files,
            log_lines::log_lines,
            long_functions,
            headings,
        ];
        found.extend(rules.iter().flat_map(|rule| rule(source)));
    }
    found
}

/// Removes what is allowed; reports exceptions that are not needed, or not enough.
fn less_allowed(found: &[Finding], allowed: &[Allowed]) -> Vec<String> {
    let matches =
        |finding: &Finding, one: &Allowed| (one.0, one.1) == (finding.rule, finding.path.as_str());
    let mut told = Vec::new();
    for one in allowed {
        let places = found.iter().filter(|finding| matches(finding, one)).count();
        let (rule, path, most, reason) = one;
        if places == 0 {
            told.push(format!(
                "{path}: {rule}: no exception needed any more ({reason}): remove it"
            ));
        } else if places > *most {
            told.push(format!("{path}: {rule}: {places} places, {most} allowed ({reason}):"));
            told.extend(found.iter().filter(|f| matches(f, one)).map(ToString::to_string));
        }
    }
    let rest = found.iter().filter(|finding| !allowed.iter().any(|one| matches(finding, one)));
    told.extend(rest.map(ToString::to_string));
    told
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every text file of the tree below `folder` that is written by hand.
fn read_tree(folder: &Path, name: &str, sources: &mut Vec<Source>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let file_name = entry.file_name().to_string_lossy().into_owned();
        let made = ["target", "data", "corpus", "artifacts", ".git", "Cargo.lock"];
        if made.contains(&file_name.as_str()) {
            continue;
        }
        let name = if name.is_empty() { file_name } else { format!("{name}/{file_name}") };
        if entry.file_type()?.is_dir() {
            read_tree(&entry.path(), &name, sources)?;
        } else if let Ok(text) = String::from_utf8(fs::read(entry.path())?) {
            sources.push(Source::new(&name, &text));
        }
    }
    Ok(())
}

#[test]
fn the_tree_is_tidy() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    let count = |what: &str| sources.iter().filter(|source| source.path.ends_with(what)).count();
    assert!(count(".rs") > 50 && count("Cargo.toml") > 6, "not the whole tree was read");
    let found: Vec<Finding> = sources.iter().flat_map(judge).collect();
    let told = less_allowed(&found, ALLOWED);
    assert!(told.is_empty(), "{} findings\n\n{}", told.len(), told.join("\n"));
    for path in UNSAFE {
        let source = sources.iter().find(|source| source.path == *path);
        let used = source.is_some_and(|source| !positions(&source.code, "unsafe ").is_empty());
        assert!(used, "{path} has no unsafe any more: remove it from UNSAFE");
    }
}

/// The tests and figures that a specification names in the last column of its tables.
fn named(specification: &str) -> Vec<&str> {
    let rows = specification.lines().filter(|line| line.starts_with("| ") && line.ends_with('|'));
    let columns = rows.filter_map(|row| row.trim_end_matches('|').rsplit('|').next());
    let words = columns.flat_map(|column| column.split('`').skip(1).step_by(2));
    let name = |word: &&str| word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    words.filter(name).collect()
}

#[test]
fn every_promise_names_its_test() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    let specification = sources.iter().find(|source| source.path == "SPEC.md").unwrap();
    let all: Vec<_> = sources.iter().filter(|source| source.is_rust()).collect();
    let test = |name: &str| {
        let head = format!("fn {name}(");
        all.iter().any(|source| !positions(&source.code, &head).is_empty())
    };
    // A figure is the name of a workload and of a measured quantity, each in quotes somewhere.
    let bench = |text: &str| {
        let quoted = format!("\"{text}\"");
        let mut benches = all.iter().filter(|source| source.path.starts_with("testbed/src/bench"));
        benches.any(|source| source.raw.contains(&quoted))
    };
    let figure = |name: &str| {
        let parts = name.strip_prefix("nbd_").unwrap_or_default();
        let splits = parts.char_indices().map(|(at, _)| parts.split_at(at));
        bench(name) || splits.into_iter().any(|(load, what)| bench(load) && bench(what))
    };
    let names = named(&specification.raw);
    assert!(names.len() > 50, "{names:?}");
    let missing: Vec<_> = names.into_iter().filter(|name| !test(name) && !figure(name)).collect();
    assert!(missing.is_empty(), "SPEC.md names tests or figures that do not exist: {missing:?}");
    assert!(!test("a_test_that_does_not_exist") && !figure("nbd_randread_4k_qd1_no_such"));
}

/// The rules and lines found in a text.
fn found(path: &str, text: &str) -> Vec<(&'static str, usize)> {
    judge(&Source::new(path, text)).iter().map(|finding| (finding.rule, finding.line)).collect()
}

#[test]
fn each_rule_catches_its_offender() {
    let io = "crates/ebb-io/src/x.rs";
    for (rule, path, line) in [
        ("flush", io, "fn f() { file.flush()?; }"),
        ("flush", io, "fn f() { Write::flush(&mut file)?; }"),
        ("panic", "crates/ebb-export-nbd/src/decode.rs", "fn f() { x.unwrap() }"),
        ("panic", "crates/ebb-config/src/lib.rs", "fn f() { x.expect(\"it is there\") }"),
        ("panic", io, "fn f() { panic!(\"no\") }"),
        ("panic", io, "fn f() { unreachable!() }"),
        ("print", io, "fn f() { println!(\"{x}\") }"),
        ("print", "testbed/src/x.rs", "fn f() { eprintln!(\"{x}\") }"),
        ("print", "testbed/tests/x.rs", "fn f() { dbg!(x) }"),
        ("sleep", io, "fn f() { std::thread::sleep(second) }"),
        ("ignore", "testbed/tests/x.rs", "#[ignore = \"slow\"] fn f() {}"),
        ("todo", "fuzz/src/x.rs", "fn f() { todo!() }"),
        ("cast", io, "fn f() { x as u32 }"),
        ("cast", io, "fn f() { (x as usize) }"),
        ("log line", io, "fn f() { tracing::warn!(volume, %error, cause) }"),
        ("log line", io, "fn f() { tracing::info!(name = \"x\", of = g(\"y\", 3)) }"),
        ("unsafe", io, "fn f() { unsafe { g() } }"),
        ("unsafe", "testbed/src/x.rs", "fn f() { unsafe { g() } }"),
        ("machine path", "testbed/src/x.rs", concat!("// see /wo", "rk/there")),
        ("machine path", "README.md", concat!("cd /ro", "ot/there")),
    ] {
        let text = format!("//! Why.\n\n{line}\n");
        assert_eq!(found(path, &text), [(rule, 3)], "{line}");
    }
    assert_eq!(found(io, "fn f() {}\n"), [("heading", 1)]);
    assert_eq!(found(io, &"//! x\n".repeat(FILE_LINES)), []);
    assert_eq!(found(io, &"//! x\n".repeat(FILE_LINES + 1)), [("long file", FILE_LINES + 1)]);
    let function = |lines| format!("//! x\nfn f() {{\n{}}}\n", "    g();\n".repeat(lines - 2));
    assert_eq!(found(io, &function(FUNCTION_LINES)), []);
    assert_eq!(found(io, &function(FUNCTION_LINES + 1)), [("long function", 2)]);
}

#[test]
fn arrows_that_point_up_are_caught() {
    let toml = |section: &str, crate_name: &str| {
        format!("[package]\n\n[{section}]\n{crate_name} = \"1\"\n\n[lints]\nworkspace = true\n")
    };
    let (io, mem) = ("crates/ebb-io/Cargo.toml", "crates/ebb-mem/Cargo.toml");
    assert_eq!(found(mem, &toml("dependencies", "ebb-io")), [("arrow", 4)]);
    assert_eq!(found(io, &toml("dependencies", "ebb-mem")), []);
    assert_eq!(found(mem, &toml("dev-dependencies", "ebb-mem")), []);
    assert_eq!(found(io, &toml("dependencies", "ebb-store")), [("arrow", 4)]);
    assert_eq!(found(io, &toml("dev-dependencies", "ebbd")), [("arrow", 4)]);
    assert_eq!(found(io, &toml("target.'cfg(unix)'.dependencies", "testbed")), [("arrow", 4)]);
    assert_eq!(found(io, &toml("features", "ebb-store")), []);
    let seeded = "seeded = { path = \"../../testbed/seeded\" }\n[x]\ny";
    assert_eq!(found(io, &toml("dependencies", seeded)), [("arrow", 4)]);
    assert_eq!(found(io, &toml("dev-dependencies", seeded)), []);
    let nbd = "crates/ebb-export-nbd/Cargo.toml";
    assert_eq!(found(nbd, &toml("dependencies", "ebb-store")), [("arrow", 4)]);
    assert_eq!(found(nbd, &toml("dev-dependencies", "ebb-store")), []);
    assert_eq!(found("crates/ebb-store/Cargo.toml", &toml("dependencies", "ebb-io")), []);
    assert_eq!(found("crates/ebb-new/Cargo.toml", &toml("dependencies", "libc")), [("arrow", 1)]);
    assert_eq!(found(io, "[package]\n"), [("lints", 1)]);
}

#[test]
fn what_only_looks_like_an_offender_is_left_alone() {
    let text = r##"//! Why.

// x.unwrap() and println!("x") in a comment /* file.flush() */
/* todo!() over
   two lines */
const A: &str = "x.unwrap() \" println!";
const B: &str = r#"unsafe { "todo!()" }"#;
const D: u32 = C as u32;
const C: [char; 3] = ['"', '\'', 'é'];
async fn f<'a>(x: &'a str) -> u64 { volume.flush(io).await; x.unwrap_or(0) as u64 }
fn g() { sprintln!("x"); x as usizes; x.expected(); tracing::warn!(%error, "it {x}") }

#[cfg(test)]
mod tests {
    fn h() { x.unwrap(); println!("{}", x as u8); }
}
"##;
    assert_eq!(found("crates/ebb-io/src/x.rs", text), []);
    let behind = format!("{text}fn after() {{ x.unwrap() }}\n");
    assert_eq!(found("crates/ebb-io/src/x.rs", &behind), [("panic", 17)]);
    assert_eq!(found("crates/ebb-io/src/x/tests.rs", "fn h() { x.unwrap(); }\n"), []);
    assert_eq!(found("crates/ebb-mem/src/models.rs", "//! Why.\nfn h() { x.unwrap(); }\n"), []);
}

#[test]
fn exceptions_are_counted() {
    let path = "crates/ebb-io/src/x.rs";
    let one = |places| [("panic", path, places, "why")];
    let findings = |count: usize| {
        let text = format!("//! Why.\n{}", "fn f() { x.unwrap() }\n".repeat(count));
        judge(&Source::new(path, &text))
    };
    assert_eq!(less_allowed(&findings(2), &one(2)), Vec::<String>::new());
    assert!(less_allowed(&findings(0), &one(2))[0].contains("no exception needed any more"));
    assert!(less_allowed(&findings(3), &one(2))[0].contains("3 places, 2 allowed"));
    let told = less_allowed(&findings(1), &[]);
    assert!(told[0].starts_with("crates/ebb-io/src/x.rs:2: panic: fn f()"), "{told:?}");
}
