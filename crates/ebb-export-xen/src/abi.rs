//! Encoding of the ring's requests and responses, in the three layouts that frontends use
//! (`xen/include/public/io/blkif.h`; the 32-bit and 64-bit x86 layouts as in Linux's
//! `drivers/block/xen-blkback/common.h`).
//!
//! Invariants: this code works on private copies, never on memory that a guest can change; the segment
//! count of a parsed request is returned as the guest sent it and has to be checked; every byte of a
//! response is initialised (XSA-216).

/// Bytes of the largest slot, which holds a request of the 64-bit layout.
pub const SLOT_BYTES: usize = 112;
/// 64-bit words in [`SLOT_BYTES`].
pub const SLOT_WORDS: usize = SLOT_BYTES / 8;
/// Most segments in a request that holds them itself (`BLKIF_MAX_SEGMENTS_PER_REQUEST`).
pub const MAX_DIRECT_SEGMENTS: usize = 11;
/// Segment descriptors in a page of an indirect request.
pub const SEGMENTS_PER_PAGE: usize = 512;
/// Pages of descriptors an indirect request can name.
pub const MAX_INDIRECT_PAGES: usize = 8;
/// Bytes of a segment descriptor.
pub const SEGMENT_BYTES: usize = 8;
/// Bytes of the ring's header, before the first slot.
pub const HEADER_BYTES: usize = 64;
/// Bytes of a granted page.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of the protocol's sector: the unit of all sector numbers and counts, whatever `sector-size` is.
pub const SECTOR_BYTES: u64 = 512;

/// The layout of a frontend's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    /// The layout of the host's architecture.
    Native,
    /// 64-bit x86, which 64-bit Arm shares.
    X86_64,
    /// 32-bit x86: 64-bit fields are aligned to 4 bytes only.
    X86_32,
}

/// A `protocol` node with an unknown value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the frontend requests the ring layout `{0}`; supported are x86_64-abi, x86_32-abi and arm-abi"
)]
pub struct UnknownProtocol(pub String);

impl Abi {
    /// The layout that the frontend's `protocol` node names. On x86 a missing node means 32-bit x86, as in
    /// Linux's backend, although `blkif.h` says the native layout.
    ///
    /// # Errors
    /// If the value is not a known layout.
    pub fn from_protocol(word: Option<&str>) -> Result<Abi, UnknownProtocol> {
        match word {
            None if cfg!(target_arch = "x86_64") => Ok(Abi::X86_32),
            None => Ok(Abi::Native),
            Some("x86_64-abi") => Ok(Abi::X86_64),
            Some("x86_32-abi") => Ok(Abi::X86_32),
            Some("arm-abi") => Ok(Abi::Native),
            Some(other) => Err(UnknownProtocol(other.chars().take(64).collect())),
        }
    }

    fn is_narrow(self) -> bool {
        match self {
            Abi::X86_32 => true,
            Abi::X86_64 => false,
            Abi::Native => cfg!(target_arch = "x86"),
        }
    }

    /// Bytes of a slot.
    pub fn slot_bytes(self) -> usize {
        if self.is_narrow() { 108 } else { SLOT_BYTES }
    }

    /// Bytes of a response.
    pub fn response_bytes(self) -> usize {
        if self.is_narrow() { 12 } else { 16 }
    }

    /// Slots of a ring of `pages` pages: a power of two, or 0 without pages.
    pub fn slots(self, pages: usize) -> u32 {
        let room = (pages * PAGE_BYTES).saturating_sub(HEADER_BYTES) / self.slot_bytes();
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        if room == 0 { 0 } else { 1 << room.ilog2() }
    }

    /// The offsets of a request's fields.
    fn offsets(self) -> FieldOffsets {
        if self.is_narrow() { NARROW } else { WIDE }
    }

