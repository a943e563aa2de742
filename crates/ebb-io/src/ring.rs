//! The ring: operation slots, submission, completion. Only this module passes memory to the kernel's ring.
//!
//! Invariants (each has a test below or in `tests/`):
//! - a slot owns its operation's memory ([`OpMemory`]) and file from submission to completion, even if the
//!   future is dropped;
//! - a completion is matched by slot index *and* generation, so a late one never completes a new operation;
//! - storage operations in flight have a limit per file ([`file_queue`]), so that a device that hangs leaves room
//!   for other devices; waits (receive, accept, poll) are not limited, since they may last for ever. The
//!   kernel keeps completions for which the completion queue has no room (`IORING_FEAT_NODROP`);
//! - system calls that block in the kernel's threads (`fdatasync`, `fallocate`, requests to a device whose
//!   queue is full) find a free thread, even if calls on devices that hang occupy many (`BLOCKING_MAX` in [`setup`]).

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use io_uring::types::{CancelBuilder, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::buf::Buf;
use crate::foreign::ForeignVectors;
use crate::gather::Gather;
use crate::op::Fd;

pub(crate) mod file_queue;
pub(crate) mod setup;

use file_queue::{FileQueues, file_number};

/// `user_data` of cancellations, whose result is ignored.
const TAG_CANCEL: u64 = u64::MAX;
/// `user_data` of the alarm.
const TAG_ALARM: u64 = u64::MAX - 2;
/// `user_data` of the poll on the worker's wake-up eventfd.
const TAG_WAKE: u64 = u64::MAX - 1;

/// Which operations on a socket are cancelled.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Direction {
    Receive,
    Send,
}

/// The memory that an operation's entry points to. Its address must not change when the `OpMemory` moves.
pub(crate) enum OpMemory {
    None,
    Buf(Buf),
    Gather(Box<Gather>),
    Foreign(Box<ForeignVectors>),
    /// No memory, but the result is a new descriptor, which is closed if the future has been dropped.
    Descriptor,
}

/// Whether an operation is limited per file (storage), or may wait for ever (receive, send, accept, poll).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpClass {
    Storage,
    Wait,
}

enum SlotState {
    Free,
    Running(Waker),
    /// The future was dropped; the slot keeps the memory until the completion arrives.
    Orphan,
    Done(i32),
}

struct OpSlot {
    state: SlotState,
    class: OpClass,
    generation: u32,
    memory: OpMemory,
    fd: Option<Fd>,
}

/// Identifies one operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpKey {
    index: u32,
    generation: u32,
}

impl OpKey {
    fn tag(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }
}

#[derive(Default)]
struct OpSlots {
    list: Vec<OpSlot>,
    free: Vec<u32>,
}

pub(crate) struct IoRing {
    uring: RefCell<IoUring>,
    /// Why it has no restrictions; `None` if it has.
    pub(crate) unrestricted: Option<String>,
    slots: RefCell<OpSlots>,
    /// The number of storage operations in flight per file, and the futures that wait for room.
    pub(crate) file_queues: FileQueues,
    cancels: RefCell<Vec<u64>>,
    /// When the earliest armed alarm expires.
    alarm: Cell<Option<Instant>>,
    /// The timeout of the alarm, counted from its submission. The kernel reads it when it consumes the entry,
    /// possibly in a later call than the one that pushed it: so it lives as long as the ring, at one address.
    alarm_in: Box<Cell<Timespec>>,
    /// Found by [`IoRing::submit_now`] and not yet reported by [`IoRing::reap`].
    early: Cell<Reaped>,
    pub(crate) enters: Cell<u64>,
    pub(crate) operations: Cell<u64>,
}

/// The result of [`IoRing::reap`].
#[derive(Clone, Copy, Default)]
pub(crate) struct Reaped {
    /// The wake-up eventfd became readable.
    pub(crate) woken: bool,
    /// The poll on the eventfd ended and must be armed again.
    pub(crate) rearm: bool,
    /// Completions processed.
    pub(crate) count: u32,
}

