//! Shared by the tests of headers.
#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io;

use ebb_luks::{DATA_OFFSET, HeaderArea, LuksHeader, Secret};

/// A store in memory, which counts its writes and may refuse them from one on.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    pub(crate) bytes: Vec<u8>,
    pub(crate) writes: usize,
    /// Writes that are carried out.
    pub(crate) most: usize,
}

impl Disk {
    pub(crate) fn new(size: u64) -> Disk {
        Disk::of(vec![0; usize::try_from(size).unwrap()])
    }

    pub(crate) fn of(bytes: Vec<u8>) -> Disk {
        Disk { bytes, writes: 0, most: usize::MAX }
    }
}

impl HeaderArea for Disk {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&mut self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let at = usize::try_from(at).unwrap();
        let found = self.bytes.get(at..at + bytes.len());
        bytes.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        if self.writes >= self.most {
            return Err(io::Error::other("no more writes"));
        }
        self.writes += 1;
        let at = usize::try_from(at).unwrap();
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A new volume of 1 MiB.
pub(crate) fn formatted(passphrase: &[u8]) -> (Disk, LuksHeader, Secret) {
    let mut disk = Disk::new(DATA_OFFSET + (1 << 20));
    let (header, key) = LuksHeader::format(&mut disk, passphrase).unwrap();
    (disk, header, key)
}
