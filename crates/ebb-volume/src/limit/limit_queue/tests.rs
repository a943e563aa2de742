use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn read(bytes: u64) -> RequestCost {
    RequestCost { kind: RequestKind::Read, bytes }
}

fn write(bytes: u64) -> RequestCost {
    RequestCost { kind: RequestKind::Write, bytes }
}

/// A client of a member: it has one request waiting, and sends the next one some time after it has passed.
struct Client {
    member: MemberId,
    cost: RequestCost,
    /// How long it needs between two requests.
    pause: u64,
    /// The time of its next request.
    next: u64,
    waiter: Option<WaiterId>,
    passed: u64,
    bytes: u64,
}

/// Simulated time: clients of a queue, and timers that are late.
struct Simulation {
    queue: LimitQueue<usize>,
    clients: Vec<Client>,
    late: u64,
    now: u64,
    /// The timer, and whose it is.
    timer: Option<(u64, usize)>,
}

impl Simulation {
    fn new(limits: &RateLimits, late: u64) -> Self {
        let mut queue = LimitQueue::default();
        queue.set(0, limits);
        Self { queue, clients: Vec::new(), late, now: 0, timer: None }
    }

    fn client(&mut self, member: MemberId, cost: RequestCost, pause: u64) {
        let fresh = Client { member, cost, pause, next: 0, waiter: None, passed: 0, bytes: 0 };
        self.clients.push(fresh);
    }

    /// Polls a client's waiter, as its task does; wakes others.
    fn poll(&mut self, at: usize) {
        let mut woken = vec![at];
        while let Some(at) = woken.pop() {
            let Some(id) = self.clients[at].waiter else { continue };
            self.queue.dispatch(self.now, |client| woken.push(client));
            match self.queue.poll(self.now, id, &at) {
                Ok(()) => {
                    self.queue.remove(id, |client| woken.push(client));
                    self.clients[at].waiter = None;
                    self.pass(at);
                }
                Err(Some(until)) if until != u64::MAX => {
                    self.timer = Some((until.saturating_add(self.late).max(self.now + 1), at));
                }
                Err(_) => {}
            }
        }
    }

    fn pass(&mut self, at: usize) {
        let (now, client) = (self.now, &mut self.clients[at]);
        client.passed += 1;
        client.bytes += client.cost.bytes;
        client.next = now + client.pause;
    }

    fn run(&mut self, until: u64) {
        while self.now < until {
            for at in 0..self.clients.len() {
                // A client without a pause sends until it has to wait; a limit of requests at one time.
                for _ in 0..100_000 {
                    let client = &self.clients[at];
                    if client.waiter.is_some() || client.next > self.now {
                        break;
                    }
                    let (member, cost) = (client.member, client.cost);
                    let mut woken = Vec::new();
                    if self.queue.try_take(self.now, member, cost, |client| woken.push(client)) {
                        self.pass(at);
                    } else {
                        self.clients[at].waiter = Some(self.queue.enqueue(member, cost));
                        woken.push(at);
                    }
                    woken.into_iter().for_each(|client| self.poll(client));
                }
            }
            let sends = self.clients.iter().filter(|client| client.waiter.is_none());
            let next = sends.map(|client| client.next).min().unwrap_or(u64::MAX);
            let timer = self.timer.map_or(u64::MAX, |(at, _)| at);
            assert!(next.min(timer) < u64::MAX, "someone waits for ever");
            self.now = next.min(timer).max(self.now);
            if timer <= next
                && let Some((_, client)) = self.timer.take()
            {
                self.poll(client);
                // The timed waiter may be another one by now.
                if self.timer.is_none() && self.queue.waiting() > 0 {
                    let timed = self.queue.timed;
                    let at = self.clients.iter().position(|c| c.waiter == timed);
                    self.poll(at.expect("there is a timed waiter"));
                }
            }
        }
    }

    fn passed(&self) -> Vec<u64> {
        self.clients.iter().map(|client| client.passed).collect()
    }
}

