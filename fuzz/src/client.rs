//! The client's side of the wire, written from the protocol text with its numbers spelt out.

use super::{Finding, ensure};

/// A 32-bit length and the bytes.
pub fn counted(text: &[u8]) -> Vec<u8> {
    [&length(text.len()).to_be_bytes()[..], text].concat()
}

/// An option as "Newstyle negotiation" lays it out.
pub fn option(number: u32, payload: &[u8]) -> Vec<u8> {
    [&b"IHAVEOPT"[..], &number.to_be_bytes(), &length(payload.len()).to_be_bytes(), payload]
        .concat()
}

fn length(len: usize) -> u32 {
    u32::try_from(len).expect("conversations are short")
}

/// A reader that finds fault with bytes that end too early.
pub struct Wire<'a>(pub &'a [u8]);

impl<'a> Wire<'a> {
    /// The next `len` bytes.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], Finding> {
        ensure!(self.0.len() >= len, "{} bytes where {len} are needed", self.0.len());
        let (taken, rest) = self.0.split_at(len);
        self.0 = rest;
        Ok(taken)
    }

    /// The next number of `len` bytes, 8 at most.
    pub fn number(&mut self, len: usize) -> Result<u64, Finding> {
        Ok(self.take(len)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}

/// A reply to an option.
pub struct OptionReply<'a> {
    /// The option it names.
    pub option: u64,
    /// What kind it is.
    pub kind: u64,
    /// What it holds.
    pub payload: &'a [u8],
}

impl<'a> OptionReply<'a> {
    /// Takes one off, and finds fault with what no client could read.
    pub fn parse(wire: &mut Wire<'a>) -> Result<Self, Finding> {
        let magic = wire.number(8)?;
        ensure!(magic == 0x0003_e889_0455_65a9, "an option reply starts with {magic:#x}");
        let (option, kind, len) = (wire.number(4)?, wire.number(4)?, wire.number(4)?);
        ensure!(len <= 3 * 4096, "an option reply of {len} bytes");
        let payload = wire.take(usize::try_from(len).unwrap_or(usize::MAX))?;
        let reply = Self { option, kind, payload };
        reply.judge()?;
        Ok(reply)
    }

    /// Whether no further reply to the option may follow.
    pub fn is_final(&self) -> bool {
        self.kind == 1 || self.is_error()
    }

    /// Whether the option was refused.
    pub fn is_error(&self) -> bool {
        self.kind & 0x8000_0000 != 0
    }

    /// "Option reply types"
    fn judge(&self) -> Result<(), Finding> {
        let mut wire = Wire(self.payload);
        match self.kind {
            1 => {}
            2 => {
                let len = wire.number(4)?;
                text(wire.take(usize::try_from(len).unwrap_or(usize::MAX))?)?;
                text(wire.take(wire.0.len())?)?;
            }
            3 => match wire.number(2)? {
                0 => {
                    wire.take(10)?;
                }
                1 | 2 => text(wire.take(wire.0.len())?)?,
                3 => {
                    let sizes = [wire.number(4)?, wire.number(4)?, wire.number(4)?];
                    let [least, good, most] = sizes;
                    ensure!(least.is_power_of_two() && least <= 65536, "sizes {sizes:?}");
                    ensure!(good.is_power_of_two() && good >= least.max(512), "sizes {sizes:?}");
                    ensure!(most >= good, "sizes {sizes:?}");
                }
                other => return Err(Finding(format!("information of type {other}"))),
            },
            4 => {
                wire.take(4)?;
                text(wire.take(wire.0.len())?)?;
            }
            0x8000_0001..=0x8000_000a => text(wire.take(wire.0.len())?)?,
            other => return Err(Finding(format!("an option reply of kind {other:#x}"))),
        }
        ensure!(wire.0.is_empty(), "{} bytes too many in kind {:#x}", wire.0.len(), self.kind);
        Ok(())
    }
}

