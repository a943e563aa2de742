//! Links of the documents and references between manual pages lead somewhere, without a network.
//!
//! - A link's file or folder is in the tree, relative to the document; its `#section` is a heading
//!   of the document, by the name that GitHub gives it.
//! - A reference to a page of ebbd, as `ebbd-serve(1)`, has its page in `docs/man`.
//! - An address of the web has the right form, and `https` unless it is local. Whether something is
//!   there depends on others.

use super::citations::pieces;
use super::names::relative;
use super::{Source, read_tree, root};

/// The targets of a document's links, each with its line.
fn targets(document: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (line, is_span, text) in pieces(document) {
        if is_span {
            continue;
        }
        let ends = text.match_indices("](").map(|(at, _)| &text[at + 2..]);
        found.extend(ends.map(|rest| (line, rest.split([')', ' ']).next().unwrap_or_default())));
        // `[name]: target`, at the start of a line.
        let definition = text.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
        found.extend(definition.map(|(_, target)| (line, target.trim())));
    }
    found
}

/// The name by which GitHub links to a heading.
fn slug(heading: &str) -> String {
    // The text of a link, without its target.
    let mut text = String::new();
    for (index, part) in heading.split("](").enumerate() {
        text.push_str(if index == 0 { part } else { part.split_once(')').map_or("", |(_, s)| s) });
    }
    let kept = text.trim().chars().filter_map(|c| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
        _ => None,
    });
    kept.collect::<String>().to_lowercase()
}

/// The names of a document's sections; the second of the same name ends in `-1`.
fn sections(document: &str) -> Vec<String> {
    let (mut fenced, mut found) = (false, Vec::new());
    for line in document.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let text = line.trim_start_matches('#');
        if fenced || text.len() == line.len() || !text.starts_with(' ') {
            continue;
        }
        let (name, mut unique, mut count) = (slug(text), slug(text), 0);
        while found.contains(&unique) {
            count += 1;
            unique = format!("{name}-{count}");
        }
        found.push(unique);
    }
    found
}

/// Why a link leads nowhere.
fn fault(document: &Source, target: &str, sources: &[Source]) -> Option<&'static str> {
    if target.contains("://") {
        // Judged as an address.
        return None;
    }
    let (path, section) = target.split_once('#').unwrap_or((target, ""));
    let path = if path.is_empty() { document.path.clone() } else { relative(&document.path, path) };
    let file = sources.iter().find(|source| source.path == path);
    let folder = format!("{path}/");
    if file.is_none() && !sources.iter().any(|source| source.path.starts_with(&folder)) {
        return Some("no such file");
    }
    if !target.contains('#') {
        return None;
    }
    let is_there = |file: &Source| sections(&file.raw).iter().any(|name| name == section);
    (!file.is_some_and(is_there)).then_some("no such section")
}

/// The addresses of the web in a text, each with its line.
fn addresses(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for (at, _) in line.match_indices("://") {
            let scheme = ["https", "http"].into_iter().find(|name| line[..at].ends_with(name));
            let Some(scheme) = scheme else { continue };
            let address = &line[at - scheme.len()..];
            let end = address.find([' ', ')', '>', '<', '`', '"', '\'', ']', '|', '\\']);
            let address = &address[..end.unwrap_or(address.len())];
            found.push((index + 1, address.trim_end_matches(['.', ',', ';', ':'])));
        }
    }
    found
}

/// Why an address cannot be right.
fn address_fault(address: &str) -> Option<&'static str> {
    let (scheme, rest) = address.split_once("://").unwrap_or_default();
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let name = host.split(':').next().unwrap_or_default();
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    // A placeholder such as `HOST`, or a shell variable.
    let stands_for_a_host = host.contains(['$', '{', '%']);
    if !stands_for_a_host && !name.split('.').all(is_label) {
        return Some("not a host");
    }
    let is_number = name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if scheme == "http" && name.contains('.') && !is_number {
        return Some("use https");
    }
    path.contains("//").then_some("two slashes in the path")
}

/// The manual pages of ebbd that a text refers to, each with its line: `ebbd-serve.1`.
fn pages(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        // As man pages write them: `\fBebbd\-serve\fR(1)`.
        let plain = line.replace("\\-", "-").replace("\\fR", "").replace("\\fB", " ");
        for (at, _) in plain.match_indices('(') {
            let rest = &plain.as_bytes()[at + 1..];
            let (Some(section @ b'1'..=b'8'), Some(b')')) = (rest.first(), rest.get(1)) else {
                continue;
            };
            let of_name = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
            let start = plain[..at].rfind(|c| !of_name(c)).map_or(0, |before| before + 1);
            let name = &plain[start..at];
            if name == "ebbd" || name.starts_with("ebbd-") || name.starts_with("ebbd.") {
                found.push((index + 1, format!("{name}.{}", char::from(*section))));
            }
        }
    }
    found
}

