//! The rules of the broker ([`ebb_broker`]), from the configuration, which the broker reads by itself: what the daemon writes to the state
//! directory makes no rule.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ebb_broker::{Broker, BrokerError, BrokerRules, PathRules, ServerNetwork, ServerRules};
use ebb_config::{
    Config, ConnectTo, KeyFile, KeySource, Listen, NbdHost, NbdUri, NbdUriKeys, RbdUri, ServeArgs,
    StoreUri, VhostSocket,
};
use ebb_io::RING_OPERATIONS;

/// What the C library, libraries that are loaded, and the daemon's own statistics read.
const READ: [&str; 9] = [
    "/etc",
    "/usr",
    "/lib",
    "/lib64",
    "/proc",
    "/sys",
    "/run/systemd",
    "/dev/urandom",
    "/dev/random",
];
/// What the daemon writes to on any host. What of `/proc` it may write to, the broker says itself.
const WRITE: [&str; 6] =
    ["/dev/null", "/dev/xen", "/run/ebbd", "/run/xenstored", "/proc", "/sys/fs/cgroup"];
/// Folders that the service manager names.
const FOLDERS: [&str; 3] = ["RUNTIME_DIRECTORY", "STATE_DIRECTORY", "CREDENTIALS_DIRECTORY"];

/// What changes when the configuration file does.
type Stamp = Option<(u64, u64, i64, i64)>;

fn stamp(file: Option<&Path>) -> Stamp {
    let found = std::fs::metadata(file?).ok()?;
    Some((found.ino(), found.size(), found.mtime(), found.mtime_nsec()))
}

/// Makes the broker. To be called while the process has one thread; `begin` starts the broker's log.
///
/// # Errors
/// [`BrokerError::Process`].
pub(crate) fn start(args: &ServeArgs, begin: impl FnOnce()) -> Result<Broker, BrokerError> {
    let args = args.clone();
    let seen: Mutex<Option<Stamp>> = Mutex::new(None);
    let source = move || {
        let found = Some(stamp(args.config.as_deref()));
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        if *seen == found {
            return None;
        }
        let config = Config::load_without_state(&args).ok()?;
        *seen = found;
        Some(rules(&config, args.config.as_deref()))
    };
    // The configuration was read a moment ago; if it cannot be any more, nothing is allowed that needs it.
    let nothing =
        || BrokerRules { paths: Some(PathRules::default()), servers: Some(ServerRules::default()) };
    let now = source().unwrap_or_else(nothing);
    Broker::start((now, Box::new(source)), &RING_OPERATIONS, begin)
}

/// What the daemon may open and connect to by this configuration.
fn rules(config: &Config, file: Option<&Path>) -> BrokerRules {
    let paths = config.open_paths.as_ref().map(|open| paths(config, open, file));
    let servers = config.connect_to.as_ref().map(|connect| servers(config, connect));
    BrokerRules { paths, servers }
}

/// The folder that a file is in. Files are made beside it, as snapshots, and before they get its name.
fn folder_of(path: &Path) -> PathBuf {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(path).into()
}

