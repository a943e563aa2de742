//! Threads for the expensive part of TLS handshakes: signatures, key exchange, certificates.
//!
//! A handshake costs a server about a hundred times as much as a peer that only sends the first
//! message, and needs no credentials. On a worker it would delay all requests there: so handshakes run on
//! a few threads of low priority, at most [`THREADS_MAX`] for the process. They are queued per peer
//! address and served round-robin: many handshakes from one address do not delay those from other
//! addresses.
//!
//! Low priority alone is not enough: a request that wakes a worker still waits until the kernel preempts
//! the handshake, a millisecond or more, which slows down a client with one request in flight by that much per request.
//! So a thread may compute for [`BURST`] without a pause, of which [`BURST_OF_ONE`] for one address, and then for one
//! part in [`ONE_IN`] of the time: one peer that begins handshakes without end slows down the others little from the
//! start. While many addresses wait, each for its turn, it computes for more of the time ([`CROWD`]): otherwise a client
//! would wait for its first message to be processed longer than a handshake may take.
//!
//! The queues are bounded by the callers: each connection has at most one step queued or running.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Poll, Waker};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::TlsSession;

/// Threads for handshakes: one for four processors, within this bound.
const THREADS_MAX: usize = 4;
/// Workers that have something to do take precedence.
const NICE: i32 = 10;
/// More than one step needs.
const STACK_BYTES: usize = 512 << 10;

/// A thread that always has steps to run computes for one part in so many of the time.
const ONE_IN: u32 = 12;
/// While so many addresses wait, one part in [`ONE_IN_CROWD`]: at 3.5 ms a step (RSA with 4096 bits) 250 addresses, about as
/// many as may be pending, then wait 2.6 s for a turn instead of 10 s, the time limit of a handshake.
const CROWD: usize = 16;
const ONE_IN_CROWD: u32 = 3;
/// What it may compute before that, without a pause: the handshakes of a thousand clients that connect at once, as
/// after a restart of a host, at 2 ms each.
const BURST: Duration = Duration::from_secs(2);
/// The part of it for handshakes from one address: as many as may be pending from one.
const BURST_OF_ONE: Duration = Duration::from_millis(256);
/// Addresses whose CPU time is remembered.
const PEERS_MAX: usize = 1024;
/// The longest pause, however long one step takes.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The key by which handshakes are queued: a number for a peer's address.
pub type PeerKey = u128;

/// The session, and the result of the step.
pub type StepResult = (TlsSession, io::Result<bool>);

/// A step that is queued, running, or completed.
#[derive(Default)]
struct QueuedStep {
    done: Option<StepResult>,
    waker: Option<Waker>,
    /// Its future was dropped.
    cancelled: bool,
}

struct HandshakeJob {
    session: TlsSession,
    step: Arc<Mutex<QueuedStep>>,
}

/// Jobs by peer, and the peers that have jobs in round-robin order.
#[derive(Default)]
struct HandshakeQueue {
    jobs: HashMap<PeerKey, VecDeque<HandshakeJob>>,
    order_of_peers: VecDeque<PeerKey>,
}

impl HandshakeQueue {
    fn push(&mut self, peer: PeerKey, job: HandshakeJob) {
        let jobs = self.jobs.entry(peer).or_default();
        if jobs.is_empty() {
            self.order_of_peers.push_back(peer);
        }
        jobs.push_back(job);
    }

    fn pop(&mut self) -> Option<(PeerKey, HandshakeJob)> {
        let peer = self.order_of_peers.pop_front()?;
        let jobs = self.jobs.get_mut(&peer)?;
        let job = jobs.pop_front().map(|job| (peer, job));
        if jobs.is_empty() {
            self.jobs.remove(&peer);
        } else {
            self.order_of_peers.push_back(peer);
        }
        job
    }
}

/// CPU time that may be used: a burst, and a part of the elapsed time.
struct CpuAllowance {
    burst: Duration,
    spent: Duration,
    seen: Instant,
}

impl CpuAllowance {
    fn new(burst: Duration, now: Instant) -> CpuAllowance {
        CpuAllowance { burst, spent: Duration::ZERO, seen: now }
    }

