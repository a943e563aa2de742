//! The command line: its commands and options, and their help texts.
//!
//! Only the form of a value is checked here; [`ServeArgs::overrides`] passes everything to
//! [`ebb_config`], which checks ranges and combinations for the command line and the file alike.
//! The manual pages and the shell completions are made from these definitions.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use ebb_config::Size;
use ebb_config::{Choice, IdleMemory, LogLevel, Overrides, TlsSetting};

use crate::control::MAX_HOLD_SECONDS;

/// Serve virtual disks over NBD
///
/// ebbd serves virtual disks, called volumes, to guests and tools over the NBD protocol, on unix
/// sockets and TCP, and to Xen guests over blkif. The data of a volume is in a file, on a block
/// device, on another NBD server or in memory.
#[derive(Clone, Debug, Parser)]
#[command(name = "ebbd", version, propagate_version = false, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `ebbd` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Serve volumes until a signal stops the daemon
    ///
    /// Serves the volumes of the configuration file and of the command line. Settings of the
    /// command line override those of the file; addresses of both are used; a volume of the
    /// command line replaces one of the same name in the file.
    Serve(Box<ServeArgs>),
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
    /// Prints memory pressure, volumes, backing devices, memory, zones and page pools as tables. LIMIT,
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
    Stat(StatArgs),
    /// Simulate memory pressure in a running daemon
    ///
    /// Publishes a level of memory pressure inside the daemon, as if the host had signalled it:
    /// L0 (calm), L1 (squeeze: page pools are emptied for a short time), L2 (drain: shared caches are
    /// emptied, too) or L3 (last resort: each worker returns all the memory it can). A level falls by
    /// itself.
    Pressure(PressureArgs),
    /// Resize a volume that is in use
    ///
    /// Changes the size of a volume's file to SIZE or, without SIZE, adopts the size that its file or
    /// block device has now. A disk of a Xen guest is resized at once; an NBD client keeps the size it
    /// received when it connected, and gets the new one when it connects again. Prints VOLUME: OLD ->
    /// NEW in bytes. The configuration is not changed: a `size` there must be corrected by hand.
    Resize(ResizeArgs),
    /// Attach a volume to a Xen guest, or detach it
    ///
    /// Writes the xenstore nodes of a disk, as a toolstack does: the guest's driver (xen-blkfront in
    /// Linux) finds the disk, and a daemon that serves Xen serves it. Detach asks the guest to close
    /// the disk, and then removes its nodes. Runs in dom0, as root.
    Xen(XenArgs),
    /// Print the completion script for a shell
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

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd stat`.
#[derive(Clone, Debug, Default, Args)]
pub struct StatArgs {
    /// Print only this: bdi, the backing devices
    #[arg(value_name = "WHAT", value_parser = ["bdi"], hide_possible_values = true)]
    pub what: Option<String>,

    /// Print JSON, sizes in bytes, times in seconds
    #[arg(long, conflicts_with_all = ["watch", "what"])]
    pub json: bool,

    /// Print a table every second, or every N seconds, until interrupted: what each volume has read
    /// and written, its cache hits, and the cache memory it holds
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1",
          conflicts_with = "what", value_parser = clap::value_parser!(u64).range(1..=3600))]
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

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd resize`.
#[derive(Clone, Debug, Default, Args)]
pub struct ResizeArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// The size, such as 20G: a multiple of 512 bytes
    #[arg(value_name = "SIZE", value_parser = size)]
    pub size: Option<Size>,

    /// Allow a smaller size: the data beyond the new end is lost
    #[arg(long)]
    pub shrink: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
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
    #[arg(value_name = "DISK")]
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

/// The options of `ebbd serve`.
#[derive(Clone, Debug, Default, Args)]
pub struct ServeArgs {
    /// Read the configuration file FILE, in the form of ebbd.toml(5); SIGHUP reads it again
    /// [default: no file]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Serve a volume: its export NAME, a STORE and options, such as
    /// disk=file:/path/to/image,size=1G,create=true. STORE is file:PATH, an NBD
    /// server's nbd://HOST/EXPORT, memory:SIZE or null:SIZE; options are size=SIZE, create=BOOL, read-only=BOOL, shared=BOOL,
    /// direct=auto|on|off, cache=none|writethrough|writeback, bdi=NAME, default=BOOL,
    /// max-buffer-pages=N and buffer-squeeze-duration-ms=N. A comma in a path is written twice. May be given several times
    /// [default: the volumes of the file]
    #[arg(long = "volume", value_name = "NAME=STORE[,option=value]...")]
    pub volumes: Vec<String>,

    /// Listen at an address: unix:/path or tcp:HOST:PORT. May be given several times. Refused if
    /// the service manager passed sockets [default: the addresses of the file]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<String>,

    /// Check the configuration and the stores, print ok for each, and exit without serving
    #[arg(long)]
    pub check: bool,

