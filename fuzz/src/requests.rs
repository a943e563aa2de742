//! Conversations in the transmission phase.

use super::choices::Choices;
use super::client::{Reply, Request, Shape, What, Wire};
use super::{Finding, ensure};
use ebb_export_nbd::decode::{Decoded, Fatal, NbdRequest, RequestHeader, decode_request};
use ebb_export_nbd::handshake::{BlockSizes, ExportCapabilities, ExportInfo, Session};
use ebb_export_nbd::proto::{Errno, ExtentState, ReplyStyle};
use ebb_export_nbd::reply::{ExtentList, ReplyTo, zero_runs};

/// How requests came out; to see that the fuzzer gets everywhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Requests that may be carried out.
    pub accepted: u64,
    /// Requests that got an error.
    pub refused: u64,
    /// Connections that were broken off.
    pub closed: u64,
}

/// What the client knows of the connection.
#[derive(Clone, Copy, Debug)]
struct View {
    shape: Shape,
    size: u64,
    block: u64,
    payload_max: u64,
    /// Transmission flags as they were sent.
    flags: u16,
    context: bool,
}

/// Chooses a session and its requests from the input; `check` selects what is checked in addition
/// to the decoding and the replies.
pub fn run(
    check: impl Fn(&RequestHeader, &Session) -> Result<NbdRequest, Errno>,
    data: &[u8],
) -> Result<Tally, Finding> {
    let mut choices = Choices::new(data);
    let (session, view) = choose_session(&mut choices);
    let mut tally = Tally::default();
    let mut stream = Vec::new();
    while !choices.is_exhausted() {
        choose_request(&mut choices, &view, &mut stream);
    }
    let mut fed = 0;
    let mut skip = 0;
    let mut at = 0;
    // What arrived is stream[..fed]; requests are decoded at `at`.
    loop {
        let passed = skip.min(fed - at);
        at += passed;
        skip -= passed;
        let arrived = &stream[at..fed];
        let decoded = match decode_request(&session, arrived) {
            Ok(decoded) => decoded,
            Err(fatal) => {
                judge_fatal(fatal, arrived, &view)?;
                tally.closed += 1;
                return Ok(tally);
            }
        };
        let len = if view.shape == Shape::Extended { 32 } else { 28 };
        match decoded {
            Decoded::NeedMore(needed) => {
                ensure!(needed == len && arrived.len() < len, "{needed} of {}", arrived.len());
                if fed == stream.len() {
                    return Ok(tally);
                }
                // Cut anywhere, but through a long payload in long strides.
                fed = stream.len().min(fed + 1 + fed % 61 + skip / 2);
            }
            Decoded::Request(header, consumed) => {
                ensure!(consumed == len && consumed <= arrived.len(), "{consumed} bytes consumed");
                let request = judge_header(&header, arrived, &view)?;
                at += consumed;
                skip = usize::try_from(header.payload_len).unwrap_or(usize::MAX);
                let verdict = check(&header, &session);
                judge_verdict(&verdict, &request, &view)?;
                match verdict {
                    Ok(NbdRequest::Disconnect) => return Ok(tally),
                    Ok(operation) => {
                        tally.accepted += 1;
                        judge_replies(operation, &header, &request, &session, &view)?;
                    }
                    Err(errno) => {
                        tally.refused += 1;
                        judge_error(errno, &header, &request, &session, &view)?;
                    }
                }
            }
        }
    }
}

