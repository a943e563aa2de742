//! Backing devices: the disks and servers that volumes share, and the controller of their dirty data
//! (`ebb-writeback`, after Linux's `mm/page-writeback.c`).
//!
//! Volumes on the same disk, on the same server, or with the same name in the configuration share a
//! backing device. Each device has a lock of its own; devices share no lock for requests.
//!
//! # Invariants
//! - A device has weak references to the caches of its volumes, so that it keeps no volume alive.
//! - A caller waits only for the lock of one device, which is held for a calculation.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ebb_api::stat::BdiStat;
use ebb_block::{BlockStore, DeviceIdentity};
use ebb_cache::{Cache, VolumeCache, WritebackOrder};
use ebb_config::VolumeConfig;
use ebb_config::params::{
    MAX_BYTES, MAX_RATIO, MIN_RATIO, ParameterOwner, Parameters, STRICT_LIMIT,
};
use ebb_io::WorkerHandle;
use ebb_mem::pressure::Level;
use ebb_param::{Parameter, ParameterValue};
use ebb_sandbox::threads;
use ebb_writeback::{
    Bdi, BdiOptions, BdiStats, Nanos, PressureLevel, Verdict, VolumeId, WHOLE, WriteOutcome,
    Writeback, WritebackError, WritebackOptions, limit_for,
};

use crate::ticks::until_tick;

/// Part of the available memory that may be dirty, in parts per million: Linux's default `vm.dirty_ratio`.
const RATIO: u32 = WHOLE / 5;
/// Available memory if the host does not report it, bytes.
const AVAILABLE_UNKNOWN: u64 = 1 << 30;
/// How often the limit is divided again, while there is dirty data and otherwise.
const UPDATE: Duration = Duration::from_millis(20);
const UPDATE_IDLE: Duration = Duration::from_secs(1);
/// The time after which a flusher without work checks again, and the longest pause of a throttled writer before it
/// tries again.
const FLUSHER_POLL: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Volumes with the same key share a backing device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BdiKey {
    /// By its name in the configuration.
    Named(String),
    /// A disk, by its device number.
    Disk(u64),
    /// A server, by its address.
    Server(String),
    /// The device of one volume only.
    Own(String),
}

impl BdiKey {
    /// The key of a volume. Reads what the kernel says of its disk, and so may block.
    pub(crate) fn of(name: &str, config: &VolumeConfig, store: &impl BlockStore) -> BdiKey {
        if let Some(bdi) = &config.bdi {
            return BdiKey::Named(bdi.clone());
        }
        match store.device_identity() {
            Some(DeviceIdentity::Disk(device)) => {
                BdiKey::Disk(whole_disk(Path::new("/sys/dev/block"), device))
            }
            Some(DeviceIdentity::Server(address)) => BdiKey::Server(address),
            None => BdiKey::Own(name.to_owned()),
        }
    }

    /// The name of the backing device.
    pub(crate) fn text(&self) -> String {
        match self {
            BdiKey::Named(name) => name.clone(),
            BdiKey::Disk(device) => {
                format!("{}:{}", rustix::fs::major(*device), rustix::fs::minor(*device))
            }
            BdiKey::Server(address) => address.clone(),
            BdiKey::Own(volume) => format!("volume {volume}"),
        }
    }
}

/// The disk of a partition, or the only disk of a device-mapper device; else the device itself.
fn whole_disk(sys: &Path, device: u64) -> u64 {
    let mut device = device;
    // A limit of the levels of device-mapper devices.
    for _ in 0..8 {
        let name = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let Ok(folder) = sys.join(name).canonicalize() else { return device };
        let below = if folder.join("partition").exists() {
            folder.parent().map(Path::to_path_buf)
        } else {
            let slaves = std::fs::read_dir(folder.join("slaves")).into_iter().flatten();
            let mut slaves = slaves.flatten();
            slaves.next().filter(|_| slaves.next().is_none()).map(|slave| slave.path())
        };
        let number = below.and_then(|below| {
            let text = std::fs::read_to_string(below.join("dev")).ok()?;
            let (major, minor) = text.trim().split_once(':')?;
            Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
        });
        match number {
            Some(number) if number != device => device = number,
            _ => return device,
        }
    }
    device
}

