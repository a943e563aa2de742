//! The client side of the negotiation: fixed newstyle, over any stream.
//!
//! Implements "Fixed newstyle negotiation" of the protocol document. It runs on a helper thread
//! with a blocking stream that has a deadline, so that nothing here waits without limit. A hostile
//! server can make it neither allocate more than [`REPLY_MAX`] bytes nor read more than
//! [`REPLIES_MAX`] replies.

use std::io::{self, Read, Write};

use ebb_nbd_proto::{
    ClientFlags, GREETING_LEN, HandshakeFlags, Reader, context, info, magic, option, option_reply,
};

use super::export::RemoteExport;
use super::options::{NbdError, NbdOptions};

/// The longest reply to an option, bytes: descriptions may have 4096.
const REPLY_MAX: u32 = 64 << 10;
/// The most replies to one option.
const REPLIES_MAX: usize = 64;

/// One reply to an option.
struct OptionReply {
    kind: u32,
    data: Vec<u8>,
}

/// A negotiation in progress.
pub(crate) struct Negotiation<'a, S> {
    stream: S,
    options: &'a NbdOptions,
    /// Both sides omit the zeroes at the end of the reply to `EXPORT_NAME`.
    no_zeroes: bool,
}

impl<'a, S: Read + Write> Negotiation<'a, S> {
    /// Reads the server's greeting and replies to it.
    pub(crate) fn greet(stream: S, options: &'a NbdOptions) -> Result<Self, NbdError> {
        let mut this = Negotiation { stream, options, no_zeroes: false };
        let greeting: [u8; GREETING_LEN] = this.read()?;
        let mut reader = Reader::new(&greeting);
        let (first, second, flags) = (reader.u64(), reader.u64(), reader.u16());
        if first != Some(magic::INIT) {
            return Err(this.protocol("does not send the greeting of an NBD server"));
        }
        if second != Some(magic::OPTION) {
            return Err(this.too_old("speaks the oldstyle protocol"));
        }
        let flags = HandshakeFlags(flags.unwrap_or(0));
        if !flags.contains(HandshakeFlags::FIXED_NEWSTYLE) {
            return Err(this.too_old("has no fixed newstyle negotiation"));
        }
        this.no_zeroes = flags.contains(HandshakeFlags::NO_ZEROES);
        let answer = ClientFlags::FIXED_NEWSTYLE.with_if(this.no_zeroes, ClientFlags::NO_ZEROES);
        this.write(&answer.0.to_be_bytes())?;
        Ok(this)
    }

    /// Requests TLS; on success the caller starts TLS on the stream, and passes the result to [`Self::resume`].
    pub(crate) fn start_tls(mut self) -> Result<bool, NbdError> {
        self.option(option::STARTTLS, &[])?;
        let reply = self.reply(option::STARTTLS)?;
        match reply.kind {
            option_reply::ACK => Ok(self.no_zeroes),
            kind if kind & option_reply::ERROR_BIT != 0 => {
                let (address, reason) = (self.address(), reason(&reply));
                Err(NbdError::NoTls { address, reason })
            }
            _ => Err(self.protocol("sends an invalid reply to STARTTLS")),
        }
    }

    /// Continues after TLS was started.
    pub(crate) fn resume(stream: S, options: &'a NbdOptions, no_zeroes: bool) -> Self {
        Negotiation { stream, options, no_zeroes }
    }

    /// Negotiates structured replies and block status, and enters the export.
    pub(crate) fn enter(mut self) -> Result<(RemoteExport, S), NbdError> {
        self.option(option::STRUCTURED_REPLY, &[])?;
        let structured = match self.reply(option::STRUCTURED_REPLY)?.kind {
            option_reply::ACK => true,
            // If this is fatal, the reply to GO has the reason.
            kind if kind & option_reply::ERROR_BIT != 0 => false,
            _ => return Err(self.protocol("sends an invalid reply to STRUCTURED_REPLY")),
        };
        let allocation = if structured { self.meta_context()? } else { None };
        let mut export = self.go()?;
        export.structured = structured;
        export.allocation = allocation;
        Ok((export, self.stream))
    }

    fn meta_context(&mut self) -> Result<Option<u32>, NbdError> {
        let mut data = self.counted_name();
        data.extend_from_slice(&1u32.to_be_bytes());
        push_counted(&mut data, context::ALLOCATION.as_bytes());
        self.option(option::SET_META_CONTEXT, &data)?;
        let mut granted = None;
        for _ in 0..REPLIES_MAX {
            let reply = self.reply(option::SET_META_CONTEXT)?;
            match reply.kind {
                option_reply::ACK => return Ok(granted),
                option_reply::META_CONTEXT => {
                    let mut reader = Reader::new(&reply.data);
                    let id = reader.u32();
                    if reply.data.get(4..) == Some(context::ALLOCATION.as_bytes()) {
                        granted = id;
                    }
                }
                kind if kind & option_reply::ERROR_BIT != 0 => return Ok(None),
                _ => return Err(self.protocol("sends an invalid reply to SET_META_CONTEXT")),
            }
        }
        Err(self.protocol("sends too many replies to SET_META_CONTEXT"))
    }

