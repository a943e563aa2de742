//! A volume's place in the engine: what is wanted of it, and what it is now.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_volume::{Stop, Volume};

use super::claims::Claim;
use crate::config::{StoreUri, VolumeConfig};
use crate::stores::{Expected, FileIdentity};

/// What a volume is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its store is being opened for the first time.
    Opening,
    /// It is offered.
    Serving,
    /// Its store cannot be opened; that is tried again.
    Failed,
    /// It is being withdrawn: requests end, and what is in memory only is written.
    Closing,
}

impl Phase {
    /// In a word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Phase::Opening => "opening",
            Phase::Serving => "serving",
            Phase::Failed => "failed",
            Phase::Closing => "closing",
        }
    }
}

/// Why a volume is not served, and when that is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The cause, and what to do.
    pub reason: String,
    /// How often it was tried.
    pub attempts: u64,
    /// The first time.
    pub since: Instant,
    /// The next.
    pub next: Instant,
}

/// A volume as it is now.
#[derive(Clone, Debug)]
pub struct VolumeState {
    /// Its name.
    pub name: String,
    /// What it is doing.
    pub phase: Phase,
    /// Why it is not served, if it cannot be opened.
    pub failure: Option<Failure>,
    /// The volume itself, while it is served or closing.
    pub volume: Option<Arc<Volume>>,
}

/// A volume, and its hold on its file.
pub(super) struct Claimed {
    pub(super) volume: Arc<Volume>,
    pub(super) claim: Option<Claim>,
}

enum State {
    /// Not opened yet, or closed for good.
    Opening,
    Serving(Arc<Volume>),
    Failed(Failure),
    Closing(Arc<Volume>),
}

struct Inner {
    /// `None`: to be removed.
    wanted: Option<VolumeConfig>,
    /// What is served.
    served: Option<VolumeConfig>,
    state: State,
    /// While it is served or closing: keeps other volumes off its file.
    claim: Option<Claim>,
    /// What it was served from last, and where that was: no new file takes its place.
    had: Option<(FileIdentity, Vec<StoreUri>)>,
    /// Cancels the attempts to open it that are being made.
    attempt: Arc<Stop>,
}

/// See the module.
pub(super) struct Slot {
    name: String,
    inner: Mutex<Inner>,
    /// One change of it at a time.
    pub(super) turn: async_lock::Mutex<()>,
}

