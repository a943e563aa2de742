//! Encrypted volumes of a daemon: what clients write is there after a restart and not in the file, `cryptsetup` opens it, keys
//! change, and whatever would be served with a wrong key, or in plain text, is refused.

#![allow(clippy::print_stdout, reason = "a test's figures")]

mod keys;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Signal;
use testbed::guest::kernel;
use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::{Client, Failure};
use testbed::harness::pattern::content;
use testbed::harness::process::{PATIENCE, until};
use testbed::{Error, Result, Server, Setup, Tool, check};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
/// Bytes of the header of a volume that ebbd makes.
const HEADER: usize = 16 << 20;
/// Where the tests write, and what.
const AT: u64 = MIB;
const LENGTH: usize = 256 << 10;
const STAMP: u64 = 7;

/// `cryptsetup`, as `testbed/install` has unpacked it.
fn cryptsetup(args: &[&str]) -> Result<Tool> {
    let root = kernel::cache().join("cryptsetup");
    let program = root.join("sbin/cryptsetup");
    check(program.is_file(), || format!("no {}: run testbed/install", program.display()))?;
    let libraries =
        ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"].map(|path| root.join(path));
    let libraries = std::env::join_paths(libraries);
    let libraries = libraries.map_err(|error| Error::unexpected(error.to_string()))?;
    Ok(Tool::new(program).env("LD_LIBRARY_PATH", libraries).args(args))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(Error::io(path.display().to_string()))
}

fn write(path: &Path, text: impl AsRef<[u8]>) -> Result {
    fs::write(path, text).map_err(Error::io(path.display().to_string()))
}

/// A daemon with a volume `disk`, configured by a file.
struct Rig {
    server: Server,
    config: PathBuf,
}

impl Rig {
    /// Each key file has its own name as its content.
    fn start(volume: &str) -> Result<Rig> {
        Rig::start_with("", volume)
    }

    /// As [`Rig::start`], with a setting of the daemon.
    fn start_with(setting: &str, volume: &str) -> Result<Rig> {
        let setup = Setup::new()?;
        for key in ["one.key", "two.key", "wrong.key"] {
            write(&setup.dir().join(key), key)?;
        }
        let config = setup.dir().join("ebbd.toml");
        configure(&config, volume)?;
        let setting = setting.replace("DIR", &setup.dir().display().to_string());
        write(&config, [setting.as_bytes(), b"\n", &read(&config)?].concat())?;
        let server = setup.arg("--config").arg(&config).start()?;
        Ok(Rig { server, config })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.server.dir().join(name)
    }

    fn image(&self) -> PathBuf {
        self.path("disk.luks")
    }

    /// The daemon listens before a key is derived, which takes seconds on a busy machine.
    fn client(&self) -> Result<Client> {
        until("the volume is served", PATIENCE, || {
            Ok(Client::open(&self.server.socket(), "disk").ok())
        })
    }

    /// Reads what the tests write.
    fn verify(&self) -> Result {
        let data = self.client()?.read(AT, 256 << 10)?;
        check(data == content(STAMP, AT, LENGTH), || "other data than was written".into())
    }

    fn fill(&self) -> Result {
        let mut client = self.client()?;
        client.write(AT, &content(STAMP, AT, LENGTH), 0)?;
        Ok(client.flush()?)
    }

    /// `ebbd image key`, on the file of the volume.
    fn key(&self, command: &str, more: &[&str]) -> Result<Tool> {
        let tool = Tool::new(binary::ebbd(Build::AsTests)?).dir(self.server.dir());
        let store = format!("file:{}", self.image().display());
        Ok(tool.args(["image", "key", command, &store]).args(more))
    }

    /// Whether `cryptsetup` opens the volume with a key.
    fn cryptsetup_opens(&self, key: &str) -> Result<bool> {
        let (key, image) = (self.path(key), self.image());
        let tool = cryptsetup(&["open", "--test-passphrase", "--key-file"])?.arg(key).arg(image);
        Ok(tool.run()?.status.success())
    }

    /// Puts another configuration in force, and waits until the log has the text once more.
    fn reload(&self, volume: &str, text: &str) -> Result {
        configure(&self.config, volume)?;
        let before = self.server.log().matches(text).count();
        self.server.signal(Signal::HUP)?;
        until(&format!("`{text}` is in the log"), PATIENCE, || {
            Ok((self.server.log().matches(text).count() > before).then_some(()))
        })
    }