/// The parameters of a device.
struct BdiParameters {
    min_ratio: Parameter<u32>,
    max_ratio: Parameter<u32>,
    max_bytes: Parameter<u64>,
    strict_limit: Parameter<bool>,
}

impl BdiParameters {
    fn of(name: &str, parameters: &Parameters) -> BdiParameters {
        let owner = ParameterOwner::Bdi(name);
        BdiParameters {
            min_ratio: parameters.handle(MIN_RATIO, owner),
            max_ratio: parameters.handle(MAX_RATIO, owner),
            max_bytes: parameters.handle(MAX_BYTES, owner),
            strict_limit: parameters.handle(STRICT_LIMIT, owner),
        }
    }

    fn options(&self) -> BdiOptions {
        BdiOptions {
            min_ratio: self.min_ratio.get().min(WHOLE),
            max_ratio: self.max_ratio.get().min(WHOLE),
            max_bytes: match self.max_bytes.get() {
                0 => u64::MAX,
                bytes => bytes,
            },
            strict_limit: self.strict_limit.get(),
            ..BdiOptions::default()
        }
    }
}

struct Device {
    name: String,
    parameters: BdiParameters,
    bdi: Mutex<Bdi>,
    volumes: Mutex<Vec<Weak<VolumeCache>>>,
    /// Number of volumes whose last write found it full; two threads may note changes of one in the
    /// other order.
    full: AtomicIsize,
}

impl Device {
    /// Applies its settings.
    fn follow_settings(&self) -> Result<(), WritebackError> {
        lock(&self.bdi).set_options(self.parameters.options())
    }

    fn volumes(&self) -> Vec<Arc<VolumeCache>> {
        let mut volumes = lock(&self.volumes);
        volumes.retain(|volume| volume.strong_count() > 0);
        volumes.iter().filter_map(Weak::upgrade).collect()
    }
}

/// All backing devices.
pub(crate) struct Bdis {
    writeback: Mutex<Writeback>,
    devices: Mutex<BTreeMap<BdiKey, Weak<Device>>>,
    /// There is no dirty data: the task of [`Bdis::keep`] sleeps for [`UPDATE_IDLE`].
    idle: AtomicBool,
    cache: Arc<Cache>,
    parameters: Parameters,
    /// Upper bound of the limit of dirty data, bytes.
    most: AtomicU64,
    start: Instant,
    /// How often the host's memory was read, and how often settings were applied.
    #[cfg(test)]
    work: [std::sync::atomic::AtomicU64; 2],
}

impl Bdis {
    /// No devices yet. At most `most` bytes are ever dirty. Devices follow their `parameters`.
    ///
    /// # Errors
    /// None: the options made here are valid.
    pub(crate) fn new(
        cache: &Arc<Cache>,
        parameters: &Parameters,
        most: u64,
        start: Instant,
    ) -> Result<Arc<Bdis>, WritebackError> {
        let bdis = Bdis {
            writeback: Mutex::new(Writeback::new(&WritebackOptions::new(
                ebb_writeback::MIN_LIMIT,
            ))?),
            devices: Mutex::default(),
            idle: AtomicBool::new(true),
            cache: cache.clone(),
            parameters: parameters.clone(),
            most: AtomicU64::new(most),
            start,
            #[cfg(test)]
            work: Default::default(),
        };
        bdis.follow_memory(bdis.available_memory());
        Ok(Arc::new(bdis))
    }

    /// Applies the settings of all devices after each change of one of this device.
    fn watch(self: &Arc<Self>, device: &Arc<Device>) {
        fn watch<T: ParameterValue>(of: &Parameter<T>, bdis: &Arc<Bdis>, device: &Arc<Device>) {
            let bdis = Arc::downgrade(bdis);
            of.watch_for(device, move |_, _| {
                bdis.upgrade().iter().for_each(|bdis| bdis.follow_settings());
            });
        }
        let BdiParameters { min_ratio, max_ratio, max_bytes, strict_limit } = &device.parameters;
        watch(min_ratio, self, device);
        watch(max_ratio, self, device);
        watch(max_bytes, self, device);
        watch(strict_limit, self, device);
    }

    fn devices(&self) -> Vec<Arc<Device>> {
        lock(&self.devices).values().filter_map(Weak::upgrade).collect()
    }

