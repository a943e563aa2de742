//! Measures elastic memory in a Linux guest: a daemon with many volumes that were used one after
//! the other, and a neighbour that needs most of the memory at once. The figures are what the
//! kernel had to swap, and how long the neighbour waited.
//!
//! Every policy for idle memory (`serve --idle-memory`) runs once in each boot, in another order
//! each time. `none` is the baseline: a daemon that keeps nothing when idle. `keep` is a static
//! pool. `drop` returns buffers for three values of `buffer_squeeze_duration_ms`. `lend` is the
//! default.
//!
//! Stores are `null:`, so that the pools are the only memory that differs; swap is a disk; the
//! guest's programs are in memory that is never swapped. The guest's processor is emulated: counts
//! are exact, times are only comparable with each other, and only as medians. It has one processor,
//! since two would wait for each other depending on the load of the host.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::figure::{Bar, Better, Figure, median};
use crate::guest::Guest;
use crate::harness::binary::{self, Build};
use crate::harness::nbd::{Client, Request, read_reply, wire};
use crate::harness::vhost::Frontend;
use crate::{Error, Result};

/// Bytes of a request: the usual limit of one from a guest's block layer.
pub const REQUEST_BYTES: u32 = 128 << 10;

/// The guest: RAM and swap in MiB.
const MEMORY_MIB: u32 = 512;
const SWAP_MIB: u32 = 1024;
/// The disk all volumes read, past the page cache.
const DISK: &str = "/dev/nullb0";
/// The disk to swap to.
const SWAP: &str = "/dev/vda";
/// Volumes; with the default `max_buffer_pages` each keeps 4 MiB.
const VOLUMES: u32 = 40;
/// What the neighbour allocates, MiB.
const NEIGHBOUR_MIB: u32 = 300;

/// A policy for idle memory: the name of its figures, and the options of `ebbd serve`.
#[derive(Debug, Clone, Copy)]
pub struct Behaviour {
    /// What its figures are called.
    pub name: &'static str,
    /// `--idle-memory`.
    pub idle: &'static str,
    /// `--buffer-squeeze-duration-ms`.
    pub squeeze_ms: u32,
}

/// All of them; the baseline first, `lend` last.
pub const BEHAVIOURS: [Behaviour; 6] = [
    Behaviour { name: "none", idle: "none", squeeze_ms: 10 },
    Behaviour { name: "keep", idle: "keep", squeeze_ms: 10 },
    Behaviour { name: "drop-1", idle: "drop", squeeze_ms: 1 },
    Behaviour { name: "drop-10", idle: "drop", squeeze_ms: 10 },
    Behaviour { name: "drop-100", idle: "drop", squeeze_ms: 100 },
    Behaviour { name: "lend", idle: "lend", squeeze_ms: 10 },
];

/// What came of one behaviour in one boot. Keys are those that `guest-pressure` prints.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The behaviour's name.
    pub behaviour: &'static str,
    /// The line of the guest.
    pub line: String,
}

impl Measured {
    /// The value of a key.
    ///
    /// # Errors
    /// The guest did not say it.
    pub fn value(&self, key: &str) -> Result<f64> {
        let pair = self.line.split_whitespace().find_map(|pair| pair.strip_prefix(key));
        let value = pair.and_then(|rest| rest.strip_prefix('=')).and_then(|text| text.parse().ok());
        value.ok_or_else(|| Error::unexpected(format!("no {key} in: {}", self.line)))
    }
}

/// One volume, as a client has it.
#[derive(Debug)]
pub enum Disk {
    /// A connection of NBD.
    Nbd(UnixStream),
    /// A frontend of vhost-user-blk.
    Vhost(Frontend),
}

impl Disk {
    /// Opens a volume: in a directory, by the socket `NAME.sock` of vhost-user-blk, otherwise by the socket of NBD.
    ///
    /// # Errors
    /// The daemon does not serve it there.
    pub fn open(socket: &Path, name: &str) -> Result<Disk> {
        Ok(match socket.is_dir() {
            true => Disk::Vhost(Frontend::connect(&socket.join(format!("{name}.sock")))?),
            false => Disk::Nbd(Client::open(socket, name)?.into_stream()),
        })
    }

