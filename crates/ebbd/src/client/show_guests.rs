//! The tables of `ebbd stat` about the disks of guests.

use std::collections::BTreeMap;

use ebb_api::stat::{VhostStat, XenStat};

use super::table::TextTable;

/// The requests of all operations.
fn sum(requests: &BTreeMap<String, u64>) -> u64 {
    requests.values().fold(0, |sum, count| sum.saturating_add(*count))
}

/// The disks of Xen guests.
pub(super) fn xen(disks: &[XenStat]) -> String {
    if disks.is_empty() {
        return String::new();
    }
    let titles = [
        "DOMAIN", "DEVICE", "XEN DISK", "STATE", "QUEUES", "MAPPED", "REQUESTS", "MAPS", "COPIES",
        "ERRORS",
    ];
    let mut table = TextTable::new(&titles, 0b1100);
    for disk in disks {
        table.row([
            disk.domain.to_string(),
            disk.device.to_string(),
            disk.volume.clone(),
            disk.state.to_string(),
            disk.queues.to_string(),
            match disk.persistent {
                true => disk.mapped_grants.to_string(),
                false => "off".to_owned(),
            },
            sum(&disk.requests).to_string(),
            disk.maps.to_string(),
            disk.copies.to_string(),
            disk.errors.to_string(),
        ]);
    }
    format!("\n{}", table.text())
}

/// The frontends of vhost-user.
pub(super) fn vhost(disks: &[VhostStat]) -> String {
    if disks.is_empty() {
        return String::new();
    }
    let titles = [
        "FRONTEND",
        "VOLUME",
        "STATE",
        "PID",
        "QUEUES",
        "IN FLIGHT",
        "REQUESTS",
        "INLINE",
        "KICKS",
        "CALLS",
        "ERRORS",
    ];
    let mut table = TextTable::new(&titles, 0b111);
    for disk in disks {
        table.row([
            format!("vhost-{}", disk.connection),
            disk.volume.clone(),
            disk.state.to_string(),
            disk.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            disk.queues.to_string(),
            disk.in_flight.to_string(),
            sum(&disk.requests).to_string(),
            disk.inline.to_string(),
            disk.kicks.to_string(),
            disk.calls.to_string(),
            disk.errors.to_string(),
        ]);
    }
    format!("\n{}", table.text())
}

#[cfg(test)]
mod tests {
    use ebb_api::stat::FrontendState;

    use super::*;

    #[test]
    fn every_xen_disk_has_a_row() {
        let disk = XenStat {
            domain: 3,
            device: 51728,
            volume: "root".into(),
            state: "connected".into(),
            queues: 2,
            persistent: true,
            mapped_grants: 64,
            requests: [("read".to_owned(), 7), ("write".to_owned(), 2)].into(),
            maps: 65,
            ..XenStat::default()
        };
        let plain = XenStat { persistent: false, copies: 5, ..disk.clone() };
        let text = xen(&[disk, plain]);
        let rows: Vec<Vec<&str>> =
            text.trim().lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["3", "51728", "root", "connected", "2", "64", "9", "65", "0", "0"]);
        assert_eq!(rows[2], ["3", "51728", "root", "connected", "2", "off", "9", "65", "5", "0"]);
        assert_eq!(xen(&[]), "");
    }

    #[test]
    fn every_frontend_has_a_row() {
        let disk = VhostStat {
            volume: "root".into(),
            connection: 17,
            pid: Some(4242),
            state: FrontendState::Serving,
            queues: 4,
            requests: [("read".to_owned(), 7), ("flush".to_owned(), 2)].into(),
            inline: 5,
            kicks: 3,
            ..VhostStat::default()
        };
        let unknown = VhostStat { pid: None, ..disk.clone() };
        let text = vhost(&[disk, unknown]);
        let rows: Vec<Vec<&str>> =
            text.trim().lines().map(|line| line.split_whitespace().collect()).collect();
        let row = ["vhost-17", "root", "serving", "4242", "4", "0", "9", "5", "3", "0", "0"];
        assert_eq!(rows[1], row);
        assert_eq!(rows[2][3], "-");
        assert_eq!(vhost(&[]), "");
    }
}
