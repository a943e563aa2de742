//! What the project may depend on: the licences, sources and versions of other projects' crates.
//!
//! - A crate's licence, an SPDX expression, can be met with the [`LICENCES`] alone.
//! - Each crate is from crates.io, with a checksum: none from a git repository, another registry or a path outside the
//!   tree. Both `Cargo.lock` say so for all platforms.
//! - No crate is in the tree in two versions, except the [`TWICE`] listed; no requirement is `*`; none is [`BANNED`].
//!
//! The facts are those of `cargo metadata` for this platform, without a network: what was built is on this machine.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

use super::root;

/// Licences that may be combined with ours.
const LICENCES: &[&str] =
    &["MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Unicode-3.0", "Zlib"];

/// Why a crate is there twice.
const BLKIO: &str = "blkio 0.5.1, its newest release, a client of tests";
/// Crates that may be there in two versions, and why.
const TWICE: &[(&str, &str)] = &[
    ("bitflags", "virtio-queue of a test needs the older"),
    ("getrandom", SHUTTLE),
    ("linux-raw-sys", BLKIO),
    ("rand", SHUTTLE),
    ("rand_core", SHUTTLE),
    ("rustix", BLKIO),
    (
        "signal-hook",
        "of crossterm 0.29, its newest release, by which `ebbd top` draws; the daemon does not use it",
    ),
    ("syn", "of derive macros: it is in no program"),
];
const SHUTTLE: &str = "of shuttle, which only model-checking tests have";

/// Crates that may not be there, and why.
const BANNED: &[(&str, &str)] =
    &[("openssl-src", "TLS is that of the system, which its distribution keeps up to date")];

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Whether a licence expression can be met with the [`LICENCES`]. `/` is an old form of `OR`; an exception (`WITH`) only
/// permits more.
fn is_permitted(expression: &str) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    any_of(&words, &mut at) && at == words.len()
}

fn any_of(words: &[&str], at: &mut usize) -> bool {
    let mut permitted = all_of(words, at);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        permitted |= all_of(words, at);
    }
    permitted
}

fn all_of(words: &[&str], at: &mut usize) -> bool {
    let mut permitted = one(words, at);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        permitted &= one(words, at);
    }
    permitted
}

fn one(words: &[&str], at: &mut usize) -> bool {
    let word = words.get(*at).copied().unwrap_or_default();
    *at += 1;
    if word == "(" {
        let permitted = any_of(words, at);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return permitted && closed;
    }
    if words.get(*at) == Some(&"WITH") {
        *at += 2;
    }
    LICENCES.contains(&word)
}

/// A crate, as `cargo metadata` describes it.
fn text<'a>(package: &'a Value, key: &str) -> &'a str {
    package[key].as_str().unwrap_or_default()
}

/// What is wrong with the crates of `cargo metadata`, a line each; those in `twice` may be there in two versions.
fn judge_packages(metadata: &Value, twice: &[(&str, &str)]) -> Vec<String> {
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let folder = text(metadata, "workspace_root");
    let mut told = Vec::new();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        let (name, version) = (text(package, "name"), text(package, "version"));
        let licence = text(package, "license");
        versions.entry(name).or_default().insert(version);
        if !is_permitted(licence) {
            told.push(format!("{name} {version}: licence `{licence}`: use another crate"));
        }
        let source = package["source"].as_str();
        let ours = source.is_none() && text(package, "manifest_path").starts_with(folder);
        if !ours && source != Some(CRATES_IO) {
            let source = source.unwrap_or("a path outside the tree");
            told.push(format!("{name} {version}: from {source}: use crates.io"));
        }
        if let Some((_, why)) = BANNED.iter().find(|(banned, _)| *banned == name) {
            told.push(format!("{name} {version}: banned: {why}"));
        }
        let all = package["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default();
        let open = all.iter().filter(|of| ours && of["path"].is_null() && text(of, "req") == "*");
        told.extend(
            open.map(|of| format!("{name}: `{} = \"*\"`: give a version", text(of, "name"))),
        );
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        if !twice.iter().any(|(twice, _)| twice == name) {
            let versions: Vec<&str> = versions.iter().copied().collect();
            told.push(format!(
                "{name}: in versions {}: update what needs the older",
                versions.join(", ")
            ));
        }
    }
    let once = |name: &str| versions.get(name).is_none_or(|versions| versions.len() < 2);
    let gone = twice.iter().filter(|(name, _)| once(name));
    told.extend(gone.map(|(name, _)| format!("{name}: there once: take it out of TWICE")));
    told
}

