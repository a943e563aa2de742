//! Programs that are run, and images that are made.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ebb_image::{DeltaHeader, HEADER_SLOTS, Layout, Parent, map_page};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const DELTA: [u8; 16] = [7; 16];

/// What a program has said, and its exit status.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Said {
    /// Fails unless the program ended with this status and said this somewhere.
    #[track_caller]
    pub(crate) fn check(&self, code: i32, text: &str) -> &Said {
        let said = self.out.contains(text) || self.err.contains(text);
        assert!(self.code == Some(code) && said, "not {code} and {text:?}: {self:#?}");
        self
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

pub(crate) fn program(name: &str, arguments: &[&str]) -> Said {
    let output = Command::new(name).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{name}: {error}: run testbed/install"));
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

pub(crate) fn ebbd(arguments: &[&str]) -> Said {
    program(env!("CARGO_BIN_EXE_ebbd"), arguments)
}

pub(crate) fn image(arguments: &[&str]) -> Said {
    ebbd(&[&["image"], arguments].concat())
}

/// Runs a program of qemu-utils that has to succeed.
#[track_caller]
pub(crate) fn qemu(name: &str, arguments: &[&str]) -> Said {
    let said = program(name, arguments);
    assert_eq!(said.code, Some(0), "{name} {arguments:?}: {said:#?}");
    said
}

/// A folder for one test.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// As a store.
    pub(crate) fn file(&self, name: &str) -> String {
        format!("file:{}", self.text(name))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    /// A delta of a volume of `size` bytes, with these blocks in the first page of its map.
    pub(crate) fn delta(&self, name: &str, size: u64, parent: &Parent, blocks: &[u64]) -> Layout {
        let layout = Layout::new(size).unwrap();
        let file = std::fs::File::create_new(self.path(name)).unwrap();
        file.set_len(layout.store_size()).unwrap();
        for number in [1, 2] {
            let header = DeltaHeader::new(number, DELTA, layout, parent.clone());
            file.write_all_at(&header.encode(), HEADER_SLOTS[header.slot()]).unwrap();
        }
        // An older copy without the blocks, and the newer one.
        for (slot, blocks) in [(0, &[][..]), (1, blocks)] {
            let mut page = vec![0; map_page::BYTES];
            for block in blocks {
                let (byte, mask) = map_page::place(*block);
                page[byte] |= mask;
            }
            map_page::seal(&mut page, 0, DELTA, slot as u64 + 1);
            file.write_all_at(&page, layout.map_slot(0, slot)).unwrap();
        }
        for block in blocks {
            file.write_all_at(&[0xd1; 4096], layout.data_start() + block * 4096).unwrap();
        }
        layout
    }

    /// Changes bytes of a file.
    pub(crate) fn patch(&self, name: &str, at: u64, bytes: &[u8]) {
        let file = std::fs::File::options().write(true).open(self.path(name)).unwrap();
        file.write_all_at(bytes, at).unwrap();
    }

    /// Flips a bit of a file.
    pub(crate) fn flip(&self, name: &str, at: u64) {
        let file = std::fs::File::options().read(true).write(true).open(self.path(name)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
}

/// A process that is killed when it is dropped.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until `done` is true.
#[track_caller]
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// Serves an image with `qemu-nbd` at a socket, once it accepts connections; `image` are its options.
pub(crate) fn qemu_nbd(socket: &Path, image: &[&str]) -> Running {
    let mut command = Command::new("qemu-nbd");
    command.args(["-t", "-e", "9", "-k"]).arg(socket).args(image);
    let server = Running(command.stdin(Stdio::null()).spawn().unwrap());
    until("qemu-nbd listens", || std::os::unix::net::UnixStream::connect(socket).is_ok());
    server
}

pub(crate) fn nbd(export: &str, socket: &Path) -> String {
    format!("nbd+unix:///{export}?socket={}", socket.display())
}
