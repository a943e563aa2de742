//! System calls for which the ring has no operation, on helper threads.
//!
//! For rare calls that may block (`lseek` for holes, `ioctl`, opening files): never on the path of
//! a read or a write. At most [`AT_ONCE`] run for one worker; further ones wait in a queue. Calls on files and devices,
//! which may hang, have a queue per file, with [`PER_FILE`] running at a time, so that calls on one file do not delay
//! calls on another.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ebb_sandbox::threads;

use crate::op::Fd;
use crate::ring::file_queue::file_number;
use crate::signal::{Budget, BudgetGuard};
use crate::worker::Io;

/// Offloaded calls of one worker at a time.
pub(crate) const AT_ONCE: usize = 8;
/// Offloaded calls on one file or device at a time.
const PER_FILE: usize = 2;
/// The pause before a call for which the host had no thread tries again.
const NO_THREAD: Duration = Duration::from_millis(10);
/// From so many entries on, entries without calls are removed before a new one is added.
const FILES: usize = 64;

/// The budgets of files with running or waiting calls, by descriptor number.
#[derive(Default)]
pub(crate) struct FileBudgets(RefCell<HashMap<usize, Weak<Budget>>>);

impl FileBudgets {
    fn of(&self, fd: &Fd) -> Rc<Budget> {
        let mut all = self.0.borrow_mut();
        let number = file_number(Some(fd));
        if let Some(budget) = all.get(&number).and_then(Weak::upgrade) {
            return budget;
        }
        if all.len() >= FILES {
            all.retain(|_, budget| budget.strong_count() > 0);
        }
        let budget = Budget::new(PER_FILE);
        all.insert(number, Rc::downgrade(&budget));
        budget
    }
}

impl Io {
    /// Runs `call` on a helper thread and waits for its result without blocking the worker. Dropping the
    /// future does not stop a call that has begun. For calls that do not depend on storage, which may hang; for
    /// those, see [`Io::offload_on`].
    pub async fn offload<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> T {
        let budget = self.offload_budget().clone();
        self.offload_within(&budget, call).await
    }

    /// As [`Io::offload`], for a call on a file or device, which may hang: it waits for other calls on the same
    /// file only.
    pub async fn offload_on<T: Send + 'static>(
        &self,
        fd: &Fd,
        call: impl FnOnce(&Fd) -> T + Send + 'static,
    ) -> T {
        let budget = self.file_budgets().of(fd);
        let fd = fd.clone();
        self.offload_within(&budget, move || call(&fd)).await
    }

    async fn offload_within<T: Send + 'static>(
        &self,
        budget: &Rc<Budget>,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        #[cfg(feature = "sim")]
        if crate::clock::is_virtual() {
            // A helper thread would complete at a time that the seed does not determine.
            let value = call();
            self.yield_now().await;
            return value;
        }
        let permit = budget.take(1).await;
        let state = Shared::new(call);
        let offloaded = OffloadedCall { io: self, running: Some((permit, state.clone())) };
        // The call waits as long as the host has no thread for it.
        while state.begin().is_err() {
            self.sleep(NO_THREAD).await;
        }
        offloaded.await
    }
}

/// A call, and its result as soon as it has ended.
struct CallState<T> {
    /// Until it begins.
    call: Option<Box<dyn FnOnce() -> T + Send>>,
    result: Option<std::thread::Result<T>>,
    waker: Option<Waker>,
}

/// A call, as its future and the helper thread share it.
struct Shared<T>(Arc<Mutex<CallState<T>>>);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Shared<T> {
        Shared(self.0.clone())
    }
}

impl<T: Send + 'static> Shared<T> {
    fn new(call: impl FnOnce() -> T + Send + 'static) -> Shared<T> {
        let call = Some(Box::new(call) as Box<dyn FnOnce() -> T + Send>);
        Shared(Arc::new(Mutex::new(CallState { call, result: None, waker: None })))
    }

    fn state(&self) -> MutexGuard<'_, CallState<T>> {
        // Each part of it is valid after a panic, too.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a helper thread run the call.
    fn begin(&self) -> std::io::Result<()> {
        let shared = self.clone();
        threads::run(move || {
            let Some(call) = shared.take_call() else { return };
            // The panic continues in the task that waits.
            let result = catch_unwind(AssertUnwindSafe(call));
            let waker = {
                let mut state = shared.state();
                state.result = Some(result);
                state.waker.take()
            };
            waker.into_iter().for_each(Waker::wake);
        })
    }

    /// The call, unless it has begun.
    fn take_call(&self) -> Option<Box<dyn FnOnce() -> T + Send>> {
        self.state().call.take()
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<std::thread::Result<T>> {
        let mut state = self.state();
        match state.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// A running call. If it is dropped early, its part of the budget is released when the call has returned.
struct OffloadedCall<'a, T: Send + 'static> {
    io: &'a Io,
    running: Option<(BudgetGuard, Shared<T>)>,
}

impl<T: Send + 'static> Future for OffloadedCall<'_, T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let Some((_, state)) = &self.running else {
            unreachable!("a call is not polled after it has completed")
        };
        let result = std::task::ready!(state.poll(cx));
        self.running = None;
        Poll::Ready(result.unwrap_or_else(|panic| resume_unwind(panic)))
    }
}

impl<T: Send + 'static> Drop for OffloadedCall<'_, T> {
    fn drop(&mut self) {
        let Some((permit, state)) = self.running.take() else { return };
        if state.take_call().is_some() {
            // It has not begun, and never will.
            return;
        }
        let end = async move {
            drop(poll_fn(|cx| state.poll(cx)).await);
            drop(permit);
        };
        self.io.spawn(end).detach();
    }
}
