//! Which volume has which file or export of a server open. Two volumes that write to one would destroy its data: the
//! second one is refused at once, whatever path it uses, and opened when the first has released it. The lock on a file
//! keeps out other processes; servers have none. A change that closes a volume and opens it again
//! has a second claim meanwhile ([`StoreClaim::hold`]). A volume that could not be closed may still
//! have writes in flight, which would
//! replace what a successor writes: its claim ends with its store, not with the volume.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use ebb_cache::Delta;
use ebb_config::VolumeConfig;
use ebb_store::Store;
use ebb_volume::Stop;

use super::lock;
use crate::stores::{HeldAs, StoreError, StoreTarget};

#[derive(Debug)]
struct ClaimHolder {
    number: u64,
    volume: String,
    /// Another volume that may have the file: it is the same one under another name, or above it.
    heir: Option<String>,
    read_only: bool,
    /// The file is a layer below the volume.
    is_layer: bool,
    /// The delta that it was the top layer with: it is only read from when that is stable on.
    frozen: Option<Arc<Delta>>,
    /// Set when it has released the file or export.
    gone: Arc<Stop>,
    /// The volume was withdrawn, and its store, which is not closed, may still write.
    withdrawn: bool,
}

impl ClaimHolder {
    /// Returns true if the file is the volume's own: an earlier attempt to open it may still hang,
    /// which writes nothing.
    fn is_of(&self, volume: &str) -> bool {
        (self.volume == volume || self.heir.as_deref() == Some(volume)) && !self.withdrawn
    }

    /// Whether it has data of a snapshot in memory.
    fn is_unflushed(&self) -> bool {
        self.frozen.as_ref().is_some_and(|delta| delta.is_unflushed())
    }

    /// How it has the file, for a volume that wants it and only reads from it if `read_only`.
    fn held(&self, read_only: bool) -> HeldAs {
        match self.is_layer {
            _ if self.is_unflushed() && read_only => HeldAs::UnstableSnapshot,
            true => HeldAs::Layer,
            false => HeldAs::Store,
        }
    }

    fn is_read_only(&self) -> bool {
        self.read_only || (self.frozen.is_some() && !self.is_unflushed())
    }
}

/// The claim of a withdrawn volume, to be released when its store is dropped.
#[derive(Debug)]
struct KeptClaim {
    file: StoreTarget,
    number: u64,
    store: Weak<Store>,
}

#[derive(Debug, Default)]
struct ClaimTable {
    files: BTreeMap<StoreTarget, Vec<ClaimHolder>>,
    kept: Vec<KeptClaim>,
    last: u64,
}

/// The files and exports of all volumes that are open or being opened.
#[derive(Debug, Default)]
pub struct StoreClaims {
    held: Mutex<ClaimTable>,
}

/// The claim of a volume to its file or export, until it is dropped.
#[derive(Debug)]
pub struct StoreClaim {
    claims: Arc<StoreClaims>,
    file: StoreTarget,
    number: u64,
    kept: bool,
}

impl StoreClaims {
    /// Claims the file or export of a volume; `None` if its store is neither. Calls `stat`, and so may block.
    ///
    /// # Errors
    /// [`StoreError::SameFile`] if another volume has it, unless both are read-only.
    pub fn claim(
        self: &Arc<Self>,
        volume: &str,
        config: &VolumeConfig,
    ) -> Result<Option<StoreClaim>, StoreError> {
        let Some(file) = StoreTarget::of(&config.store)? else { return Ok(None) };
        let read_only = config.read_only;
        self.release_unused();
        let mut held = lock(&self.held);
        let holders = held.files.get(&file).into_iter().flatten();
        let others = { holders }
            .filter(|holder| !(holder.is_of(volume) || holder.is_read_only() && read_only));
        // The volume that the file is the store of, before those that it is a layer of.
        let other = others.min_by_key(|holder| holder.is_layer);
        if let Some(other) = other {
            return Err(StoreError::SameFile {
                store: config.store.to_string(),
                other: other.volume.clone(),
                file,
                held: other.held(read_only),
                gone: other.gone.clone(),
            });
        }
        let number = held.add(&file, (volume, None), read_only);
        Ok(Some(StoreClaim { claims: self.clone(), file, number, kept: false }))
    }