/// What leads nowhere in a document or a manual page, a line each.
fn dead(source: &Source, sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    if source.path.ends_with(".md") {
        for (line, target) in targets(&source.raw) {
            let fault = fault(source, target, sources);
            found.extend(fault.map(|fault| format!("{}:{line}: {target}: {fault}", source.path)));
        }
    }
    for (line, address) in addresses(&source.raw) {
        let fault = address_fault(address);
        found.extend(fault.map(|fault| format!("{}:{line}: {address}: {fault}", source.path)));
    }
    for (line, page) in pages(&source.raw) {
        let path = format!("docs/man/{page}");
        if !sources.iter().any(|source| source.path == path) {
            found.push(format!("{}:{line}: {path}: no such page", source.path));
        }
    }
    found
}

fn is_document(path: &str) -> bool {
    path.ends_with(".md") || path.starts_with("docs/man/")
}

#[test]
fn links_lead_to_files_sections_and_pages() {
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    let documents = sources.iter().filter(|source| is_document(&source.path));
    let documents = documents.collect::<Vec<_>>();
    let links: usize = documents.iter().map(|document| targets(&document.raw).len()).sum();
    let references: usize = documents.iter().map(|document| pages(&document.raw).len()).sum();
    assert!(links > 100 && references > 40, "{links} links, {references} references");
    let found = documents.iter().flat_map(|document| dead(document, &sources)).collect::<Vec<_>>();
    assert!(found.is_empty(), "lead nowhere:\n{}", found.join("\n"));
}

#[test]
fn sections_have_the_names_that_github_gives_them() {
    let document = "# The `ebbd.toml` file\n## Units: K, M & G\n```\n# no heading\n```\n#none\n\
                    ## Again\n### Again\n## See [ADR 7](x), it_is\n";
    assert_eq!(
        sections(document),
        ["the-ebbdtoml-file", "units-k-m--g", "again", "again-1", "see-adr-7-it_is"]
    );
}

/// A document of the test; in pieces, or else it would be cited here.
const DOCUMENT: &str = concat!("docs/", "a", ".md");

#[test]
fn links_that_lead_nowhere_are_caught() {
    let page = |name: &str| Source::new(&format!("docs/man/{name}"), "");
    let other = concat!("docs/", "b", ".md");
    let tree = [
        Source::new(DOCUMENT, "# Head\n"),
        Source::new(other, "# Other head\n"),
        Source::new("LICENSE", ""),
        page("ebbd-serve.1"),
        page("ebbd.toml.5"),
    ];
    let judge = |text: &str| dead(&Source::new(DOCUMENT, &format!("# Head\n{text}\n")), &tree);
    let link = |target: &str| format!("see [it]({target}).");
    let named = |file: &str| link(&format!("{file}.md"));
    for right in [
        link("#head"),
        named("b"),
        link(concat!("b", ".md#other-head")),
        link("../LICENSE"),
        link("man"),
        link("https://example.org/a"),
        "`[it](#none)`".into(),
        "```\n[it](#none)\n```".into(),
        "ebbd-serve(1), `ebbd.toml(5)`, fio(1), \\fBebbd\\-serve\\fR(1)".into(),
        "http://localhost:9477/, http://127.0.0.1/, <https://example.org>.".into(),
    ] {
        assert_eq!(judge(&right), [""; 0], "{right}");
    }
    for (wrong, fault) in [
        (link("#none"), "no such section"),
        (named("none"), "no such file"),
        (link(concat!("b", ".md#head")), "no such section"),
        (link("LICENSE"), "no such file"),
        (link("../LICENSE#L3"), "no such section"),
        ("[it]: none".into(), "no such file"),
        ("[`code`](#none)".into(), "no such section"),
        ("ebbd-none(1)".into(), "no such page"),
        ("ebbd\\-serve(8)".into(), "no such page"),
        ("https:///a".into(), "not a host"),
        ("https://exa_mple..org".into(), "not a host"),
        ("https://example.org/a//b".into(), "two slashes"),
        ("http://example.org/".into(), "use https"),
    ] {
        let found = judge(&wrong);
        assert_eq!(found.len(), 1, "{wrong}: {found:?}");
        assert!(found[0].starts_with(DOCUMENT) && found[0].contains(fault), "{found:?}");
    }
}
