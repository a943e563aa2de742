//! Verifies the tables of an image, for programs that look at one which is not served, and says what its header says.
//!
//! Reference counts are not looked at: reading needs none.
//!
//! # Invariants
//! - Each L2 table is read once, however many entries lead to it, and what is a hole of the file is not, so that the work is
//!   proportional to the bytes that the file takes, and to the entries of the L1 table.
//! - Memory: two numbers for each used entry of the L1 table, 64 MiB at most.

use std::io;

use super::fault::Qcow2Fault;
use super::map::{HEADER_V2, PIECE, PIECE_BYTES, Piece, Qcow2Map, u32_at, u64_at};

/// The longest name of a backing file, as in QEMU.
const NAME_MOST: usize = 1023;

/// What the header of an image says, also of one that is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Info {
    /// The version of the format.
    pub version: u32,
    /// Bytes of a cluster.
    pub cluster_bytes: u64,
    /// Bytes of the disk in it.
    pub size: u64,
    /// The name of the backing file, as the image has it; it is never opened.
    pub backing_file: Option<String>,
}

impl Qcow2Info {
    /// Parses the header of a file; `read` is as that of [`Qcow2Map::load`], and `Err` has its error.
    ///
    /// # Errors
    /// That of `read`, or what is wrong with the header.
    pub fn load(
        mut read: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Result<Qcow2Info, Qcow2Fault>> {
        let mut piece = Box::new(Piece([0; PIECE_BYTES]));
        let count = read(0, &mut piece.0)?;
        let bytes = piece.0.get(..count).unwrap_or_default();
        let (info, name) = match Qcow2Info::parse(bytes) {
            Ok(parsed) => parsed,
            Err(fault) => return Ok(Err(fault)),
        };
        let Some((offset, length)) = name else { return Ok(Ok(info)) };
        // Through the page cache and direct I/O alike: whole sectors.
        let start = offset / 512 * 512;
        let count = read(start, &mut piece.0)?;
        let skip = usize::try_from(offset - start).unwrap_or(0);
        let bytes = piece.0.get(..count).unwrap_or_default();
        let name = bytes.get(skip..).unwrap_or_default();
        let name = name.get(..length).unwrap_or(name);
        let name = String::from_utf8_lossy(name);
        let name = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        Ok(Ok(Qcow2Info { backing_file: Some(name), ..info }))
    }

    /// The header, and where the name of a backing file is.
    fn parse(bytes: &[u8]) -> Result<(Qcow2Info, Option<(u64, usize)>), Qcow2Fault> {
        if bytes.get(..4) != Some(b"QFI\xfb") {
            return Err(Qcow2Fault::Magic);
        }
        let version = u32_at(bytes, 4)?;
        if !(2..=3).contains(&version) {
            return Err(Qcow2Fault::Version(version));
        }
        if bytes.len() < HEADER_V2 {
            return Err(Qcow2Fault::HeaderLength);
        }
        let cluster_bits = u32_at(bytes, 20)?;
        if !(9..=21).contains(&cluster_bits) {
            return Err(Qcow2Fault::ClusterBits(cluster_bits));
        }
        let (offset, length) = (u64_at(bytes, 8)?, u32_at(bytes, 16)?);
        let length = usize::try_from(length).unwrap_or(NAME_MOST).min(NAME_MOST);
        let name = (offset != 0).then_some((offset.min(u64::MAX >> 1), length));
        let (cluster_bytes, size) = (1 << cluster_bits, u64_at(bytes, 24)?);
        Ok((Qcow2Info { version, cluster_bytes, size, backing_file: None }, name))
    }
}

/// What [`Qcow2Map::check`] has looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckedTables {
    /// L2 tables.
    pub tables: u64,
    /// Clusters of data.
    pub clusters: u64,
}