impl IoRing {
    /// A ring, restricted to the operations of this crate if `restrict` is set and the kernel can.
    ///
    /// # Errors
    /// When there can be none; the message names the remedy.
    pub(crate) fn new(restrict: bool) -> io::Result<IoRing> {
        let (uring, unrestricted) = setup::make(restrict)?;
        Ok(IoRing {
            uring: RefCell::new(uring),
            unrestricted,
            slots: RefCell::default(),
            file_queues: FileQueues::default(),
            cancels: RefCell::default(),
            alarm: Cell::default(),
            alarm_in: Box::new(Cell::new(Timespec::new())),
            early: Cell::default(),
            enters: Cell::new(0),
            operations: Cell::new(0),
        })
    }

    /// Starts an operation, or returns its parts when the ring has no room.
    ///
    /// # Safety
    /// Every pointer in `entry` must point into `memory`, be valid for what the operation does with
    /// it, and stay valid while `memory` is moved; the descriptor in `entry` must be `fd`'s.
    pub(crate) unsafe fn start(
        &self,
        entry: &squeue::Entry,
        class: OpClass,
        memory: OpMemory,
        fd: Option<Fd>,
        waker: &Waker,
    ) -> Result<OpKey, (OpMemory, Option<Fd>)> {
        let file = file_number(fd.as_ref());
        if class == OpClass::Storage && !self.file_queues.has_room(file) {
            return Err((memory, fd));
        }
        let key = self.claim(class, memory, fd, waker);
        let entry = entry.clone().user_data(key.tag());
        if self.push(&entry) {
            self.operations.set(self.operations.get() + 1);
            if class == OpClass::Storage {
                self.file_queues.begin(file);
            }
            return Ok(key);
        }
        self.file_queues.note_refused();
        Err(self.release(key.index))
    }

    /// Starts three entries as one operation: `first`, whose result is ignored, then `second`
    /// linked to `last`, whose completion is that of the operation. For `OpClass::Wait` only.
    ///
    /// # Safety
    /// As [`IoRing::start`] for all three; the kernel must support
    /// [`IoRing::can_skip`].
    pub(crate) unsafe fn start_chain(
        &self,
        entries: [squeue::Entry; 3],
        memory: OpMemory,
        fd: Option<Fd>,
        waker: &Waker,
    ) -> Result<OpKey, (OpMemory, Option<Fd>)> {
        let key = self.claim(OpClass::Wait, memory, fd, waker);
        let [first, second, last] = entries;
        let quiet = squeue::Flags::SKIP_SUCCESS;
        // `second` and `last` carry the operation's tag, so that a cancellation finds the one that waits. If
        // `second` fails, it completes the operation; the completion of `last`, which the kernel then cancels,
        // is ignored.
        let entries = [
            first.flags(quiet).user_data(TAG_CANCEL),
            second.flags(quiet | squeue::Flags::IO_LINK).user_data(key.tag()),
            last.user_data(key.tag()),
        ];
        let mut uring = self.uring.borrow_mut();
        // SAFETY: the caller guarantees that the entries' pointers are valid.
        let mut pushed = unsafe { uring.submission().push_multiple(&entries) }.is_ok();
        if !pushed {
            // A chain must not be split: if there is no room for all of it, it waits.
            self.enters.set(self.enters.get() + 1);
            // SAFETY: as above.
            pushed = uring.submit().is_ok()
                && unsafe { uring.submission().push_multiple(&entries) }.is_ok();
        }
        drop(uring);
        if pushed {
            self.operations.set(self.operations.get() + 1);
            return Ok(key);
        }
        self.file_queues.note_refused();
        Err(self.release(key.index))
    }

    /// True when the kernel supports `IOSQE_CQE_SKIP_SUCCESS` (5.17).
    pub(crate) fn can_skip(&self) -> bool {
        self.uring.borrow().params().is_feature_skip_cqe_on_success()
    }

