//! Disks of Xen guests as metrics. A disk's counters begin anew when it connects.

use std::fmt;

use super::Out;
use crate::stat::{Stat, XenStat};

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
        ("ebbd_xen_persistent", "Whether pages stay mapped", |disk| disk.persistent.into()),
        ("ebbd_xen_mapped_grants", "Pages of the guest that are mapped", |disk| disk.mapped_grants),
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
        ("ebbd_xen_errors", "Requests answered with an error", (|disk| disk.errors) as Value),
        ("ebbd_xen_resumed", "Requests taken over from a daemon before", |disk| disk.resumed),
        ("ebbd_xen_maps", "Pages mapped", |disk| disk.maps),
        ("ebbd_xen_copies", "Pieces the hypervisor copied", |disk| disk.copies),
        ("ebbd_xen_copy_calls", "Calls in which it did so", |disk| disk.copy_calls),
        ("ebbd_xen_evictions", "Mappings that made room for others", |disk| disk.evictions),
        ("ebbd_xen_expiries", "Mappings that had lain idle for too long", |disk| disk.expiries),
        ("ebbd_xen_events", "Events of the guest", |disk| disk.events),
        ("ebbd_xen_polls", "Times that requests were found without an event", |disk| disk.polls),
        ("ebbd_xen_notifications", "Events sent to the guest", |disk| disk.notifications),
    ] {
        out.counters((name, help), None, of(value))?;
    }
    Ok(())
}
