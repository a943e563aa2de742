//! One frontend: the state that its messages set up, and the queues that are served for it.
//!
//! A frontend is served one message at a time. If the reply has to wait for a queue to end or for
//! memory to be released, the message is [`Pending`]: the next one is read after its reply.
//!
//! Source: QEMU's `interop/vhost-user.rst`. Frontends differ from it:
//! - A frontend that does not negotiate the protocol's features never enables its queues: they are
//!   enabled from the start.
//! - `SET_FEATURES` may be repeated while queues run, with `LOG_ALL` or without, and then changes
//!   nothing else.
//! - QEMU disables a queue before it asks for its base: a disabled queue consumes nothing, and its
//!   requests in flight complete.
//!
//! # Invariants
//! - After the reply to `GET_VRING_BASE` the queue changes no guest memory and sends no
//!   notification, and all consumed requests are complete. If requests are left to a successor, the
//!   connection ends without the reply.
//! - A ring is served for one connection to its volume at a time. A frontend that connects again
//!   waits until the queues of its former connection have ended. If they have not ended by a
//!   deadline, a reply that waits for them is not sent, and the new connection ends.
//! - A change of memory is acknowledged when no request uses the former regions, and a change of
//!   the log when no request uses the former log.
//! - Every descriptor is closed when it is replaced or refused.

mod memory;
mod queues;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ebb_guest_ring::{MappingBudget, SharedMemory, VolumeMappings};
use ebb_io::WorkerHandle;
use ebb_vhost_proto::{
    ConfigRange, FrontendMessage, InflightArea, MessageHeader, OutgoingMessage, ProtocolFeatures,
    VirtioFeatures, VringState, WRITEBACK_OFFSET,
};
use ebb_volume::{Lease, LogLimit};

use crate::commands::{ConnectionId, ControlMailbox};
use crate::descriptors::{DescriptorBudget, HeldDescriptors};
use crate::dirty_log::DirtyLog;
use crate::disk_served::ServedFrontends;
use crate::disk_shared::DiskShared;
use crate::features::{QUEUES_MAX, config_space, offered, offered_protocol};
use crate::frontend_socket::{FrontendSocket, ReceivedMessage, SocketError};
use crate::memory::{GuestMemory, GuestMemoryError, REGIONS_MAX, Region};
use crate::ring_uses::RingUses;
use crate::vring::Vring;

/// The reason for refusing a frontend that would hold too many descriptors.
pub(crate) const OUT_OF_BUDGET: &str =
    "no descriptors are left for it: raise LimitNOFILE= of the service (or ulimit -n)";

/// Limits log lines about guests whose store has changed: their frontends connect again and again.
static FOREIGN: LogLimit = LogLimit::new(10, Duration::from_secs(60));

/// The pause before an unread descriptor is looked at again for the first time.
const READ_SOON: Duration = Duration::from_millis(1);

