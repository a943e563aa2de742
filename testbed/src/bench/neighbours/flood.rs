//! A peer that begins TLS handshakes and continues none; run as a process of its own.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::harness::nbd::option_bytes;

/// The argument that makes the bench's program a flood: `flood ADDRESS SECONDS`.
pub const ARGUMENT: &str = "flood";
/// It ends after so many connections and so much time, whatever its arguments say.
const MOST_CONNECTIONS: usize = 10_000_000;
const MOST_TIME: Duration = Duration::from_secs(3700);
/// Connections a second: more handshakes than the server has time for with RSA-4096, and few enough that
/// both the server and the sink take all of them. Else the faster of the two would be flooded more.
const RATE: u32 = 1000;
/// Connections it has open, and the age at which each sends its ClientHello: the reply to STARTTLS
/// has arrived by then, and is not read.
const OPEN: usize = 96;
const AGE: usize = 48;
/// Bytes of the NBD greeting and of the reply to STARTTLS.
const BEFORE_TLS: usize = 18 + 20;

const OPT_STARTTLS: u32 = 5;

/// Client flags (fixed newstyle, no zeroes), and the request for TLS.
fn starttls() -> Vec<u8> {
    [3_u32.to_be_bytes().to_vec(), option_bytes(OPT_STARTTLS, &[])].concat()
}

/// A ClientHello of TLS 1.3 as a browser's or OpenSSL's: X25519, the usual suites and signatures
/// (RFC 8446, 4.1.2). The share is the curve's base point: a server cannot tell it from another.
#[must_use]
pub fn client_hello() -> Vec<u8> {
    fn sized(width: usize, content: &[u8]) -> Vec<u8> {
        [&content.len().to_be_bytes()[size_of::<usize>() - width..], content].concat()
    }
    fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
        [kind.to_be_bytes().to_vec(), sized(2, content)].concat()
    }
    let mut share = [0; 32];
    share[0] = 9;
    let extensions = [
        // supported_groups: x25519, secp256r1
        extension(10, &sized(2, &[0, 0x1d, 0, 0x17])),
        // signature_algorithms: ECDSA P-256, RSA-PSS and PKCS #1 with SHA-256 to SHA-512
        extension(13, &sized(2, &[4, 3, 8, 4, 8, 5, 8, 6, 4, 1, 5, 1, 6, 1])),
        // supported_versions: 1.3
        extension(43, &sized(1, &[3, 4])),
        // key_share
        extension(51, &sized(2, &[&[0, 0x1d][..], &sized(2, &share)].concat())),
    ]
    .concat();
    let body = [
        &[3, 3][..],
        &[0x5a; 32],
        &sized(1, &[0xa5; 32]),
        // TLS_AES_128_GCM_SHA256, TLS_AES_256_GCM_SHA384, TLS_CHACHA20_POLY1305_SHA256
        &sized(2, &[0x13, 1, 0x13, 2, 0x13, 3]),
        &sized(1, &[0]),
        &sized(2, &extensions),
    ]
    .concat();
    let handshake = [vec![1], sized(3, &body)].concat();
    [vec![0x16, 3, 1], sized(2, &handshake)].concat()
}

/// Begins one handshake and reads the reply to the ClientHello; returns its length.
///
/// # Errors
/// The server does not reply with a ServerHello.
pub fn answered(address: SocketAddr) -> io::Result<usize> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(crate::harness::nbd::PATIENCE))?;
    stream.write_all(&starttls())?;
    stream.read_exact(&mut [0; BEFORE_TLS])?;
    stream.write_all(&client_hello())?;
    let mut answer = vec![0; 16 << 10];
    let count = stream.read(&mut answer)?;
    // A handshake record whose first message is a ServerHello.
    if count > 6 && answer[0] == 0x16 && answer[5] == 2 {
        return Ok(count);
    }
    let start = &answer[..count.min(16)];
    Err(io::Error::other(format!("no ServerHello in answer to a ClientHello: {start:02x?}")))
}

/// What a flood has done.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    connections: usize,
    /// Connections that had received a reply to their ClientHello when they were closed.
    answered: usize,
}

fn flood(address: SocketAddr, time: Duration) -> io::Result<Done> {
    let (first, hello) = (starttls(), client_hello());
    let begun = Instant::now();
    let mut due = begun;
    let (mut open, mut done) = (VecDeque::<TcpStream>::new(), Done::default());
    let mut seen = vec![0; BEFORE_TLS + 1];
    while begun.elapsed() < time.min(MOST_TIME) && done.connections < MOST_CONNECTIONS {
        // What was missed is not caught up on: a burst would be another flood.
        due = due.max(Instant::now());
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        due += Duration::from_secs(1) / RATE;
        // The server may be out of memory for a moment, or close what is too old: continue.
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_millis(100))
        else {
            continue;
        };
        stream.set_nonblocking(true)?;
        let _ = stream.write_all(&first);
        open.push_back(stream);
        done.connections += 1;
        if let Some(at) = open.len().checked_sub(AGE) {
            let _ = open[at].write_all(&hello);
        }
        if open.len() >= OPEN
            && let Some(oldest) = open.pop_front()
        {
            let count = oldest.peek(&mut seen).unwrap_or_default();
            done.answered += usize::from(count == seen.len());
        }
    }
    Ok(done)
}

/// The process: floods `ADDRESS` for `SECONDS`, which must be on loopback, and says on stdout what it did.
pub fn main(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let address = arguments.next().and_then(|text| text.parse::<SocketAddr>().ok());
    let seconds = arguments.next().and_then(|text| text.parse::<u32>().ok());
    let (Some(address), Some(seconds)) = (address, seconds) else { return ExitCode::from(2) };
    if !address.ip().is_loopback() {
        return ExitCode::from(2);
    }
    match flood(address, Duration::from_secs(seconds.into())) {
        Ok(done) => {
            // The bench that reads this may have ended.
            let _ = writeln!(io::stdout(), "{} {}", done.connections, done.answered);
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lengths_of_the_hello_add_up() {
        let hello = client_hello();
        let record = usize::from(u16::from_be_bytes([hello[3], hello[4]]));
        assert_eq!(hello.len(), 5 + record);
        assert_eq!(u32::from_be_bytes([0, hello[6], hello[7], hello[8]]) as usize, record - 4);
    }

    #[test]
    fn only_loopback_is_flooded() {
        let run = |address: &str| main([address.to_owned(), "1".to_owned()].into_iter());
        assert_eq!(run("192.0.2.1:1"), ExitCode::from(2));
        assert_eq!(run("nonsense"), ExitCode::from(2));
    }
}
