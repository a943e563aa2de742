//! Checks values of the configuration against the definitions of the run-time parameters.

use crate::error::{ConfigError, ConfigErrorKind, Located};
use crate::layer::LimitsLayer;
use crate::params::{
    Key, LIMIT_BANDWIDTH, LIMIT_BURST_MS, LIMIT_IOPS, LIMIT_READ_BANDWIDTH, LIMIT_READ_IOPS,
    LIMIT_WRITE_BANDWIDTH, LIMIT_WRITE_IOPS,
};
use crate::{LimitsConfig, Size};

/// The number if it is a value of the parameter `key`.
pub(super) fn parameter(key: Key, given: Option<Located<i64>>) -> Result<Option<u64>, ConfigError> {
    let definition = key.definition();
    given
        .map(|given| {
            u64::try_from(given.value).ok().filter(|n| definition.allows(*n)).ok_or_else(|| {
                given.error(
                    ConfigErrorKind::OutOfRange,
                    format!("{} is out of range", given.value),
                    format!("choose a number from {}", definition.range()),
                )
            })
        })
        .transpose()
}

pub(super) fn check_limits(limits: &LimitsLayer) -> Result<LimitsConfig, ConfigError> {
    Ok(LimitsConfig {
        iops: parameter(LIMIT_IOPS.key(), limits.iops.clone())?,
        read_iops: parameter(LIMIT_READ_IOPS.key(), limits.read_iops.clone())?,
        write_iops: parameter(LIMIT_WRITE_IOPS.key(), limits.write_iops.clone())?,
        bandwidth: optional_size(LIMIT_BANDWIDTH.key(), limits.bandwidth.as_ref())?,
        read_bandwidth: optional_size(LIMIT_READ_BANDWIDTH.key(), limits.read_bandwidth.as_ref())?,
        write_bandwidth: optional_size(
            LIMIT_WRITE_BANDWIDTH.key(),
            limits.write_bandwidth.as_ref(),
        )?,
        burst_ms: parameter(LIMIT_BURST_MS.key(), limits.burst_ms.clone())?,
    })
}

fn optional_size(key: Key, given: Option<&Located<Size>>) -> Result<Option<Size>, ConfigError> {
    given.map(|given| size(key, Some(given))).transpose()
}

/// The size if it is a value of the parameter `key`; its default if none is given.
pub(super) fn size(key: Key, given: Option<&Located<Size>>) -> Result<Size, ConfigError> {
    let definition = key.definition();
    let Some(given) = given else { return Ok(Size::new(definition.default)) };
    if definition.allows(given.value.bytes()) {
        return Ok(given.value);
    }
    Err(given.error(
        ConfigErrorKind::OutOfRange,
        format!("{} is out of range", given.value),
        format!("choose a size from {}", definition.range()),
    ))
}
