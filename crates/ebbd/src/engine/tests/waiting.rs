//! Changes of volumes whose stores do not respond: what is left for other volumes.

use ebb_api::OperationView;
use ebb_control::{VolumeChange, VolumeManager};

use super::*;
use crate::manager::{Manager, ReloadReport};
use crate::operations::Operations;

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
        reload: Box::new(|reply| reply.send(Ok(ReloadReport::default())).is_ok()),
    };
    let begin = |change| manager.begin(change).unwrap();
    let hung = begin(VolumeChange::Flush("hangs".to_owned()));
    world.wait_for("it hangs", |_| hangs.hanging() > 0);
    for _ in 0..300 {
        begin(VolumeChange::Flush("hangs".to_owned()));
    }
    assert_eq!(manager.operations().len(), 2);
    let waiting = begin(VolumeChange::Flush("hangs".to_owned()));
    for change in [VolumeChange::Flush("good".to_owned()), VolumeChange::Reload] {
        let begun = begin(change);
        world.wait_for("it ends", |_| begun.ended.is_stopped());
        assert_eq!(manager.operation(begun.id).unwrap().0.state, OperationView::DONE);
    }
    assert!(!hung.ended.is_stopped() && !waiting.ended.is_stopped());
    hangs.release();
    world.wait_for("both end", |_| hung.ended.is_stopped() && waiting.ended.is_stopped());
    for flush in [hung, waiting] {
        assert_eq!(manager.operation(flush.id).unwrap().0.state, OperationView::DONE);
    }
    assert_eq!(hangs.stable_bytes()[0], 7);
}
