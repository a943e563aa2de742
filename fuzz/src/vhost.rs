//! Fuzzing of vhost-user messages that are mostly valid.
//!
//! A conversation of a frontend is made out of choices, and is wrong in one place at a time. It arrives in pieces.
//! Each message is judged by its sizes and values as written in the protocol document, and is encoded again, without the
//! code of the decoder.

use ebb_vhost_proto::{
    Assembler, BlkConfig, ConfigSpace, FrontendMessage, MAX_BODY, MemoryRegion, MessageHeader,
    OutgoingMessage, ProtocolError, VringFile, VringState,
};

use super::Finding;
use super::choices::Choices;

/// The decoder, or a broken one.
pub type Decode =
    for<'a> fn(MessageHeader, &'a [u8], usize) -> Result<FrontendMessage<'a>, ProtocolError>;

/// The decoder of the crate.
pub fn decode(
    header: MessageHeader,
    body: &[u8],
    descriptors: usize,
) -> Result<FrontendMessage<'_>, ProtocolError> {
    FrontendMessage::decode(header, body, descriptors)
}

/// How often what happened.
#[derive(Debug, Default)]
pub struct Tally {
    /// Messages that were decoded.
    pub decoded: u64,
    /// Among them those that are not supported.
    pub unsupported: u64,
    /// Messages that were refused.
    pub refused: u64,
    /// Conversations that a wrong header ended.
    pub ended: u64,
}

/// Judges; the text is made only when the judgement is against the decoder.
macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err(Finding(format!($($text)+)));
        }
    };
}

/// A message as it is sent.
struct Sent {
    number: u32,
    flags: u32,
    /// As the header says; more than the body has only if the header is wrong.
    size: u32,
    body: Vec<u8>,
    descriptors: usize,
}

impl Sent {
    fn bytes(&self) -> Vec<u8> {
        [&self.number.to_le_bytes()[..], &self.flags.to_le_bytes(), &self.size.to_le_bytes()]
            .concat()
            .into_iter()
            .chain(self.body.iter().copied())
            .collect()
    }

    fn has_wrong_header(&self) -> bool {
        self.flags & 7 != 1 || self.size as usize > MAX_BODY
    }
}

/// Some bytes, all of them different from zero in the long run.
fn fill(choices: &mut Choices<'_>, len: usize) -> Vec<u8> {
    let mut state = u32::from(choices.byte());
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_le_bytes()[3]
    };
    (0..len).map(|_| next()).collect()
}

/// A body that is right for the request, but for rare values.
fn body(number: u32, choices: &mut Choices<'_>) -> Vec<u8> {
    let word = |word: u32| word.to_le_bytes().to_vec();
    match number {
        1 | 3 | 4 | 7 | 15 | 17 | 21 | 34 | 36 | 40 => Vec::new(),
        2 | 8 | 10 | 11 | 16 | 35 => fill(choices, 8),
        39 => {
            let beyond = u8::from(choices.rarely());
            vec![choices.byte(), 0, beyond, 0, 0, 0, 0, 0]
        }
        18 => {
            let enabled = if choices.rarely() { 2 } else { choices.below(2) as u32 };
            [fill(choices, 4), word(enabled)].concat()
        }
        12..=14 => {
            let reserved = u8::from(choices.rarely()) << choices.below(8);
            vec![choices.byte(), u8::from(choices.often()) | reserved, 0, 0, 0, 0, 0, 0]
        }
        5 => {
            let bound = if choices.rarely() { 16 } else { 9 };
            let regions = choices.below(bound);
            let count = if choices.rarely() { choices.below(256) } else { regions };
            [word(count as u32), fill(choices, 4 + 32 * regions)].concat()
        }
        6 => {
            let len = if choices.rarely() { 8 } else { 16 };
            fill(choices, len)
        }
        9 | 37 | 38 => fill(choices, 40),
        24 | 25 => {
            let len = choices.below(256) + choices.below(2);
            let payload = if choices.rarely() { 0 } else { len };
            let offset = if choices.rarely() { choices.number() as u32 } else { 0 };
            [word(offset), word(len as u32), word(choices.below(3) as u32), fill(choices, payload)]
                .concat()
        }
        31 | 32 => {
            let len = if choices.rarely() { 20 } else { 24 };
            fill(choices, len)
        }
        _ => {
            let len = choices.below(64);
            fill(choices, len)
        }
    }
}

