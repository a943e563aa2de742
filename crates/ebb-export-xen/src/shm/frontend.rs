//! A frontend over shared memory that drives its rings as Linux's xen-blkfront does: requests are published
//! in batches, events are sent and requested by the ring's rules, ids are reused, and each response is
//! checked against its request.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Guest, World};
use crate::abi::{
    Abi, Body, HEADER_BYTES, MAX_DIRECT_SEGMENTS, MAX_INDIRECT_PAGES, PAGE_BYTES, Request,
    Response, SECTOR_BYTES, SEGMENT_BYTES, SEGMENTS_PER_PAGE, SLOT_BYTES, Segment, op,
};
use ebb_guest_ring::{full_barrier, read_barrier, write_barrier};

/// How long a backend may take, so that tests end if it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// The features that a frontend uses.
#[derive(Clone, Copy, Debug)]
pub struct FrontendConfig {
    /// The layout of its rings.
    pub abi: Abi,
    /// Pages of a ring, as an order.
    pub order: u32,
    /// Rings.
    pub queues: u32,
    /// Persistent grants.
    pub persistent: bool,
}

impl Default for FrontendConfig {
    fn default() -> FrontendConfig {
        FrontendConfig { abi: Abi::X86_64, order: 0, queues: 1, persistent: true }
    }
}

/// The frontend of one disk.
pub struct Frontend {
    world: World,
    guest: Arc<Guest>,
    device: u32,
    wishes: FrontendConfig,
    /// Its rings, once connected.
    pub queues: Vec<FrontQueue>,
    /// Unused pages.
    free: VecDeque<u32>,
}

impl Frontend {
    /// The frontend of `device` (see [`crate::device_number`]) in `guest`.
    pub fn new(world: &World, guest: &Arc<Guest>, device: u32, wishes: FrontendConfig) -> Frontend {
        // Xen reserves the lowest references.
        let free = (8..guest.pages()).collect();
        let (world, guest) = (world.clone(), guest.clone());
        Frontend { world, guest, device, wishes, queues: Vec::new(), free }
    }

    /// The guest it is in.
    pub fn guest(&self) -> &Arc<Guest> {
        &self.guest
    }

    fn path(&self, name: &str) -> String {
        format!("/local/domain/{}/device/vbd/{}/{name}", self.guest.number(), self.device)
    }

    /// The value of one of the backend's nodes.
    pub fn backend(&self, name: &str) -> Option<String> {
        let base = self.world.tree.get(&self.path("backend"))?;
        self.world.tree.get(&format!("{base}/{name}"))
    }

    /// Sets one of the frontend's nodes.
    pub fn set(&self, name: &str, value: &str) {
        self.world.tree.set(&self.path(name), value);
    }

