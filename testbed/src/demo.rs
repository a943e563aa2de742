//! The demo: a cache that shrinks when a program needs its memory, next to a cache of fixed size.
//!
//! A small guest has one disk behind a slow store, a program that reads it without end, and swap.
//! The cache fills; then another program, the neighbour, takes most of the memory, uses it, and
//! ends. `guest-cache watch` runs this in the guest and prints a sample each [`SAMPLE`], which is
//! what the plots show. Both runs are in one boot, with empty swap and an empty page cache at the
//! start.
//!
//! Invariants:
//! - Plots and the summary show measured values only; a sample that is missing leaves a gap.
//! - [`Demo::verdict`] is an error if the runs do not show what the demo claims.
//!
//! Emulated, the guest's clock counts instructions, so that a busy host changes little; with KVM it
//! is the host's.

pub mod plot;
pub mod report;
pub mod svg;

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::bench::cache_guest::slow_store;
use crate::guest::{Guest, Machine, Outcome};
use crate::harness::process::until;
use crate::{Error, Result, check};

/// From one sample to the next.
pub const SAMPLE: Duration = Duration::from_millis(200);
/// Before the cache fills.
pub const CALM: Duration = Duration::from_millis(500);
/// From the full cache to the neighbour.
pub const BEFORE: Duration = Duration::from_millis(2000);
/// From the neighbour's end to the end.
pub const AFTER: Duration = Duration::from_millis(7000);
/// The program that reads the disk: pieces in flight at once, and its pause after each such burst.
pub const BURST: u32 = 16;
/// See [`BURST`].
pub const THINK: Duration = Duration::from_millis(40);
/// The neighbour's pause after each MiB it takes.
pub const STEP: Duration = Duration::from_millis(25);
/// Its pause after each of [`PASSES`].
pub const PASS: Duration = Duration::from_millis(250);
/// How often the neighbour goes over its memory once it has all.
pub const PASSES: u32 = 8;

/// The guest's memory and swap, and the part of the disk that is in use, MiB.
const MEMORY_MIB: u32 = 256;
const SWAP_MIB: u32 = 512;
const WORKING_SET_MIB: u32 = 92;
/// Memory that the neighbour leaves, of what is available before the daemon starts, MiB.
const LEAVES_MIB: u32 = 56;
/// `2^SHIFT` ns for an instruction, emulated.
const SHIFT: u32 = 1;
const SWAP: &str = "/dev/vda";
/// The longest boot, and the longest run of a guest on a busy host.
const BOOT: Duration = Duration::from_secs(8);
const LIMIT: Duration = Duration::from_secs(600);

/// Both caches: the name of the run in the guest, and the options of `ebbd serve`.
const CACHES: [(&str, &str); 2] =
    [("elastic", ""), ("fixed", "--idle-memory keep --cache-min 96M --cache-max 96M")];
/// A sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moment {
    /// Since the start of the run, ms.
    pub ms: u64,
    /// Size of the cache, KiB.
    pub cache_kib: u64,
    /// `MemFree`, KiB.
    pub free_kib: u64,
    /// Pages that the kernel has swapped out since the boot.
    pub out: u64,
    /// Bytes read that the cache had, since the daemon started.
    pub hit: u64,
    /// Bytes read from the store, since the daemon started.
    pub miss: u64,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Course {
    /// The samples in order.
    pub moments: Vec<Moment>,
    /// When the cache is full, ms.
    pub warm: u64,
    /// When the neighbour comes, ms.
    pub comes: u64,
    /// When it has all its memory, ms.
    pub taken: u64,
    /// When it has ended, ms.
    pub done: u64,
    /// How long it took to touch its memory, without its pauses, µs.
    pub worked_us: u64,
}

/// Both runs: with the elastic cache, and with the fixed one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Demo {
    /// Memory of the neighbour, MiB.
    pub takes_mib: u64,
    /// In the order of the plots.
    pub courses: [Course; 2],
}

fn script() -> String {
    let mut script = format!("say up\n{}", slow_store());
    let _ = write!(
        script,
        r#"
available=$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)
takes=$((available / 1024 - {LEAVES_MIB}))
say takes $takes
run() {{
    name=$1
    shift
    swapoff {SWAP}
    swapon {SWAP}
    echo 3 >/proc/sys/vm/drop_caches
    : >/tmp/log
    ebbd serve --listen unix:/tmp/nbd.sock --control /tmp/control.sock "$@" \
        --volume v=file:$disk,direct=on,cache=writethrough 2>/tmp/log &
    pid=$!
    i=0
    until grep -q ready /tmp/log; do
        [ $i -lt 300 ] || {{ cat /tmp/log; exit 1; }}
        i=$((i + 1))
        usleep 50000
    done
    guest-cache watch $name {WORKING_SET_MIB} $takes >/dev/ttyS1 ||
        {{ cat /tmp/log /proc/meminfo; dmesg | tail -n 20; exit 1; }}
    kill $pid
    wait $pid || :
}}
"#
    );
    for (name, options) in CACHES {
        let _ = writeln!(script, "run {name} {options}");
    }
    script
}

