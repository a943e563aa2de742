//! A Linux guest under QEMU whose disks are exports of the daemon.
//!
//! QEMU emulates the processor (TCG) unless a guest asks for KVM, so that no special machine is
//! needed; a boot takes about ten seconds. The guest's root is an initramfs with busybox and the
//! selected programs; it runs one shell script and powers off. It has two serial lines: the
//! console, kept whole, and a second one for the script's results, which kernel messages cannot
//! garble.
//!
//! It can be made as small and as short of memory as a test needs: RAM, swap on a disk or in
//! compressed memory, processors, words on the kernel's command line; and be given programs, single
//! files, or a whole tree of files on a disk of its own.
//!
//! In the script, `say KEY VALUE` reports a result ([`Outcome::answer`]); the script runs with `set
//! -eu`, its status becomes [`Outcome::status`]. Disks are `/dev/vda`, `/dev/vdb`, ... The script of an interactive guest
//! ([`Guest::interactive`]) consists of functions that the test calls.
//!
//! Guests are heavy: one at a time, over all test programs (a lock file in the cache), unless a test needs two
//! ([`Guest::beside`]).

pub mod journal;
pub mod kernel;
pub mod machine;
pub mod qmp;
pub mod vhost;

pub use machine::{Machine, Outcome};

use crate::harness::process::PATIENCE;
use crate::{Error, Result, Server, Tool};
use kernel::Kernel;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// What a guest is to be made of. [`Guest::run`] boots it.
#[derive(Debug)]
pub struct Guest {
    script: String,
    devices: Vec<OsString>,
    disks: usize,
    modules: Vec<String>,
    programs: Vec<(PathBuf, String)>,
    files: Vec<(PathBuf, PathBuf)>,
    /// What the script begins with: mounts, swap.
    prelude: String,
    /// Empty disks by the name of their file, MiB.
    blanks: Vec<(String, u32)>,
    trees: Vec<Tree>,
    kernel_words: String,
    /// The disk that Debian is booted from.
    debian: Option<String>,
    processors: u32,
    /// Whether the host's processor runs the guest.
    kvm: bool,
    memory_mib: u32,
    hardware: vhost::Hardware,
    limit: Duration,
    /// The lock that guests of one test share.
    alone: Option<Arc<File>>,
}

/// Files of the host that become a disk.
#[derive(Debug)]
struct Tree {
    from: PathBuf,
    image: String,
    mib: u32,
}

/// All QEMU has, except for string instructions, which it executes byte by byte (the kernel has
/// faster code), and mitigations that cost an emulator much.
const PROCESSOR: &str = "max,-erms,-fsrm,-smap,-smep";
const INIT: &str = include_str!("guest/init.sh");

impl Guest {
    /// A guest that will run this script (busybox `sh`, with `set -eu`).
    #[must_use]
    pub fn new(script: impl Into<String>) -> Guest {
        Guest {
            script: script.into(),
            devices: Vec::new(),
            disks: 0,
            modules: vec!["virtio_pci".into(), "virtio_blk".into()],
            programs: Vec::new(),
            files: Vec::new(),
            prelude: String::new(),
            blanks: Vec::new(),
            trees: Vec::new(),
            kernel_words: String::new(),
            debian: None,
            processors: 1,
            kvm: false,
            memory_mib: 384,
            hardware: vhost::Hardware::default(),
            limit: PATIENCE * 4,
            alone: None,
        }
    }

    /// A guest that will carry out what [`Machine::call`] tells it, with these functions at hand.
    #[must_use]
    pub fn interactive(functions: &str) -> Guest {
        Guest::new(format!(
            "{functions}\nwhile ask ready && [ \"$order\" != end ]; do eval \"$order\"; done\n"
        ))
    }

    /// Runs while another guest of the same test does.
    #[must_use]
    pub fn beside(mut self, other: &Machine) -> Guest {
        self.alone = Some(other.alone.clone());
        self
    }

    /// Adds a disk: an export of the daemon, attached by QEMU's own NBD client.
    #[must_use]
    pub fn export(self, server: &Server, export: &str) -> Guest {
        self.disk(&server.qemu_options(export))
    }

    /// Adds a disk that is a raw file on the host; writes reach the host's page cache at once.
    #[must_use]
    pub fn file(self, path: &Path) -> Guest {
        self.disk(&format!("driver=raw,file.driver=file,file.filename={}", path.display()))
    }

    fn disk(mut self, blockdev: &str) -> Guest {
        let node = format!("disk{}", self.disks);
        self.disks += 1;
        self.devices.push("-blockdev".into());
        self.devices.push(format!("{blockdev},discard=unmap,node-name={node}").into());
        self.devices.push("-device".into());
        self.devices.push(format!("virtio-blk-pci,drive={node}").into());
        self
    }

