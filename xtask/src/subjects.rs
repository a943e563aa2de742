//! `cargo xtask subjects`: checks the subjects of commits against the form `area: imperative`.
//!
//! # Invariants
//! - Only the repository of this tree is read: a tree without `.git` may be inside another one.
//! - A tree without commits to check passes, and the output says why.
//! - Merge commits are exempt: their subjects are git's.

use std::path::Path;
use std::process::Command;

use crate::{Result, report};

/// Longest subject, in characters.
const LONGEST: usize = 72;
/// The branch that commits are made for.
const UPSTREAM: &str = "origin/main";
/// Commits checked where git does not know what is new.
const LATEST: &str = "-20";
const NULL: char = '\0';

/// Imperatives that end like another form of a verb.
const IMPERATIVES: &[&str] = &[
    "alias", "bias", "bring", "canvas", "embed", "exceed", "feed", "focus", "need", "proceed",
    "ring", "seed", "shed", "speed", "spring", "string", "succeed", "swing",
];

/// Checks the commits of `range`, or those that upstream does not have. Returns true if all pass.
pub(crate) fn check(range: Option<&str>) -> Result<bool> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    if !root.join(".git").exists() {
        report::say("subjects: not checked: this tree has no .git");
        return Ok(true);
    }
    if range.is_none() && git(&root, &["rev-parse", "--verify", "--quiet", "HEAD"]).is_err() {
        // Says why, if that is not the missing commit.
        git(&root, &["rev-parse", "--git-dir"])?;
        report::say("subjects: not checked: no commits yet");
        return Ok(true);
    }
    let (place, range) = match range {
        Some(range) => (format!("in {range}"), range.to_owned()),
        // A shallow clone may lack the common ancestor, without which all of its commits look new.
        None => match git(&root, &["merge-base", UPSTREAM, "HEAD"]) {
            Ok(base) => (format!("not on {UPSTREAM}"), format!("{}..HEAD", base.trim())),
            Err(_) => (format!("the latest, without {UPSTREAM}"), LATEST.to_owned()),
        },
    };
    let log = ["log", "-z", "--no-merges", "--format=%h %s", &range, "--"];
    let log = git(&root, &log)?;
    let subjects = log.split(NULL).filter_map(|line| line.split_once(' ')).collect::<Vec<_>>();
    let mut is_ok = true;
    for (commit, subject) in &subjects {
        for fault in faults(subject) {
            report::error(&format!("{commit} {subject}\n    {fault}"));
            is_ok = false;
        }
    }
    report::say(&format!("subjects: {} checked, {place}", subjects.len()));
    Ok(is_ok)
}

fn git(root: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").arg("-C").arg(root).args(arguments).output();
    let output = output.map_err(|error| format!("cannot run git: {error}"))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(format!("git {} failed: {}", arguments.join(" "), error.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The rules that a subject breaks, each with its remedy.
fn faults(subject: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let length = subject.chars().count();
    if length > LONGEST {
        faults.push(format!("{length} characters: shorten it to {LONGEST}"));
    }
    if subject.ends_with('.') {
        faults.push("ends with a full stop: remove it".into());
    }
    let Some((area, text)) = subject.split_once(": ").filter(|(area, _)| is_area(area)) else {
        faults.push("begin it with a lower-case area: `nbd: shrink idle buffers`".into());
        return faults;
    };
    let first = text.split(' ').next().unwrap_or_default();
    if !is_imperative(first) {
        faults.push(format!("`{first}` after `{area}:`: write an imperative, such as `shrink`"));
    }
    faults
}

fn is_area(area: &str) -> bool {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-./_".contains(c);
    area.starts_with(|c: char| c.is_ascii_lowercase()) && area.chars().all(is_part)
}

/// A guess from the form of the word: false for `adds`, `added`, `adding`, articles and names.
fn is_imperative(word: &str) -> bool {
    let is_other = ["a", "an", "the", "this", "that"].contains(&word)
        || ["ed", "ing"].iter().any(|end| word.ends_with(end))
        || (word.ends_with('s') && !word.ends_with("ss"));
    word.starts_with(|c: char| c.is_ascii_lowercase()) && (IMPERATIVES.contains(&word) || !is_other)
}

#[cfg(test)]
mod tests {
    use super::faults;

    #[test]
    fn subjects_in_the_form_pass() {
        for subject in [
            "nbd: shrink a receive buffer that holds few bytes",
            "image: don't open an open file",
            "delete-snapshot: process `a.b` at 100 %",
            "ci: embed the version",
            &format!("io: s{}", "é".repeat(67)),
        ] {
            assert_eq!(faults(subject), [""; 0], "{subject}");
        }
    }

    #[test]
    fn subjects_out_of_form_name_their_fault() {
        let long = format!("io: {}", "x".repeat(69));
        for (subject, fault) in [
            ("", "begin it with"),
            ("Shrink buffers", "begin it with"),
            ("NBD: shrink buffers", "begin it with"),
            ("nbd, vhost: shrink buffers", "begin it with"),
            ("nbd:shrink buffers", "begin it with"),
            ("Revert \"nbd: shrink buffers\"", "begin it with"),
            ("nbd: shrink buffers.", "ends with a full stop"),
            (&long, "73 characters"),
            ("nbd: ", "`` after `nbd:`"),
            ("nbd: Shrink buffers", "`Shrink` after"),
            ("nbd: shrinks buffers", "`shrinks` after"),
            ("nbd: added a buffer", "`added` after"),
            ("nbd: adding a buffer", "`adding` after"),
            ("nbd: a small buffer", "`a` after"),
        ] {
            let found = faults(subject);
            assert!(found.len() == 1 && found[0].starts_with(fault), "{subject}: {found:?}");
        }
    }
}
