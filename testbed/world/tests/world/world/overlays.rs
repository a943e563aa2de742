//! Overlays: their snapshots, and the operations on them. The files are on the disks of a [`Folder`].
//!
//! The oracle of a snapshot is an image of its volume ([`Oracle::image`]): whenever the snapshot is opened, it must hold that.

mod clones;
mod idle;
mod moved;
mod slow_base;
mod unfinished;

use std::rc::Rc;
use std::time::{Duration, Instant};

use ebb_api::{AddVolumeBody, OperationState, ResizeBody, SnapshotBody};
use ebb_control::VolumeChange;
use ebb_store::TestStore;
use ebb_volume::Mode;

use self::clones::Copies;
pub(super) use self::idle::IDLE;
use self::unfinished::Unfinished;
pub(super) use self::unfinished::commit_sites;
use super::events::Event;
use super::site::Site;
use super::{PATIENCE, World};
use crate::client::{Client, StepResult};
use crate::daemon::{Overlay, Place, Wanted};
use crate::folder::Folder;
use crate::manner::Manner;
use crate::oracle::{Oracle, SECTOR};
use crate::random::Random;

/// Snapshots of a volume.
const SNAPSHOTS: usize = 5;
/// Operations at a time.
const OPERATIONS: usize = 3;
/// The pause before a client connects to a volume that is committed.
const WHILE_COMMITTED: Duration = Duration::from_millis(50);

/// A snapshot of the overlay `site`, as far as the world knows.
struct Snapshot {
    site: usize,
    name: String,
    /// It is served as this volume.
    title: String,
    oracle: Oracle,
    /// It was made and flushed: no crash changes it.
    sure: bool,
    /// When it was made, by the clock of its volume's oracle, if a later flush of that makes it stable.
    since: Option<u64>,
    /// An attempt to delete it was made.
    doomed: bool,
    /// Its volume was moved away, and another one has the name.
    is_foreign: bool,
    reader: Option<Client>,
    /// Its reader has sent its requests.
    asked: bool,
}

/// What an operation does. `begun`: times of the volume's oracle.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Task {
    Snapshot { name: String, begun: u64, seen: bool },
    Delete { name: String },
    Open,
    Flush { begun: u64 },
    Flatten,
    Commit { begun: u64, copies: bool, is_mixed: bool },
    Resize { to: usize },
    AddOwn,
    Remove,
}

impl Task {
    /// Whether it copies the layers below an overlay into it.
    fn fills(&self) -> bool {
        matches!(self, Task::Delete { .. } | Task::Flatten)
    }
}

/// An operation in progress.
struct Operation {
    id: u64,
    site: usize,
    task: Task,
}

/// How an operation has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Done,
    Failed(String),
    /// With its daemon.
    Killed,
}

/// See the module.
#[derive(Default)]
pub(super) struct Overlays {
    snapshots: Vec<Snapshot>,
    operations: Vec<Operation>,
    copies: Copies,
    /// The number of the next snapshot.
    next: u32,
    /// A base that does not respond, and for how many steps.
    slow_base: Option<(usize, u64)>,
    unfinished: Unfinished,
}

/// A base and overlays above it.
pub(super) fn sites(random: &mut Random) -> Vec<Site> {
    let sectors = random.pick(&[512, 2048, 2055]);
    let base = "b".to_owned();
    let mut oracle = Oracle::new(&base, sectors);
    let disk = TestStore::new((sectors * SECTOR) as u64, random.next());
    disk.change(0, &oracle.write_base(random));
    let folder = Folder::new(random.fork());
    let count = random.pick(&[1, 1, 2]);
    let overlays: Vec<Site> = (1..=count)
        .map(|number| {
            let name = format!("v{number}");
            let mode = random.pick(&[Mode::Writethrough, Mode::Writeback]);
            let bdi = random.chance(30).then(|| "shared".to_owned());
            let oracle = oracle.overlay(&name, number << 32);
            let file = format!("{name}.delta");
            let place =
                Place::Overlay(Overlay { folder: folder.clone(), file, base: base.clone() });
            Site::of(Wanted { bdi, ..Wanted::new(&name, place, mode) }, oracle)
        })
        .collect();
    let (place, mode) = (Place::Disk(disk.into()), Mode::Writethrough);
    let base = Wanted { read_only: true, ..Wanted::new(&base, place, mode) };
    std::iter::once(Site::of(base, oracle)).chain(overlays).collect()
}

