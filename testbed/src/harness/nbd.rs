//! A small NBD client over a unix socket: fixed newstyle, `NBD_OPT_GO`, simple replies.
//!
//! It exists for what no tool can do: to send what is wrong, to stop in the middle, and to know
//! exactly which writes were acknowledged. It trusts the server's word on nothing but framing.
//! Source: the NBD protocol, "Handshake" and "Transmission".

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Values of the protocol, named as there without the prefix `NBD_`.
pub mod wire {
    #![expect(missing_docs, reason = "the names are the protocol's")]
    pub const MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
    pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
    pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
    pub const REQUEST_MAGIC: u32 = 0x2560_9513;
    pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

    pub const OPT_EXPORT_NAME: u32 = 1;
    pub const OPT_ABORT: u32 = 2;
    pub const OPT_LIST: u32 = 3;
    pub const OPT_INFO: u32 = 6;
    pub const OPT_GO: u32 = 7;
    pub const OPT_STRUCTURED_REPLY: u32 = 8;
    pub const OPT_SET_META_CONTEXT: u32 = 10;

    pub const REP_ACK: u32 = 1;
    pub const REP_SERVER: u32 = 2;
    pub const REP_INFO: u32 = 3;
    pub const REP_ERR_UNSUP: u32 = 0x8000_0001;
    pub const REP_ERR_INVALID: u32 = 0x8000_0003;
    pub const REP_ERR_UNKNOWN: u32 = 0x8000_0006;
    pub const REP_ERR_TOO_BIG: u32 = 0x8000_0009;

    pub const CMD_READ: u16 = 0;
    pub const CMD_WRITE: u16 = 1;
    pub const CMD_DISC: u16 = 2;
    pub const CMD_FLUSH: u16 = 3;
    pub const CMD_TRIM: u16 = 4;
    pub const CMD_CACHE: u16 = 5;
    pub const CMD_WRITE_ZEROES: u16 = 6;
    pub const CMD_BLOCK_STATUS: u16 = 7;
    pub const FLAG_FUA: u16 = 1;

    pub const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;

    pub const EPERM: u32 = 1;
    pub const EINVAL: u32 = 22;
    pub const ENOSPC: u32 = 28;
    pub const EOVERFLOW: u32 = 75;
    pub const ESHUTDOWN: u32 = 108;
}

/// Why the client stopped.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The connection failed, ended or took longer than its time limit.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The server refused a request; the connection stays usable. The number is the protocol's.
    #[error("request refused with error {0}")]
    Refused(u32),
    /// The server refused an option; negotiation can continue. The number is the reply type.
    #[error("option refused with reply {0:#x}")]
    OptionRefused(u32),
    /// The server said something that the protocol does not allow here.
    #[error("broken protocol: {0}")]
    Protocol(String),
}

type Answer<T> = Result<T, Failure>;

/// A request header; what to send is up to the caller, wrong or right.
#[derive(Debug, Clone, Copy, Default)]
pub struct Request {
    /// Command flags.
    pub flags: u16,
    /// Command number.
    pub command: u16,
    /// Returned with the reply.
    pub cookie: u64,
    /// Byte offset on the export.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
}

impl Request {
    /// The 28 bytes of a compact request header.
    #[must_use]
    pub fn bytes(&self) -> [u8; 28] {
        let mut b = [0; 28];
        b[..4].copy_from_slice(&wire::REQUEST_MAGIC.to_be_bytes());
        b[4..6].copy_from_slice(&self.flags.to_be_bytes());
        b[6..8].copy_from_slice(&self.command.to_be_bytes());
        b[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        b[16..24].copy_from_slice(&self.offset.to_be_bytes());
        b[24..].copy_from_slice(&self.length.to_be_bytes());
        b
    }
}

/// The bytes of an option: header and data.
#[must_use]
pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut b = wire::OPTION_MAGIC.to_be_bytes().to_vec();
    b.extend(option.to_be_bytes());
    b.extend(length32(data.len()).to_be_bytes());
    b.extend(data);
    b
}

