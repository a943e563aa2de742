use std::os::unix::net::{UnixListener, UnixStream};

use ebb_io::Worker;
use ebb_volume::Volumes;

use super::*;

struct World {
    folder: tempfile::TempDir,
    worker: Worker,
    export: VhostExport,
}

impl World {
    fn new() -> World {
        let world = World {
            folder: tempfile::tempdir().unwrap(),
            worker: Worker::start_alone("worker").unwrap(),
            export: VhostExport::default(),
        };
        world.export.begin();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn sync(&self, wanted: &[(&str, &str)]) {
        let wanted = wanted.iter().map(|(path, volume)| (self.path(path), (*volume).to_owned()));
        let options = || VhostOptions::new(vec![self.worker.handle()], Volumes::default());
        let wanted = || WantedSockets { served: wanted.collect(), ..WantedSockets::default() };
        self.export.sync(wanted, options, 1);
    }

    fn accepts(&self, name: &str) -> bool {
        UnixStream::connect(self.path(name)).is_ok()
    }

    fn failed(&self) -> Vec<String> {
        self.export.failed().into_iter().map(|failed| failed.volume).collect()
    }
}

#[test]
fn the_open_sockets_are_those_of_the_volumes() {
    let world = World::new();
    world.sync(&[("d/a", "a"), ("d/b", "b")]);
    assert!(world.accepts("d/a") && world.accepts("d/b"), "their directory is made");
    world.sync(&[("d/b", "c"), ("e", "d")]);
    assert!(!world.path("d/a").exists());
    assert!(world.accepts("d/b") && world.accepts("e"));
    assert!(world.failed().is_empty());
    world.export.close_sockets();
    assert!(!world.path("e").exists() && !world.path("d/b").exists());
    world.sync(&[("e", "d")]);
    assert!(!world.path("e").exists(), "a socket is open after the end");
}

#[test]
fn nothing_is_open_before_the_beginning() {
    let world = World { export: VhostExport::default(), ..World::new() };
    world.sync(&[("a", "a")]);
    assert!(!world.path("a").exists() && !world.export.has_sockets());
    world.export.begin();
    world.sync(&[("a", "a")]);
    assert!(world.accepts("a"));
}

#[test]
fn a_socket_that_cannot_be_opened_is_reported_and_opened_later() {
    let world = World::new();
    std::fs::write(world.path("file"), "precious").unwrap();
    world.sync(&[("file", "a"), ("no/such/directory", "b"), ("good", "c")]);
    assert_eq!(world.failed(), ["a", "b"]);
    assert!(world.accepts("good"), "others are open");
    assert_eq!(std::fs::read(world.path("file")).unwrap(), b"precious");
    std::fs::remove_file(world.path("file")).unwrap();
    world.sync(&[("file", "a"), ("good", "c")]);
    assert!(world.failed().is_empty() && world.accepts("file"));
}

#[test]
fn the_socket_of_another_server_is_left_alone() {
    let world = World::new();
    let other = UnixListener::bind(world.path("s")).unwrap();
    // The wait for it ends with the export.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| world.sync(&[("s", "a")]));
        world.export.close_sockets();
        waiting.join().unwrap();
    });
    assert!(world.accepts("s"));
    drop(other);
}

#[test]
fn a_path_of_another_volume_is_reported_and_not_opened() {
    let world = World::new();
    let refused = || WantedSockets {
        served: BTreeMap::new(),
        refused: [("b".to_owned(), "it is the socket of volume a".to_owned())].into(),
    };
    let options = || VhostOptions::new(vec![world.worker.handle()], Volumes::default());
    world.export.sync(refused, options, 1);
    assert_eq!(world.failed(), ["b"]);
    assert!(world.export.has_sockets(), "it is looked at again");
    world.sync(&[("b", "b")]);
    assert!(world.failed().is_empty() && world.accepts("b"));
}

#[test]
fn another_server_is_asked_once_when_its_path_is_tried_again() {
    let world = World::new();
    let other = UnixListener::bind(world.path("s")).unwrap();
    other.set_nonblocking(true).unwrap();
    world.sync(&[("s", "a")]);
    assert_eq!(world.failed(), ["a"]);
    while other.accept().is_ok() {}
    world.sync(&[("s", "a"), ("t", "b")]);
    assert_eq!(world.failed(), ["a"]);
    assert!(world.accepts("t"));
    assert!(other.accept().is_ok() && other.accept().is_err(), "one connection");
}

#[test]
fn the_error_of_making_the_directory_is_reported() {
    let world = World::new();
    std::fs::write(world.path("file"), "").unwrap();
    world.sync(&[("file/d/s", "a"), ("none/d/s", "b")]);
    let reasons: Vec<_> = world.export.failed().into_iter().map(|failed| failed.reason).collect();
    assert!(reasons[0].contains("cannot make the directory"), "{reasons:?}");
    assert!(reasons[0].contains("Not a directory"), "{reasons:?}");
    assert!(reasons[1].contains("the directory above it does not exist"), "{reasons:?}");
}

#[test]
fn the_new_path_of_a_socket_that_was_moved_is_known() {
    let path = |text: &str| PathBuf::from(text);
    let old = [(path("/a"), "a"), (path("/b"), "b")];
    let wanted = [(path("/new"), "a".to_owned()), (path("/c"), "c".to_owned())].into();
    let moved = moved_sockets(old.iter().map(|(path, volume)| (path, *volume)), &wanted);
    assert_eq!(moved, [(path("/a"), path("/new"))].into());
}
