//! Connections that are kept for the daemon's successor, and what it has to know of them to continue them.
//!
//! # Invariants
//! - [`SessionState`] has all of a [`Session`] that a request, a reply or a log line depends on.
//! - Style, block sizes, names and flags are checked as in a handshake; the size is compared with that of the volume ([`still_has`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_io::Fd;
use serde::{Deserialize, Serialize};

use crate::handshake::{BlockSizes, ExportCapabilities, ExportInfo, Session};
use crate::proto::{ReplyStyle, TransmissionFlags};

/// The most bytes that were received of requests that were not begun.
const REST_MAX: usize = 64 << 20;
/// The longest name of an export or snapshot, bytes.
const NAME_MAX: usize = 4096;

/// A connection without requests in flight, of a client in the transmission phase.
#[derive(Debug)]
pub struct KeptConnection {
    pub(crate) socket: Fd,
    pub(crate) session: Session,
    /// Received bytes, from the beginning of a request.
    pub(crate) rest: Box<[u8]>,
    /// The identity of the volume's store, so that the client is not continued on another one.
    pub(crate) store: String,
}

/// The result of a connection's handshake, as one daemon tells it to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionState {
    /// The name of the export.
    pub export: String,
    /// The identity of its store.
    pub store: String,
    /// Its size, bytes, as the client knows it.
    pub size: u64,
    /// The transmission flags that were sent to the client.
    pub flags: u16,
    /// `simple`, `structured` or `extended`.
    pub style: String,
    /// Minimum, preferred and maximum block size, bytes.
    pub block: [u32; 3],
    /// Whether the client observes them.
    pub block_size_requested: bool,
    /// The number of the selected context.
    pub context: Option<u32>,
    /// The snapshot, if the context is what has changed since.
    pub changed_since: Option<String>,
    /// `NBD_FLAG_C_NO_ZEROES` was negotiated.
    pub no_zeroes: bool,
}