fn choose_session(choices: &mut Choices<'_>) -> (Session, View) {
    let (style, shape) = choices.pick(&[
        (ReplyStyle::Simple, Shape::Simple),
        (ReplyStyle::Structured, Shape::Structured),
        (ReplyStyle::Extended, Shape::Extended),
    ]);
    // All but read-only, most likely.
    let mut bits = !1_u16;
    for _ in 0..2 {
        if choices.rarely() {
            bits ^= 1 << choices.below(9);
        }
    }
    let bit = |number: u32| bits >> number & 1 == 1;
    let capabilities = ExportCapabilities {
        read_only: bit(0),
        flush: bit(1),
        fua: bit(2),
        trim: bit(3),
        write_zeroes: bit(4),
        fast_zero: bit(5),
        multi_conn: bit(6),
        cache: bit(7),
        rotational: bit(8),
    };
    let size = if choices.rarely() {
        choices.pick(&[0, 512, 1000, u64::MAX])
    } else {
        choices.pick(&[1 << 20, 1 << 30, 1 << 45, !0xffff])
    };
    let (block, payload_max) = if choices.rarely() {
        (1 << 16, 1 << 16)
    } else {
        choices.pick(&[(512, 1 << 25), (1, 1 << 25), (512, 4096), (4096, 1 << 26)])
    };
    let block_sizes = BlockSizes::new(block, 65536.min(payload_max), payload_max);
    let export = ExportInfo {
        snapshots: Vec::new(),
        handle: 0,
        name: String::new(),
        description: String::new(),
        size,
        capabilities,
        block: block_sizes.unwrap_or_default(),
    };
    let context = style.is_chunked() && !choices.rarely();
    let session = Session {
        flags: export.transmission_flags(style),
        style,
        context: context.then_some(1),
        changed_since: None,
        block_size_requested: true,
        no_zeroes: true,
        tls: false,
        export,
    };
    let view = View {
        shape,
        size,
        block: u64::from(session.export.block.minimum()),
        payload_max: u64::from(session.export.block.maximum_payload()),
        flags: session.flags.0,
        context,
    };
    (session, view)
}

/// What clients write. It looks like a request's first byte, repeated.
static PAYLOAD: [u8; 1 << 17] = [0x25; 1 << 17];

/// Appends a request, most likely a valid one, and its payload.
fn choose_request(choices: &mut Choices<'_>, view: &View, stream: &mut Vec<u8>) {
    let command = choices.pick(&[0, 1, 0, 1, 3, 4, 5, 6, 7]);
    let extended = view.shape == Shape::Extended;
    let blocks = view.size / view.block;
    let (mut offset, mut length) = (0, 0);
    if command != 3 && blocks > 0 {
        let first = choices.number() % blocks;
        offset = first * view.block;
        let most = (view.payload_max / view.block).min(blocks - first);
        length = (1 + u64::from(choices.byte() % 4)).min(most) * view.block;
    }
    let mut flags = match command {
        0 if view.flags & 0x80 != 0 && choices.often() => 4,
        1 if extended => 0x20,
        6 => {
            choices.pick(&[0, 2]) | if view.flags & 0x800 == 0 { 0 } else { choices.pick(&[0, 16]) }
        }
        7 => choices.pick(&[0, 8]),
        _ => 0,
    };
    if view.flags & 8 != 0 && choices.often() {
        flags |= 1;
    }
    let mut request = Request { flags, command, cookie: choices.number(), offset, length };
    if choices.rarely() {
        lie(&mut request, choices, view);
    }
    let mut bytes = request.encode(view.shape);
    if choices.rarely() && choices.often() {
        let at = choices.below(bytes.len());
        bytes[at] ^= 1 << choices.below(8);
    }
    stream.extend(bytes);
    let carries = if extended { request.flags & 0x20 != 0 } else { request.command == 1 };
    if carries {
        // A client that announces much need not send it for the server to go wrong.
        let payload = usize::try_from(request.length).unwrap_or(0).min(PAYLOAD.len());
        stream.extend_from_slice(&PAYLOAD[..payload]);
    }
}

/// One thing wrong, or on the edge of it.
fn lie(request: &mut Request, choices: &mut Choices<'_>, view: &View) {
    let end = view.size;
    match choices.below(9) {
        0 => request.offset = end.wrapping_sub(view.block),
        1 => request.offset = end,
        2 => request.length = end.wrapping_sub(request.offset),
        3 => request.length = end.wrapping_sub(request.offset).wrapping_add(view.block),
        // So that offset + length wraps around to something small.
        4 => request.offset = 0_u64.wrapping_sub(request.length & !511).wrapping_add(512),
        5 => request.length = choices.pick(&[0, 1, 1 << 25, 1 << 26, 1 << 32, u64::MAX, 1 << 20]),
        6 => request.flags ^= 1 << choices.below(16),
        7 => request.command = u16::from(choices.byte()),
        _ => request.offset = choices.number(),
    }
}

