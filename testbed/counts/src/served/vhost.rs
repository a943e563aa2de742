//! A guest with a vhost-user-blk disk: the frontend and the driver of the backend's own tests.

use std::os::unix::net::UnixListener;

use ebb_export_vhost::{SteppedFrontends, VhostBackend, VhostOptions, VolumeSocket};

use super::host::NAME;
use super::vhost_parts::driver::{kind, status};
use super::vhost_parts::frontend::{Frontend, Wishes};
use super::vhost_parts::guest::Guest;
use super::{Client, Error, Host, Load};

/// See the module.
pub(crate) struct VhostGuest {
    disk: Frontend,
    missing: usize,
    _parts: (VhostBackend, SteppedFrontends),
}

/// Starts the backend and connects a disk.
pub(crate) fn connect(host: &mut Host) -> Result<VhostGuest, Error> {
    let options = VhostOptions::new(vec![host.worker.handle()], host.volumes.clone());
    let (backend, mut control) = VhostBackend::prepare(options)?;
    let path = host.folder.path().join("vhost.sock");
    backend.listen(VolumeSocket::new(UnixListener::bind(&path)?.into(), &path, NAME)?);
    // The frontend waits for replies; the backend is served here meanwhile.
    let connecting = std::thread::spawn(move || {
        let wishes = Wishes::default();
        let mut disk = Frontend::connect(&path, Guest::new(wishes.queues), wishes);
        disk.negotiate();
        disk.start();
        disk
    });
    while !connecting.is_finished() {
        control.run_once();
        host.worker.iterate();
    }
    let disk = connecting.join().map_err(|_| "the frontend could not connect")?;
    while control.run_once() || host.worker.iterate() {}
    Ok(VhostGuest { disk, missing: 0, _parts: (backend, control) })
}

impl Client for VhostGuest {
    fn send(&mut self, load: Load, offset: u64) -> Result<(), Error> {
        let kind = if load.write { kind::WRITE } else { kind::READ };
        for number in 0..load.depth {
            let at = offset + (number * load.bytes) as u64;
            self.disk.request(0, kind, at / 512, u32::try_from(load.bytes)?);
        }
        self.disk.publish(0);
        self.missing = load.depth;
        Ok(())
    }

    fn receive(&mut self) -> Result<bool, Error> {
        let (driver, memory) = (&mut self.disk.drivers[0], &self.disk.guest);
        loop {
            while let Some(done) = driver.take(memory) {
                if done.status != status::OK {
                    return Err(format!("a request failed: {done:?}").into());
                }
                self.missing -= 1;
            }
            if self.missing == 0 {
                return Ok(true);
            }
            driver.arm(memory);
            if !driver.has_used(memory) {
                return Ok(false);
            }
        }
    }
}