/// What is wrong with the sources in a `Cargo.lock`, a line each.
fn judge_lock(lock: &str) -> Vec<String> {
    let mut told = Vec::new();
    for package in lock.split("[[package]]").skip(1) {
        let field = |key: &str| {
            let mut lines = package.lines();
            lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"'))
        };
        let name = field("name").unwrap_or_default();
        match field("source") {
            // Without a source it is of the tree: `cargo metadata` has its path.
            None => {}
            Some(CRATES_IO) if field("checksum").is_some() => {}
            Some(CRATES_IO) => told.push(format!("{name}: no checksum")),
            Some(source) => told.push(format!("{name}: from {source}: use crates.io")),
        }
    }
    told
}

#[test]
fn dependencies_have_permitted_licences_sources_and_versions() {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--locked", "--all-features", "--format-version", "1"])
        .args(["--filter-platform", &platform])
        .current_dir(root())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}\ndownload what is missing: cargo fetch --locked");
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(metadata["packages"].as_array().is_some_and(|all| all.len() > 100), "all were read");
    let mut told = judge_packages(&metadata, TWICE);
    for lock in ["Cargo.lock", "fuzz/Cargo.lock"] {
        let text = std::fs::read_to_string(root().join(lock)).unwrap();
        told.extend(judge_lock(&text).into_iter().map(|line| format!("{lock}: {line}")));
    }
    assert!(told.is_empty(), "{}", told.join("\n"));
}

#[test]
fn licences_are_read_as_expressions() {
    for permitted in [
        "MIT",
        "MIT OR Apache-2.0",
        "MIT/Apache-2.0",
        "GPL-3.0 OR MIT",
        "(GPL-3.0 OR MIT) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception",
        "MIT AND BSD-3-Clause OR GPL-3.0",
    ] {
        assert!(is_permitted(permitted), "{permitted}");
    }
    for refused in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(MIT OR Apache-2.0) AND OpenSSL",
        "MIT Apache-2.0",
        "(MIT",
        "GPL-3.0 OR",
        "mit",
    ] {
        assert!(!is_permitted(refused), "{refused}");
    }
}

#[test]
fn each_rule_about_dependencies_catches_its_offender() {
    let package = |name: &str, version: &str, change: (&str, Value)| {
        let mut package = serde_json::json!({
            "name": name, "version": version, "license": "MIT", "source": CRATES_IO,
            "manifest_path": "/elsewhere/Cargo.toml", "dependencies": [],
        });
        package[change.0] = change.1;
        package
    };
    let told = |packages: Vec<Value>| {
        let twice = ["1.0.0", "2.0.0"].map(|version| package("syn", version, ("x", Value::Null)));
        let packages: Vec<Value> = packages.into_iter().chain(twice).collect();
        let all = serde_json::json!({"workspace_root": "/tree", "packages": packages});
        judge_packages(&all, &[("syn", "")])
    };
    assert_eq!(told(vec![package("a", "1.0.0", ("x", Value::Null))]), Vec::<String>::new());
    for (change, expected) in [
        (("license", "GPL-3.0".into()), "a 1.0.0: licence `GPL-3.0`"),
        (("license", Value::Null), "a 1.0.0: licence ``"),
        (("source", "git+https://example.org/a".into()), "a 1.0.0: from git+https"),
        (("source", Value::Null), "a 1.0.0: from a path outside the tree"),
    ] {
        let told = told(vec![package("a", "1.0.0", change)]);
        assert!(told.len() == 1 && told[0].starts_with(expected), "{told:?}");
    }
    let banned = told(vec![package("openssl-src", "1.0.0", ("x", Value::Null))]);
    assert!(banned[0].contains("banned"), "{banned:?}");
    let two = ["1.0.0", "1.1.0"].map(|version| package("a", version, ("x", Value::Null)));
    assert!(told(two.to_vec())[0].starts_with("a: in versions 1.0.0, 1.1.0"));
    let mut ours = package("ours", "0.1.0", ("source", Value::Null));
    ours["manifest_path"] = "/tree/Cargo.toml".into();
    assert_eq!(told(vec![ours.clone()]), Vec::<String>::new());
    ours["dependencies"] = serde_json::json!([{"name": "b", "req": "*", "path": null}]);
    assert_eq!(told(vec![ours]), ["ours: `b = \"*\"`: give a version"]);
    let none = serde_json::json!({"workspace_root": "/tree", "packages": []});
    let gone = judge_packages(&none, &[("syn", "")]);
    assert_eq!(gone, ["syn: there once: take it out of TWICE"]);

    let lock = |source: &str, checksum: &str| {
        judge_lock(&format!("[[package]]\nname = \"a\"\nsource = \"{source}\"\n{checksum}\n"))
    };
    assert_eq!(lock(CRATES_IO, "checksum = \"00\""), Vec::<String>::new());
    assert_eq!(lock(CRATES_IO, ""), ["a: no checksum"]);
    assert!(lock("git+https://example.org/a#0", "")[0].starts_with("a: from git+https"));
    assert_eq!(judge_lock("[[package]]\nname = \"ebb-mem\"\n"), Vec::<String>::new());
}