    fn claim(&self, class: OpClass, memory: OpMemory, fd: Option<Fd>, waker: &Waker) -> OpKey {
        let mut slots = self.slots.borrow_mut();
        let state = SlotState::Running(waker.clone());
        if let Some(index) = slots.free.pop() {
            let slot = &mut slots.list[index as usize];
            slot.state = state;
            slot.class = class;
            slot.memory = memory;
            slot.fd = fd;
            return OpKey { index, generation: slot.generation };
        }
        // More than 2^32 operations would need more memory than there is address space for.
        let index = u32::try_from(slots.list.len()).unwrap_or(u32::MAX);
        slots.list.push(OpSlot { state, class, generation: 0, memory, fd });
        slots.free.reserve(1);
        OpKey { index, generation: 0 }
    }

    /// Frees a slot and returns what it held. The generation moves on, so old tags miss.
    fn release(&self, index: u32) -> (OpMemory, Option<Fd>) {
        let mut slots = self.slots.borrow_mut();
        let slot = &mut slots.list[index as usize];
        slot.state = SlotState::Free;
        slot.generation = slot.generation.wrapping_add(1) & 0x7fff_ffff;
        let held = (std::mem::replace(&mut slot.memory, OpMemory::None), slot.fd.take());
        slots.free.push(index);
        held
    }

    fn push(&self, entry: &squeue::Entry) -> bool {
        let mut uring = self.uring.borrow_mut();
        // SAFETY: the callers guarantee that the entry's pointers are valid.
        if unsafe { uring.submission().push(entry) }.is_ok() {
            return true;
        }
        self.enters.set(self.enters.get() + 1);
        if uring.submit().is_err() {
            return false;
        }
        // SAFETY: as above.
        unsafe { uring.submission().push(entry) }.is_ok()
    }

    /// Arms the poll that wakes the ring when `fd` (the worker's eventfd) is readable.
    pub(crate) fn arm_wake(&self, fd: i32) -> bool {
        let poll = opcode::PollAdd::new(io_uring::types::Fd(fd), POLLIN).multi(true);
        self.push(&poll.build().user_data(TAG_WAKE))
    }

    /// Ensures that the ring wakes up at `at` or before; false if it cannot: then the next wait must be
    /// short. One alarm serves many waits: a deadline per wait would set up and remove a kernel
    /// timer for each request.
    pub(crate) fn wake_at(&self, at: Instant, now: Instant) -> bool {
        if self.alarm.get().is_some_and(|armed| armed <= at) {
            return true;
        }
        // An alarm that is still queued uses this timeout, too, which is the earlier one.
        self.alarm_in.set(Timespec::from(at.saturating_duration_since(now)));
        let spec: *const Timespec = self.alarm_in.as_ptr();
        let armed = self.push(&opcode::Timeout::new(spec).build().user_data(TAG_ALARM));
        if armed {
            self.enter(0, None, None);
            self.alarm.set(Some(at));
        }
        armed
    }

    /// The result of an operation with its memory, or `None` while it runs.
    pub(crate) fn take(&self, key: OpKey, waker: &Waker) -> Option<(i32, OpMemory)> {
        let result = {
            let mut slots = self.slots.borrow_mut();
            let slot = &mut slots.list[key.index as usize];
            assert_eq!(
                slot.generation, key.generation,
                "a future polls the slot of another operation"
            );
            match &mut slot.state {
                SlotState::Done(result) => *result,
                SlotState::Running(old) => {
                    old.clone_from(waker);
                    return None;
                }
                SlotState::Free | SlotState::Orphan => unreachable!("a live future owns its slot"),
            }
        };
        let (memory, _fd) = self.release(key.index);
        Some((result, memory))
    }