/// "Conventions": what a string is.
fn text(bytes: &[u8]) -> Result<(), Finding> {
    ensure!(bytes.len() <= 4096, "a string of {} bytes", bytes.len());
    let valid = std::str::from_utf8(bytes).is_ok_and(|text| !text.contains('\0'));
    ensure!(valid, "no string: {bytes:?}");
    Ok(())
}

/// How a connection replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Simple replies.
    Simple,
    /// Structured replies, compact requests.
    Structured,
    /// Extended headers.
    Extended,
}

/// A request as the client means it.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Command flags.
    pub flags: u16,
    /// Command.
    pub command: u16,
    /// The client's mark.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Length; its upper half is lost where headers are compact.
    pub length: u64,
}

impl Request {
    /// "Request message"
    pub fn encode(&self, shape: Shape) -> Vec<u8> {
        let magic: u32 = if shape == Shape::Extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let length = self.length.to_be_bytes();
        let length = if shape == Shape::Extended { &length[..] } else { &length[4..] };
        [
            &magic.to_be_bytes()[..],
            &self.flags.to_be_bytes(),
            &self.command.to_be_bytes(),
            &self.cookie.to_be_bytes(),
            &self.offset.to_be_bytes(),
            length,
        ]
        .concat()
    }

    /// The other direction; `None` if the magic number is wrong.
    pub fn decode(shape: Shape, bytes: &[u8]) -> Result<Option<Self>, Finding> {
        let mut wire = Wire(bytes);
        let magic = wire.number(4)?;
        if magic != if shape == Shape::Extended { 0x21e4_1c71 } else { 0x2560_9513 } {
            return Ok(None);
        }
        let flags = wire.number(2)?;
        let command = wire.number(2)?;
        Ok(Some(Self {
            flags: u16::try_from(flags).unwrap_or(0),
            command: u16::try_from(command).unwrap_or(0),
            cookie: wire.number(8)?,
            offset: wire.number(8)?,
            length: wire.number(if shape == Shape::Extended { 8 } else { 4 })?,
        }))
    }
}

/// A message of the server in the transmission phase.
pub struct Reply<'a> {
    /// No other message follows for the request.
    pub done: bool,
    /// The error of a simple reply, or the type of a chunk.
    pub what: What,
    /// The payload of a chunk. (That of a simple reply cannot be distinguished from the reply.)
    pub payload: &'a [u8],
}

/// What a [`Reply`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A simple reply with its error.
    Simple(u64),
    /// A chunk with its type.
    Chunk(u64),
}

impl<'a> Reply<'a> {
    /// Reads one reply and checks it against its request.
    pub fn parse(wire: &mut Wire<'a>, shape: Shape, request: &Request) -> Result<Self, Finding> {
        let magic = wire.number(4)?;
        if magic == 0x6744_6698 && shape != Shape::Extended {
            let error = wire.number(4)?;
            let cookie = wire.number(8)?;
            ensure!(cookie == request.cookie, "cookie {cookie:#x} for {request:?}");
            let simple = shape == Shape::Simple;
            ensure!(simple || request.command != 0, "a simple reply to a READ");
            return Ok(Self { done: true, what: What::Simple(error), payload: &[] });
        }
        let expected = match shape {
            Shape::Simple => 0x6744_6698,
            Shape::Structured => 0x668e_33ef,
            Shape::Extended => 0x6e8a_278c,
        };
        ensure!(magic == expected, "a reply starts with {magic:#x} on {shape:?}");
        let (flags, kind, cookie) = (wire.number(2)?, wire.number(2)?, wire.number(8)?);
        ensure!(flags <= 1, "reply flags {flags:#x}");
        ensure!(cookie == request.cookie, "cookie {cookie:#x} for {request:?}");
        let len = if shape == Shape::Extended {
            let offset = wire.number(8)?;
            ensure!(offset == request.offset, "offset {offset:#x} for {request:?}");
            wire.number(8)?
        } else {
            wire.number(4)?
        };
        let payload = wire.take(usize::try_from(len).unwrap_or(usize::MAX))?;
        Ok(Self { done: flags == 1, what: What::Chunk(kind), payload })
    }
}
