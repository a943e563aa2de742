//! System calls the ring has no operation for, off the worker's thread.
//!
//! For rare calls that may block (`lseek` for holes, `ioctl`, opening files): never on the path of
//! a read or a write. At most [`AT_ONCE`] run for one worker; more wait in line.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::signal::BudgetGuard;
use crate::worker::Io;

/// Offloaded calls of one worker at a time.
pub(crate) const AT_ONCE: usize = 8;

impl Io {
    /// Runs `call` on a helper thread and waits for its result without blocking the worker. A
    /// dropped future does not stop a call that has begun.
    pub async fn offload<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> T {
        #[cfg(feature = "sim")]
        if crate::clock::is_virtual() {
            // A helper thread would answer at a moment that no seed decides.
            let value = call();
            self.yield_now().await;
            return value;
        }
        let turn = self.offload_budget().take(1).await;
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
