//! Volumes on and above snapshots: clones, and looks at snapshots that are being made.
//!
//! A clone is written once, flushed, and removed from the daemon; whenever it is added again, it
//! still has these writes. While it is not served, only the header of its file says that it needs
//! its snapshot. A look opens the file of a snapshot while the snapshot is written, and reads the
//! volume's data at the moment of the snapshot.

use std::time::Instant;

use ebb_api::{AddVolumeBody, OperationState};
use ebb_control::VolumeChange;

use super::{Overlays, Snapshot, Task};
use crate::client::{Client, StepResult};
use crate::manner::Manner;
use crate::oracle::{Oracle, SECTOR};
use crate::world::{AGAIN, PATIENCE, World};

/// The most clones at a time.
const CLONES: usize = 2;
/// Requests of the client that writes to a clone.
const REQUESTS: u64 = 12;
/// The numbers of the first clone's writes follow this one.
const NUMBERS: u64 = 1000;

/// The present use of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// This operation adds the copy.
    Adding(u64),
    /// A client writes to the copy.
    Writing,
    /// The client has sent the last flush, after this many requests had succeeded.
    Flushing(u64),
    /// A client reads the whole copy, and has sent all requests.
    Reading(bool),
    /// No client uses the copy.
    Served,
    /// This operation removes the copy.
    Removing(u64),
    /// The copy is not served.
    Away,
}

/// A volume at run time on a snapshot, or above it.
struct Copy {
    name: String,
    /// The name of the copy's file.
    file: String,
    /// The volume below the copy.
    base: String,
    /// The overlay of the snapshot.
    site: usize,
    snapshot: String,
    /// The copy is above the snapshot, and not on its file.
    is_clone: bool,
    /// The data of the copy is stable.
    sure: bool,
    /// The data of the copy is not known, so the copy is removed.
    spoilt: bool,
    oracle: Oracle,
    /// Number of losses of the disk when the client began to write.
    losses: u64,
    client: Option<Client>,
    stage: Stage,
    /// The time of the next attempt to remove the copy, after a refused one.
    again: Instant,
}

/// See the module.
#[derive(Default)]
pub(super) struct Copies {
    list: Vec<Copy>,
    /// The number of the next copy.
    next: u64,
}

impl Copy {
    fn is_of(&self, site: usize, snapshot: &str) -> bool {
        self.site == site && self.snapshot == snapshot
    }

    fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Away) || self.stage == Stage::Served && self.is_clone
    }

    fn leave(&mut self) {
        if let Some(client) = self.client.take() {
            drop(client.leave(&mut self.oracle));
        }
    }

    /// Makes a step of the copy's client. Returns two values: the client was busy; it has ended.
    ///
    /// # Errors
    /// If the content of the copy is wrong.
    fn step(&mut self, now: Instant) -> Result<(bool, bool), String> {
        let Some(client) = &mut self.client else { return Ok((false, true)) };
        let step = client.step(&mut self.oracle, now)?;
        Ok((step == StepResult::Busy, step == StepResult::Ended))
    }
}

impl Overlays {
    /// Returns true if a clone above this snapshot has a file.
    pub(super) fn has_clone(&self, site: usize, snapshot: &str) -> bool {
        self.copies.list.iter().any(|one| one.is_clone && one.sure && one.is_of(site, snapshot))
    }

    /// Returns true if nothing happens to copies.
    pub(super) fn are_copies_idle(&self) -> bool {
        self.copies.list.iter().all(Copy::is_idle)
    }

    pub(super) fn has_copies(&self) -> bool {
        !self.copies.list.is_empty()
    }

    fn snapshot(&self, site: usize, name: &str) -> Option<&Snapshot> {
        self.snapshots.iter().find(|one| one.site == site && one.name == name)
    }
}

impl World {
    /// Makes a clone, removes one from the daemon, or adds one again.
    pub(super) fn change_clones(&mut self) {
        let clones = self.overlays.copies.list.iter().filter(|one| one.is_clone).count();
        if clones < CLONES && self.apart.chance(70) {
            return self.make_clone();
        }
        let idle = |(_, one): &(usize, &Copy)| one.is_clone && one.is_idle();
        let all = self.overlays.copies.list.iter().enumerate();
        let idle: Vec<usize> = all.filter(idle).map(|(at, _)| at).collect();
        if idle.is_empty() {
            return;
        }
        let at = self.apart.pick(&idle);
        match self.overlays.copies.list[at].stage {
            Stage::Served => self.remove_copy(at),
            _ if self.apart.chance(20) => self.drop_clone(at),
            _ => self.add_clone(at),
        }
    }