/// "Request message", "Size constraints": when a connection may be broken off.
fn judge_fatal(fatal: Fatal, arrived: &[u8], view: &View) -> Result<(), Finding> {
    let magic = Wire(arrived).number(4)?;
    let right = if view.shape == Shape::Extended { 0x21e4_1c71 } else { 0x2560_9513 };
    match fatal {
        Fatal::BadMagic { found, .. } => {
            ensure!(u64::from(found) == magic && magic != right, "{fatal} for {magic:#x}");
        }
        Fatal::PayloadTooLong { length, .. } => {
            let request = Request::decode(view.shape, arrived)?;
            ensure!(request.is_some_and(|it| it.length == length), "{fatal} for {request:?}");
            ensure!(length > view.payload_max.max(1 << 25), "{fatal}, yet no attack");
        }
    }
    Ok(())
}

/// The header says what the bytes say.
fn judge_header(header: &RequestHeader, bytes: &[u8], view: &View) -> Result<Request, Finding> {
    let Some(request) = Request::decode(view.shape, bytes)? else {
        return Err(Finding(format!("{bytes:?} were taken for a request")));
    };
    let same = header.cookie == request.cookie
        && header.command.to_wire() == request.command
        && header.flags.0 == request.flags
        && header.offset == request.offset
        && header.length == request.length;
    ensure!(same, "{header:?} from {request:?}");
    let carries = if view.shape == Shape::Extended {
        request.flags & 0x20 != 0
    } else {
        request.command == 1
    };
    let payload = if carries { request.length } else { 0 };
    ensure!(u64::from(header.payload_len) == payload, "{header:?} carries {payload}");
    ensure!(payload <= view.payload_max.max(1 << 25), "{payload} bytes would be read");
    Ok(request)
}

/// "Request types", "Error values": what to make of a request, in wider numbers than its own.
fn expected_verdict(request: &Request, view: &View) -> Result<(), u64> {
    const PERM: u64 = 1;
    const INVAL: u64 = 22;
    const NOSPC: u64 = 28;
    const OVERFLOW: u64 = 75;
    let extended = view.shape == Shape::Extended;
    let offers = |bit: u32| view.flags >> bit & 1 == 1;
    let valid = match request.command {
        0 => u16::from(offers(7)) << 2,
        1 => u16::from(extended) << 5,
        2 => return Ok(()),
        3..=5 => 0,
        6 => 2 | u16::from(offers(11)) << 4,
        7 => 8,
        _ => return Err(INVAL),
    } | u16::from(offers(3));
    if request.flags & !valid != 0 || (extended && request.command == 1 && request.flags < 0x20) {
        return Err(INVAL);
    }
    if offers(1) && matches!(request.command, 1 | 4 | 6) {
        return Err(PERM);
    }
    let offered = match request.command {
        3 => offers(2),
        4 => offers(5),
        5 => offers(10),
        6 => offers(6),
        7 => view.context,
        _ => true,
    };
    let (offset, length) = (u128::from(request.offset), u128::from(request.length));
    if request.command == 3 {
        return if offered && offset + length == 0 { Ok(()) } else { Err(INVAL) };
    }
    if !offered || length == 0 {
        return Err(INVAL);
    }
    if offset + length > u128::from(view.size) {
        return Err(if matches!(request.command, 1 | 6) { NOSPC } else { INVAL });
    }
    let block = u128::from(view.block);
    if offset % block != 0 || length % block != 0 {
        return Err(INVAL);
    }
    // Clients that do not ask for the limit may assume 32 MiB.
    if request.command <= 1 && length > u128::from(view.payload_max.max(1 << 25)) {
        let chunked = request.command == 0 && view.shape != Shape::Simple;
        return Err(if chunked { OVERFLOW } else { INVAL });
    }
    Ok(())
}

