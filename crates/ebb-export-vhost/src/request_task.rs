//! Executes one request in a request task, which keeps its memory for the chain, so that a warm queue allocates nothing.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use ebb_export::{PIECE, REQUEST_BYTES, RequestTask, longest_piece, piece_bytes};
use ebb_io::{BufPool, Charge, ForeignVectors};
use ebb_vhost_proto::BlkStatus;
use ebb_volume::{BlockError, ErrorKind, Operation};

use crate::chain::{Chain, SHARE_ALL, Token};
use crate::disk_shared::add;
use crate::foreign;
use crate::memory::{GuestMemory, GuestSpan};
use crate::queue::{DiskQueue, MemoryInUse};
use crate::request::{BlkAction, BlkRequest, HEADER_BYTES};

/// The longest transfer that the kernel carries out with guest memory directly, bytes. It may do all of it at once, on the
/// worker's thread.
const DIRECT_MAX: usize = 1 << 20;

/// A request for a task; its chain is in the task's scratch.
pub(crate) struct Job {
    pub(crate) token: Token,
    pub(crate) request: BlkRequest,
    /// The table in which its chain was resolved.
    pub(crate) memory: Rc<MemoryInUse>,
}

/// What a request task keeps between two requests.
#[derive(Default)]
pub(crate) struct TaskChain {
    pub(crate) chain: RefCell<Chain>,
    /// The list of the guest's memory for a direct transfer, while there is none.
    vectors: Cell<Option<Box<ForeignVectors>>>,
    /// The current request was cut short, see [`DiskQueue::next_turn`].
    cut_short: Cell<bool>,
    /// The current request is a flush that failed, and the flush of a successor could succeed.
    reports_loss: Cell<bool>,
    /// When the current request was consumed from the ring, until the volume gets it.
    arrived: Cell<Option<Instant>>,
}

impl TaskChain {
    /// Takes over the chain of the next request, in exchange for the memory of another one.
    pub(crate) fn set_chain(&self, chain: &mut Chain, at: Instant) {
        std::mem::swap(&mut *self.chain.borrow_mut(), chain);
        self.arrived.set(Some(at));
    }
}

