//! System calls for which the ring has no operation, on helper threads.
//!
//! For rare calls that may block (`lseek` for holes, `ioctl`, opening files): never on the path of
//! a read or a write. At most [`AT_ONCE`] run for one worker; further ones wait in a queue. Calls on files and devices,
//! which may hang, have a queue per file, with [`PER_FILE`] running at a time, so that calls on one file do not delay
//! calls on another.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};

use crate::op::Fd;
use crate::ring::file_queue::file_number;
use crate::signal::{Budget, BudgetGuard};
use crate::worker::Io;

/// Offloaded calls of one worker at a time.
pub(crate) const AT_ONCE: usize = 8;
/// Offloaded calls on one file or device at a time.
const PER_FILE: usize = 2;
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
        OffloadedCall { io: self, running: Some((permit, blocking::unblock(call))) }.await
    }
}

/// A running call. If it is dropped early, its part of the budget is released when the call has returned.
struct OffloadedCall<'a, T: Send + 'static> {
    io: &'a Io,
    running: Option<(BudgetGuard, blocking::Task<T>)>,
}

impl<T: Send + 'static> Future for OffloadedCall<'_, T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let Some((_, task)) = &mut self.running else {
            unreachable!("a call is not polled after it has completed")
        };
        let value = std::task::ready!(Pin::new(task).poll(cx));
        self.running = None;
        Poll::Ready(value)
    }
}

impl<T: Send + 'static> Drop for OffloadedCall<'_, T> {
    fn drop(&mut self) {
        if let Some((permit, task)) = self.running.take() {
            let cancellation = async move {
                // A call that has not begun is not started.
                let _ = task.cancel().await;
                drop(permit);
            };
            self.io.spawn(cancellation).detach();
        }
    }
}
