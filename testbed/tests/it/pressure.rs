//! Memory pressure, end to end: the daemon on this machine with pressure injected through a FIFO, and
//! in a guest that is short of memory, beside another process and in a control group.

use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use testbed::bench::pressure::{Measured, guest, shell};
use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::Client;
use testbed::harness::process::{PATIENCE, resident, until};
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;

/// The output of `ebbd stat --json`.
fn stat(control: &Path) -> Result<serde_json::Value> {
    let ebbd = binary::ebbd(Build::AsTests)?;
    Tool::new(ebbd).args(["stat", "--json", "--control"]).arg(control).ok()?.json()
}

/// Creates a FIFO for the daemon to watch.
fn fifo(path: &Path) -> Result {
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, path, FileType::Fifo, mode, 0).map_err(|e| Error::io("make a FIFO")(e.into()))
}

/// Reports memory pressure to the daemon.
fn tell(fifo: &Path) -> Result {
    let mut pipe = OpenOptions::new().write(true).open(fifo).map_err(Error::io("open the FIFO"))?;
    pipe.write_all(b"x").map_err(Error::io("write to the FIFO"))
}

fn connect(server: &Server, volumes: usize) -> Result<Vec<Client>> {
    let open = |n| Ok(Client::open(&server.socket(), &format!("v{n}"))?);
    (0..volumes).map(open).collect()
}

#[test]
fn an_event_on_the_watched_fifo_empties_idle_pools() -> Result {
    const VOLUMES: usize = 24;
    let setup = Setup::new()?;
    let (watch, control) = (setup.dir().join("pressure"), setup.dir().join("control.sock"));
    fifo(&watch)?;
    // Without lending, since the event is injected: real pressure would discard lent memory.
    let mut setup = setup.env("MEMORY_PRESSURE_WATCH", &watch).args(["--idle-memory", "drop"]);
    setup = setup.arg("--control").arg(&control);
    for n in 0..VOLUMES {
        setup = setup.image(&format!("v{n}"), 2 * MIB)?;
    }
    let mut server = setup.start()?;
    let log = server.log();
    check(log.contains("memory pressure: MEMORY_PRESSURE_WATCH"), || {
        format!("the watched FIFO is not logged:\n{log}")
    })?;
    let mut clients = connect(&server, VOLUMES)?;
    let pid = server.pid()?;
    let empty = resident(pid)?;
    // The data of a write is received as a whole: a MiB remains in the pool of each connection.
    let data = vec![7; 1 << 20];
    let free = |stat: &serde_json::Value| {
        let pools = stat["memory"]["pools"].as_array().cloned().unwrap_or_default();
        pools.iter().filter_map(|pool| pool["free_pages"].as_u64()).sum::<u64>()
    };
    // Pressure of the host empties the pools at any moment: then they are filled again.
    let (filled, held) = until("the pools hold the data of the writes", PATIENCE, || {
        for client in &mut clients {
            client.write(0, &data, 0)?;
        }
        let held = free(&stat(&control)?) * 4096;
        let filled = resident(pid)?;
        Ok((held >= 16 * MIB && filled >= empty + 16 * MIB).then_some((filled, held)))
    })?;
    // From here on every queue is idle.

    tell(&watch)?;
    until("the daemon's memory falls after the event", PATIENCE, || {
        Ok((resident(pid)? + held * 3 / 4 <= filled).then_some(()))
    })?;
    let after = stat(&control)?;
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
    let squeezed = after["memory"]["pools"]
        .as_array()
        .map_or(0, |pools| pools.iter().filter(|pool| number(&pool["squeezed_pages"]) > 0).count());
    check(number(&after["memory"]["squeezes"]) >= 1 && squeezed == VOLUMES, || {
        format!("{squeezed} of {VOLUMES} idle queues were squeezed:\n{after:#}")
    })?;
    check(free(&after) == 0, || format!("pools still hold pages:\n{after:#}"))?;
    // The connections still work.
    for client in &mut clients {
        check(client.read(0, 4096)? == data[..4096], || "written data is lost".into())?;
    }
    server.healthy()
}