fn paths(config: &Config, open: &[PathBuf], file: Option<&Path>) -> PathRules {
    let mut rules = PathRules {
        read: READ.iter().map(PathBuf::from).chain(file.map(Into::into)).collect(),
        write: WRITE.iter().map(PathBuf::from).chain(open.iter().cloned()).collect(),
        write_in: Vec::new(),
    };
    let set = FOLDERS.iter().filter_map(std::env::var_os);
    rules.write.extend(set.flat_map(|all| {
        let all = all.to_string_lossy().into_owned();
        all.split(':').map(PathBuf::from).collect::<Vec<_>>()
    }));
    rules.write.extend(std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from));
    let files = [&config.web_tokens, &config.web_tls_certificates];
    rules.read.extend(files.into_iter().flatten().cloned());
    let tls = [&config.nbd.tls_certificates, &config.nbd.tls_psk];
    rules.read.extend(tls.into_iter().flatten().cloned());
    let sockets = config.listen.iter().filter_map(|listen| match listen {
        Listen::Unix(path) => Some(folder_of(path)),
        Listen::Tcp(_) => None,
    });
    rules.write_in.extend(sockets);
    rules.write_in.extend(config.control.as_deref().map(folder_of));
    rules.write.extend(config.state.iter().cloned());
    rules.write.extend(config.vhost_user.iter().cloned());
    for volume in config.volumes.values() {
        match &volume.store {
            StoreUri::File(path) if path.starts_with("/dev") => rules.write.push(path.clone()),
            StoreUri::File(path) => rules.write_in.push(folder_of(path)),
            StoreUri::Qcow2(path) => rules.read.push(path.clone()),
            StoreUri::Nbd(uri) => of_nbd(uri, &mut rules),
            StoreUri::Rbd(uri) => of_rbd(uri, &mut rules),
            StoreUri::Memory(_) | StoreUri::Null(_) => {}
        }
        if let Some(VhostSocket::Path(path)) = &volume.vhost_user {
            rules.write_in.push(folder_of(path));
        }
        if let Some(KeySource::File(key)) = &volume.encryption {
            rules.read.extend(key_path(key));
        }
    }
    rules
}

fn key_path(key: &KeyFile) -> Option<PathBuf> {
    match key {
        KeyFile::Path(path) => Some(path.clone()),
        // It is in the folder of credentials.
        KeyFile::Credential(_) => None,
    }
}

fn of_nbd(uri: &NbdUri, rules: &mut PathRules) {
    if let NbdHost::Unix(path) = &uri.server {
        rules.write.push(path.clone());
    }
    match uri.tls.as_ref().map(|tls| &tls.keys) {
        Some(NbdUriKeys::Certificates(path) | NbdUriKeys::Psk(path, _)) => {
            rules.read.push(path.clone());
        }
        Some(NbdUriKeys::System) | None => {}
    }
}

fn of_rbd(uri: &RbdUri, rules: &mut PathRules) {
    // The configuration names the files of keys, often beside it; librbd may have a log and a socket.
    rules.read.extend(uri.conf.as_deref().map(folder_of));
    rules.read.extend(uri.keyring.as_ref().and_then(key_path));
    rules.read.extend(uri.encryption.as_ref().and_then(|it| key_path(&it.passphrase)));
    rules.write.extend(["/var/log/ceph", "/run/ceph", "/var/run/ceph"].map(PathBuf::from));
}

fn servers(config: &Config, connect: &[ConnectTo]) -> ServerRules {
    let mut rules = ServerRules::default();
    for entry in connect {
        match entry {
            ConnectTo::Network(address, bits, port) => {
                rules.networks.push((ServerNetwork::new(*address, *bits), *port));
            }
            ConnectTo::Host(name, port) => rules.names.push((name.clone(), *port)),
        }
    }
    for volume in config.volumes.values() {
        if let StoreUri::Nbd(uri) = &volume.store
            && let NbdHost::Tcp(host, port) = &uri.server
        {
            match host.parse() {
                Ok(address) => rules.networks.push((ServerNetwork::new(address, 128), Some(*port))),
                Err(_) => rules.names.push((host.clone(), Some(*port))),
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
        rules(&config, Some(Path::new("/etc/ebbd/ebbd.toml")))
    }

    #[test]
    fn without_the_keys_all_is_allowed() {
        let rules = parse("listen = ['unix:/s']\n[volume.a]\nstore = 'file:/srv/a/disk'");
        assert!(rules.paths.is_none() && rules.servers.is_none());
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
        let has = |list: &[PathBuf], path: &str| list.iter().any(|one| one == Path::new(path));
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
        assert_eq!(servers.names, [("b".into(), Some(9)), ("store".into(), Some(1))]);
        assert_eq!(servers.networks.len(), 2);
        assert_eq!(servers.listen, ["localhost:7"]);
    }
}
