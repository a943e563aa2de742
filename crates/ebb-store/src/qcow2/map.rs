//! The mapping of a qcow2 image, without I/O: its header and tables, and where a byte of the disk is in the file.
//!
//! The L1 table is in memory. Of the L2 tables the caller passes slices of [`SLICE_ENTRIES`] entries.
//!
//! # Invariants
//! - Whatever the image holds: no panic, no unchecked sum, no loop longer than a slice or the L1 table, and no more memory
//!   than [`L1_BYTES`]. An image is data of strangers.
//! - Every offset returned, with its length, is within the file, whose last sector may be cut
//!   short. A cluster that begins within the file has zeroes behind the file's end, as in QEMU.
//!
//! Source: QEMU's specification, qcow2.txt among its interop documents. What the specification calls reserved bits in table entries is ignored, as QEMU
//! does.

use std::io;

use super::fault::Qcow2Fault;

/// Entries of a slice: the smallest L2 table, of a cluster of 512 bytes, has as many.
pub const SLICE_ENTRIES: usize = 64;
/// Bytes of a slice in the file.
pub const SLICE_BYTES: usize = SLICE_ENTRIES * 8;
/// The largest disk: the most that the daemon's tests cover, far above what is in use.
pub const SIZE_MAX: u64 = 64 << 40;
/// The largest L1 table, as in QEMU.
pub const L1_BYTES: u64 = 32 << 20;

const MAGIC: u32 = u32::from_be_bytes(*b"QFI\xfb");
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
/// Which compression the compressed clusters have; there may be none.
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// The offset in an entry of both tables.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1 << 0;

/// Bytes of the header of version 2 and the least of version 3.
pub(super) const HEADER_V2: usize = 72;
const HEADER_V3: u32 = 104;

/// A run of bytes of the disk that are together in the file, or all zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they are in the file; `None`: they are zero.
    pub place: Option<u64>,
    /// How many; never 0 unless none were asked for.
    pub length: u64,
}

/// A part of an L2 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Its number in the order of the disk.
    pub number: u64,
    /// Its offset in the file, a multiple of [`SLICE_BYTES`].
    pub offset: u64,
}

/// How to find a byte of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// It is in this run.
    Run(Run),
    /// [`Qcow2Map::run`] finds it with this slice.
    Slice(Slice),
}

/// Why a map could not be loaded.
#[derive(Debug)]
pub enum LoadError {
    /// The file could not be read.
    Io(io::Error),
    /// What is in it.
    Fault(Qcow2Fault),
}

impl From<Qcow2Fault> for LoadError {
    fn from(fault: Qcow2Fault) -> LoadError {
        LoadError::Fault(fault)
    }
}

