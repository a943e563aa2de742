//! The rules of the broker ([`ebb_broker`]), and the programs for keys, from the configuration,
//! which the broker reads by itself: what the daemon writes to the state directory makes no rule.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ebb_access::Network;
use ebb_broker::{Broker, BrokerError, BrokerRules, PathRules, ProgramHelper, ServerRules};
use ebb_config::{
    Config, ConnectTo, KeyFile, KeySource, Listen, NbdHost, NbdUri, NbdUriKeys, RbdUri,
    SandboxMode, ServeArgs, StoreUri, VhostSocket, VolumeConfig, VolumeOrigin,
};
use ebb_io::RING_OPERATIONS;

/// Files that the C library, OpenSSL, librados and the daemon's own statistics read, and folders
/// with nothing else in them. No folder with secrets: not `/etc`, `/proc` or `/run`. Files of
/// processes in `/proc` are the broker's part.
const READ: [&str; 71] = [
    "/etc/crypto-policies",
    "/etc/fstab",
    "/etc/gai.conf",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/lsb-release",
    "/etc/networks",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/etc/passwd",
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/openssl.cnf",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl/cert.pem",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/dev/random",
    "/dev/urandom",
    "/dev/zero",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/ca-certificates",
    "/usr/share/zoneinfo",
    "/proc/cpuinfo",
    "/proc/filesystems",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/pressure",
    "/proc/stat",
    "/proc/sys/crypto/fips_enabled",
    "/proc/sys/fs/file-max",
    "/proc/sys/fs/nr_open",
    "/proc/sys/kernel/cap_last_cap",
    "/proc/sys/kernel/io_uring_disabled",
    "/proc/sys/kernel/ngroups_max",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/pid_max",
    "/proc/sys/kernel/random",
    "/proc/sys/kernel/threads-max",
    "/proc/sys/net/core/somaxconn",
    "/proc/sys/net/ipv4/tcp_fastopen",
    "/proc/sys/net/ipv6",
    "/proc/sys/vm",
    "/proc/uptime",
    "/proc/version",
    "/proc/vmstat",
    "/proc/xen/capabilities",
    "/proc/zoneinfo",
    "/sys/block",
    "/sys/bus/xen-backend",
    "/sys/class/bdi",
    "/sys/class/block",
    "/sys/dev/block",
    "/sys/devices",
    "/sys/fs/cgroup",
    "/sys/hypervisor",
    "/sys/kernel/mm",
    "/sys/module/xen_blkback",
    "/sys/virtual",
];
/// What the daemon writes to on any host. What of `/proc` and of control groups it may write to,
/// the broker says itself.
const WRITE: [&str; 7] = [
    "/dev/null",
    "/dev/xen",
    "/run/ebbd",
    "/run/xenstored",
    "/proc/pressure",
    "/proc/xen/xenbus",
    "/sys/fs/cgroup",
];
/// Files by which the C library finds addresses, so that they make rules as the configuration does.
const ADDRESSES: [&str; 4] =
    ["/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/host.conf"];
/// Services that the C library asks for names.
const NAMES: [&str; 5] = [
    "/run/nscd",
    "/var/run/nscd",
    "/run/systemd/resolve",
    "/run/systemd/userdb",
    "/var/lib/sss/pipes",
];
/// Folders that the service manager names.
const FOLDERS: [&str; 3] = ["RUNTIME_DIRECTORY", "STATE_DIRECTORY", "CREDENTIALS_DIRECTORY"];

/// What changes when the configuration file does; `None` if it is no file that can be read again, as a pipe.
type Stamp = Option<(u64, u64, i64, i64)>;

fn stamp(file: Option<&Path>) -> Stamp {
    let found = std::fs::metadata(file?).ok().filter(std::fs::Metadata::is_file)?;
    Some((found.ino(), found.size(), found.mtime(), found.mtime_nsec()))
}

/// What versions of the configuration have named.
struct Named {
    stamp: Stamp,
    /// A volume that a later version does not name may still be served, or have data to write.
    paths: PathRules,
    servers: ServerRules,
}

