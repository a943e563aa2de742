//! The configuration: volumes, addresses and limits; and the parameters, which are the settings that
//! can be changed while the daemon runs ([`params`]).
//!
//! A [`Config`] is plain data. The configuration file and the command line each become a layer
//! (`file.rs`, `flags.rs`); [`Config::load`] applies them to the defaults and checks
//! that all settings fit together (`resolve.rs`), and adds the volumes of the state directory, which the daemon writes
//! (`state.rs`). Only the configuration file and the state directory are opened here: whether a disk image or a certificate exists is checked by the code that opens it.
//!
//! A new key is written in `keys.rs` (its text), `layer.rs`, `file.rs`, `flags.rs` and `resolve.rs`; a
//! new parameter in `params/table.rs`.
//!
//! Invariants of a [`Config`] that `load` returned: at least one volume, or a control socket or state directory; at least one address,
//! unless sockets were passed in or guests are served; every number within the limits stated at its field; no address
//! and no socket twice; at most one volume with `default`; TLS other than `off` has exactly one source of keys.

mod bases;
mod diff;
mod error;
mod file;
mod file_names;
mod flags;
mod idle_entries;
pub mod keys;
mod layer;
mod lines;
mod mistakes;
mod parameter_values;
pub mod params;
mod percent;
mod repairs;
mod resolve;
mod shorten;
mod show;
mod size;
mod state;
mod value;
mod vhost_sockets;
mod volume_check;
mod working_folder;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ebb_access::AccessList;

pub use self::bases::{CHAIN_MOST, NO_BASE, base_chain};
pub use self::diff::Changes;
pub(crate) use self::error::closest;
pub use self::error::suggest;
pub use self::error::{BadValue, ConfigError, ConfigErrorKind};
pub use self::flags::{ServeArgs, choice, size_option};
pub use self::percent::{Percent, PercentError};
pub use self::shorten::{plural, shorten};
pub use self::show::toml_to_json;
pub use self::size::{Size, SizeError};
#[cfg(any(test, feature = "state-faults"))]
pub use self::state::StateFaults;
pub use self::state::{
    NewVolume, StateDir, StateError, StateLock, StateStep, StoredVolume, VolumeOverrides,
    allow_list, check_name, key_named_at_run_time, unmounted_point,
};
pub use self::value::{
    CacheMode, Choice, ConnectTo, DirectMode, IdleMemory, KeyFile, KeySource, Listen, LogFormat,
    LogLevel, LuksVersion, MAX_NAME_BYTES, MAX_UNIX_PATH_BYTES, NbdHost, NbdUri, NbdUriKeys,
    NbdUriTls, RbdUri, RbdUriEncryption, SECTOR_BYTES, SandboxMode, StoreUri, TlsSetting,
    VhostSocket, control_path,
};
pub use self::working_folder::from_root;

/// The largest configuration file in bytes: enough for ten thousand volumes.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// The whole configuration of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The addresses to listen at; empty only if sockets were passed in.
    pub listen: Vec<Listen>,
    /// The number of worker threads, 1 to 64.
    pub workers: usize,
    /// The log level.
    pub log: LogLevel,
    /// The form of the log's lines.
    pub log_format: LogFormat,
    /// The path of the control socket, if any.
    pub control: Option<PathBuf>,
    /// The directory of volumes that were added at run time, if any.
    pub state: Option<PathBuf>,
    /// The address of the page and the metrics, `HOST:PORT`, if any.
    pub web: Option<String>,
    /// Additional host names of the page.
    pub web_names: Vec<String>,
    /// The file of the page's tokens; without it everyone may view. Given if `web` is not a loopback address.
    pub web_tokens: Option<PathBuf>,
    /// The directory of the page's certificate; without it the page is not encrypted. Given if `web` is not a loopback
    /// address.
    pub web_tls_certificates: Option<PathBuf>,
    /// Whether disks of Xen guests are served.
    pub xen: bool,
    /// The directory of a socket for each volume at which it is served over vhost-user-blk, if any; see
    /// [`Config::vhost_sockets`].
    pub vhost_user: Option<PathBuf>,
    /// Free pages of 4096 bytes that each queue keeps, 0 to 1048576.
    pub max_buffer_pages: u64,
    /// How long page pools keep nothing after a sign of memory pressure, milliseconds, 0 to 60000.
    pub buffer_squeeze_duration_ms: u64,
    /// What happens to I/O memory that no request uses.
    pub idle_memory: IdleMemory,
    /// Whether the daemon limits what its threads may ask of the kernel.
    pub sandbox: SandboxMode,
    /// What the broker opens beside what the configuration names; `None`: all that the daemon's user may open.
    pub open_paths: Option<Vec<PathBuf>>,
    /// What the broker connects to beside what the configuration names; `None`: any address.
    pub connect_to: Option<Vec<ConnectTo>>,
    /// The maximum size of the cache, bytes; 0: it follows the host's memory.
    pub cache_max: Size,
    /// The size the cache keeps under memory pressure, bytes; at most `cache_max` if that is not 0.
    pub cache_min: Size,
    /// The NBD server.
    pub nbd: NbdConfig,
    /// The settings of backing devices, by their names as `ebbd stat bdi` shows them.
    pub bdis: BTreeMap<String, BdiConfig>,
    /// The groups of volumes with limits in common, by name.
    pub limit_groups: BTreeMap<String, LimitsConfig>,
    /// The volumes by export name: 1 to [`MAX_NAME_BYTES`] bytes without control characters.
    pub volumes: BTreeMap<String, VolumeConfig>,
    /// Where each of the volumes is defined.
    pub origins: BTreeMap<String, VolumeOrigin>,
    /// Volumes of the configuration as it has them, where the state directory has other settings.
    pub replaced: BTreeMap<String, VolumeConfig>,
    /// Groups of limits of which the state directory has other limits: those of the configuration, absent if it does not
    /// name the group.
    pub replaced_groups: BTreeMap<String, Option<LimitsConfig>>,
    /// Volumes whose file in the state directory cannot be used, each with the reason.
    pub broken: BTreeMap<String, String>,
    /// Groups of limits whose file in the state directory cannot be used, each with a warning.
    pub broken_groups: BTreeMap<String, String>,
    /// Files of the state directory with settings of volumes that the configuration does not have, by volume, each as a
    /// warning.
    pub orphans: BTreeMap<String, String>,
    /// Why the state directory is not the one that is meant, if its file system is not mounted.
    pub unmounted: Option<String>,
    /// What is odd in the state directory, or in lists of clients, and prevents nothing.
    pub warnings: Vec<String>,
}

