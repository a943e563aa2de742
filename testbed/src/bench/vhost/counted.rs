//! Instructions for a request: client, kernel and backend in one guest with one processor whose clock counts them, so
//! that figures repeat beside other work of the host.
//!
//! Cache misses, and the guest's own VMM, cost nothing here. The file is in the guest's tmpfs.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use super::client::Outcome;
use super::servers::{Data, Kind, Programs};
use crate::bench::figure::{Bar, Better, Figure};
use crate::bench::log;
use crate::guest::{Guest, Outcome as Finished};
use crate::harness::binary;
use crate::{Error, Result};

/// `2^SHIFT` ns for an instruction.
const SHIFT: u32 = 0;
const MEMORY_MIB: u32 = 1024;
/// Blocks of the file.
const BLOCKS: u32 = 4096;
/// Requests before those that are counted (all blocks, which fill our cache), and of those,
/// with one in flight and with many.
const WARM: u32 = BLOCKS;
const REQUESTS: [u32; 2] = [10_000, 30_000];
const FILE: &str = "/tmp/disk.img";
const FOLDER: &str = "/tmp/vhost";

/// A load: its name, whether of nothing or of a file, writes or reads, requests in flight, the bars of ours without and
/// with its cache.
type Load = (&'static str, bool, bool, u16, Bar, Bar);

const LOADS: [Load; 5] = [
    ("null_read_4k_qd1", true, false, 1, Bar::None, Bar::None),
    ("null_read_4k_qd32", true, false, 32, Bar::AtMostRatio(0.5), Bar::None),
    ("file_read_4k_qd1", false, false, 1, Bar::None, Bar::None),
    ("file_read_4k_qd32", false, false, 32, Bar::AtMostRatio(0.6), Bar::None),
    ("file_write_4k_qd32", false, true, 32, Bar::None, Bar::None),
];
/// The figure of a read from our cache that is held against QEMU's read of nothing.
const CACHED: &str = "vhost_cached_read_4k_qd1_null_instructions";

fn data(null: bool) -> Data<'static> {
    if null { Data::Null } else { Data::File(Path::new(FILE)) }
}

fn figure_name(load: &str, kind: Kind) -> String {
    let load = match kind {
        Kind::EbbdCached => load.replace("file_", "cached_"),
        _ => load.to_owned(),
    };
    format!("vhost_{load}_instructions")
}

/// Whether `wants` wants any figure from here.
#[must_use]
pub fn is_wanted(wants: impl Fn(&str) -> bool) -> bool {
    let mut names = LOADS
        .iter()
        .flat_map(|(load, ..)| [Kind::Ebbd, Kind::EbbdCached].map(|kind| figure_name(load, kind)));
    names.any(|name| wants(&name)) || wants(CACHED)
}

fn script(programs: &Programs, rounds: usize) -> String {
    let mut script = format!(
        "vhost-load fill {FILE} {BLOCKS}\n\
         run() {{ # NAME OPTIONS PROGRAM ARGUMENTS\n\
         name=$1 options=$2\nshift 2\nrm -rf {FOLDER}\nmkdir {FOLDER}\n\
         \"$@\" 2>/tmp/log &\npid=$!\n\
         line=$(vhost-load run {FOLDER}/disk.sock $options) || {{ cat /tmp/log; exit 1; }}\n\
         say \"$name $line\"\nkill -9 $pid || :\nwait $pid || :\n}}\n"
    );
    for round in 0..rounds {
        for (load, null, write, depth, ..) in LOADS {
            let mut kinds = programs.kinds(data(null));
            let by = round % kinds.len();
            kinds.rotate_left(by);
            for kind in kinds {
                let name = kind.name();
                let blocks = if null { 0 } else { BLOCKS };
                let requests = REQUESTS[usize::from(depth > 1)];
                let write = if write { "write " } else { "" };
                let command = kind.arguments(data(null), FOLDER, 1, 1).join(" ");
                let program = if kind.is_ours() { "ebbd" } else { name };
                // Writing to a String does not fail.
                let _ = writeln!(
                    script,
                    "run {round}.{load}.{name} '{write}depth={depth} blocks={blocks} warm={WARM} \
                     requests={requests}' {program} {command}"
                );
            }
        }
    }
    script
}

/// Boots the guest and measures: every backend with every load, `rounds` times.
///
/// # Errors
/// The guest cannot be booted, or a load failed; the error shows its console.
pub fn measure(programs: &Programs, rounds: usize) -> Result<Vec<Figure>> {
    let mut guest = Guest::new(script(programs, rounds))
        .program_as(&binary::release("testbed", "vhost-load")?, "vhost-load")
        .counted_time(SHIFT)
        .memory_mib(MEMORY_MIB)
        .limit(Duration::from_secs(3600));
    for kind in [Kind::Ebbd, Kind::Qemu7, Kind::Qemu10, Kind::CloudHypervisor] {
        if let Some(path) = programs.path(kind) {
            guest = guest.program_as(path, kind.name());
        }
    }
    let outcome = guest.ok()?;
    let mut figures = Vec::new();
    for (load, null, _, _, bar, cached_bar) in LOADS {
        let kinds = programs.kinds(data(null));
        let mut all = Vec::new();
        for kind in &kinds {
            let values = costs(&outcome, load, *kind, rounds)?;
            log(format_args!("instructions {load} {}: {values:.0?}", kind.name()));
            all.push(values);
        }
        for (kind, values) in kinds.iter().zip(&all).filter(|(kind, _)| kind.is_ours()) {
            let peers = kinds.iter().zip(&all).filter(|(kind, _)| !kind.is_ours());
            let rounds: Vec<Vec<f64>> =
                std::iter::once(values).chain(peers.map(|(_, values)| values)).cloned().collect();
            let bar = if *kind == Kind::EbbdCached { cached_bar } else { bar };
            let name = figure_name(load, *kind);
            figures.extend(Figure::from_rounds(name, &rounds, Better::Lower, bar));
        }
    }
    let all = [
        costs(&outcome, "file_read_4k_qd1", Kind::EbbdCached, rounds)?,
        costs(&outcome, "null_read_4k_qd1", Kind::Qemu7, rounds)?,
        costs(&outcome, "null_read_4k_qd1", Kind::Qemu10, rounds)?,
    ];
    figures.extend(Figure::from_rounds(CACHED, &all, Better::Lower, Bar::AtMostRatio(1.0)));
    Ok(figures)
}

/// Instructions for a request in each round.
fn costs(outcome: &Finished, load: &str, kind: Kind, rounds: usize) -> Result<Vec<f64>> {
    let one = |round: usize| {
        let line = outcome.answer(&format!("{round}.{load}.{}", kind.name()))?;
        let missing = |key: &str| Error::unexpected(format!("no {key} in: {line}"));
        let value = |key: &str| Outcome::value(line, key).ok_or_else(|| missing(key));
        Ok(value("seconds")? * 1e9 / f64::from(1_u32 << SHIFT) / value("requests")?)
    };
    (0..rounds).map(one).collect()
}
