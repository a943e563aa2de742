//! The bytes of the ring: requests and responses in the three layouts frontends use
//! (`blkif.h`; reference, section 4).
//!
//! Invariants: everything here works on private copies, never on memory a guest can change; a
//! request that was parsed has its counts within the protocol's limits, or says that it has not; a
//! response has no byte that was not set (XSA-216).

/// Bytes of the largest slot: a request of the 64-bit layout.
pub const SLOT_BYTES: usize = 112;
/// Words of it.
pub const SLOT_WORDS: usize = SLOT_BYTES / 8;
/// Segments within a ring slot.
pub const MAX_DIRECT_SEGMENTS: usize = 11;
/// Segment descriptors in a page of them.
pub const SEGMENTS_PER_PAGE: usize = 512;
/// Pages of descriptors an indirect request can name.
pub const MAX_INDIRECT_PAGES: usize = 8;
/// Bytes of a segment descriptor.
pub const SEGMENT_BYTES: usize = 8;
/// Bytes of the ring's header, before the first slot.
pub const HEADER_BYTES: usize = 64;
/// Bytes of a granted page.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of the protocol's sector: of all its quantities, whatever `sector-size` says.
pub const SECTOR_BYTES: u64 = 512;

/// The layout of a frontend's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    /// That of this machine.
    Native,
    /// 64-bit x86; 64-bit Arm has the same.
    X86_64,
    /// 32-bit x86: 64-bit numbers stand at multiples of 4.
    X86_32,
}

/// A `protocol` node with an unknown word.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the frontend asks for the ring layout `{0}`: known are x86_64-abi, x86_32-abi, arm-abi")]
pub struct UnknownProtocol(pub String);

impl Abi {
    /// From the frontend's `protocol` node. A missing one means 32-bit x86, as all backends have
    /// it, and not what the public header says.
    ///
    /// # Errors
    /// A word nobody uses.
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

    /// Slots of a ring of `pages` pages: a power of two; 0 for no pages.
    pub fn slots(self, pages: usize) -> u32 {
        let room = (pages * PAGE_BYTES).saturating_sub(HEADER_BYTES) / self.slot_bytes();
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        if room == 0 { 0 } else { 1 << room.ilog2() }
    }

    /// What a 64-bit number behind `head` bytes of smaller ones is moved by.
    fn place(self) -> Places {
        if self.is_narrow() { NARROW } else { WIDE }
    }

    /// What a slot's copy says before its segments, and where those are.
    #[inline]
    pub fn head(self, slot: &Slot) -> Head<'_> {
        let at = if self.is_narrow() { &NARROW } else { &WIDE };
        Head { slot, at }
    }

    /// Words of a slot that are in use, going by its first one.
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

const NARROW: Places = Places { id: 4, sector: 12, third: 20, segments: 20, grefs: 24 };
const WIDE: Places = Places { id: 8, sector: 16, third: 24, segments: 24, grefs: 28 };

/// A request that is taken apart as far as it is looked at: most are reads and writes of a page.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    slot: &'a Slot,
    at: &'static Places,
}

impl Head<'_> {
    /// The operation.
    #[inline]
    pub fn code(&self) -> u8 {
        byte(self.slot[0], 0)
    }

    /// The guest's name for it.
    #[inline]
    pub fn id(&self) -> u64 {
        whole(self.slot, self.at.id)
    }

    /// The first sector.
    #[inline]
    pub fn sector(&self) -> u64 {
        whole(self.slot, self.at.sector)
    }

    /// Segments within a read or write; more than [`MAX_DIRECT_SEGMENTS`] is a lie.
    #[inline]
    pub fn count(&self) -> u8 {
        byte(self.slot[0], 1)
    }

    /// A segment of those, below [`MAX_DIRECT_SEGMENTS`].
    #[inline]
    pub fn segment(&self, number: usize) -> Segment {
        Segment::from_word(whole(self.slot, self.at.segments + number * SEGMENT_BYTES))
    }

    /// Of an indirect request: the inner operation, how many segments, the grant of the first page
    /// of their descriptors.
    pub fn indirect(&self) -> (u8, u16, u32) {
        let count = u16::from_le_bytes([byte(self.slot[0], 2), byte(self.slot[0], 3)]);
        (byte(self.slot[0], 1), count, half(self.slot, self.at.grefs))
    }
}

