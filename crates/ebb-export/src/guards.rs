//! The guards that every export keeps, as one table: guard × export.
//!
//! A peer stays attached to an export while the daemon below it is killed, stopped or replaced, and
//! while its volume is resized, replaced or removed. Each guard exists because one export once
//! lacked it. Neither a new guard nor a new export compiles without its cells in [`answer`], and
//! the tests of every export run the suite that checks them (`testbed/export-guards`).
//! ARCHITECTURE.md shows the table.

/// A promise that an export keeps, whatever its protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// A peer that stays attached never goes on over another store.
    StoreIdentity,
    /// A volume has one writer over all exports, also after a restart.
    OneWriter,
    /// Only peers that `allow` admits attach, and those it no longer admits are detached.
    AccessList,
    /// A peer follows a volume that grows, and never goes on over one that lost its end.
    SizeChange,
    /// After a kill has lost acknowledged writes, no flush of an attached peer succeeds.
    UnstableWrites,
    /// Requests wait for the volume's limits, and the wait ends with the volume or the daemon.
    Limits,
    /// A stop completes the requests in flight and acknowledges only completed ones.
    Stop,
    /// A removed volume completes its requests, detaches its peers and disturbs no other volume.
    Removal,
    /// A successor carries out the requests that its predecessor left unanswered, or none of them.
    Restart,
}

impl Guard {
    /// All guards.
    pub const ALL: [Guard; 9] = [
        Guard::StoreIdentity,
        Guard::OneWriter,
        Guard::AccessList,
        Guard::SizeChange,
        Guard::UnstableWrites,
        Guard::Limits,
        Guard::Stop,
        Guard::Removal,
        Guard::Restart,
    ];

    /// The guard's name for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Guard::StoreIdentity => "store identity",
            Guard::OneWriter => "one writer",
            Guard::AccessList => "access list",
            Guard::SizeChange => "size change",
            Guard::UnstableWrites => "unstable writes",
            Guard::Limits => "limits",
            Guard::Stop => "stop",
            Guard::Removal => "removal",
            Guard::Restart => "restart",
        }
    }
}

/// An export, by its crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportKind {
    /// The NBD server.
    Nbd,
    /// The Xen block backend.
    Xen,
    /// The vhost-user-blk backend.
    Vhost,
}

impl ExportKind {
    /// All exports.
    pub const ALL: [ExportKind; 3] = [ExportKind::Nbd, ExportKind::Xen, ExportKind::Vhost];

    /// The name of the export's crate.
    #[must_use]
    pub const fn crate_name(self) -> &'static str {
        match self {
            ExportKind::Nbd => "ebb-export-nbd",
            ExportKind::Xen => "ebb-export-xen",
            ExportKind::Vhost => "ebb-export-vhost",
        }
    }
}

/// How an export answers a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuardAnswer {
    /// The export keeps the guard by these means.
    Keeps(&'static str),
    /// The guard has no meaning for this export, for this reason.
    NotApplicable(&'static str),
}

/// The cell of the table for a guard and an export.
#[must_use]
pub const fn answer(guard: Guard, export: ExportKind) -> GuardAnswer {
    use GuardAnswer::Keeps;
    match (guard, export) {
        (Guard::StoreIdentity, ExportKind::Nbd) => Keeps("in the state of a kept connection"),
        (Guard::StoreIdentity, ExportKind::Xen) => Keeps("in the ring's journal"),
        (Guard::StoreIdentity, ExportKind::Vhost) => Keeps("in the inflight region"),
        (Guard::OneWriter, ExportKind::Nbd) => Keeps("rejected in the handshake"),
        (Guard::OneWriter, ExportKind::Xen) => Keeps("waits 2 s, then fails"),
        (Guard::OneWriter, ExportKind::Vhost) => Keeps("queues wait for the writer"),
        (Guard::AccessList, ExportKind::Nbd) => Keeps("user, group, address or TLS identity"),
        (Guard::AccessList, ExportKind::Xen) => Keeps("guest, by number, name or UUID"),
        (Guard::AccessList, ExportKind::Vhost) => Keeps("user or group of the VMM"),
        (Guard::SizeChange, ExportKind::Nbd) => Keeps("keeps the size of its handshake"),
        (Guard::SizeChange, ExportKind::Xen) => Keeps("`sectors` in xenstore, and the journal"),
        (Guard::SizeChange, ExportKind::Vhost) => Keeps("config change, and the inflight region"),
        (Guard::UnstableWrites, ExportKind::Nbd) => Keeps("a kill ends the connection"),
        (Guard::UnstableWrites, ExportKind::Xen) => Keeps("in the ring's journal"),
        (Guard::UnstableWrites, ExportKind::Vhost) => Keeps("in the inflight region"),
        (Guard::Limits, ExportKind::Nbd) => Keeps("requests stay in the socket"),
        (Guard::Limits, ExportKind::Xen | ExportKind::Vhost) => Keeps("requests stay in the ring"),
        (Guard::Stop, ExportKind::Nbd) => Keeps("replies, then closes or keeps"),
        (Guard::Stop, ExportKind::Xen) => Keeps("responds; the disk stays connected"),
        (Guard::Stop, ExportKind::Vhost) => Keeps("completes, then closes the socket"),
        (Guard::Removal, ExportKind::Nbd) => Keeps("replies, then closes"),
        (Guard::Removal, ExportKind::Xen) => Keeps("responds, then disconnects the disk"),
        (Guard::Removal, ExportKind::Vhost) => Keeps("completes, then closes the socket"),
        (Guard::Restart, ExportKind::Nbd) => {
            Keeps("a takeover replies first; a kill ends the connection")
        }
        (Guard::Restart, ExportKind::Xen) => Keeps("repeats what the journal lists"),
        (Guard::Restart, ExportKind::Vhost) => Keeps("repeats what the inflight region lists"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod tests {
    use super::*;

    fn row(first: &str, cells: [&str; 3]) -> String {
        format!("| {first} | {} |", cells.join(" | "))
    }

    #[test]
    fn architecture_shows_the_table_of_guards() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let document = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
        let mut rows = vec![row("guard", ["NBD", "Xen", "vhost-user"])];
        rows.push("|---|---|---|---|".to_owned());
        for guard in Guard::ALL {
            let cells = ExportKind::ALL.map(|export| match answer(guard, export) {
                GuardAnswer::Keeps(means) => means.to_owned(),
                GuardAnswer::NotApplicable(reason) => format!("not applicable: {reason}"),
            });
            rows.push(row(guard.name(), cells.each_ref().map(String::as_str)));
        }
        let table = rows.join("\n");
        assert!(document.contains(&table), "ARCHITECTURE.md must show this table:\n{table}");
    }

    #[test]
    fn every_guard_and_export_is_listed_once() {
        assert!(Guard::ALL.iter().enumerate().all(|(at, guard)| *guard as usize == at));
        assert!(ExportKind::ALL.iter().enumerate().all(|(at, export)| *export as usize == at));
    }
}