/// Makes the broker. To be called while the process has one thread; `begin` starts the broker's log.
///
/// # Errors
/// [`BrokerError::Process`].
pub(crate) fn start(
    config: &Config,
    args: &ServeArgs,
    begin: impl FnOnce(),
) -> Result<Broker, BrokerError> {
    let args = args.clone();
    let file = args.config.as_deref();
    let mut named =
        Named { stamp: stamp(file), paths: PathRules::default(), servers: ServerRules::default() };
    let now = named.rules(config, file);
    let named = Mutex::new(named);
    let source = move || {
        let file = args.config.as_deref();
        let mut named = named.lock().unwrap_or_else(PoisonError::into_inner);
        let found = stamp(file);
        if named.stamp == found || found.is_none() {
            return None;
        }
        let config = Config::load_without_state(&args).ok()?;
        named.stamp = found;
        Some(named.rules(&config, file))
    };
    Broker::start((now, Box::new(source)), &RING_OPERATIONS, begin)
}

impl Named {
    /// What the daemon may open and connect to by this configuration, and by its earlier versions. What its two keys allow is of this
    /// version alone.
    fn rules(&mut self, config: &Config, file: Option<&Path>) -> BrokerRules {
        let paths = config.open_paths.as_ref().map(|open| {
            let named = paths(config, file);
            self.paths.read.extend(named.read);
            self.paths.write.extend(named.write);
            self.paths.write_in.extend(named.write_in);
            let mut paths = self.paths.clone();
            paths.write.extend(open.iter().cloned());
            paths
        });
        let servers = config.connect_to.as_ref().map(|connect| {
            let named = servers(config);
            self.servers.networks.extend(named.networks);
            self.servers.names.extend(named.names);
            self.servers.listen.extend(named.listen);
            let mut servers = self.servers.clone();
            add_entries(&mut servers, connect);
            servers
        });
        BrokerRules { paths, servers, kept: kept(file) }
    }
}

/// Files of the host that the broker opens only because the daemon itself reads them: no disks.
#[derive(Debug, Default)]
pub(crate) struct HostFiles {
    /// The places below which a file is a disk; `None` if the broker has no rules.
    disks: Option<Vec<PathBuf>>,
    /// Folders in which a file is a disk.
    folders: Vec<PathBuf>,
}

impl HostFiles {
    pub(crate) fn of(config: &Config) -> HostFiles {
        let guarded = config.open_paths.as_ref().filter(|_| config.sandbox == SandboxMode::On);
        let Some(open_paths) = guarded else { return HostFiles::default() };
        let mut disks = open_paths.clone();
        let mut folders = Vec::new();
        for volume in volumes(config) {
            match &volume.store {
                StoreUri::File(file) => folders.push(folder_of(file)),
                StoreUri::Qcow2(file) => disks.push(whole(file)),
                _ => {}
            }
        }
        HostFiles { disks: Some(disks), folders }
    }

    /// Returns true if no file is one of them.
    pub(crate) fn is_empty(&self) -> bool {
        self.disks.is_none()
    }

    /// Returns true if the file at `path` is one of them. Compares as the broker does.
    pub(crate) fn has(&self, path: &Path) -> bool {
        let Some(disks) = &self.disks else { return false };
        let path = whole(path);
        READ.iter().any(|at| path.starts_with(at))
            && !disks.iter().any(|at| path.starts_with(at))
            && !self.folders.iter().any(|folder| path.parent() == Some(folder))
    }
}

/// What the broker reads its rules from.
fn kept(file: Option<&Path>) -> HashSet<PathBuf> {
    let addresses = ADDRESSES.iter().map(Path::new);
    let names = addresses.chain(file).flat_map(|file| [whole(file), real(file)]);
    names.collect()
}

/// Makes the process that runs programs for keys, if the configuration names one. To be called
/// while the process has one thread.
///
/// # Errors
/// [`BrokerError::Process`].
pub(crate) fn start_programs(
    config: &Config,
    args: &ServeArgs,
) -> Result<Option<ProgramHelper>, BrokerError> {
    let now = commands(config);
    if now.is_empty() {
        return Ok(None);
    }
    let args = args.clone();
    let known = Mutex::new((stamp(args.config.as_deref()), now));
    let names = move |words: &[String]| {
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let found = stamp(args.config.as_deref());
        if known.0 != found
            && found.is_some()
            && let Ok(config) = Config::load_without_state(&args)
        {
            *known = (found, commands(&config));
        }
        known.1.contains(words)
    };
    ProgramHelper::start(Box::new(names)).map(Some)
}

/// The programs that the configuration names, each with its arguments.
fn commands(config: &Config) -> HashSet<Vec<String>> {
    let command = |volume: &VolumeConfig| match &volume.encryption {
        Some(KeySource::Command(words)) => Some(words.clone()),
        _ => None,
    };
    volumes(config).filter_map(command).collect()
}

