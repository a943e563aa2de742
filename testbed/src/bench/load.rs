//! The workloads, run in rounds over all servers, and the figures they give.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::figure::{Bar, Better, Figure};
use super::fio::{self, Load, Outcome, Until};
use super::server::{Kind, Server, Setup};
use super::syscalls::Counter;
use super::workdir::{DISK_BYTES, Workdir};
use super::{Error, Options, log, process};

/// A load with its name and the bars its figures are held against through the page cache.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    name: &'static str,
    load: Load,
    rate: Rate,
    rate_bar: Bar,
    latency_bar: Bar,
    cpu_bar: Bar,
    syscalls_bar: Bar,
}

/// Which rate of fio's is the figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rate {
    Iops,
    Megabytes,
}

const CPU_BAR: Bar = Bar::AtMostRatio(0.6);
/// With one request in flight the worker polls for the next one.
const POLLED_CPU_BAR: Bar = Bar::AtMostRatio(0.8);

/// Every workload, in the order they run.
pub const WORKLOADS: &[Workload] = &[
    single("randread_4k_qd1", "randread", 0.5),
    single("randrw_4k_qd1", "randrw", 0.6),
    parallel("randread_4k_qd64x4", "randread"),
    parallel("randrw_4k_qd64x4", "randrw"),
    sequential("seqread_1m", "read"),
    sequential("seqwrite_1m", "write"),
];

/// 4 KiB, one request in flight on one connection.
const fn single(name: &'static str, pattern: &'static str, latency: f64) -> Workload {
    Workload {
        name,
        load: Load { pattern, block: 4096, depth: 1, connections: 1 },
        rate: Rate::Iops,
        rate_bar: Bar::None,
        latency_bar: Bar::AtMostRatio(latency),
        cpu_bar: POLLED_CPU_BAR,
        syscalls_bar: Bar::None,
    }
}

/// 4 KiB, 64 requests in flight on each of 4 connections.
const fn parallel(name: &'static str, pattern: &'static str) -> Workload {
    Workload {
        name,
        load: Load { pattern, block: 4096, depth: 64, connections: 4 },
        rate: Rate::Iops,
        rate_bar: Bar::AtLeastRatio(1.2),
        latency_bar: Bar::None,
        cpu_bar: CPU_BAR,
        syscalls_bar: Bar::AtMost(0.3),
    }
}

/// 1 MiB in sequence, 16 requests in flight on one connection.
const fn sequential(name: &'static str, pattern: &'static str) -> Workload {
    Workload {
        name,
        load: Load { pattern, block: 1 << 20, depth: 16, connections: 1 },
        rate: Rate::Megabytes,
        rate_bar: Bar::AtLeastRatio(1.0),
        latency_bar: Bar::None,
        cpu_bar: CPU_BAR,
        syscalls_bar: Bar::None,
    }
}

/// What a workload is measured with.
#[derive(Debug, Clone, Copy)]
pub struct Bench<'a> {
    /// Rounds, seconds and the choice of figures.
    pub options: &'a Options,
    /// The daemon under test.
    pub daemon: &'a Path,
    /// Where the file is.
    pub work: &'a Workdir,
    /// What counts system calls.
    pub counter: Counter,
    /// How the file is opened.
    pub group: Setup,
    /// The daemon under test first, then its peers.
    pub servers: &'a [Kind],
}

/// One timed run of one server.
#[derive(Debug, Clone, Copy)]
struct Sample {
    outcome: Outcome,
    cpu_us_per_request: f64,
    resident_mib: f64,
}

/// What is taken from the rounds for one figure.
struct Column {
    suffix: &'static str,
    better: Better,
    bar: Bar,
    value: fn(&Sample) -> f64,
}

