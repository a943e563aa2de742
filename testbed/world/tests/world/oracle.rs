//! The content that a volume may have: for each sector the writes whose data a read may return, and
//! those that a crash may leave.
//!
//! Each write has a number, and the content of a sector contains the number (0: zeroes), so that a
//! read shows which write it saw, and a torn sector is detected.
//!
//! # The rules
//! Times are those of the client: a write begins when it is sent and ends when its
//! reply arrives. A write `e` lies *before* `w` if `e` had ended when `w` began.
//! - A read may see `e` unless some write that was acknowledged before the read began lies after
//!   `e`.
//! - A successful flush makes stable what was acknowledged when it was submitted; FUA its own
//!   write.
//! - A crash may leave `e` unless some stable write lies after `e`.
//! - A write whose connection is lost is in flight until the server has finished it.
//! - Beyond the end nothing can be read or written. The part that a shrink removes is stable zeroes
//!   once the shrink has succeeded; a write that is in flight then may still take effect when the
//!   volume has grown again.
//! - A write that failed may have been carried out, whole or in part, sector by sector. So may a
//!   discard.
//! - The content of a discarded range is undefined until it is written again (NBD: "the client MUST
//!   NOT make any assumptions about the contents"). So a cache need not keep the range until a
//!   flush, and when the store loses the discard together with the write before it, an older write
//!   reappears. A flush therefore makes no write stable that a discard may lie after.
//! - When a store loses what was not flushed, reads may see whatever a crash may leave.
//! - A disk reports such a loss to the next flush. Until then the volume cannot know of it, and a
//!   block of 4 KiB that an overlay has begun and not saved may read as its file was before: zeroes
//!   ([`Oracle::lost_blocks`]). After the next flush, failed or not, the block may not read so.
//! - An image of a volume ([`Oracle::image`]) holds the data that a read may have returned between
//!   two times. No client writes to an image; until it is stable, a loss or a crash has the same
//!   effect on it as on a volume.

mod blocks;
mod image;

use std::collections::BTreeSet;

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
const WORDS: usize = SECTOR / 8;
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
const NEVER: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// In flight.
    Open,
    /// Ended at this time; whether it was carried out is unknown.
    Unknown(u64),
    /// Acknowledged at this time.
    Done(u64),
}

/// A write that a sector may hold.
#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    begun: u64,
    end: End,
    /// Reads that began at this time or later do not see it.
    hidden: u64,
    stable: bool,
    /// The write lies before a stable one: no crash may leave it.
    gone: bool,
    /// The entry is a discard: later reads may differ.
    vague: bool,
    /// The entry is no write, but the content of an overlay's file in a block that was lost.
    hole: bool,
}

impl Entry {
    /// The content of a sector that was never written.
    const ZEROES: Entry = Entry {
        number: 0,
        begun: 0,
        end: End::Done(0),
        hidden: NEVER,
        stable: true,
        gone: false,
        vague: false,
        hole: false,
    };

    fn over(&self) -> u64 {
        match self.end {
            End::Open => NEVER,
            End::Unknown(at) | End::Done(at) => at,
        }
    }
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Data,
    Zeroes,
    Discard,
}

/// A change in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Writing {
    pub(crate) number: u64,
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) fua: bool,
    change: Change,
    begun: u64,
}

impl Writing {
    pub(crate) fn is_discard(&self) -> bool {
        self.change == Change::Discard
    }
}

/// See the module.
pub(crate) struct Oracle {
    name: String,
    /// The entries of each sector. An empty list: zeroes, never written.
    sectors: Vec<Vec<Entry>>,
    /// The size in sectors. After a shrink the list may have more.
    size: usize,
    /// Number of resizes that were submitted, plus the number of those that have ended.
    resizes: u64,
    /// Sectors with acknowledged writes that are not stable.
    unstable: Vec<u32>,
    /// The times at which the reads in flight began.
    reads: BTreeSet<u64>,
    /// The time of the daemon's last start.
    life: u64,
    /// The time of the store's last loss.
    loss: u64,
    /// The time of the last loss, not by a crash, of data that the disk may have shown since.
    doubt: u64,
    /// Changes that began until this time are not promised.
    forgiven: u64,
    clock: u64,
    numbers: u64,
    /// The time at which the last successful flush was submitted.
    flushed: u64,
    /// The number of sectors that were checked.
    pub(crate) checked: u64,
}

