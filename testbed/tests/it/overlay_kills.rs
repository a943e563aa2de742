//! The daemon is killed at random points of snapshots, deletions of them, flattening, commits and resizes: the volume and its
//! snapshots read as before, and the operation is done again and succeeds, with nothing left over.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use testbed::harness::nbd::{Client, wire};
use testbed::harness::pattern::Random;
use testbed::harness::process;
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, check};

const BLOCK: usize = 4096;
const BLOCKS: usize = 512;
/// An idle volume loses nothing that was written before this time: ebbd.toml(5), `cache`.
const IDLE: Duration = Duration::from_secs(30);
const LIMIT: Duration = Duration::from_secs(30);

/// What each block holds: all of its bytes are the same.
type Content = Vec<u8>;

struct World {
    server: Server,
    random: Random,
    disk: Content,
    golden: Content,
    snapshots: BTreeMap<String, Content>,
    /// Operations that the kill cut off, and all.
    cut: u64,
    kills: u64,
}

impl World {
    fn new(seed: u64) -> Result<World> {
        let setup = Setup::new()?;
        let path = |name: &str| setup.dir().join(name).display().to_string();
        let (base, delta, state) = (path("golden.raw"), path("disk.delta"), path("state"));
        let mut random = Random::new(seed);
        let golden: Content = (0..BLOCKS).map(|_| byte(&mut random)).collect();
        let bytes: Vec<u8> = golden.iter().flat_map(|byte| [*byte; BLOCK]).collect();
        fs::write(&base, bytes).map_err(Error::io("write the base"))?;
        fs::create_dir(&state).map_err(Error::io("make the state directory"))?;
        let text = format!(
            "[volume.golden]\nstore = \"file:{base}\"\nread_only = true\n\
             [volume.disk]\nstore = \"file:{delta}\"\nbase = \"golden\"\ncreate = true\n"
        );
        let config = setup.dir().join("ebbd.toml");
        fs::write(&config, text).map_err(Error::io("write the configuration"))?;
        let control = path("control.sock");
        let server = setup
            .log_level("warn")
            .args(["--workers", "1", "--config"])
            .arg(config)
            .args(["--control", &control, "--state", &state])
            .start()?;
        let (disk, snapshots) = (golden.clone(), BTreeMap::new());
        let world = World { server, random, disk, golden, snapshots, cut: 0, kills: 0 };
        Ok(world)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.server.dir().join(name)
    }

    fn open(&self, export: &str) -> Result<Client> {
        let socket = self.server.socket();
        process::until("the volume", LIMIT, || Ok(Client::open(&socket, export).ok()))
    }

    fn write_some(&mut self) -> Result {
        let mut client = self.open("disk")?;
        for _ in 0..1 + self.random.below(40) {
            let blocks = self.disk.len() as u64;
            let block = usize::try_from(self.random.below(blocks)).unwrap_or(0);
            let value = if self.random.below(5) == 0 { 0 } else { byte(&mut self.random) };
            client.write((block * BLOCK) as u64, &[value; BLOCK], wire::FLAG_FUA)?;
            self.disk[block] = value;
        }
        Ok(client.disconnect()?)
    }

    /// Writes without a flush, waits as long as the manual says that an idle volume is at risk, and kills the daemon.
    fn write_and_wait(&mut self) -> Result {
        let mut client = self.open("disk")?;
        for block in 0..64 {
            let value = byte(&mut self.random);
            client.write((block * BLOCK) as u64, &[value; BLOCK], 0)?;
            self.disk[block] = value;
        }
        std::thread::sleep(IDLE);
        self.server.kill9()?;
        self.server.restart()?;
        self.verify("disk", &self.disk)
    }

    fn verify(&self, export: &str, expected: &Content) -> Result {
        let mut client = self.open(export)?;
        let length = u32::try_from(expected.len() * BLOCK).unwrap_or(0);
        check(client.size == u64::from(length), || format!("{export} has {} bytes", client.size))?;
        let found = client.read(0, length)?;
        client.disconnect()?;
        for (block, (bytes, expected)) in found.chunks(BLOCK).zip(expected).enumerate() {
            check(bytes.iter().all(|byte| byte == expected), || {
                format!("{export}: block {block} holds {} instead of {expected}", bytes[0])
            })?;
        }
        Ok(())
    }

