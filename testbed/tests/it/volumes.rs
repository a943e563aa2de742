//! Volumes are added, written, renamed and removed at run time while another volume is under load, and the daemon is killed at
//! random points: the state directory is never half-written, and nothing leaks.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use testbed::harness::binary::{self, Build};
use testbed::harness::ledger::Ledger;
use testbed::harness::nbd::Client;
use testbed::harness::pattern::Random;
use testbed::harness::process::{Held, PATIENCE, until};
use testbed::harness::server::Setup;
use testbed::harness::writer::{Promise, Writer, let_write};
use testbed::{Error, Result, Server, Tool, check};

/// Changes between two kills, on average.
const PER_KILL: u64 = 10;
/// Threads that change volumes, and images of each.
const THREADS: u64 = 2;
const IMAGES: u64 = 4;
const IMAGE: u64 = 1 << 20;
const DISK: usize = 8 << 20;
/// Memory that may differ for reasons other than a leak.
const SLACK: u64 = 4 << 20;

/// Changes of volumes in all.
fn changes() -> u64 {
    seeded::scaled(200).max(20)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The control socket, the sockets of clients and the images.
#[derive(Clone, Debug)]
struct Place {
    control: PathBuf,
    nbd: PathBuf,
    images: PathBuf,
    state: PathBuf,
}

impl Place {
    fn of(dir: &Path) -> Place {
        Place {
            control: dir.join("control.sock"),
            nbd: dir.join("nbd.sock"),
            images: dir.to_owned(),
            state: dir.join("state"),
        }
    }

    /// A request to the control socket: the status and the body.
    fn ask(&self, method: &str, path: &str, body: &Value) -> io::Result<(u16, Value)> {
        // A body that the daemon has no use for would reset the connection.
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut stream = UnixStream::connect(&self.control)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(format!("{head}{body}").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok((status.ok_or(io::ErrorKind::InvalidData)?, serde_json::from_str(body)?))
    }

    /// Makes a change, and waits for its operation.
    fn change(&self, method: &str, path: &str, body: &Value) -> io::Result<Outcome> {
        let (status, mut view) = self.ask(method, path, body)?;
        if !(200..300).contains(&status) {
            return Ok(Err(format!("{method} {path} {body}: {status} {view}")));
        }
        while status == 202 && view["state"] == "running" {
            std::thread::sleep(Duration::from_millis(5));
            view = self.ask("GET", &format!("/v1/operations/{}", view["id"]), &Value::Null)?.1;
        }
        let failed = view["state"] == "failed" || view["state"] == "cancelled";
        Ok(if failed { Err(format!("{method} {path}: {view}")) } else { Ok(()) })
    }

    fn image(&self, thread: u64, number: u64) -> PathBuf {
        self.images.join(format!("t{thread}-{number}.img"))
    }

    fn stat(&self) -> Result<Value> {
        Ok(self.ask("GET", "/v1/stat", &Value::Null).map_err(Error::io("statistics"))?.1)
    }
}

/// What the daemon has replied.
type Outcome = std::result::Result<(), String>;

/// What was begun and perhaps not acknowledged.
#[derive(Clone, Debug)]
enum Intent {
    Nothing,
    Add(String, bool),
    Remove,
    Rename(String),
}

/// An image and its volume, as far as the daemon has acknowledged it.
#[derive(Clone, Debug)]
struct Known {
    /// Name, and whether it is kept.
    volume: Option<(String, bool)>,
    intent: Intent,
    /// The last number that was flushed, and the last that was written.
    flushed: u64,
    written: u64,
}

impl Known {
    fn new() -> Known {
        Known { volume: None, intent: Intent::Nothing, flushed: 0, written: 0 }
    }

    /// Compares it with the names that the image has after a restart, and adopts what is there.
    fn restarted(&mut self, found: &[String], on_disk: u64) -> Outcome {
        let kept = self.volume.as_ref().filter(|(_, kept)| *kept).map(|(name, _)| name.clone());
        let possible: Vec<Option<String>> = match (&self.intent, kept) {
            (Intent::Nothing, kept) => vec![kept],
            (Intent::Add(name, true), _) => vec![None, Some(name.clone())],
            (Intent::Add(_, false), _) => vec![None],
            (Intent::Remove, kept) => vec![None, kept],
            (Intent::Rename(to), Some(from)) => vec![Some(from), Some(to.clone())],
            (Intent::Rename(_), None) => vec![None],
        };
        if found.len() > 1 || !possible.contains(&found.first().cloned()) {
            return Err(format!("after a kill: {found:?}, possible {possible:?}, known {self:?}"));
        }
        if !(self.flushed..=self.written).contains(&on_disk) {
            return Err(format!("after a kill the image has {on_disk}, known {self:?}"));
        }
        self.volume = found.first().map(|name| (name.clone(), true));
        self.intent = Intent::Nothing;
        (self.flushed, self.written) = (on_disk, on_disk);
        Ok(())
    }
}

/// The number in the first bytes of an image.
fn number_of(image: &Path) -> Result<u64> {
    let mut bytes = [0; 8];
    let file = fs::File::open(image).map_err(Error::io(image.display().to_string()))?;
    file.read_exact_at(&mut bytes, 0).map_err(Error::io(image.display().to_string()))?;
    Ok(u64::from_le_bytes(bytes))
}

struct Churn<'a> {
    place: &'a Place,
    thread: u64,
    known: &'a Mutex<BTreeMap<(u64, u64), Known>>,
    /// Changes that were acknowledged.
    done: &'a AtomicU64,
    random: Random,
}

impl Churn<'_> {
    fn update(&self, number: u64, with: impl FnOnce(&mut Known)) {
        if let Some(known) = lock(self.known).get_mut(&(self.thread, number)) {
            with(known);
        }
    }

    fn known(&self, number: u64) -> Known {
        lock(self.known).get(&(self.thread, number)).cloned().unwrap_or_else(Known::new)
    }

    /// Makes one change; `Err` if the daemon was killed meanwhile.
    fn step(&mut self) -> io::Result<Result> {
        let number = self.random.below(IMAGES);
        let known = self.known(number);
        let outcome = match known.volume {
            None => self.add(number)?,
            Some((name, _)) => match self.random.below(8) {
                0 => self.rename(number, &name)?,
                1 | 2 => self.write(number, &name)?,
                _ => self.remove(number, &name)?,
            },
        };
        if outcome.is_ok() {
            self.done.fetch_add(1, Ordering::SeqCst);
        }
        Ok(outcome)
    }

    fn add(&mut self, number: u64) -> io::Result<Result> {
        let name = format!("t{}-{number}-a", self.thread);
        let (keep, cache) = (
            self.random.below(4) > 0,
            if self.random.below(2) == 0 { "none" } else { "writeback" },
        );
        let store = format!("file:{}", self.place.image(self.thread, number).display());
        self.update(number, |known| known.intent = Intent::Add(name.clone(), keep));
        let body = json!({"name": name, "store": store, "cache": cache, "persist": keep});
        let outcome = self.place.change("POST", "/v1/volumes", &body)?;
        self.update(number, |known| {
            known.intent = Intent::Nothing;
            known.volume = Some((name, keep));
        });
        Ok(outcome.map_err(Error::unexpected))
    }

    /// Writes the next number, and perhaps flushes it.
    fn write(&mut self, number: u64, name: &str) -> io::Result<Result> {
        let next = self.known(number).written + 1;
        let mut data = vec![0; 512];
        data[..8].copy_from_slice(&next.to_le_bytes());
        self.update(number, |known| known.written = next);
        let flush = self.random.below(2) == 0;
        let write = || -> Result {
            let mut client = Client::open(&self.place.nbd, name)?;
            client.write(0, &data, 0)?;
            if flush {
                client.flush()?;
            }
            Ok(client.disconnect()?)
        };
        match write() {
            // The kill shows at the control socket, too.
            Err(error) => {
                self.place.ask("GET", "/v1/version", &Value::Null)?;
                return Ok(Err(error));
            }
            Ok(()) if flush => self.update(number, |known| known.flushed = next),
            Ok(()) => {}
        }
        Ok(Ok(()))
    }

    fn remove(&mut self, number: u64, name: &str) -> io::Result<Result> {
        self.update(number, |known| known.intent = Intent::Remove);
        let outcome = self.place.change("DELETE", &format!("/v1/volumes/{name}"), &Value::Null)?;
        self.update(number, |known| {
            known.intent = Intent::Nothing;
            known.volume = None;
        });
        Ok(self.closed(number, outcome))
    }

    fn rename(&mut self, number: u64, name: &str) -> io::Result<Result> {
        let other = if name.ends_with('a') { "b" } else { "a" };
        let to = format!("t{}-{number}-{other}", self.thread);
        self.update(number, |known| known.intent = Intent::Rename(to.clone()));
        let path = format!("/v1/volumes/{name}/rename");
        // The last client may still be disconnecting.
        let deadline = std::time::Instant::now() + PATIENCE;
        let outcome = loop {
            match self.place.change("POST", &path, &json!({"name": to}))? {
                Err(why) if why.contains("in_use") && std::time::Instant::now() < deadline => {}
                outcome => break outcome,
            }
        };
        self.update(number, |known| {
            known.intent = Intent::Nothing;
            known.volume = known.volume.take().map(|(_, kept)| (to, kept));
        });
        Ok(self.closed(number, outcome))
    }

    /// After a volume was closed its image has everything.
    fn closed(&self, number: u64, outcome: Outcome) -> Result {
        outcome.map_err(Error::unexpected)?;
        let found = number_of(&self.place.image(self.thread, number))?;
        let known = self.known(number);
        self.update(number, |known| known.flushed = found);
        check(found == known.written, || format!("the image has {found} after {known:?}"))
    }

    /// Makes changes until `stop` says so, or the daemon does not reply, which is an error unless it is `killed`.
    fn run(mut self, stop: impl Fn() -> bool, killed: &AtomicBool) -> Result {
        while !stop() {
            match self.step() {
                Err(_) if killed.load(Ordering::SeqCst) => return Ok(()),
                Err(error) => return Err(Error::io("the control socket")(error)),
                Ok(outcome) => outcome?,
            }
        }
        Ok(())
    }
}

