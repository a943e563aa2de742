//! The pages of `docs/parameters`: one for each parameter, in the form of the kernel's
//! `Documentation/ABI`, generated from [`super::table`]. A test fails if the files differ from the
//! generated text.

use std::fmt::Write;
use std::path::Path;

use anyhow::Context;

use super::definition::{Definition, Kind, ParameterScope};
use super::table::TABLE;

/// A page: its file name and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterPage {
    /// The file name, such as `max_buffer_pages.md`.
    pub name: String,
    /// The text in Markdown.
    pub text: String,
}

const WIDTH: usize = 100;

/// All pages, the index first.
pub fn pages() -> Vec<ParameterPage> {
    let pages = TABLE.0.iter().map(|definition| ParameterPage {
        name: format!("{}.md", definition.name),
        text: page(definition),
    });
    std::iter::once(ParameterPage { name: "README.md".to_owned(), text: index() })
        .chain(pages)
        .collect()
}

/// Writes all pages to the directory `out`, which is created if it is absent.
///
/// # Errors
/// If the directory cannot be created or a page cannot be written; the error names the path.
pub fn write_pages(out: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(out)
        .with_context(|| format!("cannot create the directory {}", out.display()))?;
    for page in pages() {
        let path = out.join(page.name);
        std::fs::write(&path, page.text)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn page(definition: &Definition) -> String {
    let name = definition.name;
    let (first, last) = (definition.members.first(), definition.members.last());
    let what = match (first, last) {
        (Some(first), Some(last)) => format!("`{name}.{first}` to `{name}.{last}`"),
        _ => format!("`{name}`"),
    };
    let scope = match definition.scope {
        ParameterScope::Daemon => "the daemon".to_owned(),
        ParameterScope::Volume => {
            "the daemon; a volume may have its own value, and uses the daemon's otherwise"
                .to_owned()
        }
        ParameterScope::Bdi => "each backing device".to_owned(),
        ParameterScope::VolumeAndGroup => {
            "the daemon; each volume may have its own value; each group of limits".to_owned()
        }
        ParameterScope::LimitGroup => "each group of limits".to_owned(),
    };
    let config = definition.config.map_or_else(
        || "none: it is set at run time only".to_owned(),
        |path| {
            let more = match definition.scope {
                ParameterScope::Volume if !path.contains('.') => format!(", `volume.NAME.{path}`"),
                ParameterScope::VolumeAndGroup => format!(", `limit_group.NAME.{name}`"),
                _ => String::new(),
            };
            format!("`{path}`{more} in ebbd.toml(5)")
        },
    );
    let default = match definition.zero.filter(|_| definition.default == 0) {
        Some(zero) => format!("0 ({zero})"),
        None => definition.text(definition.default),
    };
    let rows = [
        ("Name", what),
        ("Scope", scope),
        ("Since", format!("ebbd {}", definition.since)),
        ("Unit", definition.unit.to_owned()),
        ("Default", default),
        ("Range", definition.range()),
        ("Configuration", config),
    ];
    let mut out = format!("# {name}\n\n| | |\n|---|---|\n");
    for (title, text) in rows {
        let _ = writeln!(out, "| {title} | {text} |");
    }
    section(&mut out, "When it takes effect", definition.effect);
    section(&mut out, "Description", definition.doc);
    let member = first.map_or_else(|| name.to_owned(), |member| format!("{name}.{member}"));
    let value = example_value(definition);
    let of = if definition.scope == ParameterScope::Bdi { " --bdi stick" } else { "" };
    let mut example = format!("ebbd get {member}{of}\nebbd set {member} {value}{of}\n");
    if matches!(definition.scope, ParameterScope::Volume | ParameterScope::VolumeAndGroup) {
        let _ = writeln!(example, "ebbd set {member} {value} --volume disk");
    }
    if definition.scope == ParameterScope::VolumeAndGroup {
        let _ = writeln!(example, "ebbd set {member} {value} --limit-group gold");
    }
    let _ = write!(out, "\n## Example\n\n```sh\n{example}ebbd set {member} --unset{of}\n```\n");
    out
}

/// A value other than the default.
fn example_value(definition: &Definition) -> String {
    match definition.kind {
        Kind::Word(words) => words.last().copied().unwrap_or_default().to_owned(),
        Kind::Percent => "25".to_owned(),
        Kind::Name => "gold".to_owned(),
        _ if definition.default == 0 => definition.text(definition.minimum << 5),
        _ => definition.text(definition.default / 2),
    }
}

fn index() -> String {
    let mut out = "# Parameters\n\n".to_owned();
    wrap(
        &mut out,
        "Parameters can be read and set while `ebbd` runs: with `ebbd get` and `ebbd set`, or over \
         the control socket at `/v1/parameters`, `/v1/volumes/NAME/parameters`, \
         `/v1/bdis/NAME/parameters` and `/v1/limit-groups/NAME/parameters`. These pages are generated from the table in the program \
         (`ebbd man --parameters docs/parameters`). Names and meanings are a stable interface.",
    );
    out.push_str("\n| parameter | scope | unit | default | range |\n|---|---|---|---|---|\n");
    for definition in TABLE.0 {
        let scope = match definition.scope {
            ParameterScope::Daemon => "daemon",
            ParameterScope::Volume => "daemon, volume",
            ParameterScope::VolumeAndGroup => "daemon, volume, limit group",
            ParameterScope::LimitGroup => "limit group",
            ParameterScope::Bdi => "backing device",
        };
        let _ = writeln!(
            out,
            "| [{name}]({name}.md) | {scope} | {} | {} | {} |",
            definition.unit,
            definition.text(definition.default),
            definition.range(),
            name = definition.name,
        );
    }
    section(
        &mut out,
        "Which value is in force",
        "A volume's own value overrides the daemon's; a volume without a value of its own uses the \
         daemon's, also after that changes. The daemon's value holds for each such volume, not for all \
         of them together. A backing device and a group of limits have values of their own only, and \
         the default where none is set.\n\n\
         Until it is set at run time, a parameter has the value of the configuration (the command \
         line overrides the file), or the default. Unsetting it goes back to the configuration. A \
         value set at run time is lost when the daemon ends, except limits of a volume that `ebbd limit \
         --persist` keeps in the state directory.\n\n\
         When SIGHUP reloads the file, the latest change of each parameter is in force: a value set \
         at run time stays, unless the parameter's value in the file differs from the value of the \
         previous load. If the resulting `max_request` and `connection_memory` do not fit together, \
         both get the values of the file. When a volume is removed from the configuration, the \
         values set for it are discarded; the same holds for a backing device without volumes. If \
         `min_ratio` and `max_ratio` of the backing devices do not fit together, all of them get the \
         values of the file.",
    );
    out
}

fn section(out: &mut String, title: &str, text: &str) {
    let _ = write!(out, "\n## {title}\n");
    for paragraph in text.split("\n\n") {
        out.push('\n');
        wrap(out, paragraph);
    }
}

/// Writes `text` in lines of at most [`WIDTH`] characters.
fn wrap(out: &mut String, text: &str) {
    let mut width = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if width > 0 && width + 1 + length > WIDTH {
            out.push('\n');
            width = 0;
        }
        if width > 0 {
            out.push(' ');
            width += 1;
        }
        out.push_str(word);
        width += length;
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_pages_in_the_repository_are_up_to_date() {
        let kept = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/parameters"));
        let remedy = "run `cargo run -p ebbd -- man --parameters docs/parameters` and commit it";
        let pages = pages();
        for page in &pages {
            let text = std::fs::read_to_string(kept.join(&page.name))
                .unwrap_or_else(|error| panic!("docs/parameters/{}: {error}; {remedy}", page.name));
            assert!(text == page.text, "docs/parameters/{} is out of date; {remedy}", page.name);
        }
        let names: BTreeSet<_> = pages.into_iter().map(|page| page.name).collect();
        let found: BTreeSet<_> = std::fs::read_dir(&kept)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(found, names, "docs/parameters contains the generated pages and nothing else");
    }

    #[test]
    fn every_page_has_all_rows_and_sections() {
        for page in pages().iter().filter(|page| page.name != "README.md") {
            for part in ["| Name |", "| Since |", "| Unit |", "| Default |", "| Range |"] {
                assert!(page.text.contains(part), "{}: {part}", page.name);
            }
            for title in ["## When it takes effect", "## Description", "## Example"] {
                assert!(page.text.contains(title), "{}: {title}", page.name);
            }
            let long = |line: &&str| line.chars().count() > WIDTH && !line.starts_with('|');
            assert_eq!(page.text.lines().find(long), None);
        }
    }

    #[test]
    fn the_examples_are_accepted() {
        for definition in TABLE.0 {
            let value = serde_json::Value::String(example_value(definition));
            assert!(definition.parse(&value).is_ok(), "{}: {value}", definition.name);
        }
    }
}