impl Workload {
    /// The figures of the timed runs.
    fn columns(&self) -> Vec<Column> {
        let (suffix, value): (_, fn(&Sample) -> f64) = match self.rate {
            Rate::Iops => ("_iops", |sample| sample.outcome.iops),
            Rate::Megabytes => ("_MBps", |sample| sample.outcome.megabytes),
        };
        let mut columns =
            vec![Column { suffix, better: Better::Higher, bar: self.rate_bar, value }];
        let mut cost = |suffix, bar, value| {
            columns.push(Column { suffix, better: Better::Lower, bar, value });
        };
        if self.latency_bar != Bar::None {
            cost("_latency_us", self.latency_bar, |sample| sample.outcome.latency_us);
        }
        cost("_cpu_us_per_req", self.cpu_bar, |sample| sample.cpu_us_per_request);
        cost("_rss_after_MiB", Bar::None, |sample| sample.resident_mib);
        columns
    }
}

const SYSCALLS: &str = "_syscalls_per_req";

impl Bench<'_> {
    /// What all figure names of a workload begin with.
    #[must_use]
    pub fn prefix(&self, workload: &Workload) -> String {
        let group = if self.group == Setup::Direct { "direct_" } else { "" };
        format!("nbd_{group}{}", workload.name)
    }

    /// The names of all figures of a workload.
    #[must_use]
    pub fn figure_names(&self, workload: &Workload) -> Vec<String> {
        let prefix = self.prefix(workload);
        let columns = workload.columns();
        let suffixes = columns.iter().map(|column| column.suffix).chain([SYSCALLS]);
        suffixes.map(|suffix| format!("{prefix}{suffix}")).collect()
    }

    /// Bars hold through the page cache; with O_DIRECT the disk decides.
    fn bar(&self, bar: Bar) -> Bar {
        if self.group == Setup::Direct { Bar::None } else { bar }
    }

    /// Runs one workload on every server, round by round, then counts system calls.
    ///
    /// # Errors
    /// [`Error`] when a server or fio fails to run.
    pub fn measure(&self, workload: &Workload) -> Result<Vec<Figure>, Error> {
        let prefix = self.prefix(workload);
        let wants = |suffix: &str| self.options.wants(&format!("{prefix}{suffix}"));
        let mut figures = Vec::new();
        let columns = workload.columns();
        if columns.iter().any(|column| wants(column.suffix)) {
            let samples = self.rounds(&prefix, workload.load)?;
            for column in columns {
                let name = format!("{prefix}{}", column.suffix);
                let rounds: Vec<Vec<f64>> = samples
                    .iter()
                    .map(|samples| samples.iter().map(column.value).collect())
                    .collect();
                self.log_pairs(&name, &rounds);
                let bar = self.bar(column.bar);
                figures.extend(Figure::from_rounds(name, &rounds, column.better, bar));
            }
        }
        if wants(SYSCALLS) {
            let name = format!("{prefix}{SYSCALLS}");
            let counts = self
                .servers
                .iter()
                .map(|kind| Ok(vec![self.count_syscalls(*kind, workload.load)?]))
                .collect::<Result<Vec<_>, Error>>()?;
            self.log_pairs(&name, &counts);
            let bar = self.bar(workload.syscalls_bar);
            figures.extend(Figure::from_rounds(name, &counts, Better::Lower, bar));
        }
        Ok(figures)
    }

    /// Samples of each server. Every other round goes through the servers backwards, so that
    /// none always runs in another's wake.
    fn rounds(&self, prefix: &str, load: Load) -> Result<Vec<Vec<Sample>>, Error> {
        let mut samples = vec![Vec::new(); self.servers.len()];
        for round in 0..self.options.rounds {
            let mut order: Vec<usize> = (0..self.servers.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let kind = self.servers[index];
                let sample = self.timed(kind, load)?;
                log(format_args!(
                    "{prefix} round {} of {}, {}: {:.0} IOPS, {:.1} MB/s, {:.1} us, \
                     {:.2} us CPU per request, {:.1} MiB after",
                    round + 1,
                    self.options.rounds,
                    kind.name(),
                    sample.outcome.iops,
                    sample.outcome.megabytes,
                    sample.outcome.latency_us,
                    sample.cpu_us_per_request,
                    sample.resident_mib,
                ));
                samples[index].push(sample);
            }
        }
        Ok(samples)
    }

    /// One fio run whose timing counts.
    fn timed(&self, kind: Kind, load: Load) -> Result<Sample, Error> {
        let server = self.serve(kind)?;
        let before = process::cpu_us(server.pid())?;
        let seconds = self.options.seconds;
        process::run(
            self.client(load, &server, seconds),
            &self.work.path("client.log"),
            limit(seconds),
        )?;
        let used = process::cpu_us(server.pid())? - before;
        let outcome = self.outcome()?;
        // Time to notice that its clients have disconnected.
        std::thread::sleep(Duration::from_millis(200));
        let resident_mib = process::resident_kib(server.pid())? / 1024.0;
        server.stop()?;
        Ok(Sample { outcome, cpu_us_per_request: used / outcome.requests as f64, resident_mib })
    }

    /// System calls per request, from a run of its own: half as long, at least one second.
    fn count_syscalls(&self, kind: Kind, load: Load) -> Result<f64, Error> {
        let server = self.serve(kind)?;
        let seconds = (self.options.seconds / 2).max(1);
        let client = self.client(load, &server, seconds);
        let calls = self.counter.count(server.pid(), &client, self.work, limit(seconds))?;
        let outcome = self.outcome()?;
        server.stop()?;
        Ok(calls as f64 / outcome.requests as f64)
    }

    fn serve(&self, kind: Kind) -> Result<Server, Error> {
        match self.group {
            Setup::PageCache => self.work.warm()?,
            Setup::Direct => self.work.cool()?,
        }
        let socket = self.work.path("disk.sock");
        let command = kind.one_disk(self.daemon, &self.work.disk(), &socket, self.group);
        Server::start(kind.name(), command, socket, self.work.path("server.log"), ["disk"])
    }

    fn client(&self, load: Load, server: &Server, seconds: u32) -> Command {
        let mut fio = Command::new("fio");
        let (until, report) = (Until::Seconds(seconds), self.work.path("fio.json"));
        fio.args(fio::arguments(
            load,
            DISK_BYTES,
            until,
            fio::Target::Nbd(server.socket()),
            &report,
        ));
        fio
    }

    fn outcome(&self) -> Result<Outcome, Error> {
        fio::take_report(&self.work.path("fio.json"))
    }

    /// Logs each peer's rounds as ratios within the round: how far the pairs agree.
    fn log_pairs(&self, name: &str, rounds: &[Vec<f64>]) {
        let Some((ours, peers)) = rounds.split_first() else { return };
        for (kind, peer) in self.servers[1..].iter().zip(peers) {
            let ratios: Vec<f64> = ours.iter().zip(peer).map(|(ours, peer)| ours / peer).collect();
            log(format_args!("{name} to {}, per round: {ratios:.3?}", kind.name()));
        }
    }
}