impl Slot {
    pub(super) fn new(name: &str) -> Slot {
        Slot {
            name: name.to_owned(),
            inner: Mutex::new(Inner {
                wanted: None,
                served: None,
                state: State::Opening,
                claim: None,
                had: None,
                attempt: Arc::default(),
            }),
            turn: async_lock::Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn wanted(&self) -> Option<VolumeConfig> {
        self.lock().wanted.clone()
    }

    pub(super) fn want(&self, config: Option<VolumeConfig>) {
        let mut inner = self.lock();
        if config.is_none() {
            // Wanted again after that, it may be on another file.
            inner.had = None;
        }
        inner.wanted = config;
    }

    /// Which file `config` is to be opened on: where that is what the volume was served as, the same one.
    pub(super) fn expected(&self, config: &VolumeConfig) -> Expected {
        let inner = self.lock();
        let had = inner.had.as_ref().filter(|(_, stores)| stores.contains(&config.store));
        Expected::file(had.map(|(file, _)| file.clone()))
    }

    /// `config` leads to the file that is served, too.
    pub(super) fn expect_same(&self, config: &VolumeConfig) {
        if let Some((_, stores)) = &mut self.lock().had
            && !stores.contains(&config.store)
        {
            stores.push(config.store.clone());
        }
    }

    /// The file that is open.
    pub(super) fn open_file(&self) -> Option<FileIdentity> {
        self.lock().claim.as_ref().map(|claim| claim.file().clone())
    }

    /// Where `new` is wanted, `old` is from now on.
    pub(super) fn want_instead(&self, new: &VolumeConfig, old: VolumeConfig) {
        let mut inner = self.lock();
        if inner.wanted.as_ref() == Some(new) {
            inner.wanted = Some(old);
        }
    }

    /// Takes what changes while the volume is served from `new`.
    pub(super) fn follow(&self, new: &VolumeConfig) {
        let inner = &mut *self.lock();
        for wanted in [&mut inner.wanted, &mut inner.served].into_iter().flatten() {
            wanted.default = new.default;
            wanted.max_buffer_pages = new.max_buffer_pages;
            wanted.buffer_squeeze_duration_ms = new.buffer_squeeze_duration_ms;
        }
    }

    /// Cancels earlier attempts to open it; what cancels the one that begins.
    pub(super) fn begin_attempt(&self) -> Arc<Stop> {
        let mut inner = self.lock();
        inner.attempt.stop();
        inner.attempt = Arc::default();
        if !matches!(inner.state, State::Failed(_)) {
            inner.state = State::Opening;
        }
        inner.attempt.clone()
    }

    /// Cancels attempts to open it.
    pub(super) fn cancel_attempts(&self) {
        self.lock().attempt.stop();
    }

    /// An attempt has failed: how many have. `None` if it was cancelled.
    pub(super) fn fail(&self, current: &Arc<Stop>, reason: &str, pause: Duration) -> Option<u64> {
        let mut inner = self.lock();
        if current.is_stopped() {
            return None;
        }
        let now = ebb_mem::clock::now();
        let (attempts, since) = match &inner.state {
            State::Failed(failure) => (failure.attempts + 1, failure.since),
            _ => (1, now),
        };
        let reason = reason.to_owned();
        inner.state = State::Failed(Failure { reason, attempts, since, next: now + pause });
        Some(attempts)
    }

    /// Serves `volume` from now on, and calls `add`, unless the attempt was cancelled or all is stopping. How often
    /// opening it had failed.
    pub(super) fn serve(
        &self,
        current: &Stop,
        stopping: &Stop,
        (Claimed { volume, claim }, config): (Claimed, VolumeConfig),
        add: impl FnOnce(&Arc<Volume>),
    ) -> Option<u64> {
        let mut inner = self.lock();
        if current.is_stopped() || stopping.is_stopped() {
            return None;
        }
        let failed = match &inner.state {
            State::Failed(failure) => failure.attempts,
            _ => 0,
        };
        add(&volume);
        inner.had = claim.as_ref().map(|claim| (claim.file().clone(), vec![config.store.clone()]));
        inner.served = Some(config);
        inner.state = State::Serving(volume);
        inner.claim = claim;
        Some(failed)
    }

    /// The volume that is offered, and as what.
    pub(super) fn served(&self) -> Option<(Arc<Volume>, VolumeConfig)> {
        let inner = self.lock();
        match &inner.state {
            State::Serving(volume) => Some((volume.clone(), inner.served.clone()?)),
            _ => None,
        }
    }

    /// The volume that is served or closing.
    pub(super) fn open_volume(&self) -> Option<Arc<Volume>> {
        match &self.lock().state {
            State::Serving(volume) | State::Closing(volume) => Some(volume.clone()),
            _ => None,
        }
    }

    /// The volume is being withdrawn.
    pub(super) fn close(&self) {
        let mut inner = self.lock();
        if let State::Serving(volume) = &inner.state {
            inner.state = State::Closing(volume.clone());
        }
    }

    /// It was withdrawn.
    pub(super) fn closed(&self) {
        let mut inner = self.lock();
        inner.state = State::Opening;
        let claim = inner.claim.take();
        drop(inner);
        drop(claim);
    }

    /// Whether it is closing, or will be, to be gone or on another file or opened for reading only.
    pub(super) fn is_leaving(&self) -> bool {
        let inner = self.lock();
        match inner.state {
            State::Serving(_) => match (&inner.wanted, &inner.served) {
                (Some(wanted), Some(served)) => {
                    (&wanted.store, wanted.read_only) != (&served.store, served.read_only)
                }
                _ => true,
            },
            State::Closing(_) => true,
            State::Opening | State::Failed(_) => inner.wanted.is_none(),
        }
    }

    pub(super) fn state(&self) -> VolumeState {
        let inner = self.lock();
        let (phase, failure, volume) = match &inner.state {
            State::Opening => (Phase::Opening, None, None),
            State::Serving(volume) => (Phase::Serving, None, Some(volume.clone())),
            State::Failed(failure) => (Phase::Failed, Some(failure.clone()), None),
            State::Closing(volume) => (Phase::Closing, None, Some(volume.clone())),
        };
        VolumeState { name: self.name.clone(), phase, failure, volume }
    }
}
