//! Limits the storage operations in flight per file; further ones wait in a queue, in the order in which they
//! came. A file whose operations hang fills only its own queue.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::task::Waker;

use crate::op::Fd;

/// Storage operations in flight per file and worker.
pub(crate) const PER_FILE: u32 = 256;

/// A file's descriptor number, which is not reused as long as an operation holds the file.
pub(crate) fn file_number(fd: Option<&Fd>) -> usize {
    fd.map_or(0, |fd| usize::try_from(fd.as_raw_fd()).unwrap_or(0))
}

#[derive(Default)]
struct FileQueue {
    in_flight: u32,
    waiting: VecDeque<(u64, Waker)>,
}

impl FileQueue {
    /// Wakes the first waiter only: when it leaves the queue, served or not, it wakes the next one.
    fn wake_first(&self) {
        if let Some((_, waker)) = self.waiting.front() {
            waker.wake_by_ref();
        }
    }
}

/// The queues of all files, by descriptor number.
#[derive(Default)]
pub(crate) struct FileQueues {
    list: RefCell<Vec<FileQueue>>,
    last_ticket: Cell<u64>,
    /// The submission queue had no room for an entry: waiters try again after completions have been processed.
    refused: Cell<bool>,
}

impl FileQueues {
    fn with<T>(&self, file: usize, f: impl FnOnce(&mut FileQueue) -> T) -> T {
        let mut list = self.list.borrow_mut();
        if file >= list.len() {
            list.resize_with(file + 1, FileQueue::default);
        }
        f(&mut list[file])
    }

    pub(crate) fn has_room(&self, file: usize) -> bool {
        self.with(file, |queue| queue.in_flight < PER_FILE)
    }

    pub(crate) fn begin(&self, file: usize) {
        self.with(file, |queue| queue.in_flight += 1);
    }

    /// To be called when a storage operation of the file has completed.
    pub(crate) fn end(&self, file: usize) {
        self.with(file, |queue| {
            queue.in_flight = queue.in_flight.saturating_sub(1);
            queue.wake_first();
        });
    }

    pub(crate) fn note_refused(&self) {
        self.refused.set(true);
    }

    /// To be called when completions have been processed.
    pub(crate) fn try_again(&self) {
        if self.refused.take() {
            self.list.borrow().iter().for_each(FileQueue::wake_first);
        }
    }

    /// Adds a waiter to a file's queue, or updates its waker; returns its ticket. Ticket 0 is none.
    pub(crate) fn enqueue(&self, file: usize, ticket: u64, waker: &Waker) -> u64 {
        self.with(file, |queue| {
            if let Some(entry) = queue.waiting.iter_mut().find(|(t, _)| *t == ticket) {
                entry.1.clone_from(waker);
                return ticket;
            }
            let ticket = self.last_ticket.get() + 1;
            self.last_ticket.set(ticket);
            queue.waiting.push_back((ticket, waker.clone()));
            ticket
        })
    }

    /// True if another operation came before `ticket` (0: a new operation).
    pub(crate) fn must_queue(&self, file: usize, ticket: u64) -> bool {
        self.with(file, |queue| {
            queue.waiting.front().is_some_and(|(first, _)| ticket == 0 || *first < ticket)
        })
    }

    pub(crate) fn remove(&self, file: usize, ticket: u64) {
        if ticket != 0 {
            self.with(file, |queue| {
                queue.waiting.retain(|(t, _)| *t != ticket);
                queue.wake_first();
            });
        }
    }
}
