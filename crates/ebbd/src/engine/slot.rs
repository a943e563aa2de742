//! The engine's record of one volume: its wanted configuration, and its state.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_access::AccessList;
use ebb_api::stat::{DefinedIn, VolumeCondition};
use ebb_cache::Delta;
use ebb_config::{Size, StoreUri, VolumeConfig};
use ebb_store::{ForeignFormat, MemoryStore};
use ebb_volume::{FailedKind, Stop, StoreHealth, Volume};

use super::claims::StoreClaim;
use crate::stores::{Expected, StoreTarget};

/// The state of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumePhase {
    /// Its store is being opened for the first time.
    Opening,
    /// It is served.
    Serving,
    /// Its store cannot be opened; that is tried again.
    Failed,
    /// It is being withdrawn: its requests complete, and its dirty data is written.
    Closing,
}

impl VolumePhase {
    /// Its condition, whatever the state of the store.
    pub const fn condition(self) -> VolumeCondition {
        match self {
            VolumePhase::Opening => VolumeCondition::Opening,
            VolumePhase::Serving => VolumeCondition::Serving,
            VolumePhase::Failed => VolumeCondition::Failed,
            VolumePhase::Closing => VolumeCondition::Closing,
        }
    }
}

/// How long opening a volume fails: perhaps until an operator corrects something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// It may succeed later.
    No,
    /// It fails until then.
    Yes,
    /// It fails until then if this folder exists; otherwise a file system may yet be mounted.
    IfFolder(PathBuf),
}

impl Lasting {
    /// Looks at the folder, if there is one.
    pub(super) fn is_certain(&self) -> bool {
        match self {
            Lasting::No => false,
            Lasting::Yes => true,
            Lasting::IfFolder(folder) => folder.is_dir(),
        }
    }
}

/// Why a volume cannot be opened, and when that is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFailure {
    /// The cause, and a remedy.
    pub reason: String,
    /// The number of attempts.
    pub attempts: u64,
    /// The time of the first attempt.
    pub since: Instant,
    /// The time of the next attempt; `None` if a reload makes it.
    pub next: Option<Instant>,
    /// How long it lasts.
    pub lasting: Lasting,
    /// Whether the volume was removed, and its file in the state directory was not.
    pub removed: bool,
}

/// The state of a volume, for statistics.
#[derive(Clone, Debug)]
pub struct VolumeState {
    /// Its name.
    pub name: String,
    /// Where it is defined; unset if it is nowhere now.
    pub origin: DefinedIn,
    /// Its phase.
    pub phase: VolumePhase,
    /// Why it cannot be opened, if that is so.
    pub failure: Option<OpenFailure>,
    /// What is waited for before it is served, if that is not its store; why its data cannot be
    /// written while it is closing.
    pub waits_for: Option<String>,
    /// The volume itself, while it is served or closing.
    pub volume: Option<Arc<Volume>>,
}

impl VolumeState {
    /// A volume whose file in the state directory was read at `since` and cannot be used, or one
    /// that was `removed` then without its file.
    pub(super) fn broken(
        name: &str,
        reason: &str,
        (since, removed): (Instant, bool),
    ) -> VolumeState {
        let reason = reason.to_owned();
        VolumeState {
            name: name.to_owned(),
            origin: DefinedIn::State,
            phase: VolumePhase::Failed,
            failure: Some(OpenFailure {
                reason,
                attempts: 1,
                since,
                next: None,
                lasting: Lasting::No,
                removed,
            }),
            waits_for: None,
            volume: None,
        }
    }
}

/// A volume, and its claim to its file.
pub(super) struct Claimed {
    pub(super) volume: Arc<Volume>,
    pub(super) claim: Option<StoreClaim>,
    /// Those to the files of the layers below.
    pub(super) base_claims: Vec<StoreClaim>,
    /// What its file looks like, if that is no raw disk.
    pub(super) format: Option<ForeignFormat>,
    /// Its store, if that is in memory.
    pub(super) memory: Option<MemoryStore>,
}

