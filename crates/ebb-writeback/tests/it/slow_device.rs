//! A device whose measured rate is far below its real one, as after it has hung.

use ebb_writeback::{
    BdiOptions, MILLISECOND, SECOND, Verdict, WriteOutcome, Writeback, WritebackOptions,
};

const SMALL: u64 = 4096;
const PIECE: u64 = 64 << 10;

/// A small write of another volume is too little to begin writeback by itself.
#[test]
fn writeback_begins_while_a_writer_waits_for_a_low_rate() {
    let mut writeback = Writeback::new(&WritebackOptions::new(1 << 20)).unwrap();
    let options = || BdiOptions { rate: Some(512), ..BdiOptions::default() };
    let mut bdis: Vec<_> = (0..3).map(|_| writeback.add_bdi(options(), 0).unwrap()).collect();
    let bdi = &mut bdis[0];
    let [a, b] = [(); 2].map(|()| bdi.add_volume(1).unwrap());
    let mut now = SECOND;
    assert_eq!(bdi.reserve(b, SMALL, now, now), Verdict::Go);
    assert_eq!(bdi.reserve(a, PIECE, now, now), Verdict::Go);
    bdi.on_writeback(b, SMALL, now);
    bdi.on_writeback(a, PIECE, now);
    let sent = now;
    now += 8 * SECOND;
    let _ = bdi.on_written(b, SMALL, sent, WriteOutcome::Written, now);
    let _ = bdi.on_written(a, PIECE, sent, WriteOutcome::Written, now);
    writeback.update(now);
    assert_eq!(bdi.reserve(b, SMALL, now, now), Verdict::Go);
    let requested = now;
    assert_ne!(bdi.reserve(a, PIECE, requested, now), Verdict::Go, "it waits for the rate");
    assert!(bdi.plan(now).start);
    bdi.on_writeback(b, SMALL, now);
    let _ = bdi.on_written(b, SMALL, now, WriteOutcome::Written, now + MILLISECOND);
    assert_eq!(bdi.reserve(a, PIECE, requested, now + MILLISECOND), Verdict::Go);
}
