//! The live tasks of a worker.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use pin_project_lite::pin_project;

thread_local! {
    /// The worker of this thread drops its tasks.
    static ENDS: Cell<bool> = const { Cell::new(false) };
}

/// Whether the worker of this thread ends: futures that are dropped now are those of tasks that will not complete.
pub fn worker_ends() -> bool {
    // While the thread itself ends, so does its worker.
    ENDS.try_with(Cell::get).unwrap_or(true)
}

/// Sets what [`worker_ends`] returns.
pub(crate) fn note_worker_ends(ends: bool) {
    ENDS.set(ends);
}

/// All live tasks, so that a stopping worker can drop them: a task may wait for
/// something that it alone owns, and would otherwise never be freed.
#[derive(Default)]
pub(crate) struct Tasks {
    /// The waker of each; `None` is a free entry.
    list: RefCell<Vec<Option<Waker>>>,
    free: RefCell<Vec<usize>>,
}

/// A task's entry in [`Tasks`], freed when its future is dropped.
struct TaskEntry {
    tasks: Rc<Tasks>,
    index: usize,
}

impl Tasks {
    fn entry(self: &Rc<Self>) -> TaskEntry {
        let mut list = self.list.borrow_mut();
        let index = self.free.borrow_mut().pop().unwrap_or_else(|| {
            list.push(None);
            list.len() - 1
        });
        TaskEntry { tasks: self.clone(), index }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.borrow().len() == self.list.borrow().len()
    }

    /// Sets the waker of the task with this index.
    pub(crate) fn set_waker(&self, index: usize, waker: Waker) {
        self.list.borrow_mut()[index] = Some(waker);
    }

    /// Wakes all tasks: a task that was woken is in the run queue, and can be dropped.
    pub(crate) fn wake_all(&self) {
        let wakers: Vec<Waker> = self.list.borrow().iter().flatten().cloned().collect();
        wakers.into_iter().for_each(Waker::wake);
    }
}

pin_project! {
    /// A task's future and its entry in the list. Not an `async` block, which would hold the future twice: as a
    /// captured value and as the value it awaits.
    pub(crate) struct TrackedFuture<F> {
        #[pin]
        future: F,
        _entry: TaskEntry,
    }
}

impl<F> TrackedFuture<F> {
    /// A future with an entry in the list, and the index of that entry.
    pub(crate) fn new(future: F, tasks: &Rc<Tasks>) -> (usize, TrackedFuture<F>) {
        let entry = tasks.entry();
        (entry.index, TrackedFuture { future, _entry: entry })
    }
}

impl<F: Future> Future for TrackedFuture<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.project().future.poll(cx)
    }
}

impl Drop for TaskEntry {
    fn drop(&mut self) {
        let waker = self.tasks.list.borrow_mut()[self.index].take();
        self.tasks.free.borrow_mut().push(self.index);
        drop(waker);
    }
}
