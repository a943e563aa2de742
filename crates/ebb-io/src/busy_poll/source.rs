//! What a worker polls: one source for each ring, client and connection to a remote store, and the list of those
//! that are polled now.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use super::load::LoadReader;
use super::pace::{SOCKET_CHEAP, SourcePace};
use super::{PollParameters, PollShare, Polling};

struct SourceState {
    pace: RefCell<SourcePace>,
    /// For shared memory: whether there are requests. A socket reports them through the ring.
    check: Option<Box<dyn Fn() -> bool>>,
    /// The task that waits in [`PollSource::poll`], and what the poll has found.
    waker: RefCell<Option<Waker>>,
    found: Cell<Option<bool>>,
    /// Its place in the list, if it is polled, and until when it is.
    index: Cell<Option<usize>>,
    until: Cell<Instant>,
}

impl SourceState {
    fn has_requests(&self) -> bool {
        self.check.as_ref().is_some_and(|check| check())
    }

    /// Ends a poll; returns whether a task waited for it.
    fn end(&self, found: bool) -> bool {
        let waker = self.waker.borrow_mut().take();
        if waker.is_some() {
            self.found.set(Some(found));
        }
        waker.map(Waker::wake).is_some()
    }
}

/// The sources that a worker polls before it sleeps, and the share of a processor it may use for that.
pub(crate) struct PollList {
    parameters: Arc<PollParameters>,
    list: RefCell<Vec<Rc<SourceState>>>,
    share: RefCell<PollShare>,
    load: RefCell<Option<LoadReader>>,
    /// The time of the current iteration of the worker's loop.
    now: Cell<Instant>,
    /// Polls that found something, and that did not.
    pub(crate) found: Cell<u64>,
    pub(crate) missed: Cell<u64>,
}

impl PollList {
    pub(crate) fn new(parameters: Arc<PollParameters>, now: Instant) -> PollList {
        PollList {
            parameters,
            list: RefCell::default(),
            share: RefCell::new(PollShare::new(now)),
            load: RefCell::default(),
            now: Cell::new(now),
            found: Cell::new(0),
            missed: Cell::new(0),
        }
    }

    /// Notes the time of the next iteration.
    pub(crate) fn set_now(&self, now: Instant) {
        self.now.set(now);
    }

    /// Nothing is to be polled.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.list.borrow().is_empty()
    }

    /// Checks the sources in shared memory and ends the polls of those that have requests; true if there was one.
    pub(crate) fn check(&self) -> bool {
        let (mut found, mut from) = (false, 0);
        loop {
            let mut list = self.list.borrow_mut();
            // All of them: if only the first one's poll ended, two busy ones could keep the others waiting for ever.
            let Some(at) = (from..list.len()).find(|at| list[*at].has_requests()) else {
                return found;
            };
            let source = remove(&mut list, at);
            drop(list);
            source.end(true);
            (found, from) = (true, at);
        }
    }

    /// True if a lightly loaded source in shared memory has requests.
    pub(crate) fn has_light(&self) -> bool {
        let list = self.list.borrow();
        list.iter().any(|source| source.pace.borrow().is_light() && source.has_requests())
    }

    /// Ends all polls whose time is over; true if that woke a task.
    pub(crate) fn expire(&self, now: Instant) -> bool {
        let mut woken = false;
        loop {
            let mut list = self.list.borrow_mut();
            let Some(index) = list.iter().position(|source| source.until.get() <= now) else {
                return woken;
            };
            let source = remove(&mut list, index);
            drop(list);
            source.pace.borrow_mut().note_miss();
            woken |= source.end(false);
        }
    }

    /// Ends all polls, because the worker must not poll now; true if that woke a task.
    pub(crate) fn give_up(&self) -> bool {
        let mut woken = false;
        loop {
            let Some(source) = self.list.borrow_mut().pop() else { return woken };
            source.index.set(None);
            woken |= source.end(false);
        }
    }

    /// Opens what says how much of the machine is in use, which a restricted worker cannot do later.
    pub(crate) fn open_load(&self) {
        if self.parameters.gives_way {
            self.load.borrow_mut().get_or_insert_with(|| LoadReader::open(self.parameters.alone));
        }
    }

    /// Permission to poll, and until when; `None`: the worker must not poll now.
    pub(crate) fn begin(&self, now: Instant) -> Option<(Polling<'_>, Instant)> {
        let (until, rings) = {
            let list = self.list.borrow();
            let rings = list.iter().any(|source| source.check.is_some());
            // With one processor only guest rings are worth polling.
            let polled = list.iter().filter(|s| !self.parameters.alone || s.check.is_some());
            (polled.map(|source| source.until.get()).max()?, rings)
        };
        let mut share = self.share.borrow_mut();
        if self.parameters.gives_way && share.wants_load(now) {
            let mut reader = self.load.borrow_mut();
            let reader = reader.get_or_insert_with(|| LoadReader::open(self.parameters.alone));
            share.note_load(reader.read(), now);
        }
        if !share.permits(until.saturating_duration_since(now), now) {
            return None;
        }
        Some((self.parameters.begin(rings)?, until))
    }

    /// Notes how a poll ended.
    pub(crate) fn note_poll(&self, found: bool, took: Duration) {
        let count = if found { &self.found } else { &self.missed };
        count.set(count.get() + 1);
        if !found {
            self.share.borrow_mut().note_unsuccessful(took);
        }
    }
}

