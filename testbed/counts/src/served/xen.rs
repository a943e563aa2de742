//! A Xen guest over shared memory.

use std::sync::Arc;

use ebb_export_xen::abi::{Body, Request, Segment, op};
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::World;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::{Backend, BackendOptions, DiskSpec, XenstoreControl, attach, device_number};
use ebb_guest_ring::full_barrier;

use super::host::NAME;
use super::{Client, Error, Host, Load};

const GUEST: u16 = 1;
const DISK: &str = "xvdb";
const PAGES: u32 = 512;
/// Steps until the disk must be connected.
const PATIENCE: u32 = 10_000;

/// See the module.
pub(crate) struct XenGuest {
    disk: Frontend,
    pages: Vec<u32>,
    /// The load and the requests of one batch, at sector 0.
    prepared: Option<(Load, Vec<Request>)>,
    missing: usize,
    _parts: (Backend, XenstoreControl),
}

/// Starts the backend and connects a disk.
pub(crate) fn connect(host: &mut Host) -> Result<XenGuest, Error> {
    let world = World::default();
    let platform = Arc::new(world.clone());
    let options = BackendOptions::new(platform, vec![host.worker.handle()], host.volumes.clone());
    let (backend, mut control) = Backend::prepare(options)?;
    let guest = world.guest(GUEST, PAGES)?;
    let order = DiskSpec { volume: NAME, name: DISK, read_only: false };
    attach(&mut *world.xenstore()?, GUEST, &order)?;
    let device = device_number(DISK).ok_or("no such device")?;
    let mut disk = Frontend::new(&world, &guest, device, FrontendConfig::default());
    let mut tries = 0;
    while !disk.step_connect()? {
        control.run_once(ebb_mem::clock::now());
        while host.worker.iterate() {}
        tries += 1;
        if tries > PATIENCE {
            return Err("the disk was not connected".into());
        }
    }
    control.run_once(ebb_mem::clock::now());
    while host.worker.iterate() {}
    let pages = disk.pages(32);
    Ok(XenGuest { disk, pages, prepared: None, missing: 0, _parts: (backend, control) })
}

fn at_sector(mut request: Request, at: u64) -> Request {
    if let Body::Direct { sector, .. } | Body::Indirect { sector, .. } = &mut request.body {
        *sector = at;
    }
    request
}

impl XenGuest {
    fn prepare(&mut self, load: Load) -> Vec<Request> {
        let operation = if load.write { op::WRITE } else { op::READ };
        let one = |number: usize| {
            let count = load.bytes.div_ceil(4096);
            let pages = &self.pages[number * count..(number + 1) * count];
            let segments: Vec<_> =
                pages.iter().map(|gref| Segment { gref: *gref, first: 0, last: 7 }).collect();
            self.disk.request(operation, 0, &segments).1
        };
        (0..load.depth).map(one).collect()
    }
}

impl Client for XenGuest {
    fn send(&mut self, load: Load, offset: u64) -> Result<(), Error> {
        if self.prepared.as_ref().is_none_or(|(of, _)| *of != load) {
            self.prepared = Some((load, self.prepare(load)));
        }
        let Some((_, requests)) = &self.prepared else { return Err("nothing prepared".into()) };
        let queue = &mut self.disk.queues[0];
        for (number, request) in requests.iter().enumerate() {
            let at = offset + (number * load.bytes) as u64;
            queue.put(at_sector(*request, at / 512));
        }
        queue.push();
        self.missing = load.depth;
        Ok(())
    }

    fn receive(&mut self) -> Result<bool, Error> {
        let queue = &mut self.disk.queues[0];
        loop {
            while let Some(response) = queue.take()? {
                if response.status != 0 {
                    return Err(format!("a request failed: {response:?}").into());
                }
                self.missing -= 1;
            }
            if self.missing == 0 {
                return Ok(true);
            }
            // The event of the next response.
            let received = queue.numbers().1;
            queue.store(12, received.wrapping_add(1));
            full_barrier();
            if queue.load(8) == received {
                return Ok(false);
            }
        }
    }
}
