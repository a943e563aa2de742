//! A directory of a world: real names in memory, and files whose content is on test disks.
//!
//! A name is stable once the directory was flushed after it was made. A power cut takes back the changes of names since the last
//! flush: all, those that replaced or removed a name, or none.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ebb_image::{DeltaHeader, HEADER_BYTES};
use ebb_store::{Faults, TestStore};
use ebbd::stores::FoundInstead;

use crate::random::Random;

/// The inode of each name.
type Names = BTreeMap<OsString, u64>;

/// What the disk does with requests, for files that are made later, too.
#[derive(Clone, Copy, Default)]
struct Conduct {
    faults: Faults,
    latency_us: u64,
    waits: u32,
    room: Option<u64>,
    hangs: bool,
}

struct Files {
    path: PathBuf,
    /// Where each inode has a further name, so that a name that was taken away can be given back.
    kept: PathBuf,
    disks: BTreeMap<u64, Arc<TestStore>>,
    stable: Names,
    conduct: Conduct,
    /// How many of 100 flushes of the directory fail.
    bad_syncs: u64,
    random: Random,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct Folder(Arc<Mutex<Files>>);

fn inode(path: &Path) -> Option<u64> {
    fs::symlink_metadata(path).ok().map(|found| found.ino())
}

impl Files {
    fn names(&self) -> Names {
        let entries = fs::read_dir(&self.path).unwrap().map(|entry| entry.unwrap().file_name());
        entries.filter_map(|name| Some((name.clone(), inode(&self.path.join(&name))?))).collect()
    }

    fn apply(&self, disk: &TestStore) {
        let Conduct { faults, latency_us, waits, room, hangs } = self.conduct;
        disk.faults(&faults);
        disk.latency_us.store(latency_us, Ordering::Relaxed);
        disk.waits.store(waits, Ordering::Relaxed);
        disk.set_room(room);
        if hangs {
            disk.hang();
        }
    }

    fn make(&mut self, path: &Path, size: u64) -> Result<Arc<TestStore>, &'static str> {
        let file = fs::OpenOptions::new().read(true).write(true).create_new(true).open(path);
        let file = file.map_err(|_| "the file cannot be made")?;
        file.set_len(size).unwrap();
        let number = file.metadata().unwrap().ino();
        fs::hard_link(path, self.kept.join(number.to_string())).unwrap();
        let disk = Arc::new(TestStore::of_file(file, size, self.random.next()));
        self.apply(&disk);
        self.disks.insert(number, disk.clone());
        Ok(disk)
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.random.chance(self.bad_syncs) {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.stable = self.names();
        Ok(())
    }

    fn cut_names(&mut self) {
        let now = self.names();
        let mut target = self.stable.clone();
        match self.random.below(3) {
            0 => {}
            // New names are there, and what replaced or removed another one is not.
            1 => {
                let new = now.iter().filter(|(name, _)| !self.stable.contains_key(*name));
                target.extend(new.map(|(name, number)| (name.clone(), *number)));
            }
            _ => target.clone_from(&now),
        }
        for (name, number) in &now {
            if target.get(name) != Some(number) {
                fs::remove_file(self.path.join(name)).unwrap();
            }
        }
        for (name, number) in &target {
            if now.get(name) != Some(number) {
                fs::hard_link(self.kept.join(number.to_string()), self.path.join(name)).unwrap();
            }
        }
        self.stable = target;
    }
}

impl Folder {
    pub(crate) fn new(random: Random) -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = format!("/dev/shm/ebb-world-files-{}-{number}", std::process::id());
        let (path, kept) = (PathBuf::from(&own), PathBuf::from(own + "-kept"));
        [&path, &kept].into_iter().for_each(|path| fs::create_dir(path).unwrap());
        Folder(Arc::new(Mutex::new(Files {
            path,
            kept,
            disks: BTreeMap::new(),
            stable: Names::new(),
            conduct: Conduct::default(),
            bad_syncs: 0,
            random,
        })))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.lock().unwrap().path.join(name)
    }

    /// Whether a path is in this directory.
    pub(crate) fn has(&self, path: &Path) -> bool {
        path.parent() == Some(&*self.0.lock().unwrap().path)
    }

