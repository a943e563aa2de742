//! Measures the cache in a Linux guest that is short of memory: an I/O-bound job that reads through
//! the daemon, next to a memory-bound one, a real build of a C tree with `make -j 1` to `30`; and a
//! neighbour that needs half the memory while the cache is full.
//!
//! Each is run with three caches: `none`; `static`, which keeps what it has once allocated
//! (`idle_memory` is `keep`), as a conventional buffer cache does; `elastic`, the default.
//!
//! The store is a device that completes each request after [`DELAY_MS`] by a timer and uses no
//! memory (`null_blk`, direct I/O), so that the guest's memory holds only what is measured. Swap is
//! a disk. The job reads pieces of its working set in random order and computes after each, as real
//! programs do.
//!
//! The guest's clock counts instructions ([`Guest::counted_time`]): computing takes the same time
//! on a busy host. Only waiting for disks (swap, files) takes the host's time, of which a busy host
//! takes more.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::figure::{Bar, Better, Figure, median};
use crate::guest::{Guest, Outcome};
use crate::harness::binary::{self, Build};
use crate::harness::pattern::Random;
use crate::{Error, Result, Tool};

/// Bytes of a read: a frame of the cache.
pub const PIECE_BYTES: u32 = 64 << 10;
/// How long the store takes for a request, ms.
pub const DELAY_MS: u64 = 10;
/// How long the I/O job thinks after each read, ms.
pub const THINK_MS: u64 = 10;

/// The guest: RAM and swap, MiB; `2^SHIFT` ns for an instruction.
const MEMORY_MIB: u32 = 256;
const SWAP_MIB: u32 = 1024;
const SHIFT: u32 = 1;
/// The disk to swap to: the first that is added.
const SWAP: &str = "/dev/vda";
/// The build's disk, and what the I/O job works on, MiB.
const TREE_MIB: u32 = 192;
const WORKING_SET_MIB: u32 = 64;
/// What the job of the neighbour test works on, and what the neighbour allocates, MiB.
const FULL_MIB: u32 = 96;
const NEIGHBOUR_MIB: u32 = MEMORY_MIB / 2;
/// The C tree: files, functions of each, numbers in the table of each.
const FILES: u32 = 36;
const FUNCTIONS: u32 = 10;
const NUMBERS: u32 = 4000;

/// The values of `make -j`, in the order they run.
pub const JOBS: [u32; 4] = [30, 20, 1, 10];

/// The caches; the baseline first, `elastic` last.
pub const CACHES: [&str; 3] = ["none", "static", "elastic"];

/// What a run is called: `j20`, or `neighbour`.
#[must_use]
pub fn test_name(jobs: Option<u32>) -> String {
    jobs.map_or_else(|| "neighbour".to_owned(), |jobs| format!("j{jobs}"))
}

/// What came of one cache in one test. Keys are those that `guest-cache` prints.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Of [`CACHES`].
    pub cache: &'static str,
    /// Of [`test_name`].
    pub test: String,
    /// The line of the guest.
    pub line: String,
}

impl Measured {
    /// The value of a key.
    ///
    /// # Errors
    /// The guest did not say it.
    pub fn value(&self, key: &str) -> Result<f64> {
        let pair = |pair: &str| pair.split_once('=').filter(|(k, _)| *k == key)?.1.parse().ok();
        let value = self.line.split_whitespace().find_map(pair);
        value.ok_or_else(|| Error::unexpected(format!("no {key} in: {}", self.line)))
    }
}

/// One C file: a table of numbers, which is memory to a compiler, and functions, which are work.
fn c_file(number: u32) -> String {
    let mut random = Random::new(u64::from(number));
    let mut text = format!(
        "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n\
                            static const unsigned table[{NUMBERS}] = {{\n"
    );
    for n in 0..NUMBERS {
        // Writing to a String does not fail, here and below.
        let _ = write!(text, "{},{}", random.below(1 << 24), if n % 16 == 15 { "\n" } else { "" });
    }
    text.push_str("};\n");
    for n in 0..FUNCTIONS {
        let (factor, bit) = (random.below(99) + 3, random.below(20));
        let _ = write!(
            text,
            "static int f{n}(int a)\n{{\n    int b = a * {factor};\n    for (int i = 0; i < a; i++) {{\n\
             \x20       b += (int)(table[(unsigned)(i + b) % {NUMBERS}u] >> 8);\n\
             \x20       if (b & (1 << {bit}))\n            b ^= i;\n    }}\n    return b;\n}}\n"
        );
    }
    let _ = write!(text, "int file{number}(int a)\n{{\n    int b = 0;\n");
    for n in 0..FUNCTIONS {
        let _ = writeln!(text, "    b += f{n}(a);");
    }
    text.push_str("    return b;\n}\n");
    text
}

