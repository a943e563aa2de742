//! A hostile frontend: mostly valid requests, so that much of the backend is reached, and now and then
//! arbitrary ones. Seeded: the same seed gives the same requests.

use std::io;
use std::sync::Arc;

use ebb_io::random::{STEP, mix};

use super::Guest;
use super::frontend::{FrontQueue, offset};
use crate::abi::{
    Body, MAX_DIRECT_SEGMENTS, MAX_INDIRECT_PAGES, PAGE_BYTES, Request, SEGMENT_BYTES, SLOT_BYTES,
    Segment, op,
};

/// A small generator of random numbers.
#[derive(Clone, Debug)]
pub struct SeededRandom(pub u64);

impl SeededRandom {
    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.any().checked_rem(end).unwrap_or(0)
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn byte(&mut self) -> u8 {
        self.any().to_le_bytes()[0]
    }

    fn word(&mut self) -> u32 {
        u32::try_from(self.any() >> 32).unwrap_or_default()
    }
}

/// Most pages that a guest withholds at a time.
const WITHHELD: usize = 4;

/// A hostile guest.
pub struct Hostile {
    guest: Arc<Guest>,
    dice: SeededRandom,
    /// Pages that it grants and ungrants at random.
    pages: Vec<u32>,
    /// The disk's sectors, and the range that it may write.
    sectors: u64,
    own: std::ops::Range<u64>,
    /// Pages that it has ungranted or made read-only; few at a time.
    withheld: std::collections::VecDeque<u32>,
    /// Requests sent.
    pub sent: u64,
}

impl Hostile {
    /// A guest that uses `pages`, with a disk of `sectors` sectors, of which it writes only those in `own`
    /// when it writes to existing ones.
    pub fn new(
        guest: &Arc<Guest>,
        seed: u64,
        pages: Vec<u32>,
        sectors: u64,
        own: std::ops::Range<u64>,
    ) -> Hostile {
        let (guest, dice, withheld) =
            (guest.clone(), SeededRandom(seed), std::collections::VecDeque::new());
        Hostile { guest, dice, pages, sectors, own, withheld, sent: 0 }
    }

    fn page(&mut self) -> u32 {
        let place = self.dice.below(self.pages.len() as u64);
        let page = usize::try_from(place).ok().and_then(|place| self.pages.get(place));
        match self.dice.below(64) {
            0 => self.dice.word(),
            1 => self.guest.pages(),
            2 => 0,
            _ => page.copied().unwrap_or_default(),
        }
    }

    fn segment(&mut self) -> Segment {
        let gref = self.page();
        let (a, b) = (self.dice.byte() % 8, self.dice.byte() % 8);
        let (mut first, mut last) = (a.min(b), a.max(b));
        match self.dice.below(200) {
            0 => last = self.dice.byte(),
            1 => first = self.dice.byte(),
            2 => (first, last) = (last, first),
            _ => {}
        }
        Segment { gref, first, last }
    }

    fn sector(&mut self, operation: u8) -> u64 {
        let own = self.own.clone();
        match self.dice.below(100) {
            // Beyond the end, or so that a sum overflows.
            0 => u64::MAX - self.dice.below(16),
            1 => self.sectors + self.dice.below(16),
            2 => u64::MAX / 512 + self.dice.below(4),
            _ if operation == op::READ => self.dice.below(self.sectors),
            // Up to 256 pages of 8 sectors may follow.
            _ => own.start + self.dice.below((own.end - own.start).saturating_sub(2048)),
        }
    }

    /// A request: usually a valid one.
    fn request(&mut self) -> Request {
        let id = self.dice.any();
        let operation = match self.dice.below(32) {
            0 => op::WRITE_BARRIER,
            1 => op::FLUSH_DISKCACHE,
            2 => op::DISCARD,
            3 => self.dice.byte(),
            number if number < 18 => op::READ,
            _ => op::WRITE,
        };
        let sector = self.sector(operation);
        if operation == op::DISCARD {
            let sectors = self.dice.below(64);
            let sectors = if self.dice.once_in(50) { u64::MAX - sectors } else { sectors };
            let secure = self.dice.once_in(4);
            return Request { id, operation, body: Body::Discard { sector, sectors, secure } };
        }
        let indirect = matches!(operation, op::READ | op::WRITE) && self.dice.once_in(8);
        if indirect {
            return self.indirect(id, operation, sector);
        }
        let mut segments = [Segment::default(); MAX_DIRECT_SEGMENTS];
        let count = match self.dice.below(64) {
            0 => self.dice.byte(),
            1 => 0,
            number => u8::try_from(number % 11 + 1).unwrap_or(1),
        };
        for segment in segments.iter_mut().take(count.into()) {
            *segment = self.segment();
        }
        Request { id, operation, body: Body::Direct { sector, count, segments } }
    }