/// The daemon flushes the directories of these volumes.
pub(super) fn know_synced_folders(sites: &[Site]) {
    let mut folders = sites.iter().filter_map(|site| Some(site.overlay()?.folder.clone()));
    // All are in the same one.
    let Some(folder) = folders.next() else { return };
    ebb_store::set_folder_sync(Some(Rc::new(move |path| {
        folder.sync(path).unwrap_or_else(|| std::fs::File::open(path)?.sync_all())
    })));
}

impl Overlays {
    /// The volume `site` was opened again after a loss: a later flush covers nothing that its
    /// unflushed snapshots hold.
    pub(super) fn doubt_snapshots(&mut self, site: usize) {
        for snapshot in self.snapshots.iter_mut().filter(|one| one.site == site && !one.sure) {
            snapshot.since = None;
            snapshot.oracle.crashed();
        }
    }
}

impl World {
    /// The volumes that are on the disk of this one.
    pub(super) fn on_same_disk(&self, at: usize) -> Vec<usize> {
        let is_overlay = |at: &usize| self.sites[*at].overlay().is_some();
        match is_overlay(&at) {
            true => (0..self.sites.len()).filter(is_overlay).collect(),
            false => vec![at],
        }
    }

    fn file_of(&self, site: usize) -> (Folder, String) {
        let overlay = self.sites[site].overlay().expect("it is an overlay");
        (overlay.folder.clone(), overlay.file.clone())
    }

    pub(super) fn apply_overlay_event(&mut self, event: Event) {
        let overlays: Vec<usize> =
            (0..self.sites.len()).filter(|at| self.sites[*at].overlay().is_some()).collect();
        if overlays.is_empty() {
            return;
        }
        let site = self.random.pick(&overlays);
        match event {
            Event::ReadSnapshot => return self.read_snapshot(),
            Event::Cancel => return self.cancel_operation(),
            Event::Clone => return self.change_clones(),
            Event::BadSyncs => {
                let share = self.random.pick(&[0, 0, 50]);
                self.file_of(site).0.set_bad_syncs(share);
                for at in overlays {
                    self.sites[at].bad_syncs = share > 0;
                    self.sites[at].judge(self.now);
                }
                return self.note(format_args!("{share} of 100 flushes of the directory fail"));
            }
            _ if self.overlays.operations.len() >= OPERATIONS => return,
            _ => {}
        }
        let name = self.sites[site].config.name.clone();
        match event {
            Event::Snapshot => self.make_snapshot(site),
            Event::DeleteSnapshot | Event::OpenSnapshot => {
                if self.overlays.snapshots.is_empty() {
                    return;
                }
                let at = self.random.index(self.overlays.snapshots.len());
                if event == Event::OpenSnapshot {
                    return self.open_snapshot(at);
                }
                let snapshot = &mut self.overlays.snapshots[at];
                snapshot.doomed = true;
                let (site, name) = (snapshot.site, snapshot.name.clone());
                let volume = self.sites[site].config.name.clone();
                let change = VolumeChange::DeleteSnapshot(volume, name.clone());
                self.begin_operation(site, Task::Delete { name }, change);
            }
            Event::Flush => {
                let begun = self.sites[site].oracle.now();
                self.begin_operation(site, Task::Flush { begun }, VolumeChange::Flush(name));
            }
            Event::Flatten => {
                self.begin_operation(site, Task::Flatten, VolumeChange::Flatten(name));
            }
            Event::Commit => self.commit(site, name),
            _ => {}
        }
    }

