//! What `ebbd stat --json` says, as far as the measurements need it.

use serde_json::Value;

use super::Error;

/// The output of one call. Bytes everywhere.
#[derive(Debug, Clone, PartialEq)]
pub struct Stat(Value);

/// What the cache did for a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reads {
    /// Found.
    pub hit: u64,
    /// Read from the store.
    pub miss: u64,
}

impl Reads {
    /// What was added since `before`.
    #[must_use]
    pub fn since(self, before: Reads) -> Reads {
        let Reads { hit, miss } = before;
        Reads { hit: self.hit.saturating_sub(hit), miss: self.miss.saturating_sub(miss) }
    }

    /// Share of the bytes read that were found, in per cent.
    ///
    /// # Errors
    /// [`Error::Failed`] when nothing was read.
    pub fn hit_percent(self) -> Result<f64, Error> {
        match self.hit + self.miss {
            0 => Err(Error::Failed { program: "ebbd".into(), what: "counted no read".into() }),
            all => Ok(self.hit as f64 * 100.0 / all as f64),
        }
    }
}

/// An owner of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Whether it is a volume's part of the cache.
    pub is_cache: bool,
    /// In use, or kept warm.
    pub wired: u64,
    /// Lent to the kernel.
    pub unwired: u64,
}

impl Stat {
    pub(super) fn new(json: Value) -> Self {
        Self(json)
    }

    fn bytes(value: &Value, field: &str) -> Result<u64, Error> {
        value.get(field).and_then(Value::as_u64).ok_or_else(|| Error::Output {
            from: "ebbd stat --json",
            what: format!("no number {field} in {value}"),
        })
    }

    /// A number of the whole cache, such as `bufspace_bytes`.
    ///
    /// # Errors
    /// [`Error::Output`] when it is not there.
    pub fn cache(&self, field: &str) -> Result<u64, Error> {
        Self::bytes(&self.0["cache"], field)
    }

    /// Signs of memory pressure that the daemon responded to so far, without the slow decay.
    #[must_use]
    pub fn pressure_events(&self) -> u64 {
        let events = self.0["pressure"]["events"].as_array().map_or(&[][..], Vec::as_slice);
        events.iter().skip(1).filter_map(Value::as_u64).sum()
    }

    /// Reads of a volume.
    ///
    /// # Errors
    /// [`Error::Output`] when there is no such volume, or it has no cache.
    pub fn reads(&self, volume: &str) -> Result<Reads, Error> {
        let volumes = self.0["volumes"].as_array().map_or(&[][..], Vec::as_slice);
        let cache =
            volumes.iter().find(|v| v["name"] == volume).map_or(&Value::Null, |v| &v["cache"]);
        let bytes = |field| Self::bytes(cache, field);
        Ok(Reads { hit: bytes("hit_bytes")?, miss: bytes("miss_bytes")? })
    }

    /// Reads of all volumes that have a cache.
    ///
    /// # Errors
    /// [`Error::Output`] when a number is missing.
    pub fn all_reads(&self) -> Result<Reads, Error> {
        let bytes = |field| Self::bytes(&self.0["cache"], field);
        Ok(Reads { hit: bytes("hit_bytes")?, miss: bytes("miss_bytes")? })
    }

    /// A number of all memory, such as `wired_bytes`.
    ///
    /// # Errors
    /// [`Error::Output`] when it is not there.
    pub fn memory(&self, field: &str) -> Result<u64, Error> {
        Self::bytes(&self.0["memory"], field)
    }

    /// All owners of memory. Unused memory has one, too.
    ///
    /// # Errors
    /// [`Error::Output`] when they are missing.
    pub fn owners(&self) -> Result<Vec<Owner>, Error> {
        let owners = self.0["memory"]["owners"].as_array().map_or(&[][..], Vec::as_slice);
        let owner = |owner: &Value| {
            let is_cache = owner["name"].as_str().is_some_and(|name| name.starts_with("cache "));
            let (wired, unwired) =
                (Self::bytes(owner, "wired_bytes")?, Self::bytes(owner, "lent_bytes")?);
            Ok(Owner { is_cache, wired, unwired })
        };
        owners.iter().map(owner).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_are_found_and_missing_ones_named() {
        let stat = Stat::new(json!({
            "cache": {"bufspace_bytes": 7, "hit_bytes": 6, "miss_bytes": 2},
            "pressure": {"events": [100, 3, 2, 1]},
            "volumes": [{"name": "a", "cache": null},
                        {"name": "b", "cache": {"hit_bytes": 3, "miss_bytes": 1}}],
            "memory": {"owners": [{"name": "cache b", "wired_bytes": 5, "lent_bytes": 2},
                                  {"name": "cache", "wired_bytes": 1, "lent_bytes": 0}]},
        }));
        assert_eq!(stat.cache("bufspace_bytes").unwrap(), 7);
        assert_eq!(stat.pressure_events(), 6);
        let reads = stat.reads("b").unwrap();
        assert!((reads.hit_percent().unwrap() - 75.0).abs() < 1e-9);
        assert!(reads.since(reads).hit_percent().is_err());
        assert_eq!(stat.all_reads().unwrap(), Reads { hit: 6, miss: 2 });
        assert!(stat.reads("a").is_err() && stat.reads("c").is_err());
        assert!(stat.cache("other").unwrap_err().to_string().contains("other"));
        let owners = stat.owners().unwrap();
        assert_eq!(owners[0], Owner { is_cache: true, wired: 5, unwired: 2 });
        assert!(!owners[1].is_cache, "free blocks belong to no cache");
    }
}
