//! Overlays and their snapshots with the clients that make backups: `nbdcopy`, `nbdinfo`, `qemu-img`, and the changed blocks
//! of the daemon's own interface.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::Value;
use testbed::harness::nbd::{Client, wire};
use testbed::harness::pattern::{Random, content};
use testbed::harness::process::PATIENCE;
use testbed::{Error, Result, Server, Setup, Tool, check};

const BLOCK: u64 = 4096;
/// No multiple of a block.
const SIZE: u64 = (24 << 20) + 1536;

/// Parts of a disk: offsets and lengths in bytes, in order.
type Parts = Vec<(u64, u64)>;

fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// A volume `disk` above a raw image `golden`, a client that writes to it as a guest does, and what it has to hold.
struct Rig {
    server: Server,
    client: Client,
    random: Random,
    model: Vec<u8>,
    /// The blocks that were written since the last snapshot.
    written: BTreeSet<u64>,
}

impl Rig {
    fn start() -> Result<Rig> {
        let setup = Setup::new()?;
        let (base, delta) = (setup.dir().join("golden.raw"), setup.dir().join("disk.delta"));
        let mut model = content(1, 0, index(SIZE));
        model[5 << 20..9 << 20].fill(0);
        fs::write(&base, &model).map_err(Error::io("write the base"))?;
        let control = setup.dir().join("control.sock");
        let server = setup
            .volume(&format!("golden=file:{},read-only=true", base.display()))
            .volume(&format!("disk=file:{},base=golden,create=true", delta.display()))
            .arg("--control")
            .arg(control)
            .start()?;
        let client = Client::open(&server.socket(), "disk")?;
        let random = Random::new(seeded::seed("EBBD_TEST_SEED", 0x1a6e));
        Ok(Rig { server, client, random, model, written: BTreeSet::new() })
    }

    /// Writes data and zeroes at random places, in sectors.
    fn write(&mut self, stamp: u64, count: u64) -> Result {
        for _ in 0..count {
            let sectors = 1 + self.random.below(96);
            let offset = 512 * self.random.below(SIZE / 512 - sectors);
            let range = index(offset)..index(offset + sectors * 512);
            if self.random.below(4) == 0 {
                let length = u32::try_from(sectors * 512).unwrap_or(512);
                self.client.command(wire::CMD_WRITE_ZEROES, 0, offset, length)?;
                self.model[range].fill(0);
            } else {
                let data = content(stamp, offset, range.len());
                self.client.write(offset, &data, 0)?;
                self.model[range].copy_from_slice(&data);
            }
            self.written.extend(offset / BLOCK..(offset + sectors * 512).div_ceil(BLOCK));
        }
        Ok(())
    }

    /// Makes a snapshot: what it has to hold, and the blocks that were written since the one before.
    fn snapshot(&mut self, name: &str) -> Result<(Vec<u8>, BTreeSet<u64>)> {
        self.server.operator(&["volume", "snapshot", "disk", name, "--wait"])?.ok()?;
        Ok((self.model.clone(), std::mem::take(&mut self.written)))
    }

    /// What `ebbd volume changes` prints with `--json`.
    fn changes(&self, volume: &str, names: &[&str]) -> Result<Parts> {
        let arguments = [&["volume", "changes", volume, "--json"], names].concat();
        let outcome = self.server.operator(&arguments)?.ok()?;
        let json = outcome.json()?;
        let parts = parts_of(&json["runs"]);
        let sum: u64 = parts.iter().map(|(_, length)| length).sum();
        outcome.check(json["changed_bytes"] == sum, "the sum of the lengths")?;
        Ok(parts)
    }

    /// What has changed, as an NBD client sees it.
    fn bitmap(&self, export: &str, snapshot: &str) -> Result<Parts> {
        let tool = Tool::new("nbdinfo").arg(format!("--map=qemu:dirty-bitmap:{snapshot}"));
        let outcome = tool.arg("--json").arg(self.server.uri(export)).ok()?;
        let json = outcome.json()?;
        let (mut dirty, mut end) = (Parts::new(), 0);
        for extent in json.as_array().into_iter().flatten() {
            let field = |name: &str| extent[name].as_u64().unwrap_or(u64::MAX);
            let (offset, length) = (field("offset"), field("length"));
            outcome.check(offset == end, "extents without gaps or overlaps")?;
            end += length;
            match (field("type"), dirty.last_mut()) {
                (0, _) => {}
                (1, Some(last)) if last.0 + last.1 == offset => last.1 += length,
                (1, _) => dirty.push((offset, length)),
                _ => return Err(outcome.unexpected("extents that are dirty (1) or not (0)")),
            }
        }
        outcome.check(end == SIZE, "extents up to the end")?;
        Ok(dirty)
    }

