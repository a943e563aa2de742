//! A guest over vhost-user-blk. It outlives the daemon: its VMM connects again with the region of
//! requests in flight.
//!
//! What the product promises: if a kill lost acknowledged writes that no flush had covered, the
//! guest's flushes and writes fail until it is reset (SPEC.md, "KVM guests"). So a flush that
//! succeeds covers all earlier writes, also writes before the kill, and an error is allowed only
//! if there was something to lose.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ebb_vhost_proto::FrontendMessage;
use testbed::harness::ledger::{Flush, Ticket};
use testbed::harness::pattern::{Random, SECTOR, content};
use testbed::harness::process::PATIENCE;
use testbed::{Error, Result, check};

use super::control::{Control, Member, Order, add, panic_text};
use super::disk::{Cache, Disk, LOADED, SLOT, User, free_slot, index, sectors_in};
use super::vmm::frontend::{is_readable, take_event};
use super::vmm::{Base, Done, Frontend, Guest, HANG, PackedPlaces, Wishes, kind, status};

const QUEUES: usize = 2;

enum Flying {
    Write { ticket: Ticket, slot: usize, after_loss: bool },
    Read { offset: u64, length: usize, slot: usize },
    Flush { flush: Flush, after_loss: bool },
}

pub(crate) struct GuestMember<'a> {
    control: &'a Control,
    disk: &'a Disk,
    socket: PathBuf,
    random: Random,
    frontend: Option<Frontend>,
    is_connected: bool,
    flying: BTreeMap<(usize, u16), Flying>,
    busy: Vec<usize>,
    /// The last kill may have lost something that no flush had covered.
    is_at_risk: bool,
    /// The guest knows of a loss.
    has_lost: bool,
    was_killed: bool,
    /// All queues were started with the region: then the base that the VMM sends is ignored.
    has_started: bool,
    /// Until then it sends no writes, so that some kills find nothing to lose.
    quiet_until: Instant,
}

