//! What the queues of one frontend's disk share.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ebb_access::{ClientIdentity, SocketCredentials};
use ebb_export::UnstableWrites;
use ebb_mem::PoolParameters;
use ebb_volume::{LogLimit, Stop, ToldLosses, Volume};
use rustix::net::SocketAddrUnix;

use crate::inflight::InflightRecord;

/// Log lines that one frontend may cause, and in what time.
const LINES: u32 = 10;
const LINES_PERIOD: Duration = Duration::from_secs(10);

/// The process at the other end of a connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct FrontendPeer {
    /// The path at which it has connected, or `unix`.
    pub(crate) socket: Arc<str>,
    pub(crate) pid: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) who: ClientIdentity,
}

impl FrontendPeer {
    /// The peer of a socket, as far as the kernel tells.
    pub(crate) fn of(socket: &OwnedFd) -> FrontendPeer {
        let own = rustix::net::getsockname(socket).ok();
        let own = own.and_then(|address| SocketAddrUnix::try_from(address).ok());
        let path = own.as_ref().and_then(SocketAddrUnix::path_bytes);
        let path = path.map_or("unix".into(), |path| String::from_utf8_lossy(path).into());
        let credentials = SocketCredentials::of(socket);
        let (pid, uid) = credentials.as_ref().map(|peer| (peer.pid, peer.uid)).unzip();
        let who = ClientIdentity { socket: credentials, ..ClientIdentity::default() };
        FrontendPeer { socket: path, pid, uid, who }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct DiskShared {
    pub(crate) volume: Arc<Volume>,
    pub(crate) pool: Arc<PoolParameters>,
    /// The connection's number, for the log.
    pub(crate) number: u64,
    pub(crate) peer: FrontendPeer,
    /// When its frontend connected.
    pub(crate) since: Instant,
    /// Bytes the requests of one queue may hold.
    pub(crate) queue_memory: usize,
    /// The guest sends flushes, so that a write may be acknowledged before it is stable.
    pub(crate) volatile_cache: AtomicBool,
    /// Acknowledged writes were lost when the daemon was killed: writes and flushes fail, until the guest resets the disk.
    pub(crate) broken: AtomicBool,
    /// Queues being served.
    pub(crate) queues: AtomicU32,
    /// The volume was withdrawn, the connection is ending, or the daemon stops.
    pub(crate) closing: AtomicBool,
    /// A queue cannot be served, since the volume has another writer.
    pub(crate) waiting: AtomicBool,
    /// The daemon stops: requests that it cannot complete are left to its successor.
    pub(crate) stopping: AtomicBool,
    /// Its frontend has gone: long requests are cut short, and repeated for the one that comes after it.
    pub(crate) gone: AtomicBool,
    /// Has all queues complete what they have consumed, and end.
    pub(crate) stop: Stop,
    pub(crate) counters: VhostCounters,
    /// Its acknowledged writes that a kill would lose.
    pub(crate) unstable: UnstableWrites<InflightRecord>,
    /// The losses of its volume that it has learned of.
    pub(crate) told: ToldLosses,
    /// Limits the log lines about its frontend and its guest.
    pub(crate) log_limit: LogLimit,
}

impl DiskShared {
    pub(crate) fn new(
        volume: Arc<Volume>,
        pool: Arc<PoolParameters>,
        (number, peer): (u64, FrontendPeer),
        queue_memory: usize,
    ) -> Arc<DiskShared> {
        Arc::new(DiskShared {
            told: volume.told_losses(),
            volume,
            pool,
            number,
            peer,
            since: ebb_mem::clock::now(),
            queue_memory,
            volatile_cache: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            queues: AtomicU32::new(0),
            closing: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            stop: Stop::default(),
            counters: VhostCounters::default(),
            unstable: UnstableWrites::default(),
            log_limit: LogLimit::new(LINES, LINES_PERIOD),
        })
    }

    /// Whether a write must be stable before its completion: the guest does not send flushes.
    #[inline]
    pub(crate) fn writes_through(&self) -> bool {
        !self.volatile_cache.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Whether a request that fails now is not completed, but stays in flight for the successor: the volume was given up, since
    /// its store does not respond, which is no error of the disk. After lost writes the guest is
    /// told, and a flush that may report a loss is completed.
    pub(crate) fn leaves_failures(&self) -> bool {
        self.stopping.load(Ordering::Relaxed) && self.volume.is_closing() && !self.is_broken()
    }

    /// Returns true if both are connections to one volume, also if it was reopened meanwhile.
    pub(crate) fn has_volume_of(&self, other: &DiskShared) -> bool {
        self.volume.name() == other.volume.name()
    }

    /// Whether requests are of no more use to the frontend.
    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Lets requests in flight complete and consumes no new ones. Does not wait.
    pub(crate) fn drain(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.stop.stop();
    }

    /// How many lines were suppressed before this one; `None` if it is to be suppressed as well.
    pub(crate) fn may_log(&self) -> Option<u64> {
        self.log_limit.admit(ebb_mem::clock::now())
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of a disk since its frontend connected; see [`VhostStats`].
        #[derive(Debug, Default)]
        pub(crate) struct VhostCounters { $(pub(crate) $name: AtomicU64),* }

        /// Figures of a disk since its frontend connected.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct VhostStats { $($(#[$doc])* pub $name: u64),* }

        impl VhostCounters {
            pub(crate) fn read(&self) -> VhostStats {
                VhostStats { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters! {
    /// Reads.
    reads,
    /// Writes.
    writes,
    /// Flushes.
    flushes,
    /// Discards and requests to write zeroes.
    discards,
    /// Bytes read.
    read_bytes,
    /// Bytes written.
    written_bytes,
    /// Requests that failed with an error.
    errors,
    /// Requests consumed.
    consumed,
    /// Requests completed.
    completed,
    /// Requests carried out without a task and a buffer.
    inline,
    /// Requests whose data the kernel transferred between the store and guest memory, without a buffer.
    direct,
    /// Notifications received from the guest.
    kicks,
    /// Times that busy polling found requests, without a notification.
    polls,
    /// Notifications sent to the guest.
    calls,
    /// Times at which completions were published.
    publications,
    /// Times that the guest was delayed because most of its requests were refused.
    throttled,
    /// Requests that were resumed from the inflight region.
    resumed,
}

#[inline]
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}
