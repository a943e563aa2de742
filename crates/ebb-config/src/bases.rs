//! Which volumes are below an overlay.

use crate::error::{BadValue, ConfigErrorKind};
use crate::{Config, StoreUri, VolumeConfig, VolumeOrigin, shorten};

/// The most deltas above each other, snapshots included: a request looks into the block maps of all, one after the other.
pub const CHAIN_MOST: usize = 8;

/// The word for an overlay that nothing is below, because it was flattened.
pub const NO_BASE: &str = "none";

impl Config {
    /// Notes overlays whose base is not configured: they are served until they are opened anew.
    pub(crate) fn note_missing_bases(&mut self) {
        let missing: Vec<_> =
            self.volumes.keys().filter_map(|name| self.missing_base(name)).collect();
        self.warnings.extend(missing);
    }

    /// The warning about an overlay whose base is not configured, if it is one.
    #[must_use]
    pub fn missing_base(&self, name: &str) -> Option<String> {
        let base = self.volumes.get(name)?.base.as_ref().filter(|base| *base != NO_BASE)?;
        (!self.volumes.contains_key(base)).then(|| {
            format!(
                "volume {name}: its base `{}` is not configured: add that volume, with `read_only = true`",
                shorten(base)
            )
        })
    }
}

/// The names of the volumes below `name`, from the top down: none if it is no overlay. A name that
/// `volume` does not know is the last one: the state directory may know it. The remedy for a
/// writable base depends on its `origin`.
///
/// # Errors
/// If a base is writable, encrypted or in memory, or an overlay is below itself, or too many are above each other.
pub fn base_chain<'a>(
    name: &str,
    volume: impl Fn(&str) -> Option<&'a VolumeConfig>,
    origin: impl Fn(&str) -> Option<VolumeOrigin>,
) -> Result<Vec<String>, BadValue> {
    let mut names: Vec<String> = Vec::new();
    let mut at = volume(name);
    let base_of = |volume: &VolumeConfig| volume.base.clone().filter(|base| base != NO_BASE);
    while let Some(base) = at.and_then(base_of) {
        let shown = shorten(&base);
        if base == name || names.contains(&base) {
            let message = format!("the overlay is below itself, by way of `{shown}`");
            let remedy = "name another volume as the base";
            return Err(BadValue::new(ConfigErrorKind::Conflict, message, remedy));
        }
        if names.len() >= CHAIN_MOST {
            let message = format!("more than {CHAIN_MOST} volumes are below this one");
            let remedy = "copy one of them to a plain volume, and use that as the base";
            return Err(BadValue::new(ConfigErrorKind::Conflict, message, remedy));
        }
        at = volume(&base);
        // First: nothing makes an encrypted base possible.
        if at.is_some_and(|base| base.encryption.is_some()) {
            let message = format!(
                "the base `{shown}` is encrypted, and a delta is not: it would hold parts of the base in plain text"
            );
            let remedy = "name a base that is not encrypted, or copy the disk to an encrypted volume of its own";
            return Err(BadValue::new(ConfigErrorKind::Conflict, message, remedy));
        }
        if at.is_some_and(|base| matches!(base.store, StoreUri::Memory(_))) {
            let message = format!(
                "the base `{shown}` is in memory: its data ends with the daemon, and the overlay could not be read without it"
            );
            let remedy = "put the data of the base into a file, and name that volume as the base";
            return Err(BadValue::new(ConfigErrorKind::Conflict, message, remedy));
        }
        if at.is_some_and(|base| !base.read_only) {
            let message = format!(
                "the base `{shown}` is writable: the data below an overlay must not change"
            );
            let remedy = match origin(&base) {
                // No command makes it read-only.
                Some(VolumeOrigin::RunTime | VolumeOrigin::State) => format!(
                    "remove `{shown}` with `ebbd volume remove {shown}`, and add it again with `--read-only`"
                ),
                Some(VolumeOrigin::Configuration(_)) | None => {
                    format!("set `read_only = true` for `{shown}`")
                }
            };
            return Err(BadValue::new(ConfigErrorKind::Conflict, message, remedy));
        }
        names.push(base);
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, ServeArgs};

    #[test]
    fn base_in_memory_is_refused() {
        let text = "listen = ['unix:/s']\n[volume.a]\nstore = 'memory:1M'\nread_only = true\n\
                    [volume.b]\nstore = 'file:/b'\nbase = 'a'\n";
        let refused = Config::parse(text, "f".as_ref(), &ServeArgs::default()).unwrap_err();
        assert!(refused.to_string().contains("base `a` is in memory"), "{refused}");
    }

    #[test]
    fn remedy_of_a_writable_base_names_the_place_of_its_setting() {
        let text =
            "listen = ['unix:/s']\n[volume.a]\nstore = 'file:/a'\n[volume.b]\nstore = 'file:/b'\n";
        let config = Config::parse(text, "f".as_ref(), &ServeArgs::default()).unwrap();
        let mut volumes = config.volumes;
        volumes.get_mut("b").unwrap().base = Some("a".to_owned());
        let remedy = |origin: VolumeOrigin| {
            let chain = base_chain("b", |name| volumes.get(name), |_| Some(origin.clone()));
            chain.unwrap_err().remedy
        };
        let file = VolumeOrigin::Configuration("f:2".into());
        assert_eq!(remedy(file), "set `read_only = true` for `a`");
        for origin in [VolumeOrigin::State, VolumeOrigin::RunTime] {
            let again =
                "remove `a` with `ebbd volume remove a`, and add it again with `--read-only`";
            assert_eq!(remedy(origin), again);
        }
        volumes.get_mut("a").unwrap().encryption = Some("credential:k".parse().unwrap());
        let refused = base_chain("b", |name| volumes.get(name), |_| None).unwrap_err();
        assert!(refused.message.contains("is encrypted"), "{refused:?}");
    }
}
