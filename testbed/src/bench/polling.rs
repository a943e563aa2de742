//! Busy polling: what it costs an idle daemon and other programs, and one busy client beside a thousand quiet ones.

use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::figure::{Bar, Better, Figure};
use super::fio::{self, Load, Until};
use super::server::{Kind, Server, Setup};
use super::workdir::{DISK_BYTES, Workdir};
use super::{Error, Options, handshake, io_context, log, process};

const IDLE_CPU: &str = "nbd_poll_idle_cpu_us_per_s";
const IDLE_WAKEUPS: &str = "nbd_poll_idle_wakeups_per_s";
const QUIET_LATENCY: &str = "nbd_poll_1000_quiet_latency_us";
const QUIET_CPU: &str = "nbd_poll_1000_quiet_cpu_us_per_req";
const BUILD: &str = "nbd_poll_build_blocks_per_s";

/// Figures, in the order they are printed.
pub const FIGURES: [&str; 5] = [IDLE_CPU, IDLE_WAKEUPS, QUIET_LATENCY, QUIET_CPU, BUILD];

/// Quiet connections.
const QUIET: usize = 1000;
/// Clients beside the CPU-bound job.
const CLIENTS: u32 = 2;

/// Random reads of 4 KiB, one in flight on each connection.
const fn reads(connections: u32) -> Load {
    Load { pattern: "randread", block: 4096, depth: 1, connections }
}

/// One server: a peer, or ebbd with the default `poll_us` or with 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    Polling,
    Sleeping,
    Peer(Kind),
}

struct Rig<'a> {
    options: &'a Options,
    daemon: &'a Path,
    work: &'a Workdir,
}

/// All figures of this module that the options ask for.
///
/// # Errors
/// [`Error`] when a server or fio fails to run.
pub fn measure(options: &Options, daemon: &Path, work: &Workdir) -> Result<Vec<Figure>, Error> {
    let rig = Rig { options, daemon, work };
    let wants = |names: &[&str]| names.iter().any(|name| options.wants(name));
    let mut figures = Vec::new();
    if wants(&[IDLE_CPU, IDLE_WAKEUPS]) {
        figures.extend(rig.idle()?);
    }
    if wants(&[QUIET_LATENCY, QUIET_CPU]) {
        figures.extend(rig.beside_quiet_clients()?);
    }
    if wants(&[BUILD]) {
        figures.extend(rig.beside_a_build()?);
    }
    Ok(figures)
}

