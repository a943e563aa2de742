//! A real disk whose flushes fail and which reports lost data once: a loop device over a full tmpfs.
//! After `EIO` the kernel's next `fdatasync` succeeds, although the data is on no disk. Needs root for
//! the mount and the device.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::process::Signal;
use serde_json::Value;
use testbed::harness::binary::{self, Build};
use testbed::harness::nbd::{Client, wire};
use testbed::harness::process::PATIENCE;
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, Tool, check};

const SIZE: u64 = 16 << 20;
/// More than the file system below has room for.
const DATA: usize = 8 << 20;

/// A loop device over a full tmpfs; detached when dropped.
struct Disk {
    folder: tempfile::TempDir,
    device: String,
}

impl Disk {
    fn new() -> Result<Disk> {
        let folder = tempfile::tempdir().map_err(Error::io("make a folder"))?;
        Tool::new("mount")
            .args(["-t", "tmpfs", "-o", "size=2M", "tmpfs"])
            .arg(folder.path())
            .ok()?;
        let mut disk = Disk { folder, device: String::new() };
        let image = fs::File::create(disk.image()).and_then(|file| file.set_len(SIZE));
        image.map_err(Error::io("make the image"))?;
        let shown = Tool::new("losetup").args(["-f", "--show"]).arg(disk.image()).ok()?;
        disk.device = shown.stdout.trim().to_owned();
        Ok(disk)
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("disk.img")
    }

    /// A daemon with the device as its only volume, through the page cache.
    fn serve(&self, cache: &str) -> Result<Server> {
        let volume = format!("disk=file:{},direct=off,cache={cache}", self.device);
        let setup = Setup::new()?.volume(&volume).args(["--drain", "5"]);
        setup.arg("--control").arg(self.control()).start()
    }

    fn control(&self) -> PathBuf {
        self.folder.path().join("control.sock")
    }

    fn stat(&self, more: &[&str]) -> Result<String> {
        let tool = Tool::new(&binary::ebbd(Build::AsTests)?).arg("stat").args(more);
        Ok(tool.arg("--control").arg(self.control()).ok()?.stdout)
    }

    /// `ebbd stat` shows the loss, with the error and the remedy.
    fn shows_the_loss(&self) -> Result {
        let table = self.stat(&[])?;
        for part in ["disk may have lost writes", "flush", "os error", "repair the device"] {
            check(table.contains(part), || format!("no {part:?}\n{table}"))?;
        }
        let stat: Value = serde_json::from_str(&self.stat(&["--json"])?)
            .map_err(|e| Error::unexpected(format!("JSON: {e}")))?;
        let volume = &stat["volumes"][0];
        let told = volume["state"] == "lost" && volume["loss"]["since_seconds"].is_number();
        check(told, || format!("{volume}"))
    }

    /// A daemon with the image file as its only volume.
    fn serve_file(&self, cache: &str) -> Result<Server> {
        let volume = format!("disk=file:{},cache={cache}", self.image().display());
        Setup::new()?.volume(&volume).args(["--drain", "5"]).start()
    }

    /// Makes room in the file system of the image.
    fn enlarge(&self) -> Result {
        let options = ["-o", "remount,size=64M"];
        Tool::new("mount").args(options).arg(self.folder.path()).ok().map(drop)
    }

    fn holds(&self, byte: u8) -> Result<bool> {
        let mut data = vec![0; DATA];
        let image = fs::File::open(self.image()).map_err(Error::io("open the image"))?;
        image.read_exact_at(&mut data, 0).map_err(Error::io("read the image"))?;
        Ok(data.iter().all(|b| *b == byte))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if !self.device.is_empty() {
            let _ = Tool::new("losetup").arg("-d").arg(&self.device).ok();
        }
        let _ = Tool::new("umount").arg("-l").arg(self.folder.path()).ok();
    }
}

