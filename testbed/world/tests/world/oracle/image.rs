//! The content of layers: a base, and images of volumes at a moment.

use super::{Change, End, Entry, NEVER, Oracle, SECTOR};
use crate::random::Random;

impl Oracle {
    /// Gives the writes of this volume the numbers after `numbers`, which no other volume has.
    pub(crate) fn numbered(mut self, numbers: u64) -> Oracle {
        self.numbers = numbers;
        self
    }

    /// Writes data to parts of a volume that was never written, stable at once. Returns the content
    /// of the volume.
    pub(crate) fn write_base(&mut self, random: &mut Random) -> Vec<u8> {
        let mut content = vec![0; self.size * SECTOR];
        let mut first = 0;
        while first < self.size {
            let count = (1 + random.index(96)).min(self.size - first);
            if random.chance(70) {
                let writing = self.begin(Change::Data, first, count, true);
                self.end(writing, true);
                let range = first * SECTOR..(first + count) * SECTOR;
                Oracle::fill(writing.number, first, &mut content[range]);
            }
            first += count;
        }
        content
    }

    /// Returns the oracle of an overlay above this volume, which does not change.
    pub(crate) fn overlay(&self, name: &str, numbers: u64) -> Oracle {
        let mut own = Oracle::new(name, self.size).numbered(numbers);
        (own.sectors, own.clock) = (self.sectors.clone(), self.clock);
        own
    }

    /// Replaces this volume by another one, which takes its name.
    pub(crate) fn begin_anew(&mut self, new: Oracle) {
        let (name, clock) = (std::mem::take(&mut self.name), self.clock.max(new.clock));
        *self = Oracle { name, clock, checked: self.checked, ..new };
    }

    /// Returns the time at which the last successful flush was submitted.
    pub(crate) fn last_flush(&self) -> u64 {
        self.flushed
    }

    /// Returns an image of the volume at some time between `begun`, when a read began that has not
    /// ended yet, and now.
    pub(crate) fn image(&self, name: &str, begun: u64) -> Oracle {
        let mut own = Oracle::new(name, self.size);
        (own.sectors, own.clock) = (self.sectors.clone(), self.clock);
        (own.loss, own.doubt) = (self.loss, self.doubt);
        for sector in &mut own.sectors {
            // What is stable now may have been written after that time.
            let held = sector.iter().filter(|entry| entry.stable && entry.over() <= begun);
            let last = held.map(|entry| entry.begun).max().unwrap_or(0);
            sector.retain(|entry| !entry.hole);
            for entry in sector {
                entry.gone = entry.over() < last;
                entry.hidden = if entry.hidden > begun { NEVER } else { 0 };
                if entry.end == End::Open {
                    entry.end = End::Unknown(self.clock);
                }
            }
        }
        own
    }

    /// Sets the size of an image.
    pub(crate) fn set_size(&mut self, size: usize) {
        self.sectors.resize(size.max(self.sectors.len()), Vec::new());
        self.size = size;
    }

    /// Makes an image stable, whatever is lost later. Data of an earlier daemon that a disk has
    /// lost is the exception: its kernel may show that data for a while, and no flush of this
    /// daemon reports the loss.
    pub(crate) fn settle(&mut self) {
        self.loss = 0;
        for sector in &mut self.sectors {
            sector.retain(|entry| entry.hidden > 0);
            for entry in sector {
                entry.vague |= !entry.stable && entry.begun <= self.doubt;
                entry.stable = true;
            }
        }
    }

    /// Notes that an image was partly copied over this volume.
    pub(crate) fn mix(&mut self, image: &Oracle) {
        for (own, copied) in self.sectors.iter_mut().zip(&image.sectors).take(image.size) {
            if own.is_empty() {
                own.push(Entry::ZEROES);
            }
            let copied = shown(copied);
            own.retain(|one| !copied.iter().any(|entry| entry.number == one.number));
            own.extend(copied);
        }
    }

    /// Notes that an image was copied over this volume.
    pub(crate) fn replace(&mut self, image: &Oracle) {
        for (own, copied) in self.sectors.iter_mut().zip(&image.sectors).take(image.size) {
            *own = shown(copied);
        }
    }
}

/// Returns the entries that a sector of an image may hold, as stable ones.
fn shown(sector: &[Entry]) -> Vec<Entry> {
    if sector.is_empty() {
        return vec![Entry::ZEROES];
    }
    let shown = sector.iter().filter(|entry| entry.hidden > 0);
    shown
        .map(|Entry { number, vague, .. }| Entry {
            number: *number,
            vague: *vague,
            ..Entry::ZEROES
        })
        .collect()
}
