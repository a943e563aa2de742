//! What a guest gains: random writes before a store with a delay, the latency of a burst, and that
//! nothing is lost where the store's speed is all there is.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::devices::{bdi, pressure, store};
use super::{Error, io_context, log};
use crate::bench::figure::{Bar, Better, Figure};
use crate::bench::fio::{self, Load, Outcome, Until};
use crate::bench::process;
use crate::bench::server::Server;
use crate::bench::workdir::Workdir;
use crate::harness::nbd::{Client, Request, wire};
use crate::harness::pattern::Random;

/// Random writes of 4 KiB, one at a time, a second; the peer is the same without a cache.
const RANDOM: &str = "writeback_random_4k_write_1ms_store_iops";
/// The same with 16 in flight: here the store has as many threads, and the ratio is shown only.
const RANDOM_DEEP: &str = "writeback_random_4k_write_1ms_store_qd16_iops";
/// A burst's 99th percentile below the limit; the peer is that of reads found in the cache.
const BURST: &str = "writeback_burst_4k_write_p99_us";
/// What reaches the store while writers are held at the limit; the peer is the store alone.
const LIMIT: &str = "writeback_at_the_limit_MBps";
/// The names of all figures.
pub const NAMES: [&str; 4] = [RANDOM, RANDOM_DEEP, BURST, LIMIT];

const ROUNDS: usize = 3;
const SECONDS: u32 = 5;
/// Region of the random writes.
const REGION: u64 = 256 << 20;
const PAGE: u64 = 4096;
/// Writes of a burst, each to a page of its own: 16 MiB.
const COUNT: u64 = 4096;

/// A daemon with one volume called `disk`.
struct Daemon {
    server: Server,
    control: PathBuf,
}

struct Rig<'a> {
    daemon: &'a Path,
    work: &'a Workdir,
}

/// Measures them.
///
/// # Errors
/// [`Error`] when something does not run, or is not what it should be.
pub fn all(daemon: &Path, work: &Workdir) -> Result<Vec<Figure>, Error> {
    let rig = Rig { daemon, work };
    let mut figures = Vec::new();
    let late = store(work, "late", &["--threads=16", "--filter=delay", "wdelay=1ms"])?;
    let load = |depth| Load { pattern: "randwrite", block: 4096, depth, connections: 1 };
    figures.extend(rig.random(&late, RANDOM, load(1), Bar::AtLeastRatio(20.0))?);
    figures.extend(rig.random(&late, RANDOM_DEEP, load(16), Bar::None)?);
    figures.extend(rig.burst(&late)?);
    late.stop()?;
    figures.extend(rig.at_the_limit()?);
    Ok(figures)
}