    /// Refuse to start if a volume cannot be opened, instead of serving the other volumes and trying
    /// to open it again [default: false]
    #[arg(long)]
    pub strict: bool,

    /// Encrypt connections: off, on (if the client requests it) or require (always) [default: off]
    #[arg(long, value_name = "MODE", value_parser = choice::<TlsSetting>(), hide_possible_values = true)]
    pub tls: Option<TlsSetting>,

    /// The directory with ca-cert.pem, server-cert.pem and server-key.pem [default: none]
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<PathBuf>,

    /// The file of pre-shared keys, one "name:hexadecimal key" a line [default: none]
    #[arg(long, value_name = "FILE")]
    pub tls_psk: Option<PathBuf>,

    /// Refuse clients without a certificate signed by ca-cert.pem [default: false]
    #[arg(long)]
    pub tls_verify_peer: bool,

    /// The maximum number of NBD connections at a time, 1 to 65536 [default: 256]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_clients: Option<i64>,

    /// The largest payload of one READ or WRITE in bytes or with a unit K or M, 4K to 64M
    /// [default: 32M]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
    pub max_request: Option<Size>,

    /// The memory that the requests of one connection may hold, in bytes or with a unit K, M, G or T,
    /// at least the largest request [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
    pub connection_memory: Option<Size>,

    /// Worker threads, each with its own io_uring, 1 to 64 [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub workers: Option<i64>,

    /// The control socket: a unix socket at PATH for ebbd get, set, stat, pressure and resize, and
    /// for HTTP. Only the daemon's user may open it [default: the path of the file]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,

    /// Serve a web page with plots, and metrics for Prometheus, at this TCP address, such as
    /// 127.0.0.1:9477. Every client that can connect may read them [default: that of the file]
    #[arg(long, value_name = "HOST:PORT")]
    pub web: Option<String>,

    /// An additional host name under which browsers reach the page, such as the name of a proxy. May
    /// be given several times [default: the names of the file]
    #[arg(long, value_name = "NAME")]
    pub web_names: Vec<String>,

    /// Serve disks of Xen guests, too: those of `ebbd xen attach` and, if the kernel's backend is not
    /// loaded, those with the script block-ebbd [default: false]
    #[arg(long)]
    pub xen: bool,

    /// The number of free pages of 4096 bytes that each queue keeps for later requests, 0 to 1048576
    /// [default: 1024]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_buffer_pages: Option<i64>,

    /// How long page pools keep no free pages after a sign of memory pressure, in milliseconds,
    /// 0 to 60000 [default: 10]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub buffer_squeeze_duration_ms: Option<i64>,

    /// What happens to I/O memory that no request uses: lend (marked MADV_FREE), drop (returned on
    /// memory pressure), keep (never returned) or none (returned at once) [default: lend]
    #[arg(
        long,
        value_name = "MODE",
        value_parser = choice::<IdleMemory>(),
        hide_possible_values = true
    )]
    pub idle_memory: Option<IdleMemory>,
    /// The maximum size of the cache of all volumes together, 1M to 1T; with 0 it follows the
    /// memory of the host [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
    pub cache_max: Option<Size>,

    /// The size down to which the cache shrinks under memory pressure other than the last resort,
    /// 0 to 1T [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
    pub cache_min: Option<Size>,

    /// How long stopping the daemon, or removing a volume, may take to write dirty data, in
    /// seconds, 1 to 3600. After that, volumes with unwritten data are listed, and the exit status
    /// is 1 [default: 60]
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 60,
        hide_default_value = true,
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    pub drain: u64,

    /// The level of the log on stderr: error, warn, info or debug; each level includes the ones
    /// before it [default: info]
    #[arg(
        long,
        value_name = "LEVEL",
        value_parser = choice::<LogLevel>(),
        hide_possible_values = true
    )]
    pub log: Option<LogLevel>,
}

impl ServeArgs {
    /// The settings of the command line, for [`ebb_config::Config::load`].
    /// `inherited_sockets` is the number of listening sockets the service manager passed.
    pub fn overrides(&self, inherited_sockets: usize) -> Overrides {
        Overrides {
            volumes: self.volumes.clone(),
            listen: self.listen.clone(),
            tls: self.tls,
            tls_certificates: self.tls_certificates.clone(),
            tls_psk: self.tls_psk.clone(),
            tls_verify_peer: self.tls_verify_peer,
            max_clients: self.max_clients,
            max_request: self.max_request,
            connection_memory: self.connection_memory,
            workers: self.workers,
            log: self.log,
            control: self.control.clone(),
            web: self.web.clone(),
            web_names: self.web_names.clone(),
            xen: self.xen,
            max_buffer_pages: self.max_buffer_pages,
            buffer_squeeze_duration_ms: self.buffer_squeeze_duration_ms,
            idle_memory: self.idle_memory,
            cache_max: self.cache_max,
            cache_min: self.cache_min,
            inherited_sockets,
        }
    }
}

/// The words of a choice; clap suggests the nearest one for an unknown word.
fn choice<T: Choice + Send + Sync>() -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(T::names()).try_map(|word| T::parse(&word))
}

