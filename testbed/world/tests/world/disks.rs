//! The stores of a world as its daemons open them: disks, files, remote exports. The world can make
//! the opening fail, and take the file system of a disk away.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ebb_config::{Size, StoreUri, VolumeConfig};
use ebb_luks::Secret;
use ebb_store::{EncryptedStore, MemoryStore, NbdStore, OpenError, Store, TestStore};
use ebbd::engine::{Comparing, Opened, Opener, Opening, StoreClaims};
use ebbd::stores::{Expected, StoreError, StoreTarget, nbd_options};

use crate::broker::SimBroker;
use crate::daemon::Place;
use crate::folder::Folder;

/// A store that the daemon can open.
struct Slot {
    place: Place,
    fails: bool,
    /// The file of the store exists.
    made: bool,
    /// The file system of that file is mounted.
    mounted: bool,
    /// The key, if the store holds an encrypted volume.
    key: Option<u64>,
    /// A daemon made the file although it exists.
    misplaced: bool,
    /// The store that was opened last in this life.
    opened: Option<Store>,
    /// The store was opened again after it had been closed with a loss.
    lost: bool,
}

impl Slot {
    /// Finds the file of the store, or makes it if `config` and `expected` allow that.
    fn find(&mut self, config: &VolumeConfig, expected: &Expected) -> Result<(), StoreError> {
        let StoreUri::File(path) = &config.store else { return Ok(()) };
        let may_make = config.create && matches!(expected, Expected::Any | Expected::None);
        match (self.mounted && self.made, may_make) {
            (true, _) => Ok(()),
            (false, false) => Err(StoreError::File(OpenError::Missing {
                path: path.clone(),
                read_only: false,
                link: None,
            })),
            (false, true) => {
                self.misplaced |= self.made;
                self.made = true;
                Ok(())
            }
        }
    }
}

/// The stores of the world, by disk.
#[derive(Default)]
pub(crate) struct Disks(Mutex<BTreeMap<String, Slot>>, SimBroker);

impl Disks {
    pub(crate) fn put(&self, name: &str, place: &Place) {
        let slot = Slot {
            place: place.clone(),
            fails: false,
            made: true,
            mounted: true,
            key: None,
            misplaced: false,
            opened: None,
            lost: false,
        };
        self.0.lock().unwrap().insert(name.to_owned(), slot);
    }

    pub(crate) fn broker(&self) -> SimBroker {
        self.1.clone()
    }

    /// Has a disk hold its volume encrypted, with this key.
    pub(crate) fn encrypt(&self, disk: &str, key: u64) {
        if let Some(found) = self.0.lock().unwrap().get_mut(disk) {
            found.key = Some(key);
        }
    }

    /// Makes the file of a disk missing: no daemon has made it yet.
    pub(crate) fn unmake(&self, disk: &str) {
        if let Some(found) = self.0.lock().unwrap().get_mut(disk) {
            found.made = false;
        }
    }

    pub(crate) fn is_made(&self, disk: &str) -> bool {
        self.0.lock().unwrap().get(disk).is_some_and(|slot| slot.made)
    }

    /// Mounts or unmounts the file system of a disk's file.
    pub(crate) fn set_mounted(&self, disk: &str, mounted: bool) {
        if let Some(found) = self.0.lock().unwrap().get_mut(disk) {
            found.mounted = mounted;
        }
    }

    /// Returns true if there is no file at a path, because its file system is not mounted.
    fn is_absent(&self, path: &Path) -> bool {
        let disk = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        self.0.lock().unwrap().get(disk).is_some_and(|slot| !slot.mounted)
    }

    /// Returns a disk whose file was made although it existed.
    pub(crate) fn misplaced(&self) -> Option<String> {
        let disks = self.0.lock().unwrap();
        let (disk, _) = disks.iter().find(|(_, slot)| slot.misplaced)?;
        Some(disk.clone())
    }

    /// Makes attempts to open a store fail, or succeed.
    pub(crate) fn fail(&self, name: &str, fails: bool) {
        if let Some(found) = self.0.lock().unwrap().get_mut(name) {
            found.fails = fails;
        }
    }

    /// Returns true if a store was opened again after a loss since the last call.
    pub(crate) fn take_lost(&self, name: &str) -> bool {
        let mut disks = self.0.lock().unwrap();
        disks.get_mut(name).is_some_and(|slot| std::mem::take(&mut slot.lost))
    }

    /// Returns true if a store was closed with a loss, or is served with one.
    pub(crate) fn is_lost(&self, name: &str) -> bool {
        let disks = self.0.lock().unwrap();
        disks.get(name).and_then(|slot| slot.opened.as_ref()).is_some_and(Store::is_lost)
    }

    /// The directory that a path is in.
    fn folder_of(&self, path: &Path) -> Option<Folder> {
        let disks = self.0.lock().unwrap();
        let mut folders = disks.values().filter_map(|slot| match &slot.place {
            Place::Overlay(overlay) => Some(&overlay.folder),
            _ => None,
        });
        folders.find(|folder| folder.has(path)).cloned()
    }

