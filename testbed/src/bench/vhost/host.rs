//! Rates, latency and processor time on this machine: the backends alternate within each round, in another order each
//! time, each freshly started with a client process of its own.
//!
//! The file is in memory (tmpfs), so that no disk is measured. Our cache holds all of it; the peers have it in the page
//! cache, so that theirs is what they have without a cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::client::Outcome;
use super::servers::{Backend, Data, Kind, Programs};
use crate::bench::figure::{Bar, Better, Figure};
use crate::bench::{Error, Options, command, io_context, log, process};

/// Blocks of the file.
const BLOCKS: u32 = 16_384;
/// Requests of each queue before those that are measured: all blocks, which fill our cache.
const WARM: u32 = BLOCKS;
/// A directory in memory.
const MEMORY: &str = "/dev/shm";

const RATE: Bar = Bar::AtLeastRatio(1.3);
const LATENCY: Bar = Bar::AtMostRatio(1.0);
const CPU: Bar = Bar::AtMostRatio(0.6);

/// A load of 4 KiB requests.
#[derive(Debug, Clone, Copy)]
struct Workload {
    name: &'static str,
    null: bool,
    write: bool,
    depth: u16,
    queues: u16,
}

const fn workload(name: &'static str, null: bool, depth: u16, queues: u16) -> Workload {
    Workload { name, null, write: false, depth, queues }
}

const WORKLOADS: [Workload; 7] = [
    workload("null_read_4k_qd1", true, 1, 1),
    workload("null_read_4k_qd32", true, 32, 1),
    workload("null_read_4k_qd32x2", true, 32, 2),
    workload("file_read_4k_qd1", false, 1, 1),
    workload("file_read_4k_qd32", false, 32, 1),
    workload("file_read_4k_qd32x2", false, 32, 2),
    Workload { name: "file_write_4k_qd32", null: false, write: true, depth: 32, queues: 1 },
];

/// A measured quantity: its key, a suffix of figures.
const QUANTITIES: [(&str, Better, Bar); 3] = [
    ("_iops", Better::Higher, RATE),
    ("_p50_us", Better::Lower, LATENCY),
    ("_cpu_us_per_req", Better::Lower, CPU),
];

impl Workload {
    /// Names of a figure of ours, with or without our cache.
    fn figure(&self, ours: Kind, suffix: &str) -> String {
        let name = match ours {
            Kind::EbbdCached => self.name.replace("file_", "cached_"),
            _ => self.name.to_owned(),
        };
        format!("vhost_{name}{suffix}")
    }

    /// Its quantities: the latency is that of single requests, which then says what the rate would say.
    fn quantities(&self) -> impl Iterator<Item = (&'static str, Better, Bar)> {
        let skipped = if self.depth == 1 { "_iops" } else { "_p50_us" };
        QUANTITIES.into_iter().filter(move |(suffix, ..)| *suffix != skipped)
    }
}

/// What a run of one backend gave: the rate, the median latency, processor time for a request.
type Sample = [f64; 3];

struct Rig<'a> {
    options: &'a Options,
    programs: &'a Programs,
    folder: tempfile::TempDir,
    client: PathBuf,
}

/// Measures what the options ask for, and hands each figure to `print`. Returns how many workloads failed to run.
///
/// # Errors
/// Nothing can be measured at all, or `print` fails.
pub fn run(
    options: &Options,
    programs: &Programs,
    mut print: impl FnMut(&Figure) -> std::io::Result<()>,
) -> Result<usize, Error> {
    let folder = tempfile::Builder::new().prefix("ebbd-vhost-").tempdir_in(MEMORY);
    let folder = folder.map_err(io_context(format!("making a directory in {MEMORY}")))?;
    let client = command::beside("vhost-load")
        .map_err(|error| Error::Failed { program: "vhost-load".into(), what: error.to_string() })?;
    let rig = Rig { options, programs, folder, client };
    rig.fill()?;
    let mut failed = 0;
    for workload in &WORKLOADS {
        match rig.measure(workload) {
            Ok(figures) => {
                figures.iter().try_for_each(&mut print).map_err(io_context("printing a figure"))?;
            }
            Err(error) => {
                log(format_args!("{} FAILED: {error}", workload.name));
                failed += 1;
            }
        }
    }
    Ok(failed)
}

