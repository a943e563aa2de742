//! Checks the settings of one volume, and fills in what is not given.

use crate::error::{BadValue, ConfigError, ConfigErrorKind, Located, ValueLocation};
use crate::layer::VolumeLayer;
use crate::parameter_values::{check_limits, parameter};
use crate::params::{BUFFER_SQUEEZE_DURATION_MS, MAX_BUFFER_PAGES};
use crate::value::{StoreUri, volume_size};
use crate::{CacheMode, Config, DirectMode, VolumeConfig, shorten};

/// The configuration of a volume.
pub(super) fn check_volume(volume: &VolumeLayer) -> Result<VolumeConfig, ConfigError> {
    let store = volume.store.value.clone();
    let create = volume.create.as_ref().filter(|create| create.value);
    let scheme = match store {
        StoreUri::File(_) => None,
        StoreUri::Qcow2(_) => Some("qcow2"),
        StoreUri::Memory(_) => Some("memory"),
        StoreUri::Null(_) => Some("null"),
        StoreUri::Nbd(_) => Some("nbd"),
        StoreUri::Rbd(_) => Some("rbd"),
    };
    if let Some(scheme) = scheme {
        check_not_a_file(volume, scheme)?;
    }
    check_size(volume, create)?;
    let usual_cache =
        if volume.base.is_some() { CacheMode::Writethrough } else { usual_cache(&store) };
    let cache = volume.cache.as_ref().map_or(usual_cache, |given| given.value);
    let read_only = is_read_only(volume)?;
    if let (Some(given), true) = (&volume.cache, cache == CacheMode::Writeback && read_only) {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            "a read-only volume has nothing to write back",
            "choose writethrough, which caches data that was read",
        ));
    }
    check_encryption(volume, &store)?;
    check_overlay(volume, (&store, create, cache))?;
    if let (Some(given), true) = (&volume.bdi, cache != CacheMode::Writeback) {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            "only a volume with a writeback cache has a backing device",
            "add cache=writeback, or remove this setting",
        ));
    }
    Ok(VolumeConfig {
        store,
        base: volume.base.as_ref().map(|given| given.value.clone()),
        size: volume.size.as_ref().map(|size| size.value),
        create: create.is_some(),
        encryption: volume.encryption.as_ref().map(|given| given.value.clone()),
        read_only,
        shared: volume.shared.as_ref().is_some_and(|given| given.value),
        allow: volume.allow.as_ref().map(|given| given.value.clone()),
        direct: volume.direct.as_ref().map_or(DirectMode::Auto, |given| given.value),
        cache,
        bdi: volume.bdi.as_ref().map(|given| given.value.clone()),
        default: volume.default.as_ref().is_some_and(|given| given.value),
        vhost_user: volume.vhost_user.as_ref().map(|given| given.value.clone()),
        max_buffer_pages: parameter(MAX_BUFFER_PAGES.key(), volume.max_buffer_pages.clone())?,
        buffer_squeeze_duration_ms: parameter(
            BUFFER_SQUEEZE_DURATION_MS.key(),
            volume.buffer_squeeze_duration_ms.clone(),
        )?,
        limits: check_limits(&volume.limits)?,
        limit_group: volume.limit_group.as_ref().map(|given| given.value.clone()),
    })
}

/// The size and the creation of a file.
fn check_size(volume: &VolumeLayer, create: Option<&Located<bool>>) -> Result<(), ConfigError> {
    if let Some(size) = &volume.size {
        volume_size(size.value).map_err(|bad| size.place.error(bad))?;
        if create.is_none() {
            return Err(size.error(
                ConfigErrorKind::Conflict,
                "a file that exists has its own size",
                "set `create` to create the file if it is absent, or remove the size",
            ));
        }
    }
    if let Some(create) = create {
        if volume.size.is_none() && volume.base.is_none() {
            return Err(create.error(
                ConfigErrorKind::Missing,
                "creating a file needs a size",
                "add a size, such as 1G",
            ));
        }
        if volume.read_only.as_ref().is_some_and(|given| given.value) {
            // At `create`: the repair of the other mistakes keeps the volume read-only.
            return Err(create.error(
                ConfigErrorKind::Conflict,
                "a new file that is read-only would stay empty",
                "remove one of read-only and create",
            ));
        }
    }
    Ok(())
}

