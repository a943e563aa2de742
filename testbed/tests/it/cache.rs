//! The buffer cache in the daemon, in front of a third-party remote store: which requests reach the
//! store (counted), where data is when a write is acknowledged, and how the cache follows its limits
//! and memory pressure.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::{Client, wire};
use testbed::harness::pattern::{Random, content};
use testbed::harness::process::{PATIENCE, until};
use testbed::harness::server::Setup;
use testbed::{Error, Nbdkit, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;
/// The size of the plugin's export, and so of the volume.
const SIZE: u64 = 16 * MIB;
/// Keeps a whole volume in the cache, unless the host's memory pressure reaches L3.
const FLOOR: [&str; 2] = ["--cache-min", "32M"];
/// A daemon with one volume `disk` on `nbdkit`, and its control socket.
struct Rig {
    store: Nbdkit,
    server: Server,
    ebbd: PathBuf,
    control: PathBuf,
}

impl Rig {
    /// Starts both with these parameters of `nbdkit`, options of the volume, and arguments of the
    /// daemon. If the arguments do not set the cache's size, `cache_min` is larger than the volume,
    /// so that memory pressure of the host on which the test runs has no effect.
    fn new(plugin: &[&str], options: &str, arguments: &[&str]) -> Result<Rig> {
        let setup = Setup::new()?;
        let store = Nbdkit::start(setup.dir(), plugin)?;
        let control = setup.dir().join("control.sock");
        let volume = format!("disk={}{options}", store.uri());
        let mut setup = setup.volume(&volume).arg("--control").arg(&control).args(arguments);
        if !arguments.iter().any(|argument| argument.starts_with("--cache-m")) {
            setup = setup.args(FLOOR);
        }
        Ok(Rig { store, server: setup.start()?, ebbd: binary::ebbd(Build::AsTests)?, control })
    }

    fn client(&self) -> Result<Client> {
        Ok(Client::open(&self.server.socket(), "disk")?)
    }

    /// `ebbd WHAT --control ...`.
    fn ebbd(&self, what: &str) -> Tool {
        Tool::new(&self.ebbd).arg(what).arg("--control").arg(&self.control)
    }

    fn stat(&self) -> Result<Value> {
        self.ebbd("stat").arg("--json").ok()?.json()
    }

    /// A figure of the whole cache.
    fn cache(&self, field: &str) -> Result<u64> {
        let stat = self.stat()?;
        let number = stat["cache"][field].as_u64();
        number.ok_or_else(|| Error::unexpected(format!("no cache.{field} in {stat}")))
    }

    /// Waits for a condition on `bufspace`, in bytes.
    fn bufspace(&self, what: &str, fits: impl Fn(u64) -> bool) -> Result<u64> {
        let mut last = 0;
        until(what, PATIENCE, || {
            last = self.cache("bufspace_bytes")?;
            Ok(fits(last).then_some(last))
        })
        .map_err(|e| Error::unexpected(format!("{e}; bufspace is {last}")))
    }

    /// Waits for a state of the cache.
    fn state(&self, wanted: &str) -> Result {
        until(&format!("the cache is {wanted}"), PATIENCE, || {
            Ok((self.stat()?["cache"]["state"] == wanted).then_some(()))
        })
    }

    fn set(&self, name: &str, value: &str) -> Result {
        self.ebbd("set").args([name, value]).ok().map(drop)
    }

    fn pressure(&self, arguments: &[&str]) -> Result {
        self.ebbd("pressure").args(arguments).ok().map(drop)
    }

    fn stop(mut self) -> Result {
        self.server.healthy()?;
        self.server.stop()
    }
}

/// Whether data is that of `nbdkit pattern`: each 8 bytes are their own offset.
fn is_pattern(offset: u64, data: &[u8]) -> bool {
    (offset..).step_by(8).zip(data.chunks(8)).all(|(place, word)| word == place.to_be_bytes())
}

/// Reads the whole volume in pieces and compares.
fn read_pattern(client: &mut Client, size: u64, piece: u32) -> Result {
    for offset in (0..size).step_by(usize::try_from(piece).unwrap_or(4096)) {
        let data = client.read(offset, piece)?;
        check(is_pattern(offset, &data), || format!("wrong data at {offset}, {piece} bytes"))?;
    }
    Ok(())
}

const PATTERN: [&str; 2] = ["pattern", "16M"];

#[test]
fn what_was_read_once_never_reaches_the_store_again() -> Result {
    let rig = Rig::new(&PATTERN, ",read-only=true", &["--workers", "2"])?;
    let mut client = rig.client()?;
    read_pattern(&mut client, SIZE, 64 << 10)?;
    let reads = rig.store.count_at_rest("Read")?;
    check(reads > 0, || "the store logged no read".into())?;
    let before = rig.cache("hit_bytes")?;
    // In other pieces, on another connection, and by a third-party client.
    read_pattern(&mut client, SIZE, 4096)?;
    read_pattern(&mut rig.client()?, SIZE, 1 << 20)?;
    let copy = rig.server.dir().join("copy");
    Tool::new("nbdcopy").arg(rig.server.uri("disk")).arg(&copy).ok()?;
    let data = fs::read(&copy).map_err(Error::io("read a file"))?;
    check(data.len() as u64 == SIZE && is_pattern(0, &data), || {
        "nbdcopy copied wrong data".into()
    })?;
    let after = rig.store.count_at_rest("Read")?;
    check(after == reads, || format!("{} reads of cached data reached the store", after - reads))?;
    let hits = rig.cache("hit_bytes")? - before;
    check(hits >= 2 * SIZE, || format!("{hits} bytes were counted as hits"))?;
    rig.stop()
}

#[test]
fn many_readers_of_one_page_read_the_store_once() -> Result {
    let slow = ["--filter=delay", "pattern", "16M", "rdelay=300ms"];
    let rig = Rig::new(&slow, ",read-only=true", &["--workers", "2"])?;
    let page = 8 * MIB;
    let readers: Vec<_> = (0..8).map(|_| rig.client()).collect::<Result<_>>()?;
    let threads: Vec<_> = readers
        .into_iter()
        .map(|mut client| std::thread::spawn(move || client.read(page, 4096)))
        .collect();
    for thread in threads {
        let data = thread.join().map_err(|_| Error::unexpected("a reader panicked"))??;
        check(is_pattern(page, &data), || "wrong data".into())?;
    }
    rig.store.count_at_rest("Read")?;
    let reads = rig.store.reads()?;
    let of_it = reads.iter().filter(|(offset, length)| (*offset..offset + length).contains(&page));
    let of_it = of_it.count();
    check(of_it == 1, || format!("8 readers of one page caused {of_it} reads of it: {reads:x?}"))?;
    rig.stop()
}

#[test]
fn without_a_cache_every_read_reaches_the_store() -> Result {
    let rig = Rig::new(&PATTERN, ",read-only=true,cache=none", &[])?;
    let mut client = rig.client()?;
    for _ in 0..2 {
        read_pattern(&mut client, SIZE, 1 << 20)?;
    }
    let reads = rig.store.count_at_rest("Read")?;
    check(reads >= 32, || {
        format!("32 reads without a cache caused only {reads} reads of the store")
    })?;
    check(rig.cache("bufspace_bytes")? == 0, || "something is cached".into())?;
    rig.stop()
}

/// One random change, made to both the volume and `oracle`. Returns the range.
fn change(client: &mut Client, random: &mut Random, oracle: &mut [u8]) -> Result<(u64, u32)> {
    let sectors = u8::try_from(1 + random.below(100)).unwrap_or(1);
    let length = 512 * u32::from(sectors);
    let offset = 512 * random.below(SIZE / 512 - 128);
    let from = usize::try_from(offset).unwrap_or(0);
    let part = &mut oracle[from..][..512 * usize::from(sectors)];
    match random.below(6) {
        0 => {
            client.command(wire::CMD_WRITE_ZEROES, 0, offset, length)?;
            part.fill(0);
        }
        1 => {
            // The content of a trimmed range is undefined; nbdkit's memory plugin, and so the volume, has zeroes.
            client.command(wire::CMD_TRIM, 0, offset, length)?;
            part.fill(0);
        }
        n => {
            let data = content(random.next() | 1, offset, part.len());
            client.write(offset, &data, if n == 2 { wire::FLAG_FUA } else { 0 })?;
            part.copy_from_slice(&data);
        }
    }
    Ok((offset, length))
}

#[test]
fn a_change_is_at_the_store_before_its_reply_and_seen_by_every_later_read() -> Result {
    let seed = seeded::seed("EBBD_TEST_SEED", 4);
    let rig = Rig::new(&["memory", "16M"], "", &["--workers", "2"])?;
    let mut random = Random::new(seed);
    let (mut client, mut other, mut direct) = (rig.client()?, rig.client()?, rig.store.client()?);
    let mut oracle = content(1, 0, usize::try_from(SIZE).unwrap_or(0));
    for (number, piece) in (0..).zip(oracle.chunks(1 << 20)) {
        client.write(number * MIB, piece, 0)?;
    }
    for round in 0..3000 {
        let (offset, length) = change(&mut client, &mut random, &mut oracle)?;
        let compare = |who: &str, data: &[u8], offset: u64| {
            let from = usize::try_from(offset).unwrap_or(0);
            check(data == &oracle[from..][..data.len()], || {
                format!("seed {seed}, round {round}: {who} has other data at {offset}")
            })
        };
        compare("the store", &direct.read(offset, length)?, offset)?;
        // Together with its surroundings, which may have been cached before.
        let from = offset / 4096 * 4096;
        compare("a later read", &other.read(from, 64 << 10)?, from)?;
        let place = 512 * random.below(SIZE / 512 - 16);
        compare("a read elsewhere", &client.read(place, 8192)?, place)?;
    }
    check(rig.cache("hit_bytes")? > 8 * MIB, || "hardly anything was read from the cache".into())?;
    rig.stop()
}

#[test]
fn qemu_io_finds_at_the_store_what_it_wrote() -> Result {
    let rig = Rig::new(&["memory", "16M"], "", &[])?;
    let through = rig.server.qemu_options("disk");
    let io = |options: &str, commands: &[&str]| -> Result {
        let mut tool = Tool::new("qemu-io").arg("--image-opts").arg(options);
        for command in commands {
            tool = tool.args(["-c", command]);
        }
        let outcome = tool.ok()?;
        let said = format!("{}{}", outcome.stdout, outcome.stderr);
        outcome.check(!said.contains("fail") && !said.contains("rror"), "no failure")
    };
    io(&through, &["read -P 0 0 4M", "write -P 7 1M 300k", "write -P 8 1536 512"])?;
    let direct = format!("driver=nbd,server.type=unix,server.path={}", socket_of(&rig.store.uri()));
    let expected = ["read -P 7 1M 300k", "read -P 8 1536 512", "read -P 0 2k 510k"];
    io(&direct, &expected)?;
    io(&through, &expected)?;
    io(&through, &["write -z -u 1100k 100k", "discard 1M 4k"])?;
    let expected = ["read -P 7 1028k 72k", "read -P 0 1100k 100k", "read -P 7 1200k 100k"];
    io(&direct, &expected)?;
    io(&through, &expected)?;
    rig.stop()
}

fn socket_of(uri: &str) -> &str {
    uri.split_once('=').map_or("", |(_, path)| path)
}

#[test]
fn limits_follow_what_is_set() -> Result {
    let rig = Rig::new(&PATTERN, ",read-only=true", &[])?;
    let mut client = rig.client()?;
    read_pattern(&mut client, SIZE, 64 << 10)?;
    rig.bufspace("all of the volume is cached", |held| held >= SIZE)?;
    rig.set("cache_min", "512K")?;
    rig.set("cache_max", "1M")?;
    rig.bufspace("the cache has shrunk to its limit", |held| held <= MIB)?;
    read_pattern(&mut client, SIZE, 64 << 10)?;
    let held = rig.bufspace("it stays there", |held| held <= MIB)?;
    check(held > 0, || "a cache of 1 MiB holds nothing".into())?;
    rig.ebbd("set").args(["cache_max", "--unset"]).ok()?;
    rig.set("cache_min", "32M")?;
    let fill = || {
        read_pattern(&mut rig.client()?, SIZE, 64 << 10)?;
        Ok((rig.cache("bufspace_bytes")? >= SIZE).then_some(()))
    };
    until("the cache holds all of the volume again", PATIENCE, fill)?;
    rig.stop()
}

#[test]
fn pressure_shrinks_the_cache_down_to_its_floor_and_the_last_resort_empties_it() -> Result {
    let rig = Rig::new(&PATTERN, ",read-only=true", &[])?;
    let mut client = rig.client()?;
    read_pattern(&mut client, SIZE, 64 << 10)?;
    rig.bufspace("all of the volume is cached", |held| held >= SIZE)?;
    rig.set("cache_min", "4M")?;
    // L1 lends, but does not evict: the kernel may discard what it needs.
    rig.pressure(&["L1", "--seconds", "3600"])?;
    rig.state("pausing")?;
    let lent = || Ok((rig.cache("bufwiredspace_bytes")? == 0).then_some(()));
    until("all idle buffers are lent", PATIENCE, lent)?;
    let kept = rig.cache("bufspace_bytes")?;
    check(kept >= SIZE, || format!("after L1 only {kept} bytes are cached"))?;
    rig.pressure(&["L2"])?;
    rig.bufspace("L2 evicted half", |held| held <= SIZE / 2)?;
    for _ in 0..4 {
        rig.pressure(&["L2"])?;
    }
    let held = rig.bufspace("L2 evicts down to cache_min", |held| held <= 5 * MIB)?;
    check(held >= 3 * MIB, || format!("cache_min is 4M, but only {held} bytes are cached"))?;
    rig.pressure(&["L3", "--seconds", "3600"])?;
    rig.state("off")?;
    rig.bufspace("L3 evicts everything", |held| held == 0)?;
    let before = rig.store.count_at_rest("Read")?;
    read_pattern(&mut client, SIZE, 1 << 20)?;
    check(rig.store.count("Read")? >= before + 16, || "reads did not reach the store".into())?;
    check(rig.cache("bufspace_bytes")? == 0, || "data was cached in the last resort".into())?;
    rig.pressure(&["L0"])?;
    let calm = || Ok((rig.stat()?["cache"]["state"] != "off").then_some(()));
    until("the cache is on again at L0", PATIENCE, calm)?;
    rig.set("cache_min", "32M")?;
    let fill = || {
        read_pattern(&mut rig.client()?, SIZE, 64 << 10)?;
        Ok((rig.cache("bufspace_bytes")? >= SIZE).then_some(()))
    };
    until("the cache holds all of the volume again", PATIENCE, fill)?;
    rig.stop()
}

fn write_file(path: &Path, text: &str) -> Result {
    fs::write(path, text).map_err(Error::io(path.display().to_string()))
}

#[test]
fn a_reload_keeps_what_is_cached_and_takes_new_limits() -> Result {
    let setup = Setup::new()?;
    let store = Nbdkit::start(setup.dir(), &PATTERN)?;
    let (control, file) = (setup.dir().join("control.sock"), setup.dir().join("ebbd.toml"));
    let text = |top: &str, mode: &str| {
        format!(
            "{top}\ncontrol = {:?}\n[volume.disk]\nstore = {:?}\nread_only = true\ncache = {mode:?}\n",
            format!("unix:{}", control.display()),
            store.uri(),
        )
    };
    write_file(&file, &text("cache_min = \"32M\"", "writethrough"))?;
    let path = file.clone();
    let new = |top: &str, mode: &str| write_file(&path, &text(top, mode));
    let rig = {
        let setup = setup.arg("--config").arg(&file);
        let (server, ebbd) = (setup.start()?, binary::ebbd(Build::AsTests)?);
        (server, ebbd)
    };
    let tool = |what: &str| Tool::new(&rig.1).arg(what).arg("--control").arg(&control);
    let bufspace = |what: &str, fits: &dyn Fn(u64) -> bool| {
        until(what, PATIENCE, || {
            let stat = tool("stat").arg("--json").ok()?.json()?;
            Ok(stat["cache"]["bufspace_bytes"].as_u64().filter(|held| fits(*held)))
        })
    };
    let reloaded = |times: usize| {
        until("the file was read again", PATIENCE, || {
            let log = rig.0.log();
            Ok((log.matches("reloaded").count() >= times).then_some(()))
        })
    };
    let mut client = Client::open(&rig.0.socket(), "disk")?;
    read_pattern(&mut client, SIZE, 64 << 10)?;
    let reads = store.count_at_rest("Read")?;
    rig.0.signal(Signal::HUP)?;
    reloaded(1)?;
    read_pattern(&mut client, SIZE, 64 << 10)?;
    let after = store.count_at_rest("Read")?;
    check(after == reads, || format!("a reload cost {} reads", after - reads))?;
    new("cache_max = \"2M\"\ncache_min = \"1M\"", "writethrough")?;
    rig.0.signal(Signal::HUP)?;
    bufspace("the limit of the new file holds", &|held| held <= 2 * MIB)?;
    new("", "none")?;
    rig.0.signal(Signal::HUP)?;
    bufspace("the buffers of a volume that is no longer cached are freed", &|held| held == 0)?;
    let mut server = rig.0;
    server.healthy()?;
    server.stop()
}

/// The metrics as text.
fn metrics(control: &Path) -> Result<String> {
    let mut stream = UnixStream::connect(control).map_err(Error::io("connect"))?;
    let request = b"GET /metrics HTTP/1.1\r\nHost: ebbd\r\nConnection: close\r\n\r\n";
    stream.write_all(request).map_err(Error::io("send the request"))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).map_err(Error::io("read the reply"))?;
    Ok(text)
}

