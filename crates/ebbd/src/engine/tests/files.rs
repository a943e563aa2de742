//! Volumes that want the same file: one has it, and it goes from one to the other without a failure.

use super::*;

fn on(files: &[(&str, &str)]) -> Config {
    let volume = |(name, file): &(&str, &str)| format!("[volume.{name}]\nstore='file:/{file}'\n");
    config(&files.iter().map(volume).collect::<String>())
}

fn failures(world: &World) -> Vec<(String, String)> {
    let states = world.engine.states().into_iter();
    states.filter_map(|state| Some((state.name, state.failure?.reason))).collect()
}

#[test]
fn two_volumes_exchange_their_files() {
    let old = on(&[("a", "one"), ("b", "two")]);
    let world = World::new(&old, SOON);
    let (one, two) = (world.store("one"), world.store("two"));
    world.start(old, None);
    world.write("a", 1).unwrap();
    world.write("b", 2).unwrap();
    world.reload(on(&[("a", "two"), ("b", "one")]));
    assert_eq!(
        world.phases(),
        [phase("a", VolumePhase::Serving), phase("b", VolumePhase::Serving)]
    );
    assert_eq!((one.stable_bytes()[0], two.stable_bytes()[0]), (1, 2), "flushed on the way");
    world.write("a", 3).unwrap();
    world.write("b", 4).unwrap();
    assert!(world.stop().is_clean());
    assert_eq!((one.stable_bytes()[0], two.stable_bytes()[0]), (4, 3));
}

#[test]
fn a_volume_waits_for_the_file_of_a_volume_that_is_removed() {
    let old = on(&[("old", "file"), ("other", "two")]);
    let world = World::new(&old, Duration::from_millis(200));
    let file = world.store("file");
    world.store("two");
    world.start(old, None);
    world.write("old", 5).unwrap();
    file.hang();
    let new = on(&[("new", "file"), ("other", "two")]);
    world.worker.handle().spawn({
        let engine = world.engine.clone();
        |io| async move { drop(engine.reload(&io, new).await) }
    });
    // Past the limit it is refused, and told why.
    world.wait_for("new is refused", |world| !failures(world).is_empty());
    let [(name, reason)] = &failures(&world)[..] else { panic!("one") };
    assert!(
        name == "new" && reason.contains("volume old was removed from the same file"),
        "{reason}"
    );
    file.release();
    world.wait_for("new is served", |world| {
        world.phases() == [phase("new", VolumePhase::Serving), phase("other", VolumePhase::Serving)]
    });
    assert_eq!(file.stable_bytes()[0], 5, "flushed before");
    assert!(world.stop().is_clean());
}

/// Its store may still write, which would replace what a successor writes: a volume of another name, or of the same one.
#[test]
fn a_volume_that_could_not_be_closed_keeps_its_file_until_its_store_is_dropped() {
    let [old, new] = ["old", "new"].map(|name| on(&[(name, "file"), ("other", "two")]));
    let world = World::new(&old, Duration::from_millis(200));
    let file = world.store("file");
    world.store("two");
    world.start(old.clone(), None);
    world.write("old", 5).unwrap();
    file.flush_faults.store(1000, Ordering::SeqCst);
    // As writeback holds it, while the store does not respond.
    let in_use = world.volume("old").unwrap();
    for (name, config) in [("new", new), ("old", old)] {
        world.worker.handle().spawn({
            let engine = world.engine.clone();
            |io| async move { drop(engine.reload(&io, config).await) }
        });
        world.wait_for("it is refused", |world| failures(world).iter().any(|(n, _)| n == name));
        let [(_, reason)] = &failures(&world)[..] else { panic!("one") };
        assert!(reason.contains("volume old was removed from the same file"), "{reason}");
        assert!(world.volume(name).is_none());
    }
    file.flush_faults.store(0, Ordering::SeqCst);
    drop(in_use);
    world.wait_for("it is served", |world| world.volume("old").is_some());
    world.write("old", 6).unwrap();
}

/// What the old volume has not written yet would overwrite what the new one has flushed.
#[test]
fn an_export_of_a_server_is_claimed_as_a_file_is() {
    let volume = |text: &str| {
        let text = format!("[volume.v]\nstore = \"nbd://host/{text}\"\n");
        config(&text).volumes["v"].clone()
    };
    let claims = Arc::new(StoreClaims::default());
    let old = claims.claim("old", &volume("a")).unwrap();
    assert!(old.is_some() && claims.claim("other", &volume("b")).is_ok());
    assert!(claims.claim("old", &volume("a")).is_ok(), "another attempt of the same volume");
    let error = claims.claim("new", &volume("a?reconnect=5")).unwrap_err();
    let text = error.full_text();
    assert!(text.contains("volume old is on the same export: give each"), "{text}");
    let StoreError::SameFile { gone, .. } = error else { panic!("{text}") };
    let mut released = std::pin::pin!(gone.wait());
    assert!(
        futures_lite::future::block_on(futures_lite::future::poll_once(released.as_mut()))
            .is_none()
    );
    drop(old);
    assert!(futures_lite::future::block_on(futures_lite::future::poll_once(released)).is_some());
    let new = claims.claim("new", &volume("a")).unwrap();
    let read_only = |text: &str| VolumeConfig { read_only: true, ..volume(text) };
    assert!(claims.claim("reader", &read_only("a")).is_err(), "one of them writes");
    drop(new);
    let readers = ["one", "two"].map(|name| claims.claim(name, &read_only("a")));
    assert!(readers.iter().all(Result::is_ok));
}

