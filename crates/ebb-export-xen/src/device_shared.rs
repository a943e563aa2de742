//! What the queues of one device share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use ebb_export::{Backing, UnstableWrites};
use ebb_mem::PoolParameters;
use ebb_volume::{LogLimit, Stop, ToldLosses, Volume};

use crate::journal::Journal;
use crate::params::XenParameters;

/// Segments in an indirect request, as offered to guests.
pub const MAX_SEGMENTS: u16 = 256;

/// What the queues of a device share.
#[derive(Debug)]
pub(crate) struct DeviceShared {
    pub(crate) volume: Arc<Volume>,
    pub(crate) pool: Arc<PoolParameters>,
    pub(crate) parameters: Arc<XenParameters>,
    pub(crate) read_only: bool,
    /// When it was connected.
    pub(crate) since: Instant,
    /// Discard was offered.
    pub(crate) discard: bool,
    /// Bytes the requests of one queue may hold.
    pub(crate) queue_memory: usize,
    /// A flush failed, so that acknowledged data may be lost. Linux's frontend takes a failed empty
    /// flush for "flushes are not supported" and continues without them: so all writes fail from then
    /// on, which a guest cannot ignore.
    pub(crate) broken: AtomicBool,
    /// Rings being served.
    pub(crate) queues: AtomicU32,
    /// Grants stay mapped: guest and backend agreed on it.
    pub(crate) persistent: AtomicBool,
    /// It is being drained: requests in flight complete, new ones are not consumed.
    pub(crate) closing: AtomicBool,
    /// Notifies its rings of that.
    pub(crate) stop: Stop,
    /// The daemon stops: requests that it cannot complete are left to its successor.
    pub(crate) stopping: AtomicBool,
    pub(crate) counters: Counters,
    /// Its acknowledged writes that a kill would lose.
    pub(crate) unstable: UnstableWrites<Journal>,
    /// The losses of its volume that it has learned of.
    pub(crate) told: ToldLosses,
    /// Limits the log lines about its guest.
    pub(crate) log_limit: Arc<LogLimit>,
}

impl DeviceShared {
    /// See [`DeviceShared::broken`].
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// What its journals are compared with.
    pub(crate) fn backing(&self) -> Backing {
        Backing::of(&self.volume)
    }

    /// Whether a request that fails now gets no response, but stays in the journal for the successor: the volume was
    /// given up because its store does not respond, which is no error of the disk. After a failed flush the guest is
    /// told: the flush of a successor would succeed.
    pub(crate) fn leaves_failures(&self) -> bool {
        self.stopping.load(Ordering::Relaxed) && self.volume.is_closing() && !self.is_broken()
    }

    /// Lets requests in flight complete and consumes no new ones. Does not wait.
    pub(crate) fn drain(&self) {
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
    /// Requests that failed with an error.
    errors,
    /// Grants that are currently mapped, without those of rings.
    mapped,
    /// The most grants that were mapped at the same time.
    mapped_most,
    /// Times that a grant was mapped.
    maps,
    /// Mappings that were unmapped because there were too many.
    evictions,
    /// Mappings that were unmapped because they were idle.
    expiries,
    /// Segments copied by the hypervisor.
    copies,
    /// Hypercalls for these copies.
    copy_calls,
    /// Events received from the guest.
    events,
    /// Times that busy polling found requests, without an event.
    polls,
    /// Events sent to the guest.
    notifications,
    /// Times at which responses were published.
    publications,
    /// Times that the guest was delayed because most of its requests were refused.
    throttled,
    /// Requests consumed.
    consumed,
    /// Responses sent.
    responses,
    /// Requests that were resumed from a predecessor's journal.
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
