//! Opening stores without a daemon, and the worker that carries out their requests.
//!
//! # Invariants
//! - A source is opened read-only, with its lock, which excludes a daemon that writes to it. An image of a Ceph cluster has
//!   no lock for readers: a copy of one that is written meanwhile is of no single moment, and a snapshot is to be named.

use std::sync::Arc;

use ebb_block::BlockStore;
use ebb_cache::{CachedStore, Delta, DeltaError};
use ebb_config::{CacheMode, DirectMode, LimitsConfig, Size, StoreUri, VolumeConfig};
use ebb_image::HeaderError;
use ebb_io::{Io, Worker};
use ebb_store::{ForeignFormat, Store};

use super::error::ImageError;
use crate::setup;
use crate::stores::{Expected, open_store};

/// A store that is open, with the delta that it holds if it holds one.
pub(super) struct OpenImage {
    pub(super) uri: StoreUri,
    pub(super) store: Arc<CachedStore>,
    pub(super) delta: Option<Delta>,
}

/// Runs `start` on a worker of its own, and waits for the result, and until the images of Ceph clusters are closed.
///
/// # Errors
/// Those of `start`, and those of starting the worker.
pub(super) fn on_worker<F, Fut, T>(start: F) -> Result<T, ImageError>
where
    F: FnOnce(Io) -> Fut + Send + 'static,
    Fut: Future<Output = Result<T, ImageError>> + 'static,
    T: Send + 'static,
{
    let memory = setup::tool_memory();
    let memory = memory.map_err(|error| ImageError::Worker(std::io::Error::other(error)))?;
    let worker = Worker::start("ebbd-image", &memory).map_err(ImageError::Worker)?;
    worker.handle().block_on(start).ok_or(ImageError::Ended)?
}

/// How a store is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
    /// As a new file of this many bytes, if there is none.
    Create(u64),
}

fn config(store: StoreUri, access: Access) -> VolumeConfig {
    let size = match access {
        Access::Create(size) => Some(Size::new(size)),
        Access::Read | Access::Write => None,
    };
    VolumeConfig {
        store,
        base: None,
        size,
        create: size.is_some(),
        encryption: None,
        read_only: access == Access::Read,
        shared: false,
        allow: None,
        direct: DirectMode::Auto,
        cache: CacheMode::None,
        bdi: None,
        default: false,
        vhost_user: None,
        max_buffer_pages: None,
        buffer_squeeze_duration_ms: None,
        limits: LimitsConfig::default(),
        limit_group: None,
    }
}

/// Opens a store. Blocks.
///
/// # Errors
/// [`ImageError`].
pub(super) fn open_now(uri: &StoreUri, access: Access) -> Result<Store, ImageError> {
    let config = config(uri.clone(), access);
    let expected = Expected::Any;
    // Without a record of locks: those in the state directory are the daemon's.
    Ok(open_store(&uri.to_string(), &config, &expected, (1, None))?)
}

/// Opens a store for reading, as the delta that it holds unless `raw`.
///
/// # Errors
/// [`ImageError`].
pub(super) async fn open_image(
    io: &Io,
    uri: &StoreUri,
    raw: bool,
) -> Result<OpenImage, ImageError> {
    let named = uri.clone();
    let store = io.offload(move || open_now(&named, Access::Read)).await?;
    let store = CachedStore::from(store);
    let may_hold_one =
        matches!(uri, StoreUri::File(_) | StoreUri::Nbd(_) | StoreUri::Rbd(_)) && !raw;
    let delta = match may_hold_one {
        true => match Delta::open(io, &store).await {
            Err(DeltaError::Header { source: HeaderError::NotADelta, .. }) => None,
            opened => Some(opened?),
        },
        false => None,
    };
    Ok(OpenImage { uri: uri.clone(), store: Arc::new(store), delta })
}

/// Returns the format of the file behind a store, if it is neither a raw disk nor a delta. Blocks.
pub(super) fn other_format(uri: &StoreUri) -> Option<ForeignFormat> {
    let StoreUri::File(path) = uri else { return None };
    // An error is reported where the file is opened.
    let format = ForeignFormat::of_path(path).ok().flatten();
    format.filter(|format| *format != ForeignFormat::Delta)
}

/// Refuses an image of another format that is named as a raw file; `or_raw`: the alternative.
///
/// # Errors
/// [`ImageError::LooksLikeQcow2`], [`ImageError::OtherFormat`].
pub(super) async fn must_be_raw(
    io: &Io,
    uri: &StoreUri,
    or_raw: &'static str,
) -> Result<(), ImageError> {
    let StoreUri::File(path) = uri.clone() else { return Ok(()) };
    let named = uri.clone();
    let format = io.offload(move || other_format(&named)).await;
    let (place, path) = (uri.to_string(), path.display().to_string());
    Err(match format {
        None => return Ok(()),
        Some(ForeignFormat::Qcow) => ImageError::LooksLikeQcow2 { place, path, or_raw },
        Some(format) => {
            let (format, remedy) = (format.name(), format.to_raw());
            ImageError::OtherFormat { place, format, remedy, or_raw }
        }
    })
}

impl OpenImage {
    /// The disk's size in bytes.
    pub(super) fn size(&self) -> u64 {
        match &self.delta {
            Some(delta) => delta.header().layout.size(),
            None => self.store.size(),
        }
    }
}