fn within(found: u64, wanted: u64, percent: u64) -> bool {
    found.abs_diff(wanted) * 100 <= wanted * percent
}

#[test]
fn rates_are_kept_at_depth_1_and_64_although_timers_are_late() {
    for (depth, late) in [(1, 0), (1, 100_000), (64, 100_000), (64, 3_000_000)] {
        let limits = RateLimits { iops: 5000, ..RateLimits::default() };
        let mut simulation = Simulation::new(&limits, late);
        let member = simulation.queue.join();
        for _ in 0..depth {
            simulation.client(member, read(4096), 50_000);
        }
        simulation.run(10 * SECOND);
        let passed: u64 = simulation.passed().iter().sum();
        assert!(within(passed, 50_000, 1), "depth {depth}, late {late} ns: {passed}");
    }
    for size in [4096, 1 << 20] {
        let limits = RateLimits { bandwidth: 200_000_000, ..RateLimits::default() };
        let mut simulation = Simulation::new(&limits, 60_000);
        let member = simulation.queue.join();
        simulation.client(member, write(size), 10_000);
        simulation.run(10 * SECOND);
        let bytes = simulation.clients[0].bytes;
        assert!(within(bytes, 2_000_000_000, 1), "{size}: {bytes}");
    }
}

#[test]
fn members_that_want_more_have_equal_parts_and_idle_ones_leave_theirs() {
    let limits = RateLimits { iops: 6000, ..RateLimits::default() };
    let mut simulation = Simulation::new(&limits, 80_000);
    // The first has 64 requests waiting, the second one, the third two slow ones that do not use its part.
    let members = [0, 1, 2].map(|_| simulation.queue.join());
    for _ in 0..64 {
        simulation.client(members[0], read(4096), 20_000);
    }
    simulation.client(members[1], write(65_536), 60_000);
    for _ in 0..2 {
        simulation.client(members[2], read(512), 10_000_000);
    }
    simulation.run(10 * SECOND);
    let passed = simulation.passed();
    let (first, second): (u64, u64) = (passed[..64].iter().sum(), passed[64]);
    let third: u64 = passed[65..].iter().sum();
    assert!(third > 1_800, "what it asks for: {third}");
    assert!(within(first + second + third, 60_000, 1));
    assert!(within(first, second, 2), "{first} and {second}");
}

#[test]
fn large_requests_of_a_member_do_not_delay_those_of_another() {
    for (bandwidth, large) in [(4 << 20, 32 << 20), (4 << 20, 1 << 20), (100 << 20, 32 << 20)] {
        let limits = RateLimits { bandwidth, ..RateLimits::default() };
        let mut simulation = Simulation::new(&limits, 80_000);
        let members = [0, 1].map(|_| simulation.queue.join());
        for _ in 0..8 {
            simulation.client(members[0], write(large), 0);
        }
        // It wants a fifth of the smaller limit at most.
        simulation.client(members[1], write(4096), 5_000_000);
        simulation.run(16 * SECOND);
        let (passed, bytes) = (simulation.passed(), simulation.clients.iter().map(|c| c.bytes));
        assert!(passed[8] > 3200 / 2, "{bandwidth}, {large}: {}", passed[8]);
        let (sum, most) = (bytes.sum::<u64>(), bandwidth * 16);
        // Those that wait have taken tokens.
        assert!(sum + 8 * large >= most && sum <= most + most / 100 + large, "{sum} of {most}");
        assert!(simulation.clients[..8].iter().any(|client| client.passed > 0));
    }
}

#[test]
fn a_limit_of_reads_does_not_delay_writes() {
    let limits = RateLimits { read_iops: 1, ..RateLimits::default() };
    let mut queue = LimitQueue::<usize>::default();
    queue.set(0, &limits);
    let member = queue.join();
    assert!(queue.try_take(0, member, read(512), |_| {}));
    assert!(!queue.try_take(0, member, read(512), |_| {}));
    let waiter = queue.enqueue(member, read(512));
    for _ in 0..1000 {
        assert!(queue.try_take(0, member, write(512), |_| {}));
    }
    assert_eq!(queue.poll(0, waiter, &0), Err(Some(SECOND)));
    queue.dispatch(SECOND, |woken| assert_eq!(woken, 0));
    assert_eq!(queue.poll(SECOND, waiter, &0), Ok(()));
}

