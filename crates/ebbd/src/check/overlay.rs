//! Whether an overlay was made above its base, by their files, which a daemon may have open.
//!
//! Bases on servers and in images of other formats are checked when the volume is opened.

use std::path::Path;

use ebb_cache::DeltaError;
use ebb_config::{CHAIN_MOST, Config, NO_BASE, StoreUri, VolumeConfig};
use ebb_image::{DeltaHeader, Parent};
use ebb_store::OpenError;

use crate::delta_file::{header_at, plain_parent};
use crate::engine::snapshot_beside;
use crate::stores::StoreError;

/// Compares the delta of an overlay with its base and the snapshots between them.
///
/// # Errors
/// It was made above another base, or a file is no delta.
pub(super) fn check_base(config: &Config, volume: &VolumeConfig) -> Result<(), StoreError> {
    let (Some(base), StoreUri::File(path)) = (&volume.base, &volume.store) else { return Ok(()) };
    if is_absent(path) {
        // The daemon makes it, or its absence was reported.
        return Ok(());
    }
    let Some(mut header) = header_at(path, volume.create)? else { return Ok(()) };
    let Some(found) = parent_of(config, base)? else { return Ok(()) };
    for _ in 0..=CHAIN_MOST {
        let parent = &header.parent;
        if *parent == Parent::default() || parent.is(&found) {
            break;
        }
        let below = snapshot_beside(path, parent).filter(|_| parent.delta != found.delta);
        if let Some(path) = below.as_ref().filter(|path| is_absent(path))
            && parent.snapshot().is_some()
        {
            return Err(
                OpenError::Missing { path: path.clone(), read_only: true, link: None }.into()
            );
        }
        let Some(below) = below.filter(|below| below.exists()) else {
            return Err(DeltaError::other_base(volume.store.to_string(), parent, &found).into());
        };
        let Some(next) = header_at(&below, false)? else { break };
        header = next;
    }
    Ok(())
}

fn is_absent(path: &Path) -> bool {
    path.try_exists().is_ok_and(|there| !there)
}

/// The volume `base` as the parent of a delta; `None` if that is not known.
fn parent_of(config: &Config, base: &str) -> Result<Option<Parent>, StoreError> {
    if base == NO_BASE {
        return Ok(Some(Parent::default()));
    }
    let Some(volume) = config.volumes.get(base) else { return Ok(None) };
    let StoreUri::File(path) = &volume.store else { return Ok(None) };
    if volume.encryption.is_some() || !path.try_exists().unwrap_or(false) {
        return Ok(None);
    }
    let place = volume.store.to_string();
    if volume.base.is_some() {
        let Some(header) = header_at(path, volume.create)? else { return Ok(None) };
        let DeltaHeader { number, delta, layout, .. } = header;
        return Ok(Some(Parent { size: layout.size(), delta, number, samples: 0, place }));
    }
    plain_parent(path, place).map(Some)
}