fn size(text: &str) -> Result<Size, String> {
    text.parse().map_err(|error: ebb_config::SizeError| format!("{error}; {}", error.remedy()))
}

/// The completion script for `shell`, as text in UTF-8.
pub fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "ebbd", &mut script);
    script
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;
    use ebb_config::keys::{NBD, TOP, VOLUME};

    fn serve(args: &[&str]) -> Result<ServeArgs, clap::Error> {
        match Cli::try_parse_from(["ebbd", "serve"].iter().chain(args))?.command {
            Command::Serve(args) => Ok(*args),
            other => panic!("not serve: {other:?}"),
        }
    }

    #[test]
    fn the_command_definition_passes_the_checks_of_clap() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_option_is_passed_to_the_configuration() {
        let args = serve(&[
            "--config=c.toml",
            "--volume=a=memory:1G",
            "--volume=b=null:1G,default=true",
            "--listen=unix:/a",
            "--listen=tcp:h:1",
            "--check",
            "--tls=require",
            "--tls-certificates=/c",
            "--tls-psk=/p",
            "--tls-verify-peer",
            "--max-clients=2",
            "--max-request=4K",
            "--connection-memory=5K",
            "--workers=3",
            "--control=/c",
            "--web=h:2",
            "--web-names=a",
            "--web-names=b",
            "--xen",
            "--max-buffer-pages=4",
            "--buffer-squeeze-duration-ms=5",
            "--idle-memory=drop",
            "--cache-max=6M",
            "--cache-min=7K",
            "--log=debug",
        ])
        .unwrap();
        assert_eq!(args.config, Some("c.toml".into()));
        assert!(args.check);
        assert_eq!(
            args.overrides(7),
            Overrides {
                volumes: vec!["a=memory:1G".into(), "b=null:1G,default=true".into()],
                listen: vec!["unix:/a".into(), "tcp:h:1".into()],
                tls: Some(TlsSetting::Require),
                tls_certificates: Some("/c".into()),
                tls_psk: Some("/p".into()),
                tls_verify_peer: true,
                max_clients: Some(2),
                max_request: Some(Size::new(4096)),
                connection_memory: Some(Size::new(5120)),
                workers: Some(3),
                log: Some(LogLevel::Debug),
                control: Some("/c".into()),
                web: Some("h:2".into()),
                web_names: vec!["a".into(), "b".into()],
                xen: true,
                max_buffer_pages: Some(4),
                buffer_squeeze_duration_ms: Some(5),
                idle_memory: Some(IdleMemory::Drop),
                cache_max: Some(Size::new(6 << 20)),
                cache_min: Some(Size::new(7 << 10)),
                inherited_sockets: 7,
            }
        );
    }

    #[test]
    fn without_options_there_are_no_overrides() {
        assert_eq!(serve(&[]).unwrap().overrides(0), Overrides::default());
    }

    #[test]
    fn an_invalid_option_is_refused_with_a_suggestion() {
        for (args, advice) in [
            (["--tls", "required"], "'require'"),
            (["--log", "inf"], "'info'"),
            (["--max-reqest", "4K"], "'--max-request'"),
            (["--max-request", "1.5G"], "next smaller unit"),
            (["--max-request", "-4K"], "negative"),
            (["--connection-memory", "1KB"], "the units are"),
        ] {
            let text = serve(&args).unwrap_err().to_string();
            assert!(text.contains(advice), "{args:?}: {text}");
        }
    }

    #[test]
    fn the_help_texts_and_the_keys_agree() {
        let mut command = Cli::command();
        let serve = command.find_subcommand_mut("serve").unwrap();
        for key in TOP.keys.iter().chain(NBD.keys) {
            let option = key.option_name();
            let arg = serve
                .get_arguments()
                .find(|arg| arg.get_long() == Some(&option))
                .unwrap_or_else(|| panic!("no option --{option}"));
            let help = arg.get_help().unwrap().to_string();
            if !key.default.is_empty() {
                let default = format!("[default: {}]", key.default);
                assert!(help.contains(&default), "--{option}: {help}");
            }
        }
        let volume = serve.get_arguments().find(|arg| arg.get_long() == Some("volume")).unwrap();
        let help = volume.get_help().unwrap().to_string();
        for key in VOLUME.keys.iter().filter(|key| key.name != "store") {
            assert!(help.contains(&format!("{}=", key.option_name())), "{}", key.name);
        }
        for arg in serve.get_arguments().filter(|arg| arg.get_long() != Some("check")) {
            let help = arg.get_help().unwrap().to_string();
            assert!(help.contains("[default: "), "{}", arg.get_id());
        }
    }

    #[test]
    fn there_are_completions_for_every_shell() {
        for shell in Shell::value_variants() {
            let script = String::from_utf8(completions(*shell)).unwrap();
            assert!(script.contains("connection-memory"), "{shell}");
        }
    }
}
