//! The command line: what can be typed, and how it reads in `--help`.
//!
//! Here a value is only checked for its form; [`ServeArgs::overrides`] hands everything to
//! [`crate::config`], which checks ranges and what belongs together for the command line and the
//! file alike. The manual pages and the shell completions are made from these definitions.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::config::{Choice, IdleMemory, LogLevel, Overrides, Tls};
use crate::control::MAX_HOLD_SECONDS;
use crate::size::Size;

/// Serve virtual disks over NBD
///
/// ebbd serves virtual disks, called volumes, to guests and tools over the NBD protocol, on unix
/// sockets and TCP. A volume lives in a file, a block device or memory.
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
    /// Serve volumes until told to stop
    ///
    /// Serves the volumes of the configuration file and of the command line. Settings of the
    /// command line win over those of the file; addresses of both are used; a volume of the
    /// command line replaces one of the same name in the file.
    Serve(Box<ServeArgs>),
    /// Print parameters of a running daemon
    ///
    /// Prints the value of one parameter, or a table of all with origin, range and unit. They are
    /// described in docs/parameters.
    Get(GetArgs),
    /// Set a parameter of a running daemon
    ///
    /// Sets a parameter until the daemon ends, or until the configuration is read again and says
    /// something else about it than before. The change is printed as NAME: OLD -> NEW.
    Set(SetArgs),
    /// Print what a running daemon does
    ///
    /// Prints memory pressure, volumes, backing devices, memory, zones and page pools as tables. LIMIT,
    /// USED, FREE and WSS of a zone are blocks of its SIZE in bytes (LIMIT 0 is none); EMPTY is the
    /// time since its caches were last empty. FREE, LENT and SQUEEZED of a pool are pages of 4096
    /// bytes. Times are seconds.
    ///
    /// Of a backing device (BDI) DIRTY waits to be written and WRITEBACK is on its way; both
    /// together are at most THRESH, which is SHARE of the limit of all dirty data. RATE/S is what it
    /// is estimated to write, BUSY how much of the last second it did. PAUSES counts writes that
    /// were held up, LONGEST is the longest of them. MIN, MAX, MAXBYTES and STRICT are its parameters
    /// min_ratio, max_ratio, max_bytes and strict_limit.
    Stat(StatArgs),
    /// Tell a running daemon of memory pressure
    ///
    /// Publishes a level of memory pressure inside the daemon as if the host had asked for memory:
    /// L0 (calm), L1 (squeeze: pools of free pages empty for a moment), L2 (drain: caches empty,
    /// too) or L3 (last resort: each worker gives back all it can). A level falls by itself.
    Pressure(PressureArgs),
    /// Give a volume in use another size
    ///
    /// Makes the file of a volume SIZE long, or, without SIZE, takes note of the size that its file or
    /// block device has by now. A disk of a Xen guest grows at once; an NBD client keeps the size it was
    /// told when it connected, and learns the new one when it connects again. Prints VOLUME: OLD -> NEW
    /// in bytes. The configuration is not changed: a `size` there must be corrected by hand.
    Resize(ResizeArgs),
    /// Attach a volume to a Xen guest, or detach it
    ///
    /// Writes the nodes of a disk into xenstore, as a toolstack does: the guest's own driver
    /// (xen-blkfront in Linux) finds the disk, and a daemon that serves Xen serves it. With detach
    /// the guest is asked to let go of the disk, and its nodes are removed. Runs in dom0, as root.
    Xen(XenArgs),
    /// Print the completion script for a shell
    Completions {
        /// The shell to complete for
        shell: Shell,
    },
    /// Write the manual pages
    Man {
        /// The directory to write ebbd.1, ebbd.toml.5 and the pages of the commands to; it is made
        /// if absent [default: the working directory]
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
    /// The parameter; without one a table of all is printed
    #[arg(value_name = "NAME")]
    pub name: Option<String>,

    /// Print what counts for this volume: its own value, or else the daemon's
    #[arg(long, value_name = "VOLUME")]
    pub volume: Option<String>,

    /// Print what counts for this backing device; `ebbd stat bdi` lists them
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

    /// Go back to what the configuration says
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

    /// Show memory flowing: a table per second, or per N seconds, of what each volume read, wrote,
    /// found in the cache, and holds of it; until interrupted
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

    /// It may become smaller: the data beyond the new end is lost
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

    /// What the guest calls the disk: xvda to xvdz, xvdaa and so on
    #[arg(value_name = "DISK")]
    pub disk: String,

    /// The volume to attach
    #[arg(value_name = "VOLUME", required_if_eq("action", "attach"))]
    pub volume: Option<String>,

    /// Attach it so that the guest can only read
    #[arg(long)]
    pub read_only: bool,

    /// Detach it even if the guest does not let go
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

    /// Check the configuration and the stores, say ok for each, and exit without serving
    #[arg(long)]
    pub check: bool,

    /// Refuse to start if a volume cannot be opened, instead of serving the others and trying it
    /// again [default: false]
    #[arg(long)]
    pub strict: bool,

    /// Encrypt connections: off, on (if the client asks) or require (always) [default: off]
    #[arg(long, value_name = "MODE", value_parser = choice::<Tls>(), hide_possible_values = true)]
    pub tls: Option<Tls>,

    /// The directory with ca-cert.pem, server-cert.pem and server-key.pem [default: none]
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<PathBuf>,

    /// The file of pre-shared keys, one "name:hexadecimal key" a line [default: none]
    #[arg(long, value_name = "FILE")]
    pub tls_psk: Option<PathBuf>,

    /// Turn clients away that show no certificate signed by ca-cert.pem [default: false]
    #[arg(long)]
    pub tls_verify_peer: bool,

    /// Connections the daemon holds at a time, 1 to 65536 [default: 256]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_clients: Option<i64>,

    /// The largest payload of one READ or WRITE in bytes or with a unit K or M, 4K to 64M
    /// [default: 32M]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
    pub max_request: Option<Size>,

    /// The memory the requests of one connection may hold, in bytes or with a unit K, M, G or T,
    /// at least the largest request [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
    pub connection_memory: Option<Size>,

    /// Worker threads, each with its own io_uring, 1 to 64 [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub workers: Option<i64>,

    /// Be controlled through a unix socket at PATH, by ebbd get, set, stat and pressure, and by
    /// HTTP. Only the daemon's user may open it [default: the path of the file]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,

    /// Show a page with plots, and metrics for Prometheus, at this TCP address to everybody who can
    /// connect, such as 127.0.0.1:9477 [default: that of the file]
    #[arg(long, value_name = "HOST:PORT")]
    pub web: Option<String>,

    /// A further name under which browsers reach the page, such as that of a proxy. May be given
    /// several times [default: the names of the file]
    #[arg(long, value_name = "NAME")]
    pub web_names: Vec<String>,

    /// Serve disks of Xen guests, too: those of `ebbd xen attach`, and where the kernel's own
    /// backend is not loaded those with the script block-ebbd [default: false]
    #[arg(long)]
    pub xen: bool,

    /// Free pages of 4096 bytes each queue keeps for requests to come, 0 to 1048576
    /// [default: 1024]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_buffer_pages: Option<i64>,

    /// How long pools of free pages keep nothing after a sign of memory pressure, in milliseconds,
    /// 0 to 60000 [default: 10]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub buffer_squeeze_duration_ms: Option<i64>,

    /// What becomes of I/O memory that no request uses: lend (to the kernel), drop (on memory
    /// pressure), keep (for ever) or none (returned at once) [default: lend]
    #[arg(
        long,
        value_name = "MODE",
        value_parser = choice::<IdleMemory>(),
        hide_possible_values = true
    )]
    pub idle_memory: Option<IdleMemory>,
    /// The most memory the cache of all volumes together may hold, 1M to 1T; 0 leaves it to the
    /// host [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
    pub cache_max: Option<Size>,

    /// What the cache keeps under memory pressure short of the last resort, 0 to 1T [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
    pub cache_min: Option<Size>,

    /// How long stopping, or withdrawing a volume, may take to write what is in memory only, in
    /// seconds, 1 to 3600. Then what was not written is listed, and the exit status is 1
    /// [default: 60]
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 60,
        hide_default_value = true,
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    pub drain: u64,

    /// What goes to the log on stderr: error, warn, info or debug, each with all before it
    /// [default: info]
    #[arg(
        long,
        value_name = "LEVEL",
        value_parser = choice::<LogLevel>(),
        hide_possible_values = true
    )]
    pub log: Option<LogLevel>,
}

