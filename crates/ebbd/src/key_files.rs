//! Files with keys that other users of the host may read: the operator is warned of them.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ebb_config::{Config, KeySource, TlsSetting};

use crate::credentials::path_of_key;

/// The private key of a server, in the folder of its certificates.
const SERVER_KEY: &str = "server-key.pem";

/// A warning for each file with a key that every user of the host may read. May block.
pub(crate) fn exposed_keys(config: &Config) -> Vec<String> {
    let mut files: Vec<(String, PathBuf)> = Vec::new();
    let nbd = &config.nbd;
    if nbd.tls != TlsSetting::Off {
        let key = nbd.tls_certificates.iter().map(|folder| folder.join(SERVER_KEY));
        files.extend(key.chain(nbd.tls_psk.clone()).map(|path| ("TLS".to_owned(), path)));
    }
    if let (Some(folder), Some(_)) = (&config.web_tls_certificates, &config.web) {
        files.push(("the page".to_owned(), folder.join(SERVER_KEY)));
    }
    for (name, volume) in &config.volumes {
        if let Some(KeySource::File(file)) = &volume.encryption
            && let Ok(path) = path_of_key(file)
        {
            files.push((format!("volume {name}"), path));
        }
    }
    let exposed = files.into_iter().filter(|(_, path)| is_exposed(path));
    let warning = |(whose, path): (String, PathBuf)| {
        let path = path.display();
        format!(
            "{whose}: every user of this host may read the key in {path}: run `chmod o-rwx` on it"
        )
    };
    exposed.map(warning).collect()
}

/// Whether every user may read the file. What cannot be looked at is reported where it is opened.
fn is_exposed(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.mode() & 0o004 != 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_operator_is_warned_of_keys_that_every_user_may_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().display();
        for name in ["server-key.pem", "keys.psk", "disk.key", "kept.key"] {
            std::fs::write(folder.path().join(name), "secret").unwrap();
        }
        let warned = |tls: &str, mode: u32| {
            for name in ["server-key.pem", "keys.psk", "disk.key"] {
                let mode = std::fs::Permissions::from_mode(mode);
                std::fs::set_permissions(folder.path().join(name), mode).unwrap();
            }
            let kept = std::fs::Permissions::from_mode(0o640);
            std::fs::set_permissions(folder.path().join("kept.key"), kept).unwrap();
            let text = format!(
                "listen = ['unix:/s']\n{tls}\n[volume.a]\nstore = 'file:/a'\nencryption = 'key-file:{at}/disk.key'\n\
                 [volume.b]\nstore = 'file:/b'\nencryption = 'key-file:{at}/kept.key'\n\
                 [volume.c]\nstore = 'file:/c'\nencryption = 'command:/bin/true'\n"
            );
            let args = ebb_config::ServeArgs::default();
            exposed_keys(&Config::parse(&text, Path::new("test"), &args).unwrap())
        };
        let certificates = format!("[nbd]\ntls = 'on'\ntls_certificates = '{at}'");
        let keys = format!("[nbd]\ntls = 'on'\ntls_psk = '{at}/keys.psk'");
        assert_eq!(warned("", 0o640), Vec::<String>::new());
        assert_eq!(warned(&certificates, 0o600), Vec::<String>::new());
        let [tls, volume] = &warned(&certificates, 0o644)[..] else { panic!("not two warnings") };
        assert!(tls.contains("TLS: ") && tls.contains("server-key.pem"), "{tls}");
        assert!(volume.contains("volume a: ") && volume.contains("chmod o-rwx"), "{volume}");
        let [psk, _] = &warned(&keys, 0o604)[..] else { panic!("not two warnings") };
        assert!(psk.contains("keys.psk"), "{psk}");
    }
}