impl Rig<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes the file, whose blocks begin with their numbers.
    fn fill(&self) -> Result<(), Error> {
        let mut fill = Command::new(&self.client);
        fill.arg("fill").arg(self.path("disk.img")).arg(BLOCKS.to_string());
        process::run(fill, &self.path("client.log"), Duration::from_secs(60))
    }

    fn measure(&self, workload: &Workload) -> Result<Vec<Figure>, Error> {
        let file = self.path("disk.img");
        let data = if workload.null { Data::Null } else { Data::File(&file) };
        let kinds = self.programs.kinds(data);
        let ours: Vec<Kind> = kinds.iter().copied().filter(|kind| kind.is_ours()).collect();
        let wanted = |kind: &Kind| {
            let mut suffixes = workload.quantities().map(|(suffix, ..)| suffix);
            suffixes.any(|suffix| self.options.wants(&workload.figure(*kind, suffix)))
        };
        if !ours.iter().any(wanted) {
            return Ok(Vec::new());
        }
        let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); kinds.len()];
        for round in 0..self.options.rounds as usize {
            for at in 0..kinds.len() {
                let at = (at + round) % kinds.len();
                samples[at].push(self.sample(kinds[at], data, workload)?);
            }
        }
        let mut figures = Vec::new();
        for (kind, samples) in kinds.iter().zip(&samples) {
            log(format_args!(
                "{} {} (rate, p50 us, cpu us): {samples:.2?}",
                workload.name,
                kind.name()
            ));
        }
        for kind in ours {
            for (index, (suffix, better, bar)) in QUANTITIES.into_iter().enumerate() {
                let name = workload.figure(kind, suffix);
                let is_its = workload.quantities().any(|(own, ..)| own == suffix);
                if !is_its || !self.options.wants(&name) {
                    continue;
                }
                let compared = kinds.iter().zip(&samples);
                let mut rounds: Vec<Vec<f64>> = compared
                    .clone()
                    .filter(|(other, _)| **other == kind)
                    .chain(compared.filter(|(other, _)| !other.is_ours()))
                    .map(|(_, samples)| samples.iter().map(|sample| sample[index]).collect())
                    .collect();
                rounds.retain(|values: &Vec<f64>| !values.is_empty());
                figures.extend(Figure::from_rounds(name, &rounds, better, bar));
            }
        }
        Ok(figures)
    }

    /// One run of one backend.
    fn sample(&self, kind: Kind, data: Data<'_>, workload: &Workload) -> Result<Sample, Error> {
        let folder = self.path("sockets");
        let making = || io_context(format!("making {}", folder.display()));
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(making())?;
        }
        fs::create_dir(&folder).map_err(making())?;
        let program = self.programs.path(kind).unwrap_or(Path::new("none"));
        let arguments = kind.arguments(data, &folder.display().to_string(), workload.queues, 2);
        let backend = Backend::start(kind, program, &arguments, &self.path("backend.log"))?;
        let line = self.load(&folder.join("disk.sock"), workload, &backend)?;
        backend.stop()?;
        let value = |key: &'static str| {
            let value = Outcome::value(&line, key);
            value.ok_or(Error::Output { from: "vhost-load", what: line.clone() })
        };
        let requests = value("requests")?;
        let rate = requests / value("seconds")?;
        Ok([rate, value("p50_us")?, value("cpu_us")? / requests])
    }

    fn load(&self, socket: &Path, workload: &Workload, backend: &Backend) -> Result<String, Error> {
        let blocks = if workload.null { 0 } else { BLOCKS };
        let Workload { depth, queues, write, .. } = workload;
        let (seconds, pid, output) = (self.options.seconds, backend.pid(), self.path("client.log"));
        let mut client = Command::new(&self.client);
        client.arg("run").arg(socket);
        client.args(write.then_some("write"));
        for option in [
            format!("depth={depth}"),
            format!("queues={queues}"),
            format!("blocks={blocks}"),
            format!("warm={WARM}"),
            format!("seconds={seconds}"),
            format!("pid={pid}"),
        ] {
            client.arg(option);
        }
        let limit = Duration::from_secs(u64::from(self.options.seconds) + 120);
        process::run(client, &output, limit).map_err(|error| {
            let what = format!("{error}; the backend said: {}", backend.said());
            Error::Failed { program: "vhost-load".into(), what }
        })?;
        fs::read_to_string(&output).map_err(io_context("reading what the client found"))
    }
}
