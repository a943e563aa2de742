//! Room for storage operations: so many of each file at a time; more wait in line, in the order in which they
//! came. A file whose operations hang fills its own line and no other.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::task::Waker;

use crate::op::Fd;

/// Storage operations of one file in flight, of one worker.
pub(crate) const PER_FILE: u32 = 256;

/// A file's number, which is its own as long as an operation holds the file.
pub(crate) fn file_number(fd: Option<&Fd>) -> usize {
    fd.map_or(0, |fd| usize::try_from(fd.as_raw_fd()).unwrap_or(0))
}

#[derive(Default)]
struct Line {
    in_flight: u32,
    waiting: VecDeque<(u64, Waker)>,
}

impl Line {
    /// Only the first: who leaves the line, served or not, wakes the next.
    fn wake_first(&self) {
        if let Some((_, waker)) = self.waiting.front() {
            waker.wake_by_ref();
        }
    }
}

/// The lines of all files, by number.
#[derive(Default)]
pub(crate) struct Lines {
    list: RefCell<Vec<Line>>,
    last_ticket: Cell<u64>,
    /// The kernel has refused an entry: whoever waits tries again after the next look at completions.
    refused: Cell<bool>,
}

impl Lines {
    fn with<T>(&self, file: usize, f: impl FnOnce(&mut Line) -> T) -> T {
        let mut list = self.list.borrow_mut();
        if file >= list.len() {
            list.resize_with(file + 1, Line::default);
        }
        f(&mut list[file])
    }

    pub(crate) fn has_room(&self, file: usize) -> bool {
        self.with(file, |line| line.in_flight < PER_FILE)
    }

    pub(crate) fn begin(&self, file: usize) {
        self.with(file, |line| line.in_flight += 1);
    }

    /// An operation of the file has completed.
    pub(crate) fn end(&self, file: usize) {
        self.with(file, |line| {
            line.in_flight = line.in_flight.saturating_sub(1);
            line.wake_first();
        });
    }

    pub(crate) fn note_refused(&self) {
        self.refused.set(true);
    }

    /// Completions were looked at.
    pub(crate) fn try_again(&self) {
        if self.refused.take() {
            self.list.borrow().iter().for_each(Line::wake_first);
        }
    }

    /// A place in a file's line; 0 is no place.
    pub(crate) fn queue_up(&self, file: usize, ticket: u64, waker: &Waker) -> u64 {
        self.with(file, |line| {
            if let Some(place) = line.waiting.iter_mut().find(|(t, _)| *t == ticket) {
                place.1.clone_from(waker);
                return ticket;
            }
            let ticket = self.last_ticket.get() + 1;
            self.last_ticket.set(ticket);
            line.waiting.push_back((ticket, waker.clone()));
            ticket
        })
    }

    /// True if another came before `ticket` (or before a newcomer, ticket 0).
    pub(crate) fn must_queue(&self, file: usize, ticket: u64) -> bool {
        self.with(file, |line| {
            line.waiting.front().is_some_and(|(first, _)| ticket == 0 || *first < ticket)
        })
    }

    pub(crate) fn leave(&self, file: usize, ticket: u64) {
        if ticket != 0 {
            self.with(file, |line| {
                line.waiting.retain(|(t, _)| *t != ticket);
                line.wake_first();
            });
        }
    }
}
