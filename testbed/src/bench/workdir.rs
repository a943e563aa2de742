//! The directory of one run: the test file, sockets, reports. It is removed at the end of the run;
//! what a killed run left is removed by the next one.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise, statfs};

use super::{Error, io_context, log};
use crate::harness::pattern::Random;

/// Size of the test file: 1 GiB.
pub const DISK_BYTES: u64 = 1 << 30;
/// Size of each of the sparse files behind the thousand idle volumes: 1 GiB.
const SPARSE_BYTES: u64 = 1 << 30;
/// `f_type` of a tmpfs, from `linux/magic.h`.
const TMPFS_MAGIC: i128 = 0x0102_1994;
/// The longest path `struct sockaddr_un` holds, without its final NUL.
const LONGEST_SOCKET: usize = 107;

/// A directory on a disk that holds everything of one run, and the test file in it.
#[derive(Debug)]
pub struct Workdir {
    directory: tempfile::TempDir,
    /// Held locked while the run lives, so that another run can tell.
    _alive: File,
}

const PREFIX: &str = "ebbd-bench-";
/// Name of the locked file in the directory.
const ALIVE: &str = "alive";

impl Workdir {
    /// Makes the directory within `place` and writes the test file: every block allocated, content
    /// that does not compress, all of it on the disk.
    ///
    /// # Errors
    /// [`Error::Place`] when `place` is in memory or its path too long for a socket in it;
    /// [`Error::Io`] when the file cannot be written.
    pub fn create(place: &Path) -> Result<Self, Error> {
        let kind = statfs(place)
            .map_err(|error| io_context(format!("looking at {}", place.display()))(error.into()))?;
        if i128::from(kind.f_type) == TMPFS_MAGIC {
            let place = place.display();
            return Err(Error::Place(format!(
                "{place} is in memory (tmpfs); set TMPDIR to a directory on a disk"
            )));
        }
        let work = Self::without_disk(place)?;
        work.write_disk()?;
        Ok(work)
    }

    /// Makes the directory alone, for a run that needs no test file.
    ///
    /// # Errors
    /// [`Error::Place`] when the path is too long for a socket in it; [`Error::Io`] when the
    /// directory cannot be made.
    pub fn without_disk(place: &Path) -> Result<Self, Error> {
        remove_left_over(place);
        let making = || format!("making a directory in {}", place.display());
        let directory = tempfile::Builder::new()
            .prefix(PREFIX)
            .tempdir_in(place)
            .map_err(io_context(making()))?;
        let alive = File::create_new(directory.path().join(ALIVE)).map_err(io_context(making()))?;
        alive.lock().map_err(io_context(making()))?;
        let work = Self { directory, _alive: alive };
        if work.path("longest-name.sock").as_os_str().len() > LONGEST_SOCKET {
            return Err(Error::Place(format!(
                "{} is too long for a unix socket in it; set TMPDIR to a shorter path",
                place.display()
            )));
        }
        Ok(work)
    }