fn guest(daemon: &Path, load: &Path, kvm: bool) -> Guest {
    let guest = Guest::new(script())
        .program_as(daemon, "ebbd")
        .program_as(load, "guest-cache")
        .memory_mib(MEMORY_MIB)
        .swap_mib(SWAP_MIB)
        .module("null_blk")
        .limit(LIMIT);
    if kvm { guest.kvm() } else { guest.counted_time(SHIFT) }
}

/// Whether this user may use KVM. QEMU may still be unable to.
fn may_use_kvm() -> bool {
    std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// Runs both, with this daemon and this `guest-cache`. `progress` gets a line for each step.
///
/// # Errors
/// Something is missing on this machine, or the guest's script failed: the error shows its console.
pub fn run(daemon: &Path, load: &Path, mut progress: impl FnMut(&str)) -> Result<Demo> {
    if may_use_kvm() {
        progress("a guest boots (KVM)");
        let mut machine = guest(daemon, load, true).boot()?;
        if is_up(&mut machine)? {
            return follow(machine, &mut progress);
        }
        progress("KVM does not run it: QEMU emulates the processor instead");
    } else {
        progress("a guest boots (no KVM: QEMU emulates the processor)");
    }
    follow(guest(daemon, load, false).boot()?, &mut progress)
}

/// Waits for the script to begin. False if QEMU ends before, or it takes too long.
fn is_up(machine: &mut Machine) -> Result<bool> {
    let deadline = Instant::now() + BOOT;
    until("the guest boots", 2 * BOOT, || {
        let up = machine.answers().iter().any(|(key, _)| key == "up");
        let given_up = !machine.is_running()? || Instant::now() > deadline;
        Ok((up || given_up).then_some(up))
    })
}

/// Reports the steps in the guest until it ends, and collects its samples.
fn follow(mut machine: Machine, progress: &mut impl FnMut(&str)) -> Result<Demo> {
    let mut told = 0;
    until("the guest ends", LIMIT, || {
        let running = machine.is_running()?;
        let answers = machine.answers();
        for (key, value) in &answers[told.min(answers.len())..] {
            let Some((name, what)) = key.split_once('-') else { continue };
            let text = match what {
                "warm" => "the cache is full",
                "comes" => "the neighbour takes memory",
                "taken" => "the neighbour uses its memory",
                "done" => "the neighbour has ended",
                _ => continue,
            };
            let at = value.parse().map_or(0.0, |ms: f64| ms / 1000.0);
            progress(&format!("{name}: {text} ({at:.1} s)"));
        }
        told = answers.len();
        Ok((!running).then_some(()))
    })?;
    let outcome = machine.wait()?;
    check(outcome.status == 0, || {
        outcome
            .unexpected(&format!("the script to succeed, not status {}", outcome.status))
            .to_string()
    })?;
    let [elastic, fixed] = CACHES.map(|(name, _)| course(&outcome, name));
    Ok(Demo { takes_mib: told_number(&outcome, "takes")?, courses: [elastic?, fixed?] })
}

/// A number that the guest has told.
fn told_number(outcome: &Outcome, key: &str) -> Result<u64> {
    let text = outcome.answer(key)?;
    text.trim().parse().map_err(|_| Error::unexpected(format!("no number for {key}: {text}")))
}

fn course(outcome: &Outcome, name: &str) -> Result<Course> {
    let mark = |what: &str| told_number(outcome, &format!("{name}-{what}"));
    let key = format!("{name}-sample");
    Ok(Course {
        moments: outcome.all(&key).map(moment).collect::<Result<_>>()?,
        warm: mark("warm")?,
        comes: mark("comes")?,
        taken: mark("taken")?,
        done: mark("done")?,
        worked_us: mark("worked")?,
    })
}

/// Parses a line of `guest-cache watch`.
fn moment(line: &str) -> Result<Moment> {
    let value = |key: &str| -> Result<u64> {
        let pairs = line.split_whitespace().filter_map(|pair| pair.split_once('='));
        let mut values = pairs.filter(|(k, _)| *k == key).filter_map(|(_, v)| v.parse().ok());
        values.next().ok_or_else(|| Error::unexpected(format!("no {key} in: {line}")))
    };
    Ok(Moment {
        ms: value("ms")?,
        cache_kib: value("cache_kib")?,
        free_kib: value("free_kib")?,
        out: value("out")?,
        hit: value("hit")?,
        miss: value("miss")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_needs_all_its_values() {
        let line = "ms=200 cache_kib=4 free_kib=5 out=6 hit=7 miss=8";
        let all = Moment { ms: 200, cache_kib: 4, free_kib: 5, out: 6, hit: 7, miss: 8 };
        assert_eq!(moment(line).unwrap(), all);
        for pair in line.split(' ') {
            let short = line.replace(pair, "");
            assert!(moment(&short).unwrap_err().to_string().contains("in: "), "{short}");
        }
    }

    #[test]
    fn both_caches_have_the_same_neighbour() {
        let script = script();
        assert_eq!(script.matches("takes=").count(), 1);
        assert!(script.ends_with(
            "run elastic \nrun fixed --idle-memory keep --cache-min 96M --cache-max 96M\n"
        ));
    }
}