    /// Returns true if a withdrawn volume may still write to a file or export, or a change has
    /// closed a volume and is opening it again.
    pub(super) fn is_kept(&self, file: &StoreTarget) -> bool {
        self.release_unused();
        let held = lock(&self.held);
        let mut holders = held.files.get(file).into_iter().flatten();
        holders.any(|holder| holder.heir.is_some())
            || held.kept.iter().any(|kept| kept.file == *file)
    }

    /// Releases the claims of withdrawn volumes whose stores are dropped by now.
    fn release_unused(&self) {
        let mut held = lock(&self.held);
        let ClaimTable { kept, .. } = &mut *held;
        let unused: Vec<_> = kept.extract_if(.., |kept| kept.store.strong_count() == 0).collect();
        for kept in unused {
            if let Some(holder) = held.take(&kept.file, kept.number) {
                holder.gone.stop();
            }
        }
    }
}

impl StoreClaim {
    /// The claimed file or export.
    pub fn file(&self) -> &StoreTarget {
        &self.file
    }

    /// A second claim to the file, which lasts when the volume is closed: until it is dropped, only
    /// this volume and `heir` may open the file; others may read from it if it is only `read_only`
    /// here.
    pub(super) fn hold(&self, volume: &str, heir: &str, read_only: bool) -> StoreClaim {
        let mut held = lock(&self.claims.held);
        let number = held.add(&self.file, (volume, Some(heir)), read_only);
        StoreClaim { claims: self.claims.clone(), file: self.file.clone(), number, kept: false }
    }

    /// From now on the file is only read, as a layer.
    pub(super) fn freeze(&self) {
        self.change(|holder| (holder.read_only, holder.is_layer) = (true, true));
    }

    /// The file is a layer below the volume.
    pub(super) fn note_layer(&self) {
        self.change(|holder| holder.is_layer = true);
    }

    fn change(&self, change: impl Fn(&mut ClaimHolder)) {
        let mut held = lock(&self.claims.held);
        let holders = held.files.get_mut(&self.file).into_iter().flatten();
        holders.filter(|holder| holder.number == self.number).for_each(change);
    }

    /// The file is only read from when `delta`, which it holds, is stable on.
    pub(super) fn freeze_when_stable(&self, delta: &Arc<Delta>) {
        self.change(|holder| (holder.frozen, holder.is_layer) = (Some(delta.clone()), true));
    }

    /// Keeps the claim until the store is dropped: its volume was withdrawn and could not be closed.
    pub(super) fn keep_until_dropped(mut self, store: Weak<Store>) {
        self.kept = true;
        let (file, number) = (self.file.clone(), self.number);
        let mut held = lock(&self.claims.held);
        let holders = held.files.get_mut(&file).into_iter().flatten();
        holders.filter(|holder| holder.number == number).for_each(|holder| holder.withdrawn = true);
        held.kept.push(KeptClaim { file, number, store });
    }

    /// To be called when the file was opened or created, and so has an inode number.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn opened(&mut self, store: &Store) -> Result<(), StoreError> {
        let Some(file) = StoreTarget::of_open(store)?.filter(|file| *file != self.file) else {
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

impl ClaimTable {
    /// Notes a claim of a volume, and of the one that may have the file as well, and returns its
    /// number.
    fn add(
        &mut self,
        file: &StoreTarget,
        (volume, heir): (&str, Option<&str>),
        read_only: bool,
    ) -> u64 {
        self.last += 1;
        self.files.entry(file.clone()).or_default().push(ClaimHolder {
            number: self.last,
            volume: volume.to_owned(),
            heir: heir.map(str::to_owned),
            read_only,
            is_layer: false,
            frozen: None,
            gone: Arc::default(),
            withdrawn: false,
        });
        self.last
    }

    fn take(&mut self, file: &StoreTarget, number: u64) -> Option<ClaimHolder> {
        let holders = self.files.get_mut(file)?;
        let at = holders.iter().position(|holder| holder.number == number)?;
        let holder = holders.swap_remove(at);
        if holders.is_empty() {
            self.files.remove(file);
        }
        Some(holder)
    }
}

impl Drop for StoreClaim {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let holder = lock(&self.claims.held).take(&self.file, self.number);
        if let Some(holder) = holder {
            holder.gone.stop();
        }
    }
}