    /// How long to pause after a step that used `took` of CPU time and ended `now`, if the allowance is one part in
    /// `one_in` of the time.
    fn pause(&mut self, took: Duration, now: Instant, one_in: u32) -> Duration {
        let earned = now.saturating_duration_since(self.seen) / one_in;
        self.seen = now;
        self.spent = self.spent.saturating_sub(earned).saturating_add(took);
        // CPU time beyond the longest pause is not carried over.
        self.spent = self.spent.min(self.burst + PAUSE_MAX / one_in);
        self.spent.saturating_sub(self.burst) * one_in
    }
}

/// The CPU time that a thread may use, in all and for each address.
struct CpuAllowances {
    all: CpuAllowance,
    of_peers: HashMap<PeerKey, CpuAllowance>,
}

impl CpuAllowances {
    fn new(now: Instant) -> CpuAllowances {
        CpuAllowances { all: CpuAllowance::new(BURST, now), of_peers: HashMap::new() }
    }

    /// How long to pause after a step for `peer` that used `took` of CPU time and ended `now`, while `waiting` addresses
    /// wait.
    fn pause(&mut self, peer: PeerKey, took: Duration, now: Instant, waiting: usize) -> Duration {
        let one_in = if waiting >= CROWD { ONE_IN_CROWD } else { ONE_IN };
        if self.of_peers.len() >= PEERS_MAX {
            self.of_peers.retain(|_, one| now < one.seen + BURST_OF_ONE * ONE_IN);
            if self.of_peers.len() >= PEERS_MAX {
                // So many addresses share the burst of all anyway.
                self.of_peers.clear();
            }
        }
        let of_peer =
            self.of_peers.entry(peer).or_insert_with(|| CpuAllowance::new(BURST_OF_ONE, now));
        of_peer.pause(took, now, one_in).max(self.all.pause(took, now, one_in))
    }
}

/// The CPU time of this thread.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

struct HandshakeThreads {
    queue: Mutex<HandshakeQueue>,
    more: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The handshake threads of this process; `None` if no thread could be started.
fn threads() -> Option<&'static HandshakeThreads> {
    static THREADS: OnceLock<Option<&'static HandshakeThreads>> = OnceLock::new();
    *THREADS.get_or_init(|| {
        let threads: &HandshakeThreads =
            Box::leak(Box::new(HandshakeThreads { queue: Mutex::default(), more: Condvar::new() }));
        let builder =
            |number| Builder::new().name(format!("ebb-tls-{number}")).stack_size(STACK_BYTES);
        // The first one starts the others: a worker cannot ask for the number of processors.
        let first = move || {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            for number in 1..(processors / 4).clamp(1, THREADS_MAX) {
                // With fewer threads handshakes wait longer.
                let _ = builder(number).spawn(|| run(threads));
            }
            run(threads);
        };
        ebb_sandbox::threads::spawn(builder(0), first).is_ok().then_some(threads)
    })
}

