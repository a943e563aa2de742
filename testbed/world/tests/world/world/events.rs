//! The events of a world.
//!
//! A new kind of event needs four places: the variant of [`Event`], with its row in [`EVENTS`] (and in the lists of
//! `theme.rs` where that situation wants it); its arm in [`World::apply_event`], which draws what it needs from the world's
//! random numbers, notes it in the trace and does it; what the oracle or the disks have to know of it, so that its
//! consequences are expected; and its line in the list of events in docs/adr/0007-world.md. `Event::Guest` is in no list:
//! a world with Xen guests adds it. Those of overlays are in `overlays.rs`.
//!
//! A new row, or another frequency, changes what every seed means: [`Theme::events`](super::theme::Theme) draws once for
//! each row, and each event draws among all of them. Seeds that are named in docs, tests or reports belong to the commit
//! they were found at.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use ebb_mem::pressure::Level;
use ebb_store::{Faults, TestStore};
use ebb_volume::Mode;
use ebb_volume::Resize;

use super::World;
use crate::daemon::{self, Later};
use crate::oracle::{Oracle, SECTOR};

/// The kinds of events. The lists have the relative frequency of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Faults,
    Hang,
    Remote,
    Lose,
    Pressure,
    Leave,
    Deaf,
    Parameters,
    Reload,
    Resize,
    Opening,
    Kill,
    PowerCut,
    Stop,
    Guest,
    Kvm,
    Snapshot,
    DeleteSnapshot,
    OpenSnapshot,
    ReadSnapshot,
    Flush,
    Flatten,
    Commit,
    Cancel,
    BadSyncs,
    Idle,
    Names,
    State,
    Mount,
    Mistake,
    Health,
    Takeover,
    Broker,
    Clone,
    Damage,
    OtherState,
}

pub(super) const EVENTS: [(Event, u64); 14] = [
    (Event::Faults, 20),
    (Event::Hang, 10),
    (Event::Remote, 15),
    (Event::Lose, 5),
    (Event::Pressure, 20),
    (Event::Leave, 15),
    (Event::Deaf, 8),
    (Event::Parameters, 8),
    (Event::Reload, 8),
    (Event::Resize, 4),
    (Event::Opening, 4),
    (Event::Kill, 5),
    (Event::PowerCut, 3),
    (Event::Stop, 3),
];

impl World {
    pub(super) fn apply_event(&mut self) -> Result<(), String> {
        let all: u64 = self.events.iter().map(|(_, share)| share).sum();
        if all == 0 {
            return Ok(());
        }
        let mut at = self.random.below(all);
        let mut event = self.events[0].0;
        for (which, share) in &self.events {
            event = *which;
            if at < *share {
                break;
            }
            at -= share;
        }
        self.trace.mix(event as u64);
        match event {
            Event::Faults => self.set_faults(),
            Event::Hang => self.hang(),
            Event::Remote => self.apply_remote_event(),
            Event::Lose => self.lose(),
            Event::Pressure => {
                let level = self.random.pick(&[Level::L0, Level::L1, Level::L2, Level::L3]);
                self.note(format_args!("pressure {level:?}"));
                let now = self.now;
                self.daemon().pressure(level, now);
            }
            Event::Leave => {
                let number = self.random.index(self.client_slots.len());
                if self.random.chance(50) {
                    self.leave(number);
                } else if let Some(client) = &mut self.client_slots[number].client {
                    client.goodbye();
                    self.note(format_args!("client {number} disconnects"));
                }
            }
            Event::Deaf => {
                let number = self.random.index(self.client_slots.len());
                if let Some(client) = &mut self.client_slots[number].client {
                    client.deaf = !client.deaf;
                    client.may_be_ended = true;
                    let deaf = client.deaf;
                    self.note(format_args!("client {number} does not read replies: {deaf}"));
                }
            }
            Event::Parameters => self.set_parameters(),
            Event::Reload => self.reload(),
            Event::Resize => self.resize(),
            Event::Opening => self.opening(),
            Event::Kill if self.plan_death() => {}
            Event::Kill => {
                self.kill(false)?;
                self.start()?;
            }
            Event::PowerCut => {
                self.kill(true)?;
                self.start()?;
            }
            Event::Stop => {
                self.stop()?;
                self.start()?;
            }
            Event::Guest => self.apply_guest_event(),
            Event::Kvm => self.apply_kvm_event(),
            Event::Idle => self.idle()?,
            Event::Names => self.change_names()?,
            Event::State => self.fail_state(),
            Event::Mount => self.mount()?,
            Event::OtherState => self.try_other_state()?,
            Event::Mistake => self.mistake()?,
            Event::Damage => self.damage_file(),
            Event::Broker => self.apply_broker_event()?,
            Event::Takeover => self.hand_over()?,
            Event::Health => self.check_health()?,
            event => self.apply_overlay_event(event),
        }
        Ok(())
    }

