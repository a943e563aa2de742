//! The xenstore side: finds devices, follows their states, publishes nodes, connects and disconnects.
//!
//! One thread does this for all guests, with calls that block on xenstored. A guest's changes to its nodes
//! only mark its device for a check, and each device is checked every few milliseconds at most: a guest
//! that floods xenstore with changes delays only its own devices and costs no memory (XSA-349).
//!
//! [`XenstoreControl::run_once`] does what is due and returns when to call it again. The thread calls it in
//! a loop and waits in between; a test can call it itself, with its own clock.

mod actions;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ebb_io::WorkerHandle;
use ebb_volume::{LogLimit, Volume, Volumes};
use rustix::event::{PollFd, PollFlags, poll};

use crate::allowance::Allowance;
use crate::counting_store::CountingStore;
use crate::device::{Device, DeviceError, DeviceKey, DeviceSettings, Serving};
use crate::mailbox::{Message, XenstoreMailbox};
use crate::nodes::{number, optional};
use crate::params::XenParameters;
use crate::platform::xenbus::{DIRECTORIES, EVERYTHING};
use crate::platform::{Domain, Platform, XenStore, XenstoreError};
use crate::served::ServedDevices;
use crate::xenbus_state::{Action, DevicePhase, XenbusState, next};

/// The interval at which the sizes of volumes are checked.
const SIZES: Duration = Duration::from_millis(100);
/// The interval between attempts to connect to xenstore.
const RECONNECT: Duration = Duration::from_secs(1);
/// Most events that are read before devices are checked.
const EVENTS_PER_RUN: u32 = 1024;
/// Most steps of one device before the next device is checked.
const STEPS: u32 = 8;
/// Most log lines about one guest's disks in a period: it may connect and disconnect without end.
const LINES: u32 = 20;
const LINES_PERIOD: Duration = Duration::from_secs(10);
/// Most devices of all guests; more are ignored.
const DEVICES_MAX: usize = 4096;
/// The script of a disk that is attached with the toolstack's configuration.
const SCRIPT: &str = "block-ebbd";
/// The toolstack's backend kind, of which only disks with that script are served.
const TOOLSTACK_KIND: &str = "vbd";

/// Whether a volume that is not found will be added later: then its guests wait for it.
pub type Awaited = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// When [`XenstoreControl::run_once`] is to be called next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextRun {
    /// Nothing is due until this time, or until there is a message from xenstore or another thread.
    Wait(Option<Instant>),
    /// The backend was stopped and no request is in flight: it is not to be called again.
    Ended,
}

/// The backend's side of xenstore; see [`crate::Backend::prepare`].
pub struct XenstoreControl {
    pub(crate) platform: Arc<dyn Platform>,
    pub(crate) store: CountingStore,
    pub(crate) own: Domain,
    pub(crate) kinds: Vec<Arc<str>>,
    pub(crate) workers: Vec<WorkerHandle>,
    pub(crate) parameters: Arc<XenParameters>,
    pub(crate) volumes: Volumes,
    pub(crate) awaited: Awaited,
    pub(crate) settings: DeviceSettings,
    pub(crate) mailbox: XenstoreMailbox,
    pub(crate) inbox: Receiver<Message>,
    pub(crate) served: Arc<ServedDevices>,
    pub(crate) devices: BTreeMap<DeviceKey, Device>,
    pub(crate) dirty: BTreeSet<DeviceKey>,
    /// Limits the xenstore requests that each guest can cause.
    pub(crate) allowances: BTreeMap<Domain, Allowance>,
    /// Limits the log lines about each guest.
    pub(crate) log_limits: BTreeMap<Domain, Arc<LogLimit>>,
    /// Events remain for the next iteration.
    pub(crate) events_remaining: bool,
    pub(crate) generation: u64,
    /// The connection to xenstore is broken.
    pub(crate) broken: bool,
    /// When to connect to xenstore again, and when to check the sizes of volumes; `None` is at once.
    pub(crate) retry: Option<Instant>,
    pub(crate) sizes: Option<Instant>,
    /// To end although requests are in flight.
    pub(crate) abandoned: bool,
    /// Locks that keep other backends from serving the same guests.
    pub(crate) _locks: Vec<std::fs::File>,
}

