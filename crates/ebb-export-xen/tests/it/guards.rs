//! The Xen block backend keeps the guards of all exports.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{HANG, Rig};
use ebb_export::guards::ExportKind;
use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig, offset};
use ebb_export_xen::{detach, device_number};
use ebb_mem::Memory;
use ebb_volume::{Volume, Volumes};
use export_guards::{Attached, End, Ending, ExportUnderTest, Peer, Reply, check_all, until};

/// The time after which a kill no longer waits for idle rings.
const KILL_WAIT: Duration = Duration::from_millis(300);

struct XenPeer {
    frontend: Frontend,
    device: u32,
}

fn outcome(status: i16) -> Reply {
    if status == 0 { Reply::Done } else { Reply::Failed }
}

impl Peer for XenPeer {
    fn submit_write(&mut self, at: u64, data: &[u8]) {
        let disk = &mut self.frontend;
        let page = disk.pages(1)[0];
        assert!(disk.guest().memory().write(offset(page), data));
        let segment = Segment { gref: page, first: 0, last: 7 };
        let (_, request) = disk.request(op::WRITE, at / 512, &[segment]);
        disk.queues[0].put(request);
        disk.queues[0].push();
    }

    fn wait(&mut self) -> Reply {
        outcome(self.frontend.queues[0].wait().unwrap().status)
    }

    fn read(&mut self, at: u64, len: usize) -> Option<Vec<u8>> {
        let mut data = vec![0; len];
        let status = self.frontend.transfer(0, op::READ, at / 512, &mut data).unwrap();
        (status == 0).then_some(data)
    }

    fn flush(&mut self) -> Reply {
        outcome(self.frontend.flush(op::FLUSH_DISKCACHE).unwrap())
    }

    fn await_size(&mut self, size: u64) -> bool {
        until("the backend shows the size", || self.frontend.size() == size);
        true
    }

    fn await_end(&mut self) {
        self.frontend.await_backend("5").unwrap();
    }

    fn detach(mut self) {
        self.frontend.close().unwrap();
    }
}

struct XenExport(Rig);

impl XenExport {
    fn error(&self, guest: u16, device: u32) -> Option<String> {
        let path = format!("/local/domain/0/error/backend/ebbd/{guest}/{device}/error");
        self.0.world.tree.get(&path)
    }

    /// Removes a disk that was attached before.
    fn remove_former(&self, guest: u16, name: &str) {
        let tree = &self.0.world.tree;
        let front = format!("/local/domain/{guest}/device/vbd/{}", device_number(name).unwrap());
        if tree.get(&front).is_some() {
            tree.set(&format!("{front}/state"), "6");
            detach(&mut *self.0.world.xenstore().unwrap(), guest, name, true).unwrap();
        }
    }
}

impl ExportUnderTest for XenExport {
    const EXPORT: ExportKind = ExportKind::Xen;
    const SURVIVES_KILL: bool = true;
    type Peer = XenPeer;

    fn start(memory: &Arc<Memory>) -> XenExport {
        let mut rig = Rig::new();
        rig.stop();
        drop(rig.volumes.remove("disk"));
        rig.memory = Some(memory.clone());
        rig.start(1, |_| {});
        XenExport(rig)
    }

    fn volumes(&self) -> &Volumes {
        &self.0.volumes
    }

    fn serve(&mut self, volume: Arc<Volume>) {
        self.0.add(volume);
    }

    fn attach(&mut self, owner: u16, volume: &str) -> Attached<XenPeer> {
        let name = if volume == "disk" { "xvdb" } else { "xvdc" };
        self.remove_former(owner, name);
        self.0.world.tree.remove_all("/local/domain/0/error");
        let found = self.0.world.find_guest(owner);
        let guest = found.unwrap_or_else(|| self.0.guest(owner, 1024));
        let mut frontend = self.0.attach(&guest, name, volume, FrontendConfig::default());
        frontend.set("state", "1");
        let state = |frontend: &Frontend| frontend.backend("state");
        until("the disk is offered or fails", || {
            matches!(state(&frontend).as_deref(), Some("2" | "6"))
        });
        if state(&frontend).as_deref() == Some("6") {
            let why = self.error(owner, device_number(name).unwrap());
            // As a toolstack does: the backend would offer the disk again with the next volume.
            self.remove_former(owner, name);
            return Attached::Rejected(why.unwrap_or_default());
        }
        frontend.connect().unwrap();
        Attached::Served(XenPeer { frontend, device: device_number(name).unwrap() })
    }

    fn admitting(&self, owner: u16) -> String {
        format!("xen:{owner}")
    }

    fn end_disallowed(&self) {
        self.0.backend.as_ref().unwrap().end_disallowed();
    }

    fn announce_sizes(&self) {}

    fn note_backing(&self, volume: &Arc<Volume>) {
        self.0.backend.as_ref().unwrap().note_backing(volume);
    }

    fn begin_withdraw(&self, volume: &Arc<Volume>) -> Ending {
        let ending = self.0.backend.as_ref().unwrap().withdraw(volume);
        Ending::new(move || assert!(ending.wait_until(Instant::now() + HANG)))
    }

    fn begin_stop(&mut self) -> Ending {
        let backend = self.0.backend.take().unwrap();
        let ending = backend.begin_stop();
        Ending::new(move || {
            assert!(ending.wait_until(Instant::now() + HANG));
            assert!(backend.stop(Instant::now() + HANG).is_empty());
        })
    }

    fn end(&mut self, end: End) {
        let backend = self.0.backend.take().unwrap();
        match end {
            End::Kill => drop(backend.stop(Instant::now() + KILL_WAIT)),
            End::HandOver { lost } => {
                let ending = backend.begin_stop();
                assert!(ending.wait_until(Instant::now() + HANG));
                match lost {
                    true => ending.of("disk").note_lost(),
                    false => ending.of("disk").note_stable(),
                }
                assert!(backend.stop(Instant::now() + HANG).is_empty());
            }
        }
        self.0.workers.clear();
    }

    fn start_again(&mut self) {
        self.0.world.tree.remove_all("/local/domain/0/error");
        self.0.start(1, |_| {});
    }

    fn resume(&mut self, peer: &mut XenPeer) -> bool {
        let guest = peer.frontend.guest().number();
        let failed = || self.error(guest, peer.device).is_some();
        let served = || {
            let stats = self.0.backend.as_ref().unwrap().stats();
            stats.iter().any(|device| device.guest == guest && !device.closing)
        };
        until("the disk is served again or fails", || failed() || served());
        !failed()
    }
}

#[test]
fn xen_keeps_all_guards() {
    check_all::<XenExport>();
}
