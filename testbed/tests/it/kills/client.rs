//! An NBD client that reads, writes and flushes with many requests in flight. Two of them share a
//! volume.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use testbed::harness::ledger::{Flush, Ticket};
use testbed::harness::nbd::{Client, Failure, Request, read_reply, wire};
use testbed::harness::pattern::{Random, SECTOR, content};
use testbed::harness::process::{PATIENCE, until};
use testbed::{Error, Result, check};

use super::control::{Control, Member, Order, add};
use super::disk::{Disk, LOADED, SLOT, free_slot, sectors_in};

const DEPTH: usize = 8;

enum Open {
    Write { ticket: Ticket, fua: bool, slot: usize },
    Read { offset: u64, length: usize, slot: usize },
    Flush(Flush),
}

pub(crate) struct NbdClient<'a> {
    control: &'a Control,
    disk: &'a Disk,
    socket: PathBuf,
    /// No other client of the volume uses it.
    slots: Range<usize>,
    random: Random,
    stream: Option<UnixStream>,
    open: HashMap<u64, Open>,
    busy: Vec<usize>,
    cookie: u64,
}

impl<'a> NbdClient<'a> {
    pub(crate) fn new(
        control: &'a Control,
        disk: &'a Disk,
        socket: PathBuf,
        slots: Range<usize>,
        random: Random,
    ) -> NbdClient<'a> {
        let (open, busy) = (HashMap::new(), Vec::new());
        NbdClient { control, disk, socket, slots, random, stream: None, open, busy, cookie: 0 }
    }

    /// Connects as soon as the volume is served, unless the order is over before.
    fn connect(&mut self, order: Option<Order>) -> Result {
        if self.stream.is_some() {
            return Ok(());
        }
        self.stream = until("the export", PATIENCE, || {
            if order.is_some_and(|order| self.control.is_over(order)) {
                return Ok(Some(None));
            }
            Ok(Client::open(&self.socket, &self.disk.name).ok().map(|c| Some(c.into_stream())))
        })?;
        Ok(())
    }

    fn send(&mut self) -> std::io::Result<()> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        self.cookie += 1;
        let mut request = Request { cookie: self.cookie, ..Request::default() };
        let mut payload = Vec::new();
        let choice = self.random.below(16);
        let open = if choice == 0 {
            request.command = wire::CMD_FLUSH;
            Open::Flush(self.disk.ledger().flush())
        } else {
            let slot = free_slot(&self.slots, &self.busy, &mut self.random);
            let sectors = sectors_in(slot, &mut self.random);
            request.offset = (sectors.start * SECTOR) as u64;
            let length = sectors.len() * SECTOR;
            request.length = u32::try_from(length).unwrap_or(0);
            self.busy.push(slot);
            if choice < 6 {
                request.command = wire::CMD_READ;
                Open::Read { offset: request.offset, length, slot }
            } else {
                let (fua, zeroes) = (choice < 8, choice == 15);
                let stamp = if zeroes { 0 } else { self.disk.stamp() };
                request.command = if zeroes { wire::CMD_WRITE_ZEROES } else { wire::CMD_WRITE };
                request.flags = if fua { wire::FLAG_FUA } else { 0 };
                if !zeroes {
                    payload = content(stamp, request.offset, length);
                }
                Open::Write { ticket: self.disk.ledger().write(stamp, sectors), fua, slot }
            }
        };
        self.open.insert(self.cookie, open);
        stream.write_all(&[&request.bytes(), payload.as_slice()].concat())
    }

    /// Receives a reply; false if the connection has ended.
    fn receive(&mut self) -> Result<bool> {
        let Some(stream) = &mut self.stream else { return Ok(false) };
        let cookie = match read_reply(stream) {
            Ok((cookie, 0)) => cookie,
            // It says that it is ending, and does.
            Ok((_, wire::ESHUTDOWN)) | Err(Failure::Io(_)) => return Ok(false),
            Ok((cookie, error)) => {
                let what = match self.open.get(&cookie) {
                    Some(Open::Write { .. }) => "write",
                    Some(Open::Read { .. }) => "read",
                    Some(Open::Flush(_)) => "flush",
                    None => "unknown request",
                };
                return Err(Error::unexpected(format!("a {what} failed with error {error}")));
            }
            Err(error) => return Err(error.into()),
        };
        let mut ledger = self.disk.ledger();
        let slot = match self.open.remove(&cookie) {
            Some(Open::Write { ticket, fua, slot }) => {
                ledger.written(ticket, fua);
                slot
            }
            Some(Open::Flush(flush)) => {
                ledger.flushed(flush);
                usize::MAX
            }
            Some(Open::Read { offset, length, slot }) => {
                drop(ledger);
                let mut data = vec![0; length];
                if stream.read_exact(&mut data).is_err() {
                    return Ok(false);
                }
                self.disk.ledger().read(offset, &data)?;
                add(&self.control.counts.sectors, length / SECTOR);
                slot
            }
            None => return Err(Error::unexpected(format!("a reply for {cookie}: not open"))),
        };
        self.busy.retain(|busy| *busy != slot);
        add(&self.control.counts.requests, 1);
        Ok(true)
    }
}

impl Member for NbdClient<'_> {
    fn name(&self) -> String {
        format!("NBD client of {}", self.disk.name)
    }

    fn load(&mut self, order: Order) -> Result {
        self.connect(Some(order))?;
        while self.stream.is_some() && !self.control.is_over(order) {
            while self.open.len() < DEPTH {
                if self.send().is_err() {
                    self.stream = None;
                    return self.control.note_closed();
                }
            }
            if !self.receive()? {
                self.stream = None;
                return self.control.note_closed();
            }
            std::thread::sleep(std::time::Duration::from_micros(self.random.below(1000)));
        }
        Ok(())
    }

    fn settle(&mut self) -> Result {
        check(self.stream.is_some() || self.open.is_empty(), || {
            "the daemon has closed the connection".into()
        })?;
        self.connect(None)?;
        while !self.open.is_empty() {
            check(self.receive()?, || "the daemon has closed the connection".into())?;
        }
        Ok(())
    }

    fn verify(&mut self) -> Result {
        let mut client = Client::open(&self.socket, &self.disk.name)?;
        for offset in (0..LOADED).step_by(16 * SLOT) {
            let length = u32::try_from(16 * SLOT).unwrap_or(0);
            let data = client.read(offset as u64, length)?;
            self.disk.ledger().read(offset as u64, &data)?;
            add(&self.control.counts.sectors, data.len() / SECTOR);
        }
        Ok(client.disconnect()?)
    }

    fn down(&mut self) -> Result {
        self.stream = None;
        self.open.clear();
        self.busy.clear();
        Ok(())
    }
}
