//! A configuration before it is complete: what one source says, and where it says so.

use std::path::PathBuf;

use super::error::{Located, Place};
use super::value::{CacheMode, Direct, IdleMemory, Listen, LogLevel, StoreUri, Tls};
use crate::percent::Percent;
use crate::size::Size;

/// What one source, the file or the command line, says.
#[derive(Default)]
pub(super) struct Layer {
    pub(super) listen: Vec<Located<Listen>>,
    pub(super) workers: Option<Located<i64>>,
    pub(super) log: Option<Located<LogLevel>>,
    pub(super) control: Option<Located<PathBuf>>,
    pub(super) web: Option<Located<String>>,
    pub(super) web_names: Vec<Located<String>>,
    pub(super) xen: Option<Located<bool>>,
    pub(super) max_buffer_pages: Option<Located<i64>>,
    pub(super) buffer_squeeze_duration_ms: Option<Located<i64>>,
    pub(super) idle_memory: Option<Located<IdleMemory>>,
    pub(super) cache_max: Option<Located<Size>>,
    pub(super) cache_min: Option<Located<Size>>,
    pub(super) max_clients: Option<Located<i64>>,
    pub(super) max_request: Option<Located<Size>>,
    pub(super) connection_memory: Option<Located<Size>>,
    pub(super) tls: Option<Located<Tls>>,
    pub(super) tls_certificates: Option<Located<PathBuf>>,
    pub(super) tls_psk: Option<Located<PathBuf>>,
    pub(super) tls_verify_peer: Option<Located<bool>>,
    pub(super) bdis: Vec<BdiLayer>,
    pub(super) volumes: Vec<VolumeLayer>,
}

/// What the file says of a backing device.
pub(super) struct BdiLayer {
    pub(super) name: String,
    pub(super) min_ratio: Option<Located<Percent>>,
    pub(super) max_ratio: Option<Located<Percent>>,
    pub(super) max_bytes: Option<Located<Size>>,
    pub(super) strict_limit: Option<Located<bool>>,
}

/// What one source says of a volume.
pub(super) struct VolumeLayer {
    pub(super) name: String,
    /// Where the volume as a whole stands.
    pub(super) place: Place,
    pub(super) store: Located<StoreUri>,
    pub(super) size: Option<Located<Size>>,
    pub(super) create: Option<Located<bool>>,
    pub(super) read_only: Option<Located<bool>>,
    pub(super) shared: Option<Located<bool>>,
    pub(super) direct: Option<Located<Direct>>,
    pub(super) cache: Option<Located<CacheMode>>,
    pub(super) bdi: Option<Located<String>>,
    pub(super) default: Option<Located<bool>>,
    pub(super) max_buffer_pages: Option<Located<i64>>,
    pub(super) buffer_squeeze_duration_ms: Option<Located<i64>>,
}
