//! The sockets of vhost-user-blk: which volume is served at which path.
//!
//! # Invariants
//! - No two volumes have one path, and none has that of another socket of the daemon, however it is spelled. A path that
//!   the configuration gives twice is refused when it is read; volumes that were added at run time have no socket then.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use super::error::{BadValue, ConfigError, ConfigErrorKind, ValueLocation};
use super::file_names::encode;
use super::value::VhostSocket;
use super::working_folder::from_root;
use super::{Config, Listen, MAX_UNIX_PATH_BYTES, VolumeConfig, VolumeOrigin};

/// The ending of a socket in the directory.
const ENDING: &str = ".sock";

/// By a path's plain form, the path as it was given, and the volume.
type GivenSockets = BTreeMap<PathBuf, (PathBuf, String)>;

impl VolumeConfig {
    /// Whether the volume has a socket of its own for vhost-user-blk.
    pub fn has_own_socket(&self) -> bool {
        matches!(self.vhost_user, Some(VhostSocket::Path(_)))
    }
}

impl Config {
    /// The volume that is served over vhost-user-blk at each path; without those of [`Config::refused_sockets`].
    pub fn vhost_sockets(&self) -> BTreeMap<PathBuf, String> {
        self.divide_sockets().0.into_values().collect()
    }

    /// The volumes that are not served over vhost-user-blk, since something else has their path or it is too long.
    pub fn refused_sockets(&self) -> BTreeMap<String, BadValue> {
        self.divide_sockets().1
    }

    /// The paths that are given to volumes, by their plain form, and the volumes that get none.
    fn divide_sockets(&self) -> (GivenSockets, BTreeMap<String, BadValue>) {
        let (mut given, mut refused) = (GivenSockets::new(), BTreeMap::new());
        let others = self.other_sockets();
        // Those of the directory have precedence, since their names are no choice; then those of the configuration.
        let mut volumes: Vec<_> = self.volumes.iter().collect();
        volumes.sort_by_key(|(name, volume)| {
            let configured =
                matches!(self.origins.get(*name), Some(VolumeOrigin::Configuration(_)));
            (volume.has_own_socket(), !configured)
        });
        for (name, volume) in volumes {
            let Some(path) = self.vhost_socket(name, volume) else { continue };
            match check_path(&path, name, &given, &others) {
                Ok(()) => drop(given.insert(plain(&path), (path, name.clone()))),
                Err(bad) => drop(refused.insert(name.clone(), bad)),
            }
        }
        (given, refused)
    }

    /// The path at which a volume is to be served over vhost-user-blk, if it is to be.
    pub fn vhost_socket(&self, name: &str, volume: &VolumeConfig) -> Option<PathBuf> {
        match (&volume.vhost_user, &self.vhost_user) {
            (Some(VhostSocket::None), _) | (None, None) => None,
            (Some(VhostSocket::Path(path)), _) => Some(path.clone()),
            (None, Some(directory)) => Some(directory.join(encode(name) + ENDING)),
        }
    }

    /// Checks the socket that a volume would have, among those of the volumes that are defined.
    ///
    /// # Errors
    /// If something else has its path, or the path is too long.
    pub fn check_socket(&self, name: &str, volume: &VolumeConfig) -> Result<(), BadValue> {
        let Some(path) = self.vhost_socket(name, volume) else { return Ok(()) };
        check_path(&path, name, &self.divide_sockets().0, &self.other_sockets())
    }

    /// The plain paths of the daemon's other sockets, and what they are.
    fn other_sockets(&self) -> BTreeMap<PathBuf, &'static str> {
        let control = self.control.iter().map(|path| (plain(path), "the control socket"));
        let listen = self.listen.iter().filter_map(|address| match address {
            Listen::Unix(path) => Some((plain(path), "an address for NBD clients")),
            Listen::Tcp(_) => None,
        });
        control.chain(listen).collect()
    }
}

/// A path without `.` and `..`, from the working directory on, to be compared. Links are not followed.
fn plain(path: &Path) -> PathBuf {
    let path = from_root(path);
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => drop(plain.pop()),
            component => plain.push(component),
        }
    }
    plain
}

fn check_path(
    path: &Path,
    name: &str,
    given: &GivenSockets,
    others: &BTreeMap<PathBuf, &'static str>,
) -> Result<(), BadValue> {
    let bytes = path.as_os_str().len();
    if bytes > MAX_UNIX_PATH_BYTES {
        return Err(BadValue::new(
            ConfigErrorKind::OutOfRange,
            format!("the path of its socket has {bytes} bytes, more than the system allows"),
            format!("give it a `vhost_user` of at most {MAX_UNIX_PATH_BYTES} bytes, or \"none\""),
        ));
    }
    let plain = plain(path);
    let other = given.get(&plain).map(|(_, other)| other).filter(|other| *other != name);
    let user = match (others.get(&plain), other) {
        (Some(what), _) => (*what).to_owned(),
        (None, Some(other)) => format!("the socket of volume {other}"),
        (None, None) => return Ok(()),
    };
    Err(BadValue::new(
        ConfigErrorKind::Conflict,
        format!("{} is {user}", path.display()),
        "choose another path",
    ))
}