    fn begin_operation(&mut self, site: usize, task: Task, change: VolumeChange) -> bool {
        let begun = self.daemon().manager.begin(change, "");
        let refused = begun.as_ref().err().map(|refused| refused.body.message.clone());
        let name = self.sites[site].config.name.clone();
        self.note(format_args!("{name}: {task:?} {refused:?}"));
        let Ok(begun) = begun else { return false };
        if task.fills() {
            self.sites[site].filled = u64::MAX;
        }
        if task == Task::Flatten {
            self.slow_down_base(site);
        }
        self.overlays.operations.push(Operation { id: begun.id, site, task });
        true
    }

    fn make_snapshot(&mut self, site: usize) {
        let own = self.overlays.snapshots.iter().filter(|snapshot| snapshot.site == site).count();
        if own >= SNAPSHOTS {
            return;
        }
        self.overlays.next += 1;
        let (name, volume) =
            (format!("s{}", self.overlays.next), self.sites[site].config.name.clone());
        let begun = self.sites[site].oracle.begin_read();
        let body = SnapshotBody { name: name.clone(), persist: false };
        let change = VolumeChange::Snapshot(volume, body);
        if !self.begin_operation(site, Task::Snapshot { name, begun, seen: false }, change) {
            self.sites[site].oracle.end_read(begun);
        }
    }

    /// Serves a snapshot as the operator does with one whose volume is not defined.
    fn open_snapshot(&mut self, at: usize) {
        let Snapshot { site, name, title, .. } = &self.overlays.snapshots[at];
        let (site, title) = (*site, title.clone());
        if self.daemon.as_ref().is_some_and(|daemon| daemon.volume(&title).is_some()) {
            return;
        }
        let overlay = self.sites[site].overlay().expect("it is an overlay");
        let path = overlay.folder.path(&format!("{}@{name}", overlay.file));
        let body = AddVolumeBody {
            name: title,
            store: format!("file:{}", path.display()),
            base: Some(overlay.base.clone()),
            read_only: Some(true),
            ..AddVolumeBody::default()
        };
        self.begin_operation(site, Task::Open, VolumeChange::Add(body));
    }

    fn read_snapshot(&mut self) {
        if self.overlays.snapshots.is_empty() {
            return;
        }
        let at = self.random.index(self.overlays.snapshots.len());
        self.connect_reader(at);
    }

    fn connect_reader(&mut self, at: usize) {
        let Some(daemon) = &self.daemon else { return };
        let snapshot = &mut self.overlays.snapshots[at];
        if snapshot.reader.is_some() || daemon.volume(&snapshot.title).is_none() {
            return;
        }
        let random = self.random.fork();
        let reader =
            Client::new(daemon.connect(), &snapshot.title, Manner::told(), random, self.now);
        (snapshot.reader, snapshot.asked) = (Some(reader), false);
        let title = snapshot.title.clone();
        self.note(format_args!("{title} is read"));
    }

    /// Nobody uses the overlay and its base for a while.
    fn commit(&mut self, site: usize, name: String) {
        // The daemon knows nothing of overlays that are not configured, and these need the base as it is.
        let mut others = self.overlays.snapshots.iter().filter(|one| one.is_foreign);
        if others.next().is_some()
            || self.overlays.has_copies()
            || self.sites.iter().any(|site| !site.listed)
        {
            return;
        }
        let overlay = self.sites[site].overlay().expect("it is an overlay");
        let base = self.sites.iter().position(|site| site.config.name == overlay.base);
        for number in 0..self.client_slots.len() {
            let slot = &self.client_slots[number];
            if slot.site == site || Some(slot.site) == base {
                self.leave(number);
                self.client_slots[number].again = self.now + WHILE_COMMITTED;
            }
        }
        let begun = self.sites[site].oracle.begin_read();
        let task = Task::Commit { begun, copies: false, is_mixed: false };
        if self.begin_operation(site, task, VolumeChange::Commit(name)) {
            self.plan_unfinished(site);
        } else {
            self.sites[site].oracle.end_read(begun);
        }
    }

    fn cancel_operation(&mut self) {
        let count = self.overlays.operations.len();
        if count == 0 {
            return;
        }
        let at = self.random.index(count);
        let id = self.overlays.operations[at].id;
        let cancelled = self.daemon().manager.cancel(id).is_ok();
        self.note(format_args!("operation {id} is cancelled: {cancelled}"));
    }

