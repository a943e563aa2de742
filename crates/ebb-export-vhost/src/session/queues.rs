//! The queues of a frontend: their configuration, their start on a worker, and their end.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_export::ServedDisk;
use ebb_guest_ring::MemoryPlace;
use ebb_io::Fd;
use ebb_vhost_proto::{
    FrontendMessage, OutgoingMessage, VirtioFeatures, VringAddress, VringFile, VringState,
};
use ebb_volume::Writer;

use super::{
    Answer, FrontendContext, FrontendSession, MessageError, OUT_OF_BUDGET, Outcome, Pending,
    SocketError,
};
use crate::commands::{QueueCommand, QueueCommands, QueueEnd};
use crate::disk_shared::add;
use crate::events::accept_event;
use crate::features::QUEUES_MAX;
use crate::frontend_socket::send_if_room;
use crate::inflight::{InflightFault, QueueInflight, RecordedWrites};
use crate::queue::{DiskQueue, EndOfQueue, VirtqueueParts};
use crate::ring_setup::{RingAddresses, RingFeatures, RingSetup, SIZE_MAX, SetupFault};
use crate::virtqueue::Virtqueue;
use crate::vring::{Kick, Vring};

impl FrontendSession {
    pub(super) fn is_packed(&self) -> bool {
        self.features.contains(VirtioFeatures::RING_PACKED)
    }

    /// The queue of this index, which is made when it is named first.
    pub(super) fn vring(&mut self, index: u32) -> Result<(u16, &mut Vring), MessageError> {
        let number = u16::try_from(index).ok().filter(|number| *number < QUEUES_MAX);
        let number = number.ok_or(MessageError::Queue(index))?;
        let at = usize::from(number);
        while self.vrings.len() <= at {
            self.vrings.push(Vring::default());
        }
        let vring = self.vrings.get_mut(at).ok_or(MessageError::Queue(index))?;
        Ok((number, vring))
    }

    /// As [`FrontendSession::vring`], of a queue that is not being served.
    pub(super) fn stopped_vring(&mut self, index: u32) -> Result<&mut Vring, MessageError> {
        let (_, vring) = self.vring(index)?;
        match vring.running {
            Some(_) => Err(MessageError::Refused("a queue that is in use cannot be changed")),
            None => Ok(vring),
        }
    }

    /// The queue that a message configures, if it was told to end and has requests in flight. A frontend that has disabled a
    /// queue need not know of them.
    pub(super) fn ending_queue_of(&self, message: FrontendMessage<'_>) -> Option<u16> {
        let index = match message {
            FrontendMessage::SetVringNum(state) | FrontendMessage::SetVringBase(state) => {
                state.index
            }
            FrontendMessage::SetVringAddr(addresses) => addresses.index,
            _ => return None,
        };
        let index = u16::try_from(index).ok()?;
        let vring = self.vrings.get(usize::from(index))?;
        (vring.ending && vring.running.is_some()).then_some(index)
    }

    pub(super) fn set_vring_size(&mut self, state: VringState) -> Outcome {
        let size = u16::try_from(state.number).ok().filter(|size| *size > 0 && *size <= SIZE_MAX);
        let size =
            size.ok_or(MessageError::Refused("a queue has an invalid number of descriptors"))?;
        let vring = self.stopped_vring(state.index)?;
        vring.size = size;
        vring.broken = false;
        Ok(Answer::Done)
    }

    pub(super) fn set_vring_base(&mut self, state: VringState) -> Outcome {
        let vring = self.stopped_vring(state.index)?;
        vring.base = state.number;
        (vring.broken, vring.left) = (false, false);
        Ok(Answer::Done)
    }

