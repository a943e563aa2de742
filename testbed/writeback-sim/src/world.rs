//! The simulated world: writers, flushers and devices around the controller, driven by one event queue.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::control::{Control, DeviceControl, control};
use crate::device::{Model, SimDevice};
use crate::law::Law;
use crate::time_of;
use ebb_writeback::units::{MILLISECOND, Nanos, SECOND, bytes_in};
use ebb_writeback::{BdiOptions, PressureLevel, Verdict, WritebackError};

/// How often the control thread runs.
const KEEP: Nanos = 10 * MILLISECOND;
/// Interval of samples.
pub const SAMPLE: Nanos = 20 * MILLISECOND;
/// Delay after which a device without work reports an unfinished batch.
const NOTICE: Nanos = 10 * MILLISECOND;

/// How a writer behaves.
#[derive(Debug, Clone)]
pub struct WriterModel {
    /// The device it writes to.
    pub device: usize,
    /// Bytes of one write.
    pub request: u64,
    /// Bytes per second it writes when it is not throttled.
    pub speed: u64,
    /// When it begins and ends.
    pub span: (Nanos, Nanos),
    /// Writes this many bytes, then pauses until this long after it began them.
    pub burst: Option<(u64, Nanos)>,
}

impl WriterModel {
    /// A stream at 1 GB/s in writes of 128 KiB, for as long as the run lasts.
    #[must_use]
    pub fn stream(device: usize) -> Self {
        Self {
            device,
            request: 128 << 10,
            speed: 1_000_000_000,
            span: (0, Nanos::MAX),
            burst: None,
        }
    }
}

/// A change of the controller's settings during the run.
#[derive(Debug, Clone, Copy)]
pub enum SimAction {
    /// The limit changes.
    Limit(u64),
    /// Memory pressure changes.
    Pressure(PressureLevel),
}

/// Everything that defines a run.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The law under test.
    pub law: Law,
    /// The limit in bytes.
    pub limit: u64,
    /// The background threshold of the Linux laws as a fraction of the limit.
    pub background: u32,
    /// Devices, with bounds.
    pub devices: Vec<(Model, BdiOptions)>,
    /// Writers; each is a volume of its own.
    pub writers: Vec<WriterModel>,
    /// Changes of settings, with their times.
    pub actions: Vec<(Nanos, SimAction)>,
    /// Length of the run.
    pub length: Nanos,
    /// The seed of all random numbers.
    pub seed: u64,
}

/// A device at one moment. Bytes, bytes per second, nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    /// Its threshold.
    pub threshold: u64,
    /// Dirty and under writeback.
    pub held: u64,
    /// The estimated bandwidth.
    pub bandwidth: u64,
    /// Busy so far.
    pub busy: Nanos,
    /// Written so far.
    pub written: u64,
}

/// The results of a run.
#[derive(Debug, Clone, Default)]
pub struct SimRun {
    /// For each device a sample every [`SAMPLE`].
    pub devices: Vec<Vec<Sample>>,
    /// For each writer every wait: when it ended, and its length.
    pub pauses: Vec<Vec<(Nanos, Nanos)>>,
    /// For each writer the bytes it wrote.
    pub accepted: Vec<u64>,
    /// The largest fraction of the limit in force that was ever held, in parts per million.
    pub fullest: u64,
    /// The largest sum of thresholds as a fraction of the limit in force, in parts per million.
    pub divided: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ask { writer: usize, turn: u64 },
    Served { device: usize },
    Notice { device: usize, batch: u64 },
    Done { device: usize },
    Keep,
    Sample,
    Act { index: usize },
}

/// A write to a device.
#[derive(Debug, Clone, Copy)]
struct Write {
    volume: usize,
    bytes: u64,
    sent: Nanos,
}

struct Writer {
    model: WriterModel,
    volume: usize,
    /// When the current write was first requested.
    requested: Option<Nanos>,
    /// Events of earlier iterations are void.
    turn: u64,
    burst_left: u64,
    burst_began: Nanos,
}

struct Disk {
    bdi: Box<dyn DeviceControl>,
    device: SimDevice,
    /// Served in this order: in service, served but not reported, reported (waiting for the latency).
    serving: VecDeque<Write>,
    served: VecDeque<Write>,
    reported: VecDeque<Write>,
    served_bytes: u64,
    batch: u64,
    in_flight: u64,
    /// The writers of this disk, their dirty bytes, and the next one to flush.
    writers: Vec<usize>,
    dirty: Vec<u64>,
    next_writer: usize,
    /// When data became dirty, oldest first.
    ages: VecDeque<(Nanos, u64)>,
}

/// A run in progress.
struct World {
    now: Nanos,
    length: Nanos,
    sequence: u64,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    writeback: Box<dyn Control>,
    disks: Vec<Disk>,
    writers: Vec<Writer>,
    actions: Vec<(Nanos, SimAction)>,
    run: SimRun,
}