    fn log_has(&self, text: &str) -> Result {
        let log = self.server.log();
        check(log.contains(text), || format!("`{text}` is not in the log:\n{log}"))
    }

    /// Searches the file for each sector that the tests write: no two are the same.
    fn has_no_plain_data(&self) -> Result {
        let (bytes, plain) = (read(&self.image())?, content(STAMP, AT, LENGTH));
        let plain: HashSet<&[u8]> = plain.chunks(512).collect();
        let found = bytes.chunks(512).position(|piece| plain.contains(piece));
        check(found.is_none(), || format!("plain data is in the file, at sector {found:?}"))
    }

    fn stop(mut self) -> Result {
        self.server.healthy()?;
        self.server.stop()
    }
}

/// Writes the configuration with the settings of the volume; DIR is the directory of the daemon.
fn configure(file: &Path, volume: &str) -> Result {
    let dir = file.parent().unwrap_or(Path::new("/")).display().to_string();
    let text = format!(
        "control = \"unix:DIR/control.sock\"\n[volume.disk]\nstore = \"file:DIR/disk.luks\"\n{volume}\n"
    );
    write(file, text.replace("DIR", &dir))
}

const ONE: &str = "encryption = \"key-file:DIR/one.key\"";

/// A new volume of 8 MiB under the first key.
fn new(more: &str) -> String {
    format!("{ONE}\nsize = \"8M\"\ncreate = true\n{more}")
}

/// Writes blocks, reads them back and flushes on one connection, until told to end.
fn use_connection(mut client: Client, end: &AtomicBool) -> Result<u64> {
    let mut stamps = [0_u64; 64];
    let mut requests = 0;
    while !end.load(Ordering::Relaxed) || requests == 0 {
        requests += 1;
        let block = requests * 37 % 64;
        let (offset, known) = (block * 4096, &mut stamps[usize::try_from(block).unwrap_or(0)]);
        if *known > 0 {
            let found = client.read(offset, 4096)?;
            check(found == content(*known, offset, 4096), || format!("other data at {offset}"))?;
        }
        *known = requests;
        client.write(offset, &content(requests, offset, 4096), 0)?;
        if requests % 16 == 0 {
            client.flush()?;
        }
    }
    for (block, known) in (0..).zip(stamps).filter(|(_, known)| *known > 0) {
        let offset = block * 4096;
        let found = client.read(offset, 4096)?;
        check(found == content(known, offset, 4096), || format!("other data at {offset}"))?;
    }
    client.disconnect()?;
    Ok(requests)
}

/// Their keys take seconds: a successor derives them while its predecessor still serves.
#[test]
fn a_takeover_keeps_the_clients_of_encrypted_volumes() -> Result {
    let (takeovers, volumes) = (seeded::scaled(2), seeded::scaled(4).clamp(4, 16));
    let setup = Setup::new()?;
    let (dir, file) = (setup.dir().to_owned(), setup.dir().join("ebbd.toml"));
    write(&dir.join("one.key"), "one.key")?;
    let mut text = String::new();
    for number in 0..volumes {
        text += &format!(
            "[volume.disk{number}]\nstore = \"file:DIR/disk{number}.luks\"\n{ONE}\nsize = \"1M\"\ncreate = true\n"
        );
    }
    write(&file, text.replace("DIR", &dir.display().to_string()))?;
    let control = dir.join("control.sock");
    let mut server = setup.arg("--config").arg(&file).arg("--control").arg(control).start()?;
    let open = |number| {
        until("the volume is served", PATIENCE, || {
            Ok(Client::open(&server.socket(), &format!("disk{number}")).ok())
        })
    };
    let clients = (0..volumes).map(open).collect::<Result<Vec<_>>>()?;
    let end = AtomicBool::new(false);
    let (handed, used) = std::thread::scope(|scope| {
        let end = &end;
        let load: Vec<_> = clients
            .into_iter()
            .map(|client| scope.spawn(move || use_connection(client, end)))
            .collect();
        let handed = (0..takeovers).try_for_each(|round| {
            let mut old = server.take_over()?;
            let ended = testbed::harness::process::wait(&mut old, PATIENCE)?;
            check(ended.is_some_and(|status| status.success()), || format!("takeover {round}"))
        });
        end.store(true, Ordering::Relaxed);
        let used = load.into_iter().map(|used| used.join().unwrap_or(Ok(0))).collect::<Vec<_>>();
        (handed, used)
    });
    handed.map_err(|error| Error::unexpected(format!("{error}: {}", server.log())))?;
    let mut requests = 0;
    for (number, used) in used.into_iter().enumerate() {
        let used = used.map_err(|error| {
            Error::unexpected(format!("the client of disk{number}: {error}: {}", server.log()))
        })?;
        check(used > 0, || format!("the client of disk{number} panicked"))?;
        requests += used;
    }
    println!("{takeovers} takeovers with {volumes} encrypted volumes and {requests} writes");
    check(!server.log().contains("requested an unknown export"), || server.log())?;
    server.stop()
}

