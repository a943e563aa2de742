//! The difference of two configurations, for a reload.

use super::Config;

/// The differences of a new configuration. Volumes are named in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Volumes that are only in the new one.
    pub volumes_added: Vec<String>,
    /// Volumes that are only in the old one.
    pub volumes_removed: Vec<String>,
    /// Volumes whose store or options differ.
    pub volumes_changed: Vec<String>,
    /// Whether the default export differs.
    pub default_changed: bool,
    /// Whether a run-time parameter differs, other than the log level: of the daemon, of a backing
    /// device, or of a volume that is in both.
    pub limits_changed: bool,
    /// Whether the clients that may open a volume differ, of a volume that is in both.
    pub allow_changed: bool,
    /// Whether the sockets of vhost-user differ.
    pub vhost_user_changed: bool,
    /// Whether the log level differs.
    pub log_changed: bool,
    /// The keys that differ and take effect at the next start only.
    pub needs_restart: Vec<&'static str>,
}

impl Changes {
    /// Whether there are no differences.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Config {
    /// The differences of `new` from `self`.
    pub fn reload_diff(&self, new: &Self) -> Changes {
        let absent_in = |other: &Self, name: &str| !other.volumes.contains_key(name);
        let (old_nbd, new_nbd) = (&self.nbd, &new.nbd);
        let restart = [
            ("listen", self.listen != new.listen),
            ("workers", self.workers != new.workers),
            ("control", self.control != new.control),
            ("state", self.state != new.state),
            ("web", self.web != new.web),
            ("web_names", self.web_names != new.web_names),
            ("web_tokens", self.web_tokens != new.web_tokens),
            ("web_tls_certificates", self.web_tls_certificates != new.web_tls_certificates),
            ("log_format", self.log_format != new.log_format),
            ("idle_memory", self.idle_memory != new.idle_memory),
            ("sandbox", self.sandbox != new.sandbox),
            ("xen", self.xen != new.xen),
            ("nbd.tls", old_nbd.tls != new_nbd.tls),
            ("nbd.tls_certificates", old_nbd.tls_certificates != new_nbd.tls_certificates),
            ("nbd.tls_psk", old_nbd.tls_psk != new_nbd.tls_psk),
            ("nbd.tls_verify_peer", old_nbd.tls_verify_peer != new_nbd.tls_verify_peer),
        ];
        Changes {
            volumes_added: new
                .volumes
                .keys()
                .filter(|name| absent_in(self, name))
                .cloned()
                .collect(),
            volumes_removed: self
                .volumes
                .keys()
                .filter(|name| absent_in(new, name))
                .cloned()
                .collect(),
            volumes_changed: self
                .volumes
                .iter()
                .filter(|(name, volume)| {
                    new.volumes.get(*name).is_some_and(|other| {
                        // The default export, the socket, the list of clients and the parameters change while the volume is served.
                        let other = super::VolumeConfig {
                            default: volume.default,
                            vhost_user: volume.vhost_user.clone(),
                            allow: volume.allow.clone(),
                            max_buffer_pages: volume.max_buffer_pages,
                            buffer_squeeze_duration_ms: volume.buffer_squeeze_duration_ms,
                            limits: volume.limits,
                            limit_group: volume.limit_group.clone(),
                            ..other.clone()
                        };
                        other != **volume
                    })
                })
                .map(|(name, _)| name.clone())
                .collect(),
            default_changed: self.default_volume() != new.default_volume(),
            limits_changed: old_nbd.max_clients != new_nbd.max_clients
                || old_nbd.max_request != new_nbd.max_request
                || old_nbd.connection_memory != new_nbd.connection_memory
                || self.max_buffer_pages != new.max_buffer_pages
                || self.buffer_squeeze_duration_ms != new.buffer_squeeze_duration_ms
                || self.cache_max != new.cache_max
                || self.cache_min != new.cache_min
                || self.bdis != new.bdis
                || self.limit_groups != new.limit_groups
                || self.volumes.iter().any(|(name, volume)| {
                    let own = |volume: &super::VolumeConfig| {
                        let pools = (volume.max_buffer_pages, volume.buffer_squeeze_duration_ms);
                        (pools, volume.limits, volume.limit_group.clone())
                    };
                    new.volumes.get(name).is_some_and(|other| own(other) != own(volume))
                }),
            allow_changed: self.volumes.iter().any(|(name, volume)| {
                new.volumes.get(name).is_some_and(|other| other.allow != volume.allow)
            }),
            vhost_user_changed: self.vhost_sockets() != new.vhost_sockets(),
            log_changed: self.log != new.log,
            needs_restart: restart.into_iter().filter(|(_, is)| *is).map(|(key, _)| key).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::ServeArgs;
    use super::*;

    const BASE: &str = r#"
        listen = ["unix:/a"]
        [volume.a]
        store = "memory:1G"
        default = true
        [volume.b]
        store = "file:/b"
    "#;

    fn diff(new: &str) -> Changes {
        let parse = |text| Config::parse(text, Path::new("x"), &ServeArgs::default()).unwrap();
        parse(BASE).reload_diff(&parse(new))
    }

    #[test]
    fn nothing() {
        assert!(diff(BASE).is_empty());
    }

    #[test]
    fn volumes() {
        let changes = diff(&BASE.replace("memory:1G", "memory:2G").replace(".b]", ".c]"));
        assert_eq!(changes.volumes_added, ["c"]);
        assert_eq!(changes.volumes_removed, ["b"]);
        assert_eq!(changes.volumes_changed, ["a"]);
        assert!(!changes.default_changed && !changes.limits_changed && !changes.log_changed);
        assert!(changes.needs_restart.is_empty());
        assert!(!changes.is_empty());
    }

    #[test]
    fn a_change_of_the_default_export_changes_no_volume() {
        let changes = diff(&(BASE.replace("default = true", "") + "default = true"));
        assert_eq!(changes, Changes { default_changed: true, ..Changes::default() });
    }

    #[test]
    fn limits_and_log() {
        for key in ["max_clients = 3", "max_request = '4K'", "connection_memory = '65M'"] {
            let changes = diff(&format!("{BASE}\n[nbd]\n{key}"));
            assert_eq!(changes, Changes { limits_changed: true, ..Changes::default() }, "{key}");
        }
        for key in ["max_buffer_pages = 3", "buffer_squeeze_duration_ms = 3"] {
            for text in [format!("{key}\n{BASE}"), format!("{BASE}\n{key}")] {
                let expected = Changes { limits_changed: true, ..Changes::default() };
                assert_eq!(diff(&text), expected, "{text}");
            }
        }
        let changes = diff(&format!("{BASE}\n[bdi.array]\nmax_bytes = '1M'"));
        assert_eq!(changes, Changes { limits_changed: true, ..Changes::default() });
        let changes = diff(&format!("log = 'debug'\n{BASE}"));
        assert_eq!(changes, Changes { log_changed: true, ..Changes::default() });
    }

    #[test]
    fn who_may_open_a_volume_changes_no_volume() {
        let expected = Changes { allow_changed: true, ..Changes::default() };
        for allow in ["[]", "['psk:alice']"] {
            assert_eq!(diff(&format!("{BASE}\nallow = {allow}")), expected, "{allow}");
        }
    }

    #[test]
    fn sockets_for_guests_change_no_volume() {
        let expected = Changes { vhost_user_changed: true, ..Changes::default() };
        assert_eq!(diff(&format!("vhost_user = '/v'\n{BASE}")), expected);
        assert_eq!(diff(&format!("{BASE}\nvhost_user = '/v'")), expected);
    }

    #[test]
    fn what_needs_a_restart() {
        let changes = diff(
            &(BASE.replace("unix:/a", "unix:/c").replace(
                "listen",
                "workers = 2\ncontrol = '/c/s'\nweb = 'tcp:h:1'\nweb_names = ['n']\nlog_format = 'json'\nweb_tokens = '/k'\nweb_tls_certificates = '/d'\nidle_memory = 'keep'\nsandbox = 'off'\nlisten",
            ) + "[nbd]\ntls = 'on'\ntls_certificates = '/t'\ntls_verify_peer = true"),
        );
        assert_eq!(
            changes.needs_restart,
            [
                "listen",
                "workers",
                "control",
                "web",
                "web_names",
                "web_tokens",
                "web_tls_certificates",
                "log_format",
                "idle_memory",
                "sandbox",
                "nbd.tls",
                "nbd.tls_certificates",
                "nbd.tls_verify_peer"
            ]
        );
        let changes = diff(&(BASE.to_owned() + "[nbd]\ntls = 'off'\ntls_psk = '/t'"));
        assert_eq!(changes.needs_restart, ["nbd.tls_psk"]);
    }
}
