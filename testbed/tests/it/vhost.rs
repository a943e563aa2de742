//! A Linux guest with disks over vhost-user-blk, under the QEMU of Debian 12 and of its backports: files, discards, cache
//! modes, sizes, memory that comes and goes, resets. SeaBIOS boots from such a disk. A guest whose memory is truncated
//! loses its disk, and no other guest notices.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use std::time::{Duration, Instant};

use serde_json::json;
use testbed::guest::vhost::Qemu;
use testbed::guest::{Guest, Machine};
use testbed::harness::process::{PATIENCE, until};

use testbed::{Error, Nbdkit, Result, Server, Setup, check};

const MIB: u64 = 1 << 20;
const FUNCTIONS: &str = include_str!("vhost/disk.sh");

/// A daemon and a guest with three disks of it.
struct Rig {
    server: Server,
    store: Nbdkit,
    guest: Machine,
}

impl Rig {
    fn boot(qemu: Qemu) -> Result<Rig> {
        let setup = Setup::new()?.image("disk", 768 * MIB)?.image("load", 32 * MIB)?;
        let store = Nbdkit::start(setup.dir(), &["memory", "64M"])?;
        let setup = setup.volume(&format!("remote={}", store.uri())).vhost_user();
        let server = setup.start()?;
        let mut guest = Guest::interactive(FUNCTIONS)
            .qemu(qemu)
            .processors(4)
            .memory_mib(512)
            .hotplug_memory()
            .may_reset()
            .program_as(Path::new(env!("CARGO_BIN_EXE_guest-load")), "guest-load");
        for program in ["mkfs.ext4", "fstrim", "blkdiscard"] {
            guest = guest.program(program);
        }
        for volume in ["disk", "remote", "load"] {
            guest = guest.vhost_user(&server.vhost_socket(volume), &["num-queues=4"]);
        }
        let mut rig = Rig { server, store, guest: guest.boot()? };
        rig.guest.ready(1)?;
        Ok(rig)
    }

    /// Completed requests of a kind on a volume.
    fn requests(&self, volume: &str, kind: &str) -> Result<u64> {
        number(&self.server, volume, &["operations", kind, "requests"])
    }

    fn files_and_discards(&mut self) -> Result {
        self.guest.call("fill")?;
        check(self.guest.answer("queues")? == "4", || "four queues are used".into())?;
        self.guest.call("verify")?;
        check(self.guest.answer("files")? == "50", || "50 files are verified".into())?;
        let full = self.server.image_usage("disk")?;
        check(full >= 200 * MIB, || format!("200 MiB are written, and the image has {full}"))?;
        self.guest.call("trim")?;
        let trimmed = self.server.image_usage("disk")?;
        check(trimmed + 150 * MIB < full, || {
            format!("160 MiB are trimmed: the image had {full} bytes and has {trimmed}")
        })?;
        self.guest.call("zeroes")?;
        check(self.requests("disk", "write-zeroes")? > 0, || "write zeroes is used".into())?;
        let full = self.server.image_usage("disk")?;
        self.guest.call("discard")?;
        let discarded = self.server.image_usage("disk")?;
        check(discarded + 3 * MIB < full, || {
            format!("8 MiB are discarded: the image had {full} bytes and has {discarded}")
        })?;
        check(self.requests("disk", "discard")? > 0, || "discard is used".into())
    }

    /// The store of a guest without a write cache gets writes with FUA, and no flush of the guest.
    fn cache_modes(&mut self) -> Result {
        for (mode, flushes, stable) in
            [("write back", 8, false), ("write through", 0, true), ("write back", 8, false)]
        {
            let flushed = self.requests("remote", "flush")?;
            let stored = (self.store.count("Flush")?, self.stable_writes()?);
            self.guest.call(&format!("cache '{mode}'"))?;
            check(self.guest.answer("cache")? == mode, || format!("the guest has {mode}"))?;
            let flushed = self.requests("remote", "flush")? - flushed;
            let after = self.store.count("Flush")? - stored.0;
            let writes = self.stable_writes()? - stored.1;
            let right = match stable {
                true => flushed == flushes && (writes >= 8 || after >= 8),
                false => flushed >= flushes && after >= 8,
            };
            check(right, || {
                format!(
                    "{mode}: {flushed} flushes of the guest, {after} at the store, {writes} writes with FUA"
                )
            })?;
        }
        Ok(())
    }