#[test]
fn what_clients_wrote_is_there_after_a_restart_and_not_in_the_file() -> Result {
    for cache in ["none", "writethrough", "writeback"] {
        let mut rig = Rig::start(&new(&format!("cache = \"{cache}\"")))?;
        rig.fill()?;
        rig.verify()?;
        rig.server.stop()?;
        rig.server.restart()?;
        rig.verify()?;
        let blank = rig.client()?.read(4 * MIB, 4096)?;
        check(blank.iter().all(|byte| *byte == 0), || "a new volume is not all zeroes".into())?;
        rig.server.kill9()?;
        let bytes = read(&rig.image())?;
        check(bytes.len() == HEADER + 8 * 1024 * 1024, || format!("{} bytes", bytes.len()))?;
        rig.has_no_plain_data()?;
        let written = &bytes[HEADER + (1 << 20)..][..LENGTH];
        check(written.iter().any(|byte| *byte != 0), || "nothing was written".into())?;
    }
    Ok(())
}

#[test]
fn a_wrong_key_is_refused_with_a_remedy_and_the_right_one_opens_the_volume_later() -> Result {
    let mut rig = Rig::start(&new(""))?;
    rig.fill()?;
    rig.server.stop()?;
    let before = read(&rig.image())?;
    for (encryption, remedy) in [
        ("key-file:DIR/wrong.key", "give the right key"),
        ("key-file:DIR/absent.key", "check the path"),
        ("credential:disk.key", "LoadCredential=disk.key"),
        ("command:/bin/false", "run it by hand"),
    ] {
        configure(
            &rig.config,
            &format!("encryption = \"{encryption}\"\nsize = \"8M\"\ncreate = true"),
        )?;
        let ebbd = Tool::new(binary::ebbd(Build::AsTests)?);
        let checked = ebbd
            .args(["serve", "--check", "--listen", "unix:/tmp/ebbd-never-made.sock", "--config"])
            .arg(&rig.config)
            .run()?;
        checked.check(!checked.status.success(), "a mistake")?;
        let said = format!("{}{}", checked.stdout, checked.stderr);
        checked.check(said.contains(remedy), remedy)?;
    }
    configure(&rig.config, "encryption = \"key-file:DIR/wrong.key\"")?;
    rig.server.restart()?;
    rig.log_has("opens none of its 1 key slots: give the right key")?;
    match Client::open(&rig.server.socket(), "disk") {
        Err(Failure::Io(error)) => return Err(Error::io("connect")(error)),
        Err(_) => {}
        Ok(_) => return Err(Error::unexpected("served with a wrong key")),
    }
    check(read(&rig.image())? == before, || "the file has changed".into())?;
    rig.reload(ONE, "reloaded")?;
    rig.verify()?;
    rig.stop()
}

