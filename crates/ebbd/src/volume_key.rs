//! Reads the keys of encrypted volumes: from files, from credentials of systemd, and from programs.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ebb_advice::Advice;
use ebb_broker::HelpedProgram;
use ebb_config::KeySource;
use ebb_luks::{KEY_BYTES_MAX, LuksError, Secret};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::credentials::{MissingCredential, path_of_key};
use crate::key_programs;

/// How long a program may take for a key.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long to wait between two looks at a program that has closed its output.
const PAUSE: Duration = Duration::from_millis(5);

/// Why there is no key. No message has anything of one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum KeyError {
    /// The file cannot be read.
    #[error("cannot read the key in {path}")]
    File { path: PathBuf, source: io::Error },
    /// The file of a command cannot be read.
    #[error("cannot read the key in {path}")]
    OwnFile { path: PathBuf, source: io::Error },
    /// There is no such credential.
    #[error(transparent)]
    Credential(#[from] MissingCredential),
    /// The program cannot be run.
    #[error("cannot run {program} for the key")]
    Program { program: String, source: io::Error },
    /// The daemon runs no programs since its start.
    #[error(
        "cannot run {program} for the key: in its sandbox the daemon runs only programs that its \
         configuration names, if one was named when it started"
    )]
    Sandbox { program: String },
    /// The process that runs programs has ended, or hangs.
    #[error("the process that runs programs for keys (ebbd-keys) does not answer")]
    Helper,
    /// It has failed.
    #[error("{program} gave no key: it has ended with {how}")]
    Failed { program: String, how: String },
    /// It takes too long.
    #[error("{program} gave no key within {seconds} s, and was killed")]
    Slow { program: String, seconds: u64 },
    /// The key is empty, too long, or there is no memory for it.
    #[error("the key in {place}: {source}")]
    Key { place: String, source: LuksError },
}

impl Advice for KeyError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        Some(
            match self {
                KeyError::File { .. } => {
                    "check the path, and that the daemon's user may read it; if `open_paths` is set, \
                     add it there"
                }
                KeyError::OwnFile { .. } => "check the path, and that you may read the file",
                KeyError::Credential(error) => return error.remedy(),
                KeyError::Program { .. } => "check its path, and that the daemon's user may run it",
                KeyError::Sandbox { .. } => "write it there, and restart the daemon",
                KeyError::Helper => {
                    "restart the daemon, which keeps serving the volumes that are open until then"
                }
                KeyError::Failed { .. } | KeyError::Slow { .. } => {
                    "run it by hand as the daemon's user"
                }
                KeyError::Key { source, .. } => return source.remedy(),
            }
            .into(),
        )
    }
}

/// Reads a key. May block, up to half a minute for a program.
///
/// # Errors
/// [`KeyError`], each with a remedy.
pub(crate) fn read_key(source: &KeySource) -> Result<Secret, KeyError> {
    match source {
        KeySource::File(file) => read_file(&path_of_key(file)?),
        KeySource::Command(words) => run(words, PATIENCE),
    }
}

/// The reason why a volume is not served yet, if a program writes its key.
pub(crate) fn wait_for_program(source: &KeySource) -> Option<String> {
    let KeySource::Command(words) = source else { return None };
    let (program, seconds) = (words.first()?, PATIENCE.as_secs());
    Some(format!(
        "{program}, which has {seconds} s to print its key, or its store has not replied yet"
    ))
}

/// Reads the key in a file.
///
/// # Errors
/// [`KeyError`].
pub(crate) fn read_file(path: &Path) -> Result<Secret, KeyError> {
    let failed = |source| KeyError::File { path: path.into(), source };
    // A FIFO would hold the thread until something is written to it.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let mut file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")));
    }
    collect(&path.display().to_string(), |bytes| file.read(bytes).map_err(failed))
}