fn write_file(path: &Path, text: &str) -> Result {
    fs::write(path, text).map_err(Error::io(path.display().to_string()))
}

/// The C tree in `dir`: the files, a main program that calls each, a Makefile.
fn c_tree(dir: &Path) -> Result {
    let (mut declared, mut called, mut objects) = (String::new(), String::new(), String::new());
    for n in 0..FILES {
        write_file(&dir.join(format!("file{n}.c")), &c_file(n))?;
        let _ = writeln!(declared, "int file{n}(int);");
        let _ = writeln!(called, "    b += file{n}(argc);");
        let _ = write!(objects, " file{n}.o");
    }
    let main = format!(
        "#include <stdio.h>\n{declared}int main(int argc, char **argv)\n{{\n    int b = 0;\n    \
         (void)argv;\n{called}    printf(\"%d\\n\", b);\n    return 0;\n}}\n"
    );
    write_file(&dir.join("main.c"), &main)?;
    write_file(
        &dir.join("Makefile"),
        &format!(
            "OBJS = main.o{objects}\nprogram: $(OBJS)\n\tgcc -o program $(OBJS)\n\
             %.o: %.c\n\tgcc -O0 -c -o $@ $<\nclean:\n\trm -f program $(OBJS)\n"
        ),
    )
}

/// A root directory at `root` with this machine's compiler, `make`, a shell, and the tree at `/src`.
///
/// # Errors
/// One of them is not installed.
pub fn build_root(root: &Path) -> Result {
    for sub in ["src", "tmp", "dev", "bin", "usr/bin"] {
        let dir = root.join(sub);
        fs::create_dir_all(&dir).map_err(Error::io(dir.display().to_string()))?;
    }
    c_tree(&root.join("src"))?;
    let ask = |words: &[&str]| -> Result<String> {
        Ok(Tool::new("gcc").args(words).ok()?.stdout.trim().to_owned())
    };
    let mut paths: Vec<PathBuf> = Vec::new();
    for program in ["make", "gcc", "as", "ld"] {
        let found = Tool::new("sh").args(["-c", &format!("command -v {program}")]).ok()?;
        paths.push(found.stdout.trim().into());
    }
    for program in ["cc1", "collect2"] {
        paths.push(ask(&[&format!("-print-prog-name={program}")])?.into());
    }
    let mut libraries = String::new();
    for path in &paths {
        libraries.push_str(&Tool::new("ldd").arg(path).run()?.stdout);
    }
    let words = libraries.split_whitespace().filter(|word| word.starts_with('/'));
    paths.extend(words.map(PathBuf::from));
    // What the linker wants for a C program.
    for file in [
        "crt1.o",
        "Scrt1.o",
        "crti.o",
        "crtn.o",
        "crtbegin.o",
        "crtbeginS.o",
        "crtend.o",
        "crtendS.o",
        "libgcc.a",
        "libgcc_s.so",
        "libgcc_s.so.1",
        "libc.so",
        "libc.so.6",
        "libc_nonshared.a",
        "liblto_plugin.so",
    ] {
        paths.push(ask(&[&format!("-print-file-name={file}")])?.into());
    }
    let main = root.join("src/file0.c");
    let headers = Tool::new("gcc").arg("-M").arg(&main).ok()?.stdout;
    let headers = headers.split_whitespace().filter(|word| word.ends_with(".h"));
    paths.extend(headers.map(PathBuf::from));
    for path in &paths {
        install(path, root)?;
    }
    let busybox = Tool::new("sh").args(["-c", "command -v busybox"]).ok()?;
    for name in ["sh", "rm"] {
        copy(Path::new(busybox.stdout.trim()), &root.join("bin").join(name))?;
    }
    Ok(())
}