    fn operator(&self, arguments: &[&str]) -> Result<std::result::Result<(), String>> {
        let outcome = self.server.operator(arguments)?.run()?;
        Ok(if outcome.status.success() { Ok(()) } else { Err(outcome.stderr) })
    }

    /// An operation that succeeds, as soon as the daemon has noticed that the last client has gone.
    fn must(&self, arguments: &[&str]) -> Result {
        process::until("an operation without clients", process::PATIENCE, || {
            match self.operator(arguments)? {
                Err(why) if why.contains("is in use by") => Ok(None),
                done => Ok(Some(
                    done.map_err(|why| Error::unexpected(format!("{arguments:?}: {why}")))?,
                )),
            }
        })
    }

    /// Begins an operation and kills the daemon; returns whether the operation had succeeded. The daemon runs again after it.
    fn kill_during(&mut self, arguments: &[&str], longest_us: u64) -> Result<bool> {
        let delay = Duration::from_micros(self.random.below(longest_us));
        let tool = self.server.operator(arguments)?;
        let server = &mut self.server;
        let done = std::thread::scope(|scope| {
            let running = scope.spawn(|| tool.run());
            std::thread::sleep(delay);
            server.kill9()?;
            running.join().map_err(|_| Error::unexpected("the operation panicked"))?
        })?;
        self.server.restart()?;
        let is_done = done.status.success();
        self.kills += 1;
        self.cut += u64::from(!is_done);
        Ok(is_done)
    }

    /// Verifies everything, after a kill.
    fn verify_all(&self) -> Result {
        self.verify("disk", &self.disk)?;
        for (name, content) in &self.snapshots {
            let title = format!("disk@{name}");
            self.serve(name)?;
            self.verify(&title, content)?;
        }
        Ok(())
    }

    /// Serves a snapshot whose file is there.
    fn serve(&self, name: &str) -> Result {
        let title = format!("disk@{name}");
        if self.operator(&["volume", "show", &title])?.is_err() {
            let store = format!("file:{}", self.file(&format!("disk.delta@{name}")).display());
            let kept = ["--base", "golden", "--read-only", "--persist"];
            let add = ["volume", "add", &title, &store];
            self.must(&[&add[..], &kept[..]].concat())?;
        }
        Ok(())
    }

    /// Whether the snapshot has a file of its own, and not a second name of the volume's.
    fn has_file(&self, name: &str) -> bool {
        let number = |path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
        let file = number(self.file(&format!("disk.delta@{name}")));
        file.is_some() && file != number(self.file("disk.delta"))
    }

    fn snapshot(&mut self, number: u64) -> Result {
        let name = format!("s{number}");
        let command = ["volume", "snapshot", "disk", &name, "--persist", "--wait"];
        let is_done = self.kill_during(&command, 25_000)?;
        if is_done || self.has_file(&name) {
            self.snapshots.insert(name.clone(), self.disk.clone());
            return self.verify_all();
        }
        self.verify_all()?;
        self.must(&command)?;
        self.snapshots.insert(name, self.disk.clone());
        self.verify_all()
    }

    fn delete(&mut self) -> Result {
        let which = self.random.below(self.snapshots.len() as u64);
        let name = self.snapshots.keys().nth(usize::try_from(which).unwrap_or(0)).cloned();
        let name = name.ok_or_else(|| Error::unexpected("no snapshot"))?;
        let command = ["volume", "delete-snapshot", "disk", &name, "--wait"];
        let is_done = self.kill_during(&command, 40_000)?;
        if self.has_file(&name) {
            check(!is_done, || format!("{name} was deleted, and its file is there"))?;
            self.verify_all()?;
            self.must(&command)?;
        }
        self.snapshots.remove(&name);
        check(!self.has_file(&name), || format!("the file of {name} is left over"))?;
        self.verify_all()
    }

