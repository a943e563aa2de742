//! How many connections the remote stores of this process have, and how many they may have: each takes a descriptor.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Stores with one connection, and stores with one for each worker.
static WITH_ONE: AtomicUsize = AtomicUsize::new(0);
static WITH_SEVERAL: AtomicUsize = AtomicUsize::new(0);
static ESTABLISHED: AtomicUsize = AtomicUsize::new(0);

/// Connections of all open remote stores of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteConnections {
    /// Those that are established.
    pub established: usize,
    /// The most there may be at a time.
    pub most: usize,
}

impl RemoteConnections {
    /// Those at present, in a process with this number of workers.
    pub fn count(workers: usize) -> RemoteConnections {
        let established = ESTABLISHED.load(Ordering::Relaxed);
        let several = WITH_SEVERAL.load(Ordering::Relaxed).saturating_mul(workers);
        let most = several.saturating_add(WITH_ONE.load(Ordering::Relaxed)).max(established);
        RemoteConnections { established, most }
    }
}

/// Counts one more, until it is dropped.
#[derive(Debug)]
pub(super) struct Counted(&'static AtomicUsize);

impl Counted {
    /// A store that is open, with `several` connections, or with one.
    pub(super) fn store(several: bool) -> Counted {
        Counted::among(if several { &WITH_SEVERAL } else { &WITH_ONE })
    }

    /// An established connection.
    pub(super) fn connection() -> Counted {
        Counted::among(&ESTABLISHED)
    }

    fn among(count: &'static AtomicUsize) -> Counted {
        count.fetch_add(1, Ordering::Relaxed);
        Counted(count)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