#[test]
fn metrics_and_tables_show_the_cache() -> Result {
    let rig = Rig::new(&PATTERN, ",read-only=true", &["--cache-max", "8M", "--cache-min", "4M"])?;
    let mut client = rig.client()?;
    for _ in 0..2 {
        client.read(0, 1 << 20)?;
    }
    let text = metrics(&rig.control)?;
    let value = |name: &str| -> Result<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let number = line.and_then(|value| value.trim().parse().ok());
        number.ok_or_else(|| Error::unexpected(format!("no metric {name} in\n{text}")))
    };
    let own = r#"{volume="disk"}"#;
    for (name, least, most) in [
        ("ebbd_cache_bufspace_bytes".to_owned(), MIB, 3 * MIB),
        ("ebbd_cache_bufkvaspace_bytes".to_owned(), MIB, 3 * MIB),
        ("ebbd_cache_bufwiredspace_bytes".to_owned(), 0, 3 * MIB),
        ("ebbd_cache_max_bytes".to_owned(), 8 * MIB, 8 * MIB),
        ("ebbd_cache_min_bytes".to_owned(), 4 * MIB, 4 * MIB),
        (format!("ebbd_volume_cache_bufspace_bytes{own}"), MIB, 3 * MIB),
        (format!("ebbd_volume_cache_hit_bytes_total{own}"), MIB, MIB),
        (format!("ebbd_volume_cache_miss_bytes_total{own}"), MIB, MIB),
    ] {
        let seen = value(&name)?;
        check((least as f64..=most as f64).contains(&seen), || format!("{name} is {seen}"))?;
    }
    let table = rig.ebbd("stat").ok()?;
    table.check(table.stdout.to_lowercase().contains("cache"), "the cache in the table")?;
    rig.stop()
}

