//! Backing devices: what can be slow as a unit, and the controller that says how much dirty data
//! each may hold (design, section 4; seed `001`).
//!
//! Volumes on the same disk, on the same server, or with the same name in the configuration share one.
//! Each has a lock of its own; between devices there is none.
//!
//! # Invariants
//! - A volume's cache is known weakly: a device keeps no volume alive, and a volume that has gone
//!   leaves its device.
//! - Nothing here waits but for the lock of one device, which is held for a calculation.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ebb_cache::{Cache, VolumeCache, WritebackOrder};
use ebb_io::WorkerHandle;
use ebb_mem::pressure::Level;
use ebb_writeback::{
    Bdi, BdiOptions, Error, Nanos, PressureLevel, Verdict, VolumeId, WHOLE, WriteOutcome,
    Writeback, WritebackOptions, limit_for,
};

use crate::config::{StoreUri, VolumeConfig};
use crate::params::{BdiLive, Key as Parameter, Parameters};
use crate::stat::BdiStat;

/// Part of the available memory that may be dirty, in parts per million; as Linux has it.
const RATIO: u32 = WHOLE / 5;
/// Available memory where the host does not say, bytes.
const AVAILABLE_UNKNOWN: u64 = 1 << 30;
/// How often the limit is divided anew while anything is dirty, and else.
const KEEP: Duration = Duration::from_millis(20);
const KEEP_IDLE: Duration = Duration::from_secs(1);
/// A flusher that has nothing to do looks again after this long, and a writer asks again.
const LOOK: Duration = Duration::from_millis(10);
const ASK: Duration = Duration::from_millis(200);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What makes two volumes share a backing device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DeviceKey {
    /// As the configuration names it.
    Named(String),
    /// A disk, by the number of its device.
    Disk(u64),
    /// A server, by its address.
    Server(String),
    /// A volume's own.
    Own(String),
}

impl DeviceKey {
    /// That of a volume; may block as long as its file system does.
    pub(crate) fn of(name: &str, config: &VolumeConfig) -> DeviceKey {
        if let Some(bdi) = &config.bdi {
            return DeviceKey::Named(bdi.clone());
        }
        match &config.store {
            StoreUri::File(path) => match std::fs::metadata(path) {
                Ok(found) => {
                    let own = if found.rdev() != 0 { found.rdev() } else { found.dev() };
                    DeviceKey::Disk(whole_disk(Path::new("/sys/dev/block"), own))
                }
                Err(_) => DeviceKey::Own(name.to_owned()),
            },
            StoreUri::Nbd(options) => DeviceKey::Server(options.address.to_string()),
            StoreUri::Memory(_) | StoreUri::Null(_) => DeviceKey::Own(name.to_owned()),
        }
    }

    /// What volumes with the same backing device have in common: its name.
    pub(crate) fn text(&self) -> String {
        match self {
            DeviceKey::Named(name) => name.clone(),
            DeviceKey::Disk(device) => {
                format!("{}:{}", rustix::fs::major(*device), rustix::fs::minor(*device))
            }
            DeviceKey::Server(address) => address.clone(),
            DeviceKey::Own(volume) => format!("volume {volume}"),
        }
    }
}

