//! The command line: its commands and options, and their help texts.
//!
//! The options of `ebbd serve` are settings of the configuration, and in [`ebb_config::ServeArgs`].
//! The manual pages and the shell completions are made from these definitions.

mod clients;
mod image;
mod limit;
mod vhost_user;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use ebb_advice::Advised;
use ebb_api::MAX_HOLD_SECONDS;
use ebb_config::ServeArgs;
use ebb_control::token_name;
use ebb_export_xen::{AttachError, disk_name};

use self::volume::{ChangeArgs, FlushArgs, OperationCommand, VolumeCommand};

pub mod volume;

mod observe;

pub(crate) use self::observe::LARGEST_REQUEST;
pub use self::observe::{
    BenchArgs, ConfigArgs, ConfigCommand, ConfigDiffArgs, ConfigFileArgs, ConfigShowArgs,
    DoctorArgs, EventsArgs, StatusArgs, TopArgs, TopSort,
};

pub use self::clients::{ClientAction, ClientArgs, ClientOptions, OneClient};
pub use self::image::{
    ImageCheckArgs, ImageClearArgs, ImageCloneArgs, ImageCommand, ImageCopyArgs, ImageInfoArgs,
    ImageKeyAddArgs, ImageKeyCommand, ImageKeyListArgs, ImageKeyRemoveArgs, ImageMapArgs,
};
pub use self::limit::{LimitArgs, milliseconds};
pub use self::vhost_user::VhostUserArgs;