/// How many descriptors the protocol document gives a request, if it is valid.
fn descriptors_of(number: u32, body: &[u8]) -> usize {
    match number {
        5 => body.first().copied().unwrap_or_default().into(),
        7 | 21 | 32 | 37 => 1,
        12..=14 => usize::from(body.get(1).is_some_and(|flags| flags & 1 == 0)),
        _ => 0,
    }
}

fn message(choices: &mut Choices<'_>) -> Sent {
    let number =
        if choices.rarely() { choices.number() as u32 } else { 1 + choices.below(44) as u32 };
    let body = body(number, choices);
    let descriptors = match choices.below(16) {
        0 => choices.below(9),
        1 => descriptors_of(number, &body) + 1,
        _ => descriptors_of(number, &body),
    };
    let flags = 1 | u32::from(choices.often()) << 3;
    let mut sent = Sent { number, flags, size: 0, body, descriptors };
    let violation = if choices.rarely() { choices.below(8) } else { 8 };
    match violation {
        0 => sent.body.truncate(sent.body.len().saturating_sub(1 + choices.below(4))),
        1 => sent.body.push(choices.byte()),
        2 => {
            let at = choices.below(256);
            if let Some(byte) = sent.body.get_mut(at) {
                *byte = choices.byte();
            }
        }
        3 => sent.body.resize(MAX_BODY, choices.byte()),
        _ => {}
    }
    sent.size = sent.body.len() as u32;
    match violation {
        4 => sent.flags ^= 1 << choices.below(2),
        5 => sent.flags |= 4,
        6 => sent.size = MAX_BODY as u32 + 1 + choices.number() as u32 % 0x8000_0000,
        7 => sent.flags |= (choices.number() as u32) << 4,
        _ => {}
    }
    sent
}

/// Whether the protocol document allows the message.
fn is_valid(sent: &Sent) -> bool {
    let body = &sent.body[..];
    let len = body.len();
    let word = |at: usize| -> u32 {
        let bytes = body[at..at + 4].iter().rev();
        bytes.fold(0, |word, byte| word << 8 | u32::from(*byte))
    };
    let sized = match sent.number {
        1 | 3 | 4 | 7 | 15 | 17 | 21 | 34 | 36 | 40 => len == 0,
        2 | 8 | 10 | 11 | 16 | 35 => len == 8,
        39 => len == 8 && body[1..].iter().all(|byte| *byte == 0),
        18 => len == 8 && word(4) < 2,
        12..=14 => len == 8 && body[1] < 2 && body[2..].iter().all(|byte| *byte == 0),
        5 => len >= 8 && word(0) <= 8 && len == 8 + 32 * word(0) as usize,
        6 => len == 8 || len == 16,
        9 | 37 | 38 => len == 40,
        24 => len == 12 || len > 12 && len - 12 == word(4) as usize,
        25 => len >= 12 && len - 12 == word(4) as usize,
        31 | 32 => len == 20 || len == 24,
        _ => true,
    };
    sized && sent.descriptors >= descriptors_of(sent.number, body)
}

fn region(region: &MemoryRegion) -> Vec<u8> {
    let MemoryRegion { guest_address, bytes, user_address, mmap_offset } = *region;
    [guest_address, bytes, user_address, mmap_offset].map(u64::to_le_bytes).concat()
}

