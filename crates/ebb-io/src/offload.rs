//! System calls the ring has no operation for, off the worker's thread.
//!
//! For rare calls that may block (`lseek` for holes, `ioctl`, opening files): never on the path of
//! a read or a write. At most [`AT_ONCE`] run for one worker; more wait in line. Calls on files and devices, which
//! may hang, have a line for each: [`OF_A_FILE`] at a time, so that those of one stop no call on another.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};

use crate::op::Fd;
use crate::ring::line::file_number;
use crate::signal::{Budget, BudgetGuard};
use crate::worker::Io;

/// Offloaded calls of one worker at a time.
pub(crate) const AT_ONCE: usize = 8;
/// Those on one file or device.
const OF_A_FILE: usize = 2;
/// From so many files on those without calls are forgotten before another one is noted.
const FILES: usize = 64;

/// The budgets of files with calls that run or wait, by number.
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
        let budget = Budget::new(OF_A_FILE);
        all.insert(number, Rc::downgrade(&budget));
        budget
    }
}

impl Io {
    /// Runs `call` on a helper thread and waits for its result without blocking the worker. A
    /// dropped future does not stop a call that has begun. For calls that end soon whatever becomes of disks;
    /// else [`Io::offload_on`].
    pub async fn offload<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> T {
        let budget = self.offload_budget().clone();
        self.offload_within(&budget, call).await
    }

    /// As [`Io::offload`], for a call on a file or device, which may hang: it waits for others on the same one,
    /// and no call on another waits for it.
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
            // A helper thread would answer at a moment that no seed decides.
            let value = call();
            self.yield_now().await;
            return value;
        }
        let turn = budget.take(1).await;
        Call { io: self, running: Some((turn, blocking::unblock(call))) }.await
    }
}

/// A call that runs. Dropped early it keeps its turn until the helper thread is free again.
struct Call<'a, T: Send + 'static> {
    io: &'a Io,
    running: Option<(BudgetGuard, blocking::Task<T>)>,
}

impl<T: Send + 'static> Future for Call<'_, T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let Some((_, task)) = &mut self.running else {
            unreachable!("a call is not polled after it is over")
        };
        let value = std::task::ready!(Pin::new(task).poll(cx));
        self.running = None;
        Poll::Ready(value)
    }
}

impl<T: Send + 'static> Drop for Call<'_, T> {
    fn drop(&mut self) {
        if let Some((turn, task)) = self.running.take() {
            let rest = async move {
                // One that has not begun never will.
                let _ = task.cancel().await;
                drop(turn);
            };
            self.io.spawn(rest).detach();
        }
    }
}