    /// Called when the future of `key` is dropped: the slot keeps the memory until the completion arrives.
    pub(crate) fn abandon(&self, key: OpKey) {
        let before = {
            let mut slots = self.slots.borrow_mut();
            // No slot: `shut_down` has leaked it.
            let Some(slot) = slots.list.get_mut(key.index as usize) else { return };
            if slot.generation != key.generation {
                return;
            }
            std::mem::replace(&mut slot.state, SlotState::Orphan)
        };
        if let SlotState::Done(result) = before {
            let (memory, _fd) = self.release(key.index);
            close_unowned(&memory, result);
        } else {
            self.cancels.borrow_mut().push(key.tag());
        }
    }

    /// Cancels what is being received from `fd`, or sent to it: each such operation completes, with the number of bytes that
    /// were moved or with ECANCELED, and no data is lost.
    pub(crate) fn cancel_on_socket(&self, fd: &Fd, direction: Direction) {
        let slots = self.slots.borrow();
        let mut cancels = self.cancels.borrow_mut();
        for (index, slot) in slots.list.iter().enumerate() {
            let moves = match direction {
                Direction::Receive => matches!(slot.memory, OpMemory::Buf(_)),
                Direction::Send => matches!(slot.memory, OpMemory::Gather(_)),
            };
            let is_on_socket = moves
                && slot.class == OpClass::Wait
                && slot.fd.as_ref().is_some_and(|other| Arc::ptr_eq(other, fd));
            if is_on_socket && matches!(slot.state, SlotState::Running(_)) {
                // As many slots as operations, of which there are fewer than 2^32.
                let index = u32::try_from(index).unwrap_or(u32::MAX);
                cancels.push(OpKey { index, generation: slot.generation }.tag());
            }
        }
    }

    fn push_cancels(&self) {
        loop {
            // A separate statement: the borrow must have ended before the tag is put back.
            let tag = self.cancels.borrow_mut().pop();
            let Some(tag) = tag else { return };
            let entry = opcode::AsyncCancel::new(tag).build().user_data(TAG_CANCEL);
            if !self.push(&entry) {
                self.cancels.borrow_mut().push(tag);
                return;
            }
        }
    }

    /// Submits queued entries and waits for `want` completions, for at most `timeout`; after
    /// `linger` one completion is enough.
    pub(crate) fn enter(&self, want: usize, timeout: Option<Duration>, linger: Option<Duration>) {
        self.push_cancels();
        let uring = self.uring.borrow();
        self.enters.set(self.enters.get() + 1);
        let result = match timeout {
            _ if want == 0 => uring.submitter().submit(),
            None if linger.is_none() => uring.submitter().submit_and_wait(want),
            _ => {
                let spec = timeout.map(Timespec::from);
                let mut args = SubmitArgs::new();
                if let Some(linger) = linger {
                    args = args.min_wait_usec(u32::try_from(linger.as_micros()).unwrap_or(1000));
                }
                match &spec {
                    Some(spec) => uring.submitter().submit_with_args(want, &args.timespec(spec)),
                    None => uring.submitter().submit_with_args(want, &args),
                }
            }
        };
        // The timeout expired, a signal arrived, or the completion queue must be read first: in each case
        // the following reap is the right reaction. A valid ring returns no other errors; entries
        // that could not be submitted stay queued.
        drop(result);
    }

    /// True when the kernel must be entered: entries wait to be submitted, or
    /// completions wait in the kernel (which delivers them only to a thread that enters it).
    pub(crate) fn wants_enter(&self) -> bool {
        let mut uring = self.uring.borrow_mut();
        let submission = uring.submission();
        !submission.is_empty()
            || submission.taskrun()
            || submission.cq_overflow()
            || !self.cancels.borrow().is_empty()
    }

    /// True when the kernel must be entered, or completions wait to be processed.
    pub(crate) fn has_work(&self) -> bool {
        self.wants_enter() || !self.uring.borrow_mut().completion().is_empty()
    }

    /// True when the kernel can wait for several completions with a short minimum wait (6.12).
    pub(crate) fn can_linger(&self) -> bool {
        self.uring.borrow().params().is_feature_min_timeout()
    }