    /// Waits until the backend shows a state.
    ///
    /// # Errors
    /// If it does not in time.
    pub fn await_backend(&self, state: &str) -> io::Result<()> {
        let begun = Instant::now();
        while self.backend("state").as_deref() != Some(state) {
            if begun.elapsed() > PATIENCE {
                let text = format!("backend is in {:?}, not {state}", self.backend("state"));
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Allocates `count` pages and grants them.
    ///
    /// # Panics
    /// If the guest has no more memory.
    pub fn pages(&mut self, count: usize) -> Vec<u32> {
        assert!(self.free.len() >= count, "the guest is too small for the test");
        let pages: Vec<u32> = self.free.drain(..count).collect();
        pages.iter().for_each(|page| self.guest.grant(*page, true));
        pages
    }

    /// Frees pages.
    pub fn free_pages(&mut self, pages: &[u32]) {
        pages.iter().for_each(|page| self.guest.revoke(*page));
        self.free.extend(pages);
    }

    /// Shares rings and waits until the backend serves them.
    ///
    /// # Errors
    /// If the backend does not.
    pub fn connect(&mut self) -> io::Result<()> {
        self.set("state", "1");
        self.await_backend("2")?;
        self.share()?;
        self.set("state", "3");
        self.await_backend("4")?;
        self.set("state", "4");
        Ok(())
    }

    /// Takes the next step of [`Frontend::connect`] if the backend's state allows it, without waiting; true once connected.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn step_connect(&mut self) -> io::Result<bool> {
        let own = self.world.tree.get(&self.path("state"));
        match (own.as_deref(), self.backend("state").as_deref()) {
            (Some("4"), _) => return Ok(true),
            (Some("1"), Some("2")) => {
                self.share()?;
                self.set("state", "3");
            }
            (Some("3"), Some("4")) => self.set("state", "4"),
            (Some("1" | "3"), _) => {}
            _ => self.set("state", "1"),
        }
        Ok(false)
    }

    /// Takes the next step of [`Frontend::close`] if the backend's state allows it, without waiting; true once closed.
    pub fn step_close(&mut self) -> bool {
        let own = self.world.tree.get(&self.path("state"));
        match (own.as_deref(), self.backend("state").as_deref()) {
            (Some("6"), Some("6")) => {
                for queue in std::mem::take(&mut self.queues) {
                    self.free_pages(&queue.ring);
                }
                return true;
            }
            (Some("5"), Some("5")) => self.set("state", "6"),
            (Some("5" | "6"), _) => {}
            _ => self.set("state", "5"),
        }
        false
    }

    /// Creates rings and writes their nodes.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn share(&mut self) -> io::Result<()> {
        let FrontendConfig { abi, order, queues, persistent } = self.wishes;
        self.queues.clear();
        for number in 0..queues {
            let ring = self.pages(1 << order);
            let port = self.guest.open_channel()?;
            let folder = if queues == 1 { String::new() } else { format!("queue-{number}/") };
            for (page, gref) in ring.iter().enumerate() {
                let page = if order == 0 { String::new() } else { page.to_string() };
                self.set(&format!("{folder}ring-ref{page}"), &gref.to_string());
            }
            self.set(&format!("{folder}event-channel"), &port.to_string());
            self.queues.push(FrontQueue::new(self.guest.clone(), ring, port, abi));
        }
        if order > 0 {
            self.set("ring-page-order", &order.to_string());
        }
        if queues > 1 {
            self.set("multi-queue-num-queues", &queues.to_string());
        }
        let protocol = if abi == Abi::X86_32 { "x86_32-abi" } else { "x86_64-abi" };
        self.set("protocol", protocol);
        self.set("feature-persistent", if persistent { "1" } else { "0" });
        Ok(())
    }

    /// Closes, and waits for the backend to do so.
    ///
    /// # Errors
    /// If it does not.
    pub fn close(&mut self) -> io::Result<()> {
        self.set("state", "5");
        self.await_backend("5")?;
        self.set("state", "6");
        self.await_backend("6")?;
        for queue in std::mem::take(&mut self.queues) {
            self.free_pages(&queue.ring);
        }
        Ok(())
    }

    /// Reads or writes `data` at `sector` through queue `number`, in as many pages as needed, and waits;
    /// returns the response's status.
    ///
    /// # Errors
    /// If the backend does not respond, or responds wrongly.
    pub fn transfer(
        &mut self,
        number: usize,
        operation: u8,
        sector: u64,
        data: &mut [u8],
    ) -> io::Result<i16> {
        let pages = self.pages(data.len().div_ceil(PAGE_BYTES));
        let guest = self.guest.clone();
        let mut segments = Vec::new();
        for (page, chunk) in pages.iter().zip(data.chunks(PAGE_BYTES)) {
            let last = u8::try_from(chunk.len() / 512 - 1).unwrap_or(7);
            segments.push(Segment { gref: *page, first: 0, last });
            if operation != op::READ {
                let _ = guest.memory().write(offset(*page), chunk);
            }
        }
        let (descriptors, request) = self.request(operation, sector, &segments);
        let status = self.queues[number].call(request)?;
        if operation == op::READ {
            for (page, chunk) in pages.iter().zip(data.chunks_mut(PAGE_BYTES)) {
                let _ = guest.memory().read(offset(*page), chunk);
            }
        }
        self.free_pages(&pages);
        self.free_pages(&descriptors);
        Ok(status)
    }

    /// A request for segments, direct if they fit, and the pages of its descriptors.
    pub fn request(
        &mut self,
        operation: u8,
        sector: u64,
        segments: &[Segment],
    ) -> (Vec<u32>, Request) {
        if segments.len() <= MAX_DIRECT_SEGMENTS {
            let mut direct = [Segment::default(); MAX_DIRECT_SEGMENTS];
            direct[..segments.len()].copy_from_slice(segments);
            let count = u8::try_from(segments.len()).unwrap_or(u8::MAX);
            let body = Body::Direct { sector, count, segments: direct };
            return (Vec::new(), Request { id: 0, operation, body });
        }
        let pages = self.pages(segments.len().div_ceil(SEGMENTS_PER_PAGE));
        let mut grefs = [0; MAX_INDIRECT_PAGES];
        for ((page, gref), part) in
            pages.iter().zip(&mut grefs).zip(segments.chunks(SEGMENTS_PER_PAGE))
        {
            *gref = *page;
            for (place, segment) in part.iter().enumerate() {
                let at = offset(*page) + place * SEGMENT_BYTES;
                let _ = self.guest.memory().write(at, &segment.encode());
            }
        }
        let count = u16::try_from(segments.len()).unwrap_or(u16::MAX);
        let body = Body::Indirect { sector, count, grefs };
        (pages, Request { id: 0, operation, body })
    }

    /// A flush or a barrier without data.
    ///
    /// # Errors
    /// As [`Frontend::transfer`].
    pub fn flush(&mut self, operation: u8) -> io::Result<i16> {
        let (_, request) = self.request(operation, 0, &[]);
        self.queues[0].call(request)
    }

    /// A discard.
    ///
    /// # Errors
    /// As [`Frontend::transfer`].
    pub fn discard(&mut self, sector: u64, sectors: u64, secure: bool) -> io::Result<i16> {
        let body = Body::Discard { sector, sectors, secure };
        self.queues[0].call(Request { id: 0, operation: op::DISCARD, body })
    }

    /// The size that the backend publishes, bytes.
    pub fn size(&self) -> u64 {
        let sectors = self.backend("sectors").and_then(|text| text.parse::<u64>().ok());
        sectors.unwrap_or(0) * SECTOR_BYTES
    }
}

/// Where a page begins in the guest's memory.
pub fn offset(page: u32) -> usize {
    usize::try_from(page).unwrap_or_default() * PAGE_BYTES
}

/// One ring, from the guest's side.
pub struct FrontQueue {
    guest: Arc<Guest>,
    /// Its pages.
    pub ring: Vec<u32>,
    /// Its channel.
    pub port: u32,
    /// Its layout.
    pub abi: Abi,
    slots: u32,
    req_prod: u32,
    rsp_cons: u32,
    /// The request of each id in flight.
    open: Vec<Option<Request>>,
    idle: Vec<usize>,
}

impl FrontQueue {
    /// A ring in the given pages of a guest, cleared.
    pub fn on(guest: &Arc<Guest>, ring: Vec<u32>, port: u32, abi: Abi) -> FrontQueue {
        FrontQueue::new(guest.clone(), ring, port, abi)
    }