/// As [`read_file`], for a command that runs without a daemon.
///
/// # Errors
/// [`KeyError`].
pub(crate) fn read_own_file(path: &Path) -> Result<Secret, KeyError> {
    read_file(path).map_err(|error| match error {
        KeyError::File { path, source } => KeyError::OwnFile { path, source },
        other => other,
    })
}

/// Reads into locked memory up to the end.
fn collect(
    place: &str,
    mut read: impl FnMut(&mut [u8]) -> Result<usize, KeyError>,
) -> Result<Secret, KeyError> {
    let wrong = |source| KeyError::Key { place: place.to_owned(), source };
    let mut key = Secret::zeroed(4096).map_err(wrong)?;
    let mut length = 0;
    loop {
        if length == key.len() {
            if length > KEY_BYTES_MAX {
                return Err(wrong(LuksError::LongKey));
            }
            let mut larger = Secret::zeroed(2 * length).map_err(wrong)?;
            larger[..length].copy_from_slice(&key);
            key = larger;
        }
        match read(&mut key[length..])? {
            0 => break,
            count => length += count,
        }
    }
    key.truncate(length);
    match length {
        0 => Err(wrong(LuksError::EmptyKey)),
        length if length > KEY_BYTES_MAX => Err(wrong(LuksError::LongKey)),
        _ => Ok(key),
    }
}

/// A program that is killed with its children unless it has ended.
struct Running {
    child: Child,
    ended: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            let group = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
            if let Some(group) = group {
                let _ = kill_process_group(group, Signal::KILL);
            }
            let _ = self.child.wait();
        }
    }
}

/// A program, run by this process or by the one that runs programs for a daemon in its sandbox.
enum KeyProgram {
    Own(Running, ChildStdout),
    Helped(HelpedProgram),
}

impl KeyProgram {
    fn start(words: &[String]) -> Result<KeyProgram, KeyError> {
        let program = words.first().cloned().unwrap_or_default();
        let failed = |source| KeyError::Program { program: program.clone(), source };
        if ebb_sandbox::programs_are_denied() {
            let denied = || KeyError::Sandbox { program: program.clone() };
            let helper = key_programs::helper().ok_or_else(denied)?;
            return helper.run(words).map(KeyProgram::Helped).map_err(|error| match error.kind() {
                ErrorKind::PermissionDenied if error.raw_os_error().is_none() => denied(),
                ErrorKind::BrokenPipe | ErrorKind::TimedOut => KeyError::Helper,
                _ => failed(error),
            });
        }
        let mut child = Command::new(&program)
            .args(words.get(1..).unwrap_or_default())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let output = child.stdout.take();
        let running = Running { child, ended: false };
        let output = output.ok_or_else(|| failed(ErrorKind::BrokenPipe.into()))?;
        Ok(KeyProgram::Own(running, output))
    }

    /// Reads what it prints; `None`: not in time.
    fn read(&mut self, bytes: &mut [u8], deadline: Instant) -> io::Result<Option<usize>> {
        match self {
            KeyProgram::Own(_, output) if !wait_for(output, deadline)? => Ok(None),
            KeyProgram::Helped(helped) if !wait_for(&helped.output, deadline)? => Ok(None),
            KeyProgram::Own(_, output) => output.read(bytes).map(Some),
            KeyProgram::Helped(helped) => helped.output.read(bytes).map(Some),
        }
    }

    /// Waits for its end; `None`: not in time.
    fn wait(&mut self, deadline: Instant) -> io::Result<Option<ExitStatus>> {
        match self {
            KeyProgram::Own(running, _) => loop {
                match running.child.try_wait()? {
                    Some(status) => {
                        running.ended = true;
                        return Ok(Some(status));
                    }
                    None if Instant::now() >= deadline => return Ok(None),
                    None => std::thread::park_timeout(PAUSE),
                }
            },
            KeyProgram::Helped(helped) => match helped.wait(deadline) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
                status => status.map(Some),
            },
        }
    }
}