fn judge_verdict(
    verdict: &Result<NbdRequest, Errno>,
    request: &Request,
    view: &View,
) -> Result<(), Finding> {
    let expected = expected_verdict(request, view);
    let given = verdict.map(|_| ()).map_err(|errno| u64::from(errno.to_wire()));
    ensure!(given == expected, "{verdict:?}, not {expected:?}, for {request:?} on {view:?}");
    let Ok(operation) = *verdict else {
        return Ok(());
    };
    let flag = |bit: u16| request.flags & bit != 0;
    let short = u32::try_from(request.length).unwrap_or(u32::MAX);
    let Request { offset, length, .. } = *request;
    let expected = match request.command {
        0 => NbdRequest::Read { offset, length: short, unfragmented: flag(4) },
        1 => NbdRequest::Write { offset, length: short, fua: flag(1) },
        2 => NbdRequest::Disconnect,
        3 => NbdRequest::Flush,
        4 => NbdRequest::Trim { offset, length, fua: flag(1) },
        5 => NbdRequest::Cache { offset, length },
        6 => NbdRequest::WriteZeroes {
            offset,
            length,
            fua: flag(1),
            no_hole: flag(2),
            fast: flag(16),
        },
        _ => NbdRequest::BlockStatus { offset, length, one: flag(8) },
    };
    ensure!(operation == expected, "{operation:?} for {request:?}");
    Ok(())
}

/// An error, in the one message the client waits for.
fn judge_error(
    errno: Errno,
    header: &RequestHeader,
    request: &Request,
    session: &Session,
    view: &View,
) -> Result<(), Finding> {
    let (front, message) = ReplyTo::new(session.style, header).error(errno, "why not");
    let bytes = [front.as_bytes(), message.as_bytes()].concat();
    let mut wire = Wire(&bytes);
    let reply = Reply::parse(&mut wire, view.shape, request)?;
    ensure!(reply.done && wire.0.is_empty(), "an error that does not end");
    let error = match reply.what {
        What::Simple(error) => error,
        What::Chunk(0x8001) => {
            let mut payload = Wire(reply.payload);
            let error = payload.number(4)?;
            let len = usize::try_from(payload.number(2)?).unwrap_or(usize::MAX);
            ensure!(payload.take(len)? == b"why not" && payload.0.is_empty(), "message lost");
            error
        }
        What::Chunk(kind) => return Err(Finding(format!("an error in a chunk of type {kind}"))),
    };
    ensure!(error == u64::from(errno.to_wire()), "{errno:?} sent as {error}");
    Ok(())
}

/// Replies to a request that succeeds, put together as a server would.
fn judge_replies(
    operation: NbdRequest,
    header: &RequestHeader,
    request: &Request,
    session: &Session,
    view: &View,
) -> Result<(), Finding> {
    let to = ReplyTo::new(session.style, header);
    match (operation, to.chunks()) {
        (NbdRequest::Read { offset, length, unfragmented: false }, Some(chunks)) => {
            // More data than this teaches nothing new.
            let data = some_data(header.cookie, length.min(16 << 10));
            let mut bytes = Vec::new();
            for run in zero_runs(&data, 4096) {
                let at = offset + u64::try_from(run.offset).unwrap_or(0);
                let len = u32::try_from(run.len).unwrap_or(0);
                if run.zero {
                    bytes.extend_from_slice(chunks.hole(at, len, false).as_bytes());
                } else {
                    bytes.extend_from_slice(chunks.data(at, len, false).as_bytes());
                    bytes.extend_from_slice(&data[run.offset..run.offset + run.len]);
                }
            }
            bytes.extend_from_slice(chunks.none().as_bytes());
            judge_content(&bytes, &data, request, view)
        }
        (NbdRequest::Read { offset, length, .. }, Some(chunks)) => {
            let data = some_data(header.cookie, length.min(16 << 10));
            let len = u32::try_from(data.len()).unwrap_or(0);
            let mut bytes = chunks.data(offset, len, true).as_bytes().to_vec();
            bytes.extend_from_slice(&data);
            judge_content(&bytes, &data, request, view)
        }
        (NbdRequest::BlockStatus { length, one, .. }, Some(chunks)) => {
            let mut extents = Vec::new();
            let limit = session.export.block.maximum_payload();
            let mut list = ExtentList::new(&mut extents, session.style, (length, one), limit, 32);
            let mut told: Vec<(u64, u64)> = Vec::new();
            let mut seed = header.cookie;
            // It continues after enough was described: that must be harmless.
            for _ in 0..40 {
                seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let (state, extent) = (seed >> 62, (seed >> 33) % (view.block * 2));
                list.push(extent, ExtentState(u32::try_from(state).unwrap_or(0)));
                match told.last_mut() {
                    Some((length, same)) if *same == state => *length += extent,
                    _ if extent > 0 => told.push((extent, state)),
                    _ => {}
                }
            }
            let count = list.finish();
            let mut bytes = chunks.block_status(1, count, true).as_bytes().to_vec();
            bytes.extend_from_slice(&extents);
            judge_status(&bytes, &told, request, view, one)
        }
        _ => {
            let front = to.success();
            let mut wire = Wire(front.as_bytes());
            let reply = Reply::parse(&mut wire, view.shape, request)?;
            let success = matches!(reply.what, What::Simple(0) | What::Chunk(0));
            ensure!(success && reply.done && wire.0.is_empty(), "{:?} for success", reply.what);
            ensure!(reply.payload.is_empty(), "success with a payload");
            Ok(())
        }
    }
}

