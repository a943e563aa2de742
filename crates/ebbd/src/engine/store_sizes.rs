//! Volumes follow the sizes that their stores get elsewhere, as an image of a Ceph cluster by `rbd resize`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_io::WorkerHandle;
use ebb_store::rbd_changes;
use ebb_volume::{LogLimit, RESIZE_LIMIT, Resize, Volume};

use super::Engine;
use crate::ticks::until_tick;

/// How often it is checked whether a store has changed: one counter for all of them.
const CHECK: Duration = Duration::from_millis(500);
/// Limits the lines of all volumes: another client may change the size of an image again and again.
static LINES: LogLimit = LogLimit::new(20, Duration::from_secs(60));

impl Engine {
    /// Resizes volumes whose stores have got another size, for as long as the worker runs.
    pub fn keep_store_sizes(self: &Arc<Self>, worker: &WorkerHandle, started: Instant) {
        let engine = self.clone();
        worker.spawn(move |io| async move {
            let mut seen = 0;
            loop {
                io.sleep(until_tick(ebb_mem::clock::now(), started, CHECK)).await;
                let changes = rbd_changes();
                if changes == seen {
                    continue;
                }
                seen = changes;
                for volume in engine.volumes.list() {
                    if volume.take_store_changed() {
                        let (engine, on) = (engine.clone(), io.clone());
                        let following = async move { engine.follow_store(&on, &volume).await };
                        io.spawn(following).detach();
                    }
                }
            }
        });
    }

    /// Gives a volume the size of its store. If that is smaller, the data beyond is gone already.
    async fn follow_store(&self, io: &ebb_io::Io, volume: &Volume) {
        if volume.layers().only().is_none() {
            // An overlay has the size that its header says.
            return;
        }
        let order = Resize { to: None, shrink: true };
        let name = &**volume.name();
        let resized = Box::pin(volume.resize_within(io, order, RESIZE_LIMIT)).await;
        if resized.as_ref().is_ok_and(|done| done.from != done.to) {
            self.guests.vhost.announce_sizes();
        } else if resized.is_ok() {
            return;
        }
        let Some(left_out) = LINES.admit(ebb_mem::clock::now()) else { return };
        let left_out = (left_out > 0).then_some(left_out);
        match resized {
            Ok(done) => {
                let (from, size) = (done.from, done.to);
                tracing::info!(
                    volume = name,
                    from,
                    size,
                    left_out,
                    "resized, because its store was"
                );
            }
            Err(error) => tracing::warn!(
                volume = name,
                %error,
                left_out,
                "its store has changed, and the volume keeps its size: try `ebbd volume resize` without a size"
            ),
        }
    }
}