/// Serve virtual disks to guests and tools
///
/// ebbd serves virtual disks, called volumes, to guests and tools over the NBD protocol, on unix
/// sockets and TCP, to KVM guests over vhost-user-blk, and to Xen guests over blkif. The data of a volume is in a file, on a block
/// device, on another NBD server or in memory.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "ebbd",
    version,
    propagate_version = false,
    disable_help_subcommand = true,
    max_term_width = 100,
    after_long_help = crate::exit_status::help()
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// What `ebbd` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum CliCommand {
    /// Serve volumes until a signal stops the daemon
    ///
    /// Serves the volumes of the configuration file and of the command line. Settings of the
    /// command line override those of the file; addresses of both are used; a volume of the
    /// command line replaces one of the same name in the file.
    Serve(Box<ServeArgs>),
    /// Serve one volume to one guest over vhost-user-blk, as a program that libvirt starts
    ///
    /// Follows the conventions of QEMU for back-end programs: the other program starts one process for each disk, and stops it
    /// with SIGTERM. The volume is a file (--blk-file), or any store with options (--volume). If its store cannot be opened,
    /// the program fails at once. For many disks `ebbd serve --vhost-user DIR` needs less memory.
    #[command(
        override_usage = "ebbd vhost-user [OPTIONS] <--socket-path PATH|--fd NUMBER>\n       \
                          <--blk-file PATH|--volume STORE>"
    )]
    VhostUser(VhostUserArgs),
    /// Print parameters of a running daemon
    ///
    /// Prints the value of one parameter, or a table of all parameters with origin, range and unit.
    /// They are described in docs/parameters.
    Get(GetArgs),
    /// Set a parameter of a running daemon
    ///
    /// Sets a parameter until the daemon ends, or until a reload finds a changed value of it in the
    /// configuration. The change is printed as NAME: OLD -> NEW.
    Set(SetArgs),
    /// Print the state and statistics of a running daemon
    ///
    /// Prints memory pressure, volumes, backing devices, memory, zones and page pools as tables, or one
    /// TOPIC: volume, remote, bdi, limit, memory, cache, pressure, xen, vhost or worker. LIMIT,
    /// USED, FREE and WSS of a zone are numbers of blocks of SIZE bytes (LIMIT 0 is no limit); EMPTY is
    /// the time since its caches were last empty. FREE, LENT and SQUEEZED of a pool are numbers of
    /// pages of 4096 bytes. Times are in seconds.
    ///
    /// For a backing device (BDI), DIRTY is data that waits to be written and WRITEBACK is data that is
    /// being written; together they are at most THRESH, which is the part SHARE of the limit of all
    /// dirty data. RATE/S is the estimated write rate, BUSY the part of the last second in which the
    /// device was busy. PAUSES counts writes that were throttled, LONGEST is the longest pause of one
    /// write. MIN, MAX, MAXBYTES and STRICT are the parameters min_ratio, max_ratio, max_bytes and
    /// strict_limit.
    ///
    /// For a frontend of vhost-user, STATE is connected (no queue is served), waiting (another writer has the volume),
    /// serving or closing. PID is the process of the frontend and QUEUES those that are served. IN FLIGHT and REQUESTS
    /// count requests, ERRORS those that failed. KICKS and CALLS are notifications received from the guest and sent to
    /// it, INLINE the requests that were carried out at once. CLIENTS of a volume counts NBD connections and disks of
    /// guests.
    Stat(StatArgs),
    /// Print whether a running daemon is ok, degraded or failing, with the reasons
    ///
    /// The exit status is 0 if it is ok, 3 if it cannot be reached, 4 if it is degraded (something
    /// is worse than configured), and 5 if it is failing (a volume is not served or fails
    /// requests).
    Status(StatusArgs),
    /// Show the volumes of a running daemon on the terminal, by what they do
    ///
    /// Shows what each volume reads and writes, the times of its requests, its dirty data and the state of
    /// its server, and updates that until q is pressed. The keys are: s and S for the next and the
    /// previous column to sort by, r to reverse the order, / to search for a name, the arrows, Page Up
    /// and Page Down, q to end.
    Top(TopArgs),
    /// Print what a running daemon has logged
    ///
    /// Prints the last events of the daemon: what it has logged at the levels error, warn and info, at most the last
    /// thousand since it started.
    Events(EventsArgs),
    /// Look for what limits or threatens a daemon on this host
    ///
    /// Checks the kernel's io_uring, limits, memory pressure information, the configuration, its stores, servers and
    /// certificates, and the running daemon. Prints a line for each, with a remedy. The exit status is 0 if all is
    /// well, 4 after a warning, 5 after a mistake.
    Doctor(DoctorArgs),
    /// Check, show or compare configurations
    ///
    /// A check opens everything that the file names and creates nothing; it reports all mistakes. What is shown can be
    /// used as a configuration file. The difference is that of the daemon's configuration to its file now.
    Config(ConfigArgs),
    /// Measure what a volume of a running daemon does
    ///
    /// Connects to the daemon over NBD, as a client does, and prints requests and bytes per second and times of
    /// reads: 4 KiB at random one at a time, 4 KiB at random with 32 in flight, 1 MiB in order with 8 in flight. Nothing
    /// is written, except with --destroy-data.
    Bench(BenchArgs),
    /// Simulate memory pressure in a running daemon
    ///
    /// Publishes a level of memory pressure inside the daemon, as if the host had signalled it:
    /// L0 (calm), L1 (squeeze: page pools are emptied for a short time), L2 (drain: shared caches are
    /// emptied, too) or L3 (last resort: each worker returns all the memory it can). A level falls by
    /// itself.
    Pressure(PressureArgs),
    /// List and change volumes of a running daemon; snapshots of overlays
    ///
    /// Volumes are added, removed, renamed and resized while the daemon runs. An overlay gets snapshots, which are served and
    /// deleted, is flattened, or committed into its base; what has changed since a snapshot is listed.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Look at images, verify and copy them, without a daemon
    ///
    /// Reads stores that no running daemon has open for writing: raw files, deltas of overlays, qcow2 images, and exports of
    /// NBD servers. No file that an image names is opened, except files in the folder of a delta.
    #[command(subcommand)]
    Image(ImageCommand),
    /// Make what was written to a volume of a running daemon stable
    ///
    /// Writes the dirty data of the volume, or of all volumes, to its store and flushes the store, as
    /// a flush of a client does. Cancelling the operation ends the waiting, and the flush goes on.
    Flush(FlushArgs),
    /// Let a running daemon read its configuration again
    ///
    /// Does what SIGHUP does, and reports what could not be changed. The exit status is 5 if a
    /// volume is not served afterwards.
    Reload(ChangeArgs),
    /// List, show and cancel operations of a running daemon
    ///
    /// A change of volumes that takes longer than a second is an operation, which goes on in the
    /// daemon whether or not a client waits for it.
    #[command(subcommand)]
    Operation(OperationCommand),
    /// Limit requests and bytes per second of a volume or a group
    ///
    /// Sets the given limits of a VOLUME, or with --group alone those of a group, at once and until the daemon ends or the
    /// configuration changes. Without options the limits in force are printed, and what they have done. Members of a
    /// group that want more than its limits allow have equal parts; what others leave goes to them. A request above
    /// a limit waits in the client's socket or the guest's ring.
    Limit(Box<LimitArgs>),
    /// List clients, or disconnect one
    ///
    /// Clients are the NBD connections that selected an export, the connected disks of Xen guests, and the frontends of
    /// vhost-user (QEMU and other VMMs). The identity is that of TLS (psk:NAME, cn:NAME), the user of a unix socket
    /// (uid:NUMBER), or the guest (xen:NUMBER).
    Client(ClientArgs),
    /// Attach a volume to a Xen guest, or detach it
    ///
    /// Writes the xenstore nodes of a disk, as a toolstack does: the guest's driver (xen-blkfront in
    /// Linux) finds the disk, and a daemon that serves Xen serves it. Detach asks the guest to close
    /// the disk, and then removes its nodes. Runs in dom0, as root.
    Xen(XenArgs),
    /// Make a token for the page
    ///
    /// Makes a new token for the role and the name. Its line for the file of tokens (web_tokens), which has only a hash,
    /// goes to standard output, and the token itself to standard error. Append the line to the file, as in
    /// `ebbd token view alice >> /etc/ebbd/tokens`, and reload the daemon; who has the token logs in to the page with it, or
    /// sends it as "Authorization: Bearer TOKEN". It is not shown again.
    ///
    /// A token for operate is worth what the daemon's user can open: who has it adds volumes on any
    /// file, device or server there, and reads and changes them; open_paths and connect_to narrow
    /// that. It changes no keys and runs no programs.
    Token(TokenArgs),
    /// Print the completion script for a shell
    ///
    /// The script completes commands and options, and the names of volumes, backing devices, groups, clients and
    /// operations of the running daemon.
    Completions {
        /// The shell to complete for
        shell: Shell,
    },
    /// Write the manual pages
    Man {
        /// The directory to write ebbd.1, ebbd.toml.5 and the pages of the commands to; it is
        /// created if absent [default: the working directory]
        #[arg(long, value_name = "DIR", hide_default_value = true, default_value = ".")]
        out: PathBuf,

        /// Write the pages of the run-time parameters to this directory instead
        #[arg(long, value_name = "DIR", conflicts_with = "out")]
        parameters: Option<PathBuf>,
    },
}

