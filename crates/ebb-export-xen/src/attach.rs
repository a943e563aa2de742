//! Attaching and detaching disks: writes the xenstore nodes that a toolstack writes (`blkif.h`,
//! "Toolstack" section, and Xen's `docs/misc/xenstore-paths.pandoc`).

use std::borrow::Cow;
use std::time::Duration;

use ebb_advice::Advice;

use crate::nodes::{number, optional, remove_all, transact};
use crate::platform::{Domain, XenStore, XenstoreError};

/// How long a guest may take to release a disk.
const DETACH_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Device numbers of `xvda` to `xvdp`, and of those beyond.
const XVD_MAJOR: u32 = 202;
const EXTENDED: u32 = 1 << 28;
/// Disks with a number below this use the `xvd` major, the others the extended numbers.
const SHORT_DISKS: u32 = 16;

/// A disk to be attached.
#[derive(Clone, Copy, Debug)]
pub struct DiskSpec<'a> {
    /// The volume's name.
    pub volume: &'a str,
    /// Its name in the guest: `xvda` to `xvdzz`.
    pub name: &'a str,
    /// The guest may only read.
    pub read_only: bool,
}

/// Why a disk cannot be attached or detached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// There is no such guest.
    #[error("there is no domain `{0}`")]
    NoDomain(String),
    /// The device's name is invalid.
    #[error("`{0}` is not a disk name")]
    BadName(String),
    /// The guest has a disk of that name.
    #[error("domain {domain} already has a disk {name}")]
    InUse {
        /// The guest.
        domain: Domain,
        /// The disk.
        name: String,
    },
    /// The guest has no such disk of this daemon.
    #[error("domain {domain} has no disk {name} that ebbd serves")]
    NotAttached {
        /// The guest.
        domain: Domain,
        /// The disk.
        name: String,
    },
    /// The guest did not release the disk in time.
    #[error("domain {domain} still uses {name}")]
    Busy {
        /// The guest.
        domain: Domain,
        /// The disk.
        name: String,
    },
    /// See [`XenstoreError`].
    #[error(transparent)]
    Store(#[from] XenstoreError),
}

impl Advice for AttachError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let remedy = match self {
            AttachError::NoDomain(_) => "`xl list` shows the domains of this host",
            AttachError::BadName(_) => "use xvda to xvdz, or xvdaa to xvdzz",
            AttachError::InUse { .. } => "choose another name, or detach that disk first",
            AttachError::Busy { .. } => "unmount it in the guest, or use --force",
            AttachError::NotAttached { .. } | AttachError::Store(_) => return None,
        };
        Some(remedy.into())
    }
}

/// The device number of the disk name `xvda` and so on; `None` if it is not such a name.
pub fn device_number(name: &str) -> Option<u32> {
    let letters = name.strip_prefix("xvd")?;
    if letters.is_empty() || letters.len() > 2 || !letters.bytes().all(|b| b.is_ascii_lowercase()) {
        return None;
    }
    let place = letters.bytes().fold(0, |sum, b| sum * 26 + u32::from(b - b'a') + 1) - 1;
    Some(if place < SHORT_DISKS { XVD_MAJOR << 8 | place << 4 } else { EXTENDED | place << 8 })
}

/// The name of a disk, if `text` is one.
///
/// # Errors
/// [`AttachError::BadName`].
pub fn disk_name(text: &str) -> Result<String, AttachError> {
    let is_name = device_number(text).is_some();
    if is_name { Ok(text.to_owned()) } else { Err(AttachError::BadName(text.to_owned())) }
}

/// The domain number of a guest that is given by number or name.
///
/// # Errors
/// [`AttachError::NoDomain`] if there is none.
pub fn find_domain(store: &mut dyn XenStore, name: &str) -> Result<Domain, AttachError> {
    let base = "/local/domain";
    let none = || AttachError::NoDomain(name.to_owned());
    if let Some(id) = number(name) {
        let id = Domain::try_from(id).map_err(|_| none())?;
        let there = store.list(0, &format!("{base}/{id}"));
        return match there {
            Ok(_) => Ok(id),
            Err(XenstoreError::Missing) => Err(none()),
            Err(error) => Err(error.into()),
        };
    }
    for id in store.list(0, base)? {
        let called = optional(store, 0, &format!("{base}/{id}/name"))?;
        if called.as_deref() == Some(name) {
            return id.parse().map_err(|_| none());
        }
    }
    Err(none())
}

struct Paths {
    back: String,
    front: String,
}