/// Why a message cannot be carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MessageError {
    #[error("a queue that does not exist: {0} (there are {QUEUES_MAX})")]
    Queue(u32),
    #[error("{0}")]
    Refused(&'static str),
    #[error("memory: {0}")]
    Memory(#[from] GuestMemoryError),
    #[error("memory: {0}")]
    Io(#[from] std::io::Error),
}

type Outcome = Result<Answer, MessageError>;

/// The answer to a message.
enum Answer {
    /// An acknowledgement, if the frontend asked for one.
    Done,
    /// A message.
    Reply(OutgoingMessage),
    /// A message and a descriptor.
    ReplyWith(OutgoingMessage, OwnedFd),
    /// An answer that has to wait.
    Later(Pending),
}

/// A message whose reply has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    /// `GET_VRING_BASE`: until the queue has ended.
    Base(u16),
    /// A change of memory: until the former regions are released.
    Memory,
    /// `SET_LOG_BASE`: until no request uses the former log.
    Log,
    /// `RESET_DEVICE`: until all queues have ended.
    Reset,
    /// The configuration of a queue that is ending: it is carried out afterwards.
    End(u16),
}

/// The state that all sessions share.
pub(crate) struct FrontendContext {
    pub(crate) workers: Vec<WorkerHandle>,
    pub(crate) mailbox: ControlMailbox,
    pub(crate) served: Arc<ServedFrontends>,
    pub(crate) descriptors: DescriptorBudget,
    pub(crate) mappings: MappingBudget,
    /// The next worker to assign a queue to.
    pub(crate) next_worker: usize,
    pub(crate) rings: RingUses,
    /// See [`VhostOptions`](crate::VhostOptions).
    pub(crate) former_wait: Duration,
}

/// See the module.
pub(crate) struct FrontendSession {
    pub(crate) id: ConnectionId,
    pub(crate) socket: FrontendSocket,
    pub(crate) disk: Arc<DiskShared>,
    features: VirtioFeatures,
    protocol: ProtocolFeatures,
    /// Set when memory of the frontend was truncated.
    lost: Arc<AtomicBool>,
    /// The memory that all frontends of this volume have mapped.
    pub(crate) mappings: Arc<VolumeMappings>,
    regions: Vec<Arc<Region>>,
    memory: Arc<GuestMemory>,
    /// Former memory tables, which queues may still use.
    replaced: Vec<Arc<GuestMemory>>,
    log: Option<Arc<DirtyLog>>,
    inflight: Option<(Arc<SharedMemory>, InflightArea)>,
    /// The records of acknowledged writes in the inflight region were read.
    records_read: bool,
    vrings: Vec<Vring>,
    backend_requests: Option<OwnedFd>,
    descriptors: HeldDescriptors,
    /// The right to write, while queues are served.
    lease: Option<Lease>,
    /// A queue cannot be started, or a reply cannot be sent, because another connection of the
    /// guest still uses the ring.
    waits_for_ring: bool,
    /// The time since which a reply waits for the former connection.
    held_since: Option<Instant>,
    pending: Option<(Pending, u32, bool)>,
    /// The message to be carried out after [`Pending::End`].
    deferred: Option<ReceivedMessage>,
    /// The cache mode that the guest selected.
    volatile_cache: bool,
    /// The guest selected it on this connection.
    cache_selected: bool,
    /// The size that the guest knows, bytes.
    size: u64,
    /// The size must be announced as soon as queues are served: QEMU reads it at no other time.
    announce: bool,
    /// The time since which no message is read, because the frontend has not read a descriptor.
    paused: Option<Instant>,
    /// The connection ends when all its queues have ended.
    pub(crate) closing: bool,
    /// The log has a line about the begin of the connection, and needs one about its end.
    pub(crate) is_logged: bool,
    /// The log has the line about the end of the connection.
    pub(crate) is_end_logged: bool,
}

impl FrontendSession {
    pub(crate) fn new(
        id: ConnectionId,
        socket: OwnedFd,
        disk: Arc<DiskShared>,
        mappings: Arc<VolumeMappings>,
    ) -> FrontendSession {
        FrontendSession {
            id,
            socket: FrontendSocket::new(socket),
            features: VirtioFeatures::NONE,
            protocol: ProtocolFeatures::NONE,
            lost: Arc::default(),
            mappings,
            regions: Vec::new(),
            memory: Arc::default(),
            replaced: Vec::new(),
            log: None,
            inflight: None,
            records_read: false,
            vrings: Vec::new(),
            backend_requests: None,
            descriptors: HeldDescriptors::default(),
            lease: None,
            waits_for_ring: false,
            held_since: None,
            pending: None,
            deferred: None,
            volatile_cache: true,
            cache_selected: false,
            size: disk.volume.size(),
            announce: true,
            paused: None,
            closing: false,
            is_logged: false,
            is_end_logged: false,
            disk,
        }
    }

    /// Returns true if the next message may be read.
    pub(crate) fn is_readable(&self) -> bool {
        self.pending.is_none()
            && !self.socket.is_blocked()
            && !self.closing
            && self.paused.is_none()
    }

    /// As [`FrontendSession::is_readable`], after a look whether the frontend has read descriptors.
    pub(crate) fn may_receive(&mut self) -> bool {
        self.pause();
        self.is_readable()
    }

    /// Returns true if [`FrontendSession::try_reader`] has to be called again.
    pub(crate) fn waits_for_reader(&self) -> bool {
        !self.closing && (self.paused.is_some() || self.socket.retries)
    }

    /// Reads no message while a reply with a descriptor is unread.
    fn pause(&mut self) {
        self.paused = match self.socket.awaits_reader() {
            true => self.paused.or_else(|| Some(ebb_mem::clock::now())),
            false => None,
        };
    }

    /// The pause before [`FrontendSession::try_reader`] is due: short at first, since most
    /// frontends read at once.
    pub(crate) fn reader_retry(&self, most: Duration) -> Option<Duration> {
        let since = self.paused.map(ebb_mem::clock::since);
        let pause = since.unwrap_or(most).clamp(READ_SOON.min(most), most);
        self.waits_for_reader().then_some(pause)
    }

    /// Looks whether the frontend has read a descriptor, and sends the rest of a message.
    pub(crate) fn try_reader(&mut self) -> Result<(), SocketError> {
        self.pause();
        if self.socket.retries { self.socket.send_rest() } else { Ok(()) }
    }

    /// Returns true if a queue could not be started, because the volume has another writer.
    pub(super) fn waits_for_writer(&self) -> bool {
        self.disk.waiting.load(Ordering::Relaxed)
    }

    /// Returns true if [`FrontendSession::try_again`] is due.
    pub(crate) fn waits_for_others(&self) -> bool {
        self.waits_for_ring || self.waits_for_writer()
    }

    /// Returns true if queues are served or drained.
    pub(crate) fn has_queues(&self) -> bool {
        self.vrings.iter().any(|vring| vring.running.is_some())
    }

    /// Carries out the message that was received.
    pub(crate) fn handle(&mut self, context: &mut FrontendContext) -> Result<(), SocketError> {
        let Some(received) = self.socket.take() else { return Ok(()) };
        self.handle_received(context, received)
    }

    /// Carries out the message that had to wait for the end of a queue.
    fn handle_deferred(&mut self, context: &mut FrontendContext) -> Result<(), SocketError> {
        match self.deferred.take_if(|_| self.pending.is_none()) {
            Some(received) if !self.closing => self.handle_received(context, received),
            _ => Ok(()),
        }
    }

    fn handle_received(
        &mut self,
        context: &mut FrontendContext,
        (header, body, mut fds): ReceivedMessage,
    ) -> Result<(), SocketError> {
        let message = FrontendMessage::decode(header, &body, fds.len())?;
        fds.truncate(message.descriptors());
        if let Some(index) = self.ending_queue_of(message) {
            self.pending = Some((Pending::End(index), header.request, false));
            self.deferred = Some((header, body, fds));
            return Ok(());
        }
        let outcome = self.carry_out(context, header, message, fds);
        let acknowledges = header.need_reply
            && self.protocol.contains(ProtocolFeatures::REPLY_ACK)
            && !message.has_reply(self.protocol);
        match outcome {
            Ok(Answer::Done) if acknowledges => {
                self.socket.send(OutgoingMessage::acknowledgement(header.request, true), None)
            }
            Ok(Answer::Done) => Ok(()),
            Ok(Answer::Reply(reply)) => self.socket.send(reply, None),
            Ok(Answer::ReplyWith(reply, fd)) => self.socket.send(reply, Some(fd)),
            Ok(Answer::Later(pending)) => {
                self.pending = Some((pending, header.request, acknowledges));
                self.reply_pending(context)
            }
            Err(error) => {
                if let Some(suppressed) = self.disk.may_log() {
                    let (volume, connection) = (&**self.disk.volume.name(), self.id);
                    tracing::warn!(volume, %connection, request = header.request, %error, suppressed,
                        "a message of the frontend cannot be carried out");
                }
                if acknowledges {
                    let refusal = OutgoingMessage::acknowledgement(header.request, false);
                    return self.socket.send(refusal, None);
                }
                // The frontend would continue with a state that we do not have.
                Err(std::io::Error::new(std::io::ErrorKind::InvalidData, error.to_string()).into())
            }
        }
    }

    fn carry_out(
        &mut self,
        context: &mut FrontendContext,
        header: MessageHeader,
        message: FrontendMessage<'_>,
        mut fds: Vec<OwnedFd>,
    ) -> Outcome {
        let number = |value| Ok(Answer::Reply(OutgoingMessage::number(header.request, value)));
        let fd = fds.pop();
        match message {
            FrontendMessage::GetFeatures => number(offered(&self.disk.volume).0),
            FrontendMessage::SetFeatures(features) => self.set_features(features),
            FrontendMessage::GetProtocolFeatures => number(offered_protocol().0),
            FrontendMessage::SetProtocolFeatures(features) => self.set_protocol_features(features),
            FrontendMessage::GetQueueNum => number(QUEUES_MAX.into()),
            FrontendMessage::GetMaxMemSlots => number(REGIONS_MAX as u64),
            FrontendMessage::SetMemTable(table) => {
                fds.extend(fd);
                self.set_memory_table(table, &fds)
            }
            FrontendMessage::AddMemReg(region) => self.add_region(region, &needed(fd)?),
            FrontendMessage::RemMemReg(region) => self.remove_region(region),
            FrontendMessage::SetVringNum(state) => self.set_vring_size(state),
            FrontendMessage::SetVringAddr(addresses) => {
                self.set_vring_addresses(context, addresses)
            }
            FrontendMessage::SetVringBase(state) => self.set_vring_base(state),
            FrontendMessage::GetVringBase(index) => self.stop_vring(index),
            FrontendMessage::SetVringKick(file) => {
                let kick = self.accept_event(context, fd)?;
                self.set_kick(context, file, kick)
            }
            FrontendMessage::SetVringCall(file) => {
                let call = self.accept_event(context, fd)?;
                self.set_call(file, call)
            }
            FrontendMessage::SetVringErr(file) => {
                let err = self.accept_event(context, fd)?;
                self.set_err(file, err)
            }
            FrontendMessage::SetVringEnable { index, enabled } => {
                self.enable(context, index, enabled)
            }
            FrontendMessage::GetConfig(range) => Ok(Answer::Reply(self.config(range))),
            FrontendMessage::SetConfig(range, bytes) => self.set_config(range, bytes),
            FrontendMessage::SetBackendReqFd => {
                let fd = needed(fd)?;
                rustix::io::ioctl_fionbio(&fd, true).map_err(std::io::Error::from)?;
                self.backend_requests = Some(fd);
                self.descriptors.has_backend_requests = true;
                Ok(Answer::Done)
            }
            FrontendMessage::GetInflightFd(area) => self.create_inflight(header, area),
            FrontendMessage::SetInflightFd(area) => self.set_inflight(context, area, &needed(fd)?),
            FrontendMessage::SetLogBase(area) => self.set_log(area, fd),
            FrontendMessage::ResetDevice => Ok(self.reset()),
            // No error of the log is reported; the status is the frontend's affair.
            FrontendMessage::SetLogFd
            | FrontendMessage::SetOwner
            | FrontendMessage::ResetOwner
            | FrontendMessage::SetStatus(_)
            | FrontendMessage::VringKick(_) => Ok(Answer::Done),
            FrontendMessage::GetStatus => number(0),
            FrontendMessage::Unsupported(_)
                if header.need_reply && self.protocol.contains(ProtocolFeatures::REPLY_ACK) =>
            {
                Err(MessageError::Refused("the request is not supported"))
            }
            FrontendMessage::Unsupported(_) => Ok(Answer::Done),
        }
    }

    fn set_features(&mut self, features: VirtioFeatures) -> Outcome {
        if !features.beyond(offered(&self.disk.volume)).is_none() {
            return Err(MessageError::Refused(
                "the frontend accepted features that were not offered",
            ));
        }
        let log_changed = (self.features.0 ^ features.0) & VirtioFeatures::LOG_ALL.0 != 0;
        self.features = features;
        self.update_cache_mode();
        if !log_changed {
            return Ok(Answer::Done);
        }
        self.update_memory();
        // Requests in flight use the former table, which has another log or none.
        Ok(Answer::Later(Pending::Memory))
    }

    fn set_protocol_features(&mut self, features: ProtocolFeatures) -> Outcome {
        if !features.beyond(offered_protocol()).is_none() {
            return Err(MessageError::Refused(
                "the frontend accepted features that were not offered",
            ));
        }
        self.protocol = features;
        Ok(Answer::Done)
    }

    /// Updates the cache mode: a guest that does not send flushes, or has switched the cache off,
    /// needs each write to be stable.
    fn update_cache_mode(&self) {
        let flushes = self.features.contains(VirtioFeatures::BLK_FLUSH);
        let selects = self.features.contains(VirtioFeatures::BLK_CONFIG_WCE);
        let volatile = flushes && (!selects || self.volatile_cache);
        self.disk.volatile_cache.store(volatile, Ordering::Relaxed);
    }

    fn config(&self, range: ConfigRange) -> OutgoingMessage {
        let space = config_space(&self.disk.volume, self.size, self.volatile_cache);
        OutgoingMessage::config(range, &space)
    }

    fn set_config(&mut self, range: ConfigRange, bytes: &[u8]) -> Outcome {
        let at = WRITEBACK_OFFSET.checked_sub(range.offset).and_then(|at| usize::try_from(at).ok());
        if let Some(value) = at.and_then(|at| bytes.get(at)) {
            self.volatile_cache = *value != 0;
            self.cache_selected = true;
            self.update_cache_mode();
            let records = self.vrings.iter().filter_map(|vring| vring.record.as_ref());
            records.for_each(|record| record.note_write_through(!self.volatile_cache));
        }
        Ok(Answer::Done)
    }

    /// Replies to the pending message, if it no longer has to wait.
    fn reply_pending(&mut self, context: &FrontendContext) -> Result<(), SocketError> {
        let Some((pending, request, acknowledges)) = self.pending else { return Ok(()) };
        let ready = match pending {
            Pending::Base(index) | Pending::End(index) => {
                let vring = self.vrings.get(usize::from(index));
                vring.is_none_or(|vring| vring.running.is_none())
            }
            Pending::Memory | Pending::Log => self.release_memory(),
            Pending::Reset => !self.has_queues(),
        };
        if !ready {
            // With its region the frontend can connect again, and the ring goes on.
            if matches!(pending, Pending::Base(_)) && self.inflight.is_some() {
                self.wait_for_ring(context);
            }
            return Ok(());
        }
        if self.is_held_back(context, pending) {
            return Ok(());
        }
        self.pending = None;
        match pending {
            Pending::Base(index)
                if self.vrings.get(usize::from(index)).is_some_and(|of| of.left) =>
            {
                // A frontend that moves to another host takes no region there, and would skip the
                // requests in flight.
                self.close();
                Ok(())
            }
            Pending::Base(index) => {
                let number = self.vrings.get(usize::from(index)).map_or(0, |vring| vring.base);
                let state = VringState { index: index.into(), number };
                self.socket.send(OutgoingMessage::vring_base(state), None)
            }
            Pending::Reset => {
                self.vrings.clear();
                // The rings begin anew: the region says what was in flight in the former ones.
                self.inflight = None;
                self.disk.broken.store(false, Ordering::Relaxed);
                self.acknowledge(request, acknowledges)
            }
            Pending::Log if self.protocol.contains(ProtocolFeatures::LOG_SHMFD) => {
                self.socket.send(OutgoingMessage::log_base(), None)
            }
            Pending::Memory | Pending::Log => self.acknowledge(request, acknowledges),
            Pending::End(_) => Ok(()),
        }
    }

    /// Returns true if queues of a former connection still use the ring of the `pending` message:
    /// they could change guest memory after the reply. Ends the connection if they do so for too
    /// long.
    fn is_held_back(&mut self, context: &FrontendContext, pending: Pending) -> bool {
        let at_former = |index: u16| {
            let place = self.ring_place(index);
            place.is_some_and(|place| context.rings.is_at_former(place, &self.disk))
        };
        let is_held = match pending {
            Pending::Base(index) => at_former(index),
            Pending::Reset => (0..QUEUES_MAX).take(self.vrings.len()).any(at_former),
            Pending::End(_) | Pending::Memory | Pending::Log => false,
        };
        if !is_held {
            self.held_since = None;
            return false;
        }
        self.wait_for_ring(context);
        true
    }

    /// Tries again soon, or ends the connection if the message has waited for too long: a VMM waits
    /// for the reply without limit.
    fn wait_for_ring(&mut self, context: &FrontendContext) {
        let since = *self.held_since.get_or_insert_with(ebb_mem::clock::now);
        self.waits_for_ring = ebb_mem::clock::since(since) < context.former_wait;
        if !self.waits_for_ring && !self.closing {
            if let Some(suppressed) = self.disk.may_log() {
                let volume = &**self.disk.volume.name();
                tracing::warn!(volume, connection = %self.id, suppressed,
                    "closed the connection of a frontend: requests of the ring that it ends are still in flight");
            }
            self.disk.gone.store(true, Ordering::Relaxed);
            self.close();
            // Its own queues may keep the connection for longer.
            self.socket.shut_down();
        }
    }

    fn acknowledge(&mut self, request: u32, acknowledges: bool) -> Result<(), SocketError> {
        match acknowledges {
            true => self.socket.send(OutgoingMessage::acknowledgement(request, true), None),
            false => Ok(()),
        }
    }

    /// Counts the descriptors that the connection holds now.
    pub(crate) fn count_descriptors(&mut self, context: &mut FrontendContext) {
        context.descriptors.update(self.disk.volume.name(), &mut self.descriptors);
    }

    /// To be called when the connection is dropped.
    pub(crate) fn release_descriptors(&self, context: &mut FrontendContext) {
        context.descriptors.release(self.disk.volume.name(), &self.descriptors);
    }

    /// Ends all queues; the connection ends when they have.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        self.disk.drain();
    }
}

fn needed(fd: Option<OwnedFd>) -> Result<OwnedFd, MessageError> {
    fd.ok_or(MessageError::Refused("a descriptor is missing"))
}
