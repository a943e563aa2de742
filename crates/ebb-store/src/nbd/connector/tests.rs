use std::sync::mpsc::channel;

use ebb_io::Worker;

use super::*;

fn target(address: usize, export: usize) -> Target {
    (format!("address {address:03}"), format!("export {export}"))
}

/// Takes all attempts that may run.
fn take(attempts: &mut Attempts<()>) -> Vec<Target> {
    std::iter::from_fn(|| attempts.take_next()).map(|(target, ())| target).collect()
}

#[test]
fn an_export_that_replies_is_not_delayed_by_exports_of_its_server_that_do_not() {
    let mut attempts = Attempts::new();
    let push = |attempts: &mut Attempts<()>| {
        for export in 0..400 {
            attempts.push(target(0, export % 160), ());
        }
    };
    push(&mut attempts);
    let mut running = take(&mut attempts);
    assert_eq!(running.len(), TO_ONE_ADDRESS);
    assert!(running.iter().all(|one| running.iter().filter(|other| one == *other).count() == 1));
    // As dead exports do: each attempt is slow, and followed by another one.
    for _ in 0..20 {
        running.iter().for_each(|target| attempts.end(target, true));
        push(&mut attempts);
        running = take(&mut attempts);
    }
    assert_eq!(running.len(), TO_ONE_ADDRESS / 2, "all have been slow");
    attempts.push(target(0, 999), ());
    assert_eq!(take(&mut attempts), [target(0, 999)], "it overtakes them");
}

#[test]
fn an_address_that_replies_is_not_delayed_by_addresses_that_do_not() {
    let mut attempts = Attempts::new();
    let push = |attempts: &mut Attempts<()>| {
        for number in 0..2000 {
            attempts.push(target(number % 300, number), ());
        }
    };
    push(&mut attempts);
    let mut running = take(&mut attempts);
    assert_eq!(running.len(), AT_ONCE);
    for _ in 0..8 {
        running.iter().for_each(|target| attempts.end(target, true));
        running = take(&mut attempts);
    }
    assert_eq!(running.len(), AT_ONCE / 2, "all have been slow");
    assert!(running.iter().all(|(one, _)| running.iter().filter(|(a, _)| one == a).count() == 1));
    attempts.push(target(999, 0), ());
    assert_eq!(take(&mut attempts), [target(999, 0)], "it overtakes them");
    // An address with few attempts does not wait for those of one with many.
    running.iter().for_each(|target| attempts.end(target, false));
    let mut attempts = Attempts::new();
    for export in 0..1000 {
        attempts.push(target(1, export), ());
    }
    attempts.push(target(2, 0), ());
    let first = take(&mut attempts);
    assert!(first[..2].contains(&target(2, 0)), "{first:?}");
}

/// Their last attempts were not slow: they have died together, a moment ago.
#[test]
fn an_address_that_replies_is_not_delayed_by_addresses_that_have_just_died() {
    for (addresses, volumes) in [(10, 30), (10, 64), (12, 40), (16, 20)] {
        let mut attempts = Attempts::new();
        let mut running = 0;
        for number in 0..addresses * volumes {
            attempts.push(target(number / volumes, number % volumes), ());
            running += take(&mut attempts).len();
        }
        assert!(running >= AT_ONCE / 2, "{addresses} x {volumes}: only {running} run at a time");
        for export in 0..3 {
            attempts.push(target(999, export), ());
        }
        let mut served = Vec::new();
        while served.len() < 3 {
            let next = take(&mut attempts);
            assert!(!next.is_empty(), "{addresses} x {volumes}: {served:?} did not wait");
            next.iter().for_each(|target| attempts.end(target, false));
            served.extend(next);
        }
        assert_eq!(served, [target(999, 0), target(999, 1), target(999, 2)]);
    }
}

#[test]
fn attempts_to_one_export_run_in_order_and_nothing_remains_of_them() {
    let mut attempts = Attempts::new();
    let numbers: Vec<u64> = (0..50).map(|number| attempts.push(target(0, 0), number)).collect();
    numbers.iter().skip(1).step_by(2).for_each(|number| attempts.withdraw(&target(0, 0), *number));
    let mut order = Vec::new();
    while let Some((target, number)) = attempts.take_next() {
        order.push(number);
        attempts.end(&target, false);
        // It runs, and has ended: there is nothing to withdraw.
        attempts.withdraw(&target, number);
    }
    assert_eq!(order, (0..50).step_by(2).collect::<Vec<u64>>());
    assert!(attempts.addresses.is_empty() && attempts.running == 0, "{attempts:?}");
    // The number of slow ones that are remembered is limited.
    for number in 0..REMEMBERED + 100 {
        for target in [target(number, 0), target(0, number)] {
            attempts.push(target, 0);
            let (target, _) = attempts.take_next().expect("nothing else runs");
            attempts.end(&target, true);
        }
    }
    let exports: usize = attempts.addresses.values().map(|address| address.exports.len()).sum();
    assert!(attempts.addresses.len() <= REMEMBERED + 1 && exports <= 2 * REMEMBERED + 2);
}

/// As a resolver that does not reply.
#[test]
fn an_attempt_that_exceeds_its_time_limit_is_not_waited_for_and_counts_until_it_ends() {
    let worker = Worker::start_alone("w").expect("a worker");
    let (release, released) = channel::<()>();
    let name = ("a server with a slow resolver".to_owned(), String::new());
    let running = || attempts().addresses.get(&name.0).map_or(0, |address| address.share.running);
    let own = name.clone();
    let result = worker.handle().block_on(move |io| async move {
        let result = run(&io, own, move || released.recv().is_ok()).await;
        result.map_err(|error| error.kind())
    });
    assert_eq!(result, Some(Err(io::ErrorKind::TimedOut)));
    assert_eq!(running(), 1);
    drop(release);
    let deadline = Instant::now() + Duration::from_secs(90);
    while running() > 0 {
        assert!(Instant::now() < deadline, "its thread does not end");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}
