//! The header of a delta: what volume it is of, and above which base.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `EBBDELTA` |
//! | 8..12 | CRC-32 of the rest of the header |
//! | 12..16 | version, 2 |
//! | 16..24 | number: of two valid headers the one with the higher number counts. Each opening for writing adds 1 |
//! | 24..40 | identity of the delta, random |
//! | 40..48 | size of the volume, bytes |
//! | 48..56 | size of the base, bytes |
//! | 56..72 | identity of the base if that is a delta, else 0 |
//! | 72..80 | number in the header of the base if that is a delta, else 0 |
//! | 80..84 | CRC-32 of samples of the base if that is no delta; 0 if it is one, or while a commit into it has not ended |
//! | 84..88 | length of the base's place |
//! | 88..96 | bytes of the base that show where the delta holds nothing: beyond are zeroes. The smallest size that the volume has had |
//! | 96..100 | map pages that there is room for, which says where the data begins |
//! | 100.. | where the base was, UTF-8, for messages |
//! | 4080..4096 | lineage: the identity of the first delta of the volume, which all its snapshots share; 0 in deltas of older versions |
//!
//! Numbers are little-endian; the remaining bytes are 0.

use std::borrow::Cow;

use ebb_advice::Advice;

use crate::layout::{Layout, LayoutError};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 4096;

const MAGIC: [u8; 8] = *b"EBBDELTA";
const VERSION: u32 = 2;
/// Where the place of the base begins, and its longest length.
const PLACE: usize = 100;
const PLACE_MOST: usize = LINEAGE - PLACE;
const LINEAGE: usize = HEADER_BYTES - 16;

/// What is below a delta, as it was when the delta was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parent {
    /// Bytes.
    pub size: u64,
    /// Its identity if it is a delta, else 0.
    pub delta: [u8; 16],
    /// The number in its header if it is a delta, else 0: it changes when the base is opened for writing.
    pub number: u64,
    /// A checksum of samples if it is no delta.
    pub samples: u32,
    /// Where it was, for messages.
    pub place: String,
}

/// Whether a snapshot can have this name: up to 64 letters and digits of ASCII, and `.`, `_` and `-`.
#[must_use]
pub fn is_snapshot_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=64).contains(&name.len()) && name.chars().all(is_plain)
}

impl Parent {
    /// The name of the snapshot that it is, by the name of its file: what follows the last `@`. `None` if no snapshot can have
    /// that name: a foreign header may have anything there.
    #[must_use]
    pub fn snapshot(&self) -> Option<&str> {
        let file = self.place.rsplit('/').next().filter(|_| self.delta != [0; 16])?;
        file.rsplit_once('@').map(|(_, name)| name).filter(|name| is_snapshot_name(name))
    }

    /// Whether `found` is the base that this describes; its place may differ.
    #[must_use]
    pub fn is(&self, found: &Parent) -> bool {
        let samples = if self.is_mixed() { found.samples } else { self.samples };
        let key =
            |parent: &Parent, samples: u32| (parent.size, parent.delta, parent.number, samples);
        key(self, samples) == key(found, found.samples)
    }

    /// This parent, as it is recorded while a commit into it has begun and not ended: it holds old and new data, and a delta above
    /// it all of the new one.
    #[must_use]
    pub fn mixed(&self) -> Parent {
        Parent { samples: 0, ..self.clone() }
    }

    /// Whether a commit into it has begun and not ended.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        self.samples == 0 && self.delta == [0; 16] && self.size > 0
    }

    /// The place for messages: a foreign header may have anything there, and must not forge lines of the log.
    #[must_use]
    pub fn shown_place(&self) -> String {
        shown_text(&self.place)
    }
}

/// Whether a terminal shows a character as it is. It obeys control characters, begins lines, and changes the order of what
/// follows others.
#[must_use]
pub fn is_shown(c: char) -> bool {
    let changes_order = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    !c.is_control() && !changes_order && !matches!(c, '\u{2028}' | '\u{2029}')
}

/// Text of a foreign image for messages, with `?` for each character that is not shown as it is.
#[must_use]
pub fn shown_text(text: &str) -> String {
    text.chars().map(|c| if is_shown(c) { c } else { '?' }).collect()
}

/// The header of a delta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaHeader {
    /// See the module.
    pub number: u64,
    /// Random; map pages repeat it.
    pub delta: [u8; 16],
    /// The volume's size and with it the places of map and data.
    pub layout: Layout,
    /// What is below.
    pub parent: Parent,
    /// Bytes of what is below that show where the delta holds nothing; beyond are zeroes. At most the volume's size, and the
    /// parent's.
    pub shown: u64,
    /// The identity of the first delta of the volume: all deltas of a volume and of its snapshots
    /// share it, and no clone does. 0: an older version made it.
    pub lineage: [u8; 16],
}