    pub(super) fn set_vring_addresses(
        &mut self,
        context: &mut FrontendContext,
        addresses: VringAddress,
    ) -> Outcome {
        let (index, vring) = self.vring(addresses.index)?;
        if let (Some(_), Some(former)) = (&vring.running, &vring.addresses) {
            // While a queue runs, its used ring may begin or cease to be logged, and nothing else may change.
            let rings = |of: &VringAddress| (of.descriptor, of.available, of.used);
            if rings(former) != rings(&addresses) {
                return Err(MessageError::Refused(
                    "the rings of a queue that is in use cannot move",
                ));
            }
            // The used ring is logged with the rest of guest memory.
            vring.addresses = Some(addresses);
            return Ok(Answer::Done);
        }
        vring.addresses = Some(addresses);
        vring.broken = false;
        self.start(context, index);
        Ok(Answer::Done)
    }

    /// Accepts an eventfd of a queue, within the budget of descriptors.
    pub(super) fn accept_event(
        &mut self,
        context: &mut FrontendContext,
        fd: Option<OwnedFd>,
    ) -> Result<Option<Fd>, MessageError> {
        let Some(fd) = fd else { return Ok(None) };
        self.count_descriptors(context);
        if !context.descriptors.admits(self.disk.volume.name(), 1) {
            return Err(MessageError::Refused(OUT_OF_BUDGET));
        }
        let event = accept_event(fd)?;
        self.descriptors.add(&event);
        Ok(Some(event))
    }

    pub(super) fn set_kick(
        &mut self,
        context: &mut FrontendContext,
        file: VringFile,
        kick: Option<Fd>,
    ) -> Outcome {
        let vring = self.stopped_or_ending(file.index)?;
        vring.kick = kick.map_or(Kick::Polled, Kick::Event);
        vring.broken = false;
        let (index, _) = self.vring(file.index)?;
        self.start(context, index);
        Ok(Answer::Done)
    }

    /// A queue whose kick may be set: it is used at the queue's next start.
    pub(super) fn stopped_or_ending(&mut self, index: u32) -> Result<&mut Vring, MessageError> {
        let (_, vring) = self.vring(index)?;
        if let Some(commands) = &vring.running
            && !vring.ending
        {
            // Replaced while the queue runs: it is drained and started again with the new one.
            commands.send(QueueCommand::Stop);
            vring.ending = true;
        }
        Ok(vring)
    }

    pub(super) fn set_call(&mut self, file: VringFile, call: Option<Fd>) -> Outcome {
        let (_, vring) = self.vring(file.index)?;
        vring.call = call.clone();
        if let Some(commands) = &vring.running {
            commands.send(QueueCommand::SetCall(call));
        }
        Ok(Answer::Done)
    }

    pub(super) fn set_err(&mut self, file: VringFile, err: Option<Fd>) -> Outcome {
        let (_, vring) = self.vring(file.index)?;
        vring.err = err;
        Ok(Answer::Done)
    }

    pub(super) fn enable(
        &mut self,
        context: &mut FrontendContext,
        index: u32,
        enabled: bool,
    ) -> Outcome {
        let (index, vring) = self.vring(index)?;
        vring.enabled = enabled;
        if enabled {
            self.start(context, index);
        } else if let Some(commands) = vring.running.as_ref().filter(|_| !vring.ending) {
            commands.send(QueueCommand::Stop);
            vring.ending = true;
        }
        Ok(Answer::Done)
    }

    pub(super) fn stop_vring(&mut self, index: u32) -> Outcome {
        let (index, vring) = self.vring(index)?;
        // A further kick descriptor starts it again.
        vring.kick = Kick::Unset;
        vring.call = None;
        if let Some(commands) = vring.running.as_ref().filter(|_| !vring.ending) {
            commands.send(QueueCommand::Stop);
            vring.ending = true;
        }
        Ok(Answer::Later(Pending::Base(index)))
    }

    pub(super) fn reset(&mut self) -> Answer {
        for vring in &mut self.vrings {
            vring.kick = Kick::Unset;
            if let Some(commands) = vring.running.as_ref().filter(|_| !vring.ending) {
                commands.send(QueueCommand::Stop);
                vring.ending = true;
            }
        }
        Answer::Later(Pending::Reset)
    }

