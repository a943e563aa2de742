//! The daemon's backend for frontends of vhost-user, with its control thread as a step, and its
//! sockets.

use std::collections::BTreeMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ebb_export_vhost::{SteppedFrontends, VhostBackend, VhostDisk, VhostFigures, VhostOptions};
use ebb_io::WorkerHandle;
use ebb_volume::Volumes;
use ebbd::engine::Engine;

/// The addresses of sockets, by volume: the same for all daemons of a world.
#[derive(Clone)]
pub(crate) struct Sockets(Arc<BTreeMap<String, SocketAddr>>);

impl Sockets {
    pub(crate) fn new<'a>(volumes: impl Iterator<Item = &'a str>) -> Sockets {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let world = NEXT.fetch_add(1, Ordering::Relaxed);
        let address = |volume: &str| {
            let name = format!("ebb-world-{}-{world}-{volume}", std::process::id());
            (volume.to_owned(), SocketAddr::from_abstract_name(name).unwrap())
        };
        Sockets(Arc::new(volumes.map(address).collect()))
    }

    pub(crate) fn of(&self, volume: &str) -> SocketAddr {
        self.0[volume].clone()
    }

    /// Starts the backend as `ebbd` does, with sockets that were passed to it.
    pub(crate) fn serve(
        &self,
        engine: &Engine,
        workers: Vec<WorkerHandle>,
        volumes: &Volumes,
    ) -> Frontends {
        let options = VhostOptions::new(workers, volumes.clone());
        let (backend, control) = VhostBackend::prepare(options).unwrap();
        let figures = backend.figures();
        engine.serve_frontends(backend);
        for (volume, address) in &*self.0 {
            let listener = UnixListener::bind_addr(address).unwrap();
            engine.serve_passed_socket(listener.into(), volume).unwrap();
        }
        Frontends { control, figures }
    }
}

/// See the module.
pub(crate) struct Frontends {
    control: SteppedFrontends,
    figures: VhostFigures,
}

impl Frontends {
    pub(crate) fn step(&mut self) -> bool {
        self.control.run_once()
    }

    pub(crate) fn wants(&self) -> Option<Instant> {
        self.control.next_turn()
    }

    pub(crate) fn disks(&self) -> Vec<VhostDisk> {
        self.figures.read()
    }
}
