//! Entries of `allow` that admit no client with the settings of TLS.

use ebb_access::{AccessList, TlsIdentity};

use crate::{Config, NbdConfig, TlsSetting, VolumeConfig, shorten};

impl Config {
    /// A warning for each entry of a volume's `allow` that admits no client, since no client has
    /// such an identity.
    #[must_use]
    pub fn idle_entries(&self, volume: &VolumeConfig) -> Vec<String> {
        let entries = volume.allow.iter().flat_map(AccessList::entries);
        let idle = entries.filter_map(|entry| {
            let (why, remedy) = match entry.tls_identity()? {
                TlsIdentity::Psk => ("no client has a pre-shared key", self.nbd.lacks_keys()?),
                TlsIdentity::Certificate => {
                    ("no client shows a certificate", self.nbd.lacks_certificates()?)
                }
            };
            let entry = shorten(entry.text());
            Some(format!("allow: `{entry}` admits no client: {why}: {remedy}, and restart ebbd"))
        });
        idle.collect()
    }

    /// Adds these warnings about all volumes.
    pub(crate) fn note_idle_entries(&mut self) {
        let of = |(name, volume): (&String, _)| {
            let idle = self.idle_entries(volume).into_iter();
            idle.map(|text| format!("volume {name}: {text}")).collect::<Vec<_>>()
        };
        let idle: Vec<_> = self.volumes.iter().flat_map(of).collect();
        self.warnings.extend(idle);
    }
}

impl NbdConfig {
    /// The setting without which clients have no pre-shared keys, if they have none.
    fn lacks_keys(&self) -> Option<&'static str> {
        match (&self.tls_psk, &self.tls_certificates) {
            (Some(_), _) if self.tls != TlsSetting::Off => None,
            (Some(_), _) => Some("set `nbd.tls` to \"on\" or \"require\""),
            (None, Some(_)) => Some("set `nbd.tls_psk` instead of `nbd.tls_certificates`"),
            (None, None) => Some("set `nbd.tls_psk`, and `nbd.tls` to \"on\" or \"require\""),
        }
    }

    /// The settings without which clients show no certificates, if they show none.
    fn lacks_certificates(&self) -> Option<&'static str> {
        match (&self.tls_psk, &self.tls_certificates) {
            (Some(_), _) => Some(
                "set `nbd.tls_certificates` instead of `nbd.tls_psk`, and `nbd.tls_verify_peer = true`",
            ),
            (None, None) => Some(
                "set `nbd.tls_certificates`, `nbd.tls_verify_peer = true`, and `nbd.tls` to \"on\" or \
                 \"require\"",
            ),
            (None, Some(_)) if !self.tls_verify_peer => Some("set `nbd.tls_verify_peer = true`"),
            (None, Some(_)) if self.tls == TlsSetting::Off => {
                Some("set `nbd.tls` to \"on\" or \"require\"")
            }
            (None, Some(_)) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{Config, ServeArgs};

    /// The warnings about a volume whose clients have these names.
    fn warnings(nbd: &str, allow: &str) -> String {
        let text = format!(
            "listen = ['unix:/s']\n[nbd]\n{nbd}\n[volume.a]\nstore = 'null:1M'\nallow = {allow}\n"
        );
        let mut config = Config::parse(&text, Path::new("f"), &ServeArgs::default()).unwrap();
        config.note_idle_entries();
        config.warnings.join("\n")
    }

    #[test]
    fn entry_that_no_client_can_match_is_reported() {
        let (psk, cn) = ("['psk:x', 'net:10.0.0.0/8']", "['cn:alice', 'uid:0']");
        let certificates = "tls = 'require'\ntls_certificates = '/c'";
        let verified = format!("{certificates}\ntls_verify_peer = true");
        let keys = "tls = 'on'\ntls_psk = '/k'";
        for (nbd, allow, remedy) in [
            ("", psk, "set `nbd.tls_psk`, and `nbd.tls` to"),
            (certificates, psk, "`nbd.tls_psk` instead of `nbd.tls_certificates`"),
            ("", cn, "set `nbd.tls_certificates`, `nbd.tls_verify_peer = true`"),
            (certificates, cn, "client shows a certificate: set `nbd.tls_verify_peer = true`"),
            (keys, cn, "`nbd.tls_certificates` instead of `nbd.tls_psk`"),
        ] {
            let said = warnings(nbd, allow);
            assert!(said.starts_with("volume a: allow: `") && said.contains(remedy), "{said}");
            assert_eq!(said.matches("admits no client").count(), 1, "{said}");
        }
        assert_eq!(warnings(keys, psk) + &warnings(&verified, cn), "");
    }
}