/// Reports the end, also if the thread panicked.
impl Drop for XenstoreControl {
    fn drop(&mut self) {
        self.served.note_control_end();
    }
}

impl XenstoreControl {
    pub(crate) fn run(mut self) {
        while let NextRun::Wait(until) = self.run_once(ebb_mem::clock::now()) {
            self.wait(until);
        }
    }

    /// Does what is due at `now`.
    pub fn run_once(&mut self, now: Instant) -> NextRun {
        let outcome = match self.broken {
            true => self.reconnect(now),
            false => self.take_events(),
        };
        self.note(outcome, now);
        self.take_messages();
        let stopping = self.served.is_stopping();
        let idle = self.devices.values().all(|device| device.serving.is_none());
        if self.abandoned || stopping && idle {
            return NextRun::Ended;
        }
        if !self.broken && !stopping {
            match self.check_dirty(now) {
                Ok(true) => return NextRun::Wait(Some(now)),
                Ok(false) => {}
                Err(error) => self.note(Err(error), now),
            }
        }
        if !idle && !self.broken && self.sizes.is_none_or(|at| now >= at) {
            self.sizes = Some(now + SIZES);
            self.compare_sizes();
        }
        if self.events_remaining && !self.broken {
            return NextRun::Wait(Some(now));
        }
        NextRun::Wait(self.next_run(stopping))
    }

    /// Notes whether xenstore can be used.
    fn note(&mut self, outcome: Result<(), XenstoreError>, now: Instant) {
        if let Err(error) = outcome {
            tracing::error!(%error, "cannot use xenstore: attached disks are served, new ones are not");
            self.broken = true;
            self.retry = Some(now + RECONNECT);
        }
    }

    fn next_run(&self, stopping: bool) -> Option<Instant> {
        let serving = self.devices.values().any(|device| device.serving.is_some());
        let sizes = self.sizes.filter(|_| serving && !self.broken);
        let look = match self.broken {
            true => self.retry,
            false if stopping => None,
            false => self.dirty.iter().filter_map(|key| self.due(key)).min(),
        };
        [sizes, look].into_iter().flatten().min()
    }

    /// Whether there is an event or a message, so that a call is due at once.
    #[cfg(feature = "shm")]
    pub fn has_events(&self) -> bool {
        self.wait_for(Some(Duration::ZERO))
    }

    /// Waits until the next call is due.
    fn wait(&self, until: Option<Instant>) {
        let span = until.map(|until| until.saturating_duration_since(ebb_mem::clock::now()));
        self.wait_for(span);
    }

    /// Waits for an event or a message, at most for `span`; true if there is one.
    fn wait_for(&self, span: Option<Duration>) -> bool {
        let timeout = span.map(|span| rustix::time::Timespec {
            tv_sec: i64::try_from(span.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: span.subsec_nanos().into(),
        });
        let wakeup = PollFd::from_borrowed_fd(self.mailbox.wakeup(), PollFlags::IN);
        let fd = self.store.fd();
        let store = PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN);
        let mut fds = [wakeup, store];
        let count = if self.broken { 1 } else { 2 };
        // If it was interrupted, the caller checks everything anyway.
        poll(&mut fds[..count], timeout.as_ref()).is_ok_and(|ready| ready > 0)
    }

    fn kind_path(&self, kind: &str) -> String {
        format!("/local/domain/{}/backend/{kind}", self.own)
    }

    fn watch_kinds(&mut self) -> Result<(), XenstoreError> {
        for kind in self.kinds.clone() {
            let path = self.kind_path(&kind);
            self.store.watch(&path, DIRECTORIES)?;
        }
        Ok(())
    }

