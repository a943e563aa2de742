//! A guest is migrated between two QEMUs on one host that share a volume, while it writes and verifies.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use testbed::guest::vhost::Qemu;
use testbed::guest::{Guest, Machine};
use testbed::harness::process::{PATIENCE, until};
use testbed::{Error, Result, Server, Setup, check};

const MIB: u64 = 1 << 20;
const FUNCTIONS: &str = include_str!("vhost/disk.sh");

fn guest(server: &Server, qemu: Qemu) -> Result<Guest> {
    let guest = Guest::interactive(FUNCTIONS).qemu(qemu).memory_mib(256).processors(2);
    let load = Path::new(env!("CARGO_BIN_EXE_guest-load"));
    let guest = guest.program("mkfs.ext4").program_as(load, "guest-load");
    let guest = guest.vhost_user(&server.vhost_socket("disk"), &["num-queues=4"]);
    Ok(guest.vhost_user(&server.vhost_socket("load"), &["num-queues=4"]))
}

/// Moves the guest to a new QEMU. Returns it, and what QEMU tells of the migration.
fn migrate(mut from: Machine, to: Guest, server: &Server) -> Result<(Machine, Value)> {
    let mut to = to.incoming().beside(&from).boot()?;
    let uri = format!("unix:{}", server.dir().join("migration.sock").display());
    to.qmp()?.execute("migrate-incoming", &json!({ "uri": uri }))?;
    let fast = json!({"max-bandwidth": 1 << 30});
    from.qmp()?.execute("migrate-set-parameters", &fast)?;
    from.qmp()?.execute("migrate", &json!({ "uri": uri }))?;
    let info = until("the migration is complete", PATIENCE, || {
        let info = from.qmp()?.execute("query-migrate", &json!({}))?;
        match info["status"].as_str() {
            Some("completed") => Ok(Some(info)),
            Some("failed" | "cancelled") => Err(Error::unexpected(info.to_string())),
            _ => Ok(None),
        }
    })?;
    until("the guest runs", PATIENCE, || {
        let status = to.qmp()?.execute("query-status", &json!({}))?;
        Ok((status["status"] == "running").then_some(()))
    })?;
    Ok((to, info))
}

#[expect(clippy::print_stderr, reason = "shown with --nocapture")]
fn migrations(qemu: Qemu) -> Result {
    let setup = Setup::new()?.image("disk", 600 * MIB)?.image("load", 32 * MIB)?;
    let mut server = setup.vhost_user().start()?;
    let mut machine = guest(&server, qemu)?.boot()?;
    machine.ready(1)?;
    machine.call("fill")?;
    let since = Instant::now();
    for round in 0..3 {
        machine.call("load 8 vdb")?;
        let (to, info) = migrate(machine, guest(&server, qemu)?, &server)?;
        machine = to;
        machine.call("loaded")?;
        let (downtime, total) = (&info["downtime"], &info["total-time"]);
        let load = machine.answer("load")?;
        eprintln!("measured: migration {round}: downtime {downtime} ms of {total} ms, {load}");
        server.healthy()?;
    }
    machine.call("verify")?;
    check(machine.answer("files")? == "50", || "50 files are verified".into())?;
    machine.call("quiet")?;
    machine.order("end")?;
    machine.wait()?;
    eprintln!("measured: all {:?}", since.elapsed());
    server.stop()
}

#[test]
fn a_guest_is_migrated_from_qemu_7_2_to_7_2() -> Result {
    migrations(Qemu::Installed)
}

#[test]
fn a_guest_is_migrated_from_qemu_10_to_10() -> Result {
    migrations(Qemu::Backports)
}
