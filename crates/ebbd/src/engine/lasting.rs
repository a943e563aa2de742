//! Failures to open a volume that last until an operator corrects something. A start ends if all
//! volumes have such a failure.

use std::path::Path;

use ebb_store::{EncryptedError, OpenError, Qcow2Error};

use super::slot::{Lasting, VolumePhase};
use super::{Engine, StoreError};

impl Engine {
    /// Returns the first volume and its failure, if all volumes have lasting failures. Looks at
    /// folders, and so may block.
    pub fn lasting_failure(&self) -> Option<(String, String)> {
        let states = self.states();
        let lasts = states.iter().all(|state| {
            let failure = state.failure.as_ref().filter(|_| state.phase == VolumePhase::Failed);
            failure.is_some_and(|failure| failure.lasting.is_certain())
        });
        let first = states.into_iter().next().filter(|_| lasts)?;
        Some((first.name, first.failure?.reason))
    }
}

/// Classifies a failure to open a store.
pub(super) fn lasting(error: &StoreError) -> Lasting {
    match error {
        StoreError::File(error)
        | StoreError::Qcow2(Qcow2Error::File(error))
        | StoreError::Encrypted(EncryptedError::File(error)) => lasting_of_file(error),
        StoreError::Qcow2(Qcow2Error::Missing { path }) => lasting_if_missing(path),
        StoreError::Qcow2(Qcow2Error::Image { .. })
        | StoreError::Encrypted(
            EncryptedError::NotBlank { .. }
            | EncryptedError::OtherSize { .. }
            | EncryptedError::TooSmall { .. }
            | EncryptedError::PartSector { .. },
        )
        | StoreError::NotEmpty { .. }
        | StoreError::Protected { .. } => Lasting::Yes,
        StoreError::Base { source, .. } => lasting(source),
        _ => Lasting::No,
    }
}

fn lasting_of_file(error: &OpenError) -> Lasting {
    match error {
        OpenError::Missing { path, .. } => lasting_if_missing(path),
        // The device may get its owner later.
        OpenError::Denied { path, .. } if is_device(path) => Lasting::No,
        OpenError::Denied { .. }
        | OpenError::ReadOnlyMount { .. }
        | OpenError::NotPermitted { .. }
        | OpenError::BadPath { .. }
        | OpenError::AmongDevices { .. }
        | OpenError::Exists { .. }
        | OpenError::WrongType { .. }
        | OpenError::Size { .. }
        | OpenError::OtherSize { .. }
        | OpenError::NoDirect { .. } => Lasting::Yes,
        _ => Lasting::No,
    }
}

/// Classifies a missing file: the kernel and udev may yet make a device.
fn lasting_if_missing(path: &Path) -> Lasting {
    match path.parent() {
        _ if is_device(path) => Lasting::No,
        Some(folder) if folder.as_os_str().is_empty() => Lasting::Yes,
        Some(folder) => Lasting::IfFolder(folder.to_owned()),
        None => Lasting::Yes,
    }
}

fn is_device(path: &Path) -> bool {
    path.starts_with("/dev")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_file_lasts_unless_a_device_or_mount_can_bring_it() {
        let folder = tempfile::tempdir().unwrap();
        let missing = |path: &Path| {
            lasting(&StoreError::File(OpenError::Missing {
                path: path.to_owned(),
                read_only: false,
                link: None,
            }))
            .is_certain()
        };
        assert!(missing(&folder.path().join("disk")) && missing(Path::new("disk")));
        assert!(!missing(&folder.path().join("not mounted/disk")));
        for device in ["/dev/nosuch", "/dev/nosuch/disk", "/dev/shm/disk"] {
            assert!(!missing(Path::new(device)), "{device}");
        }
        let denied = |path: &str| {
            let error = OpenError::Denied { path: path.into(), read_only: false };
            lasting(&StoreError::File(error)).is_certain()
        };
        assert!(denied("/srv/disk") && !denied("/dev/sdz"));
    }
}