    pub(super) fn resize_overlay(&mut self, site: usize, to: usize, shrink: bool) {
        let resizing = |operation: &Operation| {
            operation.site == site && matches!(operation.task, Task::Resize { .. })
        };
        if self.overlays.operations.iter().any(resizing) {
            return;
        }
        self.sites[site].oracle.begin_resize();
        let name = self.sites[site].config.name.clone();
        let body = ResizeBody { size: Some((to * SECTOR) as u64), shrink };
        self.begin_operation(site, Task::Resize { to }, VolumeChange::Resize(name, body));
    }

    /// A step of the operations and of the readers of snapshots.
    pub(super) fn serve_overlays(&mut self) -> Result<bool, String> {
        let slow = self.step_slow_base();
        self.add_overlays();
        let Some(daemon) = &self.daemon else { return Ok(slow) };
        let (mut ended, mut new, mut copying) = (Vec::new(), Vec::new(), Vec::new());
        self.overlays.operations.retain_mut(|operation| {
            let Some((view, _)) = daemon.manager.operation(operation.id) else { return true };
            if let Task::Commit { begun, copies, is_mixed } = &mut operation.task {
                let before = ["waiting", "writing dirty data", ""];
                *copies |= !before.contains(&view.step.as_str());
                if view.step == "copying into the base" && !std::mem::replace(is_mixed, true) {
                    copying.push((operation.site, *begun));
                }
            }
            if let Task::Snapshot { name, seen, .. } = &mut operation.task
                && view.step == "writing what the snapshot holds"
                && !std::mem::replace(seen, true)
            {
                new.push((operation.site, name.clone()));
            }
            let end = match view.state {
                OperationState::Running => return true,
                OperationState::Done => End::Done,
                _ => End::Failed(view.failure.map(|why| why.message).unwrap_or_default()),
            };
            ended.push((operation.site, operation.task.clone(), end));
            false
        });
        let mut busy = slow || !ended.is_empty();
        for (site, begun) in copying {
            self.mix_base(site, begun);
            self.fail_commit(site);
        }
        for (site, task, end) in ended {
            let is_commit = matches!(task, Task::Commit { .. });
            self.end_operation(site, task, &end)?;
            if is_commit {
                self.remove_unfinished(site);
            }
        }
        new.iter().for_each(|(site, name)| self.look_at_snapshot(*site, name));
        busy |= self.serve_readers()?;
        busy |= self.serve_copies()?;
        self.note_stable_snapshots();
        Ok(busy)
    }

    /// The overlay is copied into its base, which may be served again before the operation has
    /// ended.
    fn mix_base(&mut self, site: usize, begun: u64) {
        let image = self.sites[site].oracle.image("", begun);
        let base = self.sites[site].overlay().map(|overlay| overlay.base.clone());
        let base = self.sites.iter_mut().find(|site| Some(&site.config.name) == base.as_ref());
        if let Some(base) = base {
            base.oracle.mix(&image);
        }
    }

    fn serve_readers(&mut self) -> Result<bool, String> {
        let (now, mut busy) = (self.now, false);
        for snapshot in &mut self.overlays.snapshots {
            let Some(reader) = &mut snapshot.reader else { continue };
            if reader.is_serving() && !snapshot.asked {
                snapshot.asked = true;
                let sectors = reader.size();
                for first in (0..sectors).step_by(256) {
                    reader.read(first, 256.min(sectors - first), &mut snapshot.oracle, now);
                }
            }
            let step = reader.step(&mut snapshot.oracle, now)?;
            busy |= step == StepResult::Busy;
            if step == StepResult::Ended || snapshot.asked && reader.open() == 0 {
                self.trace.mix(reader.answered);
                let reader = snapshot.reader.take().expect("it is there");
                drop(reader.leave(&mut snapshot.oracle));
                busy = true;
            }
        }
        Ok(busy)
    }