/// Only files and block devices hold encrypted volumes.
fn check_encryption(volume: &VolumeLayer, store: &StoreUri) -> Result<(), ConfigError> {
    let Some(given) = &volume.encryption else { return Ok(()) };
    if !matches!(store, StoreUri::File(_)) {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            "only a file or a block device can hold an encrypted volume",
            "use a `file:` store, or remove this setting",
        ));
    }
    if volume.base.is_some() {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            "the delta of an overlay cannot be encrypted",
            "remove `base` or this setting: a volume that is encrypted has a file of its own",
        ));
    }
    if let (Some(size), true) = (&volume.size, volume.create.is_some()) {
        let bytes = size.value.bytes();
        if !bytes.is_multiple_of(4096) || bytes > i64::MAX.unsigned_abs() - (1 << 30) {
            return Err(size.error(
                ConfigErrorKind::OutOfRange,
                "an encrypted volume consists of sectors of 4096 bytes",
                "choose a multiple of 4K",
            ));
        }
    }
    Ok(())
}

/// The settings that an overlay cannot have.
fn check_overlay(
    volume: &VolumeLayer,
    (store, create, cache): (&StoreUri, Option<&Located<bool>>, CacheMode),
) -> Result<(), ConfigError> {
    if let (Some(given), Some(_), CacheMode::None) = (&volume.cache, &volume.base, cache) {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            "an overlay keeps its block map in the cache",
            "choose writethrough or writeback, or remove this setting",
        ));
    }
    if let (Some(given), Some(create)) = (&volume.base, create)
        && given.value == crate::NO_BASE
        && volume.size.is_none()
    {
        return Err(create.error(
            ConfigErrorKind::Missing,
            "a new overlay above nothing needs a size",
            "remove `create` if the delta exists, or add a size, such as 1G",
        ));
    }
    if let (Some(given), StoreUri::Qcow2(_)) = (&volume.base, store) {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            "a qcow2 image is read-only, and cannot be the store of an overlay",
            "name the image as the store of another volume, and that as the base of this one",
        ));
    }
    if let (Some(given), StoreUri::Memory(_) | StoreUri::Null(_)) = (&volume.base, store) {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            "the store of an overlay has to keep what is written",
            "put it into a file",
        ));
    }
    Ok(())
}

/// The default of the cache mode: a remote store is cached; memory is not cached twice; a file uses
/// the kernel's page cache, or bypasses it on purpose.
fn usual_cache(store: &StoreUri) -> CacheMode {
    match store {
        StoreUri::File(_) | StoreUri::Qcow2(_) | StoreUri::Memory(_) | StoreUri::Null(_) => {
            CacheMode::None
        }
        StoreUri::Nbd(_) | StoreUri::Rbd(_) => CacheMode::Writethrough,
    }
}

/// Whether a volume is read-only: if that is set, or its store is one that ebbd does not write, an image of qcow2 or a
/// snapshot.
fn is_read_only(volume: &VolumeLayer) -> Result<bool, ConfigError> {
    let (fixed, message, remedy) = match &volume.store.value {
        StoreUri::Qcow2(_) => (
            true,
            "a qcow2 image is read-only",
            "remove this setting; for a disk that is written, convert the image with `qemu-img convert -O raw`",
        ),
        StoreUri::Rbd(uri) if uri.snapshot.is_some() => (
            true,
            "a snapshot is read-only",
            "remove this setting; for a disk that is written, clone the snapshot with `rbd clone`, or make an overlay above it",
        ),
        _ => (false, "", ""),
    };
    match &volume.read_only {
        Some(given) if fixed && !given.value => {
            Err(given.error(ConfigErrorKind::Conflict, message, remedy))
        }
        Some(given) => Ok(given.value || fixed),
        None => Ok(fixed),
    }
}

/// Refuses settings that only file stores have, and the stores of overlays.
fn check_not_a_file(volume: &VolumeLayer, scheme: &str) -> Result<(), ConfigError> {
    let only_files = |place: &ValueLocation, remedy: String| {
        let message = format!("this setting is for file stores only, and the store is `{scheme}`");
        Err(place.error(BadValue::new(ConfigErrorKind::Conflict, message, remedy)))
    };
    // An overlay's delta is made there.
    let may_hold_a_delta = volume.base.is_some() && matches!(scheme, "nbd" | "rbd");
    if let Some(size) = volume.size.as_ref().filter(|_| !may_hold_a_delta) {
        let remedy = match scheme {
            "nbd" => "remove it: the server reports the size of its export".to_owned(),
            "qcow2" => "remove it: the image has the size of its disk".to_owned(),
            _ => format!("write the size after the store: {scheme}:{}", size.value),
        };
        return only_files(&size.place, remedy);
    }
    let create = volume.create.as_ref().filter(|create| create.value && !may_hold_a_delta);
    if let Some(create) = create {
        return only_files(&create.place, "remove it".to_owned());
    }
    if matches!(volume.store.value, StoreUri::Qcow2(_)) {
        // It is in a file, which is read as any other.
        return Ok(());
    }
    match volume.direct.as_ref().filter(|direct| direct.value != DirectMode::Auto) {
        Some(direct) => only_files(&direct.place, "remove it".to_owned()),
        None => Ok(()),
    }
}

