//! Checks that the settings of TLS of the NBD server fit together.

use std::path::PathBuf;

use crate::TlsSetting;
use crate::error::{BadValue, ConfigError, ConfigErrorKind, Located};
use crate::layer::Layer;

/// The sources of TLS keys. One on the command line replaces any in the file.
pub(super) fn tls_keys(
    file: &Layer,
    flags: &Layer,
) -> (Option<Located<PathBuf>>, Option<Located<PathBuf>>) {
    let from_flags = flags.tls_certificates.is_some() || flags.tls_psk.is_some();
    let source = if from_flags { flags } else { file };
    (source.tls_certificates.clone(), source.tls_psk.clone())
}

/// Refuses keys that have no effect, and TLS without keys.
pub(super) fn check_tls(
    tls: Option<&Located<TlsSetting>>,
    certificates: Option<&Located<PathBuf>>,
    psk: Option<&Located<PathBuf>>,
    verify_peer: Option<&Located<bool>>,
) -> Result<(), ConfigError> {
    let Some(tls) = tls else {
        // Keys without `tls` would have no effect, although the operator expects encryption.
        let wants = [certificates, psk]
            .into_iter()
            .flatten()
            .map(|path| &path.place)
            .chain(verify_peer.filter(|verify| verify.value).map(|verify| &verify.place))
            .next();
        return wants.map_or(Ok(()), |place| {
            Err(place.error(BadValue::new(
                ConfigErrorKind::Conflict,
                "this has no effect while `tls` is not set",
                "set tls to `require` or `on` to encrypt, or to `off` to serve without encryption",
            )))
        });
    };
    if tls.value == TlsSetting::Off {
        return Ok(());
    }
    match (certificates, psk) {
        (None, None) => {
            return Err(tls.error(
                ConfigErrorKind::Missing,
                format!("TLS is `{}`, but there are no keys", tls.value),
                "give tls_certificates (--tls-certificates DIR) or tls_psk (--tls-psk FILE)",
            ));
        }
        (Some(certificates), Some(psk)) => {
            return Err(psk.error(
                ConfigErrorKind::Conflict,
                format!("there is also {}", certificates.place.describe()),
                "keep one of certificates and pre-shared keys",
            ));
        }
        _ => {}
    }
    if let Some(verify) = verify_peer
        && verify.value
        && certificates.is_none()
    {
        return Err(verify.error(
            ConfigErrorKind::Conflict,
            "pre-shared keys have no certificates to verify",
            "remove it, or use certificates; a client without the key is refused anyway",
        ));
    }
    Ok(())
}
