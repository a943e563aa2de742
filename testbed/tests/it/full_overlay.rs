//! Overlays on a file system without room: a small tmpfs, which needs root. What fails for want of
//! room leaves the volume and its snapshots as they were, and works when there is room.

use std::fs;
use std::path::PathBuf;

use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::Client;
use testbed::harness::tool::Outcome;
use testbed::{Error, Result, Server, Setup, Tool, check};

const MIB: usize = 1 << 20;

/// A daemon with an overlay in writeback mode, whose delta is on a tmpfs of 4 MiB.
struct Rig {
    folder: tempfile::TempDir,
    server: Server,
}

impl Rig {
    fn start() -> Result<Rig> {
        let folder = tempfile::tempdir().map_err(Error::io("make a folder"))?;
        let options = ["-t", "tmpfs", "-o", "size=4M", "tmpfs"];
        Tool::new("mount").args(options).arg(folder.path()).ok()?;
        let setup = Setup::new()?;
        let base = setup.dir().join("golden.raw");
        let made = fs::File::create(&base).and_then(|file| file.set_len(16 << 20));
        made.map_err(Error::io("make the base"))?;
        let golden = format!("golden=file:{},read-only=true", base.display());
        let delta = folder.path().join("disk.delta");
        let disk = format!("disk=file:{},base=golden,create=true,cache=writeback", delta.display());
        let control = setup.dir().join("control.sock");
        let setup = setup.volume(&golden).volume(&disk).args(["--drain", "5"]);
        let server = setup.arg("--control").arg(control).start()?;
        Ok(Rig { folder, server })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn operator(&self, arguments: &[&str]) -> Result<Outcome> {
        self.server.operator(arguments)?.run()
    }

    /// Fills the mebibytes in `at` of a volume with `byte`.
    fn write(&self, at: std::ops::Range<usize>, byte: u8) -> Result {
        let mut client = Client::open(&self.server.socket(), "disk")?;
        for piece in at {
            client.write((piece * MIB) as u64, &vec![byte; MIB], 0)?;
        }
        Ok(client.disconnect()?)
    }

    fn flush(&self) -> Result {
        let mut client = Client::open(&self.server.socket(), "disk")?;
        client.flush()?;
        Ok(client.disconnect()?)
    }

    /// The first byte of each mebibyte of a volume.
    fn bytes<const N: usize>(&self, volume: &str) -> Result<[u8; N]> {
        let mut client = Client::open(&self.server.socket(), volume)?;
        let mut found = [0; N];
        for (piece, byte) in found.iter_mut().enumerate() {
            *byte = client.read((piece * MIB) as u64, 512)?[0];
        }
        client.disconnect()?;
        Ok(found)
    }

    /// Leaves so many bytes of room.
    fn fill(&self, left: usize) -> Result {
        let room = Tool::new("df").args(["--output=avail", "-B1"]).arg(self.folder.path()).ok()?;
        let room = room.stdout.lines().nth(1).and_then(|bytes| bytes.trim().parse().ok());
        let room: usize = room.ok_or_else(|| Error::unexpected("df prints a number"))?;
        let filler = vec![1; room.saturating_sub(left)];
        fs::write(self.path("filler"), filler).map_err(Error::io("fill the file system"))
    }

    fn enlarge(&self) -> Result {
        let options = ["-o", "remount,size=64M"];
        Tool::new("mount").args(options).arg(self.folder.path()).ok().map(drop)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = Tool::new("umount").arg("-l").arg(self.folder.path()).ok();
    }
}

#[test]
fn snapshot_is_opened_by_nobody_before_it_is_stable() -> Result {
    let mut rig = Rig::start()?;
    rig.write(0..1, 7)?;
    rig.flush()?;
    // For the header of the next delta.
    rig.fill(256 << 10)?;
    rig.write(1..2, 7)?;
    let refused = rig.operator(&["volume", "snapshot", "disk", "one"])?;
    refused.check(refused.stderr.contains("could not be flushed"), "the snapshot is not stable")?;
    let frozen = format!("file:{}", rig.path("disk.delta@one").display());
    let (copy, base) = (rig.server.dir().join("copy"), rig.server.dir().join("golden.raw"));
    let export = || {
        let tool = Tool::new(&binary::ebbd(Build::AsTests)?).args(["image", "export"]);
        let tool = tool.arg(&frozen).arg(format!("file:{}", copy.display()));
        tool.arg("--base").arg(format!("file:{}", base.display())).run()
    };
    let exported = export()?;
    exported.check(!exported.status.success(), "the snapshot is locked")?;
    let add = ["volume", "add", "disk@one", &frozen, "--base", "golden", "--read-only"];
    let added = rig.operator(&add)?;
    added.check(!added.status.success(), "the snapshot is not served")?;
    let clone = format!("file:{}", rig.server.dir().join("clone.delta").display());
    let cloned =
        rig.operator(&["volume", "add", "clone", &clone, "--base", "disk@one", "--create"])?;
    cloned.check(!cloned.status.success(), "there is no clone")?;
    rig.enlarge()?;
    rig.flush()?;
    rig.write(0..1, 8)?;
    let added = rig.operator(&add)?;
    added.check(added.status.success(), "the snapshot is served")?;
    check(rig.bytes("disk@one")? == [7, 7, 0], || "the snapshot has lost data".into())?;
    let exported = export()?;
    exported.check(exported.status.success(), "the snapshot is copied")?;
    let copied = fs::read(&copy).map_err(Error::io("read the copy"))?;
    check(copied[..2 * MIB].iter().all(|byte| *byte == 7), || "the copy has lost data".into())?;
    check(rig.bytes("disk")? == [8, 7, 0], || "the volume has lost data".into())?;
    rig.server.stop()
}

#[test]
fn snapshot_stays_if_there_is_no_room_to_delete_it() -> Result {
    let mut rig = Rig::start()?;
    rig.write(0..1, 1)?;
    rig.operator(&["volume", "snapshot", "disk", "one"])?;
    rig.write(1..2, 2)?;
    rig.flush()?;
    rig.fill(0)?;
    let refused = rig.operator(&["volume", "delete-snapshot", "disk", "one"])?;
    let is_true =
        refused.stderr.contains("was not deleted") && !refused.stderr.contains("was merged");
    refused.check(!refused.status.success() && is_true, "it was not deleted")?;
    check(rig.bytes("disk@one")? == [1, 0, 0], || "the snapshot is another one".into())?;
    check(rig.bytes("disk")? == [1, 2, 0], || "the volume is another one".into())?;
    fs::remove_file(rig.path("filler")).map_err(Error::io("make room"))?;
    rig.flush()?;
    let deleted = rig.operator(&["volume", "delete-snapshot", "disk", "one"])?;
    deleted.check(deleted.status.success(), "it is deleted")?;
    check(!rig.path("disk.delta@one").exists(), || "its file is there".into())?;
    check(rig.bytes("disk")? == [1, 2, 0], || "the volume has lost data".into())?;
    rig.server.stop()
}