/// Longest time for a run of `seconds`, with what fio needs to start and to write its report.
fn limit(seconds: u32) -> Duration {
    Duration::from_secs(u64::from(seconds) + 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_the_names_and_bars_promised() {
        let find = |name: &str| *WORKLOADS.iter().find(|w| w.name == name).unwrap();
        let bars = |name: &str| -> Vec<(&str, Bar)> {
            find(name).columns().iter().map(|column| (column.suffix, column.bar)).collect()
        };
        assert_eq!(
            bars("randread_4k_qd1"),
            [
                ("_iops", Bar::None),
                ("_latency_us", Bar::AtMostRatio(0.5)),
                ("_cpu_us_per_req", Bar::AtMostRatio(0.8)),
                ("_rss_after_MiB", Bar::None),
            ]
        );
        assert_eq!(bars("randrw_4k_qd1")[1], ("_latency_us", Bar::AtMostRatio(0.6)));
        assert_eq!(bars("randrw_4k_qd64x4")[0], ("_iops", Bar::AtLeastRatio(1.2)));
        assert_eq!(find("randrw_4k_qd64x4").syscalls_bar, Bar::AtMost(0.3));
        assert_eq!(bars("seqwrite_1m")[0], ("_MBps", Bar::AtLeastRatio(1.0)));
        assert_eq!(find("randread_4k_qd1").syscalls_bar, Bar::None);
    }
}