    /// Connects to xenstore, the first time and after the connection broke.
    fn reconnect(&mut self, now: Instant) -> Result<(), XenstoreError> {
        if self.retry.is_some_and(|at| now < at) {
            return Ok(());
        }
        if self.retry.is_some() {
            self.store = CountingStore::new(self.platform.xenstore()?);
        }
        self.watch_kinds()?;
        for (key, device) in &mut self.devices {
            self.store.watch(&format!("{}/state", device.frontend), &key.name())?;
            device.watch_begins = true;
        }
        self.mark_all();
        self.broken = false;
        self.take_events()
    }

    /// Reads events; what exceeds the limit is left for the next iteration.
    fn take_events(&mut self) -> Result<(), XenstoreError> {
        self.events_remaining = false;
        for _ in 0..EVENTS_PER_RUN {
            let Some((path, token)) = self.store.event()? else { return Ok(()) };
            if token == EVERYTHING {
                for kind in self.kinds.clone() {
                    self.find_devices(&kind)?;
                }
                self.mark_all();
            } else if token == DIRECTORIES {
                self.backend_changed(&path)?;
            } else if let Some(key) = DeviceKey::parse(&token, &self.kinds) {
                self.frontend_changed(key);
            }
        }
        self.events_remaining = true;
        Ok(())
    }

    /// A guest wrote its state, possibly with the value it had.
    fn frontend_changed(&mut self, key: DeviceKey) {
        if let Some(device) = self.devices.get_mut(&key) {
            device.changed = true;
            device.rings.needed = true;
            device.written |= !std::mem::take(&mut device.watch_begins);
            self.dirty.insert(key);
        }
    }

    /// Marks a device for a check from scratch.
    fn mark(&mut self, key: &DeviceKey) {
        if let Some(device) = self.devices.get_mut(key) {
            device.changed = true;
            device.idle_seen = None;
        }
        self.dirty.insert(key.clone());
    }

    /// As [`XenstoreControl::mark`] for all devices, whose events may have been lost.
    fn mark_all(&mut self) {
        for (key, device) in &mut self.devices {
            device.changed = true;
            device.idle_seen = None;
            device.rings.needed = true;
            self.dirty.insert(key.clone());
        }
    }

    /// Something below one of the served kinds changed: a known device, or possibly a new one.
    fn backend_changed(&mut self, path: &str) -> Result<(), XenstoreError> {
        for kind in self.kinds.clone() {
            let base = self.kind_path(&kind);
            let Some(rest) = path.strip_prefix(&base) else { continue };
            if !rest.is_empty() && !rest.starts_with('/') {
                continue;
            }
            let mut parts = rest.split('/').skip(1);
            match (parts.next().and_then(number), parts.next().and_then(number)) {
                (Some(guest), Some(device)) => self.note_device(&kind, guest, device),
                _ => self.find_devices(&kind)?,
            }
        }
        Ok(())
    }

    fn find_devices(&mut self, kind: &Arc<str>) -> Result<(), XenstoreError> {
        let base = self.kind_path(kind);
        for guest in list(&mut self.store, &base)? {
            for device in list(&mut self.store, &format!("{base}/{guest}"))? {
                if let (Some(guest), Some(device)) = (number(&guest), number(&device)) {
                    self.note_device(kind, guest, device);
                }
            }
        }
        Ok(())
    }

    fn note_device(&mut self, kind: &Arc<str>, guest: u32, device: u32) {
        let Ok(guest) = Domain::try_from(guest) else { return };
        let key = DeviceKey { kind: kind.clone(), guest, device };
        if self.devices.contains_key(&key) || self.devices.len() < DEVICES_MAX {
            self.mark(&key);
        }
    }

    fn take_messages(&mut self) {
        self.mailbox.clear_wakeup();
        while let Ok(message) = self.inbox.try_recv() {
            match message {
                Message::Ended(key, generation) => self.ring_ended(&key, generation),
                Message::Stop => {}
                Message::Abandon => self.abandoned = true,
                Message::VolumeAdded => self.mark_all(),
                Message::AllowChanged => {
                    for (key, device) in &mut self.devices {
                        device.recheck_access = true;
                        device.changed = true;
                        device.idle_seen = None;
                        self.dirty.insert(key.clone());
                    }
                }
                Message::Withdraw(volume) => self.withdraw(&volume),
            }
        }
    }