/// Every file of the state directory is complete.
fn files_are_complete(place: &Place) -> Result {
    let Ok(entries) = fs::read_dir(place.state.join("volumes")) else { return Ok(()) };
    for entry in entries {
        let path = entry.map_err(Error::io("the state directory"))?.path();
        if path.extension().is_none_or(|ending| ending != "toml") {
            // A temporary file, which the start removes.
            continue;
        }
        let text = fs::read_to_string(&path).map_err(Error::io(path.display().to_string()))?;
        let complete = text.starts_with("# Written by ebbd")
            && text.ends_with("\"\n")
            && text.contains("\nstore = \"file:");
        check(complete, || format!("{}: {text:?}", path.display()))?;
    }
    Ok(())
}

/// Compares all that was acknowledged with what the restarted daemon serves.
fn compare(place: &Place, known: &Mutex<BTreeMap<(u64, u64), Known>>) -> Result {
    let (_, volumes) =
        place.ask("GET", "/v1/volumes", &Value::Null).map_err(Error::io("volumes"))?;
    let mut names = Vec::new();
    for volume in volumes.as_array().into_iter().flatten() {
        let name = volume["name"].as_str().unwrap_or_default().to_owned();
        check(volume["state"] == "serving", || format!("{name} is not served: {volume}"))?;
        names.push(name);
    }
    for ((thread, number), known) in &mut *lock(known) {
        let own = format!("t{thread}-{number}-");
        let found: Vec<_> = names.iter().filter(|name| name.starts_with(&own)).cloned().collect();
        let on_disk = number_of(&place.image(*thread, *number))?;
        known.restarted(&found, on_disk).map_err(Error::unexpected)?;
    }
    let left = fs::read_dir(place.state.join("volumes")).into_iter().flatten().flatten();
    let temporary = left.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"."));
    check(temporary.count() == 0, || "temporary files are left after a start".into())
}

