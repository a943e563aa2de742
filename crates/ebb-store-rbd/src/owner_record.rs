//! The record of an image's lock: the addresses that this host's daemon had, or may have had, as its owner.
//!
//! A killed daemon leaves its lock behind, and Ceph would wait half a minute for it. The next daemon may break it at once, if it
//! knows that the owner was a process of this host that has ended.
//!
//! # Invariants
//! - The record is locked (`flock(2)`) as long as the image is open. The kernel drops that lock when the process has ended, so
//!   the process that has it knows that the one that wrote the record's addresses has ended, or has closed the image.
//! - An address is in the record, on the disk, before the lock of the image is taken with it. It is removed when another one
//!   has taken the lock.
//! - Addresses of clients are random for each process: another client does not have a recorded one.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_sandbox::threads;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// The longest record that is read, bytes.
const RECORD_BYTES: u64 = 4096;
/// The most addresses of it.
const ADDRESSES: usize = 16;

/// A locked record.
#[derive(Debug)]
pub(crate) struct OwnerRecord {
    /// Shared with the thread that unlocks it for a worker.
    file: Arc<File>,
    path: PathBuf,
    /// The addresses of processes that have ended.
    earlier: Vec<String>,
}

/// Why a record cannot be used.
#[derive(Debug)]
pub(crate) enum RecordError {
    /// Another process has it.
    InUse(PathBuf),
    /// A system error.
    Io(PathBuf, io::Error),
}

/// The file name of a record: what may be in identities, and in file names on any file system.
fn file_name(key: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let mut name: String = key.chars().map(plain).take(200).collect();
    name.push_str(".owner");
    name
}

impl OwnerRecord {
    /// Opens and locks the record of the image `key` in `folder`, which is made if it is absent.
    pub(crate) fn lock(folder: &Path, key: &str) -> Result<OwnerRecord, RecordError> {
        let path = folder.join(file_name(key));
        let failed = |error| RecordError::Io(path.clone(), error);
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        // A process that may read the file could lock it.
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let mut file = options.open(&path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(failed(io::Error::other("it is not a regular file")));
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(RecordError::InUse(path)),
            Err(error) => return Err(failed(error.into())),
        }
        let mut text = String::new();
        // A record that is damaged is as one that is empty: then no lock is broken.
        if (&mut file).take(RECORD_BYTES).read_to_string(&mut text).is_err() {
            text.clear();
        }
        // The last line may be torn.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let addresses = whole.lines().filter(|line| !line.is_empty());
        let earlier = addresses.take(ADDRESSES).map(str::to_owned).collect();
        Ok(OwnerRecord { file: Arc::new(file), path, earlier })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether `owner` was the address of a process of this host that has ended.
    pub(crate) fn has(&self, owner: &str) -> bool {
        self.earlier.iter().any(|earlier| earlier == owner)
    }

    /// Adds an address, before the lock is taken with it.
    pub(crate) fn add(&mut self, address: &str) -> io::Result<()> {
        let from = (self.earlier.len() + 1).saturating_sub(ADDRESSES);
        let kept = self.earlier.iter().skip(from).map(String::as_str);
        let text: String = kept.chain([address]).map(|one| format!("{one}\n")).collect();
        self.write(&text)
    }

    /// Removes all addresses but `address`, which has the lock.
    pub(crate) fn keep_only(&mut self, address: &str) -> io::Result<()> {
        self.earlier.clear();
        self.write(&format!("{address}\n"))
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        let mut file = &*self.file;
        file.rewind()?;
        file.write_all(text.as_bytes())?;
        self.file.set_len(text.len() as u64)?;
        self.file.sync_all()
    }

    /// Drops the lock of the record, after that of the image.
    pub(crate) fn unlock(&self) {
        let file = self.file.clone();
        // Not by a worker itself, which may not.
        let _ = threads::call(move || flock(&*file, FlockOperation::Unlock));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_exclusive_and_remembers_addresses_until_one_has_the_lock() {
        let folder = std::env::temp_dir().join(format!("ebbd-record-{}", std::process::id()));
        let lock = || OwnerRecord::lock(&folder, "cluster/1/image");
        let mut record = lock().unwrap();
        assert!(matches!(lock(), Err(RecordError::InUse(_))));
        assert!(!record.has("127.0.0.1:0/1"));
        record.add("127.0.0.1:0/1").unwrap();
        drop(record);
        let mut record = lock().unwrap();
        assert!(record.has("127.0.0.1:0/1") && !record.has("127.0.0.1:0/12"));
        record.add("127.0.0.1:0/2").unwrap();
        drop(record);
        let mut record = lock().unwrap();
        assert!(record.has("127.0.0.1:0/1") && record.has("127.0.0.1:0/2"));
        record.keep_only("127.0.0.1:0/3").unwrap();
        drop(record);
        let record = lock().unwrap();
        assert!(record.has("127.0.0.1:0/3") && !record.has("127.0.0.1:0/2"));
        // A torn or foreign record breaks nothing.
        std::fs::write(record.path(), b"127.0.0.1:0/3").unwrap();
        drop(record);
        assert!(!lock().unwrap().has("127.0.0.1:0/3"));
        std::fs::write(folder.join(file_name("cluster/1/image")), [0xff; 9000]).unwrap();
        assert!(lock().unwrap().earlier.is_empty());
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_record_that_is_no_file_of_its_own_is_refused() {
        let folder = std::env::temp_dir().join(format!("ebbd-links-{}", std::process::id()));
        drop(OwnerRecord::lock(&folder, "image").unwrap());
        let path = folder.join(file_name("image"));
        std::fs::remove_file(&path).unwrap();
        let victim = folder.join("victim");
        std::fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        assert!(matches!(OwnerRecord::lock(&folder, "image"), Err(RecordError::Io(..))));
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
        std::fs::remove_file(&path).unwrap();
        let fifo = rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        );
        fifo.unwrap();
        assert!(matches!(OwnerRecord::lock(&folder, "image"), Err(RecordError::Io(..))));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn addresses_do_not_accumulate_without_bound() {
        let folder = std::env::temp_dir().join(format!("ebbd-records-{}", std::process::id()));
        for number in 0..40 {
            let mut record = OwnerRecord::lock(&folder, "image").unwrap();
            record.add(&format!("10.0.0.1:0/{number}")).unwrap();
        }
        let record = OwnerRecord::lock(&folder, "image").unwrap();
        assert!(record.earlier.len() <= ADDRESSES && record.has("10.0.0.1:0/39"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
