//! Reloading: volumes are added, removed and changed, each independently of the others.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ebb_api::stat::ProblemStat;
use ebb_config::params::Configured;
use ebb_config::{Config, VolumeConfig};
use ebb_io::Io;
use ebb_volume::{ErrorKind, Volume};
use event_listener::Event;
use futures_lite::future::{or, zip};

use super::flatten::is_base_left_out;
use super::keys::is_other_key;
use super::overlay::{is_same_delta, size_of_delta_note};
use super::slot::{VolumePhase, VolumeSlot, VolumeState};
use super::stop::{
    StableFailure, Unflushed, UnstablePart, full_text, log_retry, unstable, unwritten, why_unstable,
};
use super::{Countdown, Engine, lock, memory_stores};
use crate::stores::{Expected, StoreError};
use crate::vhost::FailedSocket;

/// The first and the longest pause before writing back a withdrawn volume is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MOST: Duration = Duration::from_secs(30);

/// How long a reload waits for attempts to open volumes that failed before.
const TRIED_WITHIN: Duration = Duration::from_secs(1);

/// Called when the time to withdraw a volume has passed: its requests are given up if no data can be lost by that.
pub(super) fn give_up(slot: &VolumeSlot, volume: &Volume) {
    let (name, unwritten_bytes) = (volume.name().to_string(), unwritten(volume));
    let (unstable_bytes, in_flight) = (unstable(volume), volume.in_flight());
    if volume.abandon() {
        tracing::warn!(
            volume = name,
            in_flight,
            "its store does not respond: unacknowledged requests are abandoned. A write that a server already has may \
             still reach the disk"
        );
        volume.abort();
        return;
    }
    let reason = slot.trouble();
    let what = match &reason {
        Some(_) => "its data cannot be written",
        None => "its store does not respond",
    };
    tracing::error!(
        volume = name,
        unwritten_bytes,
        unstable_bytes,
        in_flight,
        reason,
        "not withdrawn within --drain, because {what}: ebbd keeps trying, so that no data is lost"
    );
}

/// Counts the reloads that were requested. A later reload ends the waiting of an earlier one.
#[derive(Default)]
pub(super) struct Reloads {
    count: AtomicU64,
    more: Event,
}

impl Reloads {
    fn begin(&self) -> u64 {
        let number = self.count.fetch_add(1, Ordering::SeqCst) + 1;
        self.more.notify(usize::MAX);
        number
    }

    async fn later_than(&self, number: u64) {
        loop {
            let more = self.more.listen();
            if self.count.load(Ordering::SeqCst) > number {
                return;
            }
            more.await;
        }
    }
}

/// How a reload has ended.
#[derive(Clone, Debug, Default)]
pub struct EndedReload {
    /// The keys that take effect at the next start.
    pub restart: Vec<&'static str>,
    /// A later reload has begun meanwhile, and goes on with the changes.
    pub is_superseded: bool,
}

/// The engine stops; the stop takes over unfinished changes.
#[derive(Debug)]
pub(super) struct Stopped;

impl Engine {
    /// The volumes whose stores cannot be opened or are not open yet, each with the reason. They
    /// are tried again. Volumes that other operations open are left out.
    pub(crate) fn not_served(&self) -> Vec<String> {
        let wanted = self.volumes_wanted();
        let is_reloaded = |state: &VolumeState| {
            wanted.contains_key(&state.name) && !lock(&self.definitions).is_reserved(&state.name)
        };
        let lines = self.states().into_iter().filter_map(|state| {
            let reason = match state.phase {
                VolumePhase::Serving => return None,
                VolumePhase::Failed => state.failure?.reason,
                _ if !is_reloaded(&state) => return None,
                phase => state.waits_for.unwrap_or_else(|| match phase {
                    VolumePhase::Closing => "it is still closing".to_owned(),
                    _ => "it is still opening, and its store has not replied yet".to_owned(),
                }),
            };
            Some(format!("volume {}: {reason}", state.name))
        });
        lines.collect()
    }