impl Qcow2Map {
    /// Verifies both levels of tables: each entry leads to clusters that begin within the file that
    /// are not those of a table, and no two entries lead to one table. Passes each fault to
    /// `found`. `read` is as that of [`Qcow2Map::load`]; `hole` returns how many bytes from an
    /// offset on are a hole of the file.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn check(
        &self,
        mut read: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
        mut hole: impl FnMut(u64) -> u64,
        found: &mut dyn FnMut(Qcow2Fault),
    ) -> io::Result<CheckedTables> {
        let mut tables = Vec::new();
        for (at, offset) in self.tables() {
            match self.is_table(offset) {
                true => tables.push((offset, at)),
                false => found(Qcow2Fault::L2Table { at }),
            }
        }
        tables.sort_unstable();
        for pair in tables.windows(2) {
            if let [(one, _), (other, at)] = pair
                && one == other
            {
                found(Qcow2Fault::SharedTable { at: *at });
            }
        }
        tables.dedup_by_key(|(offset, _)| *offset);
        let mut piece = Box::new(Piece([0; PIECE_BYTES]));
        let mut sum = CheckedTables { tables: tables.len() as u64, clusters: 0 };
        let cluster = self.cluster_bytes();
        for (offset, start) in &tables {
            let mut done = 0;
            while done < cluster {
                // Whole entries, which lead nowhere.
                let empty = hole(offset + done).min(cluster - done) / 8 * 8;
                if empty > 0 {
                    done += empty;
                    continue;
                }
                let bytes = PIECE.min(cluster - done);
                let length = usize::try_from(bytes).unwrap_or(PIECE_BYTES);
                let whole = piece.0.get_mut(..length).unwrap_or_default();
                let count = read(offset + done, whole)?;
                if count < length {
                    found(Qcow2Fault::L2Table { at: *start });
                    break;
                }
                let first = start + (done / 8) * cluster;
                sum.clusters += self.check_entries(whole, first, &tables, found);
                done += bytes;
            }
        }
        Ok(sum)
    }

    /// Verifies entries of an L2 table, the first one of which is for the bytes from `first` on. Returns how many have data.
    fn check_entries(
        &self,
        bytes: &[u8],
        first: u64,
        tables: &[(u64, u64)],
        found: &mut dyn FnMut(Qcow2Fault),
    ) -> u64 {
        let cluster = self.cluster_bytes();
        let mut clusters = 0;
        let (entries, _) = bytes.as_chunks::<8>();
        for (number, entry) in (0u64..).zip(entries) {
            let at = first + number * cluster;
            // A table may be for more than the disk.
            if at >= self.size() {
                break;
            }
            match self.place(u64::from_be_bytes(*entry), 0, at) {
                Ok(None) => {}
                Ok(Some(place)) => {
                    clusters += 1;
                    let is_table =
                        tables.binary_search_by_key(&place, |(offset, _)| *offset).is_ok();
                    if is_table || self.is_of_header(place) {
                        found(Qcow2Fault::Overlap { at });
                    }
                }
                Err(fault) => found(fault),
            }
        }
        clusters
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "this is a test")]

    use super::*;

    /// An image of version 3 with clusters of 512 bytes: header, L1 table, two L2 tables, and data from 2048 on.
    fn image() -> Vec<u8> {
        let mut file = vec![0u8; 8 << 10];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"QFI\xfb");
        put(4, &3u32.to_be_bytes());
        put(20, &9u32.to_be_bytes());
        put(24, &(40u64 << 10).to_be_bytes());
        put(36, &2u32.to_be_bytes());
        put(40, &512u64.to_be_bytes());
        put(100, &104u32.to_be_bytes());
        put(512, &1024u64.to_be_bytes());
        put(520, &1536u64.to_be_bytes());
        put(1024, &2048u64.to_be_bytes());
        put(1032, &2560u64.to_be_bytes());
        put(1536, &3072u64.to_be_bytes());
        file
    }

    fn reader(file: &[u8]) -> impl FnMut(u64, &mut [u8]) -> io::Result<usize> {
        move |at, buffer: &mut [u8]| {
            let rest = usize::try_from(at).ok().and_then(|at| file.get(at..)).unwrap_or_default();
            let count = rest.len().min(buffer.len());
            buffer[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        }
    }

    fn faults(file: &[u8]) -> (Vec<Qcow2Fault>, CheckedTables) {
        let size = file.len() as u64;
        let map = Qcow2Map::load_unchecked(size, reader(file)).unwrap();
        let mut list = Vec::new();
        let sum = map.check(reader(file), |_| 0, &mut |fault| list.push(fault)).unwrap();
        (list, sum)
    }

    #[test]
    fn each_wrong_entry_is_found_at_its_place() {
        let whole = CheckedTables { tables: 2, clusters: 3 };
        assert_eq!(faults(&image()), (vec![], whole));
        let table = 64 * 512;
        let wrong: [(usize, u64, Qcow2Fault); 8] = [
            (520, 1024, Qcow2Fault::SharedTable { at: table }),
            (520, 1 << 40, Qcow2Fault::L2Table { at: table }),
            (1032, 2560 + 512 * 40, Qcow2Fault::BeyondEnd { at: 512 }),
            (1032, 1536, Qcow2Fault::Overlap { at: 512 }),
            (1032, 512, Qcow2Fault::Overlap { at: 512 }),
            (1032, 1 << 62, Qcow2Fault::Compressed { at: 512 }),
            (1024 + 63 * 8, 1 << 30, Qcow2Fault::BeyondEnd { at: 63 * 512 }),
            (1536, 1024, Qcow2Fault::Overlap { at: table }),
        ];
        for (at, entry, expected) in wrong {
            let mut file = image();
            file[at..at + 8].copy_from_slice(&entry.to_be_bytes());
            assert_eq!(faults(&file).0, [expected]);
        }
        // Beyond the end of the disk, which is within the second table.
        let mut file = image();
        file[1536 + 16 * 8..1536 + 17 * 8].fill(0xff);
        assert_eq!(faults(&file), (vec![], whole));
        assert_eq!(faults(&image()[..2048]).0.len(), 3, "cut off");
    }

    #[test]
    fn the_work_does_not_grow_with_the_entries_that_lead_to_one_table() {
        let mut file = image();
        file.resize(40 << 10, 0);
        file[24..32].copy_from_slice(&(4096u64 * 64 * 512).to_be_bytes());
        file[36..40].copy_from_slice(&4096u32.to_be_bytes());
        file[40..48].copy_from_slice(&4096u64.to_be_bytes());
        for number in 0..4096 {
            file[4096 + number * 8..][..8].copy_from_slice(&1024u64.to_be_bytes());
        }
        let map = Qcow2Map::load_unchecked(file.len() as u64, reader(&file)).unwrap();
        let (mut reads, mut shared) = (0, 0);
        let mut read = reader(&file);
        let counted = |at, buffer: &mut [u8]| {
            reads += 1;
            read(at, buffer)
        };
        let sum = map.check(counted, |_| 0, &mut |fault| {
            assert!(matches!(fault, Qcow2Fault::SharedTable { .. }), "{fault:?}");
            shared += 1;
        });
        assert_eq!(sum.unwrap(), CheckedTables { tables: 1, clusters: 2 });
        assert_eq!((reads, shared), (1, 4095));
    }

    #[test]
    fn holes_are_not_read_and_what_is_behind_them_is() {
        let mut file = image();
        // A wrong entry at the end of the second table.
        file[24..32].copy_from_slice(&(64u64 << 10).to_be_bytes());
        file[2040..2048].copy_from_slice(&(1u64 << 30).to_be_bytes());
        let map = Qcow2Map::load_unchecked(file.len() as u64, reader(&file)).unwrap();
        let mut read = reader(&file);
        let mut places = Vec::new();
        let noted = |at, buffer: &mut [u8]| {
            places.push(at);
            read(at, buffer)
        };
        let hole = |at| if (1544..2040).contains(&at) { 2040 - at } else { 0 };
        let first = |at: u64| if at == 1024 { 1024 } else { hole(at) };
        let mut list = Vec::new();
        map.check(noted, first, &mut |fault| list.push(fault)).unwrap();
        assert_eq!(list, [Qcow2Fault::BeyondEnd { at: 64 * 512 + 63 * 512 }]);
        assert_eq!(places, [1536], "the first table is a hole");
    }

    #[test]
    fn the_header_is_told_whatever_it_holds() {
        let mut file = image();
        let info = Qcow2Info::load(reader(&file)).unwrap().unwrap();
        let expected =
            Qcow2Info { version: 3, cluster_bytes: 512, size: 40 << 10, backing_file: None };
        assert_eq!(info, expected);
        file[8..16].copy_from_slice(&600u64.to_be_bytes());
        file[16..20].copy_from_slice(&9u32.to_be_bytes());
        file[600..609].copy_from_slice(b"a\nb/c.raw");
        let info = Qcow2Info::load(reader(&file)).unwrap().unwrap();
        assert_eq!(info.backing_file.as_deref(), Some("a?b/c.raw"));
        // Names of any place and length.
        file[8..20].fill(0xff);
        let info = Qcow2Info::load(reader(&file)).unwrap().unwrap();
        assert_eq!(info.backing_file.as_deref(), Some(""));
        file[8..16].copy_from_slice(&600u64.to_be_bytes());
        let info = Qcow2Info::load(reader(&file)).unwrap().unwrap();
        assert_eq!(info.backing_file.map(|name| name.len()), Some(NAME_MOST));
        for (length, fault) in [(3, Qcow2Fault::Magic), (30, Qcow2Fault::HeaderLength)] {
            assert_eq!(Qcow2Info::load(reader(&file[..length])).unwrap(), Err(fault));
        }
    }
}
