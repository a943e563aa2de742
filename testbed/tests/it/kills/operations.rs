//! Operations under load: snapshots and deletions of them, flattening of clones, resizes and
//! renames.
//!
//! An operation that a kill has cut off, or that a daemon without its broker cannot carry out, has
//! one of two outcomes. The next daemon shows which one; if it was not done, it is done again and
//! succeeds.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::Client;
use testbed::harness::pattern::{Random, SECTOR, content, stamp_of};
use testbed::harness::process::{PATIENCE, until};
use testbed::{Error, Result, Tool, check};

use super::control::{Control, Member, Order, add};
use super::disk::{Disk, LOADED, SLOT, index};

/// What a resize adds at most, in steps.
const STEP: u64 = 64 << 10;
const STEPS: u64 = 16;
/// The exit status of a command that reaches no daemon, or gets no reply.
const UNREACHABLE: i32 = 3;
const SNAPSHOTS_MOST: usize = 3;
/// The base of all overlays.
pub(crate) const GOLDEN: &str = "golden";

/// The stamps that each sector may have: one, once it was read.
type Copy = Vec<Vec<u64>>;

enum Job {
    Snapshot { disk: usize, name: String },
    Delete { disk: usize, name: String },
    Flatten { base: String },
    Resize { disk: usize, from: u64, to: u64 },
    Rename { from: u64 },
}

/// The end of a command.
enum End {
    Done,
    /// The daemon has ended, or its broker.
    Cut,
}

pub(crate) struct Operator<'a> {
    control: &'a Control,
    disks: &'a [Disk],
    folder: PathBuf,
    random: Random,
    golden: u64,
    /// By disk and name.
    snapshots: BTreeMap<(usize, String), Copy>,
    sizes: Vec<u64>,
    /// The number in the name of the idle volume.
    idle: Option<u64>,
    /// An operation that was begun and whose outcome is not known, and what a snapshot may hold.
    pending: Option<(Job, Copy)>,
    names: u64,
}

