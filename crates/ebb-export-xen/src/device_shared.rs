//! A disk as one guest has it: what its queues share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ebb_mem::PoolParameters;
use ebb_volume::{LogLimit, Stop, Volume};

use crate::journal::Backing;
use crate::params::XenParameters;
use crate::unstable::Unstable;

/// Segments in an indirect request, as offered to guests.
pub const MAX_SEGMENTS: u16 = 256;

/// How pages reach us that are not kept mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transient {
    /// The hypervisor copies them.
    #[default]
    Copy,
    /// They are mapped for the request: for comparison, and what Linux's backend does.
    Map,
}

/// What the queues of a device share.
#[derive(Debug)]
pub(crate) struct DeviceShared {
    pub(crate) volume: Arc<Volume>,
    pub(crate) pool: Arc<PoolParameters>,
    pub(crate) parameters: Arc<XenParameters>,
    pub(crate) read_only: bool,
    /// Discard was offered.
    pub(crate) discard: bool,
    pub(crate) transient: Transient,
    /// Bytes the requests of one queue may hold.
    pub(crate) queue_memory: usize,
    /// Data that was acknowledged could not be made stable. Linux's frontend takes an error of an
    /// empty flush for "no flush here" and goes on as if all were well: so from then on writes
    /// fail, which no guest can overlook.
    pub(crate) broken: AtomicBool,
    /// Rings being served.
    pub(crate) queues: AtomicU32,
    /// Grants stay mapped: guest and backend agreed on it.
    pub(crate) persistent: AtomicBool,
    /// It is being wound up: what is under way ends, nothing begins.
    pub(crate) closing: AtomicBool,
    /// Tells its rings so.
    pub(crate) stop: Stop,
    pub(crate) counters: Counters,
    /// What a kill would lose of it.
    pub(crate) unstable: Unstable,
    /// Rations the lines about its guest.
    pub(crate) lines: Arc<LogLimit>,
}

impl DeviceShared {
    /// See [`DeviceShared::broken`].
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// What its journals are about.
    pub(crate) fn backing(&self) -> Backing {
        Backing {
            volume: self.volume.name().to_string(),
            store: self.volume.store_identity(),
            size: self.volume.size(),
        }
    }

    /// Has what is under way end, and nothing begin any more. Does not wait.
    pub(crate) fn wind_up(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.stop.stop();
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of a device since it was connected; see [`XenStats`].
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64),* }

        /// Figures of a device since it was connected.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct XenStats { $($(#[$doc])* pub $name: u64),* }

        impl Counters {
            pub(crate) fn read(&self) -> XenStats {
                XenStats { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters! {
    /// Reads.
    rd_req,
    /// Writes.
    wr_req,
    /// Flushes and barriers.
    f_req,
    /// Discards.
    ds_req,
    /// Sectors read, of 512 bytes.
    rd_sect,
    /// Sectors written, of 512 bytes.
    wr_sect,
    /// Requests that were answered with an error.
    errors,
    /// Grants that are mapped at the moment, rings left out.
    mapped,
    /// The most grants that were mapped at once.
    mapped_most,
    /// Grants that were mapped, ever.
    maps,
    /// Mappings that made room for others.
    evictions,
    /// Mappings that had lain idle for too long.
    expiries,
    /// Segments copied by the hypervisor.
    copies,
    /// Calls in which it did so.
    copy_calls,
    /// Events of the guest.
    events,
    /// Times that requests were found by looking, without an event.
    polls,
    /// Events sent to the guest.
    notifications,
    /// Times at which responses were published.
    publications,
    /// Times that the guest had to wait since it sent mostly what is refused.
    throttled,
    /// Requests answered.
    answers,
    /// Requests taken over from a predecessor.
    resumed,
}

pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn note_mapped(&self, change: i64) {
        let now = if change >= 0 {
            let change = change.unsigned_abs();
            self.mapped.fetch_add(change, Ordering::Relaxed) + change
        } else {
            self.mapped.fetch_sub(change.unsigned_abs(), Ordering::Relaxed)
        };
        self.mapped_most.fetch_max(now, Ordering::Relaxed);
    }
}
