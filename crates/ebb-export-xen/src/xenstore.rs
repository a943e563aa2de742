//! The xenstore side: finds devices, follows their states, publishes, connects and disconnects.
//!
//! One thread does this for all guests, with calls that wait for xenstored. What a guest does to
//! its nodes only marks its device to be looked at, and each device is looked at every few
//! milliseconds at most: floods of changes cost the flooder its changes, and nobody memory (XSA-349).
//!
//! [`XenstoreControl::turn`] does what is due and says when to call it again. The thread calls it in a loop and waits in
//! between; a test may call it itself, with times of its own.

mod actions;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ebb_io::WorkerHandle;
use ebb_mem::PoolParameters;
use ebb_volume::{LogLimit, Volume};
use rustix::event::{PollFd, PollFlags, poll};

use crate::allowance::Allowance;
use crate::counted::Counted;
use crate::device::{Device, DeviceError, Key, Settings};
use crate::mailbox::{Mailbox, Message};
use crate::nodes::{number, optional};
use crate::params::XenParameters;
use crate::platform::xenbus::{DIRECTORIES, EVERYTHING};
use crate::platform::{Domain, Platform, StoreError, XenStore};
use crate::served::Served;
use crate::xenbus_state::{Action, Phase, State, next};

/// How often volumes are asked for their size.
const SIZES: Duration = Duration::from_millis(100);
/// How long to wait before xenstore is tried again.
const RECONNECT: Duration = Duration::from_secs(1);
/// Events that are taken in before devices are looked at.
const EVENTS: u32 = 1024;
/// Steps of a device before the next one has its turn.
const STEPS: u32 = 8;
/// Lines of the log about one guest's disks in so much time: it may connect and leave without end.
const LINES: u32 = 20;
const LINES_PERIOD: Duration = Duration::from_secs(10);
/// Devices of all guests; more are not looked at.
const DEVICES_MAX: usize = 4096;
/// What a disk line's script is called.
const SCRIPT: &str = "block-ebbd";
/// The backend kind of the toolstack's own, which is served where the kernel does not.
const TOOLSTACK_KIND: &str = "vbd";

/// Whether a volume that is not found will come: then its guests wait for it.
pub type Awaited = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Finds a volume by name, with the limits of its page pools.
pub type Lookup = Arc<dyn Fn(&str) -> Option<(Arc<Volume>, Arc<PoolParameters>)> + Send + Sync>;

/// What a turn of [`XenstoreControl`] left to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing until this time, or until xenstore or another thread has something new.
    Wait(Option<Instant>),
    /// The backend was stopped, and nothing is under way any more: there are no more turns.
    Ended,
}

/// The backend's side of xenstore; see [`crate::Backend::prepare`].
pub struct XenstoreControl {
    pub(crate) platform: Arc<dyn Platform>,
    pub(crate) store: Counted,
    pub(crate) own: Domain,
    pub(crate) kinds: Vec<Arc<str>>,
    pub(crate) workers: Vec<WorkerHandle>,
    pub(crate) parameters: Arc<XenParameters>,
    pub(crate) volumes: Lookup,
    pub(crate) awaited: Awaited,
    pub(crate) settings: Settings,
    pub(crate) mailbox: Mailbox,
    pub(crate) inbox: Receiver<Message>,
    pub(crate) served: Arc<Served>,
    pub(crate) devices: BTreeMap<Key, Device>,
    pub(crate) dirty: BTreeSet<Key>,
    /// What each guest may make us ask of xenstored.
    pub(crate) allowances: BTreeMap<Domain, Allowance>,
    /// What of each guest goes to the log.
    pub(crate) lines: BTreeMap<Domain, Arc<LogLimit>>,
    /// Events were left for the next turn.
    pub(crate) more: bool,
    pub(crate) generation: u64,
    /// Xenstore is of no use until it is connected to again.
    pub(crate) broken: bool,
    /// When xenstore is tried again, and when volumes are asked for their size; at once at first.
    pub(crate) retry: Option<Instant>,
    pub(crate) sizes: Option<Instant>,
    /// Told to end whatever is under way.
    pub(crate) given_up: bool,
    /// Keep other backends from the same guests.
    pub(crate) _locks: Vec<std::fs::File>,
}

