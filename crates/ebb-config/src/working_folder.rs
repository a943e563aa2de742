//! The folder that the process was started in.
//!
//! Workers may not ask the system for it, and the daemon never changes it: it is noted when the
//! configuration is loaded, before the sandbox.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();

/// Notes the folder.
pub(crate) fn note() {
    let _ = FOLDER.get_or_init(|| std::env::current_dir().ok());
}

/// Returns the path from the root, without `.`, or the path itself if the folder is not known.
/// Links are not followed.
pub fn from_root(path: &Path) -> PathBuf {
    let folder = FOLDER.get_or_init(|| std::env::current_dir().ok());
    let whole = folder.as_ref().map_or_else(|| path.to_owned(), |folder| folder.join(path));
    match whole.is_absolute() {
        // Asks the system nothing.
        true => std::path::absolute(&whole).unwrap_or(whole),
        false => whole,
    }
}