impl Paths {
    fn new(guest: Domain, device: u32) -> Paths {
        Paths {
            back: format!("/local/domain/0/backend/ebbd/{guest}/{device}"),
            front: format!("/local/domain/{guest}/device/vbd/{device}"),
        }
    }
}

/// Writes the nodes of a new disk of `guest`.
///
/// # Errors
/// See [`AttachError`].
pub fn attach(
    store: &mut dyn XenStore,
    guest: Domain,
    disk: &DiskSpec<'_>,
) -> Result<(), AttachError> {
    let bad = || AttachError::BadName(disk.name.to_owned());
    let device = device_number(disk.name).ok_or_else(bad)?;
    let Paths { back, front } = Paths::new(guest, device);
    let mode = if disk.read_only { "r" } else { "w" };
    let (id, number) = (guest.to_string(), device.to_string());
    let backend = [
        ("frontend", front.as_str()),
        ("frontend-id", &id),
        ("online", "1"),
        ("params", disk.volume),
        ("dev", disk.name),
        ("type", "ebbd"),
        ("mode", mode),
        ("removable", "0"),
        ("bootable", "0"),
        ("device-type", "disk"),
        ("state", "1"),
    ];
    let frontend = [
        ("backend", back.as_str()),
        ("backend-id", "0"),
        ("virtual-device", &number),
        ("device-type", "disk"),
        ("state", "1"),
    ];
    let fresh = transact(store, |store, within| {
        if optional(store, within, &format!("{front}/state"))?.is_some() {
            return Ok(false);
        }
        for path in [&back, &front] {
            remove_all(store, within, path)?;
        }
        // Child nodes inherit these permissions: the guest may read the backend's nodes and owns its own.
        store.write(within, &back, "")?;
        store.set_permissions(within, &back, 0, guest)?;
        store.write(within, &front, "")?;
        store.set_permissions(within, &front, guest, 0)?;
        for (name, value) in backend {
            store.write(within, &format!("{back}/{name}"), value)?;
        }
        // The frontend acts on its state, so that node is written last.
        for (name, value) in frontend {
            store.write(within, &format!("{front}/{name}"), value)?;
        }
        Ok(true)
    })?;
    if fresh {
        return Ok(());
    }
    Err(AttachError::InUse { domain: guest, name: disk.name.to_owned() })
}

/// Makes a guest release a disk and removes the disk's nodes; with `force` also if it does not release it.
///
/// # Errors
/// See [`AttachError`].
pub fn detach(
    store: &mut dyn XenStore,
    guest: Domain,
    name: &str,
    force: bool,
) -> Result<(), AttachError> {
    let device = device_number(name).ok_or_else(|| AttachError::BadName(name.to_owned()))?;
    let Paths { back, front } = Paths::new(guest, device);
    let state = format!("{back}/state");
    let there = transact(store, |store, within| {
        if optional(store, within, &state)?.is_none() {
            return Ok(false);
        }
        store.write(within, &format!("{back}/online"), "0")?;
        store.write(within, &state, "5")?;
        Ok(true)
    })?;
    if !there {
        return Err(AttachError::NotAttached { domain: guest, name: name.to_owned() });
    }
    let begun = ebb_mem::clock::now();
    loop {
        let now = optional(store, 0, &state)?;
        if now.is_none_or(|state| state == "6") {
            break;
        }
        if ebb_mem::clock::since(begun) > DETACH_TIMEOUT {
            if force {
                break;
            }
            return Err(AttachError::Busy { domain: guest, name: name.to_owned() });
        }
        std::thread::park_timeout(POLL_INTERVAL);
    }
    transact(store, |store, within| {
        if optional(store, within, &format!("{back}/online"))?.as_deref() == Some("1") {
            // Another toolstack has attached it again.
            return Ok(());
        }
        remove_all(store, within, &front)?;
        remove_all(store, within, &back)
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_have_the_numbers_linux_gives_them() {
        assert_eq!(device_number("xvda"), Some(51712));
        assert_eq!(device_number("xvdb"), Some(51728));
        assert_eq!(device_number("xvdp"), Some(51952));
        assert_eq!(device_number("xvdq"), Some(1 << 28 | 16 << 8));
        assert_eq!(device_number("xvdaa"), Some(1 << 28 | 26 << 8));
        for bad in ["xvd", "xvda1", "sda", "xvdA", "xvdaaa", "", "xvdé"] {
            assert_eq!(device_number(bad), None, "{bad}");
        }
    }
}