    /// Serves a queue if it is configured and enabled.
    pub(super) fn start(&mut self, context: &mut FrontendContext, index: u16) {
        let always = !self.features.contains(VirtioFeatures::PROTOCOL_FEATURES);
        let startable = |vring: &Vring| vring.is_startable(always);
        let vring = self.vrings.get(usize::from(index)).filter(|vring| startable(vring));
        if self.closing || vring.is_none() {
            return;
        }
        let (place, region) = (self.ring_place(index), self.region_place());
        let mut used = place.into_iter().chain(region);
        if used.any(|at| context.rings.is_elsewhere(at, &self.disk)) {
            // Both would complete the requests in flight, or a flush of one would cover the writes
            // of the other.
            self.waits_for_ring = true;
            return;
        }
        if !self.claim_writer() {
            return;
        }
        if !context.served.add(&self.id, &self.disk) {
            // The volume was withdrawn, or the daemon stops: the connection ends.
            return;
        }
        // Before the first queue is served.
        self.read_records();
        match self.parts(context, index) {
            Ok(parts) => {
                let used = place.into_iter().chain(region);
                used.for_each(|at| context.rings.add(at, &self.disk));
                let vring = &mut self.vrings[usize::from(index)];
                (vring.place, vring.region) = (place, region);
                let volume = self.disk.volume.name();
                context.served.forget_refused(|_, other| *other == **volume);
                let worker = context.next_worker % context.workers.len().max(1);
                context.next_worker = context.next_worker.wrapping_add(1);
                if let Some(worker) = context.workers.get(worker) {
                    worker.spawn(move |io| DiskQueue::run(io, parts));
                }
                self.announce_size();
            }
            Err(error) => {
                if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
                    vring.broken = true;
                }
                if let Some(suppressed) = self.disk.may_log() {
                    let (volume, connection) = (&**self.disk.volume.name(), self.id);
                    tracing::warn!(volume, %connection, queue = index, %error, suppressed,
                        "a queue of the frontend cannot be served");
                }
            }
        }
    }

    /// Where the ring of a queue is, by which other connections know it.
    pub(super) fn ring_place(&self, index: u16) -> Option<MemoryPlace> {
        let addresses = self.vrings.get(usize::from(index))?.addresses.as_ref()?;
        let span = self.memory.find_user(addresses.descriptor, 1)?;
        Some(self.memory.region(span.region)?.memory.place(span.offset))
    }

    /// Where the inflight region is, by which other connections know it.
    fn region_place(&self) -> Option<MemoryPlace> {
        self.inflight.as_ref().map(|(memory, _)| memory.place(0))
    }

    pub(super) fn parts(
        &mut self,
        context: &FrontendContext,
        index: u16,
    ) -> Result<VirtqueueParts, SetupFault> {
        let packed = self.is_packed();
        let inflight = match &self.inflight {
            Some((memory, area)) if index < area.queues => {
                Some(QueueInflight::find(memory, packed, index, area.queue_size)?)
            }
            _ => None,
        };
        if let Some((_, area)) = self.inflight.as_ref().filter(|_| inflight.is_some())
            && self.vrings[usize::from(index)].size > area.queue_size
        {
            return Err(InflightFault::TooSmall.into());
        }
        let opening = self.disk.volume.opening();
        let record = inflight.as_ref().map(|inflight| Arc::new(inflight.record(opening)));
        if let Some(record) = &record {
            if record.is_write_through() && !self.cache_selected {
                self.volatile_cache = false;
                self.update_cache_mode();
            }
            self.disk.unstable.add(index.into(), record);
        }
        let features = RingFeatures {
            packed,
            indirect: self.features.contains(VirtioFeatures::RING_INDIRECT_DESC),
            event_idx: self.features.contains(VirtioFeatures::RING_EVENT_IDX),
        };
        let memory = self.memory.clone();
        let vring = &mut self.vrings[usize::from(index)];
        let addresses = vring.addresses.as_ref().map(|of| RingAddresses {
            descriptors: of.descriptor,
            driver: of.available,
            device: of.used,
        });
        let addresses = addresses.ok_or(SetupFault::Address)?;
        let (size, base) = (vring.size, vring.base);
        let setup = RingSetup { memory: &memory, addresses, size, features, base, inflight };
        let ring = Virtqueue::new(setup)?;
        if let Some(record) = &record {
            // Not before the region was initialised.
            record.note_write_through(!self.volatile_cache);
        }
        vring.record.clone_from(&record);
        let commands = Arc::<QueueCommands>::default();
        vring.running = Some(commands.clone());
        (vring.ending, vring.left) = (false, false);
        let kick = match &vring.kick {
            Kick::Event(fd) => Some(fd.clone()),
            Kick::Polled | Kick::Unset => None,
        };
        let resumed = ring.resumed_count();
        add(&self.disk.counters.resumed, resumed as u64);
        let base = ring.base();
        let end = QueueEnd { connection: self.id, index, base, complete: false };
        let end = EndOfQueue::new(&self.disk, &context.served, &context.mailbox, end);
        Ok(VirtqueueParts {
            disk: self.disk.clone(),
            end,
            connection: self.id,
            index,
            ring,
            memory,
            kick,
            call: vring.call.clone(),
            err: vring.err.clone(),
            record,
            commands,
            mailbox: context.mailbox.clone(),
        })
    }

    /// Reads what the inflight region says of the writes of all queues, also of those that are never started
    /// again: a flush on any queue is about all of them. Once for each region.
    fn read_records(&mut self) {
        let Some((memory, area)) = self.inflight.as_ref().filter(|_| !self.records_read) else {
            return;
        };
        let (mut lost, mut unstable, mut inherited) = (false, false, false);
        for queue in 0..area.queues.min(QUEUES_MAX) {
            let found = QueueInflight::find(memory, self.is_packed(), queue, area.queue_size);
            // The queue itself is refused when it is started.
            let Ok(found) = found else { break };
            let record = Arc::new(found.record(self.disk.volume.opening()));
            inherited |= !record.take_settled() && !found.is_unused();
            lost |= record.writes() == RecordedWrites::Lost;
            unstable |= record.writes() == RecordedWrites::Unstable;
            self.disk.unstable.add(queue.into(), &record);
        }
        self.records_read = true;
        self.disk.unstable.note_layers(&self.disk.volume);
        if lost {
            self.note_lost_writes();
        }
        if unstable {
            self.disk.unstable.note_earlier();
            // Its former connection may not have learned of a loss.
            self.disk.told.forget();
        }
        if inherited {
            self.disk.unstable.note_inherited();
        }
    }

    /// A predecessor was killed after it had acknowledged writes from memory, or has lost some.
    fn note_lost_writes(&self) {
        if !self.disk.broken.swap(true, Ordering::Relaxed) {
            let (volume, connection) = (&**self.disk.volume.name(), self.id);
            tracing::error!(
                volume,
                %connection,
                "acknowledged writes of this guest were lost, by a failed flush or since a daemon was killed before it had \
                written them back: its writes and flushes fail until it is reset, so that it notices; check its file systems then"
            );
        }
    }

    /// Claims the right to write before the first queue is served; false if there is another writer.
    pub(super) fn claim_writer(&mut self) -> bool {
        if self.disk.volume.read_only() || self.lease.is_some() {
            return true;
        }
        let name = format!("KVM guest {}", self.id);
        let writer = Writer { name: name.into(), group: None };
        match self.disk.volume.claim_writer(writer, false) {
            Ok(lease) => {
                self.lease = Some(lease);
                self.disk.waiting.store(false, Ordering::Relaxed);
                true
            }
            Err(conflict) => {
                if !self.disk.waiting.swap(true, Ordering::Relaxed) && self.disk.may_log().is_some()
                {
                    let (volume, pid) = (&**self.disk.volume.name(), self.disk.peer.pid);
                    tracing::warn!(volume, connection = %self.id, pid, error = %conflict,
                        "a guest waits for its disk");
                }
                false
            }
        }
    }

    /// Does what had to wait for the end of another writer, or of another connection of the guest.
    pub(crate) fn try_again(&mut self, context: &mut FrontendContext) -> Result<(), SocketError> {
        let always = !self.features.contains(VirtioFeatures::PROTOCOL_FEATURES);
        // Its queues may have been stopped while they waited: the right to write would be kept for nothing.
        let wanted = self.vrings.iter().any(|vring| vring.is_startable(always));
        self.disk.waiting.fetch_and(wanted, Ordering::Relaxed);
        let ring = std::mem::take(&mut self.waits_for_ring);
        if ring || self.waits_for_writer() && self.claim_writer() {
            self.start_all(context);
        }
        if ring { self.reply_pending(context) } else { Ok(()) }
    }

    pub(super) fn start_all(&mut self, context: &mut FrontendContext) {
        for index in 0..u16::try_from(self.vrings.len()).unwrap_or(QUEUES_MAX) {
            self.start(context, index);
        }
    }

    /// A queue has ended.
    pub(crate) fn note_end(
        &mut self,
        context: &mut FrontendContext,
        end: &QueueEnd,
    ) -> Result<(), SocketError> {
        if let Some(vring) = self.vrings.get_mut(usize::from(end.index)) {
            vring.running = None;
            vring.ending = false;
            (vring.base, vring.left) = (end.base, !end.complete);
            let used = vring.place.take().into_iter().chain(vring.region.take());
            used.for_each(|at| context.rings.remove(at, &self.disk));
        }
        if !self.has_queues() {
            self.lease = None;
        }
        let replied = self.reply_pending(context).and_then(|()| self.handle_deferred(context));
        // It may have been enabled, or got another kick descriptor, while it ended.
        self.start(context, end.index);
        replied
    }

    /// A queue of another connection to the volume, at this place, has ended: a ring that waited
    /// for it continues
    /// there. An inflight region that was not used yet belongs to a guest that was reset, whose
    /// ring starts from the beginning.
    pub(crate) fn note_former_end(&mut self, place: MemoryPlace, end: &QueueEnd) {
        for index in 0..u16::try_from(self.vrings.len()).unwrap_or(QUEUES_MAX) {
            if self.ring_place(index) != Some(place) || self.has_unused_region(index) {
                continue;
            }
            let vring = self.vrings.get_mut(usize::from(index));
            if let Some(vring) = vring.filter(|vring| vring.running.is_none()) {
                vring.left = !end.complete;
                if end.complete {
                    vring.base = end.base;
                }
            }
        }
    }

    fn has_unused_region(&self, index: u16) -> bool {
        let region = self.inflight.as_ref().filter(|(_, area)| index < area.queues);
        region.is_some_and(|(memory, area)| {
            let found = QueueInflight::find(memory, self.is_packed(), index, area.queue_size);
            found.is_ok_and(|found| found.is_unused())
        })
    }

    /// The ring at which a queue is served.
    pub(crate) fn place_served(&self, index: u16) -> Option<MemoryPlace> {
        self.vrings.get(usize::from(index))?.place
    }

    /// A ring is not served any more.
    pub(crate) fn note_broken(&mut self, index: u16) {
        if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
            vring.broken = true;
        }
    }

    /// Tells the guest a changed size.
    pub(crate) fn announce_size(&mut self) {
        let size = self.disk.volume.size();
        let due = size != self.size || self.announce;
        let Some(socket) = self.backend_requests.as_ref().filter(|_| due && self.has_queues())
        else {
            if size != self.size {
                self.disk.note_backing();
            }
            self.size = size;
            return;
        };
        self.size = size;
        self.disk.note_backing();
        // The frontend reads the config space when it gets this. One that does not read its messages gets it later.
        self.announce = !send_if_room(socket, &OutgoingMessage::config_change());
    }
}