impl<'a> Operator<'a> {
    pub(crate) fn new(
        control: &'a Control,
        disks: &'a [Disk],
        folder: PathBuf,
        random: Random,
        golden: u64,
    ) -> Operator<'a> {
        Operator {
            control,
            disks,
            folder,
            random,
            golden,
            snapshots: BTreeMap::new(),
            sizes: vec![LOADED as u64; disks.len()],
            idle: None,
            pending: None,
            names: 0,
        }
    }

    fn run(&self, arguments: &[&str]) -> Result<std::result::Result<String, String>> {
        let tool = Tool::new(binary::ebbd(Build::AsTests)?).args(arguments);
        let done = tool.arg("--control").arg(self.folder.join("control.sock")).run()?;
        let unreachable = done.status.code() == Some(UNREACHABLE);
        Ok(match done.status.success() {
            true => Ok(done.stdout),
            false => Err(if unreachable { String::new() } else { done.stderr }),
        })
    }

    /// Runs a command that succeeds, unless the daemon or its broker was killed.
    fn command(&self, order: Order, arguments: &[&str]) -> Result<End> {
        loop {
            add(&self.control.counts.begun, 1);
            let text = match self.run(arguments)? {
                Ok(_) => return Ok(End::Done),
                Err(text) => text,
            };
            // Set before a kill, and until this operator has noticed it.
            if !self.is_whole() {
                return Ok(End::Cut);
            }
            // The last one is of a machine that is busy with other work.
            let later = ["is in use by", "not served at present", "did not complete within"];
            let is_early = text.is_empty() || later.iter().any(|later| text.contains(later));
            check(is_early, || format!("{arguments:?}: {text}"))?;
            if self.control.is_over(order) {
                return Ok(End::Cut);
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// The daemon and its broker run.
    fn is_whole(&self) -> bool {
        !self.control.is_ending() && !self.control.is_broker_killed()
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("nbd.sock")
    }

    /// The sizes of all volumes, 0 of those that are not open; nothing if the order is over before
    /// the daemon says them.
    fn volumes(&self, order: Option<Order>) -> Result<Option<BTreeMap<String, u64>>> {
        until("the volumes", PATIENCE, || {
            if order.is_some_and(|order| self.control.is_over(order)) {
                return Ok(Some(None));
            }
            let Ok(text) = self.run(&["volume", "list", "--json"])? else { return Ok(None) };
            let list: Vec<serde_json::Value> = serde_json::from_str(&text)
                .map_err(|error| Error::unexpected(format!("{error}: {text}")))?;
            let volume = |volume: &serde_json::Value| {
                let name = volume["name"].as_str().unwrap_or_default().to_owned();
                (name, volume["size_bytes"].as_u64().unwrap_or(0))
            };
            Ok(Some(Some(list.iter().map(volume).collect())))
        })
    }

    /// Whether there is such a volume; false if the order is over before the daemon says it.
    fn is_shown(&self, order: Option<Order>, volume: &str) -> Result<bool> {
        Ok(self.volumes(order)?.is_some_and(|volumes| volumes.contains_key(volume)))
    }

    fn delta(&self, disk: usize, end: &str) -> PathBuf {
        self.folder.join(format!("{}.img{end}", self.disks[disk].name))
    }

    /// Returns true if the snapshot has its own file, and not a second name of the volume's.
    fn has_file(&self, disk: usize, name: &str) -> bool {
        let number = |path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
        let file = number(self.delta(disk, &format!("@{name}")));
        file.is_some() && file != number(self.delta(disk, ""))
    }

    fn choose(&mut self) -> Job {
        let overlays: Vec<usize> =
            (0..self.disks.len()).filter(|disk| self.disks[*disk].is_overlay()).collect();
        let disk = overlays[index(self.random.below(overlays.len() as u64))];
        self.names += 1;
        let of_disk: Vec<String> = self
            .snapshots
            .keys()
            .filter(|(of, _)| *of == disk)
            .map(|(_, name)| name.clone())
            .collect();
        let some = of_disk.get(index(self.random.below(of_disk.len() as u64))).cloned();
        match (self.random.below(8), some) {
            (0..=2, Some(name)) if of_disk.len() >= SNAPSHOTS_MOST => Job::Delete { disk, name },
            (0..=2, _) => Job::Snapshot { disk, name: format!("s{}", self.names) },
            (3, Some(name)) => Job::Delete { disk, name },
            (4, Some(name)) => Job::Flatten { base: format!("{}@{name}", self.disks[disk].name) },
            (4, None) => Job::Flatten { base: GOLDEN.to_owned() },
            (5, _) if self.idle.is_some() => Job::Rename { from: self.idle.unwrap_or(0) },
            _ => {
                let disk = index(self.random.below(self.disks.len() as u64));
                let to = LOADED as u64 + self.random.below(STEPS) * STEP;
                Job::Resize { disk, from: self.sizes[disk], to }
            }
        }
    }

    /// Completes the begun operation, or begins another.
    fn operate(&mut self, order: Order) -> Result {
        let (job, copy, again) = match self.pending.take() {
            Some((job, copy)) => (job, copy, true),
            None => (self.choose(), Copy::new(), false),
        };
        let (job, copy) = match self.carry_out(order, job, copy, again)? {
            Some(left) => left,
            None => {
                add(&self.control.counts.operations, 1);
                return Ok(());
            }
        };
        if !self.control.is_broker_killed() {
            add(&self.control.counts.operations_cut, 1);
        }
        self.pending = Some((job, copy));
        Ok(())
    }

    /// Returns the operations that are still to be done.
    fn carry_out(
        &mut self,
        order: Order,
        job: Job,
        copy: Copy,
        again: bool,
    ) -> Result<Option<(Job, Copy)>> {
        let end = match &job {
            Job::Snapshot { disk, name } => {
                let (disk, name) = (*disk, name.clone());
                if again && self.has_file(disk, &name) {
                    self.snapshots.insert((disk, name), copy);
                    return Ok(None);
                }
                self.disks[disk].ledger().begin_watch();
                let volume = self.disks[disk].name.as_str();
                let end =
                    self.command(order, &["volume", "snapshot", volume, &name, "--persist"])?;
                if matches!(end, End::Cut) {
                    // Until the daemon has ended, all writes may still be in the snapshot.
                    return Ok(Some((job, Copy::new())));
                }
                let copy = self.disks[disk].ledger().end_watch(false);
                self.snapshots.insert((disk, name), copy);
                end
            }
            Job::Delete { disk, name } => {
                let key = (*disk, name.clone());
                let mut end = End::Done;
                if !again || self.has_file(*disk, name) {
                    if again && !self.is_served(order, *disk, name)? {
                        return Ok(Some((job, copy)));
                    }
                    if again {
                        self.verify_snapshot(&key)?;
                    }
                    let volume = self.disks[*disk].name.as_str();
                    end = self.command(order, &["volume", "delete-snapshot", volume, name])?;
                }
                if matches!(end, End::Done) {
                    check(!self.has_file(*disk, name), || format!("the file of {name} is left"))?;
                    self.snapshots.remove(&key);
                }
                end
            }
            Job::Flatten { base } => self.flatten(order, base)?,
            Job::Resize { disk, from, to } => {
                let volume = self.disks[*disk].name.as_str();
                let Some(found) = self.size(order, volume)? else {
                    return Ok(Some((job, copy)));
                };
                let expected = found == *from || again && found == *to;
                check(expected, || format!("{volume} has {found} bytes, not {from} or {to}"))?;
                self.sizes[*disk] = found;
                let size = to.to_string();
                let end = self.command(order, &["volume", "resize", volume, &size, "--shrink"])?;
                if matches!(end, End::Done) {
                    self.sizes[*disk] = *to;
                }
                end
            }
            Job::Rename { from } => {
                let [old, new] = [*from, *from + 1].map(|number| format!("idle{number}"));
                let mut end = End::Done;
                let Some(volumes) = self.volumes(Some(order))? else {
                    return Ok(Some((job, copy)));
                };
                let shown = [&old, &new].map(|name| volumes.contains_key(name));
                check(shown[0] != shown[1] && (again || shown[0]), || {
                    format!("{old} and {new} are volumes: {shown:?}")
                })?;
                if shown[0] {
                    end = self.command(order, &["volume", "rename", &old, &new])?;
                }
                if matches!(end, End::Done) {
                    self.idle = Some(*from + 1);
                    if !self.verify_golden(order, &new)? {
                        return Ok(Some((Job::Rename { from: *from }, copy)));
                    }
                }
                end
            }
        };
        Ok(matches!(end, End::Cut).then_some((job, copy)))
    }

    /// The size of a volume, or nothing if the daemon was killed.
    fn size(&self, order: Order, volume: &str) -> Result<Option<u64>> {
        until("the size of a volume", PATIENCE, || {
            let Some(volumes) = self.volumes(Some(order))? else { return Ok(Some(None)) };
            Ok(volumes.get(volume).copied().filter(|size| *size > 0).map(Some))
        })
    }

    /// Adds a clone, flattens it, and removes it: whatever an interrupted attempt has left.
    fn flatten(&mut self, order: Order, base: &str) -> Result<End> {
        let file = self.folder.join("clone.delta");
        let store = format!("file:{}", file.display());
        if let Some(name) = base.split_once('@').map(|(volume, name)| (volume, name.to_owned())) {
            let disk = self.disks.iter().position(|disk| disk.name == name.0).unwrap_or(0);
            if !self.is_served(order, disk, &name.1)? {
                return Ok(End::Cut);
            }
        }
        if !self.is_shown(Some(order), "clone")? {
            if self.control.is_over(order) {
                return Ok(End::Cut);
            }
            let _ = fs::remove_file(&file);
            let add = ["volume", "add", "clone", &store, "--base", base, "--create", "--persist"];
            if let End::Cut = self.command(order, &add)? {
                return Ok(End::Cut);
            }
        }
        if let End::Cut = self.command(order, &["volume", "flatten", "clone"])? {
            return Ok(End::Cut);
        }
        let Some(found) = self.read(order, "clone")? else { return Ok(End::Cut) };
        match base.split_once('@') {
            None => self.must_be_golden("clone", &found)?,
            Some((volume, name)) => {
                let disk = self.disks.iter().position(|disk| disk.name == volume).unwrap_or(0);
                self.compare(&(disk, name.to_owned()), &found)?;
            }
        }
        self.command(order, &["volume", "remove", "clone"])
    }

    /// Serves a snapshot whose file is there; false if the daemon was killed.
    fn is_served(&self, order: Order, disk: usize, name: &str) -> Result<bool> {
        let title = format!("{}@{name}", self.disks[disk].name);
        if !self.is_shown(Some(order), &title)? {
            if self.control.is_over(order) {
                return Ok(false);
            }
            let store = format!("file:{}", self.delta(disk, &format!("@{name}")).display());
            let kept = ["--base", GOLDEN, "--read-only", "--persist"];
            let add = [&["volume", "add", title.as_str(), &store][..], &kept].concat();
            return Ok(matches!(self.command(order, &add)?, End::Done));
        }
        Ok(true)
    }

    /// The part of a volume that is compared, or nothing if the daemon was killed.
    fn read(&self, order: Order, export: &str) -> Result<Option<Vec<u8>>> {
        until("the export", PATIENCE, || {
            if self.control.is_over(order) {
                return Ok(Some(None));
            }
            Ok(self.read_now(export).ok().map(Some))
        })
    }

    fn read_now(&self, export: &str) -> Result<Vec<u8>> {
        let mut client = Client::open(&self.socket(), export)?;
        let mut data = Vec::new();
        for offset in (0..LOADED).step_by(16 * SLOT) {
            data.extend(client.read(offset as u64, u32::try_from(16 * SLOT).unwrap_or(0))?);
        }
        client.disconnect()?;
        add(&self.control.counts.sectors, data.len() / SECTOR);
        Ok(data)
    }

    fn must_be_golden(&self, export: &str, found: &[u8]) -> Result {
        check(found == content(self.golden, 0, LOADED), || {
            format!("{export} differs from what it is above")
        })
    }

    fn verify_golden(&self, order: Order, export: &str) -> Result<bool> {
        let Some(found) = self.read(order, export)? else { return Ok(false) };
        self.must_be_golden(export, &found).map(|()| true)
    }

    /// Compares with what a snapshot may hold; from then on it holds what it has held.
    fn compare(&mut self, key: &(usize, String), found: &[u8]) -> Result {
        let Some(copy) = self.snapshots.get_mut(key) else { return Ok(()) };
        let (disk, name) = (&self.disks[key.0].name, &key.1);
        for (number, bytes) in found.chunks(SECTOR).enumerate() {
            let stamp = stamp_of(bytes, (number * SECTOR) as u64);
            let allowed = &mut copy[number];
            let seen = stamp.filter(|stamp| allowed.contains(stamp));
            let seen = seen.ok_or_else(|| {
                Error::unexpected(format!(
                    "snapshot {disk}@{name}: sector {number} may hold {allowed:x?}, holds {stamp:x?} ({:02x?}...)",
                    &bytes[..16]
                ))
            })?;
            *allowed = vec![seen];
        }
        Ok(())
    }

    fn verify_snapshot(&mut self, key: &(usize, String)) -> Result {
        let title = format!("{}@{}", self.disks[key.0].name, key.1);
        let found = match self.read_now(&title) {
            Ok(found) => found,
            // Cut off by a kill: the next attempt reads it.
            Err(_) if self.snapshots.contains_key(key) => return Ok(()),
            Err(error) => return Err(error),
        };
        self.compare(key, &found)
    }
}

impl Member for Operator<'_> {
    fn name(&self) -> String {
        "operator".into()
    }

    fn load(&mut self, order: Order) -> Result {
        if self.idle.is_none() {
            let store = format!("file:{}", self.folder.join("idle.delta").display());
            let add = ["volume", "add", "idle0", &store, "--base", GOLDEN];
            let add = [&add[..], &["--create", "--persist"]].concat();
            if self.is_shown(Some(order), "idle0")?
                || matches!(self.command(order, &add)?, End::Done)
            {
                self.idle = Some(0);
            }
        }
        // An operation that is cut off goes on after the next start.
        while !self.control.is_over(order) && self.is_whole() {
            self.operate(order)?;
        }
        // Without a broker an operation fails or is carried out: the next daemon shows which one.
        while !self.control.is_over(order) {
            if self.pending.is_none() && !self.control.is_ending() {
                self.operate(order)?;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Ok(())
    }

    fn settle(&mut self) -> Result {
        Ok(())
    }

    fn verify(&mut self) -> Result {
        let keys: Vec<_> = self.snapshots.keys().cloned().collect();
        for key in keys {
            let title = format!("{}@{}", self.disks[key.0].name, key.1);
            if !self.is_shown(None, &title)? {
                let store = format!("file:{}", self.delta(key.0, &format!("@{}", key.1)).display());
                let kept = ["--base", GOLDEN, "--read-only", "--persist"];
                let add = [&["volume", "add", title.as_str(), &store][..], &kept].concat();
                self.run(&add)?.map_err(|text| Error::unexpected(format!("{title}: {text}")))?;
            }
            let found = until("a snapshot", PATIENCE, || Ok(self.read_now(&title).ok()))?;
            self.compare(&key, &found)?;
        }
        if let Some(number) = self.idle
            && self.pending.is_none()
        {
            let found = self.read_now(&format!("idle{number}"))?;
            self.must_be_golden("the idle volume", &found)?;
        }
        Ok(())
    }

    fn down(&mut self) -> Result {
        if let Some((Job::Snapshot { disk, .. }, copy)) = &mut self.pending
            && copy.is_empty()
        {
            *copy = self.disks[*disk].ledger().end_watch(true);
        }
        Ok(())
    }
}