    fn commit(&mut self) -> Result {
        let is_done = self.kill_during(&["volume", "commit", "disk", "--wait"], 40_000)?;
        self.verify("disk", &self.disk)?;
        if !is_done {
            self.must(&["volume", "commit", "disk", "--wait"])?;
            self.verify("disk", &self.disk)?;
        }
        self.golden[..self.disk.len()].copy_from_slice(&self.disk);
        self.verify("golden", &self.golden)
    }

    /// Makes the volume smaller or larger, up to the size of the base, which does not show in what was added.
    fn resize(&mut self) -> Result {
        let blocks = 1 + usize::try_from(self.random.below(BLOCKS as u64)).unwrap_or(0);
        let size = (blocks * BLOCK).to_string();
        let command = ["volume", "resize", "disk", &size, "--shrink", "--wait"];
        let is_done = self.kill_during(&command, 15_000)?;
        let found = self.open("disk")?;
        let bytes = found.size;
        found.disconnect()?;
        if is_done || bytes == (blocks * BLOCK) as u64 {
            self.disk.resize(blocks, 0);
            return self.verify_all();
        }
        self.verify_all()?;
        self.must(&command)?;
        self.disk.resize(blocks, 0);
        self.verify_all()
    }

    /// Flattens a clone of a snapshot, or of the base.
    fn flatten(&mut self, number: u64) -> Result {
        let (base, content) = match self.snapshots.iter().next() {
            Some((name, content)) => (format!("disk@{name}"), content.clone()),
            None => ("golden".to_owned(), self.golden.clone()),
        };
        if let Some(name) = base.strip_prefix("disk@") {
            self.serve(name)?;
        }
        let (title, file) = (format!("clone{number}"), self.file("clone.delta"));
        let store = format!("file:{}", file.display());
        self.must(&["volume", "add", &title, &store, "--base", &base, "--create", "--persist"])?;
        self.kill_during(&["volume", "flatten", &title, "--wait"], 40_000)?;
        self.verify(&title, &content)?;
        self.must(&["volume", "flatten", &title, "--wait"])?;
        self.verify(&title, &content)?;
        self.must(&["volume", "remove", &title])?;
        fs::remove_file(file).map_err(Error::io("remove the clone"))?;
        self.verify_all()
    }
}

fn byte(random: &mut Random) -> u8 {
    u8::try_from(1 + random.below(255)).unwrap_or(1)
}

fn run(seed: u64, kills: u64) -> Result<(u64, u64)> {
    let mut world = World::new(seed)?;
    world.write_and_wait()?;
    let mut number = 0;
    let mut left = [kills; 5];
    while left.iter().any(|left| *left > 0) {
        number += 1;
        world.write_some()?;
        let depth = world.snapshots.len();
        let operation = match world.random.below(5) {
            0 if depth < 5 => 0,
            1 if depth > 0 => 1,
            2 if depth == 0 => 2,
            operation @ 3.. => operation,
            _ => continue,
        };
        match operation {
            0 => world.snapshot(number)?,
            1 => world.delete()?,
            2 => world.commit()?,
            3 => world.flatten(number)?,
            _ => world.resize()?,
        }
        let operation = usize::try_from(operation).unwrap_or(0);
        left[operation] = left[operation].saturating_sub(1);
        // Few are left to be committed otherwise.
        if left[0] + left[1] == 0 || left[2] > left[1] + kills / 4 {
            for name in world.snapshots.keys().cloned().collect::<Vec<_>>() {
                world.must(&["volume", "delete-snapshot", "disk", &name, "--wait"])?;
                world.snapshots.remove(&name);
            }
        }
    }
    Ok((world.cut, world.kills))
}

#[test]
fn operations_on_overlays_that_are_killed_lose_nothing() -> Result {
    let kills = seeded::scaled(8);
    let seed = seeded::seed("EBBD_TEST_SEED", 2026);
    let run = run(seed, kills);
    let (cut, kills) =
        run.map_err(|error| Error::unexpected(format!("EBBD_TEST_SEED={seed}: {error}")))?;
    println!("{kills} kills, {cut} of them during the operation");
    check(cut * 10 > kills, || format!("{cut} of {kills} operations were cut off"))
}