/// The options of `ebbd token`.
#[derive(Clone, Debug, Args)]
pub struct TokenArgs {
    /// What it permits: view reads everything, operate also changes everything
    pub role: TokenRole,

    /// Its name, for the log: 1 to 64 letters, digits, -, _, . and @
    #[arg(value_name = "NAME", value_parser = token_name)]
    pub name: String,
}

/// The role of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TokenRole {
    /// Reads everything.
    View,
    /// Reads and changes everything.
    Operate,
}

/// The options of `ebbd get`.
#[derive(Clone, Debug, Default, Args)]
pub struct GetArgs {
    /// The parameter; without it a table of all parameters is printed
    #[arg(value_name = "NAME")]
    pub name: Option<String>,

    /// Print the value in force for this volume: its own, or else the daemon's
    #[arg(long, value_name = "VOLUME")]
    pub volume: Option<String>,

    /// Print the value in force for this backing device; `ebbd stat bdi` lists them
    #[arg(long, value_name = "BDI", conflicts_with = "volume")]
    pub bdi: Option<String>,

    /// Print the value in force for this group of limits
    #[arg(long, value_name = "GROUP", conflicts_with_all = ["volume", "bdi"])]
    pub limit_group: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd set`.
#[derive(Clone, Debug, Default, Args)]
pub struct SetArgs {
    /// The parameter
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The value: a number, a size such as 32M, or a word
    #[arg(
        value_name = "VALUE",
        required_unless_present = "unset",
        conflicts_with = "unset",
        allow_hyphen_values = true
    )]
    pub value: Option<String>,

    /// Go back to the value of the configuration
    #[arg(long)]
    pub unset: bool,

    /// Set the volume's own value
    #[arg(long, value_name = "VOLUME")]
    pub volume: Option<String>,

    /// Set the value of this backing device; `ebbd stat bdi` lists them
    #[arg(long, value_name = "BDI", conflicts_with = "volume")]
    pub bdi: Option<String>,

    /// Set the value of this group of limits, which is made if there is none
    #[arg(long, value_name = "GROUP", conflicts_with_all = ["volume", "bdi"])]
    pub limit_group: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// What `ebbd stat` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StatTopic {
    /// The volumes, or one: counters, times, state
    Volume,
    /// The connections to remote servers
    Remote,
    /// The Ceph clusters of volumes: their state, and how long they take to answer
    Cluster,
    /// The backing devices
    Bdi,
    /// Limits of volumes and groups, and what they have done
    Limit,
    /// I/O memory, zones and page pools
    Memory,
    /// The cache, and what each volume has in it
    Cache,
    /// Memory pressure
    Pressure,
    /// The disks of Xen guests
    Xen,
    /// The frontends of vhost-user, and the disks of their guests
    Vhost,
    /// The worker threads
    Worker,
}

/// The options of `ebbd stat`.
#[derive(Clone, Debug, Default, Args)]
pub struct StatArgs {
    /// Print only this [default: everything]
    #[arg(value_name = "TOPIC")]
    pub what: Option<StatTopic>,

    /// Print only this volume
    #[arg(value_name = "VOLUME")]
    pub name: Option<String>,

    /// Print JSON, sizes in bytes, times in seconds; with --watch a line each time
    #[arg(long)]
    pub json: bool,

    /// Print it again every second, or every N seconds, until interrupted, also after a restart of the daemon. For volumes it is a table of
    /// rates: what each has read and written, the times of its requests, its cache hits and dirty data
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub watch: Option<u64>,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd pressure`.
#[derive(Clone, Debug, Default, Args)]
pub struct PressureArgs {
    /// The level: L0, L1, L2 or L3
    #[arg(
        value_name = "LEVEL",
        value_parser = ["L0", "L1", "L2", "L3"],
        ignore_case = true,
        hide_possible_values = true
    )]
    pub level: String,

    /// Hold the level for N seconds, 1 to 86400, against falling by itself
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_HOLD_SECONDS))]
    pub seconds: Option<u64>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The name of a disk in a guest; clap shows the error as it is.