impl ServeArgs {
    /// The settings of the command line, for [`crate::config::Config::load`].
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

/// The words of a choice; clap suggests the nearest for one it does not know.
fn choice<T: Choice + Send + Sync>() -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(T::names()).try_map(|word| T::parse(&word))
}

fn size(text: &str) -> Result<Size, String> {
    text.parse().map_err(|error: crate::size::SizeError| format!("{error}; {}", error.remedy()))
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
    use crate::config::keys::{NBD, TOP, VOLUME};

    fn serve(args: &[&str]) -> Result<ServeArgs, clap::Error> {
        match Cli::try_parse_from(["ebbd", "serve"].iter().chain(args))?.command {
            Command::Serve(args) => Ok(*args),
            other => panic!("not serve: {other:?}"),
        }
    }

    #[test]
    fn clap_finds_no_fault() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_option_arrives() {
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
                tls: Some(Tls::Require),
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
    fn nothing_given_overrides_nothing() {
        assert_eq!(serve(&[]).unwrap().overrides(0), Overrides::default());
    }

    #[test]
    fn what_clap_refuses_comes_with_advice() {
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
    fn the_help_and_the_keys_agree() {
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
    fn completions_for_every_shell() {
        for shell in Shell::value_variants() {
            let script = String::from_utf8(completions(*shell)).unwrap();
            assert!(script.contains("connection-memory"), "{shell}");
        }
    }
}
