//! One boot of Xen: a job in dom0, its console, its status and what it left behind.

use super::Artefacts;
use crate::guest::{copy, libraries, make_dir, which};
use crate::harness::process;
use crate::{Error, Result, Tool};
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// What time is in a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Nanoseconds are instructions: processors run one after the other, and figures repeat.
    Instructions,
    /// The host's time: processors run side by side, and figures mean little.
    Host,
}

/// A machine to be booted with a job. [`Machine::run`] boots it.
#[derive(Debug)]
pub struct Machine {
    job: String,
    files: Vec<(String, Vec<u8>)>,
    programs: Vec<(PathBuf, String)>,
    guest_programs: Vec<(PathBuf, String)>,
    device_model: bool,
    clock: Clock,
    processors: u32,
    memory_mib: u32,
    dom0_mib: u32,
    limit: Duration,
}

/// What is left of a machine that powered off, or was switched off when its time was over.
#[derive(Debug)]
pub struct Outcome {
    /// Status of the job; 125 when it did not complete (a panic, or the time limit).
    pub status: i32,
    /// The whole console: Xen and dom0.
    pub console: String,
    dir: TempDir,
}

impl Machine {
    /// A machine whose dom0 will run this script (busybox `sh`, `set -eu`, with the functions of
    /// `dom0-lib.sh`).
    #[must_use]
    pub fn new(job: impl Into<String>) -> Machine {
        Machine {
            job: job.into(),
            files: Vec::new(),
            programs: Vec::new(),
            guest_programs: Vec::new(),
            device_model: false,
            clock: Clock::Instructions,
            processors: 1,
            memory_mib: 1280,
            dom0_mib: 1024,
            limit: Duration::from_secs(900),
        }
    }

    /// Puts a file into dom0's `/job`: a guest's script, say.
    #[must_use]
    pub fn file(mut self, name: &str, content: impl Into<Vec<u8>>) -> Machine {
        self.files.push((name.into(), content.into()));
        self
    }

    /// Makes room for a guest: processors of its own, and memory in MiB.
    #[must_use]
    pub fn guest(mut self, processors: u32, mib: u32) -> Machine {
        self.processors += processors;
        self.memory_mib += mib + 32;
        self
    }

    /// Gives dom0 the program at `path`, or of this name on this machine, with its libraries.
    #[must_use]
    pub fn program(mut self, path: impl Into<PathBuf>) -> Machine {
        let path = path.into();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.programs.push((path, name));
        self
    }

    /// Gives guests a program, with its libraries, on a disk of tools (`guest-lib.sh`: `tools`).
    #[must_use]
    pub fn guest_program(mut self, path: impl Into<PathBuf>) -> Machine {
        let path = path.into();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.guest_programs.push((path, name));
        self
    }

    /// Gives dom0 Xen's device model, which serves disks with the backend `qdisk`.
    #[must_use]
    pub fn device_model(mut self) -> Machine {
        self.device_model = true;
        self
    }

    /// What time is; the default is [`Clock::Instructions`].
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Machine {
        self.clock = clock;
        self
    }

    /// Memory of dom0 in MiB; the default is 1024.
    #[must_use]
    pub fn dom0_mib(mut self, mib: u32) -> Machine {
        self.memory_mib = self.memory_mib - self.dom0_mib + mib;
        self.dom0_mib = mib;
        self
    }

