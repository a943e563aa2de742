//! The sockets of vhost-user-blk: which volume is served at which path.
//!
//! # Invariants
//! - No two volumes have one path. A path that the configuration gives twice is refused when it is read; of volumes that
//!   were added at run time the first by name has the path.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::error::{BadValue, ConfigError, ConfigErrorKind, ValueLocation};
use super::file_names::encode;
use super::value::VhostSocket;
use super::{Config, Listen, MAX_UNIX_PATH_BYTES, VolumeConfig};

/// The ending of a socket in the directory.
const ENDING: &str = ".sock";

impl VolumeConfig {
    /// Whether the volume has a socket of its own for vhost-user-blk.
    pub fn has_own_socket(&self) -> bool {
        matches!(self.vhost_user, Some(VhostSocket::Path(_)))
    }
}

impl Config {
    /// The volume that is served over vhost-user-blk at each path.
    pub fn vhost_sockets(&self) -> BTreeMap<PathBuf, String> {
        let mut sockets = BTreeMap::new();
        // Those of the directory have precedence, since their names are no choice.
        for own in [false, true] {
            for (name, volume) in &self.volumes {
                if let Some(path) =
                    self.vhost_socket(name, volume).filter(|_| volume.has_own_socket() == own)
                {
                    sockets.entry(path).or_insert_with(|| name.clone());
                }
            }
        }
        sockets
    }

    /// The path at which a volume is to be served over vhost-user-blk, if it is to be.
    pub fn vhost_socket(&self, name: &str, volume: &VolumeConfig) -> Option<PathBuf> {
        match (&volume.vhost_user, &self.vhost_user) {
            (Some(VhostSocket::None), _) | (None, None) => None,
            (Some(VhostSocket::Path(path)), _) => Some(path.clone()),
            (None, Some(directory)) => Some(directory.join(encode(name) + ENDING)),
        }
    }

    /// Checks the socket that a volume would have, among those of `sockets`.
    ///
    /// # Errors
    /// If something else has its path, or the path is too long.
    pub fn check_socket(
        &self,
        (name, volume): (&str, &VolumeConfig),
        sockets: &BTreeMap<PathBuf, String>,
    ) -> Result<(), BadValue> {
        let Some(path) = self.vhost_socket(name, volume) else { return Ok(()) };
        let bytes = path.as_os_str().len();
        if bytes > MAX_UNIX_PATH_BYTES {
            return Err(BadValue::new(
                ConfigErrorKind::OutOfRange,
                format!("the path of its socket has {bytes} bytes, more than the system allows"),
                format!(
                    "give it a `vhost_user` of at most {MAX_UNIX_PATH_BYTES} bytes, or \"none\""
                ),
            ));
        }
        let Some(user) = self.socket_user(&path, name, sockets) else { return Ok(()) };
        Err(BadValue::new(
            ConfigErrorKind::Conflict,
            format!("{} is already {user}", path.display()),
            "choose another path",
        ))
    }

    fn socket_user(
        &self,
        path: &Path,
        name: &str,
        sockets: &BTreeMap<PathBuf, String>,
    ) -> Option<String> {
        if self.listen.iter().any(|address| matches!(address, Listen::Unix(at) if at == path)) {
            return Some("an address for NBD clients".to_owned());
        }
        if self.control.as_deref() == Some(path) {
            return Some("the control socket".to_owned());
        }
        let other = sockets.get(path).filter(|other| *other != name);
        other.map(|other| format!("the socket of volume {other}"))
    }
}

/// Checks the sockets of the volumes at these places.
pub(super) fn check(
    config: &Config,
    places: &BTreeMap<String, ValueLocation>,
) -> Result<(), ConfigError> {
    let sockets = config.vhost_sockets();
    for (name, volume) in &config.volumes {
        let Some(place) = places.get(name) else { continue };
        config.check_socket((name, volume), &sockets).map_err(|bad| place.error(bad))?;
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
        ] {
            let text = format!("{head}[volume.b]\nstore = 'null:1M'\nvhost_user = '{path}'\n");
            let error = parse(&text).unwrap_err();
            assert_eq!(error.kind, ConfigErrorKind::Conflict);
            assert_eq!((error.line, error.key.as_deref()), (Some(8), Some("volume.b.vhost_user")));
            assert!(error.message.contains(by), "{error}");
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