fn setup() -> Result<(Place, Setup)> {
    let setup = Setup::new()?.log_level("warn").image("disk", DISK as u64)?;
    let place = Place::of(setup.dir());
    for (thread, number) in (0..THREADS).flat_map(|t| (0..IMAGES).map(move |n| (t, n))) {
        let image =
            fs::File::create_new(place.image(thread, number)).and_then(|f| f.set_len(IMAGE));
        image.map_err(Error::io("an image"))?;
    }
    // With --strict a file that cannot be read fails the start.
    let setup = setup.arg("--strict").arg("--control").arg(&place.control);
    let setup = setup.arg("--state").arg(&place.state);
    Ok((place, setup))
}

fn all_images() -> BTreeMap<(u64, u64), Known> {
    let images = (0..THREADS).flat_map(|t| (0..IMAGES).map(move |n| (t, n)));
    images.map(|image| (image, Known::new())).collect()
}

/// One life of the daemon: changes and load until it is killed after `changes`.
fn round(
    server: &mut Server,
    place: &Place,
    known: &Mutex<BTreeMap<(u64, u64), Known>>,
    (ledger, random): (&Mutex<Ledger>, &mut Random),
    changes: u64,
) -> Result<u64> {
    let client = Client::open(&server.socket(), "disk")?;
    let writer = Writer::new(client, ledger, 0..DISK, random.next(), Promise::Durable);
    let (done, killed) = (AtomicU64::new(0), AtomicBool::new(false));
    let delay = Duration::from_micros(random.below(4000));
    let seeds: Vec<u64> = (0..THREADS).map(|_| random.next()).collect();
    std::thread::scope(|scope| {
        let load = scope.spawn(|| writer.run());
        let (done, killed) = (&done, &killed);
        let threads: Vec<_> = (0..THREADS)
            .zip(seeds)
            .map(|(thread, seed)| {
                let churn = Churn { place, thread, known, done, random: Random::new(seed) };
                scope.spawn(move || churn.run(|| false, killed))
            })
            .collect();
        let written = until("changes and writes", PATIENCE * 2, || {
            let failed = threads.iter().any(std::thread::ScopedJoinHandle::is_finished);
            Ok((failed || done.load(Ordering::SeqCst) >= changes).then_some(()))
        });
        let written = written.and_then(|()| let_write(ledger, 10, delay));
        let healthy = server.healthy();
        // Also after an error: the threads end only when the daemon does.
        killed.store(true, Ordering::SeqCst);
        server.kill9()?;
        let panicked = || Error::unexpected("a thread panicked");
        for thread in threads {
            thread.join().map_err(|_| panicked())??;
        }
        load.join().map_err(|_| panicked())??;
        written.and(healthy)?;
        Ok(done.load(Ordering::SeqCst))
    })
}

