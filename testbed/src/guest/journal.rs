//! ext4 of a Linux guest on volumes with a writeback cache, whose daemons are killed (SIGKILL)
//! under a journal-heavy load; afterwards each file system must be clean once its journal is
//! replayed, and hold what `fsync` promised.
//!
//! Each disk has a daemon of its own, killed at a time of its own, so that one boot is many
//! crashes.
//!
//! The guest uses the default of QEMU's NBD client (`reconnect-delay=0`): once the daemon is killed
//! the disk fails, ext4 stops its journal, nothing more is written, and the guest must be
//! restarted. That is the safe setting: a client that reconnects to the new daemon and continues
//! does not know that acknowledged writes which no flush had made stable are lost, as with a disk
//! that loses power while its host does not.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use crate::guest::{Guest, Machine};
use crate::harness::binary::Build;
use crate::harness::pattern::Random;
use crate::harness::process;
use crate::harness::server::Setup;
use crate::{Error, Result, Server, Tool, check};

/// Size of each disk: small, so that the journal wraps around.
const DISK: u64 = 48 << 20;
/// The most disks a guest has.
pub const MOST: usize = 24;
const BOOT: Duration = Duration::from_secs(600);
const LIMIT: Duration = Duration::from_secs(900);
/// Promises that a disk must have made before its daemon is killed.
const PROMISES: u64 = 3;

/// Files are created, renamed, synced and removed; a promise is printed when `sync` has returned.
const LOAD: &str = r#"
load() {
    set +e
    mkdir -p /mnt$1
    mount -t ext4 -o commit=1 $2 /mnt$1 || return
    cd /mnt$1
    mkdir d
    i=0
    while :; do
        i=$((i + 1))
        for name in a b c d; do
            echo "$name $i" >d/$name.new || break 2
            mv d/$name.new d/$name || break 2
        done
        mkdir d/$i || break
        [ $i -le 4 ] || rmdir d/$((i - 4)) || break
        dd if=/dev/urandom of=d/big bs=8k count=4 seek=$((i % 64)) conv=notrunc 2>/dev/null || break
        echo "promise $i" >n$i || break
        sync n$i || break
        say done$1 $i
        [ $i -le 8 ] || rm n$((i - 8)) || break
    done
    cd /
}
"#;

/// What came out.
#[derive(Debug, Default)]
pub struct Report {
    /// Daemons that were killed.
    pub kills: usize,
    /// Files that were promised to be there.
    pub promised: u64,
    /// File systems that were not clean, or lacked what was promised: what is wrong with them.
    pub broken: Vec<String>,
}

/// Boots a guest with so many disks (1 to [`MOST`]), kills their daemons one after the other, and
/// checks the file systems.
///
/// # Errors
/// Something is missing on this machine, or does not run.
pub fn kill_daemons(count: usize, build: Build, seed: u64) -> Result<Report> {
    let mut servers = Vec::new();
    for _ in 0..count.clamp(1, MOST) {
        servers.push(serve(build)?);
    }
    let mut script = LOAD.to_owned();
    let mut guest = Vec::new();
    for (number, letter) in ('a'..='z').take(servers.len()).enumerate() {
        guest.push(format!("load {number} /dev/vd{letter} &\n"));
    }
    script.push_str(&guest.concat());
    script.push_str("wait\n");
    let module = Guest::new(script).module("ext4").limit(LIMIT);
    let guest = servers.iter().fold(module, |guest, server| guest.export(server, "disk"));
    let machine = guest.boot()?;
    let mut random = Random::new(seed);
    for (number, server) in servers.iter_mut().enumerate() {
        process::until("a disk is under load", BOOT, || {
            Ok((promised(&machine, number) >= PROMISES).then_some(()))
        })?;
        std::thread::sleep(Duration::from_millis(random.below(700)));
        server.healthy()?;
        server.kill9()?;
    }
    let answers = machine.wait()?;
    let mut report = Report::default();
    for (number, server) in servers.iter_mut().enumerate() {
        let last = answers.answer(&format!("done{number}"))?;
        let last: u64 = last.parse().map_err(|_| Error::unexpected("a promise has a number"))?;
        server.restart()?;
        if let Err(error) = examine(server, last) {
            report.broken.push(format!("disk {number}, {last} promises: {error}"));
        }
        report.kills += 1;
        report.promised += last;
        server.stop()?;
    }
    Ok(report)
}

fn serve(build: Build) -> Result<Server> {
    let setup = Setup::new()?.build(build);
    let path = setup.image_path("disk");
    let made = File::create_new(&path).and_then(|file| file.set_len(DISK));
    made.map_err(Error::io("make a disk"))?;
    Tool::new("/sbin/mke2fs").args(["-q", "-t", "ext4"]).arg(&path).ok()?;
    setup.volume(&format!("disk=file:{},cache=writeback", path.display())).start()
}

/// The last promise a disk has made so far.
fn promised(machine: &Machine, number: usize) -> u64 {
    let key = format!("done{number}");
    let answers = machine.answers();
    let of_disk = answers.iter().rev().filter(|(found, _)| *found == key);
    of_disk.filter_map(|(_, value)| value.parse().ok()).next().unwrap_or(0)
}

/// Reads the whole disk from the daemon, replays the journal, and expects a clean file system with
/// the last promised file.
fn examine(server: &Server, last: u64) -> Result {
    let copy = server.dir().join("copy.img");
    Tool::new("nbdcopy").arg(server.uri("disk")).arg(&copy).limit(BOOT).ok()?;
    let replayed = Tool::new("/sbin/e2fsck").args(["-p"]).arg(&copy).run()?;
    // 1: what the journal holds was done.
    check(matches!(replayed.status.code(), Some(0 | 1)), || {
        format!("the journal cannot be replayed:\n{}{}", replayed.stdout, replayed.stderr)
    })?;
    Tool::new("/sbin/e2fsck").args(["-f", "-n"]).arg(&copy).ok()?;
    // The previous file may be removed, the next one may exist: the last one must.
    let found = read(&copy, last)?;
    check(found == format!("promise {last}\n"), || format!("n{last} holds {found:?}"))
}

fn read(image: &Path, number: u64) -> Result<String> {
    let request = format!("cat /n{number}");
    Ok(Tool::new("/sbin/debugfs").args(["-R", &request]).arg(image).ok()?.stdout)
}