/// The volumes that the configuration names, as it names them.
fn volumes(config: &Config) -> impl Iterator<Item = &VolumeConfig> {
    let named =
        |name: &String| matches!(config.origins.get(name), Some(VolumeOrigin::Configuration(_)));
    let named = config.volumes.iter().filter(move |(name, _)| named(name));
    named.map(|(name, volume)| config.replaced.get(name).unwrap_or(volume))
}

/// The path from the root: the daemon cannot change its folder.
fn whole(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

/// Where it is if links lead to it.
fn real(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.into())
}

/// The folder that a file is in. Files are made beside it, as snapshots, and before they get its name.
fn folder_of(path: &Path) -> PathBuf {
    let path = whole(path);
    path.parent().map_or_else(|| path.clone(), Path::to_owned)
}

/// The folder that a socket is in, and where it is if links lead to it: its mode is set by a descriptor, which has no links.
fn folders_of(socket: &Path) -> impl Iterator<Item = PathBuf> {
    let folder = folder_of(socket);
    [real(&folder), folder].into_iter()
}

fn paths(config: &Config, file: Option<&Path>) -> PathRules {
    let mut rules = PathRules {
        read: READ.iter().map(PathBuf::from).chain(file.map(whole)).collect(),
        write: WRITE.iter().chain(&NAMES).map(PathBuf::from).collect(),
        write_in: HashSet::new(),
    };
    // For the message of a panic.
    rules.read.extend(std::env::current_exe());
    let set = FOLDERS.iter().filter_map(std::env::var_os);
    rules.write.extend(set.flat_map(|all| {
        let all = all.to_string_lossy().into_owned();
        all.split(':').map(PathBuf::from).collect::<Vec<_>>()
    }));
    rules.write.extend(std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from));
    let files = [&config.web_tokens, &config.web_tls_certificates];
    rules.read.extend(files.into_iter().flatten().map(|path| whole(path)));
    let tls = [&config.nbd.tls_certificates, &config.nbd.tls_psk];
    rules.read.extend(tls.into_iter().flatten().map(|path| whole(path)));
    let sockets = config.listen.iter().filter_map(|listen| match listen {
        Listen::Unix(path) => Some(path.as_path()),
        Listen::Tcp(_) => None,
    });
    let inside = config.vhost_user.as_ref().map(|folder| folder.join("socket"));
    let sockets = sockets.chain(config.control.as_deref()).chain(inside.as_deref());
    rules.write_in.extend(sockets.flat_map(folders_of));
    rules.write.extend(config.state.iter().map(|path| whole(path)));
    rules.write.extend(config.vhost_user.iter().map(|path| whole(path)));
    for volume in volumes(config) {
        match &volume.store {
            StoreUri::File(path) if path.starts_with("/dev") => rules.write.extend([whole(path)]),
            StoreUri::File(path) => rules.write_in.extend([folder_of(path)]),
            StoreUri::Qcow2(path) => rules.read.extend([whole(path)]),
            StoreUri::Nbd(uri) => of_nbd(uri, &mut rules),
            StoreUri::Rbd(uri) => of_rbd(uri, &mut rules),
            StoreUri::Memory(_) | StoreUri::Null(_) => {}
        }
        if let Some(VhostSocket::Path(path)) = &volume.vhost_user {
            rules.write_in.extend(folders_of(path));
        }
        if let Some(KeySource::File(key)) = &volume.encryption {
            rules.read.extend(key_path(key));
        }
    }
    rules
}

fn key_path(key: &KeyFile) -> Option<PathBuf> {
    match key {
        KeyFile::Path(path) => Some(whole(path)),
        // It is in the folder of credentials.
        KeyFile::Credential(_) => None,
    }
}

fn of_nbd(uri: &NbdUri, rules: &mut PathRules) {
    if let NbdHost::Unix(path) = &uri.server {
        rules.write.insert(whole(path));
    }
    match uri.tls.as_ref().map(|tls| &tls.keys) {
        Some(NbdUriKeys::Certificates(path) | NbdUriKeys::Psk(path, _)) => {
            rules.read.insert(whole(path));
        }
        Some(NbdUriKeys::System) | None => {}
    }
}

