//! Changes of volumes whose stores, or whose state directory, do not respond: what is told of them, and what is left for
//! other volumes.

use ebb_api::OperationState;
use ebb_config::NewVolume;
use ebb_control::{VolumeChange, VolumeManager};

use super::*;
use crate::manager::{Manager, ReloadReport};
use crate::operations::Operations;
use crate::outages::Outages;

/// An engine without volumes, with a state directory in `folder`.
fn with_state(folder: &tempfile::TempDir) -> World {
    with_drain(folder, SOON)
}

/// As [`with_state`], with the time that withdrawing a volume may take.
fn with_drain(folder: &tempfile::TempDir, drain: Duration) -> World {
    let empty = config("control = '/c'\n");
    let state = StateDir::new(folder.path());
    state.prepare().unwrap();
    let stores = Arc::<Stores>::default();
    let world = World::over(&empty, drain, Some(state), stores.clone(), stores);
    world.start(empty, None);
    world
}

fn on_disk(cache: &str) -> VolumeConfig {
    let (name, store) = ("disk".to_owned(), "file:/disk".to_owned());
    let new = NewVolume { name, store, cache: Some(cache.to_owned()), ..NewVolume::default() };
    new.config().unwrap()
}

/// Flushes of a store that hangs take two places, and a flush of another volume and a reload begin.
#[test]
fn flushes_of_a_store_that_hangs_leave_the_other_volumes_alone() {
    let both = volumes(&["good", "hangs"], "writeback");
    let world = World::new(&both, SOON);
    let (_good, hangs) = (world.store("good"), world.store("hangs"));
    world.start(both, None);
    hangs.hang_only(&[Operation::Flush]);
    world.write("hangs", 7).unwrap();
    let manager = Manager {
        engine: world.engine.clone(),
        server: world.engine.server.clone(),
        volumes: world.volumes.clone(),
        worker: world.worker.handle(),
        operations: Operations::default(),
        outages: Outages::default(),
        reload: Box::new(|reply| reply.send(Ok(ReloadReport::default())).is_ok()),
        takeover: Box::new(|_| false),
    };
    let begin = |change| manager.begin(change, "").unwrap();
    let hung = begin(VolumeChange::Flush("hangs".to_owned()));
    // Not only that of the background, which may be the first.
    let step = || manager.operation(hung.id).unwrap().0.step;
    world.wait_for("it hangs", |_| hangs.hanging() > 0 && step() != "waiting");
    for _ in 0..300 {
        begin(VolumeChange::Flush("hangs".to_owned()));
    }
    assert_eq!(manager.operations().len(), 2);
    let waiting = begin(VolumeChange::Flush("hangs".to_owned()));
    for change in [VolumeChange::Flush("good".to_owned()), VolumeChange::Reload] {
        let begun = begin(change);
        world.wait_for("it ends", |_| begun.ended.is_stopped());
        assert_eq!(manager.operation(begun.id).unwrap().0.state, OperationState::Done);
    }
    assert!(!hung.ended.is_stopped() && !waiting.ended.is_stopped());
    hangs.release();
    world.wait_for("both end", |_| hung.ended.is_stopped() && waiting.ended.is_stopped());
    for flush in [hung, waiting] {
        assert_eq!(manager.operation(flush.id).unwrap().0.state, OperationState::Done);
    }
    assert_eq!(hangs.stable_bytes()[0], 7);
}

/// A reload tries a volume that failed, and neither waits for its store nor needs its reply to
/// remove the volume.
#[test]
fn reload_waits_for_no_store_of_a_volume_that_failed() {
    let all = volumes(&["back", "bad", "good"], "none");
    let world = World::new(&all, SOON);
    world.store("good");
    for name in ["back", "bad"] {
        world.stores.set(name, Fate::Fails);
    }
    world.start(all, None);
    world.store("back");
    world.store("new");
    world.stores.set("bad", Fate::Hangs);
    world.reload(volumes(&["back", "bad", "good", "new"], "none"));
    let serving = |name| phase(name, VolumePhase::Serving);
    let now = [serving("back"), phase("bad", VolumePhase::Failed), serving("good"), serving("new")];
    assert_eq!(world.phases(), now);
    world.reload(volumes(&["back", "good", "new"], "none"));
    assert_eq!(world.phases(), [serving("back"), serving("good"), serving("new")]);
    assert_eq!(world.stop(), StopReport::default());
}

#[test]
fn volume_whose_store_hangs_since_it_was_added_is_removed() {
    let good = volumes(&["good"], "none");
    let world = World::new(&good, Duration::from_millis(300));
    world.store("good");
    world.stores.set("hangs", Fate::Hangs);
    world.start(good.clone(), None);
    world.reload(volumes(&["good", "hangs"], "none"));
    assert_eq!(world.phases()[1], phase("hangs", VolumePhase::Opening));
    world.reload(good);
    assert_eq!(world.phases(), [phase("good", VolumePhase::Serving)]);
    assert_eq!(world.stop(), StopReport::default());
}

