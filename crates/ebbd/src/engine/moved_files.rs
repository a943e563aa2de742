//! Watches the paths of served files that are written to. Data that is written to a file that was
//! deleted or replaced, or whose file system was detached, is gone when the volume is closed, and
//! nothing else notices.
//!
//! Each file system is looked at on its own thread: one that hangs does not delay others, and is
//! not looked at again before it replies.
//!
//! A read-only volume may read on from a replaced file: a snapshot does when the one below it is
//! merged into it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ebb_advice::Advice;
use ebb_api::stat::ProblemStat;
use ebb_config::StoreUri;
use ebb_io::WorkerHandle;

use super::open::on_a_thread;
use super::{Engine, lock};
use crate::stores::{StoreError, StoreTarget, same_target};
use crate::ticks::until_tick;

/// How often the paths are looked at.
const LOOK: Duration = Duration::from_secs(10);
/// How long a file system may take to reply.
const PATIENCE: Duration = Duration::from_secs(1);

/// A served file: the volume, its store, and the file that it has open.
type ServedFile = (String, StoreUri, StoreTarget);

/// Volumes whose paths did not lead to their files.
#[derive(Debug, Default)]
pub(super) struct MovedFiles {
    /// At the last look.
    seen: BTreeMap<String, ServedFile>,
    /// At the last two: an operation may exchange files in between.
    known: BTreeMap<String, ProblemStat>,
}

impl Engine {
    /// Looks at the paths for as long as the worker runs.
    pub fn watch_files(self: &Arc<Self>, worker: &WorkerHandle, started: Instant) {
        let engine = Arc::downgrade(self);
        let busy = Arc::<Mutex<BTreeSet<Device>>>::default();
        worker.spawn(move |io| async move {
            loop {
                io.sleep(until_tick(ebb_mem::clock::now(), started, LOOK)).await;
                let Some(files) = engine.upgrade().map(|engine| engine.served_files()) else {
                    break;
                };
                let (mut found, mut left) = (Vec::new(), BTreeSet::new());
                for (device, files) in by_device(files) {
                    let names = files.iter().map(|(name, ..)| name.clone());
                    let names: Vec<_> = names.collect();
                    match io.timeout(PATIENCE, look(&busy, device, files)).await.flatten() {
                        Some(moved) => found.extend(moved),
                        None => left.extend(names),
                    }
                }
                let Some(engine) = engine.upgrade() else { break };
                engine.note_moved(found, &left);
            }
        });
    }

    fn served_files(&self) -> Vec<ServedFile> {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let of = |slot: &Arc<super::VolumeSlot>| {
            let (_, config) = slot.served().filter(|(_, config)| !config.read_only)?;
            Some((slot.name().to_owned(), config.store, slot.open_file()?))
        };
        slots.iter().filter_map(of).collect()
    }

    /// Notes what was found. Nothing new is known of the volumes that are `left`.
    fn note_moved(&self, found: Vec<(ServedFile, StoreError)>, left: &BTreeSet<String>) {
        let mut moved = lock(&self.moved_files);
        let seen = std::mem::take(&mut moved.seen);
        let known = std::mem::take(&mut moved.known);
        let is_left = |name: &String| left.contains(name);
        let of_left = seen.iter().filter(|(name, _)| is_left(name));
        moved.seen = of_left.map(|(name, file)| (name.clone(), file.clone())).collect();
        let of_left = known.iter().filter(|(name, _)| is_left(name));
        moved.known = of_left.map(|(name, problem)| (name.clone(), problem.clone())).collect();
        for (file, error) in found {
            let name = file.0.clone();
            if seen.get(&name) == Some(&file) {
                if !known.contains_key(&name) {
                    let error = error.full_text();
                    tracing::error!(volume = name, error, "a served file is no longer at its path");
                }
                let problem = ProblemStat {
                    volume: Some(name.clone()),
                    message: error.to_string(),
                    kind: ProblemStat::MOVED.to_owned(),
                    remedy: error.remedy().unwrap_or_default().into_owned(),
                };
                moved.known.insert(name.clone(), problem);
            }
            moved.seen.insert(name, file);
        }
    }

    /// The served volumes whose paths do not lead to their files.
    pub(super) fn moved_files(&self) -> Vec<ProblemStat> {
        lock(&self.moved_files).known.values().cloned().collect()
    }
}

/// The number of a file system; `None` if the store is not a file.
type Device = Option<u64>;

fn by_device(files: Vec<ServedFile>) -> BTreeMap<Device, Vec<ServedFile>> {
    let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for file in files {
        let device = match &file.2 {
            StoreTarget::File(device, _) => Some(*device),
            _ => None,
        };
        all.entry(device).or_default().push(file);
    }
    all
}

/// Looks at the files of one file system. Returns `None` if an earlier look has not ended.
async fn look(
    busy: &Arc<Mutex<BTreeSet<Device>>>,
    device: Device,
    files: Vec<ServedFile>,
) -> Option<Vec<(ServedFile, StoreError)>> {
    if !lock(busy).insert(device) {
        return None;
    }
    let ended = busy.clone();
    let found = on_a_thread(move || {
        let found = moved(files);
        lock(&ended).remove(&device);
        Ok(found)
    });
    let found = found.await;
    if found.is_err() {
        // No thread was made.
        lock(busy).remove(&device);
    }
    found.ok()
}

/// The files that are no longer at their paths. Blocks.
fn moved(files: Vec<ServedFile>) -> Vec<(ServedFile, StoreError)> {
    let look = |file: ServedFile| match same_target(&file.1, Some(&file.2), &file.1) {
        Err(error @ StoreError::Moved { .. }) => Some((file, error)),
        _ => None,
    };
    files.into_iter().filter_map(look).collect()
}

#[cfg(test)]
impl Engine {
    /// Looks at the paths now.
    pub(super) fn look_at_files(&self) {
        self.note_moved(moved(self.served_files()), &BTreeSet::new());
    }
}