    /// The volumes whose vhost-user sockets cannot be opened, each with the reason. They are tried
    /// again, and served to others meanwhile.
    pub(crate) fn without_socket(&self) -> Vec<String> {
        let sockets = self.failed_sockets().into_iter();
        let text = |failed: FailedSocket| {
            format!("volume {}: {}: {}", failed.volume, ProblemStat::SOCKET, failed.reason)
        };
        sockets.map(text).collect()
    }

    /// The overlays whose `size` is not in force, each with the remedy.
    pub(crate) fn other_sizes(&self) -> Vec<String> {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let served = slots.iter().filter_map(|slot| slot.served());
        served.filter_map(|(volume, config)| size_of_delta_note(&volume, &config)).collect()
    }

    /// The volumes that the last reload could not change, each with the reason: they are served as before.
    pub(crate) fn unchanged(&self) -> Vec<String> {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let unchanged = slots.iter().filter_map(|slot| {
            Some(format!("volume {}: not changed: {}", slot.name(), slot.unchanged()?))
        });
        let broken = lock(&self.definitions).served_as_before().into_iter();
        let broken = broken.map(|(name, why)| format!("volume {name}: served as before: {why}"));
        let definitions = lock(&self.definitions);
        let groups = definitions.config.iter().flat_map(|config| config.broken_groups.values());
        unchanged.chain(broken).chain(groups.cloned()).collect()
    }

    /// Applies what can change of `new` while the daemon runs. Returns when all volumes have their new configuration,
    /// at the latest after the time that withdrawing may take, or when the engine stops or reloads again: the remaining
    /// changes continue in the background.
    pub async fn reload(self: &Arc<Self>, io: &Io, mut new: Config) -> EndedReload {
        let number = self.reloads.begin();
        let Ok(_alone) = self.unless_stopped(self.reloading.lock()).await else {
            return EndedReload::default();
        };
        // Before the names mean other volumes.
        let pinning = Box::pin(self.pin_for_reload(io, &mut new));
        let Ok(not_pinned) = self.unless_stopped(pinning).await else {
            return EndedReload::default();
        };
        let (done, tried) = (Rc::new(Countdown::default()), Rc::new(Countdown::default()));
        let Some(restart) = self.begin_changes(io, (new, &not_pinned), (&done, &tried)) else {
            return EndedReload::default();
        };
        let limit = async {
            io.sleep(self.drain).await;
            let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
            for slot in slots {
                let state = slot.state();
                if let (VolumePhase::Closing, Some(volume)) = (state.phase, state.volume) {
                    give_up(&slot, &volume);
                }
            }
        };
        let tried = or(tried.over(), io.sleep(TRIED_WITHIN));
        let settled = async {
            zip(done.over(), tried).await;
        };
        let ended = async {
            or(settled, or(limit, self.stopping.wait())).await;
            false
        };
        let superseded = async {
            self.reloads.later_than(number).await;
            true
        };
        let is_superseded = or(ended, superseded).await;
        self.open_lines.sum_up();
        self.bdis.settle();
        self.update_default_export_and_shares();
        self.sync_sockets().await;
        if let Some(config) = &lock(&self.definitions).config {
            crate::ceiling::report(config, self.cache.memory(), &mut lock(&self.findings));
        }
        EndedReload { restart, is_superseded }
    }