    fn make_clone(&mut self) {
        let fits = |one: &&Snapshot| one.sure && !one.doomed;
        let count = self.overlays.snapshots.iter().filter(fits).count();
        if count == 0 {
            return;
        }
        let at = self.apart.index(count);
        let Some(found) = self.overlays.snapshots.iter().filter(fits).nth(at) else { return };
        self.overlays.copies.next += 1;
        let number = self.overlays.copies.next;
        let name = format!("c{number}");
        let copy = Copy {
            file: format!("{name}.delta"),
            base: found.title.clone(),
            site: found.site,
            snapshot: found.name.clone(),
            is_clone: true,
            sure: false,
            spoilt: false,
            oracle: found.oracle.overlay(&name, (NUMBERS + number) << 32),
            losses: 0,
            client: None,
            stage: Stage::Away,
            again: self.now,
            name,
        };
        self.overlays.copies.list.push(copy);
        self.add_clone(self.overlays.copies.list.len() - 1);
    }

    /// Adds a clone, once its base is there.
    fn add_clone(&mut self, at: usize) {
        let Copy { name, file, base, site, sure, .. } = &self.overlays.copies.list[at];
        let (folder, _) = self.file_of(*site);
        let body = AddVolumeBody {
            name: name.clone(),
            store: format!("file:{}", folder.path(file).display()),
            base: Some(base.clone()),
            create: (!sure).then_some(true),
            ..AddVolumeBody::default()
        };
        let is_base = |one: &Snapshot| one.title == *base;
        let below = self.overlays.snapshots.iter().position(is_base);
        let is_there = self.daemon.as_ref().is_some_and(|one| one.volume(base).is_some());
        match below {
            Some(below) if !is_there => self.open_snapshot(below),
            _ => self.add_copy(at, body),
        }
        let one = &self.overlays.copies.list[at];
        if !one.sure && one.stage == Stage::Away {
            self.overlays.copies.list.remove(at);
        }
    }

    fn add_copy(&mut self, at: usize, body: AddVolumeBody) {
        let name = body.name.clone();
        let begun = self.daemon().manager.begin(VolumeChange::Add(body), "");
        let refused = begun.as_ref().err().map(|refused| refused.body.message.clone());
        self.note(format_args!("{name} is added: {refused:?}"));
        if let Ok(begun) = begun {
            self.overlays.copies.list[at].stage = Stage::Adding(begun.id);
        }
    }

    fn remove_copy(&mut self, at: usize) {
        let name = self.overlays.copies.list[at].name.clone();
        let begun = self.daemon().manager.begin(VolumeChange::Remove(name.clone()), "");
        self.note(format_args!("{name} is removed: {}", begun.is_ok()));
        let one = &mut self.overlays.copies.list[at];
        match begun {
            Ok(begun) => one.stage = Stage::Removing(begun.id),
            Err(_) => one.again = self.now + AGAIN,
        }
    }

    /// Removes the file of a clone that is not served.
    fn drop_clone(&mut self, at: usize) {
        let Copy { name, file, site, is_clone, .. } = self.overlays.copies.list.remove(at);
        if is_clone {
            self.file_of(site).0.remove(&file);
        }
        self.note(format_args!("{name} is no more"));
    }

    /// Opens the file of a snapshot while the snapshot is made, under its title or another name.
    pub(super) fn look_at_snapshot(&mut self, site: usize, snapshot: &str) {
        if !self.apart.chance(60) {
            return;
        }
        self.overlays.copies.next += 1;
        let (folder, file) = self.file_of(site);
        let base = self.sites[site].overlay().expect("it is an overlay").base.clone();
        let name = match self.apart.chance(30) {
            true => format!("{}@{snapshot}", self.sites[site].config.name),
            false => format!("p{}", self.overlays.copies.next),
        };
        let file = format!("{file}@{snapshot}");
        let body = AddVolumeBody {
            name: name.clone(),
            store: format!("file:{}", folder.path(&file).display()),
            base: Some(base.clone()),
            read_only: Some(true),
            ..AddVolumeBody::default()
        };
        self.overlays.copies.list.push(Copy {
            oracle: Oracle::new(&name, 0),
            name,
            file,
            base,
            site,
            snapshot: snapshot.to_owned(),
            is_clone: false,
            sure: false,
            spoilt: false,
            losses: 0,
            client: None,
            stage: Stage::Away,
            again: self.now,
        });
        let at = self.overlays.copies.list.len() - 1;
        self.add_copy(at, body);
        if self.overlays.copies.list[at].stage == Stage::Away {
            self.overlays.copies.list.remove(at);
        }
    }