    fn go(&mut self) -> Result<RemoteExport, NbdError> {
        let mut data = self.counted_name();
        data.extend_from_slice(&1u16.to_be_bytes());
        data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        self.option(option::GO, &data)?;
        let mut export: Option<RemoteExport> = None;
        let mut blocks = None;
        for _ in 0..REPLIES_MAX {
            let reply = self.reply(option::GO)?;
            match reply.kind {
                option_reply::INFO => {
                    let mut reader = Reader::new(&reply.data);
                    let kind = reader.u16();
                    if kind == Some(info::EXPORT) {
                        let (Some(size), Some(flags)) = (reader.u64(), reader.u16()) else {
                            return Err(
                                self.protocol("sends a truncated description of the export")
                            );
                        };
                        export = Some(RemoteExport::new(size, flags));
                    } else if kind == Some(info::BLOCK_SIZE) {
                        blocks = Some((reader.u32(), reader.u32(), reader.u32()));
                    }
                }
                option_reply::ACK => {
                    let mut export = export.ok_or_else(|| {
                        self.protocol("enters the export without sending its size")
                    })?;
                    if let Some(sizes) = blocks
                        && !matches!(sizes, (Some(min), Some(preferred), Some(max))
                            if export.set_blocks(min, preferred, max))
                    {
                        return Err(self.protocol("sends invalid block sizes"));
                    }
                    return Ok(export);
                }
                option_reply::ERR_UNSUP => return self.export_name(),
                _ => return Err(self.refusal(&reply)),
            }
        }
        Err(self.protocol("sends too many replies to GO"))
    }

    /// Enters the export of a server without `NBD_OPT_GO`. Such a server closes the connection if it has no such export.
    fn export_name(&mut self) -> Result<RemoteExport, NbdError> {
        self.option(option::EXPORT_NAME, self.options.export.as_bytes())?;
        let description: [u8; 10] = self.read().map_err(|error| match error {
            NbdError::Handshake { address, source }
                if matches!(
                    source.kind(),
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
                ) =>
            {
                let (export, reason) = (self.options.export.clone(), " (it hangs up)".to_owned());
                NbdError::NoExport { address, export, reason }
            }
            other => other,
        })?;
        if !self.no_zeroes {
            self.read::<124>()?;
        }
        let mut reader = Reader::new(&description);
        let (size, flags) = (reader.u64().unwrap_or(0), reader.u16().unwrap_or(0));
        Ok(RemoteExport::new(size, flags))
    }

    fn refusal(&self, reply: &OptionReply) -> NbdError {
        let (address, export) = (self.address(), self.options.export.clone());
        match reply.kind {
            option_reply::ERR_UNKNOWN => {
                NbdError::NoExport { address, export, reason: reason(reply) }
            }
            option_reply::ERR_TLS_REQD => NbdError::TlsNeeded { address },
            kind if kind & option_reply::ERROR_BIT != 0 => {
                NbdError::Refused { address, export, reason: reason(reply) }
            }
            _ => self.protocol("sends an invalid reply to GO"),
        }
    }

    fn option(&mut self, number: u32, data: &[u8]) -> Result<(), NbdError> {
        let mut message = magic::OPTION.to_be_bytes().to_vec();
        message.extend_from_slice(&number.to_be_bytes());
        // At most a name and a few numbers.
        message.extend_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
        message.extend_from_slice(data);
        self.write(&message)
    }

    fn reply(&mut self, to: u32) -> Result<OptionReply, NbdError> {
        let header: [u8; 20] = self.read()?;
        let mut reader = Reader::new(&header);
        let (opening, number, kind, length) =
            (reader.u64(), reader.u32(), reader.u32(), reader.u32());
        if opening != Some(magic::OPTION_REPLY) || number != Some(to) {
            return Err(self.protocol("replies to another option than the one sent"));
        }
        let length = length.filter(|length| *length <= REPLY_MAX);
        let length = length.ok_or_else(|| self.protocol("sends an overlong reply"))?;
        let mut data = vec![0; usize::try_from(length).unwrap_or(0)];
        let result = self.stream.read_exact(&mut data);
        result.map_err(|source| self.broken(source))?;
        Ok(OptionReply { kind: kind.unwrap_or(0), data })
    }

    fn counted_name(&self) -> Vec<u8> {
        let mut data = Vec::new();
        push_counted(&mut data, self.options.export.as_bytes());
        data
    }

    fn read<const N: usize>(&mut self) -> Result<[u8; N], NbdError> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).map_err(|source| self.broken(source))?;
        Ok(bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), NbdError> {
        self.stream.write_all(bytes).map_err(|source| self.broken(source))
    }

    fn address(&self) -> String {
        self.options.address.to_string()
    }

    fn broken(&self, source: io::Error) -> NbdError {
        NbdError::Handshake { address: self.address(), source }
    }

    fn protocol(&self, what: &str) -> NbdError {
        NbdError::Protocol { address: self.address(), what: what.to_owned() }
    }

    fn too_old(&self, what: &'static str) -> NbdError {
        NbdError::TooOld { address: self.address(), what }
    }
}

fn push_counted(data: &mut Vec<u8>, text: &[u8]) {
    // Names have at most 4096 bytes.
    data.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes());
    data.extend_from_slice(text);
}

/// The server's message about its refusal, for the log.
fn reason(reply: &OptionReply) -> String {
    let text = String::from_utf8_lossy(&reply.data);
    let text: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
    if text.is_empty() { text } else { format!(" ({text})") }
}

#[cfg(test)]
mod tests;