    /// Has `depth` reads of [`REQUEST_BYTES`] in flight at once and waits for them: for a moment all of them are in memory
    /// at the daemon.
    ///
    /// # Errors
    /// The connection ended, or a request was refused.
    pub fn burst(&mut self, depth: u32) -> Result {
        match self {
            Disk::Nbd(stream) => burst(stream, depth),
            Disk::Vhost(frontend) => frontend.burst(depth, REQUEST_BYTES),
        }
    }
}

/// The daemon cannot send faster than we read.
fn burst(stream: &mut UnixStream, depth: u32) -> Result {
    let mut bytes = Vec::new();
    for n in 0..depth {
        let offset = u64::from(n) * u64::from(REQUEST_BYTES);
        let cookie = u64::from(n);
        let command = wire::CMD_READ;
        let request = Request { flags: 0, command, cookie, offset, length: REQUEST_BYTES };
        bytes.extend(request.bytes());
    }
    stream.write_all(&bytes).map_err(Error::io("send requests"))?;
    // The server has taken them all before the first reply leaves its socket.
    std::thread::sleep(Duration::from_millis(5));
    let mut data = vec![0; usize::try_from(REQUEST_BYTES).unwrap_or(0)];
    for _ in 0..depth {
        let (_, error) = read_reply(stream)?;
        if error != 0 {
            return Err(Error::unexpected(format!("a read was refused with error {error}")));
        }
        stream.read_exact(&mut data).map_err(Error::io("read a reply"))?;
    }
    Ok(())
}

/// Shell functions for a job in the guest: `serve OPTIONS` starts the daemon, its process id in
/// `$pid`, with `volumes` volumes called `v0` and so on; `end` stops it. With `$join` a control
/// group's `cgroup.procs`, it is in that group.
#[must_use]
pub fn shell(volumes: u32) -> String {
    let mut options = String::new();
    for n in 0..volumes {
        let _ = write!(options, " --volume v{n}=file:{DISK},read-only=true,direct=on");
    }
    format!(
        r#"
join=/dev/null
serve() {{
    : >/tmp/log # that of the daemon before says it is ready, too
    (
        echo 0 >$join
        exec ebbd serve --listen unix:/tmp/nbd.sock --control /tmp/control.sock {options} "$@"
    ) 2>/tmp/log &
    pid=$!
    i=0
    until grep -q ready /tmp/log; do
        [ $i -lt 300 ] || {{ cat /tmp/log; exit 1; }}
        i=$((i + 1))
        usleep 50000
    done
}}
end() {{
    kill $pid
    wait $pid
}}
"#
    )
}

/// A guest that has the daemon as delivered and the load, at `load`.
///
/// # Errors
/// The daemon cannot be built.
pub fn guest(script: &str, load: &Path, build: Build) -> Result<Guest> {
    Ok(Guest::new(script)
        .program_as(&binary::ebbd(build)?, "ebbd")
        .program_as(load, "guest-pressure")
        .processors(1)
        .memory_mib(MEMORY_MIB)
        .swap_mib(SWAP_MIB)
        .module("null_blk"))
}

fn script(order: &[Behaviour]) -> String {
    let mut script = shell(VOLUMES);
    let _ = write!(
        script,
        r#"
job() {{
    name=$1
    shift
    swapoff {SWAP}
    swapon {SWAP}
    echo 3 >/proc/sys/vm/drop_caches
    serve "$@"
    line=$(timeout 300 guest-pressure run /tmp/nbd.sock $pid {VOLUMES} {NEIGHBOUR_MIB}) ||
        {{ cat /tmp/log; top -b -n 1 | head -n 20; cat /proc/meminfo; exit 1; }}
    squeezes=$(ebbd stat --json --control /tmp/control.sock | tr ',' '\n' |
        sed -n 's/.*"squeezes": *\([0-9]*\).*/\1/p' | head -n 1)
    say "$name $line squeezes=$squeezes"
    end
}}
"#
    );
    for Behaviour { name, idle, squeeze_ms } in order {
        let _ = writeln!(
            script,
            "job {name} --idle-memory {idle} --buffer-squeeze-duration-ms {squeeze_ms}"
        );
    }
    script
}

