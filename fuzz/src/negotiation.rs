//! Conversations in the handshake.

use super::choices::Choices;
use super::client::{OptionReply, Shape, Wire, counted, option};
use super::{Finding, ensure};
use ebb_export_nbd::handshake::{
    BlockSizes, ExportCapabilities, ExportInfo, Exports, Handshake, HandshakeError,
    HandshakeLimits, HandshakePolicy, HandshakeStep, Session, TlsMode,
};
use ebb_export_nbd::proto::ReplyStyle;

/// What is judged: the machine itself, or a broken one that must be found out.
pub trait Negotiator {
    /// As [`Handshake::greeting`].
    fn greeting(&mut self, out: &mut Vec<u8>);
    /// As [`Handshake::advance`].
    fn advance(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(usize, HandshakeStep), HandshakeError>;
    /// As [`Handshake::tls_established`].
    fn tls_established(&mut self) -> Result<(), HandshakeError>;
    /// As [`Handshake::input_max`].
    fn input_max(&self) -> usize;
}

impl Negotiator for Handshake {
    fn greeting(&mut self, out: &mut Vec<u8>) {
        Self::greeting(self, out);
    }
    fn advance(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(usize, HandshakeStep), HandshakeError> {
        Self::advance(self, input, exports, out)
    }
    fn tls_established(&mut self) -> Result<(), HandshakeError> {
        Self::tls_established(self)
    }
    fn input_max(&self) -> usize {
        Self::input_max(self)
    }
}

/// How conversations came out; to see that the fuzzer gets everywhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Options that got their final reply.
    pub answered: u64,
    /// Of those, the ones that were refused.
    pub refused: u64,
    /// Upgrades to TLS.
    pub upgrades: u64,
    /// Conversations that led to the transmission phase.
    pub transmissions: u64,
    /// Conversations the server broke off.
    pub closed: u64,
}

/// Lets the bytes choose a conversation, has it in pieces and then burst by burst, and judges both.
pub fn run<M: Negotiator>(
    make: impl Fn(HandshakePolicy) -> M,
    data: &[u8],
) -> Result<Tally, Finding> {
    let mut choices = Choices::new(data);
    let cuts = [(); 4].map(|()| 1 + choices.below(32));
    let policy = choose_policy(&mut choices);
    let bursts = choose_bursts(policy.tls, &mut choices);
    let cut = converse(make(policy), &bursts, &cuts)?;
    let tally = audit(&cut, policy)?;
    let whole = converse(make(policy), &bursts, &[usize::MAX])?;
    audit(&whole, policy)?;
    ensure!(cut.end == whole.end, "cut {:?}, uncut {:?}", cut.end, whole.end);
    // What is injected behind STARTTLS is refused either before or after the reply to the option.
    let injected = cut.end == End::Closed(HandshakeError::PlaintextAfterStartTls);
    ensure!(injected || cut.out == whole.out, "cutting changed the replies");
    Ok(tally)
}

const ALLOCATION: &str = "base:allocation";

/// The exports of every conversation; the empty name is the first.
struct Shelf;

const NAMES: [&str; 3] = ["disk", "", "daten-träger"];

fn export(handle: u64) -> Option<ExportInfo> {
    let (name, description) = [("disk", "the first"), ("daten-träger", "")]
        .get(usize::try_from(handle).ok()?)
        .copied()?;
    Some(ExportInfo {
        snapshots: Vec::new(),
        handle,
        name: name.into(),
        description: description.into(),
        size: 1 << 30,
        capabilities: ExportCapabilities {
            flush: true,
            fua: true,
            ..ExportCapabilities::default()
        },
        block: BlockSizes::default(),
    })
}

fn find(name: &[u8]) -> Option<ExportInfo> {
    match name {
        b"" | b"disk" => export(0),
        name if name == NAMES[2].as_bytes() => export(1),
        _ => None,
    }
}

impl Exports for Shelf {
    fn list(&self, visit: &mut dyn FnMut(&str, &str)) {
        for info in (0..2).filter_map(export) {
            visit(&info.name, &info.description);
        }
    }
    fn lookup(&self, name: &str) -> Option<ExportInfo> {
        find(name.as_bytes())
    }
}

fn choose_policy(choices: &mut Choices<'_>) -> HandshakePolicy {
    let tls = choices.pick(&[TlsMode::Off, TlsMode::On, TlsMode::Require]);
    let mut limits = HandshakeLimits::default();
    if choices.rarely() {
        limits.options_max = choices.pick(&[0, 1, 3]);
    }
    if choices.rarely() {
        limits.option_bytes_max = choices.pick(&[0, 16, 64]);
    }
    if choices.rarely() {
        limits.bytes_max = choices.pick(&[0, 100, 300]);
    }
    if choices.rarely() {
        limits.queries_max = choices.pick(&[0, 1]);
    }
    HandshakePolicy { tls, limits }
}

/// What the client sends, in bursts: it waits for replies between them, as it should, but not
/// always.
fn choose_bursts(tls: TlsMode, choices: &mut Choices<'_>) -> Vec<Vec<u8>> {
    let flags: u32 = if choices.rarely() { choices.pick(&[0, 1, 2, 4, 7, u32::MAX]) } else { 3 };
    let mut bursts = vec![flags.to_be_bytes().to_vec()];
    // A client that knows its way: TLS first, then the style of replies.
    let tls_first = match tls {
        TlsMode::Off => choices.rarely(),
        TlsMode::On => choices.often(),
        TlsMode::Require => !choices.rarely(),
    };
    if tls_first {
        bursts.push(option(5, b""));
    }
    if choices.often() {
        bursts.push(option(choices.pick(&[8, 8, 11]), b""));
    }
    while bursts.len() < 40 && !choices.is_exhausted() {
        let message = choose_option(choices);
        match bursts.last_mut() {
            Some(last) if choices.rarely() => last.extend(message),
            _ => bursts.push(message),
        }
    }
    if choices.often() {
        bursts.push(option(7, &info_payload(choices)));
    }
    bursts
}

fn choose_option(choices: &mut Choices<'_>) -> Vec<u8> {
    // The ones that end the negotiation are chosen less often.
    let number = choices.pick(&[3, 6, 6, 3, 8, 9, 9, 10, 10, 10, 10, 11, 5, 7, 1, 2]);
    let number = if choices.rarely() { u32::from(choices.byte()) } else { number };
    let payload = match number {
        1 => choose_name(choices),
        6 | 7 => info_payload(choices),
        9 | 10 => context_payload(choices),
        _ => Vec::new(),
    };
    let mut bytes = option(number, &payload);
    if choices.rarely() && choices.often() {
        corrupt(&mut bytes, choices);
    }
    bytes
}

fn corrupt(bytes: &mut Vec<u8>, choices: &mut Choices<'_>) {
    let at = choices.below(bytes.len());
    match choices.below(5) {
        0 => bytes[at] ^= 1 << choices.below(8),
        1 => bytes.truncate(at),
        2 => bytes.extend_from_slice(&[0x5a; 9][..choices.below(10)]),
        // The length: a little off, or a lot.
        3 => bytes[15] = bytes[15].wrapping_add(choices.byte()),
        _ => bytes[12 + choices.below(4)] ^= choices.byte(),
    }
}

fn choose_name(choices: &mut Choices<'_>) -> Vec<u8> {
    if choices.rarely() {
        return match choices.below(5) {
            0 => b"nothing".to_vec(),
            1 => b"\xff\xfe".to_vec(),
            2 => b"di\0sk".to_vec(),
            3 => vec![b'a'; 4096],
            _ => vec![b'a'; 4097],
        };
    }
    choices.pick(&NAMES).as_bytes().to_vec()
}

fn info_payload(choices: &mut Choices<'_>) -> Vec<u8> {
    let mut bytes = counted(&choose_name(choices));
    let count = u16::try_from(choices.below(5)).unwrap_or(0);
    bytes.extend(count.to_be_bytes());
    for _ in 0..count {
        let info = u16::try_from(choices.below(5)).unwrap_or(0);
        bytes.extend(info.to_be_bytes());
    }
    bytes
}

fn context_payload(choices: &mut Choices<'_>) -> Vec<u8> {
    let mut bytes = counted(&choose_name(choices));
    let count = u32::try_from(choices.below(4)).unwrap_or(0);
    bytes.extend(count.to_be_bytes());
    for _ in 0..count {
        let query = choices.pick(&[ALLOCATION, ALLOCATION, "base:", "base:other", "x-y:z", "bad"]);
        bytes.extend(counted(query.as_bytes()));
    }
    bytes
}

/// How a conversation ended.
#[derive(Debug, PartialEq)]
enum End {
    /// The client fell silent.
    Silence,
    /// The client took its leave.
    Abort,
    /// The server broke it off.
    Closed(HandshakeError),
    /// It is done.
    Transmission(Box<Session>),
}

struct Conversation {
    /// What the server took.
    taken: Vec<u8>,
    /// What the server said.
    out: Vec<u8>,
    end: End,
}

/// Has the conversation as a server has to, in pieces of these lengths over and over, and holds
/// the machine to what it promises on the way.
fn converse<M: Negotiator>(
    mut machine: M,
    bursts: &[Vec<u8>],
    cuts: &[usize],
) -> Result<Conversation, Finding> {
    let mut talk = Conversation { taken: Vec::new(), out: Vec::new(), end: End::Silence };
    machine.greeting(&mut talk.out);
    ensure!(talk.out == b"NBDMAGICIHAVEOPT\0\x03", "greeting {:?}", talk.out);
    let mut buffer = Vec::new();
    let mut awaiting_tls = false;
    let mut cuts = cuts.iter().cycle();
    'bursts: for burst in bursts {
        let mut rest = &burst[..];
        loop {
            let len = cuts.next().map_or(usize::MAX, |len| *len);
            let (piece, behind) = rest.split_at(len.min(rest.len()));
            buffer.extend_from_slice(piece);
            rest = behind;
            let step = exchange(&mut machine, &mut buffer, &mut talk)?;
            let injected = Err(HandshakeError::PlaintextAfterStartTls);
            ensure!(!awaiting_tls || step == injected, "plain text was taken for TLS: {step:?}");
            match step {
                Ok(HandshakeStep::StartTls) => {
                    ensure!(buffer.is_empty(), "plain text is kept for after the upgrade");
                    // If there is more to send, the client continues in plain text.
                    awaiting_tls = !rest.is_empty();
                    if !awaiting_tls {
                        let up = machine.tls_established();
                        ensure!(up.is_ok(), "TLS was started, but not expected");
                    }
                }
                Ok(HandshakeStep::NeedMore | HandshakeStep::Again) => {}
                Ok(HandshakeStep::Abort) => talk.end = End::Abort,
                Ok(HandshakeStep::Transmission(session)) => {
                    talk.end = End::Transmission(Box::new(session));
                }
                Err(error) => talk.end = End::Closed(error),
            }
            if talk.end != End::Silence {
                break 'bursts;
            }
            if rest.is_empty() {
                break;
            }
        }
    }
    if talk.end != End::Silence {
        let said = talk.out.len();
        let more = machine.advance(&option(3, b""), &Shelf, &mut talk.out);
        ensure!(more == Err(HandshakeError::Ended), "after the end: {more:?}");
        ensure!(talk.out.len() == said, "the machine spoke after the end");
    }
    Ok(talk)
}

