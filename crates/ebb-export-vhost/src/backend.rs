//! The public interface of the backend: starting it, its sockets, stopping it, withdrawing volumes, figures.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_guest_ring::MappingBudget;
use ebb_io::WorkerHandle;
use ebb_volume::{Volume, Volumes};
use rustix::event::epoll;

use crate::commands::{ConnectionId, ControlMailbox, ControlMessage};
use crate::control::FrontendControl;
use crate::descriptors::{DescriptorBudget, FrontendDescriptors};
use crate::disk_served::{DrainingFrontends, ServedFrontends, VhostDisk, figures};
use crate::ring_uses::RingUses;
use crate::session::FrontendContext;
#[cfg(feature = "sim")]
use crate::stepped::SteppedFrontends;
use crate::stuck_writes::WriteWatch;
use crate::volume_socket::VolumeSocket;

/// How long dropping a backend waits for its requests.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);
/// [`VhostOptions::former_wait`]: as long as requests wait for a lost store by default.
const FORMER_WAIT: Duration = Duration::from_secs(60);

/// What a backend is started with.
pub struct VhostOptions {
    /// The workers to which queues are assigned round robin; at least one.
    pub workers: Vec<WorkerHandle>,
    /// The volumes.
    pub volumes: Volumes,
    /// Bytes of memory that the requests of one queue may hold.
    pub queue_memory: usize,
    /// How many descriptors frontends may hold.
    pub descriptors: Arc<FrontendDescriptors>,
    /// The time that the reply to the end of a ring waits for a former connection of its guest.
    /// Then the connection ends without the reply, for which a VMM would wait without limit.
    pub former_wait: Duration,
}

impl VhostOptions {
    /// The usual options.
    pub fn new(workers: Vec<WorkerHandle>, volumes: Volumes) -> VhostOptions {
        VhostOptions {
            workers,
            volumes,
            queue_memory: 64 << 20,
            descriptors: Arc::default(),
            former_wait: FORMER_WAIT,
        }
    }
}

/// A running backend. Dropping it is [`VhostBackend::stop`] with a deadline some seconds away.
pub struct VhostBackend {
    mailbox: ControlMailbox,
    served: Arc<ServedFrontends>,
    thread: Option<JoinHandle<()>>,
}

impl VhostBackend {
    /// Starts the thread that serves frontends. There are no sockets yet: see [`VhostBackend::listen`].
    ///
    /// # Errors
    /// Of the system calls that make the thread and what it waits on.
    pub fn start(options: VhostOptions) -> std::io::Result<VhostBackend> {
        let (mut backend, control) = VhostBackend::parts(options)?;
        let thread = std::thread::Builder::new()
            .name("ebbd-vhost".to_owned())
            .spawn(move || control.run())?;
        backend.thread = Some(thread);
        Ok(backend)
    }

    /// As [`VhostBackend::start`], without a thread: frontends are served while the caller calls
    /// [`SteppedFrontends::run_once`].
    ///
    /// # Errors
    /// As [`VhostBackend::start`].
    #[cfg(feature = "sim")]
    pub fn prepare(options: VhostOptions) -> std::io::Result<(VhostBackend, SteppedFrontends)> {
        let (backend, control) = VhostBackend::parts(options)?;
        Ok((backend, SteppedFrontends::new(control)))
    }

    fn parts(options: VhostOptions) -> std::io::Result<(VhostBackend, FrontendControl)> {
        let (mailbox, inbox) = ControlMailbox::new()?;
        let served = Arc::<ServedFrontends>::default();
        let control = FrontendControl {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            inbox,
            volumes: options.volumes,
            context: FrontendContext {
                workers: options.workers,
                mailbox: mailbox.clone(),
                served: served.clone(),
                descriptors: DescriptorBudget::new(options.descriptors),
                mappings: MappingBudget::default(),
                next_worker: 0,
                rings: RingUses::default(),
                former_wait: options.former_wait,
            },
            queue_memory: options.queue_memory,
            listeners: BTreeMap::new(),
            sessions: BTreeMap::new(),
            next: 0,
            accept_again: None,
            stopping: false,
            watch: WriteWatch::new()?,
            looked: ebb_mem::clock::now(),
        };
        Ok((VhostBackend { mailbox, served, thread: None }, control))
    }