impl Rig<'_> {
    fn start(&self, name: &str, store: &Server, cache: &str) -> Result<Daemon, Error> {
        let (socket, control) =
            (self.work.path(&format!("{name}.sock")), self.work.path(&format!("{name}.ctl")));
        let mut command = Command::new(self.daemon);
        let volume =
            format!("disk=nbd+unix:///disk?socket={},cache={cache}", store.socket().display());
        command.args(["serve", "--log", "warn", "--cache-min", "1G", "--control"]).arg(&control);
        command.arg("--listen").arg(format!("unix:{}", socket.display()));
        command.arg("--volume").arg(volume);
        let log = self.work.path(&format!("{name}.log"));
        let server = Server::start("ebbd", command, socket, log, ["disk"])?;
        Ok(Daemon { server, control })
    }

    /// A run of so many seconds, of which those before `counted` do not count.
    fn fio(
        &self,
        server: &Server,
        load: Load,
        bytes: u64,
        (before, counted): (u32, u32),
    ) -> Result<Outcome, Error> {
        let report = self.work.path("fio.json");
        let mut command = Command::new("fio");
        let until = Until::Seconds(counted);
        command.args(fio::arguments(
            load,
            bytes,
            until,
            fio::Target::Nbd(server.socket()),
            &report,
        ));
        command.arg(format!("--ramp_time={before}"));
        let limit = Duration::from_secs(u64::from(before + counted) + 60);
        process::run(command, &self.work.path("client.log"), limit)?;
        fio::take_report(&report)
    }

    /// Random writes with and without writeback, in pairs.
    fn random(
        &self,
        store: &Server,
        name: &str,
        load: Load,
        bar: Bar,
    ) -> Result<Option<Figure>, Error> {
        let mut rounds = vec![Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            for (place, cache) in [(0, "writeback"), (1, "none")] {
                let daemon = self.start("random", store, cache)?;
                let outcome = self.fio(&daemon.server, load, REGION, (0, SECONDS))?;
                let signs = pressure(&daemon.control)?;
                log(format_args!(
                    "{name} round {round}, {cache}: {:.0} IOPS, {:.1} us; {signs} signs of pressure",
                    outcome.iops, outcome.latency_us
                ));
                rounds[place].push(outcome.iops);
                daemon.server.stop()?;
            }
        }
        Ok(Figure::from_rounds(name, &rounds, Better::Higher, bar))
    }

    /// The latency of writes that find room beside that of reads that are found.
    fn burst(&self, store: &Server) -> Result<Option<Figure>, Error> {
        let daemon = self.start("burst", store, "writeback")?;
        let mut client = Client::open(daemon.server.socket(), "disk")?;
        // Header and data in one piece, as clients send them.
        let mut stream = Client::open(daemon.server.socket(), "disk")?.into_stream();
        let mut random = Random::new(1);
        // Fills the cache, and lets the device show what it can.
        let piece = vec![0x5a; 1 << 20];
        for offset in (0..REGION).step_by(1 << 20) {
            client.write(offset, &piece, 0)?;
        }
        client.flush()?;
        let (mut request, mut answer) = (vec![0xa5; 28 + 4096], vec![0; 16 + 4096]);
        let mut rounds = vec![Vec::new(), Vec::new()];
        for round in 0..2 * ROUNDS {
            let pages: Vec<u64> = pages(&mut random);
            let reads = timed(&pages, |offset| {
                let head =
                    Request { command: wire::CMD_READ, offset, length: 4096, ..Request::default() };
                stream.write_all(&head.bytes())?;
                stream.read_exact(&mut answer)
            })?;
            let before = bdi(&daemon.control, "pauses")?;
            let writes = timed(&pages, |offset| {
                let head = Request {
                    command: wire::CMD_WRITE,
                    offset,
                    length: 4096,
                    ..Request::default()
                };
                request[..28].copy_from_slice(&head.bytes());
                stream.write_all(&request)?;
                stream.read_exact(&mut answer[..16])
            })?;
            let paused = bdi(&daemon.control, "pauses")? - before;
            client.flush()?;
            log(format_args!(
                "{BURST} round {round}: 50th, 99th: write {writes:.1?} us, read {reads:.1?} us, {paused} paused"
            ));
            if paused > 0 {
                let what = format!("{paused} writes of a burst below the limit were held up");
                return Err(Error::Failed { program: "ebbd".into(), what });
            }
            rounds[0].push(writes[1]);
            rounds[1].push(reads[1]);
        }
        client.disconnect()?;
        daemon.server.stop()?;
        Ok(Figure::from_rounds(BURST, &rounds, Better::Lower, Bar::AtMostRatio(2.0)))
    }

    /// What the store gets while a writer that could do more waits for it, beside the store alone.
    fn at_the_limit(&self) -> Result<Option<Figure>, Error> {
        let load = Load { pattern: "write", block: 1 << 20, depth: 4, connections: 1 };
        let mut rounds = vec![Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            let slow = ["--filter=rate", "rate=480M", "burstiness=0.25"];
            let store = store(self.work, "slow", &slow)?;
            let alone = self.fio(&store, load, 1 << 30, (1, SECONDS))?.megabytes;
            let daemon = self.start("limit", &store, "writeback")?;
            let ours = thread::scope(|scope| {
                let client = scope.spawn(|| self.fio(&daemon.server, load, 1 << 30, (3, SECONDS)));
                thread::sleep(Duration::from_secs(3));
                let (before, start) = (bdi(&daemon.control, "written_bytes")?, Instant::now());
                thread::sleep(Duration::from_secs(u64::from(SECONDS) - 1));
                let written = bdi(&daemon.control, "written_bytes")? - before;
                let seconds = start.elapsed().as_secs_f64();
                let ended = client.join();
                ended.map_err(|_| Error::Failed {
                    program: "the client".into(),
                    what: "panicked".into(),
                })??;
                Ok::<f64, Error>(written as f64 / 1e6 / seconds)
            })?;
            log(format_args!("{LIMIT} round {round}: {ours:.2} MB/s, alone {alone:.2} MB/s"));
            rounds[0].push(ours);
            rounds[1].push(alone);
            daemon.server.stop()?;
            store.stop()?;
        }
        Ok(Figure::from_rounds(LIMIT, &rounds, Better::Higher, Bar::AtLeastRatio(0.97)))
    }
}

/// Different pages in no order.
fn pages(random: &mut Random) -> Vec<u64> {
    let mut all: Vec<u64> = (0..REGION / PAGE).collect();
    for place in 0..usize::try_from(COUNT).unwrap_or(0) {
        let left = u64::try_from(all.len() - place).unwrap_or(1);
        let other = place + usize::try_from(random.below(left)).unwrap_or(0);
        all.swap(place, other);
    }
    all.truncate(usize::try_from(COUNT).unwrap_or(0));
    all
}

/// The median and the 99th percentile of the time a request takes, in microseconds.
fn timed(
    pages: &[u64],
    mut request: impl FnMut(u64) -> std::io::Result<()>,
) -> Result<[f64; 2], Error> {
    let mut times = Vec::with_capacity(pages.len());
    for page in pages {
        let start = Instant::now();
        request(page * PAGE).map_err(io_context("asking the daemon"))?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    let at = |percent| times.get(times.len() * percent / 100).copied().unwrap_or(0.0);
    Ok([at(50), at(99)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_differ_and_lie_within_the_region() {
        let mut all = pages(&mut Random::new(7));
        assert_ne!(all[..10], (0..10).collect::<Vec<_>>());
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len() as u64, COUNT);
        assert!(all.iter().all(|page| (page + 1) * PAGE <= REGION));
    }
}