impl Config {
    /// Notes entries of `allow` whose user or group this host does not have: they admit no client until a reload finds it.
    pub(crate) fn note_unknown_clients(&mut self) {
        let mut unknown = Vec::new();
        for (name, volume) in &self.volumes {
            for (entry, why) in volume.allow.iter().flat_map(ebb_access::AccessList::unknown) {
                let (entry, remedy) = (shorten(entry), why.remedy());
                unknown.push(format!(
                    "volume {name}: allow: `{entry}` admits no client: {why}: {remedy}, and reload"
                ));
            }
        }
        self.warnings.extend(unknown);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{Config, ConfigError, ServeArgs};

    fn config(text: &str) -> Result<Config, ConfigError> {
        let text = format!("listen = ['unix:/s']\n{text}");
        Config::parse(&text, Path::new("test"), &ServeArgs::default())
    }

    #[test]
    fn a_volume_that_cannot_be_encrypted_is_refused() {
        let key = "encryption = 'key-file:/k'";
        for (store, part) in [
            ("'memory:1M'", "only a file or a block device"),
            ("'null:1M'", "only a file or a block device"),
            ("'qcow2:/a'", "only a file or a block device"),
            ("'nbd://host/a'", "only a file or a block device"),
            ("'rbd:p/i'", "only a file or a block device"),
            ("'file:/a'\nbase = 'b'", "the delta of an overlay cannot be encrypted"),
            ("'file:/a'\nbase = 'none'", "the delta of an overlay cannot be encrypted"),
            ("'file:/a'\ncreate = true\nsize = 4608", "sectors of 4096 bytes"),
        ] {
            let error = config(&format!("[volume.a]\n{key}\nstore = {store}\n")).unwrap_err();
            assert!(error.to_string().contains(part), "{store}: {error}");
            assert!(!error.remedy.is_empty());
        }
        let good = "store = 'file:/a'\ncreate = true\nsize = '8K'";
        let good = config(&format!("[volume.a]\n{key}\n{good}\n")).unwrap();
        let found = good.volumes["a"].encryption.as_ref().map(ToString::to_string);
        assert_eq!(found.as_deref(), Some("key-file:/k"));
    }

    /// A directory service may not respond when the host starts; what is no entry is still a mistake.
    #[test]
    fn a_client_whose_user_the_host_does_not_have_is_not_admitted_and_is_told() {
        let text = "[volume.a]\nstore = 'file:/a'\nallow = ['uid:no such user', 'uid:0', 'gid:no such group']\n";
        let mut config_of = config(text).unwrap();
        config_of.note_unknown_clients();
        let [user, group] = &config_of.warnings[..] else { panic!("{:?}", config_of.warnings) };
        assert!(user.contains("volume a: allow: `uid:no such user` admits no client"), "{user}");
        assert!(group.contains("no group of that name") && group.contains("reload"), "{group}");
        let list = config_of.volumes["a"].allow.clone().unwrap();
        let client = |uid| ebb_access::ClientIdentity {
            socket: Some(ebb_access::SocketCredentials {
                pid: 1,
                uid,
                gid: uid,
                groups: Box::default(),
            }),
            ..ebb_access::ClientIdentity::default()
        };
        assert!(list.admits(&client(0)) && !list.admits(&client(1)));
        assert!(!list.admits(&client(u32::MAX)));
        let only = config("[volume.a]\nstore = 'file:/a'\nallow = ['uid:no such user']\n").unwrap();
        assert!(!only.volumes["a"].allow.as_ref().unwrap().admits(&client(0)));
        assert!(config("[volume.a]\nstore = 'file:/a'\nallow = ['user:0']\n").is_err());
    }

    #[test]
    fn an_encrypted_volume_is_no_base() {
        let text = "[volume.a]\nstore = 'file:/a'\nbase = 'b'\n[volume.b]\nstore = 'file:/b'\nread_only = true\n";
        assert!(config(text).is_ok());
        let error = config(&format!("{text}encryption = 'credential:k'\n")).unwrap_err();
        assert!(error.to_string().contains("`b` is encrypted"), "{error}");
    }
}