/// Runs it from beginning to end.
///
/// # Errors
/// The controller's error for options it does not accept.
pub fn run(setup: &Setup) -> Result<SimRun, WritebackError> {
    let mut world = World::new(setup)?;
    while let Some(Reverse((at, _, event))) = world.events.pop() {
        if at > setup.length {
            break;
        }
        world.now = at;
        world.turn(event);
    }
    Ok(world.run)
}

impl World {
    fn new(setup: &Setup) -> Result<Self, WritebackError> {
        let mut writeback = control(setup.law, setup.limit, setup.background)?;
        let mut disks = Vec::new();
        for (seed, (model, options)) in (setup.seed..).zip(&setup.devices) {
            disks.push(Disk {
                bdi: writeback.add_bdi(options.clone())?,
                device: SimDevice::new(model.clone(), seed),
                serving: VecDeque::new(),
                served: VecDeque::new(),
                reported: VecDeque::new(),
                served_bytes: 0,
                batch: 0,
                in_flight: 0,
                writers: Vec::new(),
                dirty: Vec::new(),
                next_writer: 0,
                ages: VecDeque::new(),
            });
        }
        let mut writers = Vec::new();
        for (index, model) in setup.writers.iter().enumerate() {
            let Some(disk) = disks.get_mut(model.device) else { continue };
            disk.writers.push(index);
            disk.dirty.push(0);
            let volume = disk.bdi.add_volume()?;
            let burst_left = model.burst.map_or(u64::MAX, |(bytes, _)| bytes);
            let (model, burst_began) = (model.clone(), model.span.0);
            writers.push(Writer {
                model,
                volume,
                requested: None,
                turn: 0,
                burst_left,
                burst_began,
            });
        }
        let run = SimRun {
            devices: vec![Vec::new(); disks.len()],
            pauses: vec![Vec::new(); writers.len()],
            accepted: vec![0; writers.len()],
            ..SimRun::default()
        };
        let (actions, events) = (setup.actions.clone(), BinaryHeap::new());
        let length = setup.length;
        let mut world =
            Self { now: 0, length, sequence: 0, events, writeback, disks, writers, actions, run };
        world.begin();
        Ok(world)
    }

    fn begin(&mut self) {
        self.at(0, Event::Keep);
        self.at(0, Event::Sample);
        for index in 0..self.actions.len() {
            self.at(self.actions[index].0, Event::Act { index });
        }
        for writer in 0..self.writers.len() {
            self.at(self.writers[writer].model.span.0, Event::Ask { writer, turn: 0 });
        }
    }

    fn at(&mut self, at: Nanos, event: Event) {
        if at <= self.length {
            self.sequence += 1;
            self.events.push(Reverse((at, self.sequence, event)));
        }
    }

    fn turn(&mut self, event: Event) {
        match event {
            Event::Ask { writer, turn } => self.reserve(writer, turn),
            Event::Served { device } => self.served(device),
            Event::Notice { device, batch } => {
                if self.disks[device].batch == batch {
                    self.report(device);
                }
            }
            Event::Done { device } => self.done(device),
            Event::Keep => {
                self.writeback.update(self.now);
                self.check();
                for device in 0..self.disks.len() {
                    self.flush(device);
                }
                self.at(self.now + KEEP, Event::Keep);
            }
            Event::Sample => self.sample(),
            Event::Act { index } => match self.actions[index].1 {
                SimAction::Limit(bytes) => self.writeback.set_limit(bytes, self.now),
                SimAction::Pressure(level) => self.writeback.set_pressure(level, self.now),
            },
        }
    }

    fn reserve(&mut self, index: usize, turn: u64) {
        let now = self.now;
        let writer = &mut self.writers[index];
        if writer.turn != turn || now >= writer.model.span.1 {
            return;
        }
        let device = writer.model.device;
        let disk = &mut self.disks[device];
        let requested = *writer.requested.get_or_insert(now);
        let bytes = writer.model.request;
        writer.turn += 1;
        let turn = writer.turn;
        let verdict = disk.bdi.reserve(writer.volume, bytes, requested, now);
        if let Verdict::PauseUntil(until) = verdict {
            self.at(until.max(now + 1), Event::Ask { writer: index, turn });
            return;
        }
        // The writes of a scenario are never too large for its limit.
        debug_assert_eq!(verdict, Verdict::Go);
        writer.requested = None;
        if now > requested {
            self.run.pauses[index].push((now, now - requested));
        }
        self.run.accepted[index] += bytes;
        if let Some(place) = disk.writers.iter().position(|writer| *writer == index) {
            disk.dirty[place] += bytes;
        }
        match disk.ages.back_mut() {
            Some((at, sum)) if now - *at < 100 * MILLISECOND => *sum += bytes,
            _ => disk.ages.push_back((now, bytes)),
        }
        let next = writer.next(requested, now);
        self.at(next, Event::Ask { writer: index, turn });
        self.check();
        self.flush(device);
    }

