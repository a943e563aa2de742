//! Keys of encrypted volumes that are open: changed while clients write, while the daemon is killed, and by several operators.

use std::thread;
use std::time::{Duration, Instant};

use testbed::harness::nbd::Client;
use testbed::harness::process::{PATIENCE, until};
use testbed::{Error, Result, Tool, check};

use super::{MIB, ONE, Rig, cryptsetup, new, write};

/// Kills in the middle of a change.
const KILLS: u32 = 24;
const TWO: &str = "encryption = \"key-file:DIR/two.key\"";

impl Rig {
    /// `ebbd volume key` on the volume.
    fn open_key(&self, command: &str, more: &[&str]) -> Result<Tool> {
        let more = [&["volume", "key", command, "disk"], more].concat();
        Ok(self.server.operator(&more)?.limit(PATIENCE * 2))
    }

    fn source(&self, key: &str) -> String {
        format!("key-file:{}", self.path(key).display())
    }

    /// Adds a key while the volume is open; returns its slot.
    fn add_key(&self, key: &str) -> Result<String> {
        let added = self.open_key("add", &[&self.source(key), "--wait"])?.ok()?;
        let slot = added.stdout.trim().strip_prefix("disk: added key slot ");
        slot.map(str::to_owned).ok_or_else(|| added.unexpected("the number of the slot"))
    }

    fn remove_key(&self, slot: &str) -> Result {
        let removed = self.open_key("remove", &[slot, "--wait"])?.ok()?;
        removed.check(removed.stdout == format!("disk: removed key slot {slot}\n"), "the slot")
    }

    /// The numbers of the slots.
    fn open_slots(&self) -> Result<Vec<String>> {
        let listed = self.open_key("list", &[])?.ok()?.stdout;
        let number = |line: &str| line.split(':').next().unwrap_or_default().to_owned();
        Ok(listed.lines().map(number).collect())
    }
}

#[test]
fn keys_of_an_open_volume_are_listed_added_and_removed_and_cryptsetup_agrees() -> Result {
    let mut rig = Rig::start(&new(""))?;
    rig.fill()?;
    let mut client = rig.client()?;
    write(&rig.path("two.key"), "a key that is in no log")?;
    check(rig.open_slots()? == ["0"], || "not one key".into())?;
    check(rig.add_key("two.key")? == "1", || "another slot".into())?;
    let listed = rig.open_key("list", &["--json"])?.ok()?.json()?;
    check(listed["slots"].as_array().is_some_and(|slots| slots.len() == 2), || {
        format!("not two slots: {listed}")
    })?;

    for (command, more, said) in [
        ("add", vec![rig.source("absent.key")], "check the path"),
        ("add", vec!["credential:absent".to_owned()], "LoadCredential=absent"),
        ("add", vec!["command:/bin/true".to_owned()], "cannot name a program"),
        ("add", vec!["two.key".to_owned()], "key-file:PATH"),
        ("remove", vec!["0".to_owned()], "`ebbd volume key use`"),
        ("remove", vec!["7".to_owned()], "it has no key slot 7"),
    ] {
        let more: Vec<&str> = more.iter().map(String::as_str).chain(["--wait"]).collect();
        let refused = rig.open_key(command, &more)?.fails()?;
        refused.check(refused.stderr.contains(said), said)?;
    }
    write(&rig.path("one.key"), "changed meanwhile")?;
    let refused = rig.open_key("remove", &["1", "--wait"])?.fails()?;
    refused.check(refused.stderr.contains("opens none of its 2 key slots"), "a wrong key")?;
    rig.open_key("remove", &["0", "--force", "--wait"])?.ok()?;
    let last = rig.open_key("remove", &["1", "--force", "--wait"])?.fails()?;
    last.check(last.stderr.contains("add another key first"), "the last key stays")?;
    write(&rig.path("one.key"), "one.key")?;

    client.read(0, 4096)?;
    drop(client);
    rig.verify()?;
    let log = rig.server.log();
    check(!log.contains("that is in no log"), || "a key is in the log".into())?;
    let by = format!("by=\"uid:{}\"", rustix::process::geteuid().as_raw());
    for text in ["a key was added", "a key was removed"] {
        let line = log.lines().find(|line| line.contains(text));
        check(line.is_some_and(|line| line.contains(&by)), || format!("{text}, {by}:\n{log}"))?;
    }
    rig.server.stop()?;
    check(rig.cryptsetup_opens("two.key")? && !rig.cryptsetup_opens("one.key")?, || {
        "cryptsetup opens it with another key than the second".into()
    })?;
    cryptsetup(&["luksDump"])?.arg(rig.image()).ok()?;
    Ok(())
}