impl<'a> GuestMember<'a> {
    pub(crate) fn new(
        control: &'a Control,
        disk: &'a Disk,
        socket: PathBuf,
        random: Random,
    ) -> GuestMember<'a> {
        GuestMember {
            control,
            disk,
            socket,
            random,
            frontend: None,
            is_connected: false,
            flying: BTreeMap::new(),
            busy: Vec::new(),
            is_at_risk: false,
            has_lost: false,
            was_killed: false,
            has_started: false,
            quiet_until: Instant::now(),
        }
    }

    fn frontend(&mut self) -> Result<&mut Frontend> {
        self.frontend.as_mut().ok_or_else(|| Error::unexpected("the guest has no frontend"))
    }

    /// Connects, with the region that it has; it tries again what a kill cuts off. False if the
    /// order is over before.
    fn connect(&mut self, order: Option<Order>) -> Result<bool> {
        let begun = Instant::now();
        while !self.is_connected {
            if order.is_some_and(|order| self.control.is_over(order)) {
                return Ok(false);
            }
            let socket = self.socket.clone();
            match attempt(&socket, || self.handshake()) {
                Ok(()) => (self.is_connected, self.has_started) = (true, true),
                Err(text) => {
                    let goes_on = begun.elapsed() < PATIENCE && !self.control.has_failed();
                    check(goes_on, || format!("not served: {text}"))?;
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
        Ok(true)
    }

    fn handshake(&mut self) {
        let packed = self.disk.user == User::Packed;
        // Direct descriptors in one ring format, tables in the other.
        let wishes = Wishes { queues: QUEUES, packed, indirect: !packed, ..Wishes::default() };
        match &mut self.frontend {
            Some(frontend) => {
                // Cloud Hypervisor's base leaves out what the guest sent before the first start.
                let used = packed || !self.has_started || self.random.below(2) == 0;
                frontend.wishes.base = if used { Base::Used } else { Base::Available };
                frontend.reconnect(&self.socket);
            }
            None => {
                let mut frontend = Frontend::connect(&self.socket, Guest::new(QUEUES), wishes);
                frontend.negotiate();
                frontend.start();
                self.frontend = Some(frontend);
            }
        }
    }

    fn submit(&mut self) -> Result {
        let is_quiet = self.quiet_until > Instant::now();
        for queue in 0..QUEUES {
            for _ in 0..self.random.below(6) {
                let Some(frontend) = &mut self.frontend else { return Ok(()) };
                if frontend.drivers[queue].room() < 4 || self.busy.len() + 4 > LOADED / SLOT {
                    break;
                }
                let choice = self.random.below(16);
                if choice == 0 {
                    let flush = self.disk.ledger().flush();
                    let head = frontend.request(queue, kind::FLUSH, 0, 0);
                    let flying = Flying::Flush { flush, after_loss: self.has_lost };
                    self.flying.insert((queue, head), flying);
                    continue;
                }
                let slot = free_slot(&(0..LOADED / SLOT), &self.busy, &mut self.random);
                let sectors = sectors_in(slot, &mut self.random);
                let (sector, length) = (sectors.start as u64, sectors.len() * SECTOR);
                let offset = sector * SECTOR as u64;
                let bytes = u32::try_from(length).unwrap_or(0);
                let flying = if is_quiet || choice < 6 {
                    Flying::Read { offset, length, slot }
                } else {
                    let stamp = self.disk.stamp();
                    let driver = &frontend.drivers[queue];
                    let at = driver.data(driver.next_head());
                    frontend.guest.write(at, &content(stamp, offset, length));
                    let ticket = self.disk.ledger().write(stamp, sectors);
                    Flying::Write { ticket, slot, after_loss: self.has_lost }
                };
                let is_read = matches!(flying, Flying::Read { .. });
                let of_request = if is_read { kind::READ } else { kind::WRITE };
                let head = frontend.request(queue, of_request, sector, bytes);
                self.busy.push(slot);
                self.flying.insert((queue, head), flying);
            }
            self.frontend()?.publish(queue);
        }
        Ok(())
    }

    /// Takes all completions. The driver panics at one that belongs to no request in flight.
    fn take(&mut self) -> Result {
        for queue in 0..QUEUES {
            loop {
                let Some(frontend) = &mut self.frontend else { return Ok(()) };
                let Some(done) = frontend.drivers[queue].take(&frontend.guest) else { break };
                self.note(queue, done)?;
            }
        }
        Ok(())
    }

    fn note(&mut self, queue: usize, done: Done) -> Result {
        add(&self.control.counts.requests, 1);
        let flying = self.flying.remove(&(queue, done.head));
        let flying = flying.ok_or_else(|| Error::unexpected("a completion without request"))?;
        let is_ok = done.status == status::OK;
        check(is_ok || done.status == status::IO_ERROR, || format!("status {}", done.status))?;
        let slot = match flying {
            Flying::Read { offset, length, slot } => {
                check(is_ok, || format!("a read at {offset} failed"))?;
                let frontend = self.frontend()?;
                let data = frontend.guest.read(frontend.drivers[queue].data(done.head), length);
                self.disk.ledger().read(offset, &data)?;
                add(&self.control.counts.sectors, length / SECTOR);
                slot
            }
            Flying::Write { ticket, slot, after_loss } => {
                check(!is_ok || !after_loss, || "a write succeeded after a loss".into())?;
                match is_ok {
                    true => self.disk.ledger().written(ticket, false),
                    false => self.disk.ledger().failed(ticket),
                }
                self.note_error(is_ok, "write")?;
                slot
            }
            Flying::Flush { flush, after_loss } => {
                check(!is_ok || !after_loss, || "a flush succeeded after a loss".into())?;
                if is_ok {
                    self.disk.ledger().flushed(flush);
                    add(&self.control.counts.flushes_after_kills, self.was_killed.into());
                }
                self.note_error(is_ok, "flush")?;
                usize::MAX
            }
        };
        self.busy.retain(|busy| *busy != slot);
        Ok(())
    }

    /// An error says that acknowledged writes are lost.
    fn note_error(&mut self, is_ok: bool, what: &str) -> Result {
        if is_ok || self.has_lost {
            return Ok(());
        }
        let can_lose = self.disk.cache != Cache::None && self.is_at_risk;
        check(can_lose, || format!("a {what} failed, and no kill has lost anything"))?;
        self.has_lost = true;
        add(&self.control.counts.losses, 1);
        Ok(())
    }

    fn has_ended(&mut self) -> Result<bool> {
        let socket = &self.frontend()?.socket;
        Ok(is_readable(socket, Duration::ZERO)
            && matches!(rustix::io::read(socket, &mut [0; 1]), Ok(0) | Err(_)))
    }

    fn wait_a_little(&mut self) -> Result {
        let queue = index(self.random.below(QUEUES as u64));
        let wait = Duration::from_micros(500 + self.random.below(3000));
        let frontend = self.frontend()?;
        let driver = &frontend.drivers[queue];
        driver.arm(&frontend.guest);
        if !driver.has_used(&frontend.guest) {
            is_readable(&frontend.calls[queue], wait);
        }
        take_event(&frontend.calls[queue]);
        Ok(())
    }

    /// Waits until nothing is in flight; false if the connection has ended.
    fn finish(&mut self) -> Result<bool> {
        let begun = Instant::now();
        while !self.flying.is_empty() {
            self.take()?;
            if self.has_ended()? {
                return Ok(false);
            }
            let (count, hangs) = (self.flying.len(), begun.elapsed() > HANG);
            check(!hangs, || format!("{count} requests hang"))?;
            self.wait_a_little()?;
        }
        let frontend = self.frontend()?;
        let rest = frontend.drivers.iter().any(|driver| driver.has_used(&frontend.guest));
        check(!rest, || "a completion without request".into())?;
        Ok(true)
    }

    /// As a guest that is rebooted after the loss. False if the daemon was killed meanwhile.
    fn reset(&mut self) -> Result<bool> {
        if !self.finish()? {
            return Ok(false);
        }
        // The guest is also rebooted without a reply.
        let reset = self.frontend()?.set(&FrontendMessage::ResetDevice, &[]);
        check(reset != Some(false), || "a reset failed".into())?;
        let frontend = self.frontend()?;
        for driver in &mut frontend.drivers {
            let packed = driver.packed.is_some();
            driver.reset(&frontend.guest);
            driver.packed = packed.then(|| PackedPlaces::new(driver.size));
        }
        frontend.inflight = None;
        self.disk.ledger().disconnected();
        (self.has_lost, self.is_at_risk, self.has_started) = (false, false, false);
        add(&self.control.counts.resets, 1);
        let frontend = self.frontend()?;
        self.has_started = catch_unwind(AssertUnwindSafe(|| frontend.start())).is_ok();
        Ok(self.has_started)
    }
}

impl Member for GuestMember<'_> {
    fn name(&self) -> String {
        format!("guest of {}", self.disk.name)
    }

    fn load(&mut self, order: Order) -> Result {
        if !self.connect(Some(order))? {
            return Ok(());
        }
        while !self.control.is_over(order) {
            let is_reset = !self.has_lost || self.random.below(30) > 0 || self.reset()?;
            if !is_reset || self.has_ended()? {
                self.is_connected = false;
                return self.control.note_closed();
            }
            if self.quiet_until < Instant::now() && self.random.below(40) == 0 {
                self.quiet_until = Instant::now() + Duration::from_millis(self.random.below(120));
            }
            self.submit()?;
            self.wait_a_little()?;
            self.take()?;
        }
        Ok(())
    }

    fn settle(&mut self) -> Result {
        self.connect(None)?;
        check(self.finish()?, || "the daemon has closed the connection".into())
    }

    fn verify(&mut self) -> Result {
        // Before or after the reads: both show a flush that covers a loss.
        let flush_first = self.random.below(2) == 0;
        for turn in [true, false] {
            if turn == flush_first {
                let flush = self.disk.ledger().flush();
                let is_ok = self.frontend()?.flush(0) == status::OK;
                check(!is_ok || !self.has_lost, || "a flush succeeded after a loss".into())?;
                self.note_error(is_ok, "flush")?;
                if is_ok {
                    self.disk.ledger().flushed(flush);
                    add(&self.control.counts.flushes_after_kills, self.was_killed.into());
                }
                continue;
            }
            for offset in (0..LOADED).step_by(SLOT) {
                let queue = offset / SLOT % QUEUES;
                let data = self.frontend()?.read(queue, (offset / SECTOR) as u64, SLOT);
                self.disk.ledger().read(offset as u64, &data)?;
                add(&self.control.counts.sectors, SLOT / SECTOR);
            }
        }
        Ok(())
    }

    fn down(&mut self) -> Result {
        self.is_connected = false;
        self.take()?;
        if !self.control.is_stopped() {
            let mut ledger = self.disk.ledger();
            self.is_at_risk = ledger.is_at_risk() || self.has_lost;
            ledger.killed();
            drop(ledger);
            self.was_killed = true;
            add(&self.control.counts.requests_cut, self.flying.len());
        }
        // The guest goes on while there is no daemon. Before the first start it has no requests:
        // the VMM would have to know which of them no daemon has seen.
        if self.has_started && self.random.below(3) == 0 {
            self.submit()?;
        }
        Ok(())
    }

    fn foreign(&mut self) -> Result {
        let Some(frontend) = self.frontend.as_mut().filter(|it| it.inflight.is_some()) else {
            return Ok(());
        };
        let begun = Instant::now();
        loop {
            match attempt(&self.socket, || frontend.try_reconnect(&self.socket)) {
                Ok(served) => {
                    check(!served, || "it is served on a foreign store".into())?;
                    break;
                }
                Err(text) => {
                    let goes_on = begun.elapsed() < PATIENCE && !self.control.has_failed();
                    check(goes_on, || text)?;
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let any = frontend.drivers.iter().any(|driver| driver.has_used(&frontend.guest));
        check(!any, || "a request was carried out on a foreign store".into())?;
        add(&self.control.counts.refused, 1);
        Ok(())
    }
}

/// A handshake, which panics if the connection ends in it.
fn attempt<T>(socket: &Path, handshake: impl FnOnce() -> T) -> std::result::Result<T, String> {
    // Without a panic as long as nobody listens.
    UnixStream::connect(socket).map_err(|error| error.to_string())?;
    catch_unwind(AssertUnwindSafe(handshake)).map_err(|panic| panic_text(&*panic))
}
