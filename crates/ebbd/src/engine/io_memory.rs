//! The ceiling of I/O memory while the daemon runs: it follows the volumes and clients, and what
//! other processes of the control group leave.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ebb_advice::Advice;
use ebb_api::Refusal;
use ebb_config::{Config, VolumeOrigin};
use ebb_control::Refused;
use ebb_io::WorkerHandle;
use ebb_mem::pressure::{Limit, Room, Rooms, Roots, limit};

use super::{Engine, lock};
use crate::budget::{self, DaemonLoad, GroupTooSmall, MemoryUse};
use crate::ticks::until_tick;

/// How often the control group is sampled, at most and at least. A sample takes about 20 µs.
const OFTEN: Duration = Duration::from_millis(20);
const SELDOM: Duration = Duration::from_secs(1);
/// Between two samples other processes are assumed to allocate at most this much a second, bytes.
const RATE: u64 = 256 << 20;
/// Limits are read again after this many samples.
const LIMITS_EVERY: u32 = 10;
/// Smaller changes of the ceiling than one part in `STEP` of it wait.
const STEP: usize = 32;
/// The ceiling rises to at most so many times the one of the start.
const RAISED: usize = 2;

/// The memory of the control groups of this process, with the limit that applies.
struct GroupSampler {
    rooms: Rooms,
    sampled: Vec<Room>,
    limit: Option<Limit>,
    samples: u32,
}

impl GroupSampler {
    fn new() -> GroupSampler {
        let roots = Roots::default();
        let rooms = Rooms::open(&roots).reading_limits_every(LIMITS_EVERY);
        GroupSampler { rooms, sampled: Vec::new(), limit: limit(&roots), samples: 0 }
    }

    /// Samples the groups that have a limit. Reads files.
    fn sample(&mut self) {
        self.samples += 1;
        if self.samples >= LIMITS_EVERY {
            self.samples = 0;
            self.limit = limit(&Roots::default());
        }
        self.rooms.groups_now(&mut self.sampled);
    }

    /// The time until the next sample: a few of them before the rest of a group can be used up.
    fn pause(&self) -> Duration {
        self.sampled.iter().map(pause).min().unwrap_or(SELDOM)
    }
}

fn pause(room: &Room) -> Duration {
    let millis = (room.available / 4).saturating_mul(1000) / RATE;
    Duration::from_millis(millis).clamp(OFTEN, SELDOM)
}

impl Engine {
    /// Keeps the ceiling of I/O memory, and the number of connections, within the limit of the
    /// control group, for as long as the worker runs.
    pub fn keep_ceiling(self: &Arc<Self>, worker: &WorkerHandle, started: Instant) {
        let (engine, at_start) = (self.clone(), self.cache.memory().arena_stats().ceiling);
        worker.spawn(move |io| async move {
            let sampler = io.offload(|| Arc::new(Mutex::new(GroupSampler::new()))).await;
            let mut most = at_start;
            loop {
                let reader = sampler.clone();
                io.offload(move || lock(&reader).sample()).await;
                let pause = {
                    let sampler = lock(&sampler);
                    most = engine.follow_groups(&sampler, at_start, most);
                    sampler.pause()
                };
                match pause {
                    SELDOM => io.sleep(until_tick(ebb_mem::clock::now(), started, SELDOM)).await,
                    pause => io.sleep(pause).await,
                }
            }
        });
    }

    fn load(&self, volumes: usize) -> DaemonLoad {
        let clients = self.server.accepted_connections();
        DaemonLoad { workers: self.workers.len(), volumes, clients }
    }

    /// Adjusts the ceiling to the limit that applies and to what the groups leave. Returns the
    /// largest ceiling so far, at least `most`: requests that were admitted under it may still
    /// wait.
    fn follow_groups(&self, sampler: &GroupSampler, at_start: usize, most: usize) -> usize {
        let memory = self.cache.memory();
        let arena = memory.arena_stats();
        let load = self.load(lock(&self.slots).len());
        let wide = |bytes: usize| u64::try_from(bytes).unwrap_or(u64::MAX);
        let (wired, dirty) = (wide(arena.wired), self.bdis.held());
        let groups: Vec<_> = sampler
            .sampled
            .iter()
            .map(|room| MemoryUse { limit: room.total, available: room.available, wired, dirty })
            .collect();
        let limit = sampler.limit.as_ref();
        // The address space is four times the ceiling of the start: more needs a restart.
        let own = |groups: &[MemoryUse]| {
            let bytes = usize::try_from(load.ceiling_now(limit, groups)).unwrap_or(usize::MAX);
            bytes.min(at_start.saturating_mul(RAISED))
        };
        let (ceiling, most) = (own(&groups), most.max(own(&[])));
        if ceiling.abs_diff(arena.ceiling) > arena.ceiling / STEP {
            tracing::debug!(
                bytes = ceiling,
                before = arena.ceiling,
                "the ceiling of I/O memory follows the control group"
            );
            memory.set_ceiling(ceiling, most);
            self.bdis.set_most(wide(ceiling / 2));
            if ceiling < arena.wired {
                // The kernel cannot reclaim clean data that is wired.
                self.cache.lend_idle();
            }
        }
        let group = limit.and_then(|limit| Some((limit.bytes, limit.source.setting()?)));
        let clients = group.map_or(usize::MAX, |(bytes, _)| load.most_clients(bytes));
        let setting = group.map_or("MemoryMax", |(_, setting)| setting);
        self.server.limit_connections_by_memory(clients, setting);
        most
    }

    /// Checks that the control group has memory for one more volume.
    ///
    /// # Errors
    /// If it has not.
    pub(super) fn must_have_memory(&self) -> Result<(), Refused> {
        let volumes = lock(&self.slots).len() + 1;
        self.fits(volumes).map_err(|error| too_small(&error))
    }

    /// Checks that the control group has memory for the volumes of `new`; fewer volumes than before
    /// always fit.
    ///
    /// # Errors
    /// If it has not.
    pub(crate) fn must_have_memory_for(&self, new: &Config) -> Result<(), Refused> {
        let now = lock(&self.slots).len();
        let added = {
            let definitions = lock(&self.definitions);
            let origins = definitions.config.as_ref().map(|config| &config.origins);
            let at_run_time = |origin: &&VolumeOrigin| **origin == VolumeOrigin::RunTime;
            origins.map_or(0, |all| all.values().filter(at_run_time).count())
        };
        let volumes = new.volumes.len() + added;
        if volumes <= now {
            return Ok(());
        }
        self.fits(volumes).map_err(|error| too_small(&error))
    }

    fn fits(&self, volumes: usize) -> Result<(), GroupTooSmall> {
        // A worker may not read it itself.
        let limit = ebb_sandbox::threads::call(|| limit(&Roots::default()));
        // Connections in the handshake do not count: anyone may open them.
        let load = DaemonLoad::of_volumes(self.workers.len(), volumes, self.server.clients());
        budget::ceiling(limit.ok().flatten().as_ref(), load).map(drop)
    }
}

fn too_small(error: &GroupTooSmall) -> Refused {
    let remedy = error.remedy().unwrap_or_default();
    Refused::new(Refusal::NoMemory, "memory", error.to_string(), remedy)
}