enum SlotState {
    /// Not opened yet, or closed.
    Opening,
    Serving(Arc<Volume>),
    Failed(OpenFailure),
    Closing(Arc<Volume>),
}

struct SlotInner {
    /// `None`: to be removed.
    wanted: Option<VolumeConfig>,
    /// The configuration it is served with.
    served: Option<VolumeConfig>,
    state: SlotState,
    /// Its claim to its file while it is served or closing.
    claim: Option<StoreClaim>,
    base_claims: Vec<StoreClaim>,
    format: Option<ForeignFormat>,
    /// Its store while it is served or closing, if that is in memory.
    memory: Option<MemoryStore>,
    /// The file it was served from last, and the stores that lead to it: a new file must not take its place.
    had: Option<(StoreTarget, Vec<StoreUri>)>,
    /// What is waited for before it is served, if that is not its store.
    waits_for: Option<String>,
    /// Why its data could not be written while it is withdrawn.
    trouble: Option<String>,
    /// The failures of its own store when that began.
    failures_before: u64,
    /// Cancels the current attempts to open it.
    attempt: Arc<Stop>,
    /// Why the last change was not made, if it was not.
    unchanged: Option<String>,
}

impl SlotInner {
    /// Why its data could not be written while it is withdrawn: a writeback cache writes again by
    /// itself, without an end of the flush.
    fn trouble(&self) -> Option<String> {
        let SlotState::Closing(volume) = &self.state else { return self.trouble.clone() };
        let of_store = || {
            let kinds = [FailedKind::Write, FailedKind::Flush];
            let error =
                |health: &StoreHealth| kinds.iter().find_map(|kind| health.recent_error(*kind));
            own_health(volume, error).flatten()
        };
        let has_failed = failures_of_store(volume) > self.failures_before;
        self.trouble.clone().or_else(|| of_store().filter(|_| has_failed))
    }
}

/// What `look` finds in the health of a volume's own store, the uppermost.
fn own_health<T>(volume: &Volume, look: impl Fn(&StoreHealth) -> T) -> Option<T> {
    let found = volume.each_health(|health| health.map(&look));
    found.into_iter().next().flatten()
}

fn failures_of_store(volume: &Volume) -> u64 {
    own_health(volume, |health| health.failures()[1..].iter().sum()).unwrap_or(0)
}

/// See the module.
pub(super) struct VolumeSlot {
    name: String,
    inner: Mutex<SlotInner>,
    /// Held during a change: one change of a volume at a time.
    pub(super) changing: tokio::sync::Mutex<()>,
}