    fn stable_writes(&self) -> Result<usize> {
        let log = std::fs::read_to_string(self.store_log()).map_err(Error::io("read the log"))?;
        Ok(log.lines().filter(|line| line.contains(" Write ") && line.contains("fua=1")).count())
    }

    fn store_log(&self) -> std::path::PathBuf {
        self.server.dir().join("store.log")
    }

    /// The guest sees a new size, and one that its disk got while there was no daemon.
    fn sizes(&mut self) -> Result {
        self.guest.order(&format!("size vda {}", 800 * MIB))?;
        let since = Instant::now();
        self.server.operator(&["volume", "resize", "disk", "800M"])?.ok()?;
        let resized = since.elapsed();
        self.guest.ready(self.guest.ready_count() + 1)?;
        note(&format!("resize: command {resized:?}, seen by the guest {:?}", since.elapsed()));
        self.guest.call("load 20")?;
        self.server.stop()?;
        let image = File::options().write(true).open(self.server.image_path("disk"));
        image.and_then(|image| image.set_len(900 * MIB)).map_err(Error::io("resize the image"))?;
        let since = Instant::now();
        self.server.restart()?;
        self.guest.call(&format!("size vda {}", 900 * MIB))?;
        note(&format!(
            "size after a restart: seen by the guest {:?} after it began",
            since.elapsed()
        ));
        self.guest.call("loaded")
    }

    /// Memory is added and removed under a load that then uses it.
    fn memory(&mut self) -> Result {
        self.guest.call("total")?;
        let before = self.guest.answer("total")?;
        for round in 0..2 {
            self.guest.call("load 6")?;
            let backend = json!({"qom-type": "memory-backend-memfd", "id": "more",
                "size": 128 * MIB, "share": true});
            self.guest.qmp()?.execute("object-add", &backend)?;
            let device = json!({"driver": "pc-dimm", "id": "dimm", "memdev": "more"});
            self.guest.qmp()?.execute("device_add", &device)?;
            self.guest.call(&format!("memory -gt {before}"))?;
            self.guest.call("loaded")?;
            // Memory that was added is allocated first: the load's buffers are there.
            self.guest.call("load 6")?;
            self.guest.call("removable")?;
            check(self.guest.answer("removable")? != "0", || "the memory is not used".into())?;
            self.guest.qmp()?.execute("device_del", &json!({"id": "dimm"}))?;
            self.guest.qmp()?.event("DEVICE_DELETED")?;
            self.guest.qmp()?.execute("object-del", &json!({"id": "more"}))?;
            self.guest.call(&format!("memory -le {before}"))?;
            self.guest.call("loaded")?;
            note(&format!("memory, round {round}: load {}", self.guest.answer("load")?));
        }
        Ok(())
    }

    fn reset(&mut self) -> Result {
        self.guest.call("busy")?;
        std::thread::sleep(Duration::from_secs(2));
        let booted = self.guest.ready_count();
        self.guest.qmp()?.execute("system_reset", &json!({}))?;
        self.guest.ready(booted + 1)?;
        self.guest.call("verify")?;
        check(self.guest.answer("files")? == "10", || "10 files are verified".into())?;
        self.guest.call("load 3")?;
        self.guest.call("loaded")
    }
}

/// A figure of a volume in `ebbd stat`.
fn number(server: &Server, volume: &str, path: &[&str]) -> Result<u64> {
    let stat = server.operator(&["stat", "--json"])?.ok()?.json()?;
    let found = stat["volumes"].as_array().into_iter().flatten().find(|of| of["name"] == volume);
    let value = found.and_then(|of| path.iter().try_fold(of, |of, key| of.get(key))?.as_u64());
    value.ok_or_else(|| Error::unexpected(format!("no {path:?} of {volume} in {stat}")))
}

