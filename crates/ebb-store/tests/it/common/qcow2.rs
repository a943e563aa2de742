//! Images made by QEMU's own programs.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a program of qemu-utils, which `testbed/install` installs.
pub(crate) fn run(program: &str, arguments: &[&str]) {
    let made = Command::new(program).args(arguments).output();
    let made = made.unwrap_or_else(|error| panic!("{program}: {error}: run testbed/install"));
    let text = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{program} {arguments:?}: {text}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An image in a folder.
pub(crate) struct Image {
    pub(crate) path: PathBuf,
}

impl Image {
    /// An empty one; `options` are those of `qemu-img create -o`.
    pub(crate) fn empty(folder: &Path, name: &str, options: &str, size: u64) -> Image {
        let path = folder.join(name);
        let size = size.to_string();
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, text(&path), &size]);
        Image { path }
    }

    /// One with the content of a raw disk.
    pub(crate) fn of_raw(folder: &Path, name: &str, options: &str, raw: &Path) -> Image {
        let path = folder.join(name);
        let (from, to) = (text(raw), text(&path));
        run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", "-o", options, from, to]);
        Image { path }
    }

    /// Carries out commands of `qemu-io`.
    pub(crate) fn change(&self, commands: &[String]) {
        let mut arguments = vec!["-f", "qcow2"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        arguments.push(text(&self.path));
        run("qemu-io", &arguments);
    }

    /// The disk in it, as QEMU reads it.
    pub(crate) fn content(&self) -> Vec<u8> {
        let raw = self.path.with_extension("raw");
        run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", text(&self.path), text(&raw)]);
        std::fs::read(raw).unwrap()
    }

    /// Changes bytes of the file.
    pub(crate) fn patch(&self, at: u64, bytes: &[u8]) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(&self.path).unwrap();
        file.write_all_at(bytes, at).unwrap();
    }
}