    /// Processes all completions, wakes their futures, and lets waiting operations try again.
    pub(crate) fn reap(&self) -> Reaped {
        let mut reaped = self.early.replace(Reaped::default());
        let mut uring = self.uring.borrow_mut();
        for entry in uring.completion() {
            reaped.count += 1;
            match entry.user_data() {
                TAG_CANCEL => {}
                TAG_ALARM => self.alarm.set(None),
                TAG_WAKE => {
                    reaped.woken = true;
                    reaped.rearm |= !io_uring::cqueue::more(entry.flags());
                }
                tag => self.complete(tag, entry.result()),
            }
        }
        drop(uring);
        self.file_queues.try_again();
        reaped
    }

    /// Submits queued entries and processes completions, without waiting. For a large operation,
    /// which is worth a separate system call: data from the page cache is then available at once,
    /// and still in the processor's cache.
    pub(crate) fn submit_now(&self) {
        self.enter(0, None, None);
        let reaped = self.reap();
        self.early.set(reaped);
    }

    /// True when [`IoRing::submit_now`] has found something that [`IoRing::reap`] must report before the worker sleeps:
    /// the eventfd does not wake it a second time.
    pub(crate) fn has_unreported(&self) -> bool {
        let early = self.early.get();
        early.woken || early.rearm
    }

    fn complete(&self, tag: u64, result: i32) {
        // The halves of a tag are 32 bits each by construction.
        let (index, generation) = ((tag & 0xffff_ffff) as usize, tag >> 32);
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.list.get_mut(index) else { return };
        if u64::from(slot.generation) != generation {
            return;
        }
        if slot.class == OpClass::Storage {
            self.file_queues.end(file_number(slot.fd.as_ref()));
        }
        match std::mem::replace(&mut slot.state, SlotState::Done(result)) {
            SlotState::Running(waker) => {
                drop(slots);
                waker.wake();
            }
            SlotState::Orphan => {
                drop(slots);
                let (memory, _fd) = self.release(u32::try_from(index).unwrap_or(u32::MAX));
                close_unowned(&memory, result);
            }
            // The last entry of a chain that the kernel has cancelled.
            SlotState::Done(_) => {}
            SlotState::Free => unreachable!("a free slot has a different generation"),
        }
    }

    /// Cancels all operations and waits until the kernel holds no memory of this ring. Memory that it still
    /// holds after `timeout` is leaked on purpose: a leak is harmless, a write into freed memory
    /// is not.
    pub(crate) fn shut_down(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let everything =
            opcode::AsyncCancel2::new(CancelBuilder::any()).build().user_data(TAG_CANCEL);
        self.push(&everything);
        let count = self.slots.borrow().list.len();
        for index in 0..count {
            let mut slots = self.slots.borrow_mut();
            let slot = &mut slots.list[index];
            if matches!(slot.state, SlotState::Running(_)) {
                let old = std::mem::replace(&mut slot.state, SlotState::Orphan);
                drop(slots);
                drop(old);
            }
        }
        while self.orphans() > 0 && Instant::now() < deadline {
            self.enter(1, Some(Duration::from_millis(20)), None);
            self.reap();
        }
        if self.orphans() > 0 {
            std::mem::forget(std::mem::take(&mut *self.slots.borrow_mut()));
        }
    }

    fn orphans(&self) -> usize {
        let slots = self.slots.borrow();
        slots.list.iter().filter(|s| matches!(s.state, SlotState::Orphan)).count()
    }
}

/// Closes the descriptor that an operation created for a future that was dropped.
fn close_unowned(memory: &OpMemory, result: i32) {
    if matches!(memory, OpMemory::Descriptor) && result >= 0 {
        // SAFETY: the kernel has just created this descriptor, and the future that would own it was dropped.
        drop(unsafe { OwnedFd::from_raw_fd(result) });
    }
}

/// `POLLIN`, as the ring's poll mask wants it.
pub(crate) const POLLIN: u32 = 1;

#[cfg(test)]
mod tests;
