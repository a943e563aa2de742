//! The daemon's Xen backend, and `ebbd xen`.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use ebb_config::params::{Key, Parameters};
use ebb_export_xen::platform::XenHost;
use ebb_export_xen::platform::xenbus::XenbusConnection;
use ebb_export_xen::{
    Backend, BackendOptions, DiskSpec, XenParameters, attach, detach, find_domain,
};
use ebb_io::WorkerHandle;
use ebb_volume::Volumes;

use crate::cli::XenArgs;
use crate::engine::Engine;

/// The directory of the journals, from which the successor of a killed daemon resumes requests. It is in memory (tmpfs)
/// and does not survive a reboot of the host.
const JOURNALS: &str = "/run/ebbd/xen";
/// Exists if the kernel's backend is loaded: then it serves the disks of the kind `vbd`.
const KERNEL_BACKEND: &str = "/sys/bus/xen-backend/drivers/vbd";

/// Serves volumes to Xen guests.
///
/// # Errors
/// If the host does not run Xen, or access is denied; the message has a remedy.
pub(crate) fn serve(
    volumes: &Volumes,
    workers: Vec<WorkerHandle>,
    grants: Arc<XenParameters>,
    engine: &Arc<Engine>,
) -> anyhow::Result<Backend> {
    let mut options = BackendOptions::new(Arc::new(XenHost), workers, volumes.clone());
    options.parameters = grants;
    // Weak, because the engine owns the backend.
    let engine = Arc::downgrade(engine);
    options.awaited =
        Arc::new(move |name| engine.upgrade().is_some_and(|engine| engine.awaits(name)));
    options.journals = Some(JOURNALS.into());
    if Path::new(KERNEL_BACKEND).exists() {
        tracing::info!("xen-blkback is loaded: it serves disks with the script block-ebbd");
    } else {
        options.kinds.push("vbd".to_owned());
    }
    let backend = Backend::start(options)?;
    tracing::info!("serving Xen guests");
    Ok(backend)
}

/// Applies the parameters of grants and polling to Xen rings, now and after changes.
pub fn govern_grants(parameters: &Parameters, grants: &Arc<XenParameters>) {
    let apply = |grants: &XenParameters, key, value: u64| {
        // The maximum values are far below 2^32.
        let number = u32::try_from(value).unwrap_or(u32::MAX);
        match key {
            Key::MaxPersistentGrants => grants.set_max_persistent_grants(number),
            Key::PersistentGrantUnusedSeconds => {
                grants.set_persistent_grant_unused_seconds(number);
            }
            Key::FeaturePersistent => grants.set_feature_persistent(value != 0),
            Key::PollUs => grants.set_poll_us(number),
            _ => {}
        }
    };
    for key in Key::all() {
        apply(grants, key, parameters.live(key).get());
    }
    let grants = grants.clone();
    parameters.watch(move |change| apply(&grants, change.key, change.to));
}

/// `ebbd xen`.
///
/// # Errors
/// If xenstore cannot be reached, or the disk cannot be attached or detached; the message says why.
pub fn attach_or_detach(args: &XenArgs) -> anyhow::Result<()> {
    let mut store = XenbusConnection::open().context("xenstore")?;
    let guest = find_domain(&mut store, &args.domain)?;
    match &args.volume {
        Some(volume) if args.action == "attach" => {
            let disk = DiskSpec { volume, name: &args.disk, read_only: args.read_only };
            attach(&mut store, guest, &disk)?;
        }
        _ => detach(&mut store, guest, &args.disk, args.force)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ebb_config::params::Configured;
    use serde_json::json;

    use super::*;

    #[test]
    fn xen_rings_follow_the_parameters_of_grants() {
        let daemon = BTreeMap::from([(Key::MaxPersistentGrants, 99)]);
        let parameters = Parameters::new(&Configured { daemon, ..Configured::default() });
        let grants = Arc::<XenParameters>::default();
        let values = || {
            (
                grants.max_persistent_grants(),
                grants.persistent_grant_unused_seconds(),
                grants.feature_persistent(),
                grants.poll_us(),
            )
        };
        let ours = values();
        for (key, value) in [
            (Key::MaxPersistentGrants, u64::from(ours.0)),
            (Key::PersistentGrantUnusedSeconds, u64::from(ours.1)),
            (Key::FeaturePersistent, u64::from(ours.2)),
            (Key::PollUs, u64::from(ours.3)),
        ] {
            assert_eq!(key.definition().default, value, "both crates have one default");
        }
        govern_grants(&parameters, &grants);
        assert_eq!(values(), (99, 60, true, 100));
        parameters.set("max_persistent_grants", None, &json!(0)).unwrap();
        parameters.set("persistent_grant_unused_seconds", None, &json!("5")).unwrap();
        parameters.set("feature_persistent", None, &json!("off")).unwrap();
        parameters.set("poll_us", None, &json!(7)).unwrap();
        assert_eq!(values(), (0, 5, false, 7));
        parameters.unset("max_persistent_grants", None).unwrap();
        parameters.unset("feature_persistent", None).unwrap();
        assert_eq!(values(), (99, 5, true, 7));
        assert!(parameters.set("feature_persistent", None, &json!("maybe")).is_err());
    }
}
