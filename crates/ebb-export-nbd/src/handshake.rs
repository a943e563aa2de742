//! The handshake of a connection, from the greeting to the transmission phase.
//!
//! Implements the sections "Fixed newstyle negotiation", "TLS support" and "Option types" of the
//! protocol. [`Handshake`] is a state machine without I/O and clock: it consumes bytes, appends replies to
//! a buffer, and a [`HandshakeStep`] says what to do next. The caller owns the socket, sends the contents of the
//! buffer after each step, runs TLS, and limits the time of the handshake.
//!
//! # Invariants, whatever a client sends
//! - Nothing is kept of an option that is refused: its payload is skipped, whatever its announced
//!   length. An option that is read whole has at most [`HandshakeLimits::option_bytes_max`] bytes.
//! - One step appends at most the replies to one option.
//! - A handshake is bounded: after [`HandshakeLimits::options_max`] options or [`HandshakeLimits::bytes_max`] bytes, whichever
//!   comes first, the connection is closed.
//! - Plain text that arrived with `NBD_OPT_STARTTLS` is never interpreted as an option under TLS, and
//!   everything negotiated before TLS is discarded.
//! - After an error, an abort or the start of transmission the state machine consumes no more input.

mod export;
mod refusal;
mod replies;
mod request;
#[cfg(test)]
mod tests;

pub use export::{BlockSizes, ExportCapabilities, ExportInfo, Exports};

use crate::proto::{
    ClientFlags, OPTION_HEADER_LEN, Reader, ReplyStyle, STRING_MAX, TransmissionFlags, context,
    info, magic, option,
};
use refusal::{
    CHUNKS_NEEDED, EXTENDED_ALREADY, NO_DATA_EXPECTED, OptionRefusal, SHUTTING_DOWN, TLS_ALREADY,
    TLS_OFF, TLS_REQUIRED, TOO_BIG, UNSUPPORTED,
};
use replies::Replies;
use request::{ContextRequest, InfoRequest};

/// Whether TLS is offered, section "Server-side requirements" of "TLS support".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// NOTLS: `NBD_OPT_STARTTLS` is refused.
    #[default]
    Off,
    /// SELECTIVETLS with no export that requires it: the client may start TLS.
    On,
    /// FORCEDTLS: before TLS, all options except those that start TLS or abort are refused.
    Require,
}

/// What a client may do before it has chosen an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandshakePolicy {
    /// Whether TLS is offered.
    pub tls: TlsMode,
    /// Limits on one handshake.
    pub limits: HandshakeLimits,
}

/// Limits on one handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeLimits {
    /// Longest option payload that is read, in bytes; a longer one is skipped and refused.
    pub option_bytes_max: u32,
    /// Options before the connection is closed.
    pub options_max: u32,
    /// Bytes, skipped ones included, before the connection is closed.
    pub bytes_max: u64,
    /// Queries in one metadata context option.
    pub queries_max: u32,
}

impl Default for HandshakeLimits {
    /// 64 KiB per option, 65,536 options, 16 MiB in all, 128 queries.
    ///
    /// A client that lists a server in one connection sends two options per export
    /// (`qemu-nbd --list` does): the number of options suffices for 32,000 exports with names of 200 bytes.
    fn default() -> Self {
        Self {
            option_bytes_max: 64 << 10,
            options_max: 1 << 16,
            bytes_max: 16 << 20,
            queries_max: 128,
        }
    }
}

/// What to do after [`Handshake::advance`]. In every case, send the output first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeStep {
    /// Append more received bytes to those not consumed, then advance again.
    NeedMore,
    /// A message was processed: advance again with the bytes not consumed, before receiving more.
    Again,
    /// Do the TLS handshake on the connection, then call [`Handshake::tls_established`].
    StartTls,
    /// The client sent `NBD_OPT_ABORT`: close the connection.
    Abort,
    /// The transmission phase begins with the bytes not consumed.
    Transmission(Session),
}