/// Checks the sockets of the volumes at these places.
pub(super) fn check(
    config: &Config,
    places: &BTreeMap<String, ValueLocation>,
) -> Result<(), ConfigError> {
    for (name, bad) in config.refused_sockets() {
        if let Some(place) = places.get(&name) {
            return Err(place.error(bad));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{Config, ConfigErrorKind, ServeArgs};

    fn parse(text: &str) -> Result<Config, crate::ConfigError> {
        Config::parse(text, Path::new("test"), &ServeArgs::default())
    }

    #[test]
    fn a_volume_has_its_own_socket_or_one_in_the_directory_or_none() {
        let config = parse(
            "vhost_user = '/v'\n[volume.a]\nstore = 'null:1M'\n[volume.'b/c d']\nstore = 'null:1M'\n\
             [volume.c]\nstore = 'null:1M'\nvhost_user = '/own/c'\n[volume.d]\nstore = 'null:1M'\nvhost_user = 'none'\n",
        )
        .unwrap();
        let sockets = config.vhost_sockets();
        let found: Vec<_> =
            sockets.iter().map(|(at, name)| (at.to_str().unwrap(), &**name)).collect();
        assert_eq!(found, [("/own/c", "c"), ("/v/a.sock", "a"), ("/v/b%2Fc%20d.sock", "b/c d")]);
        let own = parse("[volume.a]\nstore = 'null:1M'\nvhost_user = 'unix:/s'\n").unwrap();
        assert_eq!(own.vhost_sockets().len(), 1, "no address is needed beside it");
    }

    #[test]
    fn a_path_that_is_in_use_is_refused() {
        let head = "listen = ['unix:/n']\ncontrol = '/c'\nvhost_user = '/v'\n[volume.a]\nstore = 'null:1M'\n";
        for (path, by) in [
            ("/n", "an address for NBD clients"),
            ("/c", "the control socket"),
            ("/v/a.sock", "the socket of volume a"),
            ("/v/../v/./a.sock", "the socket of volume a"),
            ("/x/..//c", "the control socket"),
        ] {
            let text = format!("{head}[volume.b]\nstore = 'null:1M'\nvhost_user = '{path}'\n");
            let error = parse(&text).unwrap_err();
            assert_eq!(error.kind, ConfigErrorKind::Conflict);
            assert_eq!((error.line, error.key.as_deref()), (Some(8), Some("volume.b.vhost_user")));
            assert!(error.message.contains(by), "{error}");
        }
    }

    #[test]
    fn a_volume_that_was_added_has_no_path_of_another_one_or_of_the_daemon() {
        let mut config = parse(
            "listen = ['unix:/n']\ncontrol = '/c'\n[volume.m]\nstore = 'null:1M'\nvhost_user = '/m'\n",
        )
        .unwrap();
        for (name, path) in [("a", "/m"), ("b", "/n"), ("c", "/d/../c"), ("d", "/d"), ("e", "/./d")]
        {
            let volume = crate::VolumeConfig {
                vhost_user: Some(path.parse().unwrap()),
                ..config.volumes["m"].clone()
            };
            config.volumes.insert(name.into(), volume);
            config.origins.insert(name.into(), crate::VolumeOrigin::State);
        }
        let sockets: Vec<_> = config.vhost_sockets().into_values().collect();
        assert_eq!(sockets, ["d", "m"]);
        let refused = config.refused_sockets();
        let refused: Vec<_> = refused.iter().map(|(name, bad)| (&**name, &*bad.message)).collect();
        assert_eq!(
            refused,
            [
                ("a", "/m is the socket of volume m"),
                ("b", "/n is an address for NBD clients"),
                ("c", "/d/../c is the control socket"),
                ("e", "/./d is the socket of volume d"),
            ]
        );
        assert!(config.check_socket("a", &config.volumes["a"]).is_err());
        config.check_socket("m", &config.volumes["m"]).unwrap();
    }

    #[test]
    fn a_relative_path_is_refused() {
        for text in [
            "vhost_user = 'v'\n[volume.a]\nstore = 'null:1M'\n",
            "[volume.a]\nstore = 'null:1M'\nvhost_user = './none'\n",
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.to_string().contains("write a path from / on"), "{error}");
        }
    }

    #[test]
    fn a_path_that_is_too_long_for_a_socket_is_refused() {
        let long = "n".repeat(110);
        let text = format!("vhost_user = '/v'\n[volume.{long}]\nstore = 'null:1M'\n");
        let error = parse(&text).unwrap_err();
        assert_eq!(error.kind, ConfigErrorKind::OutOfRange, "{error}");
        assert!(error.remedy.contains("vhost_user"), "{error}");
        parse(&format!("{text}vhost_user = 'none'\n")).unwrap();
    }
}
