use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ebb_mem::{Memory, MemoryOptions};
use proptest::prelude::*;

use super::*;
use crate::Worker;

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

const POLL: Duration = Duration::from_micros(100);

#[test]
fn the_share_bounds_the_unsuccessful_polls_per_second() {
    let start = Instant::now();
    let mut share = PollShare::new(start);
    let mut polls = 0u32;
    // A poll as often as one fits, for ten seconds.
    let mut now = start;
    while now < start + ms(10_000) {
        if share.permits(POLL, now) {
            share.note_unsuccessful(POLL);
            polls += 1;
        }
        now += POLL;
    }
    let most = (SAVED_MAX + ms(10_000) / SHARE).as_micros() / POLL.as_micros();
    assert!(u128::from(polls) <= most && polls > 6000, "{polls} of at most {most}");
}

#[test]
fn successful_polls_are_free() {
    let now = Instant::now();
    let mut share = PollShare::new(now);
    assert!((0..1_000_000).all(|_| share.permits(POLL, now)));
}

/// A machine on which, of each millisecond, the processors are idle and the worker is delayed for these times.
struct Machine {
    share: PollShare,
    start: Instant,
    now: Instant,
    load: LoadSample,
    polled: Duration,
}

impl Machine {
    fn new() -> Machine {
        let start = Instant::now();
        let load = LoadSample { idle: Some(ms(5000)), delayed: Duration::ZERO };
        Machine { share: PollShare::new(start), start, now: start, load, polled: Duration::ZERO }
    }

    /// A worker that polls all the time for `length`, as far as it may. How long it polled.
    fn run(&mut self, length: Duration, idle: Duration, delayed: Duration) -> Duration {
        let (end, before) = (self.now + length, self.polled);
        while self.now < end {
            if self.share.wants_load(self.now) {
                self.share.note_load(self.load, self.now);
            }
            if self.share.permits(POLL, self.now) {
                self.polled += ms(1);
            }
            self.now += ms(1);
            self.load.idle = self.load.idle.map(|total| total + idle);
            self.load.delayed += delayed;
        }
        self.polled - before
    }
}

#[test]
fn polling_gives_way_where_every_processor_is_busy() {
    let mut machine = Machine::new();
    let polled = machine.run(ms(60_000), Duration::ZERO, Duration::ZERO);
    // One window each, after pauses of 1, 2, 4, 8, 16 and 32 s.
    assert!(polled <= 6 * (WINDOW + ms(2)), "{polled:?}");
    assert!(polled >= 5 * WINDOW, "it tries again: {polled:?}");
    let later = machine.run(ms(320_000), Duration::ZERO, Duration::ZERO);
    assert!(later <= 10 * (WINDOW + ms(2)), "{later:?}");
}

#[test]
fn polling_gives_way_to_what_waits_for_the_same_processor() {
    let mut machine = Machine::new();
    let polled = machine.run(ms(60_000), ms(1), ms(1) / 2);
    assert!(polled <= 6 * (WINDOW + ms(2)), "{polled:?}");
}

#[test]
fn polling_goes_on_while_a_processor_is_idle() {
    let mut machine = Machine::new();
    assert_eq!(machine.run(ms(60_000), ms(1) / 4, ms(1) / 7), ms(60_000));
}

#[test]
fn polling_resumes_when_a_processor_is_idle_again() {
    let mut machine = Machine::new();
    machine.run(ms(60_000), Duration::ZERO, Duration::ZERO);
    let polled = machine.run(GIVE_WAY_MAX + ms(1000), ms(1), Duration::ZERO);
    assert!(polled >= ms(1000), "{polled:?}");
    // And the pauses are short again.
    machine.run(ms(200), Duration::ZERO, Duration::ZERO);
    let polled = machine.run(ms(2000), ms(1), Duration::ZERO);
    assert!(polled >= ms(900), "{polled:?} {:?}", machine.now - machine.start);
}

#[test]
fn only_so_many_workers_poll_at_once() {
    let parameters = PollParameters { pollers_max: 2, ..PollParameters::default() };
    let first = parameters.begin(false);
    let second = parameters.begin(false);
    assert!(first.is_some() && second.is_some() && parameters.begin(false).is_none());
    drop(first);
    assert!(parameters.begin(false).is_some());
    drop(second);
    let one = PollParameters::with_processors(Parameter::new(100), 1);
    assert!(one.begin(false).is_none(), "a client could not run meanwhile");
    assert!(one.begin(true).is_some(), "a guest has processors of its own");
}

/// Whether a worker of a machine with so many processors polls a guest ring, and a socket.
fn polls_with(processors: usize) -> (bool, bool) {
    let mut polling = PollParameters::with_processors(Parameter::new(1000), processors);
    polling.gives_way = false;
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let worker = Worker::start_polling("some", &memory, &Arc::new(polling)).unwrap();
    let seen = worker.handle().block_on(|io| async move {
        let ring = io.poll_source_in_memory(|| true);
        hurry(&ring);
        let ring = ring.poll().await;
        let socket = io.poll_source();
        // Its pauses depend on when the machine runs the worker: several attempts.
        for _ in 0..100 {
            for _ in 0..16 {
                socket.wait();
                io.sleep(Duration::from_micros(50)).await;
                socket.note_requests(1);
            }
            socket.wait();
            io.sleep(Duration::from_millis(5)).await;
            socket.note_requests(1);
            if io.stats().unsuccessful_polls > 0 {
                return (ring, true);
            }
        }
        (ring, false)
    });
    seen.unwrap()
}

