//! The daemon in control groups with little memory: it serves, or fails to start with the size that
//! it needs, and the kernel never kills it. Works with version 1 or 2 of control groups, and needs
//! root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::Client;
use testbed::harness::process::{PATIENCE, until};
use testbed::harness::server::Setup;
use testbed::harness::vhost::Frontend;
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const CLIENTS: usize = 34;
/// Daemons that are tested at the same time.
const AT_ONCE: usize = 3;

/// A control group with a memory limit; its processes are killed when it is dropped.
struct Group {
    dir: PathBuf,
}

impl Group {
    fn new(limit: u64) -> Result<Group> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ebbd-test-{}-{number}", std::process::id());
        let (parent, file) = hierarchy()?;
        let group = Group { dir: parent.join(name) };
        fs::create_dir(&group.dir).map_err(Error::io("make a memory control group (as root)"))?;
        let set = fs::write(group.dir.join(file), limit.to_string());
        set.map_err(Error::io("limit the memory of a control group"))?;
        Ok(group)
    }

    /// The arguments of a program that enters the group and then becomes another one.
    fn prefix(&self) -> Vec<String> {
        let enter = "echo $$ >\"$0\" && exec \"$@\"".to_owned();
        let procs = self.dir.join("cgroup.procs").display().to_string();
        vec!["sh".into(), "-c".into(), enter, procs]
    }

    fn tool(&self, program: &Path) -> Tool {
        let prefix = self.prefix();
        Tool::new(&prefix[0]).args(&prefix[1..]).arg(program)
    }

    /// Processes of the group that the kernel has killed.
    fn kills(&self) -> u64 {
        let read = |name| fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        let text = [read("memory.oom_control"), read("memory.events")].concat();
        let count = |line: &str| line.strip_prefix("oom_kill ").and_then(|n| n.parse::<u64>().ok());
        text.lines().filter_map(count).sum()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while fs::remove_dir(&self.dir).is_err() && Instant::now() < deadline {
            let list = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
            let ids =
                list.lines().filter_map(|line| rustix::process::Pid::from_raw(line.parse().ok()?));
            for id in ids {
                // It may have ended.
                let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A folder in which groups with a memory limit can be made, and the name of the limit's file.
fn hierarchy() -> Result<(PathBuf, &'static str)> {
    let old = Path::new("/sys/fs/cgroup/memory");
    if old.join("memory.limit_in_bytes").exists() {
        return Ok((old.to_owned(), "memory.limit_in_bytes"));
    }
    let new = Path::new("/sys/fs/cgroup");
    let control = new.join("cgroup.subtree_control");
    // Fails if it is on already and processes are here; the check below tells.
    let _ = fs::write(&control, "+memory");
    let on = fs::read_to_string(&control).unwrap_or_default();
    check(on.split_whitespace().any(|name| name == "memory"), || {
        "no memory control group can be made: run the test as root, with cgroup 1 or 2 at /sys/fs/cgroup".into()
    })?;
    Ok((new.to_owned(), "memory.max"))
}

fn seconds() -> Duration {
    Duration::from_secs(seeded::scaled(1))
}

#[derive(Clone, Copy, Debug)]
struct Case {
    mib: u64,
    volumes: usize,
    cache: &'static str,
}

impl Case {
    fn setup(self, group: &Group) -> Result<Setup> {
        let setup = Setup::new()?.log_level("warn").under(&group.prefix());
        // For the guest: clients that may write keep guests from a volume.
        let mut text = String::from("[volume.guest]\nstore = \"null:64M\"\n");
        for number in 0..self.volumes {
            let path = setup.image_path(&format!("v{number}"));
            let made = fs::File::create_new(&path).and_then(|file| file.set_len(SIZE));
            made.map_err(Error::io("make an image"))?;
            text += &format!(
                "[volume.v{number}]\nstore = \"file:{}\"\ncache = \"{}\"\n",
                path.display(),
                self.cache
            );
        }
        let file = setup.dir().join("ebbd.toml");
        fs::write(&file, text).map_err(Error::io("write a configuration"))?;
        Ok(setup.arg("--config").arg(file).vhost_user())
    }

    /// Serves clients for some seconds, or fails to start with the size that is needed.
    fn run(self) -> Result {
        let group = Group::new(self.mib * MIB)?;
        let mut server = match self.setup(&group)?.start() {
            Ok(server) => server,
            Err(error) => return self.check_failed_start(&group, &error.to_string()),
        };
        let requests = load(&server, self.volumes, seconds());
        check(group.kills() == 0, || format!("{self:?}: the kernel has killed: {requests:?}"))?;
        server.healthy()?;
        check(requests? > 0, || format!("{self:?}: no request was served"))?;
        server.stop()
    }

    fn check_failed_start(self, group: &Group, error: &str) -> Result {
        let words = error.split_whitespace().collect::<Vec<_>>();
        let needed = words.windows(3).find(|three| three[1..] == ["MiB", "are"]);
        let needed = needed.and_then(|three| three[0].parse::<u64>().ok());
        check(needed.is_some_and(|needed| needed > self.mib) && group.kills() == 0, || {
            format!("{self:?}: a failed start does not name the size: {error}")
        })?;
        check(self.mib < 64, || format!("{self:?}: the group is large enough: {error}"))
    }
}

/// Clients at depth 1 on all volumes, and a guest; the number of requests.
fn load(server: &Server, volumes: usize, time: Duration) -> Result<usize> {
    let (stop, count) = (AtomicBool::new(false), AtomicUsize::new(0));
    let one = |client: usize| -> Result {
        let mut connection = Client::open(&server.socket(), &format!("v{}", client % volumes))?;
        let mut at = u64::try_from(client).unwrap_or(0);
        while !stop.load(Ordering::Relaxed) {
            // A step without a pattern that the size of a block divides.
            at = (at + 7_919) % (SIZE / 65_536 - 1);
            let length = [4 << 10, 16 << 10, 64 << 10][usize::try_from(at % 3).unwrap_or(0)];
            if at % 4 == 0 {
                connection.read(at * 65_536, u32::try_from(length).unwrap_or(0))?;
            } else {
                connection.write(at * 65_536, &vec![7; length], 0)?;
            }
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    };
    let guest = || -> Result {
        let mut guest = Frontend::connect(&server.vhost_socket("guest"))?;
        while !stop.load(Ordering::Relaxed) {
            guest.burst(8, 4096)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..CLIENTS).map(|client| scope.spawn(move || one(client))).collect();
        let guest = scope.spawn(guest);
        std::thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        let ended = |thread: std::thread::ScopedJoinHandle<'_, Result>| {
            thread.join().unwrap_or_else(|_| Err(Error::unexpected("a client has panicked")))
        };
        let mut results = threads.into_iter().map(ended).collect::<Vec<_>>();
        results.push(ended(guest));
        results.into_iter().collect::<Result<Vec<()>>>()
    })?;
    Ok(count.load(Ordering::Relaxed))
}

#[test]
fn daemon_survives_or_refuses_a_small_control_group() -> Result {
    let mut cases = Vec::new();
    for mib in [16, 64, 96, 128] {
        for volumes in [1, 34, 100] {
            cases.extend(["writeback", "writethrough"].map(|cache| Case { mib, volumes, cache }));
        }
    }
    for some in cases.chunks(AT_ONCE) {
        std::thread::scope(|scope| {
            let threads: Vec<_> = some
                .iter()
                .map(|case| scope.spawn(move || case.run().map_err(|e| format!("{case:?}: {e}"))))
                .collect();
            let ended =
                |thread: std::thread::ScopedJoinHandle<'_, std::result::Result<(), String>>| {
                    thread.join().unwrap_or_else(|_| Err("a case has panicked".into()))
                };
            threads.into_iter().map(ended).collect::<Vec<_>>()
        })
        .into_iter()
        .collect::<std::result::Result<Vec<()>, String>>()
        .map_err(Error::unexpected)?;
    }
    Ok(())
}

/// A process in the group that takes `mib` MiB within a few seconds and keeps them.
fn neighbour(group: &Group, mib: u64) -> Result<Child> {
    let take = format!(
        "(for n in $(seq {mib}); do head -c 1M /dev/zero; sleep 0.03; done; sleep 600) | tail -c 1G >/dev/null"
    );
    let prefix = group.prefix();
    let mut command = Command::new(&prefix[0]);
    command.args(&prefix[1..]).args(["sh", "-c", &take]).stdin(Stdio::null());
    command.spawn().map_err(Error::io("start a neighbour"))
}

#[test]
fn a_neighbour_may_take_half_of_a_small_control_group() -> Result {
    let case = Case { mib: 96, volumes: 34, cache: "writeback" };
    let group = Group::new(case.mib * MIB)?;
    let mut server = case.setup(&group)?.start()?;
    let mut neighbour = neighbour(&group, case.mib / 2)?;
    let requests = load(&server, case.volumes, seconds() + Duration::from_secs(8));
    let kills = group.kills();
    let ended = neighbour.try_wait().map_err(Error::io("wait for the neighbour"))?;
    check(kills == 0 && ended.is_none(), || {
        format!("{kills} killed, neighbour {ended:?}, {requests:?}:\n{}", server.log())
    })?;
    requests?;
    server.healthy()?;
    server.stop()?;
    drop(group);
    neighbour.wait().map(drop).map_err(Error::io("wait for the neighbour"))
}

#[test]
fn clients_and_volumes_beyond_a_small_group_are_rejected() -> Result {
    let case = Case { mib: 32, volumes: 1, cache: "none" };
    let group = Group::new(case.mib * MIB)?;
    let mut server = case.setup(&group)?.log_level("info").start()?;
    // The limit is known to the server a moment after the start.
    let mut clients = Vec::new();
    until("clients are turned away", PATIENCE, || match Client::open(&server.socket(), "v0") {
        Ok(client) => {
            clients.push(client);
            Ok(None)
        }
        Err(_) => Ok(Some(())),
    })?;
    // Another thread writes the log.
    until("the log names the reason", PATIENCE, || {
        let reason = "the most for which the control group has memory: raise Memory";
        Ok(server.log().contains(reason).then_some(()))
    })?;
    for client in &mut clients {
        client.write(0, &[1; 4096], 0)?;
    }
    drop(clients);
    let file = server.dir().join("ebbd.toml");
    let mut text = fs::read_to_string(&file).map_err(Error::io("read the configuration"))?;
    for number in 0..200 {
        text += &format!("[volume.n{number}]\nstore = \"null:1M\"\n");
    }
    fs::write(&file, text).map_err(Error::io("write the configuration"))?;
    let outcome = server.operator(&["reload"])?.fails()?;
    check(
        outcome.stderr.contains("MiB are needed") && outcome.stderr.contains("raise Memory"),
        || format!("a reload beyond the group: {}", outcome.stderr),
    )?;
    check(group.kills() == 0, || "the kernel has killed".into())?;
    server.healthy()?;
    server.stop()
}

#[test]
fn images_are_handled_in_a_group_too_small_for_a_daemon() -> Result {
    let group = Group::new(16 * MIB)?;
    let dir = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    fs::write(&from, vec![7; 24 << 20]).map_err(Error::io("write an image"))?;
    let ebbd = binary::ebbd(Build::AsTests)?;
    let image = |words: &[&str]| group.tool(&ebbd).arg("image").args(words);
    let store = |path: &Path| format!("file:{}", path.display());
    image(&["info", &store(&from)]).ok()?;
    image(&["import", &store(&from), &store(&to)]).ok()?;
    check(fs::read(&to).is_ok_and(|data| data == vec![7; 24 << 20]), || "wrong data".into())
}

/// Returns true if the kernel reclaims memory for a process only without I/O: `PF_MEMALLOC_NOIO`.
#[test]
fn reclaim_for_the_daemon_needs_no_io() -> Result {
    let flags = |stat: &str| -> Option<u64> {
        stat.rsplit_once(')')?.1.split_whitespace().nth(6)?.parse().ok()
    };
    let mut server = Setup::new()?.log_level("debug").volume("disk=null:1M").start()?;
    let path = format!("/proc/{}/stat", server.pid()?);
    let stat = fs::read_to_string(&path).map_err(Error::io(path))?;
    let set = flags(&stat).is_some_and(|flags| flags & 0x0008_0000 != 0);
    let log = server.log();
    check(set != log.contains("CAP_SYS_RESOURCE is missing"), || {
        format!("set: {set}, and the log says otherwise:\n{log}")
    })?;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let allowed = allowed.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0);
    check(set == (allowed & (1 << 24) != 0), || format!("set: {set}, {allowed:x}"))?;
    server.stop()
}