    /// A view of the fields of a slot's private copy.
    #[inline]
    pub fn head(self, slot: &Slot) -> Head<'_> {
        let at = if self.is_narrow() { &NARROW } else { &WIDE };
        Head { slot, at }
    }

    /// How many words of a slot are in use, by its first word.
    #[inline]
    pub fn used_words(self, first: u64) -> usize {
        if self.is_narrow() {
            return SLOT_WORDS;
        }
        match byte(first, 0) {
            op::READ | op::WRITE | op::WRITE_BARRIER | op::FLUSH_DISKCACHE => {
                3 + usize::from(byte(first, 1)).min(MAX_DIRECT_SEGMENTS)
            }
            op::INDIRECT => 8,
            op::DISCARD => 4,
            _ => 2,
        }
    }
}

const NARROW: FieldOffsets =
    FieldOffsets { id: 4, sector: 12, discard_sectors: 20, segments: 20, grefs: 24 };
const WIDE: FieldOffsets =
    FieldOffsets { id: 8, sector: 16, discard_sectors: 24, segments: 24, grefs: 28 };

/// A request of which fields are decoded on demand: most requests are reads and writes of one page.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    slot: &'a Slot,
    at: &'static FieldOffsets,
}

impl Head<'_> {
    /// The operation.
    #[inline]
    pub fn code(&self) -> u8 {
        byte(self.slot[0], 0)
    }

    /// The guest's `id` for it.
    #[inline]
    pub fn id(&self) -> u64 {
        read_u64(self.slot, self.at.id)
    }

    /// The first sector.
    #[inline]
    pub fn sector(&self) -> u64 {
        read_u64(self.slot, self.at.sector)
    }

    /// Segments of a read or write. A guest may claim more than [`MAX_DIRECT_SEGMENTS`], which is invalid.
    #[inline]
    pub fn count(&self) -> u8 {
        byte(self.slot[0], 1)
    }

    /// The segment of this number, which must be below [`MAX_DIRECT_SEGMENTS`].
    #[inline]
    pub fn segment(&self, number: usize) -> Segment {
        Segment::from_word(read_u64(self.slot, self.at.segments + number * SEGMENT_BYTES))
    }

    /// For an indirect request: the inner operation, the number of segments, and the grant of the first
    /// page of segment descriptors.
    pub fn indirect(&self) -> (u8, u16, u32) {
        let count = u16::from_le_bytes([byte(self.slot[0], 2), byte(self.slot[0], 3)]);
        (byte(self.slot[0], 1), count, read_u32(self.slot, self.at.grefs))
    }
}

/// Byte offsets of the fields of a request.
#[derive(Debug)]
struct FieldOffsets {
    id: usize,
    sector: usize,
    /// The number of sectors of a discard.
    discard_sectors: usize,
    segments: usize,
    grefs: usize,
}

/// The part of a granted page that a request reads or writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// The grant reference of the page.
    pub gref: u32,
    /// The first sector of the page, 0 to 7.
    pub first: u8,
    /// The last sector of the page, `first` to 7.
    pub last: u8,
}

impl Segment {
    /// Decodes the 8 bytes of a descriptor.
    pub fn parse(bytes: &[u8; SEGMENT_BYTES]) -> Segment {
        let gref = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Segment { gref, first: bytes[4], last: bytes[5] }
    }

    /// Decodes the 8 bytes of a descriptor, given as a word.
    #[inline]
    pub fn from_word(word: u64) -> Segment {
        let gref = u32::try_from(word & 0xffff_ffff).unwrap_or_default();
        Segment { gref, first: byte(word, 4), last: byte(word, 5) }
    }

    /// Encodes the descriptor.
    pub fn encode(self) -> [u8; SEGMENT_BYTES] {
        let [a, b, c, d] = self.gref.to_le_bytes();
        [a, b, c, d, self.first, self.last, 0, 0]
    }

    /// True if it is within a page and not empty.
    pub fn is_valid(self) -> bool {
        self.last <= 7 && self.first <= self.last
    }

    /// Its length in bytes, if it is valid.
    pub fn bytes(self) -> usize {
        (usize::from(self.last.saturating_sub(self.first)) + 1) * 512
    }