#[test]
fn volumes_change_under_load_and_kills_leave_what_was_acknowledged() -> Result {
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_d014);
    let (number, mut random) = (changes(), Random::new(seed));
    let (place, setup) = setup()?;
    let mut server = setup.start()?;
    let (known, ledger) = (Mutex::new(all_images()), Mutex::new(Ledger::new(DISK)));
    let (mut done, mut kills) = (0, 0);
    while done < number {
        let changes = random.below(2 * PER_KILL);
        let at = |e: Error| Error::unexpected(format!("EBBD_TEST_SEED={seed}, kill {kills}: {e}"));
        done += round(&mut server, &place, &known, (&ledger, &mut random), changes).map_err(at)?;
        files_are_complete(&place).map_err(at)?;
        server.restart().map_err(at)?;
        compare(&place, &known).map_err(at)?;
        let mut client = Client::open(&server.socket(), "disk")?;
        let mut ledger = lock(&ledger);
        for offset in (0..DISK as u64).step_by(1 << 20) {
            ledger.crashed(offset, &client.read(offset, 1 << 20)?).map_err(at)?;
        }
        client.disconnect()?;
        kills += 1;
    }
    let promised = lock(&ledger).promised();
    check(promised > 100, || format!("only {promised} sectors of the load were promised"))?;
    server.stop()
}

