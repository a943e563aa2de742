use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};

use ebb_io::Worker;
use proptest::prelude::*;

use super::*;

/// A connection whose requests wait until the test completes them.
struct Requests {
    io: Io,
    tasks: RequestTasks<u32, Cell<u32>>,
    /// Requests in flight, in the order in which they began, with what they wait with.
    open: RefCell<Vec<(u32, Option<Waker>)>>,
    began: RefCell<Vec<u32>>,
    /// Requests that ran on each task in a row.
    most_of_a_task: Cell<u32>,
    emptied: Cell<u32>,
    /// The number of the request that is dropped without a reply.
    forgets: Option<u32>,
    alive: Arc<AtomicUsize>,
}

impl Drop for Requests {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

impl RequestRunner for Requests {
    type Job = u32;
    type Scratch = Cell<u32>;

    fn tasks(&self) -> &RequestTasks<u32, Cell<u32>> {
        &self.tasks
    }

    fn io(&self) -> &Io {
        &self.io
    }

    async fn execute(&self, task: &Rc<RequestTask<u32, Cell<u32>>>) {
        let (job, due) = task.take().unwrap();
        assert!(task.take().is_none(), "a job is taken once");
        task.scratch().set(task.scratch().get() + 1);
        self.most_of_a_task.set(self.most_of_a_task.get().max(task.scratch().get()));
        self.began.borrow_mut().push(job);
        self.open.borrow_mut().push((job, None));
        poll_fn(|cx| {
            let mut open = self.open.borrow_mut();
            match open.iter_mut().find(|(number, _)| *number == job) {
                Some((_, waker)) => {
                    *waker = Some(cx.waker().clone());
                    Poll::Pending
                }
                None => Poll::Ready(()),
            }
        })
        .await;
        if self.forgets != Some(job) {
            due.settle();
        }
    }

    fn all_done(&self) {
        assert_eq!(self.tasks.busy(), 0);
        self.emptied.set(self.emptied.get() + 1);
    }
}

impl Requests {
    fn new(io: Io, most: usize, alive: &Arc<AtomicUsize>) -> Rc<Requests> {
        alive.fetch_add(1, Ordering::SeqCst);
        Rc::new(Requests {
            io,
            tasks: RequestTasks::new(most),
            open: RefCell::default(),
            began: RefCell::default(),
            most_of_a_task: Cell::new(0),
            emptied: Cell::new(0),
            forgets: None,
            alive: alive.clone(),
        })
    }

    fn try_start(self: &Rc<Self>, job: u32) -> bool {
        let task = self.tasks.try_idle(self);
        task.map(|task| task.start(job)).is_some()
    }

    /// Completes the request that began as the `at`th of those in flight.
    fn complete(&self, at: usize) {
        let (_, waker) = self.open.borrow_mut().remove(at);
        waker.unwrap().wake();
    }

    /// Lets all ready tasks run.
    async fn settle(&self) {
        for _ in 0..4 {
            self.io.next_iteration().await;
        }
    }
}

fn on_worker<F, Fut>(test: F)
where
    F: FnOnce(Io, Arc<AtomicUsize>) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let worker = Worker::start_alone("tasks").unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let count = alive.clone();
    let done = worker.handle().block_on(move |io| test(io, count));
    assert_eq!(done, Some(()), "the worker panicked");
    drop(worker);
    assert_eq!(alive.load(Ordering::SeqCst), 0, "a task outlived its worker");
}

#[test]
fn a_task_executes_one_request_after_the_other() {
    on_worker(|io, alive| async move {
        let requests = Requests::new(io, 8, &alive);
        for job in 0..20 {
            assert!(requests.try_start(job));
            requests.settle().await;
            requests.complete(0);
            requests.settle().await;
        }
        assert_eq!(requests.most_of_a_task.get(), 20, "one task executed all of them");
        assert_eq!((requests.emptied.get(), requests.tasks.busy()), (20, 0));
        requests.tasks.retire_idle();
        requests.settle().await;
        assert_eq!(Rc::strong_count(&requests), 1, "the task has ended");
        assert!(requests.try_start(20), "and a new one takes its place");
        requests.settle().await;
        requests.complete(0);
        requests.tasks.drain().await;
        assert_eq!(requests.most_of_a_task.get(), 20);
        requests.tasks.retire_idle();
    });
}

