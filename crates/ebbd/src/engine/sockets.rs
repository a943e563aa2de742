//! The sockets of vhost-user-blk follow the volumes: opened and closed after each change of the definitions.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ebb_api::Refusal;
use ebb_api::stat::FailingGuests;
use ebb_config::VolumeConfig;
use ebb_control::Refused;
use ebb_export_vhost::{VhostFigures, VhostOptions};
use ebb_io::WorkerHandle;
use ebb_store::RemoteConnections;

use super::manage::blocking;
use super::{Engine, lock};
use crate::descriptors;
use crate::ticks::until_tick;
use crate::vhost::{FailedSocket, WantedSockets};

/// How often sockets that cannot be opened are tried again.
const RETRY: Duration = Duration::from_secs(10);
/// How often the limits of descriptors are adjusted, since volumes are opened and closed, and guests come and go.
const DESCRIPTORS: Duration = Duration::from_secs(2);

impl Engine {
    /// Opens the sockets of vhost-user-blk, and those of volumes that are added from now on. Blocks.
    pub fn begin_sockets(&self) {
        self.guests.vhost.begin();
        self.sync_sockets_now();
    }

    /// Serves a volume over vhost-user-blk at a socket that was passed to this process; see [`VhostExport::adopt`].
    ///
    /// # Errors
    /// Those of starting the export.
    ///
    /// [`VhostExport::adopt`]: crate::vhost::VhostExport::adopt
    pub fn serve_passed_socket(&self, socket: OwnedFd, volume: &str) -> std::io::Result<()> {
        self.guests.vhost.adopt(socket, volume, || self.vhost_options())
    }

    fn vhost_options(&self) -> VhostOptions {
        // There may be many frontends before the limits are adjusted next.
        let descriptors = self.guests.vhost.descriptors().clone();
        descriptors::limit_exports(&self.server, Some(&descriptors), self.workers.len());
        VhostOptions {
            descriptors,
            ..VhostOptions::new(self.workers.clone(), self.volumes.clone())
        }
    }

    /// Removes the sockets of vhost-user-blk, before [`Engine::stop`]. Blocks for a moment.
    pub fn close_sockets(&self) {
        self.guests.vhost.close_sockets();
    }

    /// The figures of the disks that are served over vhost-user-blk, as soon as there are any.
    pub fn vhost_figures(&self) -> Arc<OnceLock<VhostFigures>> {
        self.guests.vhost.figures()
    }

    /// Begins to disconnect the frontend with this number; false if there is none.
    pub(crate) fn disconnect_frontend(&self, number: u64) -> bool {
        self.guests.vhost.disconnect(number)
    }

    /// The number of disks of guests on a volume.
    pub(crate) fn disks_of(&self, volume: &str) -> u64 {
        self.guests.disks_of(volume)
    }

    /// The number of disks of guests on each volume that has any.
    pub(crate) fn disks_of_guests(&self) -> BTreeMap<String, u64> {
        self.guests.disks()
    }

    /// The guests of each volume whose requests fail until they are reset.
    pub(crate) fn failing_guests(&self) -> BTreeMap<String, FailingGuests> {
        self.guests.failing()
    }

    /// Returns true if the limits of clients' and frontends' descriptors change while the volumes
    /// stay the same.
    fn needs_descriptor_limits(&self) -> bool {
        let remote = RemoteConnections::count(self.workers.len());
        remote.most > 0 || self.guests.vhost.has_sockets()
    }

    /// Adjusts the limits of descriptors for as long as the worker runs.
    pub fn keep_descriptor_limits(self: &Arc<Self>, worker: &WorkerHandle, started: Instant) {
        let engine = self.clone();
        worker.spawn(move |io| async move {
            let mut volumes = 0;
            loop {
                io.sleep(until_tick(ebb_mem::clock::now(), started, DESCRIPTORS)).await;
                // If they are not needed all the time, they depend on the number of volumes.
                let before = std::mem::replace(&mut volumes, engine.volumes.count());
                if engine.needs_descriptor_limits() || before != volumes {
                    let engine = engine.clone();
                    io.offload(move || engine.limit_descriptors()).await;
                }
            }
        });
    }

    /// Adjusts the limits of clients' and frontends' descriptors. Blocks for a moment.
    pub(crate) fn limit_descriptors(&self) {
        let vhost = &self.guests.vhost;
        let frontends = vhost.has_sockets().then(|| &**vhost.descriptors());
        descriptors::limit_exports(&self.server, frontends, self.workers.len());
    }

    /// The sockets that cannot be opened.
    pub(crate) fn failed_sockets(&self) -> Vec<FailedSocket> {
        self.guests.vhost.failed()
    }

    /// Tries sockets that cannot be opened again, and opens those again whose file was removed or
    /// replaced, for as long as the worker runs.
    pub fn keep_sockets(self: &Arc<Self>, worker: &WorkerHandle, started: Instant) {
        let engine = self.clone();
        worker.spawn(move |io| async move {
            loop {
                io.sleep(until_tick(ebb_mem::clock::now(), started, RETRY)).await;
                let looked = engine.clone();
                let lost = io.offload(move || looked.guests.vhost.has_lost()).await;
                if lost || !engine.failed_sockets().is_empty() {
                    engine.sync_sockets().await;
                }
            }
        });
    }

    /// Makes the open sockets those of the volumes that are defined.
    pub(super) async fn sync_sockets(self: &Arc<Self>) {
        let wanted = self.wanted_sockets();
        let none = wanted.served.is_empty() && wanted.refused.is_empty();
        if none && !self.guests.vhost.has_sockets() {
            return;
        }
        let engine = self.clone();
        let sync = move || {
            engine.sync_sockets_now();
            Ok(())
        };
        if let Err(refused) = blocking(sync).await {
            tracing::error!(
                "the sockets of vhost-user are as before: {}; {}",
                refused.body.message,
                refused.body.remedy
            );
        }
    }

    fn sync_sockets_now(&self) {
        let options = || self.vhost_options();
        let wanted = || self.without_protected(self.wanted_sockets());
        self.guests.vhost.sync(wanted, options, self.workers.len());
    }

    fn wanted_sockets(&self) -> WantedSockets {
        let definitions = lock(&self.definitions);
        let Some(config) = &definitions.config else { return WantedSockets::default() };
        let refused = config.refused_sockets().into_iter();
        WantedSockets {
            served: config.vhost_sockets(),
            refused: refused
                .map(|(name, bad)| (name, format!("{}: {}", bad.message, bad.remedy)))
                .collect(),
        }
    }

    /// Why a volume is not served over vhost-user-blk, although it is to be.
    pub(crate) fn socket_failure(&self, name: &str) -> Option<String> {
        let failed = self.failed_sockets().into_iter().find(|failed| failed.volume == name);
        failed.map(|failed| failed.reason)
    }

    /// The path at which a volume is served over vhost-user-blk, if it is.
    pub(crate) fn socket_of(&self, name: &str, volume: &VolumeConfig) -> Option<PathBuf> {
        let definitions = lock(&self.definitions);
        definitions.config.as_ref()?.vhost_socket(name, volume)
    }

    /// Refuses a volume whose socket something else has.
    pub(super) fn must_have_free_socket(
        &self,
        name: &str,
        volume: &VolumeConfig,
    ) -> Result<(), Refused> {
        let definitions = lock(&self.definitions);
        let Some(config) = &definitions.config else { return Ok(()) };
        config.check_socket(name, volume).map_err(|bad| {
            Refused::new(
                Refusal::Conflict,
                "in_use",
                format!("vhost_user: {}", bad.message),
                bad.remedy,
            )
        })
    }
}
