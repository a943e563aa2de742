//! What is done about one device: what the state machine says ([`crate::xenbus_state`]), carried out.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_volume::Writer;

use super::{TOOLSTACK_KIND, XenstoreControl};
use crate::device::{Device, DeviceError, Doubt, Key, Offer, Serving, open_queue};
use crate::journal::note_size_at;
use crate::mailbox::EndOfRing;
use crate::nodes::{Frontend, optional, publish, show_state, transact};
use crate::platform::{StoreError, XenStore};
use crate::queue::Queue;
use crate::xenbus_state::{Phase, Seen, State};

/// Failures of a device that go to the log.
const FAILURES_LOGGED: u32 = 10;
/// How long a disk waits for another writer of its volume to end.
const WRITER_PATIENCE: Duration = Duration::from_secs(2);
/// Most characters of an error that are shown.
const SHOWN_MAX: usize = 512;
/// `info` bits.
const INFO_CDROM: u32 = 1;
const INFO_REMOVABLE: u32 = 2;
const INFO_READ_ONLY: u32 = 4;

impl XenstoreControl {
    pub(super) fn show(&mut self, key: &Key, state: State) -> Result<(), StoreError> {
        show_state(&mut self.store, &key.base(self.own), state.text())?;
        if state == State::Closed {
            self.set_phase(key, Phase::Closed);
        }
        Ok(())
    }

    /// What the backend's directory and the volume say.
    fn terms(&mut self, key: &Key) -> Result<Offer, DeviceError> {
        let base = key.base(self.own);
        let store = &mut self.store;
        let mut get = |name: &str| optional(store, 0, &format!("{base}/{name}"));
        let name = get("params")?.unwrap_or_default();
        let mode = get("mode")?.unwrap_or_default();
        let discard = get("discard-enable")?.is_none_or(|value| value != "0");
        let flush = get("flush-enable")?.is_none_or(|value| value != "0");
        let cdrom = get("device-type")?.is_some_and(|value| value == "cdrom");
        let removable = get("removable")?.is_some_and(|value| value == "1");
        let plain = name.strip_prefix("ebbd:").unwrap_or(&name);
        let found = (self.volumes)(plain);
        let offered = found.filter(|(volume, _)| !self.served.is_withdrawn(volume));
        let (volume, pool) = offered.ok_or_else(|| DeviceError::NoVolume(plain.to_owned()))?;
        let read_only = volume.read_only() || !mode.contains('w');
        let share = mode.contains('!');
        let discard = discard && !read_only && volume.capabilities().discard;
        let bits = [(cdrom, INFO_CDROM), (removable, INFO_REMOVABLE), (read_only, INFO_READ_ONLY)];
        let info = bits.iter().filter(|(on, _)| *on).map(|(_, bit)| bit).sum();
        let persistent = self.parameters.feature_persistent();
        Ok(Offer { volume, pool, read_only, share, discard, flush, info, persistent })
    }

    /// Takes the right to write to the volume, if the guest is to have it and has not yet.
    fn claim(&mut self, key: &Key, offer: &Offer) -> Result<(), DeviceError> {
        let held = |device: &Device| {
            device.lease.as_ref().is_some_and(|lease| offer.volume.is_leased(lease))
        };
        if offer.read_only || self.devices.get(key).is_some_and(held) {
            return Ok(());
        }
        let Key { guest, device, .. } = key;
        // A machine that moves within the host is two guests for a while. A guest that has the volume as another disk
        // already is a writer like any other.
        let twice =
            self.devices.iter().any(|(other, device)| other.guest == *guest && held(device));
        let machine = optional(&mut self.store, 0, &format!("/local/domain/{guest}/vm"))?;
        let group = machine.filter(|path| !twice && !path.is_empty()).map(Arc::from);
        let name = format!("Xen guest {guest} (disk {device})").into();
        let lease = offer.volume.claim_writer(Writer { name, group }, offer.share)?;
        if let Some(device) = self.devices.get_mut(key) {
            device.lease = Some(lease);
            device.waiting = None;
        }
        Ok(())
    }

    /// Whether a device may go on waiting for another writer to end.
    pub(super) fn may_wait(&mut self, key: &Key, now: Instant) -> bool {
        let Some(device) = self.devices.get_mut(key) else { return false };
        let since = *device.waiting.get_or_insert(now);
        let may = now < since + WRITER_PATIENCE;
        if !may {
            device.waiting = None;
        }
        may
    }

    pub(super) fn offer(&mut self, key: &Key) -> Result<(), DeviceError> {
        let offer = self.terms(key)?;
        self.claim(key, &offer)?;
        let base = key.base(self.own);
        publish(&mut self.store, &base, &offer.nodes(&self.settings))?;
        self.show(key, State::InitWait)?;
        self.set_phase(key, Phase::Waiting);
        Ok(())
    }

