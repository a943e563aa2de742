//! Volumes that share the limit of dirty data, one of which has filled its store.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Disk, MIB, Rig};
use ebb_block::ErrorKind;
use ebb_cache::{Mode, WritebackControl, WritebackOrder};
use ebb_io::{Io, Worker};

/// Nothing here takes so long, unless it hangs.
const SOON: Duration = Duration::from_secs(20);

fn play<Fut: Future<Output = ()> + 'static>(
    act: impl FnOnce(Io, Arc<Rig>, Disk) -> Fut + Send + 'static,
) {
    let rig = Arc::new(Rig::new(16 * MIB));
    let worker = Worker::start("back", &rig.memory).unwrap();
    let disk = rig.volume_as("disk", 8 * MIB, 1, Mode::Writeback);
    let done = worker.handle().block_on(move |io| act(io, rig, disk));
    assert!(done.is_some(), "the run panicked; see above");
}

/// A limit that volumes share, whose room one volume has taken that finds its store full.
#[derive(Default)]
struct Shared(AtomicBool);

impl WritebackControl for Shared {
    fn reserve(&self, _: Instant, _: Instant, _: u64, _: u64) -> Duration {
        match self.0.load(Ordering::SeqCst) {
            true => Duration::from_millis(2),
            false => Duration::ZERO,
        }
    }
    fn next(&self, _: Instant, _: u64, _: Duration) -> WritebackOrder {
        WritebackOrder::Write(65536)
    }
    fn patience(&self) -> Duration {
        Duration::from_millis(50)
    }
    fn note_full(&self, full: bool) {
        self.0.store(full, Ordering::SeqCst);
    }
    fn is_full(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Two volumes that share a limit; the first one has filled its store, and taken all of the limit.
async fn filled(io: &Io, rig: &Rig, disk: &Disk) -> (Disk, Arc<Shared>) {
    let second = rig.volume_as("second", disk.cached.size(), 2, Mode::Writeback);
    let control = Arc::new(Shared::default());
    for disk in [disk, &second] {
        disk.cached.set_control(control.clone());
        io.spawn(disk.cached.clone().run_flusher(io.clone())).detach();
    }
    disk.test.set_room(Some(0));
    assert_eq!(write(io, disk, 1).await, Ok(()), "there is room in memory");
    while !control.is_full() {
        io.sleep(Duration::from_millis(1)).await;
    }
    (second, control)
}

/// Writes to the volume, which must not hang.
async fn write(io: &Io, disk: &Disk, byte: u8) -> Result<(), ErrorKind> {
    let mut buf = io.pool().get_for_test(65536);
    buf.fill(byte);
    let written = io.timeout(SOON, disk.cached.write(io, buf, 0, false)).await;
    written.expect("it hangs").0.map_err(|error| error.kind)
}

#[test]
fn write_fails_in_time_if_another_volume_has_filled_the_disk() {
    play(|io, rig, disk| async move {
        let (second, _control) = filled(&io, &rig, &disk).await;
        second.test.set_room(Some(0));
        assert_eq!(write(&io, &second, 2).await, Err(ErrorKind::NoSpace));
        disk.test.set_room(None);
        second.test.set_room(None);
        while write(&io, &second, 3).await.is_err() {}
        while second.cached.flush(&io).await.is_err() {}
        assert!(second.test.stable_bytes()[..65536].iter().all(|byte| *byte == 3));
    });
}

#[test]
fn write_passes_memory_if_only_another_store_is_full() {
    play(|io, rig, disk| async move {
        let (second, control) = filled(&io, &rig, &disk).await;
        assert_eq!(write(&io, &second, 2).await, Ok(()));
        let mut stored = vec![0; 65536];
        second.test.look(0, &mut stored);
        assert!(stored.iter().all(|byte| *byte == 2));
        assert_eq!(second.cached.dirty(), 0, "it went past memory");
        assert!(control.is_full() && disk.cached.dirty() > 0, "the other one is full as before");
        assert_eq!(write(&io, &disk, 3).await, Ok(()), "it is dirty already");
    });
}