fn of_rbd(uri: &RbdUri, rules: &mut PathRules) {
    // The configuration names the files of keys, often beside it; librbd may have a log and a socket.
    rules.read.insert(uri.conf.as_deref().map_or_else(|| "/etc/ceph".into(), folder_of));
    rules.read.extend(uri.keyring.as_ref().and_then(key_path));
    rules.read.extend(uri.encryption.as_ref().and_then(|it| key_path(&it.passphrase)));
    rules.write.extend(["/var/log/ceph", "/run/ceph", "/var/run/ceph"].map(PathBuf::from));
}

/// Adds what `connect_to` allows.
fn add_entries(rules: &mut ServerRules, connect: &[ConnectTo]) {
    for entry in connect {
        match entry {
            ConnectTo::Network(network, port) => rules.networks.extend([(*network, *port)]),
            ConnectTo::Host(name, port) => rules.names.extend([(name.clone(), *port)]),
        }
    }
}

fn servers(config: &Config) -> ServerRules {
    let mut rules = ServerRules::default();
    for volume in volumes(config) {
        if let StoreUri::Nbd(uri) = &volume.store
            && let NbdHost::Tcp(host, port) = &uri.server
        {
            match Network::parse(host) {
                Ok(address) => rules.networks.extend([(address, Some(*port))]),
                Err(_) => rules.names.extend([(host.clone(), Some(*port))]),
            }
        }
    }
    let listen = config.listen.iter().filter_map(|listen| match listen {
        Listen::Tcp(address) => Some(address.clone()),
        Listen::Unix(_) => None,
    });
    rules.listen = listen.chain(config.web.clone()).collect();
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> BrokerRules {
        let args = ServeArgs::default();
        let config = Config::parse(text, Path::new("/etc/ebbd/ebbd.toml"), &args).unwrap();
        none().rules(&config, Some(Path::new("/etc/ebbd/ebbd.toml")))
    }

    fn none() -> Named {
        Named { stamp: None, paths: PathRules::default(), servers: ServerRules::default() }
    }

    #[test]
    fn what_an_earlier_version_named_stays_and_what_its_keys_allowed_does_not() {
        let mut named = none();
        let mut next = |text: &str| {
            let config = Config::parse(text, Path::new("x"), &ServeArgs::default()).unwrap();
            let rules = named.rules(&config, None);
            (rules.paths.unwrap(), rules.servers.unwrap())
        };
        next(
            "listen = ['unix:/s/s']\nopen_paths = ['/old']\nconnect_to = ['10.0.0.1']\n[volume.a]\nstore = 'nbd://a/'
            [volume.b]\nstore = 'file:/b/b'",
        );
        let (paths, servers) = next(
            "listen = ['unix:/s/s']\nopen_paths = ['/new']\nconnect_to = ['10.0.0.2']\n[volume.c]\nstore = 'nbd://c/'",
        );
        let has = |list: &HashSet<PathBuf>, path: &str| list.contains(Path::new(path));
        assert!(
            has(&paths.write_in, "/b") && has(&paths.write, "/new") && !has(&paths.write, "/old")
        );
        let names = [("a".into(), Some(10809)), ("c".into(), Some(10809))];
        assert_eq!(servers.names, HashSet::from(names));
        assert_eq!(servers.networks.len(), 1);
    }

    #[test]
    fn relative_paths_are_those_of_the_folder_that_the_daemon_runs_in() {
        let rules = parse("listen = ['unix:s']\nopen_paths = []\n[volume.a]\nstore = 'file:disk'");
        let here = std::env::current_dir().unwrap();
        assert!(rules.paths.unwrap().write_in.contains(&here));
    }

    #[test]
    fn without_the_keys_all_is_allowed_but_changing_the_rules() {
        let rules = parse("listen = ['unix:/s']\n[volume.a]\nstore = 'file:/srv/a/disk'");
        assert!(rules.paths.is_none() && rules.servers.is_none());
        assert!(rules.kept.contains(Path::new("/etc/ebbd/ebbd.toml")), "{:?}", rules.kept);
        assert!(rules.kept.contains(Path::new("/etc/hosts")), "{:?}", rules.kept);
    }

    #[test]
    fn no_secret_of_the_host_is_named() {
        let rules = parse("listen = ['unix:/s/s']\nopen_paths = []\n[volume.a]\nstore = 'null:1M'");
        let paths = rules.paths.unwrap();
        for secret in [
            "/etc/shadow",
            "/etc/ssl/private/key.pem",
            "/etc/ceph/ceph.client.admin.keyring",
            "/etc/ebbd/other.toml",
            "/proc/kmsg",
            "/proc/kcore",
            "/proc/kallsyms",
            "/proc/sys/kernel/core_pattern",
            "/run/systemd/private",
            "/run/credentials/other/key",
            "/sys/kernel/debug/x",
            "/sys/firmware/efi/efivars/x",
            "/usr/local/etc/key",
        ] {
            let lists = [&paths.read, &paths.write];
            let named = |list: &&HashSet<PathBuf>| {
                Path::new(secret).ancestors().any(|at| list.contains(at))
            };
            assert!(!lists.iter().any(named), "{secret}");
        }
    }

    #[test]
    fn files_of_the_host_are_no_disks_but_in_open_paths() {
        let is = |path: &str, keys: &str| {
            let text = format!(
                "listen = ['unix:/s']\n{keys}\n[volume.a]\nstore = 'file:/usr/lib/vm/a.img'"
            );
            let config = Config::parse(&text, Path::new("x"), &ServeArgs::default()).unwrap();
            HostFiles::of(&config).has(Path::new(path))
        };
        for host in ["/etc/passwd", "/etc/hosts", "/usr/lib/x.img", "/proc/cpuinfo"] {
            assert!(
                is(host, "open_paths = []") && is(host, "open_paths = ['/srv/disks']"),
                "{host}"
            );
            assert!(!is(host, "") && !is(host, "open_paths = []\nsandbox = 'off'"), "{host}");
        }
        assert!(!is("/usr/lib/disks/x.img", "open_paths = ['/usr/lib/disks']"));
        for other in ["/srv/disks/x.img", "/dev/vda", "/etc/passwd.img", "/usr/lib/vm/b.img"] {
            assert!(!is(other, "open_paths = []"), "{other}");
        }
    }

    #[test]
    fn only_programs_of_the_configuration_are_named() {
        let text = "listen = ['unix:/s']\n[volume.a]\nstore = 'file:/a'\nencryption = 'command:/bin/key a'\n\
                    [volume.b]\nstore = 'file:/b'\nencryption = 'key-file:/k'";
        let mut config = Config::parse(text, Path::new("x"), &ServeArgs::default()).unwrap();
        let words = vec!["/bin/key".to_owned(), "a".to_owned()];
        assert_eq!(commands(&config), HashSet::from([words]));
        config.origins.insert("a".into(), VolumeOrigin::State);
        assert_eq!(commands(&config), HashSet::new());
    }

    #[test]
    fn what_the_configuration_names_is_allowed_beside_the_keys() {
        let rules = parse(
            "listen = ['unix:/s/nbd/sock', 'tcp:localhost:7']\nopen_paths = ['/srv/more']\nconnect_to = ['10.0.0.0/8', 'b:9']
            [volume.a]\nstore = 'file:/srv/a/disk'\nencryption = 'key-file:/k/a'
            [volume.b]\nstore = 'file:/dev/vg/b'
            [volume.c]\nstore = 'qcow2:/base/c'
            [volume.d]\nstore = 'nbd://store:1/'
            [volume.e]\nstore = 'nbd://[fd00::1]:2/'
            [volume.f]\nstore = 'nbd+unix:///?socket=/r/f'",
        );
        let (paths, servers) = (rules.paths.unwrap(), rules.servers.unwrap());
        let has = |list: &HashSet<PathBuf>, path: &str| list.contains(Path::new(path));
        for path in ["/srv/more", "/dev/vg/b", "/r/f"] {
            assert!(has(&paths.write, path), "{path}: {paths:?}");
        }
        for path in ["/srv/a", "/s/nbd"] {
            assert!(has(&paths.write_in, path), "{path}: {paths:?}");
        }
        for path in ["/base/c", "/k/a", "/etc/ebbd/ebbd.toml"] {
            assert!(has(&paths.read, path), "{path}: {paths:?}");
        }
        for none in ["/", "/dev", "/srv", "/k", "/run", "/base"] {
            for list in [&paths.write, &paths.write_in, &paths.read] {
                assert!(!has(list, none), "{none}: {paths:?}");
            }
        }
        let names = [("b".into(), Some(9)), ("store".into(), Some(1))];
        assert_eq!(servers.names, HashSet::from(names));
        assert_eq!(servers.networks.len(), 2);
        assert_eq!(servers.listen, HashSet::from(["localhost:7".into()]));
    }
}