/// Why a store is not a delta.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Another format, or none.
    #[error("it is no delta of ebbd")]
    NotADelta,
    /// Neither slot has a valid checksum.
    #[error("the header of the delta is damaged")]
    Damaged,
    /// A newer format.
    #[error("the delta has version {0}, and this ebbd reads version 2")]
    Version(u32),
    /// The size is impossible.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl Advice for HeaderError {
    /// The remedy for the file as a whole.
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let remedy = match self {
            HeaderError::NotADelta => {
                "name the file of an overlay; if it was one, both slots of its header are gone: restore \
                 it from a backup"
            }
            HeaderError::Damaged | HeaderError::Layout(_) => {
                "look at it with `ebbd image check`, and restore it from a backup"
            }
            HeaderError::Version(_) => "use the ebbd that made it",
        };
        Some(remedy.into())
    }
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
}

impl DeltaHeader {
    /// Of the first delta of a volume, above `parent`, of which all that the volume has room for
    /// shows.
    #[must_use]
    pub fn new(number: u64, delta: [u8; 16], layout: Layout, parent: Parent) -> DeltaHeader {
        let shown = layout.size().min(parent.size);
        DeltaHeader { number, delta, layout, parent, shown, lineage: delta }
    }

    /// The slot (0 or 1) that this header belongs into.
    #[must_use]
    pub fn slot(&self) -> usize {
        usize::from(self.number % 2 == 1)
    }

    /// The header as it is stored. A long place of the base is cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let place = self.parent.place.as_bytes();
        let place = &place[..place.len().min(PLACE_MOST)];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.number.to_le_bytes());
        put(24, &self.delta);
        put(40, &self.layout.size().to_le_bytes());
        put(48, &self.parent.size.to_le_bytes());
        put(56, &self.parent.delta);
        put(72, &self.parent.number.to_le_bytes());
        put(80, &self.parent.samples.to_le_bytes());
        put(84, &u32::try_from(place.len()).unwrap_or(0).to_le_bytes());
        put(88, &self.shown.to_le_bytes());
        put(96, &self.layout.room().to_le_bytes());
        put(PLACE, place);
        put(LINEAGE, &self.lineage);
        let sum = crc32fast::hash(&bytes[12..]);
        bytes[8..12].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The newer one of the valid headers in both slots, each of [`HEADER_BYTES`].
    ///
    /// # Errors
    /// [`HeaderError`].
    pub fn decode(slots: [&[u8]; 2]) -> Result<DeltaHeader, HeaderError> {
        let mut newest: Result<DeltaHeader, HeaderError> = Err(HeaderError::NotADelta);
        for slot in slots {
            match (decode_one(slot), &newest) {
                (Ok(found), Ok(other)) if found.number <= other.number => {}
                (Ok(found), _) => newest = Ok(found),
                // A valid header counts; else the error of a damaged one is returned.
                (Err(error), Err(HeaderError::NotADelta)) => newest = Err(error),
                (Err(_), _) => {}
            }
        }
        newest
    }
}

