//! The xenstore side: finds devices, follows their states, publishes, connects and disconnects.
//!
//! One thread does this for all guests, with calls that wait for xenstored. What a guest does to
//! its nodes only marks its device to be looked at, and each device is looked at every
//! [`PAUSE`] at most: floods of changes cost the flooder its changes, and nobody memory (XSA-349).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_io::WorkerHandle;
use ebb_mem::PoolParameters;
use ebb_volume::{Stop, Volume};
use rustix::event::{PollFd, PollFlags, poll};

use crate::device::{Device, DeviceError, Key, Offer, Serving, Settings, open_queue};
use crate::disk::Disk;
use crate::machine::{Action, Phase, Seen, State, next};
use crate::nodes::{Frontend, number, optional, publish, show_state, transact};
use crate::params::XenParameters;
use crate::platform::{Domain, Platform, StoreError, XenStore};
use crate::queue::Queue;

/// The least time between two looks at a device.
const PAUSE: Duration = Duration::from_millis(5);
/// How often volumes are asked for their size.
const SIZES: Duration = Duration::from_millis(100);
/// How long to wait before xenstore is tried again.
const RECONNECT: Duration = Duration::from_secs(1);
/// Steps of a device before the next one has its turn.
const STEPS: u32 = 8;
/// Devices of all guests; more are not looked at.
const DEVICES_MAX: usize = 4096;
/// Failures of a device that go to the log.
const FAILURES_LOGGED: u32 = 10;
/// What a disk line's script is called.
const SCRIPT: &str = "block-ebbd";
/// The backend kind of the toolstack's own, which is served where the kernel does not.
const TOOLSTACK_KIND: &str = "vbd";
/// `info` bits.
const INFO_CDROM: u32 = 1;
const INFO_REMOVABLE: u32 = 2;
const INFO_READ_ONLY: u32 = 4;

/// Finds a volume by name, with the limits of its page pools.
pub type Lookup = Arc<dyn Fn(&str) -> Option<(Arc<Volume>, Arc<PoolParameters>)> + Send + Sync>;

pub(crate) enum Message {
    /// A ring has ended.
    Ended(Key, u64),
    /// Stop all rings and end; guests stay connected.
    Leave,
    /// Serve a volume no more.
    Withdraw(String),
}

/// Wakes the thread that polls the other end.
#[derive(Clone)]
pub(crate) struct Mailbox {
    sender: Sender<Message>,
    bell: Arc<OwnedFd>,
}

impl Mailbox {
    pub(crate) fn new() -> std::io::Result<(Mailbox, Receiver<Message>)> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let bell = Arc::new(rustix::event::eventfd(0, flags)?);
        let (sender, receiver) = std::sync::mpsc::channel();
        Ok((Mailbox { sender, bell }, receiver))
    }

    pub(crate) fn send(&self, message: Message) {
        // Nobody listens any more only when all rings have ended.
        let _ = self.sender.send(message);
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }
}

/// Reports the end of a ring, also of one whose worker dropped it.
struct EndOfRing(Mailbox, Key, u64);

impl Drop for EndOfRing {
    fn drop(&mut self) {
        self.0.send(Message::Ended(self.1.clone(), self.2));
    }
}

/// Devices that are served, for whoever shows figures.
pub(crate) type Served = Arc<Mutex<BTreeMap<Key, Arc<Disk>>>>;

pub(crate) struct Control {
    pub(crate) platform: Arc<dyn Platform>,
    pub(crate) store: Box<dyn XenStore>,
    pub(crate) own: Domain,
    pub(crate) kinds: Vec<Arc<str>>,
    pub(crate) workers: Vec<WorkerHandle>,
    pub(crate) parameters: Arc<XenParameters>,
    pub(crate) volumes: Lookup,
    pub(crate) settings: Settings,
    pub(crate) mailbox: Mailbox,
    pub(crate) inbox: Receiver<Message>,
    pub(crate) served: Served,
    pub(crate) devices: BTreeMap<Key, Device>,
    pub(crate) dirty: BTreeSet<Key>,
    pub(crate) generation: u64,
    pub(crate) leaving: bool,
}

