//! [`DeltaError`]: why a delta, or an overlay on it, cannot be used.

use std::borrow::Cow;

use ebb_advice::Advice;
use ebb_block::BlockError;
use ebb_image::{HeaderError, LayoutError, Parent};

/// Why a delta cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// The store holds something else, or nothing.
    #[error("{place}: {source}")]
    Header {
        /// The store.
        place: String,
        /// What is wrong.
        source: HeaderError,
    },
    /// The store is smaller than its header says.
    #[error("{place} has {size} bytes and its header needs {expected}: it was truncated")]
    Truncated {
        /// The store.
        place: String,
        /// Its size.
        size: u64,
        /// What the header needs.
        expected: u64,
    },
    /// The store has no room for a new delta.
    #[error(
        "{place} has {size} bytes, and the header, the block map and the data of a new overlay of \
         {volume} bytes need {needed}"
    )]
    TooSmall {
        /// The store.
        place: String,
        /// Its size.
        size: u64,
        /// The size of the volume.
        volume: u64,
        /// What the delta needs.
        needed: u64,
    },
    /// It has blocks of more than 4 KiB.
    #[error("{place} has blocks of more than 4 KiB")]
    Blocks {
        /// The store.
        place: String,
    },
    /// No volume has this size.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The base is not the one that the delta was made for.
    #[error(
        "{place} was made above {expected}, and {found} is not that: it has other content or another \
         size, or, if it is a delta, was opened for writing since"
    )]
    OtherBase {
        /// The delta.
        place: String,
        /// The base that it was made for.
        expected: String,
        /// The base that was found.
        found: String,
    },
    /// The configuration gives no base, and the delta needs one.
    #[error("{place} was made above {expected}, and was not flattened")]
    NotFlattened {
        /// The delta.
        place: String,
        /// The base that it was made for.
        expected: String,
    },
    /// The store failed.
    #[error(transparent)]
    Io(#[from] BlockError),
}

impl Advice for DeltaError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let remedy = match self {
            DeltaError::Header { source, .. } => return source.remedy(),
            DeltaError::Layout(error) => return error.remedy(),
            DeltaError::Io(_) => return None,
            DeltaError::Truncated { .. } => "restore it from a backup",
            DeltaError::TooSmall { .. } => "enlarge it, or set a smaller `size`",
            DeltaError::Blocks { .. } => "put the delta on a store with smaller ones",
            DeltaError::OtherBase { .. } => "name the right base, or put it back",
            DeltaError::NotFlattened { .. } => {
                "name that base, or flatten the volume first (`ebbd volume flatten`)"
            }
        };
        Some(remedy.into())
    }
}

impl DeltaError {
    /// The error of a delta at `place` that was made above `expected`, and has `found` below it.
    #[must_use]
    pub fn other_base(place: String, expected: &Parent, found: &Parent) -> DeltaError {
        let expected = expected.shown_place();
        match *found == Parent::default() {
            true => DeltaError::NotFlattened { place, expected },
            false => DeltaError::OtherBase { place, expected, found: found.place.clone() },
        }
    }
}
