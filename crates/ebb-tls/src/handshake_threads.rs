//! Threads for the costly part of TLS handshakes: signatures, key exchange, certificates.
//!
//! A handshake costs a server a hundred times what it costs a peer that only sends the first
//! message, and needs no credentials. On a worker it would hold up all requests there: so it runs on
//! a few threads of low priority, at most [`THREADS_MAX`] at once for the process. Who waits for them
//! waits by address, in turn: many handshakes of one peer wait behind one another, not before those
//! of other peers.
//!
//! Low priority alone is not enough: a request that wakes a worker still waits until the kernel takes the
//! processor from the handshake, a millisecond or more, and one at a time in flight is slowed by all of it.
//! So the threads compute for [`BURST`] at once, and then one part in [`ONE_IN`] of the time.
//!
//! What waits is bounded by the callers: each connection has at most one step under way.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::TlsSession;

/// Threads for handshakes: one for four processors, within this bound.
const THREADS_MAX: usize = 4;
/// So that a worker that has something to do comes first.
const NICE: i32 = 10;
/// What one step needs, and room to spare.
const STACK_BYTES: usize = 512 << 10;

/// A thread computes for one part in so many of the time, where there is always something to do.
const ONE_IN: u32 = 8;
/// What it computes before, without a rest: the logins of a thousand clients that come at once, as when a host
/// starts again, at 2 ms each.
const BURST: Duration = Duration::from_secs(2);
/// The longest rest, however long one step takes.
const REST_MOST: Duration = Duration::from_secs(1);

/// Whose turn a handshake takes: a number for a peer's address.
pub type Peer = u128;

type Done = (TlsSession, io::Result<bool>);

/// A step that waits, runs, or is over.
#[derive(Default)]
struct Step {
    done: Option<Done>,
    waker: Option<Waker>,
    /// Nobody wants it any more.
    gone: bool,
}

struct Job {
    session: TlsSession,
    step: Arc<Mutex<Step>>,
}

/// Jobs by peer, and the peers that have some in the order of their turns.
#[derive(Default)]
struct Line {
    jobs: HashMap<Peer, VecDeque<Job>>,
    turns: VecDeque<Peer>,
}

impl Line {
    fn push(&mut self, peer: Peer, job: Job) {
        let jobs = self.jobs.entry(peer).or_default();
        if jobs.is_empty() {
            self.turns.push_back(peer);
        }
        jobs.push_back(job);
    }

    fn pop(&mut self) -> Option<Job> {
        let peer = self.turns.pop_front()?;
        let jobs = self.jobs.get_mut(&peer)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.jobs.remove(&peer);
        } else {
            self.turns.push_back(peer);
        }
        job
    }
}

/// What a thread may still compute, of the [`BURST`] and of the time that goes by.
struct Pace {
    spent: Duration,
    seen: Instant,
}

impl Pace {
    fn new(now: Instant) -> Pace {
        Pace { spent: Duration::ZERO, seen: now }
    }

    /// How long to rest after a step that took so much of a processor and has ended `now`.
    fn rest(&mut self, took: Duration, now: Instant) -> Duration {
        let earned = now.saturating_duration_since(self.seen) / ONE_IN;
        self.seen = now;
        self.spent = self.spent.saturating_sub(earned).saturating_add(took);
        // What a rest that is cut short leaves is forgiven.
        self.spent = self.spent.min(BURST + REST_MOST / ONE_IN);
        self.spent.saturating_sub(BURST) * ONE_IN
    }
}

/// What this thread has computed so far.
fn computed() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

struct HandshakeThreads {
    line: Mutex<Line>,
    more: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The crew of this process; `None` if no thread could be started.
fn crew() -> Option<&'static HandshakeThreads> {
    static CREW: OnceLock<Option<&'static HandshakeThreads>> = OnceLock::new();
    *CREW.get_or_init(|| {
        let crew: &HandshakeThreads =
            Box::leak(Box::new(HandshakeThreads { line: Mutex::default(), more: Condvar::new() }));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mut started = 0;
        for number in 0..(processors / 4).clamp(1, THREADS_MAX) {
            let thread = std::thread::Builder::new().name(format!("ebb-tls-{number}"));
            started += usize::from(thread.stack_size(STACK_BYTES).spawn(|| work(crew)).is_ok());
        }
        (started > 0).then_some(crew)
    })
}

