//! The binary header: 4 KiB before each copy of the metadata, with their size, number and checksum.

use openssl::hash::Hasher;

use crate::kdf::Hash;

/// Bytes of the binary header.
pub(crate) const BINARY_BYTES: usize = 4096;
/// The sizes of binary header and metadata, which are also where the second copy may be.
pub(crate) const SIZES: [u64; 9] =
    [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20];

const PRIMARY: &[u8; 6] = b"LUKS\xba\xbe";
const SECONDARY: &[u8; 6] = b"SKUL\xba\xbe";
const SALT: std::ops::Range<usize> = 104..168;
const CHECKSUM: std::ops::Range<usize> = 448..512;

/// Which of the two copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copy {
    Primary,
    Secondary,
}

/// What a store begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Magic {
    /// LUKS1.
    Luks1,
    /// LUKS2.
    Luks2,
    /// Something else.
    Other,
}

impl Magic {
    /// By the first bytes.
    pub fn of(start: &[u8]) -> Magic {
        match (start.strip_prefix(PRIMARY), start.get(6..8)) {
            (Some(_), Some([0, 1])) => Magic::Luks1,
            (Some(_), Some([0, 2])) => Magic::Luks2,
            _ => Magic::Other,
        }
    }
}

/// The fields of a binary header that matter, and those that are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BinaryHeader {
    /// Bytes of binary header and metadata.
    pub(crate) size: u64,
    /// Grows with each change.
    pub(crate) sequence: u64,
    /// All 4 KiB, as they were.
    bytes: Box<[u8]>,
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A field of text: up to its zero.
fn text(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

impl BinaryHeader {
    /// Reads a binary header that is found at `offset`. Its checksum is checked with the metadata.
    pub(crate) fn parse(
        bytes: &[u8],
        copy: Copy,
        offset: u64,
    ) -> Result<BinaryHeader, &'static str> {
        let bytes = bytes.get(..BINARY_BYTES).ok_or("cut off")?;
        let magic = if copy == Copy::Primary { PRIMARY } else { SECONDARY };
        if !bytes.starts_with(magic) {
            return Err("no magic number");
        }
        if bytes[6..8] != [0, 2] {
            return Err("another version");
        }
        let (Some(size), Some(sequence), Some(at)) =
            (number(bytes, 8), number(bytes, 16), number(bytes, 256))
        else {
            return Err("cut off");
        };
        if !SIZES.contains(&size) {
            return Err("an impossible size");
        }
        let expected = if copy == Copy::Primary { 0 } else { size };
        if at != offset || at != expected {
            return Err("in a wrong place");
        }
        Ok(BinaryHeader { size, sequence, bytes: bytes.into() })
    }

    /// A new one.
    pub(crate) fn new(size: u64, uuid: &str, salt: &[u8; 64]) -> BinaryHeader {
        let mut bytes = vec![0; BINARY_BYTES];
        bytes[6..8].copy_from_slice(&[0, 2]);
        bytes[72..78].copy_from_slice(b"sha256");
        bytes[SALT].copy_from_slice(salt);
        bytes[168..168 + uuid.len().min(39)]
            .copy_from_slice(&uuid.as_bytes()[..uuid.len().min(39)]);
        BinaryHeader { size, sequence: 0, bytes: bytes.into() }
    }

    pub(crate) fn uuid(&self) -> String {
        String::from_utf8_lossy(text(&self.bytes[168..208])).into_owned()
    }

    fn hash(&self) -> Option<Hash> {
        Hash::of_name(std::str::from_utf8(text(&self.bytes[72..104])).ok()?)
    }

    /// The checksum of a binary header and its metadata.
    fn checksum(&self, binary: &[u8], metadata: &[u8]) -> Option<Vec<u8>> {
        let mut hasher = Hasher::new(self.hash()?.digest()).ok()?;
        hasher.update(&binary[..CHECKSUM.start]).ok()?;
        hasher.update(&[0; 64]).ok()?;
        hasher.update(&binary[CHECKSUM.end..]).ok()?;
        hasher.update(metadata).ok()?;
        hasher.finish().ok().map(|digest| digest.to_vec())
    }

    /// Whether the checksum is that of these metadata.
    pub(crate) fn verify(&self, metadata: &[u8]) -> Result<(), &'static str> {
        if self.hash().is_none() {
            return Err("an unknown checksum");
        }
        let sum = self.checksum(&self.bytes, metadata).unwrap_or_default();
        match !sum.is_empty() && self.bytes[CHECKSUM].starts_with(&sum) {
            true => Ok(()),
            false => Err("a wrong checksum"),
        }
    }

    /// The bytes of a copy with these metadata, which fill their area; the two copies get different salts.
    pub(crate) fn seal(&self, copy: Copy, metadata: &[u8], salt: &[u8; 64]) -> Option<Vec<u8>> {
        let mut bytes = self.bytes.to_vec();
        let (magic, offset) = match copy {
            Copy::Primary => (PRIMARY, 0),
            Copy::Secondary => (SECONDARY, self.size),
        };
        bytes[..6].copy_from_slice(magic);
        bytes[8..16].copy_from_slice(&self.size.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_be_bytes());
        bytes[SALT].copy_from_slice(salt);
        bytes[256..264].copy_from_slice(&offset.to_be_bytes());
        bytes[CHECKSUM].fill(0);
        let sum = self.checksum(&bytes, metadata)?;
        bytes[CHECKSUM.start..CHECKSUM.start + sum.len()].copy_from_slice(&sum);
        bytes.extend_from_slice(metadata);
        Some(bytes)
    }
}