    /// A flush of a volume makes its snapshots stable, too.
    fn note_stable_snapshots(&mut self) {
        for snapshot in &mut self.overlays.snapshots {
            let flushed = self.sites[snapshot.site].oracle.last_flush();
            if snapshot.since.is_some_and(|since| flushed > since) {
                (snapshot.since, snapshot.sure) = (None, true);
                snapshot.oracle.settle();
            }
        }
    }

    fn end_operation(&mut self, site: usize, task: Task, end: &End) -> Result<(), String> {
        let name = self.sites[site].config.name.clone();
        self.note(format_args!("{name}: {task:?} has ended: {end:?}"));
        self.trace.mix(u64::from(*end == End::Done));
        let (folder, file) = self.file_of(site);
        let fills = task.fills();
        match task {
            Task::Snapshot { name, begun, .. } => {
                let own = &mut self.sites[site];
                let title = format!("{}@{name}", own.config.name);
                let mut oracle = own.oracle.image(&title, begun);
                own.oracle.end_read(begun);
                let frozen = format!("{file}@{name}");
                // Before its volume has another file, the name is a second one of that of the volume.
                let made = folder.exists(&frozen) && !folder.is_same(&file, &frozen);
                let sure = *end == End::Done;
                if sure && !made {
                    return Err(format!("snapshot {title} was made, and has no file"));
                }
                if sure {
                    oracle.settle();
                }
                // Its volume may have another size by now.
                if let Some(size) = folder.size_in_header(&frozen).filter(|_| made) {
                    oracle.set_size(usize::try_from(size).unwrap() / SECTOR);
                }
                let since = (!sure && *end != End::Killed).then(|| own.oracle.now());
                let (doomed, is_foreign, reader, asked) = (false, false, None, false);
                if made {
                    self.overlays.snapshots.push(Snapshot {
                        site,
                        name,
                        title,
                        oracle,
                        sure,
                        since,
                        doomed,
                        is_foreign,
                        reader,
                        asked,
                    });
                }
            }
            Task::Delete { name } => {
                let there = folder.exists(&format!("{file}@{name}"));
                if *end == End::Done && there {
                    return Err(format!("snapshot {name} was deleted, and its file is there"));
                }
                let is_it = |one: &Snapshot| one.site == site && one.name == name;
                let foreign =
                    self.overlays.snapshots.iter().any(|one| is_it(one) && one.is_foreign);
                if !there && (foreign || self.overlays.has_clone(site, &name)) {
                    return Err(format!(
                        "snapshot {name} was deleted, and another volume needs it"
                    ));
                }
                self.overlays.snapshots.retain(|one| there || !is_it(one));
            }
            Task::Flush { begun } if *end == End::Done => self.sites[site].oracle.flushed(begun),
            Task::Commit { begun, copies, .. } => {
                let own = &mut self.sites[site];
                let image = own.oracle.image("", begun);
                own.oracle.end_read(begun);
                let base = own.overlay().map(|overlay| overlay.base.clone());
                let base =
                    self.sites.iter_mut().find(|site| Some(&site.config.name) == base.as_ref());
                match base {
                    Some(base) if *end == End::Done => base.oracle.replace(&image),
                    Some(base) if copies => base.oracle.mix(&image),
                    _ => {}
                }
            }
            Task::Resize { to } => {
                let daemon = self.daemon.as_ref();
                let volume = daemon.and_then(|daemon| daemon.volume(&name));
                let has = volume.map(|volume| usize::try_from(volume.size()).unwrap() / SECTOR);
                let own = &mut self.sites[site];
                own.is_unsure |= *end != End::Done;
                let to = if *end == End::Done { Some(to) } else { has };
                if *end != End::Killed {
                    let to = to.unwrap_or(own.oracle.sectors());
                    own.oracle.resized(to);
                }
            }
            Task::Remove => self.check_unfinished(site, end)?,
            Task::Open | Task::Flatten | Task::Flush { .. } | Task::AddOwn => {}
        }
        if fills {
            let own = &mut self.sites[site];
            own.filled = if *end == End::Killed { 0 } else { own.oracle.now() };
        }
        Ok(())
    }

