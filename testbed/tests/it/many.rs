//! Thousands of volumes with a cache: the daemon starts, serves each, and stays small.

use std::fmt::Write;
use std::path::PathBuf;

use testbed::harness::nbd::{Client, Handshake};
use testbed::harness::process::resident;
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, check};

const VOLUMES: u64 = 2000;
/// The memory limit of each further idle volume with a cache.
const EACH: u64 = 32 << 10;

/// A daemon with this many cached volumes from a configuration file.
fn cached(volumes: u64) -> Result<Server> {
    let setup = Setup::new()?.log_level("warn");
    let mut config = String::new();
    for n in 0..volumes {
        write!(config, "[volume.v{n}]\nstore = \"null:1M\"\ncache = \"writethrough\"\n")
            .map_err(|e| Error::unexpected(e.to_string()))?;
    }
    let file: PathBuf = setup.dir().join("ebbd.toml");
    std::fs::write(&file, config).map_err(Error::io("write a configuration"))?;
    setup.arg("--config").arg(file).start()
}

#[test]
fn two_thousand_cached_volumes_are_served_and_stay_small() -> Result {
    let mut one = cached(1)?;
    let alone = resident(one.pid()?)?;
    one.stop()?;
    let mut many = cached(1 + VOLUMES)?;
    let each = resident(many.pid()?)?.saturating_sub(alone) / VOLUMES;
    println!("each further idle cached volume: {each} bytes (bar {EACH})");
    let names = Handshake::connect(&many.socket())?.list()?;
    check(names.len() as u64 == 1 + VOLUMES, || format!("{} volumes listed", names.len()))?;
    for n in (0..VOLUMES).step_by(97).chain([VOLUMES]) {
        let mut client = Client::open(&many.socket(), &format!("v{n}"))?;
        for what in ["from the store", "from the cache"] {
            let data = client.read(64 << 10, 64 << 10)?;
            check(data == vec![0; 64 << 10], || format!("volume {n}, {what}: wrong data"))?;
        }
        client.disconnect()?;
    }
    many.healthy()?;
    many.stop()?;
    check(each <= EACH, || format!("each further idle cached volume uses {each} bytes"))
}