/// While a volume is renamed whose store hangs, the status has both names: what waits for the store, and what waits for that.
#[test]
fn a_rename_that_waits_for_a_store_that_hangs_shows_both_names() {
    let folder = tempfile::tempdir().unwrap();
    let (world, operations) = (with_state(&folder), Operations::default());
    let store = world.store("disk");
    let operation = operations.begin("add", Some("old"), "").unwrap();
    let add = move |engine: Arc<Engine>, io| async move {
        engine.add_volume(&io, "old", (on_disk("none"), true), &operation).await
    };
    world.run(add).unwrap();
    store.hang_only(&[Operation::Write]);
    world.leave_a_write("old");
    let operation = operations.begin("rename", Some("old"), "").unwrap();
    let (engine, renaming) = (world.engine.clone(), operation.clone());
    world.worker.handle().spawn(move |io| async move {
        renaming.finish(engine.rename_volume(&io, ("old", "new"), &renaming).await);
    });
    world.wait_for("it is closed", |world| world.phases().len() == 2 && store.hanging() > 0);
    let states = world.engine.states();
    let [new, old] = &states[..] else { panic!("{states:?}") };
    assert_eq!((&*old.name, old.phase), ("old", VolumePhase::Closing));
    assert!(old.volume.is_some() && old.waits_for.is_none());
    assert_eq!((&*new.name, new.phase), ("new", VolumePhase::Opening));
    assert!(new.waits_for.as_ref().is_some_and(|what| what.contains("volume old")), "{new:?}");
    drop(states);
    store.release();
    world.wait_for("it is renamed", |_| operation.ended().is_stopped());
    assert_eq!(world.phases(), [phase("new", VolumePhase::Serving)]);
    assert_eq!(world.engine.states()[0].waits_for, None);
}

/// A reload that a later one cuts short tells which volume is not served yet.
#[test]
fn superseded_reload_lists_volumes_that_are_not_served() {
    let both = volumes(&["good", "hangs"], "none");
    let world = World::new(&both, SOON);
    world.store("good");
    world.stores.set("hangs", Fate::Hangs);
    world.start(volumes(&["good"], "none"), None);
    let ended = world.run(|engine, io| async move {
        let [first, second] = [(); 2].map(|()| {
            let (engine, on, config) = (engine.clone(), io.clone(), both.clone());
            async move { engine.reload(&on, config).await }
        });
        let first = io.spawn(first);
        while engine.states().len() < 2 {
            io.yield_iteration().await;
        }
        io.spawn(second).detach();
        first.await
    });
    assert!(ended.is_superseded, "{ended:?}");
    let not_served = world.engine.not_served();
    assert!(matches!(&not_served[..], [line] if line.contains("volume hangs")), "{not_served:?}");
}

/// An addition on the file of a volume whose removal hangs says so, and ends.
#[test]
fn an_addition_that_waits_for_a_removal_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (world, operations) = (with_drain(&folder, Duration::from_secs(3)), Operations::default());
    let store = world.store("disk");
    let operation = operations.begin("add", Some("old"), "").unwrap();
    let add = move |engine: Arc<Engine>, io| async move {
        engine.add_volume(&io, "old", (on_disk("writeback"), false), &operation).await
    };
    world.run(add).unwrap();
    world.write("old", 7).unwrap();
    store.hang_only(&[Operation::Write]);
    let [removal, addition] = [("remove", "old"), ("add", "new")]
        .map(|(kind, name)| operations.begin(kind, Some(name), "").unwrap());
    let (engine, removing) = (world.engine.clone(), removal.clone());
    world.worker.handle().spawn(move |io| async move {
        removing.finish(engine.remove_volume(&io, "old", &removing).await);
    });
    world.wait_for("it hangs", |_| store.hanging() > 0);
    let (engine, adding) = (world.engine.clone(), addition.clone());
    world.worker.handle().spawn(move |io| async move {
        let config = (on_disk("none"), false);
        adding.finish(engine.add_volume(&io, "new", config, &adding).await);
    });
    let step = || operations.get(addition.id()).unwrap().0.step;
    world.wait_for("it says so", |_| step().starts_with("waits for the removal of volume old"));
    let new = world.engine.states().remove(0);
    assert_eq!(new.waits_for.as_deref(), Some(&*step()), "{new:?}");
    drop(new);
    world.wait_for("it ends", |_| addition.ended().is_stopped());
    let failure = operations.get(addition.id()).unwrap().0.failure.unwrap();
    assert!(failure.message.contains("not added: volume `old` is still being"), "{failure:?}");
    store.release();
    world.wait_for("it is removed", |_| removal.ended().is_stopped());
    assert!(world.engine.states().is_empty());
}

/// While the state directory is written, the status names that and not the store, which was opened.
#[test]
fn an_addition_that_waits_for_the_state_directory_names_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let world = with_state(&folder);
    world.store("disk");
    // The file may be written before that was seen.
    let seen = (0..100).any(|_| {
        let seen = world.run(move |engine, io| async move {
            let operations = Operations::default();
            let operation = operations.begin("add", Some("disk"), "").unwrap();
            let adding = engine.add_volume(&io, "disk", (on_disk("none"), true), &operation);
            let mut adding = std::pin::pin!(adding);
            let mut seen = None;
            let added = loop {
                if let Some(added) = futures_lite::future::poll_once(adding.as_mut()).await {
                    break added;
                }
                if operations.get(operation.id()).unwrap().0.step == "writing the state file" {
                    seen = Some(engine.states().remove(0));
                }
                io.sleep(Duration::from_millis(1)).await;
            };
            added.unwrap();
            let operation = operations.begin("remove", Some("disk"), "").unwrap();
            engine.remove_volume(&io, "disk", &operation).await.unwrap();
            seen
        });
        seen.is_some_and(|state| {
            assert_eq!(state.phase, VolumePhase::Opening);
            let what = state.waits_for.clone().unwrap_or_default();
            assert!(what.contains("its file is being written: ") && what.contains("disk.toml"));
            true
        })
    });
    assert!(seen, "the file was written at once each time");
}