/// One boot: every policy once, beginning with the `round`-th.
///
/// # Errors
/// The guest's script did not complete; the error shows its console.
pub fn round(round: usize, load: &Path) -> Result<Vec<Measured>> {
    let mut order = BEHAVIOURS.to_vec();
    order.rotate_left(round % BEHAVIOURS.len());
    let guest = guest(&script(&order), load, Build::Release)?.limit(Duration::from_secs(1800));
    let outcome = guest.ok()?;
    let measured = BEHAVIOURS.iter().map(|behaviour| {
        let line = outcome.answer(behaviour.name)?.to_owned();
        Ok(Measured { behaviour: behaviour.name, line })
    });
    measured.collect()
}

/// The values of a key for one behaviour, over all rounds.
///
/// # Errors
/// As [`Measured::value`].
pub fn values(all: &[Measured], behaviour: &str, key: &str) -> Result<Vec<f64>> {
    let of = all.iter().filter(|measured| measured.behaviour == behaviour);
    of.map(|measured| measured.value(key)).collect()
}

/// The figures: each policy compared with the baseline.
///
/// # Errors
/// As [`Measured::value`].
pub fn figures(all: &[Measured]) -> Result<Vec<Figure>> {
    let pages = |name: &str| -> Result<Vec<f64>> {
        let (out, back) = (values(all, name, "out")?, values(all, name, "in")?);
        Ok(out.iter().zip(&back).map(|(out, back)| out + back).collect())
    };
    let floor = median(&pages("none")?).unwrap_or(f64::INFINITY);
    let mut figures = Vec::new();
    for Behaviour { name, .. } in BEHAVIOURS {
        let ours = name == "lend";
        let bar = if ours { Bar::AtMost(1.05f64.mul_add(floor, 200.0)) } else { Bar::None };
        let mut add = |what: &str, rounds: [Vec<f64>; 2], bar: Bar| {
            let name = format!("pressure_{name}_{what}");
            figures.extend(Figure::from_rounds(name, &rounds, Better::Lower, bar));
        };
        add("swapped_pages", [pages(name)?, pages("none")?], bar);
        let slow = if ours { Bar::AtMostRatio(1.1) } else { Bar::None };
        for (what, key, bar) in [
            ("out_pages", "out", Bar::None),
            ("in_pages", "in", Bar::None),
            ("major_faults", "major", Bar::None),
            ("neighbour_us", "neighbour_us", slow),
            ("worst_mib_us", "worst_us", Bar::None),
            ("reuse_us", "reuse_us", Bar::None),
            ("idle_kib", "idle_kib", Bar::None),
        ] {
            add(what, [values(all, name, key)?, values(all, "none", key)?], bar);
        }
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(behaviour: &'static str, out: u32, us: u32) -> Measured {
        let line = format!(
            "out={out} in=0 major=1 neighbour_us={us} worst_us=1 reuse_us=1 idle_kib=1 out_first=9"
        );
        Measured { behaviour, line }
    }

    #[test]
    fn lend_is_compared_with_the_baseline() {
        let figure = |floor: u32, out: u32, us: u32, name: &str| {
            let all: Vec<_> = BEHAVIOURS
                .iter()
                .map(|b| match b.name {
                    "lend" => measured("lend", out, us),
                    "none" => measured("none", floor, 1000),
                    other => measured(other, 20_000, 5000),
                })
                .collect();
            figures(&all).unwrap().into_iter().find(|f| f.name == name).unwrap().meets_bar()
        };
        assert!(figure(100, 305, 1100, "pressure_lend_swapped_pages"));
        assert!(!figure(100, 306, 1100, "pressure_lend_swapped_pages"));
        assert!(figure(0, 200, 1100, "pressure_lend_neighbour_us"));
        assert!(!figure(0, 200, 1101, "pressure_lend_neighbour_us"));
        assert!(figure(0, 200, 1101, "pressure_keep_neighbour_us"), "the others have no bar");
    }

    #[test]
    fn a_missing_result_of_a_guest_is_an_error() {
        let measured = measured("lend", 7, 8);
        assert_eq!(measured.value("out").unwrap().to_string(), "7");
        assert!(measured.value("ou").is_err() && measured.value("absent").is_err());
    }
}