#[test]
fn a_waiter_that_needs_an_earlier_timer_gets_the_timer() {
    let limits = RateLimits { read_iops: 1, write_iops: 1000, ..RateLimits::default() };
    let mut queue = LimitQueue::<usize>::default();
    queue.set(0, &limits);
    let member = queue.join();
    queue.take(member, read(0));
    queue.take(member, write(0));
    let (late, soon) = (queue.enqueue(member, read(0)), queue.enqueue(member, write(0)));
    assert_eq!(queue.poll(0, late, &1), Err(Some(SECOND / 1000)), "the time of the first of both");
    assert_eq!(queue.poll(0, soon, &2), Err(None));
    queue.remove(late, |woken| assert_eq!(woken, 2));
    assert_eq!(queue.poll(0, soon, &2), Err(Some(SECOND / 1000)));
}

#[test]
fn waiters_of_a_member_that_leaves_pass() {
    let limits = RateLimits { bandwidth: 512, ..RateLimits::default() };
    let mut queue = LimitQueue::<usize>::default();
    queue.set(0, &limits);
    let (stays, leaves) = (queue.join(), queue.join());
    queue.take(stays, read(1 << 30));
    let (one, other) = (queue.enqueue(stays, read(1)), queue.enqueue(leaves, write(1)));
    assert!(queue.poll(0, one, &1).is_err() && queue.poll(0, other, &2).is_err());
    let mut woken = Vec::new();
    queue.release(leaves, |who| woken.push(who));
    assert_eq!((woken, queue.poll(0, other, &2)), (vec![2], Ok(())));
    queue.remove(other, |_| {});
    queue.leave(leaves);
    assert!(queue.poll(0, one, &1).is_err());
    assert_eq!(queue.join(), leaves, "its number is used again");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the members, sizes and limits: no limit is exceeded, members that always want more have equal parts of
    /// the time of the limits, and no request waits for ever.
    #[test]
    fn groups_are_fair(
        iops in 100u64..20_000,
        bandwidth in 1_000_000u64..100_000_000,
        late in 0u64..2_000_000,
        members in prop::collection::vec((1usize..6, 9u32..17, prop::bool::ANY), 1..5),
    ) {
        let limits = RateLimits { iops, bandwidth, ..RateLimits::default() };
        let mut simulation = Simulation::new(&limits, late);
        let mut owners = Vec::new();
        for (at, (depth, bits, is_read)) in members.iter().enumerate() {
            let member = simulation.queue.join();
            let cost = if *is_read { read(1 << bits) } else { write(1 << bits) };
            for _ in 0..*depth {
                simulation.client(member, cost, 1000);
                owners.push((at, cost));
            }
        }
        let seconds = 5;
        simulation.run(seconds * SECOND);
        let passed: u64 = simulation.passed().iter().sum();
        let bytes: u64 = simulation.clients.iter().map(|client| client.bytes).sum();
        let most = |rate: u64| rate * (seconds * 1000 + 20) / 1000 + 1;
        prop_assert!(passed <= most(iops), "{passed} requests of {iops}/s");
        prop_assert!(bytes <= most(bandwidth) + (1 << 17), "{bytes} bytes of {bandwidth}/s");
        let mut times = vec![0.0; members.len()];
        for ((at, cost), client) in owners.iter().zip(&simulation.clients) {
            let one = (1.0 / iops as f64).max(cost.bytes as f64 / bandwidth as f64);
            times[*at] += one * client.passed as f64;
        }
        let (least, most) = times.iter().fold((f64::MAX, 0.0_f64), |(a, b), t| (a.min(*t), b.max(*t)));
        prop_assert!(most - least <= 0.05 * most + 0.25, "{times:?}");
    }
}
