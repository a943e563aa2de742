//! Shares of the memory for requests: the memory that a volume gets, whatever other volumes hold.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use ebb_mem::{Charge, QueueShare, Shares};

const MIB: usize = 1 << 20;

fn all(queue_share: &Rc<QueueShare>, bytes: usize) -> Vec<Charge> {
    std::iter::from_fn(|| queue_share.try_take(bytes)).collect()
}

fn once(future: Pin<&mut impl Future<Output = Charge>>) -> Option<Charge> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(held) => Some(held),
        Poll::Pending => None,
    }
}

fn bytes(held: &[Charge]) -> usize {
    held.iter().map(Charge::bytes).sum()
}

#[test]
fn a_volume_alone_uses_nearly_everything() {
    let shares = Shares::new(48 * MIB);
    let queue_share = QueueShare::new(shares.join("disk"));
    let held = all(&queue_share, MIB);
    assert!(bytes(&held) >= 40 * MIB, "{} MiB", bytes(&held) / MIB);
    assert!(bytes(&held) <= 48 * MIB);
    drop(held);
    queue_share.empty();
    assert_eq!(queue_share.share().used(), 0);
}

#[test]
fn every_volume_gets_its_reserve_whatever_other_volumes_hold() {
    let shares = Shares::new(48 * MIB);
    let queue_shares: Vec<_> =
        (0..8).map(|number| QueueShare::new(shares.join(&format!("disk {number}")))).collect();
    assert_eq!(shares.reserve(), 3 * MIB);
    let greedy: Vec<_> =
        queue_shares[1..].iter().map(|queue_share| all(queue_share, 64 << 10)).collect();
    let mine = all(&queue_shares[0], 64 << 10);
    assert!(bytes(&mine) >= shares.reserve());
    let sum = greedy.iter().map(|held| bytes(held)).sum::<usize>() + bytes(&mine);
    assert!(sum <= shares.total(), "{sum}");
    // The same while the other volumes hold all that they can get.
    drop(mine);
    let whole = queue_shares[0].try_take(shares.reserve() - (64 << 10)).unwrap();
    drop(whole);
}

#[test]
fn volumes_of_one_store_share_the_limit_of_one_group() {
    let shares = Shares::new(64 * MIB);
    let silent: Vec<_> = (0..4).map(|_| QueueShare::new(shares.join("silent"))).collect();
    let healthy = QueueShare::new(shares.join("healthy"));
    let (common, reserve) = (shares.total() - 5 * shares.reserve(), shares.reserve());
    let held: Vec<_> = silent.iter().map(|queue_share| all(queue_share, MIB / 4)).collect();
    let taken = held.iter().map(|held| bytes(held)).sum::<usize>();
    assert!(taken <= 4 * reserve + common / 5 * 4, "{taken}");
    assert!(bytes(&all(&healthy, MIB / 4)) > reserve, "some of the common part remains");
}

#[test]
fn waiting_requests_are_granted_in_order_and_a_smaller_one_does_not_overtake() {
    let shares = Shares::new(16 * MIB);
    let (one, two) = (QueueShare::new(shares.join("disk")), QueueShare::new(shares.join("other")));
    let held = all(&one, MIB / 8);
    let mut large = pin!(one.take(4 * MIB));
    assert!(once(large.as_mut()).is_none());
    assert!(one.share().has_waiters());
    let mut small = pin!(one.take(4096));
    assert!(once(small.as_mut()).is_none(), "after the large one");
    assert!(two.try_take(MIB).is_some(), "another volume's requests do not wait in this queue");
    drop(held);
    assert!(once(small.as_mut()).is_none(), "still after it");
    assert_eq!(once(large.as_mut()).unwrap().bytes(), 4 * MIB);
    assert_eq!(once(small.as_mut()).unwrap().bytes(), 4096);
    assert!(!one.share().has_waiters());
}