/// The state of a connection is not one that a handshake leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its {0} is not valid")]
pub struct InvalidState(&'static str);

const STYLES: [(ReplyStyle, &str); 3] = [
    (ReplyStyle::Simple, "simple"),
    (ReplyStyle::Structured, "structured"),
    (ReplyStyle::Extended, "extended"),
];

impl SessionState {
    fn of(session: &Session, store: &str) -> SessionState {
        let Session {
            export,
            flags,
            style,
            context,
            changed_since,
            block_size_requested,
            no_zeroes,
            tls: _,
        } = session;
        let name = STYLES.iter().find(|(one, _)| one == style).map_or("", |(_, name)| name);
        let block = export.block;
        SessionState {
            export: export.name.clone(),
            store: store.to_owned(),
            size: export.size,
            flags: flags.0,
            style: name.to_owned(),
            block: [block.minimum(), block.preferred(), block.maximum_payload()],
            block_size_requested: *block_size_requested,
            context: *context,
            changed_since: changed_since.clone(),
            no_zeroes: *no_zeroes,
        }
    }

    fn session(self) -> Result<Session, InvalidState> {
        let style = STYLES.iter().find(|(_, name)| *name == self.style);
        let (style, _) = *style.ok_or(InvalidState("style of replies"))?;
        let [minimum, preferred, maximum] = self.block;
        let block =
            BlockSizes::new(minimum, preferred, maximum).ok_or(InvalidState("block size"))?;
        let snapshots: Vec<String> = self.changed_since.iter().cloned().collect();
        let names = || snapshots.iter().chain([&self.export]);
        if names().any(|name| name.len() > NAME_MAX || name.contains('\0')) {
            return Err(InvalidState("name"));
        }
        let flags = TransmissionFlags(self.flags);
        let export = ExportInfo {
            snapshots,
            handle: 0,
            name: self.export,
            description: String::new(),
            size: self.size,
            capabilities: capabilities(flags),
            block,
        };
        if export.transmission_flags(style) != flags {
            return Err(InvalidState("set of flags"));
        }
        Ok(Session {
            export,
            flags,
            style,
            context: self.context,
            changed_since: self.changed_since,
            block_size_requested: self.block_size_requested,
            no_zeroes: self.no_zeroes,
            tls: false,
        })
    }
}

/// What an export with these flags can do.
fn capabilities(flags: TransmissionFlags) -> ExportCapabilities {
    type F = TransmissionFlags;
    ExportCapabilities {
        read_only: flags.contains(F::READ_ONLY),
        flush: flags.contains(F::SEND_FLUSH),
        fua: flags.contains(F::SEND_FUA),
        trim: flags.contains(F::SEND_TRIM),
        write_zeroes: flags.contains(F::SEND_WRITE_ZEROES),
        fast_zero: flags.contains(F::SEND_FAST_ZERO),
        multi_conn: flags.contains(F::CAN_MULTI_CONN),
        cache: flags.contains(F::SEND_CACHE),
        rotational: flags.contains(F::ROTATIONAL),
    }
}

/// Whether an export, as it is now, still has all that a client was told of it.
pub(crate) fn still_has(now: &ExportInfo, then: &Session) -> bool {
    let flags = now.transmission_flags(then.style);
    let writable = !flags.contains(TransmissionFlags::READ_ONLY);
    let was_writable = !then.flags.contains(TransmissionFlags::READ_ONLY);
    let offered = then.flags.0 & !TransmissionFlags::READ_ONLY.0;
    now.size >= then.export.size
        && (writable || !was_writable)
        && flags.0 & offered == offered
        && then.changed_since.as_ref().is_none_or(|name| now.snapshots.contains(name))
}

impl KeptConnection {
    /// A connection that a predecessor has kept.
    ///
    /// # Errors
    /// [`InvalidState`]: then `socket` was closed.
    pub fn new(
        socket: Fd,
        state: SessionState,
        rest: Box<[u8]>,
    ) -> Result<KeptConnection, InvalidState> {
        if rest.len() > REST_MAX {
            return Err(InvalidState("number of received bytes"));
        }
        let store = state.store.clone();
        Ok(KeptConnection { socket, session: state.session()?, rest, store })
    }

    /// The name of its volume.
    pub fn export(&self) -> &str {
        &self.session.export.name
    }

    /// Its socket.
    pub fn socket(&self) -> &Fd {
        &self.socket
    }

    /// What a successor has to know of it, beside the bytes of [`KeptConnection::rest`].
    pub fn state(&self) -> SessionState {
        SessionState::of(&self.session, &self.store)
    }

    /// The bytes that were received from the client and not used.
    pub fn rest(&self) -> &[u8] {
        &self.rest
    }
}

/// The connections of a server that are kept.
#[derive(Debug, Default)]
pub(crate) struct KeptConnections {
    wanted: AtomicBool,
    list: Mutex<Vec<KeptConnection>>,
}

impl KeptConnections {
    /// From now on connections are kept when the server stops.
    pub(crate) fn want(&self) {
        self.wanted.store(true, Ordering::SeqCst);
    }

    pub(crate) fn are_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst)
    }

    pub(crate) fn add(&self, connection: KeptConnection) {
        self.lock().push(connection);
    }

    pub(crate) fn take(&self) -> Vec<KeptConnection> {
        std::mem::take(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<KeptConnection>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(style: ReplyStyle, read_only: bool, context: Option<u32>) -> Session {
        let capabilities = ExportCapabilities {
            read_only,
            flush: true,
            fua: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            multi_conn: true,
            cache: true,
            rotational: false,
        };
        let export = ExportInfo {
            snapshots: vec!["monday".to_owned()],
            handle: 0,
            name: "disk".to_owned(),
            description: String::new(),
            size: 1 << 30,
            capabilities,
            block: BlockSizes::new(512, 4096, 32 << 20).unwrap(),
        };
        Session {
            flags: export.transmission_flags(style),
            export,
            style,
            context,
            changed_since: Some("monday".to_owned()),
            block_size_requested: true,
            no_zeroes: true,
            tls: false,
        }
    }

    #[test]
    fn a_session_is_the_same_after_it_was_passed_on() {
        for (style, _) in STYLES {
            for read_only in [false, true] {
                for context in [None, Some(0), Some(7)] {
                    let before = session(style, read_only, context);
                    let after = SessionState::of(&before, "").session().unwrap();
                    // What a read-only export could do is not told to clients.
                    let told = |session: &Session| Session {
                        export: ExportInfo {
                            capabilities: ExportCapabilities::default(),
                            ..session.export.clone()
                        },
                        ..session.clone()
                    };
                    assert_eq!(told(&after), told(&before));
                    assert!(still_has(&before.export, &after));
                }
            }
        }
    }

    #[test]
    fn a_state_that_no_handshake_leads_to_is_refused() {
        let valid = || SessionState::of(&session(ReplyStyle::Extended, false, None), "");
        assert!(valid().session().is_ok());
        let invalid = [
            SessionState { style: "other".to_owned(), ..valid() },
            SessionState { flags: 0, ..valid() },
            SessionState { flags: u16::MAX, ..valid() },
            SessionState { block: [3, 4096, 1 << 25], ..valid() },
            SessionState { export: "x".repeat(NAME_MAX + 1), ..valid() },
            SessionState { changed_since: Some("a\0b".to_owned()), ..valid() },
        ];
        for state in invalid {
            assert!(state.clone().session().is_err(), "{state:?}");
        }
    }

    #[test]
    fn an_export_that_lacks_what_a_client_was_told_is_noticed() {
        let then = session(ReplyStyle::Structured, false, None);
        let now = &then.export;
        assert!(still_has(&ExportInfo { size: now.size + 512, ..now.clone() }, &then));
        let lacks = [
            ExportInfo { size: now.size - 512, ..now.clone() },
            ExportInfo { snapshots: Vec::new(), ..now.clone() },
            ExportInfo {
                capabilities: ExportCapabilities { read_only: true, ..now.capabilities },
                ..now.clone()
            },
            ExportInfo {
                capabilities: ExportCapabilities { trim: false, ..now.capabilities },
                ..now.clone()
            },
        ];
        for export in lacks {
            assert!(!still_has(&export, &then), "{export:?}");
        }
        let reader = session(ReplyStyle::Structured, true, None);
        assert!(still_has(now, &reader), "a volume that can be written by now serves its readers");
    }
}