/// The result of a handshake; valid for the whole transmission phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// The export, as it was described to the client.
    pub export: ExportInfo,
    /// The transmission flags, as they were sent to the client.
    pub flags: TransmissionFlags,
    /// The shape of requests and replies.
    pub style: ReplyStyle,
    /// The number of the context that the client selected for this export: `base:allocation`, or what has changed since a
    /// snapshot.
    pub context: Option<u32>,
    /// The snapshot, if that is the context.
    pub changed_since: Option<String>,
    /// The client requested the block sizes, and so must observe them.
    pub block_size_requested: bool,
    /// `NBD_FLAG_C_NO_ZEROES` was negotiated. (Affects `NBD_OPT_EXPORT_NAME` only.)
    pub no_zeroes: bool,
    /// The connection uses TLS.
    pub tls: bool,
}

/// Why a connection must be closed during its handshake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// "Client flags": unknown ones mean the connection must be dropped.
    #[error("client set unknown handshake flags {0:#x}; it speaks another version of NBD")]
    UnknownClientFlags(u32),
    /// An option did not start with `IHAVEOPT`.
    #[error(
        "client sent {0:#018x} where an NBD option starts; it is not an NBD client, or lost synchronization"
    )]
    BadMagic(u64),
    /// "Newstyle negotiation": without fixed newstyle only `NBD_OPT_EXPORT_NAME` is valid.
    #[error("client sent option {0} without negotiating fixed newstyle; upgrade the client")]
    NotFixedNewstyle(u32),
    /// The only possible error reply to `NBD_OPT_EXPORT_NAME` is to close the connection.
    #[error("client requested export {0:?}, which does not exist; check the volume names")]
    UnknownExport(String),
    /// The export of `NBD_OPT_EXPORT_NAME` has another writer, or too many clients.
    #[error("client requested an export that is not available: {0}")]
    Busy(String),
    /// The name in `NBD_OPT_EXPORT_NAME` is too long, not UTF-8, or has a NUL in it.
    #[error("client requested an export by a name that is too long or not UTF-8")]
    BadExportName,
    /// `NBD_OPT_EXPORT_NAME` before TLS where TLS is required.
    #[error("client requested an export without TLS, which is required; enable TLS in the client")]
    TlsRequired,
    /// Plain text followed `NBD_OPT_STARTTLS`.
    #[error(
        "client sent plain text after its request for TLS; this may be an attempt to inject commands"
    )]
    PlaintextAfterStartTls,
    /// `NBD_OPT_EXPORT_NAME` after extended headers were negotiated.
    #[error(
        "client used NBD_OPT_EXPORT_NAME after negotiating extended headers; NBD_OPT_GO is required"
    )]
    ExportNameAfterExtendedHeaders,
    /// [`HandshakeLimits::options_max`] was reached.
    #[error("client sent more than {0} options without choosing an export")]
    TooManyOptions(u32),
    /// [`HandshakeLimits::bytes_max`] would be passed.
    #[error("client sent, or announced, more than {0} bytes without choosing an export")]
    TooManyBytes(u64),
    /// `NBD_OPT_EXPORT_NAME` while the server is shutting down.
    #[error("client requested an export while the server is shutting down")]
    ShuttingDown,
    /// The caller continued after the end, or called methods out of order.
    #[error("the handshake has ended; the connection should have been closed")]
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum HandshakeState {
    /// Waiting for the client's flags.
    Flags,
    /// Waiting for an option.
    Options,
    /// Skipping the rest of the payload of `option`, then refusing it.
    Skipping { option: u32, left: u32, refusal: OptionRefusal },
    /// `NBD_OPT_STARTTLS` was acknowledged.
    AwaitingTls,
    /// Completed or failed.
    Ended,
}

/// How an option is processed, decided from its header alone.
enum OptionPlan {
    /// Wait for the whole payload, then reply.
    Reply,
    /// Skip the payload, then refuse.
    Refuse(OptionRefusal),
    /// Acknowledge and wait for TLS.
    StartTls,
    /// Acknowledge and end, whatever the payload.
    Abort,
}