/// Data of `NBD_OPT_GO` and `NBD_OPT_INFO` for an export, without information requests.
#[must_use]
pub fn go_data(export: &str) -> Vec<u8> {
    let mut b = length32(export.len()).to_be_bytes().to_vec();
    b.extend(export.as_bytes());
    b.extend([0, 0]);
    b
}

/// Lengths in tests are small; one that is not becomes the largest the wire can say.
fn length32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// A connection in the handshake phase: the greeting is done, options may be sent.
#[derive(Debug)]
pub struct Handshake {
    stream: UnixStream,
}

/// A connection in the transmission phase.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags of the export.
    pub flags: u16,
    cookie: u64,
}

/// Connects and sets the time limit of each single read and write.
///
/// # Errors
/// Nobody listens.
pub fn connect(socket: &Path, limit: Duration) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    Ok(stream)
}

pub use crate::harness::process::PATIENCE;

impl Handshake {
    /// Connects and exchanges greetings (fixed newstyle, no zeroes).
    ///
    /// # Errors
    /// No server listens, or it is no NBD server.
    pub fn connect(socket: &Path) -> Answer<Handshake> {
        let mut stream = connect(socket, PATIENCE)?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        let expected = [wire::MAGIC.to_be_bytes(), wire::OPTION_MAGIC.to_be_bytes()].concat();
        let flags = u16::from_be_bytes([greeting[16], greeting[17]]);
        if greeting[..16] != expected || flags & 1 == 0 {
            return Err(Failure::Protocol(format!("greeting {greeting:02x?}")));
        }
        stream.write_all(&u32::from(flags & 3).to_be_bytes())?;
        Ok(Handshake { stream })
    }

    /// Sends an option and returns the data of every reply before the final acknowledgement.
    ///
    /// # Errors
    /// [`Failure::OptionRefused`] if the server refuses; the handshake can continue.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Answer<Vec<(u32, Vec<u8>)>> {
        self.stream.write_all(&option_bytes(option, data))?;
        let mut replies = Vec::new();
        loop {
            let mut head = [0; 20];
            self.stream.read_exact(&mut head)?;
            let (magic, echoed) = (be64(&head[..8]), be32(&head[8..12]));
            let (kind, length) = (be32(&head[12..16]), be32(&head[16..]));
            if magic != wire::OPTION_REPLY_MAGIC || echoed != option || length > 1 << 20 {
                return Err(Failure::Protocol(format!("reply to option {option}: {head:02x?}")));
            }
            let mut data = vec![0; usize::try_from(length).unwrap_or(0)];
            self.stream.read_exact(&mut data)?;
            match kind {
                wire::REP_ACK => return Ok(replies),
                kind if kind & 0x8000_0000 != 0 => return Err(Failure::OptionRefused(kind)),
                kind => replies.push((kind, data)),
            }
        }
    }

    /// Names of all exports (`NBD_OPT_LIST`).
    ///
    /// # Errors
    /// As [`Handshake::option`].
    pub fn list(&mut self) -> Answer<Vec<String>> {
        let replies = self.option(wire::OPT_LIST, &[])?;
        let names = replies.iter().map(|(kind, data)| {
            let length = data.get(..4).map_or(0, be32);
            let name = usize::try_from(length).ok().and_then(|l| data.get(4..4 + l));
            match name {
                Some(name) if *kind == wire::REP_SERVER => Ok(String::from_utf8_lossy(name).into()),
                _ => Err(Failure::Protocol(format!("list reply {kind}: {data:02x?}"))),
            }
        });
        names.collect()
    }

    /// Enters transmission on an export (`NBD_OPT_GO`).
    ///
    /// # Errors
    /// As [`Handshake::option`]; or the server did not say the size.
    pub fn go(mut self, export: &str) -> Answer<Client> {
        let replies = self.option(wire::OPT_GO, &go_data(export))?;
        let info = replies.iter().find_map(|(kind, data)| match (kind, data.as_slice()) {
            (&wire::REP_INFO, [0, 0, size @ .., f0, f1]) if size.len() == 8 => {
                Some((be64(size), u16::from_be_bytes([*f0, *f1])))
            }
            _ => None,
        });
        let (size, flags) =
            info.ok_or_else(|| Failure::Protocol("no NBD_INFO_EXPORT before ACK".into()))?;
        Ok(Client { stream: self.stream, size, flags, cookie: 0 })
    }

    /// The raw connection, for tests that misbehave.
    #[must_use]
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }
}