impl Rig<'_> {
    fn serve(&self, subject: Subject) -> Result<Server, Error> {
        self.work.warm()?;
        let (socket, control) = (self.work.path("disk.sock"), self.work.path("control.sock"));
        let kind = match subject {
            Subject::Peer(kind) => kind,
            Subject::Polling | Subject::Sleeping => Kind::Ebbd,
        };
        let mut command = kind.one_disk(self.daemon, &self.work.disk(), &socket, Setup::PageCache);
        if kind == Kind::Ebbd {
            command.arg("--max-clients").arg((2 * QUIET).to_string());
            command.arg("--control").arg(&control);
        }
        let log = self.work.path("server.log");
        let server = Server::start(kind.name(), command, socket, log, ["disk"])?;
        if subject == Subject::Sleeping {
            let mut set = Command::new(self.daemon);
            set.args(["set", "poll_us", "0", "--control"]).arg(&control);
            process::run(set, &self.work.path("client.log"), Duration::from_secs(60))?;
        }
        Ok(server)
    }

    fn fio(&self, load: Load, server: &Server) -> Command {
        let mut fio = Command::new("fio");
        let (until, report) = (Until::Seconds(self.options.seconds), self.work.path("fio.json"));
        fio.args(fio::arguments(
            load,
            DISK_BYTES,
            until,
            fio::Target::Nbd(server.socket()),
            &report,
        ));
        fio
    }

    fn limit(&self) -> Duration {
        Duration::from_secs(u64::from(self.options.seconds) + 60)
    }

    /// CPU time and wakeups of a daemon whose 1,000 clients are quiet after one request each.
    fn idle(&self) -> Result<Vec<Figure>, Error> {
        let (mut cpu, mut wakeups) = (vec![Vec::new(); 2], vec![Vec::new(); 2]);
        for _ in 0..self.options.rounds {
            for (index, subject) in [Subject::Polling, Subject::Sleeping].into_iter().enumerate() {
                let server = self.serve(subject)?;
                let clients = quiet_clients(&server)?;
                std::thread::sleep(Duration::from_secs(2));
                let before = (process::cpu_us(server.pid())?, process::sleeps(server.pid())?);
                std::thread::sleep(Duration::from_secs(self.options.seconds.into()));
                let seconds = f64::from(self.options.seconds);
                cpu[index].push((process::cpu_us(server.pid())? - before.0) / seconds);
                let woken = process::wakeups(&before.1, &process::sleeps(server.pid())?);
                wakeups[index].push(woken as f64 / seconds);
                drop(clients);
                server.stop()?;
            }
        }
        log(format_args!("idle: CPU {cpu:.1?} us/s, wakeups {wakeups:.1?} per second"));
        // A clock tick of CPU time, and a wakeup, of tolerance.
        let figure = |name, rounds: &[Vec<f64>], slack: f64| {
            let peer = super::figure::median(&rounds[1]).unwrap_or_default();
            Figure::from_rounds(name, rounds, Better::Lower, Bar::AtMost(peer + slack))
        };
        let tick = 1e6 / rustix::param::clock_ticks_per_second() as f64;
        let tick = tick / f64::from(self.options.seconds);
        Ok([figure(IDLE_CPU, &cpu, tick), figure(IDLE_WAKEUPS, &wakeups, 1.0)]
            .into_iter()
            .flatten()
            .collect())
    }

    /// One busy client beside 1,000 quiet ones. The peers serve the busy one only, which is easier.
    fn beside_quiet_clients(&self) -> Result<Vec<Figure>, Error> {
        let subjects = [Subject::Polling, Subject::Peer(Kind::Nbdkit), Subject::Peer(Kind::Qemu)];
        let (mut latency, mut cpu) = (vec![Vec::new(); 3], vec![Vec::new(); 3]);
        for _ in 0..self.options.rounds {
            for (index, subject) in subjects.into_iter().enumerate() {
                let server = self.serve(subject)?;
                let clients = match subject {
                    Subject::Polling => quiet_clients(&server)?,
                    _ => Vec::new(),
                };
                let before = process::cpu_us(server.pid())?;
                let output = self.work.path("client.log");
                process::run(self.fio(reads(1), &server), &output, self.limit())?;
                let used = process::cpu_us(server.pid())? - before;
                let outcome = fio::take_report(&self.work.path("fio.json"))?;
                latency[index].push(outcome.latency_us);
                cpu[index].push(used / outcome.requests as f64);
                drop(clients);
                server.stop()?;
            }
        }
        log(format_args!("beside 1,000 quiet clients: {latency:.1?} us, CPU {cpu:.1?} us"));
        let (lower, bar) = (Better::Lower, Bar::AtMostRatio);
        Ok([
            Figure::from_rounds(QUIET_LATENCY, &latency, lower, bar(0.5)),
            Figure::from_rounds(QUIET_CPU, &cpu, lower, bar(0.8)),
        ]
        .into_iter()
        .flatten()
        .collect())
    }

    /// How fast a CPU-bound job runs beside two busy clients, with and without polling.
    fn beside_a_build(&self) -> Result<Vec<Figure>, Error> {
        let mut blocks = vec![Vec::new(); 2];
        for round in 0..self.options.rounds {
            let mut order = [(0, Subject::Polling), (1, Subject::Sleeping)];
            if round % 2 == 1 {
                order.reverse();
            }
            for (index, subject) in order {
                let server = self.serve(subject)?;
                let output = self.work.path("client.log");
                let ended = AtomicBool::new(false);
                let (ran, rate) = std::thread::scope(|scope| {
                    let job = scope.spawn(|| job(&ended));
                    let fio = self.fio(reads(CLIENTS), &server);
                    let ran = process::run(fio, &output, self.limit());
                    ended.store(true, Ordering::Relaxed);
                    (ran, job.join().unwrap_or_default())
                });
                ran?;
                let outcome = fio::take_report(&self.work.path("fio.json"))?;
                log(format_args!(
                    "{BUILD}, {subject:?}: {rate:.0} blocks/s beside {:.0} IOPS",
                    outcome.iops
                ));
                blocks[index].push(rate);
                server.stop()?;
            }
        }
        let figure = Figure::from_rounds(BUILD, &blocks, Better::Higher, Bar::AtLeastRatio(0.97));
        Ok(figure.into_iter().collect())
    }
}

/// Clients that have connected and send nothing.
fn quiet_clients(server: &Server) -> Result<Vec<std::os::unix::net::UnixStream>, Error> {
    (0..QUIET)
        .map(|_| handshake::open(server.socket(), "disk"))
        .collect::<Result<_, _>>()
        .map_err(io_context("connecting quiet clients"))
}

/// A job that only computes, as a compiler does: blocks of 64 KiB per second.
fn job(ended: &AtomicBool) -> f64 {
    let (mut block, began, mut done) = (vec![1u64; 8192], Instant::now(), 0u64);
    while !ended.load(Ordering::Relaxed) {
        for _ in 0..16 {
            block.iter_mut().fold(done, |sum, word| {
                *word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31) ^ sum;
                *word
            });
        }
        black_box(&block);
        done += 1;
    }
    done as f64 / began.elapsed().as_secs_f64()
}