    /// Host time after which the machine is switched off; the default is 15 minutes.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Machine {
        self.limit = limit;
        self
    }

    /// Boots, runs the job, and expects status 0.
    ///
    /// # Errors
    /// As [`Machine::run`]; or the job failed: the error shows the consoles.
    pub fn ok(self) -> Result<Outcome> {
        let outcome = self.run()?;
        match outcome.status {
            0 => Ok(outcome),
            n => {
                Err(outcome
                    .unexpected(&format!("the job to succeed, not status {n}{}", outcome.why())))
            }
        }
    }

    /// Boots, runs the job and waits for the machine to power off.
    ///
    /// # Errors
    /// Something is missing on this host. A machine that crashes or does not end is an outcome.
    pub fn run(self) -> Result<Outcome> {
        let artefacts = Artefacts::get()?;
        let dir = TempDir::with_prefix("xen-").map_err(Error::io("make a directory"))?;
        self.pack_job(dir.path(), &artefacts)?;
        let results =
            File::create(dir.path().join("out.img")).map_err(Error::io("make out.img"))?;
        results.set_len(64 << 20).map_err(Error::io("make out.img"))?;
        let console =
            File::create(dir.path().join("console")).map_err(Error::io("make console"))?;
        let mut qemu = Command::new("qemu-system-x86_64")
            .args(self.arguments(&artefacts))
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(console.try_clone().map_err(Error::io("open console"))?)
            .stderr(console)
            .spawn()
            .map_err(|_| Error::MissingProgram { program: "qemu-system-x86_64".into() })?;
        let ended = process::wait(&mut qemu, self.limit);
        if !matches!(ended, Ok(Some(_))) {
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
        ended?;
        let console = fs::read(dir.path().join("console")).unwrap_or_default();
        let console = String::from_utf8_lossy(&console).into_owned();
        let out = dir.path().join("out");
        make_dir(&out)?;
        // A machine that crashed has packed nothing; the console says why.
        let _ = Tool::new("tar").args(["-x", "-f", "../out.img"]).dir(&out).run();
        let status = console.lines().rev().find_map(|line| {
            line.split_once("BED rc ").and_then(|(_, status)| status.trim().parse().ok())
        });
        Ok(Outcome { status: status.unwrap_or(125), console, dir })
    }

    fn arguments(&self, artefacts: &Artefacts) -> Vec<OsString> {
        let (threads, counted) = match self.clock {
            Clock::Instructions => ("single", true),
            Clock::Host => ("multi", false),
        };
        let dom0 = self.dom0_mib;
        let words = format!(
            "-nographic -nodefaults -serial stdio -no-reboot \
             -accel tcg,thread={threads},tb-size=512 -cpu max,-smap,-smep,-erms -smp {} -m {}",
            // One processor alone does not get past loading modules when instructions are counted.
            self.processors.max(2),
            self.memory_mib + 256,
        );
        let mut arguments: Vec<OsString> = words.split_whitespace().map(OsString::from).collect();
        if counted {
            arguments.extend(["-icount", "shift=0,sleep=off"].map(OsString::from));
        }
        let pair = |name: &str, value: String| [OsString::from(name), OsString::from(value)];
        arguments.extend(pair("-kernel", artefacts.xen().display().to_string()));
        let modules = format!(
            "{} console=hvc0 panic=-1 quiet,{}",
            artefacts.kernel().display(),
            artefacts.dom0().display()
        );
        arguments.extend(pair("-initrd", modules));
        let append = format!(
            "console=com1 com1=115200 dom0_mem={dom0}M,max:{dom0}M dom0_max_vcpus=1 \
             dom0_vcpus_pin loglvl=warning guest_loglvl=warning"
        );
        arguments.extend(pair("-append", append));
        let mut drive = |id: &str, options: &str| {
            let drive = format!("file={id}.img,format=raw,if=none,id={id}{options}");
            arguments.extend(pair("-drive", drive));
            let device = format!("virtio-blk-pci,drive={id},disable-legacy=on");
            arguments.extend(pair("-device", device));
        };
        drive("job", ",readonly=on");
        drive("out", "");
        if !self.guest_programs.is_empty() {
            drive("tools", ",readonly=on");
        }
        arguments
    }

    /// Lays out the job under `dir` and packs it, with the disk of tools for guests.
    fn pack_job(&self, dir: &Path, artefacts: &Artefacts) -> Result {
        let job = dir.join("job");
        make_dir(&job)?;
        let scripts = [
            ("job.sh", self.job.as_bytes()),
            ("dom0-lib.sh", include_bytes!("dom0-lib.sh").as_slice()),
            ("guest-lib.sh", include_bytes!("guest-lib.sh").as_slice()),
        ];
        let files = self.files.iter().map(|(name, content)| (name.as_str(), content.as_slice()));
        for (name, content) in scripts.into_iter().chain(files) {
            let path = job.join(name);
            fs::write(&path, content).map_err(Error::io(path.display().to_string()))?;
        }
        programs_into(&job, &self.programs)?;
        if self.device_model {
            copy(&artefacts.device_model(), &job.join("qemu.tar"))?;
        }
        Tool::new("tar").args(["-c", "-f", "../job.img", "."]).dir(&job).ok()?;
        // QEMU wants whole sectors, and tar stops at the end of its own.
        pad(&dir.join("job.img"))?;
        if !self.guest_programs.is_empty() {
            let tools = dir.join("tools");
            programs_into(&tools, &self.guest_programs)?;
            let size = Tool::new("du").args(["-s", "-m", "tools"]).dir(dir).ok()?.stdout;
            let mib: u32 = size.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
            let size = format!("{}M", mib + mib / 4 + 8);
            let options = ["-q", "-t", "ext4", "-O", "^has_journal", "-d", "tools", "tools.img"];
            Tool::new("/sbin/mke2fs").args(options).arg(&size).dir(dir).ok()?;
        }
        Ok(())
    }
}

