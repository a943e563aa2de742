//! The NBD server keeps the guards of all exports.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::sync::Arc;

use common::{Client, FLUSH, READ, Rig, Stream, Style};
use ebb_export::guards::ExportKind;
use ebb_export_nbd::{KeptConnection, Server, ServerLimits, TlsMode};
use ebb_io::Worker;
use ebb_mem::Memory;
use ebb_volume::{Volume, Volumes};
use export_guards::{Attached, End, Ending, ExportUnderTest, Peer, Reply, check_all};

const READ_COOKIE: u64 = 0x55;

/// A client, and replies that came before the one it waited for.
struct NbdPeer {
    client: Client,
    earlier: VecDeque<Reply>,
}

impl NbdPeer {
    fn outcome(reply: std::io::Result<common::Reply>) -> Reply {
        match reply {
            Ok(reply) if reply.error == 0 => Reply::Done,
            Ok(_) => Reply::Failed,
            Err(_) => Reply::Gone,
        }
    }

    /// The server may have closed the connection.
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.client.stream.write_all(bytes);
    }

    fn try_read(&mut self, at: u64, len: usize) -> std::io::Result<common::Reply> {
        let header = self.client.header(READ, 0, READ_COOKIE, at, len as u64);
        self.send(&header);
        loop {
            let of_read = |cookie| (cookie == READ_COOKIE).then_some((at, len));
            let reply = self.client.reply(of_read)?;
            if reply.cookie == READ_COOKIE {
                return Ok(reply);
            }
            self.earlier.push_back(NbdPeer::outcome(Ok(reply)));
        }
    }
}

impl Peer for NbdPeer {
    fn submit_write(&mut self, at: u64, data: &[u8]) {
        let mut bytes = self.client.header(common::WRITE, 0, 1, at, data.len() as u64);
        bytes.extend_from_slice(data);
        self.send(&bytes);
    }

    fn wait(&mut self) -> Reply {
        let earlier = self.earlier.pop_front();
        earlier.unwrap_or_else(|| NbdPeer::outcome(self.client.reply(|_| None)))
    }

    fn read(&mut self, at: u64, len: usize) -> Option<Vec<u8>> {
        let reply = self.try_read(at, len).ok()?;
        (reply.error == 0).then_some(reply.data)
    }

    fn flush(&mut self) -> Reply {
        let header = self.client.header(FLUSH, 0, 2, 0, 0);
        self.send(&header);
        self.wait()
    }

    fn await_size(&mut self, _size: u64) -> bool {
        false
    }

    fn await_end(&mut self) {
        use std::io::ErrorKind::{TimedOut, WouldBlock};

        match self.client.stream.read(&mut [0]) {
            Ok(0) => {}
            Err(error) => assert!(!matches!(error.kind(), TimedOut | WouldBlock), "it goes on"),
            Ok(_) => panic!("bytes that nothing asked for"),
        }
    }

    fn detach(self) {}
}

struct NbdExport {
    rig: Rig,
    volumes: Volumes,
    memory: Arc<Memory>,
    kept: Vec<KeptConnection>,
}

fn rig(volumes: &Volumes, memory: &Arc<Memory>) -> Rig {
    let server = Server::new(volumes.clone(), ServerLimits::default(), TlsMode::Off, None);
    Rig::over(Worker::start("nbd-test", memory).unwrap(), server)
}

impl ExportUnderTest for NbdExport {
    const EXPORT: ExportKind = ExportKind::Nbd;
    const SURVIVES_KILL: bool = false;
    type Peer = NbdPeer;

    fn start(memory: &Arc<Memory>) -> NbdExport {
        let volumes = Volumes::default();
        let rig = rig(&volumes, memory);
        NbdExport { rig, volumes, memory: memory.clone(), kept: Vec::new() }
    }

    fn volumes(&self) -> &Volumes {
        &self.volumes
    }

    fn serve(&mut self, volume: Arc<Volume>) {
        self.volumes.add(volume, Arc::default());
    }

    fn attach(&mut self, _owner: u16, volume: &str) -> Attached<NbdPeer> {
        let mut stream: Box<dyn Stream> = Box::new(self.rig.stream());
        Client::greet(&mut stream).unwrap();
        match Client::select(stream, volume, (Style::Simple, 0), &[0, 1, 0, 3]).unwrap() {
            Ok(client) => Attached::Served(NbdPeer { client, earlier: VecDeque::new() }),
            Err(replies) => Attached::Rejected(format!("{replies:?}")),
        }
    }

    fn admitting(&self, _owner: u16) -> String {
        format!("uid:{}", rustix::process::geteuid().as_raw())
    }

    fn end_disallowed(&self) {
        self.rig.server.end_disallowed();
    }

    fn announce_sizes(&self) {}

    fn note_backing(&self, _volume: &Arc<Volume>) {}

    fn begin_withdraw(&self, volume: &Arc<Volume>) -> Ending {
        let (server, handle) = (self.rig.server.clone(), self.rig.worker().handle());
        let name = volume.name().clone();
        let withdraw = move |io| async move { server.withdraw(&io, &name).await };
        let withdrawing = std::thread::spawn(move || handle.block_on(withdraw).unwrap());
        Ending::new(move || withdrawing.join().unwrap())
    }

    fn begin_stop(&mut self) -> Ending {
        let (server, handle) = (self.rig.server.clone(), self.rig.worker().handle());
        server.begin_stop();
        Ending::new(move || {
            handle.block_on(|_| async move { server.wait_until_empty().await }).unwrap();
        })
    }

    fn end(&mut self, end: End) {
        let server = self.rig.server.clone();
        if let End::HandOver { lost } = end {
            server.keep_connections();
            self.rig.stop();
            let kept = server.take_kept().into_iter().map(|kept| {
                let (socket, rest) = (kept.socket().clone(), kept.rest().into());
                KeptConnection::new(socket, kept.state(), rest).unwrap()
            });
            // The daemon keeps no client of a volume that it cannot close.
            self.kept = kept.filter(|_| !lost).collect();
        }
        self.rig.kill();
    }

    fn start_again(&mut self) {
        self.rig = rig(&self.volumes, &self.memory);
        let (kept, server) = (std::mem::take(&mut self.kept), &self.rig.server);
        let writers = server.claim_writers(&kept);
        server.adopt(kept, &writers, &[self.rig.worker().handle()]);
    }

    fn resume(&mut self, peer: &mut NbdPeer) -> bool {
        peer.try_read(0, 512).is_ok()
    }
}

#[test]
fn nbd_keeps_all_guards() {
    check_all::<NbdExport>();
}