#[test]
fn a_cancelled_request_wakes_the_next_one() {
    let shares = Shares::new(16 * MIB);
    let queue_share = QueueShare::new(shares.join("disk"));
    let held = all(&queue_share, MIB / 8);
    let mut next = {
        let mut cancelled = Box::pin(queue_share.take(8 * MIB));
        assert!(once(cancelled.as_mut()).is_none());
        let mut next = Box::pin(queue_share.take(4096));
        assert!(once(next.as_mut()).is_none());
        next
    };
    drop(held);
    assert!(once(next.as_mut()).is_some());
}

/// Counts how often it is woken.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn memory_of_another_volume_wakes_a_waiting_request() {
    let shares = Shares::new(16 * MIB);
    let [one, two] = ["disk", "other"].map(|name| QueueShare::new(shares.join(name)));
    let (held, own) = (all(&one, MIB / 4), all(&two, MIB / 4));
    let bell = Arc::<Bell>::default();
    let waker = Waker::from(bell.clone());
    let mut waiting = pin!(two.take(MIB));
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    assert_eq!(bell.0.load(Ordering::Relaxed), 0);
    drop(held);
    assert!(bell.0.load(Ordering::Relaxed) > 0, "it would wait for its own volume");
    assert!(once(waiting).is_some());
    drop(own);
}

#[test]
fn small_requests_use_what_the_queue_keeps_until_another_request_waits() {
    let shares = Shares::new(64 * MIB);
    let share = shares.join("disk");
    let (one, two) = (QueueShare::new(share.clone()), QueueShare::new(share.clone()));
    drop(one.try_take(4096));
    assert_eq!(share.used(), 4096, "kept");
    drop(one.try_take(4096));
    assert_eq!(share.used(), 4096, "used again");
    let held = all(&two, MIB);
    let mut waiting = pin!(two.take(2 * MIB));
    assert!(once(waiting.as_mut()).is_none());
    assert!(one.try_take(4096).is_none(), "a request does not overtake a waiting one");
    one.empty();
    drop(held);
    assert!(once(waiting.as_mut()).is_some());
}

#[test]
fn reserves_follow_the_number_of_volumes() {
    let shares = Shares::new(1 << 30);
    let first = shares.join("disk");
    assert!(first.reserve() > 64 * MIB, "the largest request and its header");
    let many: Vec<_> = (0..1000).map(|_| shares.join("disk")).collect();
    assert_eq!(first.reserve(), (1 << 29) / 1001);
    drop(many);
    assert!(first.reserve() > 64 * MIB);
    shares.set_total(16 * MIB);
    assert_eq!(first.reserve(), 8 * MIB);
}

#[test]
fn a_waiting_request_is_granted_after_its_reserve_shrank() {
    let shares = Shares::new(16 * MIB);
    let [first, second] = [(); 2].map(|()| QueueShare::new(shares.join("disk")));
    let largest = shares.reserve();
    let other = all(&second, 64 << 10);
    let held = all(&first, 64 << 10);
    let mut waiting = pin!(first.take(largest));
    assert!(once(waiting.as_mut()).is_none(), "the volume holds all that it may");
    shares.set_total(4 * MIB);
    assert!(shares.reserve() < largest);
    drop(held);
    let granted = once(waiting.as_mut()).expect("the request does not wait for ever");
    assert_eq!(granted.bytes(), largest);
    assert!(first.try_take(4096).is_none(), "one such request at a time");
    drop((granted, other));
    assert_eq!(first.share().used(), 0);
}

/// The parts of a request wait behind another request, and it holds memory for its reply meanwhile.
#[test]
fn a_request_for_all_of_the_reserve_is_granted_beside_small_ones() {
    let shares = Shares::new(48 * MIB);
    let [first, second] = ["disk", "other"].map(|name| QueueShare::new(shares.join(name)));
    let others = all(&second, 64 << 10);
    let replies: Vec<_> = (0..16).map(|_| first.try_take(512).unwrap()).collect();
    let reserve = shares.reserve();
    let rest = all(&first, reserve / 4);
    let mut whole = pin!(first.take(reserve));
    assert!(once(whole.as_mut()).is_none(), "others hold more than little");
    drop(rest);
    assert_eq!(once(whole.as_mut()).unwrap().bytes(), reserve);
    drop((replies, others));
}
