//! A reload: volumes come, go and change, side by side.

use std::collections::BTreeSet;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ebb_io::Io;
use ebb_volume::{ErrorKind, Mode, Volume};
use event_listener::Event;
use futures_lite::future::{or, poll_once};

use super::slot::{Phase, Slot};
use super::stop::{Unflushed, full_text, tell_retry, unwritten};
use super::{Countdown, Engine, lock};
use crate::config::{Config, VolumeConfig};
use crate::params::Configured;
use crate::stores::{Expected, StoreError};

/// How soon a volume that could not be written on its way out is tried again, and the longest pause.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MOST: Duration = Duration::from_secs(30);

/// The time to withdraw a volume is over: if nothing of it can be lost it is given up.
fn give_up(volume: &Volume) {
    let (name, unwritten_bytes) = (volume.name().to_string(), unwritten(volume));
    let under_way = volume.in_flight();
    if volume.is_stable() {
        tracing::warn!(
            volume = name,
            under_way,
            "its store does not answer: requests are abandoned"
        );
        volume.abort();
        return;
    }
    tracing::error!(
        volume = name,
        unwritten_bytes,
        under_way,
        "not withdrawn within --drain, for its store does not answer: it is waited for, \
         so that nothing is lost"
    );
}

/// How often a reload was asked for. A later one does not wait for what an earlier one waits for.
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

/// The daemon stops: what was begun is left to the stop.
struct Stopped;

impl Engine {
    /// Puts in force of `new` what can be changed while running. Returns when all volumes are as they should be, or
    /// at the latest after the time that withdrawing may take, or when the engine is stopped or told to reload again:
    /// what is not done by then goes on in the background.
    pub async fn reload(self: &Arc<Self>, io: &Io, new: Config) {
        let number = self.reloads.begin();
        let Ok(_alone) = self.unless_stopped(self.reloading.lock()).await else { return };
        let Some(mut old) = lock(&self.config).clone() else { return };
        // Where a change was not made, the volume as it is now counts.
        old.volumes = self.volumes_wanted();
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
        let all = changes.volumes_removed.iter().chain(&changes.volumes_changed);
        let mut names: BTreeSet<_> = all.chain(&changes.volumes_added).cloned().collect();
        // What an earlier reload began is waited for, too.
        names.extend(self.being_changed());
        let done = Rc::new(Countdown::new(names.len()));
        for name in names {
            self.begin_change(io, &name, new.volumes.get(&name), &done);
        }
        let limit = async {
            io.sleep(self.drain).await;
            for state in self.states() {
                if let (Phase::Closing, Some(volume)) = (state.phase, state.volume) {
                    give_up(&volume);
                }
            }
        };
        let cut_short = or(self.stopping.wait(), self.reloads.later_than(number));
        or(done.over(), or(limit, cut_short)).await;
        self.bdis.settle();
        crate::ceiling::apportion(&new, self.cache.memory());
        crate::ceiling::tell(&new, self.cache.memory(), &mut lock(&self.told));
        self.server.set_default(new.default_volume());
        self.keep(old, new);
    }

    async fn unless_stopped<T>(&self, step: impl Future<Output = T>) -> Result<T, Stopped> {
        let stopped = async {
            self.stopping.wait().await;
            Err(Stopped)
        };
        or(async { Ok(step.await) }, stopped).await
    }

    fn being_changed(&self) -> Vec<String> {
        let slots = lock(&self.slots);
        let busy = slots.iter().filter(|(_, slot)| slot.turn.try_lock().is_none());
        busy.map(|(name, _)| name.clone()).collect()
    }

    fn volumes_wanted(&self) -> std::collections::BTreeMap<String, VolumeConfig> {
        let slots = lock(&self.slots);
        slots.iter().filter_map(|(name, slot)| Some((name.clone(), slot.wanted()?))).collect()
    }

