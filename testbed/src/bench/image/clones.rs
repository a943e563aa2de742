//! What clones of one base share: bytes fetched from the base's store, memory of the cache, and the memory of a clone that
//! is not used.

use std::fs::{self, File};
use std::time::Duration;

use super::client::{Client, Load};
use super::rig::{BASE, Rig, volume};
use super::{Error, log};
use crate::bench::figure::{Bar, Better, Figure};
use crate::bench::server::Server;
use crate::bench::{io_context, process};

/// Figures of clones that are all read: bytes fetched of the base's store for each of its bytes, and bytes of the cache,
/// whose peer is the size of the base.
pub const READ: [&str; 2] = ["image_clones16_fetched_bytes_ratio", "image_clones16_cache_bytes"];
/// Figure: memory of a clone that was never read.
pub const UNTOUCHED: &str = "image_untouched_1tib_clone_KiB";

const CLONES: u32 = 16;
/// Blocks of a request of theirs.
const PIECE: u32 = 16;
/// So many that the threads and allocations of opening, which are shared, do not count.
const UNTOUCHED_CLONES: u32 = 256;
const LARGE: u64 = 1 << 40;
/// Time for the daemon to finish what the connections began: unused buffers are lent after a second, and threads that opened
/// volumes end after five.
const SETTLE: Duration = Duration::from_secs(8);

/// Clones with a cache, all read at the same time from beginning to end. The base is behind nbdkit; what is fetched of it
/// is what the kernel counts as read by nbdkit: its file, and 28 bytes of each request.
///
/// # Errors
/// [`Error`] when a server fails or returns wrong data.
pub fn read(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let socket = rig.path("store.sock");
    let mut nbdkit = std::process::Command::new("nbdkit");
    nbdkit.args(["--foreground", "--unix"]).arg(&socket).arg("file").arg(rig.base()?);
    let store = Server::start("nbdkit", nbdkit, socket, rig.path("store.log"), ["disk"])?;
    let before = bytes_read(store.pid())?;
    let cache = "cache = \"writethrough\"";
    let uri = format!("nbd+unix:///disk?socket={}", store.socket().display());
    // A busy host's signs of memory pressure would have data fetched again.
    let mut config = format!("cache_min = \"{}\"\n", rig.bytes() * 5 / 4);
    config += &volume(BASE, &uri, &format!("read_only = true\n{cache}"));
    let names = add_clones(rig, CLONES, &format!("create = true\n{cache}"), &mut config)?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let daemon = rig.ebbd("clones", &config, &names)?;
    let places: Vec<u32> = (0..rig.blocks()).step_by(PIECE as usize).collect();
    let read_all = |name: &str| {
        let mut client = Client::open(daemon.server.socket(), name)?;
        let load = Load { places: &places, blocks: PIECE, depth: 4, write: false, time: None };
        client.run(&mut rig.image(), load)?;
        client.disconnect()
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> =
            names.iter().map(|name| scope.spawn(move || read_all(name))).collect();
        let panicked = || Error::Failed { program: "a reader".into(), what: "panicked".into() };
        readers.into_iter().try_for_each(|reader| reader.join().map_err(|_| panicked())?)
    })?;
    let fetched = (bytes_read(store.pid())? - before) as f64;
    let (size, cached) = (rig.bytes() as f64, daemon.stat()?.cache("bufspace_bytes")? as f64);
    log(format_args!("{CLONES} clones of {size} bytes: {fetched} fetched, {cached} cached"));
    daemon.server.stop()?;
    store.stop()?;
    if fetched < size {
        let what = format!("read {fetched} bytes of the base, which has {size}, by its count");
        return Err(Error::Failed { program: "nbdkit".into(), what });
    }
    let [ratio, bytes] = READ.map(String::from);
    Ok(vec![
        Figure { name: ratio, ours: fetched / size, peer: None, bar: Bar::AtMost(1.05) },
        Figure { name: bytes, ours: cached, peer: Some(size), bar: Bar::AtMostRatio(1.1) },
    ])
}

/// The daemon's own memory, without what it has lent to the kernel, for each clone of a sparse base of 1 TiB: beside a daemon that serves the base alone. Each
/// clone had a client that opened it and left.
///
/// # Errors
/// [`Error`] when a daemon fails.
pub fn untouched(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let path = rig.path("large.raw");
    File::create(&path)
        .and_then(|file| file.set_len(LARGE))
        .map_err(io_context(format!("making {} of 1 TiB, sparse", path.display())))?;
    let base = volume(BASE, &format!("file:{}", path.display()), "read_only = true");
    let mut each = Vec::new();
    for _ in 0..rig.options().common.rounds {
        let mut config = base.clone();
        let names = add_clones(rig, UNTOUCHED_CLONES, "create = true", &mut config)?;
        let mut memory = Vec::new();
        for (config, clones) in [(&base, &[][..]), (&config, &names)] {
            let served: Vec<&str> =
                std::iter::once(BASE).chain(clones.iter().map(String::as_str)).collect();
            let daemon = rig.ebbd("clones", config, &served)?;
            std::thread::sleep(SETTLE);
            memory.push(process::kept_kib(daemon.server.pid())?);
            daemon.server.stop()?;
        }
        log(format_args!("{UNTOUCHED}: {memory:.0?} KiB without and with {} clones", names.len()));
        each.push((memory[1] - memory[0]) / f64::from(UNTOUCHED_CLONES));
    }
    rig.remove("large.raw")?;
    let bar = Bar::AtMost(64.0);
    Ok(Figure::from_rounds(UNTOUCHED, &[each], Better::Lower, bar).into_iter().collect())
}

/// Adds clones of the base to a configuration, whose deltas do not exist yet; returns their names.
fn add_clones(
    rig: &Rig<'_>,
    count: u32,
    lines: &str,
    config: &mut String,
) -> Result<Vec<String>, Error> {
    let names: Vec<String> = (0..count).map(|number| format!("clone{number}")).collect();
    for name in &names {
        rig.remove(&format!("{name}.delta"))?;
        *config += &rig.delta_volume(name, BASE, lines);
    }
    Ok(names)
}

/// Bytes that a process has read from files and sockets.
fn bytes_read(pid: u32) -> Result<u64, Error> {
    let text = fs::read_to_string(format!("/proc/{pid}/io"))
        .map_err(io_context(format!("reading what process {pid} has read")))?;
    let count = text.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok());
    count.ok_or(Error::Output { from: "/proc/PID/io", what: text })
}
