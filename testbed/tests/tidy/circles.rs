//! No circle between the modules of a crate.
//!
//! A module here is what `lib.rs` declares: a file directly below `src`, together with everything below its folder. A
//! module uses another one if it names it, or what `lib.rs` exports of it, in a path that begins with `crate::`, or with as
//! many `super::` as lead to the crate's root. Comments, strings and code for tests do not count, and neither do `lib.rs`
//! and `main.rs`: they join the modules. Within a module, parents and children may use each other.
//!
//! Modules that use each other in a circle can only be read together, and none of them can become a crate of its own. A
//! circle that is argued for has a line in the documentation of its `lib.rs`, with all its modules and the reason:
//!
//! ```text
//! //! Circles: arena, zone: one structure in two files
//! ```
//!
//! A line without a circle, or with other modules than the circle has, is reported.

use std::collections::{BTreeMap, BTreeSet};

use super::{Source, positions, read_tree, root};

/// By module the modules it uses, and by each of these a file and a line where it does.
type Uses = BTreeMap<String, BTreeMap<String, String>>;

/// The root of a crate: its modules, and the names that it exports of them.
struct CrateRoot {
    modules: BTreeSet<String>,
    exports: BTreeMap<String, String>,
}

/// The name at the beginning of `code`.
fn name(code: &str) -> &str {
    let end = code.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(code.len());
    &code[..end]
}

/// The paths of the tree of a `use`, or the one path of an expression, at the beginning of `code`: `a::{b, c::d}` is
/// `a::b` and `a::c::d`.
fn paths(code: &str) -> Vec<String> {
    let code = code.trim_start();
    let Some(group) = code.strip_prefix('{') else {
        let first = name(code);
        let rest = code[first.len()..].strip_prefix("::");
        let rest = rest.map(paths).filter(|rest| !rest.is_empty());
        return match rest {
            Some(rest) => rest.iter().map(|rest| format!("{first}::{rest}")).collect(),
            None if first.is_empty() => Vec::new(),
            None => vec![first.to_owned()],
        };
    };
    let (mut depth, mut from, mut found) = (0_usize, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                found.extend(paths(&group[from..at]));
                from = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    found
}

/// The code of a file without what only tests are built from.
fn product(source: &Source) -> String {
    let lines = source.code.lines().enumerate();
    let kept = lines.map(|(index, line)| if source.is_test(index + 1) { "" } else { line });
    kept.collect::<Vec<_>>().join("\n")
}

/// The crate and the path of a module's file below `src`, without its end: `a/b` of `crates/x/src/a/b.rs`.
fn place(source: &Source) -> Option<(&str, &str)> {
    let (name, file) = source.path.strip_prefix("crates/")?.split_once("/src/")?;
    let file = file.strip_suffix(".rs")?;
    Some((name, file.strip_suffix("/mod").unwrap_or(file)))
}

fn crate_root(name: &str, sources: &[Source]) -> CrateRoot {
    let files = sources.iter().filter_map(place).filter(|(of, _)| *of == name);
    let modules = files.filter_map(|(_, file)| file.split('/').next());
    let modules: BTreeSet<String> =
        modules.filter(|file| !["lib", "main", "bin"].contains(file)).map(str::to_owned).collect();
    let mut exports = BTreeMap::new();
    let path = format!("crates/{name}/src/lib.rs");
    if let Some(lib) = sources.iter().find(|source| source.path == path) {
        let code = product(lib);
        for at in positions(&code, "use ") {
            for path in paths(&code[at + 4..]) {
                let path = path.trim_start_matches("crate::").trim_start_matches("self::");
                if let Some((module, rest)) = path.split_once("::") {
                    let last = rest.rsplit("::").next().unwrap_or(rest);
                    exports.insert(last.to_owned(), module.to_owned());
                }
            }
        }
    }
    CrateRoot { modules, exports }
}

/// The first names of the paths from the crate's root in the code of a file, each with its line.
fn from_root(code: &str, file: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let depth = file.split('/').count();
    for at in positions(code, "crate::") {
        found.extend(paths(&code[at + 7..]).into_iter().map(|path| (at, path)));
    }
    for at in positions(code, "super::") {
        let supers = code[at..].split("super::").take_while(|part| part.is_empty()).count();
        // Except a `super::` within such a sequence.
        if supers == depth && !code[..at].ends_with("::") {
            let rest = &code[at + 7 * supers..];
            found.extend(paths(rest).into_iter().map(|path| (at, path)));
        }
    }
    let line = |at: usize| code[..at].matches('\n').count() + 1;
    found.into_iter().map(|(at, path)| (line(at), name(&path).to_owned())).collect()
}

/// Which module of a crate uses which.
fn uses(crate_name: &str, sources: &[Source]) -> Uses {
    let root = crate_root(crate_name, sources);
    let mut uses = Uses::new();
    for source in sources {
        let Some((_, file)) = place(source).filter(|(of, _)| *of == crate_name) else { continue };
        let module = file.split('/').next().unwrap_or(file);
        if !root.modules.contains(module) {
            continue;
        }
        let code = product(source);
        for (line, name) in from_root(&code, file) {
            let other = root.modules.get(&name).or_else(|| root.exports.get(&name));
            let Some(other) = other.filter(|other| *other != module) else { continue };
            let entry = uses.entry(module.to_owned()).or_default().entry(other.clone());
            entry.or_insert_with(|| format!("{}:{line}", source.path));
        }
    }
    uses
}

/// The modules that `from` leads to.
fn reached<'a>(uses: &'a Uses, from: &'a str) -> BTreeSet<&'a str> {
    let (mut all, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        for other in uses.get(module).into_iter().flat_map(BTreeMap::keys) {
            if all.insert(other.as_str()) {
                next.push(other);
            }
        }
    }
    all
}

/// The circles: sets of modules each of which leads to all of its set.
fn circles(uses: &Uses) -> BTreeSet<Vec<String>> {
    let all: BTreeMap<&str, _> = uses.keys().map(|m| (m.as_str(), reached(uses, m))).collect();
    let leads = |a: &str, b: &str| all.get(a).is_some_and(|reached| reached.contains(b));
    let circle = |module: &&str| -> Vec<String> {
        let same = all.keys().filter(|other| leads(module, other) && leads(other, module));
        same.map(|other| (*other).to_owned()).collect()
    };
    all.keys().map(circle).filter(|circle| !circle.is_empty()).collect()
}

/// The circles that `lib.rs` argues for.
fn argued(lib: &Source) -> Vec<Vec<String>> {
    let lines = lib.raw.lines().filter_map(|line| line.strip_prefix("//! Circles: "));
    let argued = lines.filter_map(|line| line.split_once(": "));
    let argued = argued.filter(|(_, reason)| !reason.trim().is_empty());
    argued
        .map(|(modules, _)| {
            let mut modules: Vec<_> = modules.split(", ").map(str::to_owned).collect();
            modules.sort_unstable();
            modules
        })
        .collect()
}

/// What a crate has to change, a line each.
fn judge_crate(crate_name: &str, sources: &[Source]) -> Vec<String> {
    let path = format!("crates/{crate_name}/src/lib.rs");
    let lib = sources.iter().find(|source| source.path == path);
    let argued = lib.map(argued).unwrap_or_default();
    let uses = uses(crate_name, sources);
    let circles = circles(&uses);
    let mut told = Vec::new();
    for circle in circles.iter().filter(|circle| !argued.contains(circle)) {
        told.push(format!(
            "{path}: circle: {}\n    instead: move what is misplaced below both, or argue for it: \
             `//! Circles: {}: REASON`",
            circle.join(", "),
            circle.join(", ")
        ));
        for module in circle {
            let others = uses.get(module).into_iter().flatten();
            let others = others.filter(|(other, _)| circle.contains(other));
            told.extend(others.map(|(other, at)| format!("    {module} uses {other}: {at}")));
        }
    }
    let gone = argued.iter().filter(|circle| !circles.contains(*circle));
    told.extend(gone.map(|circle| format!("{path}: no such circle: {}", circle.join(", "))));
    told
}

#[test]
fn no_crate_has_a_circle_of_modules_that_is_not_argued_for() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    sources.retain(|source| source.is_rust() && source.path.starts_with("crates/"));
    let crates: BTreeSet<&str> = sources.iter().filter_map(place).map(|(name, _)| name).collect();
    assert!(crates.len() > 10, "{crates:?}");
    let told: Vec<String> = crates.iter().flat_map(|name| judge_crate(name, &sources)).collect();
    assert!(told.is_empty(), "{}", told.join("\n"));
}

