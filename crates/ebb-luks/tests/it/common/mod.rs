//! Shared by the tests of headers.

use std::io;

use ebb_luks::{DATA_OFFSET, HeaderArea, LuksHeader, Secret};

const SECTOR: usize = 512;

/// A store in memory, which counts its writes and may refuse them from one on, or have a page cache before a disk whose
/// syncs fail.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    /// What is read.
    pub(crate) bytes: Vec<u8>,
    pub(crate) writes: usize,
    /// Writes that are carried out.
    pub(crate) most: usize,
    pub(crate) syncs: usize,
    /// The sync that fails: of what was written since the one before, every second sector is on the disk then, and the page
    /// cache has all of it and believes that it is clean.
    pub(crate) failing_sync: usize,
    /// What is on the disk, where it differs from what is read: offset and bytes.
    pub(crate) torn: Vec<(usize, Vec<u8>)>,
    /// What was there before the writes since the last sync.
    before: Vec<(usize, Vec<u8>)>,
}

impl Disk {
    pub(crate) fn new(size: u64) -> Disk {
        Disk::of(vec![0; usize::try_from(size).unwrap()])
    }

    /// What is there after a power cut: of the writes since the last sync, every second sector.
    pub(crate) fn after_power_cut(&self) -> Disk {
        let mut bytes = self.bytes.clone();
        for (at, found) in &self.torn {
            bytes[*at..at + found.len()].copy_from_slice(found);
        }
        for (at, before) in self.before.iter().rev() {
            let sectors = before.chunks(SECTOR).enumerate().step_by(2);
            for (number, sector) in sectors {
                let at = at + number * SECTOR;
                bytes[at..at + sector.len()].copy_from_slice(sector);
            }
        }
        Disk::of(bytes)
    }

    pub(crate) fn of(bytes: Vec<u8>) -> Disk {
        Disk {
            bytes,
            writes: 0,
            most: usize::MAX,
            syncs: 0,
            failing_sync: usize::MAX,
            torn: Vec::new(),
            before: Vec::new(),
        }
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
        let range = at..at + bytes.len();
        // On the disk is what a failed sync has left there, unless this write covers it.
        let mut before = self.bytes[range.clone()].to_vec();
        self.torn.retain(|(torn, found)| {
            let covered = range.contains(torn);
            if covered {
                before[torn - at..torn - at + found.len()].copy_from_slice(found);
            }
            !covered
        });
        self.before.push((at, before));
        self.bytes[range].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.syncs += 1;
        let before = std::mem::take(&mut self.before);
        if self.syncs != self.failing_sync {
            return Ok(());
        }
        for (at, before) in before {
            for (number, sector) in before.chunks(SECTOR).enumerate().step_by(2) {
                self.torn.push((at + number * SECTOR, sector.to_vec()));
            }
        }
        Err(io::Error::other("the disk has failed"))
    }
}

/// A new volume of 1 MiB.
pub(crate) fn formatted(passphrase: &[u8]) -> (Disk, LuksHeader, Secret) {
    let mut disk = Disk::new(DATA_OFFSET + (1 << 20));
    let (header, key) = LuksHeader::format(&mut disk, passphrase).unwrap();
    (disk, header, key)
}
