//! The configuration file and the state directory of a world, in memory, and faults of their file
//! system.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use ebb_api::SuccessorState;
use ebb_config::{Config, ConfigError, ServeArgs, StateDir, StateFaults, StateStep};

use crate::random::Random;

struct Files {
    path: PathBuf,
    faults: StateFaults,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct KeptState(Rc<Files>);

impl KeptState {
    pub(crate) fn new() -> KeptState {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = format!("/dev/shm/ebb-world-state-{}-{number}", std::process::id());
        let path = PathBuf::from(path);
        fs::create_dir(&path).unwrap();
        let faults = StateFaults::of(&path.join("state"));
        KeptState(Rc::new(Files { path, faults }))
    }

    /// Where the directory is while its file system is not mounted: nothing finds it there.
    fn unmounted_root(&self) -> PathBuf {
        self.0.path.join("unmounted")
    }

    fn is_mounted(&self) -> bool {
        !self.unmounted_root().exists()
    }

    /// Mounts or unmounts the file system of the directory. In its place is an empty folder then.
    ///
    /// # Errors
    /// The folder was not empty.
    fn exchange(&self, mounted: bool) -> Result<(), String> {
        let (root, other) = (self.root(), self.unmounted_root());
        if mounted == self.is_mounted() {
            return Ok(());
        }
        if mounted {
            let made = fs::remove_dir(&root).map_err(|_| {
                "files were made in the mount point of the state directory".to_owned()
            });
            made?;
            fs::rename(&other, &root).unwrap();
        } else {
            if root.exists() {
                fs::rename(&root, &other).unwrap();
            } else {
                fs::create_dir(&other).unwrap();
            }
            fs::create_dir(&root).unwrap();
        }
        Ok(())
    }

    /// The state directory as a successor finds it while its file system is not mounted, and as it
    /// is otherwise.
    pub(crate) fn as_found(&self, mounted: bool) -> SuccessorState {
        let before = self.is_mounted();
        self.exchange(mounted).unwrap();
        let path = Some(ebb_config::from_root(&self.root()).display().to_string());
        let found = SuccessorState { path, folder: self.directory().folder_number() };
        self.exchange(before).unwrap();
        found
    }

    fn root(&self) -> PathBuf {
        self.0.path.join("state")
    }

    pub(crate) fn directory(&self) -> StateDir {
        StateDir::new(&self.root())
    }

    pub(crate) fn config_file(&self) -> PathBuf {
        self.0.path.join("ebbd.toml")
    }

    /// Writes the configuration file.
    pub(crate) fn write_configuration(&self, text: &str) {
        let text = format!("state = \"{}\"\n{text}", self.root().display());
        fs::write(self.config_file(), text).unwrap();
    }

    /// Reads the configuration as a daemon does at its start.
    pub(crate) fn load(&self) -> Result<Config, ConfigError> {
        let args = ServeArgs { config: Some(self.config_file()), ..ServeArgs::default() };
        Config::load(&args)
    }

    /// Reads it as a daemon does for a reload.
    pub(crate) fn load_again(&self, used: bool) -> Result<Config, ConfigError> {
        let args = ServeArgs { config: Some(self.config_file()), ..ServeArgs::default() };
        self.directory().found(used)?;
        Config::load_again(&args, Some(&self.root()))
    }

    /// Whether there is a file of a volume with this store.
    pub(crate) fn has(&self, name: &str, store: &str) -> bool {
        let text = fs::read_to_string(self.directory().path_of(name)).unwrap_or_default();
        text.contains(&format!("\"{store}\""))
    }

    /// The content of the file of a volume.
    pub(crate) fn text_of(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.directory().path_of(name)).ok()
    }

    /// Changes the file of a volume, as an operator does.
    pub(crate) fn set_text_of(&self, name: &str, text: &str) {
        fs::write(self.directory().path_of(name), text).unwrap();
    }

    /// Whether a power cut would leave the files as they are.
    pub(crate) fn is_stable(&self) -> bool {
        self.0.faults.is_stable()
    }

    /// Some steps fail from now on. Returns a text for the trace.
    pub(crate) fn fail(&self, random: &mut Random) -> String {
        use StateStep::{Create, List, Read, Remove, Rename, SyncFolder, Write};
        let error = ErrorKind::Other;
        self.0.faults.end();
        match random.below(4) {
            0 => "no step fails".to_owned(),
            1 => {
                let steps = [Create, List, Read, Remove, Rename, SyncFolder, SyncFolder, Write];
                let step = random.pick(&steps);
                self.0.faults.fail(step, error);
                format!("{step:?} fails")
            }
            _ => {
                let (after, count) = (random.below(8) as u32, random.between(1, 3) as u32);
                self.0.faults.fail_after(after, count, error);
                format!("{count} steps fail after {after}")
            }
        }
    }

    /// All steps after so many fail: a call that is made then is interrupted.
    pub(crate) fn interrupt_after(&self, steps: u32) {
        self.0.faults.end();
        self.0.faults.fail_after(steps, u32::MAX, ErrorKind::Other);
    }

    /// The file system of the directory is mounted, or not.
    ///
    /// # Errors
    /// A daemon has made files in its mount point.
    pub(crate) fn set_mounted(&self, mounted: bool) -> Result<(), String> {
        self.0.faults.end();
        if !mounted {
            self.0.faults.fail(StateStep::FindMount, ErrorKind::Other);
        }
        self.exchange(mounted)
    }

    /// All steps succeed from now on.
    pub(crate) fn heal(&self) {
        self.0.faults.end();
    }

    /// The power fails: names change back to those that were stable.
    pub(crate) fn cut_power(&self) {
        if self.is_mounted() {
            self.0.faults.cut_power().unwrap();
        }
    }

    /// Nothing in the directory but files of these volumes; at the start of a daemon.
    pub(crate) fn foreign(&self) -> Vec<PathBuf> {
        let is_temporary = |path: &Path| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".new-"))
        };
        let entries = fs::read_dir(self.root().join("volumes")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| is_temporary(path)).collect()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}
