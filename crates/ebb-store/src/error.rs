//! What can go wrong with an operation: a kind to match, the context, the cause.

use std::fmt;
use std::io;
use std::sync::Arc;

/// What a caller may want to tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request is malformed (alignment, length).
    Invalid,
    /// The range is not within the volume.
    OutOfRange,
    /// A write to a read-only volume.
    ReadOnly,
    /// The store is full.
    NoSpace,
    /// The store cannot do this (or not in the way asked for).
    Unsupported,
    /// The store ended before the request did.
    Short,
    /// The volume is being closed.
    Closing,
    /// A flush failed before: changes since the last one that went well may be on no disk.
    Lost,
    /// Any other failure of the store.
    Io,
}

/// The operation an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names of the block operations say it")]
pub enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    Extents,
    Prefetch,
}

impl Operation {
    /// The name used in messages and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Discard => "discard",
            Operation::WriteZeroes => "write-zeroes",
            Operation::Extents => "extents",
            Operation::Prefetch => "prefetch",
        }
    }
}

/// A failed operation.
#[derive(Debug)]
pub struct BlockError {
    /// What a caller may match.
    pub kind: ErrorKind,
    /// The volume, once it is known.
    pub volume: Option<Arc<str>>,
    /// What was being done.
    pub operation: Operation,
    /// First byte of the range.
    pub offset: u64,
    /// Bytes of the range.
    pub length: u64,
    /// The cause, if the system gave one.
    pub source: Option<io::Error>,
}

impl BlockError {
    /// An error without a cause from below.
    pub fn new(kind: ErrorKind, operation: Operation, offset: u64, length: u64) -> BlockError {
        BlockError { kind, volume: None, operation, offset, length, source: None }
    }

    /// An error of the system, its kind taken from the error number.
    pub fn from_io(
        source: io::Error,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> BlockError {
        let kind = match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => ErrorKind::NoSpace,
            Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV) => ErrorKind::Unsupported,
            Some(libc::EROFS) => ErrorKind::ReadOnly,
            _ => ErrorKind::Io,
        };
        BlockError { kind, volume: None, operation, offset, length, source: Some(source) }
    }

    /// The message with its cause.
    pub fn full_text(&self) -> String {
        match &self.source {
            Some(source) => format!("{self}: {source}"),
            None => self.to_string(),
        }
    }

    fn remedy(&self) -> &'static str {
        match self.kind {
            ErrorKind::Invalid => "offset and length must be multiples of 512 bytes",
            ErrorKind::OutOfRange => "the range is not within the volume",
            ErrorKind::ReadOnly => "the volume is read-only",
            ErrorKind::NoSpace => "the store is full: free space on it, then retry",
            ErrorKind::Unsupported => "the store cannot do this",
            ErrorKind::Short => "the store is shorter than the volume: was it truncated?",
            ErrorKind::Closing => "the volume is being closed",
            ErrorKind::Lost => {
                "an earlier flush failed, and writes since the last good flush may be lost: mend the \
                 device, open the volume anew (remove and add it, or restart ebbd), and check the \
                 guest's file systems"
            }
            ErrorKind::Io => "the store failed",
        }
    }
}

impl fmt::Display for BlockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(volume) = &self.volume {
            write!(f, "volume {volume}: ")?;
        }
        let (operation, offset, length) = (self.operation.name(), self.offset, self.length);
        write!(f, "{operation} of {length} bytes at {offset}: {}", self.remedy())
    }
}

impl std::error::Error for BlockError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_apart_and_the_message_has_its_context() {
        let cause = io::Error::from_raw_os_error(libc::ENOSPC);
        let mut error = BlockError::from_io(cause, Operation::Write, 4096, 512);
        error.volume = Some("disk".into());
        assert_eq!(error.kind, ErrorKind::NoSpace);
        let text = error.to_string();
        assert_eq!(
            text,
            "volume disk: write of 512 bytes at 4096: the store is full: free space on it, then retry"
        );
        assert!(std::error::Error::source(&error).is_some());
    }
}