fn work(crew: &HandshakeThreads) {
    // Of this thread alone on Linux. Without it handshakes are as urgent as requests: no harm done.
    let _ = rustix::process::setpriority_process(None, NICE);
    let mut pace = Pace::new(Instant::now());
    loop {
        let mut line = lock(&crew.line);
        let job = loop {
            match line.pop() {
                Some(job) => break job,
                None => line = crew.more.wait(line).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(line);
        let Job { mut session, step } = job;
        if lock(&step).gone {
            continue;
        }
        let before = computed();
        let result = session.handshake();
        let took = computed().saturating_sub(before);
        let waker = {
            let mut step = lock(&step);
            step.done = Some((session, result));
            step.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
        std::thread::sleep(pace.rest(took, Instant::now()));
    }
}

/// Takes the place of a step whose future is dropped.
struct Leave(Arc<Mutex<Step>>);

impl Drop for Leave {
    fn drop(&mut self) {
        lock(&self.0).gone = true;
    }
}

/// Goes on with a handshake ([`TlsSession::handshake`]) on one of the threads, in the turn of `peer`.
pub(crate) async fn handshake(mut session: TlsSession, peer: Peer) -> Done {
    let Some(crew) = crew() else {
        let result = session.handshake();
        return (session, result);
    };
    let step = Arc::<Mutex<Step>>::default();
    let leave = Leave(step.clone());
    lock(&crew.line).push(peer, Job { session, step });
    crew.more.notify_one();
    poll_fn(|cx| {
        let mut step = lock(&leave.0);
        match step.done.take() {
            Some(done) => Poll::Ready(done),
            None => {
                step.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServerTls;

    /// Steps of a thread that always has one to do, each of `took`, within `time`.
    fn steps(pace: &mut Pace, now: &mut Instant, took: Duration, time: Duration) -> u32 {
        let end = *now + time;
        let mut count = 0;
        while *now < end {
            *now += took;
            *now += pace.rest(took, *now);
            count += 1;
        }
        count
    }

    #[test]
    fn handshakes_without_end_take_an_eighth_of_a_processor_and_a_few_none_of_the_rests() {
        let mut now = Instant::now();
        let mut pace = Pace::new(now);
        let step = Duration::from_millis(2);
        // A burst is not held up.
        for _ in 0..1000 {
            now += step;
            assert_eq!(pace.rest(step, now), Duration::ZERO);
        }
        let many = steps(&mut pace, &mut now, step, Duration::from_secs(100));
        assert!((6_250..6_450).contains(&many), "{many} steps of 2 ms in 100 s");
        // Nor is the next one, after a while.
        now += BURST * ONE_IN;
        assert_eq!(pace.rest(step, now), Duration::ZERO);
        // One that takes seconds is followed by a rest that ends.
        assert_eq!(pace.rest(Duration::from_secs(3600), now), REST_MOST);
        now += REST_MOST;
        assert!(pace.rest(step, now) < 2 * step * ONE_IN);
    }

    #[test]
    fn peers_take_turns_however_many_handshakes_each_has() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "alice:0102030405060708\n").unwrap();
        let server = ServerTls::from_psk(file.path()).unwrap();
        let mut line = Line::default();
        let mut steps = HashMap::new();
        let mut push = |line: &mut Line, peer: Peer, name: &'static str| {
            let step = Arc::<Mutex<Step>>::default();
            steps.insert(Arc::as_ptr(&step), name);
            line.push(peer, Job { session: server.session().unwrap(), step: step.clone() });
            step
        };
        let mut kept = Vec::new();
        for _ in 0..100 {
            kept.push(push(&mut line, 1, "flood"));
        }
        kept.push(push(&mut line, 2, "honest"));
        let order: Vec<_> =
            std::iter::from_fn(|| line.pop()).map(|job| steps[&Arc::as_ptr(&job.step)]).collect();
        assert_eq!(order.iter().position(|name| *name == "honest"), Some(1));
        assert_eq!(order.len(), 101);
        assert!(line.jobs.is_empty() && line.turns.is_empty());
    }
}