/// Where the fields of a request stand.
#[derive(Debug)]
struct Places {
    id: usize,
    sector: usize,
    /// The number of sectors of a discard.
    third: usize,
    segments: usize,
    grefs: usize,
}

/// What reads and writes are, within a page that the guest granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// The grant reference of the page.
    pub gref: u32,
    /// The first sector in the page, 0 to 7.
    pub first: u8,
    /// The last one, `first` to 7.
    pub last: u8,
}

impl Segment {
    /// From its 8 bytes.
    pub fn parse(bytes: &[u8; SEGMENT_BYTES]) -> Segment {
        let gref = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Segment { gref, first: bytes[4], last: bytes[5] }
    }

    /// From its 8 bytes as a word.
    #[inline]
    pub fn from_word(word: u64) -> Segment {
        let gref = u32::try_from(word & 0xffff_ffff).unwrap_or_default();
        Segment { gref, first: byte(word, 4), last: byte(word, 5) }
    }

    /// Its 8 bytes.
    pub fn encode(self) -> [u8; SEGMENT_BYTES] {
        let [a, b, c, d] = self.gref.to_le_bytes();
        [a, b, c, d, self.first, self.last, 0, 0]
    }

    /// True if it lies within a page and is not empty.
    pub fn is_valid(self) -> bool {
        self.last <= 7 && self.first <= self.last
    }

    /// Bytes of a valid one.
    pub fn bytes(self) -> usize {
        (usize::from(self.last.saturating_sub(self.first)) + 1) * 512
    }

    /// Where it begins in its page, bytes.
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
    /// Write behind everything before it.
    pub const WRITE_BARRIER: u8 = 2;
    /// Make stable what was answered before; may carry data.
    pub const FLUSH_DISKCACHE: u8 = 3;
    /// Give the space of a range back.
    pub const DISCARD: u8 = 5;
    /// Read or write with the segments in granted pages.
    pub const INDIRECT: u8 = 6;
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Well.
    Okay,
    /// Not.
    Error,
    /// Not known or not offered.
    NotSupported,
}

impl Status {
    /// Its number in a response.
    pub fn code(self) -> i16 {
        match self {
            Status::Okay => 0,
            Status::Error => -1,
            Status::NotSupported => -2,
        }
    }
}

/// A request by value, not checked against a disk yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The guest's name for it, given back in the response.
    pub id: u64,
    /// The code the response carries: of an indirect request the inner one.
    pub operation: u8,
    /// What is asked.
    pub body: Body,
}

/// What a request asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// Read, write, barrier or flush with `count` segments; more than
    /// [`MAX_DIRECT_SEGMENTS`] is a lie.
    Direct {
        /// The first sector.
        sector: u64,
        /// Segments in use.
        count: u8,
        /// The segments.
        segments: [Segment; MAX_DIRECT_SEGMENTS],
    },
    /// Read or write with `count` segments in pages.
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
        /// How many.
        sectors: u64,
        /// The data must not be found again.
        secure: bool,
    },
    /// A code nobody knows.
    Unknown,
}

/// The private copy of a slot, in words: requests are taken apart by words, since that is the least
/// work. Bytes stand in it as in the ring.
pub type Slot = [u64; SLOT_WORDS];

/// A slot's bytes as words.
pub fn to_words(bytes: &[u8; SLOT_BYTES]) -> Slot {
    let mut words = [0; SLOT_WORDS];
    for (word, raw) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*raw);
    }
    words
}

/// A slot's words as bytes.
pub fn to_bytes(words: &Slot) -> [u8; SLOT_BYTES] {
    let mut bytes = [0; SLOT_BYTES];
    for (raw, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *raw = word.to_le_bytes();
    }
    bytes
}

/// The byte of a word.
fn byte(word: u64, at: usize) -> u8 {
    word.to_le_bytes()[at]
}

