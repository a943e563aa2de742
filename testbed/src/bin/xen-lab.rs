//! Boots Xen by hand: runs a job from a directory in dom0, shows the console, and exits with the
//! job's status.
//!
//! `xen-lab DIRECTORY` runs `DIRECTORY/job.sh`; the other files there are beside it in `/job`. What
//! the job leaves in `/out` is copied to `DIRECTORY/out`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use testbed::xen::{Clock, Machine};
use testbed::{Error, Result, Tool};

const HELP: &str = "\
usage: xen-lab [OPTION]... DIRECTORY
  --program PATH        a program for dom0, with its libraries
  --guest-program PATH  a program for guests, with its libraries (they call `tools` first)
  --guest CPUS MIB      room for a guest
  --dom0 MIB            memory of dom0 (1024)
  --qemu                Xen's device model for dom0 (/job/qemu.tar)
  --host-time           processors side by side, in the host's time
  --limit SECONDS       when to switch off (900)
";

fn main() -> ExitCode {
    match run() {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(125)),
        Err(error) => {
            let _ = writeln!(io::stderr().lock(), "xen-lab: {error}");
            ExitCode::from(125)
        }
    }
}

fn run() -> Result<i32> {
    let mut arguments = std::env::args().skip(1);
    let mut options: Vec<Box<dyn Fn(Machine) -> Machine>> = Vec::new();
    let mut directory = None;
    while let Some(word) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| Error::unexpected(HELP));
        let number = |text: String| text.parse::<u32>().map_err(|_| Error::unexpected(HELP));
        match word.as_str() {
            "--program" => {
                let path = value()?;
                options.push(Box::new(move |machine| machine.program(&path)));
            }
            "--guest-program" => {
                let path = value()?;
                options.push(Box::new(move |machine| machine.guest_program(&path)));
            }
            "--guest" => {
                let (cpus, mib) = (number(value()?)?, number(value()?)?);
                options.push(Box::new(move |machine| machine.guest(cpus, mib)));
            }
            "--dom0" => {
                let mib = number(value()?)?;
                options.push(Box::new(move |machine| machine.dom0_mib(mib)));
            }
            "--limit" => {
                let limit = Duration::from_secs(number(value()?)?.into());
                options.push(Box::new(move |machine| machine.limit(limit)));
            }
            "--qemu" => options.push(Box::new(Machine::device_model)),
            "--host-time" => options.push(Box::new(|machine| machine.clock(Clock::Host))),
            _ if word.starts_with('-') || directory.is_some() => {
                return Err(Error::unexpected(HELP));
            }
            _ => directory = Some(PathBuf::from(word)),
        }
    }
    let directory = directory.ok_or_else(|| Error::unexpected(HELP))?;
    let job = directory.join("job.sh");
    let job = std::fs::read_to_string(&job).map_err(Error::io(job.display().to_string()))?;
    let mut machine = files(Machine::new(job), &directory)?;
    for option in options {
        machine = option(machine);
    }
    let outcome = machine.run()?;
    let _ = io::stdout().lock().write_all(outcome.console.as_bytes());
    Tool::new("cp").args(["-r", "-T"]).arg(outcome.out()).arg(directory.join("out")).ok()?;
    Ok(outcome.status)
}

/// Adds all files of the directory.
fn files(mut machine: Machine, directory: &Path) -> Result<Machine> {
    let entries = std::fs::read_dir(directory);
    for entry in entries.map_err(Error::io(directory.display().to_string()))?.flatten() {
        if entry.path().is_file() && entry.file_name() != "job.sh" {
            let content = std::fs::read(entry.path());
            let content = content.map_err(Error::io(entry.path().display().to_string()))?;
            machine = machine.file(&entry.file_name().to_string_lossy(), content);
        }
    }
    Ok(machine)
}