/// Advances until bytes are needed, or something else is to be done.
fn exchange<M: Negotiator>(
    machine: &mut M,
    buffer: &mut Vec<u8>,
    talk: &mut Conversation,
) -> Result<Result<HandshakeStep, HandshakeError>, Finding> {
    loop {
        let said = talk.out.len();
        let (consumed, step) = match machine.advance(buffer, &Shelf, &mut talk.out) {
            Ok(done) => done,
            Err(error) => return Ok(Err(error)),
        };
        ensure!(consumed <= buffer.len(), "{consumed} of {} bytes consumed", buffer.len());
        let grown = talk.out.len() - said;
        ensure!(grown < 1024, "{grown} bytes at once");
        talk.taken.extend_from_slice(&buffer[..consumed]);
        buffer.drain(..consumed);
        match step {
            HandshakeStep::Again => ensure!(consumed > 0, "again, with nothing consumed"),
            HandshakeStep::NeedMore => {
                ensure!(buffer.len() < machine.input_max(), "{} bytes kept", buffer.len());
                return Ok(Ok(step));
            }
            other => return Ok(Ok(other)),
        }
    }
}

/// What the client knows of the connection, from the replies it got.
struct View {
    policy: HandshakePolicy,
    tls: bool,
    shape: Shape,
    /// Handle of the export for which the context was selected.
    allocation: Option<u64>,
}