    /// Adds a network card at 10.0.2.15; the host's 127.0.0.1 is 10.0.2.2 there.
    #[must_use]
    pub fn network(mut self) -> Guest {
        self.devices.push("-netdev".into());
        self.devices.push("user,id=net".into());
        self.devices.push("-device".into());
        self.devices.push("virtio-net-pci,netdev=net,romfile=".into());
        self.module("virtio_net")
    }

    /// Time in the guest goes by what its one processor does: `2^shift` ns for each instruction (0 to
    /// 10), so that what is computed takes as long on a busy host. It waits in the host's time.
    #[must_use]
    pub fn counted_time(mut self, shift: u32) -> Guest {
        self.devices.push("-icount".into());
        self.devices.push(format!("shift={shift}").into());
        self.processors(1)
    }

    /// Runs on the host's processor, with KVM: as fast as a real guest, but its counts and times
    /// are those of this host. QEMU may be unable to, even where `/dev/kvm` can be opened: look at
    /// [`Machine::is_running`].
    #[must_use]
    pub fn kvm(mut self) -> Guest {
        self.kvm = true;
        self
    }

    /// Loads a kernel module, with all it needs, before the script.
    #[must_use]
    pub fn module(mut self, name: &str) -> Guest {
        self.modules.push(name.into());
        self
    }

    /// Gives the guest a program of the host under its own name, with its shared libraries.
    #[must_use]
    pub fn program(mut self, name: &str) -> Guest {
        self.programs.push((name.into(), name.into()));
        self
    }

    /// Gives the guest the program at `path` under another name.
    #[must_use]
    pub fn program_as(mut self, path: &Path, name: &str) -> Guest {
        self.programs.push((path.into(), name.into()));
        self
    }

    /// Gives the guest a file of the host at an absolute path of its own.
    #[must_use]
    pub fn data(mut self, from: &Path, to: &Path) -> Guest {
        self.files.push((from.into(), to.into()));
        self
    }

    /// Boots the Debian with systemd that `testbed/install` has made, from a disk whose changes are dropped at the end.
    /// The script is a service there (bash, in `/run/test`), and the journal is on the console. Files given as
    /// `/data/NAME` are `/run/test/data/NAME`.
    #[must_use]
    pub fn debian(mut self) -> Guest {
        let image = kernel::cache().join("debian/disk.img");
        self.debian = Some(self.next_disk());
        self.disks += 1;
        let image = image.display();
        self.devices.push("-drive".into());
        self.devices.push(format!("file={image},format=raw,if=none,id=debian,snapshot=on").into());
        self.devices.push("-device".into());
        self.devices.push("virtio-blk-pci,drive=debian".into());
        // There is no udev that a terminal could wait for, and no question to ask at the first boot.
        self.kernel_words(
            "systemd.journald.forward_to_console=1 systemd.show_status=0 systemd.mask=serial-getty@ttyS0.service \
             systemd.mask=getty.target systemd.mask=systemd-firstboot.service systemd.mask=apt-daily.timer \
             systemd.mask=apt-daily-upgrade.timer",
        )
    }

    /// Gives the guest a copy of a directory of the host, writable, on a disk of `mib` MiB mounted
    /// at `at`: for more than belongs into an initramfs. Symbolic links are kept.
    #[must_use]
    pub fn tree(mut self, from: &Path, at: &str, mib: u32) -> Guest {
        let image = format!("tree{}.img", self.trees.len());
        let device = self.next_disk();
        self.prelude.push_str(&format!("mkdir -p {at}\nmount -t ext4 {device} {at}\n"));
        self.trees.push(Tree { from: from.into(), image: image.clone(), mib });
        self.file(Path::new(&image))
    }

    /// Adds an empty disk of `mib` MiB; it takes no space on the host until it is written.
    #[must_use]
    pub fn blank_mib(mut self, mib: u32) -> Guest {
        let image = format!("blank{}.img", self.blanks.len());
        self.blanks.push((image.clone(), mib));
        self.file(Path::new(&image))
    }

    /// Swap of `mib` MiB on a disk. What the guest's programs are made of stays in memory then,
    /// so that only what they allocate can be swapped.
    #[must_use]
    pub fn swap_mib(mut self, mib: u32) -> Guest {
        let device = self.next_disk();
        self.prelude.push_str(&format!("mkswap {device} >/dev/null\nswapon {device}\n"));
        self.kernel_words("rootfstype=ramfs").blank_mib(mib)
    }

