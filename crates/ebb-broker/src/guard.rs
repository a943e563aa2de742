//! The daemon's side: makes the broker, and puts the daemon under the filter.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, PipeWriter, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::exit;
use std::sync::Arc;
use std::time::Duration;

use ebb_sandbox::restrict_broker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::filter::{brokered, denied};
use crate::rules::{BrokerRules, CurrentRules, RulesSource};
use crate::serve::{BrokerServer, Refusals};
use crate::sockets::Sockets;
use crate::sys::{self, Forked};
use crate::target::{GuardedDaemon, process_fd};

/// How long the broker may take to start.
const PATIENCE: Duration = Duration::from_secs(10);
/// What the broker sends when it is ready, if it cannot see the daemon in `/proc`, and once it makes calls.
const READY: u8 = b'r';
const BLIND: u8 = b'b';
const SERVING: u8 = b's';

/// Why there is no broker.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The process cannot be made.
    #[error("its process cannot be made")]
    Process(#[source] io::Error),
    /// It has ended, or does not answer.
    #[error("its process does not answer")]
    Silent(#[source] io::Error),
    /// The kernel refuses the filter.
    #[error("seccomp")]
    Filter(#[source] io::Error),
    /// The filter is there, and the broker is not: no path can be opened.
    #[error(
        "its process has ended while it was put in charge: start the daemon again, with `sandbox = \"off\"` if that happens again"
    )]
    Lost(#[source] io::Error),
}

impl BrokerError {
    /// Whether the daemon cannot go on: it is under the filter, and nothing makes its calls.
    pub fn is_fatal(&self) -> bool {
        matches!(self, BrokerError::Lost(_))
    }
}

/// The broker, as the daemon knows it.
#[derive(Debug)]
pub struct Broker {
    channel: UnixStream,
    process: u32,
    /// What is written to it ends the broker.
    end: PipeWriter,
}

impl Broker {
    /// Makes the broker, as a copy of this process, which must have one thread and must not have read anything foreign. The copy runs
    /// `begin` first, and reads the configuration by `source` again when it refuses something. `operations` are what rings take.
    ///
    /// # Errors
    /// [`BrokerError::Process`].
    pub fn start(
        (rules, source): (BrokerRules, RulesSource),
        operations: &[u8],
        begin: impl FnOnce(),
    ) -> Result<Broker, BrokerError> {
        let (own, its) = UnixStream::pair().map_err(BrokerError::Process)?;
        let (ended, end) = io::pipe().map_err(BrokerError::Process)?;
        let daemon = std::process::id();
        match sys::fork().map_err(BrokerError::Process)? {
            Forked::Parent(process) => {
                own.set_read_timeout(Some(PATIENCE)).map_err(BrokerError::Process)?;
                sys::allow_descriptors_to(process);
                Ok(Broker { channel: own, process, end })
            }
            Forked::Child => {
                sys::ignore_signals();
                sys::close_others([&its, &ended]);
                if let Err(error) = sys::die_when_written_to(&ended) {
                    tracing::warn!("a broker that hangs cannot be ended: {error}");
                }
                let _ = rustix::thread::set_name(c"ebbd-broker");
                begin();
                let rules = CurrentRules::new(rules, source);
                if let Err(error) = serve(its, daemon, rules, operations) {
                    tracing::error!("the broker has ended: {error}");
                }
                exit(0)
            }
        }
    }

    /// Its process.
    pub fn process(&self) -> u32 {
        self.process
    }

    /// Puts all threads of the daemon under the filter, for good: from now on the broker makes their calls. No worker may be under rules
    /// of its own yet.
    ///
    /// # Errors
    /// [`BrokerError`]; with one that is fatal the daemon can open nothing any more.
    pub fn guard(&self) -> Result<(), BrokerError> {
        let guarded = self.put_in_charge();
        if guarded.is_err() {
            // It ends.
            let _ = self.channel.shutdown(std::net::Shutdown::Both);
        }
        guarded
    }

    fn put_in_charge(&self) -> Result<(), BrokerError> {
        self.hear(READY).map_err(BrokerError::Silent)?;
        let wrong = |error| BrokerError::Filter(io::Error::other(error));
        let (denied, brokered) = (denied().map_err(wrong)?, brokered().map_err(wrong)?);
        let memory = File::options().read(true).write(true).open("/proc/self/mem");
        let memory = memory.map_err(BrokerError::Filter)?;
        sys::no_new_privileges().map_err(BrokerError::Filter)?;
        let applied = seccompiler::apply_filter_all_threads(&denied);
        applied.map_err(|error| BrokerError::Filter(io::Error::other(error)))?;
        let listener = sys::listen(&brokered).map_err(BrokerError::Filter)?;
        send(&self.channel, [listener.as_fd(), memory.as_fd()]).map_err(BrokerError::Lost)?;
        self.hear(SERVING).map_err(BrokerError::Lost)?;
        drop(listener);
        File::open("/dev/null").map(drop).map_err(BrokerError::Lost)
    }

    fn hear(&self, wanted: u8) -> io::Result<()> {
        let mut said = [0];
        (&self.channel).read_exact(&mut said)?;
        match said[0] {
            byte if byte == wanted => Ok(()),
            BLIND => Err(io::Error::other("it does not see this process in /proc")),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Ends the broker, whatever it does, also one that was stopped by a signal: calls that wait
    /// for it fail. The daemon may signal no process: the broker has had the kernel do that, for
    /// itself.
    pub fn kill(&self) {
        // A pipe that is full was written to before.
        let _ = (&self.end).write(&[0]);
    }

    /// What becomes readable when the broker has ended.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub fn end(&self) -> io::Result<OwnedFd> {
        Ok(self.channel.try_clone()?.into())
    }

    /// Whether the broker has ended, so that the daemon can open nothing any more.
    pub fn has_ended(&self) -> bool {
        let mut channel = [PollFd::new(&self.channel, PollFlags::IN)];
        poll(&mut channel, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

/// The broker's life: until the daemon has ended.
fn serve(
    mut channel: UnixStream,
    daemon: u32,
    rules: Arc<CurrentRules>,
    operations: &[u8],
) -> io::Result<()> {
    // Without them it could make no call. The error is one of the daemon's, which serves without a broker.
    let seen = std::fs::read_link(format!("/proc/{daemon}/fd/0")).is_ok()
        && std::fs::exists(format!("/proc/{daemon}/task/{daemon}"))?;
    channel.write_all(&[if seen { READY } else { BLIND }])?;
    let Some([listener, memory]) = receive(&channel)? else { return Ok(()) };
    let target = Arc::new(GuardedDaemon {
        process: daemon,
        process_fd: process_fd(daemon)?,
        memory: memory.into(),
        folder: std::env::current_dir().unwrap_or_else(|_| "/".into()),
    });
    let process = restrict_broker();
    if !process.in_force {
        tracing::warn!("the broker has no rules for its own calls: {}", process.detail);
    }
    channel.write_all(&[SERVING])?;
    let operations = operations.to_vec();
    let (sockets, calls, refusals) =
        (Arc::<Sockets>::default(), Default::default(), Refusals::default());
    // The daemon sees by the channel that the broker lives, and the broker that the daemon does.
    let server =
        BrokerServer { listener, channel, target, rules, operations, sockets, calls, refusals };
    server.run();
    Ok(())
}

/// Sends two descriptors.
pub(crate) fn send(channel: &UnixStream, fds: [BorrowedFd<'_>; 2]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(channel, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The two descriptors that the daemon sends; `None` if it has ended before.
pub(crate) fn receive(channel: &UnixStream) -> io::Result<Option<[OwnedFd; 2]>> {
    let mut message = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut message)];
    let got = recvmsg(channel, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut fds = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    let fds = fds.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok(Some(fds))
}