/// The request and the body of a message, as a frontend sends them; padding is zero.
pub fn encode(message: &FrontendMessage<'_>) -> (u32, Vec<u8>) {
    use FrontendMessage as M;
    let number = |number: u64| number.to_le_bytes().to_vec();
    let words = |words: [u32; 2]| words.map(u32::to_le_bytes).concat();
    let state = |VringState { index, number }| words([index, number]);
    let file = |VringFile { index, has_descriptor }| {
        number(u64::from(index) | u64::from(!has_descriptor) << 8)
    };
    match *message {
        M::GetFeatures => (1, vec![]),
        M::SetFeatures(features) => (2, number(features.0)),
        M::SetOwner => (3, vec![]),
        M::ResetOwner => (4, vec![]),
        M::SetMemTable(table) => {
            let regions: Vec<u8> = table.regions().flat_map(|one| region(&one)).collect();
            (5, [words([table.len() as u32, 0]), regions].concat())
        }
        M::SetLogBase(Some(area)) => (6, [number(area.size), number(area.offset)].concat()),
        M::SetLogBase(None) => (6, number(0)),
        M::SetLogFd => (7, vec![]),
        M::SetVringNum(of) => (8, state(of)),
        M::SetVringAddr(of) => {
            let addresses = [of.descriptor, of.used, of.available, of.log].map(u64::to_le_bytes);
            (9, [words([of.index, of.flags]), addresses.concat()].concat())
        }
        M::SetVringBase(of) => (10, state(of)),
        M::GetVringBase(index) => (11, words([index, 0])),
        M::SetVringKick(of) => (12, file(of)),
        M::SetVringCall(of) => (13, file(of)),
        M::SetVringErr(of) => (14, file(of)),
        M::GetProtocolFeatures => (15, vec![]),
        M::SetProtocolFeatures(features) => (16, number(features.0)),
        M::GetQueueNum => (17, vec![]),
        M::SetVringEnable { index, enabled } => (18, words([index, enabled.into()])),
        M::SetBackendReqFd => (21, vec![]),
        M::GetConfig(of) => (24, [of.offset, of.size, of.flags].map(u32::to_le_bytes).concat()),
        M::SetConfig(of, payload) => {
            let head = [of.offset, of.size, of.flags].map(u32::to_le_bytes).concat();
            (25, [&head, payload].concat())
        }
        M::GetInflightFd(of) | M::SetInflightFd(of) => {
            let request = if matches!(message, M::GetInflightFd(_)) { 31 } else { 32 };
            let sizes = [of.queues, of.queue_size].map(u16::to_le_bytes).concat();
            (request, [number(of.mmap_size), number(of.mmap_offset), sizes, vec![0; 4]].concat())
        }
        M::ResetDevice => (34, vec![]),
        M::VringKick(index) => (35, words([index, 0])),
        M::GetMaxMemSlots => (36, vec![]),
        M::AddMemReg(of) => (37, [number(0), region(&of)].concat()),
        M::RemMemReg(of) => (38, [number(0), region(&of)].concat()),
        M::SetStatus(status) => (39, number(status.into())),
        M::GetStatus => (40, vec![]),
        M::Unsupported(number) => (number, vec![]),
    }
}

/// Clears what does not count in a valid body: padding, and what a message does not use.
fn without_padding(message: &FrontendMessage<'_>, body: &[u8]) -> Vec<u8> {
    use FrontendMessage as M;
    let mut body = body.to_vec();
    let ignored = match message {
        M::SetMemTable(_) | M::GetVringBase(_) | M::VringKick(_) => 4..8,
        M::AddMemReg(_) | M::RemMemReg(_) => 0..8,
        M::SetLogBase(None) => {
            body.truncate(8);
            0..8
        }
        M::GetConfig(_) => {
            body.truncate(12);
            0..0
        }
        M::GetInflightFd(_) | M::SetInflightFd(_) => {
            body.resize(24, 0);
            20..24
        }
        M::Unsupported(_) => {
            body.clear();
            0..0
        }
        _ => 0..0,
    };
    body[ignored].fill(0);
    body
}

