//! The key slots of encrypted volumes: of those that are not open ([`HeaderOfFile`]), and of those that are ([`OpenKeys`]).
//!
//! # Invariants
//! - A header is read anew before each change of it, so that a change that has failed half-way is completed or replaced.
//! - One change of a header at a time: the file is locked, and in the process a mutex is held.
//! - The key of an open volume stays where its cipher has it, in locked memory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ebb_block::BlockStore;
use ebb_io::Fd;
use ebb_luks::{KeySlot, LuksError, LuksHeader, Secret, SectorCipher};

use crate::encrypted::{EncryptedStore, HeaderFile};
use crate::encrypted_error::EncryptedError;
use crate::file::FileStore;
use crate::open_options::OpenOptions;

/// How long to wait for another use of the key slots: a change takes about a second, unless its store hangs.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long to wait between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// The header of a volume that is not open, in its file, which is locked meanwhile.
#[derive(Debug)]
pub struct HeaderOfFile {
    header: LuksHeader,
    area: HeaderFile,
    path: PathBuf,
    /// Holds the lock.
    _file: FileStore,
}

impl HeaderOfFile {
    /// Opens the header in a file, with `write` to change it. May block.
    ///
    /// # Errors
    /// [`EncryptedError`], each with a remedy.
    pub fn open(path: &Path, write: bool) -> Result<HeaderOfFile, EncryptedError> {
        let options = OpenOptions { read_only: !write, existing: true, ..OpenOptions::default() };
        let (file, _) = FileStore::open_image(path, &options)?;
        let mut area = HeaderFile::again((file.descriptor(), file.size()), path, write)?;
        let header = LuksHeader::load(&mut area);
        let header = header.map_err(|source| EncryptedError::Luks { path: path.into(), source })?;
        Ok(HeaderOfFile { header, area, path: path.into(), _file: file })
    }

    /// What it says.
    pub fn header(&self) -> &LuksHeader {
        &self.header
    }

    fn failed(&self, source: LuksError) -> EncryptedError {
        EncryptedError::Luks { path: self.path.clone(), source }
    }

    /// The slot that a key opens, and the key of the volume.
    ///
    /// # Errors
    /// [`EncryptedError::Luks`], with a remedy.
    pub fn unlock(&mut self, key: &[u8]) -> Result<(u32, Secret), EncryptedError> {
        self.header.unlock(&mut self.area, key).map_err(|error| self.failed(error))
    }

    /// Adds a slot for `key`, and returns its number; `volume_key` is that of [`HeaderOfFile::unlock`].
    ///
    /// # Errors
    /// [`EncryptedError::Luks`], with a remedy.
    pub fn add_key(&mut self, volume_key: &Secret, key: &[u8]) -> Result<u32, EncryptedError> {
        let added = self.header.add_key(&mut self.area, volume_key, key);
        added.map_err(|error| self.failed(error))
    }

    /// Removes a slot, unless it is the last.
    ///
    /// # Errors
    /// [`EncryptedError::Luks`], with a remedy.
    pub fn remove_key(&mut self, slot: u32) -> Result<(), EncryptedError> {
        let removed = self.header.remove_key(&mut self.area, slot);
        removed.map_err(|error| self.failed(error))
    }
}

/// The key slots of a volume that is open. A user that changes them keeps the volume open meanwhile, and so the lock of its
/// file. All methods may block, and some take a second of processor time.
#[derive(Debug)]
pub struct OpenKeys {
    file: Fd,
    size: u64,
    path: PathBuf,
    cipher: Arc<SectorCipher>,
    slots: Arc<Mutex<()>>,
}

impl OpenKeys {
    /// Those of this volume.
    pub fn of(store: &EncryptedStore) -> OpenKeys {
        let (file, cipher, slots) = store.parts();
        OpenKeys {
            file: file.descriptor().clone(),
            size: file.size(),
            path: PathBuf::from(file.identity().place),
            cipher: cipher.clone(),
            slots: slots.clone(),
        }
    }

