//! The client whose requests are counted.

use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::harness::nbd::{Client, Request, read_reply, wire};
use crate::harness::pattern::Random;

use super::super::Error;

/// Bytes of a read, and of the volume.
const BLOCK: u32 = 4096;
pub(super) const VOLUME: u64 = 64 << 20;

fn failed(what: impl std::fmt::Display) -> Error {
    Error::Failed { program: "ebbd".to_owned(), what: what.to_string() }
}

/// Reads for `time` with `depth` requests in flight; returns how many a second were answered.
pub(super) fn rate(socket: &Path, depth: usize, time: Duration) -> Result<f64, Error> {
    let client = Client::open(socket, "disk").map_err(failed)?;
    let mut stream = client.into_stream();
    let mut random = Random::new(1);
    let mut next = move || {
        let offset = random.below(VOLUME / u64::from(BLOCK)) * u64::from(BLOCK);
        Request { command: wire::CMD_READ, offset, length: BLOCK, ..Request::default() }.bytes()
    };
    for _ in 0..depth {
        stream.write_all(&next()).map_err(failed)?;
    }
    let (begun, mut count) = (Instant::now(), 0_u32);
    let mut data = [0; BLOCK as usize];
    while begun.elapsed() < time {
        let (_, error) = read_reply(&mut stream).map_err(failed)?;
        if error != 0 {
            return Err(failed(format!("a read failed with error {error}")));
        }
        stream.read_exact(&mut data).map_err(failed)?;
        count += 1;
        stream.write_all(&next()).map_err(failed)?;
    }
    Ok(f64::from(count) / begun.elapsed().as_secs_f64())
}