/// Walks through what was taken and what was said, side by side.
fn audit(talk: &Conversation, policy: HandshakePolicy) -> Result<Tally, Finding> {
    let mut tally = Tally::default();
    let mut view = View { policy, tls: false, shape: Shape::Simple, allocation: None };
    let mut taken = Wire(&talk.taken);
    let mut said = Wire(&talk.out);
    said.take(18)?;
    let flags = if taken.0.is_empty() { 0 } else { taken.number(4)? };
    ensure!(flags <= 3, "unknown client flags {flags:#x} were accepted");
    let sent = u64::try_from(taken.0.len()).unwrap_or(u64::MAX);
    // ABORT alone is heard beyond the limit.
    ensure!(sent <= policy.limits.bytes_max + 16, "{sent} bytes were consumed");
    let mut last = 0;
    while !taken.0.is_empty() {
        ensure!(tally.answered < u64::from(policy.limits.options_max), "too many options");
        let magic = taken.take(8)?;
        ensure!(magic == b"IHAVEOPT", "{magic:?} was taken for an option");
        last = taken.number(4)?;
        let len = usize::try_from(taken.number(4)?).unwrap_or(usize::MAX);
        if last == 1 {
            let End::Transmission(session) = &talk.end else {
                return Err(Finding(format!("EXPORT_NAME led to {:?}", talk.end)));
            };
            let name = taken.take(len)?;
            let found = find(name).map(|info| info.handle);
            ensure!(found == Some(session.export.handle), "{name:?} led to {session:?}");
            ensure!(policy.tls != TlsMode::Require || view.tls, "an export without TLS");
            ensure!(view.shape != Shape::Extended, "EXPORT_NAME with extended headers");
            ensure!(said.number(8)? == 1 << 30, "wrong size");
            said.number(2)?;
            let zeroes = said.take(if flags & 2 == 0 { 124 } else { 0 })?;
            ensure!(zeroes.iter().all(|byte| *byte == 0), "padding is zero");
            break;
        }
        ensure!(flags & 1 == 1, "option {last} without fixed newstyle");
        if last == 2 {
            ensure!(talk.end == End::Abort, "ABORT led to {:?}", talk.end);
            let reply = OptionReply::parse(&mut said)?;
            ensure!(
                (reply.option, reply.kind) == (2, 1),
                "the reply to ABORT is {:#x}",
                reply.kind
            );
            break;
        }
        if taken.0.len() < len {
            // The remainder of a refused payload is still to be sent.
            taken.take(taken.0.len())?;
            break;
        }
        let kind = judge_option(last, taken.take(len)?, &mut said, &mut view)?;
        tally.answered += 1;
        tally.refused += u64::from(kind & 0x8000_0000 != 0);
        tally.upgrades += u64::from(last == 5 && kind == 1);
    }
    ensure!(taken.0.is_empty(), "{} bytes consumed after the end", taken.0.len());
    ensure!(said.0.is_empty(), "{} bytes sent after the end", said.0.len());
    match &talk.end {
        End::Transmission(session) => {
            tally.transmissions += 1;
            judge_session(session, &view, last == 1)?;
        }
        End::Closed(_) => tally.closed += 1,
        End::Silence | End::Abort => {}
    }
    Ok(tally)
}