/// The reply to a message, if it has one with a size of its own.
fn judge_reply(
    message: &FrontendMessage<'_>,
    header: MessageHeader,
    space: &ConfigSpace,
) -> Result<(), Finding> {
    let (reply, len) = match *message {
        FrontendMessage::GetConfig(range) => {
            let is_within = u64::from(range.offset) + u64::from(range.size) <= 256;
            let len = if is_within { 12 + range.size as usize } else { 0 };
            (OutgoingMessage::config(range, space), len)
        }
        FrontendMessage::GetInflightFd(area) => {
            (OutgoingMessage::inflight(header, area), header.size as usize)
        }
        _ => return Ok(()),
    };
    let bytes = reply.as_bytes();
    let size = u32::try_from(len).unwrap_or_default().to_le_bytes();
    let head = [&header.request.to_le_bytes()[..], &5_u32.to_le_bytes(), &size].concat();
    ensure!(bytes.len() == 12 + len, "{} bytes of a reply to {message:?}", bytes.len());
    ensure!(bytes.starts_with(&head), "the reply to {message:?} begins with {:x?}", &bytes[..12]);
    Ok(())
}

/// Receives a message in pieces, and takes it. `None` if its header was refused, as it must be.
fn receive<'a>(
    assembler: &'a mut Assembler,
    sent: &Sent,
    choices: &mut Choices<'_>,
) -> Result<Option<(MessageHeader, &'a [u8])>, Finding> {
    let bytes = sent.bytes();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let piece = match choices.below(4) {
            0 => 1,
            1 => 1 + choices.below(32),
            _ => bytes.len(),
        };
        let space = assembler.space();
        let left = rest.len();
        ensure!(!space.is_empty(), "no space, and {left} bytes of the message are missing");
        ensure!(space.len() <= left, "space for {}, and the message has {left}", space.len());
        let len = piece.min(space.len());
        space[..len].copy_from_slice(&rest[..len]);
        rest = &rest[len..];
        let has_header = bytes.len() - rest.len() >= 12;
        let is_refused = assembler.advance(len).is_err();
        let wrong = has_header && sent.has_wrong_header();
        ensure!(is_refused == wrong, "refused: {is_refused}, header {:x?}", &bytes[..12]);
        if is_refused {
            ensure!(assembler.space().is_empty(), "space after an error");
            return Ok(None);
        }
    }
    ensure!(assembler.space().is_empty(), "space for the next message");
    let taken = assembler.take();
    ensure!(taken.is_some(), "a whole message cannot be taken");
    Ok(taken)
}

/// Runs a conversation.
pub fn run(decode: Decode, data: &[u8]) -> Result<Tally, Finding> {
    let mut choices = Choices::new(data);
    let mut tally = Tally::default();
    let mut assembler = Assembler::new();
    let space = BlkConfig { capacity: choices.number(), ..BlkConfig::default() }.space();
    while !choices.is_exhausted() {
        let sent = message(&mut choices);
        ensure!(assembler.is_empty(), "a message was taken, and bytes are left");
        let Some((header, body)) = receive(&mut assembler, &sent, &mut choices)? else {
            tally.ended += 1;
            break;
        };
        let need_reply = sent.flags & 8 != 0;
        let expected = MessageHeader { request: sent.number, need_reply, size: sent.size };
        ensure!(header == expected, "{header:?} instead of {expected:?}");
        ensure!(body == sent.body, "request {} has another body", sent.number);
        let decoded = decode(header, body, sent.descriptors);
        let valid = is_valid(&sent);
        ensure!(
            decoded.is_ok() == valid,
            "valid: {valid}, and {decoded:?} of {body:02x?} with {} descriptors",
            sent.descriptors
        );
        let Ok(message) = decoded else {
            tally.refused += 1;
            continue;
        };
        tally.decoded += 1;
        tally.unsupported += u64::from(matches!(message, FrontendMessage::Unsupported(_)));
        let (used, came) = (message.descriptors(), sent.descriptors);
        ensure!(used <= came, "{message:?} uses {used} descriptors, and {came} came");
        let again = encode(&message);
        ensure!(
            again == (sent.number, without_padding(&message, body)),
            "request {} with {body:02x?} became {message:?}",
            sent.number
        );
        judge_reply(&message, header, &space)?;
    }
    Ok(tally)
}