fn number_of(content: &[u8]) -> u64 {
    u64::from_le_bytes(content[..8].try_into().unwrap())
}

impl Oracle {
    pub(crate) fn new(name: &str, sectors: usize) -> Oracle {
        Oracle {
            name: name.to_owned(),
            sectors: vec![Vec::new(); sectors],
            size: sectors,
            resizes: 0,
            unstable: Vec::new(),
            reads: BTreeSet::new(),
            life: 0,
            loss: 0,
            doubt: 0,
            forgiven: 0,
            clock: 1,
            numbers: 0,
            flushed: 0,
            checked: 0,
        }
    }

    pub(crate) fn sectors(&self) -> usize {
        self.size
    }

    /// The size in sectors, and the number of resizes that were submitted or have ended.
    pub(crate) fn end_and_resizes(&self) -> (usize, u64) {
        (self.size, self.resizes)
    }

    /// Advances the clock, and returns the new time.
    pub(crate) fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Fills sectors with a write's number.
    pub(crate) fn fill(number: u64, first: usize, out: &mut [u8]) {
        for (at, sector) in out.chunks_exact_mut(SECTOR).enumerate() {
            let place = (first + at) as u64;
            for (word, bytes) in sector.chunks_exact_mut(8).enumerate() {
                let value = match word {
                    0 => number,
                    _ => number.wrapping_mul(ODD) ^ (place << 20) ^ word as u64,
                };
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
    }

    /// Returns the number in a sector, unless the sector is torn.
    fn whole(content: &[u8], place: usize) -> Option<u64> {
        let number = number_of(content);
        if number == 0 {
            return content.iter().all(|byte| *byte == 0).then_some(0);
        }
        let mut expected = [0; SECTOR];
        Oracle::fill(number, place, &mut expected);
        (expected == *content).then_some(number)
    }

    /// Returns true if this is the content of a sector that a client has written, wherever.
    pub(crate) fn is_written(content: &[u8]) -> bool {
        let word = |at: usize| number_of(&content[8 * at..]);
        number_of(content) != 0 && word(1) ^ word(2) == 1 ^ 2 && word(1) ^ word(3) == 1 ^ 3
    }

    /// Begins a read; returns the time of its begin.
    pub(crate) fn begin_read(&mut self) -> u64 {
        let begun = self.now();
        self.reads.insert(begun);
        begun
    }

    /// Ends a read, successful or not.
    pub(crate) fn end_read(&mut self, begun: u64) {
        self.reads.remove(&begun);
    }

    /// Begins a change.
    pub(crate) fn begin(
        &mut self,
        change: Change,
        first: usize,
        count: usize,
        fua: bool,
    ) -> Writing {
        let begun = self.now();
        let number = if change == Change::Data {
            self.numbers += 1;
            self.numbers
        } else {
            0
        };
        let entry = Entry {
            number,
            begun,
            end: End::Open,
            hidden: NEVER,
            stable: false,
            gone: false,
            vague: change == Change::Discard,
            hole: false,
        };
        for sector in self.sectors.iter_mut().skip(first).take(count) {
            if sector.is_empty() {
                sector.push(Entry::ZEROES);
            }
            sector.push(entry);
        }
        Writing { number, first, count, fua, change, begun }
    }

    /// Ends a change: it has completed (`done`), or has failed or ended without a reply.
    pub(crate) fn end(&mut self, writing: Writing, done: bool) {
        let now = self.now();
        let certain = done && writing.change != Change::Discard && writing.begun > self.forgiven;
        let until = (writing.first + writing.count).min(self.sectors.len());
        for place in writing.first.min(until)..until {
            let sector = &mut self.sectors[place];
            let Some(own) = sector.iter_mut().find(|entry| entry.begun == writing.begun) else {
                continue;
            };
            own.end = if certain { End::Done(now) } else { End::Unknown(now) };
            if !certain {
                continue;
            }
            // A write that began before a loss may be lost, although its reply arrives only now.
            if writing.begun > self.loss {
                for entry in sector.iter_mut().filter(|entry| entry.over() < writing.begun) {
                    entry.hidden = entry.hidden.min(now);
                }
            }
            if writing.fua && Oracle::discarded(sector) < writing.begun {
                sector
                    .iter_mut()
                    .filter(|e| e.begun == writing.begun)
                    .for_each(|e| e.stable = true);
                Oracle::forget(sector, writing.begun, &self.reads);
            } else {
                self.unstable.push(u32::try_from(place).unwrap());
            }
        }
    }

    /// Removes writes that lie before a stable one, once no read in flight may see them: they never
    /// reappear.
    fn forget(sector: &mut Vec<Entry>, begun: u64, reads: &BTreeSet<u64>) {
        let oldest = reads.first().copied().unwrap_or(NEVER);
        sector.retain_mut(|entry| {
            entry.gone |= entry.over() < begun;
            !entry.gone || entry.hidden > oldest
        });
    }

    /// Returns the time at which the last discard of the sector ended; 0 if there was none.
    fn discarded(sector: &[Entry]) -> u64 {
        sector.iter().filter(|entry| entry.vague).map(Entry::over).max().unwrap_or(0)
    }

    /// Notes that a flush that was submitted at `begun` succeeded.
    pub(crate) fn flushed(&mut self, begun: u64) {
        self.flushed = self.flushed.max(begun);
        self.flushed_since(0, begun);
        self.forget_saved_holes(begun);
    }

    /// Notes that a reload or stop that was submitted at `begun` closed the volume cleanly: writes
    /// that were acknowledged in this life are stable. A volume without writes need not flush data
    /// that an earlier life left unflushed.
    pub(crate) fn closed(&mut self, begun: u64) {
        self.flushed = self.flushed.max(begun);
        self.flushed_since(self.life, begun);
        self.forget_holes();
    }

    /// Notes that a daemon starts.
    pub(crate) fn begin_life(&mut self) {
        self.life = self.now();
    }

    fn flushed_since(&mut self, life: u64, begun: u64) {
        let (sectors, reads) = (&mut self.sectors, &self.reads);
        self.unstable.retain(|&place| {
            let sector = &mut sectors[place as usize];
            let (mut last, discarded) = (0, Oracle::discarded(sector));
            let mut left = false;
            for entry in sector.iter_mut().filter(|entry| !entry.stable) {
                match entry.end {
                    End::Done(at)
                        if at <= begun && entry.begun >= life && discarded < entry.begun =>
                    {
                        entry.stable = true;
                        last = last.max(entry.begun);
                    }
                    End::Done(_) => left = true,
                    _ => {}
                }
            }
            Oracle::forget(sector, last, reads);
            left
        });
    }

    /// Notes that the store has lost some of the data that was not stable: reads may see older
    /// data. Promises still hold: a flush that succeeds from now on also covers earlier
    /// acknowledged writes.
    pub(crate) fn lost(&mut self) {
        self.loss = self.now();
        for sector in self.sectors.iter_mut().filter(|sector| sector.len() > 1) {
            let shown = sector.iter_mut().filter(|entry| !entry.gone && !entry.hole);
            shown.for_each(|entry| entry.hidden = NEVER);
        }
    }

    /// Notes that a process has opened the store that does not know of earlier losses: lost writes
    /// are no longer promised.
    pub(crate) fn reopened(&mut self) {
        self.forget_holes();
        let (sectors, loss) = (&mut self.sectors, self.loss);
        self.unstable.retain(|&place| {
            let mut left = false;
            for entry in &mut sectors[place as usize] {
                match (entry.end, entry.stable) {
                    (End::Done(at), false) if entry.begun <= loss => entry.end = End::Unknown(at),
                    (End::Done(_), false) => left = true,
                    _ => {}
                }
            }
            left
        });
    }

    /// Notes a crash: writes that were not stable may be there or not, and are no longer promised.
    pub(crate) fn crashed(&mut self) {
        self.lost();
        self.forget_holes();
        self.sectors.iter_mut().for_each(|sector| sector.retain(|entry| !entry.gone));
        for place in self.unstable.drain(..) {
            for entry in &mut self.sectors[place as usize] {
                if let (End::Done(at), false) = (entry.end, entry.stable) {
                    entry.end = End::Unknown(at);
                }
            }
        }
    }

    /// Notes that the server of the store may have lost any data that was not stable, which no
    /// client can detect: changes that were submitted until now are not promised.
    pub(crate) fn host_crashed(&mut self) {
        self.lost();
        self.forgiven = self.loss;
        self.reopened();
    }

    /// Begins a resize: requests beyond the old or the new end may succeed or fail.
    pub(crate) fn begin_resize(&mut self) {
        self.resizes += 1;
    }

    /// Ends a resize, with this size; the new or removed part is zeroes.
    pub(crate) fn resized(&mut self, to: usize) {
        self.resize(to, true);
    }

    /// As [`Oracle::resized`], if a power cut may yet undo it: its header is not stable. What it
    /// cut off is zeroes then, or as before.
    pub(crate) fn perhaps_resized(&mut self, to: usize) {
        self.resize(to, false);
    }

    fn resize(&mut self, to: usize, certain: bool) {
        self.resizes += 1;
        if to < self.size {
            let zeroes = self.begin(Change::Zeroes, to, self.size - to, certain);
            self.end(zeroes, certain);
        }
        self.sectors.resize(to.max(self.sectors.len()), Vec::new());
        self.size = to;
    }

    /// Notes that the store was grown to this size from outside. Returns the write in the new part,
    /// which no client sees before the volume has grown.
    pub(crate) fn grown_outside(&mut self, to: usize) -> Writing {
        let from = self.size;
        self.resized(to);
        let writing = self.begin(Change::Data, from, to - from, true);
        self.end(writing, true);
        writing
    }

    fn zeroed(&mut self, first: usize, count: usize) {
        let zeroes = self.begin(Change::Zeroes, first, count, true);
        self.end(zeroes, true);
    }

    /// Notes that the whole volume is zeroes now, while clients have requests in flight.
    pub(crate) fn cleared(&mut self) {
        self.zeroed(0, self.sectors.len());
    }

    /// Notes that all data is lost: it was in the memory of a process that ended.
    pub(crate) fn wiped(&mut self) {
        self.sectors.iter_mut().for_each(Vec::clear);
        self.unstable.clear();
    }

    /// Checks the data of a read that began at `begun`.
    ///
    /// # Errors
    /// The promise that the data breaks.
    pub(crate) fn check(&mut self, begun: u64, first: usize, data: &[u8]) -> Result<(), String> {
        let now = self.now();
        for (at, content) in data.chunks_exact(SECTOR).enumerate() {
            let place = first + at;
            let Some(sector) = self.sectors.get_mut(place) else { continue };
            self.checked += 1;
            let number = Oracle::whole(content, place);
            if sector.is_empty() && number == Some(0) {
                continue;
            }
            let fits = |entry: &&mut Entry| Some(entry.number) == number && entry.hidden > begun;
            // After a loss a cache and its store may differ, and either may be seen.
            let doubtful = |entry: &Entry| !entry.stable && entry.begun <= self.loss || entry.vague;
            let mut shown = sector.iter().filter(|entry| !entry.hole || entry.hidden > begun);
            let quiet = shown.all(|entry| entry.over() < begun && !doubtful(entry));
            if sector.iter_mut().find(fits).is_none() {
                return Err(self.complaint(place, number, content, begun));
            }
            // Nothing is in flight for the sector: later reads must also return this write.
            if let (true, Some(number)) = (quiet, number) {
                for entry in sector.iter_mut().filter(|entry| entry.number != number) {
                    entry.hidden = entry.hidden.min(now);
                }
            }
        }
        Ok(())
    }

    fn complaint(&self, place: usize, number: Option<u64>, content: &[u8], begun: u64) -> String {
        let what = match number {
            Some(number) => format!("holds write {number}"),
            None => {
                let words: Vec<u64> = content.chunks_exact(8).map(number_of).collect();
                let same = (1..WORDS).take_while(|word| {
                    words[*word]
                        == words[0].wrapping_mul(ODD) ^ ((place as u64) << 20) ^ *word as u64
                });
                let whole = same.count() + 1;
                format!("is torn: begins with {:#x}, and {whole} words match that", words[0])
            }
        };
        let may: Vec<String> = self.sectors[place]
            .iter()
            .map(|entry| {
                let hidden = if entry.hidden == NEVER {
                    String::new()
                } else {
                    format!(" hidden {}", entry.hidden)
                };
                let stable = if entry.stable { " stable" } else { "" };
                format!(
                    "write {} begun {} {:?}{hidden}{stable}",
                    entry.number, entry.begun, entry.end
                )
            })
            .collect();
        format!(
            "volume {}: sector {place} {what}; the read began at {begun}; allowed: {}",
            self.name,
            if may.is_empty() { "zeroes".to_owned() } else { may.join(", ") }
        )
    }
}
