//! Volumes on NBD servers that are gone.

use std::os::unix::net::UnixListener;

use super::*;

/// A volume without anything that could be lost is given up when the time to withdraw it is over, and that ends: it
/// can be served anew when its server is back.
#[test]
fn a_volume_that_was_given_up_is_served_anew_when_its_server_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let store = Arc::new(TestStore::new(SIZE, 1));
    let serve = || {
        let remote = World::new(&volumes(&["disk"], "none"), SOON);
        remote.stores.set("disk", Fate::Opens(store.clone()));
        remote.start(volumes(&["disk"], "none"), None);
        let _ = std::fs::remove_file(&path);
        let socket = ebb_io::fd_from(UnixListener::bind(&path).unwrap());
        let (server, handles) = (remote.engine.server.clone(), vec![remote.worker.handle()]);
        remote.worker.handle().spawn(move |io| async move {
            let _ = server.listen(io, socket, handles).await;
        });
        remote
    };
    let remote = serve();
    let world = World::new(&volumes(&["disk"], "writeback"), Duration::from_secs(2));
    let mut options = NbdOptions::new(NbdAddress::Unix(path.clone()), "disk");
    options.reconnect = Duration::from_millis(100);
    world.stores.set("disk", Fate::Remote(options));
    world.start(volumes(&["disk"], "writeback"), None);
    assert!(world.volume("disk").is_some());
    drop(remote);
    // It cannot be flushed, and there is nothing to flush.
    world.store("other");
    world.reload(volumes(&["other"], "none"));
    world.wait_for("it is gone", |world| world.phases().iter().all(|(name, _)| name != "disk"));
    let remote = serve();
    world.reload(volumes(&["disk"], "writeback"));
    world.write("disk", 7).unwrap();
    assert!(world.stop().is_clean());
    assert_eq!(store.stable_bytes()[0], 7);
    drop(remote);
}