/// The disk a partition is on, or the only one a mapped device is made of; else the device itself.
fn whole_disk(sys: &Path, device: u64) -> u64 {
    let mut device = device;
    // Maps upon maps end somewhere.
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

/// The bounds that an operator gave a device.
fn options(settings: &BdiLive) -> BdiOptions {
    let ratio = |key| u32::try_from(settings.get(key)).unwrap_or(WHOLE).min(WHOLE);
    BdiOptions {
        min_ratio: ratio(Parameter::MinRatio),
        max_ratio: ratio(Parameter::MaxRatio),
        max_bytes: match settings.get(Parameter::MaxBytes) {
            0 => u64::MAX,
            bytes => bytes,
        },
        strict_limit: settings.get(Parameter::StrictLimit) != 0,
        ..BdiOptions::default()
    }
}

struct Device {
    name: String,
    settings: BdiLive,
    bdi: Mutex<Bdi>,
    volumes: Mutex<Vec<Weak<VolumeCache>>>,
}

impl Device {
    /// Puts its settings in force.
    fn follow_settings(&self) -> Result<(), Error> {
        lock(&self.bdi).set_options(options(&self.settings))
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
    devices: Mutex<BTreeMap<DeviceKey, Weak<Device>>>,
    /// Nothing is dirty: the keeper sleeps long.
    idle: AtomicBool,
    cache: Arc<Cache>,
    parameters: Parameters,
    /// Most that may ever be dirty, bytes.
    most: u64,
    start: Instant,
    /// How often the host was asked, and how often settings were put in force.
    #[cfg(test)]
    work: [std::sync::atomic::AtomicU64; 2],
}

impl Bdis {
    /// None yet. Of memory at most `most` bytes are ever dirty. Devices follow their `parameters`.
    ///
    /// # Errors
    /// None that the options made here can bring about.
    pub(crate) fn new(
        cache: &Arc<Cache>,
        parameters: &Parameters,
        most: u64,
        start: Instant,
    ) -> Result<Arc<Bdis>, Error> {
        let bdis = Bdis {
            writeback: Mutex::new(Writeback::new(&WritebackOptions::new(
                ebb_writeback::MIN_LIMIT,
            ))?),
            devices: Mutex::default(),
            idle: AtomicBool::new(true),
            cache: cache.clone(),
            parameters: parameters.clone(),
            most,
            start,
            #[cfg(test)]
            work: Default::default(),
        };
        bdis.follow_memory(bdis.ask_host());
        let bdis = Arc::new(bdis);
        let followers = Arc::downgrade(&bdis);
        parameters.watch(move |change| {
            if let (Some(_), Some(bdis)) = (&change.bdi, followers.upgrade()) {
                bdis.follow_settings();
            }
        });
        Ok(bdis)
    }

    fn devices(&self) -> Vec<Arc<Device>> {
        lock(&self.devices).values().filter_map(Weak::upgrade).collect()
    }

    fn settings_in_force(&self, device: &Device) -> Result<(), Error> {
        #[cfg(test)]
        self.work[1].fetch_add(1, Ordering::Relaxed);
        device.follow_settings()
    }

    /// Puts the settings of all devices in force, and divides the limit by them.
    fn follow_settings(&self) {
        let mut waiting = self.devices();
        loop {
            let before = waiting.len();
            // Together they fit. One that takes what another gives up has to come after it.
            waiting.retain(|device| self.settings_in_force(device).is_err());
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

    /// Forgets what was set for devices that are gone, and tells of configured ones that never came.
    /// To be called when volumes were added or removed, not from within a change of parameters.
    pub(crate) fn settle(&self) {
        let devices = self.devices();
        let here: BTreeSet<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        let mut gone = self.parameters.bdis_with_volumes();
        gone.retain(|name| !here.contains(name.as_str()));
        if !gone.is_empty() {
            self.parameters.bdis_leave(gone.iter().map(String::as_str));
        }
        for bdi in self.parameters.bdis_without_volumes() {
            tracing::warn!(
                bdi,
                "the configuration bounds a backing device that no volume is on: \
                 `ebbd stat bdi` shows the names of those that are there"
            );
        }
    }

    fn nanos(&self, at: Instant) -> Nanos {
        u64::try_from(at.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }

    fn now(&self) -> Nanos {
        self.nanos(ebb_mem::clock::now())
    }

    /// The control of a volume, on its backing device `key`.
    ///
    /// # Errors
    /// There are too many devices, or too many volumes on this one.
    pub(crate) fn control(
        self: &Arc<Self>,
        key: DeviceKey,
        cache: &Arc<VolumeCache>,
    ) -> Result<Arc<dyn ebb_cache::WritebackControl>, Error> {
        let settings = self.parameters.bdi_arrives(&key.text());
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
                        // Those who follow parameters look at the devices.
                        drop(devices);
                        if !shared {
                            self.parameters.bdis_leave([name.as_str()]);
                        }
                        return Err(error);
                    }
                };
                let device = Arc::new(Device {
                    name: key.text(),
                    settings,
                    bdi: Mutex::new(bdi),
                    volumes: Mutex::default(),
                });
                devices.insert(key, Arc::downgrade(&device));
                device
            }
        };
        let id = lock(&device.bdi).add_volume(1)?;
        lock(&device.volumes).push(Arc::downgrade(cache));
        drop(devices);
        // Nobody writes yet. What the others have is as it was, so that this costs the same however many
        // there are: a device whose share is not to be had until another one gives it up is the exception.
        if is_new && self.settings_in_force(&device).is_err() {
            self.follow_settings();
        } else if is_new {
            lock(&self.writeback).update(self.now());
        }
        if first {
            self.follow_memory(self.ask_host());
        }
        Ok(Arc::new(Member { all: self.clone(), device, id }))
    }

    /// Follows memory and pressure, and divides the limit among the devices, for as long as the
    /// worker runs.
    pub(crate) fn keep(self: &Arc<Self>, worker: &WorkerHandle) {
        let all = self.clone();
        worker.spawn(move |io| async move {
            let mut since = Duration::MAX;
            loop {
                let pause = if all.is_idle() { KEEP_IDLE } else { KEEP };
                io.sleep(pause).await;
                since = since.saturating_add(pause);
                if lock(&all.devices).is_empty() {
                    continue;
                }
                if since >= KEEP_IDLE {
                    since = Duration::ZERO;
                    // Files of the kernel: not on a thread that serves requests.
                    let host = all.clone();
                    let available = io.offload(move || host.ask_host()).await;
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

    /// What the host, and the control group, have for us. Reads files of the kernel.
    fn ask_host(&self) -> u64 {
        #[cfg(test)]
        self.work[0].fetch_add(1, Ordering::Relaxed);
        let of_group = ebb_mem::pressure::limit(&ebb_mem::pressure::Roots::default());
        let of_group = of_group.map_or(u64::MAX, |limit| limit.bytes);
        available().unwrap_or(AVAILABLE_UNKNOWN).min(of_group)
    }

    /// The limit follows what memory is available, and what the cache may hold.
    fn follow_memory(&self, available: u64) {
        let cache = match self.cache.limit_bytes() {
            0 => u64::MAX,
            limit => limit / 2,
        };
        let limit = limit_for(available, RATIO).min(self.most).min(cache);
        lock(&self.writeback).set_limit(limit, self.now());
    }

    /// Memory pressure of this level: less may be dirty, and what is goes to the stores.
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

    /// The figures of each, by name.
    pub(crate) fn stats(&self) -> Vec<BdiStat> {
        let devices = self.devices();
        let now = self.now();
        let stat = |device: &Arc<Device>| {
            let volumes = device.volumes().iter().map(|volume| volume.name().to_owned()).collect();
            BdiStat::new(&device.name, volumes, &lock(&device.bdi).stats(now))
        };
        devices.iter().map(stat).collect()
    }
}

/// Memory of the host that can be had without swapping, bytes.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// A volume on its device.
struct Member {
    all: Arc<Bdis>,
    device: Arc<Device>,
    id: VolumeId,
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
                pause.clamp(Duration::from_micros(50), ASK)
            }
            // A frame is less than a quarter of the smallest limit there is.
            Verdict::Split(_) => ASK,
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
            return WritebackOrder::Wait(LOOK);
        }
        WritebackOrder::Write(usize::try_from(plan.chunk).unwrap_or(usize::MAX))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        lock(&self.device.bdi).remove_volume(self.id, self.all.now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_and_a_map_are_on_their_disk() {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path().join("dev/block");
        std::fs::create_dir_all(&sys).unwrap();
        let device = |name: &str, number: &str| {
            let folder = dir.path().join("devices").join(name);
            std::fs::create_dir_all(folder.join("slaves")).unwrap();
            std::fs::write(folder.join("dev"), format!("{number}\n")).unwrap();
            std::os::unix::fs::symlink(&folder, sys.join(number)).unwrap();
            folder
        };
        let disk = device("sda", "8:0");
        let part = device("sda/sda1", "8:1");
        std::fs::write(part.join("partition"), "1").unwrap();
        let map = device("dm-0", "253:0");
        std::os::unix::fs::symlink(&part, map.join("slaves/sda1")).unwrap();
        let two = device("dm-1", "253:1");
        std::os::unix::fs::symlink(&part, two.join("slaves/sda1")).unwrap();
        std::os::unix::fs::symlink(&disk, two.join("slaves/sda")).unwrap();
        let number = |major, minor| rustix::fs::makedev(major, minor);
        let of = |major, minor| whole_disk(&sys, number(major, minor));
        assert_eq!(of(8, 1), number(8, 0));
        assert_eq!(of(253, 0), number(8, 0));
        assert_eq!(of(253, 1), number(253, 1), "of two disks it is neither");
        assert_eq!(of(7, 7), number(7, 7), "unknown");
    }

    #[test]
    fn a_start_costs_the_same_for_each_volume_however_many_there_are() {
        let start = Instant::now();
        let memory = ebb_mem::Memory::new(ebb_mem::Options::new(64 << 20, start)).unwrap();
        let cache = Cache::without_reclaimer(&memory, ebb_cache::CacheOptions::new(start));
        let parameters = Parameters::new(&crate::params::Configured::default());
        let bdis = Bdis::new(&cache, &parameters, 1 << 30, start).unwrap();
        let mut all = Vec::new();
        for number in 0..200 {
            let mode = ebb_cache::Mode::Writeback;
            let volume = cache.volume_as(&format!("disk {number}"), 1 << 20, mode).unwrap();
            // Four on each device.
            let key = DeviceKey::Named(format!("device {}", number / 4));
            all.push((bdis.control(key, &volume).unwrap(), volume));
        }
        let work = |at: usize| bdis.work[at].load(Ordering::Relaxed);
        assert!(work(0) <= 2, "the host was asked {} times", work(0));
        assert_eq!(work(1), 50, "settings of each device once");
        assert_eq!(bdis.stats().len(), 50);
        // Without any look at a volume's shards.
        assert_eq!(cache.limit_bytes(), cache.stats().limit);
    }

    #[test]
    fn a_device_that_finds_no_place_leaves_nothing_behind_and_the_remedy_is_told() {
        let start = Instant::now();
        let memory = ebb_mem::Memory::new(ebb_mem::Options::new(64 << 20, start)).unwrap();
        let cache = Cache::without_reclaimer(&memory, ebb_cache::CacheOptions::new(start));
        let parameters = Parameters::new(&crate::params::Configured::default());
        let bdis = Bdis::new(&cache, &parameters, 1 << 30, start).unwrap();
        let mut all = Vec::new();
        for number in 0..300 {
            let mode = ebb_cache::Mode::Writeback;
            let volume = cache.volume_as(&format!("disk {number}"), 1 << 20, mode).unwrap();
            let key = DeviceKey::Named(format!("device {number}"));
            match bdis.control(key, &volume) {
                Ok(control) => all.push((control, volume)),
                Err(error) => assert!(error.to_string().contains("`bdi = NAME`"), "{error}"),
            }
        }
        assert_eq!(all.len(), 256);
        assert_eq!(parameters.bdis_with_volumes().len(), 256);
        // There is room again when some have gone, and those leave together.
        all.truncate(100);
        bdis.settle();
        assert_eq!(parameters.bdis_with_volumes().len(), 100);
        let volume = cache.volume_as("new", 1 << 20, ebb_cache::Mode::Writeback).unwrap();
        assert!(bdis.control(DeviceKey::Named("new".to_owned()), &volume).is_ok());
    }

    #[test]
    fn the_host_says_what_memory_is_available() {
        assert!(available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
