//! The vhost-user-blk backend keeps the guards of all exports.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::Instant;

use common::driver::kind;
use common::frontend::receive;
use common::{Frontend, Guest, HANG, Rig, Wishes, status};
use ebb_export::guards::ExportKind;
use ebb_export_vhost::VhostFigures;
use ebb_mem::Memory;
use ebb_vhost_proto::FrontendMessage as M;
use ebb_volume::{Volume, Volumes};
use export_guards::{Attached, End, Ending, ExportUnderTest, Peer, Reply, check_all, until};

struct VhostPeer {
    frontend: Frontend,
    figures: VhostFigures,
}

fn outcome(status: u8) -> Reply {
    if status == status::OK { Reply::Done } else { Reply::Failed }
}

impl Peer for VhostPeer {
    fn submit_write(&mut self, at: u64, data: &[u8]) {
        let disk = &mut self.frontend;
        let head = disk.drivers[0].next_head();
        disk.guest.write(disk.drivers[0].data(head), data);
        disk.request(0, kind::WRITE, at / 512, data.len() as u32);
        disk.publish(0);
    }

    fn wait(&mut self) -> Reply {
        outcome(self.frontend.wait(0).status)
    }

    fn read(&mut self, at: u64, len: usize) -> Option<Vec<u8>> {
        let mut data = vec![0; len];
        let done = self.frontend.transfer(0, kind::READ, at / 512, &mut data);
        (done.status == status::OK).then_some(data)
    }

    fn flush(&mut self) -> Reply {
        outcome(self.frontend.flush(0))
    }

    fn await_size(&mut self, size: u64) -> bool {
        until("the config space has the size", || self.frontend.capacity() == size);
        true
    }

    fn await_end(&mut self) {
        assert!(self.frontend.is_closed());
    }

    fn detach(self) {
        let before = self.figures.read().len();
        drop(self.frontend);
        until("the connection ends", || self.figures.read().len() < before);
    }
}

struct VhostExport(Rig);

impl VhostExport {
    /// Whether the backend closes new connections to a volume.
    fn is_rejected(&self, volume: &str) -> bool {
        let wishes = Wishes::default();
        let probe = Frontend::connect(&self.0.path(volume), Guest::new(1), wishes);
        let sent = probe.try_send(&M::GetFeatures, false, &[]);
        !sent || receive(&probe.socket).is_none()
    }

    /// The newest connection is served, or waits for another export.
    fn is_waiting(&self) -> bool {
        let newest = || self.0.disks().last().unwrap();
        let foreign = || newest().waits_for.is_some_and(|writer| &*writer == "another export");
        until("it is served or waits", || newest().queues > 0 && !newest().waiting || foreign());
        foreign()
    }
}

impl ExportUnderTest for VhostExport {
    const EXPORT: ExportKind = ExportKind::Vhost;
    const SURVIVES_KILL: bool = true;
    type Peer = VhostPeer;

    fn start(memory: &Arc<Memory>) -> VhostExport {
        let mut rig = Rig::empty(1);
        rig.stop();
        rig.memory = Some(memory.clone());
        rig.start(1);
        VhostExport(rig)
    }

    fn volumes(&self) -> &Volumes {
        &self.0.volumes
    }

    fn serve(&mut self, volume: Arc<Volume>) {
        self.0.add(volume);
    }

    fn attach(&mut self, _owner: u16, volume: &str) -> Attached<VhostPeer> {
        if self.is_rejected(volume) {
            return Attached::Rejected("the connection is closed".to_owned());
        }
        let mut frontend = self.0.frontend(volume, Wishes::default());
        frontend.start();
        let figures = self.0.backend.as_ref().unwrap().figures();
        let peer = VhostPeer { frontend, figures };
        if self.is_waiting() {
            return Attached::Waiting(peer);
        }
        Attached::Served(peer)
    }

    fn admitting(&self, _owner: u16) -> String {
        format!("uid:{}", rustix::process::getuid().as_raw())
    }

    fn end_disallowed(&self) {
        self.0.backend.as_ref().unwrap().end_disallowed();
    }

    fn announce_sizes(&self) {
        self.0.backend.as_ref().unwrap().announce_sizes();
    }

    fn note_backing(&self, volume: &Arc<Volume>) {
        self.0.backend.as_ref().unwrap().note_backing(volume);
    }

    fn begin_withdraw(&self, volume: &Arc<Volume>) -> Ending {
        let draining = self.0.backend.as_ref().unwrap().withdraw(volume);
        Ending::new(move || futures_lite::future::block_on(draining.drained()))
    }

    fn begin_stop(&mut self) -> Ending {
        let backend = self.0.backend.take().unwrap();
        let draining = backend.begin_stop();
        Ending::new(move || {
            futures_lite::future::block_on(draining.drained());
            assert!(backend.stop(Instant::now() + HANG).is_empty());
        })
    }

    fn end(&mut self, end: End) {
        let End::HandOver { lost } = end else { return self.0.kill() };
        let backend = self.0.backend.take().unwrap();
        let draining = backend.begin_stop();
        futures_lite::future::block_on(draining.drained());
        match lost {
            true => draining.of("disk").note_lost(),
            false => draining.of("disk").note_stable(),
        }
        assert!(backend.stop(Instant::now() + HANG).is_empty());
        self.0.workers.clear();
    }

    fn start_again(&mut self) {
        self.0.start(1);
    }

    fn resume(&mut self, peer: &mut VhostPeer) -> bool {
        let path = self.0.path("disk");
        if self.is_rejected("disk") || !peer.frontend.try_reconnect(&path) {
            return false;
        }
        peer.frontend.reconnect(&path);
        peer.figures = self.0.backend.as_ref().unwrap().figures();
        !self.is_waiting()
    }
}

#[test]
fn vhost_keeps_all_guards() {
    check_all::<VhostExport>();
}
