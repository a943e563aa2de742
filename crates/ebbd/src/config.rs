//! The configuration: what to serve, where, and within which limits.
//!
//! It is plain data. A configuration file and the command line each become a layer
//! (`config/file.rs`, `config/flags.rs`); [`Config::load`] puts them over the defaults and checks
//! that everything fits together (`config/resolve.rs`). Nothing is opened here but the
//! configuration file itself: whether a disk image or a certificate exists is found out by whoever
//! opens it.
//!
//! Invariants of a [`Config`] that `load` returned: at least one volume; at least one address,
//! unless sockets were passed in or Xen is served; every number within the limits stated at its field; no address
//! twice; at most one volume with `default`; TLS other than `off` has exactly one source of keys.

mod diff;
mod error;
mod file;
mod flags;
pub mod keys;
mod layer;
mod resolve;
pub(crate) mod value;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use self::diff::Changes;
pub use self::error::{BadValue, ConfigError, ErrorKind};
pub(crate) use self::error::{closest, shorten, suggest};
pub use self::flags::Overrides;
pub use self::value::{
    CacheMode, Choice, Direct, IdleMemory, Listen, LogLevel, MAX_NAME_BYTES, MAX_UNIX_PATH_BYTES,
    SECTOR_BYTES, StoreUri, Tls,
};
use crate::percent::Percent;
use crate::size::Size;

/// The largest configuration file in bytes: enough for ten thousand volumes.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// The whole configuration of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The addresses to listen at; empty only if sockets were passed in.
    pub listen: Vec<Listen>,
    /// The number of worker threads, 1 to 64.
    pub workers: usize,
    /// What goes to the log.
    pub log: LogLevel,
    /// The unix socket to be controlled through, if any.
    pub control: Option<PathBuf>,
    /// Where the page and the metrics are shown, `HOST:PORT`, if anywhere.
    pub web: Option<String>,
    /// Further names the page answers to.
    pub web_names: Vec<String>,
    /// Whether disks of Xen guests are served.
    pub xen: bool,
    /// Free pages of 4096 bytes each queue keeps, 0 to 1048576.
    pub max_buffer_pages: u64,
    /// How long pools keep nothing after a sign of memory pressure, milliseconds, 0 to 60000.
    pub buffer_squeeze_duration_ms: u64,
    /// What becomes of I/O memory that no request uses.
    pub idle_memory: IdleMemory,
    /// The most the cache may hold, bytes; 0: as the host allows.
    pub cache_max: Size,
    /// What the cache keeps under memory pressure, bytes; at most `cache_max` where that is given.
    pub cache_min: Size,
    /// The NBD server.
    pub nbd: Nbd,
    /// What is said of backing devices, by their names as `ebbd stat bdi` shows them.
    pub bdis: BTreeMap<String, BdiConfig>,
    /// The volumes by export name: 1 to [`MAX_NAME_BYTES`] bytes without control characters.
    pub volumes: BTreeMap<String, VolumeConfig>,
}

/// The limits and the encryption of the NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nbd {
    /// Connections the daemon holds at a time, 1 to 65536.
    pub max_clients: usize,
    /// The largest payload of a READ or WRITE, 4K to 64M.
    pub max_request: Size,
    /// The memory the requests of one connection may hold, `max_request` or more.
    pub connection_memory: Size,
    /// Whether connections are encrypted.
    pub tls: Tls,
    /// The directory of the certificates. With `tls` other than `Off` either this or `tls_psk`
    /// is there.
    pub tls_certificates: Option<PathBuf>,
    /// The file of the pre-shared keys.
    pub tls_psk: Option<PathBuf>,
    /// Whether clients must show a certificate. Only with `tls_certificates`.
    pub tls_verify_peer: bool,
}

/// One volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeConfig {
    /// Where its bytes live.
    pub store: StoreUri,
    /// The size of the file to create: a multiple of 512, 512 to 2^63 - 512. There exactly if
    /// `create` is true.
    pub size: Option<Size>,
    /// Whether to make a sparse file of `size` if there is none. Only for file stores.
    pub create: bool,
    /// Whether clients may only read.
    pub read_only: bool,
    /// Whether several may write at the same time.
    pub shared: bool,
    /// Whether a file is opened with `O_DIRECT`. `Auto` for other stores.
    pub direct: Direct,
    /// What the cache does for it.
    pub cache: CacheMode,
    /// The name of the backing device it shares with others, if it was given one. Only with
    /// [`CacheMode::Writeback`].
    pub bdi: Option<String>,
    /// Whether the volume was named the default; see [`Config::default_volume`].
    pub default: bool,
    /// Its own [`Config::max_buffer_pages`], if it has one.
    pub max_buffer_pages: Option<u64>,
    /// Its own [`Config::buffer_squeeze_duration_ms`], if it has one.
    pub buffer_squeeze_duration_ms: Option<u64>,
}

/// What the configuration says of a backing device; see the parameters of the same names. Of all
/// devices `min_ratio` is at most the whole together, and of each at most `max_ratio`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BdiConfig {
    /// Part of the limit of all dirty data that is kept for it.
    pub min_ratio: Option<Percent>,
    /// The largest part it may have, above 0.
    pub max_ratio: Option<Percent>,
    /// The most it may have, 64K to 1T, or 0 for no limit.
    pub max_bytes: Option<Size>,
    /// Whether no write may exceed its threshold.
    pub strict_limit: Option<bool>,
}

impl Default for Nbd {
    fn default() -> Self {
        Self {
            max_clients: 256,
            max_request: Size::new(32 << 20),
            connection_memory: Size::new(64 << 20),
            tls: Tls::Off,
            tls_certificates: None,
            tls_psk: None,
            tls_verify_peer: false,
        }
    }
}

impl Config {
    /// The configuration of `file`, if one is given, with `overrides` put over it.
    ///
    /// # Errors
    /// Any mistake in either, the first one found: see [`ErrorKind`].
    pub fn load(file: Option<&Path>, overrides: &Overrides) -> Result<Self, ConfigError> {
        let base = file.map(file::read).transpose()?.unwrap_or_default();
        resolve::resolve(base, flags::layer(overrides)?, overrides.inherited_sockets)
    }

    /// As [`Config::load`], from the `text` of a file instead. `name` stands for the file in
    /// errors.
    ///
    /// # Errors
    /// As for [`Config::load`], less those of reading.
    pub fn parse(text: &str, name: &Path, overrides: &Overrides) -> Result<Self, ConfigError> {
        let base = file::parse(text, name)?;
        resolve::resolve(base, flags::layer(overrides)?, overrides.inherited_sockets)
    }

    /// The name of the volume that also answers to the empty export name: the one with `default`,
    /// or the only one.
    pub fn default_volume(&self) -> Option<&str> {
        let chosen = self.volumes.iter().find(|(_, volume)| volume.default);
        let only = || self.volumes.iter().next().filter(|_| self.volumes.len() == 1);
        chosen.or_else(only).map(|(name, _)| name.as_str())
    }
}