    fn set_faults(&mut self) {
        let at = self.random.index(self.sites.len());
        let random = &mut self.random;
        let faults = if random.chance(50) {
            Faults::default()
        } else {
            Faults {
                reads: random.pick(&[0, 0, 20, 200]),
                writes: random.pick(&[0, 0, 20, 200]),
                flushes: random.pick(&[0, 50, 300]),
                late: random.pick(&[0, 0, 50]),
                late_us: 3_000,
                ..Faults::default()
            }
        };
        let (latency, waits) = (random.pick(&[0, 0, 20, 100, 1000]), random.pick(&[0, 0, 2, 8]));
        if !self.sites[at].is_on_a_disk() {
            return;
        }
        // A base that is below others is written by a commit only.
        let flushes = if self.sites[at].config.read_only { 0 } else { faults.flushes };
        let faults = Faults { flushes, ..faults };
        self.sites[at].set_faults(&faults, latency, waits);
        for at in self.on_same_disk(at) {
            self.sites[at].fails = faults.writes > 0 || faults.flushes > 0;
            self.sites[at].judge(self.now);
        }
        self.note(format_args!("disk {at}: {faults:?}, {latency} us, {waits} waits"));
    }

    fn hang(&mut self) {
        let at = self.random.index(self.sites.len());
        let hang = self.random.chance(50);
        self.set_hang(at, hang);
    }

    pub(super) fn set_hang(&mut self, at: usize, hang: bool) {
        let now = self.now;
        if !self.sites[at].is_on_a_disk() {
            return;
        }
        self.sites[at].set_hangs(hang);
        for at in self.on_same_disk(at) {
            let site = &mut self.sites[at];
            site.hangs = hang;
            site.hung |= hang;
            site.judge(now);
        }
        self.note(format_args!("disk {at} hangs: {hang}"));
    }

    fn lose(&mut self) {
        let at = self.random.index(self.sites.len());
        let full = self.random.chance(60);
        if !self.sites[at].is_on_a_disk() || self.sites[at].config.read_only {
            return;
        }
        if full {
            let room = self.random.pick(&[None, None, Some(0), Some(100 << 10)]);
            let room = if self.random.chance(30) { self.fill_in_background(at) } else { room };
            self.sites[at].set_room(room);
            for at in self.on_same_disk(at) {
                self.sites[at].full = room.is_some();
                self.sites[at].judge(self.now);
            }
            self.note(format_args!("disk {at} has room for {room:?}"));
        } else {
            self.sites[at].stores().iter().for_each(|disk| disk.lose());
            self.note(format_args!("disk {at} loses data that was not flushed"));
        }
    }

    /// A disk found no room when it wrote earlier data, which it reports as "no space" to the next
    /// flush or write with FUA. Returns the room for new writes.
    fn fill_in_background(&mut self, at: usize) -> Option<u64> {
        let faults = Faults { told_as_full: true, ..Faults::default() };
        for disk in self.sites[at].stores() {
            disk.faults(&faults);
            disk.lose();
        }
        Some(self.random.pick(&[4, 6, 24, 80]) << 10)
    }

    fn set_parameters(&mut self) {
        const VALUES: [(&str, &[u64]); 7] = [
            ("cache_max", &[1 << 20, 2 << 20, 8 << 20]),
            ("cache_min", &[0, 65536, 1 << 20]),
            ("max_buffer_pages", &[0, 16, 1024]),
            ("buffer_squeeze_duration_ms", &[0, 10, 1000]),
            ("max_clients", &[2, 8, 256]),
            ("max_request", &[4096, 65536, 32 << 20]),
            ("connection_memory", &[65536, 1 << 20, 64 << 20]),
        ];
        let (name, values) = self.random.pick(&VALUES);
        let value = self.random.pick(values);
        let set = self.daemon().set(name, Some(value));
        self.note(format_args!("{name} = {value}: {set}"));
    }

    /// The next configuration is read when this one was.
    pub(super) fn is_reloading(&self) -> bool {
        self.reloading.as_ref().is_some_and(|later| later.borrow().is_none())
    }