/// Says that there are no more turns, also when a turn panicked.
impl Drop for XenstoreControl {
    fn drop(&mut self) {
        self.served.note_end();
    }
}

impl XenstoreControl {
    pub(crate) fn run(mut self) {
        while let Turn::Wait(until) = self.turn(ebb_mem::clock::now()) {
            self.wait(until);
        }
    }

    /// Does what is due at `now`.
    pub fn turn(&mut self, now: Instant) -> Turn {
        let outcome = match self.broken {
            true => self.reconnect(now),
            false => self.take_events(),
        };
        self.note(outcome, now);
        self.take_messages();
        let leaving = self.served.is_leaving();
        let idle = self.devices.values().all(|device| device.serving.is_none());
        if self.given_up || leaving && idle {
            return Turn::Ended;
        }
        if !self.broken && !leaving {
            match self.look_at_dirty(now) {
                Ok(true) => return Turn::Wait(Some(now)),
                Ok(false) => {}
                Err(error) => self.note(Err(error), now),
            }
        }
        if !idle && !self.broken && self.sizes.is_none_or(|at| now >= at) {
            self.sizes = Some(now + SIZES);
            self.compare_sizes();
        }
        if self.more && !self.broken {
            return Turn::Wait(Some(now));
        }
        Turn::Wait(self.next_turn(leaving))
    }

    /// Notes whether xenstore can be used.
    fn note(&mut self, outcome: Result<(), StoreError>, now: Instant) {
        if let Err(error) = outcome {
            tracing::error!(%error, "xenstore cannot be reached: disks are served, none is attached");
            self.broken = true;
            self.retry = Some(now + RECONNECT);
        }
    }

    fn next_turn(&self, leaving: bool) -> Option<Instant> {
        let serving = self.devices.values().any(|device| device.serving.is_some());
        let sizes = self.sizes.filter(|_| serving && !self.broken);
        let look = match self.broken {
            true => self.retry,
            false if leaving => None,
            false => self.dirty.iter().filter_map(|key| self.due(key)).min(),
        };
        [sizes, look].into_iter().flatten().min()
    }

    /// Whether xenstore or another thread has something new, so that a turn is due whatever the time is.
    pub fn has_news(&self) -> bool {
        self.wait_for(Some(Duration::ZERO))
    }

    /// Waits until it is time for a turn.
    fn wait(&self, until: Option<Instant>) {
        let span = until.map(|until| until.saturating_duration_since(ebb_mem::clock::now()));
        self.wait_for(span);
    }

    /// Waits for news, for so long at most; true if there are some.
    fn wait_for(&self, span: Option<Duration>) -> bool {
        let timeout = span.map(|span| rustix::time::Timespec {
            tv_sec: i64::try_from(span.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: span.subsec_nanos().into(),
        });
        let bell = PollFd::from_borrowed_fd(self.mailbox.bell(), PollFlags::IN);
        let fd = self.store.fd();
        let store = PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN);
        let mut fds = [bell, store];
        let count = if self.broken { 1 } else { 2 };
        // Interrupted or not, everything is looked at next.
        poll(&mut fds[..count], timeout.as_ref()).is_ok_and(|ready| ready > 0)
    }

    fn kind_path(&self, kind: &str) -> String {
        format!("/local/domain/{}/backend/{kind}", self.own)
    }

    fn watch_kinds(&mut self) -> Result<(), StoreError> {
        for kind in self.kinds.clone() {
            let path = self.kind_path(&kind);
            self.store.watch(&path, DIRECTORIES)?;
        }
        Ok(())
    }

