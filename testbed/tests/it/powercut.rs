//! A power cut of the machine that runs the daemon: durable data survives it.
//!
//! The page cache survives a kill, so a kill cannot show whether a flush reached the disk. Here the
//! daemon runs in a guest, with its images on the guest's own file system; the guest loses its
//! memory including the page cache, and keeps only what reached its disk.

use std::fs::File;
use std::path::Path;
use testbed::guest::Guest;
use testbed::harness::binary::{self, Build};
use testbed::harness::pattern::Random;
use testbed::harness::process::{PATIENCE, until};
use testbed::{Error, Result, Tool};

/// Starts the daemon on two images of the guest's file system.
const SERVE: &str = r"
mount -t ext4 /dev/vda /mnt
ebbd serve --listen unix:/tmp/nbd.sock \
    --volume cached=file:/mnt/cached.img,size=4M,create=true,direct=off \
    --volume direct=file:/mnt/direct.img,size=4M,create=true &
for i in $(seq 1 100); do [ -S /tmp/nbd.sock ] && break; sleep 0.2; done
";

fn guest(disk: &Path, script: &str) -> Result<Guest> {
    Ok(Guest::new(format!("{SERVE}{script}"))
        .file(disk)
        .program_as(&binary::ebbd(Build::AsTests)?, "ebbd")
        .program_as(Path::new(env!("CARGO_BIN_EXE_guest-writer")), "guest-writer")
        .program("e2fsck")
        .memory_mib(640))
}

#[test]
fn what_was_durable_before_a_power_cut_is_there_after_it() -> Result {
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_d005);
    let dir = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let disk = dir.path().join("machine.img");
    let made = File::create(&disk).and_then(|file| file.set_len(64 << 20));
    made.map_err(Error::io("make a disk"))?;
    Tool::new("/sbin/mkfs.ext4").arg("-q").arg(&disk).ok()?;

    let enough = 120 + Random::new(seed).below(160);
    let machine = guest(&disk, "guest-writer write /tmp/nbd.sock >/dev/ttyS1")?.boot()?;
    let told = || -> u64 {
        let answers = machine.answers();
        let done = answers.iter().rev().find(|(key, _)| key == "done");
        done.and_then(|(_, n)| n.parse().ok()).unwrap_or(0)
    };
    let wrote = until("durable writes in the guest", PATIENCE * 3, || {
        if let Some((_, status)) = machine.answers().iter().find(|(key, _)| key == "exit") {
            let console = machine.console();
            return Err(Error::unexpected(format!("ended with {status}\n--- console\n{console}")));
        }
        Ok((told() >= enough).then_some(()))
    });
    let last = told();
    let console = machine.console();
    machine.cut_power();
    wrote.map_err(|e| Error::unexpected(format!("{e}\n{last} done\n--- console\n{console}")))?;

    let verify = format!(
        "guest-writer verify /tmp/nbd.sock {last}\nkill %1\nwait %1\numount /mnt\ne2fsck -fn /dev/vda"
    );
    guest(&disk, &verify)?.ok().map(drop).map_err(|e| {
        Error::unexpected(format!("EBBD_TEST_SEED={seed}, {last} durable writes reported: {e}"))
    })
}
