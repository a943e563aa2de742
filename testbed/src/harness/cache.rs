//! The directory, outside the tree, that keeps what tests download or build once.

use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The part of it called `name`: below `EBBD_TESTBED_CACHE`, else below `ebbd-testbed` in the user's cache directory.
///
/// # Errors
/// There is no such directory: neither the variable nor a home is set.
pub fn folder(name: &str) -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    variable("EBBD_TESTBED_CACHE")
        .map(PathBuf::from)
        .or_else(|| variable("XDG_CACHE_HOME").map(|dir| Path::new(&dir).join("ebbd-testbed")))
        .or_else(|| variable("HOME").map(|dir| Path::new(&dir).join(".cache/ebbd-testbed")))
        .map(|dir| dir.join(name))
        .ok_or_else(|| Error::unexpected("no cache directory: set EBBD_TESTBED_CACHE"))
}