fn run(words: &[String], patience: Duration) -> Result<Secret, KeyError> {
    let program = words.first().cloned().unwrap_or_default();
    let deadline = Instant::now() + patience;
    let failed = |source| KeyError::Program { program: program.clone(), source };
    let slow = || KeyError::Slow { program: program.clone(), seconds: patience.as_secs() };
    let mut running = KeyProgram::start(words)?;
    let key = collect(&format!("the output of {program}"), |bytes| {
        running.read(bytes, deadline).map_err(failed)?.ok_or_else(slow)
    });
    // A program that failed says more than the key that it did not write.
    let key = match key {
        Err(KeyError::Key { source: LuksError::EmptyKey, .. }) | Ok(_) => key,
        Err(error) => return Err(error),
    };
    let status = running.wait(deadline).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => KeyError::Helper,
        _ => failed(error),
    })?;
    let status = status.ok_or_else(slow)?;
    if !status.success() {
        return Err(KeyError::Failed { program: program.clone(), how: status.to_string() });
    }
    key
}

/// Waits until there is something to read; false: not in time.
fn wait_for(output: &impl AsFd, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(output, PollFlags::IN)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use ebb_config::KeyFile;

    use super::*;

    fn command(text: &str) -> Result<Secret, KeyError> {
        let words = ["/bin/sh", "-c", text].map(str::to_owned);
        run(&words, Duration::from_millis(1500))
    }

    #[test]
    fn waiting_names_the_program_and_its_time() {
        let command = KeySource::Command(vec!["/bin/key".into(), "secret".into()]);
        let text = wait_for_program(&command).unwrap();
        assert!(text.starts_with("/bin/key, which has 30 s") && !text.contains("secret"), "{text}");
        assert_eq!(wait_for_program(&KeySource::File(KeyFile::Path("/k".into()))), None);
    }

    #[test]
    fn a_key_is_all_bytes_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        std::fs::write(&path, b"two\nlines\n\0").unwrap();
        let source: KeySource = format!("key-file:{}", path.display()).parse().unwrap();
        assert_eq!(&*read_key(&source).unwrap(), b"two\nlines\n\0");
        std::fs::write(&path, vec![7; KEY_BYTES_MAX]).unwrap();
        assert_eq!(read_file(&path).unwrap().len(), KEY_BYTES_MAX);
        std::fs::write(&path, vec![7; KEY_BYTES_MAX + 1]).unwrap();
        assert!(read_file(&path).unwrap_err().to_string().contains("longer than"));
        std::fs::write(&path, b"").unwrap();
        assert!(read_file(&path).unwrap_err().to_string().contains("empty"));
        assert!(matches!(read_file(Path::new("/nowhere/key")), Err(KeyError::File { .. })));
        // A command runs as its caller, and has no `open_paths`.
        let own = ebb_advice::full_text(&read_own_file(Path::new("/nowhere/key")).unwrap_err());
        assert!(own.contains("that you may read the file") && !own.contains("open_paths"), "{own}");
        // Without waiting for a writer.
        let fifo = folder.path().join("fifo");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(matches!(read_file(&fifo), Err(KeyError::File { .. })));
    }

    #[test]
    fn a_program_gives_a_key_in_time_and_in_bounds_or_an_error() {
        assert_eq!(&*command("printf 'a key'").unwrap(), b"a key");
        let failed = command("printf secret; exit 3").unwrap_err().to_string();
        assert!(failed.contains("exit status: 3") && !failed.contains("secret"), "{failed}");
        assert!(command("exit 0").unwrap_err().to_string().contains("empty"));
        assert!(matches!(command("sleep 1000 & sleep 1000"), Err(KeyError::Slow { .. })));
        assert!(matches!(command("exec >&-; sleep 1000"), Err(KeyError::Slow { .. })));
        let endless = command("cat /dev/zero").unwrap_err();
        assert!(matches!(endless, KeyError::Key { source: LuksError::LongKey, .. }), "{endless}");
        let none = run(&["/nowhere/program".to_owned()], PATIENCE);
        assert!(matches!(none, Err(KeyError::Program { .. })));
    }
}