#[test]
fn slot_is_removed_if_the_configured_key_opens_another() -> Result {
    let mut rig = Rig::start(&new(""))?;
    rig.fill()?;
    check(rig.add_key("one.key")? == "1", || "another slot".into())?;
    check(rig.add_key("two.key")? == "2", || "another slot".into())?;
    rig.remove_key("0")?;
    let only = rig.open_key("remove", &["1", "--wait"])?.fails()?;
    only.check(only.stderr.contains("the only one that the configured key opens"), "the reason")?;
    rig.verify()?;
    rig.server.stop()
}

#[test]
fn a_volume_without_encryption_and_a_read_only_one_have_no_keys_to_change() -> Result {
    let mut rig = Rig::start(&new(""))?;
    rig.fill()?;
    rig.server.operator(&["volume", "add", "plain", "memory:1M"])?.ok()?;
    let plain = rig.server.operator(&["volume", "key", "list", "plain"])?.fails()?;
    plain.check(plain.stderr.contains("is not encrypted by ebbd"), "no key slots")?;
    rig.reload(&format!("{ONE}\nread_only = true"), "reloaded")?;
    rig.client()?;
    let refused = rig.open_key("add", &[&rig.source("two.key"), "--wait"])?.fails()?;
    refused.check(refused.stderr.contains("is read-only"), "no change")?;
    check(rig.open_slots()? == ["0"], || "not one key".into())?;
    rig.server.stop()
}

#[test]
fn a_volume_of_the_state_directory_is_opened_with_another_key_from_now_on() -> Result {
    let state = "state = \"DIR/state\"";
    let mut rig = Rig::start_with(state, &new(""))?;
    let store = format!("file:{}", rig.path("added.luks").display());
    let (one, two) = (rig.source("one.key"), rig.source("two.key"));
    let add = ["volume", "add", "added", &store, "--size", "8M", "--create", "--persist", "--wait"];
    rig.server.operator(&[&add[..], &["--encryption", &one]].concat())?.ok()?;
    let mut client = Client::open(&rig.server.socket(), "added")?;
    client.write(0, &[7; 4096], 0)?;
    let key = |more: &[&str]| rig.server.operator(&[&["volume", "key"], more].concat());
    let refused = key(&["use", "added", &two, "--wait"])?.fails()?;
    refused.check(refused.stderr.contains("opens none of its 1 key slots"), "a wrong key")?;
    key(&["add", "added", &two, "--wait"])?.ok()?;
    key(&["use", "added", &two, "--wait"])?.ok()?;
    key(&["remove", "added", "0", "--wait"])?.ok()?;
    let refused = key(&["use", "disk", &two, "--wait"])?.fails()?;
    refused.check(refused.stderr.contains("`encryption`"), "that the configuration has it")?;
    client.read(0, 4096)?;
    drop(client);
    rig.server.stop()?;
    rig.server.restart()?;
    let mut client = until("the volume is served", PATIENCE, || {
        Ok(Client::open(&rig.server.socket(), "added").ok())
    })?;
    let found = client.read(0, 4096)?;
    check(found == [7; 4096], || "other data".into())?;
    drop(client);
    rig.stop()
}