    /// Changes the configuration, and reloads it.
    fn reload(&mut self) {
        if self.is_reloading() {
            return;
        }
        let at = self.random.index(self.sites.len());
        let modes = [Mode::None, Mode::Writethrough, Mode::Writeback];
        let mode = self.random.pick(&modes);
        let site = &mut self.sites[at];
        if site.config.read_only || site.run_time.is_some() || site.at_run_time {
            // It is below others, or not in the configuration.
        } else if self.random.chance(30) {
            site.listed = !site.listed;
        } else if site.may_have(mode) {
            site.config.mode = mode;
        }
        if self.sites.iter().all(|site| !site.listed) {
            self.sites[at].listed = true;
        }
        let (mode, listed) = (self.sites[at].config.mode, self.sites[at].listed);
        self.note(format_args!("reload: v{at} {mode}, listed: {listed}"));
        let reload = self.read_configuration();
        if !self.kvm.slots.is_empty() {
            self.kvm.reloads.push(reload);
        }
    }

    pub(super) fn read_configuration(&mut self) -> Later<()> {
        self.note_kept_volumes();
        for site in &mut self.sites {
            site.reloaded = site.oracle.now();
            site.changed.get_or_insert(self.now);
        }
        let text = daemon::configuration(&self.daemon().settings.clone(), &self.listed());
        let Some(state) = self.state.clone() else {
            return self.daemon().reload(daemon::parsed(&text), Duration::ZERO);
        };
        let pause = if self.calm { 0 } else { self.random.below(3_000) };
        state.write_configuration(&text);
        self.daemon().engine.begin_reading();
        let later = match state.load_again(true) {
            Ok(config) => {
                self.unread = false;
                self.daemon().reload(config, Duration::from_micros(pause))
            }
            Err(error) => {
                self.unread = true;
                self.note(format_args!("the configuration cannot be read: {error}"));
                self.daemon().engine.end_reading();
                Rc::new(RefCell::new(Some(())))
            }
        };
        self.reloading = Some(later.clone());
        later
    }

    fn resize(&mut self) {
        let at = self.random.index(self.sites.len());
        let more = self.random.between(1, 64) as usize;
        let (shrink, whole) = (self.random.chance(50), self.random.chance(50));
        let (outside, back) = (self.random.chance(40), self.random.chance(50));
        let site = &mut self.sites[at];
        let (size, before) = (site.oracle.sectors(), site.before);
        let disk = site.disk().filter(|_| !site.config.read_only).cloned();
        if disk.is_none() && site.overlay().is_none() {
            return;
        }
        if site.resizing.is_some() || size > 16_384 {
            return;
        }
        let to = match (shrink, whole) {
            (true, true) => size.saturating_sub(more).max(128) / 8 * 8,
            (true, false) => size.saturating_sub(more).max(128),
            // The part that a shrink removed exists again, and reads as zeroes.
            (false, _) if back && before > size => before,
            (false, true) => (size + more).next_multiple_of(8),
            (false, false) => size + more,
        };
        if shrink {
            site.before = size;
        }
        let Some(disk) = disk else { return self.resize_overlay(at, to, shrink) };
        if !shrink && outside {
            return self.grow_outside(at, &disk, to);
        }
        site.oracle.begin_resize();
        let (name, bytes) = (site.config.name.clone(), (to * SECTOR) as u64);
        self.note(format_args!("v{at} is resized from {size} to {to} sectors"));
        self.submit_resize(at, &name, Resize { to: Some(bytes), shrink });
    }

    /// A disk grows and has data in the new part, as a logical volume may; then the volume is
    /// resized to the size of its disk.
    fn grow_outside(&mut self, at: usize, disk: &TestStore, to: usize) {
        let site = &mut self.sites[at];
        let from = site.oracle.sectors();
        let writing = site.oracle.grown_outside(to);
        let mut data = vec![0; (to - from) * SECTOR];
        Oracle::fill(writing.number, from, &mut data);
        disk.set_size((to * SECTOR) as u64);
        disk.change((from * SECTOR) as u64, &data);
        let name = site.config.name.clone();
        self.note(format_args!("disk {at} grows from {from} to {to} sectors"));
        self.submit_resize(at, &name, Resize { to: None, shrink: false });
    }

    fn submit_resize(&mut self, at: usize, name: &str, order: Resize) {
        let volume = self.daemon().volume(name);
        let submitted = self.daemon().submit(|io| async move {
            // A volume that is not served keeps its size.
            match volume {
                Some(volume) => volume.resize(&io, order).await.map_err(|error| error.to_string()),
                None => Err("not served".to_owned()),
            }
        });
        self.sites[at].resizing = Some(submitted);
    }

    fn opening(&mut self) {
        let at = self.random.index(self.sites.len());
        let fails = self.random.chance(50);
        let name = self.sites[at].config.disk.clone();
        self.disks.fail(&name, fails);
        self.note(format_args!("{name} cannot be opened: {fails}"));
    }
}
