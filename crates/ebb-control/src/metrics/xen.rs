//! Metrics of the disks of Xen guests. The counters of a disk start at zero when it connects.

use std::fmt;

use ebb_api::stat::{Stat, XenStat};

use super::Out;

type Value = fn(&XenStat) -> u64;

/// Writes them.
pub(super) fn encode(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let of = |value: Value| {
        stat.xen.iter().map(move |disk| {
            let labels = [
                ("domain", disk.domain.to_string()),
                ("device", disk.device.to_string()),
                ("volume", disk.volume.clone()),
            ];
            (labels, value(disk))
        })
    };
    for (name, help, value) in [
        ("ebbd_xen_queues", "Rings of the disk", (|disk| disk.queues.into()) as Value),
        ("ebbd_xen_persistent", "Whether grants are persistent", |disk| disk.persistent.into()),
        ("ebbd_xen_mapped_grants", "Persistent grants that are mapped", |disk| disk.mapped_grants),
    ] {
        out.gauges((name, help), None, of(value))?;
    }
    let requests = stat.xen.iter().flat_map(|disk| {
        disk.requests.iter().map(|(operation, count)| {
            let labels = [
                ("domain", disk.domain.to_string()),
                ("device", disk.device.to_string()),
                ("volume", disk.volume.clone()),
                ("operation", operation.clone()),
            ];
            (labels, *count)
        })
    });
    out.counters(("ebbd_xen_requests", "Requests of the guest"), None, requests)?;
    for (name, help, value) in [
        ("ebbd_xen_errors", "Requests completed with an error", (|disk| disk.errors) as Value),
        ("ebbd_xen_resumed", "Requests resumed from an earlier daemon", |disk| disk.resumed),
        ("ebbd_xen_maps", "Grants mapped", |disk| disk.maps),
        ("ebbd_xen_copies", "Segments copied by the hypervisor", |disk| disk.copies),
        ("ebbd_xen_copy_calls", "Hypercalls that copied segments", |disk| disk.copy_calls),
        ("ebbd_xen_evictions", "Grants unmapped to make room", |disk| disk.evictions),
        ("ebbd_xen_expiries", "Grants unmapped because they were idle", |disk| disk.expiries),
        ("ebbd_xen_events", "Events received from the guest", |disk| disk.events),
        ("ebbd_xen_polls", "Times that polling found requests", |disk| disk.polls),
        ("ebbd_xen_notifications", "Events sent to the guest", |disk| disk.notifications),
    ] {
        out.counters((name, help), None, of(value))?;
    }
    Ok(())
}