#[test]
fn wrong_values_are_refused_with_a_remedy() -> Result {
    let refused = |arguments: &[&str], words: &[&str]| -> Result {
        let tool = Tool::new(binary::ebbd(Build::AsTests)?).args(["serve", "--check"]);
        let outcome =
            tool.args(["--listen", "unix:/tmp/ebbd-never-made.sock"]).args(arguments).run()?;
        outcome.check(outcome.status.code() == Some(2), "exit status 2")?;
        for word in words {
            outcome.check(outcome.stderr.contains(word), &format!("the word `{word}`"))?;
        }
        Ok(())
    };
    let volume = ["--volume", "d=memory:1M"];
    refused(&["--volume", "d=memory:1M,cache=fast"], &["fast", "none", "writethrough"])?;
    refused(&["--volume", "d=memory:1M,cahce=none"], &["cahce", "cache"])?;
    refused(&[&volume[..], &["--cache-max", "4K"]].concat(), &["--cache-max", "4K", "1M"])?;
    refused(&[&volume[..], &["--cache-max", "much"]].concat(), &["much"])?;
    let both = ["--cache-max", "2M", "--cache-min", "3M"];
    refused(&[&volume[..], &both].concat(), &["choose 2M or less"])?;
    let rig = Rig::new(&PATTERN, ",read-only=true", &["--cache-min", "2M"])?;
    for (name, value, word) in [
        ("cache_max", "1M", "cache_min"),
        ("cache_max", "4K", "1M"),
        ("cache_max", "x", "x"),
        ("cache_min", "2T", "1T"),
    ] {
        let outcome = rig.ebbd("set").args([name, value]).fails()?;
        outcome.check(outcome.stderr.contains(word), &format!("the word `{word}`"))?;
    }
    rig.stop()
}