/// "Option types": the replies to one option; returns the kind of the final one.
fn judge_option(
    number: u64,
    payload: &[u8],
    said: &mut Wire<'_>,
    view: &mut View,
) -> Result<u64, Finding> {
    let mut listed = 0;
    let mut context = None;
    let mut described = None;
    let end = loop {
        let reply = OptionReply::parse(said)?;
        ensure!(reply.option == number, "{number} has a reply to {}", reply.option);
        if reply.is_final() {
            break reply.kind;
        }
        match (number, reply.kind) {
            (3, 2) => listed += 1,
            (6 | 7, 3) if reply.payload.starts_with(&[0, 0]) => {
                ensure!(described.is_none(), "described twice");
                described = Some(reply.payload);
            }
            (6 | 7, 3) => {}
            (9 | 10, 4) => {
                ensure!(context.is_none(), "the same context twice");
                ensure!(&reply.payload[4..] == ALLOCATION.as_bytes(), "an unknown context");
                context = Some(reply.payload[3]);
            }
            (_, kind) => return Err(Finding(format!("the reply to {number} is {kind}"))),
        }
    };
    let expected = expected_end(number, payload, view);
    ensure!(
        expected.contains(&end),
        "option {number} {payload:?} ended with {end:#x}, not one of {expected:#x?}"
    );
    if number == 10 {
        view.allocation = None;
    }
    if end != 1 {
        return Ok(end);
    }
    match number {
        3 => ensure!(listed == 2, "{listed} exports listed"),
        5 => (view.tls, view.shape, view.allocation) = (true, Shape::Simple, None),
        6 | 7 => {
            let df = u8::from(view.shape != Shape::Simple) << 7;
            let expected = [0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0x0d | df];
            ensure!(described == Some(&expected[..]), "described as {described:?}");
        }
        8 => view.shape = Shape::Structured,
        9 => ensure!(context.is_none_or(|id| id == 0), "listed as {context:?}"),
        10 if context.is_some() => {
            ensure!(context == Some(1), "granted as {context:?}");
            view.allocation = find(name_of(payload)).map(|info| info.handle);
        }
        11 => view.shape = Shape::Extended,
        _ => {}
    }
    Ok(end)
}

