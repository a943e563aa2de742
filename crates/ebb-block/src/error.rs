//! The error of a block operation: a kind to match, the context, the cause.

use std::fmt;
use std::io;
use std::sync::Arc;

/// The kinds of errors that callers distinguish.
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
    /// The store does not support this operation, or not with these flags.
    Unsupported,
    /// The store is shorter than the volume.
    Short,
    /// The volume is being closed.
    Closing,
    /// A flush failed before: changes since the last successful one may be on no disk.
    Lost,
    /// The store has lost its right to the data (a lock, or access to its cluster): it is offline until it is opened anew.
    Offline,
    /// The store needs a larger alignment than it had when it was opened.
    Misaligned,
    /// The memory that the data is in was taken away by the process that shares it.
    Memory,
    /// Any other failure of the store.
    Io,
}

impl ErrorKind {
    /// Returns the remedy for an operator; `None` where only the cause and its logs show one.
    pub fn remedy(self) -> Option<&'static str> {
        match self {
            ErrorKind::NoSpace => Some("free space on the store"),
            ErrorKind::Short => Some("give the store its former size again, or shrink the volume"),
            ErrorKind::Lost => Some(
                "repair the device, reopen the volume (remove and add it, or restart ebbd), and check \
                 the guest's file systems",
            ),
            ErrorKind::Offline => Some(
                "check which client writes to the store, then reopen the volume (remove and add it, \
                 or restart ebbd)",
            ),
            ErrorKind::Misaligned => Some(
                "reopen the volume (remove and add it, or restart ebbd), so that ebbd determines the \
                 alignment again, or set `direct = \"off\"`",
            ),
            _ => None,
        }
    }
}

/// The operation that failed.
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

/// A failed operation: its fields are those of [`FailedOperation`]. One pointer, since the result of a request is moved
/// through every layer, with its buffer.
#[derive(Debug)]
pub struct BlockError(Box<FailedOperation>);

const _: () = assert!(size_of::<Result<(), BlockError>>() == size_of::<usize>());

/// What is known of a failed operation.
#[derive(Debug)]
pub struct FailedOperation {
    /// The kind, for callers to match.
    pub kind: ErrorKind,
    /// The volume, added by `Volume` of ebb-volume to the errors of its requests.
    pub volume: Option<Arc<str>>,
    /// The operation.
    pub operation: Operation,
    /// First byte of the range.
    pub offset: u64,
    /// Bytes of the range.
    pub length: u64,
    /// The system error, if there is one.
    pub source: Option<io::Error>,
}

impl BlockError {
    /// An error without a system error.
    pub fn new(kind: ErrorKind, operation: Operation, offset: u64, length: u64) -> BlockError {
        BlockError::with(kind, operation, offset, length, None)
    }

    #[cold]
    fn with(
        kind: ErrorKind,
        operation: Operation,
        offset: u64,
        length: u64,
        source: Option<io::Error>,
    ) -> BlockError {
        let volume = None;
        BlockError(Box::new(FailedOperation { kind, volume, operation, offset, length, source }))
    }

    /// The same error with another cause.
    #[must_use]
    pub fn caused_by(mut self, source: Option<io::Error>) -> BlockError {
        self.source = source;
        self
    }

    /// A system error, its kind derived from the error number.
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
            Some(libc::EFAULT) => ErrorKind::Memory,
            Some(libc::ESHUTDOWN) => ErrorKind::Offline,
            _ => ErrorKind::Io,
        };
        BlockError::with(kind, operation, offset, length, Some(source))
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
                "an earlier flush failed, and writes since the last good flush may be lost: repair the \
                 device, reopen the volume (remove and add it, or restart ebbd), and check the \
                 guest's file systems"
            }
            ErrorKind::Offline => {
                "the store is offline, because another client may have its lock: check which one writes to it, then \
                 reopen the volume (remove and add it, or restart ebbd)"
            }
            ErrorKind::Misaligned => {
                "the store needs a larger alignment than it had when it was opened: reopen the volume \
                 (remove and add it, or restart ebbd), or set `direct = \"off\"`"
            }
            ErrorKind::Memory => "the memory for the data was taken away",
            ErrorKind::Io => "the store failed",
        }
    }
}

impl std::ops::Deref for BlockError {
    type Target = FailedOperation;

    fn deref(&self) -> &FailedOperation {
        &self.0
    }
}

impl std::ops::DerefMut for BlockError {
    fn deref_mut(&mut self) -> &mut FailedOperation {
        &mut self.0
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
    fn a_full_disk_has_its_own_kind_and_a_message_with_context() {
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