/// Where a volume is defined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeOrigin {
    /// At this place of the configuration file or of the command line.
    Configuration(Box<str>),
    /// In the state directory.
    State,
    /// Nowhere: it was added while the daemon runs, and ends with it.
    RunTime,
}

/// The limits and the encryption of the NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdConfig {
    /// The maximum number of connections at a time, 1 to 65536.
    pub max_clients: usize,
    /// The largest payload of a READ or WRITE, 4K to 64M.
    pub max_request: Size,
    /// The memory the requests of one connection may hold, `max_request` or more.
    pub connection_memory: Size,
    /// Whether connections are encrypted.
    pub tls: TlsSetting,
    /// The directory of the certificates. With `tls` other than `Off` either this or `tls_psk`
    /// is given.
    pub tls_certificates: Option<PathBuf>,
    /// The file of the pre-shared keys.
    pub tls_psk: Option<PathBuf>,
    /// Whether clients must show a certificate. Only with `tls_certificates`.
    pub tls_verify_peer: bool,
}

/// One volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeConfig {
    /// Where its data is.
    pub store: StoreUri,
    /// The read-only volume below it, if it is an overlay: its store is then a delta.
    pub base: Option<String>,
    /// The size of the file to create: a multiple of 512, 512 to 2^63 - 512. Given exactly if
    /// `create` is true; that of an overlay may be absent, and is that of its base then.
    pub size: Option<Size>,
    /// Whether to create a sparse file of `size` if the file does not exist. Only for file stores.
    pub create: bool,
    /// Where the key is that its file is encrypted with; `None`: it is not encrypted. Only for file stores without a base.
    pub encryption: Option<KeySource>,
    /// Whether clients may only read.
    pub read_only: bool,
    /// Whether several guests and clients may have it open for writing at the same time.
    pub shared: bool,
    /// The clients that may open it; `None`: all.
    pub allow: Option<AccessList>,
    /// Whether a file is opened with `O_DIRECT`. `Auto` for other stores.
    pub direct: DirectMode,
    /// Its cache mode.
    pub cache: CacheMode,
    /// The name of its backing device, which volumes with the same name share, if one is given. Only
    /// with [`CacheMode::Writeback`].
    pub bdi: Option<String>,
    /// Whether it is configured as the default; see [`Config::default_volume`].
    pub default: bool,
    /// Its own socket for vhost-user-blk, if it has one.
    pub vhost_user: Option<VhostSocket>,
    /// Its own [`Config::max_buffer_pages`], if it has one.
    pub max_buffer_pages: Option<u64>,
    /// Its own [`Config::buffer_squeeze_duration_ms`], if it has one.
    pub buffer_squeeze_duration_ms: Option<u64>,
    /// Its own limits.
    pub limits: LimitsConfig,
    /// The group whose limits it shares; "none" for none, whatever the daemon's value is.
    pub limit_group: Option<String>,
}

