//! Reads what callgrind writes (without compressed names and positions), and names each cost.
//!
//! A cost has the name of the function in whose source it is, also where that function was inlined:
//! the name does not depend on what the compiler inlines. Code of other crates and of the standard
//! library has no source here: its cost has the name of the machine function that contains it.

use std::collections::BTreeMap;
use std::path::Path;

/// Costs by function.
pub type Costs = BTreeMap<String, f64>;

/// The costs of one load.
#[derive(Debug, Default)]
pub struct Profile {
    /// Instructions.
    pub instructions: Costs,
    /// System calls.
    pub system_calls: Costs,
}

/// The number of requests that a dump's costs are of.
#[derive(Clone, Copy, Debug)]
pub struct Requests {
    /// Of instructions.
    pub instructions: usize,
    /// Of system calls.
    pub system_calls: usize,
}

/// Names of functions by lines of source files below a directory.
#[derive(Debug)]
pub struct Sources<'a> {
    root: &'a Path,
    files: BTreeMap<String, Option<Vec<Option<String>>>>,
}

impl<'a> Sources<'a> {
    /// The sources below `root`.
    #[must_use]
    pub fn new(root: &'a Path) -> Sources<'a> {
        Sources { root, files: BTreeMap::new() }
    }

    /// The function at a line, with its file.
    fn name(&mut self, file: &str, line: usize) -> Option<String> {
        let short = Path::new(file).strip_prefix(self.root).ok()?.to_str()?;
        let functions = self.files.entry(file.to_owned()).or_insert_with(|| {
            std::fs::read_to_string(file).ok().map(|text| functions_of_lines(&text))
        });
        let function = functions.as_ref()?.get(line.checked_sub(1)?)?.as_ref()?;
        Some(format!("{function} ({short})"))
    }
}

/// The function that each line belongs to: the last `fn` at or before it.
fn functions_of_lines(text: &str) -> Vec<Option<String>> {
    let mut last = None;
    let mut lines = Vec::new();
    for line in text.lines() {
        if let Some(name) = function_of(line) {
            last = Some(name);
        }
        lines.push(last.clone());
    }
    lines
}

fn function_of(line: &str) -> Option<String> {
    let mut words = line.trim_start().split_ascii_whitespace();
    let known = |word: &str| {
        word.starts_with("pub") || ["async", "const", "unsafe", "extern", "\"C\""].contains(&word)
    };
    loop {
        let word = words.next()?;
        if word == "fn" {
            let name = words.next()?;
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
            return Some(name[..end].to_owned());
        }
        if !known(word) {
            return None;
        }
    }
}

/// Reads a dump. The result is the cost of one request.
#[must_use]
pub fn read(text: &str, sources: &mut Sources<'_>, requests: Requests) -> Profile {
    let mut profile = Profile::default();
    let (mut file, mut function) = ("", "");
    let mut of_call = false;
    for line in text.lines() {
        if let Some((key, value)) = line.split_once('=') {
            match key {
                "fl" | "fi" | "fe" => file = value,
                "fn" => function = value,
                "calls" => of_call = true,
                _ => {}
            }
            continue;
        }
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u64>);
        let (Some(Ok(position)), Some(Ok(instructions))) = (numbers.next(), numbers.next()) else {
            continue;
        };
        // The line after `calls=` is the cost of the callee.
        if std::mem::take(&mut of_call) {
            continue;
        }
        let calls = numbers.next().and_then(Result::ok).unwrap_or(0);
        let place = usize::try_from(position).unwrap_or(0);
        let name = sources.name(file, place).unwrap_or_else(|| function.to_owned());
        let both = [
            (&mut profile.instructions, instructions, requests.instructions),
            (&mut profile.system_calls, calls, requests.system_calls),
        ];
        for (costs, cost, requests) in both {
            if cost > 0 {
                *costs.entry(name.clone()).or_default() += cost as f64 / requests as f64;
            }
        }
    }
    profile
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_have_names_of_inlined_functions() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = root.join("src/callgrind.rs");
        let source = std::fs::read_to_string(&file).unwrap();
        let at = source.lines().position(|line| line.starts_with("fn function_of(")).unwrap() + 3;
        let text = format!(
            "events: Ir sysCount sysTime\nfl=/elsewhere/a.rs\nfn=outer<T>\n7 100\nfi={}\n{at} 40 2\n\
             cfn=callee\ncalls=3 9\n8 9999\nfe=/elsewhere/a.rs\n9 10\n",
            file.display()
        );
        let profile =
            read(&text, &mut Sources::new(root), Requests { instructions: 10, system_calls: 20 });
        assert_eq!(profile.instructions["outer<T>"], 11.0);
        assert_eq!(profile.instructions["function_of (src/callgrind.rs)"], 4.0);
        assert_eq!(profile.system_calls.values().copied().collect::<Vec<_>>(), [0.1]);
        assert_eq!(profile.instructions.len(), 2);
    }
}
