//! What one iteration of a worker's loop knows of the previous ones: how many completions to expect, and which tasks
//! wait for the next one.

use std::cell::Cell;
use std::task::Waker;
use std::time::Duration;

/// Completions per iteration below which a request may bypass the ring: a single request causes two, its
/// arrival and its read.
const DIRECT_BELOW: u32 = 3;
/// Completions per iteration from which on the worker waits for several.
const LINGER_FROM: u32 = 4;
/// How long the worker waits for further completions after the first one.
const LINGER: Duration = Duration::from_micros(50);

/// The recent number of completions per iteration, which decides whether to wait for several.
#[derive(Default)]
pub(crate) struct CompletionLoad {
    /// Moving average of completions per iteration, in sixteenths.
    average: Cell<u32>,
    /// Operations executed without the ring in this iteration; they count as completions.
    direct: Cell<u32>,
}

impl CompletionLoad {
    pub(crate) fn note(&self, completions: u32) {
        let completions = completions.saturating_add(self.direct.take());
        let average = self.average.get();
        self.average.set(average - average / 8 + completions.min(512) * 2);
    }

    /// Few completions per iteration: batching would not help.
    pub(crate) fn is_light(&self) -> bool {
        self.average.get() / 16 < LINGER_FROM
    }

    /// Requests arrive one by one, and this is the first of the iteration: batching would not help.
    pub(crate) fn take_direct(&self) -> bool {
        let first = self.average.get() / 16 < DIRECT_BELOW && self.direct.get() == 0;
        if first {
            self.direct.set(1);
        }
        first
    }

    /// Under load, wait for the average number of completions, but no longer than [`LINGER`];
    /// a single request is never delayed.
    pub(crate) fn batch(&self) -> (usize, Option<Duration>) {
        match self.average.get() / 16 {
            0..LINGER_FROM => (1, None),
            usual => (usual as usize, Some(LINGER)),
        }
    }
}

/// Tasks that wait for the next iteration.
#[derive(Default)]
pub(crate) struct IterationWaiters {
    /// Tasks that poll memory, or have little to do.
    pub(crate) polling: Vec<Waker>,
    /// Tasks that have much to do: they run after all other tasks.
    pub(crate) bulk: Vec<Waker>,
    /// Bulk tasks that were woken and have not run yet. They are ready, but other bulk tasks do not
    /// yield to them.
    pub(crate) bulk_woken: usize,
}

impl IterationWaiters {
    pub(crate) fn is_empty(&self) -> bool {
        self.polling.is_empty() && self.bulk.is_empty()
    }

    pub(crate) fn wake(&mut self) {
        self.bulk_woken = self.bulk.len();
        self.polling.drain(..).chain(self.bulk.drain(..)).for_each(Waker::wake);
    }
}