    /// A file of this name in the directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The test file.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.path("disk.img")
    }

    fn write_disk(&self) -> Result<(), Error> {
        let path = self.disk();
        log(format_args!("writing {DISK_BYTES} bytes of random data to {}", path.display()));
        let writing = || format!("writing {}", path.display());
        let mut file = BufWriter::with_capacity(
            1 << 20,
            File::create_new(&path).map_err(io_context(writing()))?,
        );
        let mut random = Random::new(0x6562_6264);
        for _ in 0..DISK_BYTES / 8 {
            file.write_all(&random.next().to_ne_bytes()).map_err(io_context(writing()))?;
        }
        let file = file.into_inner().map_err(|error| io_context(writing())(error.into_error()))?;
        file.sync_all().map_err(io_context(writing()))?;
        fadvise(&file, 0, None, Advice::DontNeed).map_err(|e| io_context(writing())(e.into()))?;
        let found = file.metadata().map_err(io_context(writing()))?;
        if found.blocks() * 512 < DISK_BYTES {
            return Err(Error::Place(format!(
                "the file system stores {} in {} bytes (it compresses or shares blocks); \
                 set TMPDIR to another one",
                path.display(),
                found.blocks() * 512
            )));
        }
        Ok(())
    }

    /// Writes out what the run before left dirty and reads the whole file into the page cache, page
    /// by page and without read-ahead, so that the cache holds small folios as random I/O makes
    /// them. With large ones ext4 walks every buffer of a folio for each write, 15 to 35 µs in
    /// every server alike, and nothing else is seen.
    ///
    /// # Errors
    /// [`Error::Io`] from the file system.
    pub fn warm(&self) -> Result<(), Error> {
        let path = self.disk();
        let warming = || format!("warming {}", path.display());
        let file = self.settled()?;
        fadvise(&file, 0, None, Advice::Random).map_err(|e| io_context(warming())(e.into()))?;
        let mut page = [0; 4096];
        for offset in (0..DISK_BYTES).step_by(page.len()) {
            file.read_exact_at(&mut page, offset).map_err(io_context(warming()))?;
        }
        Ok(())
    }

    /// Writes out what the run before left dirty and drops the file from the page cache, so that
    /// O_DIRECT finds nothing there to invalidate.
    ///
    /// # Errors
    /// [`Error::Io`] from the file system.
    pub fn cool(&self) -> Result<(), Error> {
        fadvise(&self.settled()?, 0, None, Advice::DontNeed)
            .map_err(|error| io_context("dropping the test file from memory")(error.into()))
    }

    fn settled(&self) -> Result<File, Error> {
        let path = self.disk();
        let settling = || format!("syncing {}", path.display());
        let file = File::open(&path).map_err(io_context(settling()))?;
        file.sync_all().map_err(io_context(settling()))?;
        Ok(file)
    }

    /// Makes `count` sparse files of 1 GiB in a directory of their own, once, and names them.
    ///
    /// # Errors
    /// [`Error::Io`] from the file system.
    pub fn sparse_files(&self, count: usize) -> Result<Vec<(String, PathBuf)>, Error> {
        let directory = self.path("volumes");
        fs::create_dir_all(&directory).map_err(io_context("making sparse files"))?;
        (0..count)
            .map(|index| {
                let name = format!("v{index:04}");
                let path = directory.join(&name);
                File::create(&path)
                    .and_then(|file| file.set_len(SPARSE_BYTES))
                    .map_err(io_context(format!("making {}", path.display())))?;
                Ok((name, path))
            })
            .collect()
    }
}

/// Removes the directories of runs that were killed: their lock is free. What cannot be inspected
/// or removed stays; it only takes disk space.
fn remove_left_over(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let free = File::open(entry.path().join(ALIVE)).is_ok_and(|file| file.try_lock().is_ok());
        if free && fs::remove_dir_all(entry.path()).is_ok() {
            log(format_args!("removed {}, left by a run that was killed", entry.path().display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_dead_runs_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let path = place.path().join(name);
            fs::create_dir(&path).unwrap();
            File::create(path.join(ALIVE)).unwrap()
        };
        let living = make("ebbd-bench-1");
        living.lock().unwrap();
        drop(make("ebbd-bench-2"));
        drop(make("other"));
        fs::create_dir(place.path().join("ebbd-bench-3")).unwrap();
        remove_left_over(place.path());
        let mut left: Vec<_> =
            fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["ebbd-bench-1", "ebbd-bench-3", "other"]);
    }

    #[test]
    fn memory_and_long_paths_are_refused_with_a_remedy() {
        let deep = tempfile::tempdir().unwrap();
        let long = deep.path().join("x".repeat(100));
        fs::create_dir(&long).unwrap();
        for place in [Path::new("/dev/shm"), &long] {
            let error = Workdir::create(place).unwrap_err().to_string();
            assert!(error.contains("set TMPDIR"), "{}: {error}", place.display());
            assert_eq!(fs::read_dir(&long).unwrap().count(), 0, "nothing is left behind");
        }
    }
}
