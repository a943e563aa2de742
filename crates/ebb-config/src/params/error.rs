//! Why a parameter cannot be read or set.

/// What sort of mistake a [`ParameterError`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterErrorKind {
    /// There is no parameter of this name.
    UnknownParameter,
    /// There is no volume of this name.
    UnknownVolume,
    /// There is no backing device of this name.
    UnknownBdi,
    /// The parameter applies to the daemon as a whole only.
    NotPerVolume,
    /// The parameter belongs to backing devices and none was named, or it does not and one was.
    NotPerBdi,
    /// No such group of limits.
    UnknownLimitGroup,
    /// Groups of limits do not have this parameter.
    NotPerLimitGroup,
    /// The value has the wrong type or form.
    InvalidValue,
    /// The value is outside its range.
    OutOfRange,
    /// The value conflicts with that of another parameter.
    Conflict,
}

impl ParameterErrorKind {
    /// The kind as a stable word for programs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UnknownParameter => "unknown_parameter",
            Self::UnknownVolume => "unknown_volume",
            Self::UnknownBdi => "unknown_bdi",
            Self::NotPerVolume => "not_per_volume",
            Self::NotPerBdi => "not_per_bdi",
            Self::UnknownLimitGroup => "unknown_limit_group",
            Self::NotPerLimitGroup => "not_per_limit_group",
            Self::InvalidValue => "invalid_value",
            Self::OutOfRange => "out_of_range",
            Self::Conflict => "conflict",
        }
    }
}

/// A parameter could not be read or set. Text that a client supplied is shortened and escaped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}; {remedy}")]
pub struct ParameterError {
    /// What sort of mistake it is.
    pub kind: ParameterErrorKind,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl ParameterError {
    pub(super) fn new(
        kind: ParameterErrorKind,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { kind, message: message.into(), remedy: remedy.into() }
    }
}
