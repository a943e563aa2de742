//! Error replies to options, with their messages for the client's user.
//!
//! Implements "Option reply types" of the protocol: every error may carry a message.

use std::borrow::Cow;

use super::Exports;
use crate::proto::option_reply;

/// A refusal of an option: an error type and a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OptionRefusal {
    /// One of the `NBD_REP_ERR_` values.
    pub(super) kind: u32,
    /// The message for the client's user.
    pub(super) message: Cow<'static, str>,
}

impl OptionRefusal {
    const fn new(kind: u32, message: &'static str) -> Self {
        Self { kind, message: Cow::Borrowed(message) }
    }

    /// For an export that is not found: it does not exist, or is not available now.
    pub(super) fn of_export(exports: &dyn Exports, name: &str) -> Self {
        match exports.refusal(name) {
            Some(why) => Self { kind: option_reply::ERR_UNKNOWN, message: Cow::Owned(why) },
            None => UNKNOWN_EXPORT,
        }
    }
}

/// For an export that cannot be used by a further client now.
pub(super) fn busy(why: String) -> OptionRefusal {
    OptionRefusal { kind: option_reply::ERR_POLICY, message: Cow::Owned(why) }
}

pub(super) const SHUTTING_DOWN: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_SHUTDOWN, "the server is shutting down");
pub(super) const NO_DATA_EXPECTED: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_INVALID, "this option takes no data");
pub(super) const TLS_ALREADY: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_INVALID, "TLS is already in use on this connection");
pub(super) const TLS_OFF: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_POLICY, "TLS is not enabled on this server");
pub(super) const TLS_REQUIRED: OptionRefusal = OptionRefusal::new(
    option_reply::ERR_TLS_REQD,
    "this server requires TLS; enable it in the client",
);
pub(super) const TOO_BIG: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_TOO_BIG, "the option is too long");
pub(super) const UNSUPPORTED: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_UNSUP, "this server does not support the option");
pub(super) const UNKNOWN_EXPORT: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_UNKNOWN, "there is no export of that name");
pub(super) const EXTENDED_ALREADY: OptionRefusal = OptionRefusal::new(
    option_reply::ERR_EXT_HEADER_REQD,
    "extended headers are already negotiated",
);
pub(super) const CHUNKS_NEEDED: OptionRefusal = OptionRefusal::new(
    option_reply::ERR_INVALID,
    "negotiate structured replies or extended headers before metadata contexts",
);
pub(super) const MALFORMED: OptionRefusal = OptionRefusal::new(
    option_reply::ERR_INVALID,
    "malformed option: its lengths do not add up to the length in its header",
);
pub(super) const BAD_STRING: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_INVALID, "a name or query must be UTF-8 without NUL");
pub(super) const LONG_STRING: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_TOO_BIG, "a name or query is longer than 4096 bytes");
pub(super) const MANY_QUERIES: OptionRefusal =
    OptionRefusal::new(option_reply::ERR_TOO_BIG, "too many queries in one option");
pub(super) const NO_NAMESPACE: OptionRefusal = OptionRefusal::new(
    option_reply::ERR_INVALID,
    "a query must start with a namespace and a colon",
);