fn write_all(client: &mut Client, byte: u8) -> Result {
    for piece in 0..DATA / (1 << 20) {
        client.write((piece << 20) as u64, &vec![byte; 1 << 20], 0)?;
    }
    Ok(())
}

/// SIGTERM: the daemon reports that data was lost, and exits with 1.
fn stop_and_report_the_loss(server: &mut Server) -> Result {
    server.signal(Signal::TERM)?;
    let status = server.wait(PATIENCE)?;
    let log = server.log();
    check(status.code() == Some(1), || format!("exit status {status}\n--- log\n{log}"))?;
    check(!log.contains("all volumes flushed"), || format!("reported as flushed\n--- log\n{log}"))?;
    let told = log.contains("not everything could be made stable");
    check(told, || format!("the loss is not reported\n--- log\n{log}"))
}

fn a_flush_that_failed_stays_failed(cache: &str) -> Result {
    let disk = Disk::new()?;
    let mut server = disk.serve(cache)?;
    let (mut a, mut b) =
        (Client::open(&server.socket(), "disk")?, Client::open(&server.socket(), "disk")?);
    write_all(&mut a, 7)?;
    check(b.flush().is_err(), || "the disk is full: B's flush must fail".to_owned())?;
    for _ in 0..3 {
        let log = server.log();
        check(a.flush().is_err(), || format!("A's flush said OK: the data is lost\n{log}"))?;
    }
    disk.shows_the_loss()?;
    drop((a, b));
    stop_and_report_the_loss(&mut server)
}

#[test]
fn a_flush_that_fails_for_one_client_does_not_succeed_for_another() -> Result {
    a_flush_that_failed_stays_failed("none")?;
    a_flush_that_failed_stays_failed("writethrough")
}

#[test]
fn a_shutdown_after_lost_data_reports_it() -> Result {
    let disk = Disk::new()?;
    let mut server = disk.serve("writeback")?;
    let mut client = Client::open(&server.socket(), "disk")?;
    write_all(&mut client, 7)?;
    drop(client);
    stop_and_report_the_loss(&mut server)?;
    check(!disk.holds(7)?, || "the disk has no room for the data, but has it".to_owned())
}

#[test]
fn what_a_disk_lost_is_written_again_when_it_has_room() -> Result {
    let disk = Disk::new()?;
    let mut server = disk.serve("writeback")?;
    let mut client = Client::open(&server.socket(), "disk")?;
    write_all(&mut client, 7)?;
    check(client.flush().is_err(), || "the disk is full".to_owned())?;
    check(client.flush().is_err(), || "the disk is still full, and the data lost".to_owned())?;
    disk.enlarge()?;
    let log = server.log();
    // An earlier failure may still be reported, once.
    let flushed = client.flush().is_ok() || client.flush().is_ok();
    check(flushed, || format!("there is room, but the flush fails\n{log}"))?;
    check(disk.holds(7)?, || "flushed data is not on the disk".to_owned())?;
    drop(client);
    server.stop()
}

#[test]
fn a_write_with_fua_to_a_full_file_system_fails_alone() -> Result {
    for cache in ["none", "writethrough"] {
        let disk = Disk::new()?;
        let mut server = disk.serve_file(cache)?;
        let mut client = Client::open(&server.socket(), "disk")?;
        client.write(0, &vec![7; 1 << 20], 0)?;
        let full = client.write(4 << 20, &vec![7; 4 << 20], wire::FLAG_FUA);
        check(full.is_err(), || "there is no room for the write, but it succeeds".to_owned())?;
        let log = server.log();
        check(client.flush().is_ok(), || format!("nothing is lost, but the flush fails\n{log}"))?;
        disk.enlarge()?;
        client.write(0, &vec![7; DATA], wire::FLAG_FUA)?;
        client.flush()?;
        check(disk.holds(7)?, || "flushed data is not on the disk".to_owned())?;
        drop(client);
        server.stop()?;
    }
    Ok(())
}
