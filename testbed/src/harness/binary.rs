//! Finds the daemon to test: `EBBD_BIN`, else what this workspace builds, which the runner of the
//! tests has built and names in `EBBD_BIN_AS_TESTS`.

use crate::{Error, Result, Tool};
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// How a binary was compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// As these tests themselves: with overflow checks and debug assertions in a debug build.
    AsTests,
    /// As delivered. What is measured against a bar is measured on this one.
    Release,
}

/// Path of the `ebbd` binary. `EBBD_BIN` names it for both builds; else it is built here, once.
///
/// # Errors
/// `EBBD_BIN` is no file, or the build fails.
pub fn ebbd(build: Build) -> Result<PathBuf> {
    let names = ["EBBD_BIN", "EBBD_BIN_AS_TESTS"];
    let names = if build == Build::AsTests { &names[..] } else { &names[..1] };
    for name in names {
        if let Some(path) = std::env::var_os(name).map(PathBuf::from) {
            return match path.is_file() {
                true => Ok(path),
                false => Err(Error::unexpected(format!("{name}={} is no file", path.display()))),
            };
        }
    }
    static BUILT: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
    static BUILDING: Mutex<()> = Mutex::new(());
    let release = build == Build::Release || !cfg!(debug_assertions);
    let slot = &BUILT[usize::from(release)];
    let _one_at_a_time = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = slot.get() {
        return Ok(path.clone());
    }
    let path = compile(release, "ebbd", "ebbd")?;
    Ok(slot.get_or_init(|| path).clone())
}

/// Path of another program of the workspace, built as delivered.
///
/// # Errors
/// The build fails.
pub fn release(package: &str, name: &str) -> Result<PathBuf> {
    compile(true, package, name)
}

/// Asks cargo, which knows its target directory and whether there is anything to do.
fn compile(release: bool, package: &str, name: &str) -> Result<PathBuf> {
    let mut cargo = Tool::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", package, "--bin", name])
        .args(["--message-format", "json-render-diagnostics"])
        .dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .limit(Duration::from_secs(1200));
    if release {
        cargo = cargo.arg("--release");
    }
    let outcome = cargo.run()?;
    if !outcome.status.success() {
        // Standard output is for machines; the compiler's words are on the other.
        let said = &outcome.stderr;
        return Err(Error::unexpected(format!("{name} cannot be built:\n{said}")));
    }
    let executable = outcome.stdout.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        (message["target"]["name"] == name)
            .then(|| message["executable"].as_str().map(PathBuf::from))?
    });
    executable.ok_or_else(|| outcome.unexpected(&format!("an executable called {name}")))
}
