//! The clients that may open a volume: at a start, a reload and a change at run time.

use ebb_access::{ClientIdentity, SocketCredentials};
use ebb_api::Refusal;
use ebb_config::allow_list;
use ebb_control::Refused;
use ebb_export_xen::abi::op;
use ebb_export_xen::device_number;
use ebb_export_xen::shm::World as Machine;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};

use super::guests::{ERROR, attach_disk, serve_guests, transfer};
use super::manage::{Kept, new_config};
use super::*;

fn user(uid: u32) -> ClientIdentity {
    let socket = Some(SocketCredentials { pid: 1, uid, gid: 9, groups: Box::default() });
    ClientIdentity { socket, ..ClientIdentity::default() }
}

impl Kept {
    /// The users 1 and 2, as far as they may open a volume.
    pub(super) fn allowed(&self, name: &str) -> Vec<u32> {
        [1, 2].into_iter().filter(|uid| self.world.volumes.admits(name, &user(*uid))).collect()
    }

    pub(super) fn allow(&self, name: &str, entries: Option<&[&str]>) -> Result<(), Refused> {
        let texts =
            |entries: &[&str]| entries.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let list = entries.map(|entries| allow_list(&texts(entries)).unwrap());
        let (name, operation) = (name.to_owned(), self.begin("allow"));
        self.world.run(move |engine, io| async move {
            engine.allow(&io, (&name, list), &operation).await
        })
    }

    pub(super) fn rewrite(&self, main: &str) {
        let path = self.args.config.clone().unwrap();
        std::fs::write(path, format!("listen = ['unix:/never']\n{main}")).unwrap();
        self.world.engine.begin_reading();
        self.world.reload(self.load());
    }
}

#[test]
fn a_reload_changes_who_may_open_a_volume_and_leaves_it_open() {
    let main = |allow: &str| format!("[volume.a]\nstore = 'null:1M'\n{allow}\n");
    let kept = Kept::new(&main("allow = ['uid:1']"), true);
    assert_eq!(kept.allowed("a"), [1]);
    let volume = kept.world.volume("a").unwrap();
    for (allow, expected) in [
        ("allow = ['uid:2']", vec![2]),
        ("allow = []", vec![]),
        ("", vec![1, 2]),
        ("allow = ['uid:1']", vec![1]),
    ] {
        kept.rewrite(&main(allow));
        assert_eq!(kept.allowed("a"), expected, "{allow}");
    }
    assert!(Arc::ptr_eq(&volume, &kept.world.volume("a").unwrap()), "it was not replaced");
    // A volume that is replaced has its list meanwhile, and one that is removed leaves none.
    kept.rewrite(&main("allow = ['uid:2']").replace("1M", "2M"));
    assert_eq!(kept.allowed("a"), [2]);
    kept.rewrite("[volume.b]\nstore = 'null:1M'\n");
    assert_eq!(kept.allowed("a"), [1, 2]);
}

#[test]
fn a_change_at_run_time_is_kept_with_the_volume() {
    let kept = Kept::new("control = '/c'\n[volume.own]\nstore = 'null:1M'\n", true);
    kept.add("a", new_config("a", "null:1M", "none"), true).unwrap();
    kept.add("b", new_config("b", "null:1M", "none"), false).unwrap();
    for name in ["a", "b"] {
        kept.allow(name, Some(&["uid:1"])).unwrap();
        assert_eq!(kept.allowed(name), [1], "{name}");
        let (config, _) = kept.world.engine.definition(name).unwrap();
        assert_eq!(config.allow.unwrap().texts().collect::<Vec<_>>(), ["uid:1"]);
    }
    let next = kept.load();
    assert!(next.volumes["a"].allow.is_some(), "the next start has it");
    kept.world.engine.begin_reading();
    kept.world.reload(next);
    assert_eq!((kept.allowed("a"), kept.allowed("b")), (vec![1], vec![1]), "a reload keeps it");
    kept.allow("a", None).unwrap();
    assert_eq!(kept.allowed("a"), [1, 2]);
    let refused = kept.allow("own", Some(&[])).unwrap_err();
    assert_eq!(refused.body.error, "configured");
    assert_eq!(kept.allow("none", None).unwrap_err().refusal, Refusal::Unknown);
}

