//! The guest's kernel: Debian's cloud kernel as `testbed/install` unpacked it, never installed.

use crate::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// A kernel in the cache.
#[derive(Debug, Clone)]
pub struct Kernel {
    root: PathBuf,
    release: String,
}

/// The cache of things too big to fetch for every run: `EBBD_TESTBED_CACHE`, else
/// `target/testbed` in the workspace. `testbed/install` fills it.
#[must_use]
pub fn cache() -> PathBuf {
    std::env::var_os("EBBD_TESTBED_CACHE").map_or_else(
        || Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/testbed")).into(),
        PathBuf::from,
    )
}

impl Kernel {
    /// The kernel in the cache.
    ///
    /// # Errors
    /// There is none; the error names the remedy.
    pub fn find() -> Result<Kernel> {
        let root = cache().join("kernel");
        let file = root.join("release");
        let release = std::fs::read_to_string(&file).map_err(|e| {
            let file = file.display();
            Error::unexpected(format!("no guest kernel ({file}: {e}): run testbed/install"))
        })?;
        Ok(Kernel { root, release: release.trim().into() })
    }

    /// The bootable image.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        self.root.join("boot").join(format!("vmlinuz-{}", self.release))
    }

    /// Files of the named modules and all they need, in the order in which to load them.
    /// A module that is built into the kernel adds nothing.
    ///
    /// # Errors
    /// The kernel knows no such module.
    pub fn modules(&self, names: &[impl AsRef<str>]) -> Result<Vec<PathBuf>> {
        let dir = self.root.join("lib/modules").join(&self.release);
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read_to_string(&path).map_err(Error::io(path.display().to_string()))
        };
        let (dep, builtin) = (read("modules.dep")?, read("modules.builtin")?);
        let order = load_order(&dep, &builtin, names)?;
        Ok(order.iter().map(|path| dir.join(path)).collect())
    }
}

/// Name of a module from its path: the file's stem, in which `-` and `_` are the same.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

/// Paths to load for `names`, dependencies first, from the text of `modules.dep` and
/// `modules.builtin`.
fn load_order(dep: &str, builtin: &str, names: &[impl AsRef<str>]) -> Result<Vec<String>> {
    let needs: HashMap<&str, &str> = dep.lines().filter_map(|l| l.split_once(':')).collect();
    let mut order = Vec::new();
    for name in names {
        let name = name.as_ref().replace('-', "_");
        if builtin.lines().any(|path| module_name(path) == name) {
            continue;
        }
        let path = needs
            .keys()
            .find(|path| module_name(path) == name)
            .ok_or_else(|| Error::unexpected(format!("the guest kernel has no module {name}")))?;
        add_after_needs(path, &needs, &mut HashSet::new(), &mut order);
    }
    Ok(order)
}

/// Adds the module at `path` to `order`, after what it needs. `visited` ends a cycle, if any.
fn add_after_needs<'a>(
    path: &'a str,
    needs: &HashMap<&str, &'a str>,
    visited: &mut HashSet<&'a str>,
    order: &mut Vec<String>,
) {
    if !visited.insert(path) || order.iter().any(|p| p == path) {
        return;
    }
    for need in needs.get(path).into_iter().flat_map(|n| n.split_whitespace()) {
        add_after_needs(need, needs, visited, order);
    }
    order.push(path.to_owned());
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "k/virtio_blk.ko: k/virtio_ring.ko k/virtio.ko\nk/virtio.ko:\n\
        k/virtio_ring.ko: k/virtio.ko\nk/virtio-pci.ko.xz: k/virtio_ring.ko k/virtio.ko\n";

    #[test]
    fn dependencies_come_first_and_once() {
        let order = load_order(DEP, "k/ext4.ko\n", &["virtio_pci", "ext4", "virtio_blk"]).unwrap();
        let expected = ["k/virtio.ko", "k/virtio_ring.ko", "k/virtio-pci.ko.xz", "k/virtio_blk.ko"];
        assert_eq!(order, expected);
    }

    #[test]
    fn an_unknown_module_is_named() {
        let error = load_order(DEP, "", &["nbd"]).unwrap_err().to_string();
        assert!(error.contains("nbd"), "{error}");
    }
}