    /// The daemon has ended: also its operations, and the readers of snapshots. With `power` the host has crashed.
    pub(super) fn end_overlays_daemon(&mut self, power: bool) -> Result<(), String> {
        let overlays: Vec<usize> =
            (0..self.sites.len()).filter(|at| self.sites[*at].overlay().is_some()).collect();
        let Some(first) = overlays.first() else { return Ok(()) };
        overlays.iter().for_each(|at| self.sites[*at].notice());
        let (folder, _) = self.file_of(*first);
        if power {
            folder.power_cut();
        }
        folder.forget_unnamed();
        for Operation { site, task, .. } in std::mem::take(&mut self.overlays.operations) {
            self.end_operation(site, task, &End::Killed)?;
        }
        self.end_unfinished();
        self.end_copies();
        let mut missing = None;
        let sites = &mut self.sites;
        self.overlays.snapshots.retain_mut(|snapshot| {
            if let Some(reader) = snapshot.reader.take() {
                drop(reader.leave(&mut snapshot.oracle));
            }
            snapshot.since = None;
            if !snapshot.sure {
                snapshot.oracle.crashed();
            }
            let file = &sites[snapshot.site].overlay().expect("it is an overlay").file;
            let frozen = format!("{file}@{}", snapshot.name);
            let there = folder.exists(&frozen) && !folder.is_same(file, &frozen);
            if !there && snapshot.sure && !snapshot.doomed {
                missing = Some(format!("the file of snapshot {} is lost", snapshot.title));
            }
            there
        });
        for at in overlays {
            let own = &mut sites[at];
            own.forgive_losses();
            let file = &own.overlay().expect("it is an overlay").file;
            let has =
                folder.size_in_header(file).map(|size| usize::try_from(size).unwrap() / SECTOR);
            // Until it is opened, which makes the header stable.
            let unsure = own.is_unsure;
            match has {
                Some(has) if has == own.oracle.sectors() => {}
                Some(has) if unsure => own.oracle.perhaps_resized(has),
                // It was not made yet.
                None if own.serving.upgrade().is_none() && own.oracle.last_flush() == 0 => {}
                has => {
                    let (name, sectors) = (&own.config.name, own.oracle.sectors());
                    let what = format!("the header of {name} has the size {has:?}, not {sectors}");
                    missing.get_or_insert(what);
                }
            }
        }
        missing.map_or(Ok(()), Err)
    }

    /// Waits until no operation is in progress.
    pub(super) fn end_operations(&mut self) -> Result<(), String> {
        let end = self.now + PATIENCE;
        let reads = |world: &World| world.overlays.snapshots.iter().any(|one| one.reader.is_some());
        let idle = |world: &World| world.overlays.are_copies_idle();
        while !self.overlays.operations.is_empty() || reads(self) || !idle(self) {
            if self.now > end {
                let tasks: Vec<_> = self.overlays.operations.iter().map(|one| &one.task).collect();
                return Err(format!("operations do not end: {tasks:?}"));
            }
            self.step()?;
        }
        Ok(())
    }

    /// Opens every snapshot, and reads it.
    pub(super) fn check_snapshots(&mut self) -> Result<(), String> {
        for at in 0..self.overlays.snapshots.len() {
            let end = self.now + PATIENCE;
            loop {
                self.open_snapshot(at);
                self.end_operations()?;
                let before = self.overlays.snapshots[at].oracle.checked;
                self.connect_reader(at);
                self.end_operations()?;
                let Snapshot { oracle, title, sure, doomed, .. } = &self.overlays.snapshots[at];
                if oracle.checked >= before + oracle.sectors() as u64 || !sure || *doomed {
                    break;
                }
                if self.now > end {
                    return Err(format!("snapshot {title} cannot be read"));
                }
                self.wait_until(self.now + super::AGAIN)?;
            }
            self.outcome.checked += std::mem::take(&mut self.overlays.snapshots[at].oracle.checked);
        }
        self.check_clones()
    }

    pub(super) fn wait_until(&mut self, until: Instant) -> Result<(), String> {
        while self.now < until {
            self.step()?;
        }
        Ok(())
    }
}