/// A snapshot follows its volume; when that is gone, it has its list, also after the next start.
#[test]
fn the_snapshots_of_a_volume_that_is_gone_keep_its_list() {
    let kept = Kept::new("control = '/c'\n", true);
    let limited = |name: &str| VolumeConfig {
        allow: Some(allow_list(&["uid:1".to_owned()]).unwrap()),
        ..new_config(name, "null:1M", "none")
    };
    for volume in ["removed", "renamed"] {
        kept.add(volume, limited(volume), true).unwrap();
        for (snapshot, persist) in [("kept", true), ("run-time", false)] {
            let name = format!("{volume}@{snapshot}");
            kept.add(&name, new_config(&name, "null:1M", "none"), persist).unwrap();
            assert_eq!(kept.allowed(&name), [1], "{name}");
        }
    }
    kept.remove("removed").unwrap();
    kept.rename("renamed", "other").unwrap();
    let next = kept.load();
    kept.world.engine.begin_reading();
    kept.world.reload(next.clone());
    for volume in ["removed", "renamed"] {
        let name = format!("{volume}@kept");
        assert!(next.volumes[&name].allow.is_some(), "{name}");
        assert_eq!(kept.allowed(&name), [1], "{name}");
        assert_eq!(kept.allowed(&format!("{volume}@run-time")), [1], "{volume}");
        assert_eq!(kept.allowed(volume), [1, 2], "{volume}");
    }
    assert_eq!(kept.allowed("other"), [1]);
}

const LIMITED: &str = "control = '/c'\n[volume.a]\nstore = 'null:1M'\nallow = ['uid:1']\n\
    [volume.b]\nstore = 'null:2M'\nallow = ['uid:2']\n";

impl Kept {
    /// With a snapshot of `a` that is kept, and one that is not.
    fn limited() -> Kept {
        let kept = Kept::new(LIMITED, true);
        for (name, persist) in [("a@kept", true), ("a@run-time", false)] {
            kept.add(name, new_config(name, "null:1M", "none"), persist).unwrap();
        }
        kept
    }

    #[track_caller]
    fn snapshots_are_of(&self, users: &[u32]) {
        for name in ["a@kept", "a@run-time"] {
            assert_eq!(self.allowed(name), users, "{name}");
        }
    }
}

/// The name of a volume gets another meaning: its snapshots are of the former one.
#[test]
fn snapshots_keep_their_list_when_another_takes_the_name() {
    let renamed = LIMITED.replace("volume.a", "volume.c");
    let anew = format!("{renamed}[volume.a]\nstore = 'null:3M'\n");
    let exchanged = LIMITED.replace("volume.a", "volume.x").replace("volume.b", "volume.a");
    let exchanged = exchanged.replace("volume.x", "volume.b");
    let opened = LIMITED.replace("1M'\nallow = ['uid:1']", "4M'");
    for new in [&anew, &exchanged, &opened] {
        let kept = Kept::limited();
        kept.rewrite(new);
        assert!(kept.world.engine.unchanged().is_empty(), "{:?}", kept.world.engine.unchanged());
        kept.snapshots_are_of(&[1]);
        kept.rewrite(new);
        kept.snapshots_are_of(&[1]);
        let kept = kept.again(new);
        assert_eq!(kept.allowed("a@kept"), [1], "after a restart: {new}");
    }
    // A volume on the same store is the same.
    let kept = Kept::limited();
    let (list, of) = kept.world.engine.allowed("a@kept");
    assert_eq!(list.unwrap().texts().collect::<Vec<_>>(), ["uid:1"]);
    assert_eq!((of.as_deref(), kept.world.engine.allowed("a").1), (Some("a"), None));
    kept.rewrite(&LIMITED.replace("uid:1", "uid:2"));
    kept.snapshots_are_of(&[2]);
}

#[test]
fn a_volume_stays_whose_snapshots_would_lose_their_list() {
    let without = LIMITED.replace("[volume.a]\nstore = 'null:1M'\nallow = ['uid:1']\n", "");
    let other = LIMITED.replace("1M'\nallow = ['uid:1']", "3M'");
    for new in [&without, &other] {
        let kept = Kept::limited();
        let served = kept.world.volume("a").unwrap();
        let faults = kept.faults();
        faults.fail(ebb_config::StateStep::Write, std::io::ErrorKind::StorageFull);
        kept.rewrite(new);
        let told = kept.world.engine.unchanged().join("\n");
        assert!(told.contains("volume a: not changed: ") && told.contains("a@kept"), "{told}");
        assert!(Arc::ptr_eq(&served, &kept.world.volume("a").unwrap()));
        assert_eq!(kept.allowed("a"), [1]);
        kept.snapshots_are_of(&[1]);
        faults.end();
        kept.rewrite(new);
        assert!(kept.world.engine.unchanged().is_empty(), "{:?}", kept.world.engine.unchanged());
        assert_eq!(kept.allowed("a"), [1, 2]);
        kept.snapshots_are_of(&[1]);
        let kept = kept.again(new);
        assert_eq!(kept.allowed("a@kept"), [1], "after a restart");
    }
}