/// Data with holes in it, the same for the same seed.
fn some_data(seed: u64, len: u32) -> Vec<u8> {
    let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
    for (number, block) in data.chunks_mut(4096).enumerate() {
        if seed >> (number % 64) & 1 == 1 {
            let last = block.len() - 1;
            block[usize::try_from(seed >> 32).unwrap_or(0) % (last + 1)] = 1;
        }
    }
    data
}

/// `NBD_CMD_READ`, "Structured replies": the chunks make up the data, once each byte.
fn judge_content(bytes: &[u8], data: &[u8], request: &Request, view: &View) -> Result<(), Finding> {
    let mut wire = Wire(bytes);
    let mut seen = Vec::new();
    loop {
        let reply = Reply::parse(&mut wire, view.shape, request)?;
        let mut payload = Wire(reply.payload);
        match reply.what {
            What::Chunk(0) => {
                ensure!(reply.done && reply.payload.is_empty(), "NONE is not the last chunk");
            }
            What::Chunk(kind @ (1 | 2)) => {
                let offset = payload.number(8)?;
                let expected = request.offset + u64::try_from(seen.len()).unwrap_or(0);
                ensure!(offset == expected, "content at {offset}, not {expected}");
                if kind == 1 {
                    ensure!(!payload.0.is_empty(), "content without a byte");
                    seen.extend_from_slice(payload.0);
                } else {
                    let len = payload.number(4)?;
                    ensure!(len > 0 && payload.0.is_empty(), "a hole of {len}");
                    seen.resize(seen.len() + usize::try_from(len).unwrap_or(0), 0);
                }
            }
            other => return Err(Finding(format!("{other:?} in reply to a READ"))),
        }
        if reply.done {
            break;
        }
    }
    ensure!(wire.0.is_empty(), "more behind the end of a reply");
    ensure!(seen == data, "the chunks are not the data");
    Ok(())
}

/// `NBD_REPLY_TYPE_BLOCK_STATUS` and its extended form: a prefix of what was described.
fn judge_status(
    bytes: &[u8],
    told: &[(u64, u64)],
    request: &Request,
    view: &View,
    one: bool,
) -> Result<(), Finding> {
    let mut wire = Wire(bytes);
    let reply = Reply::parse(&mut wire, view.shape, request)?;
    let extended = view.shape == Shape::Extended;
    ensure!(reply.what == What::Chunk(if extended { 6 } else { 5 }), "{:?}", reply.what);
    ensure!(reply.done && wire.0.is_empty(), "a status that does not end");
    let mut payload = Wire(reply.payload);
    ensure!(payload.number(4)? == 1, "status of another context");
    let size = if extended { 8 } else { 4 };
    let promised = if extended { Some(payload.number(4)?) } else { None };
    let (mut count, mut covered, mut told) = (0, 0_u128, told.iter());
    while !payload.0.is_empty() {
        let (length, state) = (payload.number(size)?, payload.number(size)?);
        (count, covered) = (count + 1, covered + u128::from(length));
        ensure!(length > 0, "an extent of nothing");
        if let Some((whole, as_state)) = told.next() {
            let last = payload.0.is_empty();
            ensure!(length == *whole || (last && length < *whole), "{length} described as {whole}");
            ensure!(state == *as_state, "{state} described as {as_state}");
        } else {
            ensure!(count == 1 && state == 0, "an extent that the volume does not have");
        }
    }
    ensure!(count > 0 && promised.is_none_or(|promised| promised == count), "{count} extents");
    ensure!(!one || count == 1, "{count} extents where one was requested");
    ensure!(covered <= u128::from(request.length), "{covered} bytes for {request:?}");
    Ok(())
}
