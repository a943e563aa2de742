//! The actions of the state machine ([`crate::xenbus_state`]) for one device.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_access::{ClientIdentity, XenGuest};
use ebb_volume::{ServedVolume, Writer};

use super::{TOOLSTACK_KIND, XenstoreControl};
use crate::device::{Device, DeviceError, DeviceKey, Offer, RingRecheck, Serving, open_queue};
use crate::journal::note_size_at;
use crate::nodes::{
    FrontendNodes, optional, publish, remove_without_frontend, show_state, transact,
};
use crate::platform::{Domain, XenStore, XenstoreError};
use crate::queue::Queue;
use crate::served::EndOfRing;
use crate::xenbus_state::{DevicePhase, ObservedStates, XenbusState};

/// Most failures of a device that are logged.
const FAILURES_LOGGED: u32 = 10;
/// How long a disk waits for another writer of its volume.
const WRITER_TIMEOUT: Duration = Duration::from_secs(2);
/// Most characters of an error message.
const SHOWN_MAX: usize = 512;
/// `info` bits.
const INFO_CDROM: u32 = 1;
const INFO_REMOVABLE: u32 = 2;
const INFO_READ_ONLY: u32 = 4;

impl XenstoreControl {
    pub(super) fn show(
        &mut self,
        key: &DeviceKey,
        state: XenbusState,
    ) -> Result<(), XenstoreError> {
        show_state(&mut self.store, &key.base(self.own), state.text())?;
        if state == XenbusState::Closed {
            self.set_phase(key, DevicePhase::Closed);
        }
        Ok(())
    }

    /// Reads what to offer from the backend's directory and the volume.
    fn read_offer(&mut self, key: &DeviceKey) -> Result<Offer, DeviceError> {
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
        let identity = self.identity(key.guest)?;
        if !self.volumes.admits(plain, &identity) {
            let (volume, guest) = (plain.to_owned(), key.guest);
            return Err(DeviceError::NotAllowed { volume, guest });
        }
        let found = self.volumes.get(plain);
        let offered = found.filter(|served| !self.served.is_withdrawn(&served.volume));
        let ServedVolume { volume, pool } =
            offered.ok_or_else(|| DeviceError::NoVolume(plain.to_owned()))?;
        let read_only = volume.read_only() || !mode.contains('w');
        let share = mode.contains('!');
        let discard = discard && !read_only && volume.capabilities().discard;
        let bits = [(cdrom, INFO_CDROM), (removable, INFO_REMOVABLE), (read_only, INFO_READ_ONLY)];
        let info = bits.iter().filter(|(on, _)| *on).map(|(_, bit)| bit).sum();
        let persistent = self.parameters.feature_persistent.get();
        Ok(Offer { volume, pool, read_only, share, discard, flush, info, persistent })
    }

    /// What a guest is known by. The guest itself can write none of it.
    fn identity(&mut self, guest: Domain) -> Result<ClientIdentity, XenstoreError> {
        let name = optional(&mut self.store, 0, &format!("/local/domain/{guest}/name"))?;
        let machine = optional(&mut self.store, 0, &format!("/local/domain/{guest}/vm"))?;
        let uuid = machine.as_deref().and_then(|path| path.strip_prefix("/vm/"));
        let (name, uuid) = (name.map(Into::into), uuid.map(Into::into));
        let guest = Some(XenGuest { domain: guest.into(), name, uuid });
        Ok(ClientIdentity { guest, ..ClientIdentity::default() })
    }

    /// Drains a device whose guest may not open its volume any more.
    pub(super) fn end_if_disallowed(&mut self, key: &DeviceKey) -> Result<(), XenstoreError> {
        let Some(device) = self.devices.get_mut(key) else { return Ok(()) };
        let Some(serving) = &device.serving else {
            // Whether it may be served is checked when its rings are opened.
            device.recheck_access = false;
            return Ok(());
        };
        let volume = serving.disk.volume.name().clone();
        let identity = self.identity(key.guest)?;
        let admitted = self.volumes.admits(&volume, &identity);
        let Some(device) = self.devices.get_mut(key) else { return Ok(()) };
        device.recheck_access = false;
        if !admitted {
            device.disallowed = Some(volume.to_string());
            self.disconnect(key);
        }
        Ok(())
    }