/// The key in a file of the configuration is exchanged again and again while `fio` writes and verifies.
#[test]
fn keys_are_exchanged_while_clients_write_and_none_notices() -> Result {
    let volume = |key: &str| format!("{key}\nsize = \"64M\"\ncreate = true\ncache = \"writeback\"");
    let mut rig = Rig::start(&volume(ONE))?;
    let mut client = rig.client()?;
    client.write(56 * MIB, &[0x5a; 65536], 0)?;
    let load = rig.server.verified_load();
    let load = thread::spawn(move || load.run());
    let keys = [("one.key", ONE), ("two.key", TWO)];
    let (mut slot, mut exchanged) = ("0".to_owned(), 0);
    while !load.is_finished() || exchanged < 2 {
        let (key, setting) = keys[(exchanged + 1) % 2];
        let added = rig.add_key(key)?;
        rig.reload(&volume(setting), "opened by another key from now on")?;
        let kept = rig.open_key("remove", &[&added, "--wait"])?.fails()?;
        kept.check(kept.stderr.contains("the configured key opens"), "the new key stays")?;
        rig.remove_key(&slot)?;
        (slot, exchanged) = (added, exchanged + 1);
    }
    let outcome = load.join().map_err(|_| Error::unexpected("the load panicked"))??;
    outcome.check(outcome.status.success(), "verified data")?;
    // The connection is that of the beginning.
    let found = client.read(56 * MIB, 65536)?;
    check(found == [0x5a; 65536], || "other data than was written".into())?;
    drop(client);
    rig.server.healthy()?;
    rig.server.stop()?;
    let (new, old) = (keys[exchanged % 2].0, keys[(exchanged + 1) % 2].0);
    check(rig.cryptsetup_opens(new)? && !rig.cryptsetup_opens(old)?, || {
        format!("after {exchanged} exchanges not {new} alone opens it")
    })?;
    rig.server.restart()?;
    let found = rig.client()?.read(56 * MIB, 65536)?;
    check(found == [0x5a; 65536], || "other data after a restart".into())?;
    rig.stop()
}

/// Kills the daemon at points all over a change, which adds and removes keys in turn.
#[test]
fn a_kill_in_the_middle_of_a_change_leaves_a_volume_that_opens() -> Result {
    let mut rig = Rig::start(&new(""))?;
    rig.fill()?;
    let began = Instant::now();
    rig.add_key("two.key")?;
    let whole = began.elapsed();
    let (mut half, mut added) = (0, 0);
    for kill in 0..KILLS {
        let slots = rig.open_slots()?;
        let change = match slots.iter().find(|slot| *slot != "0") {
            Some(slot) => rig.open_key("remove", &[slot, "--wait"])?,
            None => rig.open_key("add", &[&rig.source("two.key"), "--wait"])?,
        };
        let change = thread::spawn(move || change.run());
        // The header is written at the end.
        let part = if kill % 2 == 0 { kill * 4 } else { 70 + 2 * kill };
        thread::sleep(whole * part / 100 + Duration::from_micros(u64::from(kill) * 131));
        rig.server.kill9()?;
        change.join().map_err(|_| Error::unexpected("a thread panicked"))??;

        check(rig.cryptsetup_opens("one.key")?, || format!("kill {kill}: not opened"))?;
        let listed = rig.key("list", &[])?.ok()?.stdout;
        let count = listed.lines().filter(|line| !line.starts_with("warning")).count();
        check((1..=2).contains(&count), || format!("kill {kill}: {listed}"))?;
        added += usize::from(count == 2);
        half += usize::from(count != slots.len());
        rig.server.restart()?;
        rig.verify()?;
    }
    println!("{KILLS} kills, {half} after the change, {added} with two keys");
    rig.server.healthy()?;
    // What was interrupted last is completed by the next change.
    let slots = rig.open_slots()?;
    if let Some(slot) = slots.iter().find(|slot| *slot != "0") {
        rig.remove_key(slot)?;
    }
    rig.add_key("two.key")?;
    rig.server.stop()?;
    check(rig.cryptsetup_opens("two.key")?, || "not with the key that was added last".into())
}

#[test]
fn changes_of_several_operators_do_not_mix() -> Result {
    let mut rig = Rig::start(&new(""))?;
    rig.fill()?;
    let names: Vec<String> = (0..4).map(|number| format!("operator{number}.key")).collect();
    let mut tools = Vec::new();
    for name in &names {
        write(&rig.path(name), name)?;
        tools.push(rig.open_key("add", &[&rig.source(name), "--wait"])?);
    }
    tools.push(rig.open_key("list", &[])?);
    let running: Vec<_> = tools.into_iter().map(|tool| thread::spawn(move || tool.run())).collect();
    for one in running {
        let outcome = one.join().map_err(|_| Error::unexpected("a thread panicked"))??;
        outcome.check(outcome.status.success(), "each change is made")?;
    }
    check(rig.open_slots()?.len() == 5, || "not five slots".into())?;
    rig.verify()?;
    rig.server.stop()?;
    for name in names.iter().map(String::as_str).chain(["one.key"]) {
        check(rig.cryptsetup_opens(name)?, || format!("{name} does not open it"))?;
    }
    Ok(())
}
