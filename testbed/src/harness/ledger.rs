//! What a disk may hold after a crash, derived from the acknowledgements of its writers.
//!
//! The contract is that of a disk with a volatile write cache: what was acknowledged before a FLUSH
//! was sent survives once that FLUSH is acknowledged; a FUA write survives once it is acknowledged
//! itself. A write without either may survive or not, sector by sector.
//!
//! The ledger keeps for each sector the last value that must have survived, and every later one
//! that may have. Writers must not have two writes to one sector in flight: their order would be
//! undefined.
//!
//! While a daemon lives, a read returns exactly the last acknowledged write ([`Ledger::read`]).
//! After a kill ([`Ledger::killed`]) it returns any value that may have survived, until the next
//! write. A guest outlives the daemon: its next flush still covers its earlier writes. A client of
//! NBD has lost its connection ([`Ledger::disconnected`]): flushes of the next one promise nothing
//! about it.

use crate::harness::pattern::{SECTOR, stamp_of};
use crate::{Error, Result, check};
use std::collections::HashMap;
use std::ops::Range;

/// Names one write for as long as the ledger lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// Writes that an open flush covers.
#[derive(Debug)]
pub struct Flush(Vec<(Ticket, Range<usize>)>);

/// See the module.
#[derive(Debug)]
pub struct Ledger {
    /// Per sector: values in the order written. The first has survived, the later ones may have.
    sectors: Vec<Vec<(Ticket, u64)>>,
    /// Per sector: reads return no value that was written before this one.
    live: Vec<Ticket>,
    in_flight: HashMap<Ticket, Range<usize>>,
    acknowledged: Vec<(Ticket, Range<usize>)>,
    next: u64,
    answers: u64,
    watch: Option<Watch>,
}

/// The values that each sector may have had at one moment of a period.
#[derive(Debug)]
struct Watch {
    live: Vec<Vec<u64>>,
    /// Also those that a kill in the period may have brought back.
    all: Vec<Vec<u64>>,
}

impl Ledger {
    /// A disk of `size` bytes (a multiple of 512) that reads as zeroes.
    #[must_use]
    pub fn new(size: usize) -> Ledger {
        Ledger::filled(size, 0)
    }

    /// A disk of `size` bytes (a multiple of 512) that reads as the content with this stamp.
    #[must_use]
    pub fn filled(size: usize, stamp: u64) -> Ledger {
        Ledger {
            sectors: vec![vec![(Ticket(0), stamp)]; size / SECTOR],
            live: vec![Ticket(0); size / SECTOR],
            watch: None,
            in_flight: HashMap::new(),
            acknowledged: Vec::new(),
            next: 1,
            answers: 0,
        }
    }