#[test]
fn with_a_single_processor_only_guest_rings_are_polled() {
    assert_eq!(polls_with(2), (true, true));
    assert_eq!(polls_with(1), (true, false));
}

proptest! {
    /// However long polls take and whenever they come, unsuccessful ones stay within their share.
    #[test]
    fn unsuccessful_polls_stay_within_their_share(
        steps in prop::collection::vec((0u64..5000, 1u64..1000), 1..300),
    ) {
        let start = Instant::now();
        let (mut share, mut now, mut spent) = (PollShare::new(start), start, Duration::ZERO);
        for (pause, length) in steps {
            now += Duration::from_micros(pause);
            let length = Duration::from_micros(length);
            if share.permits(length, now) {
                now += length;
                share.note_unsuccessful(length);
                spent += length;
            }
            prop_assert!(spent <= SAVED_MAX + (now - start) / SHARE, "{spent:?}");
        }
    }
}

/// A worker with quick sources that never may poll, as while polling gives way.
fn forbidden() -> Worker {
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let polling = PollParameters {
        pollers_max: 0,
        ring_pollers_max: 0,
        ..PollParameters::unrestrained(1000)
    };
    Worker::start_polling("forbidden", &memory, &Arc::new(polling)).unwrap()
}

#[test]
fn a_worker_that_may_not_poll_makes_no_further_system_call() {
    let worker = forbidden();
    let (mut client, server) = UnixStream::pair().unwrap();
    worker.handle().spawn(move |io| async move {
        let fd = crate::fd_from(server);
        let source = io.poll_source();
        let mut buf = io.pool().take(1).await;
        let mut message = Box::<crate::Gather>::default();
        loop {
            source.wait();
            let (result, returned) = io.recv(&fd, buf, 0..1).await;
            source.note_requests(1);
            message.push_bytes(&returned[..1]);
            buf = returned;
            let (sent, returned) = io.send(&fd, message).await;
            message = returned;
            message.clear();
            if !matches!(result, Ok(1)) || sent.is_err() {
                return;
            }
        }
    });
    let mut call = || {
        client.write_all(b"x").unwrap();
        client.read_exact(&mut [0]).unwrap();
    };
    let stats = || worker.handle().block_on(|io| async move { io.stats() }).unwrap();
    call();
    let before = stats();
    (0..2000).for_each(|_| call());
    let after = stats();
    // The allowance is for the worker's timers.
    assert!(after.enters - before.enters <= 2000 + 200, "{before:?} {after:?}");
    assert_eq!((after.polls, after.unsuccessful_polls), (0, 0));
}

#[test]
fn a_task_whose_source_may_not_be_polled_waits_for_an_event_instead() {
    let polled = forbidden().handle().block_on(|io| async move {
        let source = io.poll_source_in_memory(|| false);
        let mut polled = Vec::new();
        for _ in 0..100 {
            polled.push(source.poll().await);
            source.note_requests(1);
        }
        polled
    });
    assert_eq!(polled, Some(vec![false; 100]));
}

/// A worker that may poll at any time.
fn polling() -> Worker {
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    Worker::start_polling("polling", &memory, &Arc::new(PollParameters::unrestrained(1000)))
        .unwrap()
}

/// Lets the source's requests come so quickly that it is polled.
fn hurry(source: &PollSource) {
    for _ in 0..16 {
        source.wait();
        source.note_requests(1);
    }
}

#[test]
fn one_check_ends_the_polls_of_all_sources_with_requests() {
    let worker = polling();
    let found = worker.handle().block_on(|io| async move {
        let has = Rc::new(Cell::new(false));
        let source = || {
            let has = has.clone();
            io.poll_source_in_memory(move || has.get())
        };
        let sources = [source(), source(), source()];
        sources.iter().for_each(hurry);
        let mut polls: Vec<_> = sources.iter().map(|source| Box::pin(source.poll())).collect();
        let mut done = |expected: Poll<bool>| {
            let mut cx = Context::from_waker(Waker::noop());
            polls
                .iter_mut()
                .filter_map(|poll| Some(poll.as_mut().poll(&mut cx)).filter(|p| *p == expected))
                .count()
        };
        let waiting = done(Poll::Pending);
        has.set(true);
        assert!(io.polls().check());
        (waiting, done(Poll::Ready(true)))
    });
    assert_eq!(found, Some((3, 3)));
}

#[test]
fn a_poll_ends_in_time_although_the_worker_stays_busy() {
    let worker = polling();
    let ended = worker.handle().block_on(|io| async move {
        let busy = io.clone();
        let _busy = io.spawn(async move {
            loop {
                busy.yield_iteration().await;
            }
        });
        let source = io.poll_source_in_memory(|| false);
        hurry(&source);
        let hang = async {
            io.sleep(Duration::from_secs(20)).await;
            true
        };
        futures_lite::future::or(source.poll(), hang).await
    });
    assert_eq!(ended, Some(false), "the poll has found nothing, and ended");
}
