//! Faults of the file system of a state directory, for tests (feature `state-faults`).
//!
//! Faults are for the files of volumes and groups of one directory, whichever [`super::StateDir`] uses it, so that what reads the configuration meets them, too.
//! What was stable of the volumes when their directory was last synchronised is kept, to be restored as after a power cut.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::directory::StateStep;

/// Directories, each with what is to fail in it.
static PLANS: Mutex<BTreeMap<PathBuf, Plan>> = Mutex::new(BTreeMap::new());

/// The contents of files by their names.
type Files = BTreeMap<PathBuf, Vec<u8>>;

#[derive(Debug, Default)]
struct Plan {
    /// Fails all of these steps.
    always: Option<(StateStep, ErrorKind)>,
    /// Steps until some fail, how many fail, and with which error.
    after: Option<(u32, u32, ErrorKind)>,
    stable: Files,
}

fn plans() -> MutexGuard<'static, BTreeMap<PathBuf, Plan>> {
    PLANS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a step in this directory fails.
///
/// # Errors
/// As it was told.
pub(super) fn fails(folder: &Path, step: StateStep) -> io::Result<()> {
    let mut plans = plans();
    let volumes = folder.with_file_name("volumes");
    let Some(plan) = plans.get_mut(&volumes) else { return Ok(()) };
    if let Some((which, error)) = plan.always
        && which == step
    {
        return Err(error.into());
    }
    match &mut plan.after {
        Some((0, 0, _)) | None => {}
        Some((0, count, error)) => {
            *count -= 1;
            return Err((*error).into());
        }
        Some((steps, _, _)) => *steps -= 1,
    }
    if step == StateStep::SyncFolder && folder == volumes {
        plan.stable = files(folder);
    }
    Ok(())
}

fn files(folder: &Path) -> Files {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.path(), fs::read(entry.path()).ok()?))).collect()
}

/// The folder at or above `path` that is not mounted, as a test has said with
/// [`StateStep::FindMount`].
pub(super) fn unmounted(path: &Path) -> Option<PathBuf> {
    let is_missing = |folder: &&Path| fails(&folder.join("volumes"), StateStep::FindMount).is_err();
    path.ancestors().skip(1).find(is_missing).map(Path::to_owned)
}

/// The faults of one state directory, until this is dropped.
#[derive(Debug)]
pub struct StateFaults {
    volumes: PathBuf,
}

impl StateFaults {
    /// No faults yet, of the state directory `state`. What it has is stable.
    pub fn of(state: &Path) -> StateFaults {
        let volumes = state.join("volumes");
        let stable = files(&volumes);
        plans().insert(volumes.clone(), Plan { stable, ..Plan::default() });
        StateFaults { volumes }
    }

    fn plan(&self, set: impl FnOnce(&mut Plan)) {
        if let Some(plan) = plans().get_mut(&self.volumes) {
            set(plan);
        }
    }

    /// Fails all steps of one kind.
    pub fn fail(&self, step: StateStep, error: ErrorKind) {
        self.plan(|plan| plan.always = Some((step, error)));
    }

    /// Fails `count` steps after `steps` more.
    pub fn fail_after(&self, steps: u32, count: u32, error: ErrorKind) {
        self.plan(|plan| plan.after = Some((steps, count, error)));
    }

    /// Fails no step any more.
    pub fn end(&self) {
        self.plan(|plan| (plan.always, plan.after) = (None, None));
    }

    /// Whether a power cut now would leave the files as they are.
    pub fn is_stable(&self) -> bool {
        let mut same = false;
        self.plan(|plan| same = plan.stable == files(&self.volumes));
        same
    }

    /// Makes the files what they were when the directory was last made stable, as a power cut may do.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn cut_power(&self) -> io::Result<()> {
        let mut stable = Files::new();
        self.plan(|plan| stable = plan.stable.clone());
        for path in files(&self.volumes).into_keys() {
            fs::remove_file(path)?;
        }
        stable.into_iter().try_for_each(|(path, bytes)| fs::write(path, bytes))
    }
}

impl Drop for StateFaults {
    fn drop(&mut self) {
        plans().remove(&self.volumes);
    }
}
