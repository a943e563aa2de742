//! What a link has received and not decoded yet, and why it stops receiving.

use std::io;

use ebb_io::{Buf, Io};
use ebb_tls::Transport;

use super::super::reply::ProtocolViolation;

/// Why receiving ends.
pub(super) enum ReceiveError {
    ProtocolViolation(ProtocolViolation),
    ShuttingDown,
    Io(io::Error),
}

impl From<ProtocolViolation> for ReceiveError {
    fn from(violation: ProtocolViolation) -> ReceiveError {
        ReceiveError::ProtocolViolation(violation)
    }
}

/// Bytes received and not yet decoded.
pub(super) struct ReceiveBuffer {
    /// `None` while the kernel has it.
    pub(super) buf: Option<Buf>,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl ReceiveBuffer {
    pub(super) fn bytes(&self) -> &[u8] {
        self.buf.as_ref().and_then(|buf| buf.get(self.start..self.end)).unwrap_or(&[])
    }

    /// Receives at least one byte; there are fewer than `whole` bytes now.
    pub(super) async fn more(
        &mut self,
        io: &Io,
        transport: &Transport,
        whole: usize,
    ) -> Result<(), ReceiveError> {
        let Some(mut buf) = self.buf.take() else {
            return Err(ReceiveError::Io(io::ErrorKind::Other.into()));
        };
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if buf.len() - self.start < whole {
            buf.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let range = self.end..buf.len();
        let (result, buf) = transport.recv(io, buf, range).await;
        self.buf = Some(buf);
        match result {
            Ok(0) => Err(ReceiveError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => {
                self.end += count;
                Ok(())
            }
            Err(error) => Err(ReceiveError::Io(error)),
        }
    }

    pub(super) async fn skip(
        &mut self,
        io: &Io,
        transport: &Transport,
        count: u32,
    ) -> Result<(), ReceiveError> {
        let mut left = usize::try_from(count).unwrap_or(usize::MAX);
        loop {
            let now = self.bytes().len().min(left);
            self.start += now;
            left -= now;
            if left == 0 {
                return Ok(());
            }
            self.more(io, transport, 1).await?;
        }
    }

    pub(super) async fn take8(
        &mut self,
        io: &Io,
        transport: &Transport,
    ) -> Result<[u8; 8], ReceiveError> {
        loop {
            if let Some(bytes) = self.bytes().first_chunk::<8>().copied() {
                self.start += 8;
                return Ok(bytes);
            }
            self.more(io, transport, 8).await?;
        }
    }
}
