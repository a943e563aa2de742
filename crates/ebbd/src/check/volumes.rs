//! Checks that the volumes of a configuration can be opened: by the rules of the start, in its order.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::Path;

use ebb_block::BlockStore;
use ebb_config::{Config, StateDir, StoreUri, VhostSocket, VolumeConfig};

use super::{CheckLine, overlay};
use crate::delta_file;
use crate::engine::{ProtectedFiles, chain_of, explain_missing, is_confined, must_be_creatable};
use crate::stores::{
    Expected, HeldAs, StoreError, StoreTarget, foreign_format, inspect, is_in_use,
    must_not_be_configuration, open_noting, to_be_created,
};

/// The checks of the volumes of a configuration.
pub(super) struct VolumeChecks<'a> {
    config: &'a Config,
    /// The configuration file.
    own: Option<&'a Path>,
    state: Option<StateDir>,
    protected: OnceCell<ProtectedFiles>,
    /// The volumes that were checked, by their files, and whether they only read.
    files: BTreeMap<StoreTarget, (&'a str, bool)>,
    /// The findings of each volume by itself.
    outcomes: BTreeMap<&'a str, Result<String, String>>,
    /// Notes on the stores that were opened.
    notes: BTreeMap<&'a str, Vec<String>>,
}

impl<'a> VolumeChecks<'a> {
    pub(super) fn new(config: &'a Config, own: Option<&'a Path>) -> VolumeChecks<'a> {
        VolumeChecks {
            config,
            own,
            state: config.state.as_deref().map(StateDir::new),
            protected: OnceCell::new(),
            files: BTreeMap::new(),
            outcomes: BTreeMap::new(),
            notes: BTreeMap::new(),
        }
    }

    /// Checks a volume, and those below it, and passes `say` what was found.
    pub(super) fn check(&mut self, name: &'a str, mut say: impl FnMut(CheckLine)) {
        let Some(volume) = self.config.volumes.get(name) else { return };
        say(match self.check_chain(name, volume) {
            Ok(text) => CheckLine::Ok(format!("volume {name}: {text}")),
            Err(why) => CheckLine::Mistake(format!("volume {name}: {why}")),
        });
        for note in self.notes.remove(name).into_iter().flatten() {
            say(CheckLine::Warning(format!("volume {name}: {note}")));
        }
        if let Some(format) = foreign_format(volume) {
            say(CheckLine::Warning(format!("volume {name}: {}", format.warning())));
        }
    }

    /// Checks the socket of a volume, which may be at no file that the daemon trusts.
    ///
    /// # Errors
    /// The text of a mistake.
    pub(super) fn check_socket(&self, name: &str) -> Result<(), String> {
        let own = self.config.volumes.get(name).and_then(|volume| volume.vhost_user.as_ref());
        let (Some(VhostSocket::Path(path)), true) = (own, self.is_confined(name)) else {
            return Ok(());
        };
        match self.protected().purpose_of(path) {
            Some(what) => Err(format!("{} is {what}: choose another path", path.display())),
            None => Ok(()),
        }
    }

    fn is_confined(&self, name: &str) -> bool {
        is_confined(self.config.origins.get(name))
    }

    fn protected(&self) -> &ProtectedFiles {
        let of = || ProtectedFiles::of(self.config, None, self.own);
        self.protected.get_or_init(of)
    }

    /// Checks the volumes below one, from the lowest one up, and then the volume itself.
    fn check_chain(&mut self, name: &'a str, volume: &'a VolumeConfig) -> Result<String, String> {
        let (volumes, origins) = (&self.config.volumes, &self.config.origins);
        let known = |name: &str| volumes.get_key_value(name).map(|(_, volume)| volume);
        let chain = chain_of(name, known, |name| origins.get(name).cloned());
        let chain = chain.map_err(|error| error.full_text())?;
        for (base, _) in chain.iter().rev() {
            let Some((base, config)) = volumes.get_key_value(base) else { continue };
            if self.outcome(base, config).is_err() {
                return Err(format!(
                    "its base `{base}` cannot be served, as the line about that says"
                ));
            }
        }
        self.outcome(name, volume).clone()
    }

    fn outcome(&mut self, name: &'a str, volume: &'a VolumeConfig) -> &Result<String, String> {
        if !self.outcomes.contains_key(name) {
            let outcome = self.check_one(name, volume).map_err(|error| error.full_text());
            self.outcomes.insert(name, outcome);
        }
        &self.outcomes[name]
    }

    /// Checks a volume by itself, and returns a description.
    fn check_one(&mut self, name: &'a str, volume: &VolumeConfig) -> Result<String, StoreError> {
        if self.is_confined(name) {
            self.protected().must_not_have(&volume.store)?;
        }
        must_not_be_configuration(volume, self.own)?;
        self.must_be_alone(name, volume)?;
        let origin = self.config.origins.get(name);
        let text = self
            .check_store(name, volume)
            .map_err(|error| explain_missing(self.state.as_ref(), name, (volume, origin), error))?;
        overlay::check_base(self.config, volume)?;
        Ok(text)
    }

    /// Fails if another volume is on the same file, and one of them writes.
    fn must_be_alone(&mut self, name: &'a str, volume: &VolumeConfig) -> Result<(), StoreError> {
        let Some(file) = StoreTarget::of(&volume.store)? else { return Ok(()) };
        match self.files.insert(file.clone(), (name, volume.read_only)) {
            Some((other, read_only)) if !(read_only && volume.read_only) => {
                let (store, other) = (volume.store.to_string(), other.to_owned());
                let gone = Default::default();
                Err(StoreError::SameFile { store, other, file, held: HeldAs::Store, gone })
            }
            _ => Ok(()),
        }
    }

    /// Opens the store of a volume, unless it is in use, and returns a description.
    fn check_store(&mut self, name: &'a str, volume: &VolumeConfig) -> Result<String, StoreError> {
        let origin = self.config.origins.get(name);
        let creatable = || must_be_creatable(self.state.as_ref(), name, (volume, origin));
        if let Some(base) = &volume.base {
            // What the delta has to be depends on its base, which may be in use.
            inspect(volume)?;
            let StoreUri::File(path) = &volume.store else { return Ok(format!("above {base}")) };
            if !volume.create || !path.try_exists().is_ok_and(|there| !there) {
                return Ok(match delta_file::is_flattened(path) {
                    true => "a delta that was flattened: set `base = \"none\"`".to_owned(),
                    false => format!("a delta above {base}"),
                });
            }
            creatable()?;
            return Ok(format!("a new delta above {base}"));
        }
        if let Some(size) = to_be_created(volume) {
            inspect(volume)?;
            creatable()?;
            return Ok(format!("{size} bytes, to be created"));
        }
        // Most likely a running daemon serves it: the configuration is checked before a reload.
        if is_in_use(volume) {
            inspect(volume)?;
            return Ok("in use by a daemon or another process, and not opened".to_owned());
        }
        if volume.encryption.is_some() {
            // Opening it may make a header.
            inspect(volume)?;
            return Ok("encrypted".to_owned());
        }
        let mut volume = volume.clone();
        // A running daemon may have its lock.
        volume.read_only |= matches!(volume.store, StoreUri::Rbd(_));
        let workers = (self.config.workers, None);
        let (store, notes) = open_noting(name, &volume, &Expected::Any, workers)?;
        self.notes.insert(name, notes.warnings);
        let direct = if store.capabilities().direct { ", direct" } else { "" };
        Ok(format!("{} bytes{direct}", store.size()))
    }
}
