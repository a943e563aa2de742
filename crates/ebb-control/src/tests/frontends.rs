//! Frontends of vhost-user, as statistics and as clients.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use ebb_api::ClientView;
use ebb_api::stat::VhostStat;
use ebb_export_vhost::{VhostBackend, VhostOptions, VolumeSocket};
use ebb_store::{NullStore, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};

use super::{HANG, PageAccess, Running, start_full};

fn frontends(daemon: &Running) -> Vec<VhostStat> {
    serde_json::from_value(daemon.json("GET", "/v1/stat", "")["vhost"].clone()).unwrap()
}

fn wait_for(daemon: &Running, count: usize) -> Vec<VhostStat> {
    let begun = std::time::Instant::now();
    loop {
        let shown = frontends(daemon);
        if shown.len() == count {
            return shown;
        }
        assert!(begun.elapsed() < HANG, "{shown:?}");
        std::thread::yield_now();
    }
}

#[test]
fn frontends_of_vhost_user_are_clients_and_can_be_disconnected() {
    let folder = tempfile::tempdir().unwrap();
    let worker = ebb_io::Worker::start_alone("vhost").unwrap();
    let volumes = Volumes::default();
    let store = Store::Null(NullStore::new(1 << 20));
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    volumes.add(Volume::new("root", store, options), Arc::default());
    let options = VhostOptions::new(vec![worker.handle()], volumes);
    let backend = Arc::new(VhostBackend::start(options).unwrap());
    let path = folder.path().join("root.sock");
    let listener = UnixListener::bind(&path).unwrap();
    backend.listen(VolumeSocket::new(listener.into(), &path, "root").unwrap());
    let daemon = start_full((None, Some(backend)), Vec::new(), PageAccess::default());
    assert_eq!(frontends(&daemon), []);

    let mut frontend = UnixStream::connect(&path).unwrap();
    let [disk] = &wait_for(&daemon, 1)[..] else { panic!("one frontend") };
    let (socket, uid) = (path.display().to_string(), rustix::process::geteuid().as_raw());
    assert_eq!(
        (&*disk.volume, &*disk.socket, disk.state.as_str()),
        ("root", &*socket, "connected")
    );
    assert_eq!((disk.pid, disk.uid), (Some(std::process::id()), Some(uid)));
    assert_eq!((disk.queues, disk.requests["read"], disk.in_flight), (0, 0, 0));

    let id = format!("vhost-{}", disk.connection);
    let clients: Vec<ClientView> =
        serde_json::from_value(daemon.json("GET", "/v1/clients", "")).unwrap();
    let [client] = &clients[..] else { panic!("{clients:?}") };
    assert_eq!((&*client.id, &*client.export, &*client.volume), (&*id, "vhost-user", "root"));
    assert_eq!(
        (&*client.address, client.identity.as_deref()),
        (&*socket, Some(&*format!("uid:{uid}")))
    );
    assert_eq!((client.pid, client.read_only), (Some(std::process::id()), true));

    for unknown in ["vhost-0", "vhost-", "vhost-x"] {
        let path = format!("/v1/clients/{unknown}");
        let (_, answer) = daemon.ask("DELETE", &path, "");
        assert!(answer.contains("unknown_client"), "{answer}");
    }
    assert_eq!(daemon.json("GET", &format!("/v1/clients/{id}"), "")["id"], *id);
    daemon.json("DELETE", &format!("/v1/clients/{id}"), "");
    assert_eq!(frontend.read(&mut [0]).unwrap(), 0, "its connection ends");
    wait_for(&daemon, 0);
    // It may connect again, with another number.
    let _again = UnixStream::connect(&path).unwrap();
    assert_ne!(wait_for(&daemon, 1)[0].connection, disk.connection);
}