fn remove(list: &mut Vec<Rc<SourceState>>, index: usize) -> Rc<SourceState> {
    let source = list.swap_remove(index);
    source.index.set(None);
    if let Some(moved) = list.get(index) {
        moved.index.set(Some(index));
    }
    source
}

/// Something that requests come from, which its worker polls before it sleeps while they come quickly: see
/// [`crate::PollParameters`]. Its owner notes when it waits and when requests have arrived.
pub struct PollSource {
    polls: Rc<PollList>,
    state: Rc<SourceState>,
}

impl PollSource {
    pub(crate) fn new(polls: Rc<PollList>, check: Option<Box<dyn Fn() -> bool>>) -> PollSource {
        // A guest saves its event if its ring is polled, however soon it would be noticed.
        let cheap = if check.is_some() { Duration::ZERO } else { SOCKET_CHEAP };
        let state = SourceState {
            pace: RefCell::new(SourcePace::new(cheap)),
            check,
            waker: RefCell::default(),
            found: Cell::default(),
            index: Cell::default(),
            until: Cell::new(polls.now.get()),
        };
        PollSource { polls, state: Rc::new(state) }
    }

    /// Notes that requests (or replies) have arrived, and ends a wait. 0: how many is noted later.
    #[inline]
    pub fn note_requests(&self, requests: u32) {
        self.unlist();
        self.state.pace.borrow_mut().note_requests(requests, self.polls.now.get());
    }

    /// Notes that the source waits for what comes through the ring: for sockets. No effect if it waits already.
    #[inline]
    pub fn wait(&self) {
        let now = self.polls.now.get();
        let until = self.state.pace.borrow_mut().wait(self.polls.parameters.each(), now);
        if let Some(until) = until {
            self.enlist(until);
        }
    }

    /// Notes that the source waits no longer, without requests.
    pub fn cancel(&self) {
        self.unlist();
        self.state.pace.borrow_mut().cancel();
    }

    /// For sources in shared memory: polls while that is worthwhile; true if there are requests, and false if its
    /// task has to wait for an event.
    pub async fn poll(&self) -> bool {
        let now = self.polls.now.get();
        let until = self.state.pace.borrow_mut().wait(self.polls.parameters.each(), now);
        let Some(until) = until else { return false };
        self.state.found.set(None);
        self.enlist(until);
        let _unlist = UnlistOnDrop(self);
        poll_fn(|cx| {
            if let Some(found) = self.state.found.take() {
                return Poll::Ready(found);
            }
            *self.state.waker.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// True if few requests came since the source last waited.
    pub fn is_light(&self) -> bool {
        self.state.pace.borrow().is_light()
    }

    fn enlist(&self, until: Instant) {
        self.unlist();
        let mut list = self.polls.list.borrow_mut();
        self.state.until.set(until);
        self.state.index.set(Some(list.len()));
        list.push(self.state.clone());
    }

    fn unlist(&self) {
        if let Some(index) = self.state.index.get() {
            remove(&mut self.polls.list.borrow_mut(), index);
        }
    }
}

impl Drop for PollSource {
    fn drop(&mut self) {
        self.unlist();
    }
}

/// Ends a poll whose future is dropped.
struct UnlistOnDrop<'a>(&'a PollSource);

impl Drop for UnlistOnDrop<'_> {
    fn drop(&mut self) {
        self.0.unlist();
        self.0.state.waker.borrow_mut().take();
    }
}
