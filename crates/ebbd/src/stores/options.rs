//! The options of stores, as their URIs and volumes describe them.

use ebb_config::{
    DirectMode, LuksVersion, NbdHost, NbdUri, NbdUriKeys, RbdUri, RbdUriEncryption, VolumeConfig,
};
use ebb_store::{
    LostWrites, NbdAddress, NbdOptions, NbdTls, NbdTlsKeys, RbdEncryption, RbdEncryptionFormat,
    RbdOptions,
};

use crate::credentials::{MissingCredential, path_of_key};

/// The use of the page cache.
pub(super) fn direct_mode(config: &VolumeConfig) -> ebb_store::Direct {
    match config.direct {
        DirectMode::Auto => ebb_store::Direct::Auto,
        DirectMode::On => ebb_store::Direct::On,
        DirectMode::Off => ebb_store::Direct::Off,
    }
}

/// The options of the store that `uri` describes.
pub fn nbd_options(uri: &NbdUri) -> NbdOptions {
    let address = match &uri.server {
        NbdHost::Tcp(host, port) => NbdAddress::Tcp { host: host.clone(), port: *port },
        NbdHost::Unix(path) => NbdAddress::Unix(path.clone()),
    };
    let keys = |keys: &NbdUriKeys| match keys.clone() {
        NbdUriKeys::System => NbdTlsKeys::System,
        NbdUriKeys::Certificates(folder) => NbdTlsKeys::Certificates(folder),
        NbdUriKeys::Psk(file, user) => NbdTlsKeys::Psk { file, user },
    };
    let tls = uri.tls.as_ref().map(|tls| NbdTls {
        keys: keys(&tls.keys),
        hostname: tls.hostname.clone(),
        verify: tls.verify,
    });
    let lost_writes = if uri.report_lost_writes { LostWrites::Report } else { LostWrites::Flush };
    let (reconnect, silence) = (uri.reconnect, uri.silence);
    NbdOptions { tls, reconnect, silence, lost_writes, ..NbdOptions::new(address, &uri.export) }
}

/// The image that `uri` describes, without the files of its user.
pub(super) fn rbd_image(uri: &RbdUri) -> RbdOptions {
    RbdOptions {
        namespace: uri.namespace.clone(),
        snapshot: uri.snapshot.clone(),
        conf: uri.conf.clone(),
        id: uri.id.clone(),
        connections: uri.connections,
        timeout: uri.timeout,
        ..RbdOptions::new(&uri.pool, &uri.image)
    }
}

/// The options of the image that `uri` describes.
///
/// # Errors
/// [`MissingCredential`].
pub(super) fn rbd_options(uri: &RbdUri) -> Result<RbdOptions, MissingCredential> {
    let encryption = |RbdUriEncryption { format, passphrase }: &RbdUriEncryption| {
        let format = match format {
            LuksVersion::Luks1 => RbdEncryptionFormat::Luks1,
            LuksVersion::Luks2 => RbdEncryptionFormat::Luks2,
        };
        Ok::<_, MissingCredential>(RbdEncryption { format, passphrase: path_of_key(passphrase)? })
    };
    Ok(RbdOptions {
        keyring: uri.keyring.as_ref().map(path_of_key).transpose()?,
        encryption: uri.encryption.as_ref().map(encryption).transpose()?,
        ..rbd_image(uri)
    })
}

/// A seed that differs between daemons, so that they do not all reconnect at the same time.
pub(super) fn seed() -> u64 {
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    since.as_secs() << 32 ^ u64::from(since.subsec_nanos()) ^ u64::from(std::process::id())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ebb_config::StoreUri;

    use super::*;

    #[test]
    fn the_options_of_a_remote_store_are_those_of_its_uri() {
        let options = |text: &str| match text.parse() {
            Ok(StoreUri::Nbd(uri)) => {
                let options = nbd_options(&uri);
                assert_eq!(uri.server.to_string(), options.address.to_string());
                options
            }
            other => panic!("{text}: {other:?}"),
        };
        let server = NbdAddress::Tcp { host: "::1".to_owned(), port: 7 };
        assert_eq!(options("nbd://[::1]:7/a"), NbdOptions::new(server, "a"));
        let all = options(
            "nbds+unix://me@/a?socket=/s&tls-psk-file=/k&tls-hostname=h&tls-verify-peer=0&reconnect=5&silence=9&\
             lost-writes=report",
        );
        let expected = NbdOptions {
            tls: Some(NbdTls {
                keys: NbdTlsKeys::Psk { file: "/k".into(), user: "me".to_owned() },
                hostname: Some("h".to_owned()),
                verify: false,
            }),
            reconnect: Duration::from_secs(5),
            silence: Some(Duration::from_secs(9)),
            lost_writes: LostWrites::Report,
            ..NbdOptions::new(NbdAddress::Unix("/s".into()), "a")
        };
        assert_eq!(all, expected);
        let keys = options("nbds://h/a?tls-certificates=/d").tls.unwrap().keys;
        assert_eq!(keys, NbdTlsKeys::Certificates("/d".into()));
    }

    #[test]
    fn the_options_of_an_image_are_those_of_its_uri() {
        let text = "rbd:p/n/i@s?conf=/c&id=me&keyring=/k&connections=4&timeout=0&encryption-format=luks2&\
                    encryption-passphrase-file=/p";
        let Ok(StoreUri::Rbd(uri)) = text.parse() else { panic!("{text}") };
        let format = RbdEncryptionFormat::Luks2;
        let expected = RbdOptions {
            namespace: "n".to_owned(),
            snapshot: Some("s".to_owned()),
            conf: Some("/c".into()),
            id: Some("me".to_owned()),
            keyring: Some("/k".into()),
            connections: 4,
            timeout: Duration::ZERO,
            encryption: Some(RbdEncryption { format, passphrase: "/p".into() }),
            ..RbdOptions::new("p", "i")
        };
        assert_eq!(rbd_options(&uri).unwrap(), expected);
    }

    #[test]
    fn images_with_signs_in_their_names_are_not_taken_for_one_another() {
        let target =
            |text: &str| crate::stores::StoreTarget::of(&text.parse().unwrap()).unwrap().unwrap();
        for (one, other) in [
            ("rbd:rbd/a%40b", "rbd:rbd/a@b"),
            ("rbd:p%2Fq/i", "rbd:p/q/i"),
            ("rbd:p/i", "rbd:p/i@s"),
        ] {
            assert_ne!(target(one), target(other), "{one} and {other}");
        }
        assert_eq!(target("rbd:p/q/i@s"), target("rbd:p/q/i@s"));
    }
}
