//! [`LayersError`] and [`SnapshotError`]: why layers cannot be put together, or not be exchanged.

use std::borrow::Cow;
use std::time::Duration;

use ebb_advice::Advice;
use ebb_block::{BLOCK, BlockError};

use crate::cache::CacheError;

/// Why a stack cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayersError {
    /// Requests could not be divided at every 4 KiB.
    #[error(
        "{place} has blocks of {block} bytes: a store used as a layer may have at most {}",
        BLOCK
    )]
    Blocks {
        /// The store.
        place: String,
        /// Bytes of its blocks.
        block: u32,
    },
    /// A layer is there twice.
    #[error("{place} is used twice as a layer of one volume")]
    Twice {
        /// The store.
        place: String,
    },
    /// The top layer would have a writeback cache.
    #[error("a stack of plain stores is read-only")]
    Writeback {
        /// The store.
        place: String,
    },
    /// A delta has no cache.
    #[error("the delta {place} has no cache, which its block map needs")]
    NoCache {
        /// The store.
        place: String,
    },
    /// The volume cannot have a part of the cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

impl Advice for LayersError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        match self {
            LayersError::Writeback { place } => {
                Some(format!("set `cache = \"writethrough\"` for the volume on {place}").into())
            }
            LayersError::NoCache { .. } => {
                Some("set `cache = \"writethrough\"` or `\"writeback\"`".into())
            }
            LayersError::Blocks { .. } | LayersError::Twice { .. } | LayersError::Cache(_) => None,
        }
    }
}

/// Why the layers were not exchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// It has no delta that could be frozen.
    #[error("only an overlay that is written to has snapshots")]
    NoOverlay,
    /// Another change of the layers, or the end of the volume.
    #[error("the layers of the volume are being changed, or it is being closed")]
    Busy,
    /// There is no such layer to be taken out.
    #[error("there is no such layer below the volume's own")]
    NoLayer,
    /// A write did not complete in time.
    #[error("writes of the volume did not complete within {0:?}")]
    Slow(Duration),
    /// The layers cannot be put together.
    #[error(transparent)]
    Layers(#[from] LayersError),
    /// A store failed.
    #[error(transparent)]
    Store(#[from] BlockError),
}

impl Advice for SnapshotError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        match self {
            SnapshotError::NoOverlay => Some("give the volume a `base`".into()),
            SnapshotError::Busy => Some("try again in a moment".into()),
            SnapshotError::Slow(_) => Some("see whether its store responds".into()),
            SnapshotError::Layers(error) => error.remedy(),
            SnapshotError::NoLayer | SnapshotError::Store(_) => None,
        }
    }
}