    pub(super) fn set_phase(&mut self, key: &Key, phase: Phase) {
        if let Some(device) = self.devices.get_mut(key) {
            device.phase = phase;
        }
    }

    /// Maps and binds all rings, then says so. With `resume` the guest is using them already.
    pub(super) fn connect(&mut self, key: &Key, resume: bool) -> Result<(), DeviceError> {
        let Some(device) = self.devices.get(key) else { return Ok(()) };
        let (base, path) = (device.base.clone(), device.frontend.clone());
        let mut offer = self.terms(key)?;
        self.claim(key, &offer)?;
        let max_queues = self.settings.max_queues;
        let mut frontend = Frontend::read(&mut self.store, 0, &path, max_queues)?;
        if resume {
            // What was agreed on stays.
            let agreed = optional(&mut self.store, 0, &format!("{base}/feature-persistent"))?;
            offer.persistent = agreed.is_some_and(|value| value == "1");
        }
        let asked = frontend.persistent;
        frontend.persistent = asked && offer.persistent;
        let lines = self.lines_of(key);
        let disk = offer.disk(&self.parameters, &self.settings, lines.clone());
        disk.persistent.store(frontend.persistent, Ordering::Relaxed);
        let mut rings = Vec::new();
        for number in 0..frontend.queues.len() {
            let platform = &*self.platform;
            let settings = &self.settings;
            rings.push(open_queue(platform, key, &frontend, number, resume, settings, &disk)?);
        }
        frontend.persistent = asked;
        publish(&mut self.store, &base, &offer.nodes(&self.settings))?;
        self.generation += 1;
        let generation = self.generation;
        let queues = rings.len();
        let running = u32::try_from(queues).unwrap_or(u32::MAX);
        disk.queues.store(running, Ordering::SeqCst);
        if !self.served.add(key, &disk) {
            // Withdrawn meanwhile, or the backend leaves: the next look says so.
            return Ok(());
        }
        for (number, parts) in rings.into_iter().enumerate() {
            let end = EndOfRing {
                mailbox: self.mailbox.clone(),
                served: self.served.clone(),
                key: key.clone(),
                disk: disk.clone(),
                generation,
            };
            let worker = (usize::try_from(generation).unwrap_or_default() + number)
                % self.workers.len().max(1);
            let Some(worker) = self.workers.get(worker) else { continue };
            worker.spawn(move |io| async move {
                Queue::run(io, parts).await;
                drop(end);
            });
        }
        let journals = self.settings.journals.iter().flat_map(|folder| {
            (0..queues).map(|number| crate::device::journal_path(folder, key, number))
        });
        let serving = Serving {
            generation,
            disk: disk.clone(),
            frontend,
            running,
            size: offer.volume.size(),
            journals: journals.collect(),
        };
        let settled = resume;
        let volume = offer.volume.name().clone();
        if let Some(device) = self.devices.get_mut(key) {
            device.phase = Phase::Connected { settled };
            device.serving = Some(serving);
            device.rings = Doubt::default();
            device.logged = 0;
        }
        if let Some(suppressed) = lines.admit(ebb_mem::clock::now()) {
            tracing::info!(
                device = key.name(),
                volume = &*volume,
                queues,
                resume,
                suppressed,
                "connected"
            );
        }
        Ok(self.show(key, State::Connected)?)
    }

    pub(super) fn disconnect(&mut self, key: &Key) {
        let Some(device) = self.devices.get_mut(key) else { return };
        match &device.serving {
            Some(serving) => {
                serving.disk.wind_up();
                device.phase = Phase::Draining;
            }
            None => device.phase = Phase::Closed,
        }
    }

    /// Says what is wrong, to the log and to the toolstack, and takes leave of the frontend.
    pub(super) fn fail(&mut self, key: &Key, error: &DeviceError) -> Result<(), StoreError> {
        let (own, lines) = (self.own, self.lines_of(key));
        let Some(device) = self.devices.get_mut(key) else { return Ok(()) };
        device.logged = device.logged.saturating_add(1);
        if device.logged <= FAILURES_LOGGED
            && let Some(suppressed) = lines.admit(ebb_mem::clock::now())
        {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            let (error, cause) = (tame(&error.to_string()), tame(&cause.unwrap_or_default()));
            tracing::error!(device = key.name(), error, cause, suppressed, "not served");
        }
        let Key { kind, guest, device: id } = key;
        let path = format!("/local/domain/{own}/error/backend/{kind}/{guest}/{id}/error");
        let text = tame(&format!("22 {error}"));
        match self.store.write(0, &path, &text) {
            Ok(()) | Err(StoreError::Refused(_)) => {}
            Err(error) => return Err(error),
        }
        self.show(key, State::Closing)?;
        self.disconnect(key);
        if let Some(device) = self.devices.get_mut(key).filter(|d| d.serving.is_none()) {
            device.phase = Phase::Failed;
        }
        Ok(())
    }