#[test]
fn circles_are_caught() {
    let file = |name: &str, text: &str| Source::new(&format!("crates/x/src/{name}.rs"), text);
    let told = |files: &[(&str, &str)]| {
        let sources: Vec<_> = files.iter().map(|(name, text)| file(name, text)).collect();
        judge_crate("x", &sources)
    };
    let first = |files: &[(&str, &str)]| {
        told(files).first().map(|told| told.lines().next().unwrap_or_default().to_owned())
    };
    let circle = Some("crates/x/src/lib.rs: circle: a, b".to_owned());
    let lib = ("lib", "//! X.\nmod a;\nmod b;\nmod c;\npub use b::{B, C as D};\n");
    let a = ("a", "use crate::b::B;\n");
    for back in [
        "use crate::a::A;",
        "use super::a;",
        "use crate::{c::C, a::{self, A}};",
        "fn f() { crate::a::g() }",
    ] {
        assert_eq!(first(&[lib, a, ("b", back)]), circle, "{back}");
    }
    // From a subdirectory, and by a name that the root exports.
    assert_eq!(first(&[lib, a, ("b", ""), ("b/inner", "use super::super::a::A;")]), circle);
    assert_eq!(first(&[lib, ("a", "use crate::B;"), ("b", "use crate::a;")]), circle);
    // A circle of three modules.
    let three = [lib, a, ("b", "use crate::c::C;"), ("c", "use crate::a::A;")];
    assert_eq!(first(&three), Some("crates/x/src/lib.rs: circle: a, b, c".to_owned()));
    assert!(told(&three).contains(&"    c uses a: crates/x/src/c.rs:1".to_owned()));

    for alone in [
        "",
        "use crate::c::C;",
        "use super::c;",
        "// crate::a is not used here.",
        "const A: &str = \"crate::a\";",
        "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}",
        "mod inner;\nuse self::inner::I;",
        "use ebb_mem::a;",
    ] {
        assert_eq!(first(&[lib, a, ("b", alone), ("c", "")]), None, "{alone}");
    }
    // A parent and its children.
    assert_eq!(
        first(&[lib, ("b", "use inner::I;"), ("b/inner", "use super::B; use crate::b::c;")]),
        None
    );

    let back = ("b", "use crate::a::A;");
    let argued = ("lib", "//! X.\n//!\n//! Circles: b, a: both are one.\n");
    assert_eq!(first(&[argued, a, back]), None);
    let reasonless = ("lib", "//! X.\n//!\n//! Circles: a, b: \n");
    assert_eq!(first(&[reasonless, a, back]), circle);
    let gone = Some("crates/x/src/lib.rs: no such circle: a, b".to_owned());
    assert_eq!(first(&[argued, a]), gone);
    assert_eq!(told(&[argued, a, ("b", "use crate::c::C;"), ("c", "use crate::a::A;")]).len(), 5);
}