/// The server's side of one connection's handshake. See the [module](self).
#[derive(Debug)]
pub struct Handshake {
    policy: HandshakePolicy,
    state: HandshakeState,
    fixed_newstyle: bool,
    no_zeroes: bool,
    tls_active: bool,
    shutting_down: bool,
    options: u32,
    bytes: u64,
    style: ReplyStyle,
    /// Canonical name of the export for which a context was selected last; and the snapshot, if it is not
    /// `base:allocation`.
    context_for: Option<(String, Option<String>)>,
}

impl Handshake {
    /// A handshake in which nothing has been exchanged yet.
    #[must_use]
    pub fn new(policy: HandshakePolicy) -> Self {
        Self {
            policy,
            state: HandshakeState::Flags,
            fixed_newstyle: false,
            no_zeroes: false,
            tls_active: false,
            shutting_down: false,
            options: 0,
            bytes: 0,
            style: ReplyStyle::Simple,
            context_for: None,
        }
    }

    /// Appends the first bytes of the connection, [`crate::proto::GREETING_LEN`] of them.
    pub fn greeting(&self, out: &mut Vec<u8>) {
        replies::greeting(out);
    }

    /// The most input bytes that one option needs at once: header and payload.
    #[must_use]
    pub fn input_max(&self) -> usize {
        usize::try_from(self.policy.limits.option_bytes_max.max(EXPORT_NAME_MAX))
            .unwrap_or(usize::MAX)
            .saturating_add(OPTION_HEADER_LEN)
    }

