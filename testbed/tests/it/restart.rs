//! A restart by the service manager, which keeps the connections of clients meanwhile. A binary of its own: the descriptors
//! that the daemon inherits could reach the daemons of other tests.

mod service_manager;

use std::os::unix::fs::MetadataExt;

use service_manager::ServiceManager;
use testbed::harness::nbd::Client;
use testbed::harness::pattern::content;
use testbed::harness::server::Setup;
use testbed::{Error, Result, check};

/// `systemctl restart`, with `FileDescriptorStoreMax`.
#[test]
fn the_service_manager_keeps_the_connections_over_a_restart() -> Result {
    let setup = Setup::new()?;
    let path = setup.image_path("disk");
    let volume = format!("disk=file:{},size=16M,create=true,cache=writeback", path.display());
    let setup = setup.volume(&volume);
    let manager = ServiceManager::start(setup.dir())?;
    let setup = setup.env("NOTIFY_SOCKET", manager.path()).env("FDSTORE", "100");
    let mut server = setup.start()?;
    let mut clients = Vec::new();
    for number in 0..40_u64 {
        let mut client = Client::open(&server.socket(), "disk")?;
        client.write(number << 16, &content(number, number << 16, 4096), 0)?;
        clients.push(client);
    }
    for round in 0..3 {
        let inode = || std::fs::metadata(server.socket()).map(|found| found.ino());
        let before = inode().map_err(Error::io("look at the socket"))?;
        server.stop()?;
        // The state, the listening socket and the connections.
        let stored = manager.stored();
        check(stored == 42, || format!("{stored} descriptors in the store\n{}", server.log()))?;
        let (launcher, inherited) = manager.launcher()?;
        server.set_prefix(launcher);
        server.restart()?;
        drop(inherited);
        service_manager::is_empty(&manager)?;
        let inode = std::fs::metadata(server.socket()).map(|found| found.ino());
        check(inode.map_err(Error::io("look at the socket"))? == before, || {
            "the listening socket is another one".into()
        })?;
        for (number, client) in (0..).zip(&mut clients) {
            let offset = number << 16;
            let stamp = number + round * 100;
            let found = client.read(offset, 4096)?;
            check(found == content(stamp, offset, 4096), || format!("client {number}"))?;
            client.write(offset, &content(stamp + 100, offset, 4096), 0)?;
        }
    }
    // A daemon that is killed leaves nothing for the next one.
    server.kill9()?;
    let (launcher, inherited) = manager.launcher()?;
    server.set_prefix(launcher);
    server.restart()?;
    drop(inherited);
    check(clients[0].flush().is_err(), || "the connection of a killed daemon".into())?;
    server.stop()
}