    /// Swap of `mib` MiB, before compression, in compressed memory (zram), otherwise as
    /// [`Guest::swap_mib`].
    #[must_use]
    pub fn zram_mib(mut self, mib: u32) -> Guest {
        self.prelude.push_str(&format!(
            "echo {mib}M >/sys/block/zram0/disksize\nmkswap /dev/zram0 >/dev/null\n\
             swapon /dev/zram0\n"
        ));
        self.kernel_words("rootfstype=ramfs").module("lzo_rle").module("zram")
    }

    /// Adds words to the kernel's command line.
    #[must_use]
    pub fn kernel_words(mut self, words: &str) -> Guest {
        self.kernel_words.push(' ');
        self.kernel_words.push_str(words);
        self
    }

    /// Processors; the default is 1. With several under load, QEMU 7.2 seems to have lost the timer
    /// of one of them for good, so a guest gets them only if its test is about queues.
    #[must_use]
    pub fn processors(mut self, count: u32) -> Guest {
        self.processors = count;
        self
    }

    /// The longest wait for a line of the guest, and for its end; the default is twelve minutes.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Guest {
        self.limit = limit;
        self
    }

    /// The name in the guest of the disk that is added next.
    fn next_disk(&self) -> String {
        let letter = u8::try_from(self.disks).map_or('z', |n| char::from(b'a' + n.min(25)));
        format!("/dev/vd{letter}")
    }

    /// Memory in MiB; the default is 384.
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Guest {
        self.memory_mib = mib;
        self
    }

    /// Boots, runs the script and waits for the guest to power off.
    ///
    /// # Errors
    /// Something is missing on this machine, or the guest did not power off.
    pub fn run(self) -> Result<Outcome> {
        self.boot()?.wait()
    }

    /// Boots, runs the script, and expects status 0.
    ///
    /// # Errors
    /// As [`Guest::run`]; or the script failed: the error shows the console.
    pub fn ok(self) -> Result<Outcome> {
        let outcome = self.run()?;
        match outcome.status {
            0 => Ok(outcome),
            n => Err(outcome.unexpected(&format!("the script to succeed, not status {n}"))),
        }
    }

    /// Boots the guest and lets it run.
    ///
    /// # Errors
    /// Something is missing on this machine.
    pub fn boot(self) -> Result<Machine> {
        let alone = match &self.alone {
            Some(alone) => alone.clone(),
            None => Arc::new(alone()?),
        };
        let dir = TempDir::with_prefix("guest-").map_err(Error::io("make a directory"))?;
        self.make_disks(dir.path())?;
        make_line(dir.path())?;
        let (accelerator, processor) = match (self.kvm, self.processors) {
            (true, _) => ("kvm", "host"),
            (false, 1) => ("tcg,thread=single", PROCESSOR),
            (false, _) => ("tcg,thread=multi", PROCESSOR),
        };
        let mut command = self.hardware.qemu.command()?;
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-accel", accelerator, "-cpu", processor])
            .args(["-smp", &self.processors.to_string()])
            .args(self.hardware.memory(self.memory_mib))
            .args(["-serial", "file:console", "-serial", "chardev:line"])
            .args(["-chardev", "pipe,id=line,path=line", "-qmp", "unix:qmp,server=on,wait=off"])
            .args(&self.devices)
            .current_dir(dir.path());
        if !self.hardware.may_reset {
            command.arg("-no-reboot");
        }
        if !self.hardware.boots_from_disk {
            self.add_kernel(&mut command, dir.path())?;
        }
        let qemu_log =
            File::create(dir.path().join("qemu.log")).map_err(Error::io("make qemu.log"))?;
        let qemu = command
            .stdin(Stdio::null())
            .stdout(qemu_log.try_clone().map_err(Error::io("open qemu.log"))?)
            .stderr(qemu_log)
            .spawn()
            .map_err(|_| Error::MissingProgram { program: "qemu-system-x86_64".into() })?;
        Ok(Machine { qemu, limit: self.limit, dir, qmp: None, alone })
    }

    /// Adds Linux with the guest's programs.
    fn add_kernel(&self, command: &mut Command, dir: &Path) -> Result {
        let kernel = Kernel::find()?;
        let words =
            format!("console=ttyS0 panic=-1 loglevel=5 mitigations=off{}", self.kernel_words);
        command.arg("-kernel").arg(kernel.image());
        command.arg("-initrd").arg(self.initramfs(dir, &kernel)?).args(["-append", &words]);
        Ok(())
    }

    /// Makes the disks that are files in the machine's directory.
    fn make_disks(&self, dir: &Path) -> Result {
        for (image, mib) in &self.blanks {
            let file = File::create(dir.join(image)).map_err(Error::io(image))?;
            file.set_len(u64::from(*mib) << 20).map_err(Error::io(image))?;
        }
        for Tree { from, image, mib } in &self.trees {
            Tool::new("/sbin/mke2fs")
                .args(["-q", "-t", "ext4", "-O", "^has_journal", "-d"])
                .arg(from)
                .arg(dir.join(image))
                .arg(format!("{mib}M"))
                .limit(Duration::from_secs(300))
                .ok()?;
        }
        Ok(())
    }

    /// Lays out the guest's root under `dir` and packs it.
    fn initramfs(&self, dir: &Path, kernel: &Kernel) -> Result<PathBuf> {
        let root = dir.join("root");
        for sub in ["bin", "dev", "proc", "sys", "etc", "tmp", "mnt", "run", "modules"] {
            make_dir(&root.join(sub))?;
        }
        let busybox = which(Path::new("busybox"))?;
        copy(&busybox, &root.join("bin/busybox"))?;
        if !libraries(&busybox)?.is_empty() {
            return Err(Error::unexpected("busybox is not static: run testbed/install"));
        }
        symlink("busybox", root.join("bin/sh")).map_err(Error::io("link sh"))?;
        for (place, module) in kernel.modules(&self.modules)?.iter().enumerate() {
            // The number keeps the order in which they must be loaded.
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            copy(module, &root.join(format!("modules/{place:03}-{name}")))?;
        }
        for (program, name) in &self.programs {
            let path = which(program)?;
            let to = root.join("bin").join(name);
            copy(&path, &to)?;
            if program.as_os_str() != name.as_str() {
                // Built without debug information, which would take a small guest's memory.
                Tool::new("strip").arg(&to).ok()?;
            }
            for library in libraries(&path)? {
                copy(&library, &under(&root, &library))?;
            }
        }
        for (from, to) in &self.files {
            copy(from, &under(&root, to))?;
        }
        if let Some(disk) = &self.debian {
            fs::write(root.join("debian"), disk).map_err(Error::io("name the disk of Debian"))?;
        }
        let script = format!("{}{}", self.prelude, self.script);
        for (name, text) in [("init", INIT), ("script", &script)] {
            let path = root.join(name);
            fs::write(&path, text).map_err(Error::io(path.display().to_string()))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                .map_err(Error::io(path.display().to_string()))?;
        }
        Tool::new("sh")
            .args(["-c", "find . | cpio --quiet -o -H newc -R 0:0 >../initramfs"])
            .dir(root)
            .ok()?;
        Ok(dir.join("initramfs"))
    }
}

