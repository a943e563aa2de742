//! The options of `ebbd vhost-user`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use ebb_config::SandboxMode;

/// The options of `ebbd vhost-user`.
#[derive(Clone, Debug, Default, Args)]
#[command(group = ArgGroup::new("socket").args(["socket_path", "fd"]).required(true))]
#[command(group = ArgGroup::new("store").args(["blk_file", "volume"]).required(true))]
pub struct VhostUserArgs {
    /// Listen at this unix socket; this or --fd is needed
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,

    /// Use this open descriptor: a socket that listens, or one that is connected; then the program ends with the
    /// connection
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i32).range(3..))]
    pub fd: Option<i32>,

    /// Print what the program can do as JSON, and exit; other options are ignored
    #[arg(long)]
    pub print_capabilities: bool,

    /// The file or block device to serve
    #[arg(long, value_name = "PATH")]
    pub blk_file: Option<PathBuf>,

    /// The store to serve, with options as after NAME= of `ebbd serve --volume`, such as
    /// nbd://server/disk,cache=writeback
    #[arg(long, value_name = "STORE[,option=value]...")]
    pub volume: Option<String>,

    /// Let the guest only read
    #[arg(long)]
    pub read_only: bool,

    /// A control socket for ebbd stat and the other commands [default: none]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,

    /// Whether the program limits itself to the system calls that it needs, as far as the kernel can: on or off
    /// [default: on]
    #[arg(
        long,
        value_name = "MODE",
        value_parser = ebb_config::choice::<SandboxMode>(),
        hide_possible_values = true
    )]
    pub sandbox: Option<SandboxMode>,
}