#[test]
fn all_volumes_are_renamed_in_one_reload_without_a_failure() {
    let name = |prefix: &str, number: usize| format!("{prefix}{number}");
    let all = |prefix: &str| {
        let volume = |n| format!("[volume.{}]\nstore='file:/{n}'\n", name(prefix, n));
        config(&(0..200).map(volume).collect::<String>())
    };
    let world = World::new(&all("old"), SOON);
    let stores: Vec<_> = (0..200).map(|number| world.store(&number.to_string())).collect();
    world.start(all("old"), None);
    for number in 0..stores.len() {
        world.write(&name("old", number), 7).unwrap();
    }
    world.reload(all("new"));
    assert_eq!(failures(&world), []);
    assert_eq!(world.engine.states().len(), stores.len());
    assert!((0..stores.len()).all(|n| world.volume(&name("new", n)).is_some()));
    assert!(stores.iter().all(|store| store.stable_bytes()[0] == 7));
    assert!(world.stop().is_clean());
}

#[test]
fn a_second_volume_on_one_file_is_refused_at_once_with_the_reason() {
    let both = on(&[("a", "file"), ("b", "file")]);
    let world = World::new(&both, SOON);
    world.store("file");
    world.start(both, None);
    assert_eq!(world.phases(), [phase("a", VolumePhase::Serving), phase("b", VolumePhase::Failed)]);
    let [(_, reason)] = &failures(&world)[..] else { panic!("one") };
    assert!(reason.contains("volume a is on the same file: give each"), "{reason}");
    // One that is served moves to the file of another, which stays: nothing changes.
    let apart = on(&[("a", "file"), ("b", "two")]);
    world.store("two");
    world.reload(apart);
    world.write("b", 1).unwrap();
    let served = world.volume("b").unwrap();
    world.reload(on(&[("a", "file"), ("b", "file")]));
    assert!(Arc::ptr_eq(&served, &world.volume("b").unwrap()), "it was not withdrawn");
    assert!(world.stop().is_clean());
}

#[test]
fn a_file_is_known_by_whatever_path_and_may_be_read_by_several() {
    let folder = tempfile::tempdir().unwrap();
    let (path, link) = (folder.path().join("disk"), folder.path().join("link"));
    let volume = |name: &str, path: &Path, more: &str| {
        let text = format!("[volume.{name}]\nstore='file:{}'\n{more}", path.display());
        config(&text).volumes[name].clone()
    };
    let claims = Arc::<StoreClaims>::default();
    let open = |name: &str, config: &VolumeConfig| {
        futures_lite::future::block_on(
            HelperThreads { workers: 1, ..HelperThreads::default() }.open(
                name,
                config,
                Expected::Any,
                &claims,
            ),
        )
    };
    // Claimed by its path, and by its number once it is made.
    let first = open("a", &volume("a", &path, "create=true\nsize='1M'\n")).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let refused = open("b", &volume("b", &link, "")).map(drop);
    let Err(StoreError::SameFile { other, gone, .. }) = refused else { panic!("{refused:?}") };
    assert!(other == "a" && !gone.is_stopped());
    drop(first);
    assert!(gone.is_stopped());
    let _one = open("a", &volume("a", &path, "read_only=true\n")).unwrap();
    let _other = open("b", &volume("b", &link, "read_only=true\n")).unwrap();
    let refused = open("c", &volume("c", &path, "")).map(drop);
    assert!(matches!(refused, Err(StoreError::SameFile { .. })), "{refused:?}");
}

#[test]
fn a_reload_does_not_wait_for_a_volume_that_an_earlier_one_withdraws() {
    let all = on(&[("dead", "one"), ("good", "two")]);
    let world = World::new(&all, Duration::from_secs(3600));
    let dead = world.store("one");
    world.store("two");
    world.store("three");
    world.start(all, None);
    world.write("dead", 1).unwrap();
    dead.hang();
    for files in [&[("good", "two")][..], &[("good", "two"), ("more", "three")]] {
        let (engine, new) = (world.engine.clone(), on(files));
        world.worker.handle().spawn(|io| async move { drop(engine.reload(&io, new).await) });
        world.wait_for("dead goes", |world| {
            world.phases()[0] == phase("dead", VolumePhase::Closing)
        });
    }
    world.wait_for("more is served", |world| world.volume("more").is_some());
    dead.release();
    world.wait_for("dead is gone", |world| world.phases().len() == 2);
    assert!(world.stop().is_clean());
}
