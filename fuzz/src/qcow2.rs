//! Fuzzing of qcow2 images that are mostly valid.
//!
//! An image is made out of choices: a header, an L1 table, L2 tables, and wrong numbers in any of them. The file has no
//! data beyond that, since the mapping reads none. Each answer of the mapping is judged by a decoder of its own, written
//! from the specification, which looks at one byte of the disk at a time.

use ebb_store::qcow2_map::{LoadError, Lookup, Qcow2Map, Run, SLICE_BYTES, slice_entries};

use super::Finding;
use super::choices::Choices;

/// How often what happened.
#[derive(Debug, Default)]
pub struct Tally {
    /// Images that were opened.
    pub opened: u64,
    /// Images that were refused.
    pub refused: u64,
    /// Bytes of a disk that were found in the file.
    pub found: u64,
    /// Bytes that are zero.
    pub zero: u64,
    /// Bytes whose entry is wrong.
    pub wrong: u64,
}

/// Finds a run in a slice: the mapping's own, or a broken one.
pub type Find = fn(&Qcow2Map, &[u64; 64], u64, u64) -> Result<Run, ()>;

/// The one of the crate.
pub fn find(map: &Qcow2Map, entries: &[u64; 64], at: u64, most: u64) -> Result<Run, ()> {
    map.run(entries, at, most).map_err(drop)
}

/// Bytes of a disk that are looked for.
const QUERIES: usize = 8;

/// Judges; the text is made only when the judgement is against the mapping.
macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err(Finding(format!($($text)+)));
        }
    };
}

/// A file: its first bytes, and zeroes up to its size.
struct Image {
    bytes: Vec<u8>,
    size: u64,
    cluster_bits: u32,
    disk: u64,
}

impl Image {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.bytes.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    fn byte(&self, at: u64) -> u8 {
        usize::try_from(at).ok().and_then(|at| self.bytes.get(at)).copied().unwrap_or(0)
    }

    /// A big-endian number of the file; `None` if it is not all in it.
    fn number(&self, at: u64, bytes: u64) -> Option<u64> {
        if at.checked_add(bytes)? > self.size {
            return None;
        }
        Some((at..at + bytes).fold(0, |sum, at| sum << 8 | u64::from(self.byte(at))))
    }

    fn read(&self, at: u64, buffer: &mut [u8]) -> usize {
        let left = usize::try_from(self.size.saturating_sub(at)).unwrap_or(usize::MAX);
        let count = buffer.len().min(left);
        for (at, byte) in (at..).zip(&mut buffer[..count]) {
            *byte = self.byte(at);
        }
        count
    }

    /// The end of the last sector, which may be cut short.
    fn end_of_sectors(&self) -> u64 {
        self.size.next_multiple_of(512)
    }

    /// Where a byte of the disk is: an offset, zero, or an error.
    fn place(&self, at: u64) -> Result<Option<u64>, ()> {
        let (cluster, offset) = (1 << self.cluster_bits, 0x00ff_ffff_ffff_fe00);
        let entries = cluster / 8;
        let index = at / cluster;
        let l1 = self.number(40, 8).ok_or(())?;
        let table = self.number(l1 + index / entries * 8, 8).ok_or(())? & offset;
        if table == 0 {
            return Ok(None);
        }
        let entry = self.number(table + index % entries * 8, 8).ok_or(())?;
        let (compressed, zero) = (entry >> 62 & 1 == 1, entry & 1 == 1);
        match entry & offset {
            _ if compressed => Err(()),
            _ if zero && self.byte(7) == 2 => Err(()),
            _ if zero => Ok(None),
            0 => Ok(None),
            start if start % cluster != 0 => Err(()),
            start if start >= self.size => Err(()),
            // Zeroes behind the end of the file.
            start if start + at % cluster >= self.end_of_sectors() => Ok(None),
            start => Ok(Some(start + at % cluster)),
        }
    }
}

/// An entry of a table of an image with this many clusters.
fn entry(choices: &mut Choices<'_>, clusters: u64, cluster_bits: u32) -> u64 {
    let cluster = choices.number() % clusters.max(1);
    let copied = u64::from(choices.often()) << 63;
    match choices.below(256) {
        0 => choices.number(),
        1..4 => copied | ((cluster << cluster_bits) + 512 * u64::from(choices.byte())),
        4..8 => copied | (clusters + u64::from(choices.byte())) << cluster_bits,
        8 => 1 << choices.below(64),
        9 => 1 << 62 | cluster << cluster_bits,
        10..50 => 0,
        50..70 => 1,
        70..90 => copied | cluster << cluster_bits | 1,
        _ => copied | cluster << cluster_bits,
    }
}