    fn indirect(&mut self, id: u64, operation: u8, sector: u64) -> Request {
        let mut grefs = [0; MAX_INDIRECT_PAGES];
        for gref in &mut grefs {
            *gref = self.page();
        }
        let count = match self.dice.below(32) {
            0 => u16::try_from(self.dice.below(65536)).unwrap_or(u16::MAX),
            _ => u16::try_from(self.dice.below(64) + 1).unwrap_or(1),
        };
        // Descriptors, most of them valid; their page may be any other page, also one of data.
        if let Some(page) = grefs.first().copied().filter(|page| *page < self.guest.pages()) {
            for place in 0..usize::from(count.min(256)) {
                let segment = self.segment();
                let at = offset(page) + place * SEGMENT_BYTES;
                let _ = self.guest.memory().write(at, &segment.encode());
            }
        }
        // Any other inner operation, except that a read does not become a write outside its range.
        let odd = self.dice.once_in(100).then(|| self.dice.byte());
        let operation = odd.filter(|code| *code != op::WRITE).unwrap_or(operation);
        Request { id, operation, body: Body::Indirect { sector, count, grefs } }
    }

    /// Fills the ring with requests, one of them possibly random bytes, and publishes them; meanwhile pages are
    /// granted, ungranted, and written to.
    pub fn send(&mut self, queue: &mut FrontQueue, most: u32) {
        let (sent, taken) = queue.numbers();
        let room = queue.slots() - sent.wrapping_sub(taken).min(queue.slots());
        for _ in 0..room.min(most) {
            let request = self.request();
            let mut slot = request.encode(queue.abi);
            if self.dice.once_in(64) {
                for _ in 0..4 {
                    let at = usize::try_from(self.dice.below(SLOT_BYTES as u64));
                    slot[at.unwrap_or_default()] = self.dice.byte();
                }
                // Whatever the bytes mean, the request must not write outside its range, nor to its own ring,
                // which would only end the test.
                self.tame(queue, &mut slot);
            }
            queue.put_raw(slot);
            self.sent += 1;
        }
        queue.push();
        for _ in 0..self.dice.below(4) {
            self.meddle(queue);
        }
    }

    /// Keeps a request of random bytes to the sectors that it may write.
    fn tame(&mut self, queue: &FrontQueue, slot: &mut [u8; SLOT_BYTES]) {
        let request = Request::parse(queue.abi, slot);
        let own_ring = match &request.body {
            Body::Direct { segments, .. } => {
                segments.iter().any(|segment| queue.ring.contains(&segment.gref))
            }
            Body::Indirect { grefs, .. } => grefs.iter().any(|gref| queue.ring.contains(gref)),
            _ => false,
        };
        if own_ring {
            slot[0] = 0xff;
            return;
        }
        let writes = request.operation != op::READ;
        let near = match &request.body {
            Body::Direct { sector, .. } | Body::Indirect { sector, .. } => *sector,
            Body::Discard { .. } => 0,
            Body::Unknown => return,
        };
        if writes && near < self.sectors && !self.own.contains(&near) {
            slot[0] = op::READ;
        }
        if matches!(request.body, Body::Discard { .. }) {
            slot[0] = op::READ;
        }
    }

    /// Grants or ungrants a page, writes to one that is in use, or sends an event without a request.
    fn meddle(&mut self, queue: &FrontQueue) {
        let place = self.dice.below(self.pages.len() as u64);
        let page = usize::try_from(place).ok().and_then(|place| self.pages.get(place)).copied();
        let Some(page) = page else { return };
        match self.dice.below(8) {
            number @ (0 | 1) => {
                match number {
                    0 => self.guest.revoke(page),
                    _ => self.guest.grant(page, false),
                }
                self.withheld.push_back(page);
                if self.withheld.len() > WITHHELD {
                    let back = self.withheld.pop_front();
                    back.iter().for_each(|page| self.guest.grant(*page, true));
                }
            }
            2..7 => {
                let at = offset(page) + usize::try_from(self.dice.below(512)).unwrap_or(0) * 8;
                let _ = self.guest.memory().write(at, &self.dice.any().to_le_bytes());
            }
            _ => self.guest.notify(queue.port),
        }
        debug_assert!(offset(page) + PAGE_BYTES <= self.guest.memory().bytes());
    }

    /// Waits until `least` requests have responses; returns how many have, without reading them.
    ///
    /// # Errors
    /// If the backend does not respond.
    pub fn receive(&mut self, queue: &mut FrontQueue, least: u32) -> io::Result<u32> {
        let begun = std::time::Instant::now();
        let mut taken = 0;
        loop {
            let (_, seen) = queue.numbers();
            let ready = queue.load(8).wrapping_sub(seen);
            if ready > queue.slots() {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "more responses than requests",
                ));
            }
            (0..ready).for_each(|_| queue.skip());
            taken += ready;
            if taken >= least {
                return Ok(taken);
            }
            queue.store(12, queue.numbers().1.wrapping_add(1));
            ebb_guest_ring::full_barrier();
            if queue.load(8) == queue.numbers().1 {
                if begun.elapsed() > super::frontend::PATIENCE {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                self.guest.wait(queue.port, 1000);
            }
        }
    }
}
