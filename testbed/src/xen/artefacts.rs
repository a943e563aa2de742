//! What a machine boots, made once and kept in a cache outside the tree.

use crate::{Error, Result, Tool};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Everything the build reads besides the packages; a change to any of it is a new build.
const SCRIPTS: [(&str, &str); 5] = [
    ("fetch.sh", include_str!("fetch.sh")),
    ("build.sh", include_str!("build.sh")),
    ("dom0-init.sh", include_str!("dom0-init.sh")),
    ("domu-init.sh", include_str!("domu-init.sh")),
    ("hotplug.sh", include_str!("hotplug.sh")),
];

/// Files that a machine boots.
#[derive(Debug)]
pub struct Artefacts {
    directory: PathBuf,
    /// Held while they are used: machines run one at a time.
    _alone: File,
}

/// Where packages and builds are kept, see [`folder`](crate::harness::cache::folder).
///
/// # Errors
/// There is no cache directory.
pub fn cache() -> Result<PathBuf> {
    crate::harness::cache::folder("xen")
}

impl Artefacts {
    /// Takes them from the cache, or downloads the packages (100 MB) and builds. Waits until no
    /// other program uses them.
    ///
    /// # Errors
    /// A package cannot be had or a tool is missing; the error says which.
    pub fn get() -> Result<Artefacts> {
        let cache = cache()?;
        make_dir(&cache)?;
        let path = cache.join("lock");
        let alone = File::create(&path).map_err(Error::io(path.display().to_string()))?;
        alone.lock().map_err(Error::io(path.display().to_string()))?;

        let directory = cache.join("machine");
        let inputs: String = SCRIPTS.iter().map(|(_, text)| *text).collect();
        if fs::read_to_string(cache.join("inputs")).is_ok_and(|made| made == inputs) {
            return Ok(Artefacts { directory, _alone: alone });
        }
        let scripts =
            tempfile::TempDir::with_prefix("xen-").map_err(Error::io("make a directory"))?;
        for (name, text) in SCRIPTS {
            let path = scripts.path().join(name);
            fs::write(&path, text).map_err(Error::io(path.display().to_string()))?;
        }
        let packages = cache.join("packages");
        let limit = Duration::from_secs(900);
        let bash = |name: &str| Tool::new("bash").arg(scripts.path().join(name)).limit(limit);
        bash("fetch.sh").arg(&packages).ok()?;
        bash("build.sh").arg(packages.join("tree")).arg(&directory).arg(scripts.path()).ok()?;
        let path = cache.join("inputs");
        fs::write(&path, inputs).map_err(Error::io(path.display().to_string()))?;
        Ok(Artefacts { directory, _alone: alone })
    }

    /// The hypervisor.
    #[must_use]
    pub fn xen(&self) -> PathBuf {
        self.directory.join("xen.elf")
    }

    /// The kernel of dom0 and guests, not compressed.
    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinux")
    }

    /// The root of dom0, an initramfs.
    #[must_use]
    pub fn dom0(&self) -> PathBuf {
        self.directory.join("dom0.cpio.gz")
    }

    /// Xen's device model for dom0, a tar.
    #[must_use]
    pub fn device_model(&self) -> PathBuf {
        self.directory.join("qemu.tar")
    }
}

fn make_dir(path: &Path) -> Result {
    fs::create_dir_all(path).map_err(Error::io(path.display().to_string()))
}