/// What the header says, as far as reading needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    version: u32,
    cluster_bits: u32,
    size: u64,
    l1_offset: u64,
    /// Entries that the size needs.
    l1_entries: u64,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Qcow2Fault> {
    let field = bytes.get(at..).and_then(|rest| rest.first_chunk::<N>());
    field.copied().ok_or(Qcow2Fault::HeaderLength)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Result<u32, Qcow2Fault> {
    number(bytes, at).map(u32::from_be_bytes)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Result<u64, Qcow2Fault> {
    number(bytes, at).map(u64::from_be_bytes)
}

impl Header {
    /// `bytes` are the first of the file.
    fn parse(bytes: &[u8], file_size: u64) -> Result<Header, Qcow2Fault> {
        if u32_at(bytes, 0) != Ok(MAGIC) {
            return Err(Qcow2Fault::Magic);
        }
        let version = u32_at(bytes, 4)?;
        let features = match version {
            2 => 0,
            3 => u64_at(bytes, 72)?,
            other => return Err(Qcow2Fault::Version(other)),
        };
        if bytes.len() < HEADER_V2 {
            return Err(Qcow2Fault::HeaderLength);
        }
        let cluster_bits = u32_at(bytes, 20)?;
        if !(9..=21).contains(&cluster_bits) {
            return Err(Qcow2Fault::ClusterBits(cluster_bits));
        }
        if version == 3 {
            let length = u32_at(bytes, 100)?;
            if length < HEADER_V3 || !length.is_multiple_of(8) || length > 1 << cluster_bits {
                return Err(Qcow2Fault::HeaderLength);
            }
        }
        check_features(features)?;
        if u64_at(bytes, 8)? != 0 {
            return Err(Qcow2Fault::BackingFile);
        }
        if u32_at(bytes, 32)? != 0 {
            return Err(Qcow2Fault::Encrypted);
        }
        let size = u64_at(bytes, 24)?;
        if size < 512 || !size.is_multiple_of(512) {
            return Err(Qcow2Fault::Size(size));
        }
        // An L2 table has as many entries as fit into a cluster.
        let table_bits = 2 * cluster_bits - 3;
        let most = SIZE_MAX.min((L1_BYTES / 8) << table_bits);
        if size > most {
            return Err(Qcow2Fault::TooLarge { size, most });
        }
        let (l1_offset, l1_entries) = (u64_at(bytes, 40)?, size.div_ceil(1 << table_bits));
        let end = l1_offset.checked_add(l1_entries * 8);
        let misplaced = l1_offset == 0 || !l1_offset.is_multiple_of(1 << cluster_bits);
        let short = u64::from(u32_at(bytes, 36)?) < l1_entries;
        if misplaced || short || end.is_none_or(|end| end > file_size) {
            return Err(Qcow2Fault::L1Table);
        }
        Ok(Header { version, cluster_bits, size, l1_offset, l1_entries })
    }
}

fn check_features(features: u64) -> Result<(), Qcow2Fault> {
    let known = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2;
    let has = |bit| features & bit != 0;
    match () {
        () if features & !known != 0 => Err(Qcow2Fault::Features(features & !known)),
        () if has(CORRUPT) => Err(Qcow2Fault::Corrupt),
        () if has(EXTERNAL_DATA) => Err(Qcow2Fault::ExternalData),
        () if has(EXTENDED_L2) => Err(Qcow2Fault::ExtendedL2),
        () if has(DIRTY) => Err(Qcow2Fault::Dirty),
        () => Ok(()),
    }
}

/// Bytes of the file that are read at once while an image is opened, with an alignment that direct I/O accepts.
#[repr(align(4096))]
pub(super) struct Piece(pub(super) [u8; PIECE_BYTES]);

pub(super) const PIECE_BYTES: usize = 16 << 10;
pub(super) const PIECE: u64 = PIECE_BYTES as u64;

/// Reads at most a piece, and passes what there was of it to `see`.
fn read_piece(
    read: &mut impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
    piece: &mut Piece,
    at: u64,
    bytes: u64,
    see: &mut dyn FnMut(&[u8]),
) -> Result<(), LoadError> {
    let bytes = usize::try_from(bytes).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
    let whole = piece.0.get_mut(..bytes.next_multiple_of(512)).unwrap_or_default();
    let count = read(at, whole).map_err(LoadError::Io)?;
    see(whole.get(..count.min(bytes)).unwrap_or_default());
    Ok(())
}

/// Of how many L2 tables, and how much of each, is searched for compressed clusters when an image is opened: all of most
/// images of up to 8 GiB.
const SEARCHED_TABLES: usize = 16;
const SEARCHED_BYTES: u64 = 64 << 10;

/// The mapping of an image.
#[derive(Debug)]
pub struct Qcow2Map {
    header: Header,
    file_size: u64,
    /// Offsets of the L2 tables, each at a cluster within the file; 0: the bytes of the table are zero.
    l1: Box<[u64]>,
}

impl Qcow2Map {
    /// Loads the header and the L1 table of a file of `file_size` bytes, and looks for compressed clusters in some of its
    /// L2 tables, at most 1 MiB.
    ///
    /// `read` fills a buffer from an offset, both multiples of 512, and returns how many bytes there were up to the end of
    /// the file.
    ///
    /// # Errors
    /// That of `read`, or what is wrong with the image.
    pub fn load(
        file_size: u64,
        mut read: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
    ) -> Result<Qcow2Map, LoadError> {
        let map = Qcow2Map::load_unchecked(file_size, &mut read)?;
        map.check_tables()?;
        let mut piece = Box::new(Piece([0; PIECE_BYTES]));
        map.find_compressed(&mut |at, bytes, see| {
            read_piece(&mut read, &mut piece, at, bytes, see)
        })?;
        Ok(map)
    }

    /// As [`Qcow2Map::load`], whatever the entries of both tables are: for [`Qcow2Map::check`] only.
    pub(super) fn load_unchecked(
        file_size: u64,
        mut read: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
    ) -> Result<Qcow2Map, LoadError> {
        let mut piece = Box::new(Piece([0; PIECE_BYTES]));
        let mut header = Err(Qcow2Fault::HeaderLength);
        let see = &mut |bytes: &[u8]| header = Header::parse(bytes, file_size);
        read_piece(&mut read, &mut piece, 0, 512, see)?;
        let header = header?;
        let mut l1 = Vec::new();
        let (bytes, mut done) = (header.l1_entries * 8, 0);
        while done < bytes {
            let length = PIECE.min(bytes - done);
            let mut seen = 0;
            read_piece(&mut read, &mut piece, header.l1_offset + done, length, &mut |found| {
                seen = found.len() as u64;
                let (entries, _) = found.as_chunks::<8>();
                l1.extend(entries.iter().map(|entry| u64::from_be_bytes(*entry) & OFFSET));
            })?;
            if seen < length {
                return Err(Qcow2Fault::L1Table.into());
            }
            done += length;
        }
        Ok(Qcow2Map { header, file_size, l1: l1.into() })
    }

    /// Bytes of the disk: a multiple of 512, at least 512.
    pub fn size(&self) -> u64 {
        self.header.size
    }

    /// Bytes of a cluster: a power of two, 512 to 2 MiB.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.header.cluster_bits
    }

    /// Bytes of the disk that one L2 table maps, as a power of two.
    fn table_bits(&self) -> u32 {
        2 * self.header.cluster_bits - 3
    }

    /// The L2 tables: the first byte of the disk that each is for, and its offset in the file.
    pub(super) fn tables(&self) -> impl Iterator<Item = (u64, u64)> {
        let used = (0u64..).zip(&self.l1).filter(|(_, offset)| **offset != 0);
        used.map(|(number, offset)| (number << self.table_bits(), *offset))
    }

    /// Whether an L2 table may be there: at a cluster, and within the file.
    pub(super) fn is_table(&self, offset: u64) -> bool {
        let cluster = self.cluster_bytes();
        let whole = offset.checked_add(cluster).is_some_and(|end| end <= self.file_size);
        offset.is_multiple_of(cluster) && whole
    }

    /// Whether a cluster of the file is the header's or one of the L1 table.
    pub(super) fn is_of_header(&self, offset: u64) -> bool {
        let Header { l1_offset, l1_entries, .. } = self.header;
        offset == 0 || (l1_offset..l1_offset + l1_entries * 8).contains(&offset)
    }

    fn check_tables(&self) -> Result<(), Qcow2Fault> {
        match self.tables().find(|(_, offset)| !self.is_table(*offset)) {
            Some((at, _)) => Err(Qcow2Fault::L2Table { at }),
            None => Ok(()),
        }
    }

    /// Fails if one of the tables that are searched has a compressed cluster.
    fn find_compressed(
        &self,
        read_piece: &mut impl FnMut(u64, u64, &mut dyn FnMut(&[u8])) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        let used = || (0u64..).zip(&self.l1).filter(|(_, offset)| **offset != 0);
        let step = used().count().div_ceil(SEARCHED_TABLES).max(1);
        let mut found = None;
        for (number, offset) in used().step_by(step) {
            let bytes = self.cluster_bytes().min(SEARCHED_BYTES);
            let mut done = 0;
            while done < bytes && found.is_none() {
                let start =
                    (number << self.table_bits()) + ((done / 8) << self.header.cluster_bits);
                read_piece(offset + done, PIECE.min(bytes - done), &mut |bytes| {
                    let (entries, _) = bytes.as_chunks::<8>();
                    let mut entries = entries.iter().map(|entry| u64::from_be_bytes(*entry));
                    let index = entries.position(|entry| entry & COMPRESSED != 0);
                    found = index.map(|index| start + ((index as u64) << self.header.cluster_bits));
                })?;
                done += PIECE;
            }
        }
        match found.filter(|at| *at < self.header.size) {
            Some(at) => Err(Qcow2Fault::Compressed { at }.into()),
            None => Ok(()),
        }
    }

    /// How to find the byte at `at` and up to `most` bytes from there; both are within the disk.
    #[inline]
    pub fn find(&self, at: u64, most: u64) -> Lookup {
        let table_bits = self.table_bits();
        let table = usize::try_from(at >> table_bits).ok().and_then(|index| self.l1.get(index));
        let in_table = at & ((1 << table_bits) - 1);
        match table {
            Some(offset) if *offset != 0 => {
                let slice_bits = self.header.cluster_bits + SLICE_ENTRIES.ilog2();
                let in_table = (in_table >> slice_bits) * SLICE_BYTES as u64;
                Lookup::Slice(Slice { number: at >> slice_bits, offset: offset + in_table })
            }
            _ => {
                let length = most.min((1 << table_bits) - in_table);
                Lookup::Run(Run { place: None, length })
            }
        }
    }

    /// The run that the byte at `at` begins, of at most `most` bytes; `entries` are those of the slice that [`Self::find`]
    /// named for it.
    ///
    /// # Errors
    /// What is wrong with the entry of this byte. A wrong entry after it ends the run.
    pub fn run(
        &self,
        entries: &[u64; SLICE_ENTRIES],
        at: u64,
        most: u64,
    ) -> Result<Run, Qcow2Fault> {
        let (cluster, bits) = (self.cluster_bytes(), self.header.cluster_bits);
        let skip = at & (cluster - 1);
        let first = (at >> bits) % SLICE_ENTRIES as u64;
        let mut rest = entries.iter().skip(usize::try_from(first).unwrap_or(0));
        let entry = rest.next().copied().unwrap_or_default();
        let length = most.min(cluster - skip);
        let mut run = Run { place: self.place(entry, skip, at)?, length };
        for entry in rest {
            if run.length >= most {
                break;
            }
            let length = cluster.min(most - run.length);
            let continued = run.place.map(|place| place.saturating_add(run.length));
            match self.place(*entry, 0, at) {
                Ok(place) if place == continued => run.length += length,
                _ => break,
            }
        }
        if let Some(place) = run.place {
            run.length = run.length.min(self.end_of_sectors() - place);
        }
        Ok(run)
    }

    /// The end of the last sector of the file, of which the file may have a part.
    fn end_of_sectors(&self) -> u64 {
        self.file_size.next_multiple_of(512)
    }

    /// Where the bytes of a cluster are, from `skip` on, those behind the end of the file included;
    /// `at` is for messages.
    #[inline]
    pub(super) fn place(&self, entry: u64, skip: u64, at: u64) -> Result<Option<u64>, Qcow2Fault> {
        if entry & COMPRESSED != 0 {
            return Err(Qcow2Fault::Compressed { at });
        }
        if entry & ZERO != 0 {
            let known = self.header.version >= 3;
            return if known { Ok(None) } else { Err(Qcow2Fault::ZeroFlag { at }) };
        }
        let offset = entry & OFFSET;
        if offset == 0 {
            return Ok(None);
        }
        if !offset.is_multiple_of(self.cluster_bytes()) {
            return Err(Qcow2Fault::Misplaced { at });
        }
        if offset >= self.file_size {
            return Err(Qcow2Fault::BeyondEnd { at });
        }
        // Both are less than 2^57.
        let start = offset + skip;
        Ok(Some(start).filter(|start| *start < self.end_of_sectors()))
    }
}

/// The entries of a slice, from its bytes in the file; `None` if these are too few.
pub fn slice_entries(bytes: &[u8]) -> Option<[u64; SLICE_ENTRIES]> {
    let (entries, _) = bytes.get(..SLICE_BYTES)?.as_chunks::<8>();
    let entries: &[[u8; 8]; SLICE_ENTRIES] = entries.try_into().ok()?;
    Some(entries.map(u64::from_be_bytes))
}