    /// The daemon has ended.
    pub(crate) fn end_life(&self) {
        for slot in self.0.lock().unwrap().values_mut() {
            (slot.opened, slot.lost) = (None, false);
        }
    }
}

/// The bytes before the data of an encrypted volume.
pub(crate) const ENCRYPTED_FROM: u64 = 32 << 10;

/// The volume that a disk holds encrypted. It has the disk's sectors, so that none is
/// written in part.
fn encrypted(disk: TestStore, key: u64) -> Store {
    let words = (1..=8).map(|word: u64| key.wrapping_mul(word).wrapping_add(word));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    let key = Secret::copy_of(&bytes).unwrap();
    Store::TestEncrypted(EncryptedStore::without_header(disk, key, ENCRYPTED_FROM, 512).unwrap())
}

/// The opener that the engine gets: opens [`Disks`].
pub(crate) struct OpenDisks(pub(crate) Arc<Disks>);

impl OpenDisks {
    /// A file of a directory of the world.
    fn file(
        &self,
        name: &str,
        config: &VolumeConfig,
        (folder, path): (&Folder, &Path),
        expected: &Expected,
    ) -> Result<Store, StoreError> {
        let create = config.size.filter(|_| config.create).map(Size::bytes);
        let opened = folder.open(path, create, *expected == Expected::None);
        let store = config.store.to_string();
        let disk = Arc::new(opened.map_err(|found| StoreError::Moved { store, found })?);
        if let Some(slot) = self.0.0.lock().unwrap().get_mut(name).filter(|_| !config.read_only) {
            let before = slot.opened.replace(Store::Test(disk.clone()));
            slot.lost |= before.is_some_and(|before| before.is_lost());
        }
        Ok(Store::Test(disk))
    }

    fn store(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: &Expected,
    ) -> Result<Store, StoreError> {
        let failing = self.0.0.lock().unwrap().get(name).is_some_and(|slot| slot.fails);
        let mut of = name;
        if let StoreUri::File(path) = &config.store {
            if let Some(folder) = self.0.folder_of(path).filter(|_| !failing) {
                return self.file(name, config, (&folder, path), expected);
            }
            if path.starts_with("/nowhere") {
                return Err(StoreError::File(OpenError::Missing {
                    path: path.clone(),
                    read_only: false,
                    link: None,
                }));
            }
            // That of a base, if an overlay opens it.
            of = path.file_name().and_then(|file| file.to_str()).unwrap_or(name);
        }
        let mut disks = self.0.0.lock().unwrap();
        let name = if failing { name } else { of };
        let slot = disks.get_mut(name).filter(|slot| !slot.fails);
        let slot = slot.ok_or(StoreError::Interrupted)?;
        slot.find(config, expected)?;
        Ok(match (&slot.place, &config.store) {
            (Place::Disk(disk), _) => {
                let disk = disk.open_anew();
                let encrypted = slot.key.map(|key| encrypted(disk.share(), key));
                let disk = Arc::new(disk);
                let before = slot.opened.replace(Store::Test(disk.clone()));
                slot.lost |= before.is_some_and(|before| before.is_lost());
                encrypted.unwrap_or(Store::Test(disk))
            }
            // With the same pauses between attempts in every run.
            (Place::Remote(..), StoreUri::Nbd(uri)) => {
                Store::Nbd(NbdStore::open(nbd_options(uri))?.0)
            }
            (Place::Remote(..) | Place::Overlay(_), _) => return Err(StoreError::Interrupted),
            (Place::Memory(size), _) => Store::Memory(MemoryStore::new(*size)),
        })
    }
}

impl Opener for OpenDisks {
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
        claims: &Arc<StoreClaims>,
    ) -> Opening {
        let open = |name: &str, config: &VolumeConfig, claims: &Arc<StoreClaims>| {
            claims.claim(name, config).and_then(|mut claim| {
                let store = self.store(name, config, &expected)?;
                if let Some(claim) = &mut claim {
                    claim.opened(&store)?;
                }
                Ok(Opened::new(name, config, store, claim))
            })
        };
        let broker = self.0.broker();
        if broker.works() {
            return Box::pin(std::future::ready(open(name, config, claims)));
        }
        let path = Path::new("/world").join(name);
        Box::pin(async move {
            // It is over for this daemon, whether it ends now or later.
            let _ = broker.call().await;
            Err(StoreError::File(OpenError::NoBroker { path }))
        })
    }

    fn compare(&self, old: &VolumeConfig, _: Option<StoreTarget>, new: &VolumeConfig) -> Comparing {
        let (broker, same) = (self.0.broker(), old.store == new.store);
        if let StoreUri::File(path) = &new.store
            && self.0.is_absent(path)
        {
            let missing = OpenError::Missing { path: path.clone(), read_only: false, link: None };
            return Box::pin(std::future::ready(Err(StoreError::File(missing))));
        }
        if broker.works() {
            return Box::pin(std::future::ready(Ok(same)));
        }
        let path = Path::new("/world").to_owned();
        Box::pin(async move {
            let _ = broker.call().await;
            Err(StoreError::File(OpenError::NoBroker { path }))
        })
    }
}