fn parse_disk(text: &str) -> Result<String, Advised<AttachError>> {
    disk_name(text).map_err(Advised)
}

/// The options of `ebbd xen`.
#[derive(Clone, Debug, Default, Args)]
pub struct XenArgs {
    /// What to do: attach or detach
    #[arg(value_name = "ACTION", value_parser = ["attach", "detach"], hide_possible_values = true)]
    pub action: String,

    /// The guest: its name or its number
    #[arg(value_name = "DOMAIN")]
    pub domain: String,

    /// The name of the disk in the guest: xvda to xvdz, xvdaa and so on
    #[arg(value_name = "DISK", value_parser = parse_disk)]
    pub disk: String,

    /// The volume to attach
    #[arg(value_name = "VOLUME", required_if_eq("action", "attach"))]
    pub volume: Option<String>,

    /// Attach it read-only
    #[arg(long)]
    pub read_only: bool,

    /// Detach it even if the guest does not close it
    #[arg(long)]
    pub force: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_definition_passes_the_checks_of_clap() {
        Cli::command().debug_assert();
    }

    #[test]
    fn mistakes_name_each_remedy_once() {
        let said = |args: &[&str]| {
            let refused = Cli::try_parse_from([&["ebbd"], args].concat());
            refused.err().map(|error| error.to_string()).unwrap_or_default()
        };
        let text = said(&["image", "info", "/tmp/a.img"]);
        assert_eq!(text.matches("file:/tmp/a.img").count(), 1, "{text}");
        assert!(said(&["image", "info", "a.img"]).contains("for a file write `file:a.img`"));
        let text = said(&["vhost-user", "--socket-path", "s"]);
        assert!(text.contains("--blk-file <PATH>|--volume <STORE"), "{text}");
        let text = said(&["vhost-user", "--volume", "null:1M"]);
        assert!(text.contains("--socket-path <PATH>|--fd <NUMBER>"), "{text}");
        assert!(said(&["operation", "show", "x"]).contains("`ebbd operation list`"));
        assert!(said(&["limit", "a", "--iops", "-5"]).contains("0 or 1 to 1000000000"));
    }

    #[test]
    fn help_fits_a_terminal_of_80_columns() {
        let mut command = Cli::command().term_width(80);
        command.build();
        let of_commands: Vec<_> = command.get_subcommands().cloned().collect();
        let inner: Vec<_> =
            of_commands.iter().flat_map(clap::Command::get_subcommands).cloned().collect();
        for mut one in of_commands.into_iter().chain(inner) {
            for help in [one.render_help(), one.render_long_help()] {
                let help = help.to_string();
                // A word may be longer.
                let long = |line: &&str| line.chars().count() > 80 && line.trim().contains(' ');
                assert_eq!(help.lines().find(long), None, "{}", one.get_name());
            }
        }
    }
}