    /// The list page by page, as the interface replies: each with at most `limit` parts.
    fn pages(&self, query: &str, limit: usize) -> Result<Parts> {
        let (mut all, mut offset) = (Parts::new(), 0);
        loop {
            let target = format!("/v1/volumes/disk/changes?{query}&offset={offset}&limit={limit}");
            let page = ask(&self.server.dir().join("control.sock"), &target)?;
            let parts = parts_of(&page["runs"]);
            check(parts.len() <= limit, || format!("a page of {limit} has {page}"))?;
            for (at, length) in parts {
                match all.last_mut() {
                    Some(last) if last.0 + last.1 == at => last.1 += length,
                    _ => all.push((at, length)),
                }
            }
            let Some(next) = page["next_offset"].as_u64() else { return Ok(all) };
            check(next > offset, || format!("the page at {offset} does not go on: {page}"))?;
            offset = next;
        }
    }

    /// Checks that the tools read `expected` from an export, each in its own way.
    fn reads(&self, export: &str, expected: &[u8]) -> Result {
        let dir = self.server.dir();
        let (uri, wanted) = (self.server.uri(export), dir.join("wanted"));
        fs::write(&wanted, expected).map_err(Error::io("write a file"))?;
        let copy = dir.join("copy");
        Tool::new("nbdcopy").arg(&uri).arg(&copy).ok()?;
        Tool::new("cmp").arg(&copy).arg(&wanted).ok()?;
        let img = |args: &[&str]| Tool::new("qemu-img").args(args);
        img(&["compare", "-f", "raw", "-F", "raw"]).arg(&wanted).arg(&uri).ok()?;
        let image = dir.join("copy.qcow2");
        img(&["convert", "-f", "raw", "-O", "qcow2"]).arg(&uri).arg(&image).ok()?;
        img(&["compare", "-f", "qcow2", "-F", "raw"]).arg(&image).arg(&wanted).ok()?;
        let map = img(&["map", "--output=json", "-f", "raw"]).arg(&uri).ok()?;
        let mut end = 0;
        for extent in map.json()?.as_array().into_iter().flatten() {
            let field = |name: &str| extent[name].as_u64().unwrap_or(u64::MAX);
            map.check(field("start") == end, "a map without gaps")?;
            let bytes = &expected[index(end)..index(end + field("length"))];
            end += field("length");
            let is_zero = bytes.iter().all(|byte| *byte == 0);
            map.check(extent["zero"] == false || is_zero, "zeroes where the map says so")?;
        }
        map.check(end == SIZE, "a map up to the end")
    }
}

fn parts_of(runs: &Value) -> Parts {
    let runs = runs.as_array().into_iter().flatten();
    runs.filter_map(|run| run["offset"].as_u64().zip(run["length"].as_u64())).collect()
}

impl Rig {
    /// The statistics of `disk` above two snapshots, after it was read.
    fn shows_its_layers(&self) -> Result {
        let outcome = self.server.operator(&["stat", "volume", "disk", "--json"])?.ok()?;
        let stat = outcome.json()?;
        let names: Vec<_> = stat["below"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|layer| (layer["snapshot"].as_str(), layer["store"].as_str().unwrap_or_default()))
            .collect();
        let [(Some("tuesday"), later), (Some("monday"), then), (None, base)] = names[..] else {
            return Err(outcome.unexpected("two snapshots and the base"));
        };
        let are_named = later.ends_with("disk.delta@tuesday")
            && then.ends_with("disk.delta@monday")
            && base.ends_with("golden.raw");
        outcome.check(are_named, "the files of the layers")?;
        let figure = |name: &str| stat[name].as_u64().unwrap_or(0);
        outcome.check(figure("layers") == 4, "four layers")?;
        outcome.check(figure("shared_cache_bytes") > 0, "the cache of the layers below")?;
        // The snapshots were read before, and what they read is in memory.
        let (hit, miss) = (figure("shared_hit_bytes"), figure("shared_miss_bytes"));
        outcome.check(hit > 20 << 20 && hit > miss, "most reads found in shared layers")?;
        let table = self.server.operator(&["stat", "volume", "disk"])?.ok()?;
        table.check(table.stdout.contains("SHARED HIT"), "a table of overlays")?;
        let shown = self.server.operator(&["volume", "show", "disk"])?.ok()?;
        shown.check(shown.stdout.contains("snapshot monday, "), "the chain of layers")
    }
}