/// An image of a header, an L1 table and up to three L2 tables.
fn image(choices: &mut Choices<'_>) -> Image {
    let cluster_bits: u32 = choices.pick(&[9, 9, 9, 10, 12]);
    let cluster = 1usize << cluster_bits;
    let entries = (cluster / 8) as u64;
    let clusters = 5 + choices.below(40) as u64;
    let tail = if choices.rarely() { choices.number() % cluster as u64 } else { 0 };
    let span = entries << cluster_bits;
    // Up to four tables; usually not a whole number of clusters.
    let disk = (choices.number() % (4 * span) / 512 * 512).max(512);
    let bytes = vec![0; cluster * 5];
    let size = (clusters << cluster_bits) + tail;
    let mut image = Image { bytes, size, cluster_bits, disk };
    let version: u8 = choices.pick(&[3, 3, 2]);
    image.put(0, b"QFI\xfb\0\0\0");
    image.put(7, &[version]);
    image.put(20, &cluster_bits.to_be_bytes());
    image.put(24, &disk.to_be_bytes());
    image.put(36, &(4 + u32::from(choices.byte())).to_be_bytes());
    image.put(40, &(cluster as u64).to_be_bytes());
    image.put(100, &104u32.to_be_bytes());
    for index in 0..4 {
        // The tables are at clusters 2 to 4, and may be shared.
        let table = choices.below(5) as u64;
        let offset = match choices.below(32) {
            0 => entry(choices, clusters, cluster_bits),
            _ if table < 2 => 0,
            _ => 1 << 63 | table << cluster_bits,
        };
        image.put(cluster + index * 8, &offset.to_be_bytes());
    }
    // Runs of entries: clusters one after the other, or the same one.
    let mut at = 2 * cluster;
    while at < 5 * cluster && !choices.is_exhausted() {
        let (mut entry, step) = (entry(choices, clusters, cluster_bits), choices.often());
        for _ in 0..=choices.below(12) {
            image.put(at, &entry.to_be_bytes());
            at += 8;
            entry = entry.wrapping_add(if step { cluster as u64 } else { 0 });
        }
    }
    if choices.below(4) == 0 {
        for _ in 0..=choices.below(3) {
            let field =
                choices.pick(&[0, 4, 7, 8, 20, 23, 24, 28, 35, 36, 40, 44, 72, 79, 100, 103]);
            let byte = choices.byte();
            image.put(field, &[byte]);
        }
    }
    if choices.rarely() {
        // Cut off.
        image.size = choices.number() % (6 * cluster as u64);
        let bytes = usize::try_from(image.size).unwrap_or(0).min(image.bytes.len());
        image.bytes.truncate(bytes);
    }
    image
}

/// Opens an image made of these choices, and finds bytes of its disk.
pub fn run(find: Find, data: &[u8]) -> Result<Tally, Finding> {
    // The first bytes choose what is looked for: the image uses up the others.
    let (queries, data) = data.split_at(data.len().min(QUERIES * 10));
    let mut image = image(&mut Choices::new(data));
    let mut choices = Choices::new(queries);
    let mut tally = Tally::default();
    let mut outside = None;
    let loaded = Qcow2Map::load(image.size, |at, buffer| {
        // Reading the rest of a sector at the end of the file finds less, and nothing begins behind it.
        if at > image.size {
            outside = Some(at);
        }
        Ok(image.read(at, buffer))
    });
    ensure!(outside.is_none(), "{outside:?} was read, and the file has {} bytes", image.size);
    let map = match loaded {
        Ok(map) => map,
        Err(LoadError::Io(error)) => return Err(Finding(format!("reading failed: {error}"))),
        Err(LoadError::Fault(_)) => {
            tally.refused += 1;
            return Ok(tally);
        }
    };
    tally.opened += 1;
    image.disk = image.number(24, 8).unwrap_or(0);
    image.cluster_bits = u32::try_from(image.number(20, 4).unwrap_or(0)).unwrap_or(0);
    ensure!(map.size() == image.disk && map.size() % 512 == 0, "a disk of {} bytes", map.size());
    ensure!(map.cluster_bytes() == 1 << image.cluster_bits, "clusters of {}", map.cluster_bytes());
    ensure!(image.number(8, 8) == Some(0), "an image with a backing file was opened");
    for _ in 0..QUERIES {
        let near = choices.often();
        let bound =
            if near { image.disk.min(4 << (2 * image.cluster_bits - 3)) } else { image.disk };
        let at = choices.number() % bound / 512 * 512;
        let most = (512 << choices.below(12)).min(image.disk - at);
        judge(find, &map, &image, at, most, &mut tally)?;
    }
    Ok(tally)
}

fn judge(
    find: Find,
    map: &Qcow2Map,
    image: &Image,
    at: u64,
    most: u64,
    tally: &mut Tally,
) -> Result<(), Finding> {
    let expected = image.place(at);
    let run = match map.find(at, most) {
        Lookup::Run(run) => run,
        Lookup::Slice(slice) => {
            let end = slice.offset + SLICE_BYTES as u64;
            ensure!(slice.offset % 512 == 0 && end <= image.size, "{slice:?} of {}", image.size);
            let mut bytes = [0; SLICE_BYTES];
            ensure!(
                image.read(slice.offset, &mut bytes) == SLICE_BYTES,
                "a slice outside the file"
            );
            let Some(entries) = slice_entries(&bytes) else {
                return Err(Finding("a slice without entries".to_owned()));
            };
            match find(map, &entries, at, most) {
                Ok(run) => run,
                Err(()) => {
                    tally.wrong += 1;
                    // The last byte of the sector may be the one behind the end of the file.
                    let sector = expected.is_err() || image.place(at + most.min(512) - 1).is_err();
                    let cluster = (at | ((1 << image.cluster_bits) - 1)).min(at + most - 1);
                    let wrong = sector || image.place(cluster).is_err();
                    ensure!(wrong, "the byte at {at} is at {expected:?}, and was not found");
                    return Ok(());
                }
            }
        }
    };
    let length = run.length;
    ensure!(length > 0 && length <= most, "{run:?} of {most} bytes");
    if let Some(start) = run.place {
        let end = image.end_of_sectors();
        ensure!(start + length <= end, "{run:?} is outside of {end} bytes");
    }
    // Its first and last byte, and those at the ends of its clusters.
    let cluster = 1 << image.cluster_bits;
    let steps = (at..at + length).step_by(cluster.min(1 << 16));
    for byte in steps.take(600).chain([at + length - 1]) {
        let expected = image.place(byte);
        let found = Ok(run.place.map(|start| start + (byte - at)));
        ensure!(expected == found, "the byte at {byte} is at {expected:?}, found at {found:?}");
    }
    match run.place {
        Some(_) => tally.found += 1,
        None => tally.zero += 1,
    }
    Ok(())
}
