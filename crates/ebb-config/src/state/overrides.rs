//! Sizes and limits that override those of a volume of the configuration.

use crate::show::limits_table;
use crate::value::StoreUri;
use crate::{LimitsConfig, Size, VolumeConfig};

/// Settings that override those of a volume of the configuration; absent where nothing is
/// overridden.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeOverrides {
    /// Its size.
    pub size: Option<Size>,
    /// What the configuration had when the size was remembered, as
    /// [`VolumeConfig::store_and_size`]: the size is for nothing else.
    pub size_replaces: Option<String>,
    /// Its limits.
    pub limits: LimitsConfig,
    /// Its group of limits; `none` for no group.
    pub limit_group: Option<String>,
}

impl VolumeOverrides {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        let none = |size| VolumeOverrides { size_replaces: size, ..VolumeOverrides::default() };
        *self == none(self.size_replaces.clone())
    }

    /// Whether the size belongs to another store, or replaced another size.
    pub(super) fn has_stale_size(&self, volume: &VolumeConfig) -> bool {
        let replaces = self.size_replaces.as_ref();
        self.size.is_some() && replaces.is_some_and(|text| *text != volume.store_and_size())
    }

    pub(super) fn apply(&self, volume: &mut VolumeConfig) {
        if let Some(size) = self.size {
            volume.set_size(size);
        }
        volume.limits = self.limits.over(&volume.limits);
        if let Some(group) = &self.limit_group {
            volume.limit_group = Some(group.clone());
        }
    }

    /// What makes `own`, as the configuration has it, to `in_force`.
    pub fn between(own: &VolumeConfig, in_force: &VolumeConfig) -> VolumeOverrides {
        let group = in_force.limit_group.clone().unwrap_or_else(|| "none".to_owned());
        let resized = own.store_and_size() != in_force.store_and_size();
        let size = in_force.configured_size().filter(|_| resized);
        VolumeOverrides {
            size,
            size_replaces: size.map(|_| own.store_and_size()),
            limits: in_force.limits.where_other_than(&own.limits),
            limit_group: Some(group).filter(|_| own.limit_group != in_force.limit_group),
        }
    }

    pub(super) fn table(&self) -> toml::Table {
        let VolumeOverrides { size, size_replaces, limits, limit_group } = self;
        let size = size.map(|size| ("size".to_owned(), size.to_string().into()));
        let of = |key: &str, text: &Option<String>| Some((key.to_owned(), text.clone()?.into()));
        let group = of("limit_group", limit_group);
        let replaces = of("size_replaces", size_replaces);
        limits_table(limits).chain(size).chain(replaces).chain(group).collect()
    }
}

impl LimitsConfig {
    /// These limits; missing ones come from `other`.
    #[must_use]
    pub fn over(&self, other: &LimitsConfig) -> LimitsConfig {
        LimitsConfig {
            iops: self.iops.or(other.iops),
            read_iops: self.read_iops.or(other.read_iops),
            write_iops: self.write_iops.or(other.write_iops),
            bandwidth: self.bandwidth.or(other.bandwidth),
            read_bandwidth: self.read_bandwidth.or(other.read_bandwidth),
            write_bandwidth: self.write_bandwidth.or(other.write_bandwidth),
            burst_ms: self.burst_ms.or(other.burst_ms),
        }
    }

    /// These limits, where they are not those of `other`.
    pub(super) fn where_other_than(&self, other: &LimitsConfig) -> LimitsConfig {
        fn changed<T: PartialEq + Copy>(own: Option<T>, other: Option<T>) -> Option<T> {
            own.filter(|own| other != Some(*own))
        }
        LimitsConfig {
            iops: changed(self.iops, other.iops),
            read_iops: changed(self.read_iops, other.read_iops),
            write_iops: changed(self.write_iops, other.write_iops),
            bandwidth: changed(self.bandwidth, other.bandwidth),
            read_bandwidth: changed(self.read_bandwidth, other.read_bandwidth),
            write_bandwidth: changed(self.write_bandwidth, other.write_bandwidth),
            burst_ms: changed(self.burst_ms, other.burst_ms),
        }
    }
}

impl VolumeConfig {
    /// The definition of this volume once its store exists: it asks for no new one, and the store
    /// has its size.
    #[must_use]
    pub fn made(&self) -> VolumeConfig {
        match self.create {
            true => VolumeConfig { create: false, size: None, ..self.clone() },
            false => self.clone(),
        }
    }

    /// The store and the size, to be compared.
    pub fn store_and_size(&self) -> String {
        let size = self.size.map(|size| format!(" {size}")).unwrap_or_default();
        format!("{}{size}", self.store)
    }

    /// The size that the configuration of this store has.
    fn configured_size(&self) -> Option<Size> {
        match &self.store {
            StoreUri::Memory(size) => Some(*size),
            _ => self.size,
        }
    }

    /// Notes a new size, if the configuration of this store has one. Returns whether it has.
    pub fn set_size(&mut self, size: Size) -> bool {
        match &mut self.store {
            StoreUri::Memory(old) => *old = size,
            StoreUri::File(_) | StoreUri::Nbd(_) | StoreUri::Rbd(_) if self.size.is_some() => {
                self.size = Some(size);
            }
            StoreUri::File(_)
            | StoreUri::Qcow2(_)
            | StoreUri::Null(_)
            | StoreUri::Nbd(_)
            | StoreUri::Rbd(_) => return false,
        }
        true
    }
}