impl Client {
    /// Connects and enters transmission on an export.
    ///
    /// # Errors
    /// Nobody listens, or the server refuses the export.
    pub fn open(socket: &Path, export: &str) -> Answer<Client> {
        Handshake::connect(socket)?.go(export)
    }

    /// Sends one request with its payload, if any, and waits for its reply. `payload` also sets
    /// what a read returns.
    ///
    /// # Errors
    /// [`Failure::Refused`] with the server's error number; the connection stays usable.
    pub fn request(&mut self, mut request: Request, payload: &[u8]) -> Answer<Vec<u8>> {
        self.cookie += 1;
        request.cookie = self.cookie;
        self.stream.write_all(&request.bytes())?;
        self.stream.write_all(payload)?;
        let (cookie, error) = read_reply(&mut self.stream)?;
        if cookie != request.cookie {
            return Err(Failure::Protocol(format!("reply for {cookie}, not {}", request.cookie)));
        }
        if error != 0 {
            return Err(Failure::Refused(error));
        }
        let mut data = Vec::new();
        if request.command == wire::CMD_READ {
            data.resize(usize::try_from(request.length).unwrap_or(0), 0);
            self.stream.read_exact(&mut data)?;
        }
        Ok(data)
    }

    /// Reads `length` bytes at `offset`.
    ///
    /// # Errors
    /// As [`Client::request`].
    pub fn read(&mut self, offset: u64, length: u32) -> Answer<Vec<u8>> {
        let request = Request { command: wire::CMD_READ, offset, length, ..Request::default() };
        self.request(request, &[])
    }

    /// Writes `data` at `offset`; with `flags` [`wire::FLAG_FUA`] it is durable when this returns.
    ///
    /// # Errors
    /// As [`Client::request`].
    pub fn write(&mut self, offset: u64, data: &[u8], flags: u16) -> Answer<()> {
        let length = length32(data.len());
        let command = wire::CMD_WRITE;
        let request = Request { flags, command, offset, length, cookie: 0 };
        self.request(request, data).map(drop)
    }

    /// Sends a request without payload (trim, write zeroes, cache, or one made up).
    ///
    /// # Errors
    /// As [`Client::request`].
    pub fn command(&mut self, command: u16, flags: u16, offset: u64, length: u32) -> Answer<()> {
        self.request(Request { flags, command, offset, length, cookie: 0 }, &[]).map(drop)
    }

    /// Makes every acknowledged write durable.
    ///
    /// # Errors
    /// As [`Client::request`].
    pub fn flush(&mut self) -> Answer<()> {
        self.command(wire::CMD_FLUSH, 0, 0, 0)
    }

    /// Sends `NBD_CMD_DISC` and closes.
    ///
    /// # Errors
    /// The connection was closed already.
    pub fn disconnect(mut self) -> Answer<()> {
        let request = Request { command: wire::CMD_DISC, ..Request::default() };
        Ok(self.stream.write_all(&request.bytes())?)
    }

    /// The raw connection, for tests that pipeline or misbehave.
    #[must_use]
    pub fn into_stream(self) -> UnixStream {
        self.stream
    }
}

/// Reads the head of a simple reply: cookie and error number.
///
/// # Errors
/// The connection ended, or something else came.
pub fn read_reply(stream: &mut impl Read) -> Answer<(u64, u32)> {
    let mut head = [0; 16];
    stream.read_exact(&mut head)?;
    if be32(&head[..4]) != wire::SIMPLE_REPLY_MAGIC {
        return Err(Failure::Protocol(format!("no simple reply: {head:02x?}")));
    }
    Ok((be64(&head[8..]), be32(&head[4..8])))
}

fn be32(bytes: &[u8]) -> u32 {
    bytes.iter().take(4).fold(0, |n, b| n << 8 | u32::from(*b))
}

fn be64(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).fold(0, |n, b| n << 8 | u64::from(*b))
}
