//! The memory of an idle daemon: alone, with a thousand volumes and with a thousand connections. Measured on a release build;
//! the figures are printed (`cargo test -p testbed --test sizes -- --nocapture`).

use std::fmt::Write;
use std::fs::File;
use std::time::{Duration, Instant};
use testbed::bench::elastic;
use testbed::harness::binary::Build;
use testbed::harness::nbd::{Client, Handshake};
use testbed::harness::process::{open_files, resident};
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, check};

const VOLUMES: u64 = 1000;
/// Limits: an idle daemon, each further idle volume, and each idle connection, whether used before or not.
const DAEMON: u64 = 8 << 20;
const VOLUME: u64 = 32 << 10;
const CONNECTION: u64 = 17 << 10;

/// A daemon with this many file-backed volumes from a configuration file, and the time until it
/// served.
fn idle(volumes: u64) -> Result<(Server, Duration)> {
    let setup = Setup::new()?.build(Build::Release).log_level("warn");
    let mut config = String::new();
    for n in 0..volumes {
        let path = setup.dir().join(format!("v{n}.img"));
        let made = File::create(&path).and_then(|file| file.set_len(1 << 20));
        made.map_err(Error::io(path.display().to_string()))?;
        let path = path.display();
        write!(config, "[volume.v{n}]\nstore = \"file:{path}\"\n")
            .map_err(|e| Error::unexpected(e.to_string()))?;
    }
    let file = setup.dir().join("ebbd.toml");
    std::fs::write(&file, config).map_err(Error::io("write a configuration"))?;
    let before = Instant::now();
    let server = setup.arg("--config").arg(file).start()?;
    Ok((server, before.elapsed()))
}

#[test]
fn an_idle_daemon_and_a_thousand_idle_volumes_stay_within_their_bars() -> Result {
    // How much of the program the kernel maps around each page that is used differs from start to start, by 200 KiB.
    let mut alone = u64::MAX;
    for _ in 0..5 {
        let (mut one, _) = idle(1)?;
        alone = alone.min(resident(one.pid()?)?);
        one.stop()?;
    }
    let (mut many, start) = idle(1 + VOLUMES)?;
    let names = Handshake::connect(&many.socket())?.list()?;
    check(names.len() as u64 == 1 + VOLUMES, || format!("{} volumes listed", names.len()))?;
    let full = resident(many.pid()?)?;
    let each = full.saturating_sub(alone) / VOLUMES;

    // Used once, then idle: no limit applies, but the figure is printed.
    for n in 0..=VOLUMES {
        let mut client = Client::open(&many.socket(), &format!("v{n}"))?;
        client.write(4096, &[1; 4096], 0)?;
        client.read(0, 64 << 10)?;
        client.disconnect()?;
    }
    let used = resident(many.pid()?)?.saturating_sub(alone) / VOLUMES;
    let files = open_files(many.pid()?)?.len();
    println!("idle daemon, 1 volume: {} KiB resident (bar {} KiB)", alone / 1024, DAEMON / 1024);
    println!("each further idle volume: {each} bytes (bar {VOLUME})");
    println!("each further volume after use: {used} bytes; {files} descriptors");
    println!("{} volumes served {} ms after start", 1 + VOLUMES, start.as_millis());
    many.healthy()?;
    many.stop()?;
    check(alone <= DAEMON, || format!("an idle daemon uses {} KiB", alone / 1024))?;
    check(each <= VOLUME, || format!("each further idle volume uses {each} bytes"))
}

#[test]
fn a_thousand_idle_connections_stay_within_their_bar() -> Result {
    let (idle, used) = elastic::connection_bytes()?;
    println!("each idle connection: {idle} bytes, after use {used} (bar {CONNECTION})");
    check(idle <= CONNECTION, || format!("each idle connection uses {idle} bytes"))?;
    check(used <= CONNECTION, || format!("each connection that was used before uses {used} bytes"))
}
