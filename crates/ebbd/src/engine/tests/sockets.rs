//! Sockets of vhost-user-blk follow the volumes.

use std::os::unix::net::UnixStream;

use super::manage::{Kept, new_config};
use super::*;

fn accepts(kept: &Kept, name: &str) -> bool {
    UnixStream::connect(kept.folder.path().join("v").join(name)).is_ok()
}

fn kept() -> Kept {
    let kept = Kept::new(
        "vhost_user = 'DIR/v'\n[volume.a]\nstore = 'file:DIR/a'\nsize = '1M'\ncreate = true\n",
        true,
    );
    kept.world.engine.begin_sockets();
    kept
}

#[test]
fn a_socket_is_there_as_long_as_its_volume_is_defined() {
    let kept = kept();
    assert!(accepts(&kept, "a.sock"));
    std::fs::write(kept.folder.path().join("b"), vec![0; 4096]).unwrap();
    let config = new_config("b", &kept.path("b"), "none");
    kept.add("b", config, true).unwrap();
    // A connection would be in the way of renaming it until its end is noticed.
    assert!(kept.folder.path().join("v/b.sock").exists());
    kept.rename("b", "c").unwrap();
    assert!(accepts(&kept, "c.sock") && !accepts(&kept, "b.sock"));
    kept.remove("c").unwrap();
    assert!(!accepts(&kept, "c.sock") && accepts(&kept, "a.sock"));
    kept.world.engine.close_sockets();
    assert!(!accepts(&kept, "a.sock"));
}

#[test]
fn a_reload_moves_a_socket_and_leaves_its_volume_served() {
    let kept = kept();
    let volume = || kept.world.volumes.get("a").unwrap().volume;
    let before = volume();
    let mut new = kept.load();
    let own = kept.folder.path().join("own");
    new.volumes.get_mut("a").unwrap().vhost_user = Some(ebb_config::VhostSocket::Path(own.clone()));
    kept.world.reload(new);
    assert!(UnixStream::connect(&own).is_ok() && !accepts(&kept, "a.sock"));
    assert!(Arc::ptr_eq(&before, &volume()), "the volume was opened again");
}

#[test]
fn removed_socket_file_is_noticed_and_opened_again() {
    let kept = kept();
    let has_lost = || kept.world.engine.guests.vhost.has_lost();
    assert!(!has_lost());
    std::fs::remove_file(kept.folder.path().join("v/a.sock")).unwrap();
    assert!(has_lost());
    kept.world.reload(kept.load());
    assert!(accepts(&kept, "a.sock") && !has_lost());
    // The folder can no longer be used.
    std::fs::remove_dir_all(kept.folder.path().join("v")).unwrap();
    std::fs::write(kept.folder.path().join("v"), "").unwrap();
    kept.world.reload(kept.load());
    assert_eq!(kept.world.engine.without_socket().len(), 1);
}

#[test]
fn a_volume_whose_socket_is_taken_is_not_added() {
    let kept = kept();
    let socket = kept.folder.path().join("v/a.sock");
    let mut config = new_config("b", "null:1M", "none");
    config.vhost_user = Some(ebb_config::VhostSocket::Path(socket));
    let refused = kept.add("b", config, false).unwrap_err();
    assert!(refused.body.message.contains("the socket of volume a"), "{refused:?}");
    assert!(kept.world.engine.definition("b").is_none());
}

#[test]
fn folder_of_a_socket_of_an_added_volume_is_not_made() {
    let kept = kept();
    let folder = kept.folder.path().join("none");
    let mut config = new_config("b", "null:1M", "none");
    config.vhost_user = Some(ebb_config::VhostSocket::Path(folder.join("b.sock")));
    let refused = kept.add("b", config, false).unwrap_err();
    let missing = format!("the folder {} does not exist", folder.display());
    assert!(refused.body.message.contains(&missing), "{refused:?}");
    assert!(!folder.exists());
}

#[test]
fn a_socket_that_cannot_be_opened_is_a_problem_of_its_volume_alone() {
    let kept = kept();
    let mut new = kept.load();
    let nowhere = kept.folder.path().join("no/such/directory");
    new.volumes.get_mut("a").unwrap().vhost_user = Some(ebb_config::VhostSocket::Path(nowhere));
    kept.world.reload(new);
    let problems = kept.world.engine.problems();
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!(problems[0].volume.as_deref(), Some("a"));
    assert!(kept.world.volumes.get("a").is_some());
    // A reload says so.
    let not_served = kept.world.engine.without_socket();
    assert!(not_served[0].starts_with("volume a: not served over vhost-user: "), "{not_served:?}");
    kept.world.reload(kept.load());
    assert!(kept.world.engine.without_socket().is_empty());
    assert!(kept.world.engine.problems().is_empty() && accepts(&kept, "a.sock"));
}