    /// Notes that the devices of a volume are being drained.
    fn withdraw(&mut self, volume: &Weak<Volume>) {
        for (key, device) in &mut self.devices {
            // Not by name: a device may be served by a new volume of that name already.
            let of_it = |serving: &&Serving| Arc::as_ptr(&serving.disk.volume) == volume.as_ptr();
            if let Some(serving) = device.serving.as_ref().filter(of_it) {
                let name = serving.disk.volume.name().to_string();
                device.phase = DevicePhase::Draining;
                device.withdrawn = Some(name);
                device.idle_seen = None;
                device.changed = true;
                self.dirty.insert(key.clone());
            }
        }
    }

    fn ring_ended(&mut self, key: &DeviceKey, generation: u64) {
        let Some(device) = self.devices.get_mut(key) else { return };
        let Some(serving) = &mut device.serving else { return };
        if serving.generation != generation {
            return;
        }
        serving.running = serving.running.saturating_sub(1);
        if serving.running > 0 {
            return;
        }
        // The journals of a withdrawn volume stay: a successor may find the guest before it has released the
        // disk, and has to know which store the disk was on.
        if !self.served.is_stopping() && device.withdrawn.is_none() {
            for path in &serving.journals {
                let _ = std::fs::remove_file(path);
            }
        }
        device.serving = None;
        device.lease = None;
        if device.phase == DevicePhase::Draining {
            device.phase = DevicePhase::Closed;
        }
        self.served.remove(key);
        if let Some(suppressed) = self.log_limit_of(key).admit(ebb_mem::clock::now()) {
            tracing::info!(device = key.name(), suppressed, "disconnected");
        }
        self.mark(key);
    }

    /// The limit of log lines about a device's guest.
    pub(super) fn log_limit_of(&mut self, key: &DeviceKey) -> Arc<LogLimit> {
        let new = || Arc::new(LogLimit::new(LINES, LINES_PERIOD));
        self.log_limits.entry(key.guest).or_insert_with(new).clone()
    }

    /// When a changed device may be checked; `None` is at once.
    fn due(&self, key: &DeviceKey) -> Option<Instant> {
        let next = self.devices.get(key).and_then(Device::next_check);
        next.max(self.allowances.get(&key.guest).map(Allowance::ready_at))
    }

    /// Checks devices that changed; true if at least one was checked.
    fn check_dirty(&mut self, now: Instant) -> Result<bool, XenstoreError> {
        let due = |key: &&DeviceKey| self.due(key).is_none_or(|at| now >= at);
        let due: Vec<DeviceKey> = self.dirty.iter().filter(due).cloned().collect();
        let mut any = false;
        for key in due {
            // The guest's other devices may have used up its allowance.
            if !self.charge(&key, 0, now) {
                continue;
            }
            self.dirty.remove(&key);
            any = true;
            self.check_device(&key, now)?;
        }
        Ok(any)
    }

    /// Charges xenstore requests to the allowance of a device's guest; true if it may cause more.
    fn charge(&mut self, key: &DeviceKey, requests: u64, now: Instant) -> bool {
        let Some(allowance) = self.allowances.get_mut(&key.guest) else { return true };
        allowance.take(requests);
        allowance.is_ready(now)
    }

    /// Adds a device that is not known yet; false if it is not served here, or not complete yet.
    fn discover(&mut self, key: &DeviceKey, now: Instant) -> Result<bool, XenstoreError> {
        if self.devices.contains_key(key) {
            return Ok(true);
        }
        let base = key.base(self.own);
        let store = &mut self.store;
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
        let device = Device::new(base, frontend);
        self.devices.insert(key.clone(), device);
        self.allowances.entry(key.guest).or_insert_with(|| Allowance::new(now)).add_device();
        Ok(true)
    }