    /// Opens a file; one that is missing is made with the size `create`.
    ///
    /// # Errors
    /// There is none, or with `only_new` there is one.
    pub(crate) fn open(
        &self,
        path: &Path,
        create: Option<u64>,
        only_new: bool,
    ) -> Result<TestStore, FoundInstead> {
        let mut files = self.0.lock().unwrap();
        let disk = match (inode(path), create) {
            (Some(_), _) if only_new => return Err(FoundInstead::Other),
            (Some(number), _) => files.disks[&number].clone(),
            (None, None) => return Err(FoundInstead::Nothing),
            (None, Some(size)) => {
                let disk = files.make(path, size).map_err(|_| FoundInstead::Nothing)?;
                files.sync().map_err(|_| FoundInstead::Nothing)?;
                disk
            }
        };
        Ok(disk.open_anew())
    }

    /// Removes a name for good, if there is one, and makes all others stable.
    pub(crate) fn take_away(&self, name: &str) {
        let mut files = self.0.lock().unwrap();
        let _ = fs::remove_file(files.path.join(name));
        files.stable = files.names();
    }

    /// Removes a name for good, if there is one.
    pub(crate) fn remove(&self, name: &str) {
        let mut files = self.0.lock().unwrap();
        let _ = fs::remove_file(files.path.join(name));
        files.stable.remove(&OsString::from(name));
    }

    /// The content of all its files.
    pub(crate) fn disks(&self) -> Vec<Arc<TestStore>> {
        self.0.lock().unwrap().disks.values().cloned().collect()
    }

    /// Makes the names in it stable, if it is this directory.
    pub(crate) fn sync(&self, path: &Path) -> Option<io::Result<()>> {
        let mut files = self.0.lock().unwrap();
        (path == files.path).then(|| files.sync())
    }

    /// Whether both names are those of one file.
    pub(crate) fn is_same(&self, one: &str, other: &str) -> bool {
        let number = inode(&self.path(one));
        number.is_some() && number == inode(&self.path(other))
    }

    pub(crate) fn exists(&self, name: &str) -> bool {
        inode(&self.path(name)).is_some()
    }

    /// The size of the volume whose delta a file is, in bytes.
    pub(crate) fn size_in_header(&self, name: &str) -> Option<u64> {
        Some(self.header(name)?.layout.size())
    }

    fn header(&self, name: &str) -> Option<DeltaHeader> {
        let number = inode(&self.path(name))?;
        let disk = self.0.lock().unwrap().disks.get(&number).cloned()?;
        let mut slots = vec![0; 2 * HEADER_BYTES];
        disk.look(0, &mut slots);
        DeltaHeader::decode([&slots[..HEADER_BYTES], &slots[HEADER_BYTES..]]).ok()
    }

    /// Whether a commit of the volume whose delta a file is has begun and not ended.
    pub(crate) fn is_half_committed(&self, name: &str) -> bool {
        self.header(name).is_some_and(|header| header.parent.is_mixed())
    }

    pub(crate) fn set_faults(&self, faults: &Faults, latency_us: u64, waits: u32) {
        let mut files = self.0.lock().unwrap();
        files.conduct = Conduct { faults: *faults, latency_us, waits, ..files.conduct };
        for disk in files.disks.values() {
            disk.faults(faults);
            disk.latency_us.store(latency_us, Ordering::Relaxed);
            disk.waits.store(waits, Ordering::Relaxed);
        }
    }

    pub(crate) fn set_room(&self, room: Option<u64>) {
        let mut files = self.0.lock().unwrap();
        files.conduct.room = room;
        files.disks.values().for_each(|disk| disk.set_room(room));
    }

    pub(crate) fn set_hangs(&self, hangs: bool) {
        let mut files = self.0.lock().unwrap();
        files.conduct.hangs = hangs;
        files.disks.values().for_each(|disk| if hangs { disk.hang() } else { disk.release() });
    }

    /// From now on so many of 100 flushes of the directory fail.
    pub(crate) fn set_bad_syncs(&self, share: u64) {
        self.0.lock().unwrap().bad_syncs = share;
    }

    /// The power fails and returns.
    pub(crate) fn power_cut(&self) {
        let mut files = self.0.lock().unwrap();
        files.cut_names();
        files.disks.values().for_each(|disk| disk.power_cut());
    }

    /// Nothing has a file open: those without a name are gone.
    pub(crate) fn forget_unnamed(&self) {
        let mut files = self.0.lock().unwrap();
        let now = files.names();
        let named =
            |number: &u64| now.values().chain(files.stable.values()).any(|named| named == number);
        let gone: Vec<u64> = files.disks.keys().copied().filter(|number| !named(number)).collect();
        for number in gone {
            files.disks.remove(&number);
            fs::remove_file(files.kept.join(number.to_string())).unwrap();
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
        let _ = fs::remove_dir_all(&self.kept);
    }
}