    /// Connects to xenstore, the first time and whenever the connection broke.
    fn reconnect(&mut self, now: Instant) -> Result<(), StoreError> {
        if self.retry.is_some_and(|at| now < at) {
            return Ok(());
        }
        if self.retry.is_some() {
            self.store = Counted::new(self.platform.xenstore()?);
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

    /// Takes in what xenstore tells; what is too much for one turn is left for the next one.
    fn take_events(&mut self) -> Result<(), StoreError> {
        self.more = false;
        for _ in 0..EVENTS {
            let Some((path, token)) = self.store.event()? else { return Ok(()) };
            if token == EVERYTHING {
                for kind in self.kinds.clone() {
                    self.find_devices(&kind)?;
                }
                self.mark_all();
            } else if token == DIRECTORIES {
                self.backend_changed(&path)?;
            } else if let Some(key) = Key::parse(&token, &self.kinds) {
                self.frontend_changed(key);
            }
        }
        self.more = true;
        Ok(())
    }

    /// A guest wrote its state, perhaps the one it had.
    fn frontend_changed(&mut self, key: Key) {
        if let Some(device) = self.devices.get_mut(&key) {
            device.touched = true;
            device.rings.open = true;
            device.written |= !std::mem::take(&mut device.watch_begins);
            self.dirty.insert(key);
        }
    }

    /// A device is to be looked at as if nothing were known of it.
    fn mark(&mut self, key: &Key) {
        if let Some(device) = self.devices.get_mut(key) {
            device.touched = true;
            device.rested = None;
        }
        self.dirty.insert(key.clone());
    }

    /// As [`XenstoreControl::mark`] for all devices; events of theirs may have been lost.
    fn mark_all(&mut self) {
        for (key, device) in &mut self.devices {
            device.touched = true;
            device.rested = None;
            device.rings.open = true;
            self.dirty.insert(key.clone());
        }
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
        for guest in list(&mut self.store, &base)? {
            for device in list(&mut self.store, &format!("{base}/{guest}"))? {
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
            self.mark(&key);
        }
    }

    fn take_messages(&mut self) {
        self.mailbox.answer_bell();
        while let Ok(message) = self.inbox.try_recv() {
            match message {
                Message::Ended(key, generation) => self.ring_ended(&key, generation),
                Message::Leave => {}
                Message::GiveUp => self.given_up = true,
                Message::Arrived => self.mark_all(),
                Message::Withdraw(name) => self.withdraw(&name),
            }
        }
    }

    /// The devices of a volume are being wound up.
    fn withdraw(&mut self, name: &str) {
        for (key, device) in &mut self.devices {
            let serving = device.serving.as_ref();
            if serving.is_some_and(|serving| **serving.disk.volume.name() == *name) {
                device.phase = Phase::Draining;
                device.withdrawn = Some(name.to_owned());
                device.rested = None;
                device.touched = true;
                self.dirty.insert(key.clone());
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
        if serving.running > 0 {
            return;
        }
        // A guest whose volume was withdrawn may meet a successor before it has let go of the disk: that must
        // know which store the disk was on.
        if !self.served.is_leaving() && device.withdrawn.is_none() {
            for path in &serving.journals {
                let _ = std::fs::remove_file(path);
            }
        }
        device.serving = None;
        device.lease = None;
        if device.phase == Phase::Draining {
            device.phase = Phase::Closed;
        }
        self.served.remove(key);
        if let Some(suppressed) = self.lines_of(key).admit(ebb_mem::clock::now()) {
            tracing::info!(device = key.name(), suppressed, "disconnected");
        }
        self.mark(key);
    }

    /// What rations the lines about a device's guest.
    pub(super) fn lines_of(&mut self, key: &Key) -> Arc<LogLimit> {
        let new = || Arc::new(LogLimit::new(LINES, LINES_PERIOD));
        self.lines.entry(key.guest).or_insert_with(new).clone()
    }

    /// When a device that changed may be looked at; `None` is at once.
    fn due(&self, key: &Key) -> Option<Instant> {
        let next = self.devices.get(key).and_then(Device::next_look);
        next.max(self.allowances.get(&key.guest).map(Allowance::ready_at))
    }

    /// Looks at devices that changed; true if at one at least.
    fn look_at_dirty(&mut self, now: Instant) -> Result<bool, StoreError> {
        let due = |key: &&Key| self.due(key).is_none_or(|at| now >= at);
        let due: Vec<Key> = self.dirty.iter().filter(due).cloned().collect();
        let mut any = false;
        for key in due {
            // A guest's devices before this one may have taken all there was.
            if !self.pay(&key, 0, now) {
                continue;
            }
            self.dirty.remove(&key);
            any = true;
            self.look(&key, now)?;
        }
        Ok(any)
    }

    /// Takes requests to xenstored from the allowance of a device's guest; true if it may cause more.
    fn pay(&mut self, key: &Key, requests: u64, now: Instant) -> bool {
        let Some(allowance) = self.allowances.get_mut(&key.guest) else { return true };
        allowance.take(requests);
        allowance.is_ready(now)
    }

    /// Takes in a device that was not known; false if it is not ours, or not complete yet.
    fn adopt(&mut self, key: &Key, now: Instant) -> Result<bool, StoreError> {
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

    fn look(&mut self, key: &Key, now: Instant) -> Result<(), StoreError> {
        self.store.take_count();
        let outcome = self.take_steps(key, now);
        let requests = self.store.take_count();
        self.pay(key, requests, now);
        let device = self.devices.get_mut(key).filter(|device| device.serving.is_none());
        if let Some(device) = device.filter(|device| device.phase != Phase::Waiting) {
            device.lease = None;
        }
        outcome
    }

    fn take_steps(&mut self, key: &Key, now: Instant) -> Result<(), StoreError> {
        if !self.adopt(key, now)? {
            return Ok(());
        }
        for step in 0..STEPS {
            if self.served.is_leaving() {
                return Ok(());
            }
            let requests = self.store.take_count();
            if !self.pay(key, requests, now) && step > 0 {
                break;
            }
            let Some(device) = self.devices.get_mut(key) else { return Ok(()) };
            device.looked = Some(now);
            device.touched = false;
            if device.serving.is_none()
                && let Some(name) = device.withdrawn.take()
            {
                self.fail(key, &DeviceError::Withdrawn(name))?;
                continue;
            }
            let written = std::mem::take(&mut device.written);
            let seen = actions::see(&mut self.store, device, self.settings.max_queues, now)?;
            if let Phase::Connected { settled } = &mut device.phase {
                *settled |= seen.frontend == Some(State::Connected);
            }
            let (begun, over) = (Some(State::Initialising), Some(State::Closed));
            // It begins anew: as is seen by its end, or, if that went unseen, by its having written its state since.
            let anew = seen.frontend == over || seen.frontend == begun && written;
            if device.phase == Phase::Failed && anew && seen.own == over {
                device.phase = Phase::Closed;
            }
            let failed = device.phase == Phase::Failed && seen.frontend == begun && !written;
            let action = next(device.phase, &seen);
            if action == Action::Nothing {
                device.rested = Some(seen);
                if device.rings.open {
                    self.dirty.insert(key.clone());
                }
                return Ok(());
            }
            device.rested = None;
            let outcome = match action {
                Action::Nothing => Ok(()),
                Action::Offer => self.offer(key),
                Action::Connect | Action::Resume => {
                    self.connect(key, seen.frontend == Some(State::Connected))
                }
                Action::Disconnect => {
                    self.disconnect(key);
                    Ok(())
                }
                Action::Show(state) => {
                    let shown = self.show(key, state).map_err(DeviceError::from);
                    if failed {
                        self.set_phase(key, Phase::Failed);
                    }
                    shown
                }
                Action::Fail => Err(DeviceError::BadState),
                Action::Forget => return self.forget(key),
            };
            match outcome {
                Ok(()) => {}
                // Looked at again when it is there: a guest that waits for a successor waits on.
                Err(DeviceError::NoVolume(name)) if (self.awaited)(&name) => {
                    tracing::info!(device = key.name(), volume = name, "waits for its volume");
                    return Ok(());
                }
                // The one before may be about to end, as when a guest is restarted or moves.
                Err(DeviceError::Writer(_)) if self.may_wait(key, now) => {
                    self.mark(key);
                    return Ok(());
                }
                Err(DeviceError::Nodes(crate::nodes::NodeError::Store(
                    error @ StoreError::Io(_),
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

fn list(store: &mut dyn XenStore, path: &str) -> Result<Vec<String>, StoreError> {
    match store.list(0, path) {
        Err(StoreError::Missing) => Ok(Vec::new()),
        other => other,
    }
}