/// A count of bytes as an offset; a chain is at most 4 GiB long.
fn place(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

pub(crate) fn copied(all: bool) -> Result<(), BlkStatus> {
    if all { Ok(()) } else { Err(BlkStatus::IoError) }
}

pub(crate) type ChainTask = RequestTask<Job, TaskChain>;

impl DiskQueue {
    pub(crate) async fn execute_task(&self, task: &Rc<ChainTask>) {
        let Some((job, reply)) = task.take() else { return };
        let (result, written) = match job.request.action {
            BlkAction::Read { offset, bytes } => {
                (self.read(task, &job, offset, bytes).await, bytes)
            }
            BlkAction::Write { offset, bytes } => (self.write(task, &job, offset, bytes).await, 0),
            BlkAction::Flush => (self.make_stable(task).await, 0),
            BlkAction::Discard { bytes } => (self.change_ranges(task, &job, bytes, false).await, 0),
            BlkAction::WriteZeroes { bytes } => {
                (self.change_ranges(task, &job, bytes, true).await, 0)
            }
            // Completed without a task.
            BlkAction::GetId | BlkAction::Unsupported | BlkAction::Invalid => {
                (Err(BlkStatus::IoError), 0)
            }
        };
        let Job { token, request, memory } = job;
        // Taken in any case: the flags belong to this request alone.
        let cut_short = task.scratch().cut_short.take();
        let reports_loss = task.scratch().reports_loss.take();
        let left = result.is_err()
            && !reports_loss
            && self.record.is_some()
            && self.disk.leaves_failures();
        if left && let Some(suppressed) = self.disk.may_log() {
            tracing::warn!(
                volume = &**self.disk.volume.name(),
                connection = %self.disk.connection(),
                suppressed,
                "a request was given up: it is not completed until the next daemon carries it out"
            );
        }
        if !left && !cut_short {
            let chain = task.scratch().chain.borrow();
            self.finish(memory.table(), &chain, token, &request, result, written);
        }
        reply.settle();
        self.publish_soon();
    }

    /// Fails a request that names memory which the VMM does not share.
    #[cold]
    pub(crate) fn fail_outside(
        &self,
        memory: &GuestMemory,
        chain: &Chain,
        token: Token,
        address: u64,
    ) {
        if self.may_log() {
            tracing::warn!(
                volume = &**self.disk.volume.name(),
                connection = %self.disk.connection(),
                address = %format_args!("{address:#x}"),
                remedy = SHARE_ALL,
                "a request failed: it names memory of the guest that is not shared"
            );
        }
        let request = BlkRequest { action: BlkAction::Invalid, writable: chain.writable_bytes() };
        self.finish(memory, chain, token, &request, Err(BlkStatus::IoError), 0);
    }

    /// Writes the status of a request and queues its completion: with a success, `written` bytes of data were written to
    /// the guest.
    pub(crate) fn finish(
        &self,
        memory: &crate::memory::GuestMemory,
        chain: &Chain,
        token: Token,
        request: &BlkRequest,
        result: Result<(), BlkStatus>,
        written: u64,
    ) {
        let status = result.err().unwrap_or(BlkStatus::Ok);
        self.note_result(result.is_err());
        // If the memory is lost, the ring is found to be broken as well.
        let _ = memory.copy_in(&chain.writable, place(request.writable - 1), &[status.to_wire()]);
        // The count of bytes from the start on, as virtio defines it: where data is missing before the status, the bytes
        // between them count as unwritten, and Linux does not use the count.
        let used =
            if result.is_ok() && written + 1 == request.writable { request.writable } else { 1 };
        self.complete(token, u32::try_from(used).unwrap_or(u32::MAX));
    }

    async fn read(
        &self,
        task: &ChainTask,
        job: &Job,
        offset: u64,
        bytes: u64,
    ) -> Result<(), BlkStatus> {
        add(&self.disk.counters.reads, 1);
        self.check_range(offset, bytes)?;
        let listed = self.list_memory(task, job, (offset, bytes), |chain| (&chain.writable, 0));
        if let Some(vectors) = listed {
            let _held = self.budget.take(REQUEST_BYTES).await;
            self.note_queued(task, Operation::Read);
            let (result, vectors) = self.disk.volume.read_foreign(&self.io, vectors, offset).await;
            self.end_direct(task, job, vectors, &result);
            // Also if it failed: part may have been written.
            for span in &task.scratch().chain.borrow().writable {
                job.memory.table().mark_dirty(*span);
            }
            self.status_of(result)?;
            add(&self.disk.counters.read_bytes, bytes);
            return Ok(());
        }
        let mut at = 0;
        while at < bytes {
            let piece = self.next_piece(bytes - at);
            let (_held, _share) = self.charge(offset + at, piece).await;
            let buf = self.buffers.take(piece).await;
            self.note_queued(task, Operation::Read);
            let (result, buf) = self.disk.volume.read(&self.io, buf, offset + at).await;
            self.status_of(result)?;
            {
                let chain = task.scratch().chain.borrow();
                copied(job.memory.table().copy_in(&chain.writable, place(at), &buf))?;
            }
            at += piece as u64;
            self.next_turn(task, bytes - at).await?;
        }
        add(&self.disk.counters.read_bytes, bytes);
        Ok(())
    }

    async fn write(
        &self,
        task: &ChainTask,
        job: &Job,
        offset: u64,
        bytes: u64,
    ) -> Result<(), BlkStatus> {
        add(&self.disk.counters.writes, 1);
        self.check_range(offset, bytes)?;
        if self.disk.is_broken() {
            return Err(BlkStatus::IoError);
        }
        let stable = self.disk.writes_through();
        let listed = match stable {
            true => None,
            false => self
                .list_memory(task, job, (offset, bytes), |chain| (&chain.readable, HEADER_BYTES)),
        };
        if let Some(vectors) = listed {
            let _held = self.budget.take(REQUEST_BYTES).await;
            self.note_queued(task, Operation::Write);
            let (result, vectors) = self.disk.volume.write_foreign(&self.io, vectors, offset).await;
            self.end_direct(task, job, vectors, &result);
            self.status_of(result)?;
            add(&self.disk.counters.written_bytes, bytes);
            return Ok(());
        }
        let mut at = 0;
        while at < bytes {
            let piece = self.next_piece(bytes - at);
            let (_held, _share) = self.charge(offset + at, piece).await;
            let mut buf = self.buffers.take(piece).await;
            {
                let chain = task.scratch().chain.borrow();
                let skip = place(at).saturating_add(HEADER_BYTES);
                copied(job.memory.table().copy_out(&chain.readable, skip, &mut buf))?;
            }
            self.note_queued(task, Operation::Write);
            let (result, _) = self.disk.volume.write(&self.io, buf, offset + at, stable).await;
            self.note_loss(&result);
            self.status_of(result)?;
            self.note_unstable(stable);
            at += piece as u64;
            self.next_turn(task, bytes - at).await?;
        }
        add(&self.disk.counters.written_bytes, bytes);
        Ok(())
    }

    /// Lets other tasks run before the next piece of a long transfer. Cuts the request short if its frontend has gone: it is
    /// not completed, so that it stays in the inflight region, and is carried out again for the
    /// frontend that comes next.
    async fn next_turn(&self, task: &ChainTask, rest: u64) -> Result<(), BlkStatus> {
        if rest == 0 {
            return Ok(());
        }
        self.io.yield_iteration().await;
        if !self.disk.is_gone() || self.record.is_none() {
            return Ok(());
        }
        task.scratch().cut_short.set(true);
        Err(BlkStatus::IoError)
    }

    /// The guest's memory of a transfer, if the store can transfer it directly.
    fn list_memory(
        &self,
        task: &ChainTask,
        job: &Job,
        (offset, bytes): (u64, u64),
        part: impl FnOnce(&Chain) -> (&Vec<GuestSpan>, usize),
    ) -> Option<Box<ForeignVectors>> {
        let (volume, scratch) = (&self.disk.volume, task.scratch());
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes <= DIRECT_MAX)?;
        let mut vectors = scratch.vectors.take().unwrap_or_default();
        let chain = scratch.chain.borrow();
        let (spans, skip) = part(&chain);
        // An empty list first: most volumes take none.
        let listed = volume.takes_foreign(offset, &vectors)
            && foreign::list(&mut vectors, job.memory.table(), spans, skip, bytes)
            && volume.takes_foreign(offset, &vectors);
        if listed {
            return Some(vectors);
        }
        vectors.clear();
        scratch.vectors.set(Some(vectors));
        None
    }

    /// Keeps the list of a direct transfer that has ended.
    fn end_direct(
        &self,
        task: &ChainTask,
        job: &Job,
        mut vectors: Box<ForeignVectors>,
        result: &Result<(), BlockError>,
    ) {
        add(&self.disk.counters.direct, 1);
        vectors.clear();
        task.scratch().vectors.set(Some(vectors));
        let source = result.as_ref().err().and_then(|error| error.source.as_ref());
        if source.and_then(|error| error.raw_os_error()) == Some(libc::EFAULT) {
            job.memory.table().note_lost();
        }
    }

    /// Refuses what is not within the volume before the first piece is transferred.
    pub(crate) fn check_range(&self, offset: u64, bytes: u64) -> Result<(), BlkStatus> {
        let end = offset.checked_add(bytes);
        let fits = end.is_some_and(|end| end <= self.disk.volume.size());
        if fits { Ok(()) } else { Err(BlkStatus::IoError) }
    }

    /// The length of the next piece of a transfer: whole, if it is short and the volume's reserve suffices.
    fn next_piece(&self, rest: u64) -> usize {
        let rest = usize::try_from(rest).unwrap_or(usize::MAX);
        if rest <= PIECE && BufPool::footprint(rest) <= self.queue_share.share().reserve() {
            return rest;
        }
        rest.min(longest_piece(&self.queue_share))
    }

    /// Waits until the queue and the volume's share have room for a piece.
    async fn charge(&self, offset: u64, piece: usize) -> (ebb_io::BudgetGuard, Charge) {
        let bounce = self.disk.volume.bounce_footprint(offset, piece);
        let _admitted = self.buffers.admit(BufPool::footprint(piece)).await;
        let held = self.budget.take(BufPool::footprint(piece) + bounce + REQUEST_BYTES).await;
        let share = self.queue_share.take(piece_bytes(&self.queue_share, piece, bounce)).await;
        (held, share)
    }

    async fn make_stable(&self, task: &ChainTask) -> Result<(), BlkStatus> {
        add(&self.disk.counters.flushes, 1);
        if self.disk.is_broken() {
            return Err(BlkStatus::IoError);
        }
        let mark = self.disk.unstable.mark();
        let flushed = self.disk.volume.flush_for(&self.io, &self.disk.told).await;
        self.note_loss(&flushed);
        let reports_loss = |error| self.disk.volume.may_report_loss(error);
        task.scratch().reports_loss.set(flushed.as_ref().is_err_and(reports_loss));
        self.status_of(flushed)?;
        self.disk.unstable.cover(mark);
        Ok(())
    }

    /// Records that a sync has lost acknowledged writes: the flushes of a successor would succeed.
    pub(crate) fn note_loss(&self, result: &Result<(), BlockError>) {
        if result.is_err() && self.disk.volume.is_lost() {
            self.disk.unstable.note_lost();
        }
    }

    /// Records that a change is about to be acknowledged which a kill of the daemon may lose
    /// without a report to the successor.
    pub(crate) fn note_unstable(&self, stable: bool) {
        if !stable
            && self.disk.volume.may_hide_loss()
            && let Some(record) = &self.record
        {
            self.disk.unstable.note(record);
        }
    }

    pub(crate) fn note_queued(&self, task: &ChainTask, operation: Operation) {
        if let Some(arrived) = task.scratch().arrived.take() {
            self.disk.volume.stats().note_queued(&self.io, operation, arrived);
        }
    }

    /// The status with which the guest receives the result of a request. Logs an error of the store.
    pub(crate) fn status_of(&self, result: Result<(), BlockError>) -> Result<(), BlkStatus> {
        let Err(error) = result else { return Ok(()) };
        self.log_failure(&error);
        match error.kind {
            ErrorKind::Unsupported => Err(BlkStatus::Unsupported),
            _ => Err(BlkStatus::IoError),
        }
    }

    #[cold]
    fn log_failure(&self, error: &BlockError) {
        let refused = matches!(error.kind, ErrorKind::OutOfRange | ErrorKind::Invalid);
        if !refused && self.may_log() {
            let cause = error.source.as_ref().map(ToString::to_string).unwrap_or_default();
            let volume = &**self.disk.volume.name();
            tracing::warn!(volume, connection = %self.disk.connection(), %error, cause, "a request failed");
        }
    }
}