    fn apply_settings(&self, device: &Device) -> Result<(), WritebackError> {
        #[cfg(test)]
        self.work[1].fetch_add(1, Ordering::Relaxed);
        device.follow_settings()
    }

    /// Applies the settings of all devices, and divides the limit by them.
    fn follow_settings(&self) {
        let mut waiting = self.devices();
        loop {
            let before = waiting.len();
            // Together they fit, but a device that gets a part of another one has to come after it.
            waiting.retain(|device| self.apply_settings(device).is_err());
            if waiting.is_empty() || waiting.len() == before {
                break;
            }
        }
        let now = self.now();
        lock(&self.writeback).update(now);
        for device in self.devices() {
            device.volumes().iter().for_each(|volume| volume.retry_reservation());
        }
    }

    /// Discards the values set for devices without volumes, and warns of configured devices without volumes. To be
    /// called after volumes were added or removed, but not from a watcher of parameters.
    pub(crate) fn settle(&self) {
        self.forget_unused();
        for bdi in self.parameters.bdis_without_volumes() {
            tracing::warn!(
                bdi,
                "the configuration has a backing device without volumes: \
                 `ebbd stat bdi` shows the names of those in use"
            );
        }
    }

    /// Discards the values set for devices without volumes. To be called after volumes were removed, but not from a watcher
    /// of parameters.
    pub(crate) fn forget_unused(&self) {
        let devices = self.devices();
        let used: BTreeSet<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        let mut unused = self.parameters.bdis_with_volumes();
        unused.retain(|name| !used.contains(name.as_str()));
        if !unused.is_empty() {
            self.parameters.remove_bdis(unused.iter().map(String::as_str));
            self.follow_settings();
        }
    }