/// Half of the words, `at` counted in bytes: a multiple of 4.
#[inline]
fn half(words: &Slot, at: usize) -> u32 {
    let word = words[at / 8];
    let word = if at.is_multiple_of(8) { word } else { word >> 32 };
    // The lower half is all of it.
    u32::try_from(word & 0xffff_ffff).unwrap_or_default()
}

/// A number of 64 bits at a multiple of 4 bytes.
#[inline]
fn whole(words: &Slot, at: usize) -> u64 {
    if at.is_multiple_of(8) {
        return words[at / 8];
    }
    u64::from(half(words, at)) | u64::from(half(words, at + 4)) << 32
}

fn u64_at(bytes: &[u8; SLOT_BYTES], at: usize) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(raw)
}

impl Request {
    /// Takes a slot's private copy apart. Never fails: what is no request is [`Body::Unknown`].
    pub fn parse(abi: Abi, slot: &[u8; SLOT_BYTES]) -> Request {
        Request::from_words(abi, &to_words(slot))
    }

    /// As [`Request::parse`], from words.
    #[inline]
    pub fn from_words(abi: Abi, slot: &Slot) -> Request {
        match abi.is_narrow() {
            true => Request::at_places(&NARROW, slot),
            false => Request::at_places(&WIDE, slot),
        }
    }

    #[inline(always)]
    fn at_places(at: &Places, slot: &Slot) -> Request {
        let (id, code) = (whole(slot, at.id), byte(slot[0], 0));
        let sector = whole(slot, at.sector);
        match code {
            op::READ | op::WRITE | op::WRITE_BARRIER | op::FLUSH_DISKCACHE => {
                let mut segments = [Segment::default(); MAX_DIRECT_SEGMENTS];
                let count = byte(slot[0], 1);
                for (number, segment) in segments.iter_mut().enumerate().take(count.into()) {
                    *segment = Segment::from_word(whole(slot, at.segments + number * 8));
                }
                Request { id, operation: code, body: Body::Direct { sector, count, segments } }
            }
            op::INDIRECT => {
                let mut grefs = [0; MAX_INDIRECT_PAGES];
                for (number, gref) in grefs.iter_mut().enumerate() {
                    *gref = half(slot, at.grefs + 4 * number);
                }
                let count = u16::from_le_bytes([byte(slot[0], 2), byte(slot[0], 3)]);
                // The response carries the inner code: frontends insist on it.
                let body = Body::Indirect { sector, count, grefs };
                Request { id, operation: byte(slot[0], 1), body }
            }
            op::DISCARD => {
                let secure = byte(slot[0], 1) & 1 != 0;
                let body = Body::Discard { sector, sectors: whole(slot, at.third), secure };
                Request { id, operation: code, body }
            }
            _ => Request { id, operation: code, body: Body::Unknown },
        }
    }

    /// Puts it into a slot: what a frontend does.
    pub fn encode(&self, abi: Abi) -> [u8; SLOT_BYTES] {
        let mut slot = [0; SLOT_BYTES];
        let at = abi.place();
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
                slot[at.third..at.third + 8].copy_from_slice(&sectors.to_le_bytes());
            }
            Body::Unknown => {}
        }
        slot
    }
}

/// A response, as both sides see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// The request's name.
    pub id: u64,
    /// The request's operation.
    pub operation: u8,
    /// See [`Status::code`].
    pub status: i16,
}

impl Response {
    /// Its bytes, padding included; the first [`Abi::response_bytes`] count.
    pub fn encode(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8] = self.operation;
        bytes[10..12].copy_from_slice(&self.status.to_le_bytes());
        bytes
    }

    /// Its bytes as words.
    #[inline]
    pub fn words(self) -> [u64; 2] {
        let status = u64::from(self.status.cast_unsigned());
        [self.id, u64::from(self.operation) | status << 16]
    }

    /// From a slot's private copy: what a frontend does.
    pub fn parse(slot: &[u8; SLOT_BYTES]) -> Response {
        let status = i16::from_le_bytes([slot[10], slot[11]]);
        Response { id: u64_at(slot, 0), operation: slot[8], status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_have_as_many_slots_as_the_reference_says() {
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
    fn offsets_are_those_of_the_reference() {
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
    fn every_request_survives_its_slot() {
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
