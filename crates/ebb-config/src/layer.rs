//! The settings of one source of the configuration, each with its location.

use std::path::PathBuf;

use ebb_access::AccessList;

use super::error::{Located, ValueLocation};
use super::value::{
    CacheMode, ConnectTo, DirectMode, IdleMemory, KeySource, Listen, LogFormat, LogLevel,
    SandboxMode, StoreUri, TlsSetting, VhostSocket,
};
use crate::{Percent, Size};

/// The settings of one source: the file or the command line.
#[derive(Default)]
pub(super) struct Layer {
    pub(super) listen: Vec<Located<Listen>>,
    pub(super) workers: Option<Located<i64>>,
    pub(super) log: Option<Located<LogLevel>>,
    pub(super) log_format: Option<Located<LogFormat>>,
    pub(super) control: Option<Located<PathBuf>>,
    pub(super) state: Option<Located<PathBuf>>,
    pub(super) web: Option<Located<String>>,
    pub(super) web_names: Vec<Located<String>>,
    pub(super) web_tokens: Option<Located<PathBuf>>,
    pub(super) web_tls_certificates: Option<Located<PathBuf>>,
    pub(super) xen: Option<Located<bool>>,
    pub(super) vhost_user: Option<Located<PathBuf>>,
    pub(super) max_buffer_pages: Option<Located<i64>>,
    pub(super) buffer_squeeze_duration_ms: Option<Located<i64>>,
    pub(super) idle_memory: Option<Located<IdleMemory>>,
    pub(super) sandbox: Option<Located<SandboxMode>>,
    pub(super) open_paths: Option<Vec<Located<PathBuf>>>,
    pub(super) connect_to: Option<Vec<Located<ConnectTo>>>,
    pub(super) cache_max: Option<Located<Size>>,
    pub(super) cache_min: Option<Located<Size>>,
    pub(super) max_clients: Option<Located<i64>>,
    pub(super) max_request: Option<Located<Size>>,
    pub(super) connection_memory: Option<Located<Size>>,
    pub(super) tls: Option<Located<TlsSetting>>,
    pub(super) tls_certificates: Option<Located<PathBuf>>,
    pub(super) tls_psk: Option<Located<PathBuf>>,
    pub(super) tls_verify_peer: Option<Located<bool>>,
    pub(super) bdis: Vec<BdiLayer>,
    pub(super) limit_groups: Vec<LimitGroupLayer>,
    pub(super) volumes: Vec<VolumeLayer>,
}

/// The limits of a group in the file.
pub(super) struct LimitGroupLayer {
    pub(super) name: String,
    pub(super) limits: LimitsLayer,
}

/// The limits of a volume or a group in one source.
#[derive(Default)]
pub(super) struct LimitsLayer {
    pub(super) iops: Option<Located<i64>>,
    pub(super) read_iops: Option<Located<i64>>,
    pub(super) write_iops: Option<Located<i64>>,
    pub(super) bandwidth: Option<Located<Size>>,
    pub(super) read_bandwidth: Option<Located<Size>>,
    pub(super) write_bandwidth: Option<Located<Size>>,
    pub(super) burst_ms: Option<Located<i64>>,
}

/// The settings of a backing device in the file.
pub(super) struct BdiLayer {
    pub(super) name: String,
    pub(super) min_ratio: Option<Located<Percent>>,
    pub(super) max_ratio: Option<Located<Percent>>,
    pub(super) max_bytes: Option<Located<Size>>,
    pub(super) strict_limit: Option<Located<bool>>,
}

/// The settings of a volume in one source.
pub(super) struct VolumeLayer {
    pub(super) name: String,
    /// The location of the volume as a whole.
    pub(super) place: ValueLocation,
    pub(super) store: Located<StoreUri>,
    pub(super) base: Option<Located<String>>,
    pub(super) size: Option<Located<Size>>,
    pub(super) create: Option<Located<bool>>,
    pub(super) encryption: Option<Located<KeySource>>,
    pub(super) read_only: Option<Located<bool>>,
    pub(super) shared: Option<Located<bool>>,
    pub(super) allow: Option<Located<AccessList>>,
    pub(super) direct: Option<Located<DirectMode>>,
    pub(super) cache: Option<Located<CacheMode>>,
    pub(super) bdi: Option<Located<String>>,
    pub(super) default: Option<Located<bool>>,
    pub(super) vhost_user: Option<Located<VhostSocket>>,
    pub(super) max_buffer_pages: Option<Located<i64>>,
    pub(super) buffer_squeeze_duration_ms: Option<Located<i64>>,
    pub(super) limits: LimitsLayer,
    pub(super) limit_group: Option<Located<String>>,
}