    /// A write of content with `stamp` to these sectors is about to be sent.
    /// A write of zeroes has stamp 0.
    pub fn write(&mut self, stamp: u64, sectors: Range<usize>) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        for sector in &mut self.sectors[sectors.clone()] {
            sector.push((ticket, stamp));
        }
        if let Some(watch) = &mut self.watch {
            let lists = watch.live[sectors.clone()].iter_mut();
            lists.chain(&mut watch.all[sectors.clone()]).for_each(|values| values.push(stamp));
        }
        self.in_flight.insert(ticket, sectors);
        ticket
    }

    /// A write has failed: it may have been carried out or not.
    pub fn failed(&mut self, ticket: Ticket) {
        self.in_flight.remove(&ticket);
    }

    /// A write was acknowledged; `durable` if it carried FUA.
    pub fn written(&mut self, ticket: Ticket, durable: bool) {
        self.answers += 1;
        if let Some(sectors) = self.in_flight.remove(&ticket) {
            self.live[sectors.clone()].fill(ticket);
            match durable {
                true => self.survived(ticket, sectors),
                false => self.acknowledged.push((ticket, sectors)),
            }
        }
    }

    /// A flush is about to be sent: it covers what is acknowledged by now.
    #[must_use]
    pub fn flush(&self) -> Flush {
        Flush(self.acknowledged.clone())
    }

    /// A flush was acknowledged.
    pub fn flushed(&mut self, flush: Flush) {
        self.answers += 1;
        for (ticket, sectors) in flush.0 {
            self.acknowledged.retain(|(other, _)| *other != ticket);
            self.survived(ticket, sectors);
        }
    }

    fn survived(&mut self, ticket: Ticket, sectors: Range<usize>) {
        for sector in &mut self.sectors[sectors] {
            // Gone already if a later write has survived.
            if let Some(place) = sector.iter().position(|(other, _)| *other == ticket) {
                sector.drain(..place);
            }
        }
    }

    /// Writes and flushes that were acknowledged so far.
    #[must_use]
    pub fn answers(&self) -> u64 {
        self.answers
    }

    /// Number of sectors with a value that must have survived and is not the disk's first.
    #[must_use]
    pub fn promised(&self) -> usize {
        self.sectors.iter().filter(|values| values[0].0 != Ticket(0)).count()
    }

    /// Writes were acknowledged that no flush has covered, or are in flight.
    #[must_use]
    pub fn is_at_risk(&self) -> bool {
        !self.acknowledged.is_empty() || !self.in_flight.is_empty()
    }

    /// The daemon was killed: writes that are not durable may be lost. A guest's requests stay in
    /// flight.
    pub fn killed(&mut self) {
        for (live, values) in self.live.iter_mut().zip(&self.sectors) {
            *live = values[0].0;
        }
    }

    /// The connection has ended, or the guest was reset: nothing is in flight, and no later flush
    /// covers earlier writes.
    pub fn disconnected(&mut self) {
        self.in_flight.clear();
        self.acknowledged.clear();
    }

    /// Compares data read from byte `offset` on, where no write is in flight.
    ///
    /// # Errors
    /// A sector holds what it may not; the error says which, and what it may hold.
    pub fn read(&mut self, offset: u64, found: &[u8]) -> Result {
        let first = usize::try_from(offset).unwrap_or(0) / SECTOR;
        for (number, bytes) in (first..).zip(found.chunks(SECTOR)) {
            let live = self.live[number];
            let values = self.sectors[number].iter().filter(|(ticket, _)| *ticket >= live);
            let stamp = stamp_of(bytes, (number * SECTOR) as u64);
            let seen = values.clone().find(|(_, value)| Some(*value) == stamp);
            let (ticket, _) = seen.ok_or_else(|| {
                let stamps: Vec<u64> = values.map(|(_, stamp)| *stamp).collect();
                Error::unexpected(format!(
                    "sector {number}: may read as {stamps:x?}; holds {stamp:x?} ({:02x?}...)",
                    &bytes[..16],
                ))
            })?;
            // The value is the store's, or the last one: the daemon returns no earlier one from now
            // on.
            self.live[number] = *ticket;
        }
        Ok(())
    }

    /// Begins a period in one moment of which the disk is copied.
    pub fn begin_watch(&mut self) {
        let values = |from: Option<&[Ticket]>| {
            let of = |(number, values): (usize, &Vec<(Ticket, u64)>)| {
                let from = from.map_or(Ticket(0), |live| live[number]);
                values
                    .iter()
                    .filter(|(ticket, _)| *ticket >= from)
                    .map(|(_, stamp)| *stamp)
                    .collect()
            };
            self.sectors.iter().enumerate().map(of).collect()
        };
        self.watch = Some(Watch { live: values(Some(&self.live)), all: values(None) });
    }

    /// Ends the period: the stamps that each sector of the copy may have. If the daemon was
    /// `killed` meanwhile, the copy may lack writes that are not durable.
    pub fn end_watch(&mut self, killed: bool) -> Vec<Vec<u64>> {
        let watch = self.watch.take();
        watch.map(|watch| if killed { watch.all } else { watch.live }).unwrap_or_default()
    }

    /// Compares what the disk holds from byte `offset` on after a crash, and takes it as the state
    /// for further writes. Nothing is in flight.
    ///
    /// # Errors
    /// A sector holds what it may not; the error says which, and what it may hold.
    pub fn crashed(&mut self, offset: u64, found: &[u8]) -> Result {
        self.in_flight.clear();
        self.acknowledged.clear();
        let first = usize::try_from(offset).unwrap_or(0) / SECTOR;
        for (number, bytes) in (first..).zip(found.chunks(SECTOR)) {
            let values = &mut self.sectors[number];
            let stamp = stamp_of(bytes, (number * SECTOR) as u64);
            let seen = values.iter().find(|(_, value)| Some(*value) == stamp).copied();
            check(seen.is_some(), || {
                let stamps: Vec<u64> = values.iter().map(|(_, stamp)| *stamp).collect();
                format!(
                    "sector {number}: must hold stamp {}, or one not yet durable of {:?}; holds {stamp:?} ({:02x?}...)",
                    stamps[0],
                    &stamps[1..],
                    &bytes[..16],
                )
            })?;
            self.live[number] = seen.map_or(Ticket(0), |(ticket, _)| ticket);
            *values = seen.into_iter().collect();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::pattern::content;

    /// What a ledger of one sector allows there.
    fn allowed(ledger: &Ledger) -> Vec<u64> {
        ledger.sectors[0].iter().map(|(_, stamp)| *stamp).collect()
    }

    #[test]
    fn a_write_without_flush_may_be_lost_and_may_be_there() {
        let mut ledger = Ledger::new(SECTOR);
        let write = ledger.write(5, 0..1);
        ledger.written(write, false);
        assert_eq!(allowed(&ledger), [0, 5]);
        assert_eq!(ledger.promised(), 0);
    }

    #[test]
    fn a_flush_covers_what_was_acknowledged_before_it_was_sent() {
        let mut ledger = Ledger::new(2 * SECTOR);
        let early = ledger.write(5, 0..1);
        ledger.written(early, false);
        let late = ledger.write(6, 1..2);
        let flush = ledger.flush();
        ledger.written(late, false);
        ledger.flushed(flush);
        assert_eq!(allowed(&ledger), [5]);
        assert_eq!(ledger.sectors[1].len(), 2, "the late write may still be lost");
    }

    #[test]
    fn fua_covers_itself_and_an_older_flush_changes_nothing_after_it() {
        let mut ledger = Ledger::new(SECTOR);
        let old = ledger.write(5, 0..1);
        ledger.written(old, false);
        let flush = ledger.flush();
        let new = ledger.write(6, 0..1);
        ledger.written(new, true);
        ledger.flushed(flush);
        assert_eq!(allowed(&ledger), [6]);
    }

    #[test]
    fn reads_return_the_last_write_until_a_kill() {
        let read = |ledger: &mut Ledger, stamp| ledger.read(0, &content(stamp, 0, SECTOR)).is_ok();
        let mut ledger = Ledger::filled(SECTOR, 4);
        for stamp in [5, 6] {
            let write = ledger.write(stamp, 0..1);
            ledger.written(write, false);
        }
        assert!(!read(&mut ledger, 5), "an earlier write");
        assert!(read(&mut ledger, 6));
        ledger.killed();
        assert!(read(&mut ledger, 5), "the later one was lost");
        assert!(!read(&mut ledger, 4), "it has changed since it was read");
        let flush = ledger.flush();
        ledger.flushed(flush);
        assert!(!read(&mut ledger, 5), "the guest's flush covers the write that was lost");
    }

    #[test]
    fn next_connection_promises_nothing_of_the_last_one() {
        let mut ledger = Ledger::filled(SECTOR, 4);
        let write = ledger.write(5, 0..1);
        ledger.written(write, false);
        assert!(ledger.is_at_risk());
        ledger.killed();
        ledger.disconnected();
        assert!(!ledger.is_at_risk());
        let flush = ledger.flush();
        ledger.flushed(flush);
        assert_eq!(allowed(&ledger), [4, 5]);
    }

    #[test]
    fn copy_holds_values_of_one_moment() {
        let mut ledger = Ledger::filled(2 * SECTOR, 4);
        let early = ledger.write(5, 0..1);
        ledger.written(early, false);
        ledger.begin_watch();
        let late = ledger.write(6, 1..2);
        ledger.written(late, true);
        assert_eq!(ledger.end_watch(false), [vec![5], vec![4, 6]]);
        ledger.begin_watch();
        assert_eq!(ledger.end_watch(true), [vec![4, 5], vec![6]]);
    }

    #[test]
    fn loss_misplacement_and_tearing_are_found() {
        let fresh = || {
            let mut ledger = Ledger::new(4 * SECTOR);
            let write = ledger.write(7, 0..2);
            ledger.written(write, true);
            ledger.write(8, 1..3); // cut off
            ledger
        };
        let good = |stamps: [u64; 4]| {
            let sector = |(n, s): (u64, &u64)| content(*s, n * SECTOR as u64, SECTOR);
            (0..).zip(&stamps).flat_map(sector).collect::<Vec<u8>>()
        };
        assert!(fresh().crashed(0, &good([7, 7, 0, 0])).is_ok());
        assert!(fresh().crashed(0, &good([7, 8, 0, 0])).is_ok(), "torn between sectors");
        assert!(fresh().crashed(0, &good([7, 8, 8, 0])).is_ok());
        assert!(fresh().crashed(0, &good([0, 7, 0, 0])).is_err(), "lost");
        assert!(fresh().crashed(0, &good([7, 7, 7, 0])).is_err(), "never written there");
        assert!(fresh().crashed(0, &good([7, 7, 0, 8])).is_err(), "spilled over");
        let mut torn = good([7, 7, 0, 0]);
        torn[100] ^= 1;
        assert!(fresh().crashed(0, &torn).is_err(), "torn inside a sector");
    }
}
