//! Watches the paths of served files that are written to. Data that is written to a file that was
//! deleted or replaced, or whose file system was detached, is gone when the volume is closed, and
//! nothing else notices.
//!
//! A read-only volume may read on from a replaced file: a snapshot does when the one below it is
//! merged into it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_advice::Advice;
use ebb_api::stat::ProblemStat;
use ebb_config::StoreUri;
use ebb_io::WorkerHandle;

use super::{Engine, lock};
use crate::stores::{StoreError, StoreTarget, same_target};
use crate::ticks::until_tick;

/// How often the paths are looked at.
const LOOK: Duration = Duration::from_secs(10);

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
        worker.spawn(move |io| async move {
            loop {
                io.sleep(until_tick(ebb_mem::clock::now(), started, LOOK)).await;
                let Some(files) = engine.upgrade().map(|engine| engine.served_files()) else {
                    break;
                };
                let moved = io.offload(move || moved(files)).await;
                let Some(engine) = engine.upgrade() else { break };
                engine.note_moved(moved);
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

    fn note_moved(&self, found: Vec<(ServedFile, StoreError)>) {
        let mut moved = lock(&self.moved_files);
        let seen = std::mem::take(&mut moved.seen);
        let known = std::mem::take(&mut moved.known);
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
        self.note_moved(moved(self.served_files()));
    }
}
