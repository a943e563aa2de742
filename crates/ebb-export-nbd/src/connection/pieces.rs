//! Requests that are executed in pieces: long WRITEs, and all that need more memory than the volume
//! has left, or than the connection has.
//!
//! A request that needs more than the connection's memory has all of it, so that it is the only one
//! of the connection, and its pieces share that memory. A client that does not ask for the maximum
//! payload may send such a request.

use std::pin::pin;
use std::rc::Rc;

use ebb_export::{PIECE, REQUEST_BYTES, longest_piece, piece_bytes};
use ebb_io::{Budget, BudgetGuard, BufPool, Charge};

use super::{Connection, ConnectionEnd};
use crate::decode::NbdRequest;
use crate::receiver::Receiver;
use crate::reply::{ReplyTo, RequestMemory};
use crate::request_task::{NbdJob, SplitWrite, piece_within};

/// A WRITE that is longer than [`PIECE`] is received and written in pieces: a first one of `FIRST`
/// bytes, then pieces of `PIECE` bytes. So the server holds no more memory than the data the client
/// has sent, and one piece.
const FIRST: usize = 256 << 10;

impl Connection {
    /// As [`Connection::share`], for a request that is executed in pieces if it does not fit into
    /// the connection's memory, or there is not enough memory for all of it: then the result is
    /// true, with memory for the request itself only. A volume is guaranteed no more memory than
    /// its reserve.
    pub(super) async fn share_or_short(
        &self,
        receiver: &mut Receiver,
        bytes: usize,
        fits: bool,
    ) -> Result<(Charge, bool), ConnectionEnd> {
        if !fits {
            return Ok((self.share(receiver, REQUEST_BYTES).await?, true));
        }
        if bytes <= self.queue_share.share().reserve() {
            return Ok((self.share(receiver, bytes).await?, false));
        }
        match self.queue_share.try_take(bytes) {
            Some(held) => Ok((held, false)),
            None => Ok((self.share(receiver, REQUEST_BYTES).await?, true)),
        }
    }

    /// Receives and writes a large WRITE in pieces, each with its own memory; the reply is sent
    /// after the last piece has completed.
    pub(super) async fn write_in_pieces(
        self: &Rc<Self>,
        receiver: &mut Receiver,
        to: ReplyTo,
        budget: BudgetGuard,
        (mut offset, mut left, fua): (u64, usize, bool),
        fits: bool,
    ) -> Result<(), ConnectionEnd> {
        let share = Some(self.share(receiver, REQUEST_BYTES).await?);
        let split = SplitWrite::new(to, RequestMemory { budget: Some(budget), share });
        // Pieces share the memory of the connection if the request has all of it.
        let room = (!fits).then(|| Budget::new(self.memory_bytes));
        let mut most = longest_piece(&self.queue_share);
        if !fits {
            most = most.min(piece_within(self.memory_bytes));
        }
        let mut next = FIRST;
        while left > 0 {
            let length = left.min(next).min(most);
            next = PIECE;
            left -= length;
            split.begin(left == 0);
            let arrived = self.io.iteration_start();
            let bounce = self.volume.bounce_footprint(offset, length);
            let bytes = BufPool::footprint(length).saturating_add(bounce);
            let budget = match &room {
                Some(room) => Some(self.unless_halted(pin!(room.take(bytes))).await?),
                None => None,
            };
            let share = piece_bytes(&self.queue_share, length, bounce);
            let share = Some(self.share(receiver, share).await?);
            let payload = Some(self.payload(receiver, length).await?);
            let held = RequestMemory { share, budget };
            let operation = NbdRequest::Write {
                offset,
                length: u32::try_from(length).unwrap_or(u32::MAX),
                fua,
            };
            let split = Some(split.clone());
            let job = NbdJob { to, operation, arrived, payload, held, split, short: false };
            match self.tasks.try_idle(self) {
                Some(task) => task.start(job),
                None => Box::pin(self.start_later(job)).await?,
            }
            offset += length as u64;
        }
        Ok(())
    }
}