impl Outcome {
    /// The last result reported under this key: by the job (`say KEY VALUE`), or by guest `NAME`
    /// (`NAME.KEY`).
    ///
    /// # Errors
    /// There is none; the error shows the consoles.
    pub fn answer(&self, key: &str) -> Result<String> {
        self.answers(key).pop().ok_or_else(|| self.unexpected(&format!("an answer called {key}")))
    }

    /// All results reported under this key, in order.
    #[must_use]
    pub fn answers(&self, key: &str) -> Vec<String> {
        let text = self.text("answers");
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.filter(|(found, _)| *found == key).map(|(_, value)| value.trim().into()).collect()
    }

    /// A file that the job left in `/out`, empty if it left none.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        let bytes = fs::read(self.dir.path().join("out").join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The directory with what the job left in `/out`; it goes with the outcome.
    #[must_use]
    pub fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    /// The last stage that the job began, and why it failed: the first lines of a long report.
    fn why(&self) -> String {
        let job = self.console.split("BED stage end").next().unwrap_or_default();
        let last = |what: &str| {
            let found = job.rsplit_once(what).map(|(_, rest)| rest);
            found.and_then(|text| text.lines().next()).unwrap_or("none").trim().to_owned()
        };
        format!("; failed: {}; stage: {}", last("BED failed: "), last("BED stage "))
    }

    /// An error that shows what was said on all consoles, and what was expected.
    #[must_use]
    pub fn unexpected(&self, expected: &str) -> Error {
        let mut text = format!("expected {expected}\n--- console\n{}", self.console);
        for folder in ["xen/console", "log"] {
            let Ok(entries) = fs::read_dir(self.out().join(folder)) else { continue };
            for entry in entries.flatten() {
                let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
                text += &format!("\n--- {name}\n{}", self.text(&name));
            }
        }
        Error::unexpected(text)
    }
}

/// Copies programs into `dir/bin` and all libraries they need into `dir/lib`.
fn programs_into(dir: &Path, programs: &[(PathBuf, String)]) -> Result {
    for (program, name) in programs {
        let path = which(program)?;
        copy(&path, &dir.join("bin").join(name))?;
        for library in libraries(&path)? {
            copy(&library, &dir.join("lib").join(library.file_name().unwrap_or_default()))?;
        }
    }
    Ok(())
}

fn pad(path: &Path) -> Result {
    let file = File::options().write(true).open(path).map_err(Error::io("open job.img"))?;
    let length = file.metadata().map_err(Error::io("job.img"))?.len();
    file.set_len(length.next_multiple_of(4 << 20)).map_err(Error::io("pad job.img"))
}
