//! Reasons of failed requests, as far as the caller's next step depends on them.

/// The class of an error; its kind for programs is [`ErrorBody::error`](crate::ErrorBody).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The request has a mistake.
    Invalid,
    /// It names something that does not exist.
    Unknown,
    /// It does not fit the present state.
    Conflict,
    /// It was attempted, and failed.
    Failed,
    /// It may succeed later.
    Busy,
    /// There is not enough memory for it.
    NoMemory,
}