    fn new(guest: Arc<Guest>, ring: Vec<u32>, port: u32, abi: Abi) -> FrontQueue {
        let slots = abi.slots(ring.len());
        let count = usize::try_from(slots).unwrap_or_default();
        let open = vec![None; count];
        let idle = (0..count).rev().collect();
        let queue =
            FrontQueue { guest, ring, port, abi, slots, req_prod: 0, rsp_cons: 0, open, idle };
        for page in &queue.ring {
            let _ = queue.guest.memory().write(offset(*page), &[0; PAGE_BYTES]);
        }
        queue.store(4, 1);
        queue.store(12, 1);
        queue
    }

    /// How many requests can be put now.
    pub fn room(&self) -> usize {
        self.idle.len()
    }

    /// Slots of the ring.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    fn header(&self) -> usize {
        offset(self.ring[0])
    }

    /// A number of the ring's header.
    pub fn load(&self, at: usize) -> u32 {
        self.guest.memory().load(self.header() + at)
    }

    /// Sets a number of the ring's header.
    pub fn store(&self, at: usize, value: u32) {
        self.guest.memory().store(self.header() + at, value);
    }

    /// Copies between a slot and `bytes`, page by page, since a ring's pages need not be adjacent.
    fn slot(&self, index: u32, mut bytes: &mut [u8], write: bool) {
        let place = usize::try_from(index & (self.slots - 1)).unwrap_or_default();
        let mut at = HEADER_BYTES + place * self.abi.slot_bytes();
        while !bytes.is_empty() {
            let within = at % PAGE_BYTES;
            let here = bytes.len().min(PAGE_BYTES - within);
            let (part, rest) = bytes.split_at_mut(here);
            let start = offset(self.ring[at / PAGE_BYTES]) + within;
            let memory = self.guest.memory();
            let _ = if write { memory.write(start, part) } else { memory.read(start, part) };
            at += here;
            bytes = rest;
        }
    }

