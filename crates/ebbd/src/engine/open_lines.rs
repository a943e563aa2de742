//! The log lines about volumes that cannot be opened, and that are opened later: one for each volume and outage, and of each
//! kind a limited number, so that thousands of volumes on a store that is gone leave room in the log and in the list of
//! events. What is left out is summed up in one line.

use std::time::Duration;

use ebb_io::WorkerHandle;
use ebb_volume::LogLimit;

/// Lines of each kind per period.
const LINES: u32 = 50;
const PERIOD: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub(super) struct OpenLines {
    failed: LogLimit,
    opened: LogLimit,
}

impl Default for OpenLines {
    fn default() -> Self {
        let limit = || LogLimit::new(LINES, PERIOD);
        Self { failed: limit(), opened: limit() }
    }
}

impl OpenLines {
    /// A volume could not be opened at the first attempt.
    pub(super) fn failed(&self, volume: &str, reason: &str) {
        if let Some(left_out) = self.failed.admit(ebb_mem::clock::now()) {
            let left_out = (left_out > 0).then_some(left_out);
            tracing::error!(
                volume,
                left_out,
                "cannot open the volume; clients are refused until it is open: {reason}"
            );
        }
    }

    /// The file of a volume in the state directory cannot be used.
    pub(super) fn broken(&self, volume: &str, reason: &str) {
        if let Some(left_out) = self.failed.admit(ebb_mem::clock::now()) {
            let left_out = (left_out > 0).then_some(left_out);
            tracing::error!(
                volume,
                left_out,
                "its file in the state directory cannot be used: {reason}"
            );
        }
    }

    /// A volume was opened after failed attempts.
    pub(super) fn opened(&self, volume: &str, attempts: u64) {
        if let Some(left_out) = self.opened.admit(ebb_mem::clock::now()) {
            let left_out = (left_out > 0).then_some(left_out);
            tracing::info!(volume, attempts, left_out, "opened after failed attempts: served");
        }
    }

    /// Sums up what was left out.
    pub(super) fn sum_up(&self) {
        if let Some(volumes) = self.failed.take_suppressed() {
            tracing::error!(
                volumes,
                "further volumes cannot be opened; `ebbd status` and `ebbd volume list` name them"
            );
        }
        if let Some(volumes) = self.opened.take_suppressed() {
            tracing::info!(volumes, "further volumes were opened after failed attempts: served");
        }
    }
}

impl super::Engine {
    /// Sums up in the log what was left out of it, for as long as this worker runs.
    pub fn keep_log(self: &std::sync::Arc<Self>, worker: &WorkerHandle) {
        let engine = self.clone();
        worker.spawn(move |io| async move {
            while !engine.is_stopping() {
                io.sleep(PERIOD).await;
                engine.open_lines.sum_up();
            }
        });
    }
}