    /// From now on the reply to every option except `NBD_OPT_ABORT` is `NBD_REP_ERR_SHUTDOWN`.
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
    }

    /// To be called when TLS is established, after [`HandshakeStep::StartTls`]. Everything negotiated before is
    /// discarded; the limits count on.
    ///
    /// # Errors
    /// [`HandshakeError::Ended`] if the handshake did not wait for TLS.
    pub fn tls_established(&mut self) -> Result<(), HandshakeError> {
        if self.state != HandshakeState::AwaitingTls {
            self.state = HandshakeState::Ended;
            return Err(HandshakeError::Ended);
        }
        self.style = ReplyStyle::Simple;
        self.context_for = None;
        self.tls_active = true;
        self.state = HandshakeState::Options;
        Ok(())
    }

    /// Processes at most one message from the front of `input` and appends replies to `out`. Returns the number
    /// of bytes consumed, and what to do next.
    ///
    /// # Errors
    /// The handshake has ended, and the connection must be closed after `out` has been sent.
    pub fn advance(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(usize, HandshakeStep), HandshakeError> {
        let result = match self.state {
            HandshakeState::Flags => self.client_flags(input),
            HandshakeState::Options => self.option(input, exports, out),
            HandshakeState::Skipping { .. } => Ok(self.skip(input, out)),
            HandshakeState::AwaitingTls if input.is_empty() => Ok((0, HandshakeStep::StartTls)),
            HandshakeState::AwaitingTls => Err(HandshakeError::PlaintextAfterStartTls),
            HandshakeState::Ended => Err(HandshakeError::Ended),
        };
        if result.is_err() {
            self.state = HandshakeState::Ended;
        }
        result
    }

    /// "Client flags".
    fn client_flags(&mut self, input: &[u8]) -> Result<(usize, HandshakeStep), HandshakeError> {
        let Some(flags) = Reader::new(input).u32().map(ClientFlags) else {
            return Ok((0, HandshakeStep::NeedMore));
        };
        let unknown = flags.beyond(ClientFlags::KNOWN);
        if !unknown.is_none() {
            return Err(HandshakeError::UnknownClientFlags(unknown.0));
        }
        self.fixed_newstyle = flags.contains(ClientFlags::FIXED_NEWSTYLE);
        self.no_zeroes = flags.contains(ClientFlags::NO_ZEROES);
        self.state = HandshakeState::Options;
        Ok((size_of::<u32>(), HandshakeStep::Again))
    }

    fn option(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(usize, HandshakeStep), HandshakeError> {
        let mut reader = Reader::new(input);
        match reader.u64() {
            None => return Ok((0, HandshakeStep::NeedMore)),
            Some(magic::OPTION) => {}
            Some(other) => return Err(HandshakeError::BadMagic(other)),
        }
        let (Some(option), Some(length)) = (reader.u32(), reader.u32()) else {
            return Ok((0, HandshakeStep::NeedMore));
        };
        match self.plan(option, length)? {
            OptionPlan::Reply => {
                let Some(payload) = usize::try_from(length).ok().and_then(|len| reader.bytes(len))
                else {
                    return Ok((0, HandshakeStep::NeedMore));
                };
                self.count(length);
                let step = self.reply(option, payload, exports, out)?;
                Ok((OPTION_HEADER_LEN + payload.len(), step))
            }
            OptionPlan::Refuse(refusal) => {
                self.count(length);
                if option == option::SET_META_CONTEXT {
                    // The protocol: "including when this command fails".
                    self.context_for = None;
                }
                self.state = HandshakeState::Skipping { option, left: length, refusal };
                let (skipped, step) = self.skip(&input[OPTION_HEADER_LEN..], out);
                Ok((OPTION_HEADER_LEN + skipped, step))
            }
            OptionPlan::StartTls if !reader.is_empty() => {
                Err(HandshakeError::PlaintextAfterStartTls)
            }
            OptionPlan::StartTls => {
                self.count(length);
                Replies::to(option, out).ack();
                self.state = HandshakeState::AwaitingTls;
                Ok((OPTION_HEADER_LEN, HandshakeStep::StartTls))
            }
            OptionPlan::Abort => {
                Replies::to(option, out).ack();
                self.state = HandshakeState::Ended;
                Ok((OPTION_HEADER_LEN, HandshakeStep::Abort))
            }
        }
    }

    /// Decides from its header how an option is processed. Changes nothing: it is called again
    /// while the payload is incomplete.
    fn plan(&self, option: u32, length: u32) -> Result<OptionPlan, HandshakeError> {
        let limits = self.policy.limits;
        if self.options >= limits.options_max {
            return Err(HandshakeError::TooManyOptions(limits.options_max));
        }
        if option == option::ABORT && self.fixed_newstyle {
            return Ok(OptionPlan::Abort);
        }
        if message_len(length) > limits.bytes_max.saturating_sub(self.bytes) {
            return Err(HandshakeError::TooManyBytes(limits.bytes_max));
        }
        let needs_tls = self.policy.tls == TlsMode::Require && !self.tls_active;
        if option == option::EXPORT_NAME {
            return self.plan_export_name(length, needs_tls).map(|()| OptionPlan::Reply);
        }
        if !self.fixed_newstyle {
            return Err(HandshakeError::NotFixedNewstyle(option));
        }
        if self.shutting_down {
            return Ok(OptionPlan::Refuse(SHUTTING_DOWN));
        }
        Ok(match option {
            option::STARTTLS if length > 0 => OptionPlan::Refuse(NO_DATA_EXPECTED),
            option::STARTTLS if self.tls_active => OptionPlan::Refuse(TLS_ALREADY),
            option::STARTTLS if self.policy.tls == TlsMode::Off => OptionPlan::Refuse(TLS_OFF),
            option::STARTTLS => OptionPlan::StartTls,
            _ if needs_tls => OptionPlan::Refuse(TLS_REQUIRED),
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS if length > 0 => {
                OptionPlan::Refuse(NO_DATA_EXPECTED)
            }
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => OptionPlan::Reply,
            option::INFO | option::GO | option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                if length > limits.option_bytes_max {
                    OptionPlan::Refuse(TOO_BIG)
                } else {
                    OptionPlan::Reply
                }
            }
            _ => OptionPlan::Refuse(UNSUPPORTED),
        })
    }

    /// `NBD_OPT_EXPORT_NAME` has no error reply: an error closes the connection.
    fn plan_export_name(&self, length: u32, needs_tls: bool) -> Result<(), HandshakeError> {
        if self.shutting_down {
            Err(HandshakeError::ShuttingDown)
        } else if needs_tls {
            Err(HandshakeError::TlsRequired)
        } else if self.style == ReplyStyle::Extended {
            Err(HandshakeError::ExportNameAfterExtendedHeaders)
        } else if length > EXPORT_NAME_MAX {
            Err(HandshakeError::BadExportName)
        } else {
            Ok(())
        }
    }

    fn count(&mut self, length: u32) {
        self.options += 1;
        self.bytes += message_len(length);
    }

    fn skip(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, HandshakeStep) {
        let HandshakeState::Skipping { option, left, ref refusal } = self.state else {
            return (0, HandshakeStep::NeedMore);
        };
        let available = u32::try_from(input.len()).unwrap_or(u32::MAX);
        let left_after = left.saturating_sub(available);
        if left_after > 0 {
            let refusal = refusal.clone();
            self.state = HandshakeState::Skipping { option, left: left_after, refusal };
            return (input.len(), HandshakeStep::NeedMore);
        }
        Replies::to(option, out).refuse(refusal);
        self.state = HandshakeState::Options;
        (usize::try_from(left).unwrap_or(input.len()), HandshakeStep::Again)
    }

    /// Processes an option whose payload is complete.
    fn reply(
        &mut self,
        option: u32,
        payload: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<HandshakeStep, HandshakeError> {
        if option == option::EXPORT_NAME {
            return self.export_name(payload, exports, out);
        }
        let mut replies = Replies::to(option, out);
        let done = match option {
            option::LIST => {
                exports.list(&mut |name, description| replies.server(name, description));
                Ok(())
            }
            option::STRUCTURED_REPLY if self.style == ReplyStyle::Extended => Err(EXTENDED_ALREADY),
            option::STRUCTURED_REPLY => {
                self.style = ReplyStyle::Structured;
                Ok(())
            }
            option::EXTENDED_HEADERS => {
                self.style = ReplyStyle::Extended;
                Ok(())
            }
            option::INFO => self.describe(payload, exports, &mut replies, false).map(|_| ()),
            option::GO => match self.describe(payload, exports, &mut replies, true) {
                Ok((export, block_size_requested)) => {
                    replies.ack();
                    return Ok(self.begin(export, block_size_requested));
                }
                Err(refusal) => Err(refusal),
            },
            option::LIST_META_CONTEXT => self.list_contexts(payload, exports, &mut replies),
            option::SET_META_CONTEXT => self.set_contexts(payload, exports, &mut replies),
            _ => Err(UNSUPPORTED),
        };
        match done {
            Ok(()) => replies.ack(),
            Err(refusal) => replies.refuse(&refusal),
        }
        Ok(HandshakeStep::Again)
    }

    /// `NBD_OPT_EXPORT_NAME`
    fn export_name(
        &mut self,
        payload: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<HandshakeStep, HandshakeError> {
        let name = request::string(payload).map_err(|_| HandshakeError::BadExportName)?;
        let Some(export) = exports.lookup(name) else {
            let shown = name.chars().take(LOGGED_NAME_MAX).collect();
            return Err(HandshakeError::UnknownExport(shown));
        };
        if let Some(why) = exports.busy(name) {
            return Err(HandshakeError::Busy(why));
        }
        replies::export_name(&export, self.style, self.no_zeroes, out);
        Ok(self.begin(export, false))
    }

    /// `NBD_OPT_INFO`, and the first half of `NBD_OPT_GO`: returns the export, and whether the client
    /// requested its block sizes.
    fn describe(
        &self,
        payload: &[u8],
        exports: &dyn Exports,
        replies: &mut Replies<'_>,
        enter: bool,
    ) -> Result<(ExportInfo, bool), OptionRefusal> {
        let request = InfoRequest::parse(payload)?;
        let export = exports
            .lookup(request.name)
            .ok_or_else(|| OptionRefusal::of_export(exports, request.name))?;
        if enter && let Some(why) = exports.busy(request.name) {
            return Err(refusal::busy(why));
        }
        replies.info_export(&export, self.style);
        if request.wants_name {
            replies.info_text(info::NAME, &export.name);
        }
        if request.wants_description && !export.description.is_empty() {
            replies.info_text(info::DESCRIPTION, &export.description);
        }
        replies.info_block_size(&export);
        Ok((export, request.wants_block_size))
    }

    /// `NBD_OPT_LIST_META_CONTEXT`
    fn list_contexts(
        &self,
        payload: &[u8],
        exports: &dyn Exports,
        replies: &mut Replies<'_>,
    ) -> Result<(), OptionRefusal> {
        let request = self.context_request(payload)?;
        let export = exports
            .lookup(request.name)
            .ok_or_else(|| OptionRefusal::of_export(exports, request.name))?;
        // "The metadata context ID in these replies is reserved and SHOULD be set to zero".
        if request.queries == 0 || request.names_allocation || request.names_base {
            replies.context(0, context::ALLOCATION, "");
        }
        for snapshot in &export.snapshots {
            let is_named = request.bitmap == Some(snapshot.as_str());
            if request.queries == 0 || request.names_bitmaps || is_named {
                replies.context(0, context::BITMAP, snapshot);
            }
        }
        Ok(())
    }

    /// `NBD_OPT_SET_META_CONTEXT`
    fn set_contexts(
        &mut self,
        payload: &[u8],
        exports: &dyn Exports,
        replies: &mut Replies<'_>,
    ) -> Result<(), OptionRefusal> {
        self.context_for = None;
        let request = self.context_request(payload)?;
        let export = exports
            .lookup(request.name)
            .ok_or_else(|| OptionRefusal::of_export(exports, request.name))?;
        // One is selected: a client that asks for a bitmap wants it.
        let bitmap = request.bitmap.filter(|name| export.snapshots.iter().any(|own| own == name));
        if let Some(snapshot) = bitmap {
            replies.context(context::BITMAP_ID, context::BITMAP, snapshot);
            self.context_for = Some((export.name, Some(snapshot.to_owned())));
        } else if request.names_allocation {
            replies.context(context::ALLOCATION_ID, context::ALLOCATION, "");
            self.context_for = Some((export.name, None));
        }
        Ok(())
    }

    fn context_request<'a>(&self, payload: &'a [u8]) -> Result<ContextRequest<'a>, OptionRefusal> {
        if !self.style.is_chunked() {
            return Err(CHUNKS_NEEDED);
        }
        ContextRequest::parse(payload, self.policy.limits.queries_max)
    }

    fn begin(&mut self, export: ExportInfo, block_size_requested: bool) -> HandshakeStep {
        self.state = HandshakeState::Ended;
        let selected = self.context_for.take().filter(|(name, _)| *name == export.name);
        let context = selected.as_ref().map(|(_, snapshot)| match snapshot {
            None => context::ALLOCATION_ID,
            Some(_) => context::BITMAP_ID,
        });
        HandshakeStep::Transmission(Session {
            flags: export.transmission_flags(self.style),
            style: self.style,
            context,
            changed_since: selected.and_then(|(_, snapshot)| snapshot),
            block_size_requested,
            no_zeroes: self.no_zeroes,
            tls: self.tls_active,
            export,
        })
    }
}

/// Characters of a name quoted in an error.
const LOGGED_NAME_MAX: usize = 256;

/// Longest payload of `NBD_OPT_EXPORT_NAME`; read whole whatever the limits.
#[expect(clippy::cast_possible_truncation, reason = "4096 fits")]
const EXPORT_NAME_MAX: u32 = STRING_MAX as u32;

/// Bytes of an option on the wire.
fn message_len(length: u32) -> u64 {
    OPTION_HEADER_LEN as u64 + u64::from(length)
}