/// A figure for the report of the test, which judges none.
#[expect(clippy::print_stderr, reason = "shown with --nocapture")]
fn note(text: &str) {
    eprintln!("measured: {text}");
}

/// A guest uses its disks, step by step. A QEMU 10 that crashed gets a second run: once it ended during the
/// reset, and the cause was not found. One that crashes twice fails the test.
fn disk(qemu: Qemu) -> Result {
    let mut rig = Rig::boot(qemu)?;
    if let Err(error) = use_disks(&mut rig) {
        if qemu != Qemu::Backports || !rig.guest.crashed()? {
            return Err(error);
        }
        note(&format!("QEMU crashed, and runs once more: {error}"));
        drop(rig);
        rig = Rig::boot(qemu)?;
        use_disks(&mut rig)?;
    }
    rig.guest.order("end")?;
    rig.guest.wait()?;
    rig.server.stop()
}

fn use_disks(rig: &mut Rig) -> Result {
    let since = Instant::now();
    type Step = fn(&mut Rig) -> Result;
    let steps: [(&str, Step); 5] = [
        ("files and discards", Rig::files_and_discards),
        ("cache modes", Rig::cache_modes),
        ("sizes", Rig::sizes),
        ("memory", Rig::memory),
        ("reset", Rig::reset),
    ];
    for (name, step) in steps {
        note(&format!("{name} begins after {:?}", since.elapsed()));
        step(rig).map_err(|e| {
            Error::unexpected(format!("{name}: {e}\n--- console\n{}", rig.guest.console()))
        })?;
        rig.server.healthy()?;
    }
    rig.guest.call("quiet")?;
    note(&format!("all: {:?}", since.elapsed()));
    Ok(())
}

#[test]
fn a_guest_uses_its_disks_under_qemu_7_2() -> Result {
    disk(Qemu::Installed)
}

#[test]
fn a_guest_uses_its_disks_under_qemu_10() -> Result {
    disk(Qemu::Backports)
}

/// The first sector: prints a line on the serial port, reads the second sector by int 13h and prints it, writes it to the
/// third one, and prints a line. As of GNU as, `.code16`, at 0x7c00:
///
/// ```text
///        xor %ax,%ax; mov %ax,%ds; mov %ax,%es
///        mov $first,%si; call print
///        mov $0x0201,%ax; mov $2,%cx; mov $0,%dh; mov $0x7e00,%bx; int $0x13; jc hang
///        mov $0x7e00,%si; call print
///        mov $0x0301,%ax; mov $3,%cx; mov $0,%dh; mov $0x7e00,%bx; int $0x13; jc hang
///        mov $last,%si; call print
/// hang:  hlt; jmp hang
/// print: push %dx
/// next:  lodsb; test %al,%al; jz end; mov %al,%ah
///        mov $0x3fd,%dx
/// wait:  in %dx,%al; test $0x20,%al; jz wait
///        mov $0x3f8,%dx; mov %ah,%al; out %al,%dx; jmp next
/// end:   pop %dx; ret
/// first: .asciz "boot sector\n"
/// last:  .asciz "written\n"
/// ```
#[rustfmt::skip]
const BOOT_SECTOR: [u8; 105] = [
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0xbe, 0x53, 0x7c, 0xe8, 0x2d, 0x00, 0xb8, 0x01, 0x02, 0xb9, 0x02, 0x00,
    0xb6, 0x00, 0xbb, 0x00, 0x7e, 0xcd, 0x13, 0x72, 0x1b, 0xbe, 0x00, 0x7e, 0xe8, 0x18, 0x00, 0xb8, 0x01, 0x03,
    0xb9, 0x03, 0x00, 0xb6, 0x00, 0xbb, 0x00, 0x7e, 0xcd, 0x13, 0x72, 0x06, 0xbe, 0x60, 0x7c, 0xe8, 0x03, 0x00,
    0xf4, 0xeb, 0xfd, 0x52, 0xac, 0x84, 0xc0, 0x74, 0x12, 0x88, 0xc4, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x20, 0x74,
    0xfb, 0xba, 0xf8, 0x03, 0x88, 0xe0, 0xee, 0xeb, 0xe9, 0x5a, 0xc3, b'b', b'o', b'o', b't', b' ', b's', b'e',
    b'c', b't', b'o', b'r', b'\n', 0, b'w', b'r', b'i', b't', b't', b'e', b'n', b'\n', 0,
];