    fn check_device(&mut self, key: &DeviceKey, now: Instant) -> Result<(), XenstoreError> {
        self.store.take_count();
        let outcome = self.run_steps(key, now);
        let requests = self.store.take_count();
        self.charge(key, requests, now);
        let device = self.devices.get_mut(key).filter(|device| device.serving.is_none());
        if let Some(device) = device.filter(|device| device.phase != DevicePhase::Waiting) {
            device.lease = None;
        }
        outcome
    }

    fn run_steps(&mut self, key: &DeviceKey, now: Instant) -> Result<(), XenstoreError> {
        if !self.discover(key, now)? {
            return Ok(());
        }
        for step in 0..STEPS {
            if self.served.is_stopping() {
                return Ok(());
            }
            let requests = self.store.take_count();
            if !self.charge(key, requests, now) && step > 0 {
                break;
            }
            let Some(device) = self.devices.get_mut(key) else { return Ok(()) };
            device.checked_at = Some(now);
            device.changed = false;
            if device.serving.is_none()
                && let Some(name) = device.withdrawn.take()
            {
                self.fail(key, &DeviceError::Withdrawn(name))?;
                continue;
            }
            if device.recheck_access {
                self.end_if_disallowed(key)?;
            }
            let Some(device) = self.devices.get_mut(key) else { return Ok(()) };
            if device.serving.is_none()
                && let Some(name) = device.disallowed.take()
            {
                self.fail(key, &DeviceError::NotAllowed { volume: name, guest: key.guest })?;
                continue;
            }
            let written = std::mem::take(&mut device.written);
            let seen = actions::observe(&mut self.store, device, self.settings.max_queues, now)?;
            if let DevicePhase::Connected { settled } = &mut device.phase {
                *settled |= seen.frontend == Some(XenbusState::Connected);
            }
            let (begun, over) = (Some(XenbusState::Initialising), Some(XenbusState::Closed));
            // The frontend restarts: its state was seen to be closed, or, if that was missed, it has written its state since.
            let anew = seen.frontend == over || seen.frontend == begun && written;
            if device.phase == DevicePhase::Failed && anew && seen.own == over {
                device.phase = DevicePhase::Closed;
            }
            let failed = device.phase == DevicePhase::Failed && seen.frontend == begun && !written;
            let action = next(device.phase, &seen);
            if action == Action::Nothing {
                device.idle_seen = Some(seen);
                if device.rings.needed {
                    self.dirty.insert(key.clone());
                }
                return Ok(());
            }
            device.idle_seen = None;
            let outcome = match action {
                Action::Nothing => Ok(()),
                Action::Offer => self.offer(key),
                Action::Connect | Action::Resume => {
                    self.connect(key, seen.frontend == Some(XenbusState::Connected))
                }
                Action::Disconnect => {
                    self.disconnect(key);
                    Ok(())
                }
                Action::Show(state) => {
                    let shown = self.show(key, state).map_err(DeviceError::from);
                    if failed {
                        self.set_phase(key, DevicePhase::Failed);
                    }
                    shown
                }
                Action::Fail => Err(DeviceError::BadState),
                Action::Forget => return self.forget(key),
            };
            match outcome {
                Ok(()) => {}
                // Checked again when the volume is added: a guest that waits for a successor keeps waiting.
                Err(DeviceError::NoVolume(name)) if (self.awaited)(&name) => {
                    tracing::info!(
                        device = key.name(),
                        volume = name,
                        "the device waits for its volume"
                    );
                    return Ok(());
                }
                // The other writer may be about to end, as when a guest is restarted or migrated.
                Err(DeviceError::Writer(_)) if self.may_wait(key, now) => {
                    self.mark(key);
                    return Ok(());
                }
                Err(DeviceError::Nodes(crate::nodes::NodeError::Store(
                    error @ XenstoreError::Io(_),
                ))) => {
                    return Err(error);
                }
                Err(error) => self.fail(key, &error)?,
            }
        }
        self.mark(key);
        Ok(())
    }
}

fn list(store: &mut dyn XenStore, path: &str) -> Result<Vec<String>, XenstoreError> {
    match store.list(0, path) {
        Err(XenstoreError::Missing) => Ok(Vec::new()),
        other => other,
    }
}
