//! Measures the daemon's Xen backend, the kernel's and QEMU's, in one boot; and what it swaps under
//! memory pressure.
//!
//! Times are instructions (see [`crate::xen`]): of the whole machine, guest and dom0, for one operation.
//! A figure is the median of its rounds, which alternate.

mod cap;
mod pressure;

pub use cap::cap;
pub use pressure::{Pressure, pressure};

use crate::bench::figure::{Bar, Better, Figure};
use crate::harness::binary;
use crate::xen::trace::{EVENT_CHANNEL, GRANT_TABLE, Hypercalls};
use crate::xen::{Machine, Outcome};
use crate::{Error, Result};
use std::path::Path;
use std::time::Duration;

/// Requests in a phase whose hypercalls are recorded; as in `load.sh`.
const TRACED: f64 = 20_000.0;

/// Loads of `load.sh` (mode, size, depth), each with its name and the bars of persistent and copy mode.
const LOADS: [(&str, &str, Bar, Bar); 5] = [
    ("rr 4k 32", "randread_4k_qd32", Bar::AtMostRatio(0.80), Bar::AtMostRatio(0.80)),
    ("rw 4k 32", "randwrite_4k_qd32", Bar::AtMostRatio(0.80), Bar::AtMostRatio(0.80)),
    ("rr 4k 1", "randread_4k_qd1", Bar::AtMostRatio(1.0), Bar::AtMostRatio(1.0)),
    ("sr 1m 4", "read_1m_qd4", Bar::AtMostRatio(0.75), Bar::None),
    ("sw 1m 4", "write_1m_qd4", Bar::AtMostRatio(0.75), Bar::None),
];

/// Runs the comparison of `ebbd` at `daemon` with its peers in one boot.
///
/// # Errors
/// The machine cannot be booted, or a load failed; the error shows the consoles.
pub fn side_by_side(daemon: &Path) -> Result<Vec<Figure>> {
    let outcome = Machine::new(include_str!("xen/side.sh"))
        .file("load.sh", include_str!("xen/load.sh"))
        .guest(1, 512)
        .program(daemon)
        .guest_program(binary::release("testbed", "guest-load")?)
        .device_model()
        .limit(Duration::from_secs(3000))
        .ok()?;
    let mut figures = Vec::new();
    for (load, name, persistent, copy) in LOADS {
        let rounds = |disk: &str| costs(&outcome, disk, load);
        let modes = [("persistent", "xvdd", "xvdb", persistent), ("copy", "xvde", "xvdc", copy)];
        for (mode, ours, peer, bar) in modes {
            let name = format!("xen_{name}_{mode}_us");
            let both = [rounds(ours), rounds(peer)];
            figures.extend(Figure::from_rounds(name, &both, Better::Lower, bar));
        }
        let name = format!("xen_{name}_qdisk_us");
        let both = [rounds("xvdd"), rounds("xvdf")];
        if !both[1].is_empty() {
            figures.extend(Figure::from_rounds(name, &both, Better::Lower, Bar::None));
        }
    }
    let idle = calls(&outcome, "idle")?;
    for (disk, mode, grants) in [("xvdd", "persistent", 0.0), ("xvde", "copy", 1.0 / 16.0)] {
        let found = calls(&outcome, &format!("{disk}.qd32"))?.without(&idle);
        let per_request = |count: u64| count as f64 / TRACED;
        for (what, count, bar) in [
            // A handful of calls of other things in dom0 is not one for a request.
            ("grant", found.of(GRANT_TABLE), Bar::AtMost(grants + 0.002)),
            ("event", found.of(EVENT_CHANNEL), Bar::None),
            ("all", found.all(), Bar::AtMost(0.5)),
        ] {
            let name = format!("xen_randread_4k_qd32_{mode}_{what}_hypercalls");
            figures.push(Figure { name, ours: per_request(count), peer: None, bar });
        }
    }
    Ok(figures)
}

/// Costs of a load on a disk in microseconds, one for each round.
fn costs(outcome: &Outcome, disk: &str, load: &str) -> Vec<f64> {
    let head = format!("{disk} load {load} ");
    let answers = outcome.answers("peer.load");
    // "DISK load MODE SIZE DEPTH COUNT us worst errors"
    let costs =
        answers.iter().filter_map(|text| text.strip_prefix(&head)?.split(' ').nth(1)?.parse().ok());
    costs.collect()
}

fn calls(outcome: &Outcome, phase: &str) -> Result<Hypercalls> {
    let path = outcome.out().join(format!("{phase}.trace"));
    let bytes = std::fs::read(&path).map_err(Error::io(path.display().to_string()))?;
    Ok(Hypercalls::read(&bytes, 0))
}
