//! A guest's ext4 on a writeback volume survives `kill -9` of the daemon. `make bench-writeback`
//! kills it twenty times.

use testbed::guest::journal::kill_daemons;
use testbed::harness::binary::Build;
use testbed::{Error, Result, check};

#[test]
fn ext4_is_clean_after_its_journal_is_replayed_whenever_the_daemon_was_killed() -> Result {
    let count =
        usize::try_from(seeded::scaled(3)).map_err(|_| Error::unexpected("too many kills"))?;
    let report = kill_daemons(count, Build::AsTests, seeded::seed("EBBD_TEST_SEED", 0xebb_b010))?;
    check(report.kills == count && report.promised >= 3 * count as u64, || {
        format!("{} kills, {} durable writes", report.kills, report.promised)
    })?;
    check(report.broken.is_empty(), || report.broken.join("\n"))
}