    /// Returns the image in the file of a snapshot, which may not be complete yet.
    fn image_of(&self, site: usize, name: &str) -> Option<Oracle> {
        let title = format!("a look at {}@{name}", self.sites[site].config.name);
        if let Some(found) = self.overlays.snapshot(site, name) {
            return Some(found.oracle.overlay(&title, 0));
        }
        let begun = self.overlays.operations.iter().find_map(|one| match &one.task {
            Task::Snapshot { name: made, begun, .. } if one.site == site && made == name => {
                Some(*begun)
            }
            _ => None,
        })?;
        let (folder, file) = self.file_of(site);
        let mut image = self.sites[site].oracle.image(&title, begun);
        let size = folder.size_in_header(&format!("{file}@{name}"))?;
        image.set_size(usize::try_from(size).unwrap() / SECTOR);
        image.settle();
        Some(image)
    }

    /// Makes a step of the copies.
    pub(super) fn serve_copies(&mut self) -> Result<bool, String> {
        let mut busy = false;
        let mut at = 0;
        while at < self.overlays.copies.list.len() {
            let count = self.overlays.copies.list.len();
            busy |= match self.overlays.copies.list[at].stage {
                Stage::Adding(id) => self.end_adding(at, id),
                Stage::Removing(id) => self.end_removing(at, id),
                Stage::Writing | Stage::Flushing(_) => self.serve_writer(at)?,
                Stage::Reading(asked) => self.serve_copy_reader(at, asked)?,
                Stage::Served => {
                    let one = &self.overlays.copies.list[at];
                    let wanted = (!one.is_clone || one.spoilt) && one.again <= self.now;
                    if wanted {
                        self.remove_copy(at);
                    }
                    wanted
                }
                Stage::Away => false,
            };
            at += usize::from(self.overlays.copies.list.len() == count);
        }
        Ok(busy)
    }

    /// Returns the result of an operation that has ended: its failure, or none.
    fn ended(&self, id: u64) -> Option<Option<String>> {
        let (view, _) = self.daemon.as_ref()?.manager.operation(id)?;
        match view.state {
            OperationState::Running => None,
            OperationState::Done => Some(None),
            _ => Some(Some(view.failure.map(|why| why.message).unwrap_or_default())),
        }
    }

    fn end_adding(&mut self, at: usize, id: u64) -> bool {
        let Some(failure) = self.ended(id) else { return false };
        let Copy { name, site, snapshot, sure, is_clone, .. } = &self.overlays.copies.list[at];
        let (name, sure, is_clone) = (name.clone(), *sure, *is_clone);
        let image = self.image_of(*site, snapshot);
        let losses = self.sites[*site].losses;
        self.note(format_args!("{name} was added: {failure:?}"));
        if failure.is_some() {
            match sure {
                true => self.overlays.copies.list[at].stage = Stage::Away,
                false => self.drop_clone(at),
            }
            return true;
        }
        let random = self.apart.fork();
        let stream = self.daemon().connect();
        let one = &mut self.overlays.copies.list[at];
        let writes = is_clone && !sure;
        let manner = if writes { Manner::brief(one.oracle.sectors()) } else { Manner::told() };
        one.client = Some(Client::new(stream, &name, manner, random, self.now));
        one.losses = losses;
        one.stage = if writes { Stage::Writing } else { Stage::Reading(false) };
        match image {
            Some(image) if !is_clone => one.oracle = image,
            None if !is_clone => one.spoilt = true,
            _ => {}
        }
        true
    }