/// A snapshot that gets a name of its own is not open to others by that.
#[test]
fn a_snapshot_that_is_renamed_away_from_its_volume_keeps_its_list() {
    let kept = Kept::new("control = '/c'\n", true);
    let limited = VolumeConfig {
        allow: Some(allow_list(&["uid:1".to_owned()]).unwrap()),
        ..new_config("a", "null:1M", "none")
    };
    kept.add("a", limited, true).unwrap();
    for (from, to, persist) in [("a@one", "one", true), ("a@two", "two", false)] {
        kept.add(from, new_config(from, "null:1M", "none"), persist).unwrap();
        kept.rename(from, to).unwrap();
        assert_eq!(kept.allowed(to), [1], "{to}");
    }
    let next = kept.load();
    assert!(next.volumes["one"].allow.is_some());
    kept.world.engine.begin_reading();
    kept.world.reload(next);
    assert_eq!((kept.allowed("one"), kept.allowed("two")), (vec![1], vec![1]));
}

/// The list of a volume is in its state file: without it no client is admitted, also to snapshots that follow it.
#[test]
fn a_volume_whose_list_is_not_known_admits_no_client() {
    let kept = Kept::new("control = '/c'\n", true);
    kept.add("a", new_config("a", "null:1M", "none"), true).unwrap();
    kept.add("a@s", new_config("a@s", "null:1M", "none"), true).unwrap();
    let file = kept.file_path("state").join("volumes/a.toml");
    let whole = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, "store = 'null:1M'\nallow = ['uid:no-such-user']\n").unwrap();
    let kept = kept.again("control = '/c'\n");
    assert_eq!((kept.allowed("a"), kept.allowed("a@s")), (vec![], vec![]));
    std::fs::write(&file, whole).unwrap();
    kept.world.engine.begin_reading();
    kept.world.reload(kept.load());
    assert_eq!((kept.allowed("a"), kept.allowed("a@s")), (vec![1, 2], vec![1, 2]));
}

/// A reload that changes the store and the list of a volume does not give the data of the old store to new clients.
#[test]
fn a_volume_that_could_not_be_replaced_is_for_clients_of_both_lists() {
    let volume = |file: &str, allow: &str| {
        config(&format!("[volume.disk]\nstore='file:{file}'\nallow=[{allow}]\n"))
    };
    let world = World::new(&volume("/one", "'uid:1'"), SOON);
    let _store = world.store("one");
    world.start(volume("/one", "'uid:1'"), None);
    let allowed = |world: &World| {
        [1, 2, 3]
            .into_iter()
            .filter(|uid| world.volumes.admits("disk", &user(*uid)))
            .collect::<Vec<_>>()
    };
    assert_eq!(allowed(&world), [1]);
    world.reload(volume("/none", "'uid:1', 'uid:2'"));
    assert_eq!(world.engine.unchanged().len(), 1, "{:?}", world.engine.unchanged());
    assert_eq!(allowed(&world), [1]);
    world.reload(volume("/none", "'uid:2'"));
    assert_eq!(allowed(&world), [] as [u32; 0]);
    world.reload(volume("/one", "'uid:2'"));
    assert_eq!(allowed(&world), [2]);
    let _other = world.store("two");
    world.reload(volume("/two", "'uid:3'"));
    assert_eq!(allowed(&world), [3]);
    assert!(world.stop().is_clean());
}

#[test]
fn a_reload_that_removes_a_guest_from_a_list_ends_its_disk() {
    let on = |allow: &str| {
        config(&format!("[volume.disk]\nstore='file:/one'\nallow=['xen:2', '{allow}']\n"))
    };
    let world = World::new(&on("xen:1"), SOON);
    let _store = world.store("one");
    world.start(on("xen:1"), None);
    let machine = Machine::default();
    serve_guests(&world, &machine, None);
    let guest = machine.guest(1, 64).unwrap();
    attach_disk(&machine);
    let device = device_number("xvdb").unwrap();
    let mut disk = Frontend::new(&machine, &guest, device, FrontendConfig::default());
    disk.connect().unwrap();
    transfer(&mut disk, op::WRITE, 1);
    world.reload(on("xen:1"));
    assert_eq!(transfer(&mut disk, op::READ, 0), [1; 4096], "it was not disconnected");

    world.reload(on("xen:another"));
    disk.await_backend("5").unwrap();
    let told = machine.tree.get(ERROR).unwrap();
    assert!(told.contains("guest 1 may not open volume `disk`"), "{told}");
    assert!(world.stop().is_clean());
    world.engine.end_guests();
}
