//! The test programs: built by one call of cargo, which prints a line of JSON for each of them, and
//! asked for their tests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use serde::Deserialize;

use crate::Result;

/// A test program.
#[derive(Debug)]
pub(crate) struct Program {
    /// `PACKAGE/TARGET`; the library of a package is `PACKAGE/lib`.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// The folder of its package, in which its tests run.
    pub(crate) dir: PathBuf,
    /// Its tests share a process: a library or program has many short ones.
    pub(crate) is_unit: bool,
    pub(crate) tests: Vec<String>,
}

impl Program {
    /// The name by which the plan and the command line know a test.
    pub(crate) fn full_name(&self, test: &str) -> String {
        format!("{} {test}", self.name)
    }
}

/// All test programs, and the daemon that was built with them.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) list: Vec<Arc<Program>>,
    pub(crate) daemon: PathBuf,
    pub(crate) target: PathBuf,
}

/// The part of a message of cargo that is used.
#[derive(Debug, Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

#[derive(Debug, Deserialize)]
struct Profile {
    test: bool,
}

impl Programs {
    /// Builds all of them.
    pub(crate) fn build() -> Result<Programs> {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["test", "--locked", "--workspace", "--no-run", "--lib", "--bins", "--tests"]);
        cargo.args(["--message-format", "json-render-diagnostics"]);
        let built = cargo.stderr(Stdio::inherit()).output();
        let built = built.map_err(|error| format!("cannot run cargo: {error}"))?;
        if !built.status.success() {
            return Err("the tests cannot be built".into());
        }
        let (mut list, mut daemon) = (Vec::new(), None);
        for line in built.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let message: Message = serde_json::from_slice(line)
                .map_err(|error| format!("a message of cargo is not understood: {error}"))?;
            let (Some(target), Some(profile), Some(path), Some(manifest)) =
                (message.target, message.profile, message.executable, message.manifest_path)
            else {
                continue;
            };
            if message.reason != "compiler-artifact" {
                continue;
            }
            if profile.test {
                list.push(Arc::new(program(&target, &manifest, path)?));
            } else if target.name == "ebbd" {
                daemon = Some(path);
            }
        }
        let daemon = daemon.ok_or("cargo has not built the daemon")?;
        let target = daemon.ancestors().nth(2).map(Path::to_owned);
        Ok(Programs { list, daemon, target: target.ok_or("the daemon is not in a target folder")? })
    }
}

fn program(target: &Target, manifest: &Path, path: PathBuf) -> Result<Program> {
    let dir = manifest.parent().unwrap_or(manifest).to_owned();
    let package = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is = |kind: &str| target.kind.iter().any(|has| has == kind);
    let own = match (is("test"), is("lib")) {
        (true, _) => target.name.clone(),
        (false, true) => "lib".into(),
        (false, false) => format!("bin/{}", target.name),
    };
    let ignored = list(&path, &dir, &["--ignored"])?.into_iter().collect::<BTreeSet<_>>();
    let mut tests = list(&path, &dir, &[])?;
    tests.retain(|test| !ignored.contains(test));
    Ok(Program { name: format!("{package}/{own}"), path, dir, is_unit: !is("test"), tests })
}

/// The names of a program's tests.
fn list(path: &Path, dir: &Path, flags: &[&str]) -> Result<Vec<String>> {
    let listed = Command::new(path)
        .args(["--list", "--format", "terse"])
        .args(flags)
        .current_dir(dir)
        .output()
        .map_err(|error| format!("{} cannot be run: {error}", path.display()))?;
    if !listed.status.success() {
        return Err(format!("{} does not list its tests", path.display()));
    }
    let text = String::from_utf8_lossy(&listed.stdout);
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}
