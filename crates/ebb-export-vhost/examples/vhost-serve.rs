//! Serves a null, memory or file volume to frontends of vhost-user at a socket, until standard input ends:
//! `vhost-serve SOCKET null|memory|FILE [BYTES]`.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a tool of tests and benches")]

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_export_vhost::{VhostBackend, VhostOptions, VolumeSocket};
use ebb_io::Worker;
use ebb_store::{FileStore, MemoryStore, NullStore, OpenOptions, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (socket, kind) = (&arguments[0], arguments[1].as_str());
    let bytes = arguments.get(2).map_or(1 << 30, |bytes| bytes.parse().unwrap());
    let store = match kind {
        "null" => Store::Null(NullStore::new(bytes)),
        "memory" => Store::Memory(MemoryStore::new(bytes)),
        path => Store::File(FileStore::open(Path::new(path), &OpenOptions::default()).unwrap().0),
    };
    let worker = Worker::start_alone("worker").unwrap();
    let volumes = Volumes::default();
    volumes.add(Volume::new("disk", store, VolumeOptions::default()), Arc::default());
    let backend = VhostBackend::start(VhostOptions::new(vec![worker.handle()], volumes)).unwrap();
    let _ = std::fs::remove_file(socket);
    let listening = UnixListener::bind(socket).unwrap();
    backend.listen(VolumeSocket::new(listening.into(), Path::new(socket), "disk").unwrap());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    let figures = backend.figures().read();
    println!("{figures:#?}");
    let left = backend.stop(Instant::now() + Duration::from_secs(5));
    assert!(left.is_empty(), "{left:?}");
}
