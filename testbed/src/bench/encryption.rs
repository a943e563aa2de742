//! Encrypted volumes: the rate of small requests beside that of a plain volume, and the processor time that encryption takes of large ones
//! beside that of OpenSSL alone.
//!
//! Invariants:
//! - Both volumes are files in the page cache, each served by a daemon of its own, in turns within each round.
//! - The time of encryption is what the daemon takes more for the same bytes than for the plain volume. It holds more than the cipher: sectors are
//!   encrypted in memory of the daemon's, where a plain read or write passes the kernel's pages.
//! - OpenSSL encrypts sectors of 4096 bytes, as the volume does.
//! - A missed target is a result, not a failure: the line says `short`.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::figure::{Bar, Better, Figure, median};
use super::fio::{self, Load, Until};
use super::server::Server;
use super::workdir::Workdir;
use super::{Error, Options, io_context, log, process};

/// At least this part of the plain volume's rate.
const RATE: f64 = 0.8;
/// At most this many times the processor time of OpenSSL.
const TIME: f64 = 1.15;
const BYTES: u64 = 512 << 20;
const GIB: f64 = 1_073_741_824.0;

/// Runs all measurements the options ask for; returns how many failed to run.
///
/// # Errors
/// Nothing can be measured at all, or `print` fails.
pub fn run(
    options: &Options,
    mut print: impl FnMut(&Figure) -> io::Result<()>,
) -> Result<usize, Error> {
    let daemon = super::daemon_path()?;
    let work = Workdir::without_disk(&super::place()?)?;
    process::describe_load();
    let rig = Rig { options, daemon: &daemon, work: &work };
    rig.fill()?;
    let mut failed = 0;
    for (name, pattern, block, depth) in [
        ("encrypted_randread_4k_qd64_iops", "randread", 4096, 64),
        ("encrypted_randwrite_4k_qd64_iops", "randwrite", 4096, 64),
        ("encrypted_read_1m_cpu_s_per_gib", "read", 1 << 20, 4),
        ("encrypted_write_1m_cpu_s_per_gib", "write", 1 << 20, 4),
    ] {
        if !options.wants(name) {
            continue;
        }
        let load = Load { pattern, block, depth, connections: 1 };
        let figure = if block == 4096 { rig.rate(name, load) } else { rig.time(name, load) };
        match figure {
            Ok(figure) => print(&figure).map_err(io_context("printing a figure"))?,
            Err(error) => {
                log(format_args!("{name}: {error}"));
                failed += 1;
            }
        }
    }
    Ok(failed)
}

/// What a run of fio took.
struct Taken {
    iops: f64,
    /// Processor time of the daemon, seconds per GiB.
    cpu: f64,
}

struct Rig<'a> {
    options: &'a Options,
    daemon: &'a Path,
    work: &'a Workdir,
}

impl Rig<'_> {
    fn serve(&self, encrypted: bool) -> Result<Server, Error> {
        let socket = self.work.path("disk.sock");
        let disk = self.work.path(if encrypted { "encrypted" } else { "plain" });
        let mut volume =
            format!("disk=file:{},size={BYTES},create=true,direct=off", disk.display());
        if encrypted {
            let key = self.work.path("key");
            fs::write(&key, [7; 32]).map_err(io_context("writing the key"))?;
            volume.push_str(&format!(",encryption=key-file:{}", key.display()));
        }
        let mut command = Command::new(self.daemon);
        command.args(["serve", "--log", "error", "--workers", "1", "--volume", &volume]);
        command.arg("--listen").arg(format!("unix:{}", socket.display()));
        Server::start("ebbd", command, socket, self.work.path("server.log"), ["disk"])
    }

    /// Writes all blocks of both volumes.
    fn fill(&self) -> Result<(), Error> {
        let load = Load { pattern: "write", block: 1 << 20, depth: 4, connections: 1 };
        for encrypted in [false, true] {
            self.measure(encrypted, load, Until::EachBlockOnce)?;
        }
        Ok(())
    }

    fn measure(&self, encrypted: bool, load: Load, until: Until) -> Result<Taken, Error> {
        let server = self.serve(encrypted)?;
        let report = self.work.path("disk.json");
        let mut command = Command::new("fio");
        command.args(fio::arguments(
            load,
            BYTES,
            until,
            fio::Target::Nbd(server.socket()),
            &report,
        ));
        let before = process::cpu_us(server.pid())?;
        let time = Duration::from_secs(u64::from(self.options.seconds) + 120);
        process::run(command, &self.work.path("client.log"), time)?;
        let cpu = (process::cpu_us(server.pid())? - before) / 1e6;
        let outcome = fio::take_report(&report)?;
        server.stop()?;
        let bytes = outcome.requests as f64 * f64::from(load.block);
        Ok(Taken { iops: outcome.iops, cpu: cpu / (bytes / GIB) })
    }

    /// The rate of an encrypted volume beside that of a plain one.
    fn rate(&self, name: &str, load: Load) -> Result<Figure, Error> {
        let mut rounds = [Vec::new(), Vec::new()];
        for round in 0..self.options.rounds {
            for (encrypted, rates) in [true, false].into_iter().zip(&mut rounds) {
                let taken = self.measure(encrypted, load, self.until())?;
                log(format_args!("{name} {round}: encrypted {encrypted}: {:.0} IOPS", taken.iops));
                rates.push(taken.iops);
            }
        }
        let bar = Bar::AtLeastRatio(RATE);
        Figure::from_rounds(name, &rounds, Better::Higher, bar).ok_or_else(no_rounds)
    }

    /// The processor time of encryption beside that of OpenSSL alone.
    fn time(&self, name: &str, load: Load) -> Result<Figure, Error> {
        let (mut ours, mut library) = (Vec::new(), Vec::new());
        for round in 0..self.options.rounds {
            let encrypted = self.measure(true, load, self.until())?.cpu;
            let plain = self.measure(false, load, self.until())?.cpu;
            let alone = self.openssl(load.pattern == "read")?;
            log(format_args!(
                "{name} {round}: encrypted {encrypted:.3}, plain {plain:.3}, OpenSSL {alone:.3} s per GiB"
            ));
            ours.push(encrypted - plain);
            library.push(alone);
        }
        Ok(Figure {
            name: name.to_owned(),
            ours: median(&ours).ok_or_else(no_rounds)?,
            peer: median(&library),
            bar: Bar::AtMostRatio(TIME),
        })
    }

    fn until(&self) -> Until {
        Until::Seconds(self.options.seconds)
    }

    /// The processor time that OpenSSL takes for a GiB, seconds.
    fn openssl(&self, decrypt: bool) -> Result<f64, Error> {
        let output = self.work.path("openssl.log");
        let mut command = Command::new("openssl");
        command.args(["speed", "-mr", "-seconds", "2", "-bytes", "4096", "-evp", "aes-256-xts"]);
        if decrypt {
            command.arg("-decrypt");
        }
        process::run(command, &output, Duration::from_secs(60))?;
        let text = fs::read_to_string(&output).map_err(io_context("reading OpenSSL's output"))?;
        // +F:NUMBER:CIPHER:BYTES_PER_SECOND, of the time that the process had a processor.
        let line = text.lines().find(|line| line.starts_with("+F:"));
        let rate: Option<f64> = line.and_then(|line| line.rsplit(':').next()?.trim().parse().ok());
        let wrong = || Error::Output { from: "openssl speed", what: text.clone() };
        rate.filter(|rate| *rate > 0.0).map(|rate| GIB / rate).ok_or_else(wrong)
    }
}

fn no_rounds() -> Error {
    Error::Usage { what: "no rounds".into() }
}