/// The header in one slot.
pub(crate) fn decode_one(bytes: &[u8]) -> Result<DeltaHeader, HeaderError> {
    if bytes.len() != HEADER_BYTES || bytes[..8] != MAGIC {
        return Err(HeaderError::NotADelta);
    }
    if crc32fast::hash(&bytes[12..]) != u32::from_le_bytes(number(bytes, 8)) {
        return Err(HeaderError::Damaged);
    }
    let version = u32::from_le_bytes(number(bytes, 12));
    if version != VERSION {
        return Err(HeaderError::Version(version));
    }
    let length = usize::try_from(u32::from_le_bytes(number(bytes, 84))).unwrap_or(usize::MAX);
    let place = &bytes[PLACE..PLACE + length.min(PLACE_MOST)];
    let size = u64::from_le_bytes(number(bytes, 40));
    let parent = Parent {
        size: u64::from_le_bytes(number(bytes, 48)),
        delta: number(bytes, 56),
        number: u64::from_le_bytes(number(bytes, 72)),
        samples: u32::from_le_bytes(number(bytes, 80)),
        place: String::from_utf8_lossy(place).into_owned(),
    };
    Ok(DeltaHeader {
        number: u64::from_le_bytes(number(bytes, 16)),
        delta: number(bytes, 24),
        layout: Layout::with_room(size, u32::from_le_bytes(number(bytes, 96)))?,
        // An older version may have written so long a place there.
        lineage: if length > PLACE_MOST { [0; 16] } else { number(bytes, LINEAGE) },
        shown: u64::from_le_bytes(number(bytes, 88)).min(size).min(parent.size),
        parent,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(number: u64) -> DeltaHeader {
        let parent = Parent {
            size: 9 << 20,
            samples: 5,
            place: "/golden.raw".to_owned(),
            ..Parent::default()
        };
        let layout = Layout::new(10 << 20).unwrap_or_else(|error| panic!("{error}"));
        DeltaHeader::new(number, [3; 16], layout, parent)
    }

    #[test]
    fn a_name_that_no_snapshot_can_have_is_none() {
        let parent =
            |place: &str| Parent { delta: [1; 16], place: place.into(), ..Parent::default() };
        assert_eq!(parent("/srv/a@b/disk@monday").snapshot(), Some("monday"));
        for place in
            ["/srv/disk", "/srv/disk@", "/srv/disk@a\nb", "/srv/disk@\u{1b}[2J", "/srv/disk@a b"]
        {
            assert_eq!(parent(place).snapshot(), None, "{place:?}");
        }
        assert_eq!(parent(&format!("disk@{}", "a".repeat(65))).snapshot(), None);
    }

    #[test]
    fn the_newer_valid_header_counts() {
        let (old, new) = (header(6), header(7));
        assert_eq!((old.slot(), new.slot()), (0, 1));
        let (first, second) = (old.encode(), new.encode());
        assert_eq!(DeltaHeader::decode([&first, &second]), Ok(new.clone()));
        let mut torn = second.clone();
        torn[512..].fill(0);
        torn[600] = 1;
        assert_eq!(DeltaHeader::decode([&first, &torn]), Ok(old));
        let empty = vec![0; HEADER_BYTES];
        assert_eq!(DeltaHeader::decode([&empty, &second]), Ok(new));
        assert_eq!(DeltaHeader::decode([&empty, &empty]), Err(HeaderError::NotADelta));
        // No block map says that it was a delta, so that `ebbd image check` finds none.
        let error = HeaderError::NotADelta;
        let remedy = error.remedy().unwrap();
        assert!(!remedy.contains("image check") && remedy.contains("from a backup"), "{remedy}");
        assert_eq!(DeltaHeader::decode([&empty, &torn]), Err(HeaderError::Damaged));
        assert_eq!(DeltaHeader::decode([&torn, &empty]), Err(HeaderError::Damaged));
        let mut newer = first.clone();
        newer[12] = 3;
        let sum = crc32fast::hash(&newer[12..]);
        newer[8..12].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(DeltaHeader::decode([&newer, &empty]), Err(HeaderError::Version(3)));
    }

    #[test]
    fn a_lineage_is_kept_and_a_long_place_is_none() {
        let own = DeltaHeader { lineage: [7; 16], ..header(1) };
        assert_eq!(decode_one(&own.encode()), Ok(own.clone()));
        let parent = Parent { place: "a".repeat(HEADER_BYTES), ..own.parent.clone() };
        let long = DeltaHeader { parent, ..own };
        let mut bytes = long.encode();
        assert_eq!(decode_one(&bytes).map(|found| found.lineage), Ok([7; 16]));
        // As an older version wrote it.
        bytes[84..88].copy_from_slice(&3996_u32.to_le_bytes());
        bytes[LINEAGE..].fill(b'a');
        let sum = crc32fast::hash(&bytes[12..]);
        bytes[8..12].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(decode_one(&bytes).map(|found| found.lineage), Ok([0; 16]));
    }

    #[test]
    fn another_base_is_recognised() {
        let parent = header(1).parent;
        assert!(parent.is(&Parent { place: "/moved.raw".to_owned(), ..parent.clone() }));
        assert!(!parent.is(&Parent { samples: 6, ..parent.clone() }));
        assert!(!parent.is(&Parent { number: 1, ..parent.clone() }));
        assert!(!parent.is(&Parent { size: 1, ..parent.clone() }));
        assert!(!parent.is(&Parent { delta: [1; 16], ..parent.clone() }));
        let mixed = parent.mixed();
        assert!(mixed.is_mixed() && mixed.is(&parent) && !parent.is(&mixed));
        assert!(!mixed.is(&Parent { size: 1, ..parent.clone() }));
        assert!(!Parent::default().is_mixed(), "there is no base");
    }

    #[test]
    fn a_place_cannot_forge_lines_of_the_log() {
        let parent = Parent { place: "/x\nERROR \x1b[31mfake".to_owned(), ..Parent::default() };
        assert_eq!(parent.shown_place(), "/x?ERROR ?[31mfake");
        let parent =
            Parent { place: "/a\u{202e}b\u{2066}c\u{2028}\u{e4}".to_owned(), ..Parent::default() };
        assert_eq!(parent.shown_place(), "/a?b?c?\u{e4}");
    }

    proptest! {
        /// Fields of any value with a right checksum neither panic nor give an impossible layout.
        #[test]
        fn hostile_headers_are_refused_or_have_a_layout(
            changes in prop::collection::vec((12..HEADER_BYTES, any::<u8>()), 0..40), length in 0..2 * HEADER_BYTES,
        ) {
            let mut bytes = header(1).encode();
            for (at, value) in changes {
                bytes[at] = value;
            }
            let sum = crc32fast::hash(&bytes[12..]);
            bytes[8..12].copy_from_slice(&sum.to_le_bytes());
            if let Ok(found) = DeltaHeader::decode([&bytes, &[]]) {
                prop_assert!(found.layout.store_size() > found.layout.size());
                prop_assert!(found.shown <= found.layout.size() && found.shown <= found.parent.size);
                let _ = DeltaHeader::decode([&found.encode(), &[]]);
            }
            let _ = DeltaHeader::decode([&bytes[..length.min(HEADER_BYTES)], &bytes]);
        }
    }
}