/// The final replies that are right for an option.
fn expected_end(number: u64, payload: &[u8], view: &View) -> Vec<u64> {
    const ACK: u64 = 1;
    const UNSUP: u64 = 0x8000_0001;
    const POLICY: u64 = 0x8000_0002;
    const INVALID: u64 = 0x8000_0003;
    const TLS_REQD: u64 = 0x8000_0005;
    const UNKNOWN: u64 = 0x8000_0006;
    const TOO_BIG: u64 = 0x8000_0009;
    const EXT_HEADER_REQD: u64 = 0x8000_000a;
    let limits = view.policy.limits;
    let too_long = payload.len() > usize::try_from(limits.option_bytes_max).unwrap_or(usize::MAX);
    match number {
        5 if !payload.is_empty() || view.tls => vec![INVALID],
        5 if view.policy.tls == TlsMode::Off => vec![POLICY],
        5 => vec![ACK],
        _ if view.policy.tls == TlsMode::Require && !view.tls => vec![TLS_REQD],
        3 | 8 | 11 if !payload.is_empty() => vec![INVALID],
        8 if view.shape == Shape::Extended => vec![EXT_HEADER_REQD],
        3 | 8 | 11 => vec![ACK],
        6 | 7 | 9 | 10 if too_long => vec![TOO_BIG],
        9 | 10 if view.shape == Shape::Simple => vec![INVALID],
        6 | 7 | 9 | 10 => match well_formed(number, payload, limits.queries_max) {
            Some(true) if find(name_of(payload)).is_some() => vec![ACK],
            Some(true) => vec![UNKNOWN],
            Some(false) | None => vec![INVALID, TOO_BIG],
        },
        _ => vec![UNSUP],
    }
}

/// The name at the front of a payload that was found to have one.
fn name_of(payload: &[u8]) -> &[u8] {
    let mut wire = Wire(payload);
    let len = wire.number(4).unwrap_or(0);
    wire.take(usize::try_from(len).unwrap_or(usize::MAX)).unwrap_or_default()
}

/// Whether the lengths add up (else `None`), and whether the strings are strings.
fn well_formed(number: u64, payload: &[u8], queries_max: u32) -> Option<bool> {
    let mut wire = Wire(payload);
    let string = |wire: &mut Wire<'_>| -> Option<(bool, bool)> {
        let len = usize::try_from(wire.number(4).ok()?).ok()?;
        let bytes = wire.take(len).ok()?;
        let valid = len <= 4096 && !bytes.contains(&0) && std::str::from_utf8(bytes).is_ok();
        let spaced = bytes.iter().position(|byte| *byte == b':').is_some_and(|colon| colon > 0);
        Some((valid, spaced))
    };
    let (mut valid, _) = string(&mut wire)?;
    if number <= 7 {
        let count = usize::try_from(wire.number(2).ok()?).ok()?;
        wire.take(2 * count).ok()?;
    } else {
        let count = wire.number(4).ok()?;
        if count > u64::from(queries_max) {
            return Some(false);
        }
        for _ in 0..count {
            let (text, spaced) = string(&mut wire)?;
            valid &= text && spaced;
        }
    }
    wire.0.is_empty().then_some(valid)
}

/// The session is what the client takes it for.
fn judge_session(session: &Session, view: &View, by_name: bool) -> Result<(), Finding> {
    let shape = match session.style {
        ReplyStyle::Simple => Shape::Simple,
        ReplyStyle::Structured => Shape::Structured,
        ReplyStyle::Extended => Shape::Extended,
    };
    ensure!(shape == view.shape, "{shape:?} where the client expects {:?}", view.shape);
    ensure!(session.tls == view.tls, "TLS: {}", session.tls);
    ensure!(view.policy.tls != TlsMode::Require || session.tls, "an export without TLS");
    let granted = view.allocation == Some(session.export.handle);
    ensure!(
        session.context == granted.then_some(1),
        "context {:?} where the client selected {:?}",
        session.context,
        view.allocation
    );
    ensure!(!by_name || !session.block_size_requested, "block sizes were not requested");
    let df = session.flags.0 & 0x80 != 0;
    ensure!(df == (shape != Shape::Simple), "flags {:#x} on {shape:?}", session.flags.0);
    Ok(())
}