fn run(threads: &HandshakeThreads) {
    // On Linux this affects the calling thread only. If it fails, handshakes run at normal priority.
    let _ = rustix::process::setpriority_process(None, NICE);
    let mut allowances = CpuAllowances::new(Instant::now());
    loop {
        let mut queue = lock(&threads.queue);
        let job = loop {
            match queue.pop() {
                Some(job) => break job,
                None => queue = threads.more.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        };
        let waiting = queue.order_of_peers.len();
        drop(queue);
        let (peer, HandshakeJob { mut session, step }) = job;
        if lock(&step).cancelled {
            continue;
        }
        let before = cpu_time();
        let result = session.handshake();
        let took = cpu_time().saturating_sub(before);
        let waker = {
            let mut step = lock(&step);
            step.done = Some((session, result));
            step.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
        std::thread::sleep(allowances.pause(peer, took, Instant::now(), waiting));
    }
}

/// Cancels a step when its future is dropped.
struct CancelOnDrop(Arc<Mutex<QueuedStep>>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        lock(&self.0).cancelled = true;
    }
}

/// Continues a handshake ([`TlsSession::handshake`]) on one of the threads, queued under `peer`. Needs no worker: any
/// executor can run it. The caller bounds how many handshakes are in progress.
pub async fn handshake(mut session: TlsSession, peer: PeerKey) -> StepResult {
    let Some(threads) = threads() else {
        let result = session.handshake();
        return (session, result);
    };
    let step = Arc::<Mutex<QueuedStep>>::default();
    let guard = CancelOnDrop(step.clone());
    lock(&threads.queue).push(peer, HandshakeJob { session, step });
    threads.more.notify_one();
    poll_fn(|cx| {
        let mut step = lock(&guard.0);
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

    /// The number of steps of `took` each that a thread runs within `time` if it always has one to run.
    fn steps(
        allowance: &mut CpuAllowance,
        now: &mut Instant,
        took: Duration,
        time: Duration,
        one_in: u32,
    ) -> u32 {
        let end = *now + time;
        let mut count = 0;
        while *now < end {
            *now += took;
            *now += allowance.pause(took, *now, one_in);
            count += 1;
        }
        count
    }

    #[test]
    fn endless_handshakes_use_a_part_of_a_processor_and_a_burst_is_not_delayed() {
        let mut now = Instant::now();
        let mut allowance = CpuAllowance::new(BURST, now);
        let step = Duration::from_millis(2);
        // A burst is not delayed.
        for _ in 0..1000 {
            now += step;
            assert_eq!(allowance.pause(step, now, ONE_IN), Duration::ZERO);
        }
        for (one_in, expected) in [(ONE_IN, 4_160..4_360), (ONE_IN_CROWD, 16_500..17_500)] {
            let many = steps(&mut allowance, &mut now, step, Duration::from_secs(100), one_in);
            assert!(expected.contains(&many), "{many} steps of 2 ms in 100 s");
        }
        // Nor is the next burst, after some time.
        now += BURST * ONE_IN;
        assert_eq!(allowance.pause(step, now, ONE_IN), Duration::ZERO);
        // After a step of an hour the pause is bounded.
        let pause = allowance.pause(Duration::from_secs(3600), now, ONE_IN);
        assert!(pause <= PAUSE_MAX && pause > PAUSE_MAX - step, "{pause:?}");
        now += PAUSE_MAX;
        assert!(allowance.pause(step, now, ONE_IN) < 2 * step * ONE_IN);
    }

    #[test]
    fn one_address_has_a_small_part_of_the_burst_and_takes_none_from_others() {
        let mut now = Instant::now();
        let mut allowances = CpuAllowances::new(now);
        let step = Duration::from_millis(2);
        let burst_of = |peer, now: &mut Instant, allowances: &mut CpuAllowances| {
            let mut count = 0;
            loop {
                *now += step;
                count += 1;
                if allowances.pause(peer, step, *now, 1) > Duration::ZERO {
                    return count;
                }
            }
        };
        // 128, and what the time in between earns.
        let flood = burst_of(1, &mut now, &mut allowances);
        assert!((128..160).contains(&flood), "{flood}");
        assert_eq!(burst_of(1, &mut now, &mut allowances), 1, "it is used up");
        assert!(burst_of(2, &mut now, &mut allowances) >= 128, "another address has its own");
        // Many addresses share the burst of all, and their number is bounded.
        let mut count = 0;
        while allowances.pause(3 + count, step, now, 1) == Duration::ZERO {
            count += 1;
        }
        assert!((500..900).contains(&count), "{count}");
        for peer in 0..100_000 {
            allowances.pause(peer, step, now, 1);
            assert!(allowances.of_peers.len() <= PEERS_MAX);
        }
    }

    #[test]
    fn peers_are_served_round_robin_however_many_handshakes_each_has() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "alice:0102030405060708\n").unwrap();
        let server = ServerTls::from_psk(file.path()).unwrap();
        let mut queue = HandshakeQueue::default();
        let mut steps = HashMap::new();
        let mut push = |queue: &mut HandshakeQueue, peer: PeerKey, name: &'static str| {
            let step = Arc::<Mutex<QueuedStep>>::default();
            steps.insert(Arc::as_ptr(&step), name);
            queue.push(
                peer,
                HandshakeJob { session: server.session().unwrap(), step: step.clone() },
            );
            step
        };
        let mut kept = Vec::new();
        for _ in 0..100 {
            kept.push(push(&mut queue, 1, "flood"));
        }
        kept.push(push(&mut queue, 2, "honest"));
        let order: Vec<_> = std::iter::from_fn(|| queue.pop())
            .map(|(_, job)| steps[&Arc::as_ptr(&job.step)])
            .collect();
        assert_eq!(order.iter().position(|name| *name == "honest"), Some(1));
        assert_eq!(order.len(), 101);
        assert!(queue.jobs.is_empty() && queue.order_of_peers.is_empty());
    }
}