    /// Remembers what is in force now: of `old` what takes a restart, else `new`.
    fn keep(&self, old: Config, new: Config) {
        for (name, slot) in &*lock(&self.slots) {
            if let Some(volume) = new.volumes.get(name) {
                slot.follow(volume);
            }
        }
        let nbd = crate::config::Nbd {
            tls: old.nbd.tls,
            tls_certificates: old.nbd.tls_certificates,
            tls_psk: old.nbd.tls_psk,
            tls_verify_peer: old.nbd.tls_verify_peer,
            ..new.nbd
        };
        let (listen, control) = (old.listen, old.control);
        let (web, web_names) = (old.web, old.web_names);
        let (workers, idle_memory, xen) = (old.workers, old.idle_memory, old.xen);
        let kept =
            Config { listen, control, web, web_names, workers, idle_memory, xen, nbd, ..new };
        *lock(&self.config) = Some(kept);
    }

    /// Has a volume become what is wanted of it; `done` counts down when it has, or has not.
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
            slot.or_insert_with(|| Arc::new(Slot::new(name))).clone()
        };
        slot.want(new.cloned());
        let (engine, on, done) = (self.clone(), io.clone(), done.clone());
        let task = async move {
            // The rest is the stop's.
            let _ = engine.change(&on, &slot).await;
            done.count();
        };
        // It goes on when the reload has stopped waiting.
        io.spawn(task).detach();
    }

    /// One change of a volume at a time; the last wish counts.
    async fn change(self: &Arc<Self>, io: &Io, slot: &Arc<Slot>) -> Result<(), Stopped> {
        let _turn = self.unless_stopped(slot.turn.lock()).await?;
        match (slot.served(), slot.wanted()) {
            (Some((volume, old)), Some(new)) if old != new => {
                return self.replace(io, slot, volume, old, new).await;
            }
            (Some(_), Some(_)) => return Ok(()),
            (Some((volume, _)), None) => {
                self.retire(io, slot, &volume).await?;
                tracing::info!(volume = slot.name(), "withdrawn");
            }
            (None, _) => slot.cancel_attempts(),
        }
        if slot.wanted().is_some() {
            return self.bring_up(io, slot).await;
        }
        self.server.withdraw(io, slot.name()).await;
        let mut slots = lock(&self.slots);
        // It may be wanted again by now: then who wants it waits for its turn.
        if slot.wanted().is_none() {
            slots.remove(slot.name());
        }
        Ok(())
    }

    /// Opens a volume, and waits until that was tried once.
    async fn bring_up(self: &Arc<Self>, io: &Io, slot: &Arc<Slot>) -> Result<(), Stopped> {
        let tried = Rc::new(Countdown::new(1));
        let told = tried.clone();
        self.attempt(io, slot, move || told.count());
        self.unless_stopped(tried.over()).await
    }

    /// A served volume in another form: what takes its place is opened before it is withdrawn, or looked at, if
    /// that is the same file or export in another way.
    async fn replace(
        self: &Arc<Self>,
        io: &Io,
        slot: &Arc<Slot>,
        volume: Arc<Volume>,
        old: VolumeConfig,
        new: VolumeConfig,
    ) -> Result<(), Stopped> {
        let open = slot.open_file();
        let same = self.unless_stopped(self.opener.compare(&old, open.clone(), &new)).await?;
        let had = Expected::file(open);
        // What is opened anew once it was withdrawn.
        let mut expected = had.clone();
        let opened = match same {
            Ok(true) => {
                slot.expect_same(&new);
                Ok(None)
            }
            Ok(false) => {
                let opening = self.open_now(io, slot.name(), &new, Expected::Any);
                match self.unless_stopped(opening).await? {
                    // Volumes that exchange files would each wait for the other: a look at the file is enough here.
                    Err(StoreError::SameFile { other, file, .. }) if self.is_leaving(&other) => {
                        expected = Expected::file(Some(file));
                        let look = self.opener.compare(&new, None, &new);
                        self.unless_stopped(look).await?.map(|_| None)
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
                slot.want_instead(&new, old);
                return Ok(());
            }
        };
        self.retire(io, slot, &volume).await?;
        // Its file's lock goes with it.
        drop(volume);
        tracing::info!(volume = slot.name(), "withdrawn");
        if let Some(opened) = opened {
            let current = slot.begin_attempt();
            self.offer(slot, &current, opened, new);
            tracing::info!(volume = slot.name(), "offered");
            return Ok(());
        }
        match self.unless_stopped(self.open(io, slot.name(), &new, expected)).await? {
            Ok(opened) => {
                let current = slot.begin_attempt();
                self.offer(slot, &current, opened, new);
                tracing::info!(volume = slot.name(), "offered");
                Ok(())
            }
            Err(error) => self.put_back(io, slot, (old, had), &new, &error).await,
        }
    }

    /// Serves a volume as it was: as it should be it cannot be opened.
    async fn put_back(
        self: &Arc<Self>,
        io: &Io,
        slot: &Arc<Slot>,
        (old, had): (VolumeConfig, Expected),
        new: &VolumeConfig,
        error: &StoreError,
    ) -> Result<(), Stopped> {
        let reason = error.full_text();
        // Whatever its size by now: it was served.
        let opening = self.open(io, slot.name(), &old, had.as_it_was());
        if let Ok(opened) = self.unless_stopped(opening).await? {
            tracing::error!(
                volume = slot.name(),
                "not changed, and offered again as before, until the next reload: {reason}"
            );
            slot.want_instead(new, old.clone());
            let current = slot.begin_attempt();
            self.offer(slot, &current, opened, old);
            return Ok(());
        }
        // It is told why, and tried again.
        self.bring_up(io, slot).await
    }

    /// Sees the clients of a volume off, and writes what is in memory only to its store, for as long as that takes.
    async fn retire(&self, io: &Io, slot: &Slot, volume: &Arc<Volume>) -> Result<(), Stopped> {
        slot.close();
        // Guests first: who is found by name must be found.
        let guests = self.guests.withdraw(slot.name());
        let mut clients = pin!(self.server.withdraw(io, slot.name()));
        let over = poll_once(clients.as_mut()).await.is_some();
        self.server.refuse(slot.name(), "the volume is being withdrawn");
        let seen_off = async {
            if !over {
                clients.await;
            }
            guests.await;
        };
        self.unless_stopped(seen_off).await?;
        let mut pause = RETRY_FIRST;
        loop {
            // By itself: a flush that is cancelled counts as failed, and the stop goes on with this volume.
            let (sender, closed) = tokio::sync::oneshot::channel();
            let (closing, on) = (volume.clone(), io.clone());
            let close = async move {
                let outcome = closing.close(&on).await;
                drop(closing);
                let _ = sender.send(outcome);
            };
            io.spawn(close).detach();
            // A task that is gone ended with its worker.
            let Ok(Err(error)) = self.unless_stopped(closed).await? else { break };
            // Given up, with nothing that can be lost: its store fails whatever it is asked.
            if error.kind == ErrorKind::Closing && volume.is_stable() {
                break;
            }
            if volume.cache_mode() != Mode::Writeback || volume.is_lost() {
                let why = full_text(&error);
                let (name, bytes) = (slot.name(), unwritten(volume));
                tracing::error!(volume = name, error = why, "not everything could be made stable");
                // The stop lists it, unless it is served anew until then.
                let left = Unflushed { volume: name.to_owned(), bytes, why };
                lock(&self.lost).insert(name.to_owned(), left);
                break;
            }
            if pause == RETRY_FIRST {
                tell_retry(volume, &error);
            }
            self.unless_stopped(io.sleep(pause)).await?;
            pause = (pause * 2).min(RETRY_MOST);
        }
        slot.closed();
        Ok(())
    }
}
