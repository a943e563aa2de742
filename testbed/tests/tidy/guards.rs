//! Every export runs the suite of guards (`testbed/export-guards`) under its own name.
//!
//! The table of guards is code: `crates/ebb-export/src/guards.rs`. A crate `ebb-export-*` that is
//! not in the table, or that has no `tests/it/guards.rs` with the suite, is a finding.

use super::{Source, positions, read_tree, root};

const TABLE: &str = "crates/ebb-export/src/guards.rs";

/// The crates of exports.
fn export_crates(sources: &[Source]) -> Vec<&str> {
    let manifests = sources.iter().filter_map(|source| source.path.strip_suffix("/Cargo.toml"));
    let names = manifests.filter_map(|folder| folder.strip_prefix("crates/"));
    names.filter(|name| name.starts_with("ebb-export-")).collect()
}

/// The variant that the table gives a crate.
fn variant<'a>(table: &'a str, name: &str) -> Option<&'a str> {
    let (before, _) = table.split_once(&format!(" => \"{name}\""))?;
    before
        .rsplit("ExportKind::")
        .next()
        .filter(|word| word.bytes().all(|b| b.is_ascii_alphanumeric()))
}

/// The exports that do not run the suite, a line each.
fn unguarded(sources: &[Source]) -> Vec<String> {
    let find = |path: &str| sources.iter().find(|source| source.path == path);
    let mut found = Vec::new();
    for name in export_crates(sources) {
        let Some(variant) = find(TABLE).and_then(|table| variant(&table.raw, name)) else {
            found.push(format!("{name}: add the export to `ExportKind` in {TABLE}"));
            continue;
        };
        let path = format!("crates/{name}/tests/it/guards.rs");
        let runs = |source: &Source| {
            let call = positions(&source.code, "check_all::<");
            let own = format!("const EXPORT: ExportKind = ExportKind::{variant};");
            call.iter().any(|at| source.code[..*at].contains("#[test]"))
                && positions(&source.code, &own).len() == 1
        };
        if !find(&path).is_some_and(runs) {
            found.push(format!(
                "{path}: run `check_all` of export-guards as `ExportKind::{variant}`"
            ));
        }
    }
    found
}

#[test]
fn every_export_runs_the_suite_of_guards() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    assert!(export_crates(&sources).len() >= 3, "not the whole tree was read");
    let found = unguarded(&sources);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn export_without_the_suite_is_caught() {
    let table = Source::new(TABLE, "match self { ExportKind::Iscsi => \"ebb-export-iscsi\", }");
    let manifest = Source::new("crates/ebb-export-iscsi/Cargo.toml", "[package]");
    let suite = |text: &str| Source::new("crates/ebb-export-iscsi/tests/it/guards.rs", text);
    let head = "const EXPORT: ExportKind = ExportKind::Iscsi;";
    let good = format!("{head}\n#[test]\nfn f() {{ check_all::<Iscsi>(); }}");
    let copied = good.replace("ExportKind::Iscsi", "ExportKind::Nbd");
    let idle = format!("{head}\n// check_all::<Iscsi>()");
    let mut sources = vec![manifest];
    assert_eq!(unguarded(&sources).len(), 1, "not in the table");
    sources.push(table);
    assert_eq!(unguarded(&sources).len(), 1, "no tests/it/guards.rs");
    for (text, findings) in [(copied, 1), (idle, 1), (good, 0)] {
        sources.push(suite(&text));
        assert_eq!(unguarded(&sources).len(), findings, "{text}");
        sources.pop();
    }
}
