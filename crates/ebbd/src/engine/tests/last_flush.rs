//! Reports about a volume whose last flush fails without a known loss.

use super::manage::{Kept, new_config, refuses};
use super::*;

#[test]
fn stop_claims_no_stable_data_of_earlier_daemons() {
    for flushes_first in [false, true] {
        let disk = volumes(&["disk"], "none");
        let world = World::new(&disk, SOON);
        let store = world.store("disk");
        world.start(disk, None);
        if flushes_first {
            let volume = world.volume("disk").unwrap();
            world.run(move |_, io| async move { volume.flush(&io).await.unwrap() });
        }
        store.flush_faults.store(1000, Ordering::SeqCst);
        let report = world.stop();
        assert!(report.is_clean(), "{report:?}");
        let failing: Vec<_> =
            report.failing.iter().map(|left| (&*left.volume, left.knows_earlier)).collect();
        assert_eq!(failing, [("disk", flushes_first)]);
    }
}

#[test]
fn removal_claims_no_stable_data_of_earlier_daemons() {
    for flushes_first in [false, true] {
        let kept = Kept::new("control = '/c'\n", false);
        let store = kept.world.store("disk");
        kept.add("disk", new_config("disk", "file:/disk", "none"), true).unwrap();
        if flushes_first {
            let volume = kept.world.volume("disk").unwrap();
            kept.world.run(move |_, io| async move { volume.flush(&io).await.unwrap() });
        }
        store.flush_faults.store(1000, Ordering::SeqCst);
        let outcome = kept.remove("disk");
        assert!(kept.files().is_empty() && kept.world.engine.states().is_empty());
        match flushes_first {
            true => outcome.unwrap(),
            false => refuses(outcome, "not_flushed", "if an earlier daemon was killed"),
        }
        assert!(kept.world.stop().is_clean());
    }
}

#[test]
fn folder_that_fails_is_no_loss_of_flushed_data() {
    let kept = Kept::new("control = '/c'\n", false);
    let store = kept.world.store("disk");
    kept.add("disk", new_config("disk", "file:/disk", "none"), true).unwrap();
    kept.world.write("disk", 7).unwrap();
    store.name_fails.store(true, Ordering::SeqCst);
    refuses(kept.remove("disk"), "not_flushed", "its data is flushed, but a power cut");
    assert_eq!(store.stable_bytes()[..4096], [7; 4096]);
    assert!(kept.files().is_empty() && kept.world.engine.states().is_empty());
    assert!(kept.world.stop().is_clean());
}

/// After writes that all failed, only data of an earlier daemon can be lost, and none once a flush
/// has succeeded.
#[test]
fn removal_after_failed_writes_reports_no_acknowledged_data() {
    for (mode, flushed) in
        [("none", false), ("none", true), ("writethrough", false), ("writethrough", true)]
    {
        let kept = Kept::new("control = '/c'\n", false);
        let store = kept.world.store("disk");
        kept.add("disk", new_config("disk", "file:/disk", mode), true).unwrap();
        if flushed {
            let volume = kept.world.volume("disk").unwrap();
            kept.world.run(move |_, io| async move { volume.flush(&io).await }).unwrap();
        }
        let faults = ebb_store::Faults { writes: 1000, flushes: 1000, ..Default::default() };
        store.faults(&faults);
        kept.world.write("disk", 7).unwrap_err();
        match flushed {
            true => kept.remove("disk").unwrap(),
            false => refuses(kept.remove("disk"), "not_flushed", "if an earlier daemon was killed"),
        }
        assert!(kept.files().is_empty() && kept.world.engine.states().is_empty());
    }
}

/// The same after a write that was flushed, for a removal and a stop.
#[test]
fn failed_write_after_a_flush_loses_nothing() {
    for (mode, stops) in
        [("none", false), ("none", true), ("writethrough", false), ("writethrough", true)]
    {
        let kept = Kept::new("control = '/c'\n", false);
        let store = kept.world.store("disk");
        kept.add("disk", new_config("disk", "file:/disk", mode), true).unwrap();
        kept.world.write("disk", 7).unwrap();
        let volume = kept.world.volume("disk").unwrap();
        kept.world.run(move |_, io| async move { volume.flush(&io).await }).unwrap();
        let faults = ebb_store::Faults { writes: 1000, flushes: 1000, ..Default::default() };
        store.faults(&faults);
        kept.world.write("disk", 8).unwrap_err();
        if !stops {
            kept.remove("disk").unwrap();
        }
        let report = kept.world.stop();
        assert!(report.is_clean(), "{mode}: {report:?}");
    }
}