#[test]
fn volumes_that_were_added_and_removed_leave_no_descriptor_and_no_memory() -> Result {
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_d015);
    let number = changes();
    let (place, setup) = setup()?;
    let mut server = setup.start()?;
    let (known, killed) = (Mutex::new(all_images()), AtomicBool::new(false));
    let run = |number: u64, seed: u64| -> Result {
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let (done, killed) = (&done, &killed);
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let random = Random::new(seed ^ thread);
                    let churn = Churn { place: &place, thread, known: &known, done, random };
                    scope.spawn(move || churn.run(|| done.load(Ordering::SeqCst) >= number, killed))
                })
                .collect();
            for thread in threads {
                thread.join().map_err(|_| Error::unexpected("a thread panicked"))??;
            }
            Ok::<_, Error>(())
        })?;
        check(done.load(Ordering::SeqCst) >= number, || "the daemon has ended".into())?;
        for ((thread, number), known) in &mut *lock(&known) {
            let Some((name, _)) = known.volume.take() else { continue };
            let outcome = place.change("DELETE", &format!("/v1/volumes/{name}"), &Value::Null);
            outcome.map_err(Error::io("remove"))?.map_err(Error::unexpected)?;
            let found = number_of(&place.image(*thread, *number))?;
            check(found == known.written, || format!("{name} has {found}, not {known:?}"))?;
        }
        Ok(())
    };
    // What is made once: threads' memory, tables, the operations that are remembered.
    run(number.min(600), seed)?;
    let used = || -> Result<u64> {
        let stat = place.stat()?;
        let zones = stat["memory"]["zones"].as_array().cloned().unwrap_or_default();
        Ok(zones.iter().filter_map(|zone| zone["used"].as_u64()).sum())
    };
    let wired =
        || Ok::<_, Error>(place.stat()?["memory"]["wired_bytes"].as_u64().unwrap_or(u64::MAX));
    let (held, used_before, wired_before) = (Held::by(server.pid()?)?, used()?, wired()?);
    run(number, !seed)?;
    let back = || Ok((used()? <= used_before && wired()? <= wired_before + SLACK).then_some(()));
    until("blocks and wired memory are given back", PATIENCE, back)?;
    held.returned(SLACK)?;
    let left = fs::read_dir(place.state.join("volumes")).into_iter().flatten().count();
    check(left == 0, || format!("{left} files are left"))?;
    let (_, volumes) =
        place.ask("GET", "/v1/volumes", &Value::Null).map_err(Error::io("volumes"))?;
    check(volumes.as_array().is_some_and(|all| all.len() == 1), || volumes.to_string())?;
    server.healthy()?;
    server.stop()
}