    fn nanos(&self, at: Instant) -> Nanos {
        u64::try_from(at.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }

    fn now(&self) -> Nanos {
        self.nanos(ebb_mem::clock::now())
    }

    /// The writeback control of a volume on its backing device `key`.
    ///
    /// # Errors
    /// There are too many devices, or too many volumes on this one.
    pub(crate) fn control(
        self: &Arc<Self>,
        key: BdiKey,
        cache: &Arc<VolumeCache>,
    ) -> Result<Arc<dyn ebb_cache::WritebackControl>, WritebackError> {
        // Before the lock of the devices: watchers of parameters lock it.
        self.parameters.add_bdi(&key.text());
        let parameters = BdiParameters::of(&key.text(), &self.parameters);
        let mut devices = lock(&self.devices);
        devices.retain(|_, device| device.strong_count() > 0);
        let (first, known) = (devices.is_empty(), devices.get(&key).and_then(Weak::upgrade));
        let is_new = known.is_none();
        let device = match known {
            Some(device) => device,
            None => {
                let added = lock(&self.writeback).add_bdi(BdiOptions::default(), self.now());
                let bdi = match added {
                    Ok(bdi) => bdi,
                    Err(error) => {
                        let name = key.text();
                        let shared = {
                            let mut others = devices.values().filter_map(Weak::upgrade);
                            others.any(|device| device.name == name)
                        };
                        // Watchers of parameters lock the devices.
                        drop(devices);
                        if !shared {
                            self.parameters.remove_bdis([name.as_str()]);
                        }
                        return Err(error);
                    }
                };
                let name = key.text();
                let (bdi, volumes) = (Mutex::new(bdi), Mutex::default());
                let full = AtomicIsize::new(0);
                let device = Arc::new(Device { name, parameters, bdi, volumes, full });
                devices.insert(key, Arc::downgrade(&device));
                device
            }
        };
        let id = lock(&device.bdi).add_volume(1)?;
        lock(&device.volumes).push(Arc::downgrade(cache));
        drop(devices);
        // The volume has no writes yet, and other devices keep their settings, so that this costs the same whatever
        // their number. The exception is a device whose settings fit only after those of another one have changed.
        if is_new {
            self.watch(&device);
        }
        if is_new && self.apply_settings(&device).is_err() {
            self.follow_settings();
        } else if is_new {
            lock(&self.writeback).update(self.now());
        }
        if first {
            let host = self.clone();
            // A worker may not read it itself.
            let available = threads::call(move || host.available_memory());
            self.follow_memory(available.unwrap_or(AVAILABLE_UNKNOWN));
        }
        Ok(Arc::new(Member { all: self.clone(), device, id, is_full: AtomicBool::new(false) }))
    }

    /// Follows the available memory, and divides the limit among the devices, for as long as the
    /// worker runs.
    pub(crate) fn keep(self: &Arc<Self>, worker: &WorkerHandle) {
        let all = self.clone();
        worker.spawn(move |io| async move {
            let mut since = Duration::MAX;
            loop {
                if all.is_idle() {
                    io.sleep(until_tick(ebb_mem::clock::now(), all.start, UPDATE_IDLE)).await;
                    since = UPDATE_IDLE;
                } else {
                    io.sleep(UPDATE).await;
                    since = since.saturating_add(UPDATE);
                }
                if lock(&all.devices).is_empty() {
                    continue;
                }
                if since >= UPDATE_IDLE {
                    since = Duration::ZERO;
                    // Not on this thread, which serves requests: reading /proc may block.
                    let host = all.clone();
                    let available = io.offload(move || host.available_memory()).await;
                    all.follow_memory(available);
                }
                let now = all.now();
                lock(&all.writeback).update(now);
            }
        });
    }

    fn is_idle(&self) -> bool {
        let idle = lock(&self.writeback).stats().held == 0;
        self.idle.store(idle, Ordering::Relaxed);
        idle
    }

    /// The memory available on the host and in the control group. Reads /proc and /sys.
    fn available_memory(&self) -> u64 {
        #[cfg(test)]
        self.work[0].fetch_add(1, Ordering::Relaxed);
        let available = ebb_mem::pressure::available(&ebb_mem::pressure::Roots::default());
        // As Linux does, dirty data counts as available: it is when it has been written.
        available.unwrap_or(AVAILABLE_UNKNOWN).saturating_add(self.held())
    }

    /// Dirty data of all devices, data being written included, bytes.
    pub(crate) fn held(&self) -> u64 {
        lock(&self.writeback).stats().held
    }

    /// Changes the upper bound of the limit of dirty data, bytes. A lower one is in force at once.
    pub(crate) fn set_most(&self, bytes: u64) {
        if self.most.swap(bytes, Ordering::Relaxed) > bytes {
            let mut writeback = lock(&self.writeback);
            let limit = writeback.stats().limit.min(bytes);
            writeback.set_limit(limit, self.now());
        }
    }

    /// Sets the limit from the available memory and the limit of the cache.
    fn follow_memory(&self, available: u64) {
        let cache = match self.cache.limit_bytes() {
            0 => u64::MAX,
            limit => limit / 2,
        };
        let limit = limit_for(available, RATIO).min(self.most.load(Ordering::Relaxed)).min(cache);
        lock(&self.writeback).set_limit(limit, self.now());
    }

    /// Applies a level of memory pressure: the limit shrinks, and dirty data is written to the stores.
    pub(crate) fn pressure(&self, level: Level) {
        let level = match level {
            Level::L0 => PressureLevel::Calm,
            Level::L1 => PressureLevel::Squeeze,
            Level::L2 => PressureLevel::Drain,
            Level::L3 => PressureLevel::LastResort,
        };
        lock(&self.writeback).set_pressure(level, self.now());
        for device in self.devices() {
            device.volumes().iter().for_each(|volume| volume.retry_reservation());
        }
    }

    /// The statistics of each device, by key.
    pub(crate) fn stats(&self) -> Vec<BdiStat> {
        let devices = self.devices();
        let now = self.now();
        let stat = |device: &Arc<Device>| {
            // The layers of an overlay have caches of one name.
            let mut names = BTreeSet::new();
            let caches = device.volumes();
            let all = caches.iter().map(|volume| volume.name());
            let volumes = all.filter(|name| names.insert(*name)).map(str::to_owned).collect();
            bdi_stat(&device.name, volumes, &lock(&device.bdi).stats(now))
        };
        devices.iter().map(stat).collect()
    }
}

/// The figures of the device called `name`, with `volumes` on it.
fn bdi_stat(name: &str, volumes: Vec<String>, stats: &BdiStats) -> BdiStat {
    let seconds = |nanos| Duration::from_nanos(nanos).as_secs_f64();
    let ratio = |parts_per_million: u32| f64::from(parts_per_million) / f64::from(WHOLE);
    BdiStat {
        name: name.to_owned(),
        volumes,
        dirty_bytes: stats.dirty,
        writeback_bytes: stats.writeback,
        threshold_bytes: stats.threshold,
        bandwidth_bytes_per_second: stats.bandwidth,
        share: ratio(stats.share),
        utilisation: ratio(stats.utilisation),
        written_bytes: stats.written,
        dirtied_bytes: stats.dirtied,
        failures: stats.failures,
        stuck: stats.stuck,
        pauses: stats.pauses.count,
        pause_seconds: seconds(stats.pauses.total),
        longest_pause_seconds: seconds(stats.pauses.longest),
        min_ratio: ratio(stats.min_ratio),
        max_ratio: ratio(stats.max_ratio),
        max_bytes: Some(stats.max_bytes).filter(|bytes| *bytes != u64::MAX),
        strict_limit: stats.strict_limit,
    }
}

/// A volume on its device.
struct Member {
    all: Arc<Bdis>,
    device: Arc<Device>,
    id: VolumeId,
    /// The last write of the volume found the device full.
    is_full: AtomicBool,
}

impl ebb_cache::WritebackControl for Member {
    fn reserve(&self, asked: Instant, now: Instant, bytes: u64, _: u64) -> Duration {
        if self.all.idle.load(Ordering::Relaxed)
            && self.all.idle.swap(false, Ordering::Relaxed)
            && let Ok(mut writeback) = self.all.writeback.try_lock()
        {
            writeback.update(self.all.nanos(now));
        }
        let (asked, now) = (self.all.nanos(asked), self.all.nanos(now));
        match lock(&self.device.bdi).reserve(self.id, bytes, asked, now) {
            Verdict::Go => Duration::ZERO,
            Verdict::PauseUntil(until) => {
                let pause = Duration::from_nanos(until.saturating_sub(now));
                pause.clamp(Duration::from_micros(50), LONGEST_PAUSE)
            }
            // Never for a frame, which is less than a quarter of the smallest limit.
            Verdict::Split(_) => LONGEST_PAUSE,
        }
    }