#[test]
fn keys_are_listed_added_changed_and_removed_and_cryptsetup_agrees() -> Result {
    let mut rig = Rig::start(&new(""))?;
    rig.fill()?;
    let busy = rig.key("list", &[])?.fails()?;
    busy.check(busy.stderr.contains("has it open"), "that the daemon has it open")?;
    rig.server.stop()?;
    let listed = |rig: &Rig| Ok::<_, Error>(rig.key("list", &[])?.ok()?.stdout.lines().count());
    check(listed(&rig)? == 1, || "not one key".into())?;
    check(rig.cryptsetup_opens("one.key")?, || "cryptsetup does not open it".into())?;
    rig.key("add", &["--key-file", "one.key", "--new-key-file", "two.key"])?.ok()?;
    check(listed(&rig)? == 2, || "not two keys".into())?;
    check(rig.cryptsetup_opens("two.key")?, || "not with the second key".into())?;
    rig.key("remove", &["0"])?.ok()?;
    check(!rig.cryptsetup_opens("one.key")?, || "with the key that was removed".into())?;
    let last = rig.key("remove", &["1"])?.fails()?;
    last.check(last.stderr.contains("add another key first"), "the last key stays")?;
    let wrong =
        rig.key("change", &["--key-file", "one.key", "--new-key-file", "two.key"])?.fails()?;
    wrong.check(wrong.stderr.contains("opens none of its 1 key slots"), "a wrong key")?;
    rig.key("change", &["--key-file", "two.key", "--new-key-file", "one.key"])?.ok()?;
    check(listed(&rig)? == 1 && rig.cryptsetup_opens("one.key")?, || "not changed".into())?;
    rig.server.restart()?;
    rig.verify()?;
    rig.stop()
}

#[test]
fn a_volume_that_cryptsetup_made_is_served() -> Result {
    let mut rig = Rig::start("encryption = \"key-file:DIR/one.key\"")?;
    rig.log_has("no such file")?;
    let image = rig.image();
    let file = fs::File::create(&image).and_then(|file| file.set_len(HEADER as u64 + SIZE));
    file.map_err(Error::io("make an image"))?;
    let (key, image) = (rig.path("one.key"), image.display().to_string());
    let cheap = ["--pbkdf", "argon2id", "--pbkdf-memory", "65536", "--pbkdf-force-iterations", "4"];
    let format = ["luksFormat", "-q", "--type", "luks2", "--key-size", "512", &image, "--key-file"];
    cryptsetup(&format)?.arg(key).args(cheap).ok()?;
    rig.reload("encryption = \"key-file:DIR/one.key\"\ndirect = \"off\"", "reloaded")?;
    rig.fill()?;
    rig.verify()?;
    rig.has_no_plain_data()?;
    // It waits for the lock of the file.
    rig.server.stop()?;
    check(rig.cryptsetup_opens("one.key")?, || "cryptsetup does not open it any more".into())
}

#[test]
fn a_reload_serves_with_the_new_key_or_says_that_it_does_not() -> Result {
    let rig = Rig::start(&new("cache = \"writeback\""))?;
    rig.fill()?;
    let mut client = rig.client()?;
    let wrong = "encryption = \"key-file:DIR/wrong.key\"\nsize = \"8M\"\ncreate = true\ncache = \"writeback\"";
    rig.reload(wrong, "not changed, and served as before")?;
    rig.log_has("opens none of its 1 key slots")?;
    // The clients of before are still connected.
    client.read(AT, 4096)?;
    let status = rig.server.operator(&["volume", "show", "disk"])?.ok()?;
    status.check(
        status.stdout.contains("did not change it"),
        "why the volume is not as it is configured",
    )?;
    let program = "encryption = \"command:/bin/echo -n one.key\"\nsize = \"8M\"\ncreate = true";
    rig.reload(program, "reloaded")?;
    rig.verify()?;
    // Without the setting the operator asks for ciphertext, and is warned.
    rig.reload("", "looks like a LUKS image")?;
    let mut raw = rig.client()?;
    check(&raw.read(0, 512)?[..4] == b"LUKS", || "not the file as it is".into())?;
    drop(raw);
    rig.reload(ONE, "reloaded")?;
    rig.verify()?;
    rig.stop()
}

