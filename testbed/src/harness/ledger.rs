//! What a disk may hold after a crash, derived from the acknowledgements of its writers.
//!
//! The contract is that of a disk with a volatile write cache: what was acknowledged before a FLUSH
//! was sent survives once that FLUSH is acknowledged; a FUA write survives once it is acknowledged
//! itself. A write without either may survive or not, sector by sector.
//!
//! The ledger keeps for each sector the last value that must have survived, and every later one
//! that may have. Writers must not have two writes to one sector in flight: their order would be
//! undefined.

use crate::harness::pattern::{SECTOR, stamp_of};
use crate::{Result, check};
use std::collections::HashMap;
use std::ops::Range;

/// Names one write for as long as the ledger lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// Writes that an open flush covers.
#[derive(Debug)]
pub struct Flush(Vec<(Ticket, Range<usize>)>);

/// See the module.
#[derive(Debug)]
pub struct Ledger {
    /// Per sector: values in the order written. The first has survived, the later ones may have.
    sectors: Vec<Vec<(Ticket, u64)>>,
    in_flight: HashMap<Ticket, Range<usize>>,
    acknowledged: Vec<(Ticket, Range<usize>)>,
    next: u64,
    answers: u64,
}

impl Ledger {
    /// A disk of `size` bytes (a multiple of 512) that reads as zeroes.
    #[must_use]
    pub fn new(size: usize) -> Ledger {
        Ledger {
            sectors: vec![vec![(Ticket(0), 0)]; size / SECTOR],
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
        self.in_flight.insert(ticket, sectors);
        ticket
    }

    /// A write was acknowledged; `durable` if it carried FUA.
    pub fn written(&mut self, ticket: Ticket, durable: bool) {
        self.answers += 1;
        if let Some(sectors) = self.in_flight.remove(&ticket) {
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
