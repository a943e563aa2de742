//! Clients of the bench: those whose latency is measured, and those that wait for a dead store.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::harness::nbd::{Client, Handshake, Request, wire};
use crate::harness::pattern::Random;

use super::super::Error;

/// Bytes of a measured request.
const BLOCK: u32 = 4096;
/// Bytes of a volume that the measured clients use.
const SPAN: u64 = 32 << 20;

fn failed(what: impl std::fmt::Display) -> Error {
    Error::Failed { program: "ebbd".to_owned(), what: what.to_string() }
}

/// One client per volume, one request at a time, alternating reads and writes, with occasional
/// flushes; the 99th percentile of all latencies of reads and writes, microseconds.
pub(super) fn p99(socket: &Path, volumes: &[String], seconds: u32) -> Result<f64, Error> {
    let stop = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = volumes
        .iter()
        .enumerate()
        .map(|(number, volume)| {
            let (socket, volume, stop) = (socket.to_owned(), volume.clone(), stop.clone());
            std::thread::spawn(move || client(&socket, &volume, number as u64, &stop))
        })
        .collect();
    std::thread::sleep(Duration::from_secs(seconds.into()));
    stop.store(true, Ordering::SeqCst);
    let mut all = Vec::new();
    for client in clients {
        all.extend(client.join().map_err(|_| failed("a client panicked"))??);
    }
    all.sort_unstable();
    let at = all.len() * 99 / 100;
    let nanoseconds = all.get(at).ok_or_else(|| failed("no request completed"))?;
    Ok(nanoseconds.as_secs_f64() * 1e6)
}

fn client(
    socket: &Path,
    volume: &str,
    seed: u64,
    stop: &AtomicBool,
) -> Result<Vec<Duration>, Error> {
    let mut client = Client::open(socket, volume).map_err(|e| failed(format!("{volume}: {e}")))?;
    let mut random = Random::new(seed);
    let data = vec![0x5a; BLOCK as usize];
    let mut latencies = Vec::with_capacity(1 << 20);
    let mut count = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let offset = random.below(SPAN / u64::from(BLOCK)) * u64::from(BLOCK);
        let asked = Instant::now();
        let result = match count % 2 {
            0 => client.write(offset, &data, 0),
            _ => client.read(offset, BLOCK).map(drop),
        };
        result.map_err(|e| failed(format!("{volume}: {e}")))?;
        latencies.push(asked.elapsed());
        count += 1;
        if count.is_multiple_of(1000) {
            client.flush().map_err(|e| failed(format!("{volume}: {e}")))?;
        }
    }
    Ok(latencies)
}

/// Acknowledged writes without a flush: what a stop has to write back. Bytes.
pub(super) fn dirty(socket: &Path, volume: &str, bytes: u64) -> Result<(), Error> {
    let mut client = Client::open(socket, volume).map_err(|e| failed(format!("{volume}: {e}")))?;
    let data = vec![0xa5; 1 << 20];
    for offset in (0..bytes).step_by(1 << 20) {
        client.write(offset, &data, 0).map_err(|e| failed(format!("{volume}: {e}")))?;
    }
    client.disconnect().map_err(failed)
}

/// A connection that has requests in flight and reads no reply.
pub(super) fn in_flight(
    socket: &Path,
    volume: &str,
    requests: &[(u16, u64, u32)],
) -> Result<UnixStream, Error> {
    let handshake = Handshake::connect(socket).map_err(failed)?;
    let client = handshake.go(volume).map_err(|e| failed(format!("{volume}: {e}")))?;
    let mut stream = client.into_stream();
    // What the daemon does not read (back pressure) stays unsent.
    stream.set_write_timeout(Some(Duration::from_millis(200))).map_err(failed)?;
    let data = vec![0x33; 32 << 20];
    for (cookie, &(command, offset, length)) in requests.iter().enumerate() {
        let request = Request { command, offset, length, cookie: cookie as u64, flags: 0 };
        let body = if command == wire::CMD_WRITE { &data[..length as usize] } else { &[] };
        if stream.write_all(&request.bytes()).and_then(|()| stream.write_all(body)).is_err() {
            break;
        }
    }
    Ok(stream)
}

/// A connection that announces a write of `length` bytes and sends 1,000 of them.
pub(super) fn header_only(socket: &Path, volume: &str, length: u32) -> Result<UnixStream, Error> {
    let handshake = Handshake::connect(socket).map_err(failed)?;
    let client = handshake.go(volume).map_err(|e| failed(format!("{volume}: {e}")))?;
    let mut stream = client.into_stream();
    let request = Request { command: wire::CMD_WRITE, length, ..Request::default() };
    stream.write_all(&request.bytes()).map_err(failed)?;
    stream.write_all(&[0x77; 1000]).map_err(failed)?;
    Ok(stream)
}