/// The limits of a volume or a group, as far as they are given; see the parameters of the same names, with `limit_` before
/// them. 0 is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitsConfig {
    /// Requests per second.
    pub iops: Option<u64>,
    /// Reads per second.
    pub read_iops: Option<u64>,
    /// Writes per second.
    pub write_iops: Option<u64>,
    /// Bytes per second.
    pub bandwidth: Option<Size>,
    /// Bytes per second of reads.
    pub read_bandwidth: Option<Size>,
    /// Bytes per second of writes.
    pub write_bandwidth: Option<Size>,
    /// The time of a burst, milliseconds.
    pub burst_ms: Option<u64>,
}

/// The settings of a backing device; see the parameters of the same names. The `min_ratio` of a
/// device is at most its `max_ratio`, and those of all devices together are at most the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BdiConfig {
    /// Part of the limit of all dirty data that is reserved for it.
    pub min_ratio: Option<Percent>,
    /// The largest part it may have, above 0.
    pub max_ratio: Option<Percent>,
    /// Limit of its dirty data, 64K to 1T, or 0 for no limit.
    pub max_bytes: Option<Size>,
    /// Whether no write may exceed its threshold.
    pub strict_limit: Option<bool>,
}

impl Default for NbdConfig {
    fn default() -> Self {
        Self {
            max_clients: 256,
            max_request: Size::new(32 << 20),
            connection_memory: Size::new(64 << 20),
            tls: TlsSetting::Off,
            tls_certificates: None,
            tls_psk: None,
            tls_verify_peer: false,
        }
    }
}

impl Config {
    /// The configuration of the command line and of the file that it names, if it names one, with the volumes of the
    /// state directory.
    ///
    /// # Errors
    /// The first mistake in command line or file, or a state directory that cannot be read: see [`ConfigErrorKind`].
    pub fn load(args: &ServeArgs) -> Result<Self, ConfigError> {
        let config = Self::load_without_state(args)?;
        let state = config.state.clone();
        config.with_state(state.as_deref())
    }

    /// As [`Config::load`], for a daemon that runs with the state directory `state`: a change of it takes effect at the next
    /// start.
    ///
    /// # Errors
    /// As for [`Config::load`].
    pub fn load_again(args: &ServeArgs, state: Option<&Path>) -> Result<Self, ConfigError> {
        Self::load_without_state(args)?.with_state(state)
    }

    /// As [`Config::load`], without what is in the state directory.
    ///
    /// # Errors
    /// As for [`Config::load`].
    pub fn load_without_state(args: &ServeArgs) -> Result<Self, ConfigError> {
        working_folder::note();
        let base = args.config.as_deref().map(file::read).transpose()?.unwrap_or_default();
        resolve::resolve(base, flags::layer(args)?, args.inherited_sockets)
    }

    fn with_state(mut self, state: Option<&Path>) -> Result<Self, ConfigError> {
        if let Some(state) = state {
            state::merge(&mut self, &StateDir::new(state))?;
        }
        self.note_missing_bases();
        self.note_unknown_clients();
        self.note_idle_entries();
        self.note_open_listeners();
        Ok(self)
    }

    /// Warns of addresses at which other hosts reach the volumes without TLS.
    fn note_open_listeners(&mut self) {
        if self.nbd.tls == TlsSetting::Require {
            return;
        }
        let open = |listen: &&Listen| {
            let Listen::Tcp(address) = listen else { return false };
            let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
            let host = host.trim_matches(['[', ']']);
            host.parse::<std::net::IpAddr>().map_or(host != "localhost", |ip| !ip.is_loopback())
        };
        let warning = |listen: &Listen| {
            format!(
                "{listen}: other hosts may connect without TLS, and read and change what `allow` gives them: set \
                 `nbd.tls = \"require\"`, or listen at 127.0.0.1 or a unix socket"
            )
        };
        let open: Vec<_> = self.listen.iter().filter(open).map(warning).collect();
        self.warnings.extend(open);
    }

    /// All mistakes of the file, at most a hundred, in the order of their lines; empty if [`Config::load`] succeeds. One on
    /// the command line, in the syntax of the file, or of the state directory is reported alone.
    pub fn mistakes(args: &ServeArgs) -> Vec<ConfigError> {
        match mistakes::mistakes(args) {
            none if none.is_empty() => Self::load(args).err().into_iter().collect(),
            all => all,
        }
    }

    /// As [`Config::load`], from the `text` of a file instead, and without a state directory. `name` stands for the file in
    /// errors.
    ///
    /// # Errors
    /// As for [`Config::load`], less those of reading.
    pub fn parse(text: &str, name: &Path, args: &ServeArgs) -> Result<Self, ConfigError> {
        let base = file::parse(text, name)?;
        resolve::resolve(base, flags::layer(args)?, args.inherited_sockets)
    }

    /// The name of the volume that is the default export: the one with `default`, or the only one.
    pub fn default_volume(&self) -> Option<&str> {
        let chosen = self.volumes.iter().find(|(_, volume)| volume.default);
        let only = || self.volumes.iter().next().filter(|_| self.volumes.len() == 1);
        chosen.or_else(only).map(|(name, _)| name.as_str())
    }
}