    fn unused(&self, bytes: u64) {
        lock(&self.device.bdi).on_dropped(self.id, bytes);
    }

    fn sent(&self, now: Instant, bytes: u64) {
        lock(&self.device.bdi).on_writeback(self.id, bytes, self.all.nanos(now));
    }

    fn written(&self, now: Instant, bytes: u64, sent: Instant, saved: bool) {
        let outcome = if saved { WriteOutcome::Written } else { WriteOutcome::Failed };
        let (sent, now) = (self.all.nanos(sent), self.all.nanos(now));
        let again = lock(&self.device.bdi).on_written(self.id, bytes, sent, outcome, now);
        if again {
            self.device.volumes().iter().for_each(|volume| volume.retry_reservation());
        }
    }

    fn note_full(&self, full: bool) {
        if self.is_full.swap(full, Ordering::SeqCst) != full {
            self.device.full.fetch_add(if full { 1 } else { -1 }, Ordering::SeqCst);
        }
    }

    fn is_full(&self) -> bool {
        self.device.full.load(Ordering::SeqCst) > 0
    }

    fn next(&self, now: Instant, _: u64, age: Duration) -> WritebackOrder {
        let now = self.all.nanos(now);
        let mut bdi = lock(&self.device.bdi);
        let plan = bdi.plan(now);
        if now < plan.not_before {
            return WritebackOrder::Wait(Duration::from_nanos(plan.not_before - now));
        }
        let since = now.saturating_sub(u64::try_from(age.as_nanos()).unwrap_or(u64::MAX));
        let overdue = since <= plan.expired && plan.expired > 0;
        if !plan.start && !overdue || bdi.stats(now).writeback >= plan.in_flight {
            return WritebackOrder::Wait(FLUSHER_POLL);
        }
        WritebackOrder::Write(usize::try_from(plan.chunk).unwrap_or(usize::MAX))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        ebb_cache::WritebackControl::note_full(self, false);
        lock(&self.device.bdi).remove_volume(self.id, self.all.now());
    }
}

#[cfg(test)]
mod tests;