    /// Begins to put a configuration in force, and returns the keys that take effect at the next
    /// start. Volumes whose snapshots have lists that are not kept stay as they are; `not_pinned`
    /// says why. `done` counts down the changes, and `tried` attempts to open failed volumes.
    fn begin_changes(
        self: &Arc<Self>,
        io: &Io,
        (new, not_pinned): (Config, &BTreeMap<String, String>),
        (done, tried): (&Rc<Countdown>, &Rc<Countdown>),
    ) -> Option<Vec<&'static str>> {
        let mut definitions = lock(&self.definitions);
        let mut old = definitions.config.clone()?;
        let mut new = definitions.adopt(new);
        for name in old.broken.keys() {
            if self.volumes.get(name).is_none() && !new.volumes.contains_key(name) {
                self.volumes.remove(name);
            }
        }
        // The difference is that to the volumes as they are, also if an earlier change failed.
        old.volumes = self.volumes_wanted();
        let held_back = self.hold_back(&old, &mut new, not_pinned);
        definitions.left_out = super::access::left_out(&held_back);
        let changes = old.reload_diff(&new);
        for key in &changes.needs_restart {
            tracing::warn!(key, "changed in the configuration: takes effect at the next start");
        }
        for change in self.parameters.reload(&Configured::from(&new)) {
            let definition = change.key.definition();
            let (from, to) = (definition.text(change.from), definition.text(change.to));
            let (volume, bdi) = (change.volume, change.bdi);
            tracing::info!(parameter = %change.key, volume, bdi, from, to, "changed");
        }
        self.allow_as_in(&new);
        let all = changes.volumes_removed.iter().chain(&changes.volumes_changed);
        let mut names: BTreeSet<_> = all.chain(&changes.volumes_added).cloned().collect();
        // Changes that an earlier reload began are waited for, and failed openings tried at once.
        names.extend(self.being_changed());
        for name in &names {
            done.add();
            if !definitions.is_reserved(name) {
                self.give_up_opening(name, new.volumes.get(name));
            }
            self.begin_change(io, name, new.volumes.get(name), done);
        }
        self.try_failed(io, &names, tried);
        self.refuse_broken(&new);
        definitions.put_in_force(self.kept(old, new));
        self.note_held_back(held_back);
        Some(changes.needs_restart)
    }

    pub(super) async fn unless_stopped<T>(
        &self,
        step: impl Future<Output = T>,
    ) -> Result<T, Stopped> {
        let stopped = async {
            self.stopping.wait().await;
            Err(Stopped)
        };
        or(async { Ok(step.await) }, stopped).await
    }

    fn being_changed(&self) -> Vec<String> {
        let slots = lock(&self.slots);
        let busy = slots.iter().filter(|(_, slot)| slot.changing.try_lock().is_err());
        busy.map(|(name, _)| name.clone()).collect()
    }

    /// Begins to open the volumes that failed and wait for the next attempt, other than those that
    /// are being changed. As their stores may not reply, no attempt keeps a change waiting.
    fn try_failed(self: &Arc<Self>, io: &Io, changed: &BTreeSet<String>, tried: &Rc<Countdown>) {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        for slot in slots.iter().filter(|slot| !changed.contains(slot.name())) {
            // Not while an operation has it.
            let Ok(_alone) = slot.changing.try_lock() else { continue };
            if slot.waits_for_attempt() {
                tried.add();
                let tried = tried.clone();
                self.attempt(io, slot, move || tried.count());
            }
        }
    }

    /// Ends the attempt of an earlier change to open a volume, unless `new` still wants it: a store
    /// that does not reply would keep the next change waiting.
    fn give_up_opening(&self, name: &str, new: Option<&VolumeConfig>) {
        let slot = lock(&self.slots).get(name).cloned();
        if let Some(slot) = slot.filter(|slot| slot.wanted().as_ref() != new) {
            slot.cancel_opening();
        }
    }

    pub(super) fn volumes_wanted(&self) -> std::collections::BTreeMap<String, VolumeConfig> {
        let slots = lock(&self.slots);
        slots.iter().filter_map(|(name, slot)| Some((name.clone(), slot.wanted()?))).collect()
    }

    /// The configuration in force: `new`, with the keys of `old` that need a restart.
    fn kept(&self, old: Config, new: Config) -> Config {
        for (name, slot) in &*lock(&self.slots) {
            if let Some(volume) = new.volumes.get(name) {
                slot.follow(volume);
                slot.settle(volume);
            }
        }
        let nbd = ebb_config::NbdConfig {
            tls: old.nbd.tls,
            tls_certificates: old.nbd.tls_certificates,
            tls_psk: old.nbd.tls_psk,
            tls_verify_peer: old.nbd.tls_verify_peer,
            ..new.nbd
        };
        let (listen, control, state) = (old.listen, old.control, old.state);
        let log_format = old.log_format;
        let (web, web_names) = (old.web, old.web_names);
        let (web_tokens, web_tls_certificates) = (old.web_tokens, old.web_tls_certificates);
        let (workers, idle_memory, xen) = (old.workers, old.idle_memory, old.xen);
        let sandbox = old.sandbox;
        Config {
            listen,
            log_format,
            control,
            state,
            web,
            web_names,
            web_tokens,
            web_tls_certificates,
            workers,
            idle_memory,
            sandbox,
            xen,
            nbd,
            ..new
        }
    }

    /// Begins to bring a volume to its wanted configuration; `done` counts down when that has succeeded or failed.
    fn begin_change(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        new: Option<&VolumeConfig>,
        done: &Rc<Countdown>,
    ) {
        let slot = {
            let mut slots = lock(&self.slots);
            let slot = slots.entry(name.to_owned());
            let slot = slot.or_insert_with(|| Arc::new(VolumeSlot::new(name)));
            // Under the lock, so that a change that ends does not remove a slot that is wanted again.
            slot.want(new.cloned());
            if let Some(new) = new {
                self.allow_as_wanted(Some(&**slot), name, new);
            }
            slot.clone()
        };
        let (engine, on, done) = (self.clone(), io.clone(), done.clone());
        let task = async move {
            // If the engine stops, the stop takes over.
            let _ = engine.change(&on, &slot).await;
            done.count();
        };
        // It continues after the reload has stopped waiting.
        io.spawn(task).detach();
    }

    /// Brings a volume to its wanted configuration, one change at a time; the latest wanted configuration applies.
    /// Returns what a volume that was withdrawn has lost.
    pub(super) async fn change(
        self: &Arc<Self>,
        io: &Io,
        slot: &Arc<VolumeSlot>,
    ) -> Result<Option<Unflushed>, Stopped> {
        let mut left = None;
        let _changing = self.unless_stopped(slot.changing.lock()).await?;
        if !self.is_current(slot) {
            // An earlier change removed the volume. If it was added again, it has another slot by now.
            return Ok(None);
        }
        match (slot.served(), slot.wanted()) {
            (Some((volume, old)), Some(new)) if is_base_left_out(&volume, &old, &new) => {
                slot.redefine(|_| new.clone());
                return Ok(None);
            }
            (Some((volume, old)), Some(new)) if old != new && is_same_delta(&old, &new) => {
                if let Some(note) = size_of_delta_note(&volume, &new) {
                    tracing::warn!(volume = slot.name(), "{note}");
                }
                slot.redefine(|_| new.clone());
                return Ok(None);
            }
            (Some((volume, old)), Some(new)) if is_other_key(&old, &new) => {
                return self.follow_key(slot, &volume, old, new).await.map(|()| None);
            }
            (Some((volume, old)), Some(new)) if old != new => {
                return self.replace(io, slot, volume, old, new).await.map(|()| None);
            }
            (Some(_), Some(_)) => return Ok(None),
            (Some((volume, _)), None) => {
                left = self.withdraw(io, slot, &volume).await?;
                tracing::info!(volume = slot.name(), "withdrawn");
            }
            (None, _) => slot.cancel_attempts(),
        }
        if slot.wanted().is_some() {
            return self.bring_up(io, slot).await.map(|()| left);
        }
        self.volumes.remove(slot.name());
        let followers = {
            let mut slots = lock(&self.slots);
            // If it is wanted again by now, the change that wants it waits for the lock.
            if slot.wanted().is_none() {
                slots.remove(slot.name());
                self.volumes.forget_allowed(slot.name())
            } else {
                Vec::new()
            }
        };
        Box::pin(self.keep_followers(io, followers)).await;
        Ok(left)
    }

    /// Whether `slot` has not been removed.
    fn is_current(&self, slot: &Arc<VolumeSlot>) -> bool {
        let slots = lock(&self.slots);
        slots.get(slot.name()).is_some_and(|current| Arc::ptr_eq(current, slot))
    }

    /// Begins to open a volume, and waits for the first attempt.
    pub(super) async fn bring_up(
        self: &Arc<Self>,
        io: &Io,
        slot: &Arc<VolumeSlot>,
    ) -> Result<(), Stopped> {
        let tried = Rc::new(Countdown::new(1));
        let first = tried.clone();
        self.attempt(io, slot, move || first.count());
        self.unless_stopped(tried.over()).await
    }

    /// Replaces a served volume: the new store is opened before the volume is withdrawn, or checked if it is the same
    /// file or export with other options.
    async fn replace(
        self: &Arc<Self>,
        io: &Io,
        slot: &Arc<VolumeSlot>,
        volume: Arc<Volume>,
        old: VolumeConfig,
        new: VolumeConfig,
    ) -> Result<(), Stopped> {
        let open = slot.open_file();
        let same = self.unless_stopped(self.opener.compare(&old, open.clone(), &new)).await?;
        let had = Expected::file(open);
        // The file that is opened after the volume was withdrawn.
        let mut expected = had.clone();
        let opened = match same {
            Ok(true) => {
                let fits = Box::pin(self.must_fit_base(io, &volume, (&old, &new)));
                self.unless_stopped(fits).await?.map(|()| {
                    slot.expect_same(&new);
                    None
                })
            }
            Ok(false) => {
                let opening = self.open_now(io, slot.name(), &new, Expected::Any);
                match self.unless_stopped(opening).await? {
                    // Volumes that exchange files would wait for each other: checking the file suffices here.
                    Err(StoreError::SameFile { other, file, .. })
                        if self.will_be_released(&other, &file) =>
                    {
                        expected = Expected::file(Some(file));
                        let check = self.opener.compare(&new, None, &new);
                        self.unless_stopped(check).await?.map(|_| None)
                    }
                    opened => opened.map(Some),
                }
            }
            Err(error) => Err(error),
        };
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let reason = error.full_text();
                tracing::error!(
                    volume = slot.name(),
                    "not changed, and served as before, until the next reload: {reason}"
                );
                slot.want_instead(&new, old, &reason);
                return Ok(());
            }
        };
        self.withdraw(io, slot, &volume).await?;
        // This releases the lock on its file.
        drop(volume);
        tracing::info!(volume = slot.name(), "withdrawn");
        memory_stores::warn_if_lost(slot.name(), &old, &new);
        if let Some(opened) = opened {
            let current = slot.begin_attempt();
            self.offer(slot, &current, opened, new);
            tracing::info!(volume = slot.name(), "served");
            return Ok(());
        }
        match self.unless_stopped(self.open(io, slot.name(), &new, expected)).await? {
            Ok(opened) => {
                let current = slot.begin_attempt();
                self.offer(slot, &current, opened, new);
                tracing::info!(volume = slot.name(), "served");
                Ok(())
            }
            Err(error) => self.put_back(io, slot, (old, had), &new, &error).await,
        }
    }

    /// Serves a volume with its old configuration again, because it cannot be opened with the new one.
    async fn put_back(
        self: &Arc<Self>,
        io: &Io,
        slot: &Arc<VolumeSlot>,
        (old, had): (VolumeConfig, Expected),
        new: &VolumeConfig,
        error: &StoreError,
    ) -> Result<(), Stopped> {
        let reason = error.full_text();
        // With the size that it has now, because it was served before.
        let opening = self.open(io, slot.name(), &old, had.as_it_was());
        if let Ok(opened) = self.unless_stopped(opening).await? {
            tracing::error!(
                volume = slot.name(),
                "not changed, and served again as before, until the next reload: {reason}"
            );
            slot.want_instead(new, old.clone(), &reason);
            // The list of the new definition is in force already.
            self.volumes.restrict(slot.name(), old.allow.clone());
            let current = slot.begin_attempt();
            self.offer(slot, &current, opened, old);
            return Ok(());
        }
        // Clients receive the reason, and opening is tried again.
        self.bring_up(io, slot).await
    }

    /// Waits until the requests of a volume's clients have completed, and writes its dirty data to the store, for as
    /// long as that takes. Returns the data, or the name of a file, that could not be made stable.
    pub(super) async fn withdraw(
        &self,
        io: &Io,
        slot: &VolumeSlot,
        volume: &Arc<Volume>,
    ) -> Result<Option<Unflushed>, Stopped> {
        slot.close();
        self.volumes.remove(slot.name());
        let why = slot.waits_for().unwrap_or_else(|| "being withdrawn".to_owned());
        self.volumes.refuse(slot.name(), &format!("the volume is {why}"));
        let guests = self.guests.withdraw(volume);
        let withdrawn = async {
            self.server.withdraw(io, slot.name()).await;
            guests.drained().await;
        };
        self.unless_stopped(withdrawn).await?;
        let mut unfinished: Option<Unflushed> = None;
        let mut has_lost = false;
        let mut pause = RETRY_FIRST;
        loop {
            // In a task of its own, so that a stop, which continues with this volume, does not cancel the flush: a
            // cancelled flush counts as failed.
            let (sender, closed) = tokio::sync::oneshot::channel();
            let (closing, on) = (volume.clone(), io.clone());
            let close = async move {
                let outcome = closing.close(&on).await;
                let gives_up = outcome.is_err() && !closing.loses_by_kill();
                let only_name = gives_up && closing.lacks_only_names(&on).await;
                drop(closing);
                let _ = sender.send((outcome, only_name));
            };
            io.spawn(close).detach();
            let (error, only_name) = match self.unless_stopped(closed).await? {
                Ok((Err(error), only_name)) => (error, only_name),
                Ok((Ok(()), _)) => {
                    guests.note_stable();
                    drop(slot.closed());
                    return Ok(None);
                }
                // The sender is dropped only when the worker ends.
                Err(_) => break,
            };
            // No data can be lost: the store has all that was acknowledged, and only fails now.
            if StableFailure::is_it(volume) {
                let failure = StableFailure::of(volume);
                failure.log(&error);
                // One that was given up fails as closed, whatever its store would do.
                if !failure.knows_earlier && error.kind != ErrorKind::Closing {
                    let part = UnstablePart::EarlierData;
                    unfinished = Some(Unflushed::of(volume, part, why_unstable(volume, &error)));
                }
                break;
            }
            // A store that is offline stays so.
            let for_good = volume.is_lost() || volume.is_offline();
            // Without a cache that writes back, the block map of an overlay may be in memory only.
            if !volume.loses_by_kill() || for_good {
                let part = if only_name { UnstablePart::FileName } else { UnstablePart::Data };
                has_lost = !only_name && !volume.leaves_no_loss(&error);
                let left = Unflushed::of(volume, part, why_unstable(volume, &error));
                let (name, error) = (slot.name(), &left.why);
                if only_name {
                    tracing::error!(
                        volume = name,
                        error,
                        "all data is flushed, but the name of its file could not be made stable"
                    );
                } else {
                    tracing::error!(volume = name, error, "not everything could be made stable");
                    // The stop lists it, unless it is served again until then.
                    lock(&self.lost).insert(name.to_owned(), left.clone());
                }
                unfinished = Some(left);
                break;
            }
            if pause == RETRY_FIRST {
                log_retry(volume, &error);
            }
            slot.note_trouble(full_text(&error));
            self.unless_stopped(io.sleep(pause)).await?;
            pause = (pause * 2).min(RETRY_MOST);
        }
        if has_lost || (volume.is_lost() && !StableFailure::is_it(volume)) {
            guests.note_lost();
        } else if volume.is_lost() && !volume.has_flushed() {
            guests.note_inherited_lost();
        }
        let store = volume.give_up();
        if let Some(claim) = slot.closed() {
            claim.keep_until_dropped(store);
        }
        Ok(unfinished)
    }
}
