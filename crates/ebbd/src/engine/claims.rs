//! Which volume has which file. Two volumes that write to one file destroy its data: the second one is refused at
//! once, by whatever path it names the file. Other processes are kept out by the lock on the file.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ebb_store::Store;
use ebb_volume::Stop;

use super::lock;
use crate::config::VolumeConfig;
use crate::stores::{FileIdentity, StoreError};

#[derive(Debug)]
struct Holder {
    number: u64,
    volume: String,
    read_only: bool,
    /// Sent when it has it no more.
    gone: Arc<Stop>,
}

#[derive(Debug, Default)]
struct Held {
    files: BTreeMap<FileIdentity, Vec<Holder>>,
    last: u64,
}

/// The files of all volumes that are open, or being opened.
#[derive(Debug, Default)]
pub struct Claims {
    held: Mutex<Held>,
}

/// A volume has its file until this is dropped.
#[derive(Debug)]
pub struct Claim {
    claims: Arc<Claims>,
    file: FileIdentity,
    number: u64,
}

impl Claims {
    /// Claims the file of a volume; `None` if its store is none. Looks at the file, and so may block.
    ///
    /// # Errors
    /// [`StoreError::SameFile`] if another volume has it, unless both only read.
    pub fn claim(
        self: &Arc<Self>,
        volume: &str,
        config: &VolumeConfig,
    ) -> Result<Option<Claim>, StoreError> {
        let Some(file) = FileIdentity::of(&config.store)? else { return Ok(None) };
        let read_only = config.read_only;
        let mut held = lock(&self.held);
        held.last += 1;
        let number = held.last;
        let holders = held.files.entry(file.clone()).or_default();
        // An earlier attempt of the same volume may still hang: then the file's lock decides.
        let other = holders
            .iter()
            .find(|holder| holder.volume != volume && !(holder.read_only && read_only));
        if let Some(other) = other {
            return Err(StoreError::SameFile {
                store: config.store.to_string(),
                other: other.volume.clone(),
                file,
                gone: other.gone.clone(),
            });
        }
        let volume = volume.to_owned();
        holders.push(Holder { number, volume, read_only, gone: Arc::default() });
        Ok(Some(Claim { claims: self.clone(), file, number }))
    }
}

impl Claim {
    /// The file that is held.
    pub fn file(&self) -> &FileIdentity {
        &self.file
    }

    /// The file was opened, and if need be made: it has a number now.
    ///
    /// # Errors
    /// That cannot be found out.
    pub fn opened(&mut self, store: &Store) -> Result<(), StoreError> {
        let Some(file) = FileIdentity::of_open(store)?.filter(|file| *file != self.file) else {
            return Ok(());
        };
        let mut held = lock(&self.claims.held);
        if let Some(holder) = held.take(&self.file, self.number) {
            held.files.entry(file.clone()).or_default().push(holder);
            self.file = file;
        }
        Ok(())
    }
}

impl Held {
    fn take(&mut self, file: &FileIdentity, number: u64) -> Option<Holder> {
        let holders = self.files.get_mut(file)?;
        let at = holders.iter().position(|holder| holder.number == number)?;
        let holder = holders.swap_remove(at);
        if holders.is_empty() {
            self.files.remove(file);
        }
        Some(holder)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let holder = lock(&self.claims.held).take(&self.file, self.number);
        if let Some(holder) = holder {
            holder.gone.stop();
        }
    }
}
