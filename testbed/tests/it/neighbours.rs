//! Another process in the daemon's control group, in a guest with enough memory: the cache shrinks as it
//! does on a host that is short of memory.

use std::fmt::Write as _;
use std::path::Path;
use testbed::guest::{Guest, Outcome};
use testbed::harness::binary::{self, Build};
use testbed::{Error, Result, check};

const MIB: u64 = 1 << 20;
/// The memory that the daemon and the other process may use together, and what the other process uses.
const LIMIT: u64 = 256 * MIB;
const TAKEN: u64 = 208 * MIB;
/// 4 MiB of each volume are read.
const VOLUMES: u32 = 40;

/// The store uses no memory (`null_blk`, direct I/O). The other process writes a file in memory, 2 MiB at a time;
/// there is no swap.
const BESIDE: &str = r#"
mount -t cgroup2 none /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
group=/sys/fs/cgroup/both
mkdir $group
echo 256M >$group/memory.max
(
    echo 0 >$group/cgroup.procs
    exec ebbd serve --listen unix:/tmp/nbd.sock --control /tmp/control.sock $volumes 2>/tmp/log
) &
pid=$!
i=0
until grep -q ready /tmp/log; do
    [ $i -lt 600 ] || { cat /tmp/log; exit 1; }
    i=$((i + 1))
    usleep 50000
done
stat() { ebbd stat --json --control /tmp/control.sock | tr -d '\n'; }
event() { sed -n "s/^$1 //p" $group/$2; }
guest-pressure fill /tmp/nbd.sock 40
# Long enough for the daemon to lend idle buffers.
sleep 4
say before $(stat)
lazily=$(event pglazyfreed memory.stat)
met=$(event max memory.events)
(
    echo 0 >$group/cgroup.procs
    i=0
    while [ $i -lt 104 ]; do
        dd if=/dev/zero of=/tmp/taken bs=1M count=2 seek=$((2 * i)) conv=notrunc 2>/dev/null
        usleep 20000
        i=$((i + 1))
    done
)
say after $(stat)
say lazily $(($(event pglazyfreed memory.stat) - lazily))
say met $(($(event max memory.events) - met))
say oom $(event oom memory.events)
kill $pid
wait $pid
"#;

fn cache(outcome: &Outcome, key: &str, figure: &str) -> Result<u64> {
    let stat: serde_json::Value = serde_json::from_str(outcome.answer(key)?)
        .map_err(|e| outcome.unexpected(&format!("JSON ({e})")))?;
    let value = stat["cache"][figure].as_u64();
    value.ok_or_else(|| outcome.unexpected(&format!("{figure} in {stat:#}")))
}

#[test]
fn the_cache_shrinks_for_a_neighbour_in_its_control_group() -> Result {
    let mut volumes = String::new();
    for n in 0..VOLUMES {
        let volume = format!("v{n}=file:/dev/nullb0,read-only=true,direct=on,cache=writethrough");
        write!(volumes, " --volume {volume}").map_err(|e| Error::unexpected(e.to_string()))?;
    }
    let script = format!("volumes='{volumes}'\n{BESIDE}");
    let outcome = Guest::new(script)
        .program_as(&binary::ebbd(Build::AsTests)?, "ebbd")
        .program_as(Path::new(env!("CARGO_BIN_EXE_guest-pressure")), "guest-pressure")
        .processors(1)
        .memory_mib(1024)
        .module("null_blk")
        .ok()?;
    let full = cache(&outcome, "before", "bufspace_bytes")?;
    let left = cache(&outcome, "after", "bufspace_bytes")?;
    let reclaimed = cache(&outcome, "after", "proactively_reclaimed_bytes")?;
    let count = |key| -> Result<u64> {
        let text = outcome.answer(key)?;
        text.parse().map_err(|_| outcome.unexpected(&format!("a number for {key}, not {text}")))
    };
    let (lazily, met) = (count("lazily")? * 4096, count("met")?);
    println!(
        "of {} MiB cached {} remain, {} were returned proactively; the kernel discarded {} by itself, and met the limit {met} times",
        full / MIB,
        left / MIB,
        reclaimed / MIB,
        lazily / MIB
    );
    check(full + TAKEN > LIMIT, || {
        format!("only {full} bytes are cached: the other process fits beside them")
    })?;
    check(left + TAKEN <= LIMIT, || {
        format!("{left} bytes are still cached beside the other process")
    })?;
    check(count("oom")? == 0, || outcome.unexpected("memory enough").to_string())?;
    // The host has enough memory: a daemon that reads only the host's counters returns nothing. The daemon returns
    // memory before the limit is met, or in response to it if it got no processor in time.
    let returned = full.saturating_sub(left + lazily);
    check(returned >= MIB, || outcome.unexpected("memory returned by the daemon").to_string())?;
    check(lazily <= TAKEN / 8, || format!("the kernel had to discard {lazily} bytes by itself"))
}