    /// Its offset in the page, bytes.
    pub fn offset(self) -> usize {
        usize::from(self.first) * 512
    }
}

/// Operation codes.
pub mod op {
    /// Read.
    pub const READ: u8 = 0;
    /// Write.
    pub const WRITE: u8 = 1;
    /// Write, ordered behind all earlier requests and before all later ones.
    pub const WRITE_BARRIER: u8 = 2;
    /// Make all writes that completed before stable; may carry data.
    pub const FLUSH_DISKCACHE: u8 = 3;
    /// Discard a range.
    pub const DISCARD: u8 = 5;
    /// Read or write whose segment descriptors are in granted pages.
    pub const INDIRECT: u8 = 6;
}

/// The status of a response (`BLKIF_RSP_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success.
    Okay,
    /// Failure.
    Error,
    /// The operation is unknown or not offered.
    NotSupported,
}

impl Status {
    /// Its value in a response.
    pub fn code(self) -> i16 {
        match self {
            Status::Okay => 0,
            Status::Error => -1,
            Status::NotSupported => -2,
        }
    }
}

/// A decoded request, not yet checked against a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The guest's `id` for it, repeated in the response.
    pub id: u64,
    /// The operation code that the response carries: for an indirect request the inner operation.
    pub operation: u8,
    /// The operation's fields.
    pub body: Body,
}

/// The fields of a request, by operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// Read, write, barrier or flush with `count` segments. A guest may claim more than
    /// [`MAX_DIRECT_SEGMENTS`], which is invalid.
    Direct {
        /// The first sector.
        sector: u64,
        /// Segments in use.
        count: u8,
        /// The segments.
        segments: [Segment; MAX_DIRECT_SEGMENTS],
    },
    /// Read or write with `count` segment descriptors in granted pages.
    Indirect {
        /// The first sector.
        sector: u64,
        /// Segments in the pages.
        count: u16,
        /// The grants of the pages.
        grefs: [u32; MAX_INDIRECT_PAGES],
    },
    /// Discard.
    Discard {
        /// The first sector.
        sector: u64,
        /// How many sectors.
        sectors: u64,
        /// The data must not be recoverable.
        secure: bool,
    },
    /// An unknown operation code.
    Unknown,
}

/// The private copy of a slot in words, in the ring's byte order: decoding words is faster than
/// decoding bytes.
pub type Slot = [u64; SLOT_WORDS];

/// A slot's bytes as words.
pub fn to_words(bytes: &[u8; SLOT_BYTES]) -> Slot {
    let mut words = [0; SLOT_WORDS];
    for (word, raw) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*raw);
    }
    words
}

/// The byte `at` of a word.
fn byte(word: u64, at: usize) -> u8 {
    word.to_le_bytes()[at]
}

/// The 32-bit field at byte offset `at`, a multiple of 4.
#[inline]
fn read_u32(words: &Slot, at: usize) -> u32 {
    let word = words[at / 8];
    let word = if at.is_multiple_of(8) { word } else { word >> 32 };
    // Masked to 32 bits, so the conversion cannot fail.
    u32::try_from(word & 0xffff_ffff).unwrap_or_default()
}

/// The 64-bit field at byte offset `at`, a multiple of 4.
#[inline]
fn read_u64(words: &Slot, at: usize) -> u64 {
    if at.is_multiple_of(8) {
        return words[at / 8];
    }
    u64::from(read_u32(words, at)) | u64::from(read_u32(words, at + 4)) << 32
}

fn u64_at(bytes: &[u8; SLOT_BYTES], at: usize) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(raw)
}

impl Request {
    /// Decodes the private copy of a slot. Never fails: an unknown operation is [`Body::Unknown`].
    pub fn parse(abi: Abi, slot: &[u8; SLOT_BYTES]) -> Request {
        Request::from_words(abi, &to_words(slot))
    }

