//! The daemon's Xen backend, and `ebbd xen`.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use ebb_advice::Advised;
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

/// Makes the directory of the journals, and so the one above it, in which the control socket usually is: before that is opened.
///
/// # Errors
/// If it cannot be created.
pub(crate) fn make_directory() -> anyhow::Result<()> {
    std::fs::create_dir_all(JOURNALS)
        .with_context(|| format!("cannot create {JOURNALS}: give the daemon's user access to it"))
}

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

/// `ebbd xen`.
///
/// # Errors
/// If xenstore cannot be reached, or the disk cannot be attached or detached; the message says why.
pub fn attach_or_detach(args: &XenArgs) -> anyhow::Result<()> {
    let mut store = XenbusConnection::open().context("xenstore")?;
    let guest = find_domain(&mut store, &args.domain).map_err(Advised)?;
    match &args.volume {
        Some(volume) if args.action == "attach" => {
            let disk = DiskSpec { volume, name: &args.disk, read_only: args.read_only };
            attach(&mut store, guest, &disk).map_err(Advised)?;
        }
        _ => detach(&mut store, guest, &args.disk, args.force).map_err(Advised)?,
    }
    Ok(())
}