    /// Sends what the plan says.
    fn flush(&mut self, device: usize) {
        let now = self.now;
        loop {
            let disk = &mut self.disks[device];
            let dirty: u64 = disk.dirty.iter().sum();
            if dirty == 0 {
                return;
            }
            let plan = disk.bdi.plan(now);
            let old = disk.ages.front().is_some_and(|(at, _)| *at <= plan.expired);
            if now < plan.not_before || !(plan.start || old) {
                return;
            }
            let room = plan.in_flight.saturating_sub(disk.in_flight);
            let Some(write) = disk.pick(plan.chunk, disk.in_flight <= plan.in_flight / 2, now)
            else {
                return;
            };
            if write.bytes > room && disk.in_flight > 0 {
                return;
            }
            let writer = disk.writers[write.volume];
            disk.take(write);
            disk.bdi.on_writeback(self.writers[writer].volume, write.bytes, now);
            if let Some(end) = disk.device.submit(write.bytes, now) {
                self.at(end, Event::Served { device });
            }
        }
    }

    fn served(&mut self, device: usize) {
        let disk = &mut self.disks[device];
        let Some(write) = disk.serving.pop_front() else { return };
        disk.served_bytes += write.bytes;
        disk.served.push_back(write);
        if disk.served_bytes >= disk.device.model.batch {
            self.report(device);
        } else if disk.serving.is_empty() {
            let batch = disk.batch;
            self.at(self.now + NOTICE, Event::Notice { device, batch });
        }
    }

    /// Reports everything served so far.
    fn report(&mut self, device: usize) {
        let disk = &mut self.disks[device];
        disk.served_bytes = 0;
        disk.batch += 1;
        let count = disk.served.len();
        disk.reported.append(&mut disk.served);
        let at = self.now + disk.device.model.latency;
        for _ in 0..count {
            self.at(at, Event::Done { device });
        }
    }

    fn done(&mut self, device: usize) {
        let now = self.now;
        let disk = &mut self.disks[device];
        let Some(write) = disk.reported.pop_front() else { return };
        disk.in_flight -= write.bytes;
        let volume = self.writers[disk.writers[write.volume]].volume;
        let again = disk.bdi.on_written(volume, write.bytes, write.sent, now);
        if again {
            for place in 0..self.disks[device].writers.len() {
                let writer = self.disks[device].writers[place];
                if self.writers[writer].requested.is_some() {
                    let turn = self.writers[writer].turn;
                    self.at(now, Event::Ask { writer, turn });
                }
            }
        }
        self.flush(device);
    }

    /// Checks what must hold at every moment.
    fn check(&mut self) {
        let stats = self.writeback.stats();
        self.run.fullest =
            self.run.fullest.max(ebb_writeback::units::mul_div(stats.held, 1_000_000, stats.limit));
    }

    fn sample(&mut self) {
        let now = self.now;
        let mut sum = 0;
        for (disk, samples) in self.disks.iter_mut().zip(&mut self.run.devices) {
            let stats = disk.bdi.stats(now);
            sum += stats.threshold;
            samples.push(Sample {
                threshold: stats.threshold,
                held: stats.dirty + stats.writeback,
                bandwidth: stats.bandwidth,
                busy: disk.device.busy_at(now),
                written: stats.written,
            });
        }
        let limit = self.writeback.stats().limit;
        self.run.divided =
            self.run.divided.max(ebb_writeback::units::mul_div(sum, 1_000_000, limit));
        self.at(now + SAMPLE, Event::Sample);
    }
}

impl Writer {
    /// When the next write is ready, after one that was requested at `requested` and granted.
    fn next(&mut self, requested: Nanos, now: Nanos) -> Nanos {
        let model = &self.model;
        self.burst_left = self.burst_left.saturating_sub(model.request);
        if let (0, Some((bytes, every))) = (self.burst_left, model.burst) {
            self.burst_began += every;
            self.burst_left = bytes;
            return self.burst_began.max(now);
        }
        // A slow writer goes on with its work while a write waits.
        let slow = model.speed < bytes_in(model.request, SECOND).saturating_mul(100);
        let from = if slow { requested } else { now };
        (from + time_of(model.request, model.speed)).max(now)
    }
}

impl Disk {
    /// The next write: a whole chunk of one volume if there is one, otherwise what there is if `small`.
    fn pick(&mut self, chunk: u64, small: bool, now: Nanos) -> Option<Write> {
        let count = self.dirty.len();
        let places = (0..count).map(|step| (self.next_writer + step) % count);
        let whole = places.clone().find(|place| self.dirty[*place] >= chunk);
        let some = || places.clone().find(|place| small && self.dirty[*place] > 0);
        let volume = whole.or_else(some)?;
        Some(Write { volume, bytes: self.dirty[volume].min(chunk), sent: now })
    }

    fn take(&mut self, write: Write) {
        self.next_writer = (write.volume + 1) % self.dirty.len();
        self.dirty[write.volume] -= write.bytes;
        self.in_flight += write.bytes;
        self.serving.push_back(write);
        let mut left = write.bytes;
        while let Some((_, bytes)) = self.ages.front_mut() {
            let taken = left.min(*bytes);
            *bytes -= taken;
            left -= taken;
            if *bytes > 0 {
                break;
            }
            self.ages.pop_front();
        }
    }
}