    /// Puts raw bytes into the next slot, without accounting, as a hostile frontend does.
    pub fn put_raw(&mut self, mut slot: [u8; SLOT_BYTES]) {
        let bytes = self.abi.slot_bytes();
        self.slot(self.req_prod, &mut slot[..bytes], true);
        self.req_prod = self.req_prod.wrapping_add(1);
    }

    /// Puts a request into the ring and returns its id; [`FrontQueue::push`] publishes it.
    ///
    /// # Panics
    /// If there is no room.
    pub fn put(&mut self, mut request: Request) -> u64 {
        let id = self.idle.pop();
        assert!(id.is_some(), "the ring is full");
        let id = id.unwrap_or_default();
        request.id = id as u64;
        self.open[id] = Some(request);
        self.put_raw(request.encode(self.abi));
        request.id
    }

    /// Publishes what was put, and sends an event if the backend wants one.
    pub fn push(&mut self) {
        let old = self.load(0);
        write_barrier();
        self.store(0, self.req_prod);
        full_barrier();
        let event = self.load(4);
        if self.req_prod.wrapping_sub(event) < self.req_prod.wrapping_sub(old) {
            self.guest.notify(self.port);
        }
    }

    /// Consumes one response if there is one.
    ///
    /// # Errors
    /// If it matches no request in flight, or has another operation.
    pub fn take(&mut self) -> io::Result<Option<Response>> {
        let produced = self.load(8);
        read_barrier();
        let waiting = produced.wrapping_sub(self.rsp_cons);
        if waiting == 0 {
            return Ok(None);
        }
        let wrong = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        if waiting > self.req_prod.wrapping_sub(self.rsp_cons) {
            return wrong(format!("{waiting} responses are more than requests in flight"));
        }
        let mut slot = [0; SLOT_BYTES];
        let bytes = self.abi.response_bytes();
        self.slot(self.rsp_cons, &mut slot[..bytes], false);
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
        let response = Response::parse(&slot);
        let id = usize::try_from(response.id).unwrap_or(usize::MAX);
        match self.open.get_mut(id).and_then(Option::take) {
            Some(request) if request.operation == response.operation => {
                self.idle.push(id);
                Ok(Some(response))
            }
            request => {
                wrong(format!("the response {response:?} does not match the request {request:?}"))
            }
        }
    }

    /// Waits for a response.
    ///
    /// # Errors
    /// As [`FrontQueue::take`], or if none comes.
    pub fn wait(&mut self) -> io::Result<Response> {
        let begun = Instant::now();
        loop {
            if let Some(response) = self.take()? {
                return Ok(response);
            }
            self.store(12, self.rsp_cons.wrapping_add(1));
            full_barrier();
            if let Some(response) = self.take()? {
                return Ok(response);
            }
            if begun.elapsed() > PATIENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.guest.wait(self.port, 1000);
        }
    }

    /// Sends one request and returns its response's status.
    ///
    /// # Errors
    /// As [`FrontQueue::wait`].
    pub fn call(&mut self, request: Request) -> io::Result<i16> {
        let id = self.put(request);
        self.push();
        let response = self.wait()?;
        if response.id == id {
            return Ok(response.status);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the response is to another request"))
    }

    /// Consumes one response unchecked, if there is one.
    pub fn take_raw(&mut self) -> Option<Response> {
        if self.load(8) == self.rsp_cons {
            return None;
        }
        read_barrier();
        let mut slot = [0; SLOT_BYTES];
        let bytes = self.abi.response_bytes();
        self.slot(self.rsp_cons, &mut slot[..bytes], false);
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
        Some(Response::parse(&slot))
    }

    /// Skips one response, which a hostile frontend does not read.
    pub fn skip(&mut self) {
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
    }

    /// The numbers of requests sent and responses consumed.
    pub fn numbers(&self) -> (u32, u32) {
        (self.req_prod, self.rsp_cons)
    }
}