    fn end_removing(&mut self, at: usize, id: u64) -> bool {
        let Some(failure) = self.ended(id) else { return false };
        let name = self.overlays.copies.list[at].name.clone();
        // A removal also fails if it is done, and data may be lost.
        let is_there = failure.is_some() && self.daemon().volume(&name).is_some();
        // A look under the title of its snapshot stays as the snapshot's volume.
        let is_needed = failure.is_some_and(|why| why.contains("needs its file"));
        if is_there && is_needed && !self.overlays.copies.list[at].is_clone {
            self.drop_clone(at);
            return true;
        }
        let (again, one) = (self.now + AGAIN, &mut self.overlays.copies.list[at]);
        if is_there {
            (one.stage, one.again) = (Stage::Served, again);
        } else {
            one.oracle.crashed();
            one.stage = Stage::Away;
            if one.spoilt || !one.is_clone {
                self.drop_clone(at);
            }
        }
        true
    }

    /// Makes a step of a writing client. The data of the clone is known only if its disk loses
    /// nothing meanwhile.
    fn serve_writer(&mut self, at: usize) -> Result<bool, String> {
        let now = self.now;
        let one = &mut self.overlays.copies.list[at];
        let losses = self.sites[one.site].losses;
        let (busy, ended) = match losses == one.losses {
            true => one.step(now)?,
            false => (true, true),
        };
        let Some(client) = &mut one.client else { return Ok(busy) };
        if ended {
            one.leave();
            (one.stage, one.spoilt) = (Stage::Served, true);
            return Ok(true);
        }
        client.quiet = client.answered >= REQUESTS;
        if !client.quiet || client.open() > 0 {
            return Ok(busy);
        }
        match one.stage {
            Stage::Flushing(before) => {
                one.sure = client.succeeded > before;
                one.spoilt = !one.sure;
                one.leave();
                one.stage = Stage::Served;
                let (name, sure) = (one.name.clone(), one.sure);
                self.note(format_args!("{name} is stable: {sure}"));
            }
            _ => {
                one.stage = Stage::Flushing(client.succeeded);
                client.flush(&mut one.oracle, now);
            }
        }
        Ok(true)
    }

    fn serve_copy_reader(&mut self, at: usize, asked: bool) -> Result<bool, String> {
        let now = self.now;
        let one = &mut self.overlays.copies.list[at];
        let (busy, mut ended) = if one.spoilt { (true, true) } else { one.step(now)? };
        if let Some(client) = one.client.as_mut().filter(|client| client.is_serving() && !ended) {
            if asked {
                ended = client.open() == 0;
            } else {
                one.stage = Stage::Reading(true);
                let sectors = client.size();
                for first in (0..sectors).step_by(256) {
                    client.read(first, 256.min(sectors - first), &mut one.oracle, now);
                }
                return Ok(true);
            }
        }
        if ended {
            one.leave();
            one.stage = Stage::Served;
        }
        Ok(busy || ended)
    }

    /// Notes the end of the daemon: the data of copies that were not stable is not known.
    pub(super) fn end_copies(&mut self) {
        let all = self.overlays.copies.list.len();
        for at in (0..all).rev() {
            let one = &mut self.overlays.copies.list[at];
            one.leave();
            one.oracle.crashed();
            one.stage = Stage::Away;
            if !one.sure || one.spoilt {
                self.drop_clone(at);
            }
        }
    }

    /// Adds every clone again, and reads it.
    pub(super) fn check_clones(&mut self) -> Result<(), String> {
        let names: Vec<String> =
            self.overlays.copies.list.iter().map(|one| one.name.clone()).collect();
        for name in names {
            let end = self.now + PATIENCE;
            let find = |world: &World| {
                let mut all = world.overlays.copies.list.iter();
                all.position(|one| one.name == name && one.is_clone && one.sure)
            };
            let checked = |world: &World, at: usize| world.overlays.copies.list[at].oracle.checked;
            let before = find(self).map_or(0, |at| checked(self, at));
            while let Some(at) = find(self) {
                let one = &self.overlays.copies.list[at];
                if checked(self, at) >= before + one.oracle.sectors() as u64 {
                    self.outcome.checked += checked(self, at) - before;
                    break;
                }
                if self.now > end {
                    return Err(format!("clone {name} cannot be read"));
                }
                match one.stage {
                    Stage::Served => self.remove_copy(at),
                    _ => self.add_clone(at),
                }
                self.end_operations()?;
                self.wait_until(self.now + AGAIN)?;
            }
        }
        Ok(())
    }
}