#[test]
fn by_default_only_remote_stores_are_cached() -> Result {
    let setup = Setup::new()?;
    let control = setup.dir().join("control.sock");
    let image = setup.dir().join("other.img");
    let other = format!("other=file:{},size=1M,create=true,cache=writethrough", image.display());
    let mut server = setup
        .image("disk", MIB)?
        .volume(&other)
        .arg("--control")
        .arg(&control)
        .args(FLOOR)
        .start()?;
    for name in ["disk", "other"] {
        let mut client = Client::open(&server.socket(), name)?;
        client.write(0, &content(5, 0, 65_536), 0)?;
        for _ in 0..2 {
            check(client.read(0, 65_536)? == content(5, 0, 65_536), || "wrong data".into())?;
        }
    }
    let tool = Tool::new(binary::ebbd(Build::AsTests)?).args(["stat", "--json", "--control"]);
    let stat = tool.arg(&control).ok()?.json()?;
    let volumes = stat["volumes"].as_array().cloned().unwrap_or_default();
    let cache = |name: &str| volumes.iter().find(|v| v["name"] == name).map(|v| v["cache"].clone());
    check(cache("disk") == Some(Value::Null), || format!("a file is cached: {stat}"))?;
    let hits = cache("other").and_then(|cache| cache["hit_bytes"].as_u64()).unwrap_or(0);
    check(hits >= 65_536, || format!("no hits on a volume with a configured cache: {stat}"))?;
    server.stop()
}