    /// Claims the right to write to the volume, if the guest needs it and does not have it.
    fn claim(&mut self, key: &DeviceKey, offer: &Offer) -> Result<(), DeviceError> {
        let held = |device: &Device| {
            device.lease.as_ref().is_some_and(|lease| offer.volume.is_leased(lease))
        };
        if offer.read_only || self.devices.get(key).is_some_and(held) {
            return Ok(());
        }
        let DeviceKey { guest, device, .. } = key;
        // A guest that is migrated within the host is two domains for a while, with one `vm` path. A guest that
        // already has the volume as another disk gets no group: it conflicts like any other writer.
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

    /// Whether a device may continue to wait for another writer.
    pub(super) fn may_wait(&mut self, key: &DeviceKey, now: Instant) -> bool {
        let Some(device) = self.devices.get_mut(key) else { return false };
        let since = *device.waiting.get_or_insert(now);
        let may = now < since + WRITER_TIMEOUT;
        if !may {
            device.waiting = None;
        }
        may
    }

    pub(super) fn offer(&mut self, key: &DeviceKey) -> Result<(), DeviceError> {
        let offer = self.read_offer(key)?;
        self.claim(key, &offer)?;
        let base = key.base(self.own);
        publish(&mut self.store, &base, &offer.nodes(&self.settings))?;
        self.show(key, XenbusState::InitWait)?;
        self.set_phase(key, DevicePhase::Waiting);
        Ok(())
    }

    pub(super) fn set_phase(&mut self, key: &DeviceKey, phase: DevicePhase) {
        if phase != DevicePhase::Failed {
            self.served.forget_refused(|other, _| other == key);
        }
        if let Some(device) = self.devices.get_mut(key) {
            device.phase = phase;
        }
    }

    /// Maps and binds all rings, then sets the state. With `resume` the guest is already using them.
    pub(super) fn connect(&mut self, key: &DeviceKey, resume: bool) -> Result<(), DeviceError> {
        let Some(device) = self.devices.get(key) else { return Ok(()) };
        let (base, path) = (device.base.clone(), device.frontend.clone());
        let mut offer = self.read_offer(key)?;
        self.claim(key, &offer)?;
        let max_queues = self.settings.max_queues;
        let mut frontend = FrontendNodes::read(&mut self.store, 0, &path, max_queues)?;
        if resume {
            // Features that were negotiated stay.
            let agreed = optional(&mut self.store, 0, &format!("{base}/feature-persistent"))?;
            offer.persistent = agreed.is_some_and(|value| value == "1");
        }
        let wanted = frontend.persistent;
        frontend.persistent = wanted && offer.persistent;
        let log_limit = self.log_limit_of(key);
        let disk = offer.disk(&self.parameters, &self.settings, log_limit.clone());
        disk.persistent.store(frontend.persistent, Ordering::Relaxed);
        let mut rings = Vec::new();
        for number in 0..frontend.queues.len() {
            let platform = &*self.platform;
            let settings = &self.settings;
            let opened = open_queue(platform, key, &frontend, number, resume, settings, &disk);
            if let Err(DeviceError::Resume { .. }) = opened {
                self.served.note_refused(key, disk.volume.name(), None);
            }
            rings.push(opened?);
        }
        self.served.forget_refused(|other, _| other == key);
        frontend.persistent = wanted;
        publish(&mut self.store, &base, &offer.nodes(&self.settings))?;
        self.generation += 1;
        let generation = self.generation;
        let queues = rings.len();
        let running = u32::try_from(queues).unwrap_or(u32::MAX);
        disk.queues.store(running, Ordering::SeqCst);
        if !self.served.add(key, &disk) {
            // The volume was withdrawn meanwhile, or the backend is stopping: the next check handles it.
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
            device.phase = DevicePhase::Connected { settled };
            device.serving = Some(serving);
            device.rings = RingRecheck::default();
            device.logged = 0;
        }
        if let Some(suppressed) = log_limit.admit(ebb_mem::clock::now()) {
            tracing::info!(
                device = key.name(),
                volume = &*volume,
                queues,
                resume,
                suppressed,
                "connected"
            );
        }
        Ok(self.show(key, XenbusState::Connected)?)
    }

    pub(super) fn disconnect(&mut self, key: &DeviceKey) {
        let Some(device) = self.devices.get_mut(key) else { return };
        match &device.serving {
            Some(serving) => {
                serving.disk.drain();
                device.phase = DevicePhase::Draining;
            }
            None => device.phase = DevicePhase::Closed,
        }
    }

    /// Reports an error to the log and to the toolstack, and disconnects the frontend.
    pub(super) fn fail(
        &mut self,
        key: &DeviceKey,
        error: &DeviceError,
    ) -> Result<(), XenstoreError> {
        let (own, log_limit) = (self.own, self.log_limit_of(key));
        let Some(device) = self.devices.get_mut(key) else { return Ok(()) };
        device.logged = device.logged.saturating_add(1);
        if device.logged <= FAILURES_LOGGED
            && let Some(suppressed) = log_limit.admit(ebb_mem::clock::now())
        {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            let (error, cause) =
                (sanitize(&error.to_string()), sanitize(&cause.unwrap_or_default()));
            tracing::error!(
                device = key.name(),
                error,
                cause,
                suppressed,
                "cannot serve the device"
            );
        }
        let DeviceKey { kind, guest, device: id } = key;
        let path = format!("/local/domain/{own}/error/backend/{kind}/{guest}/{id}/error");
        let text = sanitize(&format!("22 {error}"));
        match self.store.write(0, &path, &text) {
            Ok(()) | Err(XenstoreError::Refused(_)) => {}
            Err(error) => return Err(error),
        }
        self.show(key, XenbusState::Closing)?;
        self.disconnect(key);
        if let Some(device) = self.devices.get_mut(key).filter(|d| d.serving.is_none()) {
            device.phase = DevicePhase::Failed;
        }
        Ok(())
    }

    pub(super) fn forget(&mut self, key: &DeviceKey) -> Result<(), XenstoreError> {
        let Some(device) = self.devices.remove(key) else { return Ok(()) };
        self.served.forget_refused(|other, _| other == key);
        if self.allowances.get_mut(&key.guest).is_some_and(|allowance| !allowance.remove_device()) {
            self.allowances.remove(&key.guest);
            self.log_limits.remove(&key.guest);
        }
        let store = &mut self.store;
        match store.unwatch(&format!("{}/state", device.frontend), &key.name()) {
            Ok(()) | Err(XenstoreError::Missing) => {}
            Err(error @ XenstoreError::Io(_)) => return Err(error),
            Err(_) => {}
        }
        let folder = self.settings.journals.as_deref();
        for (folder, number) in
            folder.iter().flat_map(|at| (0..self.settings.max_queues).map(move |n| (at, n)))
        {
            let number = usize::try_from(number).unwrap_or(usize::MAX);
            let _ = std::fs::remove_file(crate::device::journal_path(folder, key, number));
        }
        // The toolstack removes the nodes of its own kind; those of this daemon's kind are removed here.
        if &*key.kind != TOOLSTACK_KIND {
            remove_without_frontend(store, &device.base, &device.frontend)?;
        }
        Ok(())
    }

    /// Notifies guests whose disk has been resized.
    pub(super) fn compare_sizes(&mut self) {
        for (key, device) in &mut self.devices {
            let Some(serving) = &mut device.serving else { continue };
            let size = serving.disk.volume.size();
            if size == serving.size || !matches!(device.phase, DevicePhase::Connected { .. }) {
                continue;
            }
            for path in &serving.journals {
                // Recorded before the guest is notified: its next requests need the new size.
                if let Err(error) = note_size_at(path, size) {
                    tracing::warn!(device = key.name(), %error, "cannot record the new size in the journal");
                }
            }
            let sectors = (size / crate::abi::SECTOR_BYTES).to_string();
            let (base, connected) = (&device.base, XenbusState::Connected.text());
            // The state is written again with its value, since frontends watch it.
            let notified = transact(&mut self.store, |store, within| {
                store.read(within, &format!("{base}/state"))?;
                store.write(within, &format!("{base}/sectors"), &sectors)?;
                store.write(within, &format!("{base}/state"), connected)
            });
            match notified {
                Ok(()) => {
                    serving.size = size;
                    tracing::info!(device = key.name(), bytes = size, "resized");
                }
                Err(error) => {
                    tracing::warn!(device = key.name(), %error, "cannot notify the guest of the new size");
                }
            }
        }
    }
}

/// Makes one line of visible characters, of limited length, of a text that may contain a guest's words.
fn sanitize(text: &str) -> String {
    let shown = text.chars().flat_map(|c| {
        let plain =
            !c.is_control() && !matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}');
        let escaped = (!plain).then(|| c.escape_unicode());
        escaped.into_iter().flatten().chain(plain.then_some(c))
    });
    shown.take(SHOWN_MAX).collect()
}

