//! The request tasks of one connection or ring: a task executes one request after the other and keeps its memory, so
//! that a warm connection or ring spawns and allocates nothing per request.
//!
//! There are as many tasks as requests were in flight at once, and no more than the pool's limit. A job is started on the
//! task that became idle last, whose memory is in the processor's cache. Idle tasks end when the connection or ring
//! retires them.
//!
//! # Invariants
//! - No more than `most` requests are in flight; jobs start in the order in which the connection or ring starts them.
//! - A task is either in the list of idle tasks, or counted as busy, or retired. An idle or retired task has no job.
//! - A job that was started runs to completion, unless its worker ends.
//! - [`RequestTasks::idle`] and [`RequestTasks::drain`] are called by the one task that starts the jobs: there is one
//!   waiter at a time.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;

use ebb_io::{Io, Signal};

/// A connection or ring that executes its requests on request tasks.
pub trait RequestRunner: 'static {
    /// A checked request, by value.
    type Job: 'static;
    /// What a task keeps between two requests.
    type Scratch: Default + 'static;

    /// Its request tasks.
    fn tasks(&self) -> &RequestTasks<Self::Job, Self::Scratch>;

    /// Its worker.
    fn io(&self) -> &Io;

    /// Executes the job that [`RequestTask::take`] returns, and replies.
    fn execute(&self, task: &Rc<RequestTask<Self::Job, Self::Scratch>>)
    -> impl Future<Output = ()>;

    /// Called when the last request in flight has completed.
    fn all_done(&self);
}

/// One request task; see the module.
pub struct RequestTask<J, S = ()> {
    job: RefCell<Option<J>>,
    wake: Signal,
    retired: Cell<bool>,
    scratch: S,
}

impl<J, S: Default> RequestTask<J, S> {
    fn new() -> RequestTask<J, S> {
        RequestTask {
            job: RefCell::new(None),
            wake: Signal::default(),
            retired: Cell::new(false),
            scratch: S::default(),
        }
    }
}

impl<J, S> RequestTask<J, S> {
    /// Starts a job on the task, which [`RequestTasks::try_idle`] or [`RequestTasks::idle`] returned.
    #[inline]
    pub fn start(&self, job: J) {
        *self.job.borrow_mut() = Some(job);
        self.wake.set();
    }

    /// The job, for [`RequestRunner::execute`], and the obligation to complete it. `None` if it was taken already.
    #[inline]
    pub fn take(&self) -> Option<(J, ReplyDue)> {
        self.job.take().map(|job| (job, ReplyDue(())))
    }

    /// What it keeps between two requests.
    #[inline]
    pub fn scratch(&self) -> &S {
        &self.scratch
    }

    /// Waits for a job; false if the task is to end.
    async fn has_job(&self) -> bool {
        loop {
            if self.job.borrow().is_some() {
                return true;
            }
            if self.retired.get() {
                return false;
            }
            self.wake.wait().await;
        }
    }
}

/// The request tasks of one connection or ring; see the module.
pub struct RequestTasks<J, S = ()> {
    most: usize,
    list: RefCell<Vec<Rc<RequestTask<J, S>>>>,
    busy: Cell<usize>,
    /// Set when a request has completed.
    freed: Signal,
}

impl<J: 'static, S: Default + 'static> RequestTasks<J, S> {
    /// No tasks yet; at most `most` requests will be in flight.
    #[must_use]
    pub fn new(most: usize) -> RequestTasks<J, S> {
        RequestTasks {
            most,
            list: RefCell::default(),
            busy: Cell::new(0),
            freed: Signal::default(),
        }
    }

    /// An idle task or a new one, or `None` if as many requests are in flight as may be. The task counts as busy from now
    /// on: the caller starts a job on it at once, and constructs the job in place. A job may be large enough for each
    /// move of it to be a call.
    #[must_use]
    #[inline]
    pub fn try_idle<R>(&self, runner: &Rc<R>) -> Option<Rc<RequestTask<J, S>>>
    where
        R: RequestRunner<Job = J, Scratch = S>,
    {
        let idle = self.list.borrow_mut().pop();
        let task = match idle {
            Some(task) => task,
            None if self.busy.get() < self.most => {
                let task = Rc::new(RequestTask::new());
                runner.io().spawn(run(runner.clone(), task.clone())).detach();
                task
            }
            None => return None,
        };
        self.busy.set(self.busy.get() + 1);
        Some(task)
    }

    /// As [`RequestTasks::try_idle`]; waits until a request has completed if as many are in flight as may be.
    pub async fn idle<R>(&self, runner: &Rc<R>) -> Rc<RequestTask<J, S>>
    where
        R: RequestRunner<Job = J, Scratch = S>,
    {
        loop {
            if let Some(task) = self.try_idle(runner) {
                return task;
            }
            self.freed.wait().await;
        }
    }

    /// The memory of a task, bytes: that of its future, which is allocated once.
    #[must_use]
    pub fn task_bytes<R>() -> usize
    where
        R: RequestRunner<Job = J, Scratch = S>,
    {
        fn size_of_future<A, B, F>(_: impl FnOnce(A, B) -> F) -> usize {
            size_of::<F>()
        }
        size_of_future(run::<R>)
    }

    /// Requests in flight.
    #[inline]
    pub fn busy(&self) -> usize {
        self.busy.get()
    }

    /// Waits until no request is in flight.
    pub async fn drain(&self) {
        while self.busy.get() > 0 {
            self.freed.wait().await;
        }
    }

    /// Ends the idle tasks, which frees their memory.
    pub fn retire_idle(&self) {
        for task in self.list.take() {
            task.retired.set(true);
            task.wake.set();
        }
    }
}

/// A request task, from its first job until it is retired.
async fn run<R: RequestRunner>(runner: Rc<R>, task: Rc<RequestTask<R::Job, R::Scratch>>) {
    let tasks = runner.tasks();
    while task.has_job().await {
        runner.execute(&task).await;
        debug_assert!(task.job.borrow().is_none(), "`execute` takes the job");
        tasks.busy.set(tasks.busy.get() - 1);
        if tasks.busy.get() == 0 {
            runner.all_done();
        }
        tasks.list.borrow_mut().push(task.clone());
        tasks.freed.set();
    }
}

/// The obligation to complete a request that a task has begun. Where debug assertions are on, it panics if it is dropped
/// otherwise than by [`ReplyDue::settle`] or [`ReplyDue::waive`], unless the worker ends: then the tasks of all
/// connections are dropped, as when the process is killed. It takes no memory and no time where they are off.
#[derive(Debug)]
#[must_use = "a request must be completed: settle it with its reply"]
pub struct ReplyDue(());

impl ReplyDue {
    /// The reply is queued or sent.
    #[inline]
    pub fn settle(self) {
        std::mem::forget(self);
    }

    /// The request gets no reply: its peer has disconnected, or its connection is broken, or a successor of this daemon
    /// completes it.
    #[inline]
    pub fn waive(self) {
        std::mem::forget(self);
    }
}

impl Drop for ReplyDue {
    fn drop(&mut self) {
        debug_assert!(
            std::thread::panicking() || ebb_io::worker_ends(),
            "a request was dropped without a reply"
        );
    }
}

#[cfg(test)]
mod tests;