/// Copies a file of this machine to the same place under `root`. Names with `..` in them, as the
/// compiler gives them, are made plain first.
fn install(path: &Path, root: &Path) -> Result {
    let mut plain = PathBuf::new();
    for part in path.components().skip(1) {
        match part {
            std::path::Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    if !path.is_absolute() {
        let what = format!("{} is missing: run testbed/install", path.display());
        return Err(Error::unexpected(what));
    }
    copy(path, &root.join(plain))
}

fn copy(from: &Path, to: &Path) -> Result {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(Error::io(parent.display().to_string()))?;
    }
    fs::copy(from, to).map_err(Error::io(format!("copy {}", from.display())))?;
    Ok(())
}

/// Makes the store in a guest with the module `null_blk`: a disk at `$disk` that completes each
/// request after [`DELAY_MS`].
#[must_use]
pub fn slow_store() -> String {
    let delay = DELAY_MS * 1_000_000;
    format!(
        r#"
mount -t configfs none /sys/kernel/config
d=/sys/kernel/config/nullb/slow
mkdir $d
echo 1024 >$d/size
echo 2 >$d/queue_mode
echo 2 >$d/irqmode
echo {delay} >$d/completion_nsec
echo 1 >$d/power
disk=/dev/slow
[ -b $disk ] || disk=/dev/nullb1
"#
    )
}

/// The script: the store, then each test with each of `caches`.
fn script(tests: &[Option<u32>], caches: &[&str]) -> String {
    let mut script = slow_store();
    let _ = write!(
        script,
        r#"
mkdir -p /build/dev
mount -t devtmpfs dev /build/dev
# How the figures of each run begin: clean files, empty swap, nothing in the page cache.
begin() {{
    rm -f /build/src/*.o /build/src/program
    sync
    swapoff {SWAP}
    swapon {SWAP}
    echo 3 >/proc/sys/vm/drop_caches
}}
# serve CACHE MIB
serve() {{
    case $1 in
    none) mode=none options= ;;
    static) mode=writethrough options="--idle-memory keep --cache-max $2M" ;;
    elastic) mode=writethrough options= ;;
    esac
    : >/tmp/log
    ebbd serve --listen unix:/tmp/nbd.sock --control /tmp/control.sock $options \
        --volume v=file:$disk,direct=on,cache=$mode 2>/tmp/log &
    pid=$!
    i=0
    until grep -q ready /tmp/log; do
        [ $i -lt 300 ] || {{ cat /tmp/log; exit 1; }}
        i=$((i + 1))
        usleep 50000
    done
}}
job() {{ # NAME CACHE MIB TEST ARGUMENTS
    name=$1 cache=$2 mib=$3 test=$4
    shift 4
    begin
    serve $cache $mib
    line=$(guest-cache $test $pid $mib "$@") || {{ cat /tmp/log; cat /proc/meminfo; dmesg | tail -n 20; exit 1; }}
    say "$name-$cache $line"
    kill $pid
    wait $pid || :
}}
"#
    );
    for test in tests {
        for cache in caches {
            let name = test_name(*test);
            let _ = match test {
                Some(jobs) => writeln!(
                    script,
                    "job {name} {cache} {WORKING_SET_MIB} build env TMPDIR=/tmp \
                     PATH=/usr/bin:/bin chroot /build make -s -C /src -j{jobs} program"
                ),
                None => writeln!(script, "job {name} {cache} {FULL_MIB} neighbour {NEIGHBOUR_MIB}"),
            };
        }
    }
    script
}

/// The guest for these tests.
///
/// # Errors
/// The daemon cannot be built, or `root` not be made.
pub fn guest(script: &str, load: &Path, root: &Path) -> Result<Guest> {
    Ok(Guest::new(script)
        .program_as(&binary::ebbd(Build::Release)?, "ebbd")
        .program_as(load, "guest-cache")
        .counted_time(SHIFT)
        .memory_mib(MEMORY_MIB)
        .swap_mib(SWAP_MIB)
        .tree(root, "/build", TREE_MIB)
        .module("null_blk"))
}

/// One boot: each of `tests` with every cache, in another order each round.
///
/// # Errors
/// The guest's script did not complete; the error shows its console.
pub fn round(
    round: usize,
    tests: &[Option<u32>],
    load: &Path,
    root: &Path,
) -> Result<Vec<Measured>> {
    let mut order = CACHES.to_vec();
    order.rotate_left(round % CACHES.len());
    let guest = guest(&script(tests, &order), load, root)?;
    let outcome = guest.limit(Duration::from_secs(7200)).ok()?;
    measured(tests, &outcome)
}

fn measured(tests: &[Option<u32>], outcome: &Outcome) -> Result<Vec<Measured>> {
    let mut all = Vec::new();
    for test in tests.iter().map(|test| test_name(*test)) {
        for cache in CACHES {
            let line = outcome.answer(&format!("{test}-{cache}"))?.to_owned();
            all.push(Measured { cache, test: test.clone(), line });
        }
    }
    Ok(all)
}

fn values(all: &[Measured], test: &str, cache: &str, key: &str) -> Result<Vec<f64>> {
    let of = all.iter().filter(|measured| measured.test == test && measured.cache == cache);
    of.map(|measured| measured.value(key)).collect()
}

fn sums(all: &[Measured], test: &str, cache: &str, keys: [&str; 2]) -> Result<Vec<f64>> {
    let [one, other] = keys.map(|key| values(all, test, cache, key));
    Ok(one?.iter().zip(&other?).map(|(one, other)| one + other).collect())
}

/// The figures: each cache beside none.
///
/// # Errors
/// As [`Measured::value`].
pub fn figures(all: &[Measured]) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let mut tests: Vec<&str> = Vec::new();
    for measured in all {
        if !tests.contains(&measured.test.as_str()) {
            tests.push(&measured.test);
        }
    }
    for test in tests {
        for cache in &CACHES[1..] {
            let mut add = |what: &str, ours: Vec<f64>, none: Vec<f64>, better, bar| {
                let bar = if *cache == "elastic" { bar } else { Bar::None };
                let name = format!("guest_cache_{test}_{cache}_{what}");
                figures.extend(Figure::from_rounds(name, &[ours, none], better, bar));
            };
            let pair = |key: &str| -> Result<[Vec<f64>; 2]> {
                Ok([values(all, test, cache, key)?, values(all, test, "none", key)?])
            };
            let swaps = |cache: &str| sums(all, test, cache, ["in", "out"]);
            let most = |floor: &[f64]| {
                Bar::AtMost(1.05f64.mul_add(median(floor).unwrap_or(f64::INFINITY), 200.0))
            };
            if test == "neighbour" {
                let [ours, none] = pair("out")?;
                let bar = most(&none);
                add("swapped_out_pages", ours, none, Better::Lower, bar);
                let [ours, none] = pair("touch_ms")?;
                add("allocation_ms", ours, none, Better::Lower, Bar::AtMostRatio(1.15));
                let [ours, none] = pair("touch_ran_ms")?;
                add("allocation_processor_ms", ours, none, Better::Lower, Bar::None);
                let back = values(all, test, cache, "back_percent")?;
                let full = values(all, test, cache, "full_percent")?;
                add("hits_back_percent", back, full, Better::Higher, Bar::AtLeastRatio(0.9));
                continue;
            }
            let (ours, none) = (swaps(cache)?, swaps("none")?);
            let roomy = median(&none).is_some_and(|pages| pages < 200.0);
            let bar = most(&none);
            add("swapped_pages", ours, none, Better::Lower, bar);
            let [ours, none] = pair("build_ms")?;
            add("build_ms", ours, none, Better::Lower, Bar::AtMostRatio(1.05));
            let [ours, none] = pair("reads_per_s")?;
            let bar = if roomy { Bar::AtLeastRatio(1.5) } else { Bar::None };
            add("io_reads_per_s", ours, none, Better::Higher, bar);
            let [ours, none] = pair("major")?;
            add("major_faults", ours, none, Better::Lower, Bar::None);
        }
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(cache: &'static str, test: &str, swaps: u32, ms: u32, reads: u32) -> Measured {
        let line = format!(
            "in={swaps} out=0 build_ms={ms} reads_per_s={reads} major=1 touch_ms={ms} touch_ran_ms={ms} \
             full_percent=100 back_percent={reads}"
        );
        Measured { cache, test: test.into(), line }
    }

    fn meets(test: &str, none: [u32; 3], ours: [u32; 3], name: &str) -> bool {
        let all = [
            measured("none", test, none[0], none[1], none[2]),
            measured("static", test, 90_000, 9_000, 1),
            measured("elastic", test, ours[0], ours[1], ours[2]),
        ];
        let figures = figures(&all).unwrap();
        assert!(figures.iter().filter(|f| f.name.contains("static")).all(Figure::meets_bar));
        let name = format!("guest_cache_{test}_elastic_{name}");
        figures.into_iter().find(|figure| figure.name == name).unwrap().meets_bar()
    }

    #[test]
    fn elastic_is_compared_with_no_cache() {
        let none = [100, 1000, 40];
        assert!(meets("j20", none, [305, 1050, 60], "swapped_pages"));
        assert!(!meets("j20", none, [306, 1050, 60], "swapped_pages"));
        assert!(meets("j20", none, [0, 1050, 60], "build_ms"));
        assert!(!meets("j20", none, [0, 1051, 60], "build_ms"));
        assert!(meets("j20", none, [0, 0, 60], "io_reads_per_s"));
        assert!(!meets("j20", none, [0, 0, 59], "io_reads_per_s"));
        assert!(meets("j20", [200, 1, 40], [0, 0, 59], "io_reads_per_s"), "no memory to spare");
        assert!(!meets("neighbour", none, [0, 1151, 95], "allocation_ms"));
        assert!(!meets("neighbour", none, [0, 1, 89], "hits_back_percent"));
        assert!(meets("neighbour", none, [0, 1, 90], "hits_back_percent"));
    }

    #[test]
    fn a_missing_result_of_a_guest_is_an_error() {
        let measured = measured("none", "j1", 1, 2, 3);
        assert_eq!(measured.value("build_ms").unwrap().to_string(), "2");
        assert!(measured.value("build").is_err());
    }
}
