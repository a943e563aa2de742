//! An NBD client that negotiates simple replies.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use ebb_export_nbd::{Server, ServerLimits, TlsMode};
use ebb_io::fd_from;

use super::host::NAME;
use super::{Client, Error, Host, Load};

const REQUEST: u32 = 0x2560_9513;
const SIMPLE_REPLY: u32 = 0x6744_6698;
const REPLY_BYTES: usize = 16;

/// See the module.
pub(crate) struct NbdClient {
    stream: UnixStream,
    output: Vec<u8>,
    input: Vec<u8>,
    /// Bytes of the replies that are missing, and of each reply.
    missing: usize,
    each: usize,
}

/// Starts the server and connects.
pub(crate) fn connect(host: &mut Host) -> Result<NbdClient, Error> {
    let server = Server::new(host.volumes.clone(), ServerLimits::default(), TlsMode::Off, None);
    let path = host.folder.path().join("nbd.sock");
    let socket = fd_from(UnixListener::bind(&path)?);
    let (handles, io) = (vec![host.worker.handle()], host.worker.io().clone());
    host.worker.io().spawn(async move { server.listen(io, socket, handles).await }).detach();
    let mut stream = UnixStream::connect(&path)?;
    stream.set_nonblocking(true)?;
    expect(host, &mut stream, b"NBDMAGICIHAVEOPT\0\x03")?;
    // Fixed newstyle, no zeroes; then NBD_OPT_EXPORT_NAME, whose reply is the size and the flags.
    stream.write_all(&3u32.to_be_bytes())?;
    let length = u32::try_from(NAME.len())?.to_be_bytes();
    stream.write_all(&[b"IHAVEOPT", &1u32.to_be_bytes()[..], &length, NAME.as_bytes()].concat())?;
    expect(host, &mut stream, &super::host::SIZE.to_be_bytes())?;
    receive_exactly(host, &mut stream, 2)?;
    Ok(NbdClient { stream, output: Vec::new(), input: vec![0; 1 << 18], missing: 0, each: 1 })
}

fn expect(host: &mut Host, stream: &mut UnixStream, bytes: &[u8]) -> Result<(), Error> {
    let received = receive_exactly(host, stream, bytes.len())?;
    if received == bytes { Ok(()) } else { Err(format!("the server sent {received:?}").into()) }
}

fn receive_exactly(
    host: &mut Host,
    stream: &mut UnixStream,
    count: usize,
) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; count];
    let mut done = 0;
    while done < count {
        host.worker.iterate();
        match stream.read(&mut bytes[done..]) {
            Ok(0) => return Err("the server closed the connection".into()),
            Ok(more) => done += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

impl Client for NbdClient {
    fn send(&mut self, load: Load, offset: u64) -> Result<(), Error> {
        self.output.clear();
        for number in 0..load.depth {
            let at = offset + (number * load.bytes) as u64;
            self.output.extend(REQUEST.to_be_bytes());
            self.output.extend(u32::from(load.write).to_be_bytes());
            self.output.extend((number as u64).to_be_bytes());
            self.output.extend(at.to_be_bytes());
            self.output.extend(u32::try_from(load.bytes)?.to_be_bytes());
            if load.write {
                self.output.resize(self.output.len() + load.bytes, 0x5a);
            }
        }
        self.each = REPLY_BYTES + if load.write { 0 } else { load.bytes };
        self.missing = self.each * load.depth;
        Ok(self.stream.write_all(&self.output)?)
    }

    fn receive(&mut self) -> Result<bool, Error> {
        while self.missing > 0 {
            let count = match self.stream.read(&mut self.input[..self.missing]) {
                Ok(0) => return Err("the server closed the connection".into()),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            };
            // A reply that is received in parts is checked with its first part only.
            if self.missing.is_multiple_of(self.each) && count >= 8 {
                let head = [SIMPLE_REPLY.to_be_bytes(), [0; 4]].concat();
                if self.input[..8] != head[..] {
                    return Err(format!("a reply begins with {:?}", &self.input[..8]).into());
                }
            }
            self.missing -= count;
        }
        Ok(true)
    }
}
