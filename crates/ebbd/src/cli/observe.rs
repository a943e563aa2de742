//! The options of the commands that observe a daemon and its host: `status`, `top`, `events`, `doctor`, `config`, `bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use ebb_config::{BadValue, NbdUri, Size, StoreUri, size_option};

/// The options of `ebbd status`.
#[derive(Clone, Debug, Default, Args)]
pub struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The column that `ebbd top` sorts by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TopSort {
    /// The volume's name
    Name,
    /// Reads and writes per second
    #[default]
    Iops,
    /// Bytes per second
    Bytes,
    /// The 99th percentile of the times of reads and writes
    P99,
    /// Data that waits to be written
    Dirty,
    /// Failed requests per second
    Errors,
}

/// The options of `ebbd top`.
#[derive(Clone, Debug, Default, Args)]
pub struct TopArgs {
    /// The time between two updates, seconds
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval: u64,

    /// The column to sort by
    #[arg(long, value_name = "COLUMN", default_value = "iops")]
    pub sort: TopSort,

    /// Refused: `ebbd stat --watch --json` prints samples as JSON
    #[arg(long, hide = true)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd events`.
#[derive(Clone, Debug, Default, Args)]
pub struct EventsArgs {
    /// Go on printing events as they happen, until interrupted, also after a restart of the daemon
    #[arg(long, short)]
    pub follow: bool,

    /// Print at most the last N events
    #[arg(long, short = 'n', value_name = "N", default_value = "50", value_parser = clap::value_parser!(u64).range(0..=10_000))]
    pub lines: u64,

    /// Print only events of this volume
    #[arg(long, value_name = "VOLUME")]
    pub volume: Option<String>,

    /// Print JSON, an event per line
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd doctor`.
#[derive(Clone, Debug, Default, Args)]
pub struct DoctorArgs {
    /// The configuration file to check as well [default: /etc/ebbd/ebbd.toml if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Print JSON: a list of findings, each with its level (ok, warning or mistake) and its text
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd config`.
#[derive(Clone, Debug, Args)]
pub struct ConfigArgs {
    /// What to do with the configuration.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// What `ebbd config` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a configuration file, and the stores and certificates that it names
    Check(ConfigFileArgs),
    /// Print a configuration with its defaults: of a file, or of the running daemon
    ///
    /// Keys of a volume that are not set are left out where the volume then has the daemon's value: its limits and its
    /// page pools.
    Show(ConfigShowArgs),
    /// Print what a reload of the running daemon would change, and what needs a restart
    Diff(ConfigDiffArgs),
}

/// The options of `ebbd config check`.
#[derive(Clone, Debug, Default, Args)]
pub struct ConfigFileArgs {
    /// The configuration file
    #[arg(value_name = "FILE", default_value = "/etc/ebbd/ebbd.toml")]
    pub file: PathBuf,

    /// Print JSON: a list of findings, each with its level (ok, warning or mistake) and its text
    #[arg(long)]
    pub json: bool,
}

/// The options of `ebbd config show`.
#[derive(Clone, Debug, Default, Args)]
pub struct ConfigShowArgs {
    /// The configuration file; without it the configuration in force of the daemon is printed
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd config diff`.
#[derive(Clone, Debug, Default, Args)]
pub struct ConfigDiffArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// The seconds of each measurement
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: u64,

    /// Use only the first SIZE bytes of the volume, 1M or more
    #[arg(long, value_name = "SIZE", value_parser = within)]
    pub within: Option<Size>,

    /// Measure writes, too: this OVERWRITES the data of the volume
    #[arg(long)]
    pub destroy_data: bool,

    /// Connect to this NBD URI instead of an address of the daemon, such as nbds://host/disk
    #[arg(long, value_name = "URI", value_parser = nbd_uri)]
    pub uri: Option<Box<NbdUri>>,

    /// Print JSON, an object for each measurement
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The largest request of `ebbd bench`, bytes.
pub(crate) const LARGEST_REQUEST: u64 = 1 << 20;

fn within(text: &str) -> Result<Size, String> {
    let size = size_option(text)?;
    match size.bytes() {
        LARGEST_REQUEST.. => Ok(size),
        _ => Err("too small for the largest request; choose 1M or more".to_owned()),
    }
}

fn nbd_uri(text: &str) -> Result<Box<NbdUri>, String> {
    match text.parse().map_err(|bad: BadValue| bad.to_string())? {
        StoreUri::Nbd(uri) => Ok(uri),
        _ => {
            Err("no NBD URI; write nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH".to_owned())
        }
    }
}
