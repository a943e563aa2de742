//! What an unauthenticated peer that only begins TLS handshakes costs another connection.
//!
//! One process ([`flood`]) opens connections to the daemon's TLS port, requests TLS, sends a
//! ClientHello, reads nothing and closes. Meanwhile a client on a unix socket reads. Its rate is
//! compared with its rate while the same process does the same to a socket whose listener reads and
//! discards (the sink): what is lost then is due to the process itself and to the kernel's TCP,
//! which no server can prevent.
//!
//! Invariants:
//! - The two sides of a comparison alternate within each round, against the same daemon.
//! - Before each measurement the daemon has replied to the ClientHello with its certificate once,
//!   so that a hello that is not processed cannot pass for a cheap one.
//! - The daemon and the client are bound to one processor, the flood and the sink to another. Otherwise the scheduler
//!   decides the result: on two processors a client with 16 requests in flight does 120,000 or 163,000 reads a second
//!   depending on whether it shares the worker's processor, and beside the sink always the latter, a third more than
//!   alone. Bound so, all processor time that the daemon spends on the flood is the client's loss.
//! - All traffic is on loopback; the flood ends by itself.
//! - A missed target is a result, not a failure: the line says `short`.

pub mod flood;
mod reader;
mod rig;

use std::io;
use std::path::Path;
use std::time::Duration;

use self::rig::{Rig, Target};
use super::figure::{Bar, Better, Figure};
use super::{Error, log};

/// The share of the other connection's rate beside the sink that must remain beside the daemon.
const REMAIN: f64 = 0.8;

/// A server's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Rsa4096,
    EcdsaP256,
}

impl Key {
    fn name(self) -> &'static str {
        match self {
            Key::Rsa4096 => "rsa4096",
            Key::EcdsaP256 => "ecdsa_p256",
        }
    }
}

/// Requests that the other connection has in flight.
const DEPTHS: [usize; 2] = [1, 16];

fn name(key: Key, depth: usize) -> String {
    format!("hello_flood_{}_qd{depth}_reads_per_s", key.name())
}

/// Runs all measurements the options ask for; returns how many failed to run.
///
/// # Errors
/// Nothing can be measured at all, or `print` fails.
pub fn run(
    options: &super::Options,
    mut print: impl FnMut(&Figure) -> io::Result<()>,
) -> Result<usize, Error> {
    let daemon = super::daemon_path()?;
    let place = super::place()?;
    super::process::describe_load();
    let mut failed = 0;
    for key in [Key::Rsa4096, Key::EcdsaP256] {
        for depth in DEPTHS {
            let name = name(key, depth);
            if !options.wants(&name) {
                continue;
            }
            log(&name);
            match measure(key, depth, options, &daemon, &place) {
                Ok(rounds) => {
                    let bar = Bar::AtLeastRatio(REMAIN);
                    let figure = Figure::from_rounds(name, &rounds, Better::Higher, bar);
                    figure.iter().try_for_each(&mut print)
                }
                .map_err(super::io_context("writing a figure to stdout"))?,
                Err(error) => {
                    failed += 1;
                    log(format_args!("{name} FAILED: {error}"));
                }
            }
        }
    }
    super::process::describe_load();
    Ok(failed)
}

/// Reads per second of each round, beside a flood of the daemon and beside one of the sink.
fn measure(
    key: Key,
    depth: usize,
    options: &super::Options,
    daemon: &Path,
    place: &Path,
) -> Result<[Vec<f64>; 2], Error> {
    let time = Duration::from_secs(options.seconds.into());
    let mut rig = Rig::start(daemon, place, key)?;
    log(format_args!("alone: {:.0} reads/s", rig.reads(depth, time, None)?));
    let mut rounds = [Vec::new(), Vec::new()];
    for round in 0..options.rounds {
        // Which comes first alternates: what warms up or cools down counts for both.
        let mut order = [Target::Daemon, Target::Sink];
        order.rotate_left(round as usize % 2);
        for target in order {
            rounds[target as usize].push(rig.reads(depth, time, Some(target))?);
        }
    }
    rig.stop()?;
    Ok(rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifth_of_the_requests_may_be_lost_to_the_flood() {
        let figure = |ours: f64| {
            let bar = Bar::AtLeastRatio(REMAIN);
            Figure::from_rounds("x", &[vec![ours], vec![1000.0]], Better::Higher, bar).unwrap()
        };
        assert!(figure(801.0).meets_bar());
        assert!(!figure(799.0).meets_bar());
    }

    #[test]
    fn every_measurement_has_a_name_of_its_own() {
        let mut names: Vec<_> = [Key::Rsa4096, Key::EcdsaP256]
            .into_iter()
            .flat_map(|key| DEPTHS.map(|depth| name(key, depth)))
            .collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 2 * DEPTHS.len());
    }
}