/// First the daemon with its defaults next to a process that uses memory; then in a control group
/// whose soft limit (`memory.high`) is less than what its pools would hold, while the guest has
/// enough memory. With less than 32 MiB the daemon would not start.
const SHORT_OF_MEMORY: &str = r#"
serve $serves
say lend $(timeout 100 guest-pressure run $socket $pid 12 all-18)
say trigger $(grep -c 'host pressure trigger.*window 500 ms' /tmp/log)
end
mount -t cgroup2 none /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/ebbd
echo 32M >/sys/fs/cgroup/ebbd/memory.high
join='/sys/fs/cgroup/ebbd/cgroup.procs'
serve $serves --idle-memory drop
say group $(grep -c 'memory pressure: cgroup' /tmp/log)
guest-pressure fill $socket 12
usleep 500000
say overrun $(sed -n 's/^high //p' /sys/fs/cgroup/ebbd/memory.events)
say used $(cat /sys/fs/cgroup/ebbd/memory.current)
say stat $(ebbd stat --json --control /tmp/control.sock | tr -d '\n')
cat /tmp/log
end
"#;

#[test]
fn in_a_guest_short_of_memory_idle_pools_cost_no_swap() -> Result {
    short_of_memory("/tmp/nbd.sock", "")
}

#[test]
fn in_a_guest_short_of_memory_idle_pools_of_vhost_user_cost_no_swap() -> Result {
    short_of_memory("/tmp/vhost", "--vhost-user /tmp/vhost")
}

fn short_of_memory(socket: &str, serves: &str) -> Result {
    let variables = format!("socket={socket}\nserves='{serves}'\n");
    let script = format!("{}{variables}{SHORT_OF_MEMORY}", shell(12));
    let load = Path::new(env!("CARGO_BIN_EXE_guest-pressure"));
    // The program is in memory, too, and a debug build of it is large: with less the guest swaps in every phase.
    let outcome = guest(&script, load, Build::AsTests)?.memory_mib(264).ok()?;
    let lend = Measured { behaviour: "lend", line: outcome.answer("lend")?.to_owned() };
    let kib = |key| lend.value(key);
    // 48 MiB passed through the pools; the daemon itself uses a few MiB.
    check(kib("idle_kib")? <= 12.0 * 1024.0, || {
        outcome.unexpected(&format!("idle pools to be lent, not {}", lend.line)).to_string()
    })?;
    check(lend.value("out")? <= 500.0, || {
        outcome.unexpected(&format!("hardly any swap, not {}", lend.line)).to_string()
    })?;
    check(lend.value("lazily_freed")? > 0.0, || {
        outcome.unexpected("the kernel to discard lent pages: was it short of memory?").to_string()
    })?;

    let count = |key| -> Result<u64> {
        let text = outcome.answer(key)?;
        text.parse().map_err(|_| outcome.unexpected(&format!("a number for {key}, not {text}")))
    };
    check(count("trigger")? == 1, || outcome.unexpected("a privileged trigger").to_string())?;
    check(count("group")? >= 1, || outcome.unexpected("the control group's files").to_string())?;
    // The ceiling of I/O memory usually keeps the daemon so far below `memory.high` that it gets no
    // sign. Where the group gets close to it, the daemon has responded before the kernel counts an
    // overrun.
    let below = count("overrun")? == 0 && count("used")? < 32 * MIB * 9 / 10;
    let stat: serde_json::Value = serde_json::from_str(outcome.answer("stat")?)
        .map_err(|e| outcome.unexpected(&format!("JSON ({e})")))?;
    let events = stat["pressure"]["events"].as_array().cloned().unwrap_or_default();
    let answered = events.iter().skip(1).filter_map(serde_json::Value::as_u64).sum::<u64>();
    let squeezes = stat["memory"]["squeezes"].as_u64().unwrap_or(0);
    check(below || (answered > 0 && squeezes > 0), || {
        let expected = "memory below the group's limit, or a response to it";
        outcome.unexpected(&format!("{expected}, not {stat:#}")).to_string()
    })
}
