//! Serves volumes in memory to Xen guests: `xen-serve NAME=BYTES...`. The export without the daemon, for
//! bringing up a host.

#![allow(clippy::print_stderr, reason = "a tool for people")]

use std::sync::Arc;

use ebb_export_xen::platform::XenHost;
use ebb_export_xen::{Backend, BackendOptions};
use ebb_io::Worker;
use ebb_store::{MemoryStore, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let volumes = Volumes::default();
    for argument in std::env::args().skip(1) {
        let (name, bytes) = argument.split_once('=').ok_or("NAME=BYTES")?;
        let store = Store::Memory(MemoryStore::new(bytes.parse()?));
        volumes.add(Volume::new(name, store, VolumeOptions::default()), Arc::default());
    }
    let worker = Worker::start_alone("xen")?;
    let mut options = BackendOptions::new(Arc::new(XenHost), vec![worker.handle()], volumes);
    options.journals = Some("/run/ebbd/xen".into());
    let backend = Backend::start(options)?;
    loop {
        std::thread::park_timeout(std::time::Duration::from_secs(10));
        for device in backend.stats() {
            eprintln!("{device:?}");
        }
    }
}
