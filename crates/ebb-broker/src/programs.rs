//! Programs for the daemon, which print keys: another process runs them, one that existed before
//! the sandbox, so that the daemon itself can run none, and what it can open does not depend on
//! whether a volume has such a program.
//!
//! The process runs only what the configuration names, which it reads itself. What a program prints
//! goes through a pipe of the daemon's; the process does not see it.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio, exit};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_sandbox::threads;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::guard::{BrokerError, receive, send};
use crate::sys::{self, Forked};

/// How long the process may take to answer, and how often it looks whether a program has ended.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// The most bytes of a command.
const COMMAND_MAX: u64 = 256 << 10;

/// What the process replies: it has started the program, and later its status; it does not run it;
/// it could not, and the error.
const STARTED: u8 = b's';
const NOT_NAMED: u8 = b'n';
const FAILED: u8 = b'f';

/// Whether the configuration names this command.
pub type NamesCommand = Box<dyn Fn(&[String]) -> bool + Send + Sync>;

/// The process that runs programs, as the daemon knows it.
#[derive(Debug)]
pub struct ProgramHelper {
    channel: UnixStream,
}

/// A program that runs. It is killed, with its children, when this is dropped.
#[derive(Debug)]
pub struct HelpedProgram {
    /// What it prints.
    pub output: PipeReader,
    replies: UnixStream,
}

impl ProgramHelper {
    /// Makes the process, as a copy of this one, which must have one thread.
    ///
    /// # Errors
    /// [`BrokerError::Process`].
    pub fn start(names: NamesCommand) -> Result<ProgramHelper, BrokerError> {
        let (own, its) = UnixStream::pair().map_err(BrokerError::Process)?;
        match sys::fork().map_err(BrokerError::Process)? {
            Forked::Parent(_) => Ok(ProgramHelper { channel: own }),
            Forked::Child => {
                sys::survive_signals();
                sys::close_others([&its, &its]);
                let _ = rustix::thread::set_name(c"ebbd-keys");
                serve(&its, &Arc::new(names));
                exit(0)
            }
        }
    }

    /// Becomes readable when the process has ended.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn end(&self) -> io::Result<OwnedFd> {
        self.channel.as_fd().try_clone_to_owned()
    }

    /// Starts a program.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] if the configuration does not name it,
    /// [`io::ErrorKind::TimedOut`] or [`io::ErrorKind::BrokenPipe`] if the process has ended or
    /// does not answer, otherwise as for running the program.
    pub fn run(&self, words: &[String]) -> io::Result<HelpedProgram> {
        let (output, its_output) = io::pipe()?;
        let (mut replies, its) = UnixStream::pair()?;
        replies.set_read_timeout(Some(PATIENCE))?;
        replies.set_write_timeout(Some(PATIENCE))?;
        send(&self.channel, [its.as_fd(), its_output.as_fd()])?;
        drop((its, its_output));
        replies.write_all(words.join("\0").as_bytes())?;
        replies.shutdown(Shutdown::Write)?;
        let mut reply = [0];
        replies.read_exact(&mut reply).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            io::ErrorKind::UnexpectedEof => io::ErrorKind::BrokenPipe.into(),
            _ => error,
        })?;
        match reply[0] {
            STARTED => Ok(HelpedProgram { output, replies }),
            FAILED => Err(io::Error::from_raw_os_error(number(&mut replies)?)),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }
}

impl HelpedProgram {
    /// Waits for its end.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if it has not ended at `deadline`,
    /// [`io::ErrorKind::UnexpectedEof`] if the process has.
    pub fn wait(&mut self, deadline: Instant) -> io::Result<ExitStatus> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.replies.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        number(&mut self.replies).map(ExitStatus::from_raw)
    }
}

fn number(replies: &mut UnixStream) -> io::Result<i32> {
    let mut bytes = [0; 4];
    replies.read_exact(&mut bytes)?;
    Ok(i32::from_ne_bytes(bytes))
}

/// The life of the process: until the daemon has ended.
fn serve(channel: &UnixStream, names: &Arc<NamesCommand>) {
    loop {
        let [replies, output] = match receive(channel) {
            Ok(Some(fds)) => fds,
            Ok(None) => return,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // What was sent is no order.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => continue,
            Err(_) => return,
        };
        let names = names.clone();
        // If there is no thread, the daemon notices that the order's socket is closed.
        let _ = threads::run(move || carry_out(replies.into(), output.into(), &names));
    }
}

fn carry_out(mut replies: UnixStream, output: PipeWriter, names: &NamesCommand) {
    let mut words = Vec::new();
    let _ = replies.set_read_timeout(Some(PATIENCE));
    if (&replies).take(COMMAND_MAX).read_to_end(&mut words).is_err() {
        return;
    }
    let words: Result<Vec<String>, _> =
        words.split(|byte| *byte == 0).map(|word| String::from_utf8(word.to_vec())).collect();
    let Some(words) = words.ok().filter(|words| names(words)) else {
        let _ = replies.write_all(&[NOT_NAMED]);
        return;
    };
    let mut child = match start(&words, output) {
        Ok(child) => child,
        Err(error) => {
            let mut reply = vec![FAILED];
            reply.extend(error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes());
            let _ = replies.write_all(&reply);
            return;
        }
    };
    let status = match replies.write_all(&[STARTED]) {
        Ok(()) => wait(&mut child, &replies),
        Err(_) => None,
    };
    match status {
        Some(status) => drop(replies.write_all(&status.into_raw().to_ne_bytes())),
        None => {
            let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            let _ = group.map(|group| kill_process_group(group, Signal::KILL));
            let _ = child.wait();
        }
    }
}

fn start(words: &[String], output: PipeWriter) -> io::Result<Child> {
    let mut command = Command::new(words.first().map_or("", String::as_str));
    command.args(words.get(1..).unwrap_or_default());
    command.stdin(Stdio::null()).stdout(OwnedFd::from(output)).process_group(0).spawn()
}

/// Waits for the end of a program; `None` if the daemon does not wait any longer.
fn wait(child: &mut Child, replies: &UnixStream) -> Option<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait().ok()? {
            return Some(status);
        }
        let mut daemon = [PollFd::new(replies, PollFlags::empty())];
        if poll(&mut daemon, Some(&LOOK_EVERY)).is_ok_and(|count| count > 0) {
            return None;
        }
    }
}