    /// As [`Request::parse`], from words.
    #[inline]
    pub fn from_words(abi: Abi, slot: &Slot) -> Request {
        match abi.is_narrow() {
            true => Request::with_offsets(&NARROW, slot),
            false => Request::with_offsets(&WIDE, slot),
        }
    }

    #[inline(always)]
    fn with_offsets(at: &FieldOffsets, slot: &Slot) -> Request {
        let (id, code) = (read_u64(slot, at.id), byte(slot[0], 0));
        let sector = read_u64(slot, at.sector);
        match code {
            op::READ | op::WRITE | op::WRITE_BARRIER | op::FLUSH_DISKCACHE => {
                let mut segments = [Segment::default(); MAX_DIRECT_SEGMENTS];
                let count = byte(slot[0], 1);
                for (number, segment) in segments.iter_mut().enumerate().take(count.into()) {
                    *segment = Segment::from_word(read_u64(slot, at.segments + number * 8));
                }
                Request { id, operation: code, body: Body::Direct { sector, count, segments } }
            }
            op::INDIRECT => {
                let mut grefs = [0; MAX_INDIRECT_PAGES];
                for (number, gref) in grefs.iter_mut().enumerate() {
                    *gref = read_u32(slot, at.grefs + 4 * number);
                }
                let count = u16::from_le_bytes([byte(slot[0], 2), byte(slot[0], 3)]);
                // The response carries the inner operation, which frontends check.
                let body = Body::Indirect { sector, count, grefs };
                Request { id, operation: byte(slot[0], 1), body }
            }
            op::DISCARD => {
                let secure = byte(slot[0], 1) & 1 != 0;
                let body =
                    Body::Discard { sector, sectors: read_u64(slot, at.discard_sectors), secure };
                Request { id, operation: code, body }
            }
            _ => Request { id, operation: code, body: Body::Unknown },
        }
    }

    /// Encodes it into a slot, as a frontend does.
    pub fn encode(&self, abi: Abi) -> [u8; SLOT_BYTES] {
        let mut slot = [0; SLOT_BYTES];
        let at = abi.offsets();
        slot[0] = self.operation;
        slot[at.id..at.id + 8].copy_from_slice(&self.id.to_le_bytes());
        let mut put = |sector: u64| {
            slot[at.sector..at.sector + 8].copy_from_slice(&sector.to_le_bytes());
        };
        match &self.body {
            Body::Direct { sector, count, segments } => {
                put(*sector);
                slot[1] = *count;
                for (number, segment) in segments.iter().enumerate() {
                    let from = at.segments + number * SEGMENT_BYTES;
                    slot[from..from + SEGMENT_BYTES].copy_from_slice(&segment.encode());
                }
            }
            Body::Indirect { sector, count, grefs } => {
                put(*sector);
                slot[0] = op::INDIRECT;
                slot[1] = self.operation;
                slot[2..4].copy_from_slice(&count.to_le_bytes());
                for (number, gref) in grefs.iter().enumerate() {
                    let from = at.grefs + 4 * number;
                    slot[from..from + 4].copy_from_slice(&gref.to_le_bytes());
                }
            }
            Body::Discard { sector, sectors, secure } => {
                put(*sector);
                slot[1] = u8::from(*secure);
                slot[at.discard_sectors..at.discard_sectors + 8]
                    .copy_from_slice(&sectors.to_le_bytes());
            }
            Body::Unknown => {}
        }
        slot
    }
}

/// A response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// The request's `id`.
    pub id: u64,
    /// The request's operation.
    pub operation: u8,
    /// See [`Status::code`].
    pub status: i16,
}