/// Runs the verified load and calls `disturb` every 600 ms meanwhile. Returns how often.
fn under_load(rig: &mut Rig, mut disturb: impl FnMut(&mut Rig, usize) -> Result) -> Result<usize> {
    let tool = rig.server.verified_load();
    let job = std::thread::spawn(move || tool.run());
    let mut times = 0;
    while !job.is_finished() {
        std::thread::sleep(Duration::from_millis(600));
        disturb(rig, times)?;
        times += 1;
    }
    let outcome = job.join().map_err(|_| Error::unexpected("the load panicked"))??;
    outcome.check(outcome.status.success(), "fio finds its data and no error")?;
    Ok(times)
}

#[test]
fn fio_verifies_through_a_small_cache_under_pressure() -> Result {
    let arguments = ["--cache-max", "8M", "--cache-min", "1M", "--workers", "2"];
    let mut rig = Rig::new(&["memory", "64M"], "", &arguments)?;
    under_load(&mut rig, |rig, time| {
        // L3 towards the end: from then on the cache is off until L0.
        rig.pressure(&[if time == 8 { "L3" } else { ["L1", "L2"][time % 2] }])?;
        rig.set("cache_max", ["1M", "8M", "20M"][time % 3])
    })?;
    check(rig.cache("evicted_bytes")? > 0, || "nothing was ever evicted".into())?;
    rig.stop()
}

#[test]
fn a_store_killed_under_verified_load_leaves_no_stale_data() -> Result {
    let dir = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let image = dir.path().join("store.img");
    let file = fs::File::create(&image).map_err(Error::io("make an image"))?;
    file.set_len(64 * MIB).map_err(Error::io("make an image"))?;
    let image = format!("file={}", image.display());
    let mut rig = Rig::new(&["file", &image], "", &["--cache-max", "16M", "--workers", "2"])?;
    let times = under_load(&mut rig, |rig, time| match time < 6 {
        true => rig.store.restart(),
        false => Ok(()),
    })?;
    check(times >= 4, || format!("the store was killed only {times} times under load"))?;
    // The volume's data, cached or not, is that of the store.
    let (mut through, mut direct) = (rig.client()?, rig.store.client()?);
    for offset in (0..64 * MIB).step_by(1 << 20) {
        let same = through.read(offset, 1 << 20)? == direct.read(offset, 1 << 20)?;
        check(same, || format!("cached data differs from the store's within 1M at {offset}"))?;
    }
    check(rig.cache("hit_bytes")? > 0, || "nothing was read from the cache".into())?;
    rig.stop()
}