impl Control {
    pub(crate) fn run(mut self) {
        let mut sizes = ebb_mem::clock::now();
        let mut broken = self.watch_kinds().is_err();
        loop {
            if broken {
                tracing::error!("xenstore cannot be reached: disks are served, none is attached");
                broken = self.reconnect().is_err();
            } else if let Err(error) = self.take_events() {
                tracing::error!(%error, "xenstore");
                broken = true;
            }
            self.take_messages();
            if self.leaving && self.devices.values().all(|device| device.serving.is_none()) {
                return;
            }
            let now = ebb_mem::clock::now();
            if !broken {
                match self.look_at_dirty(now) {
                    Ok(true) => continue,
                    Ok(false) => {}
                    Err(error) => {
                        tracing::error!(%error, "xenstore");
                        broken = true;
                    }
                }
            }
            if now >= sizes + SIZES {
                sizes = now;
                self.compare_sizes();
            }
            self.wait(broken);
        }
    }

    fn wait(&self, broken: bool) {
        let serving = self.devices.values().any(|device| device.serving.is_some());
        let span = match () {
            () if broken => RECONNECT,
            () if !self.dirty.is_empty() => PAUSE,
            () if serving => SIZES,
            () => Duration::from_secs(3600),
        };
        let timeout = rustix::time::Timespec {
            tv_sec: i64::try_from(span.as_secs()).unwrap_or(1),
            tv_nsec: span.subsec_nanos().into(),
        };
        let bell = PollFd::new(&*self.mailbox.bell, PollFlags::IN);
        let fd = self.store.fd();
        let store = PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN);
        let mut fds = [bell, store];
        let count = if broken { 1 } else { 2 };
        // Interrupted or not, everything is looked at next.
        let _ = poll(&mut fds[..count], Some(&timeout));
    }

    fn kind_path(&self, kind: &str) -> String {
        format!("/local/domain/{}/backend/{kind}", self.own)
    }

    fn watch_kinds(&mut self) -> Result<(), StoreError> {
        for kind in self.kinds.clone() {
            let path = self.kind_path(&kind);
            self.store.watch(&path, "backend")?;
        }
        Ok(())
    }

    fn reconnect(&mut self) -> Result<(), StoreError> {
        self.store = self.platform.xenstore()?;
        self.watch_kinds()?;
        for (key, device) in &self.devices {
            self.store.watch(&format!("{}/state", device.frontend), &key.name())?;
        }
        self.dirty.extend(self.devices.keys().cloned());
        Ok(())
    }

    fn take_events(&mut self) -> Result<(), StoreError> {
        while let Some((path, token)) = self.store.event()? {
            if token == crate::platform::xenbus::EVERYTHING {
                for kind in self.kinds.clone() {
                    self.find_devices(&kind)?;
                }
                self.dirty.extend(self.devices.keys().cloned());
            } else if token == "backend" {
                self.backend_changed(&path)?;
            } else {
                let key = self.devices.keys().find(|key| key.name() == token).cloned();
                self.dirty.extend(key);
            }
        }
        Ok(())
    }

    /// Something below one of our kinds changed: a known device, or perhaps a new one.
    fn backend_changed(&mut self, path: &str) -> Result<(), StoreError> {
        for kind in self.kinds.clone() {
            let base = self.kind_path(&kind);
            let Some(rest) = path.strip_prefix(&base) else { continue };
            if !rest.is_empty() && !rest.starts_with('/') {
                continue;
            }
            let mut parts = rest.split('/').skip(1);
            match (parts.next().and_then(number), parts.next().and_then(number)) {
                (Some(guest), Some(device)) => self.notice(&kind, guest, device),
                _ => self.find_devices(&kind)?,
            }
        }
        Ok(())
    }

    fn find_devices(&mut self, kind: &Arc<str>) -> Result<(), StoreError> {
        let base = self.kind_path(kind);
        for guest in list(&mut *self.store, &base)? {
            for device in list(&mut *self.store, &format!("{base}/{guest}"))? {
                if let (Some(guest), Some(device)) = (number(&guest), number(&device)) {
                    self.notice(kind, guest, device);
                }
            }
        }
        Ok(())
    }

    fn notice(&mut self, kind: &Arc<str>, guest: u32, device: u32) {
        let Ok(guest) = Domain::try_from(guest) else { return };
        let key = Key { kind: kind.clone(), guest, device };
        if self.devices.contains_key(&key) || self.devices.len() < DEVICES_MAX {
            self.dirty.insert(key);
        }
    }

    fn take_messages(&mut self) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&*self.mailbox.bell, &mut counter);
        while let Ok(message) = self.inbox.try_recv() {
            match message {
                Message::Ended(key, generation) => self.ring_ended(&key, generation),
                Message::Leave => {
                    self.leaving = true;
                    for serving in self.devices.values().filter_map(|d| d.serving.as_ref()) {
                        serving.wind_up();
                    }
                }
                Message::Withdraw(name) => {
                    for (key, device) in &mut self.devices {
                        let serving = device.serving.as_ref();
                        if let Some(serving) = serving.filter(|s| **s.disk.volume.name() == *name) {
                            serving.wind_up();
                            device.phase = Phase::Draining;
                            self.dirty.insert(key.clone());
                        }
                    }
                }
            }
        }
    }

    fn ring_ended(&mut self, key: &Key, generation: u64) {
        let Some(device) = self.devices.get_mut(key) else { return };
        let Some(serving) = &mut device.serving else { return };
        if serving.generation != generation {
            return;
        }
        serving.running = serving.running.saturating_sub(1);
        serving.disk.queues.store(serving.running, Ordering::Relaxed);
        if serving.running > 0 {
            return;
        }
        if !self.leaving {
            for path in &serving.journals {
                let _ = std::fs::remove_file(path);
            }
        }
        device.serving = None;
        if device.phase == Phase::Draining {
            device.phase = Phase::Closed;
        }
        self.served.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        tracing::info!(device = key.name(), "disconnected");
        self.dirty.insert(key.clone());
    }

    /// Looks at devices that changed; true if at one at least.
    fn look_at_dirty(&mut self, now: Instant) -> Result<bool, StoreError> {
        if self.leaving {
            return Ok(false);
        }
        let mut any = false;
        for key in self.dirty.clone() {
            let early = |device: &Device| device.looked.is_some_and(|at| now < at + PAUSE);
            if self.devices.get(&key).is_some_and(early) {
                continue;
            }
            self.dirty.remove(&key);
            any = true;
            self.look(&key, now)?;
        }
        Ok(any)
    }

    /// Takes in a device that was not known; false if it is not ours, or not complete yet.
    fn adopt(&mut self, key: &Key) -> Result<bool, StoreError> {
        if self.devices.contains_key(key) {
            return Ok(true);
        }
        let base = key.base(self.own);
        let store = &mut *self.store;
        let Some(frontend) = optional(store, 0, &format!("{base}/frontend"))? else {
            return Ok(false);
        };
        if optional(store, 0, &format!("{base}/state"))?.is_none() || frontend.is_empty() {
            return Ok(false);
        }
        if &*key.kind == TOOLSTACK_KIND {
            let script = optional(store, 0, &format!("{base}/script"))?.unwrap_or_default();
            if script.rsplit('/').next() != Some(SCRIPT) {
                return Ok(false);
            }
        }
        store.watch(&format!("{frontend}/state"), &key.name())?;
        let device =
            Device { base, frontend, phase: Phase::New, looked: None, serving: None, logged: 0 };
        self.devices.insert(key.clone(), device);
        Ok(true)
    }

    fn look(&mut self, key: &Key, now: Instant) -> Result<(), StoreError> {
        if !self.adopt(key)? {
            return Ok(());
        }
        for _ in 0..STEPS {
            let Some(device) = self.devices.get_mut(key) else { return Ok(()) };
            device.looked = Some(now);
            let seen = see(&mut *self.store, device, self.settings.max_queues)?;
            if let Phase::Connected { settled } = &mut device.phase {
                *settled |= seen.frontend == Some(State::Connected);
            }
            let action = next(device.phase, &seen);
            let outcome = match action {
                Action::Nothing => return Ok(()),
                Action::Offer => self.offer(key),
                Action::Connect | Action::Resume => {
                    self.connect(key, seen.frontend == Some(State::Connected))
                }
                Action::Disconnect => {
                    self.disconnect(key);
                    Ok(())
                }
                Action::Show(state) => self.show(key, state).map_err(DeviceError::from),
                Action::Fail => Err(DeviceError::BadState),
                Action::Forget => return self.forget(key),
            };
            match outcome {
                Ok(()) => {}
                Err(DeviceError::Nodes(crate::nodes::NodeError::Store(
                    error @ StoreError::Io(_),
                ))) => {
                    return Err(error);
                }
                Err(error) => self.fail(key, &error)?,
            }
        }
        self.dirty.insert(key.clone());
        Ok(())
    }

    fn show(&mut self, key: &Key, state: State) -> Result<(), StoreError> {
        show_state(&mut *self.store, &key.base(self.own), state.text())?;
        if state == State::Closed {
            self.set_phase(key, Phase::Closed);
        }
        Ok(())
    }

    /// What the backend's directory and the volume say.
    fn terms(&mut self, key: &Key) -> Result<Offer, DeviceError> {
        let base = key.base(self.own);
        let store = &mut *self.store;
        let mut get = |name: &str| optional(store, 0, &format!("{base}/{name}"));
        let name = get("params")?.unwrap_or_default();
        let mode = get("mode")?.unwrap_or_default();
        let discard = get("discard-enable")?.is_none_or(|value| value != "0");
        let flush = get("flush-enable")?.is_none_or(|value| value != "0");
        let cdrom = get("device-type")?.is_some_and(|value| value == "cdrom");
        let removable = get("removable")?.is_some_and(|value| value == "1");
        let plain = name.strip_prefix("ebbd:").unwrap_or(&name);
        let found = (self.volumes)(plain);
        let (volume, pool) = found.ok_or_else(|| DeviceError::NoVolume(plain.to_owned()))?;
        let read_only = volume.read_only() || !mode.contains('w');
        let discard = discard && !read_only && volume.capabilities().discard;
        let bits = [(cdrom, INFO_CDROM), (removable, INFO_REMOVABLE), (read_only, INFO_READ_ONLY)];
        let info = bits.iter().filter(|(on, _)| *on).map(|(_, bit)| bit).sum();
        let persistent = self.parameters.feature_persistent();
        Ok(Offer { volume, pool, read_only, discard, flush, info, persistent })
    }

    fn offer(&mut self, key: &Key) -> Result<(), DeviceError> {
        let offer = self.terms(key)?;
        let base = key.base(self.own);
        publish(&mut *self.store, &base, &offer.nodes(&self.settings))?;
        self.show(key, State::InitWait)?;
        self.set_phase(key, Phase::Waiting);
        Ok(())
    }

    fn set_phase(&mut self, key: &Key, phase: Phase) {
        if let Some(device) = self.devices.get_mut(key) {
            device.phase = phase;
        }
    }

    /// Maps and binds all rings, then says so. With `resume` the guest is using them already.
    fn connect(&mut self, key: &Key, resume: bool) -> Result<(), DeviceError> {
        let Some(device) = self.devices.get(key) else { return Ok(()) };
        let (base, path) = (device.base.clone(), device.frontend.clone());
        let mut offer = self.terms(key)?;
        let max_queues = self.settings.max_queues;
        let mut frontend = Frontend::read(&mut *self.store, 0, &path, max_queues)?;
        if resume {
            // What was agreed on stays.
            let agreed = optional(&mut *self.store, 0, &format!("{base}/feature-persistent"))?;
            offer.persistent = agreed.is_some_and(|value| value == "1");
        }
        let asked = frontend.persistent;
        frontend.persistent = asked && offer.persistent;
        let disk = offer.disk(&self.parameters, &self.settings);
        disk.persistent.store(frontend.persistent, Ordering::Relaxed);
        let stop = Arc::<Stop>::default();
        let mut rings = Vec::new();
        for number in 0..frontend.queues.len() {
            let shared = (&disk, &stop);
            let platform = &*self.platform;
            let settings = &self.settings;
            rings.push(open_queue(platform, key, &frontend, number, resume, settings, shared)?);
        }
        frontend.persistent = asked;
        publish(&mut *self.store, &base, &offer.nodes(&self.settings))?;
        self.generation += 1;
        let generation = self.generation;
        let queues = rings.len();
        for (number, parts) in rings.into_iter().enumerate() {
            let end = EndOfRing(self.mailbox.clone(), key.clone(), generation);
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
            stop,
            frontend,
            running: u32::try_from(queues).unwrap_or(u32::MAX),
            size: offer.volume.size(),
            journals: journals.collect(),
        };
        disk.queues.store(serving.running, Ordering::Relaxed);
        let settled = resume;
        let volume = offer.volume.name().clone();
        if let Some(device) = self.devices.get_mut(key) {
            device.phase = Phase::Connected { settled };
            device.serving = Some(serving);
            device.logged = 0;
        }
        self.served.lock().unwrap_or_else(PoisonError::into_inner).insert(key.clone(), disk);
        tracing::info!(device = key.name(), volume = &*volume, queues, resume, "connected");
        Ok(self.show(key, State::Connected)?)
    }

    fn disconnect(&mut self, key: &Key) {
        let Some(device) = self.devices.get_mut(key) else { return };
        match &device.serving {
            Some(serving) => {
                serving.wind_up();
                device.phase = Phase::Draining;
            }
            None => device.phase = Phase::Closed,
        }
    }

    /// Says what is wrong, to the log and to the toolstack, and takes leave of the frontend.
    fn fail(&mut self, key: &Key, error: &DeviceError) -> Result<(), StoreError> {
        let own = self.own;
        let Some(device) = self.devices.get_mut(key) else { return Ok(()) };
        device.logged = device.logged.saturating_add(1);
        if device.logged <= FAILURES_LOGGED {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            let cause = cause.unwrap_or_default();
            tracing::error!(device = key.name(), %error, cause, "not served");
        }
        let Key { kind, guest, device: id } = key;
        let path = format!("/local/domain/{own}/error/backend/{kind}/{guest}/{id}/error");
        let text: String = format!("22 {error}").chars().take(512).collect();
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

    fn forget(&mut self, key: &Key) -> Result<(), StoreError> {
        let Some(device) = self.devices.remove(key) else { return Ok(()) };
        let store = &mut *self.store;
        match store.unwatch(&format!("{}/state", device.frontend), &key.name()) {
            Ok(()) | Err(StoreError::Missing) => {}
            Err(error @ StoreError::Io(_)) => return Err(error),
            Err(_) => {}
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
    fn compare_sizes(&mut self) {
        for (key, device) in &mut self.devices {
            let Some(serving) = &mut device.serving else { continue };
            let size = serving.disk.volume.size();
            if size == serving.size || !matches!(device.phase, Phase::Connected { .. }) {
                continue;
            }
            let sectors = (size / crate::abi::SECTOR_BYTES).to_string();
            let (base, connected) = (&device.base, State::Connected.text());
            // The state is written anew, with the value it has: that is what frontends watch.
            let told = transact(&mut *self.store, |store, within| {
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

fn list(store: &mut dyn XenStore, path: &str) -> Result<Vec<String>, StoreError> {
    match store.list(0, path) {
        Err(StoreError::Missing) => Ok(Vec::new()),
        other => other,
    }
}

fn see(store: &mut dyn XenStore, device: &Device, max_queues: u32) -> Result<Seen, StoreError> {
    let mut state = |base: &str| -> Result<Option<State>, StoreError> {
        Ok(optional(store, 0, &format!("{base}/state"))?.map(|text| State::parse(&text)))
    };
    let (frontend, own) = (state(&device.frontend)?, state(&device.base)?);
    let online = optional(store, 0, &format!("{}/online", device.base))?;
    let running = matches!(frontend, Some(State::Initialised | State::Connected));
    let other_ring = match &device.serving {
        Some(serving) if running && matches!(device.phase, Phase::Connected { .. }) => {
            match Frontend::read(store, 0, &device.frontend, max_queues) {
                Ok(now) => now != serving.frontend,
                Err(crate::nodes::NodeError::Store(error @ StoreError::Io(_))) => {
                    return Err(error);
                }
                Err(_) => true,
            }
        }
        _ => false,
    };
    Ok(Seen { frontend, own, online: online.is_some_and(|value| value == "1"), other_ring })
}
