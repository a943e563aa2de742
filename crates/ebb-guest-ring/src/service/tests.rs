use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use ebb_io::{Signal, Worker};
use proptest::prelude::*;

use super::*;
use crate::time_slice::SLICE;

/// What a guest does while the backend looks at its ring.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Sends requests, and an event if one was requested.
    Send(u8),
    /// Sends an event without a request.
    Event,
    /// Claims an invalid number of requests.
    Break,
}

/// A ring of requests without content. The guest takes a step at each look at its index.
struct TestRing {
    io: Io,
    /// Index up to which requests were sent, and were consumed.
    sent: Cell<u32>,
    consumed: Cell<u32>,
    published: Cell<u32>,
    armed: Cell<bool>,
    event: Signal,
    events: Cell<u32>,
    broken: Cell<bool>,
    stopping: Cell<bool>,
    script: RefCell<VecDeque<Step>>,
    /// Waits once after each batch.
    slow: bool,
}

impl TestRing {
    fn new(io: &Io, script: &[Step], slow: bool) -> Rc<TestRing> {
        Rc::new(TestRing {
            io: io.clone(),
            sent: Cell::new(u32::MAX - 20),
            consumed: Cell::new(u32::MAX - 20),
            published: Cell::new(u32::MAX - 20),
            armed: Cell::new(false),
            event: Signal::default(),
            events: Cell::new(0),
            broken: Cell::new(false),
            stopping: Cell::new(false),
            script: RefCell::new(script.iter().copied().collect()),
            slow,
        })
    }

    fn send(&self, count: u32) {
        self.sent.set(self.sent.get().wrapping_add(count));
        if count > 0 && self.armed.take() {
            self.notify();
        }
    }

    fn notify(&self) {
        self.events.set(self.events.get() + 1);
        self.event.set();
    }

    fn stop(&self) {
        self.stopping.set(true);
        self.event.set();
    }

    fn guest(&self) {
        let step = self.script.borrow_mut().pop_front();
        match step {
            Some(Step::Send(count)) => self.send(count.into()),
            Some(Step::Event) => self.notify(),
            Some(Step::Break) => self.broken.set(true),
            None => {}
        }
    }
}

impl GuestRing for TestRing {
    type Broken = &'static str;
    type After = ();
    const BATCH: u32 = 64;

    fn io(&self) -> &Io {
        &self.io
    }

    fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    fn waiting(&self) -> Result<u32, &'static str> {
        self.guest();
        if self.broken.get() {
            return Err("too many requests");
        }
        Ok(self.sent.get().wrapping_sub(self.consumed.get()))
    }

    fn arm(&self) -> Result<bool, &'static str> {
        self.armed.set(true);
        Ok(self.waiting()? > 0)
    }

    async fn event(&self) -> Result<(), &'static str> {
        if !self.stopping.get() {
            self.event.wait().await;
        }
        Ok(())
    }

    fn has_requests(&self) -> bool {
        self.broken.get() || self.sent.get() != self.consumed.get()
    }

    fn note_polled(&self) {}

    fn take_batch(self: &Rc<Self>, most: u32, slice: &mut TimeSlice) -> Consumed<()> {
        let (mut count, mut make_way) = (0, false);
        while count < most && !make_way {
            count += 1;
            make_way = slice.spend(1, &self.io);
        }
        self.consumed.set(self.consumed.get().wrapping_add(count));
        Consumed { count, make_way, after: () }
    }

    fn publish(&self) {
        self.published.set(self.consumed.get());
    }

    async fn after_batch(self: &Rc<Self>, (): ()) {
        assert_eq!(
            self.published.get(),
            self.consumed.get(),
            "published before anything is waited for"
        );
        if self.slow {
            self.io.yield_now().await;
        }
    }
}

fn on_worker<F, Fut>(test: F)
where
    F: FnOnce(Io) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let worker = Worker::start_alone("ring").unwrap();
    assert_eq!(worker.handle().block_on(test), Some(()), "the worker panicked");
}

/// Waits until a condition holds, over iterations of the worker.
async fn until(io: &Io, mut holds: impl FnMut() -> bool) {
    while !holds() {
        io.next_iteration().await;
    }
}

#[test]
fn a_ring_that_always_has_requests_delays_another_by_a_time_slice_at_most() {
    on_worker(|io| async move {
        let (full, lone) = (TestRing::new(&io, &[], false), TestRing::new(&io, &[], false));
        let spawn = |ring: &Rc<TestRing>| {
            let ring = ring.clone();
            io.spawn(async move { serve_ring(&ring).await })
        };
        let tasks = [spawn(&full), spawn(&lone)];
        until(&io, || full.armed.get() && lone.armed.get()).await;
        full.send(1 << 30);
        for round in 0..50 {
            let before = (full.consumed.get(), lone.consumed.get());
            lone.send(1);
            until(&io, || lone.consumed.get() != before.1).await;
            let work = full.consumed.get().wrapping_sub(before.0);
            let limit = 2 * (u32::try_from(SLICE).unwrap() + TestRing::BATCH);
            assert!(work <= limit, "round {round}: the full ring had {work} requests meanwhile");
        }
        assert!(full.consumed.get() != full.sent.get());
        [&full, &lone].into_iter().for_each(|ring| ring.stop());
        for task in tasks {
            assert_eq!(task.await, Ok(()));
        }
    });
}

#[test]
fn a_guest_that_sends_events_without_end_does_not_occupy_the_worker() {
    on_worker(|io| async move {
        // The guest takes two steps for each event: at the check of the ring and when it is armed.
        let flood = TestRing::new(&io, &[Step::Event; 100_000], false);
        let serving = {
            let flood = flood.clone();
            io.spawn(async move { serve_ring(&flood).await })
        };
        // Without a pause the loop never returns to the worker before the script has ended.
        until(&io, || flood.events.get() > SPURIOUS).await;
        for _ in 0..100 {
            io.next_iteration().await;
        }
        assert!(flood.events.get() < 100_000, "{}", flood.events.get());
        flood.stop();
        assert_eq!(serving.await, Ok(()));
    });
}

#[test]
fn a_broken_ring_is_not_served_any_more() {
    on_worker(|io| async move {
        let ring = TestRing::new(&io, &[Step::Send(3), Step::Send(0), Step::Break], false);
        assert_eq!(serve_ring(&ring).await, Err("too many requests"));
        assert_eq!(ring.published.get(), ring.sent.get(), "what was sent before was served");
    });
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u8..=255).prop_map(Step::Send),
        4 => Just(Step::Send(0)),
        1 => Just(Step::Event),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whenever the guest sends requests, also between the last check and the sleep: all are consumed, without any
    /// further event.
    #[test]
    fn no_request_waits_without_an_event(script in prop::collection::vec(step(), 0..100), slow: bool) {
        on_worker(move |io| async move {
            let ring = TestRing::new(&io, &script, slow);
            let serving = {
                let ring = ring.clone();
                io.spawn(async move { serve_ring(&ring).await })
            };
            until(&io, || ring.armed.get()).await;
            while !ring.script.borrow().is_empty() {
                // The guest goes on while the backend sleeps.
                ring.guest();
                until(&io, || ring.published.get() == ring.sent.get()).await;
            }
            assert_eq!(ring.published.get(), ring.sent.get());
            ring.stop();
            assert_eq!(serving.await, Ok(()));
        });
    }
}
