//! A volume that is to be added at run time: its settings as text, each checked as in the configuration file.

use ebb_access::AccessList;

use crate::error::{ConfigError, ConfigErrorKind, Located, ValueLocation};
use crate::layer::{LimitsLayer, VolumeLayer};
use crate::value::{
    CacheMode, Choice, DirectMode, KeySource, access_entry, access_list, volume_name,
};
use crate::volume_check::check_volume;
use crate::{Size, VolumeConfig};

/// A volume to be added: its settings as text, each as in the configuration file.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "the fields are the keys of the configuration file")]
pub struct NewVolume {
    pub name: String,
    pub store: String,
    pub base: Option<String>,
    pub size: Option<String>,
    pub create: Option<bool>,
    pub encryption: Option<String>,
    pub read_only: Option<bool>,
    pub shared: Option<bool>,
    pub allow: Option<Vec<String>>,
    pub direct: Option<String>,
    pub cache: Option<String>,
    pub bdi: Option<String>,
    pub vhost_user: Option<String>,
}

impl NewVolume {
    /// Its configuration.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn config(self) -> Result<VolumeConfig, ConfigError> {
        let place = |key: &str| ValueLocation::option(key);
        let name = volume_name(&self.name).map_err(|bad| place("name").error(bad))?;
        if matches!(name.as_str(), "." | "..") {
            return Err(Located { value: (), place: place("name") }.error(
                ConfigErrorKind::InvalidValue,
                format!(
                    "`{name}` cannot be the name of a volume, because paths treat it specially"
                ),
                "choose another name",
            ));
        }
        let store = self.store.parse().map_err(|bad| place("store").error(bad))?;
        let size = self.size.map(|text| {
            let size = text.parse::<Size>().map_err(|error| place("size").error(error.into()));
            size.map(|value| Located { value, place: place("size") })
        });
        let flag =
            |key: &str, on: Option<bool>| on.map(|value| Located { value, place: place(key) });
        let bdi = self.bdi.map(|text| {
            let bdi = volume_name(&text).map_err(|bad| place("bdi").error(bad));
            bdi.map(|value| Located { value, place: place("bdi") })
        });
        let base = self.base.map(|text| {
            let base = volume_name(&text).map_err(|bad| place("base").error(bad));
            base.map(|value| Located { value, place: place("base") })
        });
        let vhost_user = self.vhost_user.map(|text| {
            let socket = text.parse().map_err(|bad| place("vhost_user").error(bad));
            socket.map(|value| Located { value, place: place("vhost_user") })
        });
        let allow = self
            .allow
            .map(|texts| allow_list(&texts).map(|value| Located { value, place: place("allow") }));
        check_volume(&VolumeLayer {
            place: place("store"),
            store: Located { value: store, place: place("store") },
            base: base.transpose()?,
            size: size.transpose()?,
            create: flag("create", self.create),
            encryption: self.encryption.as_deref().map(key_source).transpose()?,
            read_only: flag("read_only", self.read_only),
            shared: flag("shared", self.shared),
            allow: allow.transpose()?,
            direct: choice::<DirectMode>("direct", self.direct)?,
            cache: choice::<CacheMode>("cache", self.cache)?,
            bdi: bdi.transpose()?,
            default: None,
            vhost_user: vhost_user.transpose()?,
            max_buffer_pages: None,
            buffer_squeeze_duration_ms: None,
            limits: LimitsLayer::default(),
            limit_group: None,
            name,
        })
    }
}

fn key_source(text: &str) -> Result<Located<KeySource>, ConfigError> {
    key_at(text, ValueLocation::option("encryption"))
}

/// Where a key is that is named at run time.
///
/// # Errors
/// [`ConfigError`]: it is a program, or nothing that can be one.
pub fn key_named_at_run_time(text: &str) -> Result<KeySource, ConfigError> {
    key_at(text, ValueLocation::option("key")).map(|given| given.value)
}

/// A user who may change volumes is not to run programs as the daemon's user.
fn key_at(text: &str, place: ValueLocation) -> Result<Located<KeySource>, ConfigError> {
    let value: KeySource = text.parse().map_err(|bad| place.error(bad))?;
    let given = Located { value, place };
    if let KeySource::Command(_) = given.value {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            "what is given at run time cannot name a program",
            "use key-file:PATH or credential:NAME; a volume that is defined in the configuration file may name a program there",
        ));
    }
    Ok(given)
}

fn choice<T: Choice>(key: &str, text: Option<String>) -> Result<Option<Located<T>>, ConfigError> {
    let Some(text) = text else { return Ok(None) };
    let place = ValueLocation::option(key);
    let value = T::parse(&text).map_err(|bad| place.error(bad))?;
    Ok(Some(Located { value, place }))
}

/// The clients that may open a volume, from entries of `allow`.
///
/// # Errors
/// The first entry that cannot be used.
pub fn allow_list(texts: &[String]) -> Result<AccessList, ConfigError> {
    let entries = texts.iter().map(|text| access_entry(text)).collect::<Result<_, _>>();
    entries.and_then(access_list).map_err(|bad| ValueLocation::option("allow").error(bad))
}

/// Checks the name of a volume.
///
/// # Errors
/// If a volume added at run time cannot have it.
pub fn check_name(name: &str) -> Result<(), ConfigError> {
    let null = "null:512".to_owned();
    NewVolume { name: name.to_owned(), store: null, ..NewVolume::default() }.config().map(drop)
}