    /// Accepts frontends at a socket, from now on.
    pub fn listen(&self, listener: VolumeSocket) {
        self.mailbox.send(ControlMessage::Listen(listener));
    }

    /// Serves a volume to the frontend at the other end of a connected socket.
    ///
    /// # Errors
    /// If the socket cannot be made non-blocking.
    pub fn connect(&self, socket: OwnedFd, volume: &str) -> std::io::Result<()> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        self.mailbox.send(ControlMessage::Connected(socket, volume.into()));
        Ok(())
    }

    /// Closes the socket at this path. Its file stays; frontends that are connected stay.
    pub fn unlisten(&self, path: &Path) {
        self.mailbox.send(ControlMessage::Unlisten(path.to_owned()));
    }

    /// Stops serving a volume that was removed from the registry: drains its queues now, and closes its connections when they
    /// have ended. Does not wait: the requests in flight have completed when [`DrainingFrontends::drained`] returns.
    pub fn withdraw(&self, volume: &Arc<Volume>) -> DrainingFrontends {
        self.mailbox.send(ControlMessage::Withdraw(Arc::downgrade(volume)));
        DrainingFrontends(self.served.withdraw(volume))
    }

    /// Ends the connections of frontends that may not open their volumes any more, when their requests in flight have
    /// completed. Does not wait.
    pub fn end_disallowed(&self) {
        self.mailbox.send(ControlMessage::AllowChanged);
    }

    /// Records the store of a volume whose layers have changed, for a successor: its guests go on.
    pub fn note_backing(&self, volume: &Arc<Volume>) {
        self.served.note_backing(volume);
    }

    /// Tells guests the sizes of volumes that were resized.
    pub fn announce_sizes(&self) {
        self.mailbox.send(ControlMessage::Resized);
    }

    /// Closes a connection when its requests in flight have completed; false if there is none of this number. Does not wait.
    /// A frontend may connect again.
    pub fn disconnect(&self, number: u64) -> bool {
        let id = ConnectionId(number);
        let known = self.served.figures(|key, _| *key == id).contains(&true);
        if known {
            self.mailbox.send(ControlMessage::Disconnect(id));
        }
        known
    }

    /// Begins to stop: drains all queues, and closes connections when their queues have ended. Does not wait; each volume's
    /// disks drain independently, see [`DrainingFrontends::of`].
    pub fn begin_stop(&self) -> DrainingFrontends {
        let draining = DrainingFrontends(self.served.stop());
        self.mailbox.send(ControlMessage::Stop);
        draining
    }

    /// Stops, and waits for requests in flight until `deadline`. Returns the disks that still have requests in flight then:
    /// their workers continue with them as long as the process lives.
    pub fn stop(mut self, deadline: Instant) -> Vec<VhostDisk> {
        self.drain_until(deadline)
    }

    fn drain_until(&mut self, deadline: Instant) -> Vec<VhostDisk> {
        let draining = self.begin_stop();
        let Some(thread) = self.thread.take() else { return draining.remaining() };
        draining.0.wait_until(deadline);
        let left = draining.remaining();
        if !left.is_empty() {
            self.mailbox.send(ControlMessage::Abandon);
        }
        if self.served.wait_for_control(deadline) {
            let _ = thread.join();
        }
        left
    }

    /// A handle for reading the figures, which can outlive the backend.
    pub fn figures(&self) -> VhostFigures {
        VhostFigures(self.served.clone())
    }
}

/// Reads the figures of a backend's disks; none once it has ended. Cheap to clone.
#[derive(Clone)]
pub struct VhostFigures(Arc<ServedFrontends>);

impl VhostFigures {
    /// The current figures of the frontends that are connected.
    pub fn read(&self) -> Vec<VhostDisk> {
        self.0.figures(figures)
    }

    /// The number of guests of each volume whose writes and flushes fail until they are reset, or
    /// that were refused since their disk is another one than before.
    pub fn failing(&self) -> BTreeMap<Arc<str>, u64> {
        self.0.failing(ebb_mem::clock::now())
    }
}

impl Drop for VhostBackend {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.drain_until(Instant::now() + DROP_TIMEOUT);
        }
    }
}
