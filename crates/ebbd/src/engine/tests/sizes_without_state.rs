//! Sizes of volumes of the configuration, in a daemon without a state directory.

use ebb_control::Refused;
use ebb_volume::Resize;

use super::manage::{Kept, new_config, refuses};
use super::*;
use crate::operations::Operations;

fn shrink(world: &World, to: u64) -> Result<(), Refused> {
    resize(world, Resize { to: Some(to), shrink: true })
}

fn resize(world: &World, order: Resize) -> Result<(), Refused> {
    let operation = Operations::default().begin("resize", None, "").unwrap();
    world.run(move |engine, io| async move {
        engine.resize_volume(&io, ("disk", order), &operation).await
    })
}

/// The next start, or a change of another key, would refuse the smaller file.
#[test]
fn shrink_that_no_start_would_accept_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let of = |settings: &str| {
        config(&format!("[volume.disk]\nstore='file:{}'\n{settings}", path.display()))
    };
    let first = of("size='1M'\ncreate=true\n");
    let world = World::on_files(&first);
    world.start(first.clone(), None);
    refuses(shrink(&world, 512 << 10), "configured", "next start would refuse");
    assert_eq!(
        (world.volume("disk").unwrap().size(), path.metadata().unwrap().len()),
        (SIZE, SIZE)
    );
    // What the remedy says.
    let smaller = of("size='512K'\ncreate=true\n");
    world.reload(smaller.clone());
    shrink(&world, 512 << 10).unwrap();
    assert!(world.stop().is_clean());
    drop(world);
    let world = World::on_files(&smaller);
    world.start(smaller, None);
    assert_eq!(world.volume("disk").unwrap().size(), 512 << 10);
    // A configuration that promises no size does not stand in the way.
    world.reload(of(""));
    shrink(&world, 256 << 10).unwrap();
    world.reload(of("cache='none'\n"));
    assert_eq!(world.volume("disk").unwrap().size(), 256 << 10);
    assert!(world.engine.unchanged().is_empty());
}

/// Without a size in the order, a wrong one is the store's.
#[test]
fn store_of_a_size_that_no_volume_has_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [0; 4096]).unwrap();
    let disk = config(&format!("[volume.disk]\nstore='file:{}'\n", path.display()));
    let world = World::on_files(&disk);
    world.start(disk, None);
    std::fs::write(&path, [0; 5000]).unwrap();
    let refused = resize(&world, Resize { to: None, shrink: false });
    refuses(refused, "invalid_value", "its store has 5000 bytes");
}

/// The remedy is one that the command has.
#[test]
fn what_cannot_be_kept_without_a_state_directory_has_its_remedy() {
    let kept = Kept::new("control = '/c'\n", false);
    let world = World::new(&volumes(&["a"], "none"), SOON);
    world.store("a");
    world.store("b");
    world.start(volumes(&["a"], "none"), None);
    let (adding, persisting) = (kept.begin("add"), kept.begin("persist"));
    let config = new_config("b", "null:1M", "none");
    let [persist, limits] = world.run(move |engine, io| async move {
        engine.add_volume(&io, "b", (config, false), &adding).await.unwrap();
        let persist = engine.persist_volume("b", &persisting).await;
        [persist, engine.must_keep_limits("b").await]
    });
    let again = "add the volume again with --persist";
    let remedy = persist.unwrap_err().body.remedy;
    assert!(remedy.contains(again) && !remedy.contains("omit"), "{remedy}");
    refuses(limits, "no_state", "omit --persist");
}