/// Waits until no other guest runs: the lock is released with the file.
fn alone() -> Result<File> {
    let cache = kernel::cache();
    make_dir(&cache)?;
    let path = cache.join("guest.lock");
    let file = File::create(&path).map_err(Error::io(path.display().to_string()))?;
    file.lock().map_err(Error::io(path.display().to_string()))?;
    Ok(file)
}

/// Makes the two ends of the serial line for results: a file for what the guest says, and a pipe for what it is told.
fn make_line(dir: &Path) -> Result {
    File::create(dir.join("answers")).map_err(Error::io("make answers"))?;
    symlink("answers", dir.join("line.out")).map_err(Error::io("link line.out"))?;
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, dir.join("line.in"), rustix::fs::FileType::Fifo, mode, 0)
        .map_err(|e| Error::io("make line.in")(e.into()))
}

/// Path of a program: itself if it holds a slash, else from `PATH` and the administrator's places.
pub(crate) fn which(program: &Path) -> Result<PathBuf> {
    if program.components().count() > 1 {
        return Ok(program.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let mut found = places.map(|place| place.join(program));
    found.find(|path| path.is_file()).ok_or_else(|| {
        let program = program.display().to_string();
        Error::MissingProgram { program }
    })
}

/// Shared libraries that a program needs, its loader among them; none for a static one.
pub(crate) fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let outcome = Tool::new("ldd").arg(program).run()?;
    let words = outcome.stdout.lines().filter_map(|line| {
        // "libc.so.6 => /lib/.../libc.so.6 (0x...)" or "/lib64/ld-linux-x86-64.so.2 (0x...)"
        line.split_whitespace().find(|word| word.starts_with('/'))
    });
    Ok(words.map(PathBuf::from).collect())
}

fn under(root: &Path, absolute: &Path) -> PathBuf {
    root.join(absolute.strip_prefix("/").unwrap_or(absolute))
}

pub(crate) fn make_dir(path: &Path) -> Result {
    fs::create_dir_all(path).map_err(Error::io(path.display().to_string()))
}

/// Copies a file with its permissions, making directories as needed.
pub(crate) fn copy(from: &Path, to: &Path) -> Result {
    if let Some(parent) = to.parent() {
        make_dir(parent)?;
    }
    fs::copy(from, to).map(drop).map_err(Error::io(format!("copy {}", from.display())))
}
