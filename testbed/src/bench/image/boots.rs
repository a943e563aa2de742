//! Many guests that boot from clones of one base, over a store that takes a millisecond for each read.
//!
//! A boot is a trace of bursts: reads of several sizes at places that are near each other, with time in between in which a
//! guest computes. The trace is made from one seed, not recorded: 400 bursts in 4 s, some 60 MiB of the base.

use std::time::{Duration, Instant};

use super::client::{Client, Load};
use super::rig::{BASE, Rig, volume};
use super::{Error, log};
use crate::bench::cache::rig::Daemon;
use crate::bench::figure::{Bar, Figure};
use crate::bench::server::Server;
use crate::harness::pattern::Random;

/// Figure: seconds of a boot among ten at the same time, a hundred in all; its peer is one alone, after the first.
pub const BOOTS: &str = "image_boots100_seconds";

const GUESTS: usize = 100;
const TOGETHER: usize = 10;
const BURSTS: u64 = 400;
const THINK: Duration = Duration::from_millis(10);

/// Reads that a guest has in flight together.
struct Burst {
    places: Vec<u32>,
    /// Blocks of each.
    blocks: u32,
}

fn trace(blocks: u32) -> Vec<Burst> {
    let mut random = Random::new(0xb007);
    let mut below = |limit: u64| u32::try_from(random.below(limit)).unwrap_or(0);
    let burst = |_| {
        // Files are near each other: in an eighth of the disk.
        let start = below(u64::from(blocks / 8));
        let (count, size) = match below(10) {
            0..=3 => (1 + below(6), 1),
            4..=7 => (1 + below(4), 8),
            _ => (1 + below(3), 32),
        };
        Burst { places: (0..count).map(|at| start + at * size).collect(), blocks: size }
    };
    (0..BURSTS).map(burst).collect()
}

/// Seconds of one boot.
fn boot(rig: &Rig<'_>, daemon: &Daemon, name: &str, trace: &[Burst]) -> Result<f64, Error> {
    let (mut client, mut image) = (Client::open(daemon.server.socket(), name)?, rig.image());
    let began = Instant::now();
    for burst in trace {
        std::thread::sleep(THINK);
        let (places, blocks) = (&burst.places, burst.blocks);
        client.run(&mut image, Load { places, blocks, depth: 4, write: false, time: None })?;
    }
    let seconds = began.elapsed().as_secs_f64();
    client.disconnect()?;
    Ok(seconds)
}

/// Boots one guest alone, another one alone, and then a hundred, ten at a time.
///
/// # Errors
/// [`Error`] when a server fails or returns wrong data.
pub fn boots(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let socket = rig.path("slow.sock");
    let mut nbdkit = std::process::Command::new("nbdkit");
    nbdkit.args(["--foreground", "--filter=delay", "--unix"]).arg(&socket);
    nbdkit.arg("file").arg(rig.base()?).arg("rdelay=1ms");
    let store = Server::start("nbdkit", nbdkit, socket, rig.path("slow.log"), ["disk"])?;
    let uri = format!("nbd+unix:///disk?socket={}", store.socket().display());
    let mut config = format!("cache_min = \"{}\"\n", rig.bytes() / 4);
    config += &volume(BASE, &uri, "read_only = true");
    let names: Vec<String> = (0..GUESTS + 2).map(|number| format!("guest{number}")).collect();
    for name in &names {
        rig.remove(&format!("{name}.delta"))?;
        config += &rig.delta_volume(name, BASE, "create = true");
    }
    let served: Vec<&str> = names.iter().map(String::as_str).collect();
    let daemon = rig.ebbd("boots", &config, &served)?;
    let trace = trace(rig.blocks());
    let first = boot(rig, &daemon, &names[0], &trace)?;
    let alone = boot(rig, &daemon, &names[1], &trace)?;
    let mut seconds = Vec::new();
    for together in names[2..].chunks(TOGETHER) {
        let times: Result<Vec<f64>, Error> = std::thread::scope(|scope| {
            let boots =
                together.iter().map(|name| scope.spawn(|| boot(rig, &daemon, name, &trace)));
            let panicked = || Error::Failed { program: "a guest".into(), what: "panicked".into() };
            let boots: Vec<_> = boots.collect();
            boots.into_iter().map(|boot| boot.join().map_err(|_| panicked())?).collect()
        });
        seconds.extend(times?);
    }
    let mean = seconds.iter().sum::<f64>() / GUESTS as f64;
    log(format_args!("{BOOTS}: first {first:.2} s, alone {alone:.2} s, of a hundred {mean:.2} s"));
    daemon.server.stop()?;
    store.stop()?;
    let bar = Bar::AtMostRatio(1.2);
    Ok(vec![Figure { name: BOOTS.to_owned(), ours: mean, peer: Some(alone), bar }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_stays_within_the_base_and_is_the_same_each_time() {
        let (one, other) = (trace(1 << 16), trace(1 << 16));
        let end = |burst: &Burst| burst.places.iter().map(|place| place + burst.blocks).max();
        assert!(one.iter().filter_map(end).all(|end| end <= 1 << 16));
        let read = |trace: &[Burst]| {
            trace
                .iter()
                .map(|burst| burst.places.len() as u64 * u64::from(burst.blocks))
                .sum::<u64>()
        };
        assert_eq!(read(&one), read(&other));
        assert!((4096..65536).contains(&read(&one)), "{} blocks", read(&one));
    }
}