#[test]
fn no_more_requests_are_in_flight_than_may_be_and_they_begin_in_order() {
    on_worker(|io, alive| async move {
        let requests = Requests::new(io.clone(), 3, &alive);
        let started = {
            let requests = requests.clone();
            io.spawn(async move {
                for job in 0..10 {
                    requests.tasks.idle(&requests).await.start(job);
                }
            })
        };
        for begun in 3..=10 {
            requests.settle().await;
            assert_eq!(requests.open.borrow().len(), 3);
            assert_eq!(*requests.began.borrow(), (0..begun).collect::<Vec<_>>());
            if begun < 10 {
                assert!(!requests.try_start(99));
            }
            requests.complete(usize::try_from(begun % 3).unwrap());
        }
        started.await;
        requests.complete(0);
        requests.settle().await;
        requests.complete(0);
        requests.tasks.drain().await;
        assert_eq!(requests.emptied.get(), 1);
        requests.tasks.retire_idle();
    });
}

#[test]
fn requests_that_a_worker_drops_when_it_ends_need_no_reply() {
    on_worker(|io, alive| async move {
        let requests = Requests::new(io, 4, &alive);
        for job in 0..4 {
            assert!(requests.try_start(job));
        }
        requests.settle().await;
        assert_eq!(requests.open.borrow().len(), 4);
        // The wakers keep the tasks, and the tasks keep the connection.
        requests.open.borrow_mut().clear();
    });
}

#[test]
fn a_request_that_is_dropped_without_a_reply_panics_with_debug_assertions() {
    let dropped = catch_unwind(|| drop(ReplyDue(())));
    assert_eq!(dropped.is_err(), cfg!(debug_assertions));
    ReplyDue(()).settle();
    ReplyDue(()).waive();
    // A panic that unwinds through a request stays the one that is reported.
    let panics = catch_unwind(AssertUnwindSafe(|| {
        let _due = ReplyDue(());
        panic!("the first");
    }));
    assert_eq!(panics.unwrap_err().downcast_ref(), Some(&"the first"));
    let worker = Worker::start_alone("forgets").unwrap();
    let outcome = worker.handle().block_on(|io| async move {
        let alive = Arc::default();
        let mut requests = Requests::new(io, 4, &alive);
        Rc::get_mut(&mut requests).unwrap().forgets = Some(7);
        for job in 6..8 {
            assert!(requests.try_start(job));
            requests.settle().await;
            requests.complete(0);
            requests.settle().await;
        }
        requests.tasks.drain().await;
        requests.tasks.retire_idle();
    });
    assert_eq!(outcome.is_none(), cfg!(debug_assertions), "the worker panicked");
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Start,
    Complete(prop::sample::Index),
    Retire,
    Run,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Start),
        3 => any::<prop::sample::Index>().prop_map(Step::Complete),
        1 => Just(Step::Retire),
        2 => Just(Step::Run),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the order of starts, completions and retirements: each request runs once and none is lost.
    #[test]
    fn every_job_runs_once(steps in prop::collection::vec(step(), 1..200), most in 1usize..6) {
        on_worker(move |io, alive| async move {
            let requests = Requests::new(io, most, &alive);
            let mut next = 0;
            for step in steps {
                match step {
                    Step::Start => {
                        let room = requests.tasks.busy() < most;
                        assert_eq!(requests.try_start(next), room);
                        if room {
                            next += 1;
                        }
                    }
                    Step::Complete(at) => {
                        let open = requests.open.borrow().len();
                        if open > 0 {
                            requests.complete(at.index(open));
                        }
                    }
                    Step::Retire => requests.tasks.retire_idle(),
                    Step::Run => requests.settle().await,
                }
                assert!(requests.tasks.busy() <= most);
            }
            requests.settle().await;
            while !requests.open.borrow().is_empty() {
                requests.complete(0);
            }
            requests.tasks.drain().await;
            let mut began = requests.began.borrow().clone();
            began.sort_unstable();
            assert_eq!(began, (0..next).collect::<Vec<_>>());
            requests.tasks.retire_idle();
            requests.settle().await;
            assert_eq!(Rc::strong_count(&requests), 1);
        });
    }
}
