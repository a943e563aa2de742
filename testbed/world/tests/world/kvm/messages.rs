//! The conversation of a VMM with the backend: it sets up a disk, ends its queues, and starts them
//! again.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use ebb_vhost_proto::{
    ConfigRange, FrontendMessage as M, InflightArea, ProtocolFeatures, VirtioFeatures,
    VringAddress, VringFile, VringState,
};

use super::drivers::guest::USER;
use super::drivers::packed::PackedPlaces;
use super::link::{Expected, Link, Reply};
use super::{KvmGuest, Phase};

/// Bytes of the config space that a VMM reads.
const CONFIG: ConfigRange = ConfigRange { offset: 0, size: 60, flags: 0 };

fn number(body: &[u8]) -> u64 {
    body.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

pub(super) fn ask_for_features(link: &mut Link) {
    link.push(&M::GetFeatures, &[], Expected::Features);
}

pub(super) fn ask_for_size(link: &mut Link) {
    link.push(&M::GetConfig(CONFIG), &[], Expected::Config);
}

/// Ends all queues; `device`: by a reset.
pub(super) fn end(link: &mut Link, queues: usize, device: bool) {
    if device && link.protocol.contains(ProtocolFeatures::RESET_DEVICE) {
        return link.set(&M::ResetDevice, &[]);
    }
    for queue in 0..queues {
        link.push(&M::GetVringBase(queue as u32), &[], Expected::Base(queue));
    }
}

impl KvmGuest {
    pub(super) fn connect(&mut self, now: Instant) {
        self.link = Link::connect(&self.address);
        match &mut self.link {
            Some(link) => {
                ask_for_features(link);
                self.phase = Phase::Setting;
            }
            None => self.go_away(now),
        }
    }

    pub(super) fn take_reply(&mut self, reply: Reply) -> Result<(), String> {
        let Reply { to, body, mut fds } = reply;
        let Some(link) = &mut self.link else { return Ok(()) };
        match to {
            Expected::Acknowledgement if number(&body) != 0 => {
                // As QEMU does, which then connects again.
                self.link = None;
                self.refusals += 1;
                self.tell(format_args!("has a message refused"));
                let now = ebb_mem::clock::now();
                self.go_away(now);
            }
            Expected::Acknowledgement => {}
            Expected::Features => self.agree(VirtioFeatures(number(&body))),
            Expected::ProtocolFeatures => {
                let accepted = ProtocolFeatures(number(&body));
                link.set(&M::SetProtocolFeatures(accepted), &[]);
                link.protocol = accepted;
                self.set_up();
            }
            Expected::Config => {
                let bytes = body.get(12..).map_or(0, number);
                self.size = usize::try_from(bytes).unwrap();
            }
            Expected::Inflight => {
                let fd = fds.pop().ok_or("a new inflight region has no descriptor")?;
                let (queues, queue_size) = (self.wishes.queues as u16, self.wishes.size);
                let (mmap_size, mmap_offset) = (number(&body), number(&body[8..]));
                let area = InflightArea { mmap_size, mmap_offset, queues, queue_size };
                self.inflight = Some((Arc::new(fd), area));
                self.set_up_rings();
            }
            Expected::Base(queue) => {
                let base = (number(&body) >> 32) as u32;
                let driver = &self.drivers[queue];
                // A queue that has ended has completed its requests. One that was never served
                // has the base that was set.
                let checked = driver.packed.is_none() && !self.wishes.base_available;
                if checked && base != u32::from(driver.used(&self.memory)) {
                    return Err(format!(
                        "guest {}: queue {queue} has ended at {base}, and used {}",
                        self.number,
                        driver.used(&self.memory)
                    ));
                }
                self.bases[queue] = Some(base);
            }
        }
        Ok(())
    }

    /// Agrees on features, the first time; later the guest keeps them.
    fn agree(&mut self, offered: VirtioFeatures) {
        let wishes = self.wishes;
        let unwanted = VirtioFeatures::LOG_ALL
            .with_if(!wishes.packed, VirtioFeatures::RING_PACKED)
            .with_if(!wishes.event_idx, VirtioFeatures::RING_EVENT_IDX)
            .with_if(!wishes.indirect, VirtioFeatures::RING_INDIRECT_DESC)
            .with_if(!wishes.flushes, VirtioFeatures::BLK_FLUSH);
        self.features.get_or_insert(offered.beyond(unwanted));
        for driver in &mut self.drivers {
            driver.event_idx = wishes.event_idx;
            driver.indirect = wishes.indirect;
            if wishes.packed && driver.packed.is_none() {
                driver.packed = Some(PackedPlaces::new(driver.size));
            }
        }
        let Some(link) = &mut self.link else { return };
        if link.backend.is_some() {
            // The guest was reset: the connection is as before.
            return self.set_up();
        }
        link.set(&M::SetOwner, &[]);
        link.push(&M::GetProtocolFeatures, &[], Expected::ProtocolFeatures);
    }

    /// After the protocol's features.
    fn set_up(&mut self) {
        let Some(link) = &mut self.link else { return };
        let again = link.backend.is_some();
        if !again {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            link.set(&M::SetBackendReqFd, &[&Arc::new(theirs.into())]);
            link.backend = Some(ours);
        }
        ask_for_size(link);
        link.set(&M::SetFeatures(self.features.unwrap_or(VirtioFeatures::NONE)), &[]);
        if !again {
            for region in &self.memory.regions {
                link.set(&M::AddMemReg(region.place), &[&region.file]);
            }
        }
        match &self.inflight {
            Some(_) => self.set_up_rings(),
            None => {
                let (queues, queue_size) = (self.wishes.queues as u16, self.wishes.size);
                let area = InflightArea { mmap_size: 0, mmap_offset: 0, queues, queue_size };
                link.push(&M::GetInflightFd(area), &[], Expected::Inflight);
            }
        }
    }

    fn set_up_rings(&mut self) {
        if let (Some(link), Some((fd, area))) = (&mut self.link, &self.inflight) {
            link.set(&M::SetInflightFd(*area), &[fd]);
        }
        self.start_queues();
    }

    /// Configures all queues and starts them.
    pub(super) fn start_queues(&mut self) {
        let Some(link) = &mut self.link else { return };
        for (queue, driver) in self.drivers.iter().enumerate() {
            let index = queue as u32;
            let base = match self.bases[queue].take() {
                Some(base) => base,
                None if self.wishes.base_available && !self.wishes.packed => {
                    driver.available.into()
                }
                None => driver.ring_base(&self.memory),
            };
            let state = |number| VringState { index, number };
            link.set(&M::SetVringNum(state(self.wishes.size.into())), &[]);
            link.set(&M::SetVringBase(state(base)), &[]);
            let [descriptor, available, used] = driver.rings().map(|at| at + USER);
            let log = driver.rings()[2];
            let addresses = VringAddress { index, flags: 0, descriptor, used, available, log };
            link.set(&M::SetVringAddr(addresses), &[]);
            let file = VringFile { index, has_descriptor: true };
            link.set(&M::SetVringKick(file), &[&self.kicks[queue]]);
            link.set(&M::SetVringCall(file), &[&self.calls[queue]]);
            link.set(&M::SetVringEnable { index, enabled: true }, &[]);
        }
    }
}