/// The commands as an operator uses them, also on a daemon that starts without a volume.
#[test]
fn an_operator_adds_shows_resizes_renames_flushes_and_removes_volumes() -> Result {
    let setup = Setup::new()?;
    let place = Place::of(setup.dir());
    let setup = setup.arg("--control").arg(&place.control).arg("--state").arg(&place.state);
    let mut server = setup.start()?;
    let ebbd = |arguments: &[&str]| -> Result<Tool> {
        let tool = Tool::new(binary::ebbd(Build::AsTests)?).args(arguments);
        Ok(tool.arg("--control").arg(&place.control))
    };
    let says = |arguments: &[&str], part: &str| -> Result {
        let outcome = ebbd(arguments)?.ok()?;
        outcome.check(outcome.stdout.contains(part), part)
    };
    let refuses = |arguments: &[&str], parts: &[&str]| -> Result {
        let outcome = ebbd(arguments)?.run()?;
        let fits = parts.iter().all(|part| outcome.stderr.contains(part));
        let one_line = outcome.stderr.trim_end().lines().count() == 1;
        outcome.check(fits && one_line && outcome.status.code() == Some(2), &format!("{parts:?}"))
    };
    let image = format!("file:{}", server.dir().join("new.img").display());
    let add = ["volume", "add", "new", &image, "--size", "1M", "--create", "--cache", "writeback"];
    says(&[&add[..], &["--persist"]].concat(), "new: added, 1M\n")?;
    says(&["volume", "list"], "state")?;
    says(&["volume", "show", "new"], "writeback")?;
    refuses(&add, &["there is a volume `new` already", "choose another name"])?;
    refuses(&["volume", "add", "other", &image], &["volume new is on the same file"])?;
    refuses(&["volume", "add", "a", "fiel:/x"], &["store: ", "file:"])?;
    refuses(&["volume", "add", "..", "null:1G"], &["name: ", "choose another name"])?;
    refuses(
        &["volume", "add", "a", "null:1G", "--cache", "on"],
        &["cache: ", "did you mean `none`?"],
    )?;
    refuses(&["volume", "add", "a", "file:/no/image"], &["/no/image", "add the volume again"])?;
    refuses(&["volume", "remove", "news"], &["did you mean `new`?"])?;
    refuses(&["volume", "rename", "new", "new"], &["another operation", "wait"])
        .or_else(|_| refuses(&["volume", "rename", "new", "new"], &["already"]))?;
    let mut client = Client::open(&server.socket(), "new")?;
    client.write(0, &[7; 4096], 0)?;
    says(&["flush", "new", "--wait"], "flushed")?;
    refuses(&["volume", "rename", "new", "disk"], &["in use by 1 client;", "disconnect"])?;
    client.disconnect()?;
    until("the client is gone", PATIENCE, || {
        Ok(ebbd(&["volume", "rename", "new", "install cd"])?.run()?.status.success().then_some(()))
    })?;
    says(&["volume", "resize", "install cd", "2M"], "install cd: 1M -> 2M\n")?;
    says(&["volume", "resize", "install cd", "512K", "--shrink"], "2M -> 512K\n")?;
    says(&["reload", "--wait"], "reloaded")?;
    says(&["flush", "--all"], "flushed")?;
    server.kill9()?;
    server.restart()?;
    let shown = ebbd(&["volume", "show", "install cd", "--json"])?.ok()?.json()?;
    check(shown["stat"]["size_bytes"] == 512 << 10, || format!("{shown}"))?;
    let mut client = Client::open(&server.socket(), "install cd")?;
    check(client.read(0, 4096)? == [7; 4096], || "the data is not there".into())?;
    client.disconnect()?;
    says(&["volume", "remove", "install cd", "--wait"], "removed")?;
    let list = ebbd(&["operation", "list", "--json"])?.ok()?.json()?;
    check(list[0]["kind"] == "remove" && list[0]["state"] == "done", || format!("{list}"))?;
    refuses(&["operation", "cancel", "99"], &["no operation 99", "operation list"])?;
    server.stop()?;
    server.restart()?;
    let none = ebbd(&["volume", "list", "--json"])?.ok()?.json()?;
    check(none.as_array().is_some_and(Vec::is_empty), || format!("{none}"))?;
    server.stop()
}

/// A server that takes connections and never replies keeps a volume from being added; cancelling that frees the name.
#[test]
fn an_addition_that_waits_for_a_silent_server_can_be_cancelled() -> Result {
    let setup = Setup::new()?.image("disk", IMAGE)?;
    let place = Place::of(setup.dir());
    let silent = setup.dir().join("silent.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&silent).map_err(Error::io("bind"))?;
    let mut server = setup.arg("--control").arg(&place.control).start()?;
    let store = format!("nbd+unix:///a?socket={}", silent.display());
    let body = json!({"name": "remote", "store": store});
    let (status, view) = place.ask("POST", "/v1/volumes", &body).map_err(Error::io("add"))?;
    check(status == 202 && view["cancellable"] == true, || format!("{status} {view}"))?;
    let tool = |arguments: &[&str]| -> Result<Tool> {
        let tool = Tool::new(binary::ebbd(Build::AsTests)?).args(arguments);
        Ok(tool.arg("--control").arg(&place.control))
    };
    let shown = tool(&["operation", "list"])?.ok()?;
    shown.check(shown.stdout.contains("opening the store"), "its step")?;
    let id = view["id"].to_string();
    let cancelled = tool(&["operation", "cancel", &id])?.ok()?;
    cancelled.check(cancelled.stdout.contains("cancelled"), "its state")?;
    until("the name is free", PATIENCE, || {
        let added =
            place.change("POST", "/v1/volumes", &json!({"name": "remote", "store": "null:1G"}));
        Ok(added.map_err(Error::io("add"))?.ok())
    })?;
    server.stop()
}