fn boots(qemu: Qemu) -> Result {
    let setup = Setup::new()?.image("disk", MIB)?.vhost_user();
    let mut disk = vec![0_u8; 1536];
    disk[..BOOT_SECTOR.len()].copy_from_slice(&BOOT_SECTOR);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    let line = b"second sector\n";
    disk[512..][..line.len()].copy_from_slice(line);
    let image = File::options().write(true).open(setup.image_path("disk"));
    image.and_then(|image| image.write_all_at(&disk, 0)).map_err(Error::io("write the image"))?;
    let mut server = setup.start()?;
    let guest = Guest::new("").qemu(qemu).memory_mib(64).processors(1).boots_from_disk();
    let guest = guest.vhost_user(&server.vhost_socket("disk"), &["bootindex=0"]).boot()?;
    until("the boot sector's lines", PATIENCE, || {
        Ok(guest.console().contains("boot sector\nsecond sector\nwritten\n").then_some(()))
    })
    .map_err(|e| Error::unexpected(format!("{e}\n--- console\n{}", guest.console())))?;
    guest.cut_power();
    server.healthy()?;
    server.stop()?;
    let written = std::fs::read(server.image_path("disk")).map_err(Error::io("read the image"))?;
    check(written[1024..][..line.len()] == *line, || "the third sector is not written".into())
}

#[test]
fn seabios_boots_from_a_disk() -> Result {
    boots(Qemu::Installed)?;
    boots(Qemu::Backports)
}

#[test]
fn a_guest_whose_memory_is_truncated_loses_its_disk_alone() -> Result {
    let setup = Setup::new()?.image("load", 32 * MIB)?;
    // Its requests wait in the ring, so that some are there when the memory goes.
    let slow = "slow=memory:32M,limit-iops=50";
    let mut server = setup.volume(slow).vhost_user().start()?;
    let memory = tempfile::NamedTempFile::new_in("/dev/shm").map_err(Error::io("make a file"))?;
    let guest_load = Path::new(env!("CARGO_BIN_EXE_guest-load"));
    let guest = |volume: &str| {
        let socket = server.vhost_socket(volume);
        let guest = Guest::interactive(FUNCTIONS).program_as(guest_load, "guest-load");
        guest.memory_mib(256).vhost_user(&socket, &["num-queues=2"])
    };
    let mut witness = guest("load").boot()?;
    let mut victim = guest("slow").memory_file(memory.path()).beside(&witness).boot()?;
    witness.ready(1)?;
    victim.ready(1)?;
    victim.call("load 600 vda")?;
    witness.call("load 10 vda")?;
    until("the limited volume is busy", PATIENCE, || {
        let reads = number(&server, "slow", &["operations", "read", "requests"])?;
        Ok((reads > 10).then_some(()))
    })?;
    // QEMU would die at once, and its connection with it.
    victim.freeze()?;
    memory.as_file().set_len(0).map_err(Error::io("truncate the memory"))?;
    until("the connection is closed", PATIENCE, || {
        Ok((number(&server, "slow", &["clients"])? == 0).then_some(()))
    })?;
    check(server.log().contains("the guest's memory was truncated"), || "no line says why".into())?;
    drop(victim);
    witness.call("loaded")?;
    witness.call("quiet")?;
    witness.order("end")?;
    witness.wait()?;
    server.healthy()
}