    /// The key slots, and a warning if one copy of the header is damaged.
    ///
    /// # Errors
    /// [`EncryptedError`], each with a remedy.
    pub fn slots(&self) -> Result<(Vec<KeySlot>, Option<String>), EncryptedError> {
        self.with_header(false, |header, _| Ok((header.slots().to_vec(), header.warning())))
    }

    /// The slot that a key opens.
    ///
    /// # Errors
    /// [`EncryptedError::Luks`], if it opens none, or one with another key than that of the open volume.
    pub fn opened_by(&self, key: &[u8]) -> Result<u32, EncryptedError> {
        self.with_header(false, |header, area| self.slot_of(header, area, key))
    }

    /// Adds a slot for a key, and returns its number.
    ///
    /// # Errors
    /// [`EncryptedError`], each with a remedy.
    pub fn add(&self, key: &[u8]) -> Result<u32, EncryptedError> {
        self.change_header(|header, area| header.add_key(area, self.cipher.key(), key))
    }

    /// Removes a slot, unless it is the last, or the only one that `kept` opens.
    ///
    /// # Errors
    /// [`EncryptedError`], each with a remedy: also if `kept` opens no slot.
    pub fn remove(&self, slot: u32, kept: Option<&[u8]>) -> Result<(), EncryptedError> {
        self.change_header(|header, area| {
            header.check_removable(slot)?;
            if let Some(kept) = kept
                && self.slot_of(header, area, kept)? == slot
                && !self.has_slot_behind(slot, header, area, kept)?
            {
                return Err(LuksError::SlotInUse(slot));
            }
            header.remove_key(area, slot)
        })
    }

    /// Returns true if `key`, of which `slot` is the first one that it opens, also opens a later
    /// one.
    fn has_slot_behind(
        &self,
        slot: u32,
        header: &LuksHeader,
        area: &mut HeaderFile,
        key: &[u8],
    ) -> Result<bool, LuksError> {
        match header.unlock_behind(slot, area, key) {
            Ok((_, found)) => Ok(self.cipher.has_key(&found)),
            Err(LuksError::WrongKey { .. } | LuksError::NoSlot(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn slot_of(
        &self,
        header: &LuksHeader,
        area: &mut HeaderFile,
        key: &[u8],
    ) -> Result<u32, LuksError> {
        let (slot, found) = header.unlock(area, key)?;
        if self.cipher.has_key(&found) { Ok(slot) } else { Err(LuksError::OtherVolume) }
    }

    /// Changes the header, unless another one has been put into the file: it would get the key of this volume.
    fn change_header<T>(
        &self,
        change: impl FnOnce(&mut LuksHeader, &mut HeaderFile) -> Result<T, LuksError>,
    ) -> Result<T, EncryptedError> {
        self.with_header(true, |header, area| match header.is_key(self.cipher.key())? {
            true => change(header, area),
            false => Err(LuksError::OtherVolume),
        })
    }

    /// Reads the header, and uses it while no other use of it is under way.
    fn with_header<T>(
        &self,
        write: bool,
        act: impl FnOnce(&mut LuksHeader, &mut HeaderFile) -> Result<T, LuksError>,
    ) -> Result<T, EncryptedError> {
        let _alone = self.alone()?;
        let mut area = HeaderFile::again((&self.file, self.size), &self.path, write)?;
        let acted = LuksHeader::load(&mut area).and_then(|mut header| act(&mut header, &mut area));
        acted.map_err(|source| EncryptedError::Luks { path: self.path.clone(), source })
    }

    fn alone(&self) -> Result<MutexGuard<'_, ()>, EncryptedError> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.slots.try_lock() {
                Ok(guard) => return Ok(guard),
                Err(TryLockError::Poisoned(poisoned)) => {
                    return Ok(PoisonError::into_inner(poisoned));
                }
                Err(TryLockError::WouldBlock) if Instant::now() >= end => {
                    return Err(EncryptedError::KeysInUse { path: self.path.clone() });
                }
                Err(TryLockError::WouldBlock) => std::thread::park_timeout(PAUSE),
            }
        }
    }
}