/// A reply of the control socket.
fn ask(control: &Path, target: &str) -> Result<Value> {
    let failed = Error::io("the control socket");
    let exchange = || {
        let mut stream = UnixStream::connect(control)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(format!("GET {target} HTTP/1.0\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
        Ok(serde_json::from_str(body)?)
    };
    exchange().map_err(failed)
}

/// Blocks as parts of the disk.
fn parts(blocks: &BTreeSet<u64>) -> Parts {
    let mut parts = Parts::new();
    for block in blocks {
        let (offset, length) = (block * BLOCK, BLOCK.min(SIZE - block * BLOCK));
        match parts.last_mut() {
            Some(last) if last.0 + last.1 == offset => last.1 += length,
            _ => parts.push((offset, length)),
        }
    }
    parts
}

#[track_caller]
fn same(what: &str, found: &Parts, wanted: &Parts) -> Result {
    let place = std::panic::Location::caller();
    check(found == wanted, || format!("{what} ({place}): {found:?}, not {wanted:?}"))
}

/// The copy of a snapshot with the blocks that have changed until a later one is that one.
#[test]
fn an_incremental_backup_is_the_snapshot() -> Result {
    let mut rig = Rig::start()?;
    rig.write(2, 60)?;
    let (then, _) = rig.snapshot("monday")?;
    rig.write(3, 40)?;
    let (later, between) = rig.snapshot("tuesday")?;
    rig.write(4, 40)?;
    let since: BTreeSet<u64> = between.union(&rig.written).copied().collect();
    rig.reads("disk@monday", &then)?;
    rig.reads("disk@tuesday", &later)?;
    rig.reads("disk", &rig.model)?;
    rig.shows_its_layers()?;

    let changed = rig.changes("disk", &["--since", "monday", "--until", "tuesday"])?;
    same("between the snapshots", &changed, &parts(&between))?;
    let of_later = rig.changes("disk@tuesday", &["--since", "monday"])?;
    same("the same of the snapshot", &of_later, &changed)?;
    same("the same over NBD", &rig.bitmap("disk@tuesday", "monday")?, &changed)?;
    let until_now = rig.changes("disk", &["--since", "monday"])?;
    same("since then", &until_now, &parts(&since))?;
    same("since then over NBD", &rig.bitmap("disk", "monday")?, &until_now)?;
    let last = parts(&rig.written);
    same("since the last one", &rig.changes("disk", &["--since", "tuesday"])?, &last)?;
    same("since the last one over NBD", &rig.bitmap("disk", "tuesday")?, &last)?;
    for limit in [1, 7, 10_000] {
        let found = rig.pages("since=monday&until=tuesday", limit)?;
        same(&format!("in pages of {limit}"), &found, &changed)?;
    }

    let mut copy = then;
    let mut snapshot = Client::open(&rig.server.socket(), "disk@tuesday")?;
    for (offset, length) in &changed {
        let bytes = snapshot.read(*offset, u32::try_from(*length).unwrap_or(u32::MAX))?;
        copy[index(*offset)..index(offset + length)].copy_from_slice(&bytes);
    }
    snapshot.disconnect()?;
    check(copy == later, || "the copy with the changes is not the later snapshot".into())?;

    // Block maps are loaded from the files.
    rig.client.flush()?;
    let Rig { mut server, client, random, model, written } = rig;
    client.disconnect()?;
    server.stop()?;
    server.restart()?;
    let client = Client::open(&server.socket(), "disk")?;
    let mut rig = Rig { server, client, random, model, written };
    let again = rig.changes("disk", &["--since", "monday", "--until", "tuesday"])?;
    same("after a restart", &again, &changed)?;
    same("since then, after a restart", &rig.bitmap("disk", "monday")?, &until_now)?;
    // Of two snapshots it stays the same, whatever becomes of the volume.
    rig.server.operator(&["volume", "resize", "disk", "64K", "--shrink"])?.ok()?;
    let again = rig.changes("disk", &["--since", "monday", "--until", "tuesday"])?;
    same("after the volume became smaller", &again, &changed)?;
    rig.server.healthy()
}

#[test]
fn changes_are_asked_for_by_names_that_there_are() -> Result {
    let mut rig = Rig::start()?;
    let ask = |rig: &Rig, names: &[&str]| {
        rig.server.operator(&[&["volume", "changes", "disk"], names].concat())
    };
    let none = ask(&rig, &["--since", "monday"])?.fails()?;
    none.check(none.stderr.contains("volume snapshot"), "how to make a snapshot")?;
    rig.snapshot("monday")?;
    let nothing = ask(&rig, &["--since", "monday"])?.ok()?;
    nothing.check(nothing.stdout.ends_with("0 bytes changed in 0 parts\n"), "no changes")?;
    rig.client.write(8192, &[7; 512], 0)?;
    rig.snapshot("tuesday")?;
    let one = ask(&rig, &["--since", "monday"])?.ok()?;
    let words: Vec<_> = one.stdout.split_whitespace().collect();
    let wanted = "OFFSET LENGTH 8192 4096 4096 bytes changed in 1 part";
    one.check(words.join(" ") == wanted, "the block that was written")?;
    for names in [&["--since", "yesteryear"][..], &["--since", "monday", "--until", "yesteryear"]] {
        let wrong = ask(&rig, names)?.fails()?;
        wrong.check(wrong.stderr.contains("tuesday, monday"), "the names that there are")?;
    }
    let reversed = ask(&rig, &["--since", "tuesday", "--until", "monday"])?.fails()?;
    reversed.check(reversed.stderr.contains("not newer"), "the order of the snapshots")?;
    // The oldest snapshot has none below it.
    let oldest = rig.server.operator(&["volume", "changes", "disk@monday", "--since", "monday"])?;
    oldest.fails()?;
    rig.server.healthy()
}

/// Nothing is made of a snapshot that is to be kept where there is no state directory.
#[test]
fn a_snapshot_that_cannot_be_kept_is_not_made() -> Result {
    let mut rig = Rig::start()?;
    let refused = rig.server.operator(&["volume", "snapshot", "disk", "monday", "--persist"])?;
    let refused = refused.fails()?;
    refused.check(refused.stderr.contains("no state directory"), "the reason")?;
    check(!rig.server.dir().join("disk.delta@monday").exists(), || "a file was made".into())?;
    rig.snapshot("monday")?;
    rig.server.healthy()
}

/// Images as `qemu-img` and `qemu-io` make them, below an overlay: it reads what `qemu-img convert` reads.
#[test]
fn an_overlay_above_a_qcow2_image_reads_as_qemu_does() -> Result {
    let kinds: [&[&str]; 4] = [
        &["-o", "cluster_size=64k"],
        &["-o", "compat=0.10"],
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=2M,lazy_refcounts=on,preallocation=metadata"],
    ];
    for (number, options) in kinds.into_iter().enumerate() {
        let setup = Setup::new()?;
        let dir = setup.dir().to_owned();
        let image = dir.join("golden.qcow2");
        let img = |args: &[&str]| Tool::new("qemu-img").args(args);
        img(&["create", "-q", "-f", "qcow2"]).args(options).arg(&image).arg("16M").ok()?;
        let io = |commands: &[&str]| {
            let commands = commands.iter().flat_map(|command| ["-c", command]);
            Tool::new("qemu-io").args(["-f", "qcow2"]).args(commands).arg(&image).ok()
        };
        io(&["write -q -P 1 0 3M", "write -q -P 2 5000k 70k", "write -q -P 3 15M 1M"])?;
        img(&["snapshot", "-c", "old"]).arg(&image).ok()?;
        io(&["write -q -P 4 1M 33k", "write -q -z 2M 256k", "discard -q 15M 512k"])?;
        let control = dir.join("control.sock");
        let server = setup
            .volume(&format!("golden=qcow2:{},read-only=true", image.display()))
            .volume(&format!("disk=file:{}/disk.delta,base=golden,create=true", dir.display()))
            .arg("--control")
            .arg(control)
            .start()?;
        let (raw, copy) = (dir.join("wanted.raw"), dir.join("copy.raw"));
        img(&["convert", "-f", "qcow2", "-O", "raw"]).arg(&image).arg(&raw).ok()?;
        Tool::new("nbdcopy").arg(server.uri("disk")).arg(&copy).ok()?;
        Tool::new("cmp").arg(&raw).arg(&copy).ok()?;
        // What is written to the overlay is above the image, and the image stays as it is.
        let before = fs::read(&image).map_err(Error::io("read the image"))?;
        let writes = ["write -q -P 9 1000k 65k", "write -q -z 4M 1M", "write -q -P 8 15700k 3k"];
        for (format, place) in [("raw", server.uri("disk")), ("raw", raw.display().to_string())] {
            let commands = writes.iter().flat_map(|command| ["-c", command]);
            Tool::new("qemu-io").args(["-f", format]).args(commands).arg(place).ok()?;
        }
        server.operator(&["volume", "snapshot", "disk", "a", "--wait"])?.ok()?;
        for export in ["disk", "disk@a"] {
            let compared = img(&["compare", "-f", "raw", "-F", "raw"]).arg(&raw);
            compared.arg(server.uri(export)).ok()?;
        }
        let after = fs::read(&image).map_err(Error::io("read the image"))?;
        check(before == after, || format!("image {number} was changed"))?;
    }
    Ok(())
}