    pub(super) fn forget(&mut self, key: &Key) -> Result<(), StoreError> {
        let Some(device) = self.devices.remove(key) else { return Ok(()) };
        if self.allowances.get_mut(&key.guest).is_some_and(|allowance| !allowance.remove_device()) {
            self.allowances.remove(&key.guest);
            self.lines.remove(&key.guest);
        }
        let store = &mut self.store;
        match store.unwatch(&format!("{}/state", device.frontend), &key.name()) {
            Ok(()) | Err(StoreError::Missing) => {}
            Err(error @ StoreError::Io(_)) => return Err(error),
            Err(_) => {}
        }
        let folder = self.settings.journals.as_deref();
        for (folder, number) in
            folder.iter().flat_map(|at| (0..self.settings.max_queues).map(move |n| (at, n)))
        {
            let number = usize::try_from(number).unwrap_or(usize::MAX);
            let _ = std::fs::remove_file(crate::device::journal_path(folder, key, number));
        }
        // The toolstack clears up after its own kind; nobody else does after ours.
        let gone = optional(store, 0, &format!("{}/state", device.frontend))?.is_none();
        if gone && &*key.kind != TOOLSTACK_KIND {
            match store.remove(0, &device.base) {
                Ok(()) | Err(StoreError::Missing) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Tells guests whose disk has another size than before.
    pub(super) fn compare_sizes(&mut self) {
        for (key, device) in &mut self.devices {
            let Some(serving) = &mut device.serving else { continue };
            let size = serving.disk.volume.size();
            if size == serving.size || !matches!(device.phase, Phase::Connected { .. }) {
                continue;
            }
            for path in &serving.journals {
                // Before the guest knows: what it sends then must find its journal right.
                if let Err(error) = note_size_at(path, size) {
                    tracing::warn!(device = key.name(), %error, "the journal keeps the old size");
                }
            }
            let sectors = (size / crate::abi::SECTOR_BYTES).to_string();
            let (base, connected) = (&device.base, State::Connected.text());
            // The state is written anew, with the value it has: that is what frontends watch.
            let told = transact(&mut self.store, |store, within| {
                store.read(within, &format!("{base}/state"))?;
                store.write(within, &format!("{base}/sectors"), &sectors)?;
                store.write(within, &format!("{base}/state"), connected)
            });
            match told {
                Ok(()) => {
                    serving.size = size;
                    tracing::info!(device = key.name(), bytes = size, "resized");
                }
                Err(error) => tracing::warn!(device = key.name(), %error, "not resized"),
            }
        }
    }
}

/// A text with words of a guest's in it, such that it is one line of visible characters and not long.
fn tame(text: &str) -> String {
    let shown = text.chars().flat_map(|c| {
        let plain =
            !c.is_control() && !matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}');
        let escaped = (!plain).then(|| c.escape_unicode());
        escaped.into_iter().flatten().chain(plain.then_some(c))
    });
    shown.take(SHOWN_MAX).collect()
}

/// What xenstore shows of a device. One request, if only its guest may have changed something and did not.
pub(super) fn see(
    store: &mut dyn XenStore,
    device: &mut Device,
    max_queues: u32,
    now: Instant,
) -> Result<Seen, StoreError> {
    let mut state = |base: &str| -> Result<Option<State>, StoreError> {
        Ok(optional(store, 0, &format!("{base}/state"))?.map(|text| State::parse(&text)))
    };
    let frontend = state(&device.frontend)?;
    let mut seen = match device.rested {
        Some(rested) if rested.frontend == frontend => rested,
        _ => {
            let own = state(&device.base)?;
            let online = optional(store, 0, &format!("{}/online", device.base))?;
            let online = online.is_some_and(|value| value == "1");
            Seen { frontend, own, online, other_ring: false }
        }
    };
    let running = matches!(frontend, Some(State::Initialised | State::Connected));
    match &device.serving {
        Some(serving) if running && matches!(device.phase, Phase::Connected { .. }) => {
            if device.rings.settle(now) {
                seen.other_ring = match Frontend::read(store, 0, &device.frontend, max_queues) {
                    Ok(now) => now != serving.frontend,
                    Err(crate::nodes::NodeError::Store(error @ StoreError::Io(_))) => {
                        return Err(error);
                    }
                    Err(_) => true,
                };
            }
        }
        // Its rings are not served, or it is about to leave them.
        _ => device.rings.open = false,
    }
    Ok(seen)
}