impl Response {
    /// Encodes it with its padding; the first [`Abi::response_bytes`] bytes are used.
    pub fn encode(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8] = self.operation;
        bytes[10..12].copy_from_slice(&self.status.to_le_bytes());
        bytes
    }

    /// Encodes it as words.
    #[inline]
    pub fn words(self) -> [u64; 2] {
        let status = u64::from(self.status.cast_unsigned());
        [self.id, u64::from(self.operation) | status << 16]
    }

    /// Decodes the private copy of a slot, as a frontend does.
    pub fn parse(slot: &[u8; SLOT_BYTES]) -> Response {
        let status = i16::from_le_bytes([slot[10], slot[11]]);
        Response { id: u64_at(slot, 0), operation: slot[8], status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_have_as_many_slots_as_in_linux() {
        for abi in [Abi::X86_64, Abi::X86_32] {
            let counts: Vec<_> = (0..6).map(|order| abi.slots(1 << order)).collect();
            assert_eq!(counts, [32, 64, 128, 256, 512, 1024]);
            assert_eq!(abi.slots(0), 0);
        }
    }

    #[test]
    fn a_missing_protocol_is_32_bit_x86_and_an_unknown_one_is_refused() {
        #[cfg(target_arch = "x86_64")]
        assert_eq!(Abi::from_protocol(None), Ok(Abi::X86_32));
        assert_eq!(Abi::from_protocol(Some("x86_64-abi")), Ok(Abi::X86_64));
        assert!(Abi::from_protocol(Some("x86_64-abi\n")).is_err());
        assert!(Abi::from_protocol(Some("")).is_err());
    }

    #[test]
    fn field_offsets_are_those_of_blkif_h() {
        let mut slot = [0; SLOT_BYTES];
        slot[0] = op::READ;
        slot[1] = 1;
        slot[8] = 7; // id
        slot[16] = 9; // sector
        slot[24] = 5; // gref
        slot[28] = 1;
        slot[29] = 3;
        let request = Request::parse(Abi::X86_64, &slot);
        assert_eq!((request.id, request.operation), (7, op::READ));
        let Body::Direct { sector, count, segments } = request.body else { panic!("{request:?}") };
        assert_eq!((sector, count), (9, 1));
        assert_eq!(segments[0], Segment { gref: 5, first: 1, last: 3 });
        let mut slot = [0; SLOT_BYTES];
        slot[..4].copy_from_slice(&[op::INDIRECT, op::WRITE, 0x2c, 1]);
        slot[4] = 7;
        slot[12] = 9;
        slot[24] = 5;
        slot[52] = 6;
        let request = Request::parse(Abi::X86_32, &slot);
        assert_eq!((request.id, request.operation), (7, op::WRITE), "the inner operation");
        let Body::Indirect { sector, count, grefs } = request.body else { panic!("{request:?}") };
        assert_eq!((sector, count, grefs[0], grefs[7]), (9, 300, 5, 6));
    }

    #[test]
    fn every_request_is_decoded_as_it_was_encoded() {
        let segments = std::array::from_fn(|n| Segment {
            gref: 100 + u32::try_from(n).unwrap(),
            first: 0,
            last: 7,
        });
        let bodies = [
            (op::WRITE, Body::Direct { sector: u64::MAX, count: 11, segments }),
            (op::READ, Body::Indirect { sector: 3, count: 256, grefs: [9; 8] }),
            (op::DISCARD, Body::Discard { sector: 1, sectors: u64::MAX, secure: true }),
            (77, Body::Unknown),
        ];
        for abi in [Abi::Native, Abi::X86_64, Abi::X86_32] {
            for (operation, body) in bodies {
                let request = Request { id: 0x0102_0304_0506_0708, operation, body };
                assert_eq!(Request::parse(abi, &request.encode(abi)), request);
            }
        }
    }

    #[test]
    fn a_response_has_no_stray_bytes() {
        let bytes = Response { id: u64::MAX, operation: 3, status: -2 }.encode();
        assert_eq!(&bytes[8..], [3, 0, 0xfe, 0xff, 0, 0, 0, 0]);
        let words = Response { id: u64::MAX, operation: 3, status: -2 }.words();
        assert_eq!(bytes.as_chunks::<8>().0, words.map(u64::to_le_bytes));
    }
}
