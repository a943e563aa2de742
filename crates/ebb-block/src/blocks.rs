//! Ordering of requests where blocks are larger than sectors: requests for whole blocks run
//! concurrently, and a read-modify-write of part of a block runs alone.

use async_lock::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::Mutex;

/// The lock of one store. At most one task waits in the `RwLock` itself, and the rest wait for the
/// mutex: if `async_lock::RwLock` wakes two readers while the next writer already holds it, each
/// wakes the other for as long as the writer holds it, which uses a whole CPU while a server does
/// not answer. The mutex serves its tasks in order; that of `async_lock` does so only for tasks that have waited for half a
/// millisecond.
#[derive(Debug, Default)]
pub struct BlockLock {
    line: Mutex<()>,
    lock: RwLock<()>,
}

impl BlockLock {
    /// For whole blocks.
    pub async fn read(&self) -> RwLockReadGuard<'_, ()> {
        // Fails also while a writer waits.
        if let Some(guard) = self.lock.try_read() {
            return guard;
        }
        let _first = self.line.lock().await;
        self.lock.read().await
    }

    /// For parts of blocks.
    pub async fn write(&self) -> RwLockWriteGuard<'_, ()> {
        let _first = self.line.lock().await;
        self.lock.write().await
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    use super::BlockLock;

    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    type Task<'a> = (Arc<Woken>, Pin<Box<dyn Future<Output = ()> + 'a>>);

    fn task<'a>(future: impl Future<Output = ()> + 'a) -> Task<'a> {
        (Arc::new(Woken(AtomicBool::new(true))), Box::pin(future))
    }

    /// Polls woken tasks until none is woken; returns the number of polls.
    fn settle(tasks: &mut Vec<Task<'_>>) -> usize {
        let mut polls = 0;
        while let Some(at) = tasks.iter().position(|task| task.0.0.swap(false, Ordering::SeqCst)) {
            polls += 1;
            assert!(polls < 1000, "waiting tasks wake each other endlessly");
            let task = tasks.remove(at);
            let waker = Waker::from(task.0.clone());
            let (woken, mut future) = task;
            if future.as_mut().poll(&mut Context::from_waker(&waker)) == Poll::Pending {
                // To the end of the run queue.
                tasks.push((woken, future));
            }
        }
        polls
    }

    #[test]
    fn a_waiting_request_for_part_of_a_block_wakes_no_other() {
        let blocks = BlockLock::default();
        let mut first = Box::pin(blocks.write());
        let Poll::Ready(first) = first.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        else {
            panic!("the lock is free");
        };
        let mut tasks = Vec::new();
        // It never completes: a server that does not answer.
        let stays = || async {
            let _alone = blocks.write().await;
            std::future::pending::<()>().await;
        };
        let mut writer = task(stays());
        for _ in 0..8 {
            tasks.push(task(async { drop(blocks.read().await) }));
        }
        settle(&mut tasks);
        drop(first);
        // The next writer is polled before the readers that were woken.
        let waker = Waker::from(writer.0.clone());
        let _ = writer.1.as_mut().poll(&mut Context::from_waker(&waker));
        tasks.push(writer);
        let polls = settle(&mut tasks);
        assert!(polls <= 32, "{polls} polls of 9 tasks");
    }

    #[test]
    fn every_task_gets_the_lock() {
        let blocks = BlockLock::default();
        let mut tasks: Vec<Task<'_>> = (0..32)
            .map(|nth| {
                let blocks = &blocks;
                task(async move {
                    for _ in 0..10 {
                        if nth % 3 == 0 {
                            let _alone = blocks.write().await;
                            futures_lite::future::yield_now().await;
                        } else {
                            let _shared = blocks.read().await;
                            futures_lite::future::yield_now().await;
                        }
                    }
                })
            })
            .collect();
        let mut rounds = 0;
        while !tasks.is_empty() {
            rounds += 1;
            assert!(
                rounds < 100_000 && tasks.iter().any(|t| t.0.0.load(Ordering::SeqCst)),
                "stuck"
            );
            let at = tasks.iter().position(|t| t.0.0.swap(false, Ordering::SeqCst)).unwrap_or(0);
            let (woken, mut future) = tasks.remove(at);
            let waker = Waker::from(woken.clone());
            if future.as_mut().poll(&mut Context::from_waker(&waker)) == Poll::Pending {
                tasks.push((woken, future));
            }
        }
    }
}