#[test]
fn an_encrypted_volume_is_resized_and_what_is_added_reads_as_zeroes() -> Result {
    let mut rig = Rig::start(&new(""))?;
    rig.fill()?;
    rig.server.operator(&["volume", "resize", "disk", "12M"])?.ok()?;
    let length = |bytes: u64| {
        let found = fs::metadata(rig.image()).map(|found| found.len()).unwrap_or(0);
        check(found == bytes + HEADER as u64, || format!("the file has {found} bytes"))
    };
    length(12 * MIB)?;
    let mut client = rig.client()?;
    let added = client.read(SIZE, 4 << 20)?;
    check(added.iter().all(|byte| *byte == 0), || "what was added is not zero".into())?;
    client.write(12 * MIB - 4096, &[9; 4096], 0)?;
    client.flush()?;
    rig.verify()?;
    let odd = rig.server.operator(&["volume", "resize", "disk", "12583424"])?.fails()?;
    odd.check(odd.stderr.contains("4096"), "a multiple of sectors")?;
    let smaller = rig.server.operator(&["volume", "resize", "disk", "4M"])?.fails()?;
    smaller.check(smaller.stderr.contains("shrink"), "that data would be lost")?;
    length(12 * MIB)?;
    // Not below the size of the configuration: the next start would refuse that.
    rig.server.operator(&["volume", "resize", "disk", "8M", "--shrink"])?.ok()?;
    length(8 * MIB)?;
    rig.server.operator(&["volume", "resize", "disk", "12M"])?.ok()?;
    drop(client);
    rig.server.stop()?;
    rig.server.restart()?;
    rig.verify()?;
    let again = rig.client()?.read(8 * MIB, 4 << 20)?;
    check(again.iter().all(|byte| *byte == 0), || "what was cut off is there again".into())?;
    rig.stop()
}

#[test]
fn a_volume_added_at_run_time_is_encrypted_and_runs_no_program() -> Result {
    let mut rig = Rig::start(&new(""))?;
    let added = rig.path("added.luks");
    let (store, key) = (format!("file:{}", added.display()), rig.path("two.key"));
    let key = format!("key-file:{}", key.display());
    let add = |name: &str, store: &str, more: &[&str]| {
        let more = [&["volume", "add", name, store, "--wait"], more].concat();
        rig.server.operator(&more)
    };
    let create = ["--size", "8M", "--create", "--encryption"];
    let program = format!("command:/bin/cp {0} {0}.copy", rig.path("one.key").display());
    let refused = add("added", &store, &[&create[..], &[&program]].concat())?.fails()?;
    refused.check(refused.stderr.contains("cannot name a program"), "no program")?;
    check(!rig.path("one.key.copy").exists() && !added.exists(), || "it ran".into())?;
    add("added", &store, &[&create[..], &[&key]].concat())?.ok()?;
    let mut client = Client::open(&rig.server.socket(), "added")?;
    client.write(0, &[0x5a; 65536], 0)?;
    client.flush()?;
    drop(client);
    let bytes = read(&added)?;
    check(bytes.starts_with(b"LUKS"), || "it is not encrypted".into())?;
    check(!bytes.windows(16).any(|found| found == [0x5a; 16]), || "plain data is in it".into())?;
    // A delta would hold parts of an encrypted base in plain text.
    let read_only = ["--read-only", "--encryption", &key];
    rig.server.operator(&["volume", "remove", "added", "--wait"])?.ok()?;
    add("added", &store, &read_only)?.ok()?;
    let delta = format!("file:{}", rig.path("delta").display());
    let overlay = add("overlay", &delta, &["--base", "added", "--create"])?.fails()?;
    overlay.check(overlay.stderr.contains("is encrypted, and a delta is not"), "no overlay")?;
    let both = ["--base", "added", "--create", "--encryption", &key];
    let both = add("overlay", &delta, &both)?.fails()?;
    both.check(both.stderr.contains("the delta of an overlay cannot be encrypted"), "no overlay")?;
    check(!rig.path("delta").exists(), || "a delta was made".into())?;
    rig.server.healthy()?;
    rig.server.stop()
}

#[test]
fn a_file_that_holds_something_is_not_made_an_encrypted_volume() -> Result {
    let mut rig = Rig::start(&new(""))?;
    rig.server.stop()?;
    let mut disk = vec![0; HEADER + 8 * 1024 * 1024];
    for at in [0, HEADER - 1, HEADER + 4096] {
        disk[at] = 1;
        write(&rig.image(), &disk)?;
        rig.server.restart()?;
        rig.log_has("something that is no LUKS volume")?;
        rig.server.stop()?;
        check(read(&rig.image())? == disk, || "it was changed".into())?;
        disk[at] = 0;
    }
    Ok(())
}