impl VolumeSlot {
    pub(super) fn new(name: &str) -> VolumeSlot {
        VolumeSlot {
            name: name.to_owned(),
            inner: Mutex::new(SlotInner {
                wanted: None,
                served: None,
                state: SlotState::Opening,
                claim: None,
                base_claims: Vec::new(),
                format: None,
                memory: None,
                had: None,
                waits_for: None,
                trouble: None,
                failures_before: 0,
                attempt: Arc::default(),
                unchanged: None,
            }),
            changing: tokio::sync::Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, SlotInner> {
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
            // If it is wanted again later, it may be on another file.
            inner.had = None;
        }
        inner.unchanged = None;
        inner.wanted = config;
    }

    /// The file that `config` must open: the same as before, if the volume was served with that store.
    pub(super) fn expected(&self, config: &VolumeConfig) -> Expected {
        let inner = self.lock();
        let had = inner.had.as_ref().filter(|(_, stores)| stores.contains(&config.store));
        Expected::file(had.map(|(file, _)| file.clone()))
    }

    /// Notes that `config` leads to the served file, too.
    pub(super) fn expect_same(&self, config: &VolumeConfig) {
        if let Some((_, stores)) = &mut self.lock().had
            && !stores.contains(&config.store)
        {
            stores.push(config.store.clone());
        }
    }

    /// The open file.
    pub(super) fn open_file(&self) -> Option<StoreTarget> {
        self.lock().claim.as_ref().map(|claim| claim.file().clone())
    }

    /// The store of a volume that is served or closing, and its definition, if that is in memory
    /// and the volume is to keep it.
    pub(super) fn memory_store(&self) -> Option<(StoreUri, MemoryStore)> {
        let inner = self.lock();
        let (wanted, served) = (inner.wanted.as_ref()?, inner.served.as_ref()?);
        let memory = inner.memory.clone().filter(|_| wanted.store == served.store)?;
        Some((served.store.clone(), memory))
    }

    /// Second claims to the open files, for the time in which the volume is closed and opened
    /// again, perhaps as `heir`.
    pub(super) fn hold_files(&self, heir: &str) -> Vec<StoreClaim> {
        let inner = self.lock();
        let own = inner.claim.iter().map(|claim| claim.hold(&self.name, heir, false));
        let below = inner.base_claims.iter().map(|claim| claim.hold(&self.name, heir, true));
        own.chain(below).collect()
    }

    /// As [`VolumeSlot::hold_files`], of the volume's own file.
    pub(super) fn hold_own_file(&self, heir: &str) -> Option<StoreClaim> {
        self.lock().claim.as_ref().map(|claim| claim.hold(&self.name, heir, false))
    }

    /// Wants `old` from now on, if `new` is wanted, because of `reason`.
    pub(super) fn want_instead(&self, new: &VolumeConfig, old: VolumeConfig, reason: &str) {
        let mut inner = self.lock();
        if inner.wanted.as_ref() == Some(new) {
            inner.wanted = Some(old);
            inner.unchanged = Some(reason.to_owned());
        }
    }

    /// Forgets the failure of the last change if the volume has the configuration `new`: the
    /// mistake was corrected.
    pub(super) fn settle(&self, new: &VolumeConfig) {
        let mut inner = self.lock();
        if inner.wanted.as_ref() == Some(new) {
            inner.unchanged = None;
        }
    }

    /// Why the last change was not made, if it was not.
    pub(super) fn unchanged(&self) -> Option<String> {
        self.lock().unchanged.clone()
    }

    /// Notes the size that the volume was resized to.
    pub(super) fn follow_size(&self, size: Size) {
        let inner = &mut *self.lock();
        for config in [&mut inner.wanted, &mut inner.served].into_iter().flatten() {
            config.set_size(size);
        }
    }

    /// Changes a definition that the served volume follows already.
    pub(super) fn redefine(&self, change: impl Fn(&VolumeConfig) -> VolumeConfig) {
        let inner = &mut *self.lock();
        for config in [&mut inner.wanted, &mut inner.served].into_iter().flatten() {
            *config = change(config);
        }
    }

    /// Takes over from `new` the settings that can change while the volume is served.
    pub(super) fn follow(&self, new: &VolumeConfig) {
        let inner = &mut *self.lock();
        for wanted in [&mut inner.wanted, &mut inner.served].into_iter().flatten() {
            wanted.default = new.default;
            wanted.vhost_user.clone_from(&new.vhost_user);
            wanted.allow.clone_from(&new.allow);
            wanted.max_buffer_pages = new.max_buffer_pages;
            wanted.buffer_squeeze_duration_ms = new.buffer_squeeze_duration_ms;
            wanted.limits = new.limits;
            wanted.limit_group = new.limit_group.clone();
        }
    }

    /// Notes the clients that may open it.
    pub(super) fn follow_allow(&self, allow: Option<&AccessList>) {
        let inner = &mut *self.lock();
        for config in [&mut inner.wanted, &mut inner.served].into_iter().flatten() {
            config.allow = allow.cloned();
        }
    }

    /// Notes what is waited for before it is served; `None`: its store.
    pub(super) fn wait_for(&self, what: Option<String>) {
        self.lock().waits_for = what;
    }

    /// What is waited for before it is served, if that is not its store.
    pub(super) fn waits_for(&self) -> Option<String> {
        self.lock().waits_for.clone()
    }

    /// Notes why its data could not be written while it is withdrawn.
    pub(super) fn note_trouble(&self, why: String) {
        self.lock().trouble = Some(why);
    }

    /// Why its data could not be written while it is withdrawn.
    pub(super) fn trouble(&self) -> Option<String> {
        self.lock().trouble()
    }

    /// Cancels earlier attempts to open it, and returns what cancels the one that begins.
    pub(super) fn begin_attempt(&self) -> Arc<Stop> {
        let mut inner = self.lock();
        inner.attempt.stop();
        inner.attempt = Arc::default();
        match &mut inner.state {
            SlotState::Failed(failure) => failure.next = Some(ebb_mem::clock::now()),
            state => *state = SlotState::Opening,
        }
        inner.attempt.clone()
    }

    /// Cancels attempts to open it.
    pub(super) fn cancel_attempts(&self) {
        self.lock().attempt.stop();
    }

    /// As [`VolumeSlot::cancel_attempts`], unless the volume is open.
    pub(super) fn cancel_opening(&self) {
        let inner = self.lock();
        if matches!(inner.state, SlotState::Opening | SlotState::Failed(_)) {
            inner.attempt.stop();
        }
    }

    /// Records a failed attempt, and returns the number of failed attempts; `None` if it was cancelled.
    pub(super) fn fail(
        &self,
        current: &Arc<Stop>,
        (reason, lasting): (&str, Lasting),
        pause: Duration,
    ) -> Option<u64> {
        let mut inner = self.lock();
        if current.is_stopped() {
            return None;
        }
        let now = ebb_mem::clock::now();
        let (attempts, since) = match &inner.state {
            SlotState::Failed(failure) => (failure.attempts + 1, failure.since),
            _ => (1, now),
        };
        let reason = reason.to_owned();
        let next = Some(now + pause);
        let removed = false;
        inner.state =
            SlotState::Failed(OpenFailure { reason, attempts, since, next, lasting, removed });
        Some(attempts)
    }

    /// Serves `volume` from now on, and calls `add`, unless the attempt was cancelled or the engine stops. Returns the
    /// number of failed attempts before.
    pub(super) fn serve(
        &self,
        current: &Stop,
        stopping: &Stop,
        (Claimed { volume, claim, base_claims, format, memory }, config): (Claimed, VolumeConfig),
        add: impl FnOnce(&Arc<Volume>),
    ) -> Option<u64> {
        let mut inner = self.lock();
        if current.is_stopped() || stopping.is_stopped() {
            return None;
        }
        let failed = match &inner.state {
            SlotState::Failed(failure) => failure.attempts,
            _ => 0,
        };
        add(&volume);
        inner.had = claim.as_ref().map(|claim| (claim.file().clone(), vec![config.store.clone()]));
        inner.served = Some(config);
        inner.waits_for = None;
        inner.state = SlotState::Serving(volume);
        inner.claim = claim;
        inner.base_claims = base_claims;
        inner.format = format;
        inner.memory = memory;
        Some(failed)
    }

    /// The served volume, and its configuration.
    pub(super) fn served(&self) -> Option<(Arc<Volume>, VolumeConfig)> {
        let inner = self.lock();
        match &inner.state {
            SlotState::Serving(volume) => Some((volume.clone(), inner.served.clone()?)),
            _ => None,
        }
    }

    /// The volume that is served or closing.
    pub(super) fn open_volume(&self) -> Option<Arc<Volume>> {
        match &self.lock().state {
            SlotState::Serving(volume) | SlotState::Closing(volume) => Some(volume.clone()),
            _ => None,
        }
    }

    /// Marks the volume as being withdrawn.
    pub(super) fn close(&self) {
        let mut inner = self.lock();
        inner.trouble = None;
        if let SlotState::Serving(volume) = &inner.state {
            let volume = volume.clone();
            inner.failures_before = failures_of_store(&volume);
            inner.state = SlotState::Closing(volume);
        }
    }

    /// Notes that the volume writes to another file at the same path; the one of before, which
    /// holds `frozen`, is a layer below.
    pub(super) fn replace_file(&self, claim: Option<StoreClaim>, frozen: &Arc<Delta>) {
        let mut inner = self.lock();
        if let (Some((file, _)), Some(claim)) = (&mut inner.had, &claim) {
            file.clone_from(claim.file());
        }
        if let Some(before) = std::mem::replace(&mut inner.claim, claim) {
            before.freeze_when_stable(frozen);
            inner.base_claims.push(before);
        }
    }

    /// Notes a further layer below the volume.
    pub(super) fn add_base(&self, claim: StoreClaim) {
        self.lock().base_claims.push(claim);
    }

    /// Releases the claims to layers that are not below the volume any more.
    pub(super) fn release_bases(&self, is_gone: impl Fn(&StoreTarget) -> bool) {
        let mut gone = Vec::new();
        {
            let mut inner = self.lock();
            gone.extend(inner.base_claims.extract_if(.., |claim| is_gone(claim.file())));
        }
        // A volume that waits for the file is told without the lock.
        drop(gone);
    }

    /// What its file looks like, if it is served as a raw disk and is none.
    pub(super) fn foreign_format(&self) -> Option<ForeignFormat> {
        let inner = self.lock();
        inner.format.filter(|_| matches!(inner.state, SlotState::Serving(_)))
    }

    /// Notes that another file may be at its path.
    pub(super) fn forget_file(&self) {
        self.lock().had = None;
    }

    /// Marks the volume as withdrawn, and returns its claim.
    pub(super) fn closed(&self) -> Option<StoreClaim> {
        let mut inner = self.lock();
        inner.state = SlotState::Opening;
        inner.memory = None;
        inner.base_claims.clear();
        inner.claim.take()
    }

    /// Whether it is closing, or will be: to be removed, to change its file, or to become read-only.
    pub(super) fn is_leaving(&self) -> bool {
        let inner = self.lock();
        match inner.state {
            SlotState::Serving(_) => match (&inner.wanted, &inner.served) {
                (Some(wanted), Some(served)) => {
                    (&wanted.store, wanted.read_only) != (&served.store, served.read_only)
                }
                _ => true,
            },
            SlotState::Closing(_) => true,
            SlotState::Opening | SlotState::Failed(_) => inner.wanted.is_none(),
        }
    }

    /// Returns true if it could not be opened, and no attempt is under way.
    pub(super) fn waits_for_attempt(&self) -> bool {
        let (inner, now) = (self.lock(), ebb_mem::clock::now());
        matches!(&inner.state, SlotState::Failed(failure) if failure.next.is_some_and(|next| next > now))
            && inner.wanted.is_some()
    }

    pub(super) fn state(&self) -> VolumeState {
        let inner = self.lock();
        let (phase, failure, volume) = match &inner.state {
            SlotState::Opening => (VolumePhase::Opening, None, None),
            SlotState::Serving(volume) => (VolumePhase::Serving, None, Some(volume.clone())),
            SlotState::Failed(failure) => (VolumePhase::Failed, Some(failure.clone()), None),
            SlotState::Closing(volume) => (VolumePhase::Closing, None, Some(volume.clone())),
        };
        let waits_for = match phase {
            VolumePhase::Opening => inner.waits_for.clone(),
            VolumePhase::Closing => inner.trouble(),
            VolumePhase::Serving | VolumePhase::Failed => None,
        };
        VolumeState {
            name: self.name.clone(),
            origin: DefinedIn::Unset,
            phase,
            failure,
            waits_for,
            volume,
        }
    }
}
