//! A minimal NBD client that opens one export by `NBD_OPT_GO` and disconnects. It detects when a
//! server really serves, which the existence of a socket does not show.
//!
//! Specification: `doc/proto.md` of the NBD project, fixed newstyle negotiation.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
const FIXED_NEWSTYLE: u16 = 1;
const CLIENT_FIXED_NEWSTYLE_NO_ZEROES: u32 = 3;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const CMD_DISC: u16 = 2;
/// Longest option reply taken; the protocol's strings end at 4096 bytes.
const LONGEST_REPLY: u32 = 8192;
/// Most information replies to one `NBD_OPT_GO`; the protocol knows four kinds.
const MOST_REPLIES: usize = 64;

/// Connects, enters transmission on `export` and disconnects.
///
/// # Errors
/// As [`open`].
pub fn go(socket: &Path, export: &str) -> io::Result<()> {
    open(socket, export)?.write_all(&disconnect())
}

/// Connects and enters transmission on `export`: a quiet client, until it is dropped.
///
/// # Errors
/// The socket's error while no server listens; `InvalidData` or `NotFound` with a reason
/// when the server replies with an error; a time-out after 10 s without a reply.
pub fn open(socket: &Path, export: &str) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.set_write_timeout(Some(Duration::from_secs(10)))?;

    if read_u64(&mut stream)? != NBDMAGIC || read_u64(&mut stream)? != IHAVEOPT {
        return Err(invalid("the greeting is not newstyle NBD"));
    }
    let mut flags = [0; 2];
    stream.read_exact(&mut flags)?;
    if u16::from_be_bytes(flags) & FIXED_NEWSTYLE == 0 {
        return Err(invalid("the server does not speak fixed newstyle"));
    }
    stream.write_all(&option_go(export)?)?;
    for _ in 0..MOST_REPLIES {
        match read_reply(&mut stream)? {
            REP_INFO => {}
            REP_ACK => return Ok(stream),
            other => {
                let reason = format!("export {export:?} refused, option reply {other:#x}");
                return Err(io::Error::new(io::ErrorKind::NotFound, reason));
            }
        }
    }
    Err(invalid("no end of information replies"))
}

/// Client flags followed by `NBD_OPT_GO` without information requests.
fn option_go(export: &str) -> io::Result<Vec<u8>> {
    let name = u32::try_from(export.len()).ok().filter(|length| *length <= 4096);
    let name = name.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "name too long"))?;
    let mut bytes = Vec::with_capacity(26 + export.len());
    bytes.extend(CLIENT_FIXED_NEWSTYLE_NO_ZEROES.to_be_bytes());
    bytes.extend(IHAVEOPT.to_be_bytes());
    bytes.extend(OPT_GO.to_be_bytes());
    bytes.extend((name + 6).to_be_bytes());
    bytes.extend(name.to_be_bytes());
    bytes.extend(export.as_bytes());
    bytes.extend(0_u16.to_be_bytes());
    Ok(bytes)
}

fn disconnect() -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&REQUEST.to_be_bytes());
    bytes[6..8].copy_from_slice(&CMD_DISC.to_be_bytes());
    bytes
}

/// Reads one option reply, drops its payload and returns its type.
fn read_reply(stream: &mut impl Read) -> io::Result<u32> {
    if read_u64(stream)? != OPTION_REPLY || read_u32(stream)? != OPT_GO {
        return Err(invalid("not a reply to NBD_OPT_GO"));
    }
    let kind = read_u32(stream)?;
    let length = read_u32(stream)?;
    if length > LONGEST_REPLY {
        return Err(invalid("an option reply is too long"));
    }
    let dropped = io::copy(&mut stream.take(length.into()), &mut io::sink())?;
    if dropped != u64::from(length) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(kind)
}

fn read_u32(stream: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

fn read_u64(stream: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}

fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn reply(kind: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_REPLY.to_be_bytes().to_vec();
        bytes.extend(OPT_GO.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    /// Lets `go("vol")` talk to a server that sends `answer` after a valid greeting; returns the
    /// result and all that the client sent.
    fn against(name: &str, answer: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        let file = format!("ebbd-handshake-{name}-{}", std::process::id());
        let socket = std::env::temp_dir().join(file);
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut greeting = NBDMAGIC.to_be_bytes().to_vec();
            greeting.extend(IHAVEOPT.to_be_bytes());
            greeting.extend([0, 3]);
            greeting.extend(answer);
            stream.write_all(&greeting).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut sent = Vec::new();
            // A client that closes early leaves unread bytes behind: its close is then a reset.
            let _ = stream.read_to_end(&mut sent);
            sent
        });
        let result = go(&socket, "vol");
        std::fs::remove_file(&socket).unwrap();
        (result, server.join().unwrap())
    }

    #[test]
    fn success_takes_information_and_disconnects() {
        let (result, sent) =
            against("good", [reply(REP_INFO, &[0; 12]), reply(REP_ACK, &[])].concat());
        result.unwrap();
        // 4 client flags, 16 option header, 4 + 3 name, 2 requests, 28 disconnect.
        assert_eq!(sent.len(), 57);
        assert_eq!(sent[16..20], 9_u32.to_be_bytes());
        assert_eq!(&sent[24..27], b"vol");
        assert_eq!(sent[29..33], REQUEST.to_be_bytes());
    }

    #[test]
    fn refusal_and_nonsense_are_errors() {
        let unknown = against("unknown", reply(0x8000_0006, b"no such export")).0.unwrap_err();
        assert_eq!(unknown.kind(), io::ErrorKind::NotFound);
        let mut long = reply(REP_INFO, &[]);
        long[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(against("long", long).0.unwrap_err().kind(), io::ErrorKind::InvalidData);
        let endless = reply(REP_INFO, &[]).repeat(MOST_REPLIES);
        assert_eq!(against("endless", endless).0.unwrap_err().kind(), io::ErrorKind::InvalidData);
        let cut = against("cut", reply(REP_INFO, &[0; 12])[..25].to_vec()).0.unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof);
    }
}