/// Reads the states of a device: with one request if only its guest can have changed something and did not.
pub(super) fn observe(
    store: &mut dyn XenStore,
    device: &mut Device,
    max_queues: u32,
    now: Instant,
) -> Result<ObservedStates, XenstoreError> {
    let mut state = |base: &str| -> Result<Option<XenbusState>, XenstoreError> {
        Ok(optional(store, 0, &format!("{base}/state"))?.map(|text| XenbusState::parse(&text)))
    };
    let frontend = state(&device.frontend)?;
    let mut seen = match device.idle_seen {
        Some(idle_seen) if idle_seen.frontend == frontend => idle_seen,
        _ => {
            let own = state(&device.base)?;
            let online = optional(store, 0, &format!("{}/online", device.base))?;
            let online = online.is_some_and(|value| value == "1");
            ObservedStates { frontend, own, online, other_ring: false }
        }
    };
    let running = matches!(frontend, Some(XenbusState::Initialised | XenbusState::Connected));
    match &device.serving {
        Some(serving) if running && matches!(device.phase, DevicePhase::Connected { .. }) => {
            if device.rings.take_due(now) {
                seen.other_ring = match FrontendNodes::read(store, 0, &device.frontend, max_queues)
                {
                    Ok(now) => now != serving.frontend,
                    Err(crate::nodes::NodeError::Store(error @ XenstoreError::Io(_))) => {
                        return Err(error);
                    }
                    Err(_) => true,
                };
            }
        }
        // Its rings are not served, or are about to be disconnected.
        _ => device.rings.needed = false,
    }
    Ok(seen)
}
