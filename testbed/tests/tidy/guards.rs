//! The guards that every export needs, and the test by which each export shows that it has one.
//!
//! A peer of any export stays attached while the daemon below it changes: it is killed, another one
//! takes over, its volume is replaced, resized or removed. Each guard exists because an export once
//! lacked what the others had. The table is a match over all pairs, so that neither a new guard nor
//! a new export compiles without its tests, and a crate `ebb-export-*` that it does not have is a
//! finding.

use super::{positions, read_tree, root};

/// What an export must hold to, whatever its protocol.
#[derive(Clone, Copy, Debug)]
enum Guard {
    /// A peer that stays attached over a restart, a takeover or a reload never goes on over another
    /// store.
    StoreIdentity,
    /// A volume has one writer, over all exports.
    OneWriter,
    /// Only those that `allow` has may attach, and those that it no longer has are detached.
    AccessList,
    /// A volume that grows is seen in its new size, or goes on in its former one.
    Grow,
    /// A peer does not go on over a volume that has lost its end, and cannot reach beyond the end.
    Shrink,
    /// After acknowledged writes were lost, no flush of a peer that was attached succeeds.
    LostWrites,
    /// Requests wait for the volume's limits, and such a wait ends with the connection.
    Limits,
    /// A stop completes the requests in flight.
    Stop,
    /// The removal of a volume completes its requests in flight, and ends its connections only.
    Removal,
    /// Requests that were not answered by a daemon that ended are carried out once by its
    /// successor, or by none.
    Restart,
}

const GUARDS: [Guard; 10] = [
    Guard::StoreIdentity,
    Guard::OneWriter,
    Guard::AccessList,
    Guard::Grow,
    Guard::Shrink,
    Guard::LostWrites,
    Guard::Limits,
    Guard::Stop,
    Guard::Removal,
    Guard::Restart,
];

/// The exports.
#[derive(Clone, Copy, Debug)]
enum Export {
    Nbd,
    Xen,
    Vhost,
}

const EXPORTS: [Export; 3] = [Export::Nbd, Export::Xen, Export::Vhost];

impl Export {
    const fn name(self) -> &'static str {
        match self {
            Export::Nbd => "ebb-export-nbd",
            Export::Xen => "ebb-export-xen",
            Export::Vhost => "ebb-export-vhost",
        }
    }
}

/// The test that shows a guard of an export.
const fn test_of(export: Export, guard: Guard) -> &'static str {
    match (guard, export) {
        (Guard::StoreIdentity, Export::Nbd) => "a_client_is_not_continued_on_another_disk",
        (Guard::StoreIdentity, Export::Xen) => {
            "an_idle_guest_is_not_resumed_on_another_store_or_a_smaller_one"
        }
        (Guard::StoreIdentity, Export::Vhost) => "a_guest_does_not_go_on_over_another_store",
        (Guard::OneWriter, Export::Nbd) => "a_volume_with_another_writer_is_refused_to_clients",
        (Guard::OneWriter, Export::Xen) => "guests_and_nbd_clients_exclude_each_other_as_writers",
        (Guard::OneWriter, Export::Vhost) => "a_second_writer_waits_until_the_first_has_stopped",
        (Guard::AccessList, Export::Nbd) => {
            "a_client_that_may_no_longer_open_its_volume_is_disconnected"
        }
        (Guard::AccessList, Export::Xen) => {
            "a_guest_that_may_no_longer_open_its_volume_is_disconnected"
        }
        (Guard::AccessList, Export::Vhost) => {
            "a_frontend_opens_a_volume_that_its_user_or_group_may_open"
        }
        (Guard::Grow, Export::Nbd) => {
            "a_volume_grows_while_it_is_used_and_shrinks_only_with_the_flag"
        }
        (Guard::Grow, Export::Xen) => "a_guest_is_notified_when_its_disk_grows",
        (Guard::Grow, Export::Vhost) => {
            "trap_9_a_changed_size_is_announced_and_so_it_is_after_a_reconnect"
        }
        (Guard::Shrink, Export::Nbd) => "clients_of_a_volume_that_has_changed_are_closed",
        (Guard::Shrink, Export::Xen) => "the_size_that_a_guest_was_given_is_in_the_journal",
        (Guard::Shrink, Export::Vhost) => "a_guest_does_not_go_on_over_a_smaller_disk",
        (Guard::LostWrites, Export::Nbd) => {
            "a_flush_that_fails_for_one_client_does_not_succeed_for_another"
        }
        (Guard::LostWrites, Export::Xen) => {
            "a_successor_does_not_flush_over_writes_that_a_kill_has_lost"
        }
        (Guard::LostWrites, Export::Vhost) => {
            "a_successor_fails_writes_and_flushes_after_a_kill_has_lost_writes"
        }
        (Guard::Limits, Export::Nbd) => {
            "disconnecting_withdrawing_and_stopping_end_a_throttled_wait"
        }
        (Guard::Limits, Export::Xen | Export::Vhost) => {
            "withdrawing_and_stopping_end_a_throttled_wait"
        }
        (Guard::Stop, Export::Nbd) => {
            "a_stop_sends_the_replies_to_requests_in_flight_and_then_closes"
        }
        (Guard::Stop, Export::Xen) => "a_store_that_hangs_delays_only_its_own_disk_at_a_stop",
        (Guard::Stop, Export::Vhost) => "withdrawing_and_stopping_complete_what_was_consumed",
        (Guard::Removal, Export::Nbd) => {
            "a_volume_removed_under_load_ends_its_connections_and_keeps_what_it_acknowledged"
        }
        (Guard::Removal, Export::Xen) => {
            "a_withdrawn_volume_drains_independently_and_its_guest_is_notified"
        }
        (Guard::Removal, Export::Vhost) => "a_withdrawn_volume_can_be_replaced",
        (Guard::Restart, Export::Nbd) => "a_client_notices_nothing_of_forty_servers",
        (Guard::Restart, Export::Xen) => "guests_stay_connected_while_the_backend_is_replaced",
        (Guard::Restart, Export::Vhost) => "trap_1_to_5_kills_lose_no_request_and_repeat_none",
    }
}

#[test]
fn every_export_shows_every_guard() {
    let crates = std::fs::read_dir(root().join("crates")).unwrap();
    let names = crates.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut found: Vec<String> = names.filter(|name| name.starts_with("ebb-export-")).collect();
    let mut known = EXPORTS.map(Export::name);
    found.sort_unstable();
    known.sort_unstable();
    assert_eq!(found, known, "give the export its row of tests in testbed/tests/tidy/guards.rs");
    let mut sources = Vec::new();
    read_tree(&root(), "", &mut sources).unwrap();
    let mut missing = Vec::new();
    for export in EXPORTS {
        let places = [format!("crates/{}/", export.name()), "testbed/tests/".to_owned()];
        let own = |path: &str| places.iter().any(|place| path.starts_with(place.as_str()));
        for guard in GUARDS {
            let head = format!("#[test]\nfn {}()", test_of(export, guard));
            let mut own = sources.iter().filter(|source| source.is_rust() && own(&source.path));
            if !own.any(|source| !positions(&source.code, &head).is_empty()) {
                missing.push(format!("{export:?}, {guard:?}: {}", test_of(export, guard)));
            }
        }
    }
    assert!(missing.is_empty(), "no such test of the export:\n{}", missing.join("\n"));
}
